"""Datagram sockets of one host for the tasks of a `Scheduler`: what `Station` uses to tell authors their results."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from types import SimpleNamespace
from typing import Any, Final

from simulation.files import Files

POLLIN: Final = 1
QUEUED_MAX: Final = 10
"""As net.unix.max_dgram_qlen, unix(7)."""


class Socket:
    """What a `socket.socket` for datagrams is that never blocks. A datagram may get lost."""

    def __init__(self, files: Files) -> None:
        self._files, self.process = files, files.scheduler.process
        self.inbox: deque[bytes] = deque()
        self.is_closed = False
        files.sockets.append(self)

    def fileno(self) -> int:
        return self._files.sockets.index(self)

    def bind(self, path: str) -> None:
        files = self._files
        files.scheduler.step("bind", path)
        place = files.place(path)
        if place in files.names:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        files.add(place, 0o700, stat.S_IFSOCK).socket = self

    def _at(self, path: str) -> Socket:
        inode = self._files.names.get(self._files.place(path))
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if inode.socket is None or inode.socket.is_closed:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        found: Socket = inode.socket
        return found

    def connect(self, path: str) -> None:
        self._files.scheduler.step("connect", path)
        self._at(path)

    def sendto(self, data: bytes, path: str) -> int:
        files = self._files
        files.scheduler.step("sendto", path)
        inbox = self._at(path).inbox
        if len(inbox) >= QUEUED_MAX:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if not (files.loses_datagrams and files.rng.random() < files.loses_datagrams):
            inbox.append(data)
        return len(data)

    def recv(self, size: int) -> bytes:
        self._files.scheduler.step("recv")
        if not self.inbox:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self.inbox.popleft()[:size]

    def close(self) -> None:
        self.is_closed = True  # no step, for whoever collects garbage must not die of it


class Poll:
    """What `select.poll()` returns, for one socket."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._socket: Any = None

    def register(self, number: int, _: int) -> None:
        self._socket = self._files.sockets[number]

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        scheduler, inbox = self._files.scheduler, self._socket.inbox
        scheduler.step("poll", f"{milliseconds:.6f}")
        is_there = scheduler.block(lambda: bool(inbox), scheduler.now + milliseconds / 1000)
        return [(self._socket.fileno(), POLLIN)] if is_there else []


def select_of(files: Files) -> Any:
    """Return what `select` is to the tasks."""
    return SimpleNamespace(POLLIN=POLLIN, poll=lambda: Poll(files))
