"""`two_writers.py SECONDS [PART [LOOKERS]]`: what two mounts lose that append and count under a lock.

It needs no fscoord. It runs in the labs `glab.py`, `clab.py` and `mlab.py`, or with NFS_A and NFS_B set to two mounts
of one file system. Each line of the output is one kind of lock and one way to write; PART selects those that contain
this text. A line says how often both processes had the lock, how many of the counter's increments and of the appended
lines are missing, and how many reads returned other bytes than were written. LOOKERS processes on each mount read
meanwhile, without the lock. Exit status: 0 some way is sound, 1 none is.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

LINE = 64
PER_FILE = 30
"""The lines of one file, after which the writer whose turn it is begins another."""
PAGE = 4096
DIRECT = os.O_DIRECT


def posix(fd: int, kind: int) -> None:
    fcntl.lockf(fd, kind)


def ofd(fd: int, kind: int) -> None:
    kinds = {fcntl.LOCK_EX: fcntl.F_WRLCK, fcntl.LOCK_UN: fcntl.F_UNLCK}
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", kinds[kind], os.SEEK_SET, 0, 0, 0))


LOCKS: dict[str, Callable[[int, int], None]] = {"ofd": ofd, "posix": posix, "flock": fcntl.flock}
STEPS = ("between two turns", "locking", "counting", "reading", "appending", "unlocking")
HANG_S = 20.0
WAYS = (
    "append",
    "append+fsync",
    "fstat+append",
    "read+append",
    "reopen+append",
    "pwrite at fstat",
    "pwrite at read",
    "direct append",
)


def read_all(fd: int) -> bytes:
    """Return the bytes of the file, in aligned reads, which O_DIRECT asks for."""
    found, buffer = b"", mmap.mmap(-1, 1 << 20)
    while count := os.preadv(fd, [buffer], len(found)):
        found += buffer[:count]
        if count % PAGE:
            break
    return found


def line_of(index: int, size: int) -> bytes:
    """Return line `index` of all lines: it tells where it belongs."""
    return f"{index}".ljust(size - 1).encode() + b"\n"


class Writer:
    """One process on one mount.

    `shared` is memory of both: [0] how many have the lock, [1] how often both had it, [2] the number of lines, and the
    step of each process, which is the place in `STEPS`.
    """

    def __init__(self, number: int, directory: str, lock: str, way: str, shared: Any) -> None:
        self.number = number
        self.directory, self.lock, self.way, self.shared = directory, LOCKS[lock], way, shared
        self.size = PAGE if way == "direct append" else LINE
        self.locked = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT)
        extra = DIRECT if way.startswith("direct") else 0
        at_end = 0 if way.startswith("pwrite") else os.O_APPEND
        self.flags = os.O_RDWR | os.O_CREAT | at_end | extra
        self.lines, self.file = -1, -1
        self.counter = os.open(f"{directory}/counter", os.O_RDWR | os.O_CREAT | extra)
        self.tally = {"written": 0, "misplaced": 0, "misread": 0}
        self.page = mmap.mmap(-1, PAGE)

    def begin(self, step: str) -> None:
        self.shared[3 + self.number] = STEPS.index(step)

    def turn(self) -> None:
        self.begin("locking")
        self.lock(self.locked, fcntl.LOCK_EX)
        if self.shared[0]:
            self.shared[1] += 1
        self.shared[0] += 1
        try:
            self.begin("counting")
            self.count()
            if self.way == "read+append":
                self.begin("reading")
                self.read()
            self.begin("appending")
            self.append(line_of(self.shared[2], self.size))
            self.tally["written"] += 1
        finally:
            self.shared[0] -= 1
            self.begin("unlocking")
            self.lock(self.locked, fcntl.LOCK_UN)

    def count(self) -> None:
        self.page[:8] = bytes(8)
        if "fstat" in self.way:
            os.fstat(self.counter)
        os.preadv(self.counter, [self.page], 0)
        self.page[:8] = (int.from_bytes(self.page[:8], "little") + 1).to_bytes(8, "little")
        os.pwritev(self.counter, [self.page], 0)
        if "fsync" in self.way:
            os.fsync(self.counter)

    def path(self, file: int) -> str:
        return f"{self.directory}/lines.{file}"

    def read(self) -> None:
        """Read the newest file by a new descriptor. Each line must be in its place."""
        file, count = divmod(self.shared[2], PER_FILE)
        if not count:
            return
        fd = os.open(self.path(file), os.O_RDONLY | self.flags & DIRECT)
        expected = b"".join(line_of(file * PER_FILE + place, self.size) for place in range(count))
        found = read_all(fd)
        os.close(fd)
        if found != expected:
            self.tally["misread"] += 1

    def append(self, line: bytes) -> None:
        file, count = divmod(self.shared[2], PER_FILE)
        if file != self.file or self.way == "reopen+append":
            if self.lines >= 0:
                os.close(self.lines)
            self.file, self.lines = file, os.open(self.path(file), self.flags)
        if self.way == "fstat+append":
            os.fstat(self.lines)
        if self.way.startswith("pwrite"):
            # Each process has the lock, so the end that it reads here is where its line belongs.
            end = os.fstat(self.lines).st_size if self.way == "pwrite at fstat" else len(read_all(self.lines))
            os.pwrite(self.lines, line, end)
        else:
            self.page[: self.size] = line
            os.writev(self.lines, [memoryview(self.page)[: self.size]])
            if os.lseek(self.lines, 0, os.SEEK_CUR) != (count + 1) * self.size:
                self.tally["misplaced"] += 1
        if "fsync" in self.way:
            os.fsync(self.lines)
        self.shared[2] += 1


def look(writer: Writer) -> None:
    """Read the newest file for ever, without the lock, by a new descriptor. Count first lines that nobody wrote."""
    while True:
        file = writer.shared[2] // PER_FILE
        with suppress(FileNotFoundError):
            fd = os.open(writer.path(file), os.O_RDONLY | writer.flags & DIRECT)
            os.preadv(fd, [writer.page], 0)
            os.close(fd)
            expected = line_of(file * PER_FILE, writer.size)
            found = writer.page[: writer.size]
            writer.shared[8] += found.strip(b"\0") not in (expected, b"")
            writer.shared[9] += 1
            writer.page[:] = bytes(PAGE)


def fork(call: Callable[[], object]) -> int:
    pid = os.fork()
    if not pid:
        try:
            call()
        finally:
            os._exit(0)
    return pid


def run(directories: list[str], lock: str, way: str, seconds: float, lookers: int) -> bool:
    """Let both mounts write, print what is missing, and return whether nothing is."""
    memory = mmap.mmap(-1, PAGE)
    shared = memoryview(memory).cast("Q")
    children, pipes = [], []
    name = f"{lock}-{way.replace(' ', '-')}-{time.time_ns()}"
    places = [f"{directory}/{name}" for directory in directories]
    os.mkdir(places[0])
    others = [fork(partial(look, Writer(0, place, lock, way, shared))) for place in places for _ in range(lookers)]
    for number, place in enumerate(places):
        inlet, outlet = os.pipe()

        def write(number: int = number, place: str = place, outlet: int = outlet) -> None:
            writer = Writer(number, place, lock, way, shared)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                writer.turn()
            os.write(outlet, struct.pack("QQQ", *writer.tally.values()))

        children.append(fork(write))
        os.close(outlet)
        pipes.append(inlet)
    until = time.monotonic() + seconds + HANG_S
    for number, pipe in enumerate(pipes):
        if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            print(f"{lock:6}{way:17}mount {number} hangs: {STEPS[shared[3 + number]]}", flush=True)
            for pid in children + others:
                os.kill(pid, signal.SIGKILL)
            return False
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    ends = [struct.unpack("QQQ", os.read(pipe, 24).ljust(24, b"\0")) for pipe in pipes]
    for pid in children + others:
        os.waitpid(pid, 0)
    written, misplaced, misread = map(sum, zip(*ends, strict=True))
    with open(f"{places[1]}/counter", "rb") as file:
        missing = written - int.from_bytes(file.read(8), "little")
    kept = []
    for file in range(shared[2] // PER_FILE + 1):
        with suppress(FileNotFoundError), open(f"{places[1]}/lines.{file}", "rb") as lines:
            kept += [line for line in lines.read().split(b"\n") if line.strip(b"\0 ")]
    lost = written - len(kept)
    print(
        f"{lock:6}{way:17}{written:6} turns; both had the lock {shared[1]} times; {missing} increments missing;"
        f" {lost} lines lost; {misread} reads and {shared[8]} of {shared[9]} looks showed other bytes;"
        f" {misplaced} appends that the kernel placed elsewhere",
        flush=True,
    )
    return not (shared[1] or missing or lost or misread or shared[8])


def main(seconds: float, only: str = "", lookers: str = "0") -> int:
    directories = [os.environ["NFS_A"], os.environ["NFS_B"]]
    both = [pair for pair in itertools.product(LOCKS, WAYS) if only in " ".join(pair)]
    return int(sum(run(directories, lock, way, seconds, int(lookers)) for lock, way in both) == 0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *sys.argv[2:]))
