"""The contract with combined writes: the first writer leads, or a leader that is always there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.combining import AlwaysLeader, share
from support.internals import combiner

from fscoord import FileStore
from fscoord.testing import StoreContract


class Combined(StoreContract):
    """The store lies in a directory that counts as one that hosts share."""

    @pytest.fixture(autouse=True)
    def shared(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        share(str(tmp_path), monkeypatch)

    def make_store(self, tmp_path: Any) -> FileStore:
        return FileStore(tmp_path / "log")

    def another(self, store: Any) -> FileStore:
        return FileStore(store.path)


class TestWritersLeadInTurn(Combined):
    """Most operations of these tests find the seat free."""


class TestWritersFollow(Combined):
    """No operation of these tests finds the seat free."""

    @pytest.fixture(autouse=True)
    def leader(self, shared: None, tmp_path: Path) -> Iterator[AlwaysLeader]:
        with AlwaysLeader(str(tmp_path / "log")) as leader:
            yield leader

    def test_leader_serves_all_but_the_first_write_of_a_handle(
        self, leader: AlwaysLeader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("STALLED_S", "SILENT_S"):  # no writer takes a leader that is slow for one that is stopped
            monkeypatch.setattr(combiner, name, 1000.0)
        with self.make_store(tmp_path) as store:
            store.set("k", "1")
            for number in range(1, 6):
                assert store.add("n", 1) == number
        assert leader.served == 5
