"""A mutex in a ``with`` is released whenever a signal handler raises; on Python 3.14, too."""

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from fscoord._runtime import system
from fscoord._runtime.mutexes import Mutex, atomic


class HandlerError(Exception):
    """What a signal handler raises."""


class RaisingAt:
    """A profiler that raises at the `left`-th point at which CPython runs signal handlers."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, frame: object, event: str, function: object) -> None:
        if event in {"call", "c_return"}:
            self.left -= 1
            if self.left == 0:
                raise HandlerError


def is_free(mutex: Any) -> bool:
    """Whether another thread can acquire `mutex`."""
    found: list[bool] = []

    def look() -> None:
        found.append(mutex.acquire(blocking=False))
        if found[0]:
            mutex.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def enter(mutex: Any, entered: list[str]) -> None:
    with mutex:
        entered.append("")


@pytest.mark.parametrize("make", [system.mutex, system.recursive_mutex])
def test_mutex_is_free_after_an_interruption_at_any_point_of_a_with(make: Callable[[], Any]) -> None:
    points = 0
    while True:
        mutex, profiler = make(), RaisingAt(points + 1)
        sys.setprofile(profiler)
        try:
            enter(mutex, [])
        except HandlerError:
            pass
        finally:
            sys.setprofile(None)
        assert is_free(mutex), f"at point {points + 1}"
        if profiler.left > 0:
            break
        points += 1
    assert points >= 3  # `enter`, the call of `append`, the end of the block


@pytest.fixture
def handler() -> Iterator[None]:
    def fail(number: int, frame: object) -> None:
        raise HandlerError

    before = signal.signal(signal.SIGUSR1, fail)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_handler_that_runs_after_the_acquisition_runs_in_the_block(handler: None) -> None:
    exits: list[tuple[object, ...]] = []
    # Instead of a lock: `acquire` is a C function, during which a signal arrives.
    arrive = partial(ctypes.pythonapi.PyErr_SetInterruptEx, int(signal.SIGUSR1))
    mutex = Mutex(SimpleNamespace(acquire=arrive, release=None, __exit__=lambda *error: exits.append(error)))
    with pytest.raises(HandlerError):
        enter(mutex, [])
    assert [error[0] for error in exits] == [HandlerError]


@pytest.mark.parametrize("lock", [threading.Lock(), threading.RLock()])
def test_mutex_acquires_and_releases_its_lock(lock: Any) -> None:
    mutex = Mutex(lock)
    with mutex:
        assert not is_free(lock)
    assert is_free(lock)
    assert mutex.acquire(timeout=1)
    assert not is_free(mutex)
    mutex.release()
    assert is_free(mutex)


def test_lock_that_is_written_in_python_is_no_mutex() -> None:
    class Lock:
        def __enter__(self) -> None: ...

    lock = Lock()
    assert atomic(lock) is lock
