"""What each operation of `Store` means, on every kind of store."""

from __future__ import annotations

from fscoord.testing.contract.handles import Handles
from fscoord.testing.contract.members import Members
from fscoord.testing.contract.several import Several
from fscoord.testing.contract.threads import Threads
from fscoord.testing.contract.values import Values


class TestEveryStore(Handles, Members, Several, Threads, Values):
    """The suite that users run on stores of their own, on the `place` of every kind."""
