"""Code that uses the public names, checked by `mypy --strict` and never run."""

import asyncio
import math
import os
from collections.abc import Callable, Coroutine
from contextlib import aclosing, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

from typing_extensions import assert_type

import fscoord
from fscoord import (
    AcquireCancelledError,
    BarrierError,
    BrokenBarrierError,
    Capabilities,
    Change,
    CompactedError,
    CorruptLogError,
    EtcdStore,
    FileStore,
    FscoordError,
    HashStore,
    InsecurePathError,
    LimitExceededError,
    LockLostError,
    Member,
    NoProcessGroupError,
    Position,
    PrefixStore,
    QueueEmptyError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExit,
    RendezvousStateError,
    RendezvousTimeoutError,
    SessionDeadError,
    StaleRunError,
    StaleTokenError,
    Store,
    StoreClosedError,
    StoreError,
    StoreGoneError,
    StoreTimeoutError,
    StoreUnavailableError,
    TCPStore,
    UnsupportedFilesystemError,
    UsedBeforeError,
    Watch,
    WorkFailedError,
    aio,
    barrier,
    broadcast,
    gather,
    get_all,
    inspect,
    launch,
    open_store,
    status,
    store_timeout,
    synchronize,
    testing,
)
from fscoord.barriers import (
    BARRIER_REGISTRY,
    Barrier,
    BarrierConfig,
    DistBarrier,
    FileStoreBarrier,
    StoreBarrier,
    TCPStoreBarrier,
    create_barrier_from_config,
    register_barrier,
    register_in_torch,
)
from fscoord.collectives import tree_barrier
from fscoord.environment import Environment, RunId, detect, rank_and_world_size
from fscoord.events import HoldLost, RoundCompleted, SessionDied, Subscription, TelemetryEvent, WaitEnded, subscribe
from fscoord.integrations.pytest import Once
from fscoord.preemption import Preemption, requeue
from fscoord.recipes import (
    Condition,
    Contender,
    CyclicBarrier,
    DoubleBarrier,
    Election,
    Ephemeral,
    Event,
    Item,
    Latch,
    Leader,
    Lock,
    Membership,
    Participant,
    Partitioner,
    PriorityQueue,
    Queue,
    QueuedItem,
    RankZeroFirst,
    RateLimiter,
    ReadWriteLock,
    RLock,
    Semaphore,
    force_release,
    once,
)
from fscoord.rendezvous import (
    DEFAULT_PORT,
    C10dRendezvousBackend,
    DynamicRendezvousHandler,
    NodeState,
    Progress,
    RdzvEvent,
    RendezvousBackend,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousSettings,
    RendezvousStoreInfo,
    RendezvousTimeout,
    Token,
    check_options,
    construct_and_record_rdzv_event,
    create_backend,
    create_handler,
    get_rendezvous_handler,
    matches_machine_hostname,
    parse_rendezvous_config,
    parse_rendezvous_endpoint,
    rendezvous_handler_registry,
    static_rendezvous,
)
from fscoord.stores.url import register_scheme
from fscoord.visibility import wait_visible

AnyTimeout = float | int | timedelta
"""What every ``timeout`` accepts. Where None means a default, it is accepted, too."""


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
    assert_type(store.transact(compare={"a": None, "b": b"1"}, set={b"a": "x"}, add={"n": 1}, delete=["b"]), bool)
    store.queue_push("queue", "item")
    assert_type(store.queue_pop("queue"), bytes)
    assert_type(store.queue_pop("queue", block=False), bytes)
    assert_type(store.queue_len("queue"), int)
    store.barrier("barrier", 2)
    store.barrier("barrier", 2, timeout=math.inf)
    assert_type(store.timeout, timedelta)
    store.set_timeout(5)
    assert_type(store.has_extended_api(), bool)
    assert_type(store.members(range(2)), list[Member])
    assert_type((store.register(), store.dead_ranks([0]), store.dead_sessions([1])), tuple[int, list[int], list[int]])
    assert_type(store.wait_alive(["key"], [0]), list[int])
    assert_type(store.wait_sessions(["key"], {1}), list[int])
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
    assert_type(file.capabilities, Capabilities)
    assert_type(HashStore.named("name"), HashStore)
    FileStore(os.fsencode(path), trace=path)
    FileStore(file_name="path", trace="path")
    FileStore(3)  # type: ignore[arg-type]
    FileStore(path, trace=3)  # type: ignore[arg-type]


class Client:
    """The attributes of a client of etcd3gw."""

    host: str
    port: int
    protocol: str
    session: object


def servers(client: Client) -> None:
    assert_type(TCPStore("host", 0).port, int)
    assert_type(EtcdStore(client, b"prefix").below("name"), EtcdStore)
    assert_type(EtcdStore("etcd://host", "prefix", session_ttl=5).address, str)
    EtcdStore(3, "prefix")  # type: ignore[arg-type]


def mine(host: str, path: str, *, timeout: float = 300) -> Store:
    return HashStore(timeout=timeout)


register_scheme("mine", mine, {"timeout": float})


def timeouts(store: Store, path: Path, given: AnyTimeout, limit: AnyTimeout | None) -> None:
    """Every ``timeout`` accepts what the documents promise."""
    FileStore(path, timeout=limit)
    HashStore(timeout=limit)
    HashStore.named("name", timeout=limit)
    TCPStore("host", 0, timeout=limit)
    EtcdStore("host", "prefix", limit)
    open_store(path, timeout=limit)
    store.set_timeout(given)
    store.wait(["key"], limit)
    store.wait_alive(["key"], [0], limit)
    store.wait_sessions(["key"], [1], limit)
    store.barrier("key", 2, limit)
    barrier(store, 2, "prefix", limit, 0, str, given)
    barrier(store, 2, key="key", timeout=limit)
    synchronize(store, b"data", 0, 2, "prefix", limit)
    get_all(store, 0, "prefix", 2, timeout=limit)
    broadcast(store, None, 1, 2, "key", limit)
    gather(store, b"data", 0, 2, "key", limit)
    tree_barrier(store, store, 0, 2, 1, "key", limit, trace_timeout=5)
    DistBarrier().execute_barrier(limit)
    StoreBarrier(store, timeout=limit).execute_barrier(limit)
    FileStoreBarrier(path, timeout=limit)
    Lock(store, "name", limit, limit).acquire(timeout=limit)
    Semaphore(store, "name", 2, limit, limit)
    ReadWriteLock(store, "name", limit, limit)
    election = Election(store, "name", b"data", limit, limit)
    election.campaign(limit)
    election.observe(0, limit)
    election.watch(limit)
    Latch(store, "name", 2).wait(limit)
    DoubleBarrier(store, "name", 2, 0, limit).enter(limit)
    Queue(store, "name", limit).take(True, limit)
    Membership(store, "name").observe((), limit)
    Membership(store, "name").watch(limit)
    Partitioner(store, "name", 2).wait_changed(limit)
    once(store, "name", lambda: b"", timeout=limit)
    RankZeroFirst(store, "name", 0, limit)
    with Preemption(store, "name", 0, 2, signals=["SIGUSR1"], timeout=limit) as preemption:
        assert_type(preemption, Preemption)
        assert_type(preemption.should_stop(), bool)
    assert_type(requeue(), None)
    wait_visible(path, size=1, sha256="00", timeout=given)
    inspect.verify(path, timeout=given)
    inspect.copy(path, path, timeout=given)
    RendezvousStoreInfo.build(0, store, timeout=limit)
    RendezvousTimeout(given, given, given, given)
    RendezvousSettings("id", 1, 2, keep_alive_interval=given)
    static_rendezvous(store, timeout=limit, restart_timeout=given)


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


def looks_and_conditions(store: Store) -> None:
    assert_type(store.get("key"), bytes)
    assert_type(store.get("key", default=None, timeout=None), bytes | None)
    assert_type(store.get("key", timeout=5), bytes)
    assert_type(store.multi_get(["key"], timeout=5), list[bytes])
    assert_type(store.queue_pop("key", timeout=5), bytes)
    assert_type(store.create("key", "value"), bool)
    assert_type(store.pop("key"), bytes | None)
    assert_type(store.delete_key("key", expected=b"value"), bool)


def barriers(store: Store, path: Path) -> None:
    register_in_torch()

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
    assert_type(BARRIER_REGISTRY, dict[str, type[Barrier]])
    assert_type(TCPStoreBarrier(0, 2, "prefix", timeout_secs=timedelta(seconds=5)).world_size, int)
    environment = detect()
    assert_type(environment, Environment)
    run: RunId = ("job", 1)
    FileStore(path, run_id=run)
    assert_type(environment.rank, int | None)
    assert_type(environment.run_id, tuple[str, int] | str | None)
    assert_type(rank_and_world_size(), tuple[int, int])


def recipes(store: Store) -> None:
    with Lock(store, "name", timeout=5) as lock:
        assert_type(lock, Lock)
        assert_type(lock.token, int)
    assert_type(lock.acquire(timeout=timedelta(seconds=1)), bool)
    assert_type(lock.holders(), list[Contender])
    assert_type((lock.holders()[0].label, lock.is_acquired), tuple[str, bool])
    lock.cancel()
    Lock(store, "name", ttl=5, label="nightly", auto_renew=False).renew()
    shared = ReadWriteLock(store, "name", label="nightly")
    assert_type(shared.own_side(), str | None)
    shared.downgrade()
    with Semaphore(store, "name", 3) as semaphore, ReadWriteLock(store, "name").reader as side:
        assert_type(semaphore, Semaphore)
        assert_type(side.token, int)
    assert_type(force_release(store, "name", 1), bool)
    with Election(store, "name", b"data") as election:
        assert_type(election.leader(), Leader | None)
        assert_type(election.observe(after=1, timeout=5).data, bytes)
        for leader in election.watch(timeout=None):
            assert_type(leader, Leader)

    class Mine(DoubleBarrier):
        pass

    with Mine(store, "name", 4, 0, timeout=5, fail_fast=True) as both:
        assert_type(both, Mine)
        both.leave(timeout=timedelta(seconds=1))
    with RankZeroFirst(store, "name", 0, timeout=timedelta(seconds=5)) as first:
        assert_type(first, RankZeroFirst)
    with closing(Election(store, "name").watch()) as leaders:
        assert_type(next(leaders), Leader)
    with closing(Membership(store, "name").watch()) as groups:
        assert_type(next(groups), list[Participant])
    assert_type(Latch(store, "name", 3).count_down(), int)
    assert_type(Event(store, "name").wait(timeout=5), bool)
    with Condition(store, "name", Lock(store, "lock")) as condition:
        assert_type(condition, Condition)
        assert_type(condition.wait_for(lambda: "done", timeout=5), bool)
        condition.notify(2)
    assert_type(CyclicBarrier(store, "name", 2, timeout=5).wait(), int)
    with RateLimiter(store, "name", 10, per=timedelta(minutes=1), burst=5) as limiter:
        assert_type(limiter.try_acquire(2), bool)
    assert_type(once(store, "name", lambda: "value", timeout=5), bytes)
    assert_type(once(store, "name", lambda: "value", scope="host"), bytes)

    queue, urgent = Queue(store, "name", timeout=5), PriorityQueue(store, "name")
    assert_type(queue.put_all([b"value", "value"]), list[str])
    assert_type(urgent.put("value", priority=-1, timeout=5), str)
    assert_type(queue.put("value", delay=5, expires=timedelta(hours=1), wants_result=True), str)
    assert_type(urgent.put_all(["value"], 1, delay=5, expires=9, wants_result=True), list[str])
    assert_type(queue.result("id", timeout=5), bytes)
    queue.join(timeout=5)
    assert_type(queue.items(), list[QueuedItem])
    assert_type(batch := queue.take_all(9, timeout=5), list[Item])
    batch[0].ack("result")
    queue.ack_all(batch[1:])
    assert_type((queue.cancel("id"), queue.purge(), queue.requeue_dead_letters()), tuple[bool, int, int])
    with queue.take(timeout=timedelta(seconds=1)) as item:
        assert_type(item, Item)
        assert_type(item.data, bytes)
    assert_type((len(queue), queue.size(), queue.taken()), tuple[int, int, list[Contender]])
    with Partitioner(store, "name", partitions=3) as parts:
        assert_type(parts.partitions, dict[int, int])
        assert_type((parts.rebalance(), parts.leave()), tuple[bool, bool])
        assert_type(parts.wait_changed(timeout=5), dict[int, int])
    with store.watch("prefix", after="0.1", timeout=5) as watch:
        assert_type((watch, watch.position), tuple[Watch, Position])
        assert_type(next(watch), Change)
        for change in store.watch(after=watch.position):
            assert_type((change.key, change.value), tuple[str, bytes | None])
    with Ephemeral(store, "name", b"data") as key:
        assert_type((key.create(), key.get(), key.delete()), tuple[bool, bytes | None, bool])
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
    async with aio.Partitioner(store, "name", 3) as parts:
        assert_type((parts.partitions, await parts.rebalance()), tuple[dict[int, int], bool])
        assert_type(await parts.wait_changed(timeout=5), dict[int, int])
    async with aio.Membership(store, "name") as group:
        async for present in group.watch():
            assert_type(present, list[Participant])
    both = aio.ReadWriteLock(store, "name", ttl=5)
    async with both.reader as reader, aio.RLock(store, "name") as again:
        assert_type((reader, again), tuple[aio.Hold, aio.RLock])
    assert_type(await both.own_side(), str | None)
    await both.downgrade()
    await lock.cancel()
    await lock.renew()
    assert_type(lock.is_acquired, bool)
    assert_type(await aio.force_release(store, "name", 1), bool)
    assert_type(await aio.Latch(store, "name", 2).count_down(), int)
    assert_type(await aio.Event(store, "name").wait(timeout=5), bool)
    async with aio.Condition(store, "name", again) as condition:
        assert_type(await condition.wait_for(lambda: "done", timeout=5), bool)
    assert_type(await aio.CyclicBarrier(store, "name", 2, timeout=5).is_broken(), bool)
    async with aio.RateLimiter(store, "name", 10, per=60, burst=5) as limiter:
        assert_type(await limiter.try_acquire(2), bool)
    async with aio.DoubleBarrier(store, "name", 2, 0, timeout=5) as double:
        assert_type(double, aio.DoubleBarrier)
    async with aio.RankZeroFirst(store, "name", 1, 5) as first:
        assert_type(first, aio.RankZeroFirst)
    urgent = aio.PriorityQueue(store, "name", 5)
    assert_type(await urgent.put(b"value", priority=-1), str)
    await urgent.join(timeout=5)
    assert_type(await urgent.items(), list[QueuedItem])
    assert_type(await urgent.result("id"), bytes)
    assert_type(batch := await urgent.take_all(9, block=False), list[aio.Item])
    await batch[0].ack(b"result")
    await urgent.ack_all(batch[1:])
    assert_type((await urgent.cancel("id"), await urgent.purge()), tuple[bool, int])
    assert_type(await urgent.requeue_dead_letters(), int)
    assert_type(await urgent.take(block=False), aio.Item)
    assert_type((await urgent.size(), await urgent.taken()), tuple[int, list[Contender]])
    assert_type(await aio.broadcast(store, None, 1, 2, "key", source=0), bytes)
    assert_type(await aio.gather(store, b"data", 0, 2, "key", timeout=5), list[bytes] | None)
    assert_type(await aio.synchronize(store, b"data", 0, 1, "prefix"), list[bytes])
    await aio.tree_barrier(store, store, 0, world_size=1, group_size=1, key="key", timeout=5)
    assert_type(await aio.once(store, "name", work, scope="host"), bytes)
    await aio.wait_visible("path", size=1, timeout=timedelta(seconds=5))
    await aio.barrier(store, world_size=1, key="key", timeout=5)
    assert_type(await aio.get_all(store, 0, key="key", world_size=1, timeout=5), list[bytes])
    async with aclosing(aio.Election(store, "name").watch()) as leaders:
        async for leader in leaders:
            assert_type(leader, Leader)
    async with store.watch("prefix") as changes, aio.Ephemeral(store, "name") as key:
        assert_type((changes, changes.position), tuple[aio.AsyncWatch, Position | None])
        async for change in changes:
            assert_type(change, Change)
        assert_type((await key.create(), await key.get(), await key.delete()), tuple[bool, bytes | None, bool])
    async with aclosing(aio.Membership(store, "name").watch()) as groups:
        assert_type(await groups.__anext__(), list[Participant])

    @aio.once(store, "name")
    async def whole() -> str:
        return "value"

    assert_type(whole, Callable[[], Coroutine[Any, Any, bytes]])
    assert_type(await asyncio.create_task(whole()), bytes)
    assert_type(await asyncio.create_task(aio.once(store, "name", whole)), bytes)

    class Mine(aio.AsyncStore):
        pass

    async with Mine(store.store) as own:
        assert_type(own, Mine)
    assert_type(await own.clone(), aio.AsyncStore)
    assert_type(await store.register(), int)
    assert_type(await aio.Fenced(store, "key").token(), int)


def rendezvous(store: Store, parameters: RendezvousParameters) -> None:
    backend, opened = create_backend(parameters)
    assert_type((backend, opened), tuple[C10dRendezvousBackend, Store])
    assert_type(create_handler(parameters), DynamicRendezvousHandler)
    assert_type(get_rendezvous_handler(parameters), RendezvousHandler)
    settings = RendezvousSettings("id", 1, 2, keep_alive_interval=5)
    assert_type(settings.keep_alive_interval, timedelta)
    assert_type(settings.timeout, RendezvousTimeout)
    assert_type(RendezvousTimeout(join=5).join, timedelta)

    class Mine(DynamicRendezvousHandler):
        pass

    with Mine.from_backend("id", store, backend, 1, 2, keep_alive_interval=0.5) as handler:
        assert_type(handler, Mine)
        handler.on_wait = told
        info = handler.next_rendezvous()
        assert_type(info, RendezvousInfo)
        assert_type(info.bootstrap_store_info.master_port, int)
    assert_type(construct_and_record_rdzv_event("id", "message", NodeState.RUNNING), RdzvEvent)
    assert_type(static_rendezvous(store).store, Store)
    assert_type(parse_rendezvous_config("key=value"), dict[str, str])
    assert_type(parse_rendezvous_endpoint(None, DEFAULT_PORT), tuple[str, int])
    assert_type(matches_machine_hostname("node1"), bool)
    check_options(["is_host"])
    creator: RendezvousHandlerCreator = create_handler
    rendezvous_handler_registry.register("mine", creator)
    assert_type(RendezvousGracefulExitError("text"), RendezvousGracefulExit)
    assert_type(RendezvousHandlerRegistry().create_handler(parameters), RendezvousHandler)


class Backend(RendezvousBackend):
    @property
    def name(self) -> str:
        return "mine"

    def get_state(self) -> tuple[bytes, Token] | None:
        return None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        return state, token, True


def told(progress: Progress) -> None:
    assert_type(progress.left, float)


def launcher(store: Store, handler: DynamicRendezvousHandler, console: launch.Console) -> None:
    job = launch.Job(["program"], 2, "logs", streams=launch.Streams(launch.parse_streams("0:3,1:1")))
    outcome = launch.Agent(job, handler, store, console, launch.Announcer(console)).run()
    assert_type(outcome, launch.Outcome)
    assert_type(outcome.failures, list[launch.Failure])
    ending = launch.run_held(["program"], {}, lambda: None, grace=5)
    assert_type(ending, launch.Ending)
    assert_type((ending.code, ending.output), tuple[int, bytes])


def participants(store: Store, path: Path) -> None:
    assert_type(status.status(store), status.Status)
    assert_type(status.status(path).picture.participants, tuple[status.SessionStatus, ...])
    assert_type(status.find_all(status.status("mem:name").picture, 5), list[status.StatusFinding])
    status.status(3)  # type: ignore[arg-type]
    picture = status.status(store).picture
    assert_type(picture, status.Picture)
    assert_type(picture.participants[0].waiting, status.ShownWait | None)
    assert_type(picture.lines, tuple[status.LineState, ...])
    assert_type(picture.rounds, tuple[status.RoundState, ...])
    assert_type(picture.log_lock, status.LogLock | None)


def logs(path: Path) -> None:
    with closing(inspect.dump(path)) as entries:
        assert_type(next(entries), inspect.Entry)
    report = inspect.verify(os.fsencode(path), on_progress=lambda file, read, size: print(file, read, size))
    assert_type(report, inspect.Report)
    assert_type(report.findings, tuple[inspect.Finding, ...])
    assert_type(report.generations, tuple[inspect.Generation, ...])
    assert_type(inspect.repair(path, "output", on_skipped=left_out), inspect.Repair)
    assert_type(inspect.copy("path", path), inspect.Repair)
    inspect.verify(3)  # type: ignore[arg-type]
    inspect.repair(path, 3)  # type: ignore[arg-type]
    inspect.copy(3, path)  # type: ignore[arg-type]
    inspect.dump(3)  # type: ignore[arg-type]


def left_out(record: inspect.Skipped) -> None:
    assert_type((record.key, record.is_certain), tuple[bytes, bool])


def tools(store: Store, fscoord_once: Once) -> None:
    with testing.FaultyFiles() as files, files.fails("write", error=5, times=1) as hits:
        assert_type(hits, list[str])
    faulty = testing.FaultyStore(store)
    with faulty.delays("set", seconds=1) as delayed:
        assert_type(delayed, list[str])
    assert_type(faulty.clone(), testing.FaultyStore)
    assert_type(testing.not_faked(), list[str])
    assert_type(fscoord_once("name", lambda: "value", print, timeout=timedelta(seconds=5)), bytes)
    print(testing.Missing)  # type: ignore[attr-defined]


class TestMine(testing.StoreContract):
    def make_store(self, tmp_path: Path) -> Store:
        return FileStore(tmp_path / "store")

    def another(self, store: Store) -> Store:
        return store.clone()


def errors(error: FscoordError) -> None:
    if isinstance(error, StoreTimeoutError):
        assert_type(error.keys, tuple[str, ...])
        assert_type(error.missing_ranks, tuple[str, ...])
        assert_type(error.holder, str | None)
        assert_type(error.waited, float)
    elif isinstance(error, CompactedError):
        assert_type(error.position, Any)
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
    used: UsedBeforeError,
    group: NoProcessGroupError,
    cancelled: AcquireCancelledError,
    lost: LockLostError,
    token: StaleTokenError,
    work: WorkFailedError,
) -> list[RuntimeError]:
    value: ValueError = limit
    permission: PermissionError = insecure
    system: OSError = unsupported
    print(value, permission, system, broadcast, gather)
    store_gone: StoreGoneError = dead
    usages: list[BarrierError] = [usage, used, group]
    assertion: AssertionError = group
    losses: list[LockLostError] = [lost, token]
    print(assertion)
    return [closed, gone, store_gone, stale, empty, limit, work, cancelled, *usages, *losses]


def of_rendezvous(
    closed: RendezvousClosedError,
    late: RendezvousTimeoutError,
    connection: RendezvousConnectionError,
    state: RendezvousStateError,
    spare: RendezvousGracefulExit,
) -> list[RendezvousError]:
    timeout: TimeoutError = late
    print(timeout)
    return [closed, late, connection, state, spare]


def on_events() -> None:
    def report(event: TelemetryEvent) -> None:
        if isinstance(event, WaitEnded):
            assert_type((event.kind, event.seconds, event.rank, event.pattern), tuple[str, float, int | None, str])
        elif isinstance(event, SessionDied):
            assert_type(event.rank, int | None)
        elif isinstance(event, HoldLost):
            assert_type(event.token, int)
        else:
            assert_type(event, RoundCompleted)

    with subscribe(report) as subscription:
        assert_type(subscription, Subscription)
    subscribe(3)  # type: ignore[arg-type]
