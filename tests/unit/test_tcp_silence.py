"""A `TCPStore` whose server, network or resolver does not answer: every call ends at its deadline."""

from __future__ import annotations

import _thread
import errno
import logging
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.places import HANG_S, start_thread, until
from support.played_server import PlayedServer

from fscoord import StoreError, StoreTimeoutError, StoreUnavailableError, TCPStore
from fscoord._runtime import network
from fscoord._waiting import timing
from fscoord.stores.tcp import connections, wire

LIMIT = 0.3
SLACK_S = 30.0
"""What shows a deadline on a machine that is busy with something else; without one these calls never end."""

COMPARE_SET, ADD, CHECK, WAIT, MULTI_GET, CANCEL, QUEUE_POP, BARRIER = 2, 4, 5, 6, 10, 12, 15, 18


@pytest.fixture(autouse=True)
def _no_least_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_MIN_S", 0.0)


@pytest.fixture
def server() -> Iterator[PlayedServer]:
    server = PlayedServer()
    yield server
    server.end()


@pytest.fixture
def store(server: PlayedServer) -> Iterator[TCPStore]:
    store = TCPStore("127.0.0.1", server.port, timeout=HANG_S)
    store.queue_push("q", "1")  # it knows by now that there are queues
    yield store
    store.close()


READS: dict[str, Callable[[TCPStore], object]] = {
    "get": lambda store: store.get("k"),
    "multi_get": lambda store: store.multi_get(["k", "l"]),
    "wait": lambda store: store.wait(["k"]),
    "wait with a timeout": lambda store: store.wait(["k"], LIMIT),
    "look": lambda store: store.wait(["k"], 0),
    "check": lambda store: store.check(["k"]),
    "num_keys": lambda store: store.num_keys(),
    "list_keys": lambda store: store.list_keys(),
    "queue_len": lambda store: store.queue_len("q"),
    "queue_pop": lambda store: store.queue_pop("q"),  # it asks whether there is anything before it takes it
    "add": lambda store: store.add("k", 1),  # it looks at what is there before it writes
    "clone": lambda store: store.clone(),
}
WRITES: dict[str, Callable[[TCPStore], object]] = {
    "set": lambda store: store.set("k", "v"),
    "large set": lambda store: store.set("k", bytes(8 << 20)),
    "append": lambda store: store.append("k", "v"),
    "multi_set": lambda store: store.multi_set(["k", "l"], ["v", "w"]),
    "compare_set": lambda store: store.compare_set("k", "", "v"),
    "delete_key": lambda store: store.delete_key("k"),
    "queue_push": lambda store: store.queue_push("q", "v"),
    "queue_pop at once": lambda store: store.queue_pop("q", block=False),
}


def late(call: Callable[[TCPStore], object], store: TCPStore) -> StoreUnavailableError:
    """Call it with a timeout of `LIMIT`, and return what it raises, in time."""
    store.set_timeout(LIMIT)
    store._limit = LIMIT
    started = time.monotonic()
    try:
        with pytest.raises(StoreUnavailableError, match=r"^timeout: .*no answer within") as caught:
            call(store)
        assert time.monotonic() - started < SLACK_S
    finally:
        store.set_timeout(HANG_S)
    assert caught.value.errno == errno.ETIMEDOUT
    return caught.value


ErrorOfSilence = Callable[[int, Callable[[float], object]], StoreError]


@pytest.fixture
def error_of_silence(server: PlayedServer, monkeypatch: pytest.MonkeyPatch) -> ErrorOfSilence:
    """Call `attempt` with ever longer time limits until the server comes to stop before `request_kind`, long before the
    end of the attempt; return the error of this attempt. On a busy machine a short time is over before the server has
    answered what comes before.
    """
    stop, stopped_at = server.stop, [math.inf]

    def note_and_stop() -> None:
        stopped_at[0] = time.monotonic()
        stop()

    monkeypatch.setattr(server, "stop", note_and_stop)

    def error_of(request_kind: int, attempt: Callable[[float], object]) -> StoreError:
        limit = LIMIT
        while True:
            server.go_on()
            stopped_at[0] = math.inf
            server.falls_silent_before = request_kind
            monkeypatch.setattr(connections, "GRACE_S", limit)
            with pytest.raises((StoreTimeoutError, StoreUnavailableError)) as caught:
                attempt(limit)
            if time.monotonic() - stopped_at[0] > limit / 2:
                return caught.value
            assert limit < HANG_S
            limit *= 2

    return error_of


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_operation_on_a_stopped_server_ends_in_time(server: PlayedServer, store: TCPStore, name: str) -> None:
    server.stop()
    error = late((READS | WRITES)[name], store)
    assert error.maybe_applied is (name in WRITES)
    assert ("may or may not" in str(error)) is error.maybe_applied
    server.go_on()
    store.set("after", "1")
    assert store.get("after") == b"1"
    until(lambda: len(server.open) == 1)  # the connection that was given up has been closed


def test_callers_meet_at_a_barrier_on_a_server_without_a_request_for_it(
    server: PlayedServer, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "ANSWER_MIN_S", HANG_S)
    with store.clone() as other:
        waiting = start_thread(other.barrier, "b", 2)
        store.barrier("b", 2)
        waiting.join()
    assert store.list_keys() == ["b/last_member", "b/num_members"]
    assert server.asked[BARRIER]
    with pytest.raises(StoreTimeoutError):
        store.barrier("c", 2, LIMIT)


def test_unsent_data_is_dropped_after_the_deadline(server: PlayedServer, store: TCPStore) -> None:
    server.stop()
    late(lambda store: store.set("k", bytes(1 << 20)), store)  # more than the server's kernel takes, less than ours
    server.go_on()
    until(lambda: not server.open)
    assert not store.check(["k"])


@pytest.mark.parametrize("name", ["set", "get", "check"])
def test_timeout_error_of_a_signal_handler_is_not_translated(server: PlayedServer, store: TCPStore, name: str) -> None:
    def raise_it(*_: object) -> None:
        raise TimeoutError("the handler's")

    def call_until_alarm() -> None:  # where the machine is slow, the alarm comes before the call
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        (READS | WRITES)[name](store)

    server.stop()
    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        with pytest.raises(TimeoutError, match="the handler's") as caught:
            call_until_alarm()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert type(caught.value) is TimeoutError
    server.go_on()
    store.set("after", "1")


def test_queue_at_the_key_of_a_waited_value_is_not_polled_continuously(
    server: PlayedServer, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "RECHECK_S", HANG_S)
    monkeypatch.setattr(connections, "ANSWER_MIN_S", HANG_S)
    store.set_timeout(LIMIT)
    with pytest.raises(StoreTimeoutError):
        store.get("q")
    assert server.asked[WAIT] <= 4


@pytest.mark.parametrize(
    ("call", "request_kind"),
    [
        (lambda store: store.add("n", 1), ADD),
        (lambda store: store.queue_pop("q"), QUEUE_POP),
        (lambda store: store.delete_key("q"), QUEUE_POP),
    ],
    ids=["add", "queue_pop", "delete_key"],
)
def test_server_stopped_between_two_requests_may_have_applied_the_second(
    error_of_silence: ErrorOfSilence, store: TCPStore, call: Callable[[TCPStore], object], request_kind: int
) -> None:
    store.set("n", "1")

    def attempt(limit: float) -> None:
        store.set_timeout(HANG_S)
        store.queue_push("q", "1")  # an attempt that came too late may have taken one
        store.set_timeout(limit)
        call(store)

    error = error_of_silence(request_kind, attempt)
    assert isinstance(error, StoreUnavailableError)
    assert "no answer within" in str(error)
    assert error.maybe_applied


@pytest.mark.parametrize("what", ["get", "wait", "multi_get"])
@pytest.mark.parametrize("ends_with", [CANCEL, None], ids=["before the wait's end is confirmed", "after that"])
def test_server_stopped_during_a_wait_makes_it_time_out(
    error_of_silence: ErrorOfSilence, store: TCPStore, what: str, ends_with: int | None
) -> None:
    """The server had said that the key was missing; so that is what the caller hears."""
    with store.clone() as waiter:

        def attempt(limit: float) -> None:
            waiter.set_timeout(limit)
            READS[what](waiter)

        error = error_of_silence(ends_with or (CHECK if what == "wait" else COMPARE_SET), attempt)
    assert isinstance(error, StoreTimeoutError)
    assert re.search(r"^timeout: .*'k'.* no longer answered", str(error))
    assert "k" in error.keys


def test_value_that_is_not_sent_is_not_a_missing_key(error_of_silence: ErrorOfSilence, store: TCPStore) -> None:
    store.set("k", "v")

    def attempt(limit: float) -> None:
        store.set_timeout(limit)
        store.get("k")

    error = error_of_silence(MULTI_GET, attempt)
    assert isinstance(error, StoreUnavailableError)
    assert "no answer within" in str(error)
    assert not error.maybe_applied


def test_wait_names_every_key_if_the_server_stops_before_naming_the_missing(
    error_of_silence: ErrorOfSilence, store: TCPStore
) -> None:
    store.set("there", "1")
    error = error_of_silence(CHECK, lambda limit: store.wait(["there", "k"], limit))
    assert isinstance(error, StoreTimeoutError)
    assert error.keys == ("there", "k")


def test_server_stopped_before_a_store_is_opened_is_named_in_time(server: PlayedServer) -> None:
    server.stop()
    started = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=rf"^timeout: tcp://127.0.0.1:{server.port}: no answer within"):
        TCPStore("127.0.0.1", server.port, timeout=LIMIT)
    assert time.monotonic() - started < SLACK_S


def test_server_with_a_full_backlog_is_named_in_time() -> None:
    """The kernel drops what asks for a connection, as does a network that is cut."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        waiting = []
        for _ in range(4):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(address)
        with pytest.raises(StoreUnavailableError, match=r"^timeout: .*no connection within") as caught:
            TCPStore("127.0.0.1", address[1], timeout=LIMIT)
        assert not caught.value.maybe_applied
        for connection in waiting:
            connection.close()


def test_resolver_that_does_not_answer_ends_operations_and_keeps_one_thread(
    server: PlayedServer, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    asked = []

    def ask(*arguments: object, **_: object) -> list[tuple[object, ...]]:
        asked.append(arguments)
        answers.wait(HANG_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", server.port))]

    monkeypatch.setattr(network.socket, "getaddrinfo", ask)
    store._connections._endpoints = []
    server.hang_up()
    until(lambda: not server.open)
    store.set_timeout(LIMIT)
    with pytest.raises(StoreUnavailableError, match="closed the connection"):
        store.check(["k"])
    before = _thread._count()
    for _ in range(3):
        with pytest.raises(StoreUnavailableError, match=r"^timeout: .*no connection within") as caught:
            store.set("k", "v")
        assert not caught.value.maybe_applied
    until(lambda: _thread._count() <= before + 1)  # a thread of an earlier test may have ended meanwhile
    assert len(asked) == 1
    answers.set()
    store.set_timeout(HANG_S)
    store.set("k", "v")
    assert store.get("k") == b"v"


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_ctrl_c_ends_each_operation_on_a_stopped_server(
    server: PlayedServer, store: TCPStore, no_ctrl_c_is_lost: None, name: str
) -> None:
    main = threading.main_thread().ident
    assert main is not None
    server.stop()
    timer = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT))

    def call() -> None:
        timer.start()
        if name == "wait with a timeout":
            store.wait(["k"], HANG_S)
        elif name == "look":  # its deadline may come before the signal
            store.wait(["k"], HANG_S / 2)
        else:
            (READS | WRITES)[name](store)

    with pytest.raises(KeyboardInterrupt):
        call()
    timer.join()
    server.go_on()
    store.set("after", "1")
    assert store.get("after") == b"1"


def test_wait_ends_at_the_close_of_its_store_though_the_server_is_stopped(
    server: PlayedServer, store: TCPStore
) -> None:
    server.stop()
    waiting = [start_thread(call, store) for call in (READS["get"], WRITES["set"])]
    until(lambda: len(store._connections._busy) == len(waiting))
    store.close()
    for each in waiting:
        with pytest.raises(StoreError, match="is closed"):
            each.join()


def test_server_that_hangs_up_fails_one_call_only(server: PlayedServer, store: TCPStore) -> None:
    with start_thread(store.get, "k"):  # two connections
        until(lambda: store._connections._busy)
        store.set("k", "v")
    assert len(server.open) == 2
    server.hang_up()
    until(lambda: not server.open)
    with pytest.raises(StoreUnavailableError, match="closed the connection") as caught:
        store.check(["k"])
    assert not caught.value.maybe_applied
    assert store.check(["k"])


def test_wait_is_repeated_after_the_server_answered_and_then_hung_up(server: PlayedServer, store: TCPStore) -> None:
    """So does torch's server without libuv when a key vanishes between the wait for it and the reading."""
    waiting = start_thread(store.get, "k")
    until(lambda: [each for each in list(store._connections._busy) if each.has_received])
    server.hang_up()
    until(lambda: server._waiting and server.connections > 1)
    store.set("k", "v")
    assert waiting.join() == b"v"


def test_server_without_queues_is_distinguished_from_one_that_hung_up(server: PlayedServer) -> None:
    server.has_queues = False
    with TCPStore("127.0.0.1", server.port, timeout=HANG_S) as store:
        store.set("k", "v")
        assert store.delete_key("k")
        assert not store.delete_key("k")
        for call in (lambda: store.queue_push("q", "v"), lambda: store.queue_pop("q"), lambda: store.queue_len("q")):
            with pytest.raises(StoreError, match="use_libuv=True") as caught:
                call()
            assert not caught.value.maybe_applied
        assert not store.check(["q"])


def test_connection_that_was_lost_does_not_mean_a_server_without_queues(server: PlayedServer) -> None:
    with TCPStore("127.0.0.1", server.port, timeout=HANG_S) as store:
        server.hang_up()
        until(lambda: not server.open)
        store.queue_push("q", "v")
        assert store.queue_pop("q") == b"v"


def test_tcp_wait_that_lasts_long_is_logged(
    server: PlayedServer, store: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timing, "FIRST_S", 0.01)
    monkeypatch.setattr(wire, "FIRST_SLEEP_MAX_S", 0.01)
    monkeypatch.setattr(connections, "ANSWER_MIN_S", HANG_S)
    with caplog.at_level(logging.WARNING), start_thread(store.wait, ["k"]):
        until(lambda: f"still waiting for key 'k' in tcp://127.0.0.1:{server.port}" in caplog.text)
        store.set("k", "v")
    server.stop()
    with start_thread(store.set, "k", "v"):
        until(lambda: "still waiting for an answer of tcp://" in caplog.text)
        server.go_on()


def test_fork_during_a_call_gives_the_child_connections_of_its_own(server: PlayedServer, store: TCPStore) -> None:
    waiting = start_thread(store.get, "k")
    until(lambda: server._waiting)
    with store._connections._resolving:  # as if another thread were asking the resolver
        store._connections._endpoints = []
        child = os.fork()
        if not child:
            try:
                store.set("k", "v")
                os._exit(0 if store.get("k") == b"v" else 1)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert waiting.join() == b"v"
