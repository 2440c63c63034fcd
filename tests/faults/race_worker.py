"""Processes for test_race: writers that tear and void all the time, and readers that check every byte they are given.

``python race_worker.py ROLE JSON`` says "ready", prints its result as JSON, or dies of an assertion.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from support.logs import LIMIT_S, OFD, Log, LogOptions, Session

from fscoord import StoreUnavailableError
from fscoord._log.format import record
from fscoord._log.format.record import Record
from fscoord._runtime import system

FILLINGS = (b"", b"\0", b"x", b"\0\0\0x", b"x\0\0\0\0\0\0\0", bytes(range(256)))


def value(writer: int, number: int) -> bytes:
    """What `writer` writes as its record `number`: of all sizes, and with zeros at its end and within."""
    size = 90_000 if number % 1009 == 5 else 5000 if number % 97 == 3 else number * 31 % 600 if number % 7 == 2 else 9
    filling = FILLINGS[(number + writer) % len(FILLINGS)] * size
    return b"%d." % number + filling[:size]


class TearingLog(Log):
    """A log whose writer dies in the middle of a write, if `chance` has it so."""

    def __init__(self, path: str, writer: int, chance: random.Random) -> None:
        super().__init__(path, Counter(), LogOptions(OFD), lambda: Session("writer", writer))
        self.chance = chance
        self.tears = 0
        self.writer._write = partial(self._tear, self.writer._write)

    def _tear(self, write: Callable[[bytes], None], data: bytes) -> None:
        if self.chance.random() < 1 / 3:
            kept = self.chance.choice((0, 1, 11, 12, 13, len(data) - 1, self.chance.randrange(len(data))))
            system.os.write(self.handle.lock.fd, data[: min(kept, len(data) - 1)])
            self.tears += 1
            raise StoreUnavailableError("the disk is full")
        write(data)


class Counter:
    """A state machine that knows what it must be given."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def apply(self, records: Sequence[Record]) -> None:
        for kind, key, content, _, _ in records:
            writer = int(key)
            number = self.seen.get(writer, 0)
            assert kind == record.SET
            assert content == value(writer, number), f"writer {writer}: {content[:60]!r} instead of record {number}"
            self.seen[writer] = number + 1

    def reset(self) -> None:
        self.seen.clear()


def write(path: str, writer: int, count: int, seed: int) -> dict[str, int]:
    """Write `count` records, each until it is not torn."""
    log = TearingLog(path, writer, random.Random(seed))
    key = b"%d" % writer
    for number in range(count):
        content = value(writer, number)
        while True:
            try:
                log.update(record.SET, key, content, None, LIMIT_S)
                break
            except StoreUnavailableError:
                pass
    log.close()
    return {"tears": log.tears}


class WatchedLog(Log):
    """A log that counts how often it needed the lock to be sure."""

    doubts = 0

    def update(self, kind: int, *rest: Any, **named: Any) -> Any:
        self.doubts += kind == 0
        return super().update(kind, *rest, **named)


def follow(path: str, counts: dict[str, int], read_only: bool) -> dict[str, int]:
    """Look at the log without a pause until all is there."""
    wanted = {int(writer): count for writer, count in counts.items()}
    state_machine = Counter()
    log = WatchedLog(path, state_machine, LogOptions(OFD, read_only=read_only), lambda: Session("reader", 0))
    looks = 0
    while state_machine.seen != wanted:
        log.refresh(LIMIT_S)
        looks += 1
    log.close()
    return {"looks": looks, "doubts": log.doubts}


def reopen(path: str, counts: dict[str, int], seed: int) -> dict[str, int]:
    """Open the log again and again until all is there: no look may find less than the one before."""
    wanted, before, opens, chance = sum(counts.values()), 0, 0, random.Random(seed)
    while before < wanted:
        state_machine = Counter()
        log = Log(path, state_machine, LogOptions(OFD, read_only=True), lambda: Session("reader", 0))
        for _ in range(chance.choice((1, 1, 2, 50, 1000))):
            log.refresh(LIMIT_S)
        log.close()
        assert sum(state_machine.seen.values()) >= before
        before = sum(state_machine.seen.values())
        opens += 1
    return {"opens": opens}


def main(role: str, arguments: str) -> None:
    given: list[Any] = json.loads(arguments)
    print("ready", flush=True)
    print(json.dumps({"write": write, "follow": follow, "reopen": reopen}[role](*given)))


if __name__ == "__main__":
    main(*sys.argv[1:])
