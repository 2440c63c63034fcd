"""Connections: each has a deadline, over all addresses of a host."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator

import pytest

from fscoord._runtime import network

SLACK_S = 30.0


@pytest.fixture
def full() -> Iterator[int]:
    """The port of a server with no room for another connection: the kernel drops what asks for one."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        waiting = []
        for _ in range(4):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
        for connection in waiting:
            connection.close()


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def closed() -> Iterator[int]:
    """A port at which no server listens, and which no other program can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def at(*ports: int) -> list[network.Endpoint]:
    return [endpoint for port in ports for endpoint in network.resolve("127.0.0.1", port)]


def test_connection_that_is_not_made_in_time_is_a_timeout(full: int) -> None:
    started = time.monotonic()
    with pytest.raises(OSError) as caught:
        network.connect(at(full), started + 0.1)
    assert caught.value.errno == errno.ETIMEDOUT
    assert time.monotonic() - started < SLACK_S


def test_address_that_does_not_answer_leaves_time_for_the_next(full: int, closed: int, listening: int) -> None:
    addresses = at(full, *[closed] * 60, listening)  # the first has its share of the time, half a second
    started = time.monotonic()
    with network.connect(addresses, started + SLACK_S) as connection:
        assert connection.getpeername()[1] == listening
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert time.monotonic() - started < SLACK_S / 2


def test_connection_error_is_that_of_the_last_address(closed: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        network.connect(at(closed, closed), time.monotonic() + SLACK_S)
    with pytest.raises(OSError, match="no address"):
        network.connect([], time.monotonic() + SLACK_S)


def test_address_of_an_unavailable_family_is_skipped(listening: int) -> None:
    unknown = (socket.AddressFamily.AF_APPLETALK, ("127.0.0.1", listening))
    with network.connect([unknown, *at(listening)], time.monotonic() + SLACK_S) as connection:
        assert connection.getpeername()[1] == listening


@pytest.mark.parametrize("name", ["x" * 100, "a..b", "nowhere.invalid"])
def test_host_name_that_does_not_resolve_is_an_oserror_with_errno(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.endswith("invalid"):

        def find_nothing(*_: object, **__: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(network.socket, "getaddrinfo", find_nothing)
    with pytest.raises(OSError) as caught:
        network.resolve(name, 1)
    assert caught.value.errno is not None


def test_connection_already_closed_has_nothing_to_drop() -> None:
    connection = socket.socket()
    connection.close()
    network.drop_unsent(connection)
