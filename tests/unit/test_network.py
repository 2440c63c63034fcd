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


def closed() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def at(*ports: int) -> list[network.Endpoint]:
    return [endpoint for port in ports for endpoint in network.resolve("127.0.0.1", port)]


def test_a_connection_that_is_not_made_in_time_says_so(full: int) -> None:
    started = time.monotonic()
    with pytest.raises(OSError) as caught:
        network.connect(at(full), started + 0.1)
    assert caught.value.errno == errno.ETIMEDOUT
    assert time.monotonic() - started < SLACK_S


def test_an_address_that_does_not_answer_leaves_time_for_the_next(full: int, listening: int) -> None:
    with network.connect(at(full, closed(), listening), time.monotonic() + 1) as connection:
        assert connection.getpeername()[1] == listening
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_last_address_says_why_there_is_no_connection() -> None:
    with pytest.raises(ConnectionRefusedError):
        network.connect(at(closed(), closed()), time.monotonic() + SLACK_S)
    with pytest.raises(OSError, match="no address"):
        network.connect([], time.monotonic() + SLACK_S)


def test_a_kind_of_network_that_is_not_there_is_passed_over(listening: int) -> None:
    unknown = (socket.AddressFamily.AF_APPLETALK, ("127.0.0.1", listening))
    with network.connect([unknown, *at(listening)], time.monotonic() + SLACK_S) as connection:
        assert connection.getpeername()[1] == listening


@pytest.mark.parametrize("name", ["x" * 100, "a..b", "nowhere.invalid"])
def test_a_name_that_leads_nowhere_is_an_error_of_the_system(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.endswith("invalid"):

        def find_nothing(*_: object, **__: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(network.socket, "getaddrinfo", find_nothing)
    with pytest.raises(OSError) as caught:
        network.resolve(name, 1)
    assert caught.value.errno is not None


def test_a_connection_that_is_closed_already_has_nothing_to_drop() -> None:
    connection = socket.socket()
    connection.close()
    network.drop_unsent(connection)
