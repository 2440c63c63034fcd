"""Starts of one job at one path, and the next: a process never reads what a failed start has written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of
from support.processes import Processes, let_go, stop

from fscoord import FileStore, StaleRunError, StoreGoneError, StoreTimeoutError, UsedBeforeError
from fscoord.inspect import dump

HANG_S = 60


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "job.store")


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes("participant") as started:
        yield started


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def rest(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what else the process prints, after it has ended. (`communicate` drops what `readline` has buffered.)"""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.close()
    said = process.stdout.read(), process.stderr.read()
    process.wait(timeout=HANG_S)
    return said


def signalled(process: subprocess.Popen[str], end: str) -> None:
    """Send the signal that `end` is named for, if it is; and wait until the process is gone."""
    number = {"SIGKILL": signal.SIGKILL, "SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(end)
    if number is not None:
        process.send_signal(number)
    rest(process)


class Job:
    """Starts of a job of two ranks at one path; each process writes the number of its start."""

    def __init__(self, processes: Processes, path: str, **environment: str) -> None:
        self._processes, self._path, self.environment = processes, path, environment

    def open(self, run: int, rank: int, end: str, *options: str, size: int = 2) -> tuple[subprocess.Popen[str], str]:
        """Start a process, and return it with what it found, or its error, when it is ready to end."""
        waits = end if not end.startswith("SIG") else "wait"
        arguments = (self._path, str(run), str(rank), str(size), waits, *options)
        process = self._processes.start(*arguments, **self.environment)
        found = line(process)
        if found.startswith("found"):
            assert line(process) == "ready"
        return process, found

    def end(self, run: int, rank: int, end: str, *options: str, size: int = 2) -> str:
        """Start a process that ends like that, wait until it has ended, and return what it found or its error."""
        process, found = self.open(run, rank, end, *options, size=size)
        signalled(process, end)
        return found


@pytest.fixture
def job(processes: Processes, path: str) -> Job:
    return Job(processes, path)


# -- one participant ends, and another opens


FAILED = [
    "raise", "finally:raise", "unclosed:raise", "exit1", "unclosed:SIGINT", "SIGINT", "SIGKILL", "SIGTERM", "os._exit",
    "execv", "fork:raise", "spawn:raise", "forkserver:raise", "fork:os._exit", "fork:exit1",
]  # fmt: skip
LEFT = [
    "good", "exit0", "finally:good", "unclosed:good", "generator", "handled", "fork:good", "spawn:good",
    "forkserver:good", "fork:exit0", "inherited", "clone",
]  # fmt: skip


@pytest.mark.parametrize("end", FAILED)
def test_next_participant_begins_a_new_run_after_a_failure(end: str, job: Job) -> None:
    way, _, rest = end.rpartition(":")
    if rest.startswith("SIG"):
        process, _ = job.open(1, 0, f"{way}:wait" if way else rest)
        signalled(process, rest)
    else:
        job.end(1, 0, end)
    assert job.end(2, 1, "good") == "found"


@pytest.mark.parametrize("end", LEFT)
def test_ranks_that_leave_in_good_order_one_after_another_share_a_run(end: str, job: Job) -> None:
    job.end(1, 0, end)
    found = job.end(1, 1, "good").split()
    assert found[-2:] == ["rank", "0"], found
    assert job.end(2, 0, "good") == "found", "all have left, so the next start is another run"


@pytest.mark.parametrize(
    ("survivor", "end", "named"),
    [("wait", "raise", "1"), ("wait", "SIGKILL", "0"), ("idle", "raise", "0"), ("idle", "SIGKILL", "1")],
)
def test_survivor_of_a_failed_start_is_stale_and_never_met(survivor: str, end: str, named: str, job: Job) -> None:
    option = f"named={named}"
    lives, _ = job.open(1, 1, survivor, option)
    job.end(1, 0, end, option)
    process, found = job.open(2, 0, "exchange", option)
    assert found == "found"
    if survivor == "idle":
        assert lives.stdin is not None
        lives.stdin.write("go on\n")
        lives.stdin.flush()
    _, error = rest(lives)
    last = error.strip().splitlines()[-1]
    assert "StaleRunError" in last
    assert "a new start of the job" in last
    assert ("rank 0 (" in last) == (named == "1")
    assert ("left by KeyError" if end == "raise" else "was found dead") in last
    assert job.end(2, 1, "exchange", option).endswith("rank 0")
    assert rest(process)[0] == "read 2 2\n"


def test_order_of_the_ranks_does_not_matter(job: Job) -> None:
    """Start 1 forgets rank 0, and start 2 opens from the last rank to the first."""
    failed = [job.open(1, rank, "wait", size=3)[0] for rank in (2, 1)]
    signalled(failed[0], "SIGINT")
    for process, _ in [job.open(2, rank, "exchange", size=3) for rank in (2, 1, 0)]:
        assert rest(process) == ("read 2 2 2\n", "")
    assert "StaleRunError" in rest(failed[1])[1]


def test_rank_that_comes_late_to_a_failed_start_times_out_alone_and_says_why(job: Job, path: str) -> None:
    job.end(1, 0, "raise")
    with FileStore(path, 2, rank=1, timeout=0.2) as late, pytest.raises(StoreTimeoutError) as caught:
        late.get("rank 0")
    assert "the start before this one ended because rank 0 (" in str(caught.value)
    assert "left by KeyError at " in str(caught.value)


def test_first_participant_of_a_new_run_warns_once_that_data_are_discarded(
    path: str, caplog: pytest.LogCaptureFixture, job: Job
) -> None:
    job.end(1, 0, "SIGKILL")
    with FileStore(path, 2, rank=0), FileStore(path, 2, rank=1):
        pass
    (warning,) = [record.getMessage() for record in caplog.records if "the start before" in record.getMessage()]
    assert "ended because rank 0 (" in warning
    assert "was found dead at " in warning
    assert "discarded" in warning


def test_failure_is_kept_by_a_compaction_and_in_the_next_run_too(path: str, job: Job) -> None:
    job.end(1, 0, "raise")
    with FileStore(path) as tool:
        tool.compact()
        tool.compact()
        assert tool.get("rank 0") == b"1"
    with FileStore(path, 2, rank=0) as first, FileStore(path, 2, rank=1) as second:
        assert first.list_keys() == []
        second.compact()
        first.set("k", "v")
        with FileStore(path) as tool:
            assert str(log_of(tool).table.previous).startswith("rank 0 (")


# -- which handles are participants


@pytest.mark.parametrize("end", ["raise", "SIGKILL", "os._exit"])
def test_process_without_a_world_size_ends_nothing(end: str, job: Job) -> None:
    job.end(1, 0, "good")
    job.end(1, 9, end, size=0)
    assert job.end(1, 1, "good") == "found rank 0 rank 9"


def test_failed_run_stays_readable_for_those_that_are_not_participants(job: Job, path: str) -> None:
    job.end(1, 0, "raise")
    for options in ({}, {"read_only": True}, {"read_only": True, "world_size": 2}):
        with FileStore(path, **options) as store:
            assert store.get("rank 0") == b"1"
    assert [entry.kind for entry in dump(path)][-1] == "failure"


def test_handle_that_loses_its_byte_is_the_same_participant(path: str) -> None:
    with FileStore(path, 2, rank=0) as store:
        store.set("k", "1")
        log = log_of(store)
        log.liveness.lose()  # as when the file of the bytes was removed: see `Liveness.check_byte`
        log.handle.lock.session = 0
        store.set("k", "2")
        with FileStore(path, 2, rank=1) as other:
            assert other.get("k") == b"2"
            assert log_of(other).table.failure is None


# -- tokens


@pytest.mark.parametrize("by", ["run_id", "Slurm", "PBS", "torchrun"])
def test_token_decides_where_there_is_one(by: str, processes: Processes, path: str) -> None:
    def job_of(count: int) -> tuple[Job, list[str]]:
        environment = {
            "Slurm": {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(count)},
            "PBS": {"PBS_JOBID": f"{count}.host"},
            "torchrun": {"TORCHELASTIC_RUN_ID": f"job{count}"},
        }.get(by, {})
        return Job(processes, path, **environment), [f"run_id=job{count}"] if by == "run_id" else []

    job, options = job_of(0)
    job.end(1, 0, "SIGKILL", *options)
    assert job.end(1, 1, "raise", *options) == "found rank 0"
    assert job.end(1, 0, "good", *options) == "found rank 0 rank 1", "a rank may come again once its holder is dead"
    later, options = job_of(1)
    assert later.end(2, 0, "good", *options) == "found"


def test_start_without_a_token_reads_nothing_of_a_failed_start_with_one(job: Job) -> None:
    job.end(1, 0, "raise", "run_id=a")
    assert job.end(2, 0, "good") == "found"
    assert job.end(1, 1, "good", "run_id=a").startswith("StaleRunError")


WORKER = """
import os
from fscoord import FileStore, synchronize
rank, restart = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
with FileStore("job.store", 2, rank=rank, timeout=60) as store:
    if rank == int(restart):
        store.set("address", restart)
    if (rank, restart) == (1, "0"):
        raise SystemExit(5)
    print("read", *(each.decode() for each in synchronize(store, restart, rank, 2, "addresses/")), flush=True)
"""


def test_workers_that_the_launcher_restarts_begin_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    command = [sys.executable, "-m", "fscoord", "run", "--nproc-per-node", "2", "--max-restarts", "1", "worker.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert sorted(done.stdout.splitlines()) == ["[0] read 1 1", "[1] read 1 1"], done.stderr
    assert done.returncode == 0


# -- ranks and world sizes that contradict each other


def test_rank_of_a_living_participant_is_refused_with_its_holder(job: Job, path: str) -> None:
    holder, _ = job.open(1, 0, "wait")
    with pytest.raises(UsedBeforeError, match=rf"rank 0 is already taken by \S+:{holder.pid}, which is alive"):
        FileStore(path, 2, rank=0)
    with (
        FileStore(path, 2) as other,
        pytest.raises(UsedBeforeError, match=rf"already taken by \S+:{holder.pid}"),
    ):
        other.announce_rank(0)
    with FileStore(path, rank=0) as tool:
        assert tool.get("rank 0") == b"1"


def test_rank_of_a_stopped_participant_is_given_with_a_warning(
    job: Job, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    holder, _ = job.open(1, 0, "idle")  # one that waits may be stopped with the log's lock
    stop(holder.pid)
    with FileStore(path, 2, rank=0, timeout=HANG_S) as store:
        assert store.get("rank 0") == b"1"
    assert f"{holder.pid}, which is stopped. This process takes the same rank" in caplog.text


def test_process_may_open_its_rank_twice(path: str) -> None:
    with FileStore(path, 2, rank=0), FileStore(path, 2, rank=0) as again:
        again.set("k", "v")


@pytest.mark.parametrize(("rank", "size"), [(5, 2), (2, 2), (-1, 2), (-1, None)])
def test_rank_out_of_range_is_refused_and_makes_nothing(rank: int, size: Any, path: str) -> None:
    with pytest.raises(ValueError, match=rf"rank is {rank}, but ranks are (0 to 1|not negative)"):
        FileStore(path, size, rank=rank)
    assert not Path(path).exists()


def test_participants_with_another_world_size_are_refused_with_both_numbers(job: Job, path: str) -> None:
    job.open(1, 0, "wait", size=3)
    with pytest.raises(ValueError, match=r"world_size is 2 here, and rank 0 \(\S+\) has opened it with world_size=3"):
        FileStore(path, 2, rank=1)
    with FileStore(path) as tool, FileStore(path, -1) as other:
        assert tool.get("rank 0") == other.get("rank 0") == b"1"


# -- drawn at random


class Start:
    """One start of the job: which of its ranks are started, and what becomes of each."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.number, self.size = number, rng.randint(1, 3)
        self.ranks = list(range(self.size))
        rng.shuffle(self.ranks)
        self.ends = dict.fromkeys(self.ranks, "exchange")
        if rng.random() < 0.6:
            self.forgotten = rng.choice(self.ranks) if rng.random() < 0.4 and self.size > 1 else None
            victims = [rank for rank in self.ranks if rank != self.forgotten]
            if victims:
                how = ["raise", "exit1", "os._exit", "execv", "SIGKILL", "SIGINT", "unclosed:raise", "finally:raise"]
                self.ends[rng.choice(victims)] = rng.choice(how)
            if self.forgotten is not None:
                del self.ends[self.forgotten]

    @property
    def is_whole(self) -> bool:
        return list(self.ends.values()) == ["exchange"] * self.size


@pytest.mark.timeout(0)
def test_random_starts_read_only_what_they_wrote_themselves(
    job: Job, rng: random.Random, scale: Callable[[int], int]
) -> None:
    """Survivors of a broken start wait until a later one has begun, and must meet none of them. The last is whole."""
    survivors: list[tuple[Start, subprocess.Popen[str]]] = []
    named = rng.choice(["named=1", "named=0"])
    count = scale(8)
    for number in range(1, count + 1):
        start = Start(number, rng)
        if number == count:
            start.ends = dict.fromkeys(start.ranks, "exchange")
        opened = []
        for rank, end in start.ends.items():
            process, found = job.open(number, rank, end, named, "gated=1", size=start.size)
            assert found.startswith("found"), (found, number, start.ends)
            opened.append((end, process))
        for end, process in opened:
            if not end.startswith("SIG"):
                let_go(process)
        for end, process in opened:
            if end == "exchange" and start.is_whole:
                out, error = rest(process)
                assert out.split() == ["read", *[str(number)] * start.size], (out, error, number)
                assert process.returncode == 0
            elif end == "exchange":
                survivors.append((start, process))
            else:
                signalled(process, end)
        while survivors and survivors[0][0].number < number and (len(survivors) > 3 or rng.random() < 0.3):
            is_met_by_nobody(*survivors.pop(0))
    for each in survivors:
        is_met_by_nobody(*each)


def is_met_by_nobody(start: Start, process: subprocess.Popen[str]) -> None:
    out, error = rest(process)
    assert process.returncode != 0, (out, error)
    assert "read" not in out, (out, start.number, start.ends)
    assert any(kind.__name__ in error for kind in (StaleRunError, StoreGoneError)), error
