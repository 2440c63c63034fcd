"""Recipes that need only the contract of `~fscoord.Store`: locks, elections, queues, groups and latches."""

from fscoord.recipes._hold import Contender
from fscoord.recipes._line import force_release
from fscoord.recipes.election import Election, Leader
from fscoord.recipes.latch import DoubleBarrier, Latch
from fscoord.recipes.lock import Fenced, Lock, ReadWriteLock, RLock, Semaphore
from fscoord.recipes.membership import Membership, Participant
from fscoord.recipes.once import once
from fscoord.recipes.queue import Item, PriorityQueue, Queue

__all__ = [
    "Contender",
    "DoubleBarrier",
    "Election",
    "Fenced",
    "Item",
    "Latch",
    "Leader",
    "Lock",
    "Membership",
    "Participant",
    "PriorityQueue",
    "Queue",
    "RLock",
    "ReadWriteLock",
    "Semaphore",
    "force_release",
    "once",
]
