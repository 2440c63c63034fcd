"""Logical processes of several runs of a job, and participants whose last one ends the log, on one path."""

from __future__ import annotations

from simulation.workload import LIMIT_S
from simulation.world import PATH, World

from fscoord import FileStore, StaleRunError, StoreGoneError


class Runs:
    """The draw of one seed: processes of restarts 0, 1, ... of one job, which come in any order.

    Each writes its own restart count, and adds to a counter, until it is told that its run is over.
    """

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.acknowledged: dict[int, int] = {}
        self.stale = 0
        self.options = {"compact_bytes": self.world.rng.choice([None, 300])}

    def work(self, restart: int, count: int) -> None:
        try:
            store = FileStore(PATH, timeout=LIMIT_S, run_id=("job", restart), **self.options)
            for _ in range(count):
                store.set("restart", str(restart))
                store.add("sum", 1)
                self.acknowledged[restart] = self.acknowledged.get(restart, 0) + 1
                assert store.get("restart") == b"%d" % restart
            store.close()
        except StaleRunError:
            self.stale += 1
        self.world.exit()

    def check(self, world: World, newest: int) -> None:
        store = FileStore(PATH, timeout=LIMIT_S)
        count = self.acknowledged.get(newest, 0)
        if count:
            assert store.get("restart") == b"%d" % newest
            total = int(store.get("sum"))
            assert count <= total <= count + self.world.kills, (count, total)
        store.close()
        world.exit()


def run_restarts(seed: int) -> Runs:
    """Draw a world by `seed`, and let it happen: no run sees what another has written, nobody of the newest is refused,
    and none of its writes is lost.
    """
    this = Runs(seed)
    world, rng = this.world, this.world.rng
    restarts = rng.randrange(2, 4)
    with world.installed():
        for restart in range(restarts):
            for _ in range(rng.randrange(1, 3)):
                count = rng.randrange(1, 4)
                world.start(lambda restart=restart, count=count: this.work(restart, count), name="run")
        world.plan(kills=rng.choice([0, 0, 1]), stops=rng.choice([0, 1]))
        world.scheduler.run()
    end = world.sequel()
    with end.installed():
        end.start(lambda: this.check(end, restarts - 1))
        end.scheduler.run()
    return this


def run_lives(seed: int) -> World:
    """Draw a world by `seed`: participants of a log of two come and go, and each adds one to a sum of its life.

    As many lives have ended as pairs have closed it. So there are no more first sums than pairs, unless a life has lost
    one; and of each number no more than of the one below.
    """
    world = World(seed)
    rng = world.rng
    pairs = rng.randrange(1, 4)
    sums: list[int] = []

    def take_part() -> None:
        while True:
            try:
                store = FileStore(PATH, world_size=2, timeout=LIMIT_S)
                total = store.add("sum", 1)
                break
            except StoreGoneError:
                continue
        sums.append(total)
        store.close()
        world.exit()

    with world.installed():
        for _ in range(2 * pairs):
            world.start(take_part, name="part")
        world.plan(stops=rng.choice([0, 1]))
        world.scheduler.run()
    counts = [sums.count(number) for number in range(1, len(sums) + 1)]
    assert sum(counts) == 2 * pairs, sums
    assert counts[0] <= pairs, sums
    assert counts == sorted(counts, reverse=True), sums
    return world
