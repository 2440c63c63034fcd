"""Logs the events of a rendezvous as lines of JSON to the logger ``fscoord.rendezvous.events``.

Each log record also has an attribute with the message of the event. The command ``fscoord run`` shows this message.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final

from fscoord._runtime import system
from fscoord._runtime.logging import logger

FOR_PEOPLE: Final = "fscoord_for_people"
"""The name of the attribute of a log record that has the event's message for people."""

NUMBERS: Final = frozenset({"pid", "rank", "local_id"})
"""The fields of an event that are numbers. All other fields are text."""


_NODE = re.compile(r"(\S+)_([0-9]+)_[0-9]+_[0-9a-f]{12}(_s[0-9]+)?\b")


def shorten_names(text: str) -> str:
    """Replace each name of a node in `text` by ``host:pid``."""
    return _NODE.sub(r"\1:\2", text)


class NodeState(str, Enum):
    """The state of a node when an event is recorded."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    def __str__(self) -> str:
        return self.value


@dataclass
class RdzvEvent:
    """One event of a rendezvous. The fields are those of torch's ``RdzvEvent``.

    Attributes:
        name: the function that recorded the event, ``module.function`` by default.
        run_id: the name of the rendezvous.
        message: the description of the event.
        hostname: the node's host.
        pid: the node's process id.
        node_state: the node's state.
        master_endpoint: the address that rank 0 published.
        rank: the node's rank; None before it has one.
        local_id: the number of the handler in its process.
        error_trace: the traceback of a failure; empty for other events.
    """

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    def serialize(self) -> str:
        """Return the event as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def deserialize(cls, data: str | RdzvEvent) -> RdzvEvent:
        """Parse `data`, the result of `serialize`. If `data` is an event, return it unchanged.

        Raises:
            ValueError: `data` is not an event.
        """
        if isinstance(data, RdzvEvent):
            return data
        try:
            values = json.loads(data)
            event = cls(**{**values, "node_state": NodeState(values["node_state"])})
            for name, value in values.items():
                if not isinstance(value, (int, type(None)) if name in NUMBERS else str):
                    raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{data[:80]!r} is not an event of a rendezvous ({type(error).__name__})") from error
        return event

    def __str__(self) -> str:
        return self.serialize()


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> RdzvEvent:
    """Create an event, log it as JSON, and return it. A failure has the level ERROR, any other event the level INFO.

    Args:
        run_id: the name of the rendezvous.
        message: the description of the event.
        node_state: the node's state. With `NodeState.FAILED` the event has the traceback of the current exception.
        name: the function that records the event; the caller's ``module.function`` by default.
        hostname: the node's host; by default this host.
        pid: the node's process id; by default the id of this process.
        master_endpoint: the address that rank 0 published.
        local_id: the number of the handler in its process.
        rank: the node's rank; None before it has one.
    """
    is_failure = node_state is NodeState.FAILED
    event = RdzvEvent(
        name or _caller(),
        run_id,
        message,
        hostname or system.hostname(),
        system.os.getpid() if pid is None else pid,
        node_state,
        master_endpoint,
        rank,
        local_id,
        _traceback() if is_failure else "",
    )
    log = logger(__name__)
    (log.error if is_failure else log.info)("%s", event, extra={FOR_PEOPLE: shorten_names(message)})
    return event


def _caller() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}"


def _traceback() -> str:
    import traceback

    return "" if sys.exc_info()[0] is None else traceback.format_exc()
