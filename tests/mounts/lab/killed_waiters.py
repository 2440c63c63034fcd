"""`killed_waiters.py COUNT`: kill COUNT processes at once that wait for one lock, and tell whether their mount hangs.

It needs no fscoord. In the lab of `glab.py`, with `--set client.event-threads=2`, the mount hangs in most runs; see
`docs/filesystems.md`. Exit status: 0 it does not hang, 1 it does.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import sys
import time
from collections.abc import Callable

LIMIT_S = 10.0
SETTLE_S = 1.0
"""How long the processes have to begin to wait for the lock."""


def lock(fd: int, *, wait: bool) -> None:
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))


def start(call: Callable[[], object]) -> int:
    """Fork a process that makes `call` and ends; return its number."""
    pid = os.fork()
    if not pid:
        try:
            call()
        finally:
            os._exit(0)
    return pid


def ends(pid: int) -> bool:
    """Return whether the process ends within `LIMIT_S` seconds."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    return False


def main(count: int) -> int:
    holder = os.open(f"{os.environ['NFS_A']}/waiters", os.O_RDWR | os.O_CREAT)
    lock(holder, wait=False)
    path = f"{os.environ['NFS_B']}/waiters"
    waiters = [start(lambda: lock(os.open(path, os.O_RDWR), wait=True)) for _ in range(count)]
    time.sleep(SETTLE_S)
    for pid in waiters:
        os.kill(pid, signal.SIGKILL)
    left = sum(not ends(pid) for pid in waiters)
    hangs = not ends(start(lambda: os.close(os.open(path, os.O_RDWR))))
    print(f"{count} waiters killed, {left} did not end, the mount {'hangs' if hangs else 'answers'}")
    return int(hangs)


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))
