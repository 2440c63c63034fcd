"""The delay of time-outs: of a wait for a key that never comes, and of a write while others hold the lock."""

from __future__ import annotations

import fcntl
import struct
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from benchmarks.measure import Budget, Row, Settings, percentile, take_turns
from benchmarks.stores import OURS, TORCH_FILE, TORCH_TCP, fresh

TIMEOUT_S = 0.05
LOG_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 1 << 62, 1, 0)
"""The byte that all writers of a log lock, see docs/contributors/format.md, as fcntl(2) wants it on 64-bit Linux."""

BUDGET = Budget("50 ms at most", limit=50.0)


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row for waits, beside torch's, and a row for writes, which have no deadline in torch's FileStore."""
    rounds, count = settings.rounds(3), 2 if settings.quick else 30

    def waits(store: str) -> list[float]:
        with fresh(store, settings.directory) as place:
            handle = place.open()
            times = min(count, 3) if store == TORCH_FILE else count  # it is a second late each time
            late = [_lateness(lambda: handle.wait(["never"], timedelta(seconds=TIMEOUT_S))) for _ in range(times)]
            if hasattr(handle, "close"):
                handle.close()
            return late

    def writes(store: str) -> list[float]:
        with fresh(store, settings.directory) as place, place.open() as handle:
            handle.set("key", "value")
            handle.set_timeout(TIMEOUT_S)
            with open(place.address, "r+b") as log:
                fcntl.fcntl(log, fcntl.F_OFD_SETLK, LOG_LOCK)
                return [_lateness(lambda: handle.set("key", "value")) for _ in range(count)]

    found, missing = take_turns(settings, (OURS, TORCH_FILE, TORCH_TCP), rounds, waits, "deadline of a wait")
    yield _row("a wait's deadline, late by", found, missing)
    found, missing = take_turns(settings, (OURS,), rounds, writes, "deadline of a write")
    yield _row("a write's deadline while the lock is held, late by", found, missing)


def _lateness(call: Callable[[], Any]) -> float:
    """Return how much longer than `TIMEOUT_S` the call took until it raised the time-out, in ms."""
    start = time.perf_counter()
    try:
        call()
    except RuntimeError:  # ours and torch's
        return (time.perf_counter() - start - TIMEOUT_S) * 1e3
    raise AssertionError("the call did not time out")


def _row(work: str, found: dict[str, list[list[float]]], missing: dict[str, str]) -> Row:
    late = {store: [value for values in rounds for value in values] for store, rounds in found.items()}
    return Row(
        work,
        "ms",
        f"the worst of {len(late[OURS])}",
        {store: max(values) for store, values in late.items()},
        missing,
        {store: {"p50": percentile(values, 0.5)} for store, values in late.items()},
        [BUDGET],
    )
