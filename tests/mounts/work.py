"""The work of agents in the tests of shared mounts, in addition to that of `contract.worker`."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histories.worker import make_calls
from support.internals import log_of
from support.places import wait_in_vain

from fscoord.collectives import barrier, broadcast, gather, synchronize
from fscoord.errors import LockLostError, QueueEmptyError, StoreTimeoutError
from fscoord.recipes import Condition, CyclicBarrier, Election, Event, Item, Lock, Partitioner, Queue
from fscoord.rendezvous import RendezvousParameters, create_handler
from fscoord.status import status
from fscoord.store import Store

if TYPE_CHECKING:
    from mounts.agents import Worker

    from fscoord.stores.file import FileStore

HANG_S = 300
"""How long a wait lasts at most: far longer than any run needs."""


def value(size: int, seed: int) -> bytes:
    """Return `size` bytes that look like no others."""
    return random.Random(seed).randbytes(size)


def set_value(store: Store, key: str, size: int, seed: int) -> None:
    store.set(key, value(size, seed))


def has_value(store: Store, key: str, size: int, seed: int) -> bool:
    return store.get(key) == value(size, seed)


def fingerprint(store: Store) -> dict[str, Any]:
    """Return every key and value."""
    keys = store.list_keys()
    return dict(zip(keys, store.multi_get(keys), strict=True))


# Processes that go on until they are killed


def keep_compacting(worker: Worker, key: str) -> int:
    """Compact again and again until `key` is there; return how often."""
    store, done = worker.stores["store"], 0
    while not store.check([key]):
        store.compact()
        done += 1
    return done


def keep_writing(worker: Worker, name: str) -> None:
    """Append to the key `name` and push to the queue of that name, reporting what was acknowledged, until killed."""
    store = worker.stores["store"]
    for i in itertools.count():
        store.append(name, f"{i} ")
        store.queue_push(name, str(i))
        worker.report(i)


def linger(worker: Worker, key: str) -> bytes:
    """Report, then wait for `key`."""
    worker.report("waiting")
    return worker.stores["store"].get(key)


def linger_without_lock(worker: Worker, key: str) -> bytes:
    """As `linger`, but report only when no operation needs the lock: a process that is stopped with it stops all."""
    wait_in_vain(worker.stores["store"])
    return linger(worker, key)


# Histories


def clock() -> tuple[str, int]:
    """Return which machine's clock this is, and what it says."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(), time.monotonic_ns()


def history(worker: Worker, seed: int, count: int, keys: list[str]) -> None:
    """Make `count` random calls, and report each before and after, as `histories.worker.make_calls` does."""
    make_calls(worker.stores["store"], worker.tell, seed, seed, keys, count)


# File locks, which only their tests import, because they need filelock


def count_under_file_lock(path: str, times: int) -> int:
    """Add 1 to the number in a file, so many times, and each time under the file lock `path`. Return the last sum."""
    from fscoord.integrations.filelock import FsFileLock

    lock, number, found = FsFileLock(path), Path(path + ".number"), 0
    for _ in range(times):
        with lock:
            found = 1 if lock.token == 1 else int(number.read_text()) + 1
            number.write_text(str(found))
    return found


def keep_file_lock(worker: Worker, path: str) -> None:
    """Acquire the lock of the file `path`, report its token, and keep the lock until killed."""
    from fscoord.integrations.filelock import FsFileLock

    with FsFileLock(path) as lock:
        worker.report(lock.token)
        while True:
            signal.pause()


def token_of_file_lock(path: str, timeout: float) -> int | None:
    """Acquire and release the lock of the file `path`. Return the token, or None if the lock is not free in time."""
    import filelock

    from fscoord.integrations.filelock import FsFileLock

    try:
        with FsFileLock(path, timeout) as lock:
            return lock.token
    except filelock.Timeout:
        return None


# Collectives and ends


def exchange(store: Store, rank: int, size: int, length: int, limit: float) -> bool:
    """Exchange `length` bytes with every rank; return whether all arrived whole."""
    data = synchronize(store, value(length, rank), rank, size, "exchange", limit)
    return data == [value(length, other) for other in range(size)]


def broadcast_and_gather(store: Store, rank: int, size: int, limit: float) -> tuple[bytes, list[bytes] | None]:
    told = broadcast(store, b"x" if rank == 0 else None, rank, size, "b", limit)
    return told, gather(store, f"{rank} told {told.decode()}", rank, size, "g", limit)


def come_in_vain(store: Store, rank: int, size: int, limit: float) -> list[str]:
    """Wait up to `limit` seconds at a barrier for ranks that do not come, and return those that the error names."""
    try:
        barrier(store, size, "short", limit, rank)
    except StoreTimeoutError as error:
        return list(error.missing_ranks)
    raise AssertionError("the barrier has passed")


def until_error(store: Store, operation: str, *given: Any) -> None:
    """Do `operation` until it raises: the test's own limit is what ends this if it never does."""
    while True:
        getattr(store, operation)(*given)


# Requests


def requests(path: str) -> int | None:
    """Return how many requests this host has made to the NFS server of `path`, since the mount; None: it is not NFS."""
    counts: dict[str, int] = {}
    point = ""
    for line in Path("/proc/self/mountstats").read_text().splitlines():
        words = line.split()
        if line.startswith("device "):
            point = words[4] if words[words.index("fstype") + 1].startswith("nfs") else ""
        elif point and len(words) > 8 and words[0].endswith(":") and words[0][:-1].isupper() and words[0] != "RPC:":
            counts[point] = counts.get(point, 0) + int(words[1])
    under = [found for found in counts if os.path.commonpath([path, found]) == found]
    return counts[max(under, key=len)] if under else None


def repeat(store: Store, count: int, method: str, *given: Any) -> None:
    """Call `method` again and again."""
    for _ in range(count):
        getattr(store, method)(*given)


def meet_often(store: Store, rank: int, size: int, numbers: Iterable[int], pause: float) -> None:
    """Meet the other ranks at the barriers with these numbers, at each after a pause."""
    for number in numbers:
        time.sleep(pause)
        barrier(store, size, f"often {number}", rank=rank)


# Who lives


def shown_waits(worker: Worker, path: str) -> list[tuple[int | None, str, list[str]]]:
    """Return what is shown to a process that only looks at the store `path`: rank, kind and keys of each wait."""
    found = status(worker.address(path))
    return [
        (each.rank, each.waiting.kind, list(each.waiting.keys))
        for each in found.picture.participants
        if each.waiting is not None
    ]


def session(store: FileStore) -> int:
    return store.register()


def wait_dead(store: Store, number: int) -> None:
    """Return when session `number` is found dead: the test's own limit is what ends this if it never is."""
    while not store.dead_sessions([number]):
        time.sleep(0.2)


def linger_alive(worker: Worker, ranks: list[int]) -> list[int]:
    """Report, then wait for a key that no process sets, as long as `ranks` live."""
    worker.report("waiting")
    return worker.stores["store"].wait_alive(["never"], ranks)


def hold_named_lock(worker: Worker) -> None:
    """Take the lock "named", report, and keep it until killed."""
    with Lock(worker.stores["store"], "named"):
        worker.report("holding")
        signal.pause()


def pass_named_lock(store: Store) -> None:
    with Lock(store, "named"):
        store.set("passed", str(int(store.get("passed")) + 1) if store.check(["passed"]) else "1")


def hold_again(worker: Worker, kind: str) -> None:
    """Acquire and release until the key "over" is there; report each step: what, with what result, when."""
    store = worker.stores["store"]
    lock = {"Lock": Lock, "Election": Election}[kind](store, "held")
    while not store.check(["over"]):
        worker.report(("acquire", None, time.monotonic_ns()))
        lock.acquire()
        worker.report(("acquired", lock.token, time.monotonic_ns()))
        worker.report(("release", None, time.monotonic_ns()))
        lock.release()
        worker.report(("released", True, time.monotonic_ns()))


def put_and_take(worker: Worker, name: str, seed: int) -> None:
    """Put an item, take one, and do it or give it back, until the key "over" is there; report as `hold_again` does."""
    rng, store = random.Random(seed), worker.stores["store"]
    queue = Queue(store, "queue")
    for number in itertools.count():
        if store.check(["over"]):
            return
        worker.report(("put", f"{name}.{number}", time.monotonic_ns()))
        queue.put(f"{name}.{number}")
        worker.report(("take", None, time.monotonic_ns()))
        end_item(worker, queue.take(), "done" if rng.random() < 0.7 else "give back")


def end_item(worker: Worker, item: Item, how: str) -> None:
    name = item.data.decode()
    worker.report(("taken", name, time.monotonic_ns()))
    worker.report((how, name, time.monotonic_ns()))
    item.ack() if how == "done" else item.release()
    worker.report(("ended", name, time.monotonic_ns()))


def drain(worker: Worker) -> None:
    """Take and do what is left, and report it."""
    queue = Queue(worker.stores["store"], "queue")
    while True:
        worker.report(("take", None, time.monotonic_ns()))
        try:
            end_item(worker, queue.take(block=False), "done")
        except QueueEmptyError:
            return


def hold_and_stop(worker: Worker, ttl: float | None) -> str:
    """Acquire "named", stop, and say, when woken, what comes of asking whether it is still held."""
    lock = Lock(worker.stores["store"], "named", ttl=ttl)
    lock.acquire()
    worker.report("holding")
    with log_of(worker.stores["store"]).handle.mutex:  # so that no thread has the log's own lock meanwhile
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        lock.check()
    except LockLostError as error:
        return type(error).__name__
    lock.release()
    return "released"


def await_stop(pid: int) -> None:
    """Return when the process `pid` of this host is stopped: the test's own limit is what ends this if it never is."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


def await_event(store: Store) -> bool:
    return Event(store, "front").wait(HANG_S)


def set_event(store: Store) -> None:
    Event(store, "front").set()


def clear_event(store: Store) -> None:
    Event(store, "front").clear()


def event_is_set(store: Store) -> bool:
    return Event(store, "front").is_set()


def await_notification(worker: Worker) -> bool:
    """Wait in the condition "front" until the key "item" is there; report when the lock is held for the first time."""
    store = worker.stores["store"]
    with Condition(store, "front") as condition:
        worker.report("holding")
        return condition.wait_for(lambda: store.check(["item"]), HANG_S)


def change_and_notify(store: Store) -> None:
    with Condition(store, "front") as condition:
        store.set("item", "1")
        condition.notify_all()


def meet_in_rounds(store: Store, parties: int, rounds: int) -> list[int]:
    """Meet in each round, and return how many others had come before in each."""
    barrier = CyclicBarrier(store, "front", parties)
    return [barrier.wait(HANG_S) for _ in range(rounds)]


def arrived(store: Store, parties: int) -> int:
    return CyclicBarrier(store, "front", parties).n_waiting()


def keep_partitions(worker: Worker, count: int) -> None:
    """Join the partitioner "front", and report the partitions of each change, until killed."""
    with Partitioner(worker.stores["store"], "front", count) as group:
        worker.report(sorted(group.partitions))
        while True:
            worker.report(sorted(group.wait_changed(HANG_S)))


def watch_numbers(worker: Worker, last: int) -> list[int]:
    """Report, then report each number that is set below "watched/", and return all of them, up to `last`."""
    numbers: list[int] = []
    with worker.stores["store"].watch("watched/", timeout=HANG_S) as watch:
        worker.report(-1)
        while not numbers or numbers[-1] != last:
            numbers.append(int(next(watch).value or b"-1"))
            worker.report(numbers[-1])
    return numbers


def set_numbers(store: Store, first: int, end: int) -> None:
    for number in range(first, end):
        store.set(f"watched/{number % 3}", str(number))


def transfer(store: Store, times: int) -> int:
    """Move 1 from "purse/a" to "purse/b", so many times; return how many transactions were refused."""
    done = refused = 0
    while done < times:
        a, b = store.multi_get(["purse/a", "purse/b"])
        moved = {"purse/a": str(int(a) - 1), "purse/b": str(int(b) + 1)}
        if store.transact(compare={"purse/a": a, "purse/b": b}, set=moved, add={"transfers": 1}):
            done += 1
        else:
            refused += 1
    return refused


def take_and_keep(worker: Worker) -> None:
    """Take an item of the queue "queue", report it, and keep it until killed."""
    item = Queue(worker.stores["store"], "queue").take(timeout=HANG_S)
    worker.report((item.data, item.deliveries))
    signal.pause()


def take_and_ack(store: Store) -> tuple[bytes, int]:
    item = Queue(store, "queue").take(timeout=HANG_S)
    item.ack()
    return item.data, item.deliveries


def put_item(store: Store, data: str) -> None:
    Queue(store, "queue").put(data)


def take_named_lock(store: Store) -> bool:
    return Lock(store, "named").acquire()


def try_named_lock(store: Store, limit: float) -> bool:
    """Return whether "named" was to be had in `limit` seconds."""
    lock = Lock(store, "named")
    if not lock.acquire(timeout=limit):
        return False
    lock.release()
    return True


def meet(worker: Worker, path: str, least: int, most: int) -> None:
    """Take part in the rendezvous at `path`, and report each round, until killed."""
    wishes = {"keep_alive_interval": "1", "keep_alive_max_attempt": "30", "last_call_timeout": "1"}
    with create_handler(RendezvousParameters("c10d", worker.address(path), "job", least, most, **wishes)) as handler:
        while True:
            info = handler.next_rendezvous()
            worker.report({"round": handler.round, "rank": info.rank, "world": info.world_size})
            while handler.is_current() and handler.num_nodes_waiting() == 0:
                time.sleep(0.05)
