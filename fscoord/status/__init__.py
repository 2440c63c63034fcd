"""Shows the processes that use a store: their states, what they hold, what they wait for, and likely faults.

The command ``fscoord ps`` calls the function `status`.
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
