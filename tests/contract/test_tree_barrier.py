"""`tree_barrier`: ranks in groups, each with a log of its own, and their representatives in the root."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contract.worker import Workers, start, tree, work
from support.places import ETCD, HANG_S, Place, start_thread
from support.third_party import place_of

from fscoord.collectives import tree_barrier
from fscoord.errors import BarrierError, StoreTimeoutError, UsedBeforeError
from fscoord.status import status
from fscoord.store import Store
from fscoord.stores.prefix import PrefixStore

SIZE = 3


@pytest.fixture(params=["hash", "third-party", "file-ofd", "nested-file", ETCD])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = place_of(request.param, str(tmp_path))
    yield place
    place.close()


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Place]:
    """A place in which processes open the log of their group, and the root, beside the log of the place."""
    place = Place("file-ofd", str(tmp_path))
    yield place
    place.close()


def come(store: Store, rank: int, world_size: int, timeout: float = HANG_S, group_size: int = 2) -> None:
    tree_barrier(store, store, rank, world_size, group_size, "t", timeout, trace_timeout=0)


def come_in_vain(store: Store, rank: int, world_size: int, group_size: int = 2) -> StoreTimeoutError:
    with pytest.raises(StoreTimeoutError) as caught:
        come(store, rank, world_size, 0, group_size)
    return caught.value


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_ranks_pass_after_all_have_come(place: Place, world_size: int) -> None:
    begun: set[int] = set()

    def run(rank: int) -> int:
        stores = place.open(how="clone"), PrefixStore("root", place.open(how="clone"))
        begun.add(rank)
        tree_barrier(*stores, rank, world_size, 2, "t", HANG_S)
        return len(begun)

    threads = [start_thread(run, rank) for rank in range(world_size)]
    assert [thread.join() for thread in threads] == [world_size] * world_size


def test_groups_may_share_one_store(store: Store) -> None:
    for rank in (1, 3, 0):
        come_in_vain(store, rank, 4)
    come(store, 2, 4)
    for rank in (0, 1, 3):  # each may call again, because its call timed out
        come(store, rank, 4)


def test_time_out_names_the_missing_ranks_of_all_groups(store: Store) -> None:
    assert come_in_vain(store, 5, 8).missing_ranks == ("4", "0 to 1, or some of them", "2 to 3, or some of them", *LAST)
    assert come_in_vain(store, 2, 8).missing_ranks == ("3", "0 to 1, or some of them", "4", *LAST)
    come_in_vain(store, 1, 8)
    error = come_in_vain(store, 0, 8)
    assert error.missing_ranks == ("3", "4", *LAST)
    assert "on rank 0, for key prefix: t (world_size=8, group_size=2, missing_ranks=[3, 4, 6 to 7, or" in str(error)


LAST = ("6 to 7, or some of them",)


def test_group_waits_for_its_representative_to_come_again(store: Store) -> None:
    come_in_vain(store, 2, 4)
    come_in_vain(store, 0, 4)
    come_in_vain(store, 1, 4)
    error = come_in_vain(store, 3, 4)  # the call of rank 2 ended before rank 3 came
    assert error.missing_ranks[0] == "2"


def test_message_names_no_more_than_16_ranks(store: Store) -> None:
    error = come_in_vain(store, 0, 40, 40)
    assert error.missing_ranks == tuple(map(str, range(1, 17)))
    assert "16 and 23 more]" in str(error)


def test_second_use_of_a_key_is_refused(store: Store) -> None:
    come_in_vain(store, 1, 2)
    come(store, 0, 2)
    come(store, 1, 2)
    for rank in (0, 1):
        with pytest.raises(UsedBeforeError, match="used before"):
            come(store, rank, 2)


def test_groups_that_disagree_about_the_world_size_are_refused(store: Store) -> None:
    come_in_vain(store, 1, 4)
    come_in_vain(store, 0, 4)
    for rank, timeout in ((3, 0), (2, HANG_S), (3, HANG_S)):  # the last call gets the error of the representative
        with pytest.raises(BarrierError, match=r"world_size=6 and group_size=2.*disagree"):
            come(store, rank, 6, timeout)
    for rank in (0, 1):
        with pytest.raises(BarrierError, match=r"world_size=4 and group_size=2.*disagree"):
            come(store, rank, 4)


def test_ranks_of_a_group_that_disagree_about_its_size_are_refused(store: Store) -> None:
    come_in_vain(store, 1, 4)
    with pytest.raises(BarrierError, match=r"world_size=4 and group_size=4.*disagree"):
        come(store, 3, 4, group_size=4)
    with pytest.raises(BarrierError, match="disagree"):
        come(store, 0, 4, group_size=4)
    with pytest.raises(BarrierError, match="disagree"):
        come(store, 1, 4)


@pytest.mark.parametrize(
    ("arguments", "error"), [((2, 2, 1), BarrierError), ((-1, 2, 1), BarrierError), ((0, 2, 0), ValueError)]
)
def test_bad_ranks_and_sizes_are_refused(store: Store, arguments: tuple[int, int, int], error: Any) -> None:
    with pytest.raises(error):
        tree_barrier(store, store, *arguments, "t")
    with pytest.raises(TypeError, match="store"):
        tree_barrier(store, "path", 0, 1, 1, "t")  # type: ignore[arg-type]


# -- processes ---------------------------------------------------------------------------------------------------------


def test_processes_meet_in_trees(logs: Place) -> None:
    arguments = [[rank, 5, 2, 10] for rank in range(5)]
    assert work(logs.open(), logs.spec(), "tree_barriers", arguments) == [None] * 5


def test_processes_name_the_missing_ranks_of_all_groups(logs: Place) -> None:
    ranks = (0, 1, 2, 3, 5, 6)
    arguments = [[rank, 8, SIZE, len(ranks), -1] for rank in ranks]
    for message, missing, dead in work(logs.open(), logs.spec(), "time_out_in_tree", arguments):
        assert sorted(missing) == ["4", "7"], message
        assert dead == []


@pytest.mark.parametrize("dies", [4, 3], ids=["rank", "representative"])
def test_processes_name_the_dead_rank_of_a_group(logs: Place, dies: int) -> None:
    store = logs.open()
    with Workers(logs.spec(), "time_out_in_tree", [[rank, 6, SIZE, 5, dies] for rank in range(6)]) as workers:
        start(store, 6)
        store.wait(["dies"])
        victim = workers.processes.pop(dies)
        victim.kill()
        victim.communicate(timeout=HANG_S)
        store.set("killed", "1")
        for message, missing, dead in workers.results():
            assert (missing, dead) == ([str(dies)], [str(dies)]), message
            assert f"; dead: rank {dies} (" in message


@pytest.mark.parametrize("last", ["arrive", "meet"])
@pytest.mark.parametrize("rank", [3, 0])
def test_replaced_representative_releases_its_group(logs: Place, last: str, rank: int) -> None:
    store = logs.open()
    others = [[other, 6, SIZE, 1] for other in range(6) if other != rank]
    with (
        Workers(logs.spec(), "tree_barriers", others) as living,
        Workers(logs.spec(), "stop_in_tree", [[rank, 6, SIZE, last]]) as dying,
    ):
        start(store, 6)
        store.wait(["stopped"])
        dying.processes[0].kill()
        dying.processes[0].communicate(timeout=HANG_S)
        with Workers(logs.spec(), "tree_barriers", [[rank, 6, SIZE, 1]]) as again:
            assert again.results() == [None]
        assert living.results() == [None] * 5


def kill_in_wait(store: Any, workers: Workers) -> None:
    await_release_wait(store, workers)
    (process,) = workers.processes
    process.kill()
    process.communicate(timeout=HANG_S)


def await_release_wait(store: Any, workers: Workers) -> None:
    """Return when the only process of `workers` is shown waiting for the release of group 1."""
    (process,) = workers.processes
    deadline = time.monotonic() + HANG_S
    while True:
        participants = status(f"{store.path}-group-1").picture.participants
        waits = {each.pid: each.waiting for each in participants}
        wait = waits.get(process.pid)
        if wait is not None and "t0/group/1/released" in wait.keys:
            return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, waits


@pytest.mark.parametrize("last", [5, 0], ids=["group incomplete", "group complete"])
def test_rank_killed_in_its_wait_and_restarted_passes(logs: Place, last: int) -> None:
    store, killed = logs.open(), 4

    def come(*ranks: int) -> Workers:
        return Workers(logs.spec(), "tree_barriers", [[rank, 6, SIZE, 1] for rank in ranks])

    with (
        tree(store, killed, SIZE) as (group, _),
        come(*sorted({0, 1, 2, 3, 5} - {last})) as others,
        come(killed) as dying,
    ):
        start(store, 5)
        if last == 0:
            group.wait(["t0/group/1/complete"])
        kill_in_wait(store, dying)
        with come(killed) as again:
            await_release_wait(store, again)
            with come(last) as late:
                assert [*others.results(), *again.results(), *late.results()] == [None] * 6


def test_rank_killed_in_its_wait_and_restarted_after_the_release_is_refused(logs: Place) -> None:
    store, killed = logs.open(), 4

    def come(*ranks: int) -> Workers:
        return Workers(logs.spec(), "tree_barriers", [[rank, 6, SIZE, 1] for rank in ranks])

    with tree(store, killed, SIZE) as stores:
        with come(1, 2, 3, 5) as others, come(killed) as dying:
            start(store, 5)
            kill_in_wait(store, dying)
            with come(0) as late:  # all pass, because the killed process had arrived
                assert [*others.results(), *late.results()] == [None] * 5
        with pytest.raises(UsedBeforeError, match="rank 4 arrived at 't0'"):
            tree_barrier(*stores, killed, 6, SIZE, "t0", HANG_S)
