"""The contract on a `HashStore`, for an interpreter from which `elsewhere` has hidden names."""

from __future__ import annotations

from pathlib import Path

from fscoord import HashStore, Store
from fscoord.testing import StoreContract


class TestHashStore(StoreContract):
    def make_store(self, tmp_path: Path) -> Store:
        return HashStore()
