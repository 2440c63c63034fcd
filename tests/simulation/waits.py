"""Logical processes that wait for each other's keys and items, and how soon each wait ends by the simulated clock.

In some draws they are on two hosts that share the directory. There one waiter polls for its host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from simulation.workload import LIMIT_S
from simulation.world import HOST, PATH, World
from support.internals import NetworkAccess

from fscoord import FileStore

SOON_S = 0.09
"""Less than the first slow poll takes; a simulated call takes a millionth of a second."""
POLLED_S = 0.3


class Waits:
    """The draw of one seed: the keys that each process sets and waits for."""

    def __init__(self, seed: int, hosts: Sequence[str], kind: str) -> None:
        self.world = World(seed, hosts=hosts, kind=kind)
        rng = self.world.rng
        self.extents = 0
        self.watch = rng.choice(["auto", "auto", "poll"])
        self.is_meddled_with = rng.random() < 0.3
        self.keys = [f"k{number}" for number in range(rng.randrange(1, 5))]
        self.items = rng.randrange(0, 5)
        self.there: dict[str, float] = {}
        self.taken: list[bytes] = []
        self.trace = 0
        self.open_options: dict[str, Any] = {"watch": self.watch, "compact_bytes": rng.choice([None, None, 300])}

    def open(self) -> FileStore:
        return FileStore(PATH, timeout=LIMIT_S, **self.open_options)

    def set_some(self, keys: list[str], items: range) -> None:
        store = self.open()
        for key in keys:
            if self.world.rng.random() < 0.5:
                self.world.scheduler.block(lambda: False, self.world.scheduler.now + self.world.rng.random() / 20)
            store.set(key, key)
            self.there[key] = self.world.scheduler.now
        for item in items:
            store.queue_push("q", str(item))
            self.there["q"] = self.world.scheduler.now
        self.leave(store)

    def leave(self, store: FileStore) -> None:
        store.close()
        self.world.exit()

    def wait_for(self, keys: list[str]) -> None:
        store = self.open()
        if len(keys) == 1:
            assert store.get(keys[0]) == keys[0].encode()
        else:
            store.wait(keys)
            assert store.check(keys)
        self.check_lateness(keys)
        self.leave(store)

    def take(self) -> None:
        store = self.open()
        self.taken.append(store.queue_pop("q"))
        self.leave(store)

    def check_lateness(self, keys: list[str]) -> None:
        """A wait that ends before the setting call has returned is not late."""
        if not self.is_meddled_with:
            late = self.world.scheduler.now - max(self.there.get(key, self.world.scheduler.now) for key in keys)
            is_rung = self.watch == "auto" and len(self.world.hosts) == 1
            assert late < (SOON_S if is_rung else POLLED_S), (
                f"{late:.3f} s after {keys} were set\n{self.world.scheduler.describe()}"
            )

    def count_extents(self) -> Any:
        """Return a patch that counts the waits that read on in the extent that another process has published."""
        read_extent = NetworkAccess.read_extent

        def read_and_count(access: NetworkAccess, extent: Any) -> bool | None:
            found = read_extent(access, extent)
            self.extents += found is not None
            return found

        return mock.patch.object(NetworkAccess, "read_extent", read_and_count)


def run(seed: int, hosts: Sequence[str] = (HOST,), kind: str = "nfs4") -> Waits:
    """Draw a world of `hosts` by `seed`, on a file server of this `kind`, and let it happen."""
    this = Waits(seed, hosts, kind)
    world, rng = this.world, this.world.rng
    setters = rng.randrange(1, 3)
    with world.installed(), this.count_extents():
        for number in range(setters):
            keys, items = this.keys[number::setters], range(number, this.items, setters)
            world.start(
                lambda keys=keys, items=items: this.set_some(keys, items), name="set", host=hosts[number % len(hosts)]
            )
        for _ in range(rng.randrange(1, 5)):
            keys = rng.sample(this.keys, rng.randrange(1, len(this.keys) + 1))
            calls: list[Callable[[], None]] = [lambda keys=keys: this.wait_for(keys)]
            world.start(*calls, name="wait", host=rng.choice(hosts))
        for _ in range(this.items):
            world.start(this.take, name="take", host=rng.choice(hosts))
        if this.is_meddled_with:
            world.plan(stops=rng.randrange(1, 4))
        world.scheduler.run()
    this.trace = world.scheduler.trace
    assert sorted(this.taken) == [b"%d" % item for item in range(this.items)]
    return this
