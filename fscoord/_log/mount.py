"""What file system a path is on, and whether several hosts may share it."""

from __future__ import annotations

from typing import Final, NamedTuple

from fscoord import _system as system

__all__ = ["Mount", "find_mount"]

LOCAL_KINDS: Final = frozenset(
    "bcachefs btrfs erofs ext2 ext3 ext4 f2fs jfs nilfs2 overlay ramfs reiserfs rootfs tmpfs ubifs vfat xfs zfs".split()
)
"""File systems with one page cache, that of this host. Whatever is not named here counts as shared by hosts."""


class Mount(NamedTuple):
    """A line of the mount table: ``kind`` as in proc_mountinfo(5) (``""`` if unknown), ``point`` and ``options``."""

    kind: str
    point: str
    options: tuple[str, ...]

    @property
    def is_local(self) -> bool:
        """Whether only this host sees the file system, or nothing is known (no mount table, as under pyfakefs)."""
        return self.kind in LOCAL_KINDS or not self.kind


def find_mount(path: str) -> Mount:
    """Return the mount that the absolute `path` is on, by the longest mount point that it lies under."""
    best = Mount("", "", ())
    for line in system.mount_table():
        fields = line.split()
        if "-" not in fields[6:]:
            continue
        point = _unescape(fields[4])
        under = path == point or path.startswith(point.rstrip("/") + "/")
        if under and len(point) >= len(best.point):  # the later of two at one point hides the earlier
            tail = fields[fields.index("-", 6) + 1 :]
            options = fields[5].split(",") + (tail[2].split(",") if len(tail) > 2 else [])
            best = Mount(tail[0], point, tuple(options))
    return best


def _unescape(field: str) -> str:
    for escaped, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(escaped, plain)
    return field
