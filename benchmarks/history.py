"""Open a file store with a long history: the speed of the replay, and the time of a process that joins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.measure import Budget, Row, Settings, take_turns
from benchmarks.stores import OURS, OURS_GROWING, TORCH_FILE, Place, fresh, is_missing

OPERATIONS, OPERATIONS_QUICK = 1_000_000, 2_000
KEYS = 1_000
STORES = (OURS, OURS_GROWING, TORCH_FILE)
MIB = 1 << 20


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row for the rate of the replay, and a row for the opening as a whole."""
    rounds = settings.rounds(5)
    operations = OPERATIONS_QUICK if settings.quick else OPERATIONS
    with ExitStack() as stack:
        places: dict[str, Place] = {}
        for store in STORES:
            if not is_missing(store):
                settings.report(f"writing {operations} records to {store}")
                places[store] = stack.enter_context(fresh(store, settings.directory))
                write(places[store], operations)
        path = Path(places[OURS].address)
        size = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*")) / MIB

        def once(store: str) -> float:
            before = time.perf_counter()
            handle = places[store].open()
            last = handle.get(f"key.{(operations - 1) % KEYS}")
            taken = time.perf_counter() - before
            if last != b"%d" % (operations - 1):
                raise RuntimeError(f"{store} replayed {last!r} last")
            return taken

        found, missing = take_turns(settings, STORES, rounds, once, "opening")
    best = {store: min(times) for store, times in found.items()}
    yield Row(
        "replay",
        "M records/s",
        f"best of {rounds} rounds",
        {store: operations / taken / 1e6 for store, taken in best.items() if store != OURS},
        missing,
        budgets=[Budget("at least 1", limit=1.0)],
        more_is_better=True,
    )
    yield Row(
        f"open after {operations} operations on {KEYS} keys",
        "ms",
        f"best of {rounds} rounds",
        {store: taken * 1e3 for store, taken in best.items()},
        missing,
        budgets=[Budget("under 20", limit=20.0)],
    )
    live = sum(len(f"key.{number}{operations - KEYS + number}") for number in range(KEYS)) / MIB
    yield Row(
        f"files after {operations} operations on {KEYS} keys",
        "MiB",
        "one round",
        {OURS: size},
        budgets=[Budget("under twice what lives, and 1 MiB", limit=2 * live + 1)],
    )


def write(place: Place, operations: int) -> None:
    """Set `KEYS` keys in turn, `operations` times in all."""
    store = place.open()
    names = [f"key.{number}" for number in range(KEYS)]
    for number in range(operations):
        store.set(names[number % KEYS], str(number))
    if hasattr(store, "close"):
        store.close()
