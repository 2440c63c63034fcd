"""`open_log_file`: open a log with the coherence mode that its mount needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fscoord._log.files.opening import LogOptions
from fscoord._log.format.control_records import Session
from fscoord._log.locking.log_lock import KIND_NAMES
from fscoord._log.log import Log
from fscoord._log.mount import DIRECT, LOCAL, LOCKED, find_mount
from fscoord._log.shared.hang_watchdog import KernelCall
from fscoord._log.state_machine import StateMachine
from fscoord._runtime.logging import logger
from fscoord.errors import UnsupportedFilesystemError


def open_log_file(path: str, machine: StateMachine, options: LogOptions, introduce: Callable[[], Session]) -> Log:
    """Return a handle on the log at `path`. If ``options.coherence`` is None, the default of the mount is used.

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
    if options.coherence is None and mount.is_lustre and options.is_soft:
        coherence = LOCKED  # "direct" would also append past the cache, which was never tried on Lustre
    kind = Log if coherence == LOCAL else WatchedLog
    return kind(path, machine, options._replace(coherence=coherence), introduce, mount)


HANG_ON_LUSTRE: Final = (
    "The likely cause on Lustre: a host that has vanished holds its locks until the server evicts it (101 to 378 s with"
    " a timeout of 100 s). Find the host that does not answer; an administrator can evict it on the servers at once:"
    " lctl set_param mdt.*.evict_client=UUID obdfilter.*.evict_client=UUID."
)


class WatchedLog(Log):
    """A `Log` that several hosts share. A warning is logged if the file server does not answer during an operation."""

    def __init__(self, path: str, *arguments: Any) -> None:
        super().__init__(path, *arguments)
        self._call = KernelCall(path, HANG_ON_LUSTRE) if self.mount.is_lustre else KernelCall(path)

    def refresh(self, *arguments: Any, **named: Any) -> Any:
        with self._call:
            return super().refresh(*arguments, **named)

    def update(self, *arguments: Any, **named: Any) -> Any:
        with self._call:
            return super().update(*arguments, **named)

    def _wait_for_lock(self, *arguments: Any) -> None:
        self._call.end()  # the wait below has a deadline, so it can't hang
        super()._wait_for_lock(*arguments)
        self._call.begin()

    def close(self) -> None:
        super().close()
        self._call.close()
