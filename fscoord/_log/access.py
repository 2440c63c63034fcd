"""`Access`: reads and writes the bytes of a log. `LocalAccess`: the same, if only this host mounts the file system."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from fscoord._log.files import safe_files
from fscoord._log.handle import GenerationUnlinked, HandleState
from fscoord._log.liveness.own_session import CHECK_S, Liveness
from fscoord._log.mount import Mount
from fscoord._log.replay.cursor import CHUNK, Cursor
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import StoreUnavailableError

_NOT_APPLIED: Final = frozenset(
    getattr(system.errno, name, -1) for name in ("ENOSPC", "EDQUOT", "EROFS", "EFBIG", "EBADF")
)
"""The errors of write(2) after which the record is certainly incomplete. An incomplete record has no effect."""


class FileAppender:
    """Appends bytes to the log of one handle. The caller holds the log's lock. The descriptor is open with O_APPEND."""

    def __init__(self, handle: HandleState) -> None:
        self._handle = handle
        self._is_directory_synced = False

    def write(self, data: bytes) -> None:
        """Write `data` at the end of the log, and sync it if the log is durable.

        Raises:
            StoreUnavailableError: the write or the sync failed; ``maybe_applied`` is true if all of `data` may have
                been written.
        """
        handle = self._handle
        try:
            written = system.os.write(handle.lock.fd, data)
            if written != len(data):
                safe_files.write_all(handle.lock.fd, data[written:])
        except OSError as error:
            raise_if_foreign(error)
            applied = error.errno not in _NOT_APPLIED
            raise safe_files.unavailable(error, handle.path, "appending to the log", maybe_applied=applied) from error
        if handle.header.durable:
            self._sync(handle.lock.fd)

    def _sync(self, fd: int) -> None:
        """Sync the file, and the first time also its directory, so that the record survives a power failure.

        A failed sync ends the handle and is not retried. The kernel may have dropped the pages that it could not write,
        and then a second sync would succeed without writing them.
        """
        handle = self._handle
        try:
            system.sync_data(fd)
            if not self._is_directory_synced:
                safe_files.sync_directory(handle.path, handle.owned_fds)
                self._is_directory_synced = True
        except OSError as error:
            raise_if_foreign(error)
            handle.finish(StoreUnavailableError, "could not be synced, so writes may be lost; open the store again")
            raise safe_files.unavailable(error, handle.path, "syncing the log", maybe_applied=True) from error


PATH_CHECK_S: Final = 0.05
"""The shortest time between two checks that the log's path leads to the open file, in seconds. Only a read checks the
path."""


class Access(Protocol):
    """Reads and writes the bytes of a log on one kind of mount. The caller holds the process mutex.

    The methods with a body are for a local file system. These methods treat every error of the file system as final.
    """

    @property
    def before_lock(self) -> Callable[[], None] | None:
        """The function to call before each attempt to lock, for checks that need no lock; None: there are no checks."""
        return None

    def open(self, call: Callable[[], None]) -> None:
        """Open the log by calling `call`. Repeat the call after an error that is temporary on this kind of mount."""
        call()

    def reopened(self) -> None:
        """Record that the handle has opened new descriptors of the same generation."""
        return

    def read(self, locked: bool = False) -> bool:
        """Apply the records that were not read yet. Return whether the last record was a seal, which ends a generation.

        Args:
            locked: whether the caller holds the log's lock. Under the lock, every record up to the end of the file is
                applied. Without the lock, only the records that are complete by now are applied.

        Raises:
            NeedsLock: the next bytes are damaged, or belong to a record that a writer is still writing. A read without
                the lock can't distinguish the two cases.
            OSError: a system call failed.
        """

    def write(self, data: bytes) -> None:
        """Write `data` at the end of the file. The caller holds the log's lock and has read to the end."""

    def retries_read(self, error: OSError) -> bool:  # noqa: ARG002 - no error is temporary
        """Return whether to read again, under the lock, after `read` raised `error`."""
        return False

    def retries_transaction(self, error: OSError, *, maybe_applied: bool) -> bool:  # noqa: ARG002 - likewise
        """Return whether to begin the transaction again after `error` has ended it.

        `maybe_applied` is true if the transaction's record may have been written.

        Raises:
            StoreUnavailableError: the transaction must not be repeated, or was repeated too often.
        """
        return False

    def retries_recovery(self, error: StoreUnavailableError) -> bool:  # noqa: ARG002 - likewise
        """Return whether to begin the transaction again after its first step, the recovery, has raised `error`."""
        return False


class LocalAccess(FileAppender, Access):
    """An `Access` that reads and writes a log through the page cache of this host. A read needs no lock."""

    def __init__(self, handle: HandleState, cursor: Cursor, liveness: Liveness, mount: Mount) -> None:
        super().__init__(handle)
        self._cursor = cursor
        handle.short_read_is_end = mount.reads_to_end
        self._liveness = liveness

    def read(self, locked: bool = False) -> bool:
        handle = self._handle
        if system.time.monotonic() - handle.path_checked_at > PATH_CHECK_S:
            self._cursor.check_descriptors()
            is_at_seal = self._cursor.advance(system.os.read(handle.reader_fd, CHUNK), locked=locked)
            if not is_at_seal:
                self._check_path()
            return is_at_seal
        data = system.os.read(handle.reader_fd, CHUNK)
        if data:
            return self._cursor.advance(data, locked=locked)
        return False

    def _check_path(self) -> None:
        """Check that the log's path still leads to its file, and that the file was neither truncated nor unlinked."""
        handle, now = self._handle, system.time.monotonic()
        found = system.os.fstat(handle.reader_fd)
        if found.st_size < handle.offset:
            raise handle.gone(f"was truncated to {found.st_size} bytes, after {handle.offset} bytes had been read")
        try:
            named = system.os.stat(handle.path, follow_symlinks=False)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            raise handle.gone("was deleted") from None
        except PermissionError as error:  # the directory's mode or the user has changed; open descriptors still work
            raise_if_foreign(error)
            named = found if handle.root_fd < 0 else system.os.fstat(handle.root_fd)
        is_root = handle.root_fd < 0
        if (named.st_dev, named.st_ino) != handle.root.identity or (is_root and found.st_nlink == 0):
            raise handle.gone("was replaced by another file")
        if found.st_nlink == 0:  # deleted by a user, or superseded; then the next record is a seal
            raise GenerationUnlinked
        handle.path_checked_at = now
        session = handle.lock.session
        if session and session not in handle.table.sessions:  # it is dead, and a snapshot left it out
            raise handle.session_is_dead(session)
        if now - self._liveness.checked_at > CHECK_S:
            self._liveness.check_byte(now)
