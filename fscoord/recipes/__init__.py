"""Locks, elections, queues, groups, barriers, events and rate limiters on any `~fscoord.Store`.

Every operation may raise the errors of the store's own operations. Every operation raises `~fscoord.FscoordError` if
another program has written a key of the recipe. Some operations change a value by compare-and-set. Such an operation
raises `~fscoord.StoreTimeoutError` if no compare-and-set succeeds within the store's timeout, because other processes
have changed the value before each try.
"""

from fscoord.recipes._hold import Contender
from fscoord.recipes._item import Item, QueuedItem
from fscoord.recipes._line import force_release
from fscoord.recipes.condition import Condition
from fscoord.recipes.cyclic_barrier import CyclicBarrier
from fscoord.recipes.election import Election, Leader
from fscoord.recipes.ephemeral import Ephemeral
from fscoord.recipes.event import Event
from fscoord.recipes.first import RankZeroFirst
from fscoord.recipes.latch import DoubleBarrier, Latch
from fscoord.recipes.lock import Fenced, Lock, ReadWriteLock, RLock, Semaphore
from fscoord.recipes.membership import Membership, Participant
from fscoord.recipes.once import once
from fscoord.recipes.partitioner import Partitioner
from fscoord.recipes.queue import PriorityQueue, Queue
from fscoord.recipes.rate_limiter import RateLimiter

__all__ = [
    "Condition",
    "Contender",
    "CyclicBarrier",
    "DoubleBarrier",
    "Election",
    "Ephemeral",
    "Event",
    "Fenced",
    "Item",
    "Latch",
    "Leader",
    "Lock",
    "Membership",
    "Participant",
    "Partitioner",
    "PriorityQueue",
    "Queue",
    "QueuedItem",
    "RLock",
    "RankZeroFirst",
    "RateLimiter",
    "ReadWriteLock",
    "Semaphore",
    "force_release",
    "once",
]
