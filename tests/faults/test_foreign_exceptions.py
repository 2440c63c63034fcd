"""A signal handler that raises a built-in exception in the middle of a call: it comes out as it is, wherever it came.

`TimeoutError` is the usual one for SIGALRM, and it is an `OSError`; `ValueError` is what decoders used to raise.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults.test_signals import KINDS, OPERATIONS, Pair, descriptors, pair
from support.combining import HANG_S, Seat, share
from support.internals import log_of, watcher_of
from support.interrupts import At

from fscoord import FileStore, StoreTimeoutError
from fscoord._log.combining import combiner
from fscoord._log.combining.request import Author, encode_request
from fscoord._log.format import record
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import StoreUnavailableError
from fscoord.stores.file.operations import Operation

EXCEPTIONS = [TimeoutError, PermissionError, ValueError, RuntimeError, KeyError]
SLOW = {"wait", "wait_alive"}


@pytest.fixture
def path(memory: Path, mounts_stay: None) -> str:
    return str(memory / "store")


def call_with(exception: type[Exception], number: int, call: Callable[[], Any]) -> At:
    """Raise `exception` at the `number`-th point of `call`; fail unless just that comes out."""
    raised = exception("time is up")

    def act() -> None:
        raise raised

    at = At(number, act)
    try:
        with at:
            call()
    except Exception as error:
        assert error is raised, f"{type(error).__name__} came out at {at.where}: {error}"
        raised.__traceback__ = None  # it keeps alive what was half made
        if isinstance(raised, AttributeError):
            raised.obj = None  # Python notes there whose property it came out of
    else:
        assert not at.reached, f"nothing came out at {at.where}"
    return at


def require_no_leak(at: At, before: int) -> None:
    """Fail unless as many descriptors are open as `before`."""
    if descriptors() != before:
        gc.collect()
    assert descriptors() == before, at.where


def is_free(both: Pair, at: At) -> None:
    """The lock is free, and the handle knows what the other one writes."""
    both.other.set("after", at.where)
    assert both.store.get("after") == at.where.encode(), at.where


@pytest.mark.parametrize("lock", KINDS)
@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_exception_of_a_handler_is_raised_by_every_operation(path: str, lock: str, exception: type[Exception]) -> None:
    with pair(path, lock) as both:
        while watcher_of(both.store) is None:
            OPERATIONS["wait"](both.store)
        both.renew()
        both.store.set("announced", "1")  # from now on it rings the bell, which it has to open for that
        open_before = descriptors()
        for name, operation in OPERATIONS.items():
            if name in SLOW:
                continue
            for number in itertools.count(1):
                both.renew()
                at = call_with(exception, number, lambda: operation(both.store))  # noqa: B023 - called at once
                if not at.reached:
                    break
                is_free(both, at)
            assert number > 15
            both.check(name)
        logs = [log_of(both.store), log_of(both.other)]
        assert descriptors() == open_before + sum(log.handle.root_fd >= 0 for log in logs), (
            "and one for each in a later file"
        )


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_exception_of_a_handler_is_raised_by_waits(path: str, exception: type[Exception]) -> None:
    with pair(path, "ofd") as both:
        while watcher_of(both.store) is None:
            OPERATIONS["wait"](both.store)
        for number in itertools.count(1):
            at = call_with(exception, number, lambda: wait(both.store))
            is_free(both, at)
            both.renew()
            if not at.reached:
                break
        both.check("wait")
        assert number > 15


@pytest.mark.parametrize("exception", [AttributeError, ImportError])
def test_exception_of_a_handler_is_raised_by_a_first_wait(path: str, exception: type[Exception]) -> None:
    """It looks for what the platform and watchdog have, and does without what they have not."""
    with FileStore(path) as store:
        wait(store)  # so that all is imported
    gc.collect()
    open_before = descriptors()
    for number in itertools.count(1):
        with FileStore(path) as store, ignored_in_finalizers():
            at = call_with(exception, number, partial(wait, store))
        require_no_leak(at, open_before)
        if not at.reached:
            break
    assert number > 50


def wait(store: FileStore) -> None:
    with suppress(StoreTimeoutError):
        store.wait(["never"], 0.003)


@pytest.mark.parametrize("lock", ["ofd", "soft"])
@pytest.mark.parametrize("exception", [TimeoutError, ValueError])
def test_exception_of_a_handler_is_raised_by_compaction(path: str, lock: str, exception: type[Exception]) -> None:
    """Each time of another log, because the points of a compaction grow in number with those before."""
    for number in itertools.count(1):
        os.mkdir(f"{path} {number}")
        with pair(f"{path} {number}/store", lock) as both:
            both.store.compact()
            at = call_with(exception, number, both.store.compact)
            is_free(both, at)
        if not at.reached:
            break
    assert number > 100


@pytest.fixture
def shared(memory: Path, mounts_stay: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a log whose writes are combined."""
    share(str(memory), monkeypatch)
    for name in ("STALLED_S", "SILENT_S"):
        monkeypatch.setattr(combiner, name, HANG_S)
    return str(memory / "log")


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_exception_of_a_handler_is_raised_by_a_leader_that_claims(shared: str, exception: type[Exception]) -> None:
    with ExitStack() as stack:
        store, other = (stack.enter_context(FileStore(shared, timeout=HANG_S)) for _ in range(2))
        store.set("registered", "1")
        log = log_of(store)
        session = log.handle.lock.session
        author = Author(session, log.table.sessions[session].alive_id, log.follower.life, log.follower.run)
        follower = Seat(store)
        stack.callback(lambda: (follower.station.give_back(follower.slot), follower.station.close()))
        for number in itertools.count(1):
            operation = Operation(record.SET, b"claimed", b"1").encode()
            data = encode_request(author, log.writer.next_time(), follower.slot.name, operation)
            path = follower.station.request_path(0.0, str(number))
            follower.station.publish(follower.slot, data, path)
            at = call_with(exception, number, lambda: store.add("n", 1))
            follower.station.remove(path)
            other.set("after", at.where)
            assert store.get("after") == at.where.encode(), at.where
            if not at.reached:
                break
        assert number > 50


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_exception_of_a_handler_is_raised_by_a_follower(shared: str, exception: type[Exception]) -> None:
    def add() -> None:
        with suppress(StoreTimeoutError):
            store.add("n", 1)

    with FileStore(shared, timeout=0.001) as store:
        store.set("registered", "1")
        with Seat(store) as seat:
            for number in itertools.count(1):
                at = call_with(exception, number, add)
                assert seat.station.requests() == [], at.where
                if not at.reached:
                    break
        assert number > 50
        store.set_timeout(HANG_S)
        assert store.add("n", 0) == 0


@contextmanager
def ignored_in_finalizers() -> Iterator[None]:
    """Python reports what is raised while an object is thrown away, and goes on."""
    usual, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = usual


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_exception_of_a_handler_is_raised_by_opening_and_closing(path: str, exception: type[Exception]) -> None:
    FileStore(path).close()
    gc.collect()
    open_before = descriptors()
    for number in itertools.count(1):
        with ignored_in_finalizers():
            at = call_with(exception, number, lambda: FileStore(path).close())
        require_no_leak(at, open_before)
        if not at.reached:
            break
    assert number > 50


def test_error_with_a_number_is_of_the_system_and_not_foreign() -> None:
    for error in (OSError(5, "input/output error"), BlockingIOError(11, "again"), StoreUnavailableError("x")):
        raise_if_foreign(error)
    for error in (KeyError("x"), KeyboardInterrupt(), RuntimeError("can't start new thread")):
        raise_if_foreign(error)
    raise_if_foreign(ImportError("no such module", name="x"))
    for error in (OSError("x"), TimeoutError(), PermissionError("no"), RuntimeError("mine"), ImportError("mine")):
        with pytest.raises(type(error)) as caught:
            raise_if_foreign(error)
        assert caught.value is error
