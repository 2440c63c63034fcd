"""`Extent`: consecutive bytes of a log that a handle has read or written. The processes of a node share an extent.

On a mount that several hosts share, each read is a request to the server. The last arrival at a barrier wakes all ranks
of a node (a host), and each of them would read the same records from the server. Instead, a process wakes the waiters
of its node through a small file, the bell. Before the wake-up, the process copies the bytes that it has read or written
last into the bell. A waiter that wakes applies the records in these bytes.

The extent in the bell may be old, torn or lost:

- Two processes may write the extent at once. A checksum shows whether the extent is complete.
- Its bytes are bytes of the log's file, and belong to complete records. So a waiter that applies them has the state
  that a read from the server would have given at some moment since its last read.
- An extent may prove that a key exists, but never that it does not exist. A waiter that does not find its key in the
  extent arms the bell again, and reads from the server before it sleeps (`stores.file.waits.FileWait`).

The bell is in a directory that is private to the user, so only processes of this user on this host write the extent.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from fscoord._log.wakeup.doorbell import CELLS_END, SIZE, Doorbell
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign

EXTENT_MAX: Final = 60 << 10
"""The largest size of an extent, in bytes: enough for the arrivals of about 1,200 ranks at a barrier. One read of the
log returns more (`cursor.CHUNK`)."""

FileId = tuple[int, int, int]
"""Identifies a file of a log: (device, inode number, generation). A later file may get the same inode number."""


class Extent(NamedTuple):
    """Consecutive bytes of one file that belong to complete records. Such bytes never change.

    Attributes:
        file: the file.
        start: the offset of the first byte. It may be in the middle of a record.
        data: the bytes. They end with the end of a record.
    """

    file: FileId
    start: int
    data: bytes

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.start + len(self.data)


def joined(last: Extent | None, new: Extent) -> Extent:
    """Return the last `EXTENT_MAX` bytes of `last` and `new` together. Ignore `last` if `new` does not continue it."""
    file, start, data = new
    if last is not None and last.file == file and last.end == start:
        start, data = last.start, last.data + data
    more = max(0, len(data) - EXTENT_MAX)
    return Extent(file, start + more, data[more:])


EXTENT_OFFSET: Final = CELLS_END + 3 * SIZE
"""The offset of the extent in the bell file. The extent follows the two tables of `node_poller.NodeProbes`."""

_HEAD = Struct("<IIQQQQ")
"""The header of an extent in the bell: the checksum of all bytes after the checksum, the size of the data, the device,
the inode number and the generation of the file, and the offset of the data in the file."""


def publish(bell: Doorbell, extent: Extent) -> None:
    """Write `extent` into the bell, unless the bell has an extent of the same file that ends at `extent.end` or later.

    Errors are ignored, because a waiter that finds no extent reads from the server.
    """
    with ignoring(OSError):
        seen = system.os.pread(bell.fd, _HEAD.size, EXTENT_OFFSET)
        if len(seen) == _HEAD.size:
            _, size, device, inode, generation, start = _HEAD.unpack(seen)
            if (device, inode, generation) == extent.file and start + size >= extent.end:
                return
        body = _HEAD.pack(0, len(extent.data), *extent.file, extent.start)[4:] + extent.data
        system.os.pwrite(bell.fd, crc32(body).to_bytes(4, "little") + body, EXTENT_OFFSET)


def read(bell: Doorbell) -> Extent | None:
    """Return the extent in the bell; None if the bell has no complete extent, or can't be read."""
    try:
        found = system.os.pread(bell.fd, _HEAD.size + EXTENT_MAX, EXTENT_OFFSET)
    except OSError as error:  # `fall_back_to_polling` closes a bell that fails
        raise_if_foreign(error)
        return None
    if len(found) <= _HEAD.size:
        return None
    checksum, size, device, inode, generation, start = _HEAD.unpack_from(found)
    end = _HEAD.size + size
    if end > len(found) or crc32(found[4:end]) != checksum:
        return None
    return Extent((device, inode, generation), start, found[_HEAD.size : end])
