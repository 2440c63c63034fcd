"""`Waiter`: one wait, which sleeps between reads of the log. `ChangeWatcher`: reads the events that wake waiters.

A waiter sleeps until an event, or until its next poll. So no result depends on an event: a lost event only delays the
waiter until its next poll.

Of the waiting threads of a process, only one reads the inotify descriptor. It wakes the threads whose keys were
written. If several threads read the descriptor, a thread could consume the event of another thread. When the reading
thread leaves, another thread takes over. With asyncio, the event loop reads the descriptor.

A signal handler may wait as well, and so interrupt another wait of its thread. The handler must never block on a lock
that the interrupted code holds. Therefore `_sleeping` has no mutex: single C calls change it, and code that iterates
over the set copies it first. No thread blocks for `_reader_mutex`; a thread only tries to lock it. `_guard`, which
guards the table of watchers, is reentrant.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from fscoord._log.locking.process_mutex import LogKey
from fscoord._log.wakeup.doorbell import Doorbell
from fscoord._runtime import file_events as events, system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord._waiting.wait import THREAD_BACKEND, WaitBackend
from fscoord.errors import InsecurePathError, UnsupportedFilesystemError

MODES: Final = ("auto", "inotify", "poll")
POLL_LAST_S = 0.1
SHARED_POLL_LAST_S = 0.175
"""The longest pause between two polls on a mount where each poll is a request to a server, in seconds."""

SLOW_FIRST_S, SLOW_LAST_S = 0.1, 1.0
"""The first and the longest pause between two polls of a wait that events wake, in seconds."""
POLL_FIRST_S = 0.001
DEATH_WATCH_FIRST_S = 0.005


class Waiter:
    """Decides how long one wait, by a thread or a task, sleeps between two reads of the log.

    Args:
        watcher: the watcher that wakes this waiter.
        longest_sleep: a function that returns the longest sleep in seconds, if the wait also watches for deaths. The
            death of a watched process then ends a sleep, too. None: the wait does not watch for deaths.
        other_buckets: further buckets whose ring ends a sleep.

    Attributes:
        waker: the object whose `set` ends the sleep of this waiter.
        event_count: the value of `ChangeWatcher.event_count` when this waiter was armed or last checked its cells.
        was_rung: whether a ring ended the last sleep. If false, the sleep ended because a poll was due.
        is_over: whether the wait must end because the store was closed.
        is_reusable: whether another wait may use this waiter after `close`.
        role_changed: whether the waiter must check if it has become the poller of its node; see `NodeWaiter`.
    """

    was_rung = False
    is_over = False
    role_changed = False
    _bucket = 0
    _mark = b""
    _other_marks: Sequence[bytes] = ()
    _wakes_at: float | None = None  # the end of the current sleep without a ring; None: no sleep
    _pause = 0.0  # the length of the last sleep without a ring; 0.0 before the first

    def __init__(
        self,
        watcher: ChangeWatcher,
        longest_sleep: Callable[[], float] | None = None,
        other_buckets: Sequence[int] = (),
    ) -> None:
        self.watcher = watcher
        self.waker = watcher.backend.new_waker()
        self._longest_sleep = longest_sleep
        self._other_buckets = other_buckets
        self.is_reusable = longest_sleep is None and not other_buckets  # a death watch belongs to its wait
        self.event_count = watcher.event_count
        self._deaths = watcher.deaths

    def close(self) -> None:
        """End the wait, and the current sleep if there is one."""
        if self._wakes_at is not None:
            self.watcher.end_sleep(self)
            self._wakes_at = None
        self._pause = 0.0

    def arm(self, bucket: int) -> None:
        """Arm the cell of `bucket`: a write to a key of the bucket after this call ends the next sleep.

        The caller reads the log after this call.
        """
        watcher = self.watcher
        self.event_count, self._deaths, bell = watcher.event_count, watcher.deaths, watcher.bell
        if bell is not None:
            try:
                self._bucket, self._mark = bucket, bell.arm(bucket)
                if self._other_buckets:
                    self._other_marks = list(map(bell.arm, self._other_buckets))
            except OSError as error:
                raise_if_foreign(error)
                watcher.fall_back_to_polling(error)

    def is_rung(self) -> bool:
        """Return whether the caller must read the log again: a key may have changed, or the wait is over.

        A ring is always followed by an event. So if no event was read since the waiter was armed, the result is False
        without a system call. If there was a ring, the unread event of the ring ends the next `ChangeWatcher.block` at
        once.
        """
        watcher = self.watcher
        if self.is_over or (self._longest_sleep and self._deaths != watcher.deaths):
            return True
        bell = watcher.bell
        if bell is None or self.event_count == watcher.event_count:
            return self.event_count != watcher.event_count
        try:
            if bell.is_rung(self._bucket, self._mark):
                return True
            others = self._other_marks
            return bool(others) and any(map(bell.is_rung, self._other_buckets, others))
        except OSError as error:
            raise_if_foreign(error)
            watcher.fall_back_to_polling(error)
            return True

    def max_sleep(self, deadline: float) -> float:
        """Return how long to sleep at most, in seconds. 0.0: read the log now; `was_rung` then gives the reason.

        Args:
            deadline: the end of the wait (monotonic, in seconds). No sleep lasts beyond it.
        """
        watcher, now = self.watcher, system.time.monotonic()
        if self._wakes_at is None:
            has_events, pause = watcher.has_events, self._pause
            if not pause:
                first = DEATH_WATCH_FIRST_S if self._longest_sleep else SLOW_FIRST_S
                pause = self._pause = first if has_events else POLL_FIRST_S
            elif not self.was_rung:
                longest = watcher.poll_last
                if has_events:
                    longest = self._longest_sleep() if self._longest_sleep else SLOW_LAST_S
                pause = self._pause = min(pause * 2, longest)
            if not has_events:
                pause *= random.uniform(0.75, 1.25)  # so that many waiters do not poll at once
            self._wakes_at = min(now + pause, deadline)
            watcher.begin_sleep(self)
        # The usual case is decided without a call: without an event, only `close` ends a sleep.
        self.was_rung = (self.event_count != watcher.event_count or self.is_over) and self.is_rung()
        if not self.was_rung:
            seconds = self._wakes_at - now
            if seconds > 0:
                return seconds
        watcher.end_sleep(self)
        self._wakes_at = None  # last: if a signal handler raises before this line, `close` ends the sleep again
        return 0.0

    def sleep_once(self, left: float) -> bool:
        """Sleep in this thread until a ring, or for `left` seconds, but no longer than `SLOW_FIRST_S`.

        Return whether there was a ring. The waiter is armed, and its watcher has a bell.
        """
        watcher, seconds = self.watcher, min(left, SLOW_FIRST_S)
        self._wakes_at = ends = system.time.monotonic() + seconds  # if a signal handler raises, `close` ends the sleep
        watcher.begin_sleep(self)
        while True:  # the first test is for an event that another thread has read before the sleep
            count = watcher.event_count
            is_rung = (self.event_count != count or self.is_over) and self.is_rung()
            if is_rung or seconds <= 0 or not watcher.has_events:
                break
            self.event_count = count  # the cell was read after these events, and none was for this waiter
            watcher.block(self, seconds)
            seconds = ends - system.time.monotonic()
        watcher.end_sleep(self)
        self._wakes_at = None
        return is_rung

    def fail(self, error: OSError) -> None:
        """Handle `error`, raised by a read of events during a sleep. This implementation raises it again."""
        raise error


class Election(Protocol):
    """The part of `node_poller.PollerElection` that a watcher uses."""

    def close(self) -> None:
        """Leave the election."""


class ChangeWatcher:
    """Watches one log. All waiting threads of a process share a watcher, and so do all waiting tasks of an event loop.

    Args:
        log_path: the path of the log.
        bell: the bell that is watched; None: the log itself is watched.
        mode: ``"poll"``: the waiters poll. ``"auto"``: the waiters poll if no source of events can be opened.
            ``"inotify"``: an error is raised in that case, and also if the platform has no inotify. In the last two
            modes, the FIFO beside the bell is the source of events if the user has no inotify instance left.
        is_local: whether every writer is on this host, so that inotify reports all changes.
        elect: a function that joins the election of the node's poller. Its arguments are the bell, and a function that
            makes every sleeper call `Waiter.is_rung` again. None: no process polls for other processes.
        backend: how the waiters sleep.

    Attributes:
        is_announced: whether the log has a BELL record, so that writers ring the bell.
        has_events: whether events end a sleep, so that polls may be rare.
        event_count: the number of events so far. Without a bell, a waiter learns of changes only from this number.
        deaths: the number of watched processes that have ended.
        begin_sleep: a C function that adds a `Waiter` to those that a ring wakes. The caller must call `Waiter.is_rung`
            afterwards, because earlier events have not woken the waiter.
        is_outdated: whether the log continues in another file than the watched file.
        election: the election of the node's poller, or None.
    """

    def __init__(
        self,
        log_path: str,
        bell: Doorbell | None,
        mode: str,
        *,
        is_local: bool,
        elect: Callable[[Doorbell, Callable[[], None]], Election] | None = None,
        backend: WaitBackend = THREAD_BACKEND,
    ) -> None:
        self._log_path = log_path
        self.bell = bell
        self.backend = backend
        self._is_loop_driven = False  # whether an event loop, and no waiting thread, reads the events
        self.is_outdated = False
        self.is_announced = False
        self.event_count = 0
        self.poll_last = POLL_LAST_S if is_local else SHARED_POLL_LAST_S
        self.deaths = 0
        self._sleeping: set[Waiter] = set()
        self.begin_sleep = self._sleeping.add
        self._reader_mutex = system.threading.RLock()  # held by the thread that reads the events
        self._events: Any = None
        self.has_events = self.is_closed = False
        self.election: Election | None = None
        _instances.add(self)
        if mode != "poll" and (is_local or elect is not None or mode == "inotify"):
            self._start(mode, elect)
        self.has_events = self._events is not None
        if not self.has_events:
            self.bell = self.election = None

    def _start(self, mode: str, elect: Callable[[Doorbell, Callable[[], None]], Election] | None) -> None:
        target, mask = (self._log_path, events.LOG_CHANGED) if self.bell is None else (self.bell.path, events.BELL_RUNG)
        me = weakref.ref(self)

        def on_event() -> None:
            watcher = me()
            if watcher is not None:
                watcher._on_event()

        def on_vacancy() -> None:
            watcher = me()
            if watcher is not None:
                watcher._on_vacancy()

        try:
            if mode == "inotify" and not system.has_inotify():
                raise OSError(system.errno.ENOSYS, "this platform has no inotify")
            self._events = self._open_events(target, mask, on_event)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            self.is_outdated = True  # the next look at the log finds the reason, or the file to watch instead
        except (OSError, ImportError) as error:
            raise_if_foreign(error)
            if mode == "inotify":
                raise UnsupportedFilesystemError(
                    f"{self._log_path}: inotify can't be used ({error}); pass watch='poll' or watch='auto'",
                    path=self._log_path,
                ) from error
            message = "%s: no events from the file system (%s); polling instead"
            log = (
                logger(__name__).debug if system.is_fake_fs() else logger(__name__).warning
            )  # fake files have no events
            log(message, self._log_path, str(error))
        else:
            weakref.finalize(self, self.backend.release, self._events).atexit = False
            self._subscribe_loop(self._events)
            if elect is not None and self.bell is not None:
                self.election = elect(self.bell, on_vacancy)

    def _open_events(self, target: str, mask: int, on_event: Callable[[], None]) -> Any:
        """Return the source of events for `target`: inotify or, if no inotify instance is left, the bell's FIFO."""
        try:
            return events.watch_file(target, mask, on_event)
        except OSError as error:
            raise_if_foreign(error)
            if self.bell is None or error.errno not in events.EXHAUSTED:
                raise
            number, refusal = error.errno, error.strerror
        # After the clause: its error keeps the descriptors of the refused instance open.
        try:
            return events.FifoSource(self.bell.open_fifo())
        except (OSError, InsecurePathError) as error:
            raise_if_foreign(error)
            raise OSError(number, f"{refusal}; the FIFO beside the bell can't be used either: {error}") from error

    def _subscribe_loop(self, events: Any) -> None:
        """Make the event loop read `events`, if it can. Then no waiting thread reads them."""
        me, backend = weakref.ref(self), self.backend

        def on_readable() -> None:
            watcher = me()
            if watcher is None or watcher._events is not events:
                backend.release(events)  # otherwise the loop would call this function again and again
            elif events.wait(0):
                watcher._dispatch(events)

        self._is_loop_driven = events.is_pollable and backend.subscribe(events, on_readable)

    @property
    def is_stale(self) -> bool:
        """Whether a new watcher would detect more changes than this watcher."""
        bell = self.bell
        return self.is_closed or self.is_outdated or (bell is not None and bell.is_lost)

    def note_file(self, file: str) -> None:
        """Mark this watcher as outdated if it watches the log, and the log is continued in the new file `file`."""
        if self.bell is None and self._events is not None and file != self._log_path:
            self.is_outdated = True

    def close(self) -> None:
        """Close the descriptors. Waiters that still wait continue by polling."""
        self.is_closed = True
        bell, self.bell = self.bell, None
        events, self._events, self.has_events = self._events, None, False
        election, self.election = self.election, None
        if election is not None:
            election.close()
        if events is not None:
            self.backend.release(events)
        if bell is not None:
            bell.close()

    def after_fork(self) -> None:
        """Close the descriptors in a forked child, because they report events to the parent."""
        self.is_closed = True
        bell, self.bell = self.bell, None
        events, self._events, self.has_events = self._events, None, False
        self.election = None  # the child has left the election already
        if events is not None:
            events.close()
        if bell is not None:
            bell.close()

    def watch_process(self, pid: int) -> bool:
        """Watch process `pid`: its death then ends the sleep of each waiter that watches for deaths.

        Return False if the source of events can't report the death.
        """
        events = self._events
        is_watched = events is not None and events.is_pollable and bool(events.watch_process(pid))
        if is_watched and self._is_loop_driven:
            self._subscribe_loop(events)
        return is_watched

    def watches(self, pid: int) -> bool:
        """Return whether process `pid` is still watched, so that its death ends sleeps."""
        events = self._events
        return events is not None and events.is_pollable and pid in events.processes

    def fall_back_to_polling(self, error: OSError) -> None:
        """Poll from now on, because the bell failed with `error`."""
        bell, self.bell, self._events, self.has_events = self.bell, None, None, False
        election, self.election = self.election, None
        if election is not None:
            election.close()
        if bell is not None:
            logger(__name__).warning("%s can't be used (%s); waits continue by polling", bell.path, str(error))

    # -- sleeping --------------------------------------------------------------------------------------------------

    def end_sleep(self, sleeper: Waiter) -> None:
        """Remove `sleeper` from the waiters that a ring wakes, and wake another waiter, which reads the events next."""
        self._sleeping.discard(sleeper)
        if self._sleeping:
            self._pass_reader_role()

    def block(self, sleeper: Waiter, seconds: float) -> None:
        """Sleep in this thread until `sleeper` is woken, or for `seconds`. Read the events if no other thread does."""
        events = self._events
        if events is not None and events.is_pollable and not self._is_loop_driven:
            try:
                if self._reader_mutex.acquire(blocking=False):
                    # The previous reader may have read the event for this sleeper before the mutex was taken. Without
                    # this check, the sleeper would sleep until its next poll. If no event was read, `is_rung` need not
                    # be called: everything else that ends a sleep also interrupts `events.wait`.
                    is_unread = sleeper.event_count == self.event_count
                    if (is_unread or not sleeper.is_rung()) and events.wait(seconds):
                        if events.processes or len(self._sleeping) > 1:
                            self._dispatch(events, sleeper)
                        else:
                            self.event_count += 1  # as in `_dispatch`, without a call
                    return
            except BaseException as error:
                # A signal handler has raised, perhaps after an event was read. Count the event, so that the next thread
                # that reads events checks its own cell of the bell.
                self.event_count += 1
                if not isinstance(error, OSError):
                    raise
                raise_if_foreign(error)
                sleeper.fail(error)
                return
            finally:
                try:
                    self._reader_mutex.release()
                except RuntimeError as error:  # another thread holds it
                    raise_if_foreign(error, type(self._reader_mutex).__module__)
        # The thread that reads the events wakes this thread, also when it stops reading.
        waker: Any = sleeper.waker
        waker.wait(seconds)

    def _dispatch(self, events: Any, reader: Waiter | None = None) -> None:
        """Wake the sleepers whose keys were written, after an event. The sleeper `reader` is awake already."""
        self.event_count += 1
        if events.processes:
            self.deaths += events.reap_exited()
        for other in list(self._sleeping):
            if other is not reader and other.is_rung():
                other.waker.set()

    def _pass_reader_role(self) -> None:
        """Wake one sleeper that was not woken yet. It then reads the events, because no other thread does."""
        for other in list(self._sleeping):
            if other.waker.set():
                break

    def _on_event(self) -> None:
        """Wake all sleepers. Called by an event source that has a thread of its own and does not report keys."""
        self.event_count += 1
        for sleeper in list(self._sleeping):
            sleeper.waker.set()

    def _on_vacancy(self) -> None:
        """Make every sleeper check whether it has become the poller of the node."""
        for sleeper in list(self._sleeping):
            sleeper.role_changed = True
        self.wake_all()

    def wake_all(self) -> None:
        """Make every sleeper check whether its sleep is over."""
        events = self._events
        for sleeper in list(self._sleeping):
            sleeper.waker.set()
        if events is not None and events.is_pollable:
            events.interrupt()


_watchers: weakref.WeakValueDictionary[tuple[LogKey, str, WaitBackend], ChangeWatcher] = weakref.WeakValueDictionary()
_guard = [system.recursive_mutex()]  # guards insertion into `_watchers`
_instances: weakref.WeakSet[ChangeWatcher] = weakref.WeakSet()
"""All watchers, for `after_fork` in a child. A watcher is added before it opens files, because a signal handler may
fork the process at any moment."""


def shared_watcher(key: LogKey, kind: str, backend: WaitBackend, make: Callable[[], ChangeWatcher]) -> ChangeWatcher:
    """Return the watcher that the waits of `backend` in this process share on the log `key`.

    If there is no such watcher, or it is stale, `make` creates one. `kind` distinguishes watchers that detect changes
    in different ways.
    """
    watcher = _watchers.get((key, kind, backend))
    if watcher is not None and not watcher.is_stale:
        return watcher
    made = make()  # not under the guard, because it opens files and may block
    with _guard[0]:
        watcher = _watchers.get((key, kind, backend))
        if watcher is None or watcher.is_stale:
            watcher = _watchers[key, kind, backend] = made
    if watcher is not made:
        made.close()
    return watcher


def _after_fork_in_child() -> None:
    _guard[0] = system.recursive_mutex()
    for watcher in list(_instances):
        watcher.after_fork()
    _watchers.clear()


system.after_fork_in_child("watchers", _after_fork_in_child)
