"""Sleep until the log may have changed: inotify read in the waiting thread, beside a slow poll that is always on.

Nothing depends on an event having come: it only ends a sleep early. One thread of a process reads the inotify
descriptor (of 600 wake-ups two threads lost 210) and wakes the others whose marks are cleared; when it leaves, another
takes over.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable
from typing import Any, Final

from fscoord import _system as system
from fscoord._log.bell import Bell
from fscoord.errors import UnsupportedFilesystemError

__all__ = ["MODES", "Ticket", "Watch", "shared_watch"]

log = logging.getLogger(__name__)

MODES: Final = ("auto", "inotify", "poll")
SLOW_FIRST_S, SLOW_LAST_S = 0.1, 1.0
POLL_FIRST_S, POLL_LAST_S = 0.001, 0.1


class Watch:
    """What the waiting threads of a process on one log share.

    Args:
        log_path: the log, watched itself where there is no bell.
        bell: the bell that is watched, or None.
        mode: ``"auto"``, ``"inotify"`` (or else an error) or ``"poll"``.
        is_local: whether every writer is on this host, so that inotify hears of all.
    """

    def __init__(self, log_path: str, bell: Bell | None, mode: str, *, is_local: bool) -> None:
        self._log_path = log_path
        self.bell = bell
        self._mutex = system.threading.Lock()
        self._tickets: set[Ticket] = set()
        self._leader: Ticket | None = None
        self._events: Any = None
        self.is_closed = False
        if mode != "poll" and (is_local or mode == "inotify"):
            self._start(mode)
        if self._events is None:
            self.bell = None

    @property
    def hears(self) -> bool:
        """Whether events end a sleep, so that polling may be slow."""
        return self._events is not None

    def _start(self, mode: str) -> None:
        target, mask = (self._log_path, system.LOG_CHANGED) if self.bell is None else (self.bell.path, system.BELL_RUNG)
        try:
            self._events = system.watch_file(target, mask, self._wake_all)
        except (OSError, ImportError, AttributeError) as error:
            if mode == "inotify":
                raise UnsupportedFilesystemError(
                    f"{self._log_path}: inotify can't be used ({error}); pass watch='poll' or watch='auto'",
                    path=self._log_path,
                ) from error
            log.warning("%s: no events from the file system (%s); polling instead", self._log_path, error)

    @property
    def is_stale(self) -> bool:
        """Whether a new watch would hear more than this one."""
        return self.is_closed or (self.bell is not None and self.bell.is_lost)

    def close(self) -> None:
        """Give the descriptors back; who still waits goes on by polling."""
        self.is_closed = True
        bell, self.bell = self.bell, None
        events, self._events = self._events, None
        if events is not None:
            events.close()
        if bell is not None:
            bell.close()

    def lose_bell(self, error: OSError) -> None:
        """The bell failed: poll from now on."""
        if self.bell is not None:
            log.warning("%s can't be used (%s); waits go on, by polling", self.bell.path, error)
            self.bell = self._events = None

    # -- sleeping --------------------------------------------------------------------------------------------------

    def enter(self, ticket: Ticket) -> None:
        """From now on `ticket` is woken by events."""
        with self._mutex:
            self._tickets.add(ticket)

    def leave(self, ticket: Ticket) -> None:
        """`ticket` does not wait any more; if it was the one that listened, another takes over."""
        with self._mutex:
            self._tickets.discard(ticket)
            self._step_down(ticket)

    def sleep(self, ticket: Ticket, until: float) -> bool:
        """Return True when `ticket` is rung, and False at `until` by the monotonic clock."""
        events = self._events
        while True:
            left = until - system.time.monotonic()
            if left <= 0:
                return ticket.is_rung()
            if events is not None and events.readable and self._lead(ticket):
                if events.wait(left) and self._pass_on(ticket):
                    return True
            elif ticket.follow(left):
                return True

    def _lead(self, ticket: Ticket) -> bool:
        with self._mutex:
            if self._leader is None or self._leader is ticket or self._leader not in self._tickets:
                self._leader = ticket
            return self._leader is ticket

    def _step_down(self, ticket: Ticket) -> None:
        if self._leader is ticket:
            self._leader = None
            for other in self._tickets:
                if other is not ticket:
                    other.call()
                    break

    def _pass_on(self, leader: Ticket) -> bool:
        """After an event: wake the others that it is for, and return whether it is for `leader`."""
        with self._mutex:
            for other in self._tickets:
                if other is not leader:
                    other.rung = other.rung or self.bell is None
                    if other.is_rung():
                        other.call()
            is_rung = self.bell is None or leader.is_rung()
            if is_rung:
                self._step_down(leader)
            return is_rung

    def _wake_all(self) -> None:
        """For event sources with a thread of their own."""
        with self._mutex:
            for ticket in self._tickets:
                ticket.rung = True
                ticket.call()


class Ticket:
    """One thread's wait, from its first look at the log to its last."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._bucket = 0
        self._mark = b""
        self._pause = SLOW_FIRST_S if watch.hears else POLL_FIRST_S
        self._called: system.threading.Event | None = None  # only for who does not listen itself
        self.rung = False

    def __enter__(self) -> Ticket:
        self._watch.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.leave(self)

    def arm(self, number: int) -> None:
        """Before a look at the log: what is written to bucket `number` after that look ends the next `sleep`."""
        self.rung = False
        bell = self._watch.bell
        if bell is not None:
            try:
                self._bucket, self._mark = number, bell.mark(number)
            except OSError as error:
                self._watch.lose_bell(error)

    def is_rung(self) -> bool:
        """Whether the log may have news for this wait."""
        bell = self._watch.bell
        if self.rung or bell is None:
            return self.rung
        try:
            return bell.is_rung(self._bucket, self._mark)
        except OSError as error:
            self._watch.lose_bell(error)
            return True

    def call(self) -> None:
        """Have the thread that sleeps in `follow` look about."""
        if self._called is not None:
            self._called.set()

    def follow(self, left: float) -> bool:
        """Sleep until called, at most `left` seconds; return whether this wait is rung."""
        if self._called is None:
            self._called = system.threading.Event()
        if not self.is_rung():  # rung before there was something to call
            self._called.wait(left)
            self._called.clear()
        return self.is_rung()

    def sleep(self, left: float) -> bool:
        """Sleep until the log may have changed, at most `left` seconds; False when it was only time for a poll."""
        pause = min(self._pause, left)
        if not self._watch.hears:
            pause = min(pause * random.uniform(0.75, 1.25), left)
        if self._watch.sleep(self, system.time.monotonic() + pause):
            return True
        self._pause = min(self._pause * 2, SLOW_LAST_S if self._watch.hears else POLL_LAST_S)
        return False


_watches: weakref.WeakValueDictionary[tuple[bytes, str], Watch] = weakref.WeakValueDictionary()
_guard = [system.threading.Lock()]


def shared_watch(log_id: bytes, mode: str, make: Callable[[], Watch]) -> Watch:
    """Return this process's watch of the log `log_id`, made by `make` if there is none that hears."""
    watch = _watches.get((log_id, mode))
    if watch is not None and not watch.is_stale:
        return watch
    made = make()
    with _guard[0]:
        watch = _watches.get((log_id, mode))
        if watch is None or watch.is_stale:
            watch = _watches[log_id, mode] = made
    if watch is not made:
        made.close()
    return watch


def _after_fork_in_child() -> None:
    _guard[0] = system.threading.Lock()
    for watch in list(_watches.values()):
        watch.close()
    _watches.clear()


system.after_fork_in_child(_after_fork_in_child)
