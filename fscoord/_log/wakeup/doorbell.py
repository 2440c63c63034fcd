"""`Doorbell`: the bell file, through which writers wake waiters. It has a cell for each of 4,096 buckets of keys.

The file is beside the log, or in a directory of the host. A key belongs to a bucket by its hash. A cell has four bytes.
If a cell is armed, it contains a *token* that a waiter has written. Otherwise it contains zeros.

A waiter arms the cell of its key, reads the log once more, and sleeps until inotify reports an event of the bell file.
A writer reads the cell of its key after its append. If the cell is armed, the writer rings: it clears the cell and then
signals an event. A waiter that is woken reads the log if the cell no longer contains its token.

No system call reads and changes a byte of a file in one step, and no lock guards the cells. So a thread that pauses
between the read and the write of a cell may overwrite what other threads have written meanwhile. No ring is lost,
because **no token is written twice**:

- A waiter remembers the token that it has found or written. Once another thread has written the cell, that token never
  comes back. So after the next event the waiter reads the log.
- A waiter that overwrites a cell leaves it armed. A later writer signals an event for all waiters of the bucket.
- A writer that overwrites a cell signals an event afterwards.
- A writer that finds a cell cleared signals nothing. Every waiter of the bucket armed the cell before another writer
  cleared it, and that other writer signals an event afterwards.

`tests/unit/test_bell_schedules.py` tries every schedule of a few waiters and writers. A counter of one byte in each
cell would not be enough: a late write can restore an old value, and then two waiters and two writers lose a ring.

With the bell, a write wakes only the waiters of its bucket. If all waiters watched the log itself, a barrier of N
processes would cost N^2 wake-ups.

A cell is armed with pwrite(2), which raises IN_MODIFY. The ring is a utimensat(2), which raises IN_ATTRIB. Waiters
watch for IN_ATTRIB alone, so arming wakes no waiter. The cells are read and written by positional I/O. mmap(2) is not
used, because it kills the process if the disk is full. Under pyfakefs there is no bell.

A waiter that depends on a session also arms a cell for the end of that session. The process that closes the session
rings this cell.

The file also has the arrival slots, after the cells; see `fscoord.stores.file.arrival_slots`.

The bell is only a hint. If a writer is killed or stopped between the clearing and the signal, the waiter notices the
write at its next poll.

The kernel limits the inotify instances of a user (128 by default). A process that gets no instance opens a FIFO beside
the bell for reading, and sets a byte of the bell. A writer that rings and finds this byte set opens the FIFO for
writing and closes it at once. This hang-up wakes all readers of the FIFO (pipe(7), poll(2)). No process writes data
into the FIFO.

The FIFO loses no ring: the reader opens it and sets the byte before it arms a cell, and the writer reads the byte after
it has read an armed cell. If a writer is stopped while it has the FIFO open, the hang-up comes only when the FIFO is
closed. Until then the waiters poll.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Final
from zlib import crc32

from fscoord._log.files import safe_files
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

SIZE: Final = 4096
LAST_BUCKET: Final = SIZE - 1
CELL: Final = 4
"""The size of a cell, in bytes."""
CELLS_END: Final = SIZE * CELL
"""The offset of the first byte after the cells. `node_poller` uses the three bytes from here on."""
FIFO_BYTE: Final = CELLS_END + 3
"""The offset of the byte that is 1 once a process has opened the FIFO. `node_poller` uses the byte after it."""
STATE_SIZE: Final = CELLS_END + 8
"""How many bytes `Doorbell.read` returns: the cells, and the 8 bytes after them."""
FIFO_SUFFIX: Final = ".fifo"
_TOKENS: Final = 0xFFFFFFFF
_CLEARED: Final = bytes(CELL)


def bucket(key: bytes) -> int:
    """Return the number of the cell for `key`."""
    return crc32(key) & LAST_BUCKET


def cell(state: bytes, number: int) -> bytes:
    """Return cell `number` of `state`, a result of `Doorbell.read`."""
    start = number * CELL
    return state[start : start + CELL]


def low_bytes(state: bytes) -> bytes:
    """Return the first byte of each cell of `state`. The byte is odd if the cell is armed."""
    return state[:CELLS_END:CELL]


def session_end_bucket(session: int) -> int:
    """Return the number of the cell that is rung when the session with number `session` ends."""
    return bucket(b"\0end %d" % session)


class Doorbell:
    """An open bell file. If there is no file at `path`, the file is created, unless `create` is false.

    A new file gets the permissions of the log, whose path is `like`.

    Attributes:
        is_new: whether this object created the file.
        fd: the descriptor of the bell; -1 after `close`, and in a forked child.
        known_slots: {offset of an arrival slot: its content when this object last read or wrote it}.
        slot_users: {offset of an arrival slot: the call that uses it}.

    Raises:
        OSError: the bell can't be opened or created.
        InsecurePathError: the file at `path` is not a regular file, or other users can write it although `mode` does
            not allow that.
    """

    def __init__(self, path: str, mode: int, *, create: bool = True, like: str | None = None) -> None:
        self.path = path
        self.is_new = False
        # Each object begins with another number. The probability that two objects write the same token into a cell at
        # the same time is below one in 2**31. `__next__` is atomic, so two threads never get the same token.
        origin = f"{system.os.getpid()} {system.time.monotonic()} {id(self)}"
        self._next_token = count(crc32(origin.encode()), 2).__next__
        self._mode = mode
        self._fifo = -1
        self.known_slots: dict[int, bytes] = {}
        self.slot_users: dict[int, object] = {}
        self._descriptors = descriptors = system.Descriptors()
        system.close_when_collected(self, descriptors)
        self.fd = -1
        _bells.add(self)
        try:
            fd = safe_files.open_descriptor(path, system.os.O_RDWR, owned_fds=descriptors)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            if not create:
                raise
            safe_files.create(path, lambda _: bytes(STATE_SIZE), mode, durable=False, like=like)
            fd = safe_files.open_descriptor(path, system.os.O_RDWR, owned_fds=descriptors)
            self.is_new = True
        try:
            safe_files.check(path, fd, mode, read_only=False)
        except BaseException:
            system.close_all(system.os.close, self._descriptors)
            raise
        self.fd = fd

    def close(self) -> None:
        """Close the bell file and the FIFO."""
        self.fd = self._fifo = -1
        system.close_all(system.os.close, self._descriptors)

    def after_fork(self) -> None:
        """Forget the descriptors, which the fork has closed."""
        self.fd = self._fifo = -1

    def read(self) -> bytes:
        """Return the first `STATE_SIZE` bytes of the file. If the file is shorter, the rest is zeros."""
        return system.os.pread(self.fd, STATE_SIZE, 0).ljust(STATE_SIZE, b"\0")

    def arm(self, number: int, state: bytes | None = None) -> bytes:
        """Arm cell `number`, so that a write to this bucket rings. Return the token in the cell, for `is_rung`.

        Args:
            number: the bucket.
            state: the result of a call of `read` that the caller made after it had stored its event count. None: the
                cell is read now.
        """
        found = system.os.pread(self.fd, CELL, number * CELL) if state is None else cell(state, number)
        if found and found[0] & 1:
            return found
        token = (self._next_token() & _TOKENS | 1).to_bytes(CELL, "little")
        system.os.pwrite(self.fd, token, number * CELL)
        return token

    def is_rung(self, number: int, armed: bytes) -> bool:
        """Return whether a key of bucket `number` may have been written since `arm` returned the token `armed`."""
        return system.os.pread(self.fd, CELL, number * CELL) != armed

    def ring(self, *numbers: int) -> bool:
        """Wake the waiters of each of the buckets `numbers` whose cell is armed. Return whether a cell was armed."""
        is_armed = False
        try:
            for number in numbers:
                found = system.os.pread(self.fd, CELL, number * CELL)  # the only call if the write has no waiter
                if found and found[0] & 1:
                    is_armed = True
                    system.os.pwrite(self.fd, _CLEARED, number * CELL)
        finally:
            # Signal even if a signal handler has raised: other writers rely on the thread that cleared the cell. The
            # first call is of a C function, which no signal handler can prevent; see `interrupts`.
            if is_armed:
                try:
                    system.os.utime(self.fd)
                finally:
                    self._signal_fifo()
        return is_armed

    def signal(self) -> None:
        """Wake every process that watches the bell."""
        system.os.utime(self.fd)
        self._signal_fifo()

    def has_name(self) -> bool:
        """Return whether the path still leads to the open file."""
        try:
            named, found = system.os.stat(self.path, follow_symlinks=False), system.os.fstat(self.fd)
        except OSError as error:
            raise_if_foreign(error)
            return False
        return (named.st_dev, named.st_ino) == (found.st_dev, found.st_ino)

    def _signal_fifo(self) -> None:
        """Wake the processes that wait on the FIFO, if the byte at `FIFO_BYTE` is set."""
        if system.os.pread(self.fd, 1, FIFO_BYTE) != b"\1":
            return
        flags = system.os.O_WRONLY | system.O_NONBLOCK | system.O_CLOEXEC | system.O_NOFOLLOW
        opened: list[int] = []
        system.occupy_standard_descriptors()
        # One chain opens, records and closes the descriptor (rule 1 in `interrupts`). As long as any process has it
        # open, also a forked child, no ring wakes a reader.
        opening = partial(opened.extend, map(system.os.open, (self.path + FIFO_SUFFIX,), (flags,)))
        recording, forgetting = partial(system.loose.update, opened), partial(system.loose.difference_update, opened)
        try:
            system.in_one_chain(opening, recording, forgetting, partial(list, map(system.os.close, opened)))
        except OSError as error:  # ENXIO: no process reads it. After any other error the readers poll
            raise_if_foreign(error)

    def open_fifo(self) -> int:
        """Open the FIFO beside the bell for reading, and set the byte at `FIFO_BYTE`. Create the FIFO if it is missing.

        Return its descriptor. `close` closes it.

        Raises:
            OSError: the FIFO can't be opened or created, or the bell can't be written.
            InsecurePathError: the file is not a FIFO, or other users can write it although the mode of the bell does
                not allow that.
        """
        path, reading, owned_fds = self.path + FIFO_SUFFIX, system.os.O_RDONLY, self._descriptors
        try:
            fd = safe_files.open_descriptor(path, reading, owned_fds=owned_fds)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            safe_files.create_fifo(path, self._mode, self.fd, owned_fds)
            fd = safe_files.open_descriptor(path, reading, owned_fds=owned_fds)
        try:
            safe_files.check(path, fd, self._mode, read_only=False, is_fifo=True)
            system.os.pwrite(self.fd, b"\1", FIFO_BYTE)
        except BaseException:
            safe_files.close_owned(fd, owned_fds)
            raise
        self._fifo = fd
        return fd

    @property
    def is_lost(self) -> bool:
        """Whether writers can't ring this bell any more: the file has no name, or is not open.

        If this object has opened the FIFO, the result is also true if the FIFO has no name, or its byte is not set.
        """
        try:
            if self.fd < 0 or system.os.fstat(self.fd).st_nlink == 0:
                return True
            return self._fifo >= 0 and (
                system.os.fstat(self._fifo).st_nlink == 0 or system.os.pread(self.fd, 1, FIFO_BYTE) != b"\1"
            )
        except OSError as error:
            raise_if_foreign(error)
            return True


_bells = system.reset_in_child("bells", Doorbell.after_fork)
