"""Texts from people and other processes: addresses, options, environments, and states in stores."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from support.internals import MalformedText, check_interval, line_of

from fscoord import FscoordError, HashStore, RendezvousError, RendezvousStateError, environment
from fscoord.barriers import BarrierConfig
from fscoord.recipes import Lock
from fscoord.rendezvous import (
    C10dRendezvousBackend,
    NodeState,
    RdzvEvent,
    RendezvousParameters,
    RendezvousSettings,
    RendezvousStoreInfo,
    parse_rendezvous_endpoint,
)
from fscoord.rendezvous.backend import SharedState
from fscoord.rendezvous.keep_alive import KeepAliveThread
from fscoord.rendezvous.parameters import parse_rendezvous_config
from fscoord.rendezvous.state import Limits, Observed, State, Verdict, decide
from fscoord.stores import url as urls
from fscoord.stores.etcd.sessions import parse_record

SIGNS = st.text(
    alphabet=st.sampled_from(list("aZ0159:/?#[]@!$&'()*+,;=%-._~ \t\n\0\x7f\u00e9\u0661\ud800")), max_size=40
)
WORDS = st.one_of(SIGNS, st.text(max_size=40))


@given(WORDS, st.sampled_from(["", "file:", "file://", "mem:", "tcp://", "etcd://", "FILE:///"]))
@example("\ud800", "file:")
@example("?timeout=nan&timeout=1", "file:x")
@example("[::1:1", "tcp://")
def test_address_is_parsed_or_refused(text: str, scheme: str) -> None:
    try:
        parts = urls.parse_url(scheme + text)
    except ValueError as error:
        assert str(error)
        return
    for name in ("timeout", "rank", "label", "mode", "durable"):  # of each type
        try:
            urls.convert({name: text}, "file")
        except ValueError as error:
            assert str(error)
    assert len(parts) == 4


@given(WORDS)
@example("\u0661")
@example("[::1]:\u0661")
def test_endpoint_is_a_host_and_a_port_or_refused(text: str) -> None:
    try:
        host, port = parse_rendezvous_endpoint(text, 29400)
    except ValueError as error:
        assert str(error)
        return
    assert host == host.strip()
    assert host
    assert 0 <= port <= 65535


@given(WORDS)
def test_rendezvous_options_are_pairs_or_refused(text: str) -> None:
    try:
        found = parse_rendezvous_config(text)
    except ValueError as error:
        assert str(error)
        return
    assert all(key and value for key, value in found.items())
    parameters = RendezvousParameters("c10d", "", "id", 1, 1, x=text)
    for get in (parameters.get_as_bool, parameters.get_as_int):
        try:
            get("x")
        except ValueError as error:
            assert str(error)


NAMES = sorted(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_RESTART_COUNT",
     "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "PALS_RANKID",
     "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT",
     "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_NODELIST", "SLURM_STEP_ID"}
)  # fmt: skip
VALUES = st.one_of(st.sampled_from(["", "0", "1", "-1", "x", "9" * 5000, "\u0661", "gw0", "1.5"]), SIGNS)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
def test_environment_of_any_content_is_understood_or_refused(variables: dict[str, str]) -> None:
    try:
        environment.detect(variables)
    except (FscoordError, ValueError) as error:
        assert str(error)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


def changed_states() -> st.SearchStrategy[bytes]:
    """A state that was encoded, with one of its fields replaced by anything."""
    fields = sorted(json.loads(State().encode()))
    return st.builds(
        lambda field, value: json.dumps({**json.loads(State().encode()), field: value}).encode(),
        st.sampled_from([*fields, "more"]),
        JSON,
    )


@given(st.one_of(st.binary(max_size=60), st.builds(lambda value: json.dumps(value).encode(), JSON), changed_states()))
@example(b"[" * 100_000)
@example(b"9" * 5000)
@example(b'{"format":1e999}')
def test_rendezvous_state_is_read_or_refused(data: bytes) -> None:
    try:
        state = State.decode(data)
    except RendezvousStateError as error:
        assert len(str(error)) < 10_000
        return
    assert State.decode(state.encode()) == state


@given(st.one_of(st.binary(max_size=80), st.text(alphabet="aA0+/= #!", max_size=40).map(str.encode)))
def test_rendezvous_key_of_any_content_is_read_or_refused(data: bytes) -> None:
    store = HashStore(timeout=1)
    backend = C10dRendezvousBackend(store, "id")
    store.set("torch.rendezvous.id", data)
    for call in (backend.get_state, lambda: backend.set_state(b"new", b"token")):
        try:
            call()
        except RendezvousStateError as error:
            assert str(error)


EVENT = RdzvEvent("name", "id", "text", "host", 7, NodeState.RUNNING)
EVENTS = st.builds(
    lambda field, value: json.dumps({**json.loads(EVENT.serialize()), field: value}),
    st.sampled_from([*json.loads(EVENT.serialize()), "more"]),
    JSON,
)


@given(st.one_of(WORDS, JSON.map(json.dumps), EVENTS))
@example("[" * 100_000)
@example("9" * 5000)
@settings(max_examples=50)
def test_rendezvous_event_is_read_or_refused(line: str) -> None:
    try:
        event = RdzvEvent.deserialize(line)
    except ValueError as error:
        assert "is not an event" in str(error)
        return
    assert RdzvEvent.deserialize(event.serialize()) == event


RECORD = {"host": "host", "pid": 7, "ranks": [0], "label": "", "since": 1.5}
RECORDS = st.builds(lambda name, value: json.dumps({**RECORD, name: value}), st.sampled_from([*RECORD, "more"]), JSON)


@given(st.one_of(st.binary(max_size=40), JSON.map(json.dumps).map(str.encode), RECORDS.map(str.encode)))
@example(b"[" * 100_000)
@example(b"[[1, 2]]")
@example(b"[" + b"9" * 5000 + b"]")
@example(b'{"host": "host"}')
@example(json.dumps(RECORD).encode())
@settings(max_examples=50)
def test_etcd_session_description_is_read_or_refused(data: bytes) -> None:
    try:
        said = parse_record(data)
    except MalformedText as error:
        assert data != json.dumps(RECORD).encode(), error
        return
    assert said["host"] + said["label"] + str(said["pid"] + said["since"])
    assert all(rank + 1 > rank for rank in said["ranks"])


NODES = st.one_of(
    st.sampled_from(["me", "a_s1", "a_s2", "a_s", "a_s" + "9" * 5000, "a_s\u0661", "\ud800", ""]), st.text(max_size=4)
)
GROUPS = st.lists(NODES, max_size=4).map(tuple)
COUNTS = st.one_of(st.sampled_from([0, 1, 2**63 - 2]), st.integers(0, 100))
STATES = st.builds(State, COUNTS, COUNTS, COUNTS, st.booleans(), st.booleans(), GROUPS, GROUPS, GROUPS, GROUPS)
NUMBERS = st.one_of(st.sampled_from([b"1", b"9" * 5000, b"-1", b"", b"\xff", b"1.5"]), st.binary(max_size=6))


class StoreWithSessions(HashStore):
    """A store of which two sessions are known: one lives, one is dead."""

    has_liveness = True
    session = 1

    def members(self) -> Any:
        return [SimpleNamespace(number=number, alive=alive) for number, alive in ((1, "yes"), (2, "no"))]


@given(
    st.one_of(STATES.map(State.encode), changed_states()),
    st.dictionaries(st.sampled_from(["me", "a_s1", "a_s2", "", "\u0661"]), NUMBERS, max_size=3),
    st.sampled_from([HashStore, StoreWithSessions]),
)
@example(State(participants=("a_s" + "9" * 5000,)).encode(), {}, StoreWithSessions)
@example(State(participants=("a_s1",)).encode(), {"a_s1": b"x"}, HashStore)
@example(
    json.dumps({**json.loads(State(participants=("a_s2",)).encode()), "sequence": 10**4300 - 1}).encode(),
    {},
    StoreWithSessions,
)
@settings(max_examples=50)
def test_keep_alive_thread_goes_on_or_reports_an_error_for_any_content(
    state: bytes, beats: dict[str, bytes], kind: type[HashStore]
) -> None:
    store = kind(timeout=1)
    backend = C10dRendezvousBackend(store, "id")
    backend.set_state(state)
    for node, value in beats.items():
        store.set(f"beat/{node}", value)
    shared = SharedState(backend, store)
    thread = KeepAliveThread(shared, store, "me", RendezvousSettings("id", 1, 2))
    for now in (0.0, 6.0, 12.0, 18.0):
        try:
            thread.check(shared.read()[0])
            thread.tick(now)
        except RendezvousError as error:
            assert len(str(error)) < 20_000


@given(STATES, st.integers(1, 4), st.booleans(), st.booleans())
@settings(max_examples=50)
def test_rendezvous_node_comes_to_rest_in_any_state(state: State, most: int, is_over: bool, is_known: bool) -> None:
    alive = state.present if is_known else frozenset[str]()
    seen = Observed(alive=alive, is_last_call_over=is_over, is_reserve_over=is_over)
    for _ in range(4):
        decision = decide(state, "me", Limits(1, most), seen)
        if decision.verdict is not Verdict.WRITE:
            return
        state = decision.state
    pytest.fail(f"it writes and writes: {state}")


@given(st.text(max_size=9).map(lambda text: text.encode("utf-8", "surrogatepass")), NUMBERS)
@example(b"\xff", b"1")
@example(b"host", b"x")
@settings(max_examples=50)
def test_round_address_is_read_or_refused(address: bytes, port: bytes) -> None:
    store = HashStore(timeout=1)
    store.multi_set(["MASTER_ADDR", "MASTER_PORT"], [address, port])
    try:
        found = RendezvousStoreInfo.build(1, store)
    except RendezvousStateError as error:
        assert "MASTER_PORT" in str(error)
    else:
        assert found.master_addr == address.decode("utf-8", "surrogateescape")


LEASES = st.one_of(
    st.sampled_from(["-", "nan:0", "inf:1", "-1:0", "0:0", "9:-1", "1e999:0", "60:0", "1:" + "9" * 5000])
)
LINES = st.builds(
    lambda *words: "{} me\n{} {} {} {} {} {}".format(*words).encode("utf-8", "surrogatepass"),
    st.sampled_from(["0", "1", "x"]), WORDS, st.sampled_from(["x", "r"]), st.sampled_from(["0", "1", "-1", "9" * 5000]),
    st.sampled_from(["0", "1", "x"]), WORDS, LEASES,
)  # fmt: skip


@given(st.one_of(st.binary(max_size=60), LINES))
@example(b"0 me\nid x 1 0 host:1 nan:0")
@example(b"0 me\nid x 1 0 host:1 -1:0")
@settings(max_examples=50)
def test_lock_line_is_read_or_refused(line: bytes) -> None:
    store = HashStore(timeout=1)
    store.set("lock/line", line)
    lock = Lock(store, "lock", ttl=60)
    try:
        assert check_interval(line_of(lock).entries(), 1.0) > 0
        if lock.acquire(blocking=False):
            lock.release()
    except FscoordError as error:
        assert str(error)


@given(st.one_of(WORDS, JSON.map(json.dumps)))
@example("[" * 100_000)
@example('{"barrier_args":' * 100_000)
def test_barrier_configuration_is_read_or_refused(text: str) -> None:
    try:
        BarrierConfig.from_json(text)
    except (FscoordError, ValueError, TypeError) as error:
        assert str(error)


@pytest.mark.parametrize(
    "call", [urls.parse_url, lambda text: parse_rendezvous_endpoint(text, 1), parse_rendezvous_config]
)
def test_parsers_take_linear_time_for_a_megabyte_of_words(call: Any) -> None:
    """No expression that is matched against them backtracks without end: this would go on for hours."""
    for unit in ("a", "a.", "a-", "%", "a=", ":", "[", "_", "a,", "1"):
        try:
            call(unit * (1 << 20 // len(unit)))
        except ValueError as error:
            assert str(error)[:1]
