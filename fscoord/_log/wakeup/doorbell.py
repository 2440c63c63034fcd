"""`Doorbell`: a file beside the log, or in a directory of the host, with a cell for each of 4,096 buckets of keys.

A waiter arms the bucket of its key, and a writer rings that bucket.

A cell has four bytes. An armed cell contains a *token*, which a waiter has written; another cell contains zeros. A
waiter arms the cell of its key, looks at the log once more, and sleeps on inotify of the bell. A writer reads the cell
of its key after its append. If the cell is armed, the writer clears it and rings. A waiter that is woken looks at the
log if the cell no longer contains its token.

The system has no call that reads a byte of a file and changes it in one step, and no lock guards the cells. So a thread
that loses the processor between the read and the write of a cell may overwrite whatever others have written meanwhile.
That hides no ring, because **no token is written twice**:

- A waiter sleeps by the token that it has found or written. Once another thread has written the cell, the token never
  comes back. So the next event makes the waiter look.
- A waiter that overwrites a cell leaves it armed. A later writer signals an event for all waiters of the bucket.
- A writer that overwrites a cell signals an event afterwards.
- A writer that finds a cell cleared signals nothing: another writer has cleared the cell since each waiter has armed
  it, and signals an event afterwards.

`tests/unit/test_bell_schedules.py` tries every schedule of a few waiters and writers. A cell of one byte that counts
would not suffice: there a thread that writes late makes a value come back, and two waiters and two writers lose a ring.

With the bell, a write wakes only the waiters of its bucket. If all waiters watched the log itself, a barrier of N
processes would cost N^2 wake-ups.

A cell is armed with pwrite(2), which raises IN_MODIFY. The ring is a utimensat(2), which raises IN_ATTRIB. Waiters
watch for IN_ATTRIB alone, so arming wakes no waiter. The cells are read and written by positional I/O. mmap(2) is not
used, because it kills the process if the disk is full. Under pyfakefs there is no bell.

A waiter that depends on a session also arms a cell for the end of the session, and a process rings that cell when it
closes the session.

The same file has the arrival slots, after the cells; see `fscoord.stores.file.arrival_slots`.

The bell is only a hint. If a writer is killed or stopped between the two calls of a ring, the ring costs one slow poll.

The kernel limits the inotify instances of a user (128 by default). A process that gets no instance opens a FIFO beside
the bell for reading, and sets a byte of the bell. A writer that rings and finds this byte set opens the FIFO for
writing and closes it at once. This hang-up wakes all readers of the FIFO (pipe(7), poll(2)). No process writes data
into the FIFO.

No ring is lost. The reader opens the FIFO and sets the byte before it arms, and the writer reads the byte after it has
read an armed cell. If a writer is stopped while it has the FIFO open, rings reach the readers only after the writer has
closed it. Until then each waiter makes a slow poll.
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
"""The byte that is 1 once a process has opened the FIFO. `node_poller` uses the byte after it."""
STATE_SIZE: Final = CELLS_END + 8
"""How many bytes `Doorbell.read` returns: the cells, and the bytes after them, which concern every waiter."""
FIFO_SUFFIX: Final = ".fifo"
_TOKENS: Final = 0xFFFFFFFF
_CLEARED: Final = bytes(CELL)


def bucket(key: bytes) -> int:
    """Return the number of the cell for `key`."""
    return crc32(key) & LAST_BUCKET


def cell(state: bytes, number: int) -> bytes:
    """Return cell `number` of `state`, which `Doorbell.read` has returned."""
    start = number * CELL
    return state[start : start + CELL]


def low_bytes(state: bytes) -> bytes:
    """Return the first byte of each cell of `state`, which is odd if the cell is armed."""
    return state[:CELLS_END:CELL]


def session_end_bucket(session: int) -> int:
    """Return the number of the cell for the end of `session`."""
    return bucket(b"\0end %d" % session)


class Doorbell:
    """An open bell. If there is no file at `path`, a complete file is created, unless `create` is false.

    A new bell gets the group and the access control list of the log, whose path is `like`.

    Attributes:
        is_new: whether this object created the file.
        fd: the descriptor of the bell; -1 after `close`, and in a forked child.
        known_slots: the last content of each arrival slot that this object has read or written, by the slot's offset.
        slot_users: the call that uses an arrival slot, by the slot's offset.

    Raises:
        OSError: the bell can't be opened or created.
        InsecurePathError: the file at `path` is not a regular file, or users whom `mode` does not allow can write it.
    """

    def __init__(self, path: str, mode: int, *, create: bool = True, like: str | None = None) -> None:
        self.path = path
        self.is_new = False
        # Each object begins with another number. The probability that two objects write one token into one cell at one
        # time is below one in 2**31. `__next__` is one operation, so no two threads get one token.
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
        """Close the descriptors."""
        self.fd = self._fifo = -1
        system.close_all(system.os.close, self._descriptors)

    def after_fork(self) -> None:
        """Forget the descriptors, which the fork has closed."""
        self.fd = self._fifo = -1

    def read(self) -> bytes:
        """Return the first `STATE_SIZE` bytes. The bytes that a truncated bell does not have are 0."""
        return system.os.pread(self.fd, STATE_SIZE, 0).ljust(STATE_SIZE, b"\0")

    def arm(self, number: int, state: bytes | None = None) -> bytes:
        """Arm cell `number`, so that a write to that bucket rings. Return the token in the cell, which `is_rung` takes.

        Args:
            number: the bucket.
            state: what `read` has returned, no earlier than the caller has counted its events; None: the cell is read.
        """
        found = system.os.pread(self.fd, CELL, number * CELL) if state is None else cell(state, number)
        if found and found[0] & 1:
            return found
        token = (self._next_token() & _TOKENS | 1).to_bytes(CELL, "little")
        system.os.pwrite(self.fd, token, number * CELL)
        return token

    def is_rung(self, number: int, armed: bytes) -> bool:
        """Return whether bucket `number` may have been written to since `arm` returned `armed`."""
        return system.os.pread(self.fd, CELL, number * CELL) != armed

    def ring(self, *numbers: int) -> bool:
        """Wake the waiters of those of the buckets `numbers` whose cells are armed. Return whether there is one."""
        is_armed = False
        try:
            for number in numbers:
                found = system.os.pread(self.fd, CELL, number * CELL)  # the only call if the write has no waiter
                if found and found[0] & 1:
                    is_armed = True
                    system.os.pwrite(self.fd, _CLEARED, number * CELL)
        finally:
            # Also if a signal handler has raised: other writers rely on the signal of the thread that cleared the cell.
            # So the first call is of a C function; see `interrupts`.
            if is_armed:
                try:
                    system.os.utime(self.fd)
                finally:
                    self._signal_fifo()
        return is_armed

    def signal(self) -> None:
        """End the sleep of every process that watches the bell."""
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
        """Wake the processes that read the FIFO, if there may be one."""
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
        """Open the FIFO beside the bell for reading, and make writers signal it. If there is no FIFO, create one.

        Return the descriptor, which is closed with the bell.

        Raises:
            OSError: the FIFO can't be opened or created, or the bell can't be written.
            InsecurePathError: the file is not a FIFO, or users whom the mode of the bell does not allow can write it.
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
        """Whether the file has no name any more, or is not open, so that writers can't ring it.

        If the FIFO is open, it must have a name, too, and the byte for the FIFO must be set in the bell.
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
