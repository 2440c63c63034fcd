"""Tests against a real etcd, which is no Python package: `tox -e etcd` runs them, and says where to get one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
from support.etcd_server import Server

from fscoord.stores.etcd import EtcdStore

collect_ignore_glob = [] if find_spec("urllib3") and find_spec("trustme") else ["test_*.py"]
_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def shared_server(request: pytest.FixtureRequest) -> Iterator[Server | None]:
    """One server for all tests that do it no harm; it begins before them, so that none is blamed for the process."""
    server = Server() if any(item.get_closest_marker("etcd") for item in request.session.items) else None
    yield server
    if server is not None:
        server.stop()


@pytest.fixture
def server(shared_server: Server) -> Server:
    return shared_server


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server of this test's own, to stop and to kill."""
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def open_store(server: Server) -> Iterator[Callable[..., EtcdStore]]:
    """Give `open_store(timeout=60, **options)`: another handle, on one prefix that is this test's own."""
    prefix, opened = f"test{next(_numbers)}", []

    def open_one(timeout: float = 60, **options: object) -> EtcdStore:
        opened.append(server.open(prefix, timeout, **options))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., EtcdStore]) -> EtcdStore:
    return open_store()
