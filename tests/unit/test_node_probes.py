"""The processes of a node probe each session once together; what is lost or wrong there only delays a death."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of, notifier_of, watcher_of
from support.places import start_thread

from fscoord import BrokenBarrierError, FileStore, barrier
from fscoord._log import mount, opened
from fscoord._log.liveness.liveness_file import LivenessFile, ProcessIdentity
from fscoord._log.log import Log
from fscoord._log.shared import network, node_poller, node_waiter
from fscoord._log.shared.node_poller import PROBES_PER_S, RESULT_TABLE, SEEMS_DEAD, WANTED, WANTED_TABLE, NodeProbes
from fscoord._log.wakeup import watcher as waiter_module
from fscoord._log.wakeup.doorbell import SIZE, Doorbell
from fscoord._runtime import system
from fscoord.inspect import dump
from fscoord.stores.file import death_watch

LIMIT_S = 60


class Requests:
    """The requests to the server: looks at the log, and probes of sessions, by the thread that makes them."""

    def __init__(self) -> None:
        self.looks: Counter[str] = Counter()
        self.probes: Counter[tuple[str, int]] = Counter()

    def clear(self) -> None:
        self.looks.clear()
        self.probes.clear()

    def probed(self) -> set[int]:
        return {number for _, number in self.probes}


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Requests:
    """A directory that counts as NFS, on which all sessions are those of other hosts."""
    made = Requests()
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(node_poller, "FALLBACK", str(tmp_path / "node"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(opened, "find_mount", lambda path: mount.Mount("nfs4", str(tmp_path), ("rw",)))
    monkeypatch.setattr(network, "PATH_CHECK_S", math.inf)
    monkeypatch.setattr(system, "O_DIRECT", 0)
    monkeypatch.setattr(system, "nfs_recovers_lost_locks", lambda: False)
    monkeypatch.setattr(ProcessIdentity, "shares_processes_with", lambda self, session: False)
    monkeypatch.setattr(death_watch, "BEGIN_S", 0.0)
    is_held, refresh = LivenessFile.is_held, Log.refresh

    def held(file: LivenessFile, number: int) -> bool:
        made.probes[system.threading.current_thread().name, number] += 1
        return is_held(file, number)

    def refreshed(log: Log, *given: Any) -> Any:
        made.looks[system.threading.current_thread().name] += 1
        return refresh(log, *given)

    monkeypatch.setattr(LivenessFile, "is_held", held)
    monkeypatch.setattr(Log, "refresh", refreshed)
    return made


def until(what: Callable[[], object]) -> None:
    deadline = system.time.monotonic() + LIMIT_S
    while not what():
        assert system.time.monotonic() < deadline
        system.time.sleep(0.001)


def election_of(store: FileStore) -> Any:
    watched = watcher_of(store)
    return None if watched is None else watched.election


def rounds(store: FileStore, number: int, count: int) -> None:
    """Return when the poller has probed session `number` so often."""
    for _ in range(count):
        before = result_of(store, number)
        until(lambda before=before: result_of(store, number) != before)


def result_of(store: FileStore, number: int) -> int:
    return (os.pread(election_of(store)._bell.fd, 1, RESULT_TABLE + number % SIZE) or b"\0")[0]


# What it costs


def test_waiters_of_a_node_probe_the_missing_rank_once_together(
    tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sleeps are short, the poller counts as well, and its results stay fresh: all that a busy machine changes."""
    monkeypatch.setattr(waiter_module, "SLOW_LAST_S", 0.02)
    beats = itertools.count()
    monkeypatch.setattr(node_poller.PollerElection, "heartbeat_count", lambda self: next(beats))
    monkeypatch.setattr(death_watch, "STALE_S", 1000.0)
    path, size = str(tmp_path / "log"), 8
    with ExitStack() as stack:
        stores = [stack.enter_context(FileStore(path, rank=rank, timeout=LIMIT_S)) for rank in range(size)]
        missing = stores[-1].register()
        threads = [
            start_thread(lambda rank=rank: barrier(stores[rank], size, "b", LIMIT_S, rank, fail_fast=True))
            for rank in range(size - 1)
        ]
        until(lambda: stores[0].check(["b/arrivals"]) and stores[0].get("b/arrivals").count(b" ") == size - 1)
        # Then every slot that was wanted before the last arrival is forgotten, or was probed.
        until(lambda: all(notifier_of(store)._waiters for store in stores[:-1]))
        wanted = lambda: [  # noqa: E731
            number for number, byte in enumerate(os.pread(election_of(stores[0])._bell.fd, SIZE, WANTED_TABLE)) if byte
        ]
        until(lambda: wanted() == [missing])
        before = system.time.monotonic()
        requests.clear()
        rounds(stores[0], missing, 6)
        asked, looks = requests.probes.total(), requests.looks.most_common()
        passed = system.time.monotonic() - before  # not less than the time in which these were counted
        assert requests.probed() == {missing}
        assert len(requests.probes) == 1, "one thread, the poller, asks for all"
        assert asked <= passed / node_poller.PROBE_S + 1
        followers = [count for _, count in looks[1:]]
        # The pause between two looks begins at 0.02 s, and each is four times as long as the one before, up to 10 s.
        assert sum(followers) <= (size - 2) * (6 + passed / node_waiter.OWN_POLL_S), "they look ever more rarely"
        stores[-1].close()
        for thread in threads:
            with pytest.raises(BrokenBarrierError):
                thread.join()
        assert sum(entry.kind == "death" for entry in dump(path)) == 1


def test_poller_probes_for_others_while_it_waits_for_a_key_only(
    tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes the waiter that needs the session, whose next look of its own is far away."""
    monkeypatch.setattr(waiter_module, "SLOW_LAST_S", 1000.0)
    path = str(tmp_path / "log")
    with FileStore(path) as polls, FileStore(path) as follows, FileStore(path) as other:
        number = other.register()
        with start_thread(polls.wait, ["k"], LIMIT_S) as poller:
            until(lambda: election_of(polls) is not None and election_of(polls)._poller is not None)
            with start_thread(follows.wait_sessions, ["never"], [number], LIMIT_S) as follower:
                until(lambda: (poller._thread.name, number) in requests.probes)
                log_of(other).liveness.unlock()  # as when its process is killed: nobody here is rung
            assert follower.result == [number]
            polls.set("k", "1")


# What is lost, late or wrong


def test_waiter_without_fresh_results_probes_itself(
    tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poller is of an older version, say, that polls and does not probe."""
    monkeypatch.setattr(NodeProbes, "probe_due", lambda *given: False)
    monkeypatch.setattr(death_watch, "STALE_S", 0.1)
    path = str(tmp_path / "log")
    with FileStore(path) as polls, FileStore(path) as follows, FileStore(path) as other:
        number = other.register()
        with start_thread(polls.wait, ["k"], LIMIT_S):
            until(lambda: election_of(polls) is not None and election_of(polls)._poller is not None)
            with start_thread(follows.wait_sessions, ["never"], [number], LIMIT_S) as follower:
                until(lambda: requests.probes[follower._thread.name, number])
                other.close()
            assert follower.result == [number]
            polls.set("k", "1")


@pytest.mark.parametrize("watch", ["poll", "auto"])
def test_waiter_without_a_poller_probes_less_often_than_it_looks(
    watch: str, tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    if watch == "auto":
        monkeypatch.setattr(system, "has_inotify", lambda: False)
    path = str(tmp_path / "log")
    with FileStore(path, watch=watch) as store, FileStore(path) as other:
        number = other.register()
        requests.clear()
        with start_thread(store.wait_sessions, ["never"], [number], LIMIT_S) as waiter:
            until(lambda: requests.probes[waiter._thread.name, number] >= 3)
            assert requests.looks[waiter._thread.name] > 6
            other.close()
        assert waiter.result == [number]


def test_wrong_result_of_death_is_refuted_without_the_lock(
    tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the bytes say, a living session is not declared dead, and no waiter takes the log's lock for it."""
    path = str(tmp_path / "log")
    recorded: list[int] = []
    monkeypatch.setattr(Log, "record_death", lambda self, number, *given: recorded.append(number))
    with FileStore(path) as store, FileStore(path) as other, FileStore(path) as writer:
        number = other.register()
        with start_thread(store.wait_sessions, ["k"], [number], LIMIT_S) as waiter:
            until(lambda: election_of(store) is not None and result_of(store, number))
            requests.clear()
            fd = election_of(store)._bell.fd
            for count in range(1, 60):
                os.pwrite(fd, bytes([count << 1 | SEEMS_DEAD]), RESULT_TABLE + number)
                election_of(store).notify(range(SIZE))
                system.time.sleep(0.001)
            assert not waiter.result
            writer.set("k", "1")
        assert waiter.result == []
        assert recorded == []


# The tables


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Doorbell]:
    made = Doorbell(str(tmp_path / "bell"), 0o600)
    yield made
    made.close()


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(system, "time", made)
    return made


def test_slot_is_probed_while_it_is_wanted_and_then_forgotten(bell: Doorbell, clock: Clock) -> None:
    waiter, poller, probed = NodeProbes(bell), NodeProbes(bell), list[int]()

    def probe(number: int) -> bool:
        probed.append(number)
        return True

    assert waiter.ask([7])[0] == {7: 0}
    results = set()
    for _ in range(WANTED + 3):
        assert not poller.probe_due(lambda: [6, 7, 8], probe)
        assert not poller.probe_due(lambda: [6, 7, 8], probe), "not twice in `PROBE_S`"
        results.add(os.pread(bell.fd, 1, RESULT_TABLE + 7)[0])
        clock.now += node_poller.PROBE_S
    assert probed == [7] * WANTED
    assert len(results) == WANTED, "each result differs from the one before"
    assert not any(result & SEEMS_DEAD for result in results)
    assert waiter.ask([7])[0] == {7: 0}, "the old result is cleared"


def test_slots_are_probed_in_turn_at_a_bounded_rate(bell: Doorbell, clock: Clock) -> None:
    waiter, poller, probed = NodeProbes(bell), NodeProbes(bell), list[int]()

    def probe(number: int) -> bool:
        probed.append(number)
        return True

    count = 200
    poller._probed_at = clock.now
    for _ in range(4):
        _, turn_s = waiter.ask(range(count))
        clock.now += 1.0
        poller.probe_due(lambda: list(range(count)), probe)
    assert turn_s == count / PROBES_PER_S
    assert len(probed) == 4 * PROBES_PER_S
    assert set(probed[:count]) == set(range(count)), "none is probed twice before all were"


@pytest.mark.parametrize(
    ("undead", "alive", "seems_dead"),
    [
        ([7], {7: True}, False),
        ([7], {7: None}, False),
        ([7], {7: False}, True),
        ([], {}, True),
        ([7, 7 + SIZE], {7: True, 7 + SIZE: False}, True),
        ([8], {8: False}, True),
    ],
    ids=["alive", "unknown", "dead", "recorded as dead", "another of the slot dead", "another slot"],
)
def test_result_on_a_slot(
    undead: list[int], alive: dict[int, bool | None], seems_dead: bool, bell: Doorbell, clock: Clock
) -> None:
    waiter, poller = NodeProbes(bell), NodeProbes(bell)
    waiter.ask([7])
    assert poller.probe_due(lambda: undead, alive.__getitem__) is seems_dead
    assert bool(waiter.ask([7])[0][7] & SEEMS_DEAD) is seems_dead
    clock.now += 1
    assert not poller.probe_due(lambda: undead, alive.__getitem__), "it rings once"
