"""The fixture `place`: a fresh store of every kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.etcd_server import Server
from support.places import HANG_S, KINDS, Place, etcd, open_tcp
from support.torch_lacks import LACKS

from fscoord.errors import StoreError
from fscoord.store import Store
from fscoord.stores.tcp import connections, server

LACKED = re.compile("this server of torch (keeps no queues|does not list its keys)")


@pytest.fixture(scope="session", autouse=True)
def _torch_has_opened_what_it_keeps(request: pytest.FixtureRequest) -> None:
    """Its first server opens a pipe for the whole process, which no test is to be blamed for."""
    if any(item.get_closest_marker("torch") for item in request.session.items):
        open_tcp().close()


@pytest.fixture(autouse=True)
def _server_of_torch_may_be_slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may get no turn for seconds on a busy machine. Then a wait that shall time out is unanswered, and a
    server that is closed still has its descriptors.
    """
    if request.node.get_closest_marker("torch"):
        for module in (connections, server):
            monkeypatch.setattr(module, "ANSWER_MIN_S", HANG_S)


@pytest.fixture(scope="session", autouse=True)
def _etcd_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """It begins before the first test, so that none is to be blamed for the process."""
    if any(item.get_closest_marker("etcd") for item in request.session.items):
        etcd.append(Server())
    yield
    while etcd:
        etcd.pop().stop()


def _skip_what_torch_lacks(item: pytest.Item) -> Iterator[None]:
    """Skip a test that needs what the server of an older torch lacks. The text is the error of the store."""
    try:
        return (yield)
    except StoreError as error:
        if item.get_closest_marker("torch") and LACKED.search(str(error)):
            pytest.skip(f"{LACKS}what the test needs: {error}")
        raise


# A fixture may be the first that needs it.
pytest_runtest_setup = pytest.hookimpl(wrapper=True)(_skip_what_torch_lacks)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(_skip_what_torch_lacks)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, str(tmp_path))
    yield place
    place.close()


@pytest.fixture
def store(place: Place) -> Store:
    return place.open()
