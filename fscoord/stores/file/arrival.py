"""`Arrival`: the wait of one call at a barrier, which begins with the arrival of the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fscoord._arguments import key_text
from fscoord._log.format import record
from fscoord._log.log import SEVERAL, Decide, Log
from fscoord._log.wakeup.doorbell import Doorbell
from fscoord._log.wakeup.watcher import Waiter
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._waiting.awaited import BARRIER, Awaited
from fscoord._waiting.rounds import add_arrivals
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import NOT_YET, ArrivalRequest, NotYet, new_tuple
from fscoord.errors import StoreError
from fscoord.stores.file.arrival_slots import COLUMNS, LATE_S, ROW, ROWS, SLOT, START, ArrivalSlots, Begun, ranks_of
from fscoord.stores.file.operations import COUNTS, LAST, PASSED, RANKS, WAITS, Arrived, Operation
from fscoord.stores.file.replay import KeyValueState, materialize
from fscoord.stores.file.waits import Condition, Write


class Arrival(Condition["bytes | None"]):
    """The condition that all ranks have arrived. Its first look is the arrival of the caller itself.

    The answer is that of an `ArrivalRequest`. A rank arrives in a slot if the store has slots; see `arrival_slots`.
    Any other caller arrives in the log.

    Args:
        log: the log of the store.
        state: its state.
        request: the arrival.
        write: carries out an operation.
        decide_alone: decides an arrival in the log without slots.
        slots: the slots of the store, or None if the store has no slots.

    If the request has a `Begun`, the caller has arrived in its slot already.
    """

    _bell: Doorbell | None = None  # the bell that has the slots of the barrier
    _place = -1  # the offset in the bell of the slot that this call uses; -1: none
    _is_in_log = False  # whether the log has the arrival of this call
    _is_deleted = False  # whether a key of the barrier was deleted since the arrival, which then does not count again
    _deletes = 0  # the `KeyValueState.deletes` at the arrival
    _values: object = None  # the `KeyValueState.values` at the arrival

    def __init__(
        self,
        log: Log,
        state: KeyValueState,
        request: ArrivalRequest,
        write: Write,
        decide_alone: Decide,
        slots: ArrivalSlots | None,
    ) -> None:
        self._log = log
        self._state = state
        self._request = request
        self._write, self._decide_alone = write, decide_alone
        self._key, self._done, self._size = request.key, request.done, request.world_size
        self._slots = slots if request.token and request.all_wait and 1 < self._size <= COLUMNS else None
        self.missing = [self._done]
        begun = request.begun
        if isinstance(begun, Begun):
            self._bell, self._place, self._content, self._deletes, self._values, self._run, _ = begun
            self._row, self._rank = START + self._content[0] % ROWS * ROW, int(request.token.partition(b"/")[0])
            self._bell.slot_users.setdefault(self._place, self)

    def new_slow_logger(self, started: float) -> SlowWaitLogger:
        request = self._request
        if request.new_slow_logger is not None:
            return request.new_slow_logger(started)
        name, _, _ = request.done.rpartition(b"/")  # of a barrier without ranks, which gives no words itself
        return SlowWaitLogger(__name__, self._describe, started, Awaited(BARRIER, key_text(name)))

    def arrive(self, arm: Callable[[], None], waiter: Waiter | None) -> bytes | NotYet | None:
        """Arrive, and return what `look` returns. `arm` arms `waiter`, so that the end of the barrier wakes it."""
        slots, waits = self._slots, self._request.waits
        if self._bell is not None:  # it has begun
            arm()
            return self.look(self._request.timeout, reads=True)
        if slots is None:
            found = self._arrive_in_log(arm if waits else None)
        else:
            token = self._request.token
            self._rank = int(token[: token.index(b"/")])
            self._bell = slots.bell()
            self._find_slots(slots)
            if waits and waiter is not None and waiter.watcher.bell is not None and self._write_slot(slots):
                arm()
                return self.look(self._request.timeout, reads=True)
            # Not armed under the lock: other ranks may write their slots until the next look, which arms first.
            found = self._arrive_in_log(None, self._decide_first)
        return found if waits or not isinstance(found, NotYet) else None

    def _arrive_in_log(self, arm: Callable[[], None] | None, decide: Decide | None = None) -> bytes | NotYet | None:
        self._is_in_log = True
        found: bytes | NotYet | None
        found, _ = self._write(self._operation(), None, self._request.started, arm, decide)
        return found

    def _operation(self) -> Operation:
        token = self._request.token
        kind, rule = (record.APPEND, RANKS) if token else (record.ADD, COUNTS)
        return new_tuple(Operation, (kind, self._key, token, b"", rule, self._done, self._size))

    def _find_slots(self, slots: ArrivalSlots) -> None:
        """Find the slots of the barrier, in the run that the handle has read. Deletes count from now on."""
        state = self._state
        self._content = content = slots.content(self._key, self._size)
        self._row, self._run = START + content[0] % ROWS * ROW, self._log.handle.header.run
        self._deletes, self._values = state.deletes, state.values

    def _write_slot(self, slots: ArrivalSlots) -> bool:
        """Arrive in the slot of the caller's rank. Return False if the caller must arrive in the log."""
        bell, content = self._bell, self._content
        if bell is None:
            return False
        place = self._row + SLOT * self._rank
        # One C function, so of several threads only one gets the slot. `close` gives it back.
        if bell.slot_users.setdefault(place, self) is not self:
            return False
        self._place = place
        try:
            known, values = slots.known(bell, place, self._request.timeout), self._state.values
            if known is None or known == content or self._log.handle.header.run != self._run:
                return False
            if self._key in values or self._done in values:
                return False
            self._deletes, self._values = self._state.deletes, values
            bell.known_slots[place] = content  # before the write: if that is interrupted, the next call needs the log
            system.os.pwrite(bell.fd, content, place)
        except OSError as error:
            raise_if_foreign(error)
            return False
        return True

    def _was_deleted(self) -> bool:
        """Return whether a key of the barrier was deleted since the arrival, as far as the handle has read.

        If the handle has applied all records again since the arrival, a delete before the arrival can't be told from a
        later delete, so no delete counts. Then the slots, which a delete clears, are the only evidence.
        """
        state, first = self._state, self._deletes
        if state.values is self._values and state.deletes != first:
            deleted = state.deleted
            self._is_deleted |= deleted.get(self._key, 0) > first or deleted.get(self._done, 0) > first
        return self._is_deleted or self._log.handle.header.run != self._run

    def look(self, timeout: float, *, reads: bool) -> bytes | NotYet | None:
        state, done = self._state, self._done
        values = state.values
        if reads:
            self._log.refresh(timeout)
        is_there = done in values or done in state.queues
        if values is not state.values:  # another thread reads the log again; see `KeyValueState.reset`
            is_there = self._log.inspect(lambda: state.has(done))
        if is_there:
            return None
        return NOT_YET if self._bell is None else self._look_at_slots(self._bell, timeout)

    def _look_at_slots(self, bell: Doorbell, timeout: float) -> bytes | NotYet | None:
        """Read the slots, after a look at the log that has not found the end of the barrier."""
        if self._was_deleted():
            return NOT_YET
        try:
            found = system.os.pread(bell.fd, SLOT * self._size, self._row)
        except OSError as error:
            raise_if_foreign(error)
            found = b""
        if found != self._content * self._size and (self._is_in_log or timeout > self._request.timeout - LATE_S > 0):
            text = self._state.values.get(self._key)
            if text is None:
                return NOT_YET
            if isinstance(text, (bytes, bytearray)):  # otherwise it is spilled, and is read under the lock
                added = add_arrivals(bytes(text), ranks_of(found, self._content), None, self._size)
                if added is None:
                    return NOT_YET
                # Ranks that look only at the log must find this rank there, and a time-out names the missing ranks.
                token = self._request.token
                self._is_in_log = self._is_in_log or text.startswith(token) or b" " + token in text
                if not (added[1] or not self._is_in_log or (added[0] and timeout <= 0)):
                    return NOT_YET
        return self.decide(timeout)

    def decide(self, timeout: float) -> bytes | NotYet | None:
        """Decide under the log's lock, after another look at the slots, and return what `look` returns."""
        answer: bytes | NotYet | None
        try:
            answer, _ = self._write(self._operation(), timeout, None, None, self._decide)
        except StoreError as error:
            error.maybe_applied = True  # the caller has arrived: its slot counts
            raise
        return answer

    # -- under the log's lock --------------------------------------------------------------------------------------

    def _decide(self, key: bytes, operation: Operation) -> tuple[Arrived, int, Any]:
        """Decide, after a look at the slots, what this call appends."""
        if self._state.has(self._done):
            return PASSED, 0, b""
        if self._was_deleted():
            return WAITS, 0, b""
        own = None if self._is_in_log else self._rank
        merged = self._merge(own)
        if merged is None:
            return (WAITS, 0, b"") if self._is_in_log else self._decide_alone(key, operation)
        return merged

    def _decide_first(self, key: bytes, operation: Operation) -> tuple[Arrived, int, Any]:
        """Decide an arrival in the log. The arrivals in slots count if the log does not have all arrivals."""
        slots = self._slots
        assert slots is not None, "only callers with ranks get here"
        self._bell = slots.bell()  # it may have been announced since
        self._find_slots(slots)
        if self._state.has(self._done):
            return self._decide_alone(key, operation)
        return self._merge(self._rank, is_first=True) or self._decide_alone(key, operation)

    def _merge(self, own: int | None, *, is_first: bool = False) -> tuple[Arrived, int, Any] | None:
        """Decide with the arrivals in slots. Return None if the arrivals in the log must be decided without slots.

        Args:
            own: the rank of the caller if its arrival is to be appended.
            is_first: whether to append it even if the log has an arrival of this rank.
        """
        slots = self._slots
        assert slots is not None, "only callers with ranks get here"
        text = materialize(self._state.values.get(self._key, b""), self._log.read_locked)
        added = add_arrivals(text, slots.arrived(self._content), own, self._size, is_first=is_first)
        if added is None:
            return None
        tokens, is_full = added
        if not is_full:
            self._is_in_log = self._is_in_log or own is not None
            return WAITS, record.APPEND if tokens else 0, tokens
        pairs = record.encode_pairs([(self._key, text + tokens), (self._done, b"1")])
        return LAST, SEVERAL, [(record.MULTI_SET, b"", pairs)]

    def close(self) -> None:
        """Give back the slot. It may be called twice."""
        bell, self._bell = self._bell, None
        if bell is not None and bell.slot_users.get(self._place) is self:
            del bell.slot_users[self._place]
