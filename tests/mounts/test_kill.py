"""Processes that are killed or stopped on one host, and those on the other that must not suffer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from mounts.agents import Agent
from mounts.conftest import Sides
from mounts.long_batches import await_writing, sizes, unsent

from fscoord.errors import StoreTimeoutError

MANY = 1_000_000
LONG_WRITE_S = 0.05
"""As long as a sync of many pages takes where a round trip takes 25 ms, in seconds."""

SHARES = [0.0, 0.5, 1.0]
"""How much of its record a holder has written when it is stopped."""


def hold(agent: Agent, share: float) -> None:
    """Let `agent` stop with the lock."""
    agent.begin_and_stop("with_worker", "mounts.trouble.hold", share)
    assert agent.next_event() == "holding"


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("lock", ["ofd", "flock"])
def test_holder_that_is_killed_leaves_a_log_that_goes_on(sides: Sides, lock: str, share: float) -> None:
    for holder_host, other_host in ((sides.a, sides.b), (sides.b, sides.a)):
        name = f"log-{holder_host.name}"
        other = other_host.fork().open(sides.path(name), lock=lock)
        other.set("before", "1")
        holder = holder_host.fork().open(sides.path(name), lock=lock)
        hold(holder, share)
        waiter = other.begin("store:set", "after", "1")
        holder.kill()
        waiter.result()
        assert other.check(["held"]) == (share == 1.0)
        third = holder_host.fork().open(sides.path(name), lock=lock)
        for agent in (other, third):
            assert agent.list_keys() == ["after", "before", *(["held"] if share == 1.0 else []), "introduced"]


@pytest.mark.hosts
@pytest.mark.parametrize("share", SHARES)
def test_marker_of_a_dead_holder_names_it_and_is_not_removed_by_another_host(sides: Sides, share: float) -> None:
    for holder_host, other_host in ((sides.a, sides.b), (sides.b, sides.a)):
        name = f"log-{holder_host.name}"
        other = other_host.fork().open(sides.path(name), lock="soft")
        other.set("before", "1")
        holder = holder_host.fork().open(sides.path(name), lock="soft")
        pid = holder.do("pid")
        hold(holder, share)
        holder.kill()
        marker = sides.full(other_host, name) + ".lock"
        other.set_timeout(0.5)
        error = other.begin("store:set", "after", "1").error()
        assert isinstance(error, StoreTimeoutError)
        assert error.holder == f"{holder_host.hostname}:{pid}"
        assert str(error).endswith(f"rm {marker}")
        other.set_timeout(120)
        waiter = other.begin("store:set", "after", "1")
        other_host.fork().do("os.unlink", marker)
        waiter.result()
        third = holder_host.fork().open(sides.path(name), lock="soft")
        third.set("after", "2")
        for agent in (other, third):
            assert agent.list_keys() == ["after", "before", *(["held"] if share == 1.0 else []), "introduced"]
            assert agent.get("after") == b"2"


@pytest.mark.parametrize("share", SHARES)
def test_holder_that_is_stopped_is_named_and_goes_on(sides: Sides, share: float) -> None:
    for holder_host, other_host in ((sides.a, sides.b), (sides.b, sides.a)):
        name = f"log-{holder_host.name}"
        holder, other = holder_host.fork().open(sides.path(name)), other_host.fork().open(sides.path(name))
        pid = holder.do("pid")
        other.set("before", "1")
        hold(holder, share)
        other.set_timeout(0.3)
        error = other.begin("store:set", "k", "1").error()
        assert isinstance(error, StoreTimeoutError)
        assert error.holder is not None
        assert f"{holder_host.hostname}:{pid}" in error.holder
        other.set_timeout(120)
        waiter = other.begin("store:add", "n", 1)
        holder.resume()
        assert waiter.result() == 1
        assert other.list_keys() == ["before", "held", "introduced", "n"]
        assert holder.list_keys() == ["before", "held", "introduced", "n"]


def test_waiter_for_the_lock_that_is_killed_leaves_nothing_stuck(sides: Sides) -> None:
    holder, doomed_a, doomed_b, *others = sides.opened(6)
    hold(holder, 0.0)
    for doomed in (doomed_a, doomed_b):
        doomed.begin("store:add", "n", 100)
    waiting = [agent.begin("store:add", "n", 1) for agent in others]
    doomed_a.kill()
    doomed_b.kill()
    holder.resume()
    assert sorted(pending.result() for pending in waiting) == [1, 2, 3]


def test_waiters_for_a_key_wake_though_others_were_killed_or_stopped(sides: Sides) -> None:
    crew = sides.opened(9)
    *waiters, writer = crew
    asked = [agent.begin("with_worker", "mounts.work.linger_without_lock", "k") for agent in waiters]
    for agent in waiters:
        assert agent.next_event() == "waiting"
    for agent in waiters[:2]:
        agent.kill()
    for agent in waiters[2:4]:
        agent.stop()
    writer.set("k", "there")
    assert [pending.result() for pending in asked[4:]] == [b"there"] * 4
    for agent in waiters[2:4]:
        agent.resume()
    assert [pending.result() for pending in asked[2:4]] == [b"there"] * 2


def test_write_that_was_acknowledged_to_a_killed_writer_stays_done(
    sides: Sides, rng: random.Random, scale: Callable[[int], int]
) -> None:
    reader = sides.b.fork().open(sides.path())
    for turn in range(scale(3)):
        for host in (sides.a, sides.b):
            writer, name = host.fork().open(sides.path()), f"{host.name}{turn}"
            writer.begin("with_worker", "mounts.work.keep_writing", name)
            last = -1
            for _ in range(rng.randrange(1, 12)):
                last = writer.next_event()
            writer.kill()
            last = writer.events[-1] if writer.events else last
            done = reader.get(name).decode().split()
            assert done in ([str(i) for i in range(last + 1)], [str(i) for i in range(last + 2)])
            assert reader.queue_len(name) in (len(done), len(done) - 1)
            assert [reader.queue_pop(name) for _ in range(last + 1)] == [b"%d" % i for i in range(last + 1)]


def test_leader_that_is_killed_in_a_long_write_changes_no_byte_that_was_read(
    sides: Sides, rng: random.Random, scale: Callable[[int], int], record_property: Callable[[str, object], None]
) -> None:
    """A thread that is killed while it sends many pages may leave some that arrive later. Others append meanwhile."""
    path = sides.full(sides.a)
    watcher = sides.a.fork().open(sides.path(), compact_bytes=None)
    total = watcher.do("with_worker", "mounts.long_batches.add_and_compare", path)
    sent, cut = [], []
    for turn in range(scale(5)):
        writer = sides.b.fork().open(sides.path(), compact_bytes=None)
        writer.begin("with_worker", "mounts.long_batches.write", turn, MANY)
        await_writing(writer, rng.randrange(1, 13))
        time.sleep(rng.random() ** 2 * LONG_WRITE_S)  # mostly within the sync that has begun, else behind it
        writer.kill()
        sent += sizes(writer.events)
        cut.append(unsent(writer.events))
        total += 1
        assert watcher.do("with_worker", "mounts.long_batches.add_and_compare", path) == total
    fresh = sides.b.fork().open(sides.path())
    assert fresh.add("n", 0) == watcher.do("with_worker", "mounts.long_batches.add_and_compare", path) - 1
    assert watcher.do("mounts.trouble.how_it_ends", path) == "whole"
    record_property("writes that were synced", len(sent))
    record_property("bytes of each write in whose sync a leader was killed", [size for size in cut if size is not None])
