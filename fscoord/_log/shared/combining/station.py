"""`Station`: the files through which the writers of a log on one host combine writes: requests, seat and sockets.

The station is a directory beside the bell of the host (the file that wakes waiters), and is private to its user. The
subdirectory ``q`` contains the requests. The subdirectory ``a`` contains the addresses of the threads that wait for an
answer. The leader locks the file ``seat``. docs/contributors/format.md lists the names. The directory is in memory if
possible, because a request is published much faster there.

- A **request** is usually a symbolic link, whose text is the request: one call creates the link, and one call reads it.
  A file would take four calls. A request that is too long for a link is a file, which is written under another name and
  renamed. So no process reads a part of a request. unlink(2) decides who owns the request: the leader claims it, or the
  author withdraws it. Only one unlink(2) can succeed.
- The **seat** is a lock on byte 0 of a file. A thread tries to take it, and never waits for it. The file contains the
  phase of the leader and a counter. From them, followers see whether a leader waits for the log's lock or is stopped.
- An **address** is a datagram socket. A send never blocks. The error ECONNREFUSED shows that the author is gone.

Everything here may be lost. If the directory was removed or is full, OSError is raised, and the author takes the log's
lock itself.
"""

from __future__ import annotations

import weakref
from binascii import Error as BinasciiError, a2b_base64, b2a_base64
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from fscoord._log.files import safe_files
from fscoord._log.locking.log_lock import _no_descriptor, _nothing
from fscoord._log.locking.process_mutex import LogKey
from fscoord._log.shared.combining.request import SEAT_SIZE, Answer, encode_seat
from fscoord._log.shared.node_poller import node_path
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign, raise_unless_absent

VERSION: Final = ".3"
"""The suffix of the directory's name. Versions of fscoord that can read each other's files have the same suffix."""

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the subdirectory that is made in it is checked
"""A file system in memory, for hosts on which XDG_RUNTIME_DIR is not set."""

SWEEP_S: Final = 60.0
"""How often a leader removes the addresses of dead processes, in seconds."""

ANSWER_MAX: Final = 1 << 16
"""The size of the buffer for an answer or a request, in bytes. Every answer and every request is shorter."""

LINK_MAX: Final = 750
"""The longest request that is published as a link, in bytes. The text of the link is base64, because it must not
contain a null byte. The text may have 1,024 bytes on XFS (XFS_SYMLINK_MAXLEN), and 4,095 on most other file systems."""


class Slot:
    """The objects that one thread uses while it writes: its sockets, and its descriptor of the seat file.

    Each thread needs its own descriptor: two threads with the same descriptor would not exclude each other, because the
    seat is an open-file-description lock. If an interruption loses a slot, the garbage collector closes the slot.

    Args:
        path: the path of the address, the name of the socket that receives answers.

    Attributes:
        name: the file name of the address: the last component of `path`.
        take: takes the seat, or raises BlockingIOError.
        free: leaves the seat. It is a C function, so it may be the first call of a ``finally``; see `interrupts`.
        may_have_seat: whether the slot may have the seat. The flag is set before `take`, and cleared after a failed
            `take` and after `free`.
    """

    may_have_seat = False

    def __init__(self, path: str) -> None:
        self.name = system.os.path.basename(path)
        self.take: Callable[[], object] = _no_descriptor
        self.free: Callable[[], object] = _nothing
        self._sockets: list[Any] = []
        self._fds = system.Descriptors()
        system.close_when_collected(self, self._fds)
        self.is_readable: Callable[[float], Any]
        epoch = system.process_epoch()
        self._finalizer = weakref.finalize(self, _close, path, epoch, self._sockets)
        self._finalizer.atexit = False
        self._close = partial(_close, path, epoch, self._sockets)

    def open(self, way: str, seat: str, network: Any) -> None:
        """Open the sockets and the seat.

        Args:
            way: a short path of the directory of the addresses, with a slash at its end.
            seat: the path of the seat file.
            network: the module that creates the sockets.
        """
        network.datagram_sockets(self._sockets)
        self.inbox.bind(way + self.name)
        self.is_readable = system.readiness(self.inbox.fileno())
        fd, fcntl = safe_files.open_descriptor(seat, system.os.O_RDWR, owned_fds=self._fds), system.fcntl
        self.free = partial(fcntl.fcntl, fd, fcntl.F_OFD_SETLK, _seat_lock(fcntl.F_UNLCK))
        self.take = partial(fcntl.fcntl, fd, fcntl.F_OFD_SETLK, _seat_lock(fcntl.F_WRLCK))

    @property
    def inbox(self) -> Any:
        """The socket that is bound to the address."""
        return self._sockets[0]

    @property
    def outbox(self) -> Any:
        """The socket that probes other addresses and sends answers to them."""
        return self._sockets[1]

    def close(self) -> None:
        """Remove the address, and close all descriptors. May be called again after an interruption."""
        self._close()
        system.close_all(system.os.close, self._fds)
        self._finalizer.detach()

    def after_fork(self) -> None:
        """Close the sockets in a forked child. `system.Descriptors` closes the descriptor of the seat."""
        self.take, self.free = _no_descriptor, _nothing
        for each in self._sockets:
            each.close()


def _close(path: str, epoch: int, sockets: list[Any]) -> None:
    """Close the sockets of a slot. Remove the address of the slot as well, unless this is a forked child."""
    safe_files.unlink_quietly(path, epoch)
    for each in sockets:
        each.close()


def _seat_lock(kind: int) -> bytes:
    return system.FLOCK_STRUCT.pack(kind, 0, 0, 1, 0)


class Station:
    """Publishes requests, takes the seat and sends answers for one handle on the log `key`.

    The threads of the handle share a pool of slots. A thread takes a slot for each operation.

    Raises:
        OSError: no directory is local to this host and private to this user, or files can't be created in it.
    """

    def __init__(self, key: LogKey) -> None:
        self._network: Any = system.import_uninterrupted("fscoord._runtime.network")
        self._fds = system.Descriptors()
        system.close_when_collected(self, self._fds)
        self._free_slots: list[Slot] = []
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._swept_at = 0.0
        self.is_closed = False
        self.epoch = system.process_epoch()
        join = system.os.path.join
        self.directory = node_path(key, (SHARED_MEMORY,)) + VERSION
        self._requests, self._addresses = join(self.directory, "q"), join(self.directory, "a")
        self._seat = join(self.directory, "seat")
        _stations.add(self)
        try:
            try:
                self._make()
            except FileNotFoundError as error:  # the last user of the directory has just removed it
                raise_if_foreign(error)
                self._make()
            self._sweep(self._free_slots[-1], system.time.monotonic())
            self._empty_size = self._size_of_empty()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for directory in (self.directory, self._requests, self._addresses):
            with ignoring(FileExistsError):
                system.os.mkdir(directory, 0o700)
        flags = system.os.O_RDONLY | system.os.O_DIRECTORY
        # The path of a socket may have 107 bytes, so addresses are reached through this descriptor of their directory.
        fd = safe_files.open_descriptor(self._addresses, flags, owned_fds=self._fds)
        self._way = f"/proc/self/fd/{fd}/"
        self._seat_fd = safe_files.open_descriptor(
            self._seat, system.os.O_RDWR | system.os.O_CREAT, owned_fds=self._fds
        )
        # Made at once: while an address exists, no other process removes the directory; see `close`.
        self._add_slot(self._free_slots.append)

    def _size_of_empty(self) -> int:
        """Return the size in bytes of the empty directory of requests. Return -1 if this size is not known or useful.

        On tmpfs, the size of a directory grows with each name. On ext4, a directory has one block with or without
        names, so the result is -1. The size of the station's own directory, which always has three names, distinguishes
        the two file systems: on tmpfs this directory is larger than an empty directory. The result is also -1 if there
        is a request.
        """
        size = system.os.stat(self._requests).st_size
        is_longer = system.os.stat(self.directory).st_size > size
        return size if is_longer and not system.os.listdir(self._requests) else -1

    # -- slots -----------------------------------------------------------------------------------------------------

    def take_slot(self, taken: list[Slot]) -> None:
        """Take a slot for this thread, and append it to `taken`. The inbox may contain answers to earlier requests."""
        try:
            # In one chain, so that the caller can give the slot back even if it is interrupted here.
            taken.extend(map(list.pop, (self._free_slots,)))
        except IndexError as error:
            raise_unless_absent(error)
            self._add_slot(taken.append)

    def give_back(self, slot: Slot) -> None:
        """Return `slot` to the pool. Close it if the station was closed meanwhile."""
        self._free_slots.append(slot)
        if self.is_closed:
            self.close()

    def _add_slot(self, record: Callable[[Slot], None]) -> None:
        """Create a slot, and pass it to the C function `record`."""
        name = f"{system.os.getpid():x}-{system.random_bytes(4).hex()}"
        slot = Slot(system.os.path.join(self._addresses, name))
        self._slots.add(slot)
        try:
            slot.open(self._way, self._seat, self._network)
        except BaseException:
            # The traceback of the error keeps the slot. While the station has a slot, `close` leaves the directory.
            slot.close()
            self._slots.discard(slot)
            raise
        record(slot)

    # -- the seat --------------------------------------------------------------------------------------------------

    def try_seat(self, slot: Slot) -> bool:
        """Take the seat, unless another process or thread has it. Return whether it was taken."""
        slot.may_have_seat = True  # before the call, so that `leave_seat` frees a seat that an interruption hides
        try:
            slot.take()
        except (BlockingIOError, PermissionError) as error:
            raise_if_foreign(error)
            slot.may_have_seat = False
            return False
        return True

    def leave_seat(self, slot: Slot) -> None:
        """Leave the seat, if `slot` may have it."""
        if slot.may_have_seat:
            try:
                slot.free()
            except OSError as error:  # a signal handler has forked, and this is the child: the seat is the parent's
                raise_if_foreign(error)
            slot.may_have_seat = False

    def show(self, phase: int, count: int) -> None:
        """Write the leader's phase and a changing `count` into the seat file. Only a leader calls this method."""
        data = encode_seat(phase, count)
        # No signal handler runs between the two steps of this line. In a child that one forks, the descriptor is -1.
        system.os.pwrite(self._seat_fd, data, 0)

    def seat_state(self) -> bytes:
        """Return the bytes that the leader has written into the seat file, for `decode_seat`."""
        return system.os.pread(self._seat_fd, SEAT_SIZE, 0)

    @property
    def is_lost(self) -> bool:
        """Whether the seat file has no name any more. Other processes then use another seat file."""
        with ignoring(OSError):
            return system.os.fstat(self._seat_fd).st_nlink == 0
        return True

    # -- requests --------------------------------------------------------------------------------------------------

    def request_path(self, started: float, name: str) -> str:
        """Return the path for a new request. The file name consists of a time and `name`.

        The time is `started` (monotonic, in seconds) in nanoseconds. It comes first, so that the sorted file names
        begin with the oldest request.
        """
        return f"{self._requests}/{int(started * 1e9):020d}.{name}"

    def publish(self, slot: Slot, data: bytes, path: str) -> None:
        """Publish the request `data` at `path`. `slot` is the slot of the request's author.

        Raises:
            OSError: the request can't be written, or this is a forked child, where `slot` belongs to the parent.
        """
        if len(data) > LINK_MAX:
            self._publish_file(slot, data, path)
            return
        text = b2a_base64(data, newline=False)
        # No signal handler runs between this comparison and the call.
        if system.process_epoch() != self.epoch:
            _no_descriptor()
        system.os.symlink(text, path)

    def _publish_file(self, slot: Slot, data: bytes, path: str) -> None:
        temporary = safe_files.temporary_name(system.os.path.join(self._addresses, slot.name))
        try:
            fd = safe_files.create_descriptor(temporary, 0o600, self._fds)
            with safe_files.closing_owned(fd, self._fds):
                safe_files.write_all(fd, data)
            if system.process_epoch() != self.epoch:
                _no_descriptor()
            system.os.rename(temporary, path)
        except BaseException:
            safe_files.unlink_quietly(temporary, self.epoch)  # it would take space, and keep the directory in use
            raise

    def requests(self) -> list[str]:
        """Return the paths of all requests, the oldest first. The list is empty if the directory is gone."""
        try:
            if self._empty_size >= 0 and (size := system.os.stat(self._requests).st_size) <= self._empty_size:
                # One system call instead of five. If a request was withdrawn while `_size_of_empty` ran, its result is
                # too large, and one request may be overlooked. The next size of an empty directory corrects this.
                self._empty_size = size
                return []
            names = system.os.listdir(self._requests)
        except OSError as error:
            raise_if_foreign(error)
            return []
        return [system.os.path.join(self._requests, name) for name in sorted(names)]

    def read(self, path: str) -> bytes | None:
        """Return the content of the request `path`; None if it was claimed or withdrawn, or can't be read."""
        try:
            text = system.os.readlink(path)
        except OSError as error:
            raise_if_foreign(error)
            return self._read_file(path) if error.errno == system.errno.EINVAL else None  # EINVAL: it is not a link
        try:
            # `a2b_base64` raises a plain ValueError for other text. So would a signal handler, so none is caught here.
            return a2b_base64(text) if text.isascii() else b""
        except BinasciiError:
            return b""  # not a request. The leader removes it

    def _read_file(self, path: str) -> bytes | None:
        with ignoring(OSError):
            fd = safe_files.open_descriptor(path, system.os.O_RDONLY, owned_fds=self._fds)
            with safe_files.closing_owned(fd, self._fds):
                return system.os.read(fd, ANSWER_MAX)
        return None

    def is_pending(self, path: str) -> bool:
        """Return whether the request `path` still exists, so that no leader has claimed it; True after an error."""
        try:
            system.os.stat(path, follow_symlinks=False)
        except OSError as error:
            raise_if_foreign(error)
            return error.errno != system.errno.ENOENT
        return True

    def remove(self, path: str) -> bool:
        """Claim or withdraw the request `path` by unlink(2). Return False if another process has removed it already.

        The safety of combined writes depends on this call: it succeeds either for a leader or for the author.
        """
        if system.process_epoch() != self.epoch:
            return False  # in a forked child: the request is the parent's
        try:
            system.os.unlink(path)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            return False
        return True

    # -- answers ---------------------------------------------------------------------------------------------------

    def is_there(self, slot: Slot, address: str) -> bool:
        """Return whether a process has the socket `address` open."""
        if "/" in address or not address:
            return False
        with ignoring(OSError):
            slot.outbox.connect(self._way + address)
            return True
        return False

    def tell(self, slot: Slot, address: str, answer: Answer) -> bool:
        """Send `answer` to `address`. Return whether it was sent. Without an answer, the author reads the log."""
        with ignoring(OSError):
            slot.outbox.sendto(answer.encode(), self._way + address)
            return True
        return False

    def receive(self, slot: Slot, seconds: float) -> bytes | None:
        """Return the next datagram that `slot` receives within `seconds`; None if there is none."""
        if seconds > 0 and not slot.is_readable(seconds * 1000):
            return None
        with ignoring(OSError):
            data: bytes = slot.inbox.recv(ANSWER_MAX)
            return data
        return None

    # -- the end ---------------------------------------------------------------------------------------------------

    def sweep_if_due(self, slot: Slot, now: float) -> None:
        """Remove the files of dead processes, if the last sweep was `SWEEP_S` before `now` (monotonic, in seconds).

        Only a leader calls this method, with its `slot`. Errors are ignored, because the leader's write has succeeded.
        """
        if now - self._swept_at > SWEEP_S:
            with ignoring(OSError):
                self._sweep(slot, now)

    def _sweep(self, slot: Slot, now: float) -> None:
        """Remove each address whose socket is closed. The outbox of `slot` probes the sockets.

        The outbox must stay open, or every other socket would seem closed. No other thread closes the outbox, because
        the caller uses the slot. A socket is opened before its address exists, so a new address is never removed.
        """
        self._swept_at = now
        for name in system.os.listdir(self._addresses):
            address = name.partition(".")[0]  # the name of a request that is being written begins with the address
            if address != slot.name and not self.is_there(slot, address):
                # Not in a child that a signal handler has forked meanwhile: there the socket of `slot` is closed.
                safe_files.unlink_quietly(system.os.path.join(self._addresses, name), self.epoch)

    def close(self) -> None:
        """Close the free slots. If other slots are in use, the last thread to give its slot back closes the rest.

        Remove the directory if no other process uses it. The first rmdir(2) fails if another process has an address.
        """
        self.is_closed = True
        while self._free_slots:
            slot = self._free_slots.pop()
            slot.close()
            self._slots.discard(slot)
        if not self._slots:
            self._forget_descriptors()
            system.close_all(system.os.close, self._fds)
            if system.process_epoch() == self.epoch:
                self._remove_directory()

    def _forget_descriptors(self) -> None:
        """Make every later use of the seat or of an address fail.

        Another thread may be about to use a descriptor that the station closes. The number of that descriptor may soon
        belong to another file, even to the log.
        """
        self._seat_fd = -1
        self._way = "/proc/self/fd/-1/"

    def _remove_directory(self) -> None:
        steps: tuple[tuple[Callable[[str], None], str], ...] = (
            (system.os.rmdir, self._addresses),
            (system.os.rmdir, self._requests),
            (system.os.unlink, self._seat),
            (system.os.rmdir, self.directory),
        )
        with ignoring(OSError):
            for step, path in steps:
                step(path)

    def after_fork(self) -> None:
        """Discard the slots in a forked child. Remove and unlock nothing, because files and locks belong to the parent.

        The descriptors are closed already. The child opens a station of its own.
        """
        self.is_closed = True
        self._forget_descriptors()
        for slot in list(self._slots):
            slot.after_fork()
        self._free_slots.clear()
        self._slots.clear()


_stations = system.reset_in_child("stations", Station.after_fork)
