"""Wait slots: the wait of a session is shown in words after a while, and no fault of the file harms the wait."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from support.disks import fill
from support.faulty import faulty_os
from support.internals import log_of
from support.places import start_thread, until, wait_in_vain
from support.recipes import RECIPES, WAITED_FOR, look_often, new

from fscoord import FileStore, HashStore, PrefixStore, aio, barrier, synchronize
from fscoord._log.format.wait_slot import EMPTY, FILE_HEADER, SLOT_SIZE, WaitSlot
from fscoord._waiting import timing
from fscoord.errors import StoreTimeoutError
from fscoord.recipes import (
    Condition,
    CyclicBarrier,
    Election,
    Event,
    Lock,
    RateLimiter,
    ReadWriteLock,
    Semaphore,
    once,
)
from fscoord.rendezvous import C10dRendezvousBackend, DynamicRendezvousHandler
from fscoord.status import SessionStatus, ShownWait, status
from fscoord.store import Store
from fscoord.stores.file import wait_slots

HANG_S = 60
NO_WAIT = ShownWait("", "", (), 0, 0, 0.0, 0)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def _waits_are_soon_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHOW_S", 0.02)
    look_often(monkeypatch, 0.05)


soon = pytest.mark.usefixtures("_waits_are_soon_shown")


def seen(path: str, rank: int = 0) -> SessionStatus:
    found = [each for each in status(path).picture.participants if each.rank == rank]
    return max(found, key=lambda each: each.waiting is not None)  # a clone of a handle is a session of its rank, too


def wait_of(path: str, rank: int | None = 0) -> ShownWait | None:
    """Return what the rank waits for; None as the rank: what any handle waits for."""
    if rank is None:
        return next((each.waiting for each in status(path).picture.participants if each.waiting), None)
    return seen(path, rank).waiting


def shown(path: str, rank: int | None = 0) -> ShownWait:
    """Return what the rank waits for, as soon as that is shown; see `wait_of`."""
    looks: list[ShownWait | None] = []
    until(lambda: looks.append(wait_of(path, rank)) or looks[-1])  # one look: the wait may end before another
    assert looks[-1] is not None
    return looks[-1]


def slots(path: str) -> list[int]:
    """The sessions whose waits are in the slots, from the first slot on; 0 where a slot is blank."""
    data = Path(path + ".waits").read_bytes()
    found = [data[begin : begin + SLOT_SIZE] for begin in range(SLOT_SIZE, len(data), SLOT_SIZE)]
    decoded = map(WaitSlot.decode, found)
    return [slot.number if slot is not None and slot.number else 0 for slot in decoded]


def slot_of(path: str, number: int) -> bytes:
    """The slot that has the wait of session `number`; `EMPTY` if none has."""
    data = Path(path + ".waits").read_bytes()
    place = slots(path).index(number) + 1 if number in slots(path) else len(data)
    return data[place * SLOT_SIZE : (place + 1) * SLOT_SIZE] or EMPTY


def is_blank(path: str, number: int) -> bool:
    return slot_of(path, number) == EMPTY


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What this process has written into slots so far."""
    slots: list[bytes] = []
    real = wait_slots.write_slot

    def write_slot(log: Any, mode: int, number: int, data: bytes) -> None:
        slots.append(data)
        real(log, mode, number, data)

    monkeypatch.setattr(wait_slots, "write_slot", write_slot)
    return slots


def wait_until_shown(wait: Callable[[float], object], written: list[bytes]) -> str:
    """Wait in vain, and longer each time, until the wait was shown; return what its error says.

    On a busy machine a short time is over before the first look that would show the wait.
    """
    limit, before = 0.1, len(written)
    while True:
        with pytest.raises(StoreTimeoutError) as caught:
            wait(limit)
        if len(written) > before:
            return str(caught.value)
        assert limit < HANG_S
        limit *= 2


# -- what is shown -----------------------------------------------------------------------------------------------------

END_S = HANG_S


def wait_for_a_notification(store: Store) -> None:
    with Condition(store, "front") as condition:
        condition.wait(END_S)


def notify(store: Store) -> None:
    with Condition(store, "front") as condition:
        condition.notify()


WAITS: dict[str, tuple[Callable[[Store], object], Callable[[Store, Any], object], str]] = {
    "get": (lambda store: store.get("plan"), lambda store, _: store.set("plan", "x"), "key 'plan'"),
    "wait": (
        lambda store: store.wait(["plan", "b", "c", "d"]),
        lambda store, _: store.multi_set(["plan", "b", "c", "d"], ["1"] * 4),
        "keys 'plan', 'b' and 2 more",
    ),
    "queue_pop": (
        lambda store: store.queue_pop("work"),
        lambda store, _: store.queue_push("work", "x"),
        "queue 'work'",
    ),
    "barrier": (
        lambda store: barrier(store, 2, "epoch 7", END_S, 0),
        lambda store, _: barrier(store, 2, "epoch 7", END_S, 1),
        "barrier 'epoch 7'",
    ),
    "barrier without ranks": (
        lambda store: barrier(store, 2, "epoch 7", END_S),
        lambda store, _: barrier(store, 2, "epoch 7", END_S),
        "barrier 'epoch 7'",
    ),
    "barrier that fails fast": (
        lambda store: barrier(store, 2, "epoch 7", END_S, 0, fail_fast=True),
        lambda store, _: barrier(store, 2, "epoch 7", END_S, 1),
        "barrier 'epoch 7'",
    ),
    "synchronize": (
        lambda store: synchronize(store, "a", 0, 2, "addresses", END_S),
        lambda store, _: synchronize(store, "b", 1, 2, "addresses", END_S),
        "exchange 'addresses'",
    ),
    "Lock": (
        lambda store: Lock(store, "dataset").acquire(timeout=END_S),
        lambda _, holder: holder.release(),
        "lock 'dataset'",
    ),
    "Semaphore": (
        lambda store: Semaphore(store, "dataset").acquire(timeout=END_S),
        lambda _, holder: holder.release(),
        "semaphore 'dataset'",
    ),
    "writer": (
        lambda store: ReadWriteLock(store, "dataset").writer.acquire(timeout=END_S),
        lambda _, holder: holder.release(),
        "lock 'dataset'",
    ),
    "campaign": (
        lambda store: Election(store, "dataset").campaign(END_S),
        lambda _, holder: holder.release(),
        "election 'dataset'",
    ),
    "once": (
        lambda store: once(store, "dataset", lambda: b"x"),
        lambda _, holder: holder.release(),
        "work 'dataset'",
    ),
    "Event": (
        lambda store: Event(store, "front").wait(END_S),
        lambda store, _: Event(store, "front").set(),
        "event 'front'",
    ),
    "Condition": (
        wait_for_a_notification,
        lambda store, _: notify(store),
        "condition 'front'",
    ),
    "RateLimiter": (
        lambda store: [RateLimiter(store, "front", 1, 3600, 1).acquire(timeout=2 * 3600) for _ in range(2)],
        lambda store, _: store.set("front/bucket", "0"),
        "rate limiter 'front'",
    ),
    "watch": (
        lambda store: next(iter(store.watch("front/"))),
        lambda store, _: store.set("front/x", "1"),
        "a change of a key that begins with 'front/'",
    ),
    "CyclicBarrier": (
        lambda store: CyclicBarrier(store, "front", 2).wait(END_S),
        lambda store, _: CyclicBarrier(store, "front", 2).wait(END_S),
        "cyclic barrier 'front'",
    ),
    **{
        name: (
            lambda store, name=name: RECIPES[name].wait(new(name, store, "front"), timeout=END_S),  # type: ignore[misc]
            lambda store, _, name=name: RECIPES[name].end(new(name, store, "front")),  # type: ignore[misc]
            f"{recipe.waits_for} 'front'",
        )
        for name, recipe in WAITED_FOR.items()
    },
}
HOLDERS: dict[str, Callable[[Store, str], Any]] = {
    "Semaphore": Semaphore,
    "writer": lambda store, name: ReadWriteLock(store, name).reader,
}


@soon
@pytest.mark.parametrize("prefix", ["", "job"])
@pytest.mark.parametrize("name", WAITS)
def test_wait_is_shown_in_words_and_its_slot_is_cleared_at_its_end(name: str, prefix: str, path: str) -> None:
    """Without the prefix, the waiter is a handle that has not registered when it begins to wait."""
    wait, end, words = WAITS[name]
    rank = 0 if prefix else None
    with FileStore(path, timeout=HANG_S, rank=rank) as waiter, FileStore(path, timeout=HANG_S) as other:
        wait_in_vain(other)  # it writes that there is a bell, as the first wait of a log does
        inner, outer = (PrefixStore(prefix, each) if prefix else each for each in (waiter, other))
        holder = HOLDERS.get(name, Lock)(outer, "dataset")
        if "dataset" in words:
            holder.acquire()
        with start_thread(wait, inner):
            found = shown(path, rank)
            end(outer, holder)
        number = waiter.register()
        if name == "barrier without ranks" and prefix:
            words = "barrier 'job/epoch 7'"  # by its key, because it gives no words
        if name == "watch" and prefix:
            words = words.replace("front/", "job/front/")
        key = f"{prefix}/" if prefix and found.name == "" else ""
        assert found.words() == words.replace("'plan', 'b'", f"'{key}plan', '{key}b'").replace(
            "key 'plan'", f"key '{key}plan'"
        ).replace("queue 'work'", f"queue '{key}work'")
        assert 0 < found.seconds < HANG_S
        assert is_blank(path, number)
        assert wait_of(path, rank) is None


@soon
def test_rendezvous_is_shown_by_its_name(path: str) -> None:
    with FileStore(path, timeout=HANG_S, rank=0) as store:

        def join(node: Store) -> object:
            backend = C10dRendezvousBackend(node, "job")
            handler = DynamicRendezvousHandler.from_backend("job", node, backend, 2, 2)
            with handler:
                return handler.next_rendezvous().world_size

        with FileStore(path, timeout=HANG_S) as other, start_thread(join, store) as first:
            assert shown(path).words() == "rendezvous 'job'"
            with start_thread(join, other) as second:
                pass
        assert (first.result, second.result) == (2, 2)


@soon
@pytest.mark.parametrize("coherence", ["direct", "locked"])
def test_waits_on_a_mount_that_hosts_share_are_shown_also_beside_the_poller(coherence: str, path: str) -> None:
    """The wait that does not poll looks once in ten seconds; it is shown sooner."""
    with (
        FileStore(path, timeout=HANG_S, rank=0, coherence=coherence) as one,
        FileStore(path, timeout=HANG_S, rank=1, coherence=coherence) as two,
        FileStore(path, timeout=HANG_S, coherence=coherence) as other,
    ):
        numbers = one.register(), two.register()
        with start_thread(one.get, "a"), start_thread(two.get, "b"):
            until(lambda: all(each.waiting for each in status(one).picture.participants if each.rank is not None))
            found = [each.waiting.words() for each in status(one).picture.participants if each.waiting]
            other.multi_set(["a", "b"], ["1", "1"])
        assert found == ["key 'a'", "key 'b'"]
        assert [is_blank(path, number) for number in numbers] == [True, True]


@soon
def test_tasks_fill_the_slot_of_their_handle(path: str) -> None:
    async def run() -> None:
        async with aio.AsyncStore(FileStore(path, timeout=HANG_S, rank=0)) as store:
            number = await store.register()
            tasks = [asyncio.create_task(store.get(f"k{place}")) for place in range(3)]
            tasks.append(asyncio.create_task(aio.Lock(store, "l").acquire(timeout=HANG_S)))
            found = None
            while found is None or found.more != 3:
                await asyncio.sleep(0)
                found = await asyncio.to_thread(wait_of, path)
            assert found.words() == "key 'k0'"
            tasks[0].cancel()
            while found is None or found.more != 2:
                found = await asyncio.to_thread(wait_of, path)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert is_blank(path, number)

    with FileStore(path, timeout=HANG_S) as other, Lock(other, "l"):
        asyncio.run(run())


@soon
def test_longest_wait_of_several_threads_is_shown_and_the_others_counted(path: str) -> None:
    with FileStore(path, timeout=HANG_S, rank=0) as store, FileStore(path, timeout=HANG_S) as other:
        with start_thread(store.get, "first"):
            assert shown(path).more == 0
            with start_thread(store.get, "second"), start_thread(store.get, "third"):
                until(lambda: (wait_of(path) or NO_WAIT).more == 2)
                assert shown(path).words() == "key 'first'"
                other.set("first", "x")
                until(lambda: shown(path).words() != "key 'first'")
                assert shown(path).more == 1
                other.multi_set(["second", "third"], ["x", "x"])
        assert is_blank(path, store.register())


@soon
def test_wait_that_ends_without_its_condition_is_shown_no_more(path: str, written: list[bytes]) -> None:
    with FileStore(path, timeout=HANG_S, rank=0) as store, FileStore(path) as other, Lock(other, "l"):
        for wait in (
            lambda limit: store.wait(["never"], limit),
            lambda limit: Lock(store, "l", timeout=limit).__enter__(),
            lambda limit: barrier(store, 2, "b", limit, 0),
        ):
            assert wait_until_shown(wait, written).endswith(f"; to look closer, run fscoord ps {path}")
            assert is_blank(path, store.register())


@soon
def test_handle_that_only_reads_shows_no_wait(path: str) -> None:
    with FileStore(path) as other, FileStore(path, timeout=HANG_S, read_only=True) as reader:
        other.set("a", "1")
        with pytest.raises(StoreTimeoutError):
            reader.wait(["never"], 0.3)
        assert not os.path.exists(path + ".waits")


@soon
@pytest.mark.parametrize("lock", ["ofd", "soft"])
def test_wait_of_a_store_that_is_closed_is_shown_no_more(path: str, lock: str) -> None:
    store = FileStore(path, timeout=HANG_S, rank=0, lock=lock)
    number = store.register()

    def wait() -> None:
        with suppress(Exception):
            store.get("never")

    with start_thread(wait):
        shown(path)
        store.close()
    assert is_blank(path, number) or lock == "ofd"  # a closed store has no lock on the slot, and does not write it
    assert wait_of(path) is None


@soon
def test_child_of_a_fork_does_not_touch_the_slot_of_its_parent(path: str, written: list[bytes]) -> None:
    with FileStore(path, timeout=HANG_S, rank=0) as store, FileStore(path) as other:
        number = store.register()
        with start_thread(store.get, "k"):
            shown(path)
            before = slot_of(path, number)
            pid = os.fork()
            if pid == 0:
                status_code = 1
                try:
                    store.announce_rank(7)
                    wait_until_shown(lambda limit: store.wait(["never"], limit), written)
                    status_code = 0 if store.register() != number and is_blank(path, store.register()) else 2
                finally:
                    os._exit(status_code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert slot_of(path, number) == before
            other.set("k", "x")


# -- short waits -------------------------------------------------------------------------------------------------------


def test_waits_shorter_than_a_second_make_no_call_for_slots(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are the calls that name the file, and with them every write to a slot: each opens the file.

    On a busy machine they take longer than a second. So they are compared with a longer time.
    """
    assert timing.SHOW_S == 1.0
    monkeypatch.setattr(timing, "SHOW_S", 2.0 * HANG_S)
    with FileStore(path, timeout=HANG_S, rank=0) as store, FileStore(path, timeout=HANG_S, rank=1) as other:
        with faulty_os() as faulty:
            with start_thread(barrier, store, 2, "b", HANG_S, 0):
                barrier(other, 2, "b", HANG_S, 1)
            for wait in (lambda: store.wait(["never"], 0.3), lambda: barrier(store, 2, "c", 0.3, 0)):
                with pytest.raises(StoreTimeoutError):
                    wait()
            with Lock(other, "l"), pytest.raises(StoreTimeoutError):
                Lock(store, "l", timeout=0.3).__enter__()
            named = [call for call in faulty.calls if isinstance(call[1], str) and ".waits" in call[1]]
        assert named == []
    assert not os.path.exists(path + ".waits")


@soon
def test_long_wait_writes_its_slot_once_and_clears_it_once(path: str, written: list[bytes]) -> None:
    with FileStore(path, timeout=HANG_S, rank=0) as store, FileStore(path) as other:
        held = Lock(other, "l")
        held.acquire()
        with start_thread(Lock(store, "l").acquire, True, HANG_S):
            until(lambda: (wait_of(path) or NO_WAIT).seconds > 0.3)  # after several looks
            held.release()
    assert [data == EMPTY for data in written] == [False, True]


# -- what may happen to slots ------------------------------------------------------------------------------------------


@soon
@pytest.mark.parametrize("how", ["foreign", "symlink", "directory", "torn", "short", "stale"])
def test_file_that_is_not_one_of_slots_is_left_alone_and_the_wait_goes_on(
    how: str, path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fscoord")
    name = Path(path + ".waits")
    foreign = b"somebody's notes\n" * 1000
    with FileStore(path, timeout=HANG_S, rank=0) as store, FileStore(path, timeout=HANG_S) as other:
        number = store.register()
        if how == "foreign":
            name.write_bytes(foreign)
            name.chmod(0o600)
        elif how == "symlink":
            (tmp_path / "elsewhere").write_bytes(foreign)
            name.symlink_to(tmp_path / "elsewhere")
        elif how == "directory":
            name.mkdir()
        elif how == "torn":
            name.write_bytes(FILE_HEADER + b"\1" * SLOT_SIZE * 2)
            name.chmod(0o600)
        elif how == "short":
            name.write_bytes(b"")
            name.chmod(0o600)
        else:
            slot = WaitSlot(number, 1, 1, b"x" * 16, 1, 0, 1, 1, "key", "", 0, (b"k",), 1)
            name.write_bytes(FILE_HEADER + slot.encode() * 3)
            name.chmod(0o600)
        before = status(path)
        assert before.picture.participants[0].waiting is None
        assert ([note for note in before.picture.notes if "can't be read" in note] != []) == (
            how in ("torn", "symlink", "directory")
        )
        with start_thread(store.get, "k"):
            if how in ("foreign", "symlink", "directory"):
                until(lambda: caplog.records)
                assert "store.waits can't be written" in caplog.records[0].getMessage()
                assert status(path).picture.notes != ()
            else:
                assert shown(path).words() == "key 'k'"
            other.set("k", "x")
    if how in ("foreign", "symlink"):
        assert name.read_bytes() == foreign


@soon
@pytest.mark.parametrize("name", ["open", "fstat", "pread", "pwrite", "link"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.ESTALE, errno.EINTR, errno.ENOLCK])
def test_slot_whose_calls_fail_costs_no_wait(name: str, error: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that the publication makes fails, and no other."""
    with FileStore(path, timeout=HANG_S, rank=0) as store, FileStore(path, timeout=HANG_S) as other:
        real, ended = wait_slots.write_slot, list[BaseException | None]()

        def write_slot(*arguments: Any) -> None:
            try:
                with faulty_os() as faulty, faulty.fail(0, error, names=(name,), for_good=True):
                    real(*arguments)
            except BaseException as problem:
                ended.append(problem)
                raise
            ended.append(None)

        monkeypatch.setattr(wait_slots, "write_slot", write_slot)
        with start_thread(store.get, "k") as waiter:
            until(lambda: ended)  # and no call of this thread meanwhile, which would fail, too
            other.set("k", "x")
        assert waiter.result == b"x"
        assert all(problem is None or isinstance(problem, Exception) for problem in ended)


@soon
@pytest.mark.parametrize("rank", [0, None], ids=["registered", "not registered"])
def test_full_disk_costs_the_slot_and_not_the_wait(
    rank: int | None, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fscoord")
    path = str(small_disk / "store")
    with FileStore(path, timeout=HANG_S, rank=rank) as store, FileStore(path, timeout=HANG_S) as other:
        wait_in_vain(other)
        fill(small_disk)
        with start_thread(store.get, "k"):
            until(lambda: [each for each in caplog.records if ".waits can't be written" in each.getMessage()])
            assert wait_of(path, rank) is None
            os.unlink(small_disk / "ballast")
            other.set("k", "x")


HOLDER = """
import os, signal, sys
from fscoord import FileStore
def stop(_, __):
    os.kill(os.getpid(), signal.SIGSTOP)
    return None, 0, b""
FileStore(sys.argv[1])._log.update(0, b"", b"", stop, 60)
"""


@soon
def test_wait_that_cannot_register_goes_on_and_is_shown_when_the_log_is_free(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        wait_in_vain(other)
        holder, refused = subprocess.Popen([sys.executable, "-c", HOLDER, path]), list[StoreTimeoutError]()
        register = log_of(store).register

        def note(limit: float) -> int:
            try:
                return register(limit)
            except StoreTimeoutError as error:
                refused.append(error)
                raise

        monkeypatch.setattr(log_of(store), "register", note)
        try:
            assert os.WIFSTOPPED(os.waitpid(holder.pid, os.WUNTRACED)[1])
            with start_thread(store.get, "k") as waiter:
                until(lambda: len(refused) > 1)
                assert wait_of(path, None) is None
                holder.send_signal(signal.SIGCONT)
                assert shown(path, None).words() == "key 'k'"
                other.set("k", "x")
            assert waiter.result == b"x"
        finally:
            holder.kill()
            holder.wait(HANG_S)


WAITER = """
import sys
from fscoord import FileStore
from fscoord._waiting import timing
timing.SHOW_S = 0.02
FileStore(sys.argv[1], rank=int(sys.argv[2]), timeout=60).get("never")
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_slot_of_a_killed_process_is_ignored_and_of_a_stopped_one_shown(path: str, end: signal.Signals) -> None:
    FileStore(path).close()
    child = subprocess.Popen([sys.executable, "-c", WAITER, path, "3"])
    try:
        until(lambda: any(each.rank == 3 and each.waiting for each in status(path).picture.participants))
        child.send_signal(end)
        if end == signal.SIGKILL:
            child.wait(HANG_S)
            assert (seen(path, 3).alive, seen(path, 3).waiting) == ("no", None)
        else:
            until(lambda: seen(path, 3).is_stopped)
            assert shown(path, 3).words() == "key 'never'"
    finally:
        child.kill()
        child.wait(HANG_S)


@soon
def test_file_of_slots_goes_with_the_log_at_the_end_of_its_life(path: str, written: list[bytes]) -> None:
    with FileStore(path, 1, timeout=HANG_S, rank=0) as store:
        wait_until_shown(lambda limit: store.wait(["never"], limit), written)
        assert os.path.exists(path + ".waits")
    assert os.listdir(os.path.dirname(path)) == []


@soon
def test_file_of_slots_has_the_mode_of_the_log(path: str, written: list[bytes]) -> None:
    with FileStore(path, timeout=HANG_S, rank=0, mode=0o660) as store:
        wait_until_shown(lambda limit: store.wait(["never"], limit), written)
    assert os.stat(path + ".waits").st_mode & 0o777 == 0o660


def test_status_of_a_store_in_memory_says_what_it_can_not_show() -> None:
    with HashStore() as store, Lock(store, "l"):
        found = status(store)
        assert found.picture.participants == ()
        assert [line.name for line in found.picture.lines] == ["l"]
        assert any("no sessions" in note for note in found.picture.notes)


def test_status_writes_nothing(path: str) -> None:
    with FileStore(path, rank=0):
        before = {
            name: os.stat(os.path.join(os.path.dirname(path), name)).st_mtime_ns
            for name in os.listdir(os.path.dirname(path))
        }
        status(path)
        after = {
            name: os.stat(os.path.join(os.path.dirname(path), name)).st_mtime_ns
            for name in os.listdir(os.path.dirname(path))
        }
        assert before == after


def test_session_whose_log_was_compacted_keeps_its_slot(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHOW_S", 0.02)
    with FileStore(path, timeout=HANG_S, rank=0) as store, FileStore(path, timeout=HANG_S) as other:
        with start_thread(store.get, "k"):
            shown(path)
            other.compact()
            assert shown(path).words() == "key 'k'"
            other.set("k", "x")
        assert log_of(store).handle.header.generation == 1


@soon
def test_slots_of_ended_sessions_are_used_again(
    path: str, written: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions come, wait and end, while the first one waits. Half of them do not clear their slots."""
    monkeypatch.setattr(wait_slots, "BLOCK", 4)
    with FileStore(path, timeout=HANG_S, rank=0) as first, start_thread(first.get, "k"):
        shown(path)
        for turn in range(6):
            with FileStore(path, timeout=HANG_S) as store:
                store.register()
                wait_until_shown(partial(store.wait, ["never"]), written)
                if turn % 2:
                    wait_slots.write_slot(log_of(store), 0o600, store.register(), written[0])
        assert shown(path).words() == "key 'k'"
        assert os.stat(path + ".waits").st_size <= (1 + 4) * SLOT_SIZE
        with FileStore(path) as other:
            other.set("k", "x")


@soon
def test_sessions_that_wait_have_a_slot_each_which_a_kill_frees(path: str) -> None:
    FileStore(path).close()
    with ExitStack() as stack:
        children = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", WAITER, path, str(rank)])) for rank in range(4)
        ]
        try:
            until(lambda: {each.rank for each in status(path).picture.participants if each.waiting} == set(range(4)))
            taken = slots(path)
            assert sorted(filter(None, taken)) == sorted({seen(path, rank).number for rank in range(4)})
            gone = seen(path, 0).number
            children[0].kill()
            children[0].wait(HANG_S)
            assert seen(path, 0).waiting is None
            with FileStore(path, timeout=HANG_S, rank=9) as store:
                wait_slots.write_slot(log_of(store), 0o600, store.register(), EMPTY)  # locks a slot, and clears it
            assert [each for each in slots(path) if each not in (0, gone)] == [
                each for each in taken if each not in (0, gone)
            ]
        finally:
            for child in children:
                child.kill()
                child.wait(HANG_S)


@soon
def test_session_that_lost_the_lock_on_its_slot_takes_another(path: str) -> None:
    """A lost connection to a file server drops locks, and then another session may have the slot."""
    with FileStore(path, timeout=HANG_S, rank=0) as store, FileStore(path, timeout=HANG_S, rank=1) as other:
        number = store.register(), other.register()
        with start_thread(store.get, "k"):
            shown(path)
            file = log_of(store).liveness.file
            assert file is not None
            file._lock(fcntl.F_UNLCK, (1 << 62) + file._slots[0])
            with start_thread(other.get, "k"):
                shown(path, 1)
                with start_thread(store.get, "l"):
                    until(lambda: wait_of(path) != NO_WAIT and shown(path).more == 1)
                    assert sorted(filter(None, slots(path)))[-2:] == sorted(number)
                    other.multi_set(["k", "l"], ["x", "x"])


@soon
def test_session_without_a_lock_in_the_liveness_file_writes_no_slot(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fscoord")
    with FileStore(path, timeout=HANG_S, rank=0) as store, FileStore(path, timeout=HANG_S) as other:
        store.register()
        log_of(store).liveness.lose()
        with start_thread(store.get, "k"):
            until(lambda: "no slot is free" in caplog.text)
            other.set("k", "x")
    assert not os.path.exists(path + ".waits")


def test_slot_numbers_of_consecutive_sessions_differ_and_end() -> None:
    first = [next(wait_slots._candidates(number)) for number in range(1000, 1000 + wait_slots.BLOCK)]
    assert sorted(first) == list(range(1, 1 + wait_slots.BLOCK))
    every = [list(wait_slots._candidates(number)) for number in range(200)]
    assert max(map(max, every)) < wait_slots.SLOTS_MAX
    assert all(len(set(numbers)) == len(numbers) for numbers in every)


# The bytes of a slot


def test_foreign_bytes_with_a_right_checksum_never_raise() -> None:
    rng = random.Random(random.randrange(1 << 32))
    for _ in range(2000):
        body = rng.randbytes(SLOT_SIZE - 4) if rng.random() < 0.5 else bytes(rng.choices((0, 1, 255), k=SLOT_SIZE - 4))
        WaitSlot.decode(crc32(body).to_bytes(4, "little") + body)


def test_keys_that_do_not_fit_are_left_out_and_counted() -> None:
    keys = tuple(b"%04d" % number * 100 for number in range(50))
    slot = WaitSlot(3, 4711, 12345, b"b" * 16, 1_700_000_000_000_000_000, 2, 1, 99, "barrier", "epoch 7", 64, keys, 50)
    found = WaitSlot.decode(slot.encode())
    assert found is not None
    assert 5 < len(found.keys) < 20
    assert found.keys == keys[: len(found.keys)]
    assert found.key_count == 50
