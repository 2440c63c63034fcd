"""A wait at a server of torch's, played by the test; those at the real one are in tests/with_torch."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
from contract.places import HANG_S, start_thread

from fscoord.stores import tcp_waits
from fscoord.stores.tcp_waits import Channel

HELLO = struct.pack("=BI", 0, 0x3C85F7CE)
K = struct.pack("=QQ", 1, 2) + b"/k"
GRANTED, CANCELLED, CANCEL = b"\0", b"\1", b"\x0c"


class Server:
    """The server's end of one connection."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(HANG_S)
        self._end = end
        self.say, self.hang_up = end.sendall, end.close

    def hear(self, data: bytes) -> None:
        heard = b""
        while len(heard) < len(data) and (part := self._end.recv(len(data) - len(heard))):
            heard += part
        assert heard == data

    def hear_and_say(self, heard: bytes, said: bytes) -> None:
        self.hear(heard)
        self.say(said)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Server]]:
    ours, theirs = socket.socketpair()
    channel, server = Channel(ours), Server(theirs)
    yield channel, server
    channel.close()
    server.hang_up()


def test_what_is_there_ends_a_wait_and_is_read(ends: tuple[Channel, Server]) -> None:
    channel, server = ends
    server.say(GRANTED)
    assert channel.wait([b"k"], HANG_S)
    server.hear(HELLO + b"\6" + K)
    server.say(GRANTED + struct.pack("=Q", 3) + b"one")
    assert channel.check([b"k"])
    assert channel.values([b"k"]) == [b"one"]
    server.hear(b"\5" + K + b"\x0a" + K)
    server.say(b"\1" + struct.pack("=QQ", 0, 100_000))
    assert not channel.check([b"k"])
    with start_thread(server.say, bytes(100_000)):
        assert channel.values([b"k", b"k"]) == [b"", bytes(100_000)]


@pytest.mark.parametrize(
    ("answer", "is_granted"), [(CANCELLED, False), (GRANTED + CANCELLED, True)], ids=["in vain", "granted meanwhile"]
)
def test_a_wait_that_is_given_up_leaves_the_connection_whole(
    ends: tuple[Channel, Server], answer: bytes, is_granted: bool
) -> None:
    channel, server = ends
    with start_thread(server.hear_and_say, HELLO + b"\6" + K + CANCEL, answer):
        assert channel.wait([b"k"], 0) is is_granted
    server.say(GRANTED)
    assert channel.wait([b"k"], HANG_S)


def test_a_server_that_hangs_is_not_waited_for(ends: tuple[Channel, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_waits, "ANSWER_S", 0.01)
    with pytest.raises(TimeoutError):
        ends[0].wait([b"k"], 0)


@pytest.mark.parametrize("answer", [b"\7", CANCELLED])
def test_an_answer_to_something_else_is_no_answer(ends: tuple[Channel, Server], answer: bytes) -> None:
    channel, server = ends
    server.say(answer)
    with pytest.raises(OSError, match="what was not asked"):
        channel.wait([b"k"], HANG_S)


def test_a_wait_ends_with_its_connection(ends: tuple[Channel, Server]) -> None:
    channel, server = ends
    server.hang_up()
    with pytest.raises(OSError):
        channel.wait([b"k"], HANG_S)


def test_a_wait_is_interrupted_by_another_thread(ends: tuple[Channel, Server]) -> None:
    channel, server = ends
    waiting = start_thread(channel.wait, [b"k"], HANG_S)
    server.hear(HELLO + b"\6" + K)
    channel.interrupt()
    with pytest.raises(OSError, match="closed the connection"):
        waiting.join()
