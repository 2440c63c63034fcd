"""A rendezvous whose state vanishes, and backends that refuse writes or do not report their results."""

from __future__ import annotations

import logging

import pytest
from support.internals import timing
from support.places import HANG_S, start_thread, until

from fscoord import HashStore, RendezvousClosedError, RendezvousStateError, RendezvousTimeoutError
from fscoord.rendezvous import (
    C10dRendezvousBackend,
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
)
from fscoord.rendezvous.backend import SharedState
from fscoord.rendezvous.state import State, close, evict

KEY = "torch.rendezvous.id"
JOIN_S = 0.3
WRITES_MAX = timing.FREE_TRIES + 60
"""How many writes a node may try in `JOIN_S`, with its pauses; without pauses there are thousands."""


class Vanishing(HashStore):
    """A store that loses the key of the rendezvous when told to, just before a write of it."""

    is_armed = False

    def compare_set(self, key, expected, desired):
        if self.is_armed and key == KEY:
            self.is_armed = False
            self.delete_key(KEY)
        return super().compare_set(key, expected, desired)


class Refusing(RendezvousBackend):
    """A backend that refuses each write; `answer` makes what it returns."""

    name = "refusing"

    def __init__(self, answer):
        self._answer = answer
        self.writes = 0

    def get_state(self):
        return State().encode(), "token"

    def set_state(self, state, token=None):
        self.writes += 1
        return self._answer(state, token)


class Silent(RendezvousBackend):
    """A backend that does not say what became of a write, as that of torch's own tests."""

    name = "silent"

    def __init__(self):
        self._state = self._token = None

    def get_state(self):
        return None if self._state is None else (self._state, self._token)

    def set_state(self, state, token=None):
        if token == self._token:
            self._state = state
            self._token = 1 if token is None else token + 1


def handler_on(backend, store, join=JOIN_S, most=1):
    settings = RendezvousSettings("id", most, most, RendezvousTimeout(join=join, last_call=0, close=JOIN_S))
    return DynamicRendezvousHandler(settings, backend, store)


def error_of(call, kind):
    """Return what `call`, in a thread, raises: a call that hangs fails the test."""

    def run():
        with pytest.raises(kind) as caught:
            call()
        return str(caught.value)

    return start_thread(run).join()


@pytest.mark.parametrize("is_first", [True, False], ids=["first write", "later write"])
def test_state_that_vanishes_between_read_and_write_ends_the_rendezvous(is_first):
    store = Vanishing(timeout=HANG_S)
    handler = handler_on(C10dRendezvousBackend(store, "id"), store)
    if not is_first:
        handler.next_rendezvous()
    store.is_armed = True
    assert f"'{KEY}'" in error_of(handler.next_rendezvous, RendezvousStateError)
    assert not handler.shutdown()


def test_state_that_vanishes_before_a_read_is_not_waited_for():
    store = HashStore(timeout=HANG_S * 10)
    handler = handler_on(C10dRendezvousBackend(store, "id"), store)
    handler.next_rendezvous()
    store.delete_key(KEY)
    for call in (handler.next_rendezvous, handler.is_closed, handler.set_closed, handler.leave):
        assert "another id or another store" in error_of(call, RendezvousStateError)
    assert not start_thread(handler.shutdown).join()


def test_state_that_vanishes_while_a_node_waits_is_found_at_its_next_look():
    store = HashStore(timeout=HANG_S)
    handler = handler_on(C10dRendezvousBackend(store, "id"), store, join=HANG_S * 10, most=2)
    thread = start_thread(error_of, handler.next_rendezvous, RendezvousStateError)
    store.wait(["fscoord.rendezvous.id/changed/1"], HANG_S)
    store.delete_key(KEY)
    assert KEY in thread.join()
    handler.shutdown()


@pytest.mark.parametrize(
    "answer",
    [
        lambda state, token: None,
        lambda state, token: (State().encode(), token, False),
        lambda state, token: (State(sequence=1).encode(), object(), False),
    ],
    ids=["nothing", "the same state", "another state"],
)
def test_refused_writes_end_with_the_deadline_and_have_pauses(answer):
    backend = Refusing(answer)
    handler = handler_on(backend, HashStore())
    message = error_of(handler.next_rendezvous, RendezvousTimeoutError)
    assert "'refusing' refused the last" in message
    assert handler.shutdown() is False
    assert backend.writes < 3 * WRITES_MAX  # with those of `leave` and `shutdown`

    backend.writes = 0
    shared = SharedState(backend, HashStore(timeout=JOIN_S))
    for limit in (None, JOIN_S):
        message = error_of(
            lambda given=limit: shared.change(lambda state: close(state, "n"), given), RendezvousTimeoutError
        )
        assert "refused each of" in message
    assert backend.writes < 2 * WRITES_MAX


def test_backend_that_does_not_report_the_outcome_of_a_write_is_read_again():
    store, backend = HashStore(timeout=HANG_S), Silent()
    handlers = [handler_on(backend, store, join=HANG_S, most=2) for _ in range(2)]
    for _ in range(2):
        threads = [start_thread(handler.next_rendezvous) for handler in handlers]
        assert sorted(thread.join().rank for thread in threads) == [0, 1]
    assert all(handler.shutdown() for handler in handlers)


def test_write_whose_outcome_is_not_reported_wakes_the_waiting_nodes():
    store = HashStore()
    shared = SharedState(Silent(), store)
    state, token, is_written = shared.write(State(sequence=1, participants=("n",)), None)
    assert is_written
    assert store.check(["changed/1"])
    assert shared.write(State(sequence=1, participants=("other",)), None) == (state, token, False)


def test_state_that_a_backend_loses_is_distinguished_from_one_that_never_was():
    backend = Silent()
    shared = SharedState(backend, HashStore())
    assert shared.read() == (State(), None)
    shared.write(State(sequence=1), None)
    backend._state = backend._token = None
    with pytest.raises(RendezvousStateError, match="'silent'"):
        shared.read()
    with pytest.raises(RendezvousStateError, match="'silent'"):
        shared.change(lambda state: evict(state, ["n"]))


def test_first_state_that_another_thread_writes_during_a_read_has_not_been_removed(monkeypatch):
    backend = Silent()
    shared = SharedState(backend, HashStore())

    def write_after_the_read():
        monkeypatch.undo()
        shared.write(State(sequence=1), None)

    monkeypatch.setattr(backend, "get_state", write_after_the_read)
    assert shared.read() == (State(), None)
    assert shared.read()[0] == State(sequence=1)


def test_nodes_that_refuse_each_other_their_writes_come_through():
    """Contention is no fault: each refusal means that another node's write was taken."""
    store = HashStore(timeout=HANG_S)
    shared = [SharedState(C10dRendezvousBackend(store, "id"), store.clone()) for _ in range(8)]

    def count_up(each):
        for _ in range(20):
            each.change(lambda state: State(state.sequence, round=state.round + 1))

    for thread in [start_thread(count_up, each) for each in shared]:
        thread.join()
    assert shared[0].read()[0].round == 160


def test_wait_of_the_rendezvous_is_logged(monkeypatch, caplog):
    monkeypatch.setattr("fscoord._waiting.timing.FIRST_S", 0.0)
    caplog.set_level(logging.WARNING, "fscoord")
    store = HashStore(timeout=HANG_S)
    handler = handler_on(C10dRendezvousBackend(store, "id"), store, join=HANG_S, most=2)
    thread = start_thread(error_of, handler.next_rendezvous, RendezvousClosedError)
    words = "still waiting for the rendezvous 'id': it needs 2 nodes, and has only this one"
    until(lambda: words in caplog.text or not thread.is_alive())
    handler.set_closed()
    assert "has been closed" in thread.join()
    assert words in caplog.text
    handler.shutdown()
