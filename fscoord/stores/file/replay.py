"""`KeyValueState` applies the records of a log, and holds the values and queues of a `~fscoord.FileStore`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final
from zlib import crc32

from fscoord._log.files.spill import NEVER, Fetch, Spilled, SpilledRecord, Spot, checksum_of_both
from fscoord._log.format import record
from fscoord._waiting.rounds import KEYS_OF_BARRIER

BATCH: Final = 1 << 16
"""The maximum size of the keys and values in one record of a snapshot, in bytes. A single value may be longer."""
PAIR_SIZE: Final = 6
RECORD_SIZE: Final = record.RECORD_MIN

DELETED_MAX: Final = 1024
"""How many deleted barrier keys a state remembers."""

_ASSIGN = frozenset((record.SET, record.ADD, record.COMPARE_SET))
_TAKES = frozenset((record.POP, record.DELETE))
_NOWHERE: Final = Spot(0, b"", 0, -1)


class Rope:
    """A value that consists of parts: spilled parts, which are only in the file, and parts in memory."""

    __slots__ = ("parts", "size")

    def __init__(self, first: StoredValue) -> None:
        self.parts: list[StoredValue] = [first]
        self.size = len(first)

    def __len__(self) -> int:
        return self.size

    def append(self, piece: bytes | Spilled) -> None:
        """Append `piece`. Consecutive pieces in memory are joined in one bytearray, so that n appends cost O(n)."""
        last = self.parts[-1]
        if not isinstance(piece, bytes):
            self.parts.append(piece)
        elif isinstance(last, bytearray):
            last += piece
        else:
            self.parts.append(bytearray(piece))
        self.size += len(piece)


StoredValue = bytes | bytearray | Spilled | Rope
"""A value in memory or in the file. An append replaces ``bytes`` by a ``bytearray``, so that n appends cost O(n)."""


def materialize(value: StoredValue, fetch: Fetch) -> bytes:
    """Return the bytes of `value`. `fetch` reads spilled bytes from the file."""
    if isinstance(value, Rope):
        return b"".join([materialize(part, fetch) for part in value.parts])
    return fetch(value) if isinstance(value, Spilled) else bytes(value)


def _checksum(value: StoredValue) -> int:
    """Return the CRC-32 of `value`, without reading spilled bytes."""
    if isinstance(value, Rope):
        total = 0
        for part in value.parts:
            total = checksum_of_both(total, _checksum(part), len(part))
        return total
    return value.crc if isinstance(value, Spilled) else crc32(value)


class KeyValueState:
    """The state machine of a `~fscoord.FileStore`. It applies records in order and answers reads.

    A value of `spill_bytes` or more is spilled: its bytes are only in the file, and memory holds a `Spilled`. If
    `spill_bytes` is 0, no value is spilled. A value that grows to this size by appends is spilled at the next
    compaction. A method that returns a value reads the bytes of a spilled value from the file.
    """

    def __init__(self, spill_bytes: int = 0) -> None:
        self.values: dict[bytes, StoredValue] = {}
        self.queues: dict[bytes, deque[bytes | Spilled]] = {}
        self.deletes = 0
        """How many deletes of barrier keys were applied."""
        self.deleted: dict[bytes, int] = {}
        """{deleted barrier key: the value of `deletes` after its last delete}, for the most recent deletes."""
        self._least = spill_bytes or NEVER
        self._long: set[bytes] = set()
        """The keys that may have spilled values. Some of these keys may have been deleted."""

    def reset(self) -> None:
        """Begin with new, empty dictionaries, because all records will be applied again from the first.

        The old dictionaries are not changed. A thread that reads `values` without the process mutex could find an old
        value of a key while another thread applies the records again. So the reading thread must keep a reference to
        `values` before it reads the log, and use a value only if `values` is still the same object afterwards.
        """
        self.values, self.queues, self._long = {}, {}, set()

    def mark_spilled(self, keys: set[bytes]) -> None:
        """Note that the next records have spilled values for `keys`."""
        self._long |= keys

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        """Apply the next records."""
        values = self.values
        for kind, key, value, _, _ in records:
            if kind in _ASSIGN:
                values[key] = value
            elif kind == record.APPEND:
                current, least = values.get(key), self._least
                # The usual cases of `_append`, inlined for speed.
                if current.__class__ is bytearray and value.__class__ is bytes and len(current) + len(value) < least:
                    current += value
                elif current is None and value.__class__ is bytes and len(value) < least:
                    values[key] = bytearray(value)
                else:
                    self._append(key, value)
            elif kind == record.MULTI_SET:
                assert isinstance(value, bytes), "its long values come as single records"
                values.update(record.decode_pairs(value))
            elif kind == record.DELETE:
                self._delete(key)
            elif kind == record.PUSH:
                self.queues.setdefault(key, deque()).append(value)
            elif kind == record.POP:
                self._pop(key)
            elif kind == record.TRANSACTION:
                assert isinstance(value, bytes), "as above"
                for name, new in record.decode_changes(value):
                    if new is not None:
                        values[name] = new
                    elif self.queues or name.endswith(KEYS_OF_BARRIER):
                        self._delete(name)
                    else:
                        values.pop(name, None)  # the usual case of `_delete`, inlined for speed

    def relocate_spilled(self, spots: Iterable[Spot]) -> bool:
        """Update the offsets of all spilled values after a compaction, because the log continues in a new file.

        Args:
            spots: the offsets of the spilled values in the new file.

        Returns:
            False if a spilled value is missing in `spots`. Then this state can't be used any more.
        """
        if not self._long:
            return True
        values: dict[bytes, Spot] = {}
        queues: dict[bytes, list[Spot]] = {}
        for spot in spots:
            if spot.kind == record.PUSH:
                queues.setdefault(spot.key, []).append(spot)
            else:
                values[spot.key] = spot
        long, self._long = self._long, set()
        return all(
            self._relocate_value(key, values.get(key, _NOWHERE)) and self._relocate_queue(key, queues.get(key, []))
            for key in long
        )

    def _relocate_value(self, key: bytes, spot: Spot) -> bool:
        value = self.values.get(key)
        if value is None or len(value) < self._least:
            return True
        if spot.size != len(value):
            return False
        self.values[key] = Spilled(spot.offset, spot.size, _checksum(value))
        self._long.add(key)
        return True

    def _relocate_queue(self, key: bytes, spots: list[Spot]) -> bool:
        queue = self.queues.get(key)
        if queue is None:
            return True
        items: deque[bytes | Spilled] = deque()
        left = iter(spots)
        for item in queue:
            if not isinstance(item, Spilled):
                items.append(item)
                continue
            spot = next(left, _NOWHERE)
            if spot.size != item.size:
                return False
            items.append(Spilled(spot.offset, spot.size, item.crc))
            self._long.add(key)
        self.queues[key] = items
        return True

    def snapshot(self, fetch: Fetch) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield the records of a snapshot of this state, as (kind, key, value)."""
        pairs: list[tuple[bytes, bytes]] = []
        size = 0
        for key, value in self.values.items():
            if size + len(value) > BATCH and pairs:
                yield record.MULTI_SET, b"", record.encode_pairs(pairs)
                pairs, size = [], 0
            pairs.append((key, materialize(value, fetch)))
            size += len(key) + len(value)
        if pairs:
            yield record.MULTI_SET, b"", record.encode_pairs(pairs)
        for key, queue in self.queues.items():
            for item in queue:
                yield record.PUSH, key, materialize(item, fetch)

    def live_size(self) -> int:
        """Return the approximate size of the records of `snapshot` in a log, in bytes."""
        size = sum(map(len, self.values)) + sum(map(len, self.values.values())) + PAIR_SIZE * len(self.values)
        for key, queue in self.queues.items():
            size += (RECORD_SIZE + len(key)) * len(queue) + sum(map(len, queue))
        return size

    def _delete(self, key: bytes) -> None:
        self.values.pop(key, None)
        self.queues.pop(key, None)
        if not key.endswith(KEYS_OF_BARRIER):
            return
        self.deletes += 1
        self.deleted.pop(key, None)
        self.deleted[key] = self.deletes
        if len(self.deleted) > DELETED_MAX:
            del self.deleted[next(iter(self.deleted))]

    def _append(self, key: bytes, piece: bytes | Spilled) -> None:
        current = self.values.get(key, b"")
        if isinstance(current, bytearray) and isinstance(piece, bytes):
            current += piece
        elif isinstance(current, bytes) and isinstance(piece, bytes):
            self.values[key] = current = bytearray(current) + piece
        else:
            if not isinstance(current, Rope):
                self.values[key] = current = Rope(current)
            current.append(piece)
        if len(current) >= self._least:
            self._long.add(key)

    def _pop(self, key: bytes) -> None:
        queue = self.queues.get(key)
        if queue:
            queue.popleft()
            if not queue:
                del self.queues[key]

    def get(self, key: bytes, fetch: Fetch) -> bytes | None:
        """Return the value of `key`, or None if the key has no value. `fetch` reads a spilled value from the file."""
        value = self.values.get(key)
        return value if value is None or isinstance(value, bytes) else materialize(value, fetch)

    def values_of(self, keys: list[bytes], fetch: Fetch) -> tuple[list[bytes], list[bytes]]:
        """Return (missing keys, values).

        The missing keys are in the order of `keys`, each once. If a key is missing, the list of values is empty.
        """
        absent = [key for key in dict.fromkeys(keys) if key not in self.values]
        return absent, [] if absent else [materialize(self.values[key], fetch) for key in keys]

    def has(self, key: bytes) -> bool:
        """Return whether `key` has a value or a non-empty queue."""
        return key in self.values or key in self.queues

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of `keys` that have neither a value nor a queue. Each key is listed once, in the given order."""
        return [key for key in dict.fromkeys(keys) if not self.has(key)]


class Witness:
    """Records the last write to one of the keys of a traced wait, so that the trace can name the writer.

    Attributes:
        key: the key that was written last; empty if no key was written yet.
        writer: the number of the session that wrote the key; 0 if no key was written yet.
    """

    __slots__ = ("key", "writer")

    def __init__(self) -> None:
        self.key, self.writer = b"", 0


class WitnessedState(KeyValueState):
    """A `KeyValueState` that also updates the witnesses of traced waits: objects that record the last write to a key.

    While there is a witness, an instance attribute replaces the method `apply`. So `apply` needs no check for witnesses
    while there is none.
    """

    def __init__(self, spill_bytes: int = 0) -> None:
        super().__init__(spill_bytes)
        self._witnesses: dict[bytes, list[Witness]] = {}

    def _apply_and_inform(self, records: Sequence[SpilledRecord]) -> None:
        """Apply the next records, as `KeyValueState.apply` does, and update the witnesses of the written keys."""
        KeyValueState.apply(self, records)
        for kind, key, value, writer, _ in records:
            if kind not in _TAKES:  # a wait for a queue writes its own pop, which is not the cause of its end
                for name in record.changed_keys(kind, key, value):
                    self._inform(name, writer)

    def _inform(self, key: bytes, writer: int) -> None:
        for witness in self._witnesses.get(key, ()):
            witness.key, witness.writer = key, writer

    def attend(self, keys: Iterable[bytes]) -> Witness:
        """Return a new witness of writes to `keys`. The caller must pass it and `keys` to `dismiss` at the end."""
        witness = Witness()
        for key in keys:
            self._witnesses.setdefault(key, []).append(witness)
        self.__dict__["apply"] = self._apply_and_inform
        return witness

    def dismiss(self, witness: Witness, keys: Iterable[bytes]) -> None:
        """Remove `witness`, which `attend` has returned for `keys`."""
        for key in keys:
            rest = [each for each in self._witnesses.get(key, ()) if each is not witness]
            if rest:
                self._witnesses[key] = rest
            else:
                self._witnesses.pop(key, None)
        if not self._witnesses:
            self.__dict__.pop("apply", None)
