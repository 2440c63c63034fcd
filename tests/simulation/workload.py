"""Random calls of logical processes on one `FileStore`, and what must be true of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from linear import models, operations
from linear.checker import LINEARIZABLE, UNKNOWN, Call, check_each
from simulation.files import Files
from simulation.world import PATH, World
from support.plain_reader import Log, read_newest

from fscoord import FileStore, StoreError, StoreTimeoutError, StoreUnavailableError

VALUES, QUEUES = ("v1", "v2"), ("q1",)
DATA = "SICAMDPO"
LIMIT_S = 1000.0
AFTER_EVICTION_S = 60.0
"""How long a call may take after the eviction of the host that it had to wait for, in seconds."""


def model(key: str) -> tuple[Any, Any]:
    return (models.queue, ()) if key in QUEUES else (models.value, None)


@dataclass
class File:
    """A simulated file, as `plain_reader.read_newest` wants a path."""

    files: Files
    name: str = PATH

    def read_bytes(self) -> bytes:
        return bytes(self.files.names[self.name].data)

    def with_name(self, name: str) -> File:
        return File(self.files, f"{Files.DIRECTORY}/{name}")


@dataclass
class Run:
    """The draw of one seed, and the history of its calls; a moment is a count of begins and ends."""

    world: World
    options: dict[str, Any]
    count: int
    calls: list[tuple[str, Call]] = field(default_factory=list)
    moments: Any = field(default_factory=lambda: itertools.count(1))
    refused: int = 0
    limits: tuple[float, ...] = (LIMIT_S,)
    late: int = 0
    counted: dict[str, int] = field(default_factory=dict)

    def open(self, limit: float = LIMIT_S, **more: Any) -> FileStore:
        """Open the store; try again if the disk is full."""
        while True:
            try:
                store = FileStore(PATH, timeout=LIMIT_S, **self.options | more)
            except StoreUnavailableError:
                self.refused += 1
            else:
                store.set_timeout(limit)
                return store

    def do(self, store: FileStore, key: str, operation: tuple[Any, ...]) -> None:
        """Make one call, and write it into the history: at first as one that never returns."""
        start, place = next(self.moments), len(self.calls)
        self.calls.append((key, Call(start, math.inf, operation, UNKNOWN)))
        began = self.world.scheduler.now
        try:
            result = operations.call(store, key, operation)
        except (StoreError, StoreTimeoutError) as error:
            is_late = isinstance(error, StoreTimeoutError) and min(self.limits) < LIMIT_S
            assert isinstance(error, StoreUnavailableError) or is_late, error
            self.refused += not is_late
            self.late += is_late
            if not error.maybe_applied:
                self.calls[place] = (key, Call(start, math.inf, ("len",) if key in QUEUES else ("read",), UNKNOWN))
            return
        except ValueError:  # it is no integer that was to be added to: the state is what a read would find
            assert operation[0] == "add"
            self.calls[place] = (key, Call(start, math.inf, ("read",), UNKNOWN))
            return
        finally:
            ended, evicted = self.world.scheduler.now, self.world.evicted_at
            if began < evicted < ended:
                self.counted["waited"] = self.counted.get("waited", 0) + 1
                assert ended - evicted < AFTER_EVICTION_S, "it has waited for another eviction"
        self.calls[place] = (key, Call(start, next(self.moments), operation, result))

    def work(self, store: FileStore, rng: random.Random, name: int, *, shares: bool) -> None:
        """Make random calls, on a handle that another thread may share."""
        for number in range(self.count):
            key = rng.choice(VALUES + QUEUES)
            draw = operations.draw_queue if key in QUEUES else operations.draw_value
            operation = draw(rng, number, name)
            if shares and operation == ("read",):  # for that the handle's time-out would be changed
                operation = ("has",)
            self.do(store, key, operation)
            if rng.random() < 0.05:
                self.compact(store)

    def compact(self, store: FileStore) -> None:
        try:
            store.compact()
        except (StoreUnavailableError, StoreTimeoutError):
            self.refused += 1

    def process(self, name: int, threads: int) -> None:
        """Start a process with so many threads on one handle; should it be killed, another takes its place.

        Its name tells its host.
        """
        seed = self.world.rng.random()
        opened: list[FileStore] = []
        left = [threads]

        def thread(number: int) -> None:
            if not number:
                limit = random.Random(seed).choice(self.limits)
                opened.append(self.open(limit, rank=name if name % 2 else None))
            else:
                self.world.scheduler.block(lambda: bool(opened), math.inf)
            self.work(opened[0], random.Random(f"{seed} {number}"), name * 10 + number, shares=threads > 1)
            left[0] -= 1
            if not left[0]:
                opened[0].close()
                self.world.exit()

        calls: list[Callable[[], None]] = [lambda number=number: thread(number) for number in range(threads)]
        host = self.world.hosts[name % len(self.world.hosts)]
        self.world.start(*calls, then=lambda: self.process(name + 100, threads), host=host)


def run(seed: int, lock: str = "ofd") -> Run:
    """Draw a world by `seed`, let it happen under this kind of lock, and judge what happened."""
    world = World(seed)
    rng = world.rng
    if lock == "soft":
        world.files.loses = rng.choice([0, 0.02, 0.2])
    options = {
        "lock": lock,
        "compact_bytes": rng.choice([None, None, 300, 900]),
        "watch": rng.choice(["auto", "poll"]),
        "durable": rng.random() < 0.2,
        "spill_bytes": random.Random(seed).choice([None, None, 1, 3]),
    }
    this = Run(world, options, rng.randrange(3, 8))
    with world.installed():
        for name in range(rng.randrange(2, 5)):
            this.process(name, rng.choice([1, 1, 1, 2]))
        world.plan(rng.choice([0, 0, 1, 2, 3]), rng.choice([0, 0, 1, 2]), rng.choice([0, 0, 0, 1, 2]))
        world.scheduler.run()
    with_end(this)
    return this


def with_end(this: Run) -> None:
    """Count, read everything in the end, by a new process, and judge."""
    world = this.world
    this.counted |= {
        "kills": world.kills,
        "stops": world.stops,
        "fulls": world.fulls,
        "generations": sum(name.startswith(f"{PATH}.1.") for name in world.files.kept),
        "tears": world.files.torn,
        "lost": world.files.lost,
        "steps": world.scheduler.steps,
        "trace": world.scheduler.trace,
    }
    ending = world.sequel()
    found: dict[str, Any] = {}

    def last() -> None:
        store = this.open()
        for key in VALUES:
            this.do(store, key, ("read",))
            found[key] = this.calls[-1][1].result
        store.set("last", "1")
        log = read_newest(File(ending.files))  # type: ignore[arg-type]
        check_log(log, found)
        for _ in range(len(log.queues.get(b"q1", ())) + 1):
            this.do(store, "q1", ("pop",))
        assert this.calls[-1][1].result == models.EMPTY
        store.close()
        ending.exit()

    with ending.installed():
        ending.start(last)
        ending.scheduler.run()
    judge(this)


def check_log(log: Log, found: dict[str, Any]) -> None:
    """The log, read by a reader of its own, ends whole, and adds up to what the store says.

    A session introduces itself before its records, whoever appends them, and none of them has the time of another. (The
    data of a snapshot have one time.)
    """
    assert log.ends == "whole", (log.ends, log.offset)
    for key, value in found.items():
        assert log.values.get(key.encode()) == value, (key, value, log.values)
    assert log.values[b"last"] == b"1"
    introduced: set[int] = set()
    tokens: list[tuple[int, int]] = []
    for _, kind, _, _, writer, time in log.records:
        if kind == "s":
            introduced.add(writer)
        elif kind in DATA:
            assert writer in introduced, f"session {writer} has written before its introduction"
            tokens.append((writer, time))
    later = [token for token in tokens if token != tokens[0]]
    assert len(set(later)) == len(later), "two records of a session have one time"


def judge(this: Run) -> None:
    """Fail unless the history is linearizable; one that is too hard to tell fails, too."""
    verdicts = check_each(this.calls, model)
    wrong = {
        key: [verdict, *sorted((call for name, call in this.calls if name == key), key=lambda call: call.start)]
        for key, verdict in verdicts.items()
        if verdict != LINEARIZABLE
    }
    assert not wrong, wrong
