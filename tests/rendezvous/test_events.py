"""Events: their content, their way through JSON, and where they are reported."""

from __future__ import annotations

import json
import logging
import os

import pytest
from support.internals import system

from fscoord.rendezvous import NodeState, RdzvEvent, construct_and_record_rdzv_event


def test_event_survives_json():
    event = RdzvEvent("n", "id", "tëxt\n", "host", 7, NodeState.FAILED, "host:1", 3, 2, "trace")
    line = event.serialize()
    assert "\n" not in line
    twin = RdzvEvent.deserialize(line)
    assert twin == event
    assert twin.node_state is NodeState.FAILED
    assert RdzvEvent.deserialize(event) is event
    assert str(event) == line
    assert json.loads(line)["node_state"] == "FAILED"
    assert str(NodeState.RUNNING) == "RUNNING"


def test_event_is_logged_with_the_place_where_it_comes_from(caplog):
    with caplog.at_level(logging.INFO, "fscoord"):
        event = construct_and_record_rdzv_event("id", "text", NodeState.INIT)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("fscoord.rendezvous.events", logging.INFO)
    assert RdzvEvent.deserialize(record.message) == event
    assert event.name == f"{__name__}.test_event_is_logged_with_the_place_where_it_comes_from"
    assert (event.hostname, event.pid, event.error_trace) == (system.hostname(), os.getpid(), "")


def test_event_has_the_values_that_its_caller_gives(caplog):
    event = construct_and_record_rdzv_event("id", "text", NodeState.RUNNING, "name", "host", 0, "host:1", 2, 3)
    assert event == RdzvEvent("name", "id", "text", "host", 0, NodeState.RUNNING, "host:1", 3, 2)


def test_event_of_a_failure_is_an_error_with_its_traceback(caplog):
    try:
        raise ValueError("why")
    except ValueError:
        event = construct_and_record_rdzv_event("id", "text", NodeState.FAILED)
    assert caplog.records[0].levelno == logging.ERROR
    assert "ValueError: why" in event.error_trace
    assert construct_and_record_rdzv_event("id", "text", NodeState.FAILED).error_trace == ""


def test_line_that_is_no_event_is_refused():
    event = json.loads(RdzvEvent("n", "id", "text", "host", 7, NodeState.FAILED).serialize())
    changes = ({"node_state": "DANCING"}, {"pid": "7"}, {"message": None}, {"more": "field"})
    lines = [json.dumps({**event, **change}) for change in changes]
    for line in ("", "[]", "null", "{}", '{"node_state": "RUNNING"}', "[" * 100_000, *lines):
        with pytest.raises(ValueError, match="is not an event"):
            RdzvEvent.deserialize(line)
