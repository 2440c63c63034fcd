"""`Mailbox`: a directory in which the instances of an examination exchange messages, below the examined directory.

The mailbox belongs to one user. If a group may write to the examined directory, the mailbox belongs to that group, so
that instances of several users find each other.

A message is a file. An instance lists the directory to find new messages. Three rules make this reliable on NFS:

- An instance opens a name only after a listing has shown the name. If it opened the name earlier, the NFS client could
  remember for up to 30 s that the name was missing (nfs(5), "lookupcache").
- Before an instance lists the directory, it creates or removes a file there. The change makes the NFS client request
  the listing from the server. CephFS needs no such change, and there a change of a directory that two clients use may
  take seconds.
- A message is complete before its name appears, and each name is used once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from fscoord._log.files import safe_files
from fscoord._log.mount import CEPH_KINDS, find_mount
from fscoord._runtime import system
from fscoord.errors import InsecurePathError

ATTEMPTS: Final = 50
NAP_S: Final = 0.01
BUSY_NAP_S: Final = 0.03
IDLE_NAP_S: Final = 0.5
BEAT_S: Final = 1.0
READ_S: Final = 3.0
REMOVE_S: Final = 8.0
GONE: Final = frozenset((system.errno.ENOENT, system.errno.ESTALE))
"""The errors of a call on a mailbox that does not exist any more."""
OWN_MODE: Final = 0o600
GROUP_MODE: Final = 0o660
GROUP_UMASK: Final = 0o007


def new_file(path: str, mode: int = OWN_MODE) -> int:
    """Create the file `path`, which must not exist, and return a descriptor for writing."""
    return safe_files.open_descriptor(path, system.os.O_WRONLY | system.os.O_CREAT | system.os.O_EXCL, mode)


def group_of(found: Any) -> int | None:
    """Return the group that may share a mailbox, or None. `found` is the stat(2) result of the examined directory.

    The result is None for a sticky directory, because there a user can't remove the files of another user.
    """
    mode, group = found.st_mode, int(found.st_gid)
    is_shared = mode & system.stat.S_IWGRP and not mode & system.stat.S_ISVTX
    return group if is_shared and group in {system.os.getegid(), *system.os.getgroups()} else None


def file_mode(directory: str) -> int:
    """Return the permissions for new files in the mailbox `directory`."""
    return GROUP_MODE if system.os.stat(directory).st_mode & system.stat.S_IWGRP else OWN_MODE


class Mailbox:
    """Gives the instance `name` access to the mailbox `directory`.

    Waits call `pause` to sleep for a number of seconds. If `pause` returns True, the wait ends.
    """

    def __init__(self, directory: str, name: str, pause: Callable[[float], bool | None] = system.time.sleep) -> None:
        self._pause = pause
        self.directory = directory
        self.name = name
        self.is_coordinator = False
        self._mode = OWN_MODE
        self._is_in = False
        self._is_ceph = find_mount(directory).kind in CEPH_KINDS
        self._fd = -1
        self._fds = system.Descriptors()
        system.close_when_collected(self, self._fds)
        self._messages = 0
        self._beats = 0
        self._last_beat = -BEAT_S

    def enter(self, facts: dict[str, Any]) -> bool:
        """Create the mailbox if it is missing, and publish `facts` as ``here.NAME``.

        Returns True if this instance is the first in the mailbox, and so the coordinator.

        Raises:
            OSError: the directory can't be created or used.
            InsecurePathError: the path is not a directory of this user, or of the group ``facts["group"]``.
        """
        group: int | None = facts.get("group")
        if group is not None:
            self._mode = GROUP_MODE
            system.os.umask(GROUP_UMASK)
        for _ in range(ATTEMPTS):
            try:
                self._is_in = True
                if group is None:
                    self._make()
                else:
                    self._make_shared(group)
                self._open(group)
                self.publish(f"here.{self.name}", facts)
                with suppress(FileExistsError):
                    system.os.mkdir(self._path("chair"), 0o700)
                    self.is_coordinator = True
                return self.is_coordinator
            except OSError as error:
                if error.errno not in GONE:  # gone: the coordinator of another examination has just removed it
                    raise
                system.time.sleep(NAP_S)
        raise FileNotFoundError(
            system.errno.ENOENT,
            "other examinations remove this directory again and again, or its parent is gone",
            self.directory,
        )

    def _make(self) -> None:
        with suppress(FileExistsError):
            system.os.mkdir(self.directory, 0o700)

    def _make_shared(self, group: int) -> None:
        """Create a mailbox whose files belong to `group` (the setgid bit).

        The mailbox never has other permissions under its final name.
        """

        def permit(fd: int) -> None:
            if system.os.fstat(fd).st_gid != group:
                system.os.fchown(fd, -1, group)
            system.os.fchmod(fd, system.stat.S_ISGID | 0o770)

        with suppress(FileExistsError):
            system.close_quietly(system.make_directory(self.directory, 0o700, permit))

    def _open(self, group: int | None) -> None:
        """Open the mailbox directory, and check its type, group and permissions. `_remove` uses the same descriptor."""
        system.close_all(system.os.close, self._fds)
        wanted, others = (0, 0o022) if group is None else (0o070, 0o072)
        try:
            self._fd = safe_files.open_descriptor(self.directory, system.os.O_RDONLY, owned_fds=self._fds)
            found = system.os.fstat(self._fd)
            is_ours = system.stat.S_ISDIR(found.st_mode) and group in (None, found.st_gid)
        except PermissionError:  # the directory belongs to another user
            is_ours = False
        if not is_ours or found.st_mode & others != wanted:
            users = "only this user" if group is None else f"exactly the group {group}"
            raise InsecurePathError(
                f"{self.directory} is not a directory that {users} can write; remove it", path=self.directory
            )

    def publish(self, name: str, message: Any) -> None:
        """Publish `message` under `name`. The name appears when the content is complete."""
        self._messages += 1
        draft = self._path(f".draft.{self.name}.{self._messages}")
        fd = new_file(draft, self._mode)
        try:
            safe_files.write_all(fd, json.dumps(message).encode("ascii"))
            system.sync_file(fd)
            system.os.rename(draft, self._path(name))
        except BaseException:
            safe_files.unlink_quietly(draft)
            raise
        finally:
            system.close_quietly(fd)

    def fetch(self, name: str) -> Any:
        """Return the message `name`, which a listing must have shown."""
        deadline = system.time.monotonic() + READ_S
        while True:
            try:
                return json.loads(content(self._path(name)))
            except (ValueError, OSError):  # the NFS client may see the name before the content
                if system.time.monotonic() > deadline:
                    raise
            system.time.sleep(NAP_S)

    def listing(self) -> list[str]:
        """Return the sorted names of the messages. The list is empty if the mailbox is gone."""
        try:
            self._touch()
            return sorted(name for name in system.os.listdir(self.directory) if not name.startswith("."))
        except OSError as error:
            if error.errno in GONE:
                return []
            raise

    def _touch(self) -> None:
        """Create and remove a file, so that the NFS client requests the next listing from the server.

        Once a second the coordinator instead creates a new file ``beat``, its heartbeat.
        """
        now = system.time.monotonic()
        if self.is_coordinator and now - self._last_beat >= BEAT_S:
            self._last_beat = now
            self._beats += 1
            system.close_quietly(new_file(self._path(f"beat.{self._beats}")))
            safe_files.unlink_quietly(self._path(f"beat.{self._beats - 1}"))
            return
        if self._is_ceph:  # a listing is always current, and a change may take seconds
            return
        system.close_quietly(new_file(self._path(f".touch.{self.name}")))
        safe_files.unlink_quietly(self._path(f".touch.{self.name}"))

    def wait(self, prefixes: list[str], known: list[str], seconds: float, idle: bool = False) -> list[str]:
        """Wait up to `seconds` for a name that has one of `prefixes` and is not in `known`. Return all names.

        If `idle` is true, the directory is listed only twice a second, because there may be hundreds of idle instances.
        """
        deadline = system.time.monotonic() + seconds
        nap = NAP_S
        while True:
            names = self.listing()
            fresh = set(names).difference(known)
            if not names or any(name.startswith(tuple(prefixes)) for name in fresh):
                return names
            left = deadline - system.time.monotonic()
            if left <= 0:
                return names
            if self._pause(min(nap, left)):
                return names
            nap = min(nap * 1.5, IDLE_NAP_S if idle else BUSY_NAP_S)

    def put_aside(self) -> None:
        """Rename the mailbox atomically, then remove it. If several instances try, one succeeds.

        Does nothing if the path no longer leads to the directory that `enter` has opened.
        """
        aside, found = f"{self.directory}.{self.name}", system.os.fstat(self._fd)
        if not safe_files.names_same_file(self.directory, (found.st_dev, found.st_ino)):
            return
        try:
            system.os.rename(self.directory, aside)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return
        _remove(aside, self._fd)

    def leave(self) -> None:
        """Remove the files of this instance. The coordinator removes the whole mailbox."""
        if not self._is_in:
            return
        self._is_in = False
        if self.is_coordinator:
            self.put_aside()
            return
        for leaf in (f"here.{self.name}", f".touch.{self.name}"):
            safe_files.unlink_quietly(self._path(leaf))
        with suppress(OSError):  # the mailbox is gone, or the disk is full
            self.publish(f"left.{self.name}", None)
        with suppress(OSError):
            if not {name.partition(".")[0] for name in system.os.listdir(self.directory)} - {"left"}:
                _remove(self.directory, self._fd)  # there is no coordinator, and no other instance

    def _path(self, name: str) -> str:
        return system.os.path.join(self.directory, name)


def content(path: str) -> bytes:
    """Return the content of the file `path`."""
    with system.os.fdopen(safe_files.open_descriptor(path, system.os.O_RDONLY), "rb") as file:
        return file.read()


def _remove(directory: str, fd: int) -> None:
    """Remove the mailbox `directory`, whose descriptor is `fd`. Retry, because NFS keeps files that a process has open.

    Other members of the group may move other directories to the mailbox's path, or into the mailbox. The files in these
    directories must stay. So this function empties the mailbox through `fd`, and removes only empty directories in the
    mailbox.
    """
    deadline = system.time.monotonic() + REMOVE_S
    while True:
        try:
            for name in system.os.listdir(fd):
                _remove_name(name, fd)
            system.os.rmdir(directory)
            return
        except OSError as error:
            if error.errno in GONE or system.time.monotonic() > deadline:
                return
        system.time.sleep(5 * NAP_S)


def _remove_name(name: str, dir_fd: int) -> None:
    try:
        system.os.unlink(name, dir_fd=dir_fd)
    except (IsADirectoryError, PermissionError):
        system.os.rmdir(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
