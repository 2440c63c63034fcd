"""`RecentBytes`: the last bytes that a handle has read from its log or appended to it, without a gap."""

from __future__ import annotations

from typing import Final, NamedTuple

RECENT_MAX: Final = 1 << 15
"""The most bytes that are kept. It is less than one read (`cursor.CHUNK`). 32 KiB hold the arrivals of some 400
ranks."""


FileId = tuple[int, int, int]
"""One file of a log: its device, its inode number, and its generation, because a later file may get the same inode."""


class Extent(NamedTuple):
    """Bytes of one file. All of them are complete records that count.

    Attributes:
        file: the file.
        start: the offset of the first byte.
        data: the bytes.
    """

    file: FileId
    start: int
    data: bytes

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.start + len(self.data)


class RecentBytes:
    """The last bytes of one handle. The mutex of the log guards them."""

    def __init__(self) -> None:
        self._file: FileId = (0, 0, 0)
        self._start = self._end = 0
        self._pieces: list[bytes] = []

    def clear(self) -> None:
        """Forget all bytes."""
        self._pieces, self._start = [], self._end

    def add(self, file: FileId, start: int, data: bytes) -> None:
        """Add `data`, which complete records of `file` have at the offset `start`.

        If `data` does not follow the bytes so far, these are dropped.
        """
        if file != self._file or start != self._end:
            self._file, self._start, self._pieces = file, start, []
        self._pieces.append(data)
        self._end = start + len(data)
        while self._end - self._start > RECENT_MAX:
            self._start += len(self._pieces.pop(0))

    def extent(self) -> Extent | None:
        """Return the bytes, or None if there are none."""
        if not self._pieces:
            return None
        self._pieces = [b"".join(self._pieces)]
        return Extent(self._file, self._start, self._pieces[0])
