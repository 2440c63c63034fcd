"""EtcdStore beside FileStore, and beside torch's method, which reads the whole directory for each operation.

This benchmark runs only on request (``--only etcd``). It needs an etcd on PATH and the extra ``etcd``.
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import fscoord
from benchmarks import crew
from benchmarks.measure import Budget, Row, Settings, median, percentile, take_turns
from benchmarks.stores import ETCD, ETCD_REREADING, OURS, Place, fresh
from benchmarks.uncontended import OPERATIONS
from benchmarks.wakeup import one_way
from fscoord.errors import StoreTimeoutError
from fscoord.stores.etcd.requests import after_prefix, compare, key_values, put, range_of, unb64
from fscoord.stores.etcd.transactions import KeySnapshot, WatchRange

STORES = (ETCD, ETCD_REREADING, OURS)
DIFFERENT = ("get", "add", "check")
"""The operations that the two do differently."""

KEYS = 1000
"""How many other keys there are: a rank's data each, say."""

START_S = 60


class ReReading(fscoord.EtcdStore):
    """An EtcdStore that gets, waits and adds as torch's EtcdStore does.

    It follows ``torch/distributed/elastic/rendezvous/etcd_store.py``: every look reads all keys of the store. A wait is
    a watch of all keys, which any write ends. A process that loses a race for a counter sleeps for 50 ms on average.
    Both stores use version 3 of the protocol and the same connections.
    """

    def _everything(self, limit: float) -> tuple[dict[bytes, bytes], int]:
        values = self._keys.values
        answers, revision = self._transactions.read([range_of(values, after_prefix(values))], limit)
        found = key_values(answers[0])
        return {unb64(each["key"])[len(values) :]: unb64(each.get("value")) for each in found}, revision

    def get(self, key: Any) -> bytes:
        """Read all keys until `key` is among them."""
        ends = time.monotonic() + self._timeout
        name, values = key.encode(), self._keys.values
        while True:
            everything, revision = self._everything(self._timeout)
            if name in everything:
                return everything[name]
            if time.monotonic() >= ends:
                raise StoreTimeoutError("late")
            seen = KeySnapshot(revision, [name], [[WatchRange(values, after_prefix(values))]])
            self._watcher.watch(seen, ends - time.monotonic())

    def check(self, keys: Any) -> bool:
        """Read all keys."""
        everything, _ = self._everything(self._timeout)
        return all(key.encode() in everything for key in keys)

    def add(self, key: Any, amount: int) -> int:
        """Create the counter, or read and exchange it, until no other process is quicker."""
        place, limit = self._keys.value(key.encode()), self._timeout
        write = self._transactions.write
        if write([put(place, b"%d" % amount)], limit, [compare(place, "create", 0)]).is_done:
            return amount
        while True:
            answers, _ = self._transactions.read([range_of(place)], limit)
            now = key_values(answers[0])[0]
            total = int(unb64(now["value"])) + amount
            if write([put(place, b"%d" % total)], limit, [compare(place, "mod", int(now["mod_revision"]))]).is_done:
                return total
            time.sleep(random.uniform(0, 0.1))


def version() -> str:
    """Return the version of the etcd on PATH."""
    done = subprocess.run(["etcd", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0].rpartition(" ")[2]


@contextmanager
def server(directory: str, host: str = "127.0.0.1") -> Iterator[str]:
    """Run an etcd that listens at `host` and has its data in `directory`; yield its address."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    program = shutil.which("etcd")
    assert program
    here = f"http://{host}:{port}"
    with subprocess.Popen(
        [program, f"--data-dir={directory}/data", f"--listen-client-urls={here}", f"--advertise-client-urls={here}",
         "--listen-peer-urls=http://127.0.0.1:0"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            ends = time.monotonic() + START_S
            while True:
                try:
                    urllib.request.urlopen(f"{here}/health", timeout=START_S).close()
                    break
                except OSError:
                    assert time.monotonic() < ends, "etcd does not start"
                    time.sleep(0.02)
            yield f"{host}:{port}"
        finally:
            process.kill()


def filled(place: Place, count: int) -> Any:
    """Return a handle on the store at `place`, after setting that many other keys."""
    store = place.open()
    store.multi_set([f"other{number}" for number in range(count)], [b"x" * 32] * count)
    return store


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row per operation, for wake-ups, and for additions of several processes."""
    count = 10 if settings.quick else KEYS
    yield from uncontended(settings, count)
    yield wake_up(settings, count)
    yield contended(settings)


def uncontended(settings: Settings, count: int) -> Iterator[Row]:
    """The cost of each operation for one process."""
    rounds = settings.rounds(9)
    times = 5 if settings.quick else 50
    with ExitStack() as stack:
        handles = {}
        for store in STORES:
            handles[store] = stack.enter_context(filled(stack.enter_context(fresh(store, settings.directory)), count))
            handles[store].set("key", "value")
        for operation, statement in OPERATIONS.items():
            code = compile(statement, "<benchmark>", "exec")

            def once(store: str, code: Any = code) -> float:
                names = {"store": handles[store]}
                start = time.perf_counter()
                for _ in range(times):
                    exec(code, names)
                return (time.perf_counter() - start) / times * 1e6

            taken, missing = take_turns(settings, STORES, rounds, once, operation)
            yield Row(
                f"{operation} beside {count} keys, one process",
                "µs",
                f"median of {rounds} rounds",
                {store: median(each) for store, each in taken.items()},
                missing,
                {store: {"best": min(each)} for store, each in taken.items()},
                [Budget("faster", ETCD_REREADING, 1.0)] if operation in DIFFERENT else [],
            )


def wake_up(settings: Settings, count: int) -> Row:
    """The time from the `set` of one process to the return of another's `get`."""
    rounds = settings.rounds(3)

    def once(store: str) -> list[float]:
        with fresh(store, settings.directory) as place:
            filled(place, count).close()
            return one_way(place, 3 if settings.quick else 100, 0.0)

    taken, missing = take_turns(settings, STORES, rounds, once, "wake-up")
    return Row(
        f"wake-up beside {count} keys, one way",
        "µs",
        f"p50, median of {rounds} rounds",
        {store: median(percentile(each, 0.5) for each in lists) for store, lists in taken.items()},
        missing,
        {store: {"p99": median(percentile(each, 0.99) for each in lists)} for store, lists in taken.items()},
        [Budget("faster", ETCD_REREADING, 1.0)],
    )


def contended(settings: Settings) -> Row:
    """How many additions to one counter 4 processes make together."""
    rounds = settings.rounds(3)
    times = 3 if settings.quick else 50

    def once(store: str) -> float:
        with fresh(store, settings.directory) as place:
            place.open().close()
            spans = crew.run(add_often, 4, place, times)
            begun, ended = zip(*spans, strict=True)
            return 4 * times / (max(ended) - min(begun))

    taken, missing = take_turns(settings, STORES, rounds, once, "add, 4 processes")
    return Row(
        "add, 4 processes at once",
        "1/s",
        f"median of {rounds} rounds",
        {store: median(each) for store, each in taken.items()},
        missing,
        budgets=[Budget("faster", ETCD_REREADING, 1.0)],
        more_is_better=True,
    )


def add_often(member: crew.Member, place: Place, times: int) -> tuple[float, float]:
    """Add `count` times; return the begin and the end of the additions, by the clock that all processes share."""
    store = place.open()
    store.check(["counter"])
    member.start()
    start = time.perf_counter()
    for _ in range(times):
        store.add("counter", 1)
    return start, time.perf_counter()
