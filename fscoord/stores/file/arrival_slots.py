"""`ArrivalSlots`: slots in the bell, in which the ranks of one host arrive at barriers without the log's lock.

A rank arrives by writing its *slot*: a hash of the barrier, and the world size. Then it arms the bell for the end of
the barrier, reads the log on, and reads the slots of all ranks in one call. The rank that finds all slots written takes
the log's lock and appends one record, which leaves the same keys as an arrival of each rank would. So a rank neither
queues for the lock nor decodes the arrivals of the other ranks, and its costs do not grow with their number.

The record is the truth, and slots are hints. It is appended only under the lock, after the log was read on, and only
if each rank then has an arrival in the log or in its slot. These rules keep that sound:

- A rank writes its slot, arms, looks at the log, and then reads the slots. The last rank to read finds all slots, or
  the barrier has ended since the rank had armed, and the ring wakes it.
- A handle reads a slot once before it first writes to it, and then reads the log on. If the slot has the hash already,
  or the log has a key of the barrier, the rank arrives in the log: it may have arrived by an earlier call or process.
- Before a key of a barrier is deleted, its slots are cleared, under the same hold of the lock, even if the log has no
  such key. A call that was waiting during the delete never counts again: it waits for the end of the barrier alone.
- A rank that has waited for `LATE_S` appends an arrival for each rank that has a slot. So tools show the arrivals of a
  barrier that lasts, and a rank that times out leaves its arrival, as everywhere.
- The slots count only if the bell still has its name, because a delete clears the slots in the file of that name.

There are `ROWS` rows, so that barriers of several groups, or of several threads of a rank, rarely share slots. A slot
that another barrier has overwritten only delays a barrier: its ranks arrive in the log after `LATE_S`.
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
"""The largest world size of a barrier by slots."""
HASH: Final = 12
SLOT: Final = HASH + 4
"""The size of a slot in bytes: the hash of the barrier, and the world size. An empty slot has zeros."""
ROW: Final = COLUMNS * SLOT
START: Final = 1 << 16
"""The offset of the slots in the bell."""
LATE_S: Final = 0.05
"""How many seconds a rank waits until it also arrives in the log."""
EMPTY: Final = bytes(SLOT)


class Begun(NamedTuple):
    """An arrival, or the place where it may be.

    Attributes:
        bell: the bell that has the slots; None: there is none.
        place: the offset in the bell of the slot of the rank.
        content: the content of a slot of the barrier.
        deletes, values: those of the `KeyValueState` before the arrival.
        run: the run in which the rank arrives.
    """

    bell: Doorbell | None
    place: int
    content: bytes
    deletes: int
    values: object
    run: int


class ArrivalSlots:
    """The slots of one handle on a log that only this host mounts."""

    def __init__(self, log: Log, state: KeyValueState, notifier: ChangeNotifier) -> None:
        self._log = log
        self._state = state
        self._notifier = notifier
        self._run = -1
        self._hash: Any = None
        self.bell = notifier.open_bell
        """Returns the bell that has the slots, or None if the log has no bell, so that no rank arrives by a slot."""

    def content(self, key: bytes, world_size: int) -> bytes:
        """Return the content of a slot of the barrier that has the key `key`, in the run that the handle has read."""
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
        """Return where `rank` may arrive at the barrier that has the key `key`. Deletes count from now on."""
        state, content = self._state, self.content(key, world_size)
        place = START + content[0] % ROWS * ROW + SLOT * rank
        return new_tuple(Begun, (self.bell(), place, content, state.deletes, state.values, self._run))

    def begin(self, key: bytes, done: bytes, world_size: int, rank: int, timeout: float, user: object) -> Begun | None:
        """Arrive in the slot of `rank`. Return None if the caller must arrive in the log.

        `user` uses the slot until `release`, so that no other thread does. For the others see `ArrivalRequest`.
        """
        found = self.find(key, world_size, rank)
        bell, place, content, _, _, run = found
        if bell is None:
            return None
        known = bell.known_slots.get(place)
        if known is None:  # read once, and the log after it: an earlier process of the rank may have written the slot
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
        # One C function, so of several threads only one gets the slot.
        if bell.slot_users.setdefault(place, user) is not user:
            return None
        try:
            bell.known_slots[place] = content  # before the write: if that is interrupted, the next call needs the log
            system.os.pwrite(bell.fd, content, place)
        except BaseException as error:
            release(found, user)
            if not isinstance(error, OSError):
                raise
            raise_if_foreign(error)
            return None
        return found

    def meet(self, prefix: bytes, rank: int, world_size: int, timeout: float) -> tuple[Begun, bool] | bool:
        """Carry out the usual barrier, which the ring after the first sleep of this thread ends.

        These are the steps of an `Arrival` and its wait, without their objects and their other cases.

        Returns:
            True if the rank has passed the barrier, and False if it has not arrived. Otherwise its arrival, and whether
            all ranks have slots, so that the rank must end the barrier.
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
            assert bell is not None, "it has the slot"
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
            pass  # the wait that follows looks once more, and raises the error of the barrier
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
            waiter = None  # the traceback of an error keeps this frame
        assert begun is not None, "the rank has arrived"
        return begun, is_full

    def arrived(self, content: bytes) -> list[int]:
        """Return the ranks whose slots have `content`. The caller holds the log's lock.

        The list is empty if the file of the slots has lost its name, because a delete may have missed it.
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
        """Clear the slots of a barrier if `key` is one of its keys, before `key` is deleted under the log's lock.

        Raises:
            StoreUnavailableError: the slots can't be cleared, so the key must not be deleted.
        """
        if not key.endswith(KEYS_OF_BARRIER):
            return
        bell = self.bell()
        try:
            if bell is None:
                if self._log.handle.bell and self._notifier.bell_exists():
                    raise OSError(system.errno.ENXIO, "its bell can't be opened")
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
    """End the use of a slot by `user`. It may be called twice."""
    bell = begun.bell
    if bell is not None and bell.slot_users.get(begun.place) is user:
        del bell.slot_users[begun.place]


def row_of(content: bytes) -> int:
    """Return the offset in the bell of the row for a slot with `content`."""
    return START + content[0] % ROWS * ROW


def ranks_of(data: bytes, content: bytes) -> list[int]:
    """Return the ranks whose slots in the row `data` have `content`."""
    return [place // SLOT for place in range(0, len(data), SLOT) if data[place : place + SLOT] == content]
