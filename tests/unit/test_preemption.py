"""Ranks that a scheduler preempts stop at the same step; and a job is requeued."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support.places import HANG_S, start_thread, until

from fscoord import FileStore, HashStore, preemption
from fscoord.errors import BrokenBarrierError, FscoordError, StoreTimeoutError, UsedBeforeError
from fscoord.preemption import Preemption, requeue
from fscoord.store import Store


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "LOOK_S", 0.01)


@pytest.fixture
def store() -> Store:
    return HashStore(timeout=HANG_S)


def steps_of(store: Store, rank: int, meet: Callable[[], object], signalled: int | None = None) -> int:
    """Make steps until the ranks stop, and return how many. A rank is signalled in its step `signalled`."""
    done = 0
    with Preemption(store, "p", rank, 3) as job:
        while not job.should_stop():
            done += 1
            meet()
            if done == signalled:
                job.request()
    return done


@pytest.mark.parametrize("in_step", [True, False], ids=["in step", "each at its own pace"])
@pytest.mark.parametrize("kind", ["hash", "file"])
def test_ranks_stop_at_the_same_step(store: Store, tmp_path: Path, in_step: bool, kind: str) -> None:
    """In step, a rank that waits for the counts would block the others if no thread gave their counts."""
    meet: Any = threading.Barrier(3).wait if in_step else lambda: None
    stores = [store if kind == "hash" else FileStore(tmp_path / "store", timeout=HANG_S) for _ in range(3)]
    signalled = [None, 3, None]
    threads = [start_thread(steps_of, each, rank, meet, signalled[rank]) for rank, each in enumerate(stores)]
    counts = [thread.join() for thread in threads]
    assert counts == [counts[0]] * 3
    assert counts[0] >= 3
    assert stores[0].get("p/requested").endswith(b":%d" % os.getpid())
    for each in stores:
        each.close()


def test_signal_requests_the_stop_and_its_handler_is_restored(store: Store) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with Preemption(store, "p", 0, 1, ["USR2"]) as job:
        assert not job.should_stop()
        signal.raise_signal(signal.SIGUSR2)
        until(job.should_stop)
        assert job.should_stop()
    assert signal.getsignal(signal.SIGUSR2) is before


def test_ranks_go_on_if_a_rank_has_finished_its_steps(store: Store) -> None:
    with Preemption(store, "p", 0, 2):
        pass
    with Preemption(store, "p", 1, 2) as job:
        job.request()
        assert not job.should_stop()
        until(lambda: store.check(["p/count/1"]))
        assert not any(job.should_stop() for _ in range(3))


def test_name_that_this_rank_has_used_is_refused(store: Store) -> None:
    with Preemption(store, "p", 0, 2):
        pass
    with pytest.raises(UsedBeforeError, match="rank 0 has used 'p' before"), Preemption(store, "p", 0, 2):
        pass


def outcome(job: Preemption) -> Exception | None:
    try:
        job.should_stop()
    except Exception as error:
        return error
    return None


def test_rank_that_died_is_an_error_that_names_it() -> None:
    class Bereaved(HashStore):
        def wait_alive(self, keys: Any, ranks: Iterable[int], timeout: Any = None) -> list[int]:
            return [0, 1]

    store = Bereaved()
    with Preemption(store, "p", 0, 3) as job:
        job.request()
        until(lambda: outcome(job))
        with pytest.raises(BrokenBarrierError, match="for 'p': ranks 1 ended before they gave") as caught:
            job.should_stop()
    assert (caught.value.missing, caught.value.dead) == (("1", "2"), ("1",))


def test_rank_that_gives_no_count_is_an_error_after_the_timeout(store: Store) -> None:
    with Preemption(store, "p", 0, 2, timeout=0.01) as job:
        job.request()
        until(lambda: outcome(job))
        with pytest.raises(StoreTimeoutError, match="'p/count/1'"):
            job.should_stop()


def test_error_of_the_body_comes_out_though_the_store_is_closed(store: Store) -> None:
    def fail() -> None:
        store.close()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Preemption(store, "p", 0, 1):
        fail()


def test_unknown_signal_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="SIGNONE"):
        Preemption(store, "p", 0, 1, ["NONE"])


# requeue


def scontrol(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (directory / "scontrol").write_text(f"#!/bin/sh\n{text}\n")
    (directory / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
    monkeypatch.delenv("SLURM_HET_JOB_ID", raising=False)


@pytest.mark.parametrize(("variables", "job"), [({}, "7"), ({"SLURM_HET_JOB_ID": "6"}, "6")], ids=["usual", "het"])
def test_job_is_requeued_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], job: str
) -> None:
    scontrol(tmp_path, monkeypatch, f'echo "$@" >> {tmp_path}/called')
    for name, value in {"SLURM_JOB_ID": "7", **variables}.items():
        monkeypatch.setenv(name, value)
    requeue()
    assert (tmp_path / "called").read_text() == f"requeue {job}\n"


def test_refusal_of_the_scheduler_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, "echo 'Requested operation is disabled' >&2; exit 1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(FscoordError, match="requeue 7 failed with exit code 1: Requested operation is disabled; the"):
        requeue()
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(FscoordError, match="SLURM_JOB_ID is not set"):
        requeue()
