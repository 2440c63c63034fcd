"""`StoreContract`, a class for pytest with the tests that every store must pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import pytest

from fscoord.store import Store
from fscoord.testing.contract.handles import Handles, Members
from fscoord.testing.contract.operations import Several, Threads, Values
from fscoord.testing.contract.place import HANG_S, Place
from fscoord.testing.contract.refusals import Refusals
from fscoord.testing.contract.waiting import Interrupts, Waiting


class StoreContract(Values, Several, Handles, Refusals, Waiting, Threads, Members, Interrupts):
    """The contract of `~fscoord.Store`, as a class of tests for pytest.

    A subclass makes the store, and pytest runs the tests::

        class TestMine(StoreContract):
            def make_store(self, tmp_path):
                return MyStore(tmp_path / "store")

    The claims in the store's `~fscoord.Store.capabilities` are tested as well. Every test gets a store of its own, and
    closes the handles that it has opened. The class needs pytest (extra ``testing``).
    """

    @abstractmethod
    def make_store(self, tmp_path: Any) -> Store:
        """Return a handle on a new and empty store; called once for each test.

        Args:
            tmp_path: a fresh directory, as a `pathlib.Path`, that pytest removes later.
        """

    def another(self, store: Store) -> Store:
        """Return one more handle on the same store as `store`; by default a clone."""
        return store.clone()

    def name_in_errors(self, key: str) -> str:
        """Return `key` as it appears in error messages; unchanged by default."""
        return key

    @pytest.fixture
    def place(self, tmp_path: Any) -> Iterator[Place]:
        """Yield a fresh store, and close all handles on it at the end."""
        first = self.make_store(tmp_path)
        first.set_timeout(HANG_S)
        place = Place(first, self.another, self.name_in_errors)
        yield place
        place.close()
