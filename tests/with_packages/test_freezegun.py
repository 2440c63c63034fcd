"""Waits inside of freezegun's ``freeze_time``."""

from __future__ import annotations

from pathlib import Path

import freezegun
import pytest

from fscoord import FileStore, HashStore, Store, StoreTimeoutError
from fscoord.recipes import Lock

pytestmark = pytest.mark.packages


@pytest.mark.parametrize("kind", ["file", "hash"])
@pytest.mark.timeout(60)
def test_wait_ends_while_the_time_is_frozen(kind: str, tmp_path: Path) -> None:
    with freezegun.freeze_time("2020-01-01"):
        store: Store = HashStore() if kind == "hash" else FileStore(tmp_path / "s", timeout=20)
        with store:
            with pytest.raises(StoreTimeoutError):
                store.wait(["never"], 0.1)
            with Lock(store, "l"):
                assert not Lock(store, "l").acquire(timeout=0.1)
