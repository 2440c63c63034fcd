"""The particular features of `TCPStore`. tests/contract tests the contract of all stores."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from support.places import HANG_S, start_thread, until
from support.ports import held_port
from support.torch_lacks import LACKS, needs

from fscoord import PrefixStore, TCPStore, barrier, open_store
from fscoord.aio import AsyncStore
from fscoord.errors import (
    BarrierError,
    LimitExceededError,
    QueueEmptyError,
    StoreClosedError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    UsedBeforeError,
)
from fscoord.rendezvous import RendezvousParameters, create_backend
from fscoord.stores.tcp import PAYLOAD_MAX, server as tcp_server
from fscoord.stores.tcp.wire import Channel, Deadline
from fscoord.testing.contract.waiting import CtrlC

pytestmark = pytest.mark.torch

# A server of torch knows the requests that its client has methods for: test_server_knows_what_the_client_of_torch_has.
HAS_QUEUES, LISTS_KEYS, HAS_BARRIERS = (hasattr(dist.TCPStore, name) for name in ("queue_push", "list_keys", "barrier"))


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


def test_client_of_torch_and_ours_share_a_server(master: TCPStore, store: TCPStore) -> None:
    other = dist.TCPStore("127.0.0.1", master.port, timeout=timedelta(seconds=HANG_S))
    other.set("k", "v")
    assert store.get("k") == b"v"
    assert (store.add("n", 2), other.add("n", 3), store.add("n", 1)) == (2, 5, 6)


# -- one server, torch's client and ours -------------------------------------------------------------------------------

SOON = timedelta(seconds=0.05)


def mixed_set(one: Any, other: Any, key: str) -> None:
    for value in (b"v", b"", b"\0\xff\n", bytes(PAYLOAD_MAX - 100)):
        one.set(key, value), one.num_keys()
        assert other.get(key) == value


def mixed_get(one: Any, other: Any, key: str) -> None:
    waiting = start_thread(one.get, key)
    other.set(key, "late")
    assert waiting.join() == b"late"


def mixed_wait(one: Any, other: Any, key: str) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        one.wait([key, f"{key}2"], SOON)
    other.set(key, "v"), other.num_keys()
    waiting = start_thread(one.wait, [key, f"{key}2"])
    other.set(f"{key}2", "v")
    waiting.join()
    one.wait([f"{key}2"], timedelta(seconds=HANG_S))


def mixed_check(one: Any, other: Any, key: str) -> None:
    assert not one.check([key])
    other.set(key, ""), other.num_keys()
    assert one.check([key, key])
    assert not one.check([key, f"{key}2"])


def mixed_append(one: Any, other: Any, key: str) -> None:
    one.append(key, "v"), one.num_keys()
    other.append(key, "w"), other.num_keys()
    assert one.get(key) == other.get(key) == b"vw"


def mixed_compare_set(one: Any, other: Any, key: str) -> None:
    assert one.compare_set(key, "not there", "v") == b"not there"
    assert not other.check([key])
    assert one.compare_set(key, "", "v") == other.get(key) == b"v"
    assert one.compare_set(key, "another", "w") == other.get(key) == b"v"
    assert other.compare_set(key, "v", "") == one.get(key) == b""


def mixed_delete_key(one: Any, other: Any, key: str) -> None:
    other.set(key, "v"), other.num_keys()
    assert one.delete_key(key)
    assert not other.check([key])
    assert not other.delete_key(key)


def mixed_add(one: Any, other: Any, key: str) -> None:
    sums = (one.add(key, 2), other.add(key, -3), one.add(key, 2**62), other.add(key, 0))
    assert sums == (2, -1, 2**62 - 1, 2**62 - 1)
    assert one.get(key) == other.get(key) == b"%d" % sums[-1]
    one.set(key, "7"), one.num_keys()
    assert other.add(key, 1) == 8


def mixed_multi_set(one: Any, other: Any, key: str) -> None:
    one.multi_set([key, f"{key}2"], ["1", ""]), one.num_keys()
    assert (other.get(key), other.get(f"{key}2")) == (b"1", b"")


def mixed_multi_get(one: Any, other: Any, key: str) -> None:
    keys, values = [f"{key}{number}" for number in range(3)], [b"1", b"", bytes(1 << 20)]
    waiting = start_thread(one.multi_get, keys)
    for name, value in zip(keys, values, strict=True):
        other.set(name, value)
    assert waiting.join() == values


def mixed_num_keys(one: Any, other: Any, key: str) -> None:
    before = other.num_keys()
    one.multi_set([key, f"{key}2"], ["", ""])
    assert one.num_keys() == other.num_keys() == before + 2


def mixed_list_keys(one: Any, other: Any, key: str) -> None:
    one.multi_set([key, f"{key}2"], ["", ""])
    assert sorted(one.list_keys()) == sorted(other.list_keys())
    assert {key, f"{key}2"} <= set(other.list_keys())


def mixed_barrier(one: Any, other: Any, key: str) -> None:
    arrived = start_thread(one.barrier, key, 2)
    until(lambda: other.check([key]))
    other.barrier(key, 2)
    arrived.join()
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        one.barrier(f"{key}2", 2, SOON)


def mixed_queue_push(one: Any, other: Any, key: str) -> None:
    for item in (b"first", b"", bytes(1 << 20)):
        one.queue_push(key, item)
    one.num_keys()
    assert [other.queue_pop(key) for _ in range(3)] == [b"first", b"", bytes(1 << 20)]


def mixed_queue_pop(one: Any, other: Any, key: str) -> None:
    with pytest.raises(dist.QueueEmptyError if isinstance(one, dist.TCPStore) else QueueEmptyError):
        one.queue_pop(key, False)
    waiting = start_thread(one.queue_pop, key)
    other.queue_push(key, "late")
    assert waiting.join() == b"late"
    other.queue_push(key, "there"), other.num_keys()
    assert one.queue_pop(key, False) == b"there"


def mixed_queue_len(one: Any, other: Any, key: str) -> None:
    assert one.queue_len(key) == 0
    other.queue_push(key, "1"), other.queue_push(key, "2"), other.num_keys()
    assert one.queue_len(key) == 2


def mixed_clone(one: Any, other: Any, key: str) -> None:
    clone = one.clone()
    clone.set(key, "v"), clone.num_keys()
    assert other.get(key) == one.get(key) == b"v"
    if isinstance(clone, TCPStore):
        clone.close()


MIXED = {name.removeprefix("mixed_"): call for name, call in globals().items() if name.startswith("mixed_")}
NO_REQUESTS = {"has_extended_api", "host", "libuvBackend", "port", "set_timeout", "timeout"}


@pytest.mark.parametrize(
    ("name", "use_libuv"),
    [
        pytest.param(
            name, use_libuv, marks=needs(dist.TCPStore, name), id=f"{name} {'libuv' if use_libuv else 'no libuv'}"
        )
        for name in MIXED
        for use_libuv in ([True] if name.startswith("queue") else [True, False])
    ],
)
def test_operation_means_the_same_to_the_client_of_torch(name: str, use_libuv: bool) -> None:
    """The client of torch does not wait until the server has made a write, but the answer to `num_keys` comes after."""
    limit = timedelta(seconds=HANG_S)
    options = {"timeout": limit, "wait_for_workers": False, "use_libuv": use_libuv}
    with TCPStore("127.0.0.1", 0, is_master=True, **options) as master, master.clone() as ours:
        theirs = dist.TCPStore("127.0.0.1", master.port, **options)
        MIXED[name](ours, theirs, "our ключ")
        MIXED[name](theirs, ours, "their ключ")


def test_requests_of_the_client_of_torch_are_all_tried_beside_ours() -> None:
    assert {name for name in dir(dist.TCPStore) if not name.startswith("_")} - NO_REQUESTS - MIXED.keys() == set()


@pytest.mark.parametrize("use_libuv", [True, False])
def test_server_knows_what_the_client_of_torch_has(
    use_libuv: bool, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """What this torch lacks stands in the report. fscoord finds it out from the server."""
    lacks = [name for name in ("queue_push", "list_keys", "barrier") if not hasattr(dist.TCPStore, name)]
    record_testsuite_property("lacked by the TCPStore of torch", ", ".join(lacks) or "nothing")
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False, use_libuv=use_libuv) as store:
        if HAS_QUEUES and use_libuv:
            assert store.queue_len("q") == 0
        else:
            with pytest.raises(StoreError, match="keeps no queues; start it with use_libuv=True, with a torch"):
                store.queue_len("q")
        if LISTS_KEYS:
            assert store.list_keys() == []
        else:
            with pytest.raises(StoreError, match="does not list its keys; start it with a torch whose"):
                store.list_keys()
        store.barrier("b", 1)
        assert store._has_barriers == HAS_BARRIERS
        assert store.check(["b"] if HAS_BARRIERS else ["b/num_members", "b/last_member"])


@pytest.mark.usefixtures("patient")
def test_tasks_and_threads_meet_at_one_barrier_with_the_client_of_torch(store: TCPStore) -> None:
    theirs = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=HANG_S), wait_for_workers=False)
    view = PrefixStore("p", store)
    first = theirs.barrier if HAS_BARRIERS else store.barrier  # then a barrier is of fscoord's clients alone
    counter = "" if HAS_BARRIERS else "/num_members"
    threads = [start_thread(first, "p/b", 4), start_thread(view.barrier, "b", 4)]
    threads.append(start_thread(lambda: asyncio.run(AsyncStore(view).barrier("b", 4))))
    until(lambda: store.get(f"p/b{counter}", default=b"0") == b"3")
    asyncio.run(AsyncStore(store).barrier("p/b", 4))
    for thread in threads:
        thread.join()
    with pytest.raises(UsedBeforeError, match="arrival 5 of 4"):
        view.barrier("b", 4)
    # The server refuses the fifth arrival; where keys make the barrier, its caller has counted it already.
    assert store.get(f"p/b{counter}") == (b"4" if HAS_BARRIERS else b"5")
    with pytest.raises(StoreTimeoutError, match=r"last caller of barrier 'c'|'c/last_member'"):
        store.barrier("c", 2, timeout=0.1)
    with pytest.raises(StoreTimeoutError, match="1 arrived"):
        barrier(view, 2, "d", 0.1)
    store.set(f"e{counter}", "text")
    with pytest.raises(BarrierError, match="text"):
        store.barrier("e", 2)


@pytest.mark.parametrize("is_master", [True, False])
def test_world_size_of_zero_is_refused_at_once(is_master: bool) -> None:
    with pytest.raises(ValueError, match="world_size"):
        TCPStore("localhost", 0, world_size=0, is_master=is_master, timeout=HANG_S)
    with pytest.raises(ValueError, match="world size"):
        dist.TCPStore("localhost", 0, world_size=0, is_master=is_master)
    with pytest.raises(ValueError, match="port"):
        TCPStore("localhost", 0, timeout=HANG_S)


def test_addition_to_a_value_that_is_no_integer_leaves_the_connection_usable(store: TCPStore) -> None:
    store.set("k", "abc")
    with pytest.raises(ValueError, match="not an integer"):
        store.add("k", 1)
    assert store.get("k") == b"abc"


def test_compare_set_that_writes_nothing_does_not_end_a_wait(store: TCPStore, master: TCPStore) -> None:
    """A `compare_set` that writes nothing wakes the waiters for the key, and torch's get returns an empty value."""
    waiting = [start_thread(call, argument) for call, argument in [(store.get, "k"), (store.wait, ["k"])]]
    for _ in range(20):
        master.compare_set("k", "something", "else")
    assert all(thread.is_alive() for thread in waiting)
    master.set("k", "v")
    assert [thread.join() for thread in waiting] == [b"v", None]


def test_pickled_master_arrives_as_a_client(master: TCPStore) -> None:
    with pickle.loads(pickle.dumps(master)) as other:
        other.set("k", "v")
        assert (master.get("k"), other.timeout) == (b"v", master.timeout)
    assert master.check(["k"])  # the server lives on


def test_write_of_one_client_is_read_by_the_next(master: TCPStore) -> None:
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
                    if HAS_QUEUES:
                        writer.queue_push("q", value)
                        assert reader.queue_pop("q", block=False) == value
        finally:
            over.set()


def test_waiting_thread_does_not_block_other_threads(store: TCPStore) -> None:
    with start_thread(store.get, "k") as waiting:
        store.set("k", "v")
    assert waiting.result == b"v"


def test_value_over_the_payload_limit_of_the_server_is_refused(store: TCPStore) -> None:
    with pytest.raises(LimitExceededError, match=str(PAYLOAD_MAX)):
        store.set("k", bytes(PAYLOAD_MAX + 1))
    with pytest.raises(LimitExceededError):
        store.multi_set(["a", "b"], [bytes(PAYLOAD_MAX // 2), bytes(PAYLOAD_MAX // 2)])
    assert store.num_keys() == 0


def is_ended_by_ctrl_c(call: Callable[[], object], when: Callable[[], object]) -> bool:
    """Make the call, press Ctrl-C in it once the condition `when` holds, and return whether that has ended the call."""

    def press() -> None:
        until(when)
        ctrl_c.press()

    with CtrlC() as ctrl_c, start_thread(press):
        return ctrl_c.ends(call)


def test_ctrl_c_ends_a_wait(store: TCPStore) -> None:
    assert is_ended_by_ctrl_c(lambda: store.get("never"), lambda: store._connections._busy)
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_server_that_is_not_there_is_named_within_the_timeout() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(StoreUnavailableError, match=f"tcp://127.0.0.1:{port}"):
            TCPStore("127.0.0.1", port, timeout=0.2)


def test_port_already_in_use_is_reported(master: TCPStore) -> None:
    with pytest.raises(StoreUnavailableError, match="free and open"):
        TCPStore("127.0.0.1", master.port, is_master=True, timeout=0.2, wait_for_workers=False)


def set_for_ever(store: TCPStore) -> None:
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        store.set("k", "v")


def test_store_fails_once_its_master_is_closed(store: TCPStore, master: TCPStore) -> None:
    master.close()
    with pytest.raises(StoreUnavailableError) as caught:
        set_for_ever(store)
    assert caught.value.maybe_applied
    with pytest.raises(StoreClosedError):
        master.get("k")


def test_forked_child_has_a_connection_of_its_own(store: TCPStore, master: TCPStore) -> None:
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


@pytest.mark.parametrize("what", ["pass", "del store", "store.set('k', 'v')", "store.close()"])
def test_forked_child_of_the_master_ends_normally(what: str) -> None:
    """torch's C++ ends the process when a server is destroyed whose thread is not there."""
    program = f"""
import os, sys
from fscoord import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, timeout={HANG_S}, wait_for_workers=False)
child = os.fork()
if not child:
    {what}
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
store.set("k", "w")
store.close()
sys.stdout.flush()
os._exit(0)  # torch 2.6 rarely hangs when Python has ended in the parent
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


@pytest.mark.usefixtures("patient")
def test_tcp_url_opens_a_client_or_a_master(master: TCPStore) -> None:
    with open_store(f"tcp://127.0.0.1:{master.port}?timeout=3") as store:
        assert store.timeout == timedelta(seconds=3)
        store.set("k", "v")
    assert master.get("k") == b"v"
    with open_store("tcp://127.0.0.1:0?is_master=1&wait_for_workers=0") as other:
        other.set_timeout(0)
        with pytest.raises(StoreTimeoutError):
            other.get("k")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://:1", "tcp://h:x", "tcp://h:1/path"])
def test_tcp_url_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="tcp://host:port"):
        open_store(address)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("use_libuv", [True, False])
def test_wait_that_times_out_prints_nothing(use_libuv: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own client writes two lines each time, and asks the resolver for its own name for them."""
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False, use_libuv=use_libuv) as store:
        store.set("here", "1")
        store.set_timeout(0.2)
        for wait in (store.get, lambda key: store.wait(["here", key]), lambda key: store.multi_get([key, "here"])):
            with pytest.raises(StoreTimeoutError) as caught:
                wait("never")
            assert caught.value.keys == ("never",)
        if use_libuv and HAS_QUEUES:
            with pytest.raises(StoreTimeoutError):
                store.queue_pop("never")
    assert capfd.readouterr().err == ""


@needs(dist.TCPStore, "queue_pop")
@pytest.mark.usefixtures("patient")
def test_queue_pop_counts_the_whole_call_as_waited(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the server has queues is asked first, and a busy server takes long to answer."""
    refuse = store._refuse_without_queues

    def refuse_late(deadline: Deadline) -> None:
        refuse(deadline)
        while deadline.waited() < 0.2:
            time.sleep(0.01)

    monkeypatch.setattr(store, "_refuse_without_queues", refuse_late)
    store.set_timeout(0.3)
    with pytest.raises(StoreTimeoutError) as caught:
        store.queue_pop("never")
    assert caught.value.waited >= 0.3


def test_clone_with_timeout_zero_still_has_time_to_connect(store: TCPStore) -> None:
    store.set_timeout(0)
    with store.clone() as clone:
        assert clone.timeout == timedelta(0)
        assert clone._limit == HANG_S


def test_close_ends_the_wait_of_another_thread(store: TCPStore) -> None:
    waiting = start_thread(store.get, "never")
    until(lambda: store._connections._busy)
    store.close()
    with pytest.raises(StoreClosedError):
        waiting.join()


class Stopped:
    """A server in a process of its own, which can be stopped."""

    def __init__(self, use_libuv: bool) -> None:
        ours, theirs = os.pipe()
        self._child = os.fork()
        if not self._child:
            try:
                master = TCPStore(
                    "127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False, use_libuv=use_libuv
                )
                os.write(theirs, b"%d" % master.port)
                signal.pause()
            finally:
                os._exit(2)
        os.close(theirs)
        self.port = int(os.read(ours, 10))
        os.close(ours)

    def stop(self) -> None:
        os.kill(self._child, signal.SIGSTOP)
        os.waitpid(self._child, os.WUNTRACED)

    def go_on(self) -> None:
        os.kill(self._child, signal.SIGCONT)

    def end(self) -> None:
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)


@pytest.fixture(params=[True, False], ids=["libuv", "no libuv"])
def stopped(request: pytest.FixtureRequest) -> Iterator[Stopped]:
    server = Stopped(request.param)
    yield server
    server.end()


LIMIT = 2.5
CALLS: dict[str, Callable[[TCPStore], object]] = {
    "get": lambda store: store.get("k"),
    "get of what is there": lambda store: store.get("there"),
    "wait": lambda store: store.wait(["k"], LIMIT),
    "multi_get": lambda store: store.multi_get(["k", "there"]),
    "check": lambda store: store.check(["k"]),
    "num_keys": TCPStore.num_keys,
    "list_keys": TCPStore.list_keys,
    "queue_len": lambda store: store.queue_len("q"),
    "queue_pop": lambda store: store.queue_pop("q"),
    "queue_pop at once": lambda store: store.queue_pop("q", block=False),
    "queue_push": lambda store: store.queue_push("q", "v"),
    "set": lambda store: store.set("set", "v"),
    "set of what fills every buffer": lambda store: store.set("large", bytes(PAYLOAD_MAX)),
    "append": lambda store: store.append("append", "v"),
    "multi_set": lambda store: store.multi_set(["multi"], ["v"]),
    "compare_set": lambda store: store.compare_set("compare", "", "v"),
    "delete_key": lambda store: store.delete_key("gone"),
    "add": lambda store: store.add("n", 1),
    "barrier": lambda store: store.barrier("b", 2),
    "clone": TCPStore.clone,
}
WRITTEN = {"set": b"v", "append": b"v", "multi": b"v", "compare": b"v"}
"""What the writes leave if they were applied, by their keys."""


def test_stopped_server_ends_each_operation_in_time_and_stores_resume_later(stopped: Stopped) -> None:
    """torch's own client waits for ever, or until the kernel gives up."""
    stores = {name: TCPStore("127.0.0.1", stopped.port, timeout=HANG_S) for name in CALLS}
    first = stores["set"]
    first.multi_set(["there", "gone"], ["1", "1"])
    has_queues = first._has_queues(first._deadline())
    for store in stores.values():
        store._keeps_queues = has_queues
        store.set_timeout(LIMIT)
        store._limit = LIMIT  # of a clone's connection
    names = [name for name in CALLS if has_queues or not name.startswith("queue")]
    stopped.stop()
    started = time.monotonic()
    calls = {name: start_thread(CALLS[name], stores[name]) for name in names}
    errors = {}
    for name, call in calls.items():
        with pytest.raises(StoreUnavailableError, match=r"^timeout: .*no answer within") as caught:
            call.join()
        errors[name] = caught.value
    assert time.monotonic() - started < HANG_S
    sent = {"set", "set of what fills every buffer", "append", "multi_set", "compare_set", "delete_key"}
    sent |= {"queue_push", "queue_pop at once"} & set(names)
    assert {name for name, error in errors.items() if error.maybe_applied} == sent
    stopped.go_on()
    for store in stores.values():
        store.set_timeout(HANG_S)
        store.add("alive", 1)
    assert int(first.get("alive")) == len(stores)
    for key, value in WRITTEN.items():
        assert not first.check([key]) or first.get(key) == value
    for store in stores.values():
        store.close()


def test_stopped_server_makes_a_running_wait_time_out(stopped: Stopped) -> None:
    with TCPStore("127.0.0.1", stopped.port, timeout=HANG_S) as store:
        calls, limit = [], LIMIT
        errors = StoreTimeoutError, StoreUnavailableError
        while not calls or calls[-1].result:  # a server without a turn may not have answered in time
            store.set_timeout(limit)
            calls.append(start_thread(pytest.raises, errors, store.get, "k"))
            until(lambda: [each for each in list(store._connections._busy) if each.has_received] or calls[-1].result)
            limit *= 2
        stopped.stop()
        error = calls[-1].join().value
        assert isinstance(error, StoreTimeoutError)
        assert error.keys == ("k",)
        stopped.go_on()
        store.set_timeout(HANG_S)
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_ctrl_c_ends_a_write_to_a_stopped_server(stopped: Stopped) -> None:
    with TCPStore("127.0.0.1", stopped.port, timeout=HANG_S) as store:
        stopped.stop()
        assert is_ended_by_ctrl_c(lambda: store.set("k", "v"), lambda: store._connections._busy)
        stopped.go_on()
        store.set("k", "w")
        assert store.get("k") == b"w"


def test_stopped_server_makes_opening_another_store_time_out(stopped: Stopped) -> None:
    stopped.stop()
    started = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=r"^timeout: .*no answer within"):
        TCPStore("127.0.0.1", stopped.port, timeout=LIMIT)
    assert time.monotonic() - started < HANG_S


def test_server_without_libuv_keeps_values_and_refuses_queues() -> None:
    with (
        TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False, use_libuv=False) as master,
        master.clone() as store,
    ):
        store.set("k", "v")
        assert store.delete_key("k")
        assert not store.delete_key("k")
        for call in (lambda: store.queue_push("q", "v"), lambda: store.queue_pop("q"), lambda: store.queue_len("q")):
            with pytest.raises(StoreError, match="keeps no queues; start it with use_libuv=True") as caught:
                call()
            assert not caught.value.maybe_applied
        with pytest.raises(StoreError, match="keeps no queues"):
            store.queue_pop("q", block=False)
        assert master.num_keys() == 0


@pytest.mark.parametrize("use_libuv", [True, False])
def test_key_of_torch_is_neither_counted_nor_listed(use_libuv: bool) -> None:
    with TCPStore(
        "127.0.0.1", 0, 2, is_master=True, timeout=HANG_S, wait_for_workers=False, use_libuv=use_libuv
    ) as master:
        assert master.num_keys() == 0
        other = dist.TCPStore(
            "127.0.0.1", master.port, 2, timeout=timedelta(seconds=HANG_S), wait_for_workers=True, use_libuv=use_libuv
        )
        assert other.num_keys() == 1
        assert (master.num_keys(), master.check(["init/"])) == (0, False)
        assert not LISTS_KEYS or master.list_keys() == []
        master.set("init/", "mine")
        assert not LISTS_KEYS or master.list_keys() == ["init/"]
        assert (master.num_keys(), master.delete_key("init/")) == (1, True)
        assert other.num_keys() == 1


def test_master_waits_for_workers_of_torch_too() -> None:
    with held_port() as port:
        opening = start_thread(lambda: TCPStore("127.0.0.1", port, 3, is_master=True, timeout=HANG_S))
        with TCPStore("127.0.0.1", port, 3, timeout=HANG_S) as worker:
            assert opening.is_alive()
            other = dist.TCPStore("127.0.0.1", port, 3, timeout=timedelta(seconds=HANG_S))
            with opening.join() as master:
                master.set("k", "v")
                assert worker.get("k") == other.get("k") == b"v"


@pytest.mark.usefixtures("patient")
def test_master_whose_workers_do_not_come_reports_how_many_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers the last question for them only after the time is over."""
    add_worker = Channel.add_worker

    def slow(channel: Channel, amount: int) -> int:
        if not amount:
            time.sleep(0.2)
        count = add_worker(channel, amount)
        if amount:  # the time is not over before the master itself is counted
            channel._deadline.ends = time.monotonic() + 0.1
        return count

    monkeypatch.setattr(Channel, "add_worker", slow)
    with pytest.raises(StoreTimeoutError, match=r"^timeout: .*: 1 of 2 stores connected within"):
        TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=HANG_S)


@pytest.mark.parametrize("use_libuv", [True, False])
def test_master_accepts_a_listening_socket(use_libuv: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = os.dup(listener.fileno())
        port = listener.getsockname()[1]
    options = {"use_libuv": use_libuv, "master_listen_fd": number, "wait_for_workers": False}
    try:
        opened = TCPStore("127.0.0.1", port, is_master=True, timeout=HANG_S, **options)
    except ValueError as error:
        os.close(number)  # which is still the caller's
        assert use_libuv
        assert re.search("listen fd.*; pass use_libuv=False", str(error))
        pytest.skip(f"{LACKS}a server with libuv that accepts a listening socket: {error}")
    with opened as store:
        store.set("k", "v")
        assert store.port == port
        assert store.get("k") == b"v"


@needs(dist.TCPStore, "list_keys")
def test_keys_that_are_not_text_are_listed(store: TCPStore) -> None:
    store.set(b"\xff", "v")
    assert store.list_keys() == ["\udcff"]


def test_server_that_is_slow_to_start_or_stop_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are the only calls into torch's C++."""
    goes_on = threading.Event()
    descriptors = len(os.listdir("/proc/self/fd"))

    class Slow(dist.TCPStore):  # type: ignore[misc]
        def __init__(self, *arguments: object, **named: object) -> None:
            started.append(weakref.ref(self))
            goes_on.wait(HANG_S)
            super().__init__(*arguments, **named)

    started: list[weakref.ref[Slow]] = []

    class SlowToEnd:
        def __init__(self, server: object) -> None:
            self._server = server

        def __del__(self) -> None:
            goes_on.wait(HANG_S)

    monkeypatch.setattr(tcp_server, "ANSWER_MIN_S", 0.05)
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False) as store:
        server = store._server
        assert server is not None
        server._store = SlowToEnd(server._store)
    with monkeypatch.context() as patched:
        patched.setattr(dist, "TCPStore", Slow)
        with pytest.raises(StoreUnavailableError, match=r"^timeout: .*did not start within 0\.1 s"):
            TCPStore("127.0.0.1", 0, is_master=True, timeout=0.1, wait_for_workers=False)
        assert is_ended_by_ctrl_c(
            lambda: TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False),
            lambda: len(started) == 2,
        )
    goes_on.set()
    # On Python 3.11 a join that Ctrl-C interrupts takes the thread for ended, so nothing else waits for its server.
    until(lambda: len(started) == 2 and not any(server() for server in started))
    # Threads of their own destroy the servers, and a reference to a server is gone before its descriptors are.
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_client_needs_no_torch(master: TCPStore) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from fscoord import TCPStore\n"
        f"with TCPStore('127.0.0.1', {master.port}, timeout={HANG_S}) as store: store.set('k', 'v')\n"
        "try: TCPStore('127.0.0.1', 0, is_master=True)\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert "pip install 'fscoord[torch]'" in done.stdout
    assert master.get("k") == b"v"


def test_torch_without_libuv_is_reported_with_the_option_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a torch raises a plain RuntimeError, not a DistError; and a node must not wait for another host then."""

    def refuse(*_: object, use_libuv: bool, **__: object) -> None:
        raise RuntimeError(
            "use_libuv was requested but PyTorch was built without libuv support, run with USE_LIBUV=0\nC++"
        )

    monkeypatch.setattr(dist, "TCPStore", refuse)
    match = r"tcp://127.0.0.1:0: use_libuv was requested .* USE_LIBUV=0; pass use_libuv=False, or add \?use_libuv=0"
    with pytest.raises(ValueError, match=match):
        TCPStore("127.0.0.1", 0, is_master=True)
    parameters = RendezvousParameters("c10d", "127.0.0.1:0", "run", 1, 1)
    with pytest.raises(ValueError, match="use_libuv=False"):
        create_backend(parameters)


def test_taken_port_is_reported_although_torch_raises_a_plain_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("The server socket has failed to listen on any local network address. name: EADDRINUSE")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    with pytest.raises(StoreUnavailableError, match=r"EADDRINUSE.*free and open"):
        TCPStore("127.0.0.1", 0, is_master=True)
