"""Leases: a holder with a ``ttl`` renews its entry in line, and a waiter removes an entry that was not renewed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError, StoreClosedError, StoreGoneError
from fscoord.recipes._entry import Entry

RENEWALS_PER_TTL: Final = 4
"""How often a holder renews its entry within one ``ttl``."""

CHECKS_PER_TTL: Final = 8
"""How often a waiter reads a holder's entry within one ``ttl``."""


class LeaseRenewer:
    """Renews the lease of `entry` in a thread, until `end` is called or another process has removed the entry.

    Args:
        line: the name of the line, for log messages.
        renew: renews the lease of the entry with the given id, and returns whether the entry still holds the resource.
        entry: the entry of the holder.
        on_loss: called when the entry was found to be lost.
    """

    def __init__(
        self, line: str, renew: Callable[[str], bool], entry: Entry, on_loss: Callable[[Entry], object]
    ) -> None:
        self._line = line
        self._renew = renew
        self._entry = entry
        self._on_loss = on_loss
        self._is_over = False
        self._life = system.process_epoch()
        self._wakeup = system.AutoResetEvent()

    def start(self) -> None:
        """Start the thread. The thread first renews the lease after a quarter of the lease has passed."""
        system.start_thread(f"fscoord {self._line}", self._run)

    def end(self) -> None:
        """Tell the thread to stop. The call does not wait for the end of the thread."""
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
            text = (
                "%r is not held any more: its lease was not renewed for %g s, or another process removed the holder;"
                " stop the work that needs it"
            )
            logger(__name__).warning(text, self._line, self._entry.lease_s)
            self._on_loss(self._entry)

    def _ended(self) -> bool:
        return self._is_over or self._life != system.process_epoch()


class LeaseMonitor:
    """Measures the age of each lease of other contenders: the time since the lease was seen to change.

    The times are those of this waiter's monotonic clock. Each check adds at most a quarter of the length of the lease
    to the age. If more time has passed since the previous check, this host may have been suspended. Holders on this
    host then could not renew their leases either.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float, float]] = {}  # by id: the lease, its age, when it was last checked

    def expired(self, entries: Iterable[Entry], before: float) -> set[tuple[str, str]]:
        """Return the (id, lease) of each holder in `entries` whose lease has expired.

        Args:
            entries: the entries that were just read from the store.
            before: the time of the monotonic clock before this read.
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
    """Return how many seconds to wait before the next check of the leases in `entries`, at most `usual`."""
    return min([usual, *(entry.lease_s / CHECKS_PER_TTL for entry in entries if entry.token and entry.lease_s)])
