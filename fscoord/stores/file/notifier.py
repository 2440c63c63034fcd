"""How the handles of a `~fscoord.FileStore` sleep until the log may hold what they wait for, and wake each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from fscoord._log.format import record
from fscoord._log.io.opening import LogOptions
from fscoord._log.log import Log
from fscoord._log.opened import WatchedLog
from fscoord._log.wakeup.doorbell import Doorbell, bucket, session_end_bucket
from fscoord._log.wakeup.node_poller import node_bell_path
from fscoord._log.wakeup.waiter import Ticket
from fscoord._log.wakeup.watcher import Watch, shared_watch
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord._waiting.parking import THREADS, Naps, Sleepers
from fscoord.errors import FscoordError, StoreTimeoutError, StoreUnavailableError

__all__ = ["BELL_SUFFIX", "MISSING", "Missing", "Waiting"]

BELL_SUFFIX: Final = ".bell"

ANNOUNCE_S: Final = 0.1
"""How long a wait without rings may do without looks, to get the lock for an announcement."""

T = TypeVar("T")


class Missing:
    """What a look returns when it is worth waiting."""


MISSING: Final = Missing()


class Waiting:
    """The sleeping and waking of one handle.

    A bell is announced in the log by the first who waits, so that writers nobody waits for need not look for one. Where
    it can't be had the log itself is watched, or polled; either way a slow poll bounds every ring that is lost.

    Who waits for a change of any key (`is_for_all`) has no use for a bell, and always does so.
    """

    def __init__(
        self, handle: Log, wanted: LogOptions, mode: str, sleepers: Sleepers = THREADS, *, is_for_all: bool = False
    ) -> None:
        self._log = handle
        self._wanted = wanted
        self._mode = mode
        self._sleepers = sleepers
        self._is_for_all = is_for_all
        self._bell: Doorbell | None = None
        self._announcements = 0
        self._watch: Watch | None = None
        self._tickets: set[Ticket] = set()
        self._warned = self._is_closed = False

    def ring(self, names: Iterable[bytes]) -> None:
        """Wake those who wait for one of the keys `names`, which have just been written."""
        bell = self._bell
        if self._announcements != self._log.handle.bell or (bell is not None and bell.fd < 0):
            self._announcements = self._log.handle.bell
            bell = self._bell = self._open_bell()
        if bell is not None:
            try:
                for name in names:
                    bell.ring(bucket(name))
            except OSError as error:
                raise_if_foreign(error)
                self._warn(error)
                self._bell = None

    def until(
        self,
        limit: float,
        look: Callable[[float], T | Missing],
        lacking: Callable[[], bytes],
        vigil: Callable[[], float] | None = None,
        ends: Sequence[int] = (),
    ) -> Naps[T | Missing]:
        """Return what `look` finds, looking again whenever it may have changed, or `MISSING` after `limit` seconds.

        After a look in vain `lacking` returns one key without which the next would be in vain too. With a
        `vigil`, which returns how long a sleep may be, also when a process dies that `watch_process` was told of, or
        one of the sessions `ends` is closed.
        """
        deadline = system.time.monotonic() + limit
        found = look(limit)
        while isinstance(found, Missing) and system.time.monotonic() < deadline:
            watch = self._listen(deadline)
            ticket = Ticket(watch, vigil, list(map(session_end_bucket, ends)))
            found = yield from self._follow(watch, ticket, deadline, look, lacking)
        return found

    def watch_process(self, pid: int) -> bool:
        """Have the death of process `pid` end the sleeps of who keeps a vigil; False if that can't be had."""
        watch = self._watch
        return watch is not None and watch.watch_process(pid)

    def watches(self, pid: int) -> bool:
        """Return whether the death of process `pid` still ends sleeps."""
        watch = self._watch
        return watch is not None and watch.watches(pid)

    def _follow(
        self,
        watch: Watch,
        ticket: Ticket,
        deadline: float,
        look: Callable[[float], T | Missing],
        lacking: Callable[[], bytes],
    ) -> Naps[T | Missing]:
        """As `until`, but return `MISSING` also when another watch would hear more than `watch`."""
        # Who asks for itself alone leaves the news to the handle's other waits, which may have to pass them on.
        shared = self._log if isinstance(self._log, WatchedLog) and not self._is_for_all else None
        try:
            self._tickets.add(ticket)
            is_rung = False
            while True:
                awaited = lacking()
                if not is_rung:  # who was rung mostly finds what it waits for, and need not mark again
                    ticket.arm(bucket(awaited))
                left = deadline - system.time.monotonic()
                found = look(max(left, 0.0))
                watch.note_file(self._log.handle.file)
                if shared is not None:
                    ticket.pass_on(shared.take_changed_keys())
                if not isinstance(found, Missing) or left <= 0:
                    return found
                if is_rung or lacking() != awaited:  # the ring that will come is not the one that was asked for
                    is_rung = False
                    continue
                is_rung = not watch.is_past and (yield from ticket.sleep(left))
                if not is_rung and (watch.is_stale or not watch.is_announced):
                    self._watch = None
                    return found
        finally:
            self._tickets.discard(ticket)
            ticket.leave()

    def close(self, session: int) -> None:
        """Give the descriptors back, when no other thread uses them any more, and wake the handle's waits.

        Those who wait for the end of `session`, which has just come, are told; 0: there is none.
        """
        self._is_closed = True  # before the watch is dropped: a wait of another thread may be about to make one
        if session:
            self._ring_end(session)
        watch, self._watch, self._bell = self._watch, None, None
        for ticket in list(self._tickets):
            ticket.is_over = True
        if watch is not None:
            watch.look_about()

    def _listen(self, deadline: float) -> Watch:
        watch = self._watch
        if watch is None or watch.is_closed or watch.is_past:
            kind = self._mode + " for all" * self._is_for_all
            watch = self._watch = shared_watch(self._log.handle.root.key, kind, self._sleepers, self._make_watch)
            if self._is_closed:
                self._watch = None  # the next look raises
        if not watch.is_announced:
            self._announce(watch, min(deadline - system.time.monotonic(), ANNOUNCE_S))
        return watch

    def _make_watch(self) -> Watch:
        local, node = self._log.mount.is_local, self._is_of_node
        bell = None
        has_use = node or not (self._wanted.read_only or self._is_for_all)
        if self._mode != "poll" and (node or local) and system.has_inotify() and has_use:
            bell = self._open_bell()
        return Watch(self._log.handle.file, bell, self._mode, is_local=local, is_node=node, sleepers=self._sleepers)

    @property
    def _is_of_node(self) -> bool:
        """Whether the bell is that of a node, because its processes share the log with other hosts."""
        return not (self._log.mount.is_local or self._is_for_all) and isinstance(self._log, WatchedLog)

    def _ring_end(self, session: int) -> None:
        """Ring for the end of `session`, if there is a bell: who comes later sees for itself that it has ended."""
        try:
            bell = self._bell
            if bell is None or bell.is_lost:
                if self._is_of_node and not self._log.handle.bell:  # to look for that would make a directory
                    return
                bell = self._find_bell(create=False)
            bell.ring(session_end_bucket(session))
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            logger(__name__).debug("%s: nobody is told of the end of %d: %s", self._log.path, session, error)

    def _find_bell(self, *, create: bool) -> Doorbell:
        if self._is_of_node:
            return Doorbell(node_bell_path(self._log.handle.root.key), 0o600, create=create)
        return Doorbell(self._log.path + BELL_SUFFIX, self._wanted.mode, create=create, like=self._log.path)

    def _open_bell(self) -> Doorbell | None:
        try:
            return self._find_bell(create=True)
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            self._warn(error)
            return None

    def _announce(self, watch: Watch, limit: float) -> None:
        """Tell writers that there is a bell to ring, if the lock for that comes soon; else at the next slow poll."""
        bell = watch.bell

        def decide(_: bytes, __: bytes) -> tuple[None, int, bytes]:
            known = self._log.handle.bell and (self._is_of_node or watch.is_announced or not (bell and bell.is_new))
            return None, 0 if known else record.BELL, b""

        try:
            is_heard = self._wanted.read_only or (
                self._log.handle.bell and (self._is_of_node or not (bell and bell.is_new))
            )
            if bell is not None and not is_heard:
                self._log.update(record.BELL, b"", b"", decide, limit)
            watch.is_announced = True
        except StoreTimeoutError as error:
            logger(__name__).debug("%s: its bell is not announced yet: %s", self._log.path, str(error))
        except StoreUnavailableError as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger(__name__).warning(
                "%s%s can't be used (%s); waits go on, more slowly", self._log.path, BELL_SUFFIX, str(error)
            )
