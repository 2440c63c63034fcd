"""Trials of Optuna whose processes are killed are failed by the next worker; those of living processes are not."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage, fail_stale_trials
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState
from with_packages.optuna_processes import in_child, start

from fscoord import HashStore, StoreError
from fscoord.integrations.optuna import FscoordJournalBackend, FscoordJournalStorage

pytestmark = [
    pytest.mark.packages,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings(
        "ignore:RetryFailedTrialCallback has been deprecated:FutureWarning"
    ),  # the only name in Optuna 4.7
    pytest.mark.filterwarnings("ignore:Heartbeat of storage is supposed to be used:UserWarning"),
]

optuna.logging.set_verbosity(optuna.logging.WARNING)

RUNNING, WAITING, FAIL, COMPLETE = TrialState.RUNNING, TrialState.WAITING, TrialState.FAIL, TrialState.COMPLETE

Opened = Callable[..., FscoordJournalStorage]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


@pytest.fixture
def opened(path: str) -> Iterator[Opened]:
    """Give `opened(...)`: a new storage on the same journal, which is closed at the end."""
    backends: list[FscoordJournalBackend] = []

    def open_storage(kind: Callable[..., Any] = FscoordJournalStorage, **options: Any) -> Any:
        backends.append(FscoordJournalBackend(path))
        return kind(backends[-1], **options)

    yield open_storage
    for backend in backends:
        backend.close()


def study_of(storage: Any) -> optuna.Study:
    sampler = optuna.samplers.RandomSampler()
    return optuna.create_study(study_name="s", storage=storage, sampler=sampler, load_if_exists=True)


def states(storage: Any) -> list[TrialState]:
    return [trial.state for trial in storage.get_all_trials(0)]


class Running:
    """A child that runs one trial of `study.optimize` until `go_on`. It is killed at the end of the ``with``."""

    def __init__(self, path: str, kind: Callable[..., Any] = FscoordJournalStorage) -> None:
        started, started_w = os.pipe()
        self._go_on_r, self._go_on = os.pipe()

        def body() -> None:
            def objective(trial: Trial) -> float:
                x = trial.suggest_float("x", -1, 1)
                os.write(started_w, b"x")
                os.read(self._go_on_r, 1)
                return x

            study_of(kind(FscoordJournalBackend(path))).optimize(objective, n_trials=1)

        self.pid: int | None = start(body)
        os.close(started_w)
        assert os.read(started, 1) == b"x", "the worker has ended"
        os.close(started)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid is not None:
            self.kill()
        os.close(self._go_on_r)
        os.close(self._go_on)

    def kill(self) -> None:
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = None

    def stop(self) -> None:
        assert self.pid is not None
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def finish(self) -> int:
        """Let the trial end, and return the exit code of the process."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGCONT)
        os.write(self._go_on, b"x")
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = None
        return code


def test_trial_of_a_killed_process_is_failed_before_the_next_trial(path: str, opened: Opened) -> None:
    storage = opened()
    study = study_of(storage)
    with Running(path) as worker:
        study.optimize(lambda _: 1.0, n_trials=1)
        assert states(storage) == [RUNNING, COMPLETE]
        worker.kill()
    seen = []

    def objective(_: Trial) -> float:
        seen.extend(states(storage))
        return 1.0

    study.optimize(objective, n_trials=1)
    assert seen == [FAIL, COMPLETE, RUNNING]
    assert storage.get_trial(0).params, "the trial keeps its parameters"


def test_trial_of_a_stopped_process_goes_on(path: str, opened: Opened) -> None:
    storage = opened()
    study = study_of(storage)
    with Running(path) as worker:
        worker.stop()
        study.optimize(lambda _: 1.0, n_trials=2)
        assert states(storage) == [RUNNING, COMPLETE, COMPLETE]
        assert worker.finish() == 0
    assert states(storage) == [COMPLETE] * 3


def test_trial_of_another_thread_of_a_living_process_stays(opened: Opened) -> None:
    storage, other = opened(), opened()
    study = study_of(storage)
    begun, go_on = threading.Event(), threading.Event()

    def objective(_: Trial) -> float:
        begun.set()
        assert go_on.wait(60)
        return 1.0

    thread = threading.Thread(target=study.optimize, args=(objective,), kwargs={"n_trials": 1})
    thread.start()
    try:
        assert begun.wait(60)
        for each in (storage, other):
            fail_stale_trials(study_of(each))
            assert states(each) == [RUNNING]
    finally:
        go_on.set()
        thread.join()
    assert states(other) == [COMPLETE]


def test_trial_is_enqueued_once_if_two_workers_find_it(
    path: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    retry = optuna.storages.RetryFailedTrialCallback(max_retry=1)
    one, two = opened(failed_trial_callback=retry), opened(failed_trial_callback=retry)
    with Running(path) as worker:
        worker.kill()
    find = one._get_stale_trial_ids

    def find_and_be_late(study_id: int) -> list[int]:
        found = find(study_id)
        fail_stale_trials(study_of(two))
        return found

    monkeypatch.setattr(one, "_get_stale_trial_ids", find_and_be_late)
    fail_stale_trials(study_of(one))
    assert states(one) == states(two) == [FAIL, WAITING]
    assert one.get_trial(1).params == one.get_trial(0).params


def test_trial_of_the_queue_belongs_to_the_process_that_took_it(path: str, opened: Opened) -> None:
    """The entry of a worker that came too late does not change the owner."""
    storage, late = opened(), opened()
    study_of(storage).enqueue_trial({"x": 0.5})
    late._sync_with_backend()
    with Running(path) as worker:
        log = {"trial_id": 0, "state": RUNNING, "values": None, "datetime_start": "2026-01-01T00:00:00+00:00"}
        late._write_log(6, log)
        fail_stale_trials(study_of(storage))
        assert states(storage) == [RUNNING]
        worker.kill()
    fail_stale_trials(study_of(storage))
    assert states(storage) == [FAIL]


def test_trials_of_another_study_are_left_alone(path: str, opened: Opened) -> None:
    storage = opened()
    other = optuna.create_study(study_name="other", storage=storage)
    with Running(path) as worker:
        worker.kill()
    fail_stale_trials(other)
    assert [trial.state for trial in storage.get_all_trials(1)] == [RUNNING]
    fail_stale_trials(study_of(storage))
    assert [trial.state for trial in storage.get_all_trials(1)] == [FAIL]


def test_forked_child_runs_trials_in_a_session_of_its_own(opened: Opened) -> None:
    storage = opened()
    study = study_of(storage)
    mine = study.ask()
    assert in_child(lambda: study.ask() and None) == 0
    fail_stale_trials(study)
    assert states(storage) == [RUNNING, FAIL]
    study.tell(mine, 1.0)


def test_trial_of_a_plain_journal_storage_stays(path: str, opened: Opened) -> None:
    storage = opened()
    with Running(path, JournalStorage) as worker:
        worker.kill()
    fail_stale_trials(study_of(storage))
    assert states(storage) == [RUNNING]


@pytest.mark.parametrize("saver", [FscoordJournalStorage, JournalStorage])
def test_storage_that_begins_with_a_snapshot_knows_the_owners(
    saver: type, path: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna.storages.journal._storage, "SNAPSHOT_INTERVAL", 3)
    first = opened(saver)
    study = study_of(first)
    with Running(path) as worker:
        study.optimize(lambda _: 1.0, n_trials=4)
        worker.kill()
    assert first._backend.load_snapshot() is not None
    storage = opened()
    fail_stale_trials(study_of(storage))
    assert states(storage) == [FAIL] + [COMPLETE] * 4


def test_plain_storage_does_not_write_for_the_session_of_its_snapshot(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna.storages.journal._storage, "SNAPSHOT_INTERVAL", 1)
    saver = opened()
    study_of(saver).optimize(lambda _: 1.0, n_trials=2)
    plain = opened(JournalStorage)
    assert plain._replay_result.log_number_read > 0
    trial = study_of(plain).ask()
    saver._backend.close()
    storage = opened()
    fail_stale_trials(study_of(storage))
    assert storage.get_trial(trial._trial_id).state == RUNNING


def test_unpickled_storage_has_a_session_of_its_own(opened: Opened) -> None:
    storage = opened(failed_trial_callback=optuna.storages.RetryFailedTrialCallback())
    study_of(storage).ask()
    copy = pickle.loads(pickle.dumps(storage))
    with copy._backend:
        study_of(copy).ask()
    fail_stale_trials(study_of(storage))
    assert states(storage) == [RUNNING, FAIL, WAITING]


def test_store_that_detects_no_deaths_is_refused(tmp_path: Path) -> None:
    with HashStore() as store, pytest.raises(StoreError, match=r"can't detect the death .* use a FileStore"):
        FscoordJournalStorage(FscoordJournalBackend(store))
    with pytest.raises(TypeError, match="must be a FscoordJournalBackend, not JournalFileBackend"):
        FscoordJournalStorage(JournalFileBackend(str(tmp_path / "j")))  # type: ignore[arg-type]
