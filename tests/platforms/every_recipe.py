"""Use every recipe, barrier and exchange on a `HashStore` and on a `TCPStore` with a played server, also in asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.played_server import PlayedServer
from support.recipes import RECIPES, use as use_alone

from fscoord import HashStore, Store, TCPStore, aio, barrier, broadcast, gather, open_store, recipes, synchronize

RANKS = 3


def each(store: Store, work: Callable[[Store, int], Any]) -> list[Any]:
    """Do the work of each rank in a thread, and return the results by rank."""
    with ThreadPoolExecutor(RANKS) as pool:
        done = [pool.submit(work, store, rank) for rank in range(RANKS)]
        return [each.result(60) for each in done]


def meet(store: Store, rank: int) -> Any:
    names = synchronize(store, b"%d" % rank, rank, RANKS, "names/")
    barrier(store, RANKS, "all", rank=rank)
    said = broadcast(store, b"said" if rank == 0 else None, rank=rank, world_size=RANKS, key="told")
    gathered = gather(store, b"%d" % rank, rank=rank, world_size=RANKS, key="gathered")
    return names, said, gathered


def count_under(hold: Callable[[Store], Any]) -> Callable[[Store, int], None]:
    def count(store: Store, rank: int) -> None:
        for _ in range(5):
            with hold(store):
                store.set("count", str(int(store.get("count")) + 1))

    return count


def use(store: Store) -> None:
    store.set_timeout(60)
    for names, said, gathered in each(store, meet):
        assert (names, said) == ([b"0", b"1", b"2"], b"said")
        assert gathered in (None, [b"0", b"1", b"2"])
    exclusive = {
        "Lock": lambda store: recipes.Lock(store, "lock"),
        "RLock": lambda store: recipes.RLock(store, "rlock"),
        "ReadWriteLock": lambda store: recipes.ReadWriteLock(store, "rwlock").writer,
        "Semaphore": lambda store: recipes.Semaphore(store, "semaphore", 1),
    }
    for hold in exclusive.values():
        store.set("count", "0")
        each(store, count_under(hold))
        assert store.get("count") == b"15"
    with recipes.Lock(store, "leased", ttl=30) as lock:
        assert lock is not None
    for name in RECIPES:
        use_alone(name, store, f"{name} alone")
    assert recipes.once(store, "once", lambda: b"made") == b"made"

    def enter(store: Store, rank: int) -> None:
        with recipes.DoubleBarrier(store, "double", RANKS, rank):
            pass

    each(store, enter)
    asyncio.run(use_tasks(store))


async def use_tasks(store: Store) -> None:
    shared = aio.AsyncStore(store)

    async def hold(number: int) -> int:
        async with aio.Lock(shared, "of tasks"):
            return number

    assert await asyncio.gather(*map(hold, range(5))) == list(range(5))


use(HashStore())
use(open_store("mem:"))
server = PlayedServer()
with TCPStore("127.0.0.1", server.port) as store:
    use(store)
server.end()
print("used")
