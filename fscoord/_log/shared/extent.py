"""`Extent`: consecutive bytes of a log, as a handle has read or written them, and the shared extent of a node.

On a mount that several hosts share, each read is a request to the server. The last arrival at a barrier wakes all
ranks of a node, and each of them would read the same records from the server. Instead the process that rings first
copies the bytes that it has read and written last into the node's bell. A waiter that is rung continues from there.

The extent may be old, torn or lost, like everything in a bell:

- The checksum shows whether the extent is complete. Two processes may write at once.
- Every byte is a byte of the file, and belongs to a complete record that counts. So a waiter that continues from an
  extent is where it would be after a read of the server at some moment between its last read and now.
- An extent proves that a record exists, never that it does not. A waiter that does not find its key in the extent arms
  the bell again, and reads from the server before it sleeps (`stores.file.waits.FileWait`).

The bell lies in a directory that is private to the user, so only processes of this user on this host write the extent.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from fscoord._log.wakeup.doorbell import CELLS_END, SIZE, Doorbell
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign

EXTENT_MAX: Final = 60 << 10
"""The most bytes that are kept. It is less than one read (`cursor.CHUNK`). They hold the arrivals of some 1,200
ranks."""

FileId = tuple[int, int, int]
"""One file of a log: its device, its inode number, and its generation, because a later file may get the same inode."""


class Extent(NamedTuple):
    """Bytes of one file. They belong to complete records that count, so they never change.

    Attributes:
        file: the file.
        start: the offset of the first byte, which may lie within a record.
        data: the bytes. The last one is the end of a record.
    """

    file: FileId
    start: int
    data: bytes

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.start + len(self.data)


def joined(last: Extent | None, new: Extent) -> Extent:
    """Return the last `EXTENT_MAX` bytes of `last` and `new`; those of `new` alone, if there is a gap between them."""
    file, start, data = new
    if last is not None and last.file == file and last.end == start:
        start, data = last.start, last.data + data
    more = max(0, len(data) - EXTENT_MAX)
    return Extent(file, start + more, data[more:])


EXTENT_OFFSET: Final = CELLS_END + 3 * SIZE
"""The offset of the extent in the bell: it comes after the two tables of `node_poller.NodeProbes`."""

_HEAD = Struct("<IIQQQQ")
"""The checksum of the rest; the number of bytes; device, inode number and generation of the file; the offset in it."""


def publish(bell: Doorbell, extent: Extent) -> None:
    """Make `extent` the shared extent of the node, unless the present extent goes further.

    Errors are dropped. The disk of the bell may be full, and a ring does not need the extent.
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
    """Return the shared extent of the node; None if there is none, or if it is not complete."""
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
