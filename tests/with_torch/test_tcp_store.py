"""What is particular to `TCPStore`; the contract that it keeps with all stores is tested in tests/contract."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from contract.places import HANG_S, start_thread, until

from fscoord import TCPStore, open_store
from fscoord.errors import LimitExceededError, StoreClosedError, StoreTimeoutError, StoreUnavailableError
from fscoord.stores import tcp_waits
from fscoord.stores.tcp import PAYLOAD_MAX

pytestmark = pytest.mark.torch


@pytest.fixture(scope="session", autouse=True)
def _torch_has_opened_what_it_keeps() -> None:
    TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False).close()


@pytest.fixture
def master() -> Iterator[TCPStore]:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False)
    yield store
    store.close()


@pytest.fixture
def store(master: TCPStore) -> Iterator[TCPStore]:
    store = TCPStore("127.0.0.1", master.port, timeout=HANG_S)
    yield store
    store.close()


def test_torchs_own_client_and_this_one_share_a_server(master: TCPStore, store: TCPStore) -> None:
    other = dist.TCPStore("127.0.0.1", master.port, timeout=timedelta(seconds=HANG_S))
    other.set("k", "v")
    assert store.get("k") == b"v"
    assert (store.add("n", 2), other.add("n", 3), store.add("n", 1)) == (2, 5, 6)


def test_an_addition_to_what_is_no_integer_leaves_the_connection_whole(store: TCPStore) -> None:
    store.set("k", "abc")
    with pytest.raises(ValueError, match="not an integer"):
        store.add("k", 1)
    assert store.get("k") == b"abc"


def test_a_probe_that_wakes_a_waiter_does_not_end_its_wait(store: TCPStore, master: TCPStore) -> None:
    """A `compare_set` that writes nothing wakes who waits for the key, and torch's get returns an empty value then."""
    waiting = [start_thread(call, argument) for call, argument in [(store.get, "k"), (store.wait, ["k"])]]
    for _ in range(20):
        master.compare_set("k", "something", "else")
    assert all(thread.is_alive() for thread in waiting)
    master.set("k", "v")
    assert [thread.join() for thread in waiting] == [b"v", None]


def test_what_one_client_has_written_the_next_one_reads(master: TCPStore) -> None:
    """torch's own set returns when the request is sent, and another client may still read the old value."""
    over = threading.Event()

    def keep_the_server_busy() -> None:
        busy = master.clone()
        while not over.is_set():
            busy.set("large", bytes(1 << 22))
        busy.close()

    with master.clone() as first, master.clone() as second, start_thread(keep_the_server_busy):
        try:
            for number in range(100):
                value = b"%d" % number
                for writer, reader in ((first, second), (second, first)):
                    writer.set("k", value)
                    assert reader.get("k") == value
                    writer.append("k", "x")
                    assert reader.get("k") == value + b"x"
                    writer.queue_push("q", value)
                    assert reader.queue_pop("q", block=False) == value
        finally:
            over.set()


def test_a_thread_that_waits_keeps_no_other_from_working(store: TCPStore) -> None:
    with start_thread(store.get, "k") as waiting:
        store.set("k", "v")
    assert waiting.result == b"v"


def test_what_the_server_would_hang_up_on_is_refused(store: TCPStore) -> None:
    with pytest.raises(LimitExceededError, match=str(PAYLOAD_MAX)):
        store.set("k", bytes(PAYLOAD_MAX + 1))
    with pytest.raises(LimitExceededError):
        store.multi_set(["a", "b"], [bytes(PAYLOAD_MAX // 2), bytes(PAYLOAD_MAX // 2)])
    assert store.num_keys() == 0


def test_ctrl_c_ends_a_wait(store: TCPStore) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.05, interrupt)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.get("never")
    finally:
        timer.join()
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_a_server_that_is_not_there_is_named_within_the_timeout() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(StoreUnavailableError, match=f"tcp://127.0.0.1:{port}"):
            TCPStore("127.0.0.1", port, timeout=0.2)


def test_a_port_that_is_taken_is_said_so(master: TCPStore) -> None:
    with pytest.raises(StoreUnavailableError, match="free and open"):
        TCPStore("127.0.0.1", master.port, is_master=True, timeout=0.2, wait_for_workers=False)


def set_for_ever(store: TCPStore) -> None:
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        store.set("k", "v")


def test_the_store_is_gone_with_its_master(store: TCPStore, master: TCPStore) -> None:
    master.close()
    with pytest.raises(StoreUnavailableError) as caught:
        set_for_ever(store)
    assert caught.value.maybe_applied
    with pytest.raises(StoreClosedError):
        master.get("k")


def test_a_forked_child_has_a_connection_of_its_own(store: TCPStore, master: TCPStore) -> None:
    store.set("k", "0")
    child = os.fork()
    if not child:
        try:
            master.add("n", 1)
            store.set("k", "1")
            os._exit(0 if store.get("k") == b"1" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (store.get("k"), store.get("n")) == (b"1", b"1")


def test_an_address_opens_it(master: TCPStore) -> None:
    with open_store(f"tcp://127.0.0.1:{master.port}?timeout=3") as store:
        assert store.timeout == timedelta(seconds=3)
        store.set("k", "v")
    assert master.get("k") == b"v"
    with open_store("tcp://127.0.0.1:0?is_master=1&wait_for_workers=0") as other:
        other.set_timeout(0)
        with pytest.raises(StoreTimeoutError):
            other.get("k")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://:1", "tcp://h:x", "tcp://h:1/path"])
def test_an_address_without_host_or_port_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="tcp://host:port"):
        open_store(address)


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_wait_in_vain_writes_nothing(use_libuv: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own client writes two lines each time, and asks the resolver for its own name for them."""
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False, use_libuv=use_libuv) as store:
        store.set("here", "1")
        store.set_timeout(0.2)
        for wait in (store.get, lambda key: store.wait(["here", key]), lambda key: store.multi_get([key, "here"])):
            with pytest.raises(StoreTimeoutError) as caught:
                wait("never")
            assert caught.value.keys == ("never",)
        if use_libuv:
            with pytest.raises(StoreTimeoutError):
                store.queue_pop("never")
    assert capfd.readouterr().err == ""


def test_a_clone_that_looks_once_has_its_time_to_connect(store: TCPStore) -> None:
    store.set_timeout(0)
    with store.clone() as clone:
        assert clone.timeout == timedelta(0)
        assert clone._connections.limit == HANG_S


def test_closing_ends_a_wait_of_another_thread(store: TCPStore) -> None:
    waiting = start_thread(store.get, "never")
    until(lambda: store._waits._busy)
    store.close()
    with pytest.raises(StoreClosedError):
        waiting.join()


def test_a_server_that_stands_still_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own client waits for ever for what a server answers at once."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            master = TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False)
            os.write(theirs, b"%d" % master.port)
            signal.pause()
        finally:
            os._exit(2)
    try:
        with TCPStore("127.0.0.1", int(os.read(ours, 10)), timeout=HANG_S) as store:
            with pytest.raises(StoreTimeoutError):
                store.wait(["never"], 0)
            os.kill(child, signal.SIGSTOP)
            monkeypatch.setattr(tcp_waits, "ANSWER_S", 0.01)
            with pytest.raises(StoreUnavailableError, match=f"{store.port}: timed out"):
                store.wait(["never"], 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)
