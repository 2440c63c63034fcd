"""The reports of processes about their calls, checked by a search, or by the log, which has them all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from linear import models
from linear.checker import LINEARIZABLE, UNKNOWN, Call, check_each
from linear.witness import Done, Places, mistakes, unclaimed

Ahead = tuple[int, int]
"""By how many nanoseconds the clock of who told may be ahead of that by which all are judged: at least, at most."""


def model(key: str) -> tuple[Any, Any]:
    return (models.queue, ()) if key.startswith("q") else (models.value, None)


def take_history(told: Iterable[tuple[Any, ...]], ahead: Ahead = (0, 0)) -> list[tuple[str, Call]]:
    """Put together what a process told by `histories.worker.make_calls`, and its forked children. No call becomes
    shorter than it was.
    """
    least, most = ahead
    begun: dict[tuple[int, int], tuple[str, tuple[Any, ...], int]] = {}
    calls = []
    for name, number, *rest in told:
        if rest[0] == "failed":
            raise AssertionError(f"process {name} at call {number}: {rest[1]}")
        if (name, number) not in begun:
            key, operation, start = rest
            begun[name, number] = (key, operation, start - most)
            continue
        key, operation, start = begun.pop((name, number))
        word, *more = rest
        if word == "done":
            calls.append((key, Call(start, more[1] - least, operation, more[0])))
        elif word == "maybe":
            calls.append((key, Call(start, math.inf, operation, UNKNOWN)))
    return calls + [(key, Call(start, math.inf, operation, UNKNOWN)) for key, operation, start in begun.values()]


def errors(told: Iterable[tuple[Any, ...]]) -> list[str]:
    """Return what calls raised, but for what a full disk, a busy machine and large numbers explain."""
    texts = [rest[1] for _, _, *rest in told if rest[0] in ("never", "maybe")]
    usual = ("File too large", "StoreTimeoutError", "OverflowError")
    return [text for text in texts if not any(word in text for word in usual)]


def judge(calls: list[tuple[str, Call]], keys: list[str]) -> None:
    """Fail unless every key's history is linearizable; one that is too hard to tell fails, too."""
    verdicts = check_each(calls, model)
    wrong = {
        key: [verdict, *sorted((call for name, call in calls if name == key), key=lambda call: call.start)]
        for key, verdict in verdicts.items()
        if verdict != LINEARIZABLE
    }
    assert not wrong, wrong
    assert verdicts.keys() == set(keys), "a key that nobody used proves nothing"


class Witnessed:
    """The reports of `histories.worker.testify`, to be compared with the log.

    Attributes:
        calls: the calls on each key that returned a result.
        undecided: the errors of calls that may have had an effect.
    """

    def __init__(self) -> None:
        self.calls: dict[bytes, list[Done]] = {}
        self.undecided: list[str] = []
        self._in_flight: set[bytes] = set()

    def take(self, name: int, lines: Iterable[bytes], was_killed: bool, ahead: Ahead = (0, 0)) -> None:
        """Take in the report of process `name`. A killed process may have done one operation more."""
        least, most = ahead
        following = 0
        for line in lines:
            _, number, what, key, start, end, result = line.split(b" ", 6)
            following = int(number) + 1
            if what == b"maybe":
                self.undecided.append(result.decode())
                self._in_flight.add(b"%d.%d" % (name, int(number)))
                continue
            name_of_key = {b"add": b"c", b"push": b"q", b"pop": b"q"}.get(what, b"v") + key
            done = Done(what.decode(), int(start) - most, int(end) - least, result)
            self.calls.setdefault(name_of_key, []).append(done)
        if was_killed:
            self._in_flight.add(b"%d.%d" % (name, following))

    def compare(self, records: list[tuple[str, bytes, bytes]]) -> int:
        """Fail unless the calls are linearizable in the order of the log, and the log holds them and nothing else;
        return how many they are.
        """
        places = Places(records)
        wrong = [text for key, done in self.calls.items() for text in mistakes(key, done, places)]
        assert not wrong, (len(wrong), wrong[:5])
        others = [effect for effect in unclaimed(self.calls, places) if not effect[2].startswith(b"first.")]
        phantoms = [
            effect
            for effect in others
            if effect[2] not in self._in_flight and not (effect[0] == "pop" or effect[1].startswith(b"c"))
        ]
        assert not phantoms, f"nobody says to have written {phantoms[:5]}"
        assert len(others) <= len(self._in_flight), f"{len(self._in_flight)} are undecided; no report has {others}"
        return sum(map(len, self.calls.values()))
