"""The present status of the participants of a store: their states, their holds and waits, and the findings.

`status` is the function behind the command ``fscoord ps``.
"""

from __future__ import annotations

from fscoord._waiting.awaited import ShownWait
from fscoord._waiting.rounds import RoundState
from fscoord.recipes.holdings import LineState
from fscoord.status.findings import StatusFinding, find_all
from fscoord.status.picture import LogLock, Picture, SessionStatus
from fscoord.status.reading import Activity, Observer, Status, observe, status

__all__ = [
    "Activity",
    "LineState",
    "LogLock",
    "Observer",
    "Picture",
    "RoundState",
    "SessionStatus",
    "ShownWait",
    "Status",
    "StatusFinding",
    "find_all",
    "observe",
    "status",
]
