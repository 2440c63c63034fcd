"""Two hands between which something is tried: two processes of this host, or one here and one on another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fscoord.doctor.checks import Check
from fscoord.doctor.child import HandLike

__all__ = ["ACT_S", "Pair"]

ACT_S: Final = 15.0
"""How long an act may take that takes milliseconds where all is well: after that the kernel counts as stuck."""


class Pair:
    """`one` and `other`, who try something `between` processes or hosts, each time with files of their own.

    `effort` is for how many seconds they do what is measured; `pause` gives a waiter the time to wait.
    """

    def __init__(self, one: HandLike, other: HandLike, between: str, effort: float) -> None:
        self.one = one
        self.other = other
        self.between = between
        self.effort = effort
        self.pause = min(0.2, effort)

    def __iter__(self) -> Iterator[HandLike]:
        return iter((self.one, self.other))

    def name(self, what: str, how: str = "") -> str:
        """Return the name of a file for one probe."""
        return f"file-{self.between}-{what}-{how}"

    def check(self, name: str, outcome: str, says: str, lock: str = "", **measured: Any) -> Check:
        """Return a check of this pair's."""
        return Check(name, self.between, outcome, says, lock, measured)
