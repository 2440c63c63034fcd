"""Write operations as data: `Operation`, and `Draft`, which decides a batch of them. Pure: no I/O, no clock.

On a mount that hosts share, one process of a host may decide and append the operations of others; see
`fscoord._log.shared.combining`. So an operation is not a closure of its author. It is a value that can be encoded, and
a `Draft` decides it with the state of the process that holds the log's lock.

A `Draft` is the state of a store as it will be once the records of a batch are applied. The state itself changes only
when records are applied, after they were written or read. So a batch whose write fails has changed nothing, and the
second operation of a batch is decided on the result of the first.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any, Final, NamedTuple

from fscoord._arguments import VALUE_MAX, CounterRangeError, NotACounterError, counter_sum, key_text
from fscoord._log.files.spill import Fetch, Spilled
from fscoord._log.format import record
from fscoord._log.handle import NeedsLock
from fscoord._waiting.wait import NOT_YET, LastOfCount, LastOfRanks, NotYet
from fscoord.errors import LimitExceededError, StoreUnavailableError
from fscoord.stores.file.replay import KeyValueState, materialize

__all__ = ["RESULT_MAX", "Arrived", "Draft", "KeyValueDecider", "MustWriteAlone", "Operation", "check_value_size"]

RESULT_MAX: Final = 16 * 1024
"""The longest value, in bytes, that a leader reads or returns for another process."""

REFUSALS: Final = (NotACounterError, CounterRangeError, LimitExceededError)
"""The errors by which an operation is refused under the lock. They leave everything unchanged."""

Records = list[tuple[int, bytes, bytes]]

_HEAD = struct.Struct("<BBHHIIQ")  # kind, judge, sizes of key, done, value and expected; world size
_NO_JUDGE, _COUNTS, _RANKS = range(3)


class MustWriteAlone(Exception):
    """Raised by a draft for an operation that only its author can carry out. The draft is unchanged."""


class Arrived(NamedTuple):
    """The result of an arrival.

    Attributes:
        answer: `NOT_YET`; None if the key `done` is set; or the new value, if the caller must decide.
        is_last: whether this arrival has set the key `done`.
    """

    answer: bytes | NotYet | None
    is_last: bool


class Operation(NamedTuple):
    """One write operation of a store.

    Attributes:
        kind: the kind of its record, as in `fscoord._log.format.record`.
        key: the key, checked. Empty for a `MULTI_SET`.
        value: the value; for an `ADD` the addend as decimal digits; for a `MULTI_SET` the encoded pairs.
        expected: for a `COMPARE_SET`: the value that the key must have.
        done: for an arrival: the key that the last arrival sets.
        judge: for an arrival: whether the arrival is the last. None: the operation is not an arrival.
    """

    kind: int
    key: bytes
    value: bytes = b""
    expected: bytes = b""
    done: bytes = b""
    judge: LastOfCount | LastOfRanks | None = None

    def encode(self) -> bytes:
        """Return the operation as bytes."""
        judge, world_size = _NO_JUDGE, 0
        if self.judge is not None:
            judge = _RANKS if isinstance(self.judge, LastOfRanks) else _COUNTS
            world_size = self.judge.world_size
        sizes = (len(self.key), len(self.done), len(self.value), len(self.expected))
        return _HEAD.pack(self.kind, judge, *sizes, world_size) + self.key + self.done + self.value + self.expected

    @classmethod
    def decode(cls, data: bytes) -> Operation:
        """Return the operation in `data`.

        Raises:
            MustWriteAlone: `data` is not an operation of this version.
        """
        try:
            kind, judging, key_size, done_size, value_size, expected_size, world_size = _HEAD.unpack_from(data)
        except struct.error:
            raise MustWriteAlone from None
        parts, position = [], _HEAD.size
        for size in (key_size, done_size, value_size, expected_size):
            parts.append(data[position : position + size])
            position += size
        key, done, value, expected = parts
        if position != len(data) or kind not in record.DATA_KINDS or judging > _RANKS:
            raise MustWriteAlone
        judge: LastOfCount | LastOfRanks | None = None
        if judging == _COUNTS:
            judge = LastOfCount(world_size)
        elif judging == _RANKS:
            judge = LastOfRanks(value, world_size)
        return cls(kind, key, value, expected, done, judge)

    @property
    def size(self) -> int:
        """The approximate size of its record, in bytes."""
        return len(self.key) + len(self.value)

    @property
    def keys(self) -> list[bytes]:
        """The keys that a record of this operation changes."""
        if self.kind == record.MULTI_SET:
            return [name for name, _ in record.decode_pairs(self.value)]
        return [self.key]


class _Pieces:
    """A value to which a batch appends: the value before the batch, which is read only if needed, and the pieces."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.pieces: list[bytes] = []
        self.size = 0 if base is None else len(base)

    def append(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.size += len(piece)


class _QueueDraft:
    """A queue after a batch: how many old items were taken, and which items were pushed."""

    def __init__(self, old: deque[Any] | None) -> None:
        self.old: deque[Any] = old if old is not None else deque()
        self.taken = 0
        self.pushed: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self.old) - self.taken + len(self.pushed)

    def first(self) -> Any:
        return self.old[self.taken] if self.taken < len(self.old) else self.pushed[0]

    def pop(self) -> None:
        if self.taken < len(self.old):
            self.taken += 1
        else:
            self.pushed.popleft()


class Draft:
    """The state of a store as it will be once the records of one batch are applied.

    Args:
        state: the state before the batch. It is only read, and must not change while the draft is used.
        fetch: reads the bytes of a spilled value, under the log's lock.
        path: the path of the log, for messages.
    """

    def __init__(self, state: KeyValueState, fetch: Fetch, path: str) -> None:
        self._state = state
        self._fetch = fetch
        self._path = path
        self._values: dict[bytes, bytes | _Pieces | None] = {}
        self._queues: dict[bytes, _QueueDraft] = {}
        self._is_own = True

    def decide(self, operation: Operation, *, is_own: bool) -> tuple[Records, Any]:
        """Decide `operation` after all operations that were decided before.

        Args:
            operation: the operation.
            is_own: whether this process is its author. For another author, a long or spilled value is not read, because
                all writers wait while the lock is held.

        Returns:
            The records to append, as kind, key and value, and the result of the operation. Without a record, nothing
            changes.

        Raises:
            MustWriteAlone: the author must carry out the operation. Raised only if `is_own` is false.
            NotACounterError, CounterRangeError, LimitExceededError: the operation is refused. The draft is unchanged.
        """
        self._is_own = is_own
        kind, key, value = operation.kind, operation.key, operation.value
        if operation.judge is not None:
            return self._decide_arrival(operation, operation.judge)
        if kind == record.SET:
            self._values[key] = value
            return [(kind, key, value)], None
        if kind == record.ADD:
            total = counter_sum(self._get(key), int(value), key)
            self._values[key] = digits = b"%d" % total
            return [(kind, key, digits)], total
        if kind == record.COMPARE_SET:
            current = self._get(key)
            if current == operation.expected or (current is None and not operation.expected):
                self._values[key] = value
                return [(kind, key, value)], value
            return [], operation.expected if current is None else current
        if kind == record.APPEND:
            check_value_size(key, self._size(key) + len(value), self._path)
            self._grow(key, value)
            return [(kind, key, value)], None
        if kind == record.MULTI_SET:
            self._values.update(record.decode_pairs(value))
            return [(kind, key, value)], None
        return self._decide_other(kind, key, value)

    def _decide_other(self, kind: int, key: bytes, value: bytes) -> tuple[Records, Any]:
        if kind == record.DELETE:
            if not self._has(key):
                return [], False
            self._values[key] = None
            self._queues[key] = _QueueDraft(None)
            return [(kind, key, b"")], True
        if kind == record.PUSH:
            self._queue(key).pushed.append(value)
            return [(kind, key, value)], None
        if kind == record.POP:
            queue = self._queue(key)
            if not len(queue):
                return [], None
            item = self._read(queue.first())
            queue.pop()
            return [(kind, key, b"")], item
        raise MustWriteAlone

    def _decide_arrival(self, operation: Operation, judge: LastOfCount | LastOfRanks) -> tuple[Records, Arrived]:
        """Decide an arrival, as `fscoord.stores.file.waits.Arrival` does without combining."""
        key, piece = operation.key, operation.value
        if operation.kind == record.ADD:
            text = content = b"%d" % counter_sum(self._get(key), 1, key)
        else:
            check_value_size(key, self._size(key) + len(piece), self._path)
            text, content = (self._get(key) or b"") + piece, piece
        is_last = judge(text)
        if is_last is None and len(text) > RESULT_MAX and not self._is_own:
            raise MustWriteAlone
        records = [(operation.kind, key, content)]
        answer: bytes | NotYet | None = NOT_YET
        if is_last:
            records.append((record.SET, operation.done, b"1"))
            answer = None
        elif is_last is None:
            answer = text
        elif self._has(operation.done):
            answer = None
        if operation.kind == record.ADD:
            self._values[key] = content
        else:
            self._grow(key, content)
        if is_last:
            self._values[operation.done] = b"1"
        return records, Arrived(answer, bool(is_last))

    def resume(self, operation: Operation, noted: Any) -> tuple[Records, Any]:
        """Return the records that `operation`, whose first record is in the log, still needs, and its result.

        Args:
            operation: the operation.
            noted: the result of `KeyValueDecider.note` when the record was applied.

        Raises:
            StoreUnavailableError: the result is a spilled value that can't be read any more.
        """
        self._is_own = True
        kind = operation.kind
        if operation.judge is not None:
            if noted is None:
                return [], Arrived(self._get(operation.key) or b"", is_last=False)
            is_last = operation.judge(noted)
            if is_last is None:
                return [], Arrived(noted, is_last=False)
            if self._has(operation.done):
                return [], Arrived(None, is_last=is_last)
            if not is_last:
                return [], Arrived(NOT_YET, is_last=False)
            # The batch was torn between the two records of this arrival. All ranks wait for the second one.
            self._values[operation.done] = b"1"
            return [(record.SET, operation.done, b"1")], Arrived(None, is_last=True)
        if kind in (record.ADD, record.POP):
            if noted is None:
                raise StoreUnavailableError(
                    f"{self._path}: the operation took effect, and its result can't be read any more: a leader of this"
                    " host wrote its record and did not answer",
                    path=self._path,
                    maybe_applied=True,
                )
            return [], int(noted) if kind == record.ADD else bytes(noted)
        if kind == record.COMPARE_SET:
            return [], operation.value
        return [], True if kind == record.DELETE else None

    # -- what the state and the batch hold -------------------------------------------------------------------------

    def _get(self, key: bytes) -> bytes | None:
        found = self._values[key] if key in self._values else self._state.values.get(key)
        if isinstance(found, _Pieces):
            if found.size > RESULT_MAX and not self._is_own:
                raise MustWriteAlone
            base = b"" if found.base is None else self._read(found.base)
            return base + b"".join(found.pieces)
        return None if found is None else self._read(found)

    def _read(self, found: Any) -> bytes:
        """Return the bytes of a stored value."""
        if not self._is_own and (len(found) > RESULT_MAX or not isinstance(found, bytes | bytearray)):
            raise MustWriteAlone
        return found if isinstance(found, bytes) else materialize(found, self._fetch)

    def _size(self, key: bytes) -> int:
        found = self._values[key] if key in self._values else self._state.values.get(key)
        if isinstance(found, _Pieces):
            return found.size
        return 0 if found is None else len(found)

    def _grow(self, key: bytes, piece: bytes) -> None:
        found = self._values[key] if key in self._values else self._state.values.get(key)
        if not isinstance(found, _Pieces):
            found = self._values[key] = _Pieces(found)
        found.append(piece)

    def _queue(self, key: bytes) -> _QueueDraft:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _QueueDraft(self._state.queues.get(key))
        return queue

    def _has(self, key: bytes) -> bool:
        value = self._values[key] if key in self._values else self._state.values.get(key)
        queue: Any = self._queues[key] if key in self._queues else self._state.queues.get(key)
        return value is not None or bool(queue is not None and len(queue))


class KeyValueDecider:
    """The `Decider` of a store: by it `fscoord._log.shared.combining` decides, encodes and decodes operations.

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
        """Return the draft for one batch."""
        return Draft(self._state, self._fetch, self._path)

    decode = staticmethod(Operation.decode)

    def note(self, operation: Operation, found: Any) -> Any:
        """Return the `noted` of `Draft.resume` for `operation`, whose record `found` is about to be applied.

        The caller holds the process mutex. The value that a pop takes is in the state until the record is applied.
        """
        _, key, value, _, _ = found
        if operation.kind == record.POP:
            queue = self._state.queues.get(key)
            return self._note_value(queue[0]) if queue else b""
        if operation.judge is not None and operation.kind == record.APPEND:
            current: Any = self._state.values.get(key, b"")
            # A long value is not read here. Without a note, the caller of the arrival looks at the value itself.
            is_in_memory = isinstance(current, bytes | bytearray) and isinstance(value, bytes)
            return bytes(current) + value if is_in_memory else None
        return self._note_value(value) if operation.kind == record.ADD else None

    def _note_value(self, value: bytes | Spilled) -> bytes | None:
        """Return the bytes of `value`; None if they can't be read.

        A spilled value is read at once: its offset counts in this generation only, and the author may find its record
        in one generation and return the result in the next.
        """
        if isinstance(value, bytes):
            return value
        try:
            return self._peek(value)
        except NeedsLock:
            return None

    @staticmethod
    def encode_result(result: Any) -> bytes:
        """Return `result`, which `Draft.decide` has returned, as bytes.

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
        """Return the result in `data`, which `encode_result` has returned."""
        form, content = data[:1], data[1:]
        if form in (b"L", b"W"):
            answer = NOT_YET if content == b"Y" else KeyValueDecider.decode_result(content)
            return Arrived(answer, form == b"L")
        if form == b"I":
            return int(content)
        return content if form == b"B" else {b"N": None, b"T": True, b"F": False}[form]


def check_value_size(name: bytes, size: int, path: str) -> None:
    """Raise `LimitExceededError` if key `name` can't have a value of `size` bytes."""
    if size > VALUE_MAX:
        raise LimitExceededError(
            f"key {key_text(name)!r}: {size} bytes would be over the limit of {VALUE_MAX}; nothing was added", path=path
        )
