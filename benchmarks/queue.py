"""Queues of work: how many items of 100 bytes 8 producers pass to 8 consumers in a second, and with which files.

This benchmark runs only on request (``--only queue``), because it needs other packages and a server. A consumer
acknowledges each item where the queue has acknowledgements. Each producer puts one more item at the end, and a consumer
that takes such an item ends. So the items that are left in the queue at the end are an error of the queue.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import fscoord
from benchmarks import crew
from benchmarks.measure import Budget, Row, Settings, median, take_turns
from fscoord.recipes import Queue

OURS = "fscoord Queue, 100 items a call"
OURS_SINGLE = "fscoord Queue, 1 item a call"
HUEY = "huey FileStorage"
PERSIST = "persist-queue Queue, 16 threads of one process"
LITE = "litequeue, synchronous off"
REDIS = "Redis list, in memory"
KINDS = (OURS, OURS_SINGLE, HUEY, PERSIST, LITE, REDIS)
MODULES = {HUEY: ("huey", "huey"), PERSIST: ("persistqueue", "persist-queue"), LITE: ("litequeue", "litequeue")}

ITEMS, ITEMS_QUICK = 20_000, 160
SIDES, SIDES_QUICK = 8, 2
BATCH: Final = 100
MAXSIZE: Final = 10_000
"""The `maxsize` of fscoord's queue. The other queues are not limited."""
END: Final = b"end"
LIMIT_S: Final = 60.0
SLOWEST: Final = 50
"""The lowest rate in items a second at which a run is waited for to its end."""
PAUSE_S: Final = 0.001
"""How long a consumer of a queue that can't wait sleeps when the queue is empty."""


class Access(NamedTuple):
    """One process's access to a queue. `take` returns some items, or none if there are none now."""

    put: Callable[[list[bytes]], object]
    take: Callable[[], list[bytes]]
    batch: int = 1


def opened(kind: str, address: str) -> Access:
    """Open the queue at `address`, a path in a directory of its own or a port."""
    if kind in (OURS, OURS_SINGLE):
        return ours(address, BATCH if kind == OURS else 1)
    if kind == HUEY:
        from huey.storage import FileStorage

        storage = FileStorage("q", address)
        return Access(lambda values: storage.enqueue(values[0]), lambda: _some(storage.dequeue()))
    if kind == PERSIST:
        import persistqueue

        shared = persistqueue.Queue(address, autosave=True)
        return Access(lambda values: shared.put(values[0]), lambda: _unless_empty(shared))
    if kind == LITE:
        return lite(address)
    import redis

    server = redis.Redis(port=int(address))
    mine = f"taken by {os.getpid()}"

    def take() -> list[bytes]:
        value = server.blmove("q", mine, LIMIT_S, "LEFT", "RIGHT")
        if value is not None:
            server.lrem(mine, 1, value)
        return _some(value)

    return Access(lambda values: server.rpush("q", *values), take)


def ours(path: str, batch: int) -> Access:
    """Open a queue on a FileStore at `path`, that is not durable."""
    queue = Queue(fscoord.FileStore(path, timeout=LIMIT_S), "q", maxsize=MAXSIZE)

    def take() -> list[bytes]:
        items = queue.take_all(batch)
        ends = [item for item in items if item.data == END]
        for item in ends[1:]:  # one for each consumer
            item.release()
        queue.ack_all([item for item in items if item not in ends[1:]])
        return [item.data for item in items if item not in ends[1:]]

    def take_one() -> list[bytes]:
        with queue.take() as item:
            return [item.data]

    return Access(queue.put_all, take, batch) if batch > 1 else Access(lambda values: queue.put(values[0]), take_one)


def lite(path: str) -> Access:
    """Open litequeue's queue at `path`."""
    import litequeue

    queue = litequeue.LiteQueue(path, timeout=LIMIT_S)
    queue.conn.execute("PRAGMA synchronous = OFF")

    def take() -> list[bytes]:
        message = queue.pop()
        if message is None:
            return []
        queue.done(message.message_id)
        return [message.data.encode()]

    return Access(lambda values: queue.put(values[0].decode()), take)


def _some(value: bytes | None) -> list[bytes]:
    return [] if value is None else [value]


def _unless_empty(queue: Any) -> list[bytes]:
    import persistqueue

    with suppress(persistqueue.Empty):
        return [queue.get(block=False)]
    return []


def produce(access: Access, rank: int, count: int) -> None:
    """Put `count` items of 100 bytes, and one to end a consumer."""
    for first in range(0, count, access.batch):
        numbers = range(first, min(count, first + access.batch))
        access.put(
            [b"%d.%d" % (rank, number) + b"x" * (99 - len(b"%d.%d" % (rank, number))) + b"\n" for number in numbers]
        )
    access.put([END])


def consume(access: Access) -> int:
    """Take items until the end of a producer, and return how many there were."""
    count = 0
    while True:
        values = access.take()
        if not values:
            time.sleep(PAUSE_S)
        count += len(values)
        if END in values:
            return count - 1


def work(member: crew.Member, kind: str, address: str, each: int) -> tuple[float, float, int, float]:
    """In each process, of which the first half produces: return the begin, the end, the items, the memory in MiB."""
    access = opened(kind, address)
    member.start()
    begin, count = time.monotonic(), 0
    if member.rank < member.size // 2:
        produce(access, member.rank, each)
    else:
        count = consume(access)
    return begin, time.monotonic(), count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_threads(kind: str, address: str, sides: int, each: int) -> list[tuple[float, float, int, float]]:
    """Do the work of all processes in threads of this one: persist-queue's file queue is for one process."""
    access, counts = opened(kind, address), list[int]()
    threads = [threading.Thread(target=produce, args=(access, rank, each), daemon=True) for rank in range(sides)]
    threads += [threading.Thread(target=lambda: counts.append(consume(access)), daemon=True) for _ in range(sides)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(begin, time.monotonic(), sum(counts), 0.0)]


@contextmanager
def server(kind: str, directory: str) -> Iterator[str]:
    """Yield the address of an empty queue in `directory`, with a server for Redis."""
    if kind != REDIS:
        path = str(Path(directory, "queue"))
        if kind == HUEY:
            opened(kind, path)  # processes that create its directories at the same time may fail
        yield path
        return
    import redis

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen([*command, "--dir", directory], stdout=subprocess.DEVNULL) as process:
        try:
            ends = time.monotonic() + LIMIT_S
            while True:
                try:
                    redis.Redis(port=port).ping()
                    break
                except redis.ConnectionError:
                    assert time.monotonic() < ends, "redis-server does not start"
                    time.sleep(0.02)
            yield str(port)
        finally:
            process.kill()


class Sizes:
    """Measures the size of all files in a directory every now and then, and keeps the largest sum in MiB."""

    def __init__(self, directory: str) -> None:
        self.largest, self._directory, self._end = 0.0, directory, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._end.wait(0.2):
            self._look()

    def _look(self) -> None:
        total = 0
        for path in Path(self._directory).rglob("*"):
            with suppress(FileNotFoundError):
                total += path.stat().st_blocks * 512
        self.largest = max(self.largest, total / (1 << 20))


class Found(NamedTuple):
    """One run: items in a second, the memory of the largest process and the largest size of the files in MiB."""

    rate: float
    memory: float
    files: float


def run(kind: str, directory: str, items: int, sides: int) -> Found:
    """Pass `items` items through a new queue of this kind.

    Raises:
        RuntimeError: an item was lost or came twice, or the queue was too slow.
    """
    each = items // sides
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory) as place, server(kind, place) as address:
        sizes = Sizes(place)
        if kind == PERSIST:
            with sizes:
                times = in_threads(kind, address, sides, each)
        else:
            times = crew.run(work, 2 * sides, kind, address, each, during=sizes, limit_s=LIMIT_S + items / SLOWEST)
    if (count := sum(counted for _, _, counted, _ in times)) != each * sides:
        raise RuntimeError(f"{kind}: {count} of {each * sides} items came out")
    seconds = max(end for _, end, _, _ in times) - min(begin for begin, _, _, _ in times)
    return Found(count / seconds, max(memory for *_, memory in times), sizes.largest)


def absent() -> dict[str, str]:
    """Return {kind: why it can't be measured}."""
    missing = {
        kind: f"{package} is not installed: pip install {package}"
        for kind, (module, package) in MODULES.items()
        if importlib.util.find_spec(module) is None
    }
    if not shutil.which("redis-server"):
        missing[REDIS] = "there is no redis-server on PATH: apt-get install redis-server"
    elif importlib.util.find_spec("redis") is None:
        missing[REDIS] = "redis is not installed: pip install redis"
    return missing


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row for the rate, one for the memory, and one for the files."""
    items = settings.items or (ITEMS_QUICK if settings.quick else ITEMS)
    sides = SIDES_QUICK if settings.quick else SIDES
    rounds = settings.rounds(1)

    def once(kind: str) -> Found:
        return run(kind, settings.directory, items, sides)

    found, missing = take_turns(settings, KINDS, rounds, once, f"{items} items", absent())
    statistic, what = f"median of {rounds} rounds", f"queue, {items} items, {sides} producers, {sides} consumers"
    yield Row(
        what,
        "1/s",
        statistic,
        {kind: median(each.rate for each in runs) for kind, runs in found.items()},
        missing,
        {kind: {"least": min(runs).rate, "most": max(runs).rate} for kind, runs in found.items()},
        [Budget("as fast", kind) for kind in KINDS[2:] if kind != REDIS],
        more_is_better=True,
    )
    for figure, text, limit in (("memory", "memory of the largest process", 300), ("files", "files at most", 200)):
        values = {
            kind: median(getattr(each, figure) for each in runs)
            for kind, runs in found.items()
            if kind not in ((PERSIST, REDIS) if figure == "memory" else (REDIS,))
        }
        yield Row(f"{what}, {text}", "MiB", statistic, values, missing, budgets=[Budget(f"{limit} MiB", limit=limit)])
