"""What a hand can do to the files of an examination: open, lock, append, look, watch, replace, claim names.

Each act is a method whose arguments and result go through JSON. Files are named by a word, below the meeting place.
"""

from __future__ import annotations

import random
from typing import Any, Final

from fscoord._log.access.mount import find_mount
from fscoord._log.io import safe_files
from fscoord._log.locking.log_lock import KINDS, LogLock
from fscoord._runtime import system
from fscoord._runtime.file_events import LOG_CHANGED, watch_file
from fscoord.doctor import lines
from fscoord.doctor.place import GROUP_UMASK, OWN_MODE, content, file_mode, group_of, new_file

__all__ = ["Acts", "Opened"]

CHUNK: Final = 1 << 16
NAP_S: Final = 0.0005
TAKE_S: Final = 60.0
"""How long a lock is tried for: longer than anybody waits for an answer. A hand whose asking process was killed in the
meantime would try for ever."""
O_DIRECT: Final = getattr(system.os, "O_DIRECT", 0)


class Opened:
    """A file as a store has it: one descriptor that appends and locks, one that reads and only moves forward."""

    def __init__(self, path: str, *, is_nfs: bool = False, mode: int = OWN_MODE) -> None:
        self.path = path
        self._is_nfs = is_nfs
        self.writer = safe_files.open_descriptor(path, system.os.O_RDWR | system.os.O_APPEND | system.os.O_CREAT, mode)
        self.reader = safe_files.open_descriptor(path, system.os.O_RDONLY)
        self._mutex = system.threading.RLock()
        self._locks: dict[tuple[str, bool], LogLock] = {}
        self._direct = -1
        self._pending: dict[int, bytes] = {}

    def lock(self, kind: str, *, shared: bool = False) -> LogLock:
        """Return the lock of a log, of this kind, on this file."""
        if (kind, shared) not in self._locks:
            fd = self.reader if shared else self.writer
            self._locks[kind, shared] = LogLock(self.path, fd, KINDS[kind], self._mutex, set(), shared=shared)
        return self._locks[kind, shared]

    def take(self, kind: str, *, shared: bool = False) -> bool:
        """Take the lock if it is free; return whether it was."""
        lock = self.lock(kind, shared=shared)
        try:
            lock.try_lock()
        except OSError as error:
            if not lock.is_taken(error):
                raise
            return False
        return True

    def await_lock(self, kind: str, *, shared: bool = False) -> None:
        """Try to take the lock until it is free.

        Raises:
            TimeoutError: another had it for `TAKE_S` seconds.
        """
        deadline = system.time.monotonic() + TAKE_S
        while not self.take(kind, shared=shared):
            if system.time.monotonic() >= deadline:
                raise TimeoutError(system.errno.ETIMEDOUT, f"another had its lock for {TAKE_S:g} s", self.path)
            system.time.sleep(random.uniform(0.1, 1) * NAP_S)

    def append(self, kind: str, data: bytes) -> None:
        """Append as a store does that has the lock: on NFS, with a marker file for one, past the cache."""
        if self.way(kind) != "direct":
            safe_files.write_all(self.writer, data)
            return
        fd = safe_files.open_descriptor(self.path, system.os.O_WRONLY | O_DIRECT)
        try:
            system.os.lseek(fd, 0, system.os.SEEK_END)
            safe_files.write_all(fd, data)
        finally:
            system.close_quietly(fd)

    def way(self, kind: str) -> str:
        """Return how a store that has the lock looks: a marker file, other than a lock, makes no cache of NFS valid."""
        return "direct" if kind == "soft" and self._is_nfs else "plain"

    def read(self, how: str, kind: str) -> list[lines.Line | None]:
        """Return the lines that are new since the last look of this way.

        Args:
            how: ``"plain"``, ``"locked"`` (under the shared lock) or ``"direct"`` (O_DIRECT, without a lock).
            kind: of which kind the shared lock is.
        """
        if kind == "soft" and how != "direct":
            self._forget()
        if how == "locked":
            self.await_lock(kind, shared=True)
            try:
                return self._forward(self.reader)
            finally:
                self.lock(kind, shared=True).unlock()
        if how == "direct":
            if self._direct < 0:
                self._direct = safe_files.open_descriptor(self.path, system.os.O_RDONLY | O_DIRECT)
            return self._forward(self._direct)
        return self._forward(self.reader)

    def _forget(self) -> None:
        """Open the file again and drop what the kernel keeps of it, as a store does whose lock validates no cache."""
        fd = safe_files.open_descriptor(self.path, system.os.O_RDONLY)
        if hasattr(system.os, "posix_fadvise"):
            system.os.posix_fadvise(fd, 0, 0, system.os.POSIX_FADV_DONTNEED)
        system.os.lseek(fd, system.os.lseek(self.reader, 0, system.os.SEEK_CUR), system.os.SEEK_SET)
        self._pending[fd] = self._pending.pop(self.reader, b"")
        system.close_quietly(self.reader)
        self.reader = fd

    def _forward(self, fd: int) -> list[lines.Line | None]:
        """Read on. From a line that is not sound one steps back: it may be a cache's first, wrong idea of it."""
        data = self._pending.get(fd, b"") + system.os.read(fd, CHUNK)
        found = lines.decode(data)
        sound = next((index for index, line in enumerate(found) if line is None), len(found))
        if sound < len(found):
            rest = len(data) - sound * lines.LINE_SIZE
            system.os.lseek(fd, -rest, system.os.SEEK_CUR)
            self._pending[fd] = b""
            return found[: sound + 1]
        self._pending[fd] = data[len(found) * lines.LINE_SIZE :]
        return found

    def read_all(self) -> bytes:
        """Return all that the file holds."""
        return content(self.path)

    def close(self) -> None:
        """Close every descriptor, which gives the kernel's locks back."""
        for lock in self._locks.values():
            try:
                lock.unlock()
            except OSError:  # closing the descriptor will do
                pass
            lock.close()
        system.close_quietly(self.writer, self.reader, self._direct)


class Acts:
    """One hand's files below `directory`."""

    def __init__(self) -> None:
        self.directory = ""
        self.mode = OWN_MODE
        self.files: dict[str, Opened] = {}
        self._watch: Any = None

    def settle(self, directory: str) -> None:
        """Work below `directory` from now on."""
        self.directory = directory
        self.mode = file_mode(directory)
        if self.mode != OWN_MODE:
            system.os.umask(GROUP_UMASK)

    def facts(self, path: str) -> dict[str, Any]:
        """Return what can be known of `path` and of this host without trying anything."""
        real = system.os.path.realpath(path)
        found = system.os.stat(real)
        if not system.stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(system.errno.ENOTDIR, "name the directory, not a file in it", path)
        mount = find_mount(real)
        return {
            "path": real,
            "kind": mount.kind,
            "point": mount.point,
            "options": list(mount.options),
            "is_local": mount.is_local,
            "coherence": mount.coherence,
            "objections": {kind: mount.objection(kind) for kind in KINDS},
            "caution": mount.caution,
            "device": found.st_dev,
            "group": group_of(found),
            "host": system.hostname(),
            "boot_id": system.boot_id().hex(),
            "network": system.namespace("net"),
            "kernel": system.os.uname().release,
        }

    def lock(self, name: str, kind: str, shared: bool = False) -> bool:
        """Take the lock of the file if it is free; return whether it was."""
        return self.file(name).take(kind, shared=shared)

    def unlock(self, name: str, kind: str, shared: bool = False) -> None:
        """Give the lock of the file back."""
        self.file(name).lock(kind, shared=shared).unlock()

    def block(self, name: str, kind: str) -> float:
        """Wait for the lock, in the kernel if it can; return after how many seconds it came."""
        file = self.file(name)
        start = system.time.monotonic()
        if kind == "soft":
            file.await_lock(kind)
        else:
            file.lock(kind).block(file.writer)
        return system.time.monotonic() - start

    def time_lock(self, name: str, kind: str, seconds: float) -> float:
        """Return how many seconds it takes to take a free lock and to give it back: the median."""
        lock = self.file(name).lock(kind)
        took: list[float] = []
        deadline = system.time.monotonic() + seconds
        while not took or system.time.monotonic() < deadline:
            start = system.time.perf_counter()
            lock.try_lock()
            lock.unlock()
            took.append(system.time.perf_counter() - start)
        return sorted(took)[len(took) // 2]

    def tally(self, name: str, kind: str) -> dict[str, Any]:
        """Return what the whole file holds, looked at under the lock."""
        file = self.file(name)
        file.await_lock(kind)
        try:
            return lines.tally(file.read_all())._asdict()
        finally:
            file.lock(kind).unlock()

    def append(self, name: str, kind: str, number: int, writer: str) -> None:
        """Append one line under the lock."""
        file = self.file(name)
        file.await_lock(kind)
        try:
            file.append(kind, lines.encode(number, writer))
        finally:
            file.lock(kind).unlock()

    def look(self, name: str, kind: str, how: str) -> list[int]:
        """Return the numbers of the lines that are new, 0 for one that is not sound; ``[-1]``: no such way here."""
        try:
            return [0 if line is None else line.number for line in self.file(name).read(how, kind)]
        except OSError as error:
            if how != "direct" or error.errno != system.errno.EINVAL:
                raise
            return [-1]

    def watch(self, name: str) -> bool:
        """Watch the file for events from now on; return whether that is possible."""
        self.file(name)
        try:
            self._watch = watch_file(self.path(name), LOG_CHANGED, lambda: None)
        except (OSError, ImportError):
            return False
        return bool(self._watch.is_pollable)

    def watched(self, seconds: float) -> bool:
        """Return whether an event came, at once or within so many seconds."""
        try:
            return bool(self._watch.wait(seconds))
        finally:
            self._watch.close()
            self._watch = None

    def replace(self, name: str, number: int) -> None:
        """Rename another file, which holds one line of this number, over the file."""
        draft = self.path(f".{name}.{system.os.getpid()}")
        fd = new_file(draft, self.mode)
        try:
            safe_files.write_all(fd, lines.encode(number, "replaced"))
            system.os.fsync(fd)
        finally:
            system.close_quietly(fd)
        system.os.rename(draft, self.path(name))

    def reopened(self, name: str, number: int, seconds: float) -> float | None:
        """Return after how many seconds a fresh open of the name shows the line `number`, None if not in `seconds`."""
        start = system.time.monotonic()
        while True:
            file = Opened(self.path(name), mode=self.mode)
            try:
                found = lines.decode(file.read_all())
            except OSError as error:
                if error.errno != system.errno.ESTALE:
                    raise
                found = []
            finally:
                file.close()
            waited = system.time.monotonic() - start
            if found and found[-1] is not None and found[-1].number == number:
                return waited
            if waited > seconds:
                return None
            system.time.sleep(NAP_S)

    def claim(self, stem: str, how: str, count: int) -> list[int]:
        """Try to be the first to make each of the names ``STEM.0`` to ``STEM.COUNT-1``; return which it was."""
        won = []
        source = self.path(f".{stem}.{system.random_bytes(4).hex()}")
        system.close_quietly(new_file(source, self.mode))
        for number in range(count):
            path = self.path(f"{stem}.{number}")
            try:
                if how == "link":
                    system.os.link(source, path)
                elif how == "mkdir":
                    system.os.mkdir(path)
                else:
                    system.close_quietly(new_file(path, self.mode))
                won.append(number)
            except FileExistsError:
                pass
        safe_files.unlink_quietly(source)
        return won

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()
        self.files.clear()

    def file(self, name: str) -> Opened:
        """Return the file of this name, open."""
        if name not in self.files:
            path = self.path(name)
            self.files[name] = Opened(path, is_nfs=find_mount(path).is_nfs, mode=self.mode)
        return self.files[name]

    def path(self, name: str) -> str:
        """Return the path of the file of this name."""
        # Questions come from other hosts by way of files: they name nothing outside of the meeting place.
        if not name or "/" in name or not self.directory:
            raise ValueError(f"{name!r} names no file of the examination")
        return system.os.path.join(self.directory, name)
