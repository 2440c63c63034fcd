"""`Arrival`: one call's arrival at a barrier of a `~fscoord.FileStore`, and its wait for the end of the barrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fscoord._arguments import key_text
from fscoord._log.format import record
from fscoord._log.log import SEVERAL, Decide, Log
from fscoord._log.wakeup.watcher import Waiter
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._waiting.awaited import BARRIER, Awaited
from fscoord._waiting.rounds import add_arrivals
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import NOT_YET, ArrivalRequest, NotYet, new_tuple
from fscoord.errors import StoreError
from fscoord.stores.file.arrival_slots import COLUMNS, LATE_S, SLOT, ArrivalSlots, Begun, ranks_of, release, row_of
from fscoord.stores.file.operations import COUNTS, LAST, PASSED, RANKS, WAITS, Arrived, Operation
from fscoord.stores.file.replay import KeyValueState, materialize
from fscoord.stores.file.waits import Condition, Write


class Arrival(Condition["bytes | None"]):
    """The condition that all ranks have arrived at a barrier. `arrive` records the arrival of the caller.

    `ArrivalRequest` describes the answer of the wait. If the store has slots (bytes of the bell file, one slot for each
    rank), a caller with a rank arrives by a write to its slot; see `arrival_slots`. All other callers arrive by a
    record in the log.

    Args:
        log: the log of the store.
        state: the state of the store.
        request: the request to arrive. If its ``begun`` is a `Begun`, the caller has arrived in its slot already.
        write: performs an operation.
        decide_alone: computes the records of an arrival in the log, without the slots.
        slots: the slots of the store, or None if the store has no slots.
    """

    _begun: Begun | None = None  # the arrival in a slot; after an arrival in the log, the slots to read
    _is_in_log = False  # whether the log has the arrival of this call
    _is_deleted = False  # whether a key of the barrier was deleted after the arrival: then the arrival never counts

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
        self._rank = -1 if self._slots is None else int(request.token[: request.token.index(b"/")])
        if isinstance(request.begun, Begun):
            self._begun = request.begun

    def new_slow_logger(self, started: float) -> SlowWaitLogger:
        request = self._request
        if request.new_slow_logger is not None:
            return request.new_slow_logger(started)
        name, _, _ = request.done.rpartition(b"/")  # a barrier without ranks, whose request has no logger
        return SlowWaitLogger(__name__, self._describe, started, Awaited(BARRIER, key_text(name)))

    def arrive(self, arm: Callable[[], None], waiter: Waiter | None) -> bytes | NotYet | None:
        """Arrive, and return the result of `look`. `arm` arms `waiter`, so that the end of the barrier wakes it."""
        slots, waits, timeout = self._slots, self._request.waits, self._request.timeout
        if slots is None:
            found = self._arrive_in_log(arm if waits else None)
        else:
            if self._begun is None and waits and waiter is not None and waiter.watcher.bell is not None:
                self._begun = slots.begin(self._key, self._done, self._size, self._rank, timeout, self)
            if self._begun is not None:
                arm()
                return self.look(timeout, reads=True)
            # Don't arm under the lock: the next look arms first, and then reads the slots of other ranks.
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

    def _was_deleted(self, begun: Begun) -> bool:
        """Return whether a key of the barrier was deleted after the arrival, or the run of the arrival has ended.

        If the handle has replayed the whole log since the arrival, it can't tell a delete before the arrival from a
        delete after the arrival. In this case the method ignores deletes, which is safe because a delete also clears
        the slots.
        """
        state, first = self._state, begun.deletes
        if state.values is begun.values and state.deletes != first:
            deleted = state.deleted
            self._is_deleted |= deleted.get(self._key, 0) > first or deleted.get(self._done, 0) > first
        return self._is_deleted or self._log.handle.header.run != begun.run

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
        return NOT_YET if self._begun is None else self._look_at_slots(self._begun, timeout)

    def _look_at_slots(self, begun: Begun, timeout: float) -> bytes | NotYet | None:
        """Read the slots. The caller has just read the log, which does not have the end of the barrier."""
        bell, content = begun.bell, begun.content
        if bell is None or self._was_deleted(begun):
            return NOT_YET
        try:
            found = system.os.pread(bell.fd, SLOT * self._size, row_of(content))
        except OSError as error:
            raise_if_foreign(error)
            found = b""
        if found != content * self._size and (self._is_in_log or timeout > self._request.timeout - LATE_S > 0):
            text = self._state.values.get(self._key)
            if text is None:
                return NOT_YET
            if isinstance(text, (bytes, bytearray)):  # otherwise it is a spilled value, which is read under the lock
                added = add_arrivals(bytes(text), ranks_of(found, content), None, self._size)
                if added is None:
                    return NOT_YET
                # This rank must also arrive in the log: some ranks read only the log, and a time-out names the ranks
                # that are missing there.
                token = self._request.token
                self._is_in_log = self._is_in_log or text.startswith(token) or b" " + token in text
                if not (added[1] or not self._is_in_log or (added[0] and timeout <= 0)):
                    return NOT_YET
        return self.decide(timeout)

    def decide(self, timeout: float) -> bytes | NotYet | None:
        """Read the slots again under the log's lock, append the arrivals, and return the result of `look`."""
        answer: bytes | NotYet | None
        try:
            answer, _ = self._write(self._operation(), timeout, None, None, self._decide)
        except StoreError as error:
            error.maybe_applied = True  # the caller has arrived: its slot counts
            raise
        return answer

    # -- under the log's lock --------------------------------------------------------------------------------------

    def _decide(self, key: bytes, operation: Operation) -> tuple[Arrived, int, Any]:
        """Implement `Decide` for `decide`: return the result of this arrival, and the record to append."""
        if self._state.has(self._done):
            return PASSED, 0, b""
        begun = self._begun
        assert begun is not None, "the slots were read before"
        if self._was_deleted(begun):
            return WAITS, 0, b""
        own = None if self._is_in_log else self._rank
        merged = self._merge(begun, own)
        if merged is None:
            return (WAITS, 0, b"") if self._is_in_log else self._decide_alone(key, operation)
        return merged

    def _decide_first(self, key: bytes, operation: Operation) -> tuple[Arrived, int, Any]:
        """Implement `Decide` for a caller that arrives in the log. If the barrier is not complete, read the slots."""
        slots = self._slots
        assert slots is not None, "only callers with ranks get here"
        self._begun = begun = slots.find(self._key, self._size, self._rank)
        if self._state.has(self._done):
            return self._decide_alone(key, operation)
        return self._merge(begun, self._rank, is_first=True) or self._decide_alone(key, operation)

    def _merge(self, begun: Begun, own: int | None, *, is_first: bool = False) -> tuple[Arrived, int, Any] | None:
        """Combine the arrivals in the log with the arrivals in slots. Return the result, and the record to append.

        Return None if the slots can't be used, so that only the arrivals in the log count.

        Args:
            begun: the slots of the barrier.
            own: the rank of the caller, whose arrival is appended too. None: the log has the arrival of the caller.
            is_first: whether to append the arrival even if the log has an arrival of this rank.
        """
        slots = self._slots
        assert slots is not None, "only callers with ranks get here"
        text = materialize(self._state.values.get(self._key, b""), self._log.read_locked)
        added = add_arrivals(text, slots.arrived(begun.content), own, self._size, is_first=is_first)
        if added is None:
            return None
        tokens, is_full = added
        if not is_full:
            self._is_in_log = self._is_in_log or own is not None
            return WAITS, record.APPEND if tokens else 0, tokens
        pairs = record.encode_pairs([(self._key, text + tokens), (self._done, b"1")])
        return LAST, SEVERAL, [(record.MULTI_SET, b"", pairs)]

    def close(self) -> None:
        """Let other threads use the slot. This method may be called twice."""
        if self._begun is not None:
            release(self._begun, self)
