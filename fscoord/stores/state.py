"""The values and queues that the records of a log add up to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from fscoord._log import record
from fscoord._log.record import Record

__all__ = ["State"]

BATCH: Final = 1 << 16
"""How many bytes of keys and values one record of a snapshot holds, unless a single value is longer."""
PAIR_SIZE: Final = 6
RECORD_SIZE: Final = record.FRAME_SIZE + record.BODY_MIN

_ASSIGN = frozenset((record.SET, record.ADD, record.COMPARE_SET))


class State:
    """What a `~fscoord.FileStore` knows: it takes in records, in order, and answers reads.

    A value that was appended to is a bytearray, so that n appends cost n and not n^2; it never leaves this object.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes | bytearray] = {}
        self.queues: dict[bytes, deque[bytes]] = {}

    def reset(self) -> None:
        """Forget everything: the records come again from the first."""
        self.values.clear()
        self.queues.clear()

    def apply(self, records: Sequence[Record]) -> None:
        """Take in the next records."""
        values = self.values
        for kind, key, value, _, _ in records:
            if kind in _ASSIGN:
                values[key] = value
            elif kind == record.APPEND:
                self._append(key, value)
            elif kind == record.MULTI_SET:
                values.update(record.decode_pairs(value))
            elif kind == record.DELETE:
                values.pop(key, None)
                self.queues.pop(key, None)
            elif kind == record.PUSH:
                self.queues.setdefault(key, deque()).append(value)
            elif kind == record.POP:
                self._pop(key)

    def snapshot(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield kind, key and value of records that amount to this state."""
        pairs: list[tuple[bytes, bytes]] = []
        size = 0
        for key, value in self.values.items():
            if size + len(value) > BATCH and pairs:
                yield record.MULTI_SET, b"", record.encode_pairs(pairs)
                pairs, size = [], 0
            pairs.append((key, bytes(value)))
            size += len(key) + len(value)
        if pairs:
            yield record.MULTI_SET, b"", record.encode_pairs(pairs)
        for key, queue in self.queues.items():
            for item in queue:
                yield record.PUSH, key, item

    def live_size(self) -> int:
        """Return about how many bytes of a log this state takes."""
        size = sum(map(len, self.values)) + sum(map(len, self.values.values())) + PAIR_SIZE * len(self.values)
        for key, queue in self.queues.items():
            size += (RECORD_SIZE + len(key)) * len(queue) + sum(map(len, queue))
        return size

    def _append(self, key: bytes, value: bytes) -> None:
        current = self.values.get(key)
        if isinstance(current, bytearray):
            current += value
        else:
            self.values[key] = bytearray(current or b"") + value

    def _pop(self, key: bytes) -> None:
        queue = self.queues.get(key)
        if queue:
            queue.popleft()
            if not queue:
                del self.queues[key]

    def get(self, key: bytes) -> bytes | None:
        """Return the value of `key`, or None."""
        value = self.values.get(key)
        return bytes(value) if isinstance(value, bytearray) else value

    def has(self, key: bytes) -> bool:
        """Return whether `key` has a value or a non-empty queue."""
        return key in self.values or key in self.queues

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of `keys` that have neither value nor queue, each once, in order."""
        return [key for key in dict.fromkeys(keys) if not self.has(key)]
