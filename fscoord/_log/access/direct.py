"""How a log that several hosts share is followed and written under a marker file, which no kernel knows to be a lock.

The NFS client makes its caches valid when it is given a lock. Under a marker nothing does: an append through the cache
may begin in a page that the host has read long ago, and be sent with all of it. So the client of one host wrote zeros
over acknowledged records of the other, in 4 of 4 runs on Linux 6.1. Hence nothing of the log goes through the cache
there. NFS refuses O_DIRECT together with O_APPEND (fs/nfs/file.c, ``nfs_check_flags``), so the writer asks the server
for the end of the file, which no other process moves while the marker is there, and writes at it.
"""

from __future__ import annotations

from fscoord._log.access.mount import DIRECT
from fscoord._log.access.network import NetworkAccess
from fscoord._log.recovery import APPLYING
from fscoord._runtime import system
from fscoord.errors import CorruptLogError, StoreUnavailableError

__all__ = ["SymlinkLockAccess"]


class SymlinkLockAccess(NetworkAccess):
    """A `NetworkAccess` that reads and writes past the cache, as long as its ``coherence`` is ``"direct"``."""

    def _set_mode(self, coherence: str) -> None:
        super()._set_mode(coherence)
        if coherence == DIRECT:
            self._handle.write_flags = system.os.O_WRONLY | system.O_DIRECT

    def _refuses_direct(self, error: OSError) -> bool:
        return not self._mount.is_nfs and super()._refuses_direct(error)

    def _reopen_writer(self) -> None:
        if self.coherence != DIRECT:
            super()._reopen_writer()

    def _is_caught_up(self, *, final: bool) -> bool:
        """As for any shared log; the writer is then at the end of the file, which is where the records end."""
        handle = self._handle
        if self.coherence != DIRECT or handle.read_only:
            return super()._is_caught_up(final=final)
        try:
            if self._read_on(locked=True):
                return True
        except CorruptLogError:
            if final or handle.recovery & APPLYING:
                self._check_identity()
                raise
            return False
        end = system.os.lseek(handle.lock.fd, 0, system.os.SEEK_END)  # with O_DIRECT that asks the server
        if system.os.fstat(handle.lock.fd).st_nlink == 0:
            raise handle.unlinked()
        if handle.is_torn or handle.pending or end == handle.offset:
            return True
        if not final:
            return False
        self._check_identity()
        if end < handle.offset:
            raise handle.gone(f"was truncated to {end} bytes, and {handle.offset} were read")
        raise StoreUnavailableError(
            f"{handle.path}: it grew to {end} bytes under the lock, whose marker this process has made; somebody writes"
            f" whose marker was removed: end all processes that use the log, then remove {handle.path}.lock",
            path=handle.path,
        )

    def write(self, data: bytes) -> None:
        """See `Access.write`."""
        handle = self._handle
        if self.coherence == DIRECT and (handle.is_torn or handle.pending):  # the file was made longer, for a void
            system.os.lseek(handle.lock.fd, 0, system.os.SEEK_END)
        super().write(data)
