"""How a log that several hosts share is followed and written under a marker file, which no kernel knows to be a lock.

The NFS client makes its caches valid when it is given a lock. Under a marker nothing does: an append through the cache
may begin in a page that the host has read long ago, and be sent with all of it. So the client of one host wrote zeros
over what the other had written and been told to be safe, in 4 of 4 runs on Linux 6.1. Hence nothing of the log goes
through the cache there. NFS refuses O_DIRECT together with O_APPEND (fs/nfs/file.c, ``nfs_check_flags``), so the writer
asks the server for the end of the file, which nobody moves while the marker is there, and writes at it.
"""

from __future__ import annotations

from collections.abc import Callable

from fscoord._log.access.mount import DIRECT, LOCAL, LOCKED, find_mount
from fscoord._log.access.network import SharedLogFile
from fscoord._log.consumer import Consumer
from fscoord._log.format.control_records import Session
from fscoord._log.io.cursor import APPLYING
from fscoord._log.io.opening import LogOptions
from fscoord._log.locking.log_lock import KIND_NAMES
from fscoord._log.log import LogFile
from fscoord._runtime import system
from fscoord._runtime.logger import logger
from fscoord.errors import CorruptLogError, StoreUnavailableError, UnsupportedFilesystemError

__all__ = ["MarkedLogFile", "open_log_file"]


def open_log_file(
    path: str, consumer: Consumer, wanted: LogOptions, introduce: Callable[[], Session], participants: int = 0
) -> LogFile:
    """Return a handle on the log at `path` that reads in the way of its mount, or as `wanted` says.

    Raises:
        UnsupportedFilesystemError: locks lie there; the text says why, and what to do.
    """
    mount = find_mount(path)
    objection = mount.objection(KIND_NAMES[wanted.lock_kind], wanted.coherence)
    if objection is not None:
        raise UnsupportedFilesystemError(
            f"{path} is on {mount.kind} at {mount.point}: {objection.reason}; {objection.remedy}", path=path
        )
    if mount.caution:
        logger(__name__).warning("%s is on %s: %s", path, mount.kind, mount.caution)
    coherence = wanted.coherence or mount.coherence
    if coherence == LOCAL:
        return LogFile(path, consumer, wanted, introduce, participants, mount)
    if coherence == LOCKED and mount.is_nfs and wanted.is_soft:
        coherence = DIRECT  # there is no lock to read under
    kind = MarkedLogFile if wanted.is_soft and coherence == DIRECT else SharedLogFile
    return kind(path, consumer, wanted, introduce, participants, mount, coherence)


class MarkedLogFile(SharedLogFile):
    """A `SharedLogFile` that reads and writes past the cache, as long as its ``coherence`` is ``"direct"``."""

    def _choose(self, coherence: str) -> None:
        super()._choose(coherence)
        if coherence == DIRECT:
            self._write_flags = system.os.O_WRONLY | system.O_DIRECT

    def _refuses_direct(self, error: OSError) -> bool:
        return not self.mount.is_nfs and super()._refuses_direct(error)

    def _reopen_writer(self) -> None:
        if self.coherence != DIRECT:
            super()._reopen_writer()

    def _is_caught_up(self, *, final: bool) -> bool:
        """As for any shared log; the writer then stands at the end of the file, which is where what was read ends."""
        if self.coherence != DIRECT or self.read_only:
            return super()._is_caught_up(final=final)
        lock = self._lock
        try:
            self._read_on(locked=True)
        except CorruptLogError:
            if final or self._trouble & APPLYING:
                self._check_identity()
                raise
            return False
        if lock is not self._lock:
            return True  # the log goes on in another file
        end = system.os.lseek(lock.fd, 0, system.os.SEEK_END)  # with O_DIRECT that asks the server
        if system.os.fstat(lock.fd).st_nlink == 0:
            raise self._unnamed()
        if self._torn or self._pending or end == self._offset:
            return True
        if not final:
            return False
        self._check_identity()
        if end < self._offset:
            raise self._gone(f"was truncated to {end} bytes, and {self._offset} were read")
        raise StoreUnavailableError(
            f"{self.path}: it grew to {end} bytes under the lock, whose marker this process has made; somebody writes"
            f" whose marker was removed: end all processes that use the log, then remove {self.path}.lock",
            path=self.path,
        )

    def _write(self, data: bytes) -> None:
        if self.coherence == DIRECT and (self._torn or self._pending):  # the file was made longer, for a VOID
            system.os.lseek(self._lock.fd, 0, system.os.SEEK_END)
        super()._write(data)
