"""`predict` estimates by a model the cost of a job's coordination on a file server. This module does no I/O.

The terms of the model are fitted to measurements with 2 to 8 hosts. docs/contributors/scaling.md has the measurements,
the errors of the model and its limits. ``python -m benchmarks.scaling_page`` fits the terms again.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from fscoord._log.shared.extent import EXTENT_MAX
from fscoord._waiting.timing import SHOW_S
from fscoord.doctor.verdict import HOSTS


class Job(NamedTuple):
    """The size of a job: `ranks_per_node` ranks on each of `nodes` nodes."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.nodes * self.ranks_per_node


class Terms(NamedTuple):
    """The coefficients of a linear model: a constant `base`, and a cost for each node, pair of nodes and rank.

    Pairs of nodes count because of the lock: when a node releases the lock, the server notifies every waiting node. All
    but one of the waiting nodes then request the lock in vain. `shown` is the extra cost of a rank that waits for
    longer than `SHOW_S` seconds, because such a rank writes a description of its wait for `fscoord ps`.
    """

    base: float = 0.0
    node: float = 0.0
    pair: float = 0.0
    rank: float = 0.0
    shown: float = 0.0

    def of(self, job: Job, shown: float = 0.0) -> float:
        """Return the estimate for `job`. `shown` is the number of ranks that describe their waits."""
        pairs = job.nodes * (job.nodes - 1) / 2
        return self.base + self.node * job.nodes + self.pair * pairs + self.rank * job.ranks + self.shown * shown


# Fitted by benchmarks/scaling_page.py: a test compares these lines with benchmarks/results/scaling.json.
def readers(job: Job, record_bytes: float) -> int:
    """Return how many processes of `job` read the arrivals at a barrier from the server.

    An arrival is a record of `record_bytes` bytes. The processes of a node share an extent: the bytes of the log that
    one of the processes has read last (`fscoord._log.shared.extent`). If all arrivals fit into the extent, one process
    of each node reads from the server. Otherwise each rank reads from the server.
    """
    return job.nodes if job.ranks * record_bytes <= EXTENT_MAX else job.ranks


BARRIER_REQUESTS: Final = Terms(node=6.8, pair=2.75, rank=0.833, shown=1.01)
BARRIER_ROUND_TRIPS: Final = Terms(base=0.241, node=4.91)
ADDS_REQUESTS: Final = Terms(node=6.81, pair=1.94, rank=0.0534)
ADDS_ROUND_TRIPS: Final = Terms(base=0.0677, node=4.96)
WAITING_REQUESTS_PER_S: Final = Terms(node=6.76, rank=0.0489)
RENDEZVOUS_REQUESTS: Final = Terms(node=72.5, pair=12.6)
RENDEZVOUS_ROUND_TRIPS: Final = Terms(node=20.9, pair=1.01)
LEADER_S: Final = 6e-05
RECORD_BYTES: Final = 46.9

LONE_ADD_REQUESTS: Final = 5
LONE_ADD_ROUND_TRIPS: Final = 4
"""If only one rank writes, an add takes four round trips: lock, get the size, write, unlock. The client also sends
FREE_STATEID, a fifth request, after the call has returned. If another node has written since, an add also has to read.
"""


def predict(job: Job, round_trip_s: float) -> dict[str, Any]:
    """Return the estimated times and requests of `job`. ``docs/cli/doctor.md`` explains the fields.

    `round_trip_s` is the time of a round trip to the server, in seconds. A time in the result is the time of the
    round trips plus the processor time of all writing ranks, because only one node writes at a time. The time in which
    a slow server sends the records to each of the `readers` is not included.
    """
    agents = Job(job.nodes, 1)
    leaders_s = LEADER_S * job.ranks  # one node after the other has the lock
    reading = readers(job, RECORD_BYTES)
    barrier_s = BARRIER_ROUND_TRIPS.of(job) * round_trip_s + leaders_s
    adding_s = ADDS_ROUND_TRIPS.of(job) * round_trip_s + leaders_s
    return {
        "nodes": job.nodes,
        "ranks_per_node": job.ranks_per_node,
        "round_trip_s": round_trip_s,
        "barrier_s": barrier_s,
        "barrier_requests": round(
            BARRIER_REQUESTS.of(job, job.ranks if barrier_s > SHOW_S else 0) + reading - job.nodes
        ),
        "barrier_bytes": round(RECORD_BYTES * reading * job.ranks),
        "lone_add_s": LONE_ADD_ROUND_TRIPS * round_trip_s,
        "adds_per_s": job.ranks / adding_s,
        "add_requests": ADDS_REQUESTS.of(job) / job.ranks,
        "rendezvous_s": RENDEZVOUS_ROUND_TRIPS.of(agents) * round_trip_s,
        "rendezvous_requests": round(RENDEZVOUS_REQUESTS.of(agents)),
        "waiting_requests_per_s": WAITING_REQUESTS_PER_S.of(job),
    }


def round_trip_of(checks: list[dict[str, Any]], lock: str) -> float | None:
    """Return the time of a round trip in seconds, from the checks of an examination. None if only one host took part.

    To acquire and release a free lock takes two round trips. A check between two processes of one host does not count,
    because its lock requests may not reach the server.
    """
    for check in checks:
        if (check["name"], check["between"], check["lock"]) == ("latency", HOSTS, lock):
            seconds = check["measured"].get("seconds")
            return None if seconds is None else float(seconds) / 2
    return None
