"""The stores and recipes of fscoord for asyncio. Classes and functions have the same names; methods are coroutines."""

from fscoord.aio.collectives import barrier, broadcast, gather, get_all, synchronize, tree_barrier
from fscoord.aio.recipes import (
    DoubleBarrier,
    Election,
    Ephemeral,
    Fenced,
    Hold,
    Item,
    Latch,
    Lock,
    Membership,
    PriorityQueue,
    Queue,
    RankZeroFirst,
    ReadWriteLock,
    RLock,
    Semaphore,
    force_release,
    once,
)
from fscoord.aio.store import AsyncStore, AsyncWatch, open_store
from fscoord.aio.visibility import wait_visible

__all__ = [
    "AsyncStore",
    "AsyncWatch",
    "DoubleBarrier",
    "Election",
    "Ephemeral",
    "Fenced",
    "Hold",
    "Item",
    "Latch",
    "Lock",
    "Membership",
    "PriorityQueue",
    "Queue",
    "RLock",
    "RankZeroFirst",
    "ReadWriteLock",
    "Semaphore",
    "barrier",
    "broadcast",
    "force_release",
    "gather",
    "get_all",
    "once",
    "open_store",
    "synchronize",
    "tree_barrier",
    "wait_visible",
]
