"""Traps of the log's lock: holders that stop, waits that are given up, hand-overs that are interrupted."""

from __future__ import annotations

import fcntl
import gc
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults.holder import Holder
from support.internals import log_of
from support.interrupts import At, interrupt
from support.places import start_thread

from fscoord import FileStore
from fscoord._log import log as log_file
from fscoord._log.files import safe_files as log_path, torn_tail
from fscoord._log.handle import NeedsLock
from fscoord._log.locking import kernel_wait as log_line, log_lock
from fscoord.errors import StoreClosedError, StoreError, StoreGoneError, StoreTimeoutError

KINDS = ["ofd", "flock", "soft"]
KERNEL_KINDS = ["ofd", "flock"]
HANG_S = 60
"""How long something may take before a test calls it hung. How long it takes, benchmarks measure."""

every_kind = pytest.mark.parametrize("lock", KINDS)
every_kernel_kind = pytest.mark.parametrize("lock", KERNEL_KINDS)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the lock in the kernel at once, instead of trying again for a while."""
    monkeypatch.setattr(log_lock, "NAP_PHASE_S", 0)


@contextmanager
def held(path: str, lock: str) -> Iterator[Callable[[], object]]:
    """Hold the lock through a handle of its own; yields what gives it back."""
    with FileStore(path, lock=lock, timeout=HANG_S) as holder:
        kernel = log_of(holder).handle.lock
        until(lambda: takes(holder))
        try:
            yield kernel.unlock
        finally:
            kernel.unlock()


def is_free(path: str, lock: str) -> bool:
    """Return whether another handle gets the lock before it would report a hang."""
    with FileStore(path, lock=lock, timeout=HANG_S) as store:
        try:
            store.set("free", "1")
        except StoreTimeoutError:
            return False
    return True


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def lock_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fscoord-lock"]


def until(condition: Callable[[], Any]) -> None:
    """Wait for what another thread or process is about to do."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "that never came"
        time.sleep(0.001)


# Holders that stop


@every_kind
@pytest.mark.parametrize("where", ["nothing", "half", "all"])
def test_holder_that_is_stopped_is_named_at_the_deadline(
    path: str, lock: str, where: str, record_property: Any
) -> None:
    with FileStore(path, lock=lock, timeout=0.05) as store, Holder(path, lock, where) as holder:
        start = time.monotonic()
        with pytest.raises(StoreTimeoutError) as caught:
            store.set("k", "1")
        took = time.monotonic() - start
        record_property("milliseconds late", 1000 * (took - 0.05))
        assert 0.05 <= caught.value.waited <= took < HANG_S
        assert caught.value.holder == holder.name
        assert holder.name in str(caught.value)
        holder.finish()
        store.set_timeout(HANG_S)
        store.set("k", "2")
        assert store.get("held") == b"by the holder"


@every_kernel_kind
def test_holder_that_goes_on_after_a_stop_loses_nothing(path: str, lock: str) -> None:
    with FileStore(path, lock=lock, timeout=HANG_S) as store, Holder(path, lock) as holder:
        with start_thread(store.add, "n", 1) as waiter:
            until(lock_threads)
            assert holder.finish() == "by the holder"
        assert waiter.result == 1
        assert store.get("held") == b"by the holder"


def test_holder_that_has_written_nothing_yet_is_reported_as_such(path: str) -> None:
    with (
        FileStore(path, timeout=0.05) as store,
        Holder(path, introduced=False),
        pytest.raises(StoreTimeoutError, match="has not written yet"),
    ):
        store.set("k", "1")


def test_holder_whose_introduction_was_not_read_yet_is_named(path: str) -> None:
    with FileStore(path, timeout=0.05) as store, Holder(path) as holder:
        assert not log_of(store).table.sessions
        with pytest.raises(StoreTimeoutError) as caught:
            store.set("k", "1")
        assert caught.value.holder == holder.name


@every_kind
def test_reads_need_no_lock(path: str, lock: str) -> None:
    """Complete records are read while a holder is stopped; its half record does not count."""
    with FileStore(path, lock=lock, timeout=HANG_S) as store:
        store.set("k", "1")
        with Holder(path, lock) as holder:
            assert store.get("k") == b"1"
            assert not store.check(["held"])
            assert store.list_keys() == ["holder", "k"]
            holder.finish()
        assert store.check(["held"])


@pytest.mark.parametrize("where", ["nothing", "all"])
def test_wait_keeps_its_deadline_while_a_holder_is_stopped(path: str, where: str) -> None:
    """Even the first wait on a log, which would announce a bell and needs the lock for that."""
    with FileStore(path, timeout=HANG_S) as store, Holder(path, where=where):
        start = time.monotonic()
        with pytest.raises(StoreTimeoutError) as caught:
            store.wait(["k"], 0.05)
        assert time.monotonic() - start < HANG_S / 2
        assert caught.value.keys == ("k",)


def test_key_is_seen_at_once_although_its_writer_still_has_the_lock(path: str) -> None:
    with FileStore(path, timeout=HANG_S) as store, start_thread(store.get, "held") as waiter, Holder(path, where="all"):
        until(lambda: not waiter.is_alive())
    assert waiter.result == b"by the holder"


def test_timeout_of_zero_looks_once(path: str) -> None:
    with FileStore(path, timeout=0) as store, Holder(path) as holder:
        with pytest.raises(StoreTimeoutError) as caught:
            store.set("k", "1")
        assert caught.value.holder == holder.name
        with pytest.raises(StoreTimeoutError):
            store.get("k")


def test_timeout_without_limit_waits_as_long_as_it_takes(path: str) -> None:
    with FileStore(path, timeout=math.inf) as store, Holder(path) as holder:
        with start_thread(store.add, "n", 1) as waiter:
            until(lock_threads)
            holder.finish()
        assert waiter.result == 1


def test_timeout_of_nan_is_refused(path: str) -> None:
    with FileStore(path) as store:
        for call in (lambda: store.set_timeout(math.nan), lambda: store.wait(["k"], math.nan)):
            with pytest.raises(ValueError, match=r"NaN|nan"):
                call()
    with pytest.raises(ValueError, match=r"NaN|nan"):
        FileStore(path, timeout=math.nan)


# Waits that are given up


@every_kernel_kind
def test_wait_given_up_does_not_take_the_lock_later(path: str, lock: str, impatient: None) -> None:
    with FileStore(path, lock=lock, timeout=0.05) as store:
        descriptors = count_descriptors()
        with Holder(path, lock) as holder:
            with pytest.raises(StoreTimeoutError):
                store.set("k", "1")
            holder.finish()
        for thread in lock_threads():
            thread.join(HANG_S)
        assert count_descriptors() == descriptors
        assert is_free(path, lock)
        assert not store.check(["k"])


@every_kernel_kind
def test_wait_given_up_does_not_free_a_later_hold(path: str, lock: str, impatient: None) -> None:
    """A request without a waiter gets the lock at some time, and releases only its own hold."""
    with FileStore(path, lock=lock, timeout=0.05) as store, FileStore(path, lock=lock, timeout=0.05) as stranger:
        with held(path, lock) as release:
            with pytest.raises(StoreTimeoutError):
                store.set("k", "1")
            release()
            store.set_timeout(HANG_S)
            found = []

            def decide(*_: bytes) -> tuple[None, int, bytes]:
                """Holding the lock, let the old request come and go, and see whether a stranger gets in."""
                for thread in lock_threads():
                    thread.join(0.1)
                try:
                    log_of(stranger).handle.lock.try_lock()
                    found.append("a stranger got in")
                except BlockingIOError:
                    pass
                finally:
                    log_of(stranger).handle.lock.unlock()
                return None, 0, b""

            for _ in range(3):
                log_of(store).update(1, b"k", b"v", decide, HANG_S)
            assert not found
        assert is_free(path, lock)


def test_waits_given_up_on_one_stopped_holder_share_a_request(path: str, impatient: None) -> None:
    """However many handles come, give up and close: one thread and one descriptor wait in the kernel."""
    with FileStore(path, timeout=0) as store, Holder(path) as holder:
        before = count_descriptors()
        give_up_in_the_kernel(store)
        for _ in range(20):
            with pytest.raises(StoreTimeoutError):
                store.set("k", "1")
            with FileStore(path, timeout=0) as other, pytest.raises(StoreTimeoutError):
                other.set("k", "1")
        assert len(lock_threads()) == 1
        assert count_descriptors() == before + 1
        holder.finish()
        store.set_timeout(HANG_S)
        store.set("k", "1")


def give_up_in_the_kernel(store: FileStore) -> None:
    """Give up a wait for the lock again and again, until a request of one of them has its descriptor."""

    def is_asked() -> bool:
        with pytest.raises(StoreTimeoutError):
            store.set("k", "1")
        return any(request.fd >= 0 for request in list(log_line._requests.values()))

    until(is_asked)


def test_threads_and_handles_that_wait_for_a_stopped_holder_all_get_the_lock(path: str, impatient: None) -> None:
    with FileStore(path, timeout=HANG_S) as store, Holder(path) as holder:
        handles = [store, store.clone(), store.clone()]
        waiters = [start_thread(handle.add, "n", 1) for handle in handles for _ in range(3)]
        until(lambda: len(log_line._requests) == 1 and sum(map(len, waiting_lists())) == len(waiters))
        assert len(lock_threads()) == 1
        holder.finish()
        assert sorted(waiter.join() for waiter in waiters) == list(range(1, 10))
        for handle in handles[1:]:
            handle.close()


def waiting_lists() -> list[Any]:
    return [request.waiters for request in list(log_line._requests.values())]


def test_handle_discarded_while_it_waits_leaves_nothing(path: str, impatient: None) -> None:
    gc.collect()  # what others threw away is not to be counted
    before = count_descriptors()
    store = FileStore(path, timeout=0)
    own = count_descriptors() - before
    with Holder(path) as holder:
        give_up_in_the_kernel(store)
        waiting = count_descriptors()
        del store
        gc.collect()
        assert count_descriptors() == waiting - own
        holder.finish()
    for thread in lock_threads():
        thread.join(HANG_S)
    assert count_descriptors() == before
    assert is_free(path, "ofd")


@every_kind
def test_close_ends_the_lock_waits_of_other_threads(path: str, lock: str) -> None:
    store = FileStore(path, lock=lock, timeout=math.inf)
    with Holder(path, lock) as holder:
        waiter = start_thread(store.set, "k", "1")
        if lock == "soft":
            until(lambda: waiter.is_alive())
        else:
            until(lock_threads)
        store.close()
        with pytest.raises(StoreClosedError):
            waiter.join()
        holder.finish()
    assert is_free(path, lock)


def test_wait_that_the_kernel_refuses_goes_on_by_trying(
    path: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may know F_OFD_SETLK and not F_OFD_SETLKW; a process may have no descriptor or thread left."""

    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(log_lock.LogLock, "block", refuse)
    with FileStore(path, timeout=HANG_S) as store, held(path, "ofd") as release:
        with start_thread(store.add, "n", 1) as waiter:
            until(lambda: not log_of(store).handle.lock.can_block)
            assert waiter.is_alive()
            release()
        assert waiter.result == 1


@pytest.mark.parametrize("first", ["direct", "locked"])
def test_lock_is_handed_over_only_with_a_descriptor_of_the_flags_of_its_handle(
    memory: Path, impatient: None, first: str
) -> None:
    """A handle that reads under a lock can't do so on a descriptor for writing only, as one that reads directly has."""
    path = str(memory / "store")
    second = {"direct": "locked", "locked": "direct"}[first]
    with (
        FileStore(path, timeout=0.1, coherence=first) as one,
        FileStore(path, timeout=HANG_S, coherence=second) as two,
    ):
        two.set("b", "1")
        modes = [fcntl.fcntl(log_of(store).handle.lock.fd, fcntl.F_GETFL) & os.O_ACCMODE for store in (one, two)]
        with held(path, "ofd") as release:
            give_up_in_the_kernel(one)
            with start_thread(two.set, "b", "2"):
                until(lambda: sum(map(len, waiting_lists())) == 1)
                release()
        one.set_timeout(HANG_S)  # the request that it gave up may hold the lock for a moment
        assert two.get("b") == one.get("b") == b"2"
        two.set("b", "3")
        one.set("a", "2")
        assert (two.get("a"), one.get("b")) == (b"2", b"3")
        assert modes == [
            fcntl.fcntl(log_of(store).handle.lock.fd, fcntl.F_GETFL) & os.O_ACCMODE for store in (one, two)
        ]


def test_wait_goes_on_by_trying_if_no_thread_can_be_started(
    path: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with FileStore(path, timeout=0.05) as store, held(path, "ofd"):
        descriptors = count_descriptors()
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(StoreTimeoutError):
            store.set("k", "1")
        assert count_descriptors() == descriptors


def test_wait_goes_on_by_trying_if_no_descriptor_is_left(
    path: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reopen(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(log_file.Log, "_reopen_for_lock", reopen)
    with FileStore(path, timeout=0.05) as store, held(path, "ofd"), pytest.raises(StoreTimeoutError):
        store.set("k", "1")


@pytest.mark.parametrize("steps", [1, 2])
def test_log_that_goes_on_elsewhere_while_its_waiter_reopens_it_is_not_gone(
    steps: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits in the kernel opens the file in use, while another follows a seal on the same handle. It
    found a file that was not the one in use any more, and declared the log replaced, for good.
    """
    with FileStore(path, timeout=HANG_S) as store:
        store.set("k", "1")
        opened = log_path.open_descriptor

        def open_and_go_on(*given: Any, **named: Any) -> int:
            monkeypatch.setattr(log_path, "open_descriptor", opened)
            fd = opened(*given, **named)
            for _ in range(steps):
                store.compact()
                store.set("k", "2")
            return fd

        monkeypatch.setattr(log_path, "open_descriptor", open_and_go_on)
        os.close(log_of(store)._reopen_for_lock())
        assert store.get("k") == b"2"
        store.set("k", "3")


@every_kernel_kind
@pytest.mark.parametrize("replaced", [False, True])
def test_waiter_for_the_lock_of_a_log_that_is_gone_fails_while_another_holds_it(
    lock: str, replaced: bool, path: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile it does not open the file in its place again and again."""
    opened: list[int] = []
    reopen = log_file.Log._reopen_for_lock

    def count(log: log_file.Log) -> int:
        opened.append(1)
        return reopen(log)

    monkeypatch.setattr(log_file.Log, "_reopen_for_lock", count)
    with FileStore(path, lock=lock, timeout=HANG_S) as store:
        store.set("k", "1")
        with held(path, lock):
            os.unlink(path)
            if replaced:
                FileStore(path, lock=lock).close()
            with pytest.raises(StoreGoneError):
                store.set("k", "2")
    assert len(opened) <= 2


# Interruptions of the hand-over


@every_kernel_kind
def test_handover_that_is_interrupted_never_lets_two_hold_the_lock(
    path: str, lock: str, impatient: None, rng: random.Random
) -> None:
    """At every second point of a call that gets the lock from the kernel: it is free then, and the handle works."""
    first, number = rng.randint(1, 2), 0
    while interrupt_hand_over(path, lock, first + 2 * number, number):
        number += 1
    assert number > 15


def interrupt_hand_over(path: str, lock: str, point: int, number: int) -> bool:
    """Interrupt a call that gets the lock from the kernel at the given point; say whether it has so many.

    This is done for the `number`-th time, counted from 0.
    """
    with FileStore(path, lock=lock, timeout=HANG_S) as store, FileStore(path, lock=lock, timeout=HANG_S) as other:
        store.set("introduced", "1")
        at = At(point, interrupt)
        with held(path, lock) as release, start_thread(interrupted, at, store.add, "n", 1) as waiter:
            until(lambda: at.reached or any(waiting_lists()) or not waiter.is_alive())
            release()
        until(lambda: takes(other))
        store.set_timeout(0)
        with pytest.raises(StoreTimeoutError):  # for the other holds the lock
            store.set("two", at.where)
        log_of(other).handle.lock.unlock()
        store.set_timeout(HANG_S)
        assert store.add("m", 1) == number + 1
    return at.reached


def interrupted(at: At, call: Callable[..., Any], *arguments: Any) -> None:
    try:
        with at:
            call(*arguments)
    except KeyboardInterrupt:
        pass


def takes(store: FileStore) -> bool:
    try:
        log_of(store).handle.lock.try_lock()
    except BlockingIOError:
        return False
    return True


@pytest.mark.usefixtures("no_ctrl_c_is_lost")
def test_call_that_waits_for_the_lock_ends_at_once_on_ctrl_c(path: str) -> None:
    with FileStore(path, timeout=math.inf) as store, Holder(path) as holder:
        with start_thread(press_ctrl_c, lock_threads), pytest.raises(KeyboardInterrupt):
            store.set("k", "1")
        holder.finish()
        store.set("k", "2")
    assert is_free(path, "ofd")


def press_ctrl_c(condition: Callable[[], Any]) -> None:
    until(condition)
    os.kill(os.getpid(), signal.SIGINT)


# Ends of processes


@every_kernel_kind
def test_interpreter_may_exit_while_it_waits_for_the_lock(path: str, lock: str) -> None:
    program = (
        "import sys, threading, fscoord\n"
        f"store = fscoord.FileStore({path!r}, lock={lock!r}, timeout=60)\n"
        "threading.Thread(target=store.set, args=('k', '1'), daemon=True).start()\n"
        "while not [thread for thread in threading.enumerate() if thread.name == 'fscoord-lock']: pass\n"
        "print('waiting')\n"
    )
    with FileStore(path, lock=lock), Holder(path, lock) as holder:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
        assert (done.returncode, done.stdout, done.stderr) == (0, "waiting\n", "")
        holder.finish()
    assert is_free(path, lock)


def test_participant_that_exits_while_the_holder_is_stopped_prints_nothing(path: str) -> None:
    """Its leaving is lost; but no thread can be started any more, and nothing is printed."""
    program = (
        f"import fscoord; fscoord.FileStore({path!r}, world_size=2, timeout=0.2); print('open', flush=True); input()"
    )
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with FileStore(path), subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as participant:
        assert participant.stdout is not None
        assert participant.stdout.readline() == "open\n"
        with Holder(path):
            assert participant.communicate("\n", timeout=HANG_S) == ("", "")
        assert participant.returncode == 0


@every_kind
def test_holder_that_is_killed_frees_the_lock_and_its_torn_record_is_voided(path: str, lock: str) -> None:
    with FileStore(path, lock=lock, timeout=HANG_S) as store:
        with Holder(path, lock) as holder:
            holder.kill()
        assert store.add("n", 1) == 1
        assert not store.check(["held"])


# Different ideas of the lock


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("first", "second"), [(a, b) for a in KINDS for b in KINDS if a != b])
def test_opener_with_another_lock_than_the_log_has_is_refused(path: str, first: str, second: str, empty: bool) -> None:
    if empty:
        Path(path).touch(0o600)
    with FileStore(path, lock=first) as store:
        store.set("k", "1")
        with pytest.raises(StoreError, match=f'lock="{first}"'):
            FileStore(path, lock=second)
        with FileStore(path, lock=second, read_only=True) as reader:
            assert reader.get("k") == b"1"


def test_openers_of_an_empty_file_that_want_different_locks_agree_on_one(path: str) -> None:
    """All at once: the first process writes the header, and only processes with the same kind of lock get in."""
    Path(path).touch(0o600)
    ready = threading.Barrier(6)

    def opener(lock: str) -> str:
        ready.wait(HANG_S)
        try:
            with FileStore(path, lock=lock, timeout=HANG_S) as store:
                store.add("n", 1)
            return lock
        except StoreError as error:
            return str(error)

    results = [thread.join() for thread in [start_thread(opener, lock) for lock in KINDS * 2]]
    losers = [result for result in results if "this log is locked by" in result]
    (agreed,) = set(results) - set(losers)
    assert agreed in KINDS
    with FileStore(path, lock=agreed) as store:
        assert int(store.get("n")) == len(results) - len(losers)


# Readers that may not write


def suspect(read: Callable[[bool], bool], locked: bool = False) -> bool:
    """Read under the lock, and raise without it, where a reader must look again under the lock."""
    if not locked:
        raise NeedsLock
    return read(locked)


def test_reader_that_waits_for_the_lock_lets_others_of_its_process_work(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(path, timeout=0.05) as store, FileStore(path, read_only=True, timeout=HANG_S) as reader:
        store.set("k", "1")
        with held(path, "ofd") as release:
            monkeypatch.setattr(log_of(reader), "_read", partial(suspect, log_of(reader)._read))
            with start_thread(reader.get, "k") as waiter:
                for _ in range(10):
                    assert store.get("k") == b"1"
                with pytest.raises(StoreTimeoutError):
                    store.set("k", "2")
                assert waiter.is_alive()
                release()
        assert waiter.result == b"1"


def test_reader_passes_a_torn_record_that_looked_like_damage(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lock held, nothing that reading does to its descriptors lets the lock go, or fails."""
    with FileStore(path) as store, FileStore(path, read_only=True) as reader:
        store.set("k", "1")
        with open(path, "ab") as log:
            log.write(b"torn")
        monkeypatch.setattr(log_of(reader), "_read", partial(suspect, log_of(reader)._read))
        assert reader.get("k") == b"1"
        store.set("k", "2")
        assert reader.get("k") == b"2"


def test_damage_seen_without_the_lock_is_looked_at_again_with_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer may be in the middle of voiding the torn record."""
    examine, looks = torn_tail.examine, []

    def examine_too_soon(
        fd: int, offset: int, chain: int, zeros: torn_tail.Zeros, *, durable: bool
    ) -> torn_tail.Verdict:
        looks.append(offset)
        too_soon = torn_tail.Damage(offset, "seen too soon")
        return too_soon if len(looks) == 1 else examine(fd, offset, chain, zeros, durable=durable)

    with FileStore(path) as store, FileStore(path) as reader:
        store.set("k", "1")
        with open(path, "ab") as log:
            log.write(bytes(40))
        monkeypatch.setattr(torn_tail, "examine", examine_too_soon)
        assert reader.get("k") == b"1"
        assert len(looks) == 2
