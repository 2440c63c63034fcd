"""Batches of many pages, by the threads of one process, and one who sees that no byte changes that was read once."""

from __future__ import annotations

import os
import random
import threading
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mounts.trouble import read_past_cache
from support.internals import log_of, system

from fscoord.store import Store

if TYPE_CHECKING:
    from mounts.agents import Agent, Worker

THREADS = 12
LENGTHS = 2_000, 16_000
"""The least and the most bytes of a value. A value of 16 KiB would be written by its author alone."""


class TellingOs(types.ModuleType):
    """`os`, but each sync of data is reported: before it the size of the write that it sends, and after it "sent".

    A log on a mount that hosts share is synced after each write, and no other log is.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__("os")
        self._worker = worker
        self._sizes: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: bytes) -> int:
        self._sizes[fd] = os.write(fd, data)
        return self._sizes[fd]

    def fdatasync(self, fd: int) -> None:
        self._worker.report(self._sizes.pop(fd, 0))
        os.fdatasync(fd)
        self._worker.report("sent")


def sizes(events: Iterable[Any]) -> list[int]:
    """Return the size of each write whose sync is reported in `events`."""
    return [event for event in events if isinstance(event, int)]


def await_writing(writer: Agent, threads: int) -> None:
    """Return when so many threads have set a value, and a sync has just begun, if syncs are reported at all."""
    while writer.events.count("writing") < threads:
        writer.look_for_event()
    before = len(sizes(writer.events))
    while before and len(sizes(writer.events)) == before:
        writer.look_for_event()


def unsent(events: Iterable[Any]) -> int | None:
    """Return the size of the write whose sync had begun and not ended at the last of `events`."""
    syncs = [event for event in events if event != "writing"]
    return syncs[-1] if syncs and syncs[-1] != "sent" else None


def write(worker: Worker, seed: int, count: int) -> None:
    """Let threads set `count` long values each, in batches of 6 to 48 pages. Report the first of each, and syncs."""
    store = worker.stores["store"]
    store.set("registered", "1")
    system.os = TellingOs(worker)

    def set_values(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        for turn in range(count):
            store.set(f"{seed}.{number}", draw.randbytes(draw.randrange(*LENGTHS)))
            if not turn:
                worker.report("writing")

    threads = [threading.Thread(target=set_values, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


KEPT = 1 << 20
"""At least so many bytes are compared again. No batch is longer."""


class Seen:
    """The last bytes of a log that one process has read: from `start` to the end of the last complete record."""

    def __init__(self) -> None:
        self.start = 0
        self.data = b""


_seen: dict[str, Seen] = {}


def add_and_compare(worker: Worker, path: str) -> int:
    """Append a record, read the log, and compare it with what was read before. Return the sum.

    The record is appended as soon as the lock is free, so directly behind what a writer has left that was killed.
    """
    store, seen = worker.stores["store"], _seen.setdefault(path, Seen())
    total = store.add("n", 1)
    _, end = log_of(store).position()
    data = read_past_cache(path, seen.start)
    assert seen.start + len(data) >= end
    before = seen.data
    if data[: len(before)] != before:
        first = next(place for place, byte in enumerate(before) if data[place] != byte)
        raise AssertionError(f"byte {seen.start + first} has changed, and {seen.start + len(before)} had been read")
    start = max(0, end - KEPT) // KEPT * KEPT
    seen.data = data[start - seen.start : end - seen.start]
    seen.start = start
    return total


def keep_reading(store: Store, key: str) -> int:
    """Read what is new, again and again, until `key` is there. Return how often."""
    count = 0
    while not store.check([key]):
        count += 1
    return count
