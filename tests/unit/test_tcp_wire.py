"""Requests to a server of torch's, whose end the test plays; those at the real one are in tests/with_torch."""

from __future__ import annotations

import math
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.places import HANG_S, start_thread

from fscoord.stores.tcp import wire
from fscoord.stores.tcp.wire import Channel, Deadline, Disconnected, Unanswered

HELLO = struct.pack("=BI", 0, 0x3C85F7CE)
PING, ECHO = b"\x0dfsco", b"fsco"
K = struct.pack("=QQ", 1, 2) + b"/k"
GRANTED, CANCELLED, CANCEL = b"\0", b"\1", b"\x0c"
NOW = -math.inf


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
    begin(channel, HANG_S)
    yield channel, server
    channel.close()
    server.hang_up()


def begin(channel: Channel, limit: float) -> None:
    channel.begin(Deadline(limit, lambda: "an answer"))


def test_wait_for_a_present_key_ends_and_its_value_is_read(ends: tuple[Channel, Server]) -> None:
    channel, server = ends
    server.say(GRANTED)
    assert channel.wait([b"k"], math.inf)
    server.hear(HELLO + b"\6" + K)
    server.say(GRANTED)
    assert channel.check([b"k"])
    server.say(struct.pack("=Q", 3) + b"one")
    assert channel.values([b"k"]) == [b"one"]
    server.hear(b"\5" + K + b"\x0a" + K)
    server.say(b"\1")
    assert not channel.check([b"k"])
    with start_thread(server.say, struct.pack("=QQ", 0, 100_000) + bytes(100_000)):
        assert channel.values([b"k", b"k"]) == [b"", bytes(100_000)]
    assert channel.is_whole


@pytest.mark.parametrize(
    ("answer", "is_granted"), [(CANCELLED, False), (GRANTED + CANCELLED, True)], ids=["in vain", "granted meanwhile"]
)
def test_wait_that_is_cancelled_leaves_the_connection_usable(
    ends: tuple[Channel, Server], answer: bytes, is_granted: bool
) -> None:
    channel, server = ends
    with start_thread(server.hear_and_say, HELLO + b"\6" + K + CANCEL, answer):
        assert channel.wait([b"k"], NOW) is is_granted
    assert channel.is_whole
    server.say(GRANTED)
    assert channel.wait([b"k"], math.inf)


@pytest.mark.parametrize("answer", [ECHO + GRANTED, GRANTED + ECHO], ids=["it is granted later", "before that"])
def test_wait_that_lasts_pings_the_server(ends: tuple[Channel, Server], answer: bytes) -> None:
    channel, server = ends
    with start_thread(server.hear_and_say, HELLO + b"\6" + K + PING, answer):
        assert channel.wait([b"k"], math.inf)
    server.say(GRANTED)
    assert channel.check([b"k"])


@pytest.mark.parametrize(
    ("answer", "is_granted"),
    [
        (ECHO + CANCELLED, False),
        (GRANTED + ECHO + CANCELLED, True),
        (ECHO + GRANTED + CANCELLED, True),
    ],
    ids=["in vain", "granted before its echo", "granted after its echo"],
)
def test_wait_that_is_cancelled_after_a_ping_leaves_the_connection_usable(
    ends: tuple[Channel, Server], monkeypatch: pytest.MonkeyPatch, answer: bytes, is_granted: bool
) -> None:
    monkeypatch.setattr(wire, "ECHO_AFTER_S", -HANG_S)  # before the end of the wait, however slow the machine is
    channel, server = ends
    with start_thread(server.hear_and_say, HELLO + b"\6" + K + PING + CANCEL, answer):
        assert channel.wait([b"k"], time.monotonic() + 0.02) is is_granted
    assert channel.is_whole
    server.say(GRANTED)
    assert channel.check([b"k"])


@pytest.mark.parametrize("size", [0, 1, 1 << 14, (1 << 14) + 1, 1 << 20])
def test_value_of_any_size_is_read_whole_and_not_beyond(ends: tuple[Channel, Server], size: int) -> None:
    channel, server = ends
    value = bytes(range(256)) * (size // 256) + bytes(size % 256)
    with start_thread(server.say, struct.pack("=Q", size) + value):
        assert channel.values([b"k"]) == [value]
    server.say(GRANTED)
    assert channel.check([b"k"])


def test_answer_with_an_invalid_size_is_rejected(ends: tuple[Channel, Server]) -> None:
    channel, server = ends
    server.say(b"\xff" * 8)
    with pytest.raises(Disconnected, match="does not fit the request"):
        channel.values([b"k"])


def test_answer_received_before_the_deadline_counts_after_it(ends: tuple[Channel, Server]) -> None:
    channel, server = ends
    server.say(ECHO)
    begin(channel, -1)
    channel.ping()
    assert channel.is_whole


CALLS: dict[str, Callable[[Channel], object]] = {
    "ping": Channel.ping,
    "wait": lambda channel: channel.wait([b"k"], NOW),
    "check": lambda channel: channel.check([b"k"]),
    "check_each": lambda channel: channel.check_each([b"k"]),
    "arrivals": lambda channel: channel.arrivals(b"k"),
    "values": lambda channel: channel.values([b"k"]),
    "value": lambda channel: channel.value(b"k"),
    "value_of_each": lambda channel: channel.value_of_each([b"k"]),
    "queue_len": lambda channel: channel.queue_len(b"k"),
    "num_keys": Channel.num_keys,
    "list_keys": Channel.list_keys,
}
WRITES: dict[str, Callable[[Channel], object]] = {
    "set": lambda channel: channel.set(b"k", b"v"),
    "append": lambda channel: channel.append(b"k", b"v"),
    "multi_set": lambda channel: channel.multi_set([(b"k", b"v")]),
    "queue_push": lambda channel: channel.queue_push(b"k", b"v"),
    "compare_set": lambda channel: channel.compare_set(b"k", b"", b"v"),
    "add": lambda channel: channel.add(b"k", 1),
    "delete": lambda channel: channel.delete(b"k"),
    "queue_pop": lambda channel: channel.queue_pop(b"k"),
    "add_worker": lambda channel: channel.add_worker(1),
    "barrier": lambda channel: channel.barrier(b"k", 2, NOW),
}
LIFE = {"begin", "interrupt", "close", "abandon"}


def test_requests_of_a_channel_are_all_covered_by_these_tests() -> None:
    assert {name for name in vars(Channel) if not name.startswith("_")} == CALLS.keys() | WRITES.keys() | LIFE


@pytest.mark.parametrize("name", [*CALLS, *WRITES])
@pytest.mark.parametrize("answer", [b"", b"\0", b"\0\0\0"], ids=["nothing", "a byte", "three bytes"])
def test_request_that_is_not_answered_ends_at_its_deadline(
    ends: tuple[Channel, Server], name: str, answer: bytes
) -> None:
    channel, server = ends
    server.say(answer)
    begin(channel, 0.01)
    if name in ("set", "append", "multi_set", "queue_push", "check", "check_each", "wait", "barrier") and answer:
        (CALLS | WRITES)[name](channel)  # one byte is all that it asks for
        if len(answer) > 1:  # and what nobody asked for does not become the next answer
            with pytest.raises(Disconnected, match="does not fit the request"):
                channel.ping()
        else:
            assert channel.is_whole
        return
    with pytest.raises((Unanswered, Disconnected)):
        (CALLS | WRITES)[name](channel)
    assert not channel.is_whole
    assert channel.has_written is (name in WRITES)


def test_request_that_the_server_does_not_read_ends_at_its_deadline(ends: tuple[Channel, Server]) -> None:
    channel, _ = ends
    begin(channel, 0.01)
    with pytest.raises(Unanswered):
        channel.set(b"k", bytes(8 << 20))
    assert channel.has_written
    assert not channel.is_whole


def test_request_ends_when_a_signal_handler_raises(ends: tuple[Channel, Server]) -> None:
    """Its `TimeoutError` is not taken for one of the connection."""

    def raise_it(*_: object) -> None:
        raise TimeoutError("the handler's")

    def signal_once_it_is_sent() -> None:
        server.hear(HELLO + b"\1" + K[8:] + struct.pack("=Q", 1) + b"v")
        signal.pthread_kill(main, signal.SIGALRM)

    channel, server = ends
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        thread = start_thread(signal_once_it_is_sent)
        with pytest.raises(TimeoutError, match="the handler's"):
            channel.set(b"k", b"v")
        thread.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not channel.is_whole


@pytest.mark.parametrize("answer", [b"\7", CANCELLED, ECHO])
def test_answer_to_another_request_is_rejected(ends: tuple[Channel, Server], answer: bytes) -> None:
    channel, server = ends
    server.say(answer)
    with pytest.raises(Disconnected, match="does not fit the request"):
        channel.wait([b"k"], math.inf)


def test_echo_with_other_bytes_is_rejected(ends: tuple[Channel, Server]) -> None:
    channel, server = ends
    server.say(b"HTTP")
    with pytest.raises(Disconnected, match="does not fit the request"):
        channel.ping()


def test_wait_ends_when_its_connection_is_lost(ends: tuple[Channel, Server]) -> None:
    channel, server = ends
    server.hang_up()
    with pytest.raises((OSError, Disconnected)):
        channel.wait([b"k"], math.inf)


def test_wait_is_interrupted_by_another_thread(ends: tuple[Channel, Server]) -> None:
    channel, server = ends
    waiting = start_thread(channel.wait, [b"k"], math.inf)
    server.hear(HELLO + b"\6" + K)
    channel.interrupt()
    with pytest.raises(Disconnected, match="closed the connection"):
        waiting.join()


def test_key_count_excludes_the_key_of_torch_that_appears_meanwhile(ends: tuple[Channel, Server]) -> None:
    channel, server = ends
    own, count = b"\5" + struct.pack("=QQ", 1, 5) + b"init/", b"\7"

    def play() -> None:
        for before, number, after, heard in ((b"\1", 2, b"\0", HELLO), (b"\0", 3, b"\0", b"")):
            server.hear_and_say(heard + own + count + own, before + struct.pack("=q", number) + after)

    with start_thread(play):
        assert channel.num_keys() == 2
