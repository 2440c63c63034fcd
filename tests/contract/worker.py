"""The other processes of the contract suite: ``python worker.py WHAT STORE ARGUMENTS``, all but the first in JSON.

Every worker opens a handle of its own, says that it is there, waits for the start, works, and prints its result.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from contract.opening import open_spec
from support.internals import log_of, timing

import fscoord
from fscoord.barriers import StoreBarrier
from fscoord.collectives import barrier, synchronize, tree_barrier
from fscoord.collectives.tree import TreeCall
from fscoord.errors import FscoordError, LockLostError, QueueEmptyError, StaleTokenError, StoreTimeoutError
from fscoord.recipes import (
    CyclicBarrier,
    Election,
    Fenced,
    Lock,
    Membership,
    Partitioner,
    Queue,
    RankZeroFirst,
    RateLimiter,
    ReadWriteLock,
    Semaphore,
    once,
)
from fscoord.store import Store, run_blocking
from fscoord.stores.file import FileStore

HANG_S = 60
START_S = 600
"""How long 32 processes may take until the last has begun, on a machine that is busy."""


def add(store: Store, count: int) -> list[int]:
    return [store.add("n", 1) for _ in range(count)]


def append(store: Store, rank: int, count: int) -> None:
    for i in range(count):
        store.append("text", f"{rank}.{i} ")


def append_same(store: Store, count: int) -> None:
    for _ in range(count):
        store.append("text", "x")


def compare_set(store: Store, count: int) -> int:
    """Count with compare_set alone; return how often it was too late."""

    def settled() -> bytes:
        while b" " in (current := store.get("n")):
            pass
        return current

    late = 0
    for _ in range(count):
        current = settled()
        while True:
            wanted = b"%d" % (int(current) + 1)
            found = store.compare_set("n", current, wanted + b" by %d" % os.getpid())
            if found == wanted + b" by %d" % os.getpid():
                store.set("n", wanted)
                break
            late += 1
            current = settled() if b" " in found else found
    return late


def move(store: Store, rank: int, size: int, count: int) -> list[str]:
    """Push `count` items, and pop as many, of any process."""
    taken = []
    for i in range(count):
        store.queue_push("q", f"{rank}.{i}")
        taken.append(store.queue_pop("q").decode())
    return taken


def drain(store: Store) -> list[str]:
    """Pop all that is there."""
    taken = []
    while True:
        try:
            taken.append(store.queue_pop("q", block=False).decode())
        except QueueEmptyError:
            return taken


def pair(store: Store, rank: int, count: int) -> bool:
    """Set two keys to the same value, again and again; return whether they were ever seen to differ."""
    differed = False
    for i in range(count):
        store.multi_set(["a", "b"], [f"{rank}.{i}"] * 2)
        first, second = store.multi_get(["a", "b"])
        differed |= first != second
    return differed


def relay(store: Store, rank: int, size: int, count: int) -> None:
    """Pass a token around: each waits for the one before it."""
    for i in range(count):
        if (rank, i) != (0, 0):
            store.wait([f"token{i}.{rank}"])
        after = (i, rank + 1) if rank + 1 < size else (i + 1, 0)
        store.set(f"token{after[0]}.{after[1]}", "1")


def barriers(store: Store, rank: int, size: int, count: int) -> None:
    for i in range(count):
        barrier(store, size, f"ranked{i}", HANG_S, rank)
        barrier(store, size, f"unranked{i}", HANG_S)


def execute_barriers(store: Store, rank: int, size: int, count: int) -> int:
    barrier = StoreBarrier(store, "row", rank=rank, world_size=size, timeout=HANG_S)
    for _ in range(count):
        barrier.execute_barrier()
    return barrier.sequence


def block_for_ever(store: Store, name: str) -> None:
    """Be rank 0 in its block, to be killed."""
    with RankZeroFirst(store, name, 0):
        store.set("working", "1")
        store.wait(["never"])


def wait_at_a_barrier(store: Store) -> None:
    """Wait at a barrier for many others, to be killed."""
    CyclicBarrier(store, "b", 9, START_S).wait()


def wait_for_a_token(store: Store) -> None:
    """Take the only token of an hour, and wait for the next one, to be killed."""
    limiter = RateLimiter(store, "r", 1, per=3600)
    limiter.acquire()
    limiter.acquire(timeout=2 * 3600)


def hold(store: Store, name: str) -> None:
    """Acquire a lock and keep it, to be killed."""
    with Lock(store, name):
        store.wait(["never"])


def count_under_lock(store: Store, name: str, times: int) -> int:
    """Count with get and set alone, and write down every token."""
    lock = Lock(store, name)
    for _ in range(times):
        with lock:
            count = int(store.get("n"))
            store.append("tokens", f"{lock.token} ")
            store.set("n", str(count + 1))
            lock.check()
    return times


def wake_up_and_write(store: Store, name: str, ttl: float) -> list[str]:
    """Acquire a lock, stop and lose it, wake up, and return what comes of asking and of writing."""
    lock = Lock(store, name, ttl=ttl)
    lock.acquire()
    with log_of(store).handle.mutex:  # so that no thread has the log's own lock meanwhile
        os.kill(os.getpid(), signal.SIGSTOP)
    found = []
    for call in (lock.check, lambda: Fenced(store, "value").set("old", lock.token)):
        try:
            call()
        except LockLostError as error:
            found.append(type(error).__name__)
    return found


class Journal:
    """A file to which a process that may be killed at any time adds a line with each step."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, *words: object) -> None:
        os.write(self._fd, (" ".join(map(str, (time.monotonic(), os.getpid(), *words))) + "\n").encode())


def hold_again(store: Store, kind: str, journal: str) -> None:
    """Acquire and release until it is over, and note when."""
    lock = {"Lock": Lock, "Election": Election}[kind](store, "l")
    steps = Journal(journal)
    while not store.check(["over"]):
        steps.note("acquire")
        lock.acquire()
        steps.note("acquired", lock.token)
        steps.note("release")
        lock.release()
        steps.note("released")


def write_again(store: Store, ttl: float, stop_at: int, journal: str) -> None:
    """Write a fenced value under a lock until it is over, and note what came of it; stop once, before a write."""
    lock, value = Lock(store, "l", ttl=ttl), Fenced(store, "value")
    steps, count = Journal(journal), 0
    while not store.check(["over"]):
        with suppress(LockLostError), lock:
            steps.note("token", lock.token)
            for _ in range(3):
                count += 1
                if count == stop_at:
                    with log_of(store).handle.mutex:  # so that no thread has the log's own lock meanwhile
                        os.kill(os.getpid(), signal.SIGSTOP)
                steps.note("write", lock.token)
                try:
                    value.set(f"{os.getpid()}", lock.token)
                except StaleTokenError:
                    steps.note("refused")
                else:
                    steps.note("written")


def hold_semaphore(store: Store, name: str, value: int) -> None:
    with Semaphore(store, name, value):
        store.wait(["never"])


def work_for_ever(store: Store, name: str) -> None:
    def work() -> bytes:
        store.set("working", "1")
        store.wait(["never"])
        return b""

    once(store, name, work)


def exchange(store: Store, rank: int, size: int) -> list[str]:
    return [data.decode() for data in synchronize(store, f"from {rank}", rank, size, "s", HANG_S)]


def time_out(store: Store, rank: int, size: int, callers: int) -> Any:
    """Time out at a barrier, and when all `callers` have, again: then each knows of every other."""

    def come() -> Any:
        try:
            barrier(store, size, "late", 0.01, rank, lambda missing: f"host{missing}", HANG_S)
        except FscoordError as error:
            return type(error).__name__, str(error), getattr(error, "missing_ranks", None)
        return None

    come()
    barrier(store, callers, "all have come", HANG_S)
    return come()


@contextmanager
def tree(store: Any, rank: int, group_size: int) -> Iterator[tuple[Store, Store]]:
    """Yield the store of the group of `rank`, and the root. They are logs beside that of `store`."""
    with (
        FileStore(f"{store.path}-group-{rank // group_size}", timeout=HANG_S) as group,
        FileStore(f"{store.path}-root", timeout=HANG_S) as root,
    ):
        yield group, root


def tree_barriers(store: Store, rank: int, world_size: int, group_size: int, count: int) -> None:
    timing.SHOW_S = 0.05  # type: ignore[misc]  # tests look at what these processes wait for
    with tree(store, rank, group_size) as stores:
        for i in range(count):
            tree_barrier(*stores, rank, world_size, group_size, f"t{i}", HANG_S)


def time_out_in_tree(store: Store, rank: int, world_size: int, group_size: int, callers: int, dies: int) -> Any:
    """Time out in a tree, where rank `dies` waits to be killed. After two times all callers have arrived everywhere."""
    found = None
    with tree(store, rank, group_size) as stores:
        if dies >= 0:
            tree_barrier(*stores, rank, world_size, group_size, "all live", HANG_S)
            if rank == dies:
                store.set("dies", "1")
            store.wait(["never" if rank == dies else "killed"])
        for i in range(3):
            try:
                tree_barrier(*stores, rank, world_size, group_size, "late", 0.01, trace_timeout=HANG_S)
            except StoreTimeoutError as error:
                found = str(error), error.missing_ranks, error.dead_ranks
            barrier(store, callers, f"time-out {i}", HANG_S)
    return found


def stop_in_tree(store: Store, rank: int, world_size: int, group_size: int, last: str) -> None:
    """Carry out the steps of a tree barrier up to `last`, to be killed."""
    with tree(store, rank, group_size) as (group, root):
        call = TreeCall(group, root, rank, world_size, group_size, "t0", HANG_S, 0.0)
        run_blocking(group, call.arrive())
        if last == "meet":
            run_blocking(root, call.meet())
        store.set("stopped", "1")
        store.wait(["never"])


def take_and_keep(store: Store, name: str) -> None:
    """Take an item and keep it, to be killed."""
    Queue(store, name).take()
    store.queue_push("taken", "")
    store.wait(["never"])


def take_and_do(store: Store, name: str) -> None:
    """Take items and do them for ever, to be killed."""
    while True:
        with Queue(store, name).take() as item:
            store.add(f"did/{item.data.decode()}", 1)


def put_batches(store: Store, name: str, rank: int) -> None:
    """Put items for ever, to be killed. Each is in the value `put` when it is in the queue."""
    queue = Queue(store, name, maxsize=60)
    for number in count():
        values = [f"{rank}.{number}.{part}" for part in range(5)]
        queue.put_all(values)
        store.append("put", " ".join(values) + " ")


def take_batches(store: Store, name: str) -> None:
    """Take and acknowledge items for ever, to be killed; push each batch to the queue `acked` afterwards.

    An item that comes after it was acknowledged is in the value `again`.
    """
    queue = Queue(store, name)
    while True:
        batch = queue.take_all(3)
        values = [item.data.decode() for item in batch]
        store.append("taken", " ".join(values) + " ")
        for value in values:
            if store.check([f"acked/{value}"]):
                store.append("again", f"{value} ")
        queue.ack_all(batch)
        store.multi_set([f"acked/{value}" for value in values], ["1"] * len(values))
        store.queue_push("rounds", "")


def use_everything(store: Store) -> None:
    """Use each recipe, again and again, to be killed; say so with each round."""
    holds = [Lock(store, "Lock"), Semaphore(store, "Semaphore", 2), Election(store, "Election", "x" * 100)]
    holds += [ReadWriteLock(store, "ReadWriteLock").reader, ReadWriteLock(store, "ReadWriteLock").writer]
    queue, group = Queue(store, "Queue"), Membership(store, "Membership", "data")
    for number in count():
        for hold in holds:
            if hold.acquire(number % 3 > 0):
                hold.release()
        queue.put(str(number))
        with group, queue.take():
            group.update("busy")
        once(store, "once", lambda: b"done")
        store.queue_push("rounds", "")


def take_part(store: Store, name: str, data: str) -> None:
    """Take part in a group, to be killed."""
    Membership(store, name, data).join()
    store.wait(["never"])


def share_out(store: Store, name: str, partitions: int) -> None:
    """Work on the partitions of this member until the key "stop" is there: a second holder of one would be refused."""
    with Partitioner(store, name, partitions) as group:
        while not store.check(["stop"]):
            for number, token in group.partitions.items():
                Fenced(store, f"shard/{number}").set(b"", token)
            group.rebalance()


def linger(store: Store) -> None:
    """Hold a handle and wait, to be killed."""
    store.wait(["never"])


class Workers:
    """Processes that work on the store of `spec`, one for each of `arguments`; killed and reaped at the end."""

    def __init__(self, spec: dict[str, Any], what: str, arguments: list[list[Any]]) -> None:
        root = str(Path(fscoord.__file__).parent.parent)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, str(Path(__file__).parent.parent)])}
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, what, json.dumps(spec), json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for given in arguments
        ]

    def results(self, patience: float = HANG_S + 10) -> list[Any]:
        """Wait for all, each no longer than `patience`, and return what each returned."""
        found = []
        for process in self.processes:
            out, complaint = process.communicate(timeout=patience)
            assert process.returncode == 0, complaint
            found.append(json.loads(out))
        return found

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def work(store: Store, spec: dict[str, Any], what: str, arguments: list[list[Any]]) -> list[Any]:
    """Let one process for each of `arguments` do `what`, all at once, and return their results."""
    with Workers(spec, what, arguments) as workers:
        start(store, len(arguments))
        return workers.results()


def start(store: Store, count: int) -> None:
    """Wait until `count` workers are there, then let them begin. On a busy machine a process takes long to be there."""
    usual = store.timeout
    store.set_timeout(START_S)
    for _ in range(count):
        store.queue_pop("ready")
    store.set_timeout(usual)
    store.set("go", "1")


def main(what: str, spec: str, arguments: str) -> None:
    with open_spec(json.loads(spec), HANG_S) as store:
        store.queue_push("ready", "")
        store.wait(["go"], START_S)
        print(json.dumps(globals()[what](store, *json.loads(arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
