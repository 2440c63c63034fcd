"""Faults that need the lab: a client is cut off from the network and comes back, and the server restarts.

Run with `--lease 15 --grace 15`, which is how long an NFS 4 server keeps the locks of a client that it does not hear.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mounts.agents import Agent, Host
from mounts.conftest import Sides
from mounts.long_batches import await_writing
from mounts.test_histories import KEYS, clocks
from support.told import judge, take_history

from fscoord.errors import SessionDeadError, StoreError, StoreTimeoutError

pytestmark = [pytest.mark.lab, pytest.mark.hosts]

LEASE = Path("/proc/fs/nfsd/nfsv4leasetime")


class Network:
    """The links between the hosts and the server."""

    def __init__(self, version: str) -> None:
        self.version = version

    def cut(self, host: Host) -> None:
        subprocess.run(["link_host", host.name, "down"], check=True)

    def heal(self, host: Host) -> None:
        subprocess.run(["link_host", host.name, "up"], check=True)

    def server(self, word: str) -> None:
        subprocess.run(["nfs_server", word], check=True)


@pytest.fixture
def network(sides: Sides) -> Iterator[Network]:
    lease = int(LEASE.read_text())
    assert lease <= 30, f"the lease is {lease} s: start the lab with --lease 15 --grace 15"
    mounts = Path("/proc/mounts").read_text().splitlines()
    options = next(line.split()[3] for line in mounts if line.split()[1] == sides.a.directory)
    network = Network(next(word.partition("=")[2] for word in options.split(",") if word.startswith("vers=")))
    yield network
    for host in (sides.a, sides.b):
        network.heal(host)


LONG_VALUES = 5
MOMENT_S = 0.3
"""How long a host is cut off for a moment, in seconds."""


def hold(agent: Agent, share: float) -> None:
    agent.begin("with_worker", "mounts.trouble.hold", share)
    assert agent.next_event() == "holding"


def agree(sides: Sides, *more: Agent) -> dict[str, bytes]:
    """Return the keys and values of the log, which every handle, old or new, on every host must agree on."""
    fresh = [host.fork().open(sides.path()) for host in (sides.a, sides.b)]
    seen = [agent.do("mounts.work.fingerprint", "@store") for agent in (*fresh, *more)]
    assert all(found == seen[0] for found in seen), seen
    return dict(seen[0])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_holder_that_is_cut_off_loses_the_lock_and_harms_nothing(sides: Sides, network: Network, share: float) -> None:
    """On NFS 4 the lease runs out and the lock goes on; on NFS 3 the others are told in time that they must wait."""
    holder, here = sides.a.fork().open(sides.path()), sides.a.fork().open(sides.path())
    other = sides.b.fork().open(sides.path())
    other.set("before", "1")
    here.set("here", "1")
    asked = holder.begin_and_stop("with_worker", "mounts.trouble.hold", share)
    assert holder.next_event() == "holding"
    network.cut(sides.a)
    if network.version.startswith("4"):
        for _ in range(5):
            other.add("n", 1)
        done = {"n": b"5"}
    else:
        other.set_timeout(5)
        assert isinstance(other.begin("store:add", "n", 1).error(), StoreTimeoutError)
        other.set_timeout(120)
        done = {}
    late = here.begin("store:append", "late", "x")
    network.heal(sides.a)
    holder.resume()
    told = finish(asked)
    assert told is None or isinstance(told, StoreError)
    late_told = finish(late)
    assert late_told is None or isinstance(late_told, StoreError)
    found = agree(sides, other, *[agent for agent in (holder, here) if recovers(agent)])
    assert {"before": b"1", "here": b"1", "introduced": b"1"} | done == {
        key: value for key, value in found.items() if key not in ("held", "late", "again")
    }
    if told is None:
        assert found["held"] == b"1"
    elif not getattr(told, "maybe_applied", False):
        assert "held" not in found
    if late_told is None:
        assert found["late"] == b"x"


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_compactor_that_is_cut_off_at_its_seal_takes_nothing_back(sides: Sides, network: Network, share: float) -> None:
    compactor, other = sides.opened(2)
    other.multi_set(["x", "y"], ["1", "2"])
    asked = compactor.begin_and_stop("with_worker", "mounts.trouble.hold_seal", share)
    assert compactor.next_event() == "sealing"
    network.cut(sides.a)
    expected = {"x": b"1", "y": b"2", "introduced": b"1"}
    if network.version.startswith("4"):
        for i in range(5):
            other.set(f"b{i}", "1")
            expected[f"b{i}"] = b"1"
        other.compact()
        other.set("last", "1")
        expected["last"] = b"1"
    network.heal(sides.a)
    compactor.resume()
    told = finish(asked)
    assert told is None or isinstance(told, StoreError)
    assert agree(sides, other) == expected
    again = sides.a.fork().open(sides.path())
    again.compact()
    again.set("again", "1")
    assert agree(sides, other, again) == expected | {"again": b"1"}


def finish(pending: Any) -> Exception | None:
    """Wait for the end of a call; return what it raised."""
    try:
        pending.result()
    except StoreError as error:
        return error
    return None


def recovers(agent: Agent) -> bool:
    """After a failure a handle goes on; the program need not open another."""
    agent.do("store:set", "again", "1")
    return True


def test_host_that_is_cut_off_is_found_dead_and_learns_of_it_on_its_return(sides: Sides, network: Network) -> None:
    """On NFS 4. On NFS 3 the server keeps the locks, so no host can detect it."""
    a, b = sides.opened(2)
    number = a.do("mounts.work.session", "@store")
    b.set("k", "1")
    network.cut(sides.a)
    if network.version.startswith("4"):
        b.do("mounts.work.wait_dead", "@store", number)
        network.heal(sides.a)
        error = a.begin("store:set", "k", "2").error()
        assert isinstance(error, SessionDeadError)
        assert "dead" in str(error)
        a.open(sides.path())
    else:
        assert b.dead_sessions([number]) == []
        network.heal(sides.a)
    a.set("k", "3")
    assert b.get("k") == b"3"


def test_cut_shorter_than_the_lease_is_only_a_delay(sides: Sides, network: Network) -> None:
    a, b = sides.opened(2)
    a.set("k", "1")
    b.set("k", "2")
    network.cut(sides.a)
    asked = a.begin("store:add", "n", 1)
    b.set("k", "3")
    assert b.get("k") == b"3"
    network.heal(sides.a)
    assert asked.result() == 1
    assert a.get("k") == b"3"
    assert b.add("n", 1) == 2


@pytest.mark.timeout(1200)
def test_calls_stay_linearizable_over_a_cut_that_outlasts_the_lease(
    sides: Sides, network: Network, rng: random.Random
) -> None:
    """On NFS 3 the others may wait until the cut is over: the server keeps the locks of the host that is cut off."""
    goes_on = network.version.startswith("4")
    ahead = clocks(sides)
    crew = sides.opened(4)
    for agent in crew:
        agent.begin("with_worker", "mounts.work.history", rng.randrange(2**32), 100_000, KEYS)
    progress(crew, 20)
    network.cut(sides.a)
    # More calls than fit before the lease ends, had those of a held the lock.
    progress(crew[1::2], 40 * goes_on)
    lease = int(LEASE.read_text())
    sides.b.fork().do("time.sleep", lease + 5)  # the lease itself is waited for: nothing tells that it is over
    progress(crew[1::2], 20 * goes_on)
    network.heal(sides.a)
    progress(crew, 40)
    calls = []
    for agent in crew:
        agent.kill()
        calls += take_history(agent.events, ahead[agent.host.name])
    judge(calls, KEYS)


@pytest.mark.timeout(1200)
def test_calls_stay_linearizable_over_a_restart_of_the_server(
    sides: Sides, network: Network, rng: random.Random
) -> None:
    ahead = clocks(sides)
    crew = sides.opened(4)
    for agent in crew:
        agent.begin("with_worker", "mounts.work.history", rng.randrange(2**32), 100_000, KEYS)
    for _ in range(3):
        progress(crew, 20)
        network.server("restart")
    progress(crew, 20)
    calls = []
    for agent in crew:
        agent.kill()
        calls += take_history(agent.events, ahead[agent.host.name])
    judge(calls, KEYS)


def progress(crew: list[Agent], calls: int) -> None:
    """Return when each of `crew` has ended `calls` more calls than now."""
    targets = [len(agent.events) + 2 * calls for agent in crew]
    for agent, target in zip(crew, targets, strict=True):
        while len(agent.events) < target:
            assert agent.status is None
            agent.host.look(10)


def test_waiter_survives_a_cut_and_a_restart(sides: Sides, network: Network, scale: Callable[[int], int]) -> None:
    crew = sides.opened(2)
    asked = [agent.begin("with_worker", "mounts.work.linger", "k") for agent in crew]
    for agent in crew:
        assert agent.next_event() == "waiting"
    network.cut(sides.a)
    network.server("restart")
    network.heal(sides.a)
    sides.b.fork().open(sides.path()).set("k", "there")
    told = [finish(pending) for pending in asked]
    assert told == [None, None]


def test_batch_that_is_cut_off_for_a_moment_leaves_no_hole(
    sides: Sides, network: Network, rng: random.Random, scale: Callable[[int], int]
) -> None:
    """Beside the leader a process of its host reads all the time, past the cache, which flushes what is to be sent."""
    path = sides.full(sides.a)
    watcher = sides.a.fork().open(sides.path(), compact_bytes=None)
    writer, reader = (sides.b.fork().open(sides.path(), compact_bytes=None) for _ in range(2))
    total = watcher.do("with_worker", "mounts.long_batches.add_and_compare", path)
    reading = reader.begin("mounts.long_batches.keep_reading", "@store", "end")
    for turn in range(scale(10)):
        writer.events.clear()
        writing = writer.begin("with_worker", "mounts.long_batches.write", turn, LONG_VALUES)
        await_writing(writer, 1)
        time.sleep(rng.random() * MOMENT_S)  # anywhere within some writes
        network.cut(sides.b)
        time.sleep(rng.random() * MOMENT_S)  # shorter than a lease, so no lock is lost
        network.heal(sides.b)
        writing.result()
        total += 1
        assert watcher.do("with_worker", "mounts.long_batches.add_and_compare", path) == total
    watcher.set("end", "1")
    assert reading.result() > 0
    assert watcher.do("mounts.trouble.how_it_ends", path) == "whole"
