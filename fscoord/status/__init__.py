"""What the participants of a store do now: who lives, who holds what, who waits for what, and what is wrong.

`status` is the function behind the command ``fscoord ps``.
"""

from __future__ import annotations

from fscoord.status.findings import Finding, find_all
from fscoord.status.picture import LogLock, Participant, Picture, Waiting
from fscoord.status.reading import Activity, Observer, Status, observe, status

__all__ = [
    "Activity",
    "Finding",
    "LogLock",
    "Observer",
    "Participant",
    "Picture",
    "Status",
    "Waiting",
    "find_all",
    "observe",
    "status",
]
