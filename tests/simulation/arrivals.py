"""Ranks that meet at barriers: threads of simulated processes, of which one may die in the call that would be last."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

from simulation.scheduler import Process
from simulation.waits import POLLED_S, SOON_S
from simulation.workload import LIMIT_S, File
from simulation.world import HOST, PATH, World
from support.internals import watcher
from support.plain_reader import read_newest

from fscoord import BarrierError, FileStore, PrefixStore, StoreTimeoutError, barrier

LATE_S = 1.5
"""More than the longest pause between two slow polls, which find what no event has told."""
BARRIER_S = 20.0
TROUBLES = (
    "none",
    "none",
    "none",
    "stops",
    "lost events",
    "dies",
    "dies",
    "dies and comes again",
    "dies and comes again",
)


class Meetings:
    """The draw of one seed: the ranks, which of them share a process or a handle, and the faults.

    Attributes:
        between: whether a rank died when its arrival was recorded, and that all have come was not.
        trace: the checksum of the schedule.
    """

    def __init__(self, seed: int, hosts: Sequence[str], kind: str) -> None:
        self.world = World(seed, hosts=hosts, kind=kind)
        rng = self.world.rng
        self.way = rng.choice(["count", "rank", "view"])
        self.watch = rng.choice(["auto", "auto", "auto", "poll"])
        self.trouble = rng.choice(TROUBLES)
        self.size = rng.randrange(2, 6)
        self.dies = self.trouble.startswith("dies")
        self.rounds = 1 if self.dies else rng.choice([1, 3, 10])
        self.begun: dict[int, set[int]] = {number: set() for number in range(self.rounds)}
        self.passed: dict[int, dict[int, float]] = {number: {} for number in range(self.rounds)}
        self.comes_again_at = math.inf
        self.between = self.has_arrived = self.is_early = False
        self.trace = 0
        self.options: dict[str, Any] = {
            "watch": self.watch,
            "compact_bytes": rng.choice([None, None, 300]),
            "spill_bytes": rng.choice([None, None, 1, 3]),
            "durable": rng.random() < 0.2,
        }

    # -- what ranks do ---------------------------------------------------------------------------------------------

    def open(self) -> FileStore:
        return FileStore(PATH, timeout=LIMIT_S, **self.options)

    def pause(self, seconds: float) -> None:
        scheduler = self.world.scheduler
        scheduler.block(lambda: False, scheduler.now + seconds)

    def meet(self, store: FileStore, rank: int, number: int) -> None:
        """Arrive at a barrier, and check that no rank passes before all have come."""
        self.begun[number].add(rank)
        if self.way == "count":
            store.barrier(f"b{number}", self.size, BARRIER_S)
        else:
            place = store if self.way == "rank" else PrefixStore("view", store)
            barrier(place, self.size, f"b{number}", BARRIER_S, rank)
        assert len(self.begun[number]) == self.size, f"rank {rank} passed, and only {self.begun[number]} had come"
        self.passed[number][rank] = self.world.scheduler.now

    def check_lateness(self, rank: int, number: int) -> None:
        """The first that passes is the last that came, or was woken by it."""
        late = self.passed[number][rank] - min(self.passed[number].values())
        is_rung = self.watch == "auto" and len(self.world.hosts) == 1
        limit = {"stops": math.inf, "lost events": LATE_S}.get(self.trouble, SOON_S if is_rung else POLLED_S)
        assert late < limit, f"rank {rank} passed {late:.3f} s after the first\n{self.world.scheduler.describe()}"

    def take_part(self, store: FileStore, rank: int) -> None:
        for number in range(self.rounds):
            if self.world.rng.random() < 0.2:
                self.pause(self.world.rng.random() / 20)
            self.meet(store, rank, number)
            self.check_lateness(rank, number)

    def start(self, ranks: list[int], *, shares: bool) -> None:
        """Start a process in which a thread is each of `ranks`, on a handle of its own or on one for all."""
        opened: list[FileStore] = []
        left = [len(ranks)]

        def thread(rank: int) -> None:
            if not shares or rank == ranks[0]:
                opened.append(self.open())
                store = opened[-1]
            else:
                self.world.scheduler.block(lambda: bool(opened), math.inf)
                store = opened[0]
            if self.dies:
                self.wait_for_the_dead(store, rank)
            else:
                self.take_part(store, rank)
            left[0] -= 1
            if not left[0]:
                for each in opened:
                    each.close()
                self.world.exit()

        host = self.world.hosts[ranks[0] % len(self.world.hosts)]
        self.world.start(*(bound(thread, rank) for rank in ranks), name="rank", host=host)

    # -- one that dies ---------------------------------------------------------------------------------------------

    @property
    def last(self) -> int:
        return self.size - 1

    def wait_for_the_dead(self, store: FileStore, rank: int) -> None:
        """Be at the barrier of which the last rank dies: whoever waits passes if it has arrived, and if it comes again.

        Nobody but those who have arrived knows who has, so where they are only counted the others time out.
        """
        scheduler, may_time_out = self.world.scheduler, True
        try:
            self.meet(store, rank, 0)
        except StoreTimeoutError:
            if self.way != "count":
                may_time_out = not self.has_arrived and self.comes_again_at == math.inf
            assert may_time_out, f"rank {rank} timed out, and all had come\n{scheduler.describe()}"
            return
        if self.way != "count" and self.comes_again_at < math.inf:
            late = scheduler.now - self.comes_again_at
            assert late < LATE_S, f"rank {rank} passed {late:.3f} s after it came again\n{scheduler.describe()}"

    def start_victim(self) -> None:
        """Start the last rank, which comes when all others sleep; it is killed at a step of its call."""
        world, others = self.world, set(range(self.last))

        def come() -> None:
            store = self.open()
            world.scheduler.block(lambda: self.begun[0] == others, math.inf)
            self.pause(0.01)
            world.doom(victim[0], world.rng.randrange(5, 40))
            self.meet(store, self.last, 0)
            self.has_arrived = True
            world.spare()
            store.close()
            world.exit()

        victim: list[Process] = []
        victim.append(world.start(come, name="victim", then=self.bury))

    def bury(self) -> None:
        """See what the dead one has done, and let it come again."""
        values = read_newest(File(self.world.files)).values  # type: ignore[arg-type]
        arrivals, done = self.names(0)
        came = values.get(arrivals, b"")
        self.has_arrived = came == b"%d" % self.size if self.way == "count" else b"%d/" % self.last in came
        self.between = self.has_arrived and done not in values
        self.is_early = done in values and not self.has_arrived  # not raised here: who is dead raises nothing
        if self.trouble == "dies and comes again" and self.way != "count":
            self.world.start(self.come_again, name="again")

    def come_again(self) -> None:
        store = self.open()
        try:
            self.meet(store, self.last, 0)
        except BarrierError as error:  # its first arrival counts
            assert not isinstance(error, StoreTimeoutError)
            assert self.has_arrived, error
        self.comes_again_at = self.world.scheduler.now
        store.close()
        self.world.exit()

    # -- the end ---------------------------------------------------------------------------------------------------

    def names(self, number: int) -> tuple[bytes, bytes]:
        prefix = b"view/" if self.way == "view" else b""
        words = (b"num_members", b"last_member") if self.way == "count" else (b"arrivals", b"complete")
        return prefix + b"b%d/" % number + words[0], prefix + b"b%d/" % number + words[1]

    def check_log(self) -> None:
        """The content of the log about each barrier at which no rank died."""
        values = read_newest(File(self.world.files)).values  # type: ignore[arg-type]
        for number in range(self.rounds):
            arrivals, done = self.names(number)
            assert values[done] == b"1"
            if self.way == "count":
                assert values[arrivals] == b"%d" % self.size
            else:
                assert sorted(values[arrivals].split()) == [b"%d/%d" % (rank, self.size) for rank in range(self.size)]


def bound(call: Callable[[int], None], rank: int) -> Callable[[], None]:
    return lambda: call(rank)


def run(seed: int, hosts: Sequence[str] = (HOST,), kind: str = "nfs4") -> Meetings:
    """Draw a world of `hosts` by `seed`, on a file server of this `kind`, and let it happen.

    Where nothing goes wrong there is no slow poll, so that a rank that is not rung does not pass in time.
    """
    this = Meetings(seed, hosts, kind)
    world, rng = this.world, this.world.rng
    ranks = list(range(this.last if this.dies else this.size))
    rng.shuffle(ranks)
    with world.installed(), ExitStack() as stack:
        if this.trouble == "none":
            stack.enter_context(mock.patch.object(watcher, "SLOW_FIRST_S", BARRIER_S))
        elif this.trouble == "lost events":
            world.files.loses_events = rng.choice([0.1, 0.5, 1.0])
        while ranks:
            count = rng.choice([1, 1, 2, 3])
            this.start(ranks[:count], shares=rng.random() < 0.5)
            del ranks[:count]
        if this.dies:
            this.start_victim()
        elif this.trouble == "stops":
            world.plan(stops=rng.randrange(1, 4))
        world.scheduler.run()
        if not this.dies:
            this.check_log()
    assert not this.is_early, "the key is set that says that all have come, and one had not"
    this.trace = world.scheduler.trace
    return this
