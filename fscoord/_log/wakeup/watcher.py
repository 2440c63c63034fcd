"""Sleep until the log may have changed: inotify read in the waiting thread, beside a slow poll that is always on.

Nothing depends on an event having come: it only ends a sleep early. One thread of a process reads the inotify
descriptor (of 600 wake-ups two threads lost 210) and wakes the others who are rung; when it leaves, another
takes over.

A signal handler may wait, too, wherever it interrupts another wait of its thread. So nothing here is kept apart by a
lock that such a handler could find locked for ever, and whatever it could change meanwhile is copied first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from fscoord._log.locking.process_mutex import LogKey
from fscoord._log.wakeup.doorbell import Doorbell
from fscoord._log.wakeup.node_poller import PollerElection
from fscoord._runtime import file_events as events, system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord._waiting.parking import THREADS, Naps, Sleepers
from fscoord.errors import UnsupportedFilesystemError

if TYPE_CHECKING:
    from fscoord._log.wakeup.waiter import Ticket

__all__ = ["MODES", "Watch", "shared_watch"]

MODES: Final = ("auto", "inotify", "poll")
POLL_LAST_S = 0.1
SHARED_POLL_LAST_S = 0.175
"""Where each look is a request to a server: less than ten in a second, counted from the first."""


class Watch:
    """What the waiting threads of a process on one log share, or the waiting tasks of one of its event loops.

    Args:
        log_path: the log, watched itself where there is no bell.
        bell: the bell that is watched, or None.
        mode: ``"auto"``, ``"inotify"`` (or else an error) or ``"poll"``.
        is_local: whether every writer is on this host, so that inotify hears of all.
        is_node: whether the bell is that of a node, one of whose processes asks the server for all.
        sleepers: who waits.

    Attributes:
        is_announced: whether writers know of the bell.
        heard: counts the events, where there is no bell to ask whom they were for.
        deaths: counts the watched processes that have ended.
        is_past: whether the log goes on in another file than the one watched.
    """

    def __init__(
        self,
        log_path: str,
        bell: Doorbell | None,
        mode: str,
        *,
        is_local: bool,
        is_node: bool = False,
        sleepers: Sleepers = THREADS,
    ) -> None:
        self._log_path = log_path
        self.bell = bell
        self.sleepers = sleepers
        self._is_told = False
        self.is_past = False
        self.is_announced = False
        self.heard = 0
        self.poll_last = POLL_LAST_S if is_local else SHARED_POLL_LAST_S
        self.deaths = 0
        self._asleep: set[Ticket] = set()
        self._ears = system.threading.RLock()  # held by who listens; to release it when one doesn't is harmless
        self._events: Any = None
        self.is_closed = False
        self.post: PollerElection | None = None
        if mode != "poll" and (is_local or is_node or mode == "inotify"):
            self._start(mode, is_node=is_node)
        if self._events is None:
            self.bell = self.post = None

    @property
    def hears(self) -> bool:
        """Whether events end a sleep, so that polling may be slow."""
        return self._events is not None

    def _start(self, mode: str, *, is_node: bool) -> None:
        target, mask = (self._log_path, events.LOG_CHANGED) if self.bell is None else (self.bell.path, events.BELL_RUNG)
        me = weakref.ref(self)

        def wake() -> None:
            watch = me()
            if watch is not None:
                watch._wake_all()

        try:
            if mode == "inotify" and not system.has_inotify():
                raise OSError(system.errno.ENOSYS, "this platform has none")
            self._events = events.watch_file(target, mask, wake)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            self.is_past = True  # the next look at the log tells why, or what to watch instead
        except (OSError, ImportError) as error:
            raise_if_foreign(error)
            if mode == "inotify":
                raise UnsupportedFilesystemError(
                    f"{self._log_path}: inotify can't be used ({error}); pass watch='poll' or watch='auto'",
                    path=self._log_path,
                ) from error
            logger(__name__).warning(
                "%s: no events from the file system (%s); polling instead", self._log_path, str(error)
            )
        else:
            weakref.finalize(self, self.sleepers.give_back, self._events).atexit = False
            self._have_it_told(self._events)
            if is_node and self.bell is not None:
                self.post = PollerElection(self.bell, lambda: _call_all(me()))

    def _have_it_told(self, events: Any) -> None:
        """If there is somebody to tell this watch when there are events, let no waiting thread read them."""
        me, sleepers = weakref.ref(self), self.sleepers

        def heard() -> None:
            watch = me()
            if watch is None or watch._events is not events:
                sleepers.give_back(events)  # or it would be called again and again
            elif events.wait(0):
                watch._tell(events)

        self._is_told = events.is_pollable and sleepers.listen(events, heard)

    @property
    def is_stale(self) -> bool:
        """Whether a new watch would hear more than this one."""
        bell = self.bell
        return self.is_closed or self.is_past or (bell is not None and bell.is_lost)

    def note_file(self, file: str) -> None:
        """The log is in `file` by now: without a bell, that is what must be watched."""
        if self.bell is None and self._events is not None and file != self._log_path:
            self.is_past = True

    def close(self) -> None:
        """Give the descriptors back; who still waits goes on by polling."""
        self.is_closed = True
        bell, self.bell = self.bell, None
        events, self._events = self._events, None
        post, self.post = self.post, None
        if post is not None:
            post.close()
        if events is not None:
            self.sleepers.give_back(events)
        if bell is not None:
            bell.close()

    def after_fork(self) -> None:
        """In a forked child: close what tells the parent's waits of events; whoever listens to it is not here."""
        self.is_closed = True
        bell, self.bell = self.bell, None
        events, self._events = self._events, None
        self.post = None  # it has been left already
        if events is not None:
            events.close()
        if bell is not None:
            bell.close()

    def watch_process(self, pid: int) -> bool:
        """Have the death of process `pid` end the sleeps of who keeps a vigil; False if that can't be had here."""
        events = self._events
        is_watched = events is not None and events.is_pollable and bool(events.watch_process(pid))
        if is_watched and self._is_told:
            self._have_it_told(events)
        return is_watched

    def watches(self, pid: int) -> bool:
        """Return whether the death of process `pid` still ends sleeps."""
        events = self._events
        return events is not None and events.is_pollable and pid in events.processes

    def lose_bell(self, error: OSError) -> None:
        """The bell failed: poll from now on."""
        bell, self.bell, self._events = self.bell, None, None
        post, self.post = self.post, None
        if post is not None:
            post.close()
        if bell is not None:
            logger(__name__).warning("%s can't be used (%s); waits go on, by polling", bell.path, str(error))

    # -- sleeping --------------------------------------------------------------------------------------------------

    def sleep(self, ticket: Ticket, until: float) -> Naps[bool]:
        """Return True when `ticket` is rung, and False at `until` by the monotonic clock."""
        events = self._events
        try:
            self._asleep.add(ticket)
            while not ticket.is_rung():
                left = until - system.time.monotonic()
                if left <= 0:
                    return False
                # Whoever gets the ears listens here, in C calls that nothing comes between; everybody else sleeps.
                if events is None or not events.is_pollable or self._is_told or not self._listen(events, ticket, left):
                    yield ticket.wake, left
            return True
        finally:
            self._asleep.discard(ticket)
            self._hand_on()

    def _listen(self, events: Any, ticket: Ticket, left: float) -> bool:
        """Wait for an event; False if another thread does, to be woken by it or to take its place."""
        try:
            if not self._ears.acquire(blocking=False):
                return False
            # The event for this ticket may have been read by the thread that had the ears before. Without a look after
            # they are taken, the ticket would sleep for the whole pause.
            if not ticket.is_rung() and events.wait(left):
                self._tell(events, ticket)
            return True
        finally:
            try:
                self._ears.release()
            except RuntimeError as error:  # it is another's
                raise_if_foreign(error)

    def _tell(self, events: Any, listener: Ticket | None = None) -> None:
        """Something was heard: wake whom it concerns."""
        self.heard += 1
        self.deaths += events.reap_exited()
        for other in list(self._asleep):
            if other is not listener and other.is_rung():
                other.wake.set()

    def _hand_on(self) -> None:
        """Let another listen in the place of who leaves."""
        for other in list(self._asleep):
            if other.wake.set():
                break

    def _wake_all(self) -> None:
        """For event sources with a thread of their own."""
        self.heard += 1
        for ticket in list(self._asleep):
            ticket.wake.set()

    def look_about(self) -> None:
        """Have everybody who sleeps see whether its wait is over."""
        events = self._events
        for ticket in list(self._asleep):
            ticket.wake.set()
        if events is not None and events.is_pollable:
            events.interrupt()


def _call_all(watch: Watch | None) -> None:
    """Have everybody who sleeps see whether it is to ask the server for all."""
    if watch is not None:
        for ticket in list(watch._asleep):
            ticket.is_called = True
        watch.look_about()


_watches: weakref.WeakValueDictionary[tuple[LogKey, str, Sleepers], Watch] = weakref.WeakValueDictionary()
_guard = [system.threading.RLock()]


def shared_watch(key: LogKey, kind: str, sleepers: Sleepers, make: Callable[[], Watch]) -> Watch:
    """Return the watch that `sleepers` of this process have on the log `key`, made by `make` if none hears.

    `kind` tells those apart that hear in different ways.
    """
    watch = _watches.get((key, kind, sleepers))
    if watch is not None and not watch.is_stale:
        return watch
    made = make()
    with _guard[0]:
        watch = _watches.get((key, kind, sleepers))
        if watch is None or watch.is_stale:
            watch = _watches[key, kind, sleepers] = made
    if watch is not made:
        made.close()
    return watch


def _after_fork_in_child() -> None:
    _guard[0] = system.threading.RLock()
    for watch in list(_watches.values()):
        watch.after_fork()
    _watches.clear()


system.after_fork_in_child("watches", _after_fork_in_child)
