"""`Mount`: the file system of a path, whether several hosts may share it, and whether its locks can be trusted."""

from __future__ import annotations

from typing import Final, NamedTuple

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

LOCAL, DIRECT, LOCKED = COHERENCES = ("local", "direct", "locked")
"""How a log is read: through the cache of this host, directly (O_DIRECT), or under a lock, which empties the cache."""

LOCAL_KINDS: Final = frozenset(
    "bcachefs btrfs erofs exfat ext2 ext3 ext4 f2fs jfs nilfs2 ntfs3 overlay ramfs reiserfs rootfs tmpfs ubifs vfat xfs"
    " zfs".split()
)
"""File systems that only one host mounts, so that its page cache is always valid. All others count as shared."""

NFS_KINDS: Final = frozenset(("nfs", "nfs4"))
SMB_KINDS: Final = frozenset(("cifs", "smb3"))


HOLES_REPORTED: Final = frozenset(("btrfs", "ext4", "tmpfs", "xfs"))
"""File systems whose SEEK_DATA (lseek(2)) is known to reflect the latest writes. The SEEK_DATA of ZFS did not."""

FUSE_WITH_INODES: Final = frozenset(
    "fuse.ceph fuse.ceph-fuse fuse.fuse-overlayfs fuse.glusterfs fuse.juicefs fuseblk".split()
)
"""FUSE file systems that pass on the inode numbers of the underlying files. Others assign a new number whenever the
kernel has forgotten a file: on sshfs, a file with number 2 had number 5 once its inode had left the cache, and number 3
after the next mount."""


CEPH_FUSE_KINDS: Final = frozenset(("fuse.ceph", "fuse.ceph-fuse"))


class Objection(NamedTuple):
    """The reason to refuse a mount, as a clause, and the remedy."""

    reason: str
    remedy: str


class Mount(NamedTuple):
    """A line of the mount table: ``kind`` as in proc_mountinfo(5) (``""`` if unknown), ``point`` and ``options``."""

    kind: str
    point: str
    options: tuple[str, ...]

    @property
    def is_local(self) -> bool:
        """Whether only this host mounts the file system. Also true if the file system is unknown, as under pyfakefs."""
        return self.kind in LOCAL_KINDS or not self.kind

    @property
    def is_nfs(self) -> bool:
        """Whether this is a mount of the kernel's NFS client."""
        return self.kind in NFS_KINDS

    @property
    def appends(self) -> bool:
        """Whether a write with O_APPEND begins at the end of the file if the writer holds a lock.

        On ceph-fuse it begins at the size that the kernel has cached, and neither the lock nor the write updates this
        size: of 425 appends of two mounts under a lock, 211 were lost.
        """
        return self.kind not in CEPH_FUSE_KINDS

    @property
    def reads_to_end(self) -> bool:
        """Whether a read(2) that returns fewer bytes than requested has met the end of the file, or an error.

        This holds where the kernel reads a file through its page cache in one call.
        """
        return self.kind in HOLES_REPORTED

    @property
    def inodes_last(self) -> bool:
        """Whether a file keeps its inode number for as long as it exists, so that the number identifies it."""
        return not self.kind.startswith("fuse") or self.kind in FUSE_WITH_INODES

    @property
    def reports_holes(self) -> bool:
        """Whether SEEK_DATA of lseek(2) can be trusted."""
        return self.kind in HOLES_REPORTED

    @property
    def coherence(self) -> str:
        """The default way to read a log on this mount: one of `COHERENCES`.

        On NFS it is a direct read, which returns the data of the server, in one request. A read through the cache may
        return zeros instead of data while a process of the host writes. On other shared file systems only a lock is
        known to make the cache valid.
        """
        if self.is_local:
            return LOCAL
        return DIRECT if self.is_nfs else LOCKED

    def option(self, name: str) -> str | None:
        """Return the value of the option `name`, ``""`` if the option has no value, or None if it is not set."""
        values = dict(option.partition("=")[::2] for option in self.options)
        return values.get(name)

    def objection(self, lock: str, coherence: str | None = None, *, trusts_locks: bool = False) -> Objection | None:
        """Return the objection to a log on this mount, or None.

        The locks and the reads are judged apart. A process that reads current data still damages the log if its lock
        excludes no process of another host.

        Args:
            lock: the kind of lock: ``"ofd"``, ``"flock"`` or ``"soft"``.
            coherence: the mode that the user has chosen, or None.
            trusts_locks: whether the user vouches for the locks.
        """
        found = None if trusts_locks or lock == "soft" else self._objection_to_locks(lock)
        if found is None:
            return self._objection_to_reads(coherence)
        return found._replace(
            remedy=f"{found.remedy}; if only processes of one host ever use the log, pass trust_locks=True in each"
        )

    def _objection_to_locks(self, lock: str) -> Objection | None:
        if self.is_nfs:
            return self._objection_to_nfs(lock)
        if self.kind == "lustre":
            return self._objection_to_lustre()
        if self.kind == "gpfs" and lock == "flock":
            return Objection("on GPFS flock may be known to one node only", 'pass lock="ofd" in every process')
        if self.kind in SMB_KINDS and self.option("nobrl") is not None:
            return Objection("nobrl keeps locks from the server (mount.cifs(8))", "mount it without nobrl")
        if self.kind == "fuse.sshfs":
            return Objection("sshfs gives every host every lock", "use another shared directory")
        return None

    def _objection_to_reads(self, coherence: str | None) -> Objection | None:
        """Return the objection to reads of the chosen mode `coherence`, or of the default mode.

        A chosen mode is the user's responsibility. Only on GlusterFS and ceph-fuse one mode alone can return current
        data.
        """
        if self.kind == "fuse.sshfs" and coherence is None:
            return Objection(
                "sshfs shows old data",
                'use another shared directory, or, if only one host uses the log, pass coherence="local"',
            )
        if self.kind in CEPH_FUSE_KINDS:
            return self._objection_to_ceph_fuse(coherence)
        if self.kind == "fuse.glusterfs" and coherence != LOCKED:
            return Objection(
                "GlusterFS by default returns data that is up to a second old, even under the lock, and the options of"
                " its volume can't be seen from here",
                "turn the volume's performance.* options off, set its client.event-threads to 16, mount it with"
                ' direct-io-mode=enable, run "fscoord doctor" on two hosts at once, and pass coherence="locked"',
            )
        return None

    def _objection_to_ceph_fuse(self, coherence: str | None) -> Objection | None:
        """Return the objection to reads through the caches of ceph-fuse, which are not valid under a lock either."""
        if coherence == DIRECT:
            return None
        return Objection(
            "a read through the caches of ceph-fuse may return other bytes than the file has, under the lock too",
            'pass coherence="direct" in every process; the kernel\'s CephFS client was not tested',
        )

    def _objection_to_nfs(self, lock: str) -> Objection | None:
        """Return the objection to locks of the kind `lock` on this NFS mount, or None.

        With the option ``nolock`` or ``local_lock`` (nfs(5)), the client keeps some locks from the server: two hosts
        were seen to hold the same lock.
        """
        local = self.option("local_lock")
        touched = {"ofd": ("all", "posix"), "flock": ("all", "flock")}[lock]
        if self.option("nolock") is not None:
            return Objection("nolock keeps locks from the server (nfs(5))", "mount it without nolock, or by NFS 4")
        if local in touched:
            return Objection(
                f"local_lock={local} keeps {lock} locks from the server (nfs(5))",
                "mount it with local_lock=none, or by NFS 4",
            )
        if self._is_nfs4 and system.nfs_recovers_lost_locks():
            return Objection(
                "the kernel's nfs.recover_lost_locks is on: a host that was cut off takes back locks that others have"
                " had meanwhile, and its late writes damage the log",
                "turn it off: echo N >/sys/module/nfs/parameters/recover_lost_locks",
            )
        return None

    @property
    def _is_nfs4(self) -> bool:
        return self.kind == "nfs4" or (self.option("vers") or "").startswith("4")

    def _objection_to_lustre(self) -> Objection | None:
        if self.option("localflock") is not None:
            return Objection("localflock keeps locks on this node (mount.lustre(8))", "mount it with flock")
        if self.option("flock") is None:
            return Objection(
                "it is mounted without locks (mount.lustre(8))", 'mount it with flock, or pass lock="soft"'
            )
        return None

    @property
    def caution(self) -> str | None:
        """A setting that makes locks unreliable and can't be seen from this host, or None."""
        if self.kind == "beegfs":
            return (
                "BeeGFS keeps locks on one node unless tuneUseGlobalFileLocks is true in beegfs-client.conf, which"
                ' can\'t be seen from here; run "fscoord doctor" on two nodes at once'
            )
        return None


def find_mount(path: str) -> Mount:
    """Return the mount of the absolute `path`: the mount with the longest mount point above the path."""
    found = _look_up(path)
    if found.kind == "autofs":  # opening the directory mounts the file system; stat(2) would not
        try:
            directory = system.os.path.dirname(path)
            system.close_quietly(system.open_file(directory, system.os.O_RDONLY, 0, system.loose))
        except OSError as error:  # opening the log will fail in the same way, and report it
            raise_if_foreign(error)
            return found
        found = _look_up(path)
    return found


def _look_up(path: str) -> Mount:
    best = Mount("", "", ())
    for line in system.mount_table():
        first = line.split(None, 5)  # the rest is split only if needed: a host may have hundreds of mounts
        if len(first) < 6:
            continue
        point = _unescape(first[4])
        under = path == point or path.startswith(point.rstrip("/") + "/")
        fields = line.split() if under and len(point) >= len(best.point) else []
        if "-" in fields[6:]:  # of two mounts at one point the later hides the earlier
            tail = fields[fields.index("-", 6) + 1 :]
            options = fields[5].split(",") + (tail[2].split(",") if len(tail) > 2 else [])
            best = Mount(tail[0], point, tuple(options))
    return best


def _unescape(field: str) -> str:
    if "\\" not in field:
        return field
    for escaped, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(escaped, plain)
    return field
