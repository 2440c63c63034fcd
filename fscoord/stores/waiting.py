"""How the handles of a `~fscoord.FileStore` sleep until the log may hold what they wait for, and wake each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from fscoord import _system as system
from fscoord._log import record
from fscoord._log.bell import Bell, bucket
from fscoord._log.file import LogFile
from fscoord._log.opening import Wanted
from fscoord._log.watch import Ticket, Watch, shared_watch
from fscoord.errors import FscoordError, StoreTimeoutError

__all__ = ["BELL_SUFFIX", "MISSING", "Missing", "Waiting"]

log = logging.getLogger(__name__)

BELL_SUFFIX: Final = ".bell"

T = TypeVar("T")


class Missing:
    """What a look returns when it is worth waiting."""


MISSING: Final = Missing()


class Waiting:
    """The sleeping and waking of one handle.

    A bell is announced in the log by the first who waits, so that writers nobody waits for need not look for one. Where
    it can't be had the log itself is watched, or polled; either way a slow poll bounds every ring that is lost.
    """

    def __init__(self, handle: LogFile, wanted: Wanted, mode: str) -> None:
        self._log = handle
        self._wanted = wanted
        self._mode = mode
        self._bell: Bell | None = None
        self._announcements = 0
        self._watch: Watch | None = None
        self._warned = False

    def ring(self, names: Iterable[bytes]) -> None:
        """Wake those who wait for one of the keys `names`, which have just been written."""
        if self._announcements != self._log.bell or (self._bell is not None and self._bell.fd < 0):
            self._announcements = self._log.bell
            self._bell = self._open_bell()
        if self._bell is not None:
            try:
                for name in names:
                    self._bell.ring(bucket(name))
            except OSError as error:
                self._warn(error)
                self._bell = None

    def until(self, limit: float, look: Callable[[float], T | Missing], lacking: Callable[[], bytes]) -> T | Missing:
        """Return what `look` finds, looking again whenever it may have changed, or `MISSING` after `limit` seconds.

        After a look in vain `lacking` returns one key without which the next would be in vain too.
        """
        deadline = system.time.monotonic() + limit
        found = look(limit)
        if not isinstance(found, Missing) or limit <= 0:
            return found
        while True:
            watch = self._listen(deadline)
            with Ticket(watch) as ticket:
                is_rung = False
                while True:
                    if not is_rung:  # who was rung mostly finds what it waits for, and need not mark again
                        ticket.arm(bucket(lacking()))
                    left = deadline - system.time.monotonic()
                    found = look(max(left, 0.0))
                    if not isinstance(found, Missing) or left <= 0:
                        return found
                    if is_rung:
                        is_rung = False
                        continue
                    is_rung = ticket.sleep(left)
                    if not is_rung and watch.is_stale:
                        self._watch = None
                        break

    def close(self) -> None:
        """Give the descriptors back."""
        if self._bell is not None:
            self._bell.close()
        self._bell = self._watch = None

    def _listen(self, deadline: float) -> Watch:
        if self._watch is None or self._watch.is_closed:
            self._watch = shared_watch(self._log.header.log_id, self._mode, lambda: self._make_watch(deadline))
        return self._watch

    def _make_watch(self, deadline: float) -> Watch:
        local = self._log.mount.is_local
        bell = None
        if self._mode != "poll" and local and system.has_inotify() and not self._wanted.read_only:
            bell = self._open_bell()
        watch = Watch(self._log.path, bell, self._mode, is_local=local)
        if watch.bell is not None:
            self._announce(watch, watch.bell, deadline)
        return watch

    def _open_bell(self) -> Bell | None:
        try:
            return Bell(self._log.path + BELL_SUFFIX, self._wanted.mode)
        except (OSError, FscoordError) as error:
            self._warn(error)
            return None

    def _announce(self, watch: Watch, bell: Bell, deadline: float) -> None:
        """Tell writers that there is a bell to ring; not for longer than the wait may take for which it is needed."""

        def decide(_: bytes, __: bytes) -> tuple[None, int, bytes]:
            return None, record.BELL if bell.is_new or not self._log.bell else 0, b""

        try:
            self._log.update(record.BELL, b"", b"", decide, max(0.0, deadline - system.time.monotonic()))
        except StoreTimeoutError:
            watch.close()  # no writer knows of the bell: whoever waits next tries again
        except (FscoordError, OSError) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s%s can't be used (%s); waits go on, more slowly", self._log.path, BELL_SUFFIX, error)
