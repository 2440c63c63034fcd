"""The waiter of a wait that has ended, which the next wait of the handle takes."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of, notifier_of, state_of, watcher_of

from fscoord import FileStore, StoreGoneError, StoreTimeoutError
from fscoord._log.wakeup import watcher as waiter
from fscoord._log.wakeup.watcher import Waiter
from fscoord._waiting.wait import KEYS, NOT_YET, WaitRequest
from fscoord.stores.file.waits import FileWait, condition_of

HANG_S = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[FileStore]:
    with FileStore(path, timeout=HANG_S) as store:
        yield store


def asleep(store: FileStore, key: bytes) -> tuple[FileWait[Any], Waiter]:
    """Return a wait for `key` of which a thread would sleep now, and its waiter."""
    notifier = notifier_of(store)
    request = WaitRequest(KEYS, [key], HANG_S)
    wait: FileWait[Any] = FileWait(
        notifier, condition_of(request, log_of(store), state_of(store), notifier, None), HANG_S
    )
    for _ in range(2):
        assert wait.look() is NOT_YET
    assert wait.max_sleep() > 0
    assert wait._waiter in watcher_of(store)._sleeping
    assert wait._waiter is not None
    return wait, wait._waiter


def test_sleep_with_a_waiter_that_is_used_again_begins_as_the_first_did(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiter, "SLOW_FIRST_S", 0.001)
    with pytest.raises(StoreTimeoutError):
        store.wait(["never"], 0.1)
    monkeypatch.setattr(waiter, "SLOW_FIRST_S", 50.0)
    wait, _ = asleep(store, b"a")
    assert 1 < wait.max_sleep() <= 50, "not as long as the last sleep of the wait before, nor twice as long"
    wait.close()


def test_second_close_of_a_wait_does_not_end_the_sleep_of_another(store: FileStore) -> None:
    """A signal handler interrupts the first, at its last step or one before."""
    notifier = notifier_of(store)
    keep_spare, discard_waiter = notifier.keep_spare, notifier.discard_waiter
    for step in ("keep_spare", "discard_waiter"):
        wait, its_waiter = asleep(store, b"a")

        def interrupt(waiter: Waiter, step: str = step) -> None:
            (keep_spare if step == "keep_spare" else discard_waiter)(waiter)
            raise KeyboardInterrupt

        setattr(notifier, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            wait.close()
        notifier.keep_spare, notifier.discard_waiter = keep_spare, discard_waiter  # type: ignore[method-assign]
        other, waiter_of_other = asleep(store, b"b")
        wait.close()
        assert waiter_of_other in watcher_of(store)._sleeping
        assert waiter_of_other in notifier._waiters
        other.close()
        assert its_waiter not in watcher_of(store)._sleeping


def test_waiter_of_an_outdated_watcher_is_not_used_again(store: FileStore) -> None:
    wait, its_waiter = asleep(store, b"a")
    wait.close()
    its_waiter.watcher.is_outdated = True
    other, waiter_of_other = asleep(store, b"b")
    assert waiter_of_other is not its_waiter
    assert not waiter_of_other.watcher.is_outdated
    other.close()
    notifier_of(store).keep_spare(its_waiter)
    assert list(notifier_of(store)._spare.values()) == [waiter_of_other]


def test_closed_store_keeps_no_waiter_and_so_no_descriptor(path: Path) -> None:
    store = FileStore(path, timeout=HANG_S)
    wait, its_waiter = asleep(store, b"a")
    wait.close()
    assert notifier_of(store)._spare
    watcher = weakref.ref(watcher_of(store))
    del wait, its_waiter
    store.close()
    gc.collect()
    assert watcher() is None


def test_wait_that_ends_after_the_store_was_closed_keeps_no_waiter(path: Path) -> None:
    store = FileStore(path, timeout=HANG_S)
    notifier = notifier_of(store)
    wait, its_waiter = asleep(store, b"a")
    watcher = its_waiter.watcher
    store.close()
    wait.close()
    assert not notifier._spare
    notifier._watcher = watcher  # as if `close` came after the comparison in `keep_spare`
    notifier.keep_spare(its_waiter)
    assert not notifier._spare
    notifier._watcher = None


def test_wait_after_the_handle_has_ended_makes_nothing(store: FileStore, path: Path) -> None:
    path.unlink()
    log_of(store).handle.path_checked_at = 0.0
    with pytest.raises(StoreGoneError):
        store.num_keys()
    assert notifier_of(store).new_waiter(math.inf) is None
    assert not Path(f"{path}.bell").exists()
