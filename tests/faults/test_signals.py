"""Signals: Ctrl-C at every point of every call, at random in a tight loop, and handlers that call the store."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from faults.holder import Holder
from support.internals import log_of, state_of, watcher_of
from support.interrupts import At, interrupt
from support.places import start_thread

import fscoord
from fscoord import FileStore, barrier
from fscoord._log import recovery
from fscoord._log.files import safe_files
from fscoord.errors import StoreClosedError, StoreError, StoreTimeoutError

HANG_S = 60
KERNEL_KINDS = ["ofd", "flock"]

OPERATIONS: dict[str, Callable[[FileStore], Any]] = {
    "set": lambda store: store.set("k", "v"),
    "add": lambda store: store.add("n", 1),
    "append": lambda store: store.append("text", "x"),
    "compare_set": lambda store: store.compare_set("k", "v", "w"),
    "delete_key": lambda store: store.delete_key("k"),
    "multi_set": lambda store: store.multi_set(["a", "b"], ["1", "2"]),
    "transact": lambda store: store.transact(compare={"never": None}, set={"a": "1"}, add={"n": 1}, delete=["k"]),
    "queue_push": lambda store: store.queue_push("q", "v"),
    "queue_pop": lambda store: store.queue_pop("q", block=False),
    "get": lambda store: store.get("fresh"),
    "check": lambda store: store.check(["fresh"]),
    "list_keys": lambda store: store.list_keys(),
    "multi_get": lambda store: store.multi_get(["introduced", "fresh"]),
    "wait": lambda store: times_out(lambda: store.wait(["never"], 0.003)),
    "barrier": lambda store: times_out(lambda: store.barrier(f"b{next(NUMBERS)}", 2, 0.003)),
    "barrier by rank": lambda store: barrier(store, 1, f"b{next(NUMBERS)}", rank=0),
    "announce_rank": lambda store: store.announce_rank(next(NUMBERS)),
    "wait_alive": lambda store: times_out(lambda: store.wait_alive(["never"], [0, 1, 2], 0.003)),
}
NUMBERS = itertools.count()


@pytest.fixture
def path(memory: Path, mounts_stay: None) -> str:
    return str(memory / "store")


def times_out(call: Callable[[], object]) -> None:
    with pytest.raises(StoreTimeoutError):
        call()


class Pair:
    """The handle that is interrupted, and another that sees what became of the store."""

    def __init__(self, path: str, lock: str) -> None:
        self.path, self.lock = path, lock
        self.store = FileStore(path, lock=lock, timeout=HANG_S)
        self.other = FileStore(path, lock=lock, timeout=HANG_S)
        for handle in (self.store, self.other):  # which opens the liveness file
            handle.set("introduced", "1")

    def renew(self) -> None:
        """Give the handle something to read."""
        self.other.set("fresh", "1")
        self.other.queue_push("q", "fresh")
        self.other.delete_key("new")

    def check(self, where: str) -> None:
        """The lock and the mutex are free, the handle works, and knows what a fresh one knows."""
        kernel = log_of(self.other).handle.lock
        try:
            kernel.try_lock()
        except BlockingIOError:
            pytest.fail(f"interrupted at {where}, it kept the lock")
        finally:
            kernel.unlock()
        assert not log_of(self.store).handle.shared.is_inside, where
        with start_thread(self.store.set, "from another thread", where) as thread:
            thread.join()
        assert self.store.add("works", 1) == int(self.other.get("works")), where
        with FileStore(self.path, lock=self.lock, timeout=HANG_S) as fresh:
            fresh_state, state = state_of(fresh), state_of(self.store)
            assert self.store.list_keys() == fresh.list_keys(), where
            assert (state.values, state.queues) == (fresh_state.values, fresh_state.queues), where

    def close(self) -> None:
        self.store.close()
        self.other.close()


@contextmanager
def pair(path: str, lock: str) -> Iterator[Pair]:
    pair = Pair(path, lock)
    try:
        yield pair
    finally:
        pair.close()


def run(at: At, call: Callable[[], object]) -> None:
    try:
        with at:
            call()
    except KeyboardInterrupt:
        assert at.reached


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Ctrl-C at every point


@pytest.mark.parametrize(
    ("operation", "lock"),
    [*((name, "ofd") for name in OPERATIONS), *product(["set", "queue_pop", "get", "wait"], ["flock", "soft"])],
)
def test_call_that_is_interrupted_leaves_nothing_behind(path: str, operation: str, lock: str) -> None:
    """Wherever Ctrl-C comes: no lock, no mutex, no descriptor; and the handle works, with nothing lost or doubled.

    What differs by the kind of lock is the same for all writes, and for all waits.
    """
    with pair(path, lock) as both:
        while watcher_of(both.store) is None:
            OPERATIONS["wait"](both.store)  # opens what all later waits and rings share, if its time suffices
        both.renew()
        both.check("no point")
        number, reached = 0, True
        open_before = descriptors()
        while reached:
            number += 1
            both.renew()
            at = At(number, interrupt)
            run(at, lambda: OPERATIONS[operation](both.store))
            both.check(at.where)
            reached = at.reached
        assert descriptors() == open_before
    assert number > 15


def test_first_wait_that_is_interrupted_leaves_no_descriptor(path: str) -> None:
    """The watch is made in it, and may be interrupted half-way."""
    OPERATIONS["wait"](FileStore(path))  # imports what all later waits share
    gc.collect()
    open_before = descriptors()
    number, reached = 0, True
    while reached:
        number += 1
        at = At(number, interrupt)
        with FileStore(path, timeout=HANG_S) as store:
            run(at, lambda: OPERATIONS["wait"](store))
        reached = at.reached
        del store
        if descriptors() != open_before:  # what the error's traceback holds
            gc.collect()
        assert descriptors() == open_before, at.where
    assert number > 15


def test_birth_that_is_interrupted_leaves_no_descriptor(path: str) -> None:
    """Of a log, or a bell."""
    open_before = descriptors()
    number, reached = 0, True
    while reached:
        number += 1
        at = At(number, interrupt)
        run(at, lambda: safe_files.create(f"{path} {number}", lambda _: b"header", 0o600, durable=True))  # noqa: B023 - called at once
        reached = at.reached
        assert descriptors() == open_before, at.where
    assert number > 10


@pytest.mark.parametrize("operation", ["queue_push", "queue_pop", "get"])
def test_recovery_from_an_interrupted_call_may_be_interrupted_too(
    path: str, operation: str, rng: random.Random, scale: Callable[[int], int]
) -> None:
    call = OPERATIONS[operation]
    with pair(path, "ofd") as both:
        open_before = descriptors()
        for _ in range(scale(200)):
            points = [At(rng.randint(1, 60), interrupt) for _ in range(3)]
            for at in points:
                both.renew()  # each time: an interrupted pop may have taken its value
                run(at, lambda: call(both.store))
            both.check(", ".join(at.where for at in points))
        logs = [log_of(both.store), log_of(both.other)]
        assert descriptors() == open_before + sum(log.handle.root_fd >= 0 for log in logs), (
            "and one for each in a later file"
        )


LOOP = """
import random, signal, sys
from fscoord import FileStore
from fscoord._log import recovery
from fscoord._runtime.signals import resend_lost_signals

path, lock, count, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
store = FileStore(path, lock=lock, timeout=60)
store.compact()  # behind generation 0 a handle has one descriptor more
armed = False
random = random.Random(seed)


def handler(*_):
    if armed:
        raise KeyboardInterrupt


signal.signal(signal.SIGINT, handler)
signal.signal(signal.SIGALRM, handler)
acknowledged = 0
with resend_lost_signals():
    for number in range(count):
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, random.choice((20, 100, 400)) * random.uniform(1e-6, 2e-6))
                while True:
                    acknowledged = store.add("n", 1)
                    store.set("k" + str(random.randrange(9)), "v" * random.randrange(5000))
            finally:
                armed = False
        except KeyboardInterrupt:
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        if number % 50 == 49:
            found = int(store.get("n"))
            assert acknowledged <= found, f"{found} after {acknowledged} was acknowledged"
            print(found, flush=True)
            assert sys.stdin.readline() == "go on\\n"
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("lock", KERNEL_KINDS)
def test_ctrl_c_at_random_in_a_tight_loop_frees_the_lock_and_loses_nothing(
    path: str, lock: str, seed: int, scale: Callable[[int], int]
) -> None:
    """Thousands, and this process looks in between: the lock is free, and what was acknowledged is there."""
    count = scale(2000)
    with FileStore(path, lock=lock, timeout=HANG_S) as store, interrupted_loop(path, lock, count, seed) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        open_there = set()
        for line in process.stdout:
            store.add("n", 1)  # needs the lock
            if line == "done\n":
                break
            assert int(store.get("n")) > int(line)
            open_there.add(len(os.listdir(f"/proc/{process.pid}/fd")))
            process.stdin.write("go on\n")
            process.stdin.flush()
        assert process.poll() is None, "it failed"
        assert len(open_there) == 1, f"descriptors were lost: {open_there}"
        with FileStore(path, lock=lock) as fresh:
            assert fresh.list_keys() == store.list_keys()


@contextmanager
def interrupted_loop(path: str, lock: str, count: int, seed: int) -> Iterator[subprocess.Popen[str]]:
    root = str(Path(fscoord.__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, path, lock, str(count), str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


# Ctrl-C ends waits


@pytest.mark.usefixtures("no_ctrl_c_is_lost")
@pytest.mark.parametrize("operation", ["get", "wait", "queue_pop", "multi_get", "barrier"])
@pytest.mark.parametrize("watch", ["inotify", "poll"])
def test_ctrl_c_ends_a_wait_at_once(path: str, operation: str, watch: str) -> None:
    waits: dict[str, Callable[[FileStore], object]] = {
        "get": lambda store: store.get("k"),
        "wait": lambda store: store.wait(["k"]),
        "queue_pop": lambda store: store.queue_pop("k"),
        "multi_get": lambda store: store.multi_get(["k"]),
        "barrier": lambda store: store.barrier("k", 2),
    }
    with FileStore(path, timeout=2 * HANG_S, watch=watch) as store:
        start = time.monotonic()
        with start_thread(press_ctrl_c_when_asleep, store), pytest.raises(KeyboardInterrupt):
            waits[operation](store)
        assert time.monotonic() - start < HANG_S
        store.set("works", "1")
        with start_thread(store.get, "later") as waiter:
            wait_until(lambda: asleep(store))
            store.set("later", "1")
        assert waiter.result == b"1"


def press_ctrl_c_when_asleep(store: FileStore) -> None:
    wait_until(lambda: asleep(store))
    os.kill(os.getpid(), signal.SIGINT)


def asleep(store: FileStore) -> int:
    """Count the threads of this process that sleep on what `store` watches."""
    watch = watcher_of(store)
    return 0 if watch is None else len(watch._sleeping)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "that never came"
        time.sleep(0.001)


@contextmanager
def handling(number: int, handler: Callable[..., Any]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_signal_without_effect_neither_ends_nor_prolongs_a_wait(path: str) -> None:
    seen: list[int] = []
    with FileStore(path, timeout=HANG_S) as store, handling(signal.SIGUSR1, lambda *_: seen.append(1)):

        def disturb() -> None:
            for count in range(1, 6):
                wait_until(lambda: asleep(store))
                os.kill(os.getpid(), signal.SIGUSR1)
                wait_until(lambda: len(seen) == count)  # noqa: B023

        with start_thread(disturb) as disturber:
            while disturber.is_alive():  # one wait may be over before it is disturbed
                with pytest.raises(StoreTimeoutError) as caught:
                    store.wait(["k"], 0.3)
                assert 0.3 <= caught.value.waited < HANG_S
        assert len(seen) == 5


@pytest.mark.parametrize("lock", ["ofd", "soft"])
def test_signal_without_effect_neither_ends_nor_prolongs_a_wait_for_the_lock(path: str, lock: str) -> None:
    """Whether the handler lets the kernel repeat what it interrupts (SA_RESTART) or not."""
    seen: list[int] = []
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.005):
            os.kill(os.getpid(), signal.SIGUSR1)

    with (
        Holder(path, lock),
        FileStore(path, lock=lock, timeout=0.1) as store,
        handling(signal.SIGUSR1, lambda *_: seen.append(1)),
        start_thread(disturb),
    ):
        try:
            for interrupts in (True, False):
                signal.siginterrupt(signal.SIGUSR1, interrupts)
                seen.clear()
                while len(seen) < 10:
                    with pytest.raises(StoreTimeoutError) as caught:
                        store.set("k", "v")
                    assert 0.1 <= caught.value.waited < HANG_S
        finally:
            stop.set()


# Handlers that call the store


HANDLERS: dict[str, Callable[[FileStore], Any]] = {
    "queue_push": lambda store: store.queue_push("handled", "1"),
    "list_keys": lambda store: store.list_keys(),
    "wait": lambda store: times_out(lambda: store.wait(["never"], 0)),
    "sleep": lambda store: times_out(lambda: store.wait(["never"], 0.002)),
    "set": lambda store: store.set("new", "1"),
    "delete_key": lambda store: store.delete_key("fresh"),
    "close": lambda store: store.close(),
}


CASES = [(operation, False) for operation in ("queue_push", "queue_pop", "list_keys", "multi_get", "wait")]
CASES += [(operation, True) for operation in ("queue_push", "get")]


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize(("operation", "dirty"), CASES)
def test_signal_handler_that_calls_the_store_works_or_is_refused(
    path: str, operation: str, dirty: bool, handler: str, rng: random.Random
) -> None:
    """At every point of a call: never a hang; the call goes on as if nothing had been; nothing is lost or doubled."""
    step = 2 if operation == "wait" else 1  # it has many points
    number, reached, refused = rng.randint(1, step) - step, True, 0
    with pair(path, "ofd") as both:
        may_time_out = operation in ("get", "multi_get") and handler == "delete_key"
        both.store.set_timeout(0.003 if may_time_out else HANG_S)
        while reached:
            number += step
            both.renew()
            if dirty:
                log_of(both.store).handle.recovery |= recovery.POSITION
            said: list[str] = []
            at = At(number, lambda: said.append(outcome(HANDLERS[handler], both.store)))  # noqa: B023
            with at:
                try:
                    found = OPERATIONS[operation](both.store)
                except StoreClosedError:
                    assert said == ["works"]
                    assert handler == "close"
                except StoreTimeoutError:
                    assert may_time_out
                else:
                    assert operation != "multi_get" or found == [b"1", b"1"], at.where
            reached = at.reached
            if handler == "close" and said == ["works"]:
                with pytest.raises(StoreClosedError):
                    both.store.check(["k"])
                both.store = FileStore(path, timeout=HANG_S)
            assert said in (["works"], ["refused"], []), (at.where, said)
            refused += said == ["refused"]
            both.check(at.where)
    assert refused > 5


def outcome(call: Callable[[FileStore], Any], store: FileStore) -> str:
    try:
        call(store)
    except StoreError as error:
        return "refused" if "signal handler" in str(error) else repr(error)
    except BaseException as error:
        return repr(error)
    return "works"


def test_signal_handler_may_wait_while_its_thread_waits(path: str) -> None:
    """Really asleep, in the very call that listens for events; and the wait that it interrupted is woken afterwards."""
    found: list[bytes] = []
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:

        def handler(*_: Any) -> None:
            found.append(store.get("inner"))

        def disturb() -> None:
            wait_until(lambda: asleep(store) == 1)
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: asleep(store) == 2)
            other.set("inner", "1")
            wait_until(lambda: found)
            other.set("outer", "2")

        with handling(signal.SIGUSR1, handler), start_thread(disturb):
            assert store.get("outer") == b"2"
        assert found == [b"1"]


def test_signal_handler_may_wait_while_its_thread_waits_for_the_lock(path: str) -> None:
    begun: list[int] = []
    found: list[int] = []
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        kernel = log_of(other).handle.lock

        def disturb() -> None:
            wait_until(lock_threads)
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: begun)  # a handler that begins when the lock is there already is refused
            kernel.unlock()

        def handler(*_: Any) -> None:
            begun.append(1)
            found.append(store.add("n", 1))

        with handling(signal.SIGUSR1, handler):
            kernel.try_lock()
            try:
                with start_thread(disturb):
                    found.append(store.add("n", 1))
            finally:
                kernel.unlock()
        assert sorted(found) == [1, 2]


def lock_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fscoord-lock"]
