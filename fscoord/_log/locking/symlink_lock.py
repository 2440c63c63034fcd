"""`SymlinkLock`: the file beside a log that is there while its soft lock is held, for mounts that have no locks.

It is a symbolic link that leads nowhere: its text says who holds the lock. symlink(2) makes it whole or not at all, and
only for the first who asks; over NFS that is one request, and so is its removal. Nobody opens it.

A regular file, made with O_EXCL, was there before (filelock's). Its holder has it open, so that an NFS client needs
three steps to remove it; who is killed before it is written leaves an empty one, which names nobody; and who waits
opens it again and again to see whose it is, so that the server lends it to that host, and calls it back (delegations,
RFC 8881, 10.4).

An answer may get lost, and the request be repeated: the holder is then told that somebody else was first. So each try
writes a text of its own, and who is refused looks, now and then, whether what is there is its own. (The same idea, with
a hard link: open(2), O_EXCL, of NFS before version 3.)

Emacs locks the files that it edits in this way.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from fscoord._log.format.control_records import Session
from fscoord._log.format.record import MalformedRecord
from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

__all__ = ["SymlinkLock", "holder"]

LOOK_S: Final = 0.25
"""How old the last look at a marker in the way may be: it is a request or two to a server."""

REMOVER: Final = "fscoord-marker"
"""The name that one process of a host has at a time, which removes what another has left behind."""


_TEXT: Final = re.compile(
    r"(.*):([0-9]{1,20}):([0-9]{1,20}):((?:[0-9a-f]{2})*):([0-9]{1,20}):([0-9]{1,20}):([0-9]{1,20}):[^:]*", re.DOTALL
)
"""The text of a marker; what follows the last colon is the name of a try."""


class _Maker(NamedTuple):
    """Who made a marker: the process, and the network in which its host's names count."""

    session: Session
    network: int

    def encode(self) -> str:
        who = self.session
        spaces = f"{who.pid_space}:{who.time_space}:{self.network}"
        return f"{who.host}:{who.pid}:{who.start_time}:{who.boot_id.hex()}:{spaces}"

    @classmethod
    def decode(cls, text: str) -> _Maker:
        """Return the maker of the marker with `text`.

        Raises:
            MalformedRecord: it is not a marker of a log.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise MalformedRecord("the text of a lock's marker is not that of a marker")
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


def holder(path: str) -> str | None:
    """Return ``host:pid`` out of the marker at `path`, or None if there is none, or it says nothing."""
    try:
        return str(_Maker.decode(_read(path)).session)
    except (OSError, MalformedRecord) as error:
        raise_if_foreign(error)
        return None


class SymlinkLock:
    """One handle's hold on the marker at `path`. Whoever uses it sees to it that no two threads do at once."""

    _home: ProcessIdentity
    _network: int

    def __init__(self, path: str) -> None:
        self.path = path
        self._life = 0
        self._who = self._text = ""
        self._count = self._given_back = 0
        self._may_hold = self._is_unseen = False
        self._looked = -math.inf

    def take(self) -> None:
        """Make the marker.

        Raises:
            BlockingIOError: somebody else has. If it was a process of this host that is gone, the next try may succeed.
            OSError: the file system failed. The marker may be there: `give_back` then removes it.
        """
        self.give_back()  # of a hold that an interruption, or an error, left behind
        if self._life != system.process_epoch():
            self._begin()
        self._count += 1
        self._text = f"{self._who}.{self._count}"
        self._may_hold = True
        try:
            system.os.symlink(self._text, self.path)
        except FileExistsError as error:
            raise_if_foreign(error)
            if not self._finds_itself():
                self._may_hold = False
                raise BlockingIOError(system.errno.EAGAIN, "the log is locked") from None

    def give_back(self) -> None:
        """Remove the marker, if it is that of the last try.

        Raises:
            OSError: the file system failed. The marker may be there: to call this again is right.
        """
        if not self._may_hold or self._life != system.process_epoch():
            return
        if _read(self.path) == self._text:  # else somebody was told to remove it, and did
            _remove(self.path)
        self._given_back = self._count
        self._may_hold = False

    def close(self) -> None:
        """Remove the marker if it is that of any try: nobody will look for it again."""
        try:
            if self._is_unseen and self._life == system.process_epoch():
                text = _read(self.path)
                if self._is_own(text):
                    self._text, self._may_hold = text, True
            self.give_back()
        except OSError as error:  # it stays until this process has ended
            raise_if_foreign(error)

    def _begin(self) -> None:
        """Say who this process is: a forked child is another than its parent."""
        self._home = home = ProcessIdentity.find()
        session = Session(
            home.host,
            system.os.getpid(),
            system.start_time(),
            home.boot_id,
            pid_space=home.pid_space,
            time_space=home.time_space,
        )
        self._network = system.namespace("net")
        self._who = f"{_Maker(session, self._network).encode()}:{system.random_bytes(8).hex()}"
        self._life, self._may_hold, self._is_unseen = system.process_epoch(), False, False

    def _finds_itself(self) -> bool:
        """Look who is in the way, if that was not done just now; return whether it is this handle."""
        now = system.time.monotonic()
        self._is_unseen = True
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        try:
            text = _read(self.path)
            self._is_unseen = False
            if self._is_own(text):
                self._text = text
                return True
            if self._is_of_the_dead(text):
                self._remove_in_turn(text)
        except OSError as error:  # it is gone again, or the next try meets the same
            raise_if_foreign(error)
        return False

    def _is_own(self, text: str) -> bool:
        who, _, count = text.rpartition(".")
        return who == self._who and int(count) > self._given_back

    def _is_of_the_dead(self, text: str) -> bool:
        try:
            made = _Maker.decode(text)
        except MalformedRecord:
            return False
        return made.network == self._network and self._home.is_provably_dead(made.session)

    def _remove_in_turn(self, text: str) -> None:
        """Remove the marker with `text`, whose maker has ended on this host.

        Other hosts can't know that it has, and those of this one take turns. So nobody makes another one meanwhile.
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
        if error.errno == system.errno.EINVAL:  # it is no symbolic link, and so none of ours
            return ""
        raise


def _remove(path: str) -> None:
    try:
        system.os.unlink(path)
    except FileNotFoundError as error:
        raise_if_foreign(error)
