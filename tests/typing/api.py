"""Code that uses the public names, checked by `mypy --strict` and never run."""

import math
from datetime import timedelta
from pathlib import Path

from typing_extensions import assert_type

import fscoord
from fscoord import (
    BarrierError,
    BrokenBarrierError,
    CorruptLogError,
    FileStore,
    FscoordError,
    HashStore,
    InsecurePathError,
    LimitExceededError,
    PrefixStore,
    QueueEmptyError,
    SessionDeadError,
    StaleRunError,
    Store,
    StoreClosedError,
    StoreError,
    StoreGoneError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnsupportedFilesystemError,
    aio,
    barrier,
    broadcast,
    gather,
    get_all,
    open_store,
    store_timeout,
    synchronize,
)
from fscoord.barriers import (
    Barrier,
    BarrierConfig,
    FileStoreBarrier,
    StoreBarrier,
    create_barrier_from_config,
    register_barrier,
)
from fscoord.environment import detect, rank_and_world_size
from fscoord.recipes import (
    Contender,
    DoubleBarrier,
    Election,
    Item,
    Latch,
    Leader,
    Lock,
    Membership,
    Participant,
    PriorityQueue,
    Queue,
    ReadWriteLock,
    RLock,
    Semaphore,
    once,
)


def contract(store: Store) -> None:
    store.set("text", "text")
    store.set(b"bytes", bytearray(b"bytes"))
    store.set("view", memoryview(b"view"))
    assert_type(store.get("text"), bytes)
    assert_type(store.add("count", 1), int)
    assert_type(store.compare_set("text", "text", b"other"), bytes)
    assert_type(store.check(["text", b"bytes"]), bool)
    store.wait(["text"])
    store.wait(key for key in ("a", "b"))
    store.wait(("text",), 0.5)
    store.wait(["text"], timeout=timedelta(seconds=1))
    assert_type(store.delete_key("text"), bool)
    assert_type(store.num_keys(), int)
    assert_type(store.list_keys(), list[str])
    assert_type(store.list_keys("prefix"), list[str])
    store.append("text", b"more")
    assert_type(store.multi_get(["text", "count"]), list[bytes])
    store.multi_set(["text", "count"], ["value", b"1"])
    store.queue_push("queue", "item")
    assert_type(store.queue_pop("queue"), bytes)
    assert_type(store.queue_pop("queue", block=False), bytes)
    assert_type(store.queue_len("queue"), int)
    store.barrier("barrier", 2)
    store.barrier("barrier", 2, timeout=math.inf)
    assert_type(store.timeout, timedelta)
    store.set_timeout(5)
    assert_type(store.has_extended_api(), bool)
    store.close()


def stores(path: Path) -> None:
    file = FileStore(path, 2, timeout=timedelta(minutes=1), rank=0, label="trainer", lock="flock", durable=True)
    assert_type(file.clone(), FileStore)
    assert_type(file.path, str)
    with FileStore() as private:
        assert_type(private, FileStore)
    with FileStore(str(path), read_only=True, watch="poll", mode=0o640) as observer:
        contract(observer)
    memory = HashStore()
    assert_type(memory.clone(), HashStore)
    view = PrefixStore("prefix", memory)
    assert_type(view.underlying_store, Store)
    contract(view.clone())
    assert_type(open_store("mem:"), Store)
    assert_type(open_store(path, timeout=5, world_size=2), Store)
    assert_type(open_store(), Store)


def collectives(store: Store, rank: int, world_size: int) -> None:
    with store_timeout(store, 5):
        assert_type(synchronize(store, b"data", rank, world_size, "prefix", timeout=5), list[bytes])
        assert_type(get_all(store, rank, "prefix", world_size), list[bytes])
    barrier(store, world_size, "prefix", 5)
    barrier(store, world_size=world_size, key="key", timeout=5, rank=rank, fail_fast=True)
    barrier(store, world_size, "prefix", timeout=timedelta(seconds=5))
    assert_type(get_all(store, rank, key="key", world_size=world_size, timeout=5), list[bytes])
    assert_type(synchronize(store, b"data", rank, world_size=world_size, key="key", timeout=5), list[bytes])
    assert_type(broadcast(store, b"data", rank, world_size=world_size, key="key", timeout=5), bytes)
    assert_type(gather(store, b"data", rank, world_size=world_size, key="key", timeout=5), list[bytes] | None)
    barrier(store, world_size, "prefix", None, rank)
    barrier(store, world_size, "prefix", 5, rank, lambda rank: f"node{rank}", 2)
    assert_type(fscoord.__version__, str)


def barriers(store: Store, path: Path) -> None:
    @register_barrier
    class Mine(Barrier):
        barrier_type = "mine"

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def execute_barrier(self, timeout: float | timedelta | None = None) -> None:
            pass

    assert_type(Mine(rank=0).rank, int)
    with FileStoreBarrier(path, "checkpoint", timeout=5, durable=True) as file_barrier:
        assert_type(file_barrier, FileStoreBarrier)
        file_barrier.execute_barrier()
        file_barrier.execute_barrier(timeout=timedelta(seconds=1))
    with StoreBarrier(store, rank=0, world_size=1, fail_fast=True) as barrier:
        assert_type(barrier.sequence, int)
    assert_type(create_barrier_from_config(BarrierConfig.from_json("{}")), Barrier | None)
    environment = detect()
    assert_type(environment.rank, int | None)
    assert_type(environment.run_id, tuple[str, int] | str | None)
    assert_type(rank_and_world_size(), tuple[int, int])


def recipes(store: Store) -> None:
    with Lock(store, "name", timeout=5) as lock:
        assert_type(lock, Lock)
        assert_type(lock.token, int)
    assert_type(lock.acquire(timeout=timedelta(seconds=1)), bool)
    assert_type(lock.holders(), list[Contender])
    with Semaphore(store, "name", 3) as semaphore, ReadWriteLock(store, "name").reader as side:
        assert_type(semaphore, Semaphore)
        assert_type(side.token, int)
    with Election(store, "name", b"data") as election:
        assert_type(election.leader(), Leader | None)
        assert_type(election.observe(after=1, timeout=5).data, bytes)
        for leader in election.watch(timeout=None):
            assert_type(leader, Leader)
    with DoubleBarrier(store, "name", 4, 0, timeout=5, fail_fast=True) as both:
        both.leave(timeout=timedelta(seconds=1))
    assert_type(Latch(store, "name", 3).count_down(), int)
    assert_type(once(store, "name", lambda: "value", timeout=5), bytes)

    queue, urgent = Queue(store, "name", timeout=5), PriorityQueue(store, "name")
    queue.put_all([b"value", "value"])
    urgent.put("value", priority=-1)
    with queue.take(timeout=timedelta(seconds=1)) as item:
        assert_type(item, Item)
        assert_type(item.data, bytes)
    assert_type((len(queue), queue.size(), queue.taken()), tuple[int, int, list[Contender]])
    with Membership(store, "name", b"data") as group:
        assert_type(group.observe(timeout=5), list[Participant])
        assert_type(group.evict(group.members()[0]), bool)
        for present in group.watch():
            assert_type(present[0].data, bytes)

    @once(store, "name")
    def work() -> str:
        return "value"

    assert_type(work(), bytes)
    with RLock(store, b"name") as again:
        assert_type(again, RLock)


async def tasks(store: aio.AsyncStore) -> None:
    async def work() -> str:
        return "value"

    async with aio.open_store("mem:") as opened:
        assert_type(opened, aio.AsyncStore)
    assert_type(await aio.open_store("mem:"), aio.AsyncStore)
    assert_type(await store.get("key"), bytes)
    assert_type(await store.add("key", 1), int)
    assert_type(await store.queue_pop("queue", block=False), bytes)
    await store.wait(["key"], timeout=timedelta(seconds=1))
    async with aio.Lock(store, "name") as lock, aio.Semaphore(store, "name", 3):
        assert_type(lock, aio.Lock)
        assert_type((lock.token, await lock.holders()), tuple[int, list[Contender]])
    async with await aio.Queue(store, "name").take(timeout=5) as item:
        assert_type(item.data, bytes)
        await item.check()
    async with aio.Membership(store, "name") as group:
        async for present in group.watch():
            assert_type(present, list[Participant])
    assert_type(await aio.synchronize(store, b"data", 0, 1, "prefix"), list[bytes])
    assert_type(await aio.once(store, "name", work), bytes)
    await aio.barrier(store, world_size=1, key="key", timeout=5)
    assert_type(await aio.get_all(store, 0, key="key", world_size=1, timeout=5), list[bytes])
    assert_type(await store.register(), int)
    assert_type(await aio.Fenced(store, "key").token(), int)


def errors(error: FscoordError) -> None:
    if isinstance(error, StoreTimeoutError):
        assert_type(error.keys, tuple[str, ...])
        assert_type(error.missing_ranks, tuple[str, ...])
        assert_type(error.holder, str | None)
        assert_type(error.waited, float)
    elif isinstance(error, CorruptLogError):
        assert_type(error.offset, int)
        assert_type(error.reason, str)
    elif isinstance(error, StoreUnavailableError):
        assert_type(error.errno, int | None)
    elif isinstance(error, StoreError):
        assert_type(error.path, str | None)
        assert_type(error.maybe_applied, bool)
    elif isinstance(error, BrokenBarrierError):
        assert_type(error.missing, tuple[str, ...])
        assert_type(error.dead, tuple[str, ...])


def built_in(
    closed: StoreClosedError,
    gone: StoreGoneError,
    dead: SessionDeadError,
    stale: StaleRunError,
    empty: QueueEmptyError,
    limit: LimitExceededError,
    insecure: InsecurePathError,
    unsupported: UnsupportedFilesystemError,
    usage: BarrierError,
) -> list[RuntimeError]:
    value: ValueError = limit
    permission: PermissionError = insecure
    system: OSError = unsupported
    print(value, permission, system, broadcast, gather)
    store_gone: StoreGoneError = dead
    return [closed, gone, store_gone, stale, empty, limit, usage]
