"""Recipes on the contract of `~fscoord.Store` alone: what several processes need to take turns and share work."""

from fscoord.recipes._hold import Waiter
from fscoord.recipes.lock import Lock, RLock

__all__ = ["Lock", "RLock", "Waiter"]
