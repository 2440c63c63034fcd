"""What an examination found: one check after another, and what each says."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

__all__ = ["BAD", "HOSTS", "INFO", "OK", "PROCESSES", "UNKNOWN", "Check"]

OK: Final = "ok"
BAD: Final = "bad"
UNKNOWN: Final = "unknown"
INFO: Final = "info"

PROCESSES: Final = "processes"
HOSTS: Final = "hosts"


class Check(NamedTuple):
    """One thing that was tried.

    Attributes:
        name: what, as one word.
        between: ``"processes"`` of one host or ``"hosts"``.
        outcome: ``"ok"``, ``"bad"`` (a promise would be broken), ``"unknown"`` (it could not be tried to its end) or
            ``"info"`` (nothing depends on it).
        says: what was seen, in words.
        lock: which kind of lock it is about, ``""`` if none.
        measured: figures; times in seconds.
    """

    name: str
    between: str
    outcome: str
    says: str
    lock: str = ""
    measured: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it

    @property
    def title(self) -> str:
        """The check's name with its kind of lock."""
        return f"{self.name} ({self.lock})" if self.lock else self.name
