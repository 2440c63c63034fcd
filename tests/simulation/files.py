"""A file system with open-file-description locks and events, for the tasks of a `Scheduler`.

It is one directory, which all hosts share, and one more of each host. A write may be seen, or end with its process,
after any byte; an inode number is given again as soon as it is free; the disk may be full for a while. The answer to a
call that makes or removes a symbolic link may get lost: it is repeated then, as NFS does, or fails.
A host may vanish, as from Lustre: until the server evicts it its locks stay, and the calls of the others on the files
that it has open block. What it had not synced is lost then, and the first answer to a call that was blocked may come
from the size that its host knew before.
An event may get lost, too, and tells only of what the own host does.

The directory may be one of Lustre. Then flock(2) and open-file-description locks are one space, a wait for a lock may
fail with EDEADLK, times of files have whole seconds, and symbolic links are refused.
"""

from __future__ import annotations

import errno
import math
import os
import random
import stat
from collections.abc import Sequence
from struct import Struct
from types import ModuleType, SimpleNamespace
from typing import Any

from portalocker import exceptions
from simulation.scheduler import Killed, Process, Scheduler

_FLOCK = Struct("hhqqi4x")  # struct flock, fcntl(2)
FOREVER = 1 << 63


class Inode:
    """A file: its bytes, names, locks (whose, kind, first byte, end) and watchers."""

    def __init__(self, number: int, mode: int) -> None:
        self.number, self.mode = number, mode
        self.data = bytearray()
        self.names = 0
        self.opened: set[int] = set()
        self.locks: list[tuple[int, int, int, int]] = []
        self.events: list[Events] = []
        self.socket: Any = None
        self.known: dict[str, int] = {}  # the size of which each host knows
        self.unsynced: dict[str, list[tuple[int, int]]] = {}  # what only the cache of a host has, by start and end
        self.changed = 0.0


class Opened:
    """An open file description."""

    def __init__(self, inode: Inode, flags: int, process: Process, path: str) -> None:
        self.inode, self.flags, self.process, self.path = inode, flags, process, path
        self.place = 0


class Events:
    """Stands for `_events.Inotify`, on these files."""

    is_pollable = True

    def __init__(self, files: Files, path: str, mask: int) -> None:
        inode = files.names.get(files.place(path))
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        self.host = files.scheduler.process.host
        self.processes: dict[int, int] = {}
        self._files, self._inode, self.mask, self._is_rung = files, inode, mask, False
        inode.events.append(self)

    def raise_event(self, mask: int) -> None:
        files = self._files
        if mask & self.mask and not (files.loses_events and files.rng.random() < files.loses_events):
            self._is_rung = True

    def wait(self, limit: float) -> bool:
        scheduler = self._files.scheduler
        scheduler.step("wait for events", f"{limit:.6f}")
        rung = scheduler.block(lambda: self._is_rung, scheduler.now + limit)
        self._is_rung = False
        return rung

    def watch_process(self, pid: int) -> bool:
        return False

    def reap_exited(self) -> int:
        return 0

    def interrupt(self) -> None:
        self._is_rung = True

    def close(self) -> None:
        if self in self._inode.events:
            self._inode.events.remove(self)


MODIFY, ATTRIB, DELETE_SELF = 0x0002, 0x0004, 0x0400  # inotify(7)


class Files:
    """The directory `DIRECTORY`, and all that is open. What lies in `LOCAL` is another on each host."""

    DIRECTORY, LOCAL = "/simulated", "/local"

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler, self.rng = scheduler, rng
        self.names: dict[str, Inode] = {}
        self.opened: dict[int, Opened] = {}
        self.kept: dict[str, Inode] = {}
        self.full_until = 0
        self.torn = self.lost = 0
        self.loses = self.loses_events = self.loses_datagrams = 0.0
        self.is_lustre = False
        self.deadlocks = 0.0
        self.called_deadlocks = 0
        self.tears = rng.choice([0.05, 0.3, 0.7])
        self.sockets: list[Any] = []
        self.vanished: set[str] = set()
        self.blocked = self.old_answers = self.holes = 0
        self._next = 1000
        self._inode_numbers = set(range(2, 400))
        self.directory = Inode(1, stat.S_IFDIR | 0o700)
        self.directory.names = 1

    def take_over(self, files: Files) -> None:
        """Let this be the directory that `files` was, with nothing open."""
        self.names, self.kept, self._inode_numbers = files.names, files.kept, files._inode_numbers

    def add_host(self, host: str) -> None:
        """Make the directory that is `LOCAL` on `host`, unless there is one."""
        path = f"{self.LOCAL}@{host}"
        if path not in self.names:
            self.names[path] = self.make(0o700, stat.S_IFDIR)
            self.names[path].names = 1

    def place(self, path: str) -> str:
        """Return what `path`, as the process that runs names it, is in `names`."""
        if path.startswith("/proc/self/fd/"):
            fd, _, name = path.removeprefix("/proc/self/fd/").partition("/")
            return f"{self.find(int(fd)).path}/{name}"
        if path.startswith(self.LOCAL + "/"):
            return f"{self.LOCAL}@{self.scheduler.process.host}{path.removeprefix(self.LOCAL)}"
        return path

    def is_shared(self, place: str) -> bool:
        """Return whether what is at `place` is on the file server, and not on one host."""
        return not place.startswith(self.LOCAL)

    def make(self, mode: int, kind: int = stat.S_IFREG) -> Inode:
        number = min(self._inode_numbers)
        self._inode_numbers.discard(number)
        return Inode(number, kind | mode)

    def add(self, path: str, mode: int, kind: int = stat.S_IFREG) -> Inode:
        """Make what is to be at `path`, where nothing is, in a directory that is there."""
        directory = os.path.dirname(path)
        if directory != self.DIRECTORY and directory not in self.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        inode = self.names[path] = self.make(mode, kind)
        inode.names = 1
        return inode

    def open(self, inode: Inode, flags: int, process: Process, path: str) -> int:
        self._next += 1
        inode.opened.add(self._next)
        self.opened[self._next] = Opened(inode, flags, process, path)
        return self._next

    def find(self, fd: int) -> Opened:
        found = self.opened.get(fd)
        if found is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return found

    def close(self, fd: int) -> None:
        inode = self.find(fd).inode
        del self.opened[fd]
        inode.opened.discard(fd)
        inode.locks = [lock for lock in inode.locks if lock[0] != fd]
        self.release(inode)

    def release(self, inode: Inode) -> None:
        if not inode.names and not inode.opened:
            self._inode_numbers.add(inode.number)

    def bury(self, process: Process) -> None:
        """The kernel closes what `process` had open."""
        for fd, opened in list(self.opened.items()):
            if opened.process is process:
                self.close(fd)
        for socket in self.sockets:
            if socket.process is process:
                socket.close()

    # -- hosts that vanish -----------------------------------------------------------------------------------------

    def _is_kept(self, inode: Inode) -> bool:
        """Return whether a host that has vanished has `inode` open, so that the server waits for its answer."""
        return any(self.opened[fd].process.host in self.vanished for fd in inode.opened)

    def reach(self, inode: Inode) -> int:
        """Wait for the server; return the size by which the call of the process that runs is answered.

        Other hosts write back what only they have of the file: the server asks them to.
        """
        host, size = self.scheduler.process.host, None
        if self.vanished and self._is_kept(inode):
            self.blocked += 1
            self.scheduler.block(lambda: not self._is_kept(inode), math.inf)
            if self.rng.random() < 0.9:
                size = min(inode.known.get(host, len(inode.data)), len(inode.data))
                self.old_answers += size < len(inode.data)
        for other in [name for name in inode.unsynced if name != host]:
            del inode.unsynced[other]
        inode.known[host] = len(inode.data)
        return len(inode.data) if size is None else size

    def evict(self, host: str) -> None:
        """The server evicts `host`, which has vanished: its locks are free, and what only its cache had is lost."""
        for inode in {*self.names.values(), *(opened.inode for opened in self.opened.values())}:
            for start, end in reversed(inode.unsynced.pop(host, [])):
                self.holes += 1
                inode.data[start:end] = bytes(end - start)
                if end == len(inode.data) and self.rng.random() < 0.5:
                    del inode.data[start:]
        for process in {opened.process for opened in self.opened.values() if opened.process.host == host}:
            self.bury(process)
        self.vanished.discard(host)

    def ring(self, inode: Inode, mask: int) -> None:
        inode.changed = self.scheduler.now
        for events in inode.events:
            if events.host == self.scheduler.process.host:
                events.raise_event(mask)

    def drop_name(self, path: str) -> None:
        inode = self.names.pop(path)
        inode.names -= 1
        self.kept[path] = inode
        self.ring(inode, ATTRIB | (0 if inode.opened else DELETE_SELF))
        self.release(inode)

    # -- locks -----------------------------------------------------------------------------------------------------

    def conflict(self, inode: Inode, fd: int, kind: int, start: int, end: int) -> tuple[int, int, int, int] | None:
        for lock in inode.locks:
            if lock[0] != fd and lock[2] < end and start < lock[3] and 1 in (kind, lock[1]):  # 1 is F_WRLCK
                return lock
        return None

    def set_lock(self, inode: Inode, fd: int, kind: int, start: int, end: int) -> None:
        kept = []
        for lock in inode.locks:
            if lock[0] == fd and lock[2] < end and start < lock[3]:
                kept += [
                    (fd, lock[1], first, last) for first, last in ((lock[2], start), (end, lock[3])) if first < last
                ]
            else:
                kept.append(lock)
        if kind != 2:  # F_UNLCK
            kept.append((fd, kind, start, end))
        inode.locks = kept


class Fcntl:
    """`fcntl`, as far as fscoord uses it on Linux, with the numbers of Linux."""

    F_RDLCK, F_WRLCK, F_UNLCK = 0, 1, 2
    F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW = 36, 37, 38
    LOCK_SH, LOCK_EX, LOCK_NB, LOCK_UN = 1, 2, 4, 8

    def __init__(self, files: Files) -> None:
        self._files = files

    def fcntl(self, fd: int, command: int, given: bytes) -> bytes:
        files = self._files
        if files.scheduler.is_over:
            return given
        kind, _, start, length, _ = _FLOCK.unpack(given)
        name = {36: "GETLK", 37: "SETLK", 38: "SETLKW"}[command]
        files.scheduler.step(name, f"{fd} {kind} {start:x}+{length}")
        opened = files.find(fd)
        inode, end = opened.inode, start + length if length else FOREVER
        conflict = files.conflict(inode, fd, kind, start, end)
        if command == self.F_OFD_GETLK:
            if conflict is None:
                return _FLOCK.pack(self.F_UNLCK, 0, start, length, 0)
            return _FLOCK.pack(conflict[1], 0, conflict[2], conflict[3] - conflict[2], -1)
        access = opened.flags & os.O_ACCMODE
        if (kind == self.F_WRLCK and access == os.O_RDONLY) or (kind == self.F_RDLCK and access == os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._lock(fd, kind, start, end, waits=command == self.F_OFD_SETLKW)
        return given

    def flock(self, fd: int, how: int) -> None:
        files = self._files
        if files.scheduler.is_over:
            return
        files.scheduler.step("flock", f"{fd} {how}")
        kind = {self.LOCK_SH: self.F_RDLCK, self.LOCK_EX: self.F_WRLCK, self.LOCK_UN: self.F_UNLCK}[how & ~self.LOCK_NB]
        is_one_space = files.is_lustre and files.is_shared(files.find(fd).path)
        self._lock(fd, kind, 0 if is_one_space else FOREVER, FOREVER + 1, waits=not how & self.LOCK_NB)

    def _lock(self, fd: int, kind: int, start: int, end: int, *, waits: bool) -> None:
        files, inode = self._files, self._files.find(fd).inode
        if kind != self.F_UNLCK and files.conflict(inode, fd, kind, start, end) is not None:
            if not waits:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            if files.is_shared(files.find(fd).path) and files.rng.random() < files.deadlocks:
                files.called_deadlocks += 1
                raise OSError(errno.EDEADLK, os.strerror(errno.EDEADLK))
            files.scheduler.block(lambda: files.conflict(inode, fd, kind, start, end) is None, math.inf)
            files.find(fd)
        files.set_lock(inode, fd, kind, start, end)


class FlockLocker(Fcntl):
    """What portalocker's `FlockLocker` is."""

    def lock(self, fd: int, flags: int) -> None:
        try:
            self.flock(fd, flags)
        except BlockingIOError as error:
            raise exceptions.AlreadyLocked(error) from error
        except OSError as error:
            raise exceptions.LockException(error) from error


PASSED_ON = frozenset(("path", "fspath", "fsencode", "fsdecode", "strerror", "geteuid", "get_inheritable"))


class Os(ModuleType):
    """`os`, as far as `fscoord.FileStore` uses it; each call is a step."""

    def __init__(self, files: Files, alive: Any) -> None:
        super().__init__("os")
        self._files, self._alive = files, alive
        self.environ = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}

    def __getattr__(self, name: str) -> Any:
        if name in PASSED_ON or name.isupper():
            return getattr(os, name)
        raise AttributeError(f"the simulation has no os.{name}")

    def _find(self, path: str) -> Inode:
        files = self._files
        if path == files.DIRECTORY:
            return files.directory
        inode = files.names.get(files.place(path))
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return inode

    def getpid(self) -> int:
        return self._files.scheduler.process.number

    def kill(self, pid: int, _: int) -> None:
        self._files.scheduler.step("kill", pid)
        if not self._alive(pid):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    def sched_yield(self) -> None:
        self._files.scheduler.give_way()

    # -- names -----------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        files = self._files
        files.scheduler.step("open", path.removeprefix(files.DIRECTORY))
        place = files.place(path)
        if place not in files.names and path != files.DIRECTORY and flags & os.O_CREAT:
            self._have_space()
            files.add(place, mode)
        elif flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        inode = self._find(path)
        if flags & os.O_TRUNC:
            del inode.data[:]
        return files.open(inode, flags, files.scheduler.process, place)

    def close(self, fd: int) -> None:
        files = self._files
        if files.scheduler.is_over or files.scheduler.process.host in files.vanished:
            return
        if fd in files.opened:  # else the process is dead, and the kernel has done it
            files.close(fd)  # no step, for whoever collects garbage must not die of it

    def link(self, source: str, target: str) -> None:
        files = self._files
        files.scheduler.step("link", target)
        inode, place = self._find(source), files.place(target)
        if place in files.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        files.names[place] = inode
        inode.names += 1

    def rename(self, source: str, target: str) -> None:
        files = self._files
        files.scheduler.step("rename", target)
        inode, place = self._find(source), files.place(target)
        if os.path.dirname(place) not in files.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), target)
        if place in files.names:
            files.drop_name(place)
        del files.names[files.place(source)]
        files.names[place] = inode

    def mkdir(self, path: str, mode: int) -> None:
        files = self._files
        files.scheduler.step("mkdir", path)
        if files.place(path) in files.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._have_space()
        files.add(files.place(path), mode, stat.S_IFDIR)

    def rmdir(self, path: str) -> None:
        files = self._files
        files.scheduler.step("rmdir", path)
        self._find(path)
        place = files.place(path)
        if any(name.startswith(place + "/") for name in files.names):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        files.drop_name(place)

    def unlink(self, path: str) -> None:
        scheduler = self._files.scheduler
        if os.path.basename(os.path.dirname(path)) != "a":
            scheduler.step("unlink", path)
        elif scheduler.is_over or scheduler.process.is_dead:
            return  # an address of `Station`: no step, for whoever collects garbage must not die of it
        inode = self._find(path)
        self._files.drop_name(self._files.place(path))
        if stat.S_ISLNK(inode.mode) and not path.startswith(self._files.LOCAL):
            self._lose_answer(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path))

    def symlink(self, text: str | bytes, path: str) -> None:
        files = self._files
        files.scheduler.step("symlink", path)
        if files.is_lustre and files.is_shared(files.place(path)):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        taken = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        place = files.place(path)
        if place in files.names:
            raise taken
        self._have_space()
        files.add(place, 0o777, stat.S_IFLNK).data[:] = os.fsencode(text)
        if not path.startswith(files.LOCAL):
            self._lose_answer(taken)

    def readlink(self, path: str) -> str:
        self._files.scheduler.step("readlink", path)
        inode = self._find(path)
        if not stat.S_ISLNK(inode.mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return os.fsdecode(bytes(inode.data))

    def _lose_answer(self, repeated: OSError) -> None:
        """Nothing, or the answer gets lost: what the call was to do is done, and it fails, or fails when `repeated`."""
        files = self._files
        if files.rng.random() < files.loses:
            files.lost += 1
            raise files.rng.choice([repeated, OSError(errno.EIO, os.strerror(errno.EIO))])

    def listdir(self, path: str) -> list[str]:
        self._files.scheduler.step("listdir")
        self._find(path)
        place = self._files.place(path)
        names = [os.path.basename(name) for name in self._files.names if os.path.dirname(name) == place]
        self._files.rng.shuffle(names)
        return names

    def stat(self, path: str, *, follow_symlinks: bool = True) -> Any:
        self._files.scheduler.step("stat", path)
        found = _status(self._find(path), self._files)
        if stat.S_ISDIR(found.st_mode) and path.startswith(self._files.LOCAL):
            place = self._files.place(path)  # a directory of tmpfs counts its names
            found.st_size = 20 * sum(os.path.dirname(name) == place for name in self._files.names)
        return found

    # -- what is open ----------------------------------------------------------------------------------------------

    def getxattr(self, fd: int, _: str) -> bytes:
        self._files.scheduler.step("getxattr", fd)
        self._files.find(fd)
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))

    def fchmod(self, fd: int, mode: int) -> None:
        self._files.scheduler.step("fchmod", fd)
        inode = self._files.find(fd).inode
        inode.mode = stat.S_IFREG | mode
        self._files.ring(inode, ATTRIB)

    def fstat(self, fd: int) -> Any:
        self._files.scheduler.step("fstat", fd)
        inode = self._files.find(fd).inode
        size = self._files.reach(inode)
        found = _status(inode, self._files)
        found.st_size = size
        return found

    def lseek(self, fd: int, offset: int, whence: int) -> int:
        opened = self._files.find(fd)
        opened.place = offset + (0, opened.place, len(opened.inode.data))[whence]
        return opened.place

    def read(self, fd: int, size: int) -> bytes:
        self._files.scheduler.step("read", fd)
        opened = self._files.find(fd)
        end = min(opened.place + size, self._files.reach(opened.inode))
        data = bytes(opened.inode.data[opened.place : end])
        opened.place += len(data)
        return data

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self._files.scheduler.step("pread", f"{fd} {offset}")
        inode = self._files.find(fd).inode
        return bytes(inode.data[offset : min(offset + size, self._files.reach(inode))])

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        (buffer,) = buffers
        data = self.pread(fd, len(buffer), offset)
        buffer[: len(data)] = data
        return len(data)

    def write(self, fd: int, data: bytes) -> int:
        files = self._files
        files.scheduler.step("write", f"{fd} {len(data)}")
        opened = files.find(fd)
        assert opened.flags & os.O_ACCMODE != os.O_RDONLY
        files.reach(opened.inode)
        room = len(data)
        if files.scheduler.steps < files.full_until:
            room = files.rng.choice([0, 0, 1, len(data) // 2, len(data) - 1])
            self._have_space(room)
        done = 0
        while done < room:
            part = room - done
            if part > 1 and files.rng.random() < files.tears:
                part = files.rng.randrange(1, part)
            place = len(opened.inode.data) if opened.flags & os.O_APPEND else opened.place
            opened.inode.data[place : place + part] = data[done : done + part]
            opened.inode.unsynced.setdefault(opened.process.host, []).append((place, place + part))
            opened.place, done = place + part, done + part
            files.ring(opened.inode, MODIFY)
            if done < room:
                try:
                    files.scheduler.step("write on", f"{fd} {done}")
                except Killed:
                    files.torn += 1
                    raise
        files.torn += 0 < done < len(data)
        return done

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self._files.scheduler.step("pwrite", f"{fd} {offset}")
        inode = self._files.find(fd).inode
        if len(inode.data) < offset:
            inode.data.extend(bytes(offset - len(inode.data)))
        inode.data[offset : offset + len(data)] = data
        self._files.ring(inode, MODIFY)
        return len(data)

    def ftruncate(self, fd: int, size: int) -> None:
        self._files.scheduler.step("ftruncate", f"{fd} {size}")
        self._have_space()
        inode = self._files.find(fd).inode
        del inode.data[size:]
        inode.data.extend(bytes(size - len(inode.data)))
        self._files.ring(inode, MODIFY)

    def fsync(self, fd: int) -> None:
        self._files.scheduler.step("fsync", fd)
        inode = self._files.find(fd).inode
        self._files.reach(inode)
        inode.unsynced.pop(self._files.scheduler.process.host, None)

    def fdatasync(self, fd: int) -> None:
        self.fsync(fd)

    def utime(self, fd: int) -> None:
        self._files.scheduler.step("utime", fd)
        self._files.ring(self._files.find(fd).inode, ATTRIB)

    def _have_space(self, room: int = 0) -> None:
        if not room and self._files.scheduler.steps < self._files.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _status(inode: Inode, files: Files) -> Any:
    nanoseconds = int(inode.changed) * 10**9 if files.is_lustre else int(inode.changed * 10**9)
    return SimpleNamespace(
        st_dev=1,
        st_ino=inode.number,
        st_nlink=inode.names,
        st_size=len(inode.data),
        st_mode=inode.mode,
        st_uid=os.geteuid(),
        st_gid=os.getegid(),
        st_mtime=nanoseconds / 10**9,
        st_mtime_ns=nanoseconds,
        st_ctime_ns=nanoseconds,
    )
