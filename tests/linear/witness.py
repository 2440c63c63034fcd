"""The log as a witness: calls by the millions are linearizable in the order in which the log has their effects.

No search: each call has a place, that of its own record or of the one whose value it read. It may not end before a call
of an earlier place has begun, and that is all: the order of places, which each process could have seen, is then an
order of the calls that real time allows. Whether the log itself is right is checked by replaying it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from struct import unpack_from
from typing import NamedTuple

from linear.models import EMPTY
from support.plain_reader import read_log


class Done(NamedTuple):
    """A call on one key: ``what`` is set, miss, get, add, push or pop; ``result`` names its effect, or what it read."""

    what: str
    start: int
    end: int
    result: bytes


class Placed(NamedTuple):
    """A call and its place in the log: of its own record if it `writes`, else of the one that it read."""

    start: int
    end: int
    place: int
    writes: bool


def read_generations(
    path: Path, kept: Path, read: Callable[[Path], bytes] = lambda file: file.read_bytes()
) -> list[tuple[str, bytes, bytes]]:
    """Return kind, key and value of all records of the log at `path`, from its first generation to its newest.

    ``read(file)`` returns what a file holds. Those that were removed lie in `kept`. The snapshot that a generation
    begins with repeats what was before.
    """
    records: list[tuple[str, bytes, bytes]] = []
    file, begin = path, 0
    while True:
        log = read_log(_read(file, kept, read))
        assert log.ends == "whole" or file == path, f"{file} ends {log.ends}"
        seal = None
        for offset, kind, key, value, _, _ in log.records:
            if kind == "Z":
                seal = value
                break
            if offset >= begin:
                records.append((kind, key, value))
        if seal is None:
            return records
        _, _, begin, _, length = unpack_from("<I16sQIH", seal)
        file = path.with_name(seal[34 : 34 + length].decode())


def _read(file: Path, kept: Path, read: Callable[[Path], bytes]) -> bytes:
    try:
        return read(file)
    except FileNotFoundError:
        return read(kept / file.name)


class Places:
    """Where in the log each effect is.

    Attributes:
        effects: the place of the record that gave a key a value, or pushed or popped it.
        empty: for each queue, where it becomes empty and where it is not any more.
        last: the values of the end.
    """

    def __init__(self, records: Iterable[tuple[str, bytes, bytes]]) -> None:
        self.effects: dict[tuple[str, bytes, bytes], int] = {}
        self.empty: dict[bytes, tuple[list[int], list[int]]] = {}
        self.last: dict[bytes, bytes] = {}
        queues: dict[bytes, deque[bytes]] = {}
        for place, (kind, key, value) in enumerate(records, 1):
            if kind in "SCA":
                assert kind != "A", "no text is appended to here"
                self._note(("set", key, value), place)
                self.last[key] = value
            elif kind == "I":
                assert value == b"%d" % (int(self.last.get(key, b"0")) + 1)
                self._note(("set", key, value), place)
                self.last[key] = value
            elif kind == "M":
                for name, one in pairs(value):
                    self._note(("set", name, one), place)
                    self.last[name] = one
            elif kind == "P":
                queue = queues.setdefault(key, deque())
                if not queue:
                    self._spans(key)[1].append(place)
                queue.append(value)
                self._note(("push", key, value), place)
            elif kind == "O":
                self._note(("pop", key, queues[key].popleft()), place)
                if not queues[key]:
                    self._spans(key)[0].append(place)

    def _note(self, effect: tuple[str, bytes, bytes], place: int) -> None:
        assert effect not in self.effects, f"twice in the log: {effect}"
        self.effects[effect] = place

    def _spans(self, key: bytes) -> tuple[list[int], list[int]]:
        return self.empty.setdefault(key, ([0], []))

    def is_empty_between(self, key: bytes, least: int, most: int) -> bool:
        """Return whether the queue is empty at a place from `least` to before `most`."""
        begins, ends = self._spans(key)
        span = bisect_right(begins, least) - 1
        if span < len(ends) and ends[span] <= least:
            span += 1
        return span < len(begins) and begins[span] < most


def pairs(data: bytes) -> list[tuple[bytes, bytes]]:
    from support.plain_reader import read_pairs

    return read_pairs(data)


def mistakes(key: bytes, calls: Iterable[Done], places: Places) -> list[str]:
    """Return what is wrong with the calls on one key."""
    wrong: list[str] = []
    placed: list[Placed] = []
    empties: list[Done] = []
    taken: set[int] = set()
    for call in calls:
        kind = {"get": "set", "miss": "set", "add": "set"}.get(call.what, call.what)
        if call.what == "pop" and call.result == EMPTY.encode():
            empties.append(call)
            continue
        place = places.effects.get((kind, key, call.result))
        if place is None:
            wrong.append(f"not in the log: {call} on {key!r}")
        else:
            one = Placed(call.start, call.end, place, call.what not in ("get", "miss"))
            if one.writes and place in taken:
                wrong.append(f"two calls had the one effect of {call} on {key!r}")
            taken.update([place] * one.writes)
            placed.append(one)
    return wrong + _out_of_turn(key, placed) + _not_empty(key, placed, empties, places)


def unclaimed(calls: dict[bytes, list[Done]], places: Places) -> list[tuple[str, bytes, bytes]]:
    """Return the effects in the log that no call has had; `calls` are those on each key."""
    kinds = {"set": "set", "add": "set", "push": "push", "pop": "pop"}
    claimed = {(kinds[call.what], key, call.result) for key in calls for call in calls[key] if call.what in kinds}
    return [effect for effect in places.effects if effect not in claimed]


def _out_of_turn(key: bytes, placed: list[Placed]) -> list[str]:
    wrong: list[str] = []
    ended = sorted(placed, key=lambda call: call.end)
    last, position = Placed(0, 0, 0, writes=False), 0
    for call in sorted(placed):
        while ended[position].end < call.start:
            last = max(last, ended[position], key=lambda one: one.place)
            position += 1
        if call.place < last.place or (call.writes and call.place == last.place):
            wrong.append(f"on {key!r} {call} began after {last} had ended")
    return wrong


def _not_empty(key: bytes, placed: list[Placed], empties: list[Done], places: Places) -> list[str]:
    wrong = []
    ended = sorted(placed, key=lambda call: call.end)
    ends, highest = [call.end for call in ended], [0]
    for call in ended:
        highest.append(max(highest[-1], call.place))
    begun = sorted(placed)
    starts, lowest = [call.start for call in begun], [1 << 62]
    for call in reversed(begun):
        lowest.append(min(lowest[-1], call.place))
    lowest.reverse()
    for call in empties:
        least, most = highest[bisect_left(ends, call.start)], lowest[bisect_right(starts, call.end)]
        if not places.is_empty_between(key, least, most):
            wrong.append(f"{key!r} was not empty at any time of {call}")
    return wrong
