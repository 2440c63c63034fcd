"""`ArrivalSlots`: the ranks of one host arrive at a barrier by writing to slots, without the log's lock.

The slots are in the bell, the small file through which writers wake waiters. A rank arrives by writing to its *slot* a
hash of the barrier, and the world size. Then the rank arms its wait, reads the new records of the log, and reads the
slots of all ranks in one call. The rank that finds all slots written acquires the log's lock and appends one record
with all arrivals. The other ranks don't wait for the lock and don't decode arrivals, so their costs do not grow with
the number of ranks.

Only the record completes a barrier; slots are hints. A rank appends the record under the lock, after it has read the
log to the end, and only if each rank has an arrival in the log or in its slot. These rules keep the hints safe:

- A rank writes its slot, arms its wait, reads the log, and then reads the slots. So the last rank to read finds all
  slots written, unless another rank has already ended the barrier. In that case, its armed wait is woken.
- Before a handle writes to a slot for the first time, it reads the slot and then the log. If the slot has the same
  content already, or the log has a key of the barrier, an earlier call or process may have arrived as this rank. In
  this case the rank arrives in the log.
- Before a key of a barrier is deleted, the barrier's slots are cleared under the same hold of the lock, even if the log
  does not have the key. A call that was waiting during the delete does not arrive again, but continues to wait for the
  end of the barrier.
- A rank that has waited for `LATE_S` seconds appends the arrivals of all ranks with written slots. So tools can show
  the arrivals at a slow barrier, and the arrival of a rank that times out stays in the log, as in other stores.
- The slots count only while the file that contains them is at the path of the bell, because a delete clears the slots
  in the file at this path.

There are `ROWS` rows of slots, so that barriers of several groups or threads rarely share slots. If another barrier
overwrites a slot, the barrier is only delayed: its ranks arrive in the log after `LATE_S` seconds.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from zlib import crc32

from fscoord._arguments import KEY_MAX
from fscoord._log.files import safe_files
from fscoord._log.log import Log
from fscoord._log.wakeup.doorbell import LAST_BUCKET, Doorbell
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._waiting.rounds import ARRIVALS, COMPLETE, KEYS_OF_BARRIER
from fscoord._waiting.wait import new_tuple
from fscoord.errors import StoreTimeoutError
from fscoord.stores.file.notifier import ChangeNotifier
from fscoord.stores.file.replay import KeyValueState

ROWS: Final = 64
COLUMNS: Final = 1024
"""The largest world size of a barrier that uses slots."""
HASH: Final = 12
SLOT: Final = HASH + 4
"""The size of a slot in bytes: the hash of the barrier, and the world size. An empty slot has zeros."""
ROW: Final = COLUMNS * SLOT
START: Final = 1 << 16
"""The offset of the slots in the bell."""
LATE_S: Final = 0.05
"""How many seconds a rank waits before it also arrives in the log."""
EMPTY: Final = bytes(SLOT)


class Begun(NamedTuple):
    """The slot of a rank for one barrier, and the state of the store before the arrival.

    Attributes:
        bell: the bell that contains the slots, or None if the log has no bell.
        place: the offset of the rank's slot in the bell.
        content: the bytes that each rank writes to its slot.
        deletes: `KeyValueState.deletes` before the arrival.
        values: `KeyValueState.values` before the arrival.
        run: the number of the run in which the rank arrives.
    """

    bell: Doorbell | None
    place: int
    content: bytes
    deletes: int
    values: object
    run: int


class ArrivalSlots:
    """Reads and writes the slots of a log that only this host mounts, for one handle."""

    def __init__(self, log: Log, state: KeyValueState, notifier: ChangeNotifier) -> None:
        self._log = log
        self._state = state
        self._notifier = notifier
        self._run = -1
        self._hash: Any = None
        self.bell = notifier.open_bell
        """A function that returns the bell with the slots, or None if the log has no bell. Without a bell, ranks arrive
        only in the log."""

    def content(self, key: bytes, world_size: int) -> bytes:
        """Return the bytes that a rank writes to its slot at the barrier with the key `key`, in the current run."""
        run = self._log.handle.header.run
        if run != self._run:
            blake2b = system.import_uninterrupted("hashlib").blake2b
            seed = self._log.handle.root.header.log_id + run.to_bytes(8, "little")
            self._hash, self._run = blake2b(seed, digest_size=HASH, usedforsecurity=False), run
        found = self._hash.copy()
        found.update(key[: key.rindex(b"/")])
        content: bytes = found.digest() + world_size.to_bytes(4, "little")
        return content

    def find(self, key: bytes, world_size: int, rank: int) -> Begun:
        """Return the slot of `rank` at the barrier with the key `key`. A delete after this call cancels the arrival."""
        state, content = self._state, self.content(key, world_size)
        place = START + content[0] % ROWS * ROW + SLOT * rank
        return new_tuple(Begun, (self.bell(), place, content, state.deletes, state.values, self._run))

    def begin(self, key: bytes, done: bytes, world_size: int, rank: int, timeout: float, user: object) -> Begun | None:
        """Arrive in the slot of `rank`. Return None if the caller must arrive in the log.

        `user` identifies this use of the slot. No other thread can use the slot until `release` is called with `user`.
        `ArrivalRequest` describes the other arguments.
        """
        found = self.find(key, world_size, rank)
        bell, place, content, _, _, run = found
        if bell is None:
            return None
        known = bell.known_slots.get(place)
        if known is None:  # read the slot, and then the log: an earlier process of the rank may have written the slot
            try:
                known = system.os.pread(bell.fd, SLOT, place)
                self._log.refresh(timeout)
                bell.known_slots[place] = known
            except (OSError, StoreTimeoutError) as error:
                raise_if_foreign(error)
                return None
            found = self.find(key, world_size, rank)
        values: Any = found.values
        if known == content or key in values or done in values or found.run != run:
            return None
        # This C function is atomic, so only one of several threads gets the slot.
        if bell.slot_users.setdefault(place, user) is not user:
            return None
        try:
            bell.known_slots[place] = content  # first: after an interrupted write, the next call must use the log
            system.os.pwrite(bell.fd, content, place)
        except BaseException as error:
            release(found, user)
            if not isinstance(error, OSError):
                raise
            raise_if_foreign(error)
            return None
        return found

    def meet(self, prefix: bytes, rank: int, world_size: int, timeout: float) -> tuple[Begun, bool] | bool:
        """Fast path of a barrier: arrive in the slot, sleep at most once, and check whether the barrier has ended.

        In the usual case, an `Arrival` and its `FileWait` take the same steps. This method is faster because it creates
        neither of these objects.

        Returns:
            True if the rank has passed the barrier. False if the rank has not arrived. Otherwise a pair: the unfinished
            arrival, and whether all slots are written, so that this rank must end the barrier.
        """
        log, state, notifier = self._log, self._state, self._notifier
        key, done, is_full = prefix + ARRIVALS, prefix + COMPLETE, False
        if not 1 < world_size <= COLUMNS or timeout <= 0 or len(key) > KEY_MAX:
            return False
        waiter = notifier.take_spare()
        if waiter is None or waiter.watcher.bell is None:
            return False
        begun = None
        try:
            notifier.add_waiter(waiter)
            begun = self.begin(key, done, world_size, rank, timeout, waiter)
            if begun is None:
                return False
            bell, place, content, deletes, values, run = begun
            assert bell is not None, "the slot is in it"
            waiter.arm(crc32(done) & LAST_BUCKET)
            log.refresh(timeout)
            if done in state.values and values is state.values:
                return True
            if key not in state.values and state.deletes == deletes and log.handle.header.run == run:
                row = system.os.pread(bell.fd, SLOT * world_size, place - SLOT * rank)
                is_full = row == content * world_size
                if not is_full and waiter.sleep_once(timeout):
                    log.refresh(timeout)
                    if done in state.values and values is state.values:
                        return True
        except StoreTimeoutError:
            pass  # the caller continues with an `Arrival`, which raises the error of the barrier
        except OSError as error:
            raise_if_foreign(error)
        finally:
            if begun is not None:
                release(begun, waiter)
            try:
                waiter.close()
            finally:
                notifier.discard_waiter(waiter)
            notifier.keep_spare(waiter)
            waiter = None  # otherwise the traceback of an error would keep the waiter alive
        assert begun is not None, "the rank has arrived"
        return begun, is_full

    def arrived(self, content: bytes) -> list[int]:
        """Return the ranks whose slots have `content`. The caller must hold the log's lock.

        The list is empty if another file is at the path of the bell, because a delete clears only the slots in that
        file.
        """
        bell = self.bell()
        if bell is None:
            return []
        try:
            found = ranks_of(
                system.os.pread(bell.fd, SLOT * int.from_bytes(content[HASH:], "little"), row_of(content)), content
            )
            return found if found and bell.has_name() else []
        except OSError as error:
            raise_if_foreign(error)
            return []

    def clear(self, key: bytes) -> None:
        """If `key` is a key of a barrier, clear its slots. Call it under the log's lock before `key` is deleted.

        Raises:
            StoreUnavailableError: the slots can't be cleared, so the key must not be deleted.
        """
        if not key.endswith(KEYS_OF_BARRIER):
            return
        bell = self.bell()
        try:
            if bell is None:
                if self._log.handle.bell and self._notifier.bell_exists():
                    raise OSError(
                        system.errno.ENXIO, f"the bell {self._log.path}.bell can't be opened; check its owner and mode"
                    )
                return
            wanted = self.content(key, 0)
            row = row_of(wanted)
            data = system.os.pread(bell.fd, SLOT * COLUMNS, row)
            place = data.find(wanted[:HASH])
            while place >= 0:
                if place % SLOT == 0:
                    system.os.pwrite(bell.fd, EMPTY, row + place)
                place = data.find(wanted[:HASH], place + 1)
        except OSError as error:
            raise_if_foreign(error)
            raise safe_files.unavailable(error, self._log.path, "clearing the slots of a barrier") from error


def release(begun: Begun, user: object) -> None:
    """End the use of a slot by `user`. This function may be called twice."""
    bell = begun.bell
    if bell is not None and bell.slot_users.get(begun.place) is user:
        del bell.slot_users[begun.place]


def row_of(content: bytes) -> int:
    """Return the offset, in the bell, of the row of slots for `content`."""
    return START + content[0] % ROWS * ROW


def ranks_of(data: bytes, content: bytes) -> list[int]:
    """Return the ranks whose slots have `content`. `data` are the bytes of the row."""
    return [place // SLOT for place in range(0, len(data), SLOT) if data[place : place + SLOT] == content]
