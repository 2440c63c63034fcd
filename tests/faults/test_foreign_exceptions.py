"""A signal handler that raises a built-in exception in the middle of a call: it comes out as it is, wherever it came.

`TimeoutError` is the usual one for SIGALRM, and it is an `OSError`; `ValueError` is what decoders used to raise.
"""

from __future__ import annotations

import _thread
import gc
import itertools
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock, RLock, current_thread, enumerate as enumerate_threads
from types import FrameType
from typing import Any

import pytest
from faults.test_signals import OPERATIONS, Pair, descriptors, pair
from support.combining import HANG_S, Seat, share
from support.internals import log_of, watcher_of
from support.interrupts import At, TimeoutOrPermissionError, ValueOrLookupError
from support.places import until

from fscoord import FileStore, HashStore, StoreTimeoutError
from fscoord._log.format import record
from fscoord._log.locking import kernel_wait
from fscoord._log.shared.combining import combiner
from fscoord._log.shared.combining.request import Author, encode_request
from fscoord._runtime import forks, interrupts, network, system
from fscoord._runtime.interrupts import import_uninterrupted, raise_if_foreign
from fscoord.collectives import c10d
from fscoord.errors import StoreUnavailableError
from fscoord.stores.file.operations import Operation

EXCEPTIONS = [TimeoutOrPermissionError, ValueOrLookupError, RuntimeError]
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


@pytest.mark.parametrize(
    ("exception", "lock"),
    [*((each, "ofd") for each in EXCEPTIONS), (TimeoutOrPermissionError, "flock"), (ValueOrLookupError, "soft")],
)
def test_exception_of_a_handler_is_raised_by_every_operation(path: str, exception: type[Exception], lock: str) -> None:
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


def test_exception_of_a_handler_is_raised_by_functions_that_ignore_errors(path: str) -> None:
    with FileStore(path) as store, socket.socket() as connection:
        store.register()
        alive, before = log_of(store).liveness.file, set(system.loose)
        calls: list[Callable[[], object]] = [
            lambda: system.close_quietly(system.open_file(os.devnull, os.O_RDONLY, 0, system.loose)),
            system.start_time,
            partial(system.namespace, "pid"),
            partial(system.range_lock_holder, 0, 0.0),
            partial(network.drop_unsent, connection),
            network.own_name,
            partial(system.remove_directory, f"{path}.none", os, os.getpid()),
            alive.release,
        ]
        for call in calls:
            for number in itertools.count(1):
                if not call_with(TimeoutError, number, call).reached:
                    break
            assert number > 1
        system.close_quietly(*system.loose - before)


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


@pytest.mark.parametrize(("exception", "lock"), [(TimeoutOrPermissionError, "ofd"), (ValueOrLookupError, "soft")])
def test_exception_of_a_handler_is_raised_by_compaction(path: str, exception: type[Exception], lock: str) -> None:
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
        author = Author(session, log.table.sessions[session].alive_id, log.follower.run)
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
    for error in (KeyError("x"), KeyboardInterrupt()):
        raise_if_foreign(error)
    raise_if_foreign(ImportError("no such module", name="x"))
    for error in (OSError("x"), TimeoutError(), PermissionError("no"), RecursionError(), ImportError("mine")):
        with pytest.raises(type(error)) as caught:
            raise_if_foreign(error)
        assert caught.value is error


def test_runtime_error_is_foreign_if_it_passed_through_a_function_of_the_program() -> None:
    with pytest.raises(RuntimeError, match="release unlocked lock") as caught:
        Lock().release()
    interpreters = caught.value.with_traceback(None)
    raise_if_foreign(interpreters)
    for text in ("mine", "can't start new thread"):
        with pytest.raises(RuntimeError) as caught:
            raise RuntimeError(text)
        with pytest.raises(RuntimeError) as again:
            raise_if_foreign(caught.value)
        assert again.value is caught.value
        raise_if_foreign(caught.value, __name__)


class AlarmError(RuntimeError):
    """What a program's handler raises."""


ALARMS = [AlarmError("too slow"), RuntimeError("can't start new thread"), RecursionError("too deep")]


def came_out(number: int, alarm: Exception, call: Callable[[], object]) -> bool:
    """Raise `alarm` at the `number`-th point of `call`, also in functions outside of the package. It must come out.

    Returns:
        Whether there are so many points.
    """
    left = number

    def hook(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        left -= event in ("call", "c_return")
        if not left:
            sys.setprofile(None)
            raise alarm

    gc.disable()
    sys.setprofile(hook)
    try:
        call()
    except BaseException as error:
        sys.setprofile(None)
        assert error is alarm, f"{error!r} came out at point {number}"
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
        alarm.__traceback__ = alarm.__context__ = None
    assert left > 0, f"nothing came out at point {number}"
    return False


@pytest.mark.parametrize("alarm", ALARMS, ids=repr)
def test_runtime_error_of_a_handler_is_raised_by_a_start_of_a_thread(alarm: Exception) -> None:
    before, ended, threads = (
        _thread._count(),
        list[int](),
        list[object](),
    )  # kept, because `threading` runs a function at the end of each
    number = 1
    while came_out(number, alarm, lambda: threads.append(system.start_thread("fscoord-test", ended.append, 1))):
        number += 1
    assert number > 10
    until(lambda: ended and _thread._count() <= before)  # those whose starts were interrupted end later


@pytest.mark.parametrize("alarm", ALARMS, ids=repr)
def test_runtime_error_of_a_handler_is_raised_by_a_first_import(
    alarm: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"fscoord_first_{abs(hash(repr(alarm)))}"
    (tmp_path / f"{name}.py").touch()

    def first() -> None:
        sys.modules.pop(name, None)
        import_uninterrupted(name)

    number = 1
    while came_out(number, alarm, first):
        number += 1
        until(lambda: name not in interrupts._importing.values())
    assert number > 10


@pytest.mark.parametrize("alarm", ALARMS, ids=repr)
def test_runtime_error_of_a_handler_is_raised_by_a_wait_for_the_lock(alarm: Exception, path: str) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as holder:
        lock, held = log_of(store).handle.lock, log_of(holder).handle.lock
        holder.set("k", "1")
        lock.mutex, number, is_reached = RLock(), 1, True  # as in another process
        while is_reached:
            with held.mutex:
                held.try_lock()
                try:
                    reopen = partial(log_of(store)._reopen_for_lock)
                    is_reached = came_out(number, alarm, lambda: lock.wait(9, 1.0, 0.0, reopen, patient=False))  # noqa: B023
                finally:
                    held.unlock()
            until(lambda: not kernel_wait._requests)
            number += 1
        assert number > 20
        assert lock.can_block


def test_event_that_a_handler_interrupts_raises_its_error() -> None:
    for alarm in ALARMS:
        event = system.AutoResetEvent()
        number = 1
        while came_out(number, alarm, event.set):
            number += 1
        assert number > 2
        assert not event.set()


def test_runtime_error_of_a_handler_is_no_time_out_of_a_foreign_store() -> None:
    def handler() -> None:
        raise RuntimeError("timeout")

    with pytest.raises(RuntimeError) as caught:
        handler()
    with pytest.raises(RuntimeError):
        c10d._is_timeout(caught.value, HashStore())  # type: ignore[arg-type]


def test_end_of_an_object_that_recovers_from_forks_runs_no_function_of_python() -> None:
    called: list[str] = []

    class Thing:
        pass

    things = forks.WeakObjects[Thing]()
    kept, thing = Thing(), Thing()
    things.add(kept)
    things.add(thing)
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    del thing
    sys.setprofile(None)
    assert called == []
    assert list(things) == [kept]


def test_bare_thread_leaves_no_object_of_a_thread() -> None:
    """An import may call `current_thread`, for which Python up to 3.12 makes an object that it never removes."""
    before = set(enumerate_threads())
    assert interrupts.BareCall(current_thread).wait(HANG_S)
    assert set(enumerate_threads()) == before
