"""`Operation`, a write operation as data, and its decision: `Decisions` for one, `Draft` for a batch.

To *decide* an operation is to compute its result and its records from the current state, under the log's lock. On a
mount that several hosts share, one process of a host, the *leader*, may decide and append operations for other
processes of the host; see `fscoord._log.shared.combining`. The process whose caller has requested an operation is the
*author* of the operation. An operation is a value that can be encoded, so that its author can send it to the leader. A
process that decides its own operations uses the same code.

The operations that a leader appends together are a *batch*. A `Draft` is the state of a store as it will be when the
records of the batch are applied. So the second operation of a batch is decided on the result of the first. The state
itself changes only when records are applied, after they were written or read. So a batch whose write fails has changed
nothing. This module does no I/O of its own.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any, Final, NamedTuple

from fscoord._arguments import VALUE_MAX, CounterRangeError, NotACounterError, Transaction, counter_sum, key_text
from fscoord._log.files.spill import Fetch, Spilled
from fscoord._log.format import record
from fscoord._log.handle import NeedsLock
from fscoord._log.log import SEVERAL
from fscoord._waiting.rounds import is_last
from fscoord._waiting.wait import NOT_YET, NotYet
from fscoord.errors import LimitExceededError, StoreUnavailableError
from fscoord.stores.file.replay import KeyValueState, Rope, StoredValue, materialize

RESULT_MAX: Final = 16 * 1024
"""The longest value, in bytes, that a leader reads or returns for another author."""

REFUSALS: Final = (NotACounterError, CounterRangeError, LimitExceededError)
"""The errors that an operation may raise when it is decided. An operation that raises one of these changes nothing."""

Records = list[tuple[int, bytes, bytes]]

_HEAD = struct.Struct("<BBHHIIQ")  # kind, rule, sizes of key, done, value and expected; world size

PLAIN, COUNTS, RANKS, ABSENT, EQUALS, PRESENT = range(6)
"""The rules of operations; see `Operation.rule`."""


class MustWriteAlone(Exception):
    """Raised by a draft if a leader can't decide an operation, so that the author of the operation must append it."""


class Arrived(NamedTuple):
    """The result of an arrival.

    Attributes:
        answer: None if the key `done` is set, and `NOT_YET` if `done` is not set. If `fscoord._waiting.rounds.is_last`
            can't tell whether this arrival is the last, the answer is the new value of the key of the arrivals, and the
            caller must parse this value.
        is_last: whether this arrival has set the key `done`.
    """

    answer: bytes | NotYet | None
    is_last: bool


LAST: Final = Arrived(None, is_last=True)
PASSED: Final = Arrived(None, is_last=False)
WAITS: Final = Arrived(NOT_YET, is_last=False)


class Operation(NamedTuple):
    """One write operation of a store.

    Attributes:
        kind: the kind of its record, as in `fscoord._log.format.record`.
        key: the key, as returned by `key_bytes`. Empty for a `MULTI_SET` and a `TRANSACTION`.
        value: the value; for an `ADD` the addend as decimal digits; for a `MULTI_SET` the encoded pairs; for a
            `TRANSACTION`, which also adds or deletes, the encoded changes, the additions last.
        expected: the value that the key must have, for a `COMPARE_SET` with the rule `PLAIN` and for the rule `EQUALS`;
            for a `MULTI_SET` and a `TRANSACTION` the encoded comparisons.
        rule: when the record is written, and what the operation returns. `PLAIN`: as usual for `kind`. `COUNTS`: an
            arrival that adds 1 to a counter. `RANKS`: an arrival that appends the token of a rank. `ABSENT`: write the
            record only if the key has no value, and return whether the record was written. `EQUALS`: write the record
            only if the value is `expected`, and return whether the record was written. `PRESENT`: write the record only
            if the key has a value, and return this value.
        done: for an arrival: the key that the last arrival sets.
        world_size: for an arrival: how many ranks must arrive. For a `TRANSACTION`: how many changes are additions.
    """

    kind: int
    key: bytes
    value: bytes = b""
    expected: bytes = b""
    rule: int = PLAIN
    done: bytes = b""
    world_size: int = 0

    def encode(self) -> bytes:
        """Encode the operation for a leader."""
        sizes = (len(self.key), len(self.done), len(self.value), len(self.expected))
        head = _HEAD.pack(self.kind, self.rule, *sizes, self.world_size)
        return head + self.key + self.done + self.value + self.expected

    @classmethod
    def decode(cls, data: bytes) -> Operation:
        """Decode an operation.

        Raises:
            MustWriteAlone: `data` is not an operation that this version knows.
        """
        try:
            kind, rule, key_size, done_size, value_size, expected_size, world_size = _HEAD.unpack_from(data)
        except struct.error:
            raise MustWriteAlone from None
        parts, position = [], _HEAD.size
        for size in (key_size, done_size, value_size, expected_size):
            parts.append(data[position : position + size])
            position += size
        key, done, value, expected = parts
        if position != len(data) or kind not in record.DATA_KINDS or rule > PRESENT:
            raise MustWriteAlone
        return cls(kind, key, value, expected, rule, done, world_size)

    @classmethod
    def of(cls, transaction: Transaction) -> Operation:
        """Return the operation that performs `transaction`."""
        compared, present, added, deleted = transaction
        amounts = [(key, b"%d" % amount) for key, amount in added.items()]
        changes = record.encode_pairs([*present.items(), *((key, None) for key in deleted), *amounts])
        expected = record.encode_pairs([*compared.items()])
        kind = record.TRANSACTION if deleted or added else record.MULTI_SET
        return cls(kind, b"", changes, expected, world_size=len(amounts))

    def transaction(self) -> Transaction:
        """Return the transaction from which `of` has made this operation."""
        changes = list(record.decode_changes(self.value))
        first = len(changes) - self.world_size  # the first addition
        return Transaction(
            dict(record.decode_changes(self.expected)),
            {key: value for key, value in changes[:first] if value is not None},
            {key: int(amount or 0) for key, amount in changes[first:]},
            [key for key, value in changes[:first] if value is None],
        )

    @property
    def size(self) -> int:
        """The approximate size of the operation's record, in bytes."""
        return len(self.key) + len(self.value)


class _QueueDraft:
    """A queue after the operations of a batch: `taken` items of the old queue are gone, `pushed` items are new."""

    def __init__(self, old: deque[Any]) -> None:
        self.old = old
        self.taken = 0
        self.pushed: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self.old) - self.taken + len(self.pushed)

    def __getitem__(self, index: int) -> Any:
        return self.old[self.taken] if self.taken < len(self.old) else self.pushed[index]

    def pop(self) -> None:
        if self.taken < len(self.old):
            self.taken += 1
        else:
            self.pushed.popleft()


class Decisions:
    """Decides operations, each by itself, on the current state of a store. The caller holds the log's lock.

    Args:
        state: the current state. It is only read.
        fetch: reads the bytes of a spilled value, under the log's lock.
        path: the path of the log, for messages.
    """

    _is_own = True

    def __init__(self, state: KeyValueState, fetch: Fetch, path: str) -> None:
        self._state = state
        self._fetch = fetch
        self._path = path

    def decide(self, key: bytes, operation: Operation) -> tuple[Any, int, Any]:
        """Return the result of a `fscoord._log.log.Decide` for `operation` on `key`. The state does not change."""
        kind, _, value, expected, rule, _, _ = operation
        if rule:
            if rule > RANKS:
                return self._decide_by_rule(key, operation)
            current = self._get(key)  # the operation is an arrival
            if rule == COUNTS:
                text = value = b"%d" % counter_sum(current, 1, key)
            else:
                text = value if current is None else current + value
                if len(text) > VALUE_MAX:
                    raise self._too_long(key, len(text))
            arrived = self._arrived(operation, text)
            if arrived.answer is text and len(text) > RESULT_MAX and not self._is_own:
                raise MustWriteAlone
            if arrived.is_last:
                return arrived, SEVERAL, [(kind, key, value), (record.SET, operation.done, b"1")]
            return arrived, kind, value
        if kind == record.COMPARE_SET:
            current = self._get(key)
            if current == expected or (current is None and not expected):
                return value, kind, value
            return expected if current is None else current, 0, b""
        if kind == record.ADD:
            total = counter_sum(self._get(key), int(value), key)
            return total, kind, b"%d" % total
        if kind == record.APPEND:
            found = self._stored(key)
            size = len(value) if found is None else len(found) + len(value)
            if size > VALUE_MAX:
                raise self._too_long(key, size)
        elif kind == record.DELETE:
            return (True, kind, b"") if self._has(key) else (False, 0, b"")
        elif kind == record.POP:
            queue = self._queue(key)
            return (self._read(queue[0]), kind, b"") if queue else (None, 0, b"")
        elif kind in record.OF_SEVERAL_KEYS:
            if kind == record.MULTI_SET and not expected:
                return True, kind if value else 0, value  # without decoding it
            return self.decide_transaction(operation.transaction())
        elif kind not in (record.SET, record.PUSH):
            raise MustWriteAlone
        return None, kind, value

    def _decide_by_rule(self, key: bytes, operation: Operation) -> tuple[Any, int, Any]:
        kind, rule, current = operation.kind, operation.rule, self._get(key)
        if rule == PRESENT:
            return current, 0 if current is None else kind, b""
        holds = current is None if rule == ABSENT else current == operation.expected
        return holds, kind if holds else 0, operation.value

    def decide_transaction(self, transaction: Transaction) -> tuple[bool, int, bytes]:
        """Return the result of a `fscoord._log.log.Decide` for `transaction`. The state does not change."""
        compared, present, added, deleted = transaction
        get = self._get
        for key, value in compared.items():
            if get(key) != value:
                return False, 0, b""
        gone: list[tuple[bytes, None]] = [(key, None) for key in deleted if self._has(key)]
        sums = [(key, b"%d" % counter_sum(get(key), amount, key)) for key, amount in added.items()]
        changes = [*present.items(), *gone, *sums]
        if not changes:
            return True, 0, b""
        return True, record.TRANSACTION if gone else record.MULTI_SET, record.encode_pairs(changes)

    def _arrived(self, operation: Operation, text: bytes) -> Arrived:
        """Return the result of the arrival `operation`. `text` is the value of ``operation.key`` after the arrival."""
        last = is_last(text, operation.value, operation.world_size)
        if last is None:
            return Arrived(text, is_last=False)
        return LAST if last else PASSED if self._has(operation.done) else WAITS

    # -- what the state holds --------------------------------------------------------------------------------------

    def _stored(self, key: bytes) -> StoredValue | None:
        return self._state.values.get(key)

    def _get(self, key: bytes) -> bytes | None:
        found = self._state.values.get(key)
        if found.__class__ is bytes or found is None:
            return found  # the usual case, without another call
        return bytes(found) if found.__class__ is bytearray else materialize(found, self._fetch)

    def _read(self, found: StoredValue) -> bytes:
        return materialize(found, self._fetch)

    def _queue(self, key: bytes) -> Any:
        return self._state.queues.get(key)

    def _has(self, key: bytes) -> bool:
        return self._state.has(key)

    def _too_long(self, key: bytes, size: int) -> LimitExceededError:
        return LimitExceededError(
            f"key {key_text(key)!r}: a value of {size} bytes would be over the limit of {VALUE_MAX}; nothing was added",
            path=self._path,
        )


class Draft(Decisions):
    """The state of a store after the operations of one batch, before their records are applied.

    The arguments are those of `Decisions`. The state must not change while a batch is decided.
    """

    def __init__(self, state: KeyValueState, fetch: Fetch, path: str) -> None:
        super().__init__(state, fetch, path)
        self._values: dict[bytes, StoredValue | None] = {}
        self._queues: dict[bytes, _QueueDraft] = {}

    def add(self, operation: Operation, *, is_own: bool) -> tuple[Records, Any]:
        """Decide `operation` on top of the operations added so far, and add its records to the draft.

        Args:
            operation: the operation.
            is_own: whether this process is the author of the operation. For another author, long or spilled values are
                not read, because all writers wait while the lock is held.

        Returns:
            The records to append, as (kind, key, value), and the result of the operation. The list of records is empty
            if the operation changes nothing.

        Raises:
            MustWriteAlone: the author must write the operation. Raised only if `is_own` is false.
            NotACounterError, CounterRangeError, LimitExceededError: the operation fails. The draft is unchanged.
        """
        self._is_own = is_own
        result, kind, value = self.decide(operation.key, operation)
        records = value if kind == SEVERAL else [(kind, operation.key, value)] if kind else []
        for each in records:
            self._apply(*each)
        return records, result

    def resume(self, operation: Operation, noted: Any) -> tuple[Records, Any]:
        """Complete `operation`, whose first record a leader has written. Return its remaining records, and its result.

        Args:
            operation: the operation.
            noted: the result of `KeyValueDecider.note` when the first record was applied.

        Raises:
            StoreUnavailableError: the result was a spilled value, and can't be read any more.
        """
        self._is_own = True
        kind, rule = operation.kind, operation.rule
        if rule in (COUNTS, RANKS):
            if noted is None:
                return [], Arrived(self._get(operation.key) or b"", is_last=False)
            arrived = self._arrived(operation, noted)
            if not arrived.is_last or self._has(operation.done):
                return [], arrived
            # The leader died between the two records of this arrival. All ranks wait for the second record.
            self._apply(*(second := (record.SET, operation.done, b"1")))
            return [second], arrived
        if kind in (record.ADD, record.POP) or rule == PRESENT:
            if noted is None:
                raise StoreUnavailableError(
                    f"{self._path}: the operation took effect, but its result is lost: another process of this host"
                    " wrote the record and did not answer. Read the key again",
                    path=self._path,
                    maybe_applied=True,
                )
            return [], int(noted) if kind == record.ADD else noted
        if rule or kind == record.DELETE or kind in record.OF_SEVERAL_KEYS:
            return [], True
        return [], operation.value if kind == record.COMPARE_SET else None

    # -- what the state and the batch hold -------------------------------------------------------------------------

    def _stored(self, key: bytes) -> StoredValue | None:
        values = self._values
        return values[key] if key in values else self._state.values.get(key)

    def _get(self, key: bytes) -> bytes | None:
        found = self._stored(key)
        return None if found is None else self._read(found)

    def _read(self, found: StoredValue) -> bytes:
        if not self._is_own and len(found) > RESULT_MAX:
            raise MustWriteAlone
        return found if found.__class__ is bytes else materialize(found, self._fetch if self._is_own else _leave)

    def _queue(self, key: bytes) -> Any:
        return self._queues[key] if key in self._queues else self._state.queues.get(key)

    def _has(self, key: bytes) -> bool:
        return self._stored(key) is not None or bool(self._queue(key))

    def _apply(self, kind: int, key: bytes, value: bytes) -> None:
        """Apply one record to the draft, as `KeyValueState.apply` will apply it to the state."""
        if kind == record.APPEND:
            own = self._values.get(key)
            if not isinstance(own, Rope):  # a `Rope` of the state is not in `_values`
                found = self._stored(key)
                # The first part belongs to the state and must not change. So append to a new second part.
                own = self._values[key] = Rope(b"" if found is None else found)
                own.parts.append(bytearray())
            own.append(value)
        elif kind == record.MULTI_SET:
            self._values.update(record.decode_pairs(value))
        elif kind == record.TRANSACTION:
            for name, new in record.decode_changes(value):
                self._apply(record.DELETE if new is None else record.SET, name, new or b"")
        elif kind == record.DELETE:
            self._values[key], self._queues[key] = None, _QueueDraft(deque())
        elif kind in (record.PUSH, record.POP):
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = _QueueDraft(self._state.queues.get(key, deque()))
            if kind == record.PUSH:
                queue.pushed.append(value)
            else:
                queue.pop()
        else:
            self._values[key] = value


def _leave(_: Spilled) -> bytes:
    """Raise `MustWriteAlone`: a leader does not read spilled values for another author."""
    raise MustWriteAlone


class KeyValueDecider:
    """Implements `Decider`: decides, encodes and decodes operations for `fscoord._log.shared.combining`.

    Args:
        state: the state of the handle.
        fetch: reads the bytes of a spilled value, under the log's lock.
        peek: reads the bytes of a spilled value with or without the log's lock, or raises `NeedsLock`.
        path: the path of the log, for messages.
    """

    refusals = REFUSALS
    must_write_alone = MustWriteAlone

    def __init__(self, state: KeyValueState, fetch: Fetch, peek: Fetch, path: str) -> None:
        self._state = state
        self._fetch = fetch
        self._peek = peek
        self._path = path

    def begin(self) -> Draft:
        """Return a new draft for one batch."""
        return Draft(self._state, self._fetch, self._path)

    decode = staticmethod(Operation.decode)

    def note(self, operation: Operation, found: Any) -> Any:
        """Return the argument `noted` of `Draft.resume` for `operation`, whose record `found` is about to be applied.

        The caller holds the process mutex. The method must be called before the record is applied, because a pop
        removes the value that is the result of the pop.
        """
        _, key, value, _, _ = found
        if operation.kind == record.POP:
            queue = self._state.queues.get(key)
            return self._note_value(queue[0]) if queue else b""
        if operation.rule in (RANKS, PRESENT):
            current: Any = self._state.values.get(key, b"")
            if operation.rule == PRESENT:
                return self._note_value(current)
            # Don't read a long value here. If the note is None, `resume` returns the value to the caller.
            is_in_memory = isinstance(current, bytes | bytearray) and isinstance(value, bytes)
            return bytes(current) + value if is_in_memory else None
        return self._note_value(value) if operation.kind == record.ADD else None

    def _note_value(self, value: StoredValue) -> bytes | None:
        """Return the bytes of `value`, or None if they can't be read without the log's lock.

        A spilled value is read at once, because its offset is valid only in the current file of the log. A compaction
        may replace this file before the author returns the result.
        """
        try:
            return materialize(value, self._peek)
        except NeedsLock:
            return None

    @staticmethod
    def encode_result(result: Any) -> bytes:
        """Encode `result`, a result of `Draft.decide`.

        Raises:
            MustWriteAlone: the result is too long to be sent.
        """
        if isinstance(result, Arrived):
            data = b"L" if result.is_last else b"W"
            return data + (b"Y" if isinstance(result.answer, NotYet) else KeyValueDecider.encode_result(result.answer))
        if result is None or isinstance(result, bool):
            return {None: b"N", True: b"T", False: b"F"}[result]
        if isinstance(result, int):
            return b"I%d" % result
        if len(result) > RESULT_MAX:
            raise MustWriteAlone
        return b"B" + bytes(result)

    @staticmethod
    def decode_result(data: bytes) -> Any:
        """Decode `data`, a result of `encode_result`."""
        form, content = data[:1], data[1:]
        if form in (b"L", b"W"):
            answer = NOT_YET if content == b"Y" else KeyValueDecider.decode_result(content)
            return Arrived(answer, form == b"L")
        if form == b"I":
            return int(content)
        return content if form == b"B" else {b"N": None, b"T": True, b"F": False}[form]
