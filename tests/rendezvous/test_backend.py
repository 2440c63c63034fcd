"""`C10dRendezvousBackend` on every store: the winner of a write, the answers, and the errors of failures."""

from __future__ import annotations

import base64
import os
import pickle

import pytest
from support.places import KINDS, Place, start_thread

from fscoord import (
    HashStore,
    RendezvousConnectionError,
    RendezvousStateError,
    StoreClosedError,
    StoreTimeoutError,
)
from fscoord.rendezvous import C10dRendezvousBackend, RendezvousBackend

KEY = "torch.rendezvous.id"
SENTINEL = b"Y2FuaW1hZGFt"


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
    place = Place(request.param, str(tmp_path))
    yield place.open()
    place.close()


@pytest.fixture
def backend(store):
    return C10dRendezvousBackend(store, "id")


def test_backend_is_named_c10d_and_has_the_key_of_torch(store, backend):
    assert isinstance(backend, RendezvousBackend)
    assert backend.name == "c10d"
    assert store.get(KEY) == SENTINEL


@pytest.mark.parametrize("run_id", ["", None])
def test_backend_of_a_rendezvous_without_a_name_is_refused(run_id):
    with pytest.raises(ValueError):
        C10dRendezvousBackend(HashStore(), run_id)


def test_backend_has_no_state_at_first(backend):
    assert backend.get_state() is None
    assert backend.set_state(b"x", "foreign token") is None
    assert backend.set_state(b"x", b"") is None
    assert backend.set_state(b"x", b"wrong") is None
    assert backend.get_state() is None


def test_write_without_a_token_takes_effect_for_the_first_state_only(backend):
    first, token, won = backend.set_state(b"first")
    assert (first, won) == (b"first", True)
    assert backend.get_state() == (b"first", token)
    assert backend.set_state(b"second") == (b"first", token, False)
    assert backend.get_state() == (b"first", token)


def test_write_with_the_token_of_the_state_takes_effect(backend):
    _, token, _ = backend.set_state(b"first")
    second, newer, won = backend.set_state(b"second", token)
    assert (second, won) == (b"second", True)
    assert newer != token
    assert backend.get_state() == (b"second", newer)
    assert backend.set_state(b"third", token) == (b"second", newer, False)


@pytest.mark.parametrize("token", ["text", 5, 0, False, object(), b"", bytearray(b"x"), ()])
def test_write_with_a_foreign_token_changes_nothing_and_returns_the_state(backend, token):
    _, own, _ = backend.set_state(b"first")
    assert backend.set_state(b"second", token) == (b"first", own, False)
    assert backend.get_state() == (b"first", own)


@pytest.mark.parametrize("state", [b"", b"\0", b"x", b"xy", b"xyz", os.urandom(1000), base64.b64decode(SENTINEL)])
def test_state_of_any_bytes_comes_back_byte_for_byte(backend, state):
    written, token, won = backend.set_state(state)
    assert (written, won) == (state, True)
    assert backend.get_state() == (state, token)


def test_state_written_twice_wins_once(store, backend):
    """c10d compares states, so that both would believe that they won."""
    other = C10dRendezvousBackend(store, "id")
    _, token, _ = backend.set_state(b"old")
    assert backend.set_state(b"new", token)[2] is True
    assert other.set_state(b"new", token)[2] is False
    assert other.set_state(b"new")[2] is False


def test_state_taken_away_and_put_back_is_another_one(backend):
    _, token, _ = backend.set_state(b"a")
    _, between, _ = backend.set_state(b"b", token)
    _, again, won = backend.set_state(b"a", between)
    assert won
    assert again != token
    assert backend.set_state(b"c", token) == (b"a", again, False)


def test_writers_of_the_same_state_at_once_have_one_winner_each_time(tmp_path):
    place = Place("file-ofd", str(tmp_path))
    first = C10dRendezvousBackend(place.open(), "id")
    token = first.set_state(b"0")[1]
    backends = [C10dRendezvousBackend(place.open(), "id") for _ in range(4)]
    for number in range(10):
        threads = [start_thread(each.set_state, b"same", token) for each in backends]
        results = [thread.join() for thread in threads]
        assert sum(won for _, _, won in results) == 1, number
        token = first.get_state()[1]
    place.close()


def test_state_written_here_is_read_by_torch(store, backend):
    state = pickle.dumps({"any": "bytes"})
    backend.set_state(state)
    assert base64.b64decode(store.get(KEY)) == state


def test_state_written_by_torch_is_read_here(store, backend):
    store.set(KEY, base64.b64encode(b"from torch"))
    state, token = backend.get_state()
    assert state == b"from torch"
    assert backend.set_state(b"answer", token)[2] is True


@pytest.mark.parametrize("damage", [b"abc", b"=", b"YWJj\n", b"YW J", b"\xff\xff\xff\xff", b"{}", b'"', b"YWJj-"])
def test_value_that_is_no_state_is_an_error(store, backend, damage):
    store.set(KEY, damage)
    with pytest.raises(RendezvousStateError, match=r"torch\.rendezvous\.id"):
        backend.get_state()
    with pytest.raises(RendezvousStateError):
        backend.set_state(b"x")
    assert store.get(KEY) == damage


class Failing(HashStore):
    """A store of which every operation fails, once it is told to."""

    error: BaseException | None = None

    def get(self, key, **given):
        if self.error:
            raise self.error
        return super().get(key, **given)

    def compare_set(self, key, expected, desired):
        if self.error:
            raise self.error
        return super().compare_set(key, expected, desired)


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(5, "eio"), ConnectionError("gone"), TimeoutError("late"), RuntimeError("c10d"), ValueError("v")),
        *(LookupError("etcd"), StoreTimeoutError("late"), StoreClosedError("closed")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_store_error_of_any_kind_becomes_one_error_with_its_cause(error):
    store = Failing()
    backend = C10dRendezvousBackend(store, "id")
    store.error = error
    for call in (backend.get_state, lambda: backend.set_state(b"x"), lambda: C10dRendezvousBackend(store, "id")):
        with pytest.raises(RendezvousConnectionError, match=str(error.args[-1])) as caught:
            call()
        assert caught.value.__cause__ is error


def test_ctrl_c_is_not_turned_into_another_error():
    store = Failing()
    backend = C10dRendezvousBackend(store, "id")
    store.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        backend.get_state()


def test_file_store_that_is_closed_is_a_lost_connection(tmp_path):
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    backend = C10dRendezvousBackend(store, "id")
    place.close()
    with pytest.raises(RendezvousConnectionError) as caught:
        backend.get_state()
    assert isinstance(caught.value.__cause__, StoreClosedError)


def test_rendezvous_of_two_names_do_not_touch_each_other():
    store = HashStore()
    one, two = C10dRendezvousBackend(store, "1"), C10dRendezvousBackend(store, "2")
    one.set_state(b"one")
    assert two.get_state() is None


@pytest.mark.torch
def test_backends_of_torch_and_fscoord_take_turns_on_one_store():
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend as Theirs

    store = dist.HashStore()
    ours, theirs = C10dRendezvousBackend(store, "id"), Theirs(store, "id")
    assert theirs.get_state() is None
    _, old, won = ours.set_state(b"one")
    assert won
    state, token = theirs.get_state()
    assert state == b"one"
    assert theirs.set_state(b"two", token)[2] is True
    assert ours.set_state(b"late", old)[2] is False
    state, token = ours.get_state()
    assert state == b"two"
    assert ours.set_state(b"three", token)[2] is True
    assert theirs.get_state()[0] == b"three"
