"""Process groups at one ``fscoord://`` URL, one after another: each rank is a process, which a test leads by steps."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.places import HANG_S, until
from support.torch_ranks import Rank, Refused, meet, meet_and_part, number_of_descriptors, part, ranks, use_store, work

from fscoord import FileStore, StoreError

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

SHORT_S = 0.5


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    with ranks(str(tmp_path / "store")) as begin:
        yield begin


def all_meet(processes: list[Rank], *more: object) -> None:
    """Let the processes, whose ranks are their places in the list, make one group together and destroy it."""
    size = len(processes)
    for rank, process in enumerate(processes):
        process.begin(meet_and_part, rank, size, *more)
    assert [process.result() for process in processes] == [size * (size - 1) // 2] * size


def refused(process: Rank, *call: object) -> Refused:
    with pytest.raises(Refused) as caught:
        process.call(*call)
    return caught.value


def wait_until_joined(path: Path, group: str, rank: int) -> None:
    def has_joined() -> bool:
        try:
            with FileStore(path, read_only=True, timeout=HANG_S) as store:
                return store.check([f"fscoord/torch/{group}/fscoord/rank/{rank}"])
        except StoreError:  # there is no store yet, or another run has begun
            return False

    until(has_joined)


def test_groups_one_after_another_at_one_url_meet(start: Callable[..., Rank]) -> None:
    processes = [start(), start()]
    for _ in range(4):
        all_meet(processes)
    for process in processes:
        process.end()


def test_groups_that_shrink_and_grow_back_meet(start: Callable[..., Rank]) -> None:
    """A process that has left gives its rank to another one."""
    first, second, third = start(), start(), start()
    all_meet([first, second, third])
    all_meet([third, first])
    all_meet([first, second, third])
    all_meet([second, third, first])
    all_meet([first, third])


def test_groups_use_no_more_descriptors_each_time(start: Callable[..., Rank]) -> None:
    """The first wait that sleeps opens some, once: fewer than there are groups."""
    processes = [start(), start()]
    used = []
    for _ in range(9):
        all_meet(processes)
        used.append(processes[0].call(number_of_descriptors))
    assert used[-1] - used[0] < len(used) - 1, used


def test_call_repeated_after_one_without_all_ranks_meets(start: Callable[..., Rank]) -> None:
    first, second = start(), start()
    for _ in range(2):
        error = refused(first, meet, 0, 2, SHORT_S)
        assert (error.name, error.cause) == ("DistStoreError", "StoreTimeoutError")
        assert "missing_ranks=[1]" in error.message
    all_meet([first, second])
    assert "missing_ranks=[0]" in refused(second, meet, 1, 2, SHORT_S).message
    all_meet([first, second])


def test_rank_that_comes_after_a_failed_call_waits_for_its_repetition(start: Callable[..., Rank]) -> None:
    """The address of the failed call would lead it to a process that does not listen."""
    first, second = start(), start()
    refused(first, meet, 0, 2, SHORT_S)
    second.begin(meet, 1, 2)
    assert (first.call(meet, 0, 2), second.result()) == (1, 1)


def test_rank_that_waits_goes_on_to_the_next_group_with_a_rank_that_gave_up(start: Callable[..., Rank]) -> None:
    first, second, third = start(), start(), start()
    second.begin(meet, 1, 3)
    refused(first, meet, 0, 3, SHORT_S)
    third.begin(meet, 2, 3)
    assert (first.call(meet, 0, 3), second.result(), third.result()) == (3, 3, 3)


@pytest.mark.parametrize("by", ["URL", "environment"])
def test_rank_that_restarts_alone_in_a_run_with_an_id_is_refused(by: str, start: Callable[..., Rank]) -> None:
    query, job = ("?run_id=7", {}) if by == "URL" else ("", {"SLURM_JOB_ID": "7"})
    first, second, again = start(**job), start(**job), start(**job)
    all_meet([first, second], HANG_S, query)
    second.kill()
    error = refused(again, meet, 1, 2, SHORT_S, query)
    assert (error.name, error.cause) == ("DistStoreError", "UsedBeforeError")
    host = socket.gethostname()
    assert f"rank 1 is already taken by process {host}:{second.pid}, which has ended. The other ranks" in error.message


def test_rank_that_restarts_with_an_id_meets_the_others_in_their_next_group(start: Callable[..., Rank]) -> None:
    job = {"SLURM_JOB_ID": "7"}
    first, second, again = start(**job), start(**job), start(**job)
    all_meet([first, second])
    second.kill()
    refused(first, meet, 0, 2, SHORT_S)
    all_meet([first, again])


def test_rank_that_restarts_alone_without_an_id_begins_a_run_in_which_all_meet(start: Callable[..., Rank]) -> None:
    first, second, again = start(), start(), start()
    first.begin(meet, 0, 2)
    assert (second.call(meet, 1, 2), first.result()) == (1, 1)
    second.kill()
    assert "missing_ranks=[0]" in refused(again, meet, 1, 2, SHORT_S).message
    error = refused(first, use_store)
    assert (error.name, error.cause) == ("DistStoreError", "StaleRunError")
    assert "rank 1" in error.message
    assert "was found dead" in error.message
    first.call(part)
    all_meet([first, again])


def test_survivor_that_waits_in_the_next_group_is_told_of_the_new_run(
    start: Callable[..., Rank], tmp_path: Path
) -> None:
    first, second, again = start(), start(), start()
    all_meet([first, second])
    second.kill()
    first.begin(meet, 0, 2)
    wait_until_joined(tmp_path / "store", "2/2", 0)
    refused(again, meet, 1, 2, SHORT_S)
    with pytest.raises(Refused) as caught:
        first.result()
    assert (caught.value.name, caught.value.cause) == ("DistStoreError", "StaleRunError")
    all_meet([first, again])


def test_process_takes_the_rank_of_one_that_has_left_in_good_order(start: Callable[..., Rank]) -> None:
    """A driver stays, and its worker of each job is a new process. Either may be first."""
    driver = start()
    for is_first in (True, False, True):
        worker = start()
        early, late = ((driver, 0), (worker, 1)) if is_first else ((worker, 1), (driver, 0))
        early[0].begin(meet_and_part, early[1], 2)
        late[0].begin(meet_and_part, late[1], 2)
        assert (driver.result(), worker.result()) == (1, 1)
        worker.end()


# -- a second launch with the same path --------------------------------------------------------------------------------


def test_launch_meets_at_the_path_of_one_that_has_left_in_good_order(
    start: Callable[..., Rank], tmp_path: Path
) -> None:
    with FileStore(tmp_path / "store") as before:
        before.set("written before the launch", "1")
    for _ in range(2):
        processes = [start(), start()]
        all_meet(processes)
        for process in processes:
            process.end()
        assert not (tmp_path / "store").exists()


def test_launch_without_an_id_meets_at_the_path_of_one_that_was_killed(start: Callable[..., Rank]) -> None:
    """torch's ``file://`` has the addresses of the killed processes."""
    for _ in range(3):
        processes = [start(), start()]
        all_meet(processes)
        for process in processes:
            process.kill()


def test_job_that_was_killed_and_restarted_meets_at_the_path(start: Callable[..., Rank]) -> None:
    for count in range(3):
        processes = [start(SLURM_JOB_ID="4711", SLURM_RESTART_COUNT=str(count)) for _ in range(2)]
        all_meet(processes)
        for process in processes:
            process.kill()


@pytest.mark.parametrize("by", ["URL", "URL with a count", "environment"])
def test_late_rank_joins_only_its_own_launch(by: str, start: Callable[..., Rank], tmp_path: Path) -> None:
    queries = {"URL": "?run_id=launch%20{}", "URL with a count": "?run_id=job&restart={}", "environment": ""}

    def begin(launch: int, rank: int) -> Rank:
        job = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(launch)} if by == "environment" else {}
        return start(**job).begin(meet, rank, 2, HANG_S, queries[by].format(launch))

    waiting = begin(0, 0)
    wait_until_joined(tmp_path / "store", "2/1", 0)
    first, late = begin(1, 0), begin(1, 1)
    assert (first.result(), late.result()) == (1, 1)
    for stale in (waiting, begin(0, 1)):
        with pytest.raises(Refused) as caught:
            stale.result()
        assert (caught.value.name, caught.value.cause) == ("DistStoreError", "StaleRunError")


@pytest.mark.parametrize("query", ["", "?run_id=x"])
def test_rank_of_a_process_that_lives_is_refused_to_another_one(query: str, start: Callable[..., Rank]) -> None:
    first, second, third = start(), start(), start()
    all_meet([first, second], HANG_S, query)
    error = refused(third, meet, 1, 2, HANG_S, query)
    assert (error.name, error.cause) == ("DistStoreError", "UsedBeforeError")
    assert f"rank 1 is already taken by {socket.gethostname()}:{second.pid}, which is alive" in error.message
    all_meet([first, second], HANG_S, query)


# -- what torch does with a group --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["store", "url"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_process_group_on_gloo_runs_on_a_torch_store(how: str, world_size: int, start: Callable[..., Rank]) -> None:
    processes = [start().begin(work, how, rank, world_size) for rank in range(world_size)]
    assert [process.result() for process in processes] == [None] * world_size
    for process in processes:
        process.end()
