"""`SymlinkLock`: the soft lock of a log, for mounts without locks. The lock is held while a symbolic link exists.

The target of the link is not a path: it is a text that names the holder. symlink(2) is atomic, and succeeds for only
one process. Over NFS, the creation is one request, and the removal is another. No process opens the link.

A regular file, created with O_EXCL as filelock does, has three disadvantages. Its holder keeps it open, so an NFS
client needs three requests to remove it. A process that is killed before it has written the file leaves an empty file,
which names no holder. Waiters open the file often to read the holder, so the server gives their host a delegation,
which it must recall before the file can be removed (RFC 8881, 10.4).

An NFS client that gets no reply repeats the request. If the first request had created the link, the server answers that
the name exists already. So each attempt uses another text, and a process that is refused sometimes reads the link to
find out whether the text is its own. (open(2), O_EXCL, describes the same for hard links on NFS before version 3.)

Emacs locks the files that it edits in the same way.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Final, NamedTuple

from fscoord._log.format.control_records import Session
from fscoord._log.format.record import MalformedRecord
from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign

CHECK_INTERVAL_S: Final = 0.25
"""How often a refused `acquire` reads the link, in seconds. Each read costs one or two requests to the server."""

REMOVER: Final = "fscoord-marker"
"""An abstract socket address. Only the process that has bound it may remove a stale link on this host."""


_TEXT: Final = re.compile(
    r"(.*):([0-9]{1,20}):([0-9]{1,20}):((?:[0-9a-f]{2})*):([0-9]{1,20}):([0-9]{1,20}):([0-9]{1,20}):[^:]*", re.DOTALL
)
"""Matches the text of a link. The part after the last colon identifies the attempt."""


class _Owner(NamedTuple):
    """The process that created a link, and its network namespace. The address `REMOVER` is unique in a namespace."""

    session: Session
    network: int

    def encode(self) -> str:
        session = self.session
        spaces = f"{session.pid_space}:{session.time_space}:{self.network}"
        return f"{session.host}:{session.pid}:{session.start_time}:{session.boot_id.hex()}:{spaces}"

    @classmethod
    def decode(cls, text: str) -> _Owner:
        """Return the owner of the link with `text`.

        Raises:
            MalformedRecord: `text` is not the text of a soft lock's link.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise MalformedRecord("the symbolic link at the path of a lock's marker is not a marker")
        host, pid, start_time, boot_id, pid_space, time_space, network = found.groups()
        session = Session(
            host,
            int(pid),
            int(start_time),
            bytes.fromhex(boot_id),
            pid_space=int(pid_space),
            time_space=int(time_space),
        )
        return cls(session, int(network))


def _owner_of(path: str) -> Session | None:
    """Return the owner of the link at `path`; None if the link is missing, or does not name an owner."""
    with ignoring(OSError, MalformedRecord):
        return _Owner.decode(_read(path)).session
    return None


def holder(path: str) -> str | None:
    """Return ``host:pid`` of the owner of the link at `path`; None if the link is missing, or names no owner."""
    owner = _owner_of(path)
    return None if owner is None else str(owner)


def foreign(path: str) -> str:
    """Return why this process can't find out whether the owner of the link at `path` is alive; "" if it can.

    The owner may have the same host name, but belong to another boot or another container. Then the owner's pid may
    also be the pid of another process on this host, so the pid proves nothing.
    """
    owner, here = _owner_of(path), ProcessIdentity.find()
    if owner is None or owner.host != here.host or here.shares_processes_with(owner):
        return ""
    if owner.boot_id != here.boot_id:
        return "that is a process of another boot of the host, or of another host of that name; "
    return f"that is a process of another container (pid namespace {owner.pid_space}, here {here.pid_space}); "


class SymlinkLock:
    """The soft lock of one handle: the symbolic link at `path`. The caller holds the process mutex.

    A `KeyboardInterrupt` may come between any two lines of `acquire` and `release`. So `_may_hold` is set before the
    link is created, and cleared after the link has been removed. If `_may_hold` is set, `release` reads the link, and
    removes the link if it has the text of this handle's last attempt.
    """

    _identity: ProcessIdentity
    _network: int

    def __init__(self, path: str) -> None:
        self.path = path
        self._epoch = 0
        self._owner = self._text = ""
        self._count = self._released = 0
        self._may_hold = self._is_unchecked = False
        self._checked_at = -math.inf

    def acquire(self) -> None:
        """Create the link.

        Raises:
            BlockingIOError: the link exists. If its owner was a process of this host that is dead, the link has been
                removed, and the next attempt may succeed.
            OSError: the file system failed. The link may exist; then `release` removes it.
        """
        self.release()  # a link that an interruption or an error has left
        if self._epoch != system.process_epoch():
            self._begin()
        self._count += 1
        self._text = f"{self._owner}.{self._count}"
        self._may_hold = True
        try:
            system.os.symlink(self._text, self.path)
        except FileExistsError as error:
            raise_if_foreign(error)
            if not self._holds_existing():
                self._may_hold = False
                raise BlockingIOError(system.errno.EAGAIN, "the log is locked") from None

    def release(self) -> None:
        """Remove the link, if the last attempt has created it.

        Raises:
            OSError: the file system failed. The link may still exist. The caller may call this method again.
        """
        if not self._may_hold or self._epoch != system.process_epoch():
            return
        if _read(self.path) == self._text:  # otherwise a person has removed it, as an error message may advise
            _remove(self.path)
        self._released = self._count
        self._may_hold = False

    def close(self) -> None:
        """Remove the link if any attempt of this handle has created it. The handle makes no more attempts."""
        with ignoring(OSError):  # the link stays until this process has ended, and is stale then
            if self._is_unchecked and self._epoch == system.process_epoch():
                text = _read(self.path)
                if self._is_own(text):
                    self._text, self._may_hold = text, True
            self.release()

    def _begin(self) -> None:
        """Set the identity of this process. Called at the first attempt, and again in a forked child."""
        self._identity, self._network = ProcessIdentity.find(), system.namespace("net")
        self._owner = f"{_Owner(self._identity.session(), self._network).encode()}:{system.random_bytes(8).hex()}"
        self._epoch, self._may_hold, self._is_unchecked = system.process_epoch(), False, False

    def _holds_existing(self) -> bool:
        """Return whether this handle has created the existing link. Remove the link if it is stale.

        The link is read only if `CHECK_INTERVAL_S` have passed since the last check.
        """
        now = system.time.monotonic()
        self._is_unchecked = True
        if now - self._checked_at < CHECK_INTERVAL_S:
            return False
        self._checked_at = now
        with ignoring(OSError):  # the link is gone again, or the next attempt meets the same error
            text = _read(self.path)
            self._is_unchecked = False
            if self._is_own(text):
                self._text = text
                return True
            with suppress(MalformedRecord):
                owner = _Owner.decode(text)
                if owner.network == self._network and self._identity.is_provably_dead(owner.session):
                    self._remove_stale(text)
        return False

    def _is_own(self, text: str) -> bool:
        owner, _, count = text.rpartition(".")
        return owner == self._owner and int(count) > self._released

    def _remove_stale(self, text: str) -> None:
        """Remove the link if its text is still `text`. Its owner was a process of this host, and is dead.

        No other process can replace the link between the read and the removal: a process on another host does not know
        that the owner is dead, and on this host only the process that has bound `REMOVER` removes stale links.
        """
        turn = system.import_uninterrupted("fscoord._runtime.network").acquire_host_mutex(REMOVER)
        if turn is not None:
            with turn:
                if _read(self.path) == text:
                    _remove(self.path)


def _read(path: str) -> str:
    try:
        return str(system.os.readlink(path))
    except FileNotFoundError as error:
        raise_if_foreign(error)
        return ""
    except OSError as error:
        raise_if_foreign(error)
        if error.errno == system.errno.EINVAL:  # not a symbolic link, so it was not made by this module
            return ""
        raise


def _remove(path: str) -> None:
    with ignoring(FileNotFoundError):
        system.os.unlink(path)
