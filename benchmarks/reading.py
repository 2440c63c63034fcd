"""The cost of reading another handle's records: to read them from the file, decode them and apply them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.measure import Row, Settings, median, take_turns
from benchmarks.stores import OURS, TORCH_FILE, fresh

BATCH = 128
"""Records per look, as of a barrier of so many processes."""


def measure(settings: Settings) -> Iterator[Row]:
    """Yield one row: the cost of a record that another process has written."""
    rounds = settings.rounds(9)
    looks = 3 if settings.quick else 100

    def once(store: str) -> float:
        spent = idle = 0.0
        clock = time.process_time
        with fresh(store, settings.directory) as place:
            writer, reader = place.open(), place.open()
            writer.set("key", "value")
            for number in range(-3, looks):
                for _ in range(BATCH):
                    writer.add(f"barrier.{number}/arrivals", 1)
                begin = clock()
                reader.check(["key"])
                read = clock()
                reader.check(["key"])
                if number >= 0:
                    spent += read - begin
                    idle += clock() - read
            for handle in (writer, reader):
                if hasattr(handle, "close"):
                    handle.close()
        return (spent - idle) / looks / BATCH * 1e6

    found, missing = take_turns(settings, (OURS, TORCH_FILE), rounds, once, "records of others")
    yield Row(
        "a record of another process",
        "µs",
        f"median of {rounds} rounds, {BATCH} records at a look",
        {store: median(times) for store, times in found.items()},
        missing,
    )
