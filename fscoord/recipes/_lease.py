"""Signs of life: who holds with a ``ttl`` gives one now and then, and whoever waits judges by whether they change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError, StoreClosedError, StoreGoneError
from fscoord.recipes._entry import Entry

__all__ = ["Renewal", "Signs", "longest_look"]

SIGNS: Final = 4
"""How many signs of life are given in the time after which their absence counts."""

LOOKS: Final = 8
"""How often a waiter looks for one in that time."""


class Renewable(Protocol):
    """A line, as far as this module asks it for anything."""

    name: str

    def renew(self, name: str) -> bool:
        """Change what stands there for `name`; return whether it is served still."""


class Renewal:
    """A thread that gives signs of life for `entry`, until `end` is called or somebody has taken it out of `line`."""

    def __init__(self, line: Renewable, entry: Entry) -> None:
        self._line = line
        self._entry = entry
        self._is_over = False
        self._wakeup = system.AutoResetEvent()

    def start(self) -> None:
        """Give the first after a while, and then one after the other."""
        system.start_thread(f"fscoord {self._line.name}", self._run)

    def end(self) -> None:
        """Give no more of them."""
        self._is_over = True
        self._wakeup.set()

    def _run(self) -> None:
        lost = False
        while not (lost or self._ended()):
            self._wakeup.wait(self._entry.lease_s / SIGNS)
            try:
                lost = not self._ended() and not self._line.renew(self._entry.id)
            except (StoreClosedError, StoreGoneError):
                return
            except FscoordError as error:
                logger(__name__).warning("no sign of life for %r: %s", self._line.name, str(error))
        if not self._ended():
            logger(__name__).warning(
                "%r is not held any more: there was no sign of life for %g s, or somebody took it away",
                self._line.name,
                self._entry.lease_s,
            )

    def _ended(self) -> bool:
        return self._is_over


class Signs:
    """What one who waits has seen of others, by its own monotonic clock.

    Between two looks no more counts than a quarter of the time: if everything stood still, those who are looked at did,
    too.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float, float]] = {}  # by id: the lease, how long it is the same, the last look

    def silent(self, entries: Iterable[Entry], before: float) -> set[tuple[str, str]]:
        """Return id and lease of those served `entries`, read after the time `before`, that showed nothing for long."""
        seen, silent = {}, set()
        for entry in entries:
            if entry.token and entry.lease_s:
                lease, age, last = self._seen.get(entry.id, ("", 0.0, before))
                age = age + min(max(before - last, 0.0), entry.lease_s / SIGNS) if lease == entry.lease else 0.0
                seen[entry.id] = entry.lease, age, system.time.monotonic()
                if age >= entry.lease_s:
                    silent.add((entry.id, entry.lease))
        self._seen = seen
        return silent


def longest_look(entries: Iterable[Entry], usual: float) -> float:
    """Return after how many seconds to look at `entries` again, `usual` at most."""
    return min([usual, *(entry.lease_s / LOOKS for entry in entries if entry.token and entry.lease_s)])
