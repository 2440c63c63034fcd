"""Nodes watch their successors in a ring: its cost, and that it detects each death."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.internals import LivenessFile, Log, system
from support.places import start_thread, until

from fscoord import FileStore, HashStore, PrefixStore
from fscoord.rendezvous import (
    C10dRendezvousBackend,
    DynamicRendezvousHandler,
    RendezvousTimeout,
    handler as handler_module,
)
from fscoord.rendezvous.backend import SharedState, latest_change
from fscoord.rendezvous.handler import RoundDeadlines
from fscoord.rendezvous.keep_alive import NEIGHBOURS, TICKS_PER_READ
from fscoord.rendezvous.parameters import RendezvousSettings
from fscoord.rendezvous.state import Limits, Observed, State, Verdict, decide

HOUR = 3600
"""The interval of keep-alives that only tests send."""


class Job:
    """A rendezvous of handlers on one file. The test makes their ticks."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.handlers: list[DynamicRendezvousHandler] = []

    def meet(self, count: int, least: int = 1) -> list[DynamicRendezvousHandler]:
        """Let `count` nodes take part in one round, and return them in the order of the ring."""
        for number in range(count):
            store = FileStore(self.path)
            timeout = RendezvousTimeout(last_call=HOUR)
            settings = RendezvousSettings("id", least, count, timeout, timedelta(seconds=HOUR))
            backend = C10dRendezvousBackend(store, "id")
            address = f"host{number % 3}"
            handler = DynamicRendezvousHandler(settings, backend, store, address, owns_store=True)
            self.handlers.append(handler)
        for thread in [start_thread(handler.next_rendezvous) for handler in self.handlers]:
            thread.join()
        return sorted(self.handlers, key=lambda handler: handler.node)

    def present(self) -> frozenset[str]:
        return self.handlers[0]._shared.read()[0].present

    def close(self) -> None:
        for handler in self.handlers:
            handler.shutdown()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(str(tmp_path / "job"))
    yield made
    made.close()


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The session of each probe."""
    probes: list[int] = []
    is_held = LivenessFile.is_held

    def spied(file: LivenessFile, number: int) -> bool:
        probes.append(number)
        return is_held(file, number)

    monkeypatch.setattr(LivenessFile, "is_held", spied)
    return probes


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node reads the state because time has passed. Otherwise the counts would depend on the machine's speed."""
    monkeypatch.setattr(handler_module, "POLL_INTERVAL_S", HOUR)
    monkeypatch.setattr(handler_module, "SETTLED_POLL_S", HOUR)
    monkeypatch.setattr(RoundDeadlines.left, "__defaults__", (HOUR,))


def die(handler: DynamicRendezvousHandler) -> None:
    """End as a process that is killed."""
    handler._keep_alive.stop()


@pytest.mark.parametrize("count", [2, 4, 9])
def test_tick_probes_the_next_neighbours_and_no_other_session(job: Job, count: int, probed: list[int]) -> None:
    nodes = job.meet(count)
    with ExitStack() as stack:
        workers = [stack.enter_context(FileStore(job.path, rank=rank)).register() for rank in range(20)]
        for place, handler in enumerate(nodes):
            probed.clear()
            handler._keep_alive.tick(0.0)
            ring = [int(node.node.rpartition("_s")[2]) for node in nodes[place + 1 :] + nodes[:place]]
            assert sorted(probed) == sorted(ring[:NEIGHBOURS])
            assert not set(probed) & set(workers)


def test_idle_tick_costs_two_reads_and_the_probes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network mount each look at the log is a request to the server."""
    looks: list[Log] = []
    refresh = Log.refresh

    def spied(log: Log, *given: Any) -> Any:
        looks.append(log)
        return refresh(log, *given)

    for handler in job.meet(4):
        with monkeypatch.context() as patch:
            handler._keep_alive.tick(0.0)
            handler._keep_alive._ticks_since_read = 0
            patch.setattr(Log, "refresh", spied)
            looks.clear()
            for _ in range(TICKS_PER_READ - 1):
                handler._keep_alive.tick(0.0)
            assert len(looks) == 2 * (TICKS_PER_READ - 1)
            assert len(set(looks)) == 1, "two handles would compare the path with the file twice"


@pytest.mark.parametrize("seed", range(6))
def test_nodes_that_die_at_once_are_evicted_by_one_tick_of_the_rest(job: Job, seed: int) -> None:
    """However many nodes die, and whichever: at most one interval later they are known, as long as one node lives."""
    rng = random.Random(seed)
    nodes = job.meet(8)
    living = rng.sample(nodes, 1 + seed)
    for handler in nodes:
        if handler not in living:
            die(handler)
    rng.shuffle(living)
    for handler in living:
        handler._keep_alive.tick(0.0)
    assert job.present() == {handler.node for handler in living}


def test_node_is_watched_by_others_than_a_stopped_one(job: Job) -> None:
    nodes = job.meet(5)
    stopped, dead = nodes[1], nodes[2]
    die(dead)
    for handler in nodes:
        if handler not in (stopped, dead):
            handler._keep_alive.tick(0.0)
    assert dead.node not in job.present()


def test_change_whose_maker_died_before_it_rang_is_read_after_some_ticks(job: Job) -> None:
    nodes = job.meet(3)
    for handler in nodes:
        handler._keep_alive.tick(0.0)
    with FileStore(job.path) as store:
        backend = C10dRendezvousBackend(store, "id")
        found = backend.get_state()
        assert found is not None
        state = State.decode(found[0])
        late = f"a_s{store.register()}"
        backend.set_state(replace(state, sequence=state.sequence + 1, waiting=(late,)).encode(), found[1])
    for _ in range(TICKS_PER_READ):
        for handler in nodes:
            handler._keep_alive.tick(0.0)
    assert late not in job.present(), "its session has ended"


def test_node_of_a_job_that_died_is_replaced_though_nobody_saw_the_others_come(job: Job, tmp_path: Path) -> None:
    """The next node evicts the nodes of a dead job at once, however many there were."""
    for handler in job.meet(7):
        die(handler)
    again = Job(job.path)
    (handler,) = again.meet(1)
    assert job.present() == {handler.node}
    again.close()


def test_round_is_completed_by_a_node_that_did_not_see_the_others_join(job: Job) -> None:
    """The first participant, which saw them, is stopped before it completes the round."""
    with FileStore(job.path, timeout=60) as store, ExitStack() as stack:
        clones = [stack.enter_context(store.clone()) for _ in range(6)]
        names = tuple(f"a{number}_s{clone.register()}" for number, clone in enumerate(clones))
        backend = C10dRendezvousBackend(store, "id")
        backend.set_state(State(sequence=1, participants=names).encode())
        settings = RendezvousSettings("id", 1, 7, RendezvousTimeout(join=60, last_call=0), timedelta(seconds=HOUR))
        handler = DynamicRendezvousHandler(settings, backend, store, "b")
        PrefixStore("torch.rendezvous.id.0", store).multi_set(["MASTER_ADDR", "MASTER_PORT"], ["x", "1"])
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (6, 7)
        handler.depart()


def test_nodes_that_meet_do_not_all_probe_all_others(job: Job, probed: list[int], no_polls: None) -> None:
    job.meet(12, least=12)
    assert len(probed) <= 12 * (NEIGHBOURS + 2), "and not 12 times 11"


def test_first_participant_alone_asks_for_all_others_before_it_has_waited(job: Job) -> None:
    """Otherwise all of them would ask, each time that the last one joins."""
    nodes = job.meet(4)
    forming = State(sequence=1, participants=tuple(handler.node for handler in nodes))
    for handler in nodes:
        handler._limits = Limits(4, 4)
        seen = Observed(life=0)
        decision = decide(forming, handler.node, handler._limits, seen)
        assert decision.verdict is Verdict.WAIT
        assert handler._must_know_all(decision, forming, seen, None) is (handler is nodes[0])
        assert handler._must_know_all(decision, forming, seen, forming)


def test_latest_change_ignores_what_no_node_writes() -> None:
    store = HashStore()
    assert latest_change(store) == 0
    for name in ("3", "12", "x", "\u0663", "-1"):
        store.set(f"changed/{name}", b"")
    assert latest_change(store) == 12


def test_participants_read_the_state_a_few_times_however_many_join(no_polls: None) -> None:
    """Otherwise each of them would be woken by each that joins, and read the state."""
    reads: Counter[int] = Counter()

    class Counted(C10dRendezvousBackend):
        def get_state(self) -> Any:
            reads[id(self)] += 1
            return super().get_state()

    store, count, handlers, threads = HashStore(), 24, list[DynamicRendezvousHandler](), list[Any]()
    for _ in range(count):
        limits = RendezvousTimeout(last_call=HOUR)
        settings = RendezvousSettings("id", count, count, limits, timedelta(seconds=HOUR))
        handlers.append(DynamicRendezvousHandler(settings, Counted(store, "id"), store))
    watching = C10dRendezvousBackend(store, "id")
    for number, handler in enumerate(handlers):  # one after another, and each waits before the next one comes
        threads.append(start_thread(handler.next_rendezvous))
        until(lambda number=number: _joined(watching) == number + 1)
    for thread in threads:
        thread.join()
    for handler in handlers:
        handler.shutdown()
    first, *others = sorted(reads.values(), reverse=True)
    assert first <= count + 6
    assert max(others) <= 8


def _joined(backend: C10dRendezvousBackend) -> int:
    found = backend.get_state()
    return len(State.decode(found[0]).participants) if found else 0


@pytest.mark.parametrize("change", ["complete", "closed"])
def test_change_that_settles_a_round_wakes_its_participants(change: str) -> None:
    store = HashStore(timeout=60)
    shared = SharedState(C10dRendezvousBackend(store, "id"), store)
    forming, token, _ = shared.write(State(sequence=1, round=7, participants=("a", "b")), None)
    joined, token, _ = shared.write(replace(forming, sequence=2, participants=("a", "b", "c")), token)
    with start_thread(shared.wait_until_settled, forming, 20) as waiter:
        until(lambda: store._shared.readers)
        assert waiter.is_alive()
        shared.write(replace(joined, sequence=3, **{change: True}), token)
        assert store.check(["settled/7"])


def test_node_whose_write_was_refused_pauses_and_reads_before_it_writes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where writes are slow, others that wait to write would make the next one fail as well."""
    store = HashStore()
    settings = RendezvousSettings("id", 1, 2, RendezvousTimeout(), timedelta(seconds=HOUR))
    handler = DynamicRendezvousHandler(settings, C10dRendezvousBackend(store, "id"), store)
    other = SharedState(C10dRendezvousBackend(store, "id"), store)
    old, token, _ = other.write(State(sequence=1), None)
    now, _, _ = other.write(State(sequence=2, waiting=("x",)), token)
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=system.time.monotonic, sleep=pauses.append)
    deadlines = RoundDeadlines(handler._limits, settings.timeout)
    monkeypatch.setattr(system, "time", clock)
    assert handler._read_apart(old, token, 0.0, deadlines) == (old, token), "a fast write is repeated at once"
    assert pauses == []
    for took in (0.01, 0.4):
        pauses.clear()
        for _ in range(20):
            assert handler._read_apart(old, token, took, deadlines)[0] == now
        assert took / 2 < max(pauses) <= 2 * took
    monkeypatch.undo()
    handler.shutdown()


@pytest.mark.parametrize(("count", "longest"), [(2, 1.0), (8, 1.0), (16, 2.0), (1000, 5.0)])
def test_participants_poll_more_rarely_the_more_they_are(
    count: int, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    settings = RendezvousSettings("id", count + 1, count + 1, RendezvousTimeout(), timedelta(seconds=HOUR))
    handler = DynamicRendezvousHandler(settings, C10dRendezvousBackend(store, "id"), store)
    waits: list[tuple[str, float]] = []
    monkeypatch.setattr(handler._shared, "wait", lambda _, seconds: waits.append(("change", seconds)))
    monkeypatch.setattr(handler._shared, "wait_until_settled", lambda _, seconds: waits.append(("settled", seconds)))
    deadlines = RoundDeadlines(handler._limits, settings.timeout)
    others = tuple(f"n{number}" for number in range(count - 1))
    handler._wait(State(participants=(*others, handler.node)), deadlines)
    handler._wait(State(participants=(handler.node, *others)), deadlines)
    handler._wait(State(participants=others, waiting=(handler.node,)), deadlines)
    assert waits == [("settled", longest), ("change", 1.0), ("change", 1.0)]
    handler.shutdown()
