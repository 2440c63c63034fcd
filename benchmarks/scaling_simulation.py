"""`python -m benchmarks.scaling_simulation`: barriers, rendezvous and crashes of 10 to 1,000 nodes, by simulation.

The nodes share one log, or a tree of logs: one log for each group of nodes, and the root, where one node of each group
meets those of the other groups. The simulated parts are the lock of a log and its line of waiting nodes, the requests
of each hold, the polls of each node, and a server that answers one request after the other. `COSTS` has what they cost
on NFS and on Lustre. The program writes `RESULTS`, of which `benchmarks.scaling_page` makes tables. With ``--check
MEASURED`` it prints a comparison with measurements of `benchmarks.scaling`. Each figure is the median of `SEEDS`.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.page import figure, table
from benchmarks.scaling import TREES
from benchmarks.scaling_fit import fastest_s, load
from fscoord.doctor.prediction import BARRIER_REQUESTS, LEADER_S, RECORD_BYTES, Job, readers

RESULTS = Path(__file__).parent / "results" / "scaling_simulation.json"
SEEDS = (1, 2, 3)
NODES = (10, 32, 100, 320, 1000)
RANKS = 8
ROUND_TRIP_S = 0.0002
CHECKED_MS = 25
"""The delay of the measurements with which the simulation is compared: the messages take nearly all of the time."""
POLL_S = 0.04
"""The time between two polls of a node whose log has changed lately: `NEWS_POLL_S` of `_log/shared/node_waiter.py`."""
FIRST_POLL_S, IDLE_POLL_S = 0.001, 0.175
PROBE_S = 0.25
"""The time between two probes of a node for the rank that it needs: `PROBE_S` of `_log/shared/node_poller.py`."""
MEETING_HOLDS, MEETING_READS = 5, 40
"""The holds of the lock by each agent of a rendezvous, and its further requests. With 5 holds of 7 requests they sum up
to the 73 requests of the fitted model; that model has 4.6 times as many requests in vain as a barrier.
"""
NAMING_READS = 4
"""The requests of each rank that times out, to find and name the missing ranks."""


class Costs(NamedTuple):
    """The costs of a file system.

    Attributes:
        steps: the requests of a node between the lock's acquisition and its release, one after the other.
        aside: the requests of a hold for which the node does not wait.
        vain: the requests that each waiting node makes in vain when another node releases the lock.
        rank: the requests of each rank beyond those.
        poll, changed_poll: the requests of a poll if the log has not changed, and if it has.
        server_per_s, bytes_per_s: what the server does in a second. These are assumptions.
    """

    steps: int
    aside: float
    vain: float
    rank: float
    poll: float
    changed_poll: float
    server_per_s: float = 50_000.0
    bytes_per_s: float = 1e9


COSTS = {
    # GETATTR, READ and WRITE, between LOCK and LOCKU; the other terms are those of the fitted model.
    "NFS 4.2": Costs(3, BARRIER_REQUESTS.node - 5, BARRIER_REQUESTS.pair, BARRIER_REQUESTS.rank, 1, 1),
    # 9 to 13 messages for an addition after one of the other host, none to a waiter that polls in vain, and 2.3 for a
    # read after a write of the other host, to which the callback is added that takes the cached pages away.
    "Lustre": Costs(9, 0, 0, BARRIER_REQUESTS.rank, 0, 3.3),
}


class World:
    """The clock, the events to come and the server."""

    def __init__(self, costs: Costs, seed: int, round_trip_s: float = ROUND_TRIP_S) -> None:
        self.costs, self.rng, self.round_trip_s = costs, random.Random(seed), round_trip_s
        self.now = 0.0
        self.requests = 0.0
        self._free = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Call `do` at the time `when`."""
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), do))

    def send(self, count: float = 1.0, sent: float = 0.0) -> float:
        """Send requests whose answers have `sent` bytes; return when the last answer arrives."""
        self.requests += count
        begun = max(self.now + self.round_trip_s / 2, self._free)
        self._free = begun + count / self.costs.server_per_s + sent / self.costs.bytes_per_s
        return self._free + self.round_trip_s / 2

    def run(self) -> float:
        """Let everything happen; return when the last event was."""
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            do()
        return self.now


class Log:
    """A log: its lock, the nodes that wait for the lock, and how often it has changed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.version = 0
        self._is_held = False
        self._waiting: list[Callable[[], None]] = []

    def hold(self, sent: float, processor_s: float, then: Callable[[], None]) -> None:
        """Acquire the lock, read `sent` bytes and append; then release the lock and call `then`."""
        if self._is_held:
            self.world.send()  # refused, or queued
            self._waiting.append(lambda: self._use(sent, processor_s, then))
        else:
            self._is_held = True
            self.world.at(self.world.send(), lambda: self._use(sent, processor_s, then))

    def _use(self, sent: float, processor_s: float, then: Callable[[], None]) -> None:
        self.world.send(self.world.costs.aside)
        self._step(self.world.costs.steps, sent, processor_s, then)

    def _step(self, left: int, sent: float, processor_s: float, then: Callable[[], None]) -> None:
        world = self.world
        if left:
            world.at(world.send(1, sent), lambda: self._step(left - 1, 0.0, processor_s, then))
        else:
            world.at(world.now + processor_s, lambda: self._release(then))

    def _release(self, then: Callable[[], None]) -> None:
        world = self.world
        self.version += 1
        done = world.send()
        world.at(done, then)
        if not self._waiting:
            self._is_held = False
        elif world.costs.vain:  # the server notifies all waiting nodes
            world.at(done, self._ask_again)
        else:
            world.at(done, self._waiting.pop(0))  # a callback grants the lock, in the order of the requests

    def _ask_again(self) -> None:
        """Let all waiting nodes ask for the lock. The first has it, and the others ask in vain."""
        first = self._waiting.pop(self.world.rng.randrange(len(self._waiting)))
        self.world.at(self.world.send(), first)
        if self._waiting:
            self.world.send(self.world.costs.vain * len(self._waiting))


def poll(
    log: Log, is_over: Callable[[], bool], sent: float, then: Callable[[], None], *, has_waited: bool = False
) -> None:
    """Let a node poll `log` until `is_over`; then let it read `sent` bytes and call `then`.

    If the node `has_waited` for long, it polls rarely. Otherwise its first pauses are short.
    """
    world = log.world
    seen = [-1]

    def look(pause: float) -> None:
        costs = world.costs
        count = costs.changed_poll if seen[0] != log.version else costs.poll
        seen[0] = log.version
        ends = is_over()
        answered = world.send(count, sent if ends else 0.0) if count else world.now
        if ends:
            world.at(answered, then)
        else:
            world.at(answered + pause, lambda: look(pause if has_waited else min(2 * pause, POLL_S)))

    if has_waited:
        world.at(world.rng.random() * IDLE_POLL_S, lambda: look(IDLE_POLL_S))
    else:
        look(FIRST_POLL_S * (1 + world.rng.random()))


def meet(log: Log, job: Job, then: Callable[[int], None], holds: int = 1) -> None:
    """Let the nodes of `job` meet in `log`, with `holds` holds of each. `then` is called for each node that passes."""
    world = log.world
    arrived = [0]
    shared = RECORD_BYTES * job.ranks * (readers(job, RECORD_BYTES) / job.nodes)

    def arrive(node: int, left: int) -> None:
        def go_on() -> None:
            if left > 1:
                arrive(node, left - 1)
                return
            arrived[0] += 1
            poll(log, lambda: arrived[0] == job.nodes, shared, lambda: then(node))

        log.hold(RECORD_BYTES * job.ranks / 2, LEADER_S * job.ranks_per_node, go_on)

    for node in range(job.nodes):
        world.send(world.costs.rank * job.ranks_per_node)
        world.at(world.now, lambda node=node: arrive(node, holds))  # type: ignore[misc]


def groups_of(nodes: int, size: int) -> list[int]:
    """Return the number of nodes of each group."""
    return [min(size, nodes - first) for first in range(0, nodes, size)]


def run_one(world: World, job: Job, holds: int = 1) -> float:
    """Return the time in which all nodes meet in one log."""
    meet(Log(world), job, lambda _: None, holds)
    return world.run()


def run_tree(world: World, job: Job, size: int, holds: int = 1) -> float:
    """Return the time in which all nodes meet in a tree with groups of `size` nodes."""
    sizes = groups_of(job.nodes, size)
    root, logs = Log(world), [Log(world) for _ in sizes]
    met, released = [0], [False] * len(sizes)

    def go_up(group: int) -> None:
        def arrived() -> None:
            met[0] += 1
            poll(root, lambda: met[0] == len(sizes), RECORD_BYTES * len(sizes), lambda: release(group))

        def arrive(left: int) -> None:
            root.hold(RECORD_BYTES * len(sizes), LEADER_S, arrived if left == 1 else lambda: arrive(left - 1))

        arrive(holds)

    def release(group: int) -> None:
        def end() -> None:
            released[group] = True

        logs[group].hold(0.0, LEADER_S, end)

    for group, (count, log) in enumerate(zip(sizes, logs, strict=True)):
        # The representative polls for its group. The other nodes arrive, and poll for the release.
        came = [0]

        def arrive(log: Log, group: int, count: int, node: int, left: int, came: list[int]) -> None:
            def go_on() -> None:
                if left > 1:
                    arrive(log, group, count, node, left - 1, came)
                    return
                came[0] += 1
                if node == 0:
                    poll(log, lambda: came[0] == count, RECORD_BYTES * count * job.ranks_per_node, lambda: go_up(group))
                poll(log, lambda: released[group], 0.0, lambda: None)

            log.hold(RECORD_BYTES * count * job.ranks_per_node / 2, LEADER_S * job.ranks_per_node, go_on)

        for node in range(count):
            world.send((world.costs.rank + 1) * job.ranks_per_node)  # each rank also looks for the release
            world.at(0.0, lambda a=(log, group, count, node, holds, came): arrive(*a))  # type: ignore[misc]
    return world.run()


def run_time_out(world: World, job: Job, size: int) -> float:
    """Return how long all ranks take, after their time-out, to record it and to name a missing rank.

    The logs have groups of `size` nodes; one log has all nodes.
    """
    for count in groups_of(job.nodes, size):
        log = Log(world)
        for _ in range(count):
            world.send(NAMING_READS * job.ranks_per_node)
            processor_s = LEADER_S * job.ranks_per_node
            world.at(0.0, lambda a=(log, processor_s): a[0].hold(0.0, a[1], lambda: None))  # type: ignore[misc]
    return world.run()


def run_fail_fast(world: World, job: Job) -> float:
    """Return how long after the death of a rank all nodes know of it, if they wait with `fail_fast` in one log.

    Each node probes for the missing rank. Those that notice its death before the first verdict can be read write one,
    too.
    """
    log, known = Log(world), [False]

    def end() -> None:
        known[0] = True

    def notice() -> None:
        if not known[0]:
            log.hold(0.0, LEADER_S, end)

    for _ in range(job.nodes):
        world.at(world.rng.random() * PROBE_S, lambda: world.at(world.send(), notice))
        name = lambda: world.at(world.send(NAMING_READS * job.ranks_per_node), lambda: None)  # noqa: E731
        poll(log, lambda: known[0], 0.0, name, has_waited=True)
    return world.run()


# The tables


def group_size(nodes: int) -> int:
    """Return the number of nodes of a group: the square root, so that no log has more nodes than another."""
    return max(2, round(nodes**0.5))


def medians(costs: Costs, run: Callable[[World], float], round_trip_s: float = ROUND_TRIP_S) -> tuple[float, float]:
    """Return the median time and the median number of requests of a simulation."""
    found = []
    for seed in SEEDS:
        world = World(costs, seed, round_trip_s)
        found.append((run(world), world.requests))
    times, requests = zip(*found, strict=True)
    return statistics.median(times), statistics.median(requests)


def duration(seconds: float) -> str:
    """Return a time with its unit."""
    return f"{figure(seconds * 1e3)} ms" if seconds < 1 else f"{figure(seconds)} s"


def amount(count: float) -> str:
    """Return a number with two digits and a unit."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2g} {unit}" if count < 100 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f}"


HEAD = (
    "nodes", "barrier: one log", "barrier: tree", "rendezvous: one log", "rendezvous: tree",
    "crash: one log, `fail_fast`", "crash, after the time-out: one log", "crash, after the time-out: tree",
)  # fmt: skip


def simulate(costs: Costs, nodes: int) -> list[list[float]]:
    """Return the time in seconds and the number of requests for each column of `HEAD` after the first."""
    job, agents, size = Job(nodes, RANKS), Job(nodes, 1), group_size(nodes)
    meeting = MEETING_READS * nodes
    runs: list[tuple[Callable[[World], float], int]] = [
        (lambda world: run_one(world, job), 0),
        (lambda world: run_tree(world, job, size), 0),
        (lambda world: run_one(world, agents, MEETING_HOLDS), meeting),
        (lambda world: run_tree(world, agents, size, MEETING_HOLDS), meeting),
        (lambda world: run_fail_fast(world, job), 0),
        (lambda world: run_time_out(world, job, nodes), 0),
        (lambda world: run_time_out(world, job, size), 0),
    ]
    found = []
    for run, more in runs:
        seconds, requests = medians(costs, run)
        found.append([float(f"{seconds + more / costs.server_per_s:.3g}"), float(f"{requests + more:.3g}")])
    return found


def simulated(name: str, path: Path = RESULTS) -> str:
    """Return the table for the file system `name`: a time and a number of requests in each cell."""
    found = json.loads(path.read_text(encoding="utf-8"))[name]
    rows = [
        (f"{int(nodes):,}", *(f"{duration(seconds)}, {amount(requests)}" for seconds, requests in cells))
        for nodes, cells in found.items()
    ]
    return table(HEAD, rows)


def check(path: Path) -> str:
    """Return the table that compares measured barriers with simulated barriers, where 25 ms were added."""
    run, lines = load(path), []
    for work in ("barrier", "tree barrier"):
        for row in sorted(run.of(work), key=lambda row: (row["nodes"], row["ranks_per_node"])):
            if row["rtt_ms"] != CHECKED_MS:
                continue
            trip, job = row["rtt_ms"] / 1e3, Job(row["nodes"], row["ranks_per_node"])
            simulate: Callable[[World], float]
            if work == "barrier":
                simulate = lambda world, job=job: run_one(world, job)  # type: ignore[misc]  # noqa: E731
            else:
                simulate = lambda world, job=job, row=row: run_tree(world, job, TREES[row["nodes"]])  # type: ignore[misc]  # noqa: E731
            seconds, requests = medians(COSTS["NFS 4.2"], simulate, trip)
            lines.append(
                (
                    f"{work}, {job.nodes} x {job.ranks_per_node}",
                    f"{duration(fastest_s(row))}, {duration(seconds)}, {seconds / fastest_s(row) - 1:+.0%}",
                    f"{figure(row['requests'])}, {figure(requests)}, {requests / row['requests'] - 1:+.0%}",
                )
            )
    return table(("work, nodes x ranks", "time: measured, simulated", "requests: measured, simulated"), lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the results, or print the comparison."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling_simulation", description=__doc__)
    parser.add_argument("--check", type=Path, metavar="MEASURED", help="compare with results of `benchmarks.scaling`")
    options = parser.parse_args(arguments)
    if options.check:
        print(check(options.check))
        return
    found = {name: {nodes: simulate(costs, nodes) for nodes in NODES} for name, costs in COSTS.items()}
    lines = ",\n".join(
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(f'    "{nodes}": {json.dumps(cells)}' for nodes, cells in rows.items())
        + "\n  }"
        for name, rows in found.items()
    )
    RESULTS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
