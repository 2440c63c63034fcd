"""Which log a file belongs to: what its header says, compared with the files that are there. Pure.

Users rename, copy, archive and restore logs, so a name proves nothing. Nor does an inode number alone: a file system
gives it to another file as soon as it is free. See docs/format.md, "LogIdentity".
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from fscoord._log.format.header import Header

__all__ = ["LogIdentity", "Provenance", "provenance_of"]


class Provenance(Enum):
    """What the newest file of a log is to the log's generation 0."""

    OWN = "both are where they were made, or were moved together"
    COPY = "they were copied, or restored"
    OTHER_ROOT = "generation 0 is not the one that this file was made for: a copy, if that one is there as well"


def provenance_of(header: Header, root_inode: int, inode: int) -> Provenance:
    """Return what the file with `header` and this `inode` number is to the generation 0 with `root_inode`.

    A number of 0, in the header or as argument, counts as equal: a file system without inode numbers that last.
    """
    if 0 not in (header.root_inode, root_inode) and header.root_inode != root_inode:
        return Provenance.OTHER_ROOT if header.generation else Provenance.COPY
    return Provenance.OWN if 0 in (header.inode, inode) or header.inode == inode else Provenance.COPY


class LogIdentity(NamedTuple):
    """What the header of a file names if the file belongs to a log: the ``lineage``, and ``root_inode``."""

    lineage: bytes
    root_inode: int

    def owns(self, header: Header, inode: int) -> bool:
        """Return whether the file with `header` and this `inode` number provably belongs to the log.

        It must before it is removed. Where inode numbers do not last nothing can be proven.
        """
        claimed = (header.lineage, header.root_inode, header.inode)
        return claimed == (self.lineage, self.root_inode, inode) and 0 not in (self.root_inode, inode)
