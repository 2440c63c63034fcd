"""What `Store` promises holds for `AsyncStore`: the contract's suite, each of whose calls is a coroutine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aio.through_a_loop import Loop, ThroughALoop
from support.third_party import ThirdPartyStore

from fscoord import FileStore, HashStore, PrefixStore
from fscoord.store import Store
from fscoord.testing.contract.handles import Handles, Members
from fscoord.testing.contract.operations import Values
from fscoord.testing.contract.place import HANG_S, Place
from fscoord.testing.contract.waiting import Waiting


def make(kind: str, tmp_path: Path) -> Store:
    if kind == "file":
        return FileStore(tmp_path / "store")
    return HashStore() if kind == "hash" else ThirdPartyStore()


@pytest.fixture(params=["hash", "file", "nested file", "third-party"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    family, _, kind = request.param.rpartition(" ")
    store = make(kind, tmp_path)
    loop = Loop()
    first = ThroughALoop(PrefixStore("job", store) if family else store, loop)
    first.set_timeout(HANG_S)
    place = Place(first, full=lambda key: f"job/{key}" if family else key)
    yield place
    place.close()
    store.close()
    loop.stop()


class TestEveryStore(Handles, Waiting, Members):
    """Ctrl-C is left out: none comes to the thread of the loop."""


@pytest.mark.parametrize("place", ["file"], indirect=True)
class TestValues(Values):
    """Calls that do not wait: they are passed on in the same way for each store."""
