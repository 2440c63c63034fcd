"""The particular features of `EtcdStore`. tests/contract tests the contract of all stores."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import pytest
import urllib3
from support.etcd_server import Server
from support.places import HANG_S, start_thread, until
from support.ports import held_port

import fscoord
from fscoord import EtcdStore
from fscoord.errors import (
    FscoordError,
    LimitExceededError,
    QueueEmptyError,
    StoreClosedError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from fscoord.rendezvous import RendezvousParameters, create_backend

pytestmark = pytest.mark.etcd

Open = Callable[..., EtcdStore]


def post(server: Server, path: str, body: dict[str, object]) -> dict[str, object]:
    """Ask the server itself, past the store."""
    with urllib3.HTTPConnectionPool("127.0.0.1", server.port) as pool:
        return pool.request("POST", f"/v3/{path}", json=body, retries=False).json()


# What others see


def test_stores_with_other_prefixes_see_nothing_of_each_other(server: Server) -> None:
    names = ["p", "p/q", "p0", "o", "p/=", "pp", "p//", b"p\xff", b"p\xff\xff", "/p"]
    names.remove("p/=")
    stores = [server.open(name) for name in names]
    for number, store in enumerate(stores):
        store.multi_set(["k", b"\xff", ""], [b"%d" % number] * 3)
        store.queue_push("q", b"%d" % number)
    for number, store in enumerate(stores):
        assert store.list_keys() == ["", "k", "\udcff"]
        assert store.multi_get(["k", b"\xff", ""]) == [b"%d" % number] * 3
        assert store.queue_len("q") == 1
        assert store.queue_pop("q") == b"%d" % number
        assert store.delete_key(b"\xff")
        assert store.num_keys() == 2
        store.close()


@pytest.mark.parametrize("prefix", ["", "/", "=v", "a/=q/b", "a\0b"])
def test_prefix_that_could_reach_into_another_store_is_refused(server: Server, prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        server.open(prefix)


def test_queues_whose_names_begin_alike_are_separate(store: EtcdStore) -> None:
    names = ["q", "q/", "q/1", "1/q", "", "/", b"q\xff"]
    for name in names:
        store.queue_push(name, name)
    for name in names:
        assert store.queue_len(name) == 1
        assert store.queue_pop(name) == (name if isinstance(name, bytes) else name.encode())


def test_arguments_may_have_the_names_of_torch(server: Server) -> None:
    address = f"127.0.0.1:{server.port}"
    with EtcdStore(etcd_client=address, etcd_store_prefix="as/in/torch") as store:
        assert (store.client, store.prefix) == (address, "as/in/torch/")
        with pytest.raises(StoreTimeoutError) as caught:
            store.wait(["missing"], override_timeout=0.01)
        assert caught.value.waited < HANG_S
        for both in ({"timeout": 1, "override_timeout": 1}, {"override_timeout": -1}):
            with pytest.raises((TypeError, ValueError), match="timeout"):
                store.wait(["missing"], **both)
    with pytest.raises(TypeError, match="etcd_store_prefix"):
        EtcdStore(address)
    with pytest.raises(TypeError, match="etcd_client"):
        EtcdStore(address, "p", etcd_client=address)


def test_etcd3gw_client_supplies_the_server_address(server: Server) -> None:
    class Client:  # what of it counts
        host, port, protocol = "127.0.0.1", server.port, "http"
        session = type("Session", (), {"verify": True, "cert": None})()

    with EtcdStore(Client(), "of-a-client") as store:
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_etcd_url_is_percent_decoded(server: Server) -> None:
    with (
        fscoord.open_store(f"etcd://{server.address}/a%20%2f%3Fjob?timeout=7&session_ttl=3") as store,
        server.open("a /?job") as same,
    ):
        store.set("k", "v")
        assert same.get("k") == b"v"
        assert store.timeout.total_seconds() == 7


def test_rendezvous_backend_uses_its_own_prefix_in_etcd(server: Server) -> None:
    for endpoint in (server.address, f"etcd://{server.address}/elsewhere"):
        params = RendezvousParameters("c10d", endpoint, "run/=1", 1, 1, store_type="etcd")
        backend, store = create_backend(params)
        with store:
            assert isinstance(store, EtcdStore)
            written = backend.set_state(b"state", None)
            assert written is not None
            assert written[0] == b"state"
            with create_backend(params)[1] as other:
                assert other.list_keys() == store.list_keys() != []


# Limits


def test_multi_set_of_4096_keys_is_one_transaction(store: EtcdStore) -> None:
    names = [f"k{number}" for number in range(4096)]
    before = store.num_keys()
    revisions = set()
    store.multi_set(names, names)
    assert store.num_keys() - before == 4096
    assert store.multi_get(names) == [name.encode() for name in names]
    reply = store._client.call("kv/txn", {"success": [_range(store, name) for name in names[::100]]}, HANG_S)
    for answer in reply["responses"]:
        revisions.add(answer["response_range"]["kvs"][0]["mod_revision"])
    assert len(revisions) == 1
    assert store.check(names)
    store.wait(names * 2, HANG_S)
    with pytest.raises(LimitExceededError, match="4097 keys"):
        store.multi_set([*names, "another"], ["v"] * 4097)
    assert not store.check(["another"])


def test_transaction_may_have_120_comparisons_and_additions(store: EtcdStore) -> None:
    store.register()  # the lease of the session is one more condition
    counters = {f"n{number}": 1 for number in range(120)}
    assert store.transact(add=counters, set={f"k{number}": "1" for number in range(700)}, delete=["none"])
    compared = {f"none{number}": None for number in range(60)}
    assert store.transact(compare=compared, add=dict(list(counters.items())[:60]))
    assert store.multi_get(["n0", "n59", "n60", "k699"]) == [b"2", b"2", b"1", b"1"]
    with pytest.raises(LimitExceededError, match="121 keys"):
        store.transact(add={**counters, "another": 1})


@pytest.mark.parametrize("call", ["add", "append", "compare_set"])
def test_handle_with_timeout_zero_can_change_a_key_it_has_not_read(store: EtcdStore, call: str) -> None:
    """Its first try is a guess. That this was wrong is no sign that others are quicker."""
    store.set("k", "1")
    with store.clone() as hasty:
        hasty.set_timeout(0)
        getattr(hasty, call)("k", *{"add": (1,), "append": ("2",), "compare_set": ("1", "2")}[call])
    assert store.get("k") == (b"12" if call == "append" else b"2")


def _range(store: EtcdStore, name: str) -> dict[str, object]:
    from fscoord.stores.etcd.requests import range_of

    return range_of(store._keys.value(name.encode()), keys_only=True)


@pytest.mark.parametrize("size", [1_600_000, 3_000_000])
def test_value_too_large_for_the_server_changes_nothing(store: EtcdStore, size: int) -> None:
    store.set("k", "v")
    for call in (
        lambda: store.set("k", bytes(size)),
        lambda: store.append("k", bytes(size)),
        lambda: store.compare_set("k", "v", bytes(size)),
        lambda: store.multi_set(["other", "k"], ["v", bytes(size)]),
        lambda: store.queue_push("k", bytes(size)),
    ):
        with pytest.raises(LimitExceededError, match="max-request-bytes"):
            call()
    assert store.get("k") == b"v"
    assert store.list_keys() == ["k"]
    assert store.queue_len("k") == 0


# Servers that are not there


@pytest.fixture
def unused() -> Iterator[int]:
    """A port on which nobody listens."""
    with held_port() as port:
        yield port


def test_server_that_is_not_there_is_named_within_the_timeout(unused: int) -> None:
    store = EtcdStore(f"127.0.0.1:{unused}", "p", timeout=0.2)
    calls: list[Callable[[], object]] = [
        lambda: store.set("k", "v"),
        lambda: store.get("k"),
        lambda: store.add("k", 1),
        lambda: store.check(["k"]),
        lambda: store.queue_pop("k"),
        lambda: store.wait(["k"], 0.1),
        lambda: store.members(),
    ]
    for call in calls:
        start = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=rf"127\.0\.0\.1:{unused}.*refused") as caught:
            call()
        assert time.monotonic() - start < HANG_S
        assert not caught.value.maybe_applied
    store.close()


def test_server_that_is_not_etcd_is_named() -> None:
    # It says that it will hang up: a client that does not know may ask once more just then.
    reply = b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 3\r\n\r\nno\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    asked = b""
                    while not asked.endswith(b"}"):  # what is left unread would make the end of this a reset
                        asked += connection.recv(1 << 16)
                    connection.sendall(reply)

        with start_thread(answer), EtcdStore(f"127.0.0.1:{port}", "p", timeout=HANG_S) as store:
            for call in (lambda: store.get("k"), lambda: store.set("k", "v")):
                with pytest.raises(StoreUnavailableError, match="not how etcd"):
                    call()


def test_write_whose_answer_is_lost_may_have_been_applied() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def hang_up() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)

        with start_thread(hang_up), EtcdStore(f"127.0.0.1:{port}", "p", timeout=HANG_S) as store:
            with pytest.raises(StoreUnavailableError, match=str(port)) as caught:
                store.set("k", "v")
            assert caught.value.maybe_applied


def test_server_that_does_not_answer_ends_a_call_at_its_timeout(own_server: Server) -> None:
    store = own_server.open("p", timeout=HANG_S)
    store.set("k", "v")
    own_server.pause()
    store.set_timeout(0.2)
    start = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=own_server.address) as caught:
        store.set("k", "w")
    assert caught.value.maybe_applied
    with pytest.raises(StoreUnavailableError, match=own_server.address):
        store.get("k")
    assert time.monotonic() - start < HANG_S
    own_server.resume()
    store.set_timeout(HANG_S)
    assert store.get("k") in (b"v", b"w")
    store.close()


def test_member_that_is_gone_is_replaced_by_the_next(server: Server, unused: int) -> None:
    with EtcdStore(f"127.0.0.1:{unused},{server.address}", "failover", timeout=HANG_S) as store:
        store.set("k", "v")
        assert store.get("k") == b"v"
        with start_thread(store.get, "later") as waiter:
            store.set("later", "1")
        assert waiter.result == b"1"


def test_member_that_does_not_answer_is_replaced_by_another_for_reads(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]},{server.address}"
        with server.open("silence") as store, EtcdStore(address, "silence", timeout=HANG_S) as other:
            store.set("k", "v")
            assert other.get("k") == b"v"
            other.set("k", "w")  # from now on the one that answers is asked first
        with server.open("silence") as store:
            assert store.get("k") == b"w"


def test_waits_survive_a_restart_of_the_server(own_server: Server) -> None:
    with own_server.open("p") as store, own_server.open("p") as other:
        waits = [start_thread(call, name) for call, name in ((store.get, "a"), (other.queue_pop, "q"))]
        waits.append(start_thread(store.wait, ["a", "b"]))
        own_server.kill()
        assert all(each.is_alive() for each in waits)
        own_server.start()
        with own_server.open("p") as third:
            third.multi_set(["a", "b"], ["1", "2"])
            third.queue_push("q", "3")
        assert [each.join() for each in waits] == [b"1", b"3", None]


def test_wait_reads_again_when_its_revision_was_compacted(server: Server, store: EtcdStore) -> None:
    """A watch from a revision that the server has forgotten is ended by the server; the wait reads again."""
    from fscoord.stores.etcd.transactions import KeySnapshot, WatchRange

    store.set("k", "1")
    revision = store._transactions.read([_range(store, "k")], HANG_S)[1]
    store.set("other", "1")
    current = store._transactions.read([_range(store, "k")], HANG_S)[1]
    post(server, "kv/compaction", {"revision": str(current)})
    key = store._keys.value(b"k")
    stale = KeySnapshot(revision - 1, [b"k"], [[WatchRange(key)]])
    assert store._watcher.watch(stale, 0.05) == ([b"k"], None)  # it ends, and says that nothing has come
    assert store.get("k") == b"1"


# Closing


def test_close_ends_the_waits_of_other_threads(open_store: Open) -> None:
    store = open_store()
    waits = [start_thread(call, argument) for call, argument in ((store.get, "k"), (store.queue_pop, "q"))]
    until(lambda: len(store._client._streams) == 2)
    store.close()
    for each in waits:
        with pytest.raises(StoreClosedError):
            each.join()
    store.close()
    for call in (lambda: store.set("k", "v"), lambda: store.check(["k"]), store.clone, lambda: store.announce_rank(1)):
        with pytest.raises(StoreClosedError):
            call()


def test_forked_child_has_connections_and_a_session_of_its_own(store: EtcdStore) -> None:
    store.announce_rank(0)
    number = store.register()
    pid = os.fork()
    if pid == 0:
        try:
            store.set("from", "child")
            store.announce_rank(1)
            store.set("session", b"%d" % store.register())
            store.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.get("from") == b"child"
    assert int(store.get("session")) != number == store.register()
    assert store.dead_ranks([0, 1]) == [1]


# Counters and queues under contention


def test_additions_by_several_threads_are_all_counted(open_store: Open) -> None:
    handles = [open_store() for _ in range(4)]
    threads = [start_thread(lambda handle=handle: [handle.add("n", 1) for _ in range(25)]) for handle in handles]
    sums = [number for thread in threads for number in thread.join()]
    assert sorted(sums) == list(range(1, 101))


def test_queue_values_are_popped_once_and_in_order_by_several_threads(open_store: Open) -> None:
    store = open_store()
    for number in range(60):
        store.queue_push("q", b"%d" % number)

    def take(handle: EtcdStore) -> list[int]:
        taken = []
        while True:
            try:
                taken.append(int(handle.queue_pop("q", block=False)))
            except QueueEmptyError:
                return taken

    takers = [start_thread(take, open_store()) for _ in range(3)]
    taken = [taker.join() for taker in takers]
    assert sorted(number for each in taken for number in each) == list(range(60))
    assert all(each == sorted(each) for each in taken)


def test_addition_is_judged_by_the_current_value_of_the_key(open_store: Open) -> None:
    """A handle remembers what it wrote last, which says nothing of what the key has now."""
    one, two = open_store(), open_store()
    one.add("n", 2**63 - 1)
    two.set("n", "5")
    assert one.add("n", 1) == 6
    two.set("n", "text")
    with pytest.raises(ValueError, match="not an integer"):
        one.add("n", 1)
    two.delete_key("n")
    assert one.add("n", 1) == 1
    assert one.compare_set("n", "7", "8") == b"1"


# Sessions


def test_session_of_a_killed_process_is_dead_when_its_lease_is_over(open_store: Open) -> None:
    store = open_store()
    store.announce_rank(0)
    pid = os.fork()
    if pid == 0:
        try:
            while True:
                with suppress(FscoordError):  # this process did not run for so long that its lease was over
                    open_store(session_ttl=1).announce_rank(1)
                    os.kill(os.getpid(), 9)
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    assert store.wait_alive(["never"], [0, 1], HANG_S) == [1]
    assert store.dead_ranks([0, 1]) == [1]
    dead = store.members([1])
    assert [(member.pid, member.alive) for member in dead] == [(pid, "no")]


def test_key_that_the_dead_set_last_ends_the_wait_and_not_their_death(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key may come after the look for it, and the death before the look for deaths."""
    store = open_store()
    asked: list[object] = []

    def dead_ranks(ranks: Iterable[int]) -> list[int]:
        asked.append(ranks)
        store.set("k", "v")
        return list(ranks)

    monkeypatch.setattr(store, "dead_ranks", dead_ranks)
    assert store.wait_alive(["k"], [1]) == []
    assert len(asked) == 1
    assert store.wait_alive(["other"], [1]) == [1]


def test_session_taken_for_dead_can_no_longer_write(server: Server, open_store: Open) -> None:
    store, other = open_store(), open_store()
    store.announce_rank(0)
    post(server, "lease/revoke", {"ID": str(store._session._lease.number)})
    assert other.dead_ranks([0]) == [0]
    for call in (
        lambda: store.set("k", "v"),
        lambda: store.add("n", 1),
        lambda: store.queue_push("q", "v"),
        lambda: store.multi_set(["k", "l"], ["v", "v"]),
    ):
        with pytest.raises(fscoord.SessionDeadError, match="its lease was not renewed"):
            call()
    assert other.num_keys() == 0
    assert store.check(["k"]) is False


def test_lease_is_renewed_long_before_it_ends(server: Server, open_store: Open) -> None:
    store, other = open_store(session_ttl=18), open_store()
    store.announce_rank(0)
    lease = {"ID": str(store._session._lease.number)}
    left = [18]

    def is_renewed() -> bool:
        left.append(int(post(server, "lease/timetolive", lease)["TTL"]))
        return left[-1] > left[-2]

    until(is_renewed)
    assert other.dead_ranks([0]) == []


def test_session_survives_a_restart_of_the_server(own_server: Server) -> None:
    with own_server.open("p") as store, own_server.open("p") as other:
        store.announce_rank(0)
        own_server.kill()
        own_server.start()
        assert other.dead_ranks([0]) == []
        store.set("k", "v")


def test_barrier_that_fails_fast_names_the_rank_that_closed(open_store: Open) -> None:
    def leave() -> None:
        with open_store() as leaving:
            leaving.announce_rank(1)
            came.wait(HANG_S)

    came = threading.Event()
    store = open_store()
    with start_thread(leave):
        until(lambda: store.members([1]))
        with start_thread(
            lambda: fscoord.barrier(store, 2, "b", barrier_timeout=HANG_S, rank=0, fail_fast=True)
        ) as waiting:
            until(lambda: len(store._client._streams) == 1)
            came.set()
            with pytest.raises(fscoord.BrokenBarrierError) as caught:
                waiting.join()
            waiting._error = None
    assert caught.value.dead == ("1",)


def test_get_that_waited_returns_a_written_value_and_never_a_deleted_one(open_store: Open) -> None:
    store, other = open_store(), open_store()
    for turn in range(20):
        with start_thread(other.get, f"k{turn}") as waiter:
            until(lambda: other._client._streams or not waiter.is_alive())
            store.set(f"k{turn}", "1")
            store.set(f"k{turn}", "2")
            store.delete_key(f"k{turn}")
            store.set(f"k{turn}", "3")
        assert waiter.result in (b"1", b"2", b"3")
        with start_thread(other.get, f"e{turn}") as waiter:
            store.set(f"e{turn}", "")
        assert waiter.result == b""


def test_write_between_the_look_and_the_watch_is_not_missed(store: EtcdStore) -> None:
    """Several requests on one stream were lost now and then: Go's server drops what it has not read when it answers."""
    from fscoord.stores.etcd.transactions import KeySnapshot

    seen = store._look([b"k", b"q"], HANG_S)
    assert isinstance(seen, KeySnapshot)
    assert seen.missing == [b"k", b"q"]
    store.set("k", "v")
    store.queue_push("q", "w")
    assert store._watcher.watch(seen, HANG_S)[0] == []
