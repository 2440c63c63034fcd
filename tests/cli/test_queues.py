"""push, pop, len."""

from __future__ import annotations

import json

from fscoord import FileStore


def test_values_come_out_in_their_order_byte_for_byte(fscoord):
    assert fscoord("push", "q", "first") == (0, b"", "")
    assert fscoord("push", "q", "-", stdin=b"\x00\xff\n") == (0, b"", "")
    assert fscoord("len", "q") == (0, b"2\n", "")
    assert fscoord("pop", "q") == (0, b"first", "")
    assert fscoord("pop", "--no-wait", "q") == (0, b"\x00\xff\n", "")
    assert fscoord("len", "q") == (0, b"0\n", "")


def test_pop_without_waiting_on_an_empty_queue_exits_with_1_without_output(fscoord):
    assert fscoord("pop", "--no-wait", "q") == (1, b"", "")


def test_pop_exits_with_75_when_time_runs_out(fscoord):
    result = fscoord("pop", "--timeout", "0", "q")
    assert (result.code, result.out) == (75, b"")
    assert "'q'" in result.err


def test_pop_waits_for_another_process_to_push(process, line_with, path):
    child = process("pop", "-v", "q")
    line_with(child, "waiting for a value in queue 'q'")
    with FileStore(path) as store:
        store.queue_push("q", b"v")
    out, _ = child.communicate()
    assert (child.returncode, out) == (0, b"v")


def test_json_names_the_queue(fscoord):
    fscoord("push", "q", "v")
    assert json.loads(fscoord("len", "--json", "q").out) == {"queue": "q", "length": 1}
    assert json.loads(fscoord("pop", "--json", "q").out) == {"queue": "q", "value": "v"}
