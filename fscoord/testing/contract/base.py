"""`ContractTests`: what every part of the suite stands on, the fixtures for a store and for another handle on it."""

from __future__ import annotations

import pytest

from fscoord.store import Store
from fscoord.testing.contract.place import Place

__all__ = ["ContractTests"]


class ContractTests:
    """Tests that take a fixture ``place``: a `~fscoord.testing.contract.place.Place` with a fresh and empty store."""

    @pytest.fixture
    def store(self, place: Place) -> Store:
        """Give a handle on the store."""
        return place.open()

    @pytest.fixture
    def other(self, place: Place) -> Store:
        """Give a second handle on the store."""
        return place.open()
