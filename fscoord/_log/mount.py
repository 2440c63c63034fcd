"""`Mount`: the file system of a path, whether several hosts may share it, and whether its locks can be trusted."""

from __future__ import annotations

from typing import Final, NamedTuple

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

LOCAL, DIRECT, LOCKED = COHERENCES = ("local", "direct", "locked")
"""How a log is read: through this host's cache, with O_DIRECT, or under a lock. Taking a lock empties the cache."""

LOCAL_KINDS: Final = frozenset(
    "bcachefs btrfs erofs exfat ext2 ext3 ext4 f2fs jfs nilfs2 ntfs3 overlay ramfs reiserfs rootfs tmpfs ubifs vfat xfs"
    " zfs".split()
)
"""File systems that only one host mounts. The page cache of that host is always valid. All other file systems count as
shared."""

NFS_KINDS: Final = frozenset(("nfs", "nfs4"))
SMB_KINDS: Final = frozenset(("cifs", "smb3"))


HOLES_REPORTED: Final = frozenset(("btrfs", "ext4", "tmpfs", "xfs"))
"""File systems whose SEEK_DATA (lseek(2)) is known to take the latest writes into account. ZFS is not among them."""

FUSE_WITH_INODES: Final = frozenset(
    "fuse.ceph fuse.ceph-fuse fuse.fuse-overlayfs fuse.glusterfs fuse.juicefs fuseblk".split()
)
"""FUSE file systems that pass on the inode numbers of the underlying files. Other FUSE file systems, such as sshfs,
assign a new number to a file after its inode has left the kernel's cache, and at each mount."""


CEPH_FUSE_KINDS: Final = frozenset(("fuse.ceph", "fuse.ceph-fuse"))
CEPH_KINDS: Final = CEPH_FUSE_KINDS | {"ceph"}


class Objection(NamedTuple):
    """The reason why a mount is refused, and the remedy: two clauses of an error message."""

    reason: str
    remedy: str


class Mount(NamedTuple):
    """A line of the mount table: type of file system (``""`` if unknown), mount point and options."""

    kind: str
    point: str
    options: tuple[str, ...]

    @property
    def is_local(self) -> bool:
        """Whether only this host mounts the file system; also true if its type is unknown, as with pyfakefs."""
        return self.kind in LOCAL_KINDS or not self.kind

    @property
    def is_nfs(self) -> bool:
        """Whether this is a mount of the kernel's NFS client."""
        return self.kind in NFS_KINDS

    @property
    def is_lustre(self) -> bool:
        """Whether this is a mount of Lustre's client.

        The options of such a mount always include ``nolock``. This word does not mean that the mount has no locks: it
        is not the option ``nolock`` of nfs(5). The mount has locks if its options include ``flock`` or ``localflock``.
        """
        return self.kind == "lustre"

    @property
    def reads_to_end(self) -> bool:
        """Whether a read(2) returns fewer bytes than requested only at the end of the file, or after an error."""
        return self.kind in HOLES_REPORTED

    @property
    def inodes_last(self) -> bool:
        """Whether each file keeps its inode number while it exists. Only then does the number identify the file."""
        return not self.kind.startswith("fuse") or self.kind in FUSE_WITH_INODES

    @property
    def reports_holes(self) -> bool:
        """Whether SEEK_DATA of lseek(2) can be trusted."""
        return self.kind in HOLES_REPORTED

    @property
    def coherence(self) -> str:
        """The default way to read a log on this mount: one of `COHERENCES`.

        On NFS the default is a direct read: one request, which returns the data of the server. A read through the cache
        may return zeros instead of data while a process on this host writes. On Lustre every read returns current data,
        and a direct read needs the fewest messages. On ceph-fuse a read through the caches may return wrong bytes, also
        under a lock. On other shared file systems, only a read under a lock is known to return current data. If a mount
        refuses direct reads, the log is read under a lock (`NetworkAccess`).
        """
        if self.is_local:
            return LOCAL
        return DIRECT if self.is_nfs or self.is_lustre or self.kind in CEPH_FUSE_KINDS else LOCKED

    def option(self, name: str) -> str | None:
        """Return the value of the mount option `name`; ``""`` if it has no value, None if it is not set."""
        values = dict(option.partition("=")[::2] for option in self.options)
        return values.get(name)

    def objection(self, lock: str, coherence: str | None = None, *, trusts_locks: bool = False) -> Objection | None:
        """Return why a log on this mount must be refused; None if it may be used.

        Locks and reads are checked separately. If locks do not exclude processes on other hosts, the log is damaged
        even if all reads return current data.

        Args:
            lock: the kind of lock: ``"ofd"``, ``"flock"`` or ``"soft"``.
            coherence: the way to read that the user has chosen; None: the default.
            trusts_locks: whether the user has passed ``trust_locks=True``.
        """
        found = None if trusts_locks or lock == "soft" else self._objection_to_locks(lock)
        if found is None:
            return self._objection_to_reads(lock, coherence)
        return found._replace(
            remedy=f"{found.remedy}; if only processes of one host ever use the log, pass trust_locks=True in each"
        )

    def _objection_to_locks(self, lock: str) -> Objection | None:
        if self.is_nfs:
            return self._objection_to_nfs(lock)
        if self.is_lustre:
            return self._objection_to_lustre()
        if self.kind == "gpfs" and lock == "flock":
            return Objection("on GPFS flock may be known to one node only", 'pass lock="ofd" in every process')
        if self.kind in SMB_KINDS and self.option("nobrl") is not None:
            return Objection("nobrl keeps locks from the server (mount.cifs(8))", "mount it without nobrl")
        if self.kind == "fuse.sshfs":
            return Objection("sshfs locks do not exclude other hosts", "use another shared directory")
        return None

    def _objection_to_reads(self, lock: str, coherence: str | None) -> Objection | None:
        """Return why reads in the mode `coherence` (None: the default) can't return current data; None if they can.

        A mode that the user has chosen is not checked, except on GlusterFS, ceph-fuse and SMB. On each of these file
        systems, at most one mode can return current data. On SMB, a ``flock`` lock keeps other processes from reading
        the file (flock(2)), and ``soft`` locks can't be made.
        """
        if self.kind in SMB_KINDS and (coherence != LOCAL or lock != "ofd"):
            return Objection(
                "on SMB a process may append at an old end of the file, and so overwrite records of another host, under"
                " the lock too",
                'use another shared directory, or, if only one host uses the log, pass coherence="local" and'
                ' lock="ofd" in every process',
            )
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
        """Return the objection to reads through the caches of ceph-fuse. A lock does not make these caches valid."""
        if coherence == DIRECT:
            return None
        return Objection(
            "a read through the caches of ceph-fuse may return other bytes than the file has, under the lock too",
            'pass coherence="direct" in every process; the kernel\'s CephFS client was not tested',
        )

    def _objection_to_nfs(self, lock: str) -> Objection | None:
        """Return why locks of the kind `lock` are not safe on this NFS mount; None if they are.

        With the option ``nolock`` or ``local_lock`` (nfs(5)), the client does not tell the server of some locks. Then
        two hosts can hold the same lock.
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
    def reads_why(self) -> str:
        """The reason for the default mode `coherence` of this mount: the last clause of a sentence in a message."""
        if self.is_local:
            return "the page cache of this host is always valid"
        if self.coherence == DIRECT:
            return "a read past the cache returns the data of the server, and takes no lock"
        return "no other read is known to be current here; taking the lock empties the cache"

    @property
    def vanished_host(self) -> str:
        """A sentence for a message, without its period: what happens to the locks of a host that vanishes."""
        if self.is_local:
            return "no other host uses this file system; the kernel releases the locks of a process that ends"
        if self._is_nfs4:
            return (
                "the server gives that host's locks to others after its lease, 90 s by default; others can still read"
            )
        if self.is_nfs:
            return "the server of NFS 3 keeps its locks until that host is back, or an administrator releases them"
        if self.is_lustre:
            seconds = system.lustre_timeout()
            here = f"The timeout is {seconds} s here" if seconds else "Compare `lctl get_param timeout`"
            return (
                "calls of other hosts block in the kernel until the server evicts that host: 101 to 378 s were measured"
                f" with a timeout of 100 s. {here}. An administrator can evict the host at once"
                " (docs/how-to/a-job-hangs.md)"
            )
        if self.kind in CEPH_KINDS:
            return (
                "the metadata server evicts that host after its session_timeout, 60 s by default, and at the latest"
                " after its session_autoclose, 300 s. On ceph-fuse the calls of other hosts blocked for 70 s meanwhile."
                " An administrator can evict the host at once: ceph tell mds.0 client evict id=ID"
            )
        return "it is not known when the server releases the locks of that host"

    @property
    def caution(self) -> str | None:
        """A warning about a setting that may make locks unreliable and can't be checked here; None if there is none."""
        if self.kind == "beegfs":
            return (
                "BeeGFS keeps locks on one node unless tuneUseGlobalFileLocks is true in beegfs-client.conf, which"
                ' can\'t be seen from here; run "fscoord doctor" on two nodes at once'
            )
        return None


def find_mount(path: str) -> Mount:
    """Return the mount that contains the absolute `path`."""
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
