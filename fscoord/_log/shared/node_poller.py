"""`PollerElection`: elects one process of a node (a host), which polls the file server for all waiters on the node.

`NodeProbes`: the elected process also probes the sessions that these waiters need.

On a mount that several hosts share, no event reports the write of another host, so a waiter must poll. A hundred
waiting processes of a host would send the same request a hundred times. Instead these processes share a bell (see
`doorbell`) in a directory of the host. One process, the poller, asks the server and rings the bell for the others.

The poller is the process that holds the lock on one byte of the bell. A process that waits longer than `QUEUE_AFTER_S`
queues: one of its threads blocks for the lock. When the poller leaves or dies, the kernel grants the lock to a queued
process at once.

Most waits are shorter than `QUEUE_AFTER_S`, and a thread for each of them would be expensive. During its first
`QUEUE_AFTER_S` seconds, a waiter does not queue. Instead it reads the *term byte* of the bell before it sleeps, and
tries to take the lock if the byte says that there is no poller. A poller changes the byte when it begins and when it
leaves. A poller that dies does not change the byte, and then no process polls for a waiter that does not queue yet.

The bell has a cell for each bucket of keys. A new poller rings the cells of all buckets, because the previous poller
may have died between a poll and the ring.

The poller counts its polls in the bell. If the count stops, for example because the poller's process is stopped, each
waiter polls by itself. All of this is a hint. A lost ring or a wrong count only delays a waiter, because each waiter
reads the log from the server in the end.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final
from zlib import crc32

from fscoord._log.files import safe_files
from fscoord._log.locking.process_mutex import LogKey
from fscoord._log.mount import find_mount
from fscoord._log.shared import extent as shared_extent
from fscoord._log.shared.extent import Extent
from fscoord._log.wakeup.doorbell import CELLS_END, SIZE, Doorbell, low_bytes
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign

HEARTBEAT_BYTE, INTERVAL_BYTE, HURRY_BYTE = CELLS_END, CELLS_END + 1, CELLS_END + 2
"""The offsets of three bytes in the bell: the number of polls, the time between two polls in milliseconds, and the
number of requests for faster polls. The two counts are modulo 256, and the time is at most 255."""
TERM_BYTE: Final = CELLS_END + 4
"""The offset of a byte in the bell. The byte is odd while there is a poller, and changes when a poller begins or
leaves."""
QUEUE_AFTER_S: Final = 0.1
"""How long a process waits before it queues for the poller's lock, in seconds."""
FALLBACK = "/tmp"  # noqa: S108
"""The directory that is used if XDG_RUNTIME_DIR is not set (basedir specification)."""
SLOW_INTERVAL_MS: Final = 40
"""A new waiter asks for faster polls if the time between two polls is longer than this, in milliseconds."""
POLLER_BYTE: Final = 1 << 20
"""The offset of the byte of the bell that the poller locks."""
_PARITY: Final = bytes(byte & 1 for byte in range(256))
"""A table for `bytes.translate` that maps odd bytes to 1. The first byte of an armed cell is odd."""

WANTED_TABLE: Final = CELLS_END + SIZE
RESULT_TABLE: Final = CELLS_END + 2 * SIZE
"""The offsets of the two tables in the bell of a node."""

WANTED: Final = 8
SEEMS_DEAD: Final = 1
_WANTED: Final = bytes(byte if byte <= WANTED else 0 for byte in range(256))
"""A table for `bytes.translate` that maps bytes above `WANTED`, which no waiter writes, to 0."""

PROBE_S: Final = 0.25
"""The shortest time between two probes of a slot by the poller, in seconds."""

PROBES_PER_S: Final = 64
"""The largest number of slots that the poller probes in a second."""


def node_path(key: LogKey, preferred: Sequence[str] = ()) -> str:
    """Return the path of a file that the processes of this user on this host share for the log `key`.

    The name depends on the host name and the boot id, because hosts may share one /tmp.

    Args:
        key: identifies the log.
        preferred: directories that are tried before /tmp. A directory that is not local is not used.

    Raises:
        OSError: no directory is local to this host and private to this user.
    """
    log_id, device, inode = key
    uid = system.os.geteuid()
    runtime = system.os.environ.get("XDG_RUNTIME_DIR", "")
    bases = [base for base in (runtime, *preferred, FALLBACK) if system.os.path.isabs(base)]
    node = crc32(system.hostname().encode("utf-8", "surrogateescape"), crc32(system.boot_id()))
    for base in bases:
        directory = system.os.path.join(base, f"fscoord-{uid}")
        try:
            _make_private(directory, uid)
        except OSError as error:
            raise_if_foreign(error)
            if base == bases[-1]:
                raise
            continue
        return system.os.path.join(directory, f"{log_id.hex()}-{device:x}-{inode:x}-{node:08x}")
    raise OSError(system.errno.ENOENT, "there is no /tmp")


def _make_private(directory: str, uid: int) -> None:
    """Create `directory` if it does not exist. Raise OSError unless it is a local directory, private to this user."""
    with ignoring(FileExistsError):
        system.os.mkdir(directory, 0o700)
    # No descriptor is opened, which a signal handler could make this function lose.
    found = system.os.stat(directory, follow_symlinks=False)
    if not system.stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise PermissionError(
            system.errno.EPERM, f"{directory} must belong to uid {uid} and have mode 0700; correct that, or remove it"
        )
    if not find_mount(directory + "/x").is_local:
        raise OSError(system.errno.EXDEV, f"{directory} is not on a local file system")


class NodeProbes:
    """Shares the probes of sessions between the processes of a node, in the node's `bell`.

    On a mount that several hosts share, the probe of another host's session is a request to the server. If each waiter
    probed by itself, the number of requests would grow with the square of the number of processes. So the waiters of a
    node write into the node's bell which sessions they need, and the poller probes these sessions.

    The contract:

    - Session *n* uses slot *n* modulo `SIZE`. A slot has one byte in each of two tables in the bell:
    - ``wanted``: a waiter that needs a session sets the byte of the session's slot to `WANTED`, and sets it again at
      each later call of `ask`. The poller probes the sessions of each slot whose byte is not 0, and then decrements the
      byte. So a slot that no waiter needs any more is dropped after `WANTED` probes.
    - ``results``: the poller writes the byte of a slot after each probe. Bit 0 is 1 if a session of the slot seems
      dead, or if the poller knows no living session of the slot. The other bits count the probes, from 1 to 127 and
      again from 1. A byte of 0 means that the slot was not probed yet. If a waiter sets a ``wanted`` byte that was 0,
      the waiter also sets the result to 0, because the present result may be old.
    - The poller probes a slot at most once in `PROBE_S`, and at most `PROBES_PER_S` slots in a second, in turn. When a
      session first seems dead, the poller rings every bucket of the bell.
    - Each byte is a hint. It may be lost, late or overwritten, and the bell may be truncated. If a result has not
      changed for `STALE_S` and two turns of the poller, the waiter probes the session itself, at most once in a second.
    - The result "seems dead" is never enough: the waiter probes the session itself, and again under the log's lock
      (`Log.record_death`). A wrong result "alive" delays the detection of a death until the next result.

    The bell is in a directory that is private to the user, so only processes of this user on this host write it.
    """

    def __init__(self, bell: Doorbell) -> None:
        self._bell = bell
        self._probed_at = -math.inf
        self._last_slot = -1

    def ask(self, numbers: Iterable[int]) -> tuple[dict[int, int], float]:
        """Ask the poller to probe the sessions `numbers`. Return the present results without waiting.

        Returns:
            {session number: result byte}, and the time in seconds that the poller needs to probe each wanted slot once.

        Raises:
            OSError: the bell can't be read or written.
        """
        wanted, results = self._read_wanted(), self._read(RESULT_TABLE)
        found: dict[int, int] = {}
        for number in numbers:
            slot = number % SIZE
            if not wanted[slot]:
                self._write(RESULT_TABLE + slot, 0)
                results[slot] = 0
            if wanted[slot] != WANTED:
                self._write(WANTED_TABLE + slot, WANTED)
                wanted[slot] = WANTED
            found[number] = results[slot]
        return found, max(PROBE_S, (SIZE - wanted.count(0)) / PROBES_PER_S)

    def probe_due(self, undead: Callable[[], list[int]], is_alive: Callable[[int], bool | None]) -> bool:
        """Probe the wanted sessions, if `PROBE_S` have passed since the last probe. Only the poller calls this method.

        Args:
            undead: a function that returns all sessions that are not recorded as dead.
            is_alive: a function that probes a session. It returns None if the result is unknown.

        Returns:
            Whether a slot seems dead for the first time. Then the caller must wake the waiters of the node.

        Raises:
            OSError: the bell can't be read or written.
        """
        now = system.time.monotonic()
        passed = now - self._probed_at
        if passed < PROBE_S:
            return False
        wanted = self._read_wanted()
        if wanted.count(0) == SIZE:  # the usual case, in one C call
            return False
        slots = [slot for slot in range(SIZE) if wanted[slot]]
        self._probed_at = now
        in_turn = [slot for slot in slots if slot > self._last_slot] + [s for s in slots if s <= self._last_slot]
        chosen = in_turn[: max(1, int(PROBES_PER_S * min(passed, 1.0)))]
        self._last_slot = chosen[-1]
        results = self._read(RESULT_TABLE)
        sessions: dict[int, list[int]] = {slot: [] for slot in chosen}
        for number in undead():
            if number % SIZE in sessions:
                sessions[number % SIZE].append(number)
        is_new = False
        for slot, numbers in sessions.items():
            seems_dead = not numbers or any(is_alive(number) is False for number in numbers)
            count = (results[slot] >> 1) % 127 + 1
            self._write(RESULT_TABLE + slot, count << 1 | (SEEMS_DEAD if seems_dead else 0))
            self._write(WANTED_TABLE + slot, wanted[slot] - 1)
            is_new = is_new or (seems_dead and not results[slot] & SEEMS_DEAD)
        return is_new

    def _read_wanted(self) -> bytearray:
        """Return the table of wanted slots. Bytes that no waiter writes are replaced by 0."""
        wanted = self._read(WANTED_TABLE)
        return wanted.translate(_WANTED)

    def _read(self, offset: int) -> bytearray:
        data = system.os.pread(self._bell.fd, SIZE, offset)
        return bytearray(data.ljust(SIZE, b"\0"))  # a bell that no waiter has written to yet is shorter

    def _write(self, offset: int, value: int) -> None:
        system.os.pwrite(self._bell.fd, bytes([value]), offset)


class PollerElection:
    """Takes part in the election of the host's poller. If this process is elected, one waiter of this process polls.

    `_guard` protects the descriptors, the poller and the set of waiters. A thread that blocks in the kernel for the
    poller's lock does not hold `_guard`.

    Args:
        bell: the host's bell. The watcher closes the bell.
        recheck: a function that wakes all waiters of this process, so that each calls `try_elect` again.

    Attributes:
        probes: the probes that the processes of the node share.
    """

    def __init__(self, bell: Doorbell, recheck: Callable[[], None]) -> None:
        self._bell = bell
        self.probes = NodeProbes(bell)
        self._recheck = recheck
        self._guard = system.recursive_mutex()
        self._held = system.Descriptors()  # the descriptor that has the poller's lock, while this process has it
        self._requested = system.Descriptors()  # the descriptor on which a thread blocks for that lock
        self._poller_ref: Callable[[], Any] = _no_poller
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hurries = self._beats = 0
        self._refused = -1  # the term byte at the last refusal of the lock; -1 before the first
        for owned_fds in (self._held, self._requested):
            system.close_when_collected(self, owned_fds)
        _elections.add(self)

    # -- the election --------------------------------------------------------------------------------------------------

    @property
    def _poller(self) -> Any:
        """The waiter of this process that polls; None if there is none, `self` after `close` (no waiter may poll).

        It is a weak reference. So if an interruption skips `remove`, the waiter is collected, and another can poll.
        """
        return self._poller_ref()

    @_poller.setter
    def _poller(self, waiter: Any) -> None:
        self._poller_ref = _no_poller if waiter is None else weakref.ref(waiter)

    # `state` is a result of `Doorbell.read` that was read just now. A method that gets None reads the byte itself.

    def add(self, waiter: Any) -> None:
        """Add `waiter` to the waiters of this process."""
        self._waiting.add(waiter)

    def hurry(self, state: bytes) -> None:
        """Ask the poller to poll faster, if it polls slowly. A waiter calls this once, when it first arms a cell."""
        if state[INTERVAL_BYTE] > SLOW_INTERVAL_MS:
            self._put(HURRY_BYTE, state[HURRY_BYTE] + 1)
            self._bell.signal()

    def remove(self, waiter: Any) -> None:
        """Remove `waiter`. If it is the poller, another waiter or another process becomes the poller."""
        with self._guard:
            self._waiting.discard(waiter)
            if self._poller is waiter:
                self._poller = None
            if self._poller is not None or not self._held:
                return
            if not self._waiting:
                self._resign()
                return
        self._recheck()  # called without the guard, because the threads that it wakes take the guard

    def _resign(self) -> None:
        for fd in list(self._held):
            self._unlock(fd, self._held)

    def _unlock(self, fd: int, owned_fds: set[int]) -> None:
        """Release the poller's lock and close its descriptor.

        Closing the descriptor is not enough: a child that is forked at this moment may inherit the descriptor, and with
        it the lock.
        """
        with ignoring(OSError):  # closing the descriptor unlocks it as well
            self._lock(fd, system.fcntl.F_OFD_SETLK, system.fcntl.F_UNLCK)
        safe_files.close_owned(fd, owned_fds)
        # The byte changes after the unlock, so that a waiter that reads it can get the lock. A waiter that arms after
        # the buckets are read here reads the byte before it sleeps.
        with ignoring(OSError):  # the bell is closed, or lost; a waiter queues later
            self._put(TERM_BYTE, (self._byte(TERM_BYTE) | 1) + 1)
            if 1 in low_bytes(self._bell.read()).translate(_PARITY):
                self._bell.signal()

    @staticmethod
    def _lock(fd: int, command: int, kind: int) -> None:
        system.fcntl.fcntl(fd, command, system.FLOCK_STRUCT.pack(kind, 0, POLLER_BYTE, 1, 0))

    def close(self) -> None:
        """Leave the election and release the poller's lock. No waiter of this process can be elected afterwards."""
        with self._guard:
            self._waiting.clear()
            self._poller = self  # so that no waiter becomes the poller
            self._resign()

    def try_elect(self, waiter: Any, *, may_queue: bool = True) -> bool:
        """Make `waiter` the poller if there is none. Return whether `waiter` is the poller.

        If another process is the poller and `may_queue` is true, a thread begins to wait for the poller's lock.
        """
        if self._poller is waiter:
            return True
        with self._guard:
            if self._poller is not None or (self._requested and not self._held):
                return False
            if not self._held:
                if not may_queue and not self.is_vacant():
                    return False
                if not self._acquire(may_queue=may_queue):
                    return False
            self._poller = waiter
        found = self._bell.read()
        self._hurries, self._beats = found[HURRY_BYTE], found[HEARTBEAT_BYTE]
        self.notify(range(SIZE))  # the previous poller may have died between a poll and its ring
        return True

    def is_vacant(self, state: bytes | None = None) -> bool:
        """Return whether a waiter of this process can probably become the poller at once.

        The result is True if this process has the lock and none of its waiters polls. It is also True if this process
        does not queue for the lock and the term byte says that the lock is free. After a failed attempt to take the
        lock, the term byte is ignored until it changes.
        """
        if self._poller is not None:
            return False
        if self._held:  # the poller was another thread of this process, or the kernel has just granted the lock
            return True
        if self._requested:
            return False
        term = self._byte(TERM_BYTE) if state is None else state[TERM_BYTE]
        return not term & 1 and term != self._refused

    def _acquire(self, *, may_queue: bool) -> bool:
        """Try to take the poller's lock, and return whether that succeeded.

        If another process has the lock and `may_queue` is true, begin to wait for the lock in a thread.
        """
        claim = system.threading.Lock()  # the thread that acquires it owns the descriptor
        term = self._byte(TERM_BYTE)
        try:
            fd = safe_files.open_descriptor(self._bell.path, system.os.O_RDWR, owned_fds=self._requested)
            if self._try_lock(fd):
                system.in_one_chain(partial(self._held.add, fd), partial(self._requested.clear))
                self._begin_term()
                return True
            # The byte may still say that the lock is free, because the poller has not changed it yet, or the previous
            # poller changed it late. Remember the byte, so that the waiters do not try again until it changes.
            self._refused = term
            # A thread blocks for the lock, which the kernel grants when the present poller leaves or dies. If no thread
            # is left, waiters poll when the heartbeat stops.
            if not may_queue or isinstance(
                system.try_kernel_thread("fscoord-poller", self._wait_for_lock, fd, claim), RuntimeError
            ):
                safe_files.close_owned(fd, self._requested)
        except BaseException:
            # An interruption. A descriptor without a thread would keep this process from all later elections.
            if claim.acquire(blocking=False):
                for fd in list(self._requested):
                    safe_files.close_owned(fd, self._requested)
            raise
        return False

    def _begin_term(self) -> None:
        """Change the term byte to another odd number."""
        self._put(TERM_BYTE, self._byte(TERM_BYTE) + 1 | 1)

    def _try_lock(self, fd: int) -> bool:
        with ignoring(BlockingIOError, PermissionError):
            self._lock(fd, system.fcntl.F_OFD_SETLK, system.fcntl.F_WRLCK)
            return True
        return False

    def _wait_for_lock(self, fd: int, claim: Any) -> None:
        """Wait until this process has the poller's lock on the file `fd`. This is the main function of a thread.

        The thread that has locked the mutex `claim` owns `fd`. If another thread has locked `claim`, return at once.
        """
        if not claim.acquire(blocking=False) or fd not in self._requested:  # an interruption or a fork has closed it
            return
        try:
            self._lock(fd, system.fcntl.F_OFD_SETLKW, system.fcntl.F_WRLCK)
        except OSError:
            safe_files.close_owned(fd, self._requested)
            return
        with self._guard:
            if not self._waiting:
                self._unlock(fd, self._requested)
                return
            self._held.add(fd)
            self._requested.discard(fd)
            with ignoring(OSError):  # the bell is lost
                self._begin_term()
        self._recheck()

    # -- messages through the bell -------------------------------------------------------------------------------------

    def heartbeat(self, pause: float) -> None:
        """Record that this process has just polled, and will poll again in `pause` seconds."""
        self._beats = (self._beats + 1) & 0xFF
        system.os.pwrite(self._bell.fd, bytes([self._beats, min(int(pause * 1000), 255)]), HEARTBEAT_BYTE)

    def heartbeat_count(self) -> int:
        """Return the number of polls modulo 256. It changes as long as the poller polls."""
        return self._byte(HEARTBEAT_BYTE)

    def is_hurried(self, waiter: Any, state: bytes | None = None) -> bool:
        """Return whether `waiter` is the poller, and was asked to poll faster after the last `ack_hurry`."""
        if self._poller is not waiter:
            return False
        return (self._byte(HURRY_BYTE) if state is None else state[HURRY_BYTE]) != self._hurries

    def ack_hurry(self) -> None:
        """Mark all requests for faster polls as seen."""
        self._hurries = self._byte(HURRY_BYTE)

    def is_poller(self, waiter: Any) -> bool:
        """Return whether `waiter` is the poller."""
        return self._poller is waiter

    def notify(self, buckets: Container[int], extent: Extent | None = None) -> bool:
        """Wake the waiters of the keys in `buckets`. Return whether any of `buckets` had a waiter (was armed).

        Args:
            buckets: the buckets.
            extent: the bytes that the caller has read last, which are published in the bell before the ring; or None.
        """
        state = self._bell.read()
        armed = [number for number in _armed_buckets(low_bytes(state)) if number in buckets]
        if armed and extent is not None:
            shared_extent.publish(self._bell, extent)
        return self._bell.ring(*armed)

    def _byte(self, offset: int) -> int:
        return int.from_bytes(system.os.pread(self._bell.fd, 1, offset), "little")

    def _put(self, offset: int, number: int) -> None:
        system.os.pwrite(self._bell.fd, bytes([number & 0xFF]), offset)

    def after_fork(self) -> None:
        """Leave the election in a forked child. The parent keeps the lock. The descriptors are closed already."""
        self._guard = system.recursive_mutex()
        self._waiting.clear()
        self._poller = self


def _no_poller() -> None:
    """Return None, like a dead weak reference."""


def _armed_buckets(found: bytes) -> Iterator[int]:
    """Yield the buckets whose byte in `found` is odd. Each is found by one C call."""
    parities = found.translate(_PARITY)
    bucket = parities.find(1)
    while bucket >= 0:
        yield bucket
        bucket = parities.find(1, bucket + 1)


_elections = system.reset_in_child("poller elections", PollerElection.after_fork)
