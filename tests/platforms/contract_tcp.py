"""The contract on a `TCPStore` and a played server, for an interpreter from which `elsewhere` has hidden names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.played_server import PlayedServer

from fscoord import Store, TCPStore
from fscoord.stores.tcp import connections
from fscoord.testing import StoreContract

connections.ANSWER_MIN_S = 60  # type: ignore[misc]  # on a busy machine the played server may get no turn for seconds


@pytest.fixture(scope="module")
def played() -> Iterator[PlayedServer]:
    server = PlayedServer()
    yield server
    server.end()


class TestTCPStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _empty(self, played: PlayedServer) -> None:
        self.played = played
        played.forget()

    def make_store(self, tmp_path: Path) -> Store:
        return TCPStore("127.0.0.1", self.played.port)
