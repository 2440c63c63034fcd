"""The waits of the sessions of an `EtcdStore`, as `fscoord.status` shows them."""

from __future__ import annotations

from typing import Any

import pytest
from support.etcd_server import Server
from support.internals import timing
from support.places import start_thread, until

from fscoord import PrefixStore, barrier
from fscoord.recipes import Event, Lock
from fscoord.status import SessionStatus, status
from fscoord.store import Store

pytestmark = pytest.mark.etcd

HANG_S = 60


@pytest.fixture(autouse=True)
def _waits_are_soon_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHOW_S", 0.05)


def waiting(store: Store) -> list[SessionStatus]:
    return [each for each in status(store).picture.participants if each.waiting is not None]


@pytest.mark.parametrize("prefix", ["", "job"])
@pytest.mark.parametrize("name", ["get", "queue_pop", "barrier", "Lock", "Event", "watch"])
def test_wait_is_shown_in_words_and_deleted_at_its_end(name: str, prefix: str, server: Server) -> None:
    """Without the prefix, the waiter is a handle that has not registered when it begins to wait."""
    place = f"shown-{name}-{prefix}"
    with server.open(place, HANG_S) as one, server.open(place, HANG_S) as other:
        if prefix:
            one.announce_rank(0)
        inner, outer = (PrefixStore(prefix, each) if prefix else each for each in (one, other))
        held = Lock(outer, "dataset")
        held.acquire()
        key = f"{prefix}/" if prefix else ""
        waits: dict[str, tuple[Any, Any, str]] = {
            "get": (lambda: inner.get("plan"), lambda: outer.set("plan", "x"), f"key '{key}plan'"),
            "queue_pop": (lambda: inner.queue_pop("q"), lambda: outer.queue_push("q", "x"), f"queue '{key}q'"),
            "barrier": (
                lambda: barrier(inner, 2, "epoch 7", HANG_S, 0),
                lambda: barrier(outer, 2, "epoch 7", HANG_S, 1),
                "barrier 'epoch 7'",
            ),
            "Event": (lambda: Event(inner, "front").wait(HANG_S), lambda: Event(outer, "front").set(), "event 'front'"),
            "watch": (
                lambda: next(iter(inner.watch("front/"))),
                lambda: outer.set("front/x", "1"),
                f"a change of a key that begins with '{key}front/'",
            ),
            "Lock": (lambda: Lock(inner, "dataset").acquire(timeout=HANG_S), held.release, "lock 'dataset'"),
        }
        wait, end, words = waits[name]
        with start_thread(wait):
            until(lambda: waiting(one))
            (found,) = waiting(one)
            end()
        assert found.rank == (0 if prefix or name == "barrier" else None)
        assert found.waiting is not None
        assert found.waiting.words() == words
        assert waiting(one) == []


def test_status_of_a_store_in_etcd_registers_no_session(server: Server) -> None:
    with server.open("observed", HANG_S) as store:
        assert status(store).picture.participants == ()
        store.announce_rank(3)
        (found,) = status(store.address).picture.participants
        assert (found.rank, found.alive) == (3, "yes")
        assert status(store).picture.notes == ()


def test_key_that_another_program_wrote_is_no_wait(server: Server) -> None:
    with server.open("foreign", HANG_S) as store:
        number = store.register()
        for value in ("", "{}", "[1]", '{"kind": 1}', "x" * 100):
            store._transactions.write(
                [{"request_put": {"key": _b64(store._keys.wait(number)), "value": _b64(value.encode())}}], HANG_S
            )
            assert waiting(store) == []


def _b64(data: bytes) -> str:
    from fscoord.stores.etcd.requests import b64

    return b64(data)
