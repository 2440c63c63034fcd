"""The stores and recipes of fscoord for asyncio: classes and functions of the same names, as coroutines."""

from fscoord.aio.collectives import barrier, broadcast, gather, get_all, synchronize
from fscoord.aio.groups import DoubleBarrier, Fenced, Latch, Membership, once
from fscoord.aio.holds import Election, Hold, Lock, ReadWriteLock, RLock, Semaphore, force_release
from fscoord.aio.queue import Item, PriorityQueue, Queue
from fscoord.aio.store import AsyncStore, open_store

__all__ = [
    "AsyncStore",
    "DoubleBarrier",
    "Election",
    "Fenced",
    "Hold",
    "Item",
    "Latch",
    "Lock",
    "Membership",
    "PriorityQueue",
    "Queue",
    "RLock",
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
]
