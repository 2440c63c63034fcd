"""Code that uses the integrations, checked by mypy and never run. Their packages are absent where it is checked."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from typing_extensions import assert_type

from fscoord import Store
from fscoord.events import Subscription
from fscoord.integrations import dask, filelock, jax, lightning, opentelemetry, optuna, tooz, torch


def journal(store: Store, path: Path) -> None:
    with optuna.FscoordJournalBackend(path, prefix=b"study", timeout=5) as backend:
        assert_type(backend, optuna.FscoordJournalBackend)
    optuna.FscoordJournalBackend(store, snapshots=False).append_logs([{"op_code": 0}])
    optuna.FscoordJournalBackend(3)  # type: ignore[arg-type]
    optuna.FscoordJournalStorage(backend, failed_trial_callback=lambda study, trial: print(study, trial))
    optuna.FscoordJournalStorage(store)  # type: ignore[arg-type]


def addresses(store: Store, path: Path) -> None:
    assert_type(dask.scheduler_address(store, timedelta(seconds=5)), str)
    assert_type(dask.scheduler_address(path, 5), str)
    assert_type(dask.FscoordBackend().get_address_host_port("/path"), tuple[str, int])
    print(dask.dask_setup, dask.dask_teardown)
    jax.initialize(store, rank=0, world_size=2, timeout=timedelta(seconds=5), restart_timeout=5)
    jax.initialize(path, heartbeat_timeout_seconds=5)
    assert_type(lightning.FscoordEnvironment(path, rank=0, world_size=2, timeout=5).main_port, int)
    print(jax.DETECTION_METHOD, torch.SCHEME)


def locks(store: Store, path: Path) -> None:
    with filelock.FsFileLock(path, timeout=5, store=store) as lock:
        print(lock.token)
    with filelock.FsReadWriteLock(path).read_lock():
        print(filelock.AsyncFsFileLock(path).token)
    print(filelock.AsyncFsReadWriteLock(path, timeout=5).lock_file)
    assert_type(opentelemetry.instrument(min_seconds=0.1), Subscription)
    print(tooz.FscoordDriver(b"member", None, {}), tooz.FscoordLock)
