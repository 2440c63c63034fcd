"""`DynamicRendezvousHandler` on stores in memory and on files: outcomes, closing, deaths, lives, failures."""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
from support.places import Place, start_thread

from fscoord import (
    FileStore,
    HashStore,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExit,
    RendezvousStateError,
    RendezvousTimeoutError,
    StoreClosedError,
)
from fscoord.rendezvous import (
    C10dRendezvousBackend,
    DynamicRendezvousHandler,
    RdzvEvent,
    RendezvousParameters,
    RendezvousSettings,
    RendezvousTimeout,
    create_handler,
    get_rendezvous_handler,
)
from fscoord.rendezvous.backend import SharedState
from fscoord.rendezvous.keep_alive import KeepAliveThread
from fscoord.rendezvous.state import State, evict

HOUR = 3600
"""The interval of keep-alives that only tests send."""


@pytest.fixture(params=["hash", "file-ofd", "prefix-file", "file-soft"])
def place(request, tmp_path):
    place = Place(request.param, str(tmp_path))
    yield place
    place.close()


@pytest.fixture
def node(place):
    """Give `node(least, most, **timeouts)`: a new handler; all are shut down at the end."""
    handlers = []

    def make(least=1, most=1, run_id="id", **timeouts):
        store = place.open()
        backend = C10dRendezvousBackend(store, run_id)
        timeout = RendezvousTimeout(**{"last_call": 0, **timeouts})
        handler = DynamicRendezvousHandler.from_backend(run_id, store, backend, least, most, None, timeout, HOUR)
        handlers.append(handler)
        return handler

    yield make
    for handler in handlers:
        handler.shutdown()


def joined(*handlers):
    """Let all take part, and return their outcomes in the order of ranks."""
    threads = [start_thread(handler.next_rendezvous) for handler in handlers]
    return sorted((thread.join() for thread in threads), key=lambda info: info.rank)


def set_last_call(seconds, *handlers):
    """From now on let the handlers wait so long for more nodes than the least."""
    for handler in handlers:
        timeout = replace(handler.settings.timeout, last_call=seconds)
        handler._settings = replace(handler.settings, timeout=timeout)


def grow(one, late):
    """Let `one` be a round by itself, and then both be one."""
    one.next_rendezvous()
    set_last_call(HOUR, one, late)
    with start_thread(late.next_rendezvous) as thread:
        watch(lambda: one.num_nodes_waiting() == 1)
        assert one.is_current()
        return [one.next_rendezvous(), thread.join()]


def die(*handlers):
    """Let handlers end as they do when their process is killed."""
    for handler in handlers:
        handler._keep_alive.stop()


def pass_time(*living):
    """Let time pass until the nodes that are not among `living` are dead, and `living` see it."""
    for number in range(1, 6):
        for handler in living:
            handler._keep_alive.tick(number * 2.0 * HOUR)


def test_round_of_one_node_completes(node):
    handler = node()
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert info.bootstrap_store_info.master_port > 0
    assert (handler.get_backend(), handler.get_run_id()) == ("c10d", "id")
    assert handler.use_agent_store is False
    assert handler.is_current()
    assert handler.num_nodes_waiting() == 0


def test_nodes_meet_and_have_dense_ranks_one_address_and_a_store_of_their_own(node):
    handlers = [node(4, 4) for _ in range(4)]
    infos = joined(*handlers)
    assert [info.rank for info in infos] == [0, 1, 2, 3]
    assert {info.world_size for info in infos} == {4}
    assert len({info.bootstrap_store_info for info in infos}) == 1
    infos[0].store.set("k", "v")
    assert infos[3].store.get("k") == b"v"
    again = joined(*handlers)
    assert not again[0].store.check(["k"])


def test_last_call_decides_between_the_least_and_the_most_nodes(node):
    one, two = node(2, 3), node(2, 3)
    assert [info.world_size for info in joined(one, two)] == [2, 2]


def test_node_that_comes_late_waits_and_takes_part_in_the_next_round(node):
    infos = grow(node(1, 2), node(1, 2))
    assert {(info.rank, info.world_size) for info in infos} == {(0, 2), (1, 2)}


def watch(condition):
    """Return when `condition` holds; a test that waits for ever is ended by pytest."""
    while not condition():
        time.sleep(0)


def test_spare_node_waits_without_counting_and_leaves_in_good_order(node):
    one, spare = node(1, 1), node(1, 1, join=0.001)
    one.next_rendezvous()
    thread = start_thread(spare.next_rendezvous)
    watch(lambda: spare.node in one._shared.read()[0].waiting)
    assert one.num_nodes_waiting() == 0
    one.set_closed()
    with pytest.raises(RendezvousGracefulExit):
        thread.join()


def test_spare_node_takes_the_place_of_a_dead_one(node):
    one, two, spare = node(2, 2), node(2, 2), node(2, 2)
    joined(one, two)
    thread = start_thread(spare.next_rendezvous)
    watch(lambda: spare.node in one._shared.read()[0].waiting)
    die(two)
    pass_time(one, spare)
    assert not one.is_current()
    assert one.num_nodes_waiting() >= 1
    infos = [one.next_rendezvous(), thread.join()]
    assert {(info.rank, info.world_size) for info in infos} == {(0, 2), (1, 2)}
    assert two.node not in one._shared.read()[0].present


def test_node_that_was_taken_for_dead_comes_again(node):
    one, two = node(1, 2), node(1, 2)
    grow(one, two)
    one._shared.change(lambda state: evict(state, [two.node]))
    assert not two.is_current()
    infos = joined(one, two)
    assert {info.world_size for info in infos} == {2}


def test_node_that_leaves_breaks_the_round_and_the_rest_goes_on(node):
    one, two = node(1, 2), node(1, 2)
    grow(one, two)
    two.leave()
    assert not one.is_current()
    set_last_call(0, one)
    assert one.next_rendezvous().world_size == 1


def test_rendezvous_that_is_closed_takes_no_further_nodes(node):
    one = node(1, 2)
    one.next_rendezvous()
    assert not one.is_closed()
    one.set_closed()
    assert one.is_closed()
    late = node(1, 2)
    late._keep_alive._detector.mark_alive([one.node])
    with pytest.raises(RendezvousClosedError):
        late.next_rendezvous()
    with pytest.raises(RendezvousClosedError):
        one.next_rendezvous()


def test_waiting_nodes_are_notified_of_the_closing_at_once(node):
    one, two = node(3, 3), node(3, 3)
    threads = [start_thread(each.next_rendezvous) for each in (one, two)]
    watch(lambda: len(one._shared.read()[0].present) == 2)
    node(3, 3).set_closed()
    for thread in threads:
        with pytest.raises(RendezvousClosedError):
            thread.join()


def test_launch_after_a_clean_end_starts_afresh(node):
    for launch in range(3):
        handlers = [node(2, 2), node(2, 2)]
        infos = joined(*handlers)
        assert not infos[0].store.check(["left behind"])
        infos[0].store.set("left behind", "x")
        assert [handler.shutdown() for handler in handlers] == [True, True]
        assert handlers[0]._shared.read()[0].life == launch


def test_launch_after_all_nodes_have_died_starts_afresh(node):
    old = [node(2, 2), node(2, 2)]
    joined(*old)
    die(*old)
    fresh = [node(2, 2), node(2, 2)]
    threads = [start_thread(each.next_rendezvous) for each in fresh]
    watch(lambda: all(each._keep_alive._thread for each in fresh))
    pass_time(*fresh)
    assert {thread.join().rank for thread in threads} == {0, 1}


def test_closed_rendezvous_whose_nodes_died_is_taken_over_once_that_is_known(node):
    one = node(1, 1)
    one.next_rendezvous()
    one.set_closed()
    die(one)
    fresh = node(1, 1)
    thread = start_thread(fresh.next_rendezvous)
    watch(lambda: fresh._keep_alive._thread is not None)
    pass_time(fresh)
    assert thread.join().world_size == 1
    with pytest.raises(RendezvousClosedError):
        one.next_rendezvous()
    assert one.is_closed()
    one.set_closed()
    one.shutdown()
    assert not fresh.is_closed()


def test_node_in_an_older_state_does_not_count_as_just_come(node):
    one, fresh = node(1, 1), node(1, 1)
    one.next_rendezvous()
    one.set_closed()
    old, _ = fresh._shared.read()
    die(one)
    fresh._keep_alive.check(old)
    pass_time(fresh)
    fresh._keep_alive.check(fresh._shared.read()[0])
    alive, _ = fresh._keep_alive.check(old)  # as if this thread had read it before the keep-alive wrote
    assert one.node in old.present
    assert one.node not in alive


def test_rendezvous_with_too_few_nodes_names_them_and_forgets_the_node(node):
    handler = node(2, 3, join=0.01)
    with pytest.raises(RendezvousTimeoutError, match=r"2 to 3 nodes.*only this one"):
        handler.next_rendezvous()
    assert handler._shared.read()[0].present == frozenset()


def test_nodes_do_not_wait_for_ever_for_the_address_of_rank_0(node, monkeypatch):
    monkeypatch.setattr("fscoord.rendezvous.handler.ADDRESS_POLL_S", 0)
    first, second = sorted([node(2, 2), node(2, 2)], key=lambda handler: handler.node)
    monkeypatch.setattr(first, "_prepare", lambda *_: "nothing")
    agree = second._agree

    thread = start_thread(first._next)

    def agree_at_the_last_moment(patience, slow_wait):
        state = agree(patience, slow_wait)
        assert thread.join() == "nothing"
        patience._deadline = 0
        return state

    monkeypatch.setattr(second, "_agree", agree_at_the_last_moment)
    with pytest.raises(RendezvousTimeoutError) as caught:
        second.next_rendezvous()
    assert f"rank 0 ({first.node})" in str(caught.value)


def test_wait_for_the_address_of_rank_0_is_logged(monkeypatch):
    monkeypatch.setattr("fscoord.rendezvous.handler.ADDRESS_POLL_S", 0)
    store = HashStore()
    handler = DynamicRendezvousHandler(RendezvousSettings("id", 2, 2), C10dRendezvousBackend(store, "id"), store)
    state = State(complete=True, participants=("0 silent", handler.node))
    handler._shared.write(state, None)
    looks, words = iter([False]), []
    patience = SimpleNamespace(is_over=lambda *_: next(looks, True))
    slow_wait = SimpleNamespace(warn_if_due=lambda describe: words.append(describe()))
    with pytest.raises(RendezvousTimeoutError):
        handler._prepare(state, patience, slow_wait)
    assert words == ["the address of rank 0 (0 silent) of rendezvous 'id'"]


def test_handler_that_is_shut_down_takes_part_no_more(node):
    handler = node()
    with handler:
        handler.next_rendezvous()
    assert handler.shutdown()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()


def test_shutdown_returns_whether_all_went_well(place, caplog):
    store = place.open()
    handler = DynamicRendezvousHandler(RendezvousSettings("id", 1, 1), C10dRendezvousBackend(store, "id"), store)
    handler.next_rendezvous()
    store.close()
    assert handler.shutdown() is False
    assert any("did not end cleanly" in record.message for record in caplog.records)


def test_store_that_fails_is_a_lost_connection(place):
    store = place.open()
    handler = DynamicRendezvousHandler(RendezvousSettings("id", 1, 1), C10dRendezvousBackend(store, "id"), store)
    store.close()
    with pytest.raises(RendezvousConnectionError) as caught:
        handler.next_rendezvous()
    assert isinstance(caught.value.__cause__, StoreClosedError)
    handler.shutdown()


def test_state_that_is_malformed_is_an_error_and_left_alone(node, place):
    C10dRendezvousBackend(place.open(), "id").set_state(b"\x80\x04]\x94.")  # a pickle, as torch writes it
    with pytest.raises(RendezvousStateError):
        node().next_rendezvous()
    assert C10dRendezvousBackend(place.open(), "id").get_state()[0] == b"\x80\x04]\x94."


def test_handler_records_the_events_of_its_rounds(node, caplog):
    caplog.set_level(logging.INFO, "fscoord")
    handler = node()
    info = handler.next_rendezvous()
    handler.shutdown()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    events = [RdzvEvent.deserialize(r.message) for r in caplog.records if r.name == "fscoord.rendezvous.events"]
    assert [event.node_state.value for event in events] == ["INIT", "RUNNING", "SUCCEEDED", "INIT", "FAILED"]
    assert events[1].rank == 0
    assert events[1].master_endpoint.endswith(f":{info.bootstrap_store_info.master_port}")
    assert events[4].message.startswith(f"the node {handler.node} RendezvousClosedError: ")


def test_dead_node_of_any_name_can_be_logged(caplog):
    store = HashStore()
    shared = SharedState(C10dRendezvousBackend(store, "id"), store)
    shared.write(State(participants=("\ud800",)), None)
    thread = KeepAliveThread(shared, store, "me", RendezvousSettings("id", 1, 2))
    for now in range(0, 60, 6):
        with suppress(RendezvousConnectionError):  # such a name is none of a key: it has no counter to forget
            thread.tick(float(now))
    assert shared.read()[0].participants == ()
    assert [record.message for record in caplog.records] == ["nodes found dead: \\ud800"]


def test_node_registers_with_the_time_limit_of_the_store_not_of_a_keep_alive(tmp_path, monkeypatch):
    """Where many nodes open a log at once, each waits for its turn with the lock."""
    limits = []
    register = FileStore.register

    def note(store: FileStore) -> int:
        limits.append(store.timeout)
        return register(store)

    monkeypatch.setattr(FileStore, "register", note)
    with FileStore(tmp_path / "log", timeout=HOUR) as store:
        thread = KeepAliveThread(
            SharedState(C10dRendezvousBackend(store, "id"), store), store, "me", RendezvousSettings("id", 1, 2)
        )
        assert limits == [timedelta(seconds=HOUR)]
        assert store.timeout == RendezvousTimeout().heartbeat
        assert thread.node == f"me_s{store.register()}"


def test_rendezvous_of_two_names_in_one_store_do_not_touch_each_other(node):
    one, other = node(1, 2, "1"), node(1, 2, "2")
    assert one.next_rendezvous().world_size == other.next_rendezvous().world_size == 1
    one.set_closed()
    assert not other.is_closed()


# Made from parameters


def test_handler_made_from_parameters_closes_its_store(tmp_path):
    params = RendezvousParameters(
        "c10d",
        str(tmp_path / "job"),
        "id",
        1,
        2,
        local_addr="10.0.0.1",
        join_timeout=60,
        last_call_timeout="0.5",
        close_timeout=6,
        heartbeat_timeout=7,
        keep_alive_interval="8",
        keep_alive_max_attempt="9",
    )
    with get_rendezvous_handler(params) as handler:
        assert isinstance(handler, DynamicRendezvousHandler)
        assert handler.settings.timeout == RendezvousTimeout(60, 0.5, 6, timedelta(seconds=7))
        assert handler.settings.keep_alive_interval == timedelta(seconds=8)
        assert handler.settings.keep_alive_max_attempt == 9
        info = handler.next_rendezvous()
        assert info.bootstrap_store_info.master_addr == "10.0.0.1"
        store = info.store
    with pytest.raises(StoreClosedError):
        store.get("k")


def test_defaults_are_those_of_torch():
    timeout = RendezvousTimeout()
    limits = [timeout.join, timeout.last_call, timeout.close, timeout.heartbeat]
    assert [limit.total_seconds() for limit in limits] == [600, 30, 30, 5]
    params = RendezvousParameters("c10d", "mem:", "id", 1, 1)
    settings = RendezvousSettings.from_parameters(params)
    assert settings == RendezvousSettings("id", 1, 1)
    assert (settings.keep_alive_interval, settings.keep_alive_max_attempt) == (timedelta(seconds=5), 3)
    assert RendezvousTimeout(join=math.inf).join == timedelta.max


@pytest.mark.parametrize(
    "wrong",
    [
        *({"join_timeout": "x"}, {"last_call_timeout": -1}, {"heartbeat_timeout": 0}, {"join_timeout": []}),
        *({"keep_alive_interval": 0}, {"keep_alive_max_attempt": -1}, {"keep_alive_max_attempt": "x"}),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_a_store_is_opened(tmp_path, wrong):
    with pytest.raises(ValueError):
        create_handler(RendezvousParameters("c10d", str(tmp_path / "job"), "id", 1, 1, **wrong))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("interval", [2, 2.0, timedelta(seconds=2)])
def test_interval_of_the_settings_is_seconds_or_a_timedelta(interval):
    settings = RendezvousSettings("id", 1, 2, keep_alive_interval=interval)
    assert settings == RendezvousSettings("id", 1, 2, RendezvousTimeout(), timedelta(seconds=2), 3)
    assert replace(settings, max_nodes=3) == RendezvousSettings("id", 1, 3, None, interval)
    assert settings.keep_alive_interval == timedelta(seconds=2)


@pytest.mark.parametrize("arguments", [("", 1, 1), ("id", 0, 1), ("id", 2, 1)])
def test_rendezvous_needs_a_name_and_sound_numbers(arguments):
    with pytest.raises(ValueError):
        RendezvousSettings(*arguments)


def test_handlers_of_many_nodes_at_once_agree():
    store = HashStore()
    handlers = []
    for _ in range(12):
        backend = C10dRendezvousBackend(store, "id")
        handlers.append(DynamicRendezvousHandler(RendezvousSettings("id", 12, 12), backend, store))
    for _ in range(3):
        assert [info.rank for info in joined(*handlers)] == list(range(12))
    for handler in handlers:
        assert handler.shutdown()
