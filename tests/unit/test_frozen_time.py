"""A test of the program that stops the clocks of Python, as freezegun does, stops no deadline of the package."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support.internals import system
from support.places import HANG_S, start_thread

from fscoord import FileStore, HashStore, Store, StoreTimeoutError
from fscoord.recipes import Lock

CLOCKS = ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns")
OPENERS: dict[str, Callable[[Path], Store]] = {
    "file": lambda path: FileStore(path, timeout=HANG_S),
    "polling": lambda path: FileStore(path, timeout=HANG_S, watch="poll"),
    "hash": lambda path: HashStore(timeout=HANG_S),
}


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace each clock in the module `time` and wherever the package has it as a module attribute."""
    fakes = {id(getattr(time, name)): getattr(time, name)() for name in CLOCKS}
    modules = [sys.modules["time"], *(module for name, module in sys.modules.items() if name.startswith("fscoord"))]
    with monkeypatch.context() as patch:
        for module in modules:
            for name, value in list(vars(module).items()):
                if id(value) in fakes:
                    patch.setattr(module, name, partial(float, fakes[id(value)]))
        yield


@pytest.mark.parametrize("kind", OPENERS)
def test_wait_ends_at_its_deadline_while_the_clocks_of_python_stand_still(
    kind: str, tmp_path: Path, frozen: None
) -> None:
    with OPENERS[kind](tmp_path / "store") as store:

        def wait() -> None:
            with pytest.raises(StoreTimeoutError):
                store.wait(["never"], 0.1)
            with Lock(store, "l"):
                assert not Lock(store, "l").acquire(timeout=0.1)

        waiter = start_thread(wait)
        try:
            waiter.join()
        finally:
            store.set("never", "")


def test_pause_is_that_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of green threads may replace it after the import of the package."""
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    system.time.sleep(7)
    assert naps == [7]
