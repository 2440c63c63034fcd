"""`Extent`: consecutive bytes of one file of a log. `joined` keeps the last ones that a handle has read or written."""

from __future__ import annotations

from typing import Final, NamedTuple

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
