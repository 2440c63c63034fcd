"""`ChangeNotifier` wakes the waits of a `~fscoord.FileStore` handle. When the handle writes, it wakes other waits.

The *bell* is a small file through which a writer wakes waiters. To *ring* the bell is to wake the waiters of a key. To
*announce* the bell is to append a record to the log which says that there is a bell to ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final
from zlib import crc32

from fscoord._log.files.opening import LogOptions
from fscoord._log.format import record
from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._log.log import Log
from fscoord._log.recovery import CLOSED
from fscoord._log.shared import extent as shared_extent
from fscoord._log.shared.node_poller import PollerElection, node_path
from fscoord._log.shared.node_waiter import NodeWaiter
from fscoord._log.wakeup.doorbell import CELL, LAST_BUCKET, Doorbell, session_end_bucket
from fscoord._log.wakeup.watcher import ChangeWatcher, Waiter, shared_watcher
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord._waiting.wait import THREAD_BACKEND, WaitBackend
from fscoord.errors import FscoordError, StoreTimeoutError, StoreUnavailableError
from fscoord.stores.file.wait_slots import WaitSlots

BELL_SUFFIX: Final = ".bell"

ANNOUNCE_S: Final = 0.1
"""How long the announcement of the bell, a record in the log, may wait for the log's lock, in seconds. This wait delays
the waiter's next read of the log."""


class ChangeNotifier:
    """Wakes the waits of one handle. When the handle writes, it rings the bell for the waits of all handles.

    The first waiter announces the bell. Writers of a log without an announcement need not check for a bell. If no bell
    can be used, the log itself is watched or polled. In all cases a slow poll limits the delay after a lost ring.

    Args:
        log: the log of the handle. If the notifier watches every key, the log is its own, and `close` closes it.
        wanted: the options with which the log was opened.
        mode: the mode of the watcher; see `ChangeWatcher`.
        backend: the backend of the waits. It is also an attribute.
        watches_every_key: whether the waits end at a change of any key. If so, the log itself is watched, because a
            bell only reports changes of given keys.

    Attributes:
        add_waiter: adds a waiter to the set of waiters that `close` wakes. It is a fast C function.
        discard_waiter: removes a waiter from this set. It is a fast C function.
        passes_on_changes: whether `after_look` rings the bell for the changes that a wait has read.
    """

    slots: WaitSlots | None = None
    """The object that shows the handle's long waits to other processes; None: long waits are not shown."""

    def __init__(
        self,
        log: Log,
        wanted: LogOptions,
        mode: str,
        backend: WaitBackend = THREAD_BACKEND,
        *,
        watches_every_key: bool = False,
    ) -> None:
        self._log = log
        self._wanted = wanted
        self._mode = mode
        self.backend = backend
        self._watches_every_key = watches_every_key
        self._bell: Doorbell | None = None
        self._announcements = 0
        self._watcher: ChangeWatcher | None = None
        self._waiters: set[Waiter] = set()
        self.add_waiter, self.discard_waiter = self._waiters.add, self._waiters.discard
        self._spare: dict[int, Waiter] = {}
        """At most one reusable waiter, under the key 0. `dict.pop` is atomic, so only one thread gets the waiter."""
        self._warned = self._is_closed = False
        # On a mount of several hosts, one waiter of each host, the poller, rings for the changes that it reads. A wait
        # for any change does not take the list of changed keys, because another wait of the handle may be the poller.
        self._shared = None if watches_every_key else log.shared
        self.passes_on_changes = self._shared is not None

    def open_bell(self) -> Doorbell | None:
        """Open and return the bell that was announced last. Return None if none was announced, or after an error."""
        bell, count = self._bell, self._log.handle.bell
        if self._announcements != count or (bell is not None and bell.fd < 0):
            bell = self._bell = self._find_or_warn()
            # Set this only when the bell is open. Otherwise another thread that writes meanwhile would find no bell.
            self._announcements = count
        return bell

    def notify(self, names: Iterable[bytes]) -> None:
        """Wake the waiters of the keys `names`, which this handle has just written."""
        bell = self._bell
        if bell is None or bell.fd < 0 or self._announcements != self._log.handle.bell:  # else without a call
            bell = self.open_bell()
        if bell is not None:
            try:
                if self.passes_on_changes:
                    self._ring_node(bell, names)
                    return
                bell.ring(*map(LAST_BUCKET.__and__, map(crc32, names)))  # as `bucket`, without a call
            except OSError as error:
                raise_if_foreign(error)
                self._warn(error)
                self._bell = None

    def _ring_node(self, bell: Doorbell, names: Iterable[bytes]) -> None:
        """Ring the bell of this host for `names`.

        If there is a waiter, first publish the last bytes of the log in the bell (the shared extent), so that the
        waiter need not request them from the file server.
        """
        state = bell.read()
        armed = [number for number in {crc32(name) & LAST_BUCKET for name in names} if state[number * CELL] & 1]
        if armed:
            extent = None if self._shared is None else self._shared.access.recent
            if extent is not None:
                shared_extent.publish(bell, extent)
            bell.ring(*armed)

    # -- for one wait ----------------------------------------------------------------------------------------------

    def new_waiter(
        self,
        deadline: float,
        longest_sleep: Callable[[], float] | None = None,
        sessions: Sequence[int] = (),
        is_check_due: Callable[[], bool] | None = None,
    ) -> Waiter | None:
        """Return a waiter for one wait. Return None if the handle is closed, so that the next `look` raises an error.

        The wait must pass the waiter to `add_waiter` before it arms the waiter. At its end it must close the waiter,
        and pass it to `discard_waiter` and then to `keep_spare`.

        Args:
            deadline: the deadline of the wait, by the monotonic clock.
            longest_sleep: a function that returns the longest sleep, in seconds; None: the wait has no death watch.
            sessions: the sessions whose end also wakes the waiter.
            is_check_due: see `NodeWaiter`.
        """
        watcher = self._watcher
        if watcher is None or watcher.is_closed or watcher.is_outdated or not watcher.is_announced:
            if self._log.handle.recovery & CLOSED:  # a watcher would create the bell of a log that may be gone
                return None
            watcher = self._watch(deadline)
        spare = self.take_spare() if longest_sleep is None and not sessions else None
        if spare is not None and spare.watcher is watcher:
            return spare
        ends = list(map(session_end_bucket, sessions)) if sessions else ()
        election = watcher.election
        if isinstance(election, PollerElection):
            return NodeWaiter(watcher, election, longest_sleep, ends, is_check_due)
        return Waiter(watcher, longest_sleep, ends)

    def take_spare(self) -> Waiter | None:
        """Return the reusable waiter of an earlier wait, or None if a new waiter is needed."""
        watcher, spare = self._watcher, self._spare.pop(0, None)
        if spare is None or spare.watcher is not watcher or watcher.is_closed or not watcher.is_announced:
            return None
        return spare

    def stand_for_election(self, waiter: Waiter | None) -> None:
        """Call `NodeWaiter.stand_for_election` if `waiter` is a `NodeWaiter`."""
        if isinstance(waiter, NodeWaiter):
            waiter.stand_for_election()

    def read_shared_extent(self, waiter: Waiter | None) -> bool:
        """Read new records from the shared extent: the last bytes of the log, published by the process that has rung.

        Return whether the handle has read new records. The method sends no request to the file server. The log may have
        newer records than the extent, so the method can't show that a key is missing.
        """
        bell = None if waiter is None else waiter.watcher.bell
        extent = None if bell is None else shared_extent.read(bell)
        return extent is not None and self._shared is not None and self._shared.read_extent(extent)

    def after_look(self, waiter: Waiter) -> None:
        """Tell a watcher without a bell which file was read. If `waiter` is the poller, ring for the changed keys.

        The wait of `waiter` calls this method after each `look`.
        """
        watcher = waiter.watcher
        if watcher.bell is None:
            watcher.note_file(self._log.handle.file)
        if self._shared is not None:
            changed = self._shared.changed_keys.take()
            if isinstance(waiter, NodeWaiter):
                waiter.notify_node(changed, self._shared.access.recent)
                waiter.probe_for_node(self._undead, self._is_alive)

    def _undead(self) -> list[int]:
        return self._log.inspect(lambda: self._log.table.presumed_alive(None))

    def _is_alive(self, number: int) -> bool | None:
        return self._log.is_alive(number, ProcessIdentity.find())

    def remove_stale(self, waiter: Waiter) -> bool:
        """Close `waiter` if a new watcher could detect more changes. Return whether it was closed."""
        watcher = waiter.watcher
        if not watcher.is_stale and watcher.is_announced:
            return False
        self._watcher = None
        try:
            waiter.close()
        finally:
            self._waiters.discard(waiter)
        return True

    def keep_spare(self, waiter: Waiter) -> None:
        """Keep `waiter` for the next wait, if it is reusable. The caller must not use it any more."""
        if waiter.is_reusable and waiter.watcher is self._watcher:
            self._spare[0] = waiter
            if self._is_closed:  # another thread may have closed it just now; the waiter would keep the watcher open
                self._spare.clear()

    def close(self, session: int) -> None:
        """End the waits of the handle, and wake the waiters of other handles that watch `session`.

        The descriptors are closed when no other thread uses them any more.

        Args:
            session: the number of the handle's session; 0 if the handle had no session.
        """
        # Set first. Another thread may be creating a watcher at this moment. It removes the watcher if this is set.
        self._is_closed = True
        if session:
            self._ring_end(session)
        watcher, self._watcher, self._bell = self._watcher, None, None
        for waiter in list(self._waiters):
            waiter.is_over = True
        self._spare.clear()
        self._waiters.clear()  # a waiter remains in the set if a signal handler raised in the `close` of its wait
        if self._watches_every_key:
            self._log.close()
        if watcher is not None:
            watcher.wake_all()

    def _watch(self, deadline: float) -> ChangeWatcher:
        """Return the watcher. Create it if necessary, and try to announce its bell."""
        watcher = self._watcher
        if watcher is None or watcher.is_closed or watcher.is_outdated:
            kind = self._mode + " for all" * self._watches_every_key
            watcher = self._watcher = shared_watcher(self._log.handle.root.key, kind, self.backend, self._make_watcher)
            if self._is_closed:
                self._watcher = None  # the next look raises
        if not watcher.is_announced:
            self._announce(watcher, min(deadline - system.time.monotonic(), ANNOUNCE_S))
        return watcher

    def _make_watcher(self) -> ChangeWatcher:
        local, node = self._log.mount.is_local, self._uses_node_bell
        bell = None
        has_use = node or not (self._wanted.read_only or self._watches_every_key)
        if self._mode != "poll" and (node or local) and system.has_inotify() and has_use:
            bell = self._find_or_warn()
        elect = PollerElection if node else None
        return ChangeWatcher(self._log.handle.file, bell, self._mode, is_local=local, elect=elect, backend=self.backend)

    @property
    def _uses_node_bell(self) -> bool:
        """Whether this host has its own bell for the log, because several hosts share the log."""
        return self._shared is not None and not self._log.mount.is_local

    def _ring_end(self, session: int) -> None:
        """Ring the bell for the end of `session`, if there is a bell. Later waits find the end in the log."""
        try:
            bell = self._bell
            if bell is None or bell.is_lost:
                if self._uses_node_bell and not self._log.handle.bell:  # a search for the bell would create a directory
                    return
                bell = self._find_bell(create=False)
            bell.ring(session_end_bucket(session))
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            logger(__name__).debug(
                "%s: no waiter was woken at the end of session %d: %s", self._log.path, session, error
            )

    def bell_exists(self) -> bool:
        """Return whether a file exists at the path of the bell."""
        return system.os.path.lexists(self._log.path + BELL_SUFFIX)

    def _find_bell(self, *, create: bool) -> Doorbell:
        if self._uses_node_bell:
            return Doorbell(node_path(self._log.handle.root.key), 0o600, create=create)
        return Doorbell(self._log.path + BELL_SUFFIX, self._wanted.mode, create=create, like=self._log.path)

    def _find_or_warn(self) -> Doorbell | None:
        try:
            return self._find_bell(create=True)
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            self._warn(error)
            return None

    def _announce(self, watcher: ChangeWatcher, timeout: float) -> None:
        """Announce the bell by a record in the log, so that writers ring it.

        If the lock is not acquired within `timeout` seconds, the next slow poll tries again.
        """
        bell = watcher.bell

        def decide(_: bytes, __: bytes) -> tuple[None, int, bytes]:
            known = self._log.handle.bell and (
                self._uses_node_bell or watcher.is_announced or not (bell and bell.is_new)
            )
            return None, 0 if known else record.BELL, b""

        try:
            is_new = bell is not None and bell.is_new
            is_known = self._wanted.read_only or (self._log.handle.bell and (self._uses_node_bell or not is_new))
            if bell is not None and not is_known:
                self._log.update(record.BELL, b"", b"", decide, timeout)
            watcher.is_announced = True
        except StoreTimeoutError as error:
            logger(__name__).debug(
                "%s: the bell could not be announced, and the next poll tries again: %s", self._log.path, str(error)
            )
        except StoreUnavailableError as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger(__name__).warning(
                "%s%s can't be used (%s); waits continue, but may end later", self._log.path, BELL_SUFFIX, str(error)
            )
