"""Recipes on the contract of `~fscoord.Store` alone: what several processes need to take turns and share work."""

from fscoord.recipes._hold import Contender
from fscoord.recipes.breaking import force_release
from fscoord.recipes.double_barrier import DoubleBarrier
from fscoord.recipes.election import Election, Leader
from fscoord.recipes.fenced import Fenced
from fscoord.recipes.latch import Latch
from fscoord.recipes.lock import Lock, ReadWriteLock, RLock, Semaphore
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
