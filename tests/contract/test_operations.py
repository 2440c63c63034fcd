"""The meaning of each operation of `Store`, on every kind of store."""

from __future__ import annotations

from fscoord.testing.contract.handles import Handles, Members
from fscoord.testing.contract.operations import Several, Threads, Values


class TestEveryStore(Handles, Members, Several, Threads, Values):
    """The suite that users run on stores of their own, on the `place` of every kind."""
