"""`open_log_file`: choose the access to a log by its mount, and open the log."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from fscoord._log.files.opening import LogOptions
from fscoord._log.format.control_records import Session
from fscoord._log.handle import NeedsLock
from fscoord._log.locking.log_lock import KIND_NAMES
from fscoord._log.log import Decide, Log
from fscoord._log.mount import DIRECT, LOCAL, LOCKED, find_mount
from fscoord._log.recovery import POSITION
from fscoord._log.shared.extent import Extent
from fscoord._log.shared.hang_watchdog import KernelCall
from fscoord._log.shared.network import NetworkAccess
from fscoord._log.state_machine import StateMachine
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError, UnsupportedFilesystemError


def open_log_file(path: str, machine: StateMachine, options: LogOptions, introduce: Callable[[], Session]) -> Log:
    """Return a handle on the log at `path`, with the coherence of `options` or else the default of the mount.

    Raises:
        UnsupportedFilesystemError: locks are not reliable on the mount; the message says why, and what to do.
    """
    mount = find_mount(path)
    kind_of_lock = KIND_NAMES[options.lock_kind]
    objection = mount.objection(kind_of_lock, options.coherence, trusts_locks=options.trust_locks)
    if objection is not None:
        raise UnsupportedFilesystemError(
            f"{path} is on {mount.kind} at {mount.point}: {objection.reason}; {objection.remedy}", path=path
        )
    if mount.caution:
        logger(__name__).warning("%s is on %s: %s", path, mount.kind, mount.caution)
    coherence = options.coherence or mount.coherence
    if coherence == LOCKED and mount.is_nfs and options.is_soft:
        coherence = DIRECT  # the kernel does not see a soft lock, so a soft lock does not make its caches valid
    kind = Log if coherence == LOCAL else WatchedLog
    return kind(path, machine, options._replace(coherence=coherence), introduce, mount)


class WatchedLog(Log):
    """A `Log` that hosts share.

    `hang_watchdog` logs a warning if the file server does not answer during an operation. The log also collects the
    keys in the records that it reads, because no event of this host's file system reports the writes of other hosts.
    """

    def __init__(self, path: str, *arguments: Any) -> None:
        super().__init__(path, *arguments)
        self._call = KernelCall(path)

    def refresh(self, limit: float, answer: Callable[[], Any] | None = None) -> Any:
        with self._call:
            return super().refresh(limit, answer)

    def update(
        self,
        kind: int,
        key: bytes,
        value: Any,
        decide: Decide | None,
        limit: float,
        appended: Callable[[], None] | None = None,
    ) -> Any:
        with self._call:
            return super().update(kind, key, value, decide, limit, appended)

    def _wait_for_lock(
        self, attempt: int, started: float, limit: float, show_life: Callable[[], None] | None = None
    ) -> None:
        self._call.end()  # the wait below has a deadline, so it can't hang
        super()._wait_for_lock(attempt, started, limit, show_life)
        self._call.begin()

    def close(self) -> None:
        super().close()
        self._call.close()

    def read_extent(self, extent: Extent) -> bool:
        """Apply the records in `extent`, which another process of the host has read.

        Errors are dropped, because the next `refresh` raises them again.

        Returns:
            Whether there were any records. If not, only `refresh` can tell whether the log has new records.
        """
        handle, access = self.handle, self.access
        if not system.fork_marker[0] or not isinstance(access, NetworkAccess):
            return False
        with handle.mutex:
            if handle.shared.is_inside or handle.recovery:
                return False
            try:
                handle.shared.is_inside = True
                handle.recovery = POSITION  # as in `refresh`
                is_sealed = access.read_extent(extent)
                if is_sealed:
                    self.follower.follow()
                handle.recovery = 0
                return is_sealed is not None
            except (OSError, FscoordError, NeedsLock) as error:
                raise_if_foreign(error)
                return False
            finally:
                handle.shared.is_inside = False

    def recent_extent(self) -> Extent | None:
        """Return the bytes that this handle has read or written last, or None."""
        return self.access.recent if isinstance(self.access, NetworkAccess) else None

    def take_changed_keys(self) -> Collection[int]:
        """Return the buckets (see `doorbell`) of all keys in records that were read or written since the last call."""
        assert self.changed_keys is not None, "a log that hosts share collects them"
        return self.changed_keys.take()
