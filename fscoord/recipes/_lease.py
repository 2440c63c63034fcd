"""Leases of recipes: a holder with a ``ttl`` renews its entry, and a waiter removes an entry that does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError, StoreClosedError, StoreGoneError
from fscoord.recipes._entry import Entry

RENEWALS_PER_TTL: Final = 4
"""How often a holder renews its entry in the time after which the entry expires."""

CHECKS_PER_TTL: Final = 8
"""How often a waiter reads the entry in that time."""


class LeaseRenewer:
    """A thread that renews `entry` until `end` is called, or another process has removed the entry from the line.

    Args:
        line: the name of the line.
        renew: changes the lease of the entry with an id; returns whether the entry is still served.
        entry: the entry.
    """

    def __init__(self, line: str, renew: Callable[[str], bool], entry: Entry) -> None:
        self._line = line
        self._renew = renew
        self._entry = entry
        self._is_over = False
        self._life = system.process_epoch()
        self._wakeup = system.AutoResetEvent()

    def start(self) -> None:
        """Start the thread, which renews the entry first after a quarter of its lease."""
        system.start_thread(f"fscoord {self._line}", self._run)

    def end(self) -> None:
        """Stop renewing."""
        self._is_over = True
        self._wakeup.set()

    def _run(self) -> None:
        lost = False
        while not (lost or self._ended()):
            self._wakeup.wait(self._entry.lease_s / RENEWALS_PER_TTL)
            try:
                lost = not self._ended() and not self._renew(self._entry.id)
            except (StoreClosedError, StoreGoneError):
                return
            except FscoordError as error:
                logger(__name__).warning("could not renew the lease of %r: %s", self._line, str(error))
        if not self._ended():
            text = "%r is not held any more: its lease was not renewed for %g s, or another process removed the holder"
            logger(__name__).warning(text, self._line, self._entry.lease_s)

    def _ended(self) -> bool:
        return self._is_over or self._life != system.process_epoch()


class LeaseMonitor:
    """The ages of other contenders' leases, as one waiter has observed them by its own monotonic clock.

    Between two checks at most a quarter of the lease counts. If the waiter did not run for longer than that, its whole
    host may have been stopped, and the holders may not have run either.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float, float]] = {}  # by id: the lease, its age, when it was last checked

    def expired(self, entries: Iterable[Entry], before: float) -> set[tuple[str, str]]:
        """Return the id and the lease of each served entry whose lease has not changed for the length of the lease.

        Args:
            entries: the entries as they were read from the store.
            before: a time of the monotonic clock before that read.
        """
        seen, expired = {}, set()
        for entry in entries:
            if entry.token and entry.lease_s:
                lease, age, last = self._seen.get(entry.id, ("", 0.0, before))
                counted = min(max(before - last, 0.0), entry.lease_s / RENEWALS_PER_TTL)
                age = age + counted if lease == entry.lease else 0.0
                seen[entry.id] = entry.lease, age, system.time.monotonic()
                if age >= entry.lease_s:
                    expired.add((entry.id, entry.lease))
        self._seen = seen
        return expired


def check_interval(entries: Iterable[Entry], usual: float) -> float:
    """Return the seconds after which to check `entries` again, at most `usual`."""
    return min([usual, *(entry.lease_s / CHECKS_PER_TTL for entry in entries if entry.token and entry.lease_s)])
