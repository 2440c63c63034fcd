"""`LogCopy`: a new log that appears whole, with all its records, or not at all."""

from __future__ import annotations

from typing import Final

from fscoord._log.access.mount import find_mount
from fscoord._log.format import record
from fscoord._log.format.header import Header
from fscoord._log.format.record import Record
from fscoord._log.io import safe_files
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

__all__ = ["LogCopy"]

_BUFFER: Final = 1 << 20


class LogCopy:
    """A log that is being written: ``with LogCopy(path, header, mode) as copy``, then `add`, and `finish` at the end.

    Args:
        path: the path at which it appears.
        header: the header to begin with; a new lineage begins with this log.
        mode: the permissions of the file.
    """

    def __init__(self, path: str, header: Header, mode: int) -> None:
        self._path, self._mode = path, mode
        self._temporary, self._epoch = safe_files.temporary_name(path), system.process_epoch()
        self._opened = system.Descriptors()
        self._header = header
        self._parts, self._waiting = [b""], 0

    def __enter__(self) -> LogCopy:
        try:
            self._fd = safe_files.create_descriptor(self._temporary, self._mode, self._opened)
            inode = system.os.fstat(self._fd).st_ino if find_mount(self._path).inodes_last else 0
            header = self._header._replace(lineage=self._header.log_id, root_inode=inode, inode=inode)
            first = header.encode()
            _, self._waiting, self._chain = Header.decode(first)
            self._parts = [first]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        system.close_all(system.os.close, self._opened)
        safe_files.unlink_quietly(self._temporary, self._epoch)

    def add(self, found: Record) -> None:
        """Append a record with its own writer and time, chained to the record before it."""
        data, self._chain = record.encode(*found, self._chain)
        self._parts.append(data)
        self._waiting += len(data)
        if self._waiting >= _BUFFER:
            self._write()

    def finish(self) -> None:
        """Sync the file and publish it under its path.

        Raises:
            ValueError: a file exists at the path by now. It is not overwritten.
        """
        self._write()
        system.os.fsync(self._fd)
        try:
            safe_files.publish(self._temporary, self._path)
        except FileExistsError as error:
            raise_if_foreign(error)
            raise ValueError(
                f"{self._path} was created meanwhile, and nothing is overwritten; name another file"
            ) from None
        safe_files.sync_directory(self._path, set())

    def _write(self) -> None:
        safe_files.write_all(self._fd, b"".join(self._parts))
        self._parts, self._waiting = [], 0
