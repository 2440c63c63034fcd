"""Barriers that are executed again and again, on every kind of store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contract.worker import Workers, start
from support.places import ETCD, HANG_S, Place, Thread, start_thread
from support.third_party import place_of

from fscoord import barriers, open_store
from fscoord.barriers import (
    BARRIER_REGISTRY,
    Barrier,
    BarrierConfig,
    DistBarrier,
    FileStoreBarrier,
    StoreBarrier,
    TCPStoreBarrier,
    create_barrier_from_config,
    register_barrier,
    store as store_module,
)
from fscoord.errors import BarrierError, BrokenBarrierError, StoreClosedError, StoreTimeoutError, StoreUnavailableError
from fscoord.store import Store
from fscoord.stores.file import FileStore
from fscoord.stores.memory import HashStore
from fscoord.stores.prefix import PrefixStore


@pytest.fixture(params=["hash", "nested-hash", "third-party", "file-ofd", "nested-file", ETCD])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = place_of(request.param, str(tmp_path))
    yield place
    place.close()


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which no launcher says anything."""
    monkeypatch.setattr("fscoord._runtime.system.os.environ", {})
    return monkeypatch


def make(store: Store, rank: int, size: int, prefix: str = "ckpt", **options: Any) -> StoreBarrier:
    return StoreBarrier(store, prefix, rank=rank, world_size=size, **{"timeout": HANG_S, **options})


def each(place: Place, size: int, times: int, prefix: str = "ckpt") -> None:
    """Let every rank execute a barrier of its own so many times, in a thread of its own."""

    def run(rank: int) -> None:
        barrier = make(place.open(how="clone"), rank, size, prefix)
        for _ in range(times):
            barrier.execute_barrier()

    for thread in [start_thread(run, rank) for rank in range(size)]:
        thread.join()


def times_out(barrier: Barrier, timeout: float | None = 0) -> StoreTimeoutError:
    with pytest.raises(StoreTimeoutError) as caught:
        barrier.execute_barrier(timeout)
    return caught.value


# The barrier


def test_barriers_pass_again_and_again_and_leave_two_at_most(place: Place, store: Store) -> None:
    before = store.num_keys()
    each(place, 3, 12)
    assert [make(store, rank, 3).sequence for rank in range(3)] == [12, 12, 12]
    assert store.num_keys() - before <= 3 + 2 * 2


def test_barrier_that_is_the_second_is_passed_only_when_the_last_has_come(place: Place, store: Store) -> None:
    each(place, 3, 1)
    passed: list[int] = []

    def early(rank: int) -> None:
        make(place.open(how="clone"), rank, 3).execute_barrier()
        passed.append(rank)

    threads = [start_thread(early, rank) for rank in (0, 1)]
    with pytest.raises(StoreTimeoutError):
        store.wait(["never"], 0.1)
    assert not passed
    make(store, 2, 3).execute_barrier()
    for thread in threads:
        thread.join()


def test_barrier_object_goes_on_where_another_of_its_rank_was(place: Place, store: Store) -> None:
    each(place, 2, 3)
    first, second = make(store, 0, 2), make(store, 0, 2)
    for barrier in (first, second, first):
        with start_thread(barrier.execute_barrier):
            make(place.open(how="clone"), 1, 2).execute_barrier()
    assert first.sequence == second.sequence == 6


def test_barriers_under_different_prefixes_do_not_meet(place: Place, store: Store) -> None:
    for prefix in ("ckpt", "ckpt/1", "ckpt/sequence", "ckpt1", ""):
        each(place, 2, 2, prefix)
        assert make(store, 0, 2, prefix).sequence == 2
    each(place, 2, 1)
    assert make(store, 0, 2).sequence == 3


def test_rank_may_try_again_after_a_timeout(place: Place, store: Store) -> None:
    each(place, 2, 1)
    barrier = make(store, 0, 2)
    times_out(barrier)
    times_out(barrier)
    with start_thread(make(place.open(), 1, 2).execute_barrier):
        barrier.execute_barrier()
    assert barrier.sequence == 2


class DyingError(Exception):
    """What ends a rank in the middle of a barrier, as SIGKILL would."""


class Dying(PrefixStore):
    """A view of a store whose user dies at the call of one method."""

    def __init__(self, store: Store, method: str, key: str) -> None:
        super().__init__("x", store)
        self.method, self.key = method, key

    def die_at(self, method: str, keys: Any) -> None:
        if method == self.method and any(self.key in str(key) for key in keys):
            raise DyingError

    def append(self, key: Any, value: Any) -> None:
        self.die_at("append", [key])
        super().append(key, value)

    def set(self, key: Any, value: Any) -> None:
        self.die_at("set", [key])
        super().set(key, value)

    def wait(self, keys: Any, timeout: Any = None) -> None:
        keys = list(keys)
        self.die_at("wait", keys)
        super().wait(keys, timeout)

    def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
        self.die_at("compare_set", [key])
        return super().compare_set(key, expected, desired)


@pytest.mark.parametrize(
    ("method", "key"),
    [("append", "arrivals"), ("wait", "complete"), ("compare_set", "sequence")],
    ids=["before it arrives", "while it waits", "before it writes down that it passed"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_rank_that_dies_in_a_barrier_and_is_restarted_completes_that_barrier(
    place: Place, store: Store, method: str, key: str, size: int
) -> None:
    def come(ranks: Iterable[int]) -> list[Thread]:
        return [start_thread(make(PrefixStore("x", place.open()), rank, size).execute_barrier) for rank in ranks]

    others = [] if method == "wait" else come(range(1, size))  # the last one would not wait
    with pytest.raises(DyingError):
        make(Dying(place.open(), method, key), 0, size).execute_barrier()
    others = others or come(range(1, size))
    again = make(PrefixStore("x", store), 0, size)
    again.execute_barrier()
    for thread in others:
        thread.join()
    assert again.sequence == 1


def test_rank_that_died_before_completion_passes_when_the_others_have_gone_on(place: Place, store: Store) -> None:
    with pytest.raises(DyingError):
        make(Dying(store, "wait", "complete"), 1, 2).execute_barrier()
    first = make(PrefixStore("x", place.open()), 0, 2)
    first.execute_barrier(0)
    times_out(first)  # it waits at the next one
    again = make(PrefixStore("x", store), 1, 2)
    again.execute_barrier(0)
    with start_thread(first.execute_barrier):
        again.execute_barrier()
    assert first.sequence == again.sequence == 2


def test_rank_that_came_last_and_died_completes_the_barrier_when_restarted(place: Place, store: Store) -> None:
    view = PrefixStore("x", store)
    times_out(make(view, 0, 2))
    with pytest.raises(DyingError):
        make(Dying(place.open(), "set", "complete"), 1, 2).execute_barrier()
    assert not view.check(["ckpt/0/complete"])
    make(PrefixStore("x", place.open()), 1, 2).execute_barrier(0)
    assert view.check(["ckpt/0/complete"])


# What goes wrong, and what is said of it


def test_timeout_names_the_missing_ranks_and_the_sequence_of_each(place: Place, store: Store) -> None:
    each(place, 4, 4)
    for rank in range(3):
        times_out(make(store, rank, 4))
    for rank in (3, 0):
        make(store, rank, 4).execute_barrier(0)  # the fifth: rank 3 is the last, and rank 0 has come back to it ...
    error = times_out(make(store, 3, 4))  # ... but neither 1 nor 2
    assert error.missing_ranks == ("0", "1", "2")
    assert "; this is sequence 5, rank 0 is at sequence 5, rank 1 is at sequence 4, rank 2 is at sequence 4" in str(
        error
    )
    assert "key prefix:" in str(error)
    assert "missing_ranks=[0, 1, 2]" in str(error)


def test_decoder_names_the_missing_ranks_beside_their_sequences(store: Store) -> None:
    error = times_out(make(store, 0, 2, rank_tracing_decoder=lambda rank: f"host{rank}"))
    assert error.missing_ranks == ("host1",)
    assert str(error).endswith("; this is sequence 0, rank 1 is at sequence 0")


def test_sequences_of_sixteen_missing_ranks_are_read(store: Store) -> None:
    assert str(times_out(make(store, 0, 40))).count("is at sequence") == 16


def test_timeout_names_the_holder_of_the_stores_lock(store: Store) -> None:
    class Held(PrefixStore):
        def append(self, key: Any, value: Any) -> None:
            raise StoreTimeoutError("the lock was held", holder="other:1")

    error = times_out(make(Held("x", store), 0, 1))
    assert error.holder == "other:1"
    assert "other:1 holds the store's lock" in str(error)


def test_timeout_is_raised_even_if_the_sequences_cannot_be_read(store: Store) -> None:
    class Silent(PrefixStore):
        def get(self, key: Any, **given: Any) -> Any:
            if key == b"ckpt/sequence/1":
                raise StoreUnavailableError("input/output error")
            return super().get(key, **given)

    words = str(times_out(make(Silent("x", store), 0, 2)))
    assert "timeout=0)" in words
    assert "sequence" not in words


def test_callers_with_different_world_sizes_are_an_error(store: Store) -> None:
    times_out(make(store, 0, 2))
    with pytest.raises(BarrierError, match=r"world_size=2.*world_size=3"):
        make(store, 1, 3).execute_barrier(0)


def test_callers_that_share_a_rank_are_an_error_when_one_is_left_behind(store: Store) -> None:
    class Overtaken(PrefixStore):
        def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
            self.set(key, "7")  # here the other one passes, again and again
            return super().compare_set(key, expected, desired)

    with pytest.raises(BarrierError, match="is at sequence 7: two callers use the same rank"):
        make(Overtaken("x", store), 0, 1).execute_barrier()


def test_callers_that_share_a_rank_in_one_barrier_pass_it_together(store: Store) -> None:
    class Twin(PrefixStore):
        def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
            super().compare_set(key, expected, desired)  # here the other one passes
            return super().compare_set(key, expected, desired)

    barrier = make(Twin("x", store), 0, 1)
    barrier.execute_barrier()
    barrier.execute_barrier()
    assert barrier.sequence == 2


def test_sequence_that_is_no_number_is_an_error(store: Store) -> None:
    store.set("ckpt/sequence/0", "some")
    with pytest.raises(BarrierError, match="not a sequence number"):
        make(store, 0, 1).execute_barrier()


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"rank": 2}, BarrierError),
        ({"rank": -1}, BarrierError),
        ({"rank": "0"}, TypeError),
        ({"world_size": 0}, ValueError),
        ({"timeout": -1}, ValueError),
        ({"timeout": "1"}, TypeError),
        ({"barrier_prefix": None}, TypeError),
        ({"durable": True}, TypeError),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_when_the_barrier_is_made(arguments: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        StoreBarrier(**{"store": HashStore(), "rank": 0, "world_size": 2, **arguments})


def test_timeout_of_one_call_counts_for_more_than_that_of_the_barrier(store: Store) -> None:
    assert "timeout=0.01" in str(times_out(make(store, 0, 2), 0.01))
    with pytest.raises(StoreTimeoutError, match=r"timeout=0\.02"):
        make(store, 0, 2, timeout=0.02).execute_barrier()
    with pytest.raises(ValueError, match="timeout"):
        make(store, 0, 2).execute_barrier(-1)


def test_timeout_of_the_store_holds_where_a_barrier_has_none(place: Place) -> None:
    store = place.open(0.03)
    barrier = StoreBarrier(store, rank=0, world_size=2)
    assert "timeout=0.03)" in str(start_thread(times_out, barrier, None).join())
    store.set_timeout(0.01)  # it is asked at each call
    assert "timeout=0.01)" in str(start_thread(times_out, barrier, None).join())


@pytest.mark.parametrize("kind", ["file", "mem"])
def test_timeout_in_an_address_holds_where_a_barrier_has_none(tmp_path: Path, kind: str) -> None:
    address = f"file:{tmp_path}/store?timeout=0.02" if kind == "file" else "mem:?timeout=0.02"
    with StoreBarrier(address, rank=0, world_size=2) as barrier:
        assert "timeout=0.02)" in str(start_thread(times_out, barrier, None).join())
    with StoreBarrier(address, rank=0, world_size=2, timeout=0.01) as barrier:
        assert "timeout=0.01)" in str(start_thread(times_out, barrier, None).join())
    with FileStoreBarrier(tmp_path / "other", rank=0, world_size=2, timeout=0.01) as barrier:
        assert "timeout=0.01)" in str(start_thread(times_out, barrier, None).join())


def test_barrier_with_fail_fast_breaks_at_a_dead_rank_and_names_its_sequence(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStoreBarrier(path, rank=0, world_size=2, timeout=HANG_S, fail_fast=True) as first:
        with (
            FileStoreBarrier(path, rank=1, world_size=2, timeout=HANG_S) as second,
            start_thread(first.execute_barrier),
        ):
            second.execute_barrier()
        with pytest.raises(BrokenBarrierError, match="this is sequence 1, rank 1 is at sequence 1") as caught:
            first.execute_barrier()  # the second one is closed
        assert [name.partition(" ")[0] for name in caught.value.dead] == ["1"]
        with FileStoreBarrier(path, rank=1, world_size=2, timeout=HANG_S) as again, start_thread(first.execute_barrier):
            again.execute_barrier()
        assert first.sequence == 2


# Stores


def test_store_that_was_open_stays_open(store: Store) -> None:
    with make(store, 0, 1) as barrier:
        barrier.execute_barrier()
    store.set("k", "v")


def test_store_that_was_opened_for_the_barrier_is_closed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(
        store_module, "open_store", lambda url, **given: (options.append(given), open_store(url, **given))[1]
    )
    with StoreBarrier(f"file:{tmp_path}/store?durable=1", rank=0, world_size=1, timeout=7) as barrier:
        barrier.execute_barrier()
    assert options == [{"timeout": 7}]
    with pytest.raises(StoreClosedError):
        barrier.execute_barrier()
    barrier.close()


def test_address_may_be_that_of_any_store() -> None:
    first, second = (StoreBarrier("mem:barriers", rank=rank, world_size=2, timeout=HANG_S) for rank in range(2))
    with first, second, start_thread(first.execute_barrier):
        second.execute_barrier()


@pytest.mark.parametrize("name", ["store", "a:b?c=1#d%20", "with blank"])
def test_path_of_a_file_store_barrier_is_taken_literally(tmp_path: Path, name: str) -> None:
    with FileStoreBarrier(tmp_path / name, rank=0, world_size=1, lock="flock", label="me") as barrier:
        barrier.execute_barrier()
    with FileStore(tmp_path / name, lock="flock") as store:
        assert store.get("barrier/sequence/0") == b"1"
    with pytest.raises(StoreClosedError):
        barrier.execute_barrier()


def test_barrier_with_bad_arguments_opens_nothing(tmp_path: Path) -> None:
    for arguments in ({"rank": 3, "world_size": 3}, {"rank": 0, "world_size": 1, "barrier_prefix": "x" * 2000}):
        with pytest.raises((BarrierError, ValueError)):
            FileStoreBarrier(tmp_path / "store", **arguments)
    assert not list(tmp_path.iterdir())


def test_process_that_is_killed_is_replaced_and_its_sequence_goes_on(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    with Workers(place.spec(), "execute_barriers", [[0, 2, 3], [1, 2, 2]]) as workers:
        start(store, 2)
        assert workers.processes[1].wait(HANG_S) == 0
        store.wait(["row/2/arrivals"])  # rank 0 waits at the third, or is about to
        workers.processes[0].kill()
        workers.processes[0].wait(HANG_S)
    with Workers(place.spec(), "execute_barriers", [[0, 2, 1], [1, 2, 1]]) as workers:
        start(store, 2)
        assert workers.results() == [3, 3]
    place.close()


# The registry and configurations


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Barrier]]:
    """The registry, as it was again after the test."""
    copy = dict(BARRIER_REGISTRY)
    monkeypatch.setattr(barriers.base, "BARRIER_REGISTRY", copy)
    monkeypatch.setattr(barriers, "BARRIER_REGISTRY", copy)
    return copy


class Recorded(Barrier):
    barrier_type = "recorded"

    def __init__(self, global_rank: int, global_world_size: int, name: str = "none") -> None:
        self.arguments = (global_rank, global_world_size, name)

    def execute_barrier(self, timeout: Any = None) -> None:
        pass


def test_barriers_are_registered_by_their_type() -> None:
    assert list(BARRIER_REGISTRY.items()) == [
        ("store", StoreBarrier),
        ("file_store", FileStoreBarrier),
        ("tcp_store", TCPStoreBarrier),
        ("dist_barrier", DistBarrier),
    ]


def test_registration_returns_the_class_and_may_be_done_again(registry: dict[str, type[Barrier]]) -> None:
    assert register_barrier(Recorded) is Recorded
    assert register_barrier(Recorded) is Recorded
    assert registry["recorded"] is Recorded


def test_type_that_is_missing_or_taken_or_no_barrier_is_refused(registry: dict[str, type[Barrier]]) -> None:
    with pytest.raises(ValueError, match="Nameless has no barrier_type"):
        register_barrier(type("Nameless", (Barrier,), {}))
    with pytest.raises(ValueError, match="Second: the barrier_type 'store' is already used by StoreBarrier"):
        register_barrier(type("Second", (Barrier,), {"barrier_type": "store"}))
    with pytest.raises(ValueError, match="Heir: the barrier_type 'store' is already used by StoreBarrier"):
        register_barrier(type("Heir", (StoreBarrier,), {}))
    for wrong in (int, StoreBarrier.execute_barrier):
        with pytest.raises(TypeError, match="not a subclass"):
            register_barrier(wrong)
    assert registry == BARRIER_REGISTRY


def test_configurations_compare_print_and_load() -> None:
    config = BarrierConfig("file_store", {"path": "p", "rank": 0})
    assert repr(config) == "BarrierConfig(barrier_type='file_store', barrier_args={'path': 'p', 'rank': 0})"
    assert config == BarrierConfig.from_dict({"barrier_type": "file_store", "barrier_args": {"path": "p", "rank": 0}})
    assert config == BarrierConfig.from_json('{"barrier_type": "file_store", "barrier_args": {"path": "p", "rank": 0}}')
    assert config != BarrierConfig("file_store")
    assert BarrierConfig() == BarrierConfig.from_dict({}) == BarrierConfig.from_json(b'{"barrier_args": null}')
    assert BarrierConfig().barrier_args is not BarrierConfig().barrier_args


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[]", TypeError),
        ("{", ValueError),
        ('{"type": "store"}', ValueError),
        ('{"barrier_type": 3}', TypeError),
        ('{"barrier_args": [1]}', TypeError),
    ],
)
def test_configuration_with_unknown_or_wrong_fields_is_refused(text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        BarrierConfig.from_json(text)
    with pytest.raises(TypeError):
        BarrierConfig("store", {1: 2})


def test_type_not_given_makes_no_barrier_and_an_unknown_one_lists_those_known() -> None:
    assert create_barrier_from_config(BarrierConfig()) is None
    with pytest.raises(
        ValueError, match="unknown barrier_type 'tcp'; registered are dist_barrier, file_store, store, tcp_store"
    ):
        create_barrier_from_config(BarrierConfig("tcp"))


def test_rank_and_world_size_come_from_the_environment_when_not_given(
    registry: dict[str, type[Barrier]], no_launcher: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register_barrier(Recorded)
    no_launcher.setattr("fscoord._runtime.system.os.environ", {"RANK": "1", "WORLD_SIZE": "3"})
    made = create_barrier_from_config(BarrierConfig("recorded", {"name": "x"}))
    assert isinstance(made, Recorded)
    assert made.arguments == (1, 3, "x")
    given = create_barrier_from_config(BarrierConfig("recorded", {"global_rank": 0}))
    assert isinstance(given, Recorded)
    assert given.arguments == (0, 3, "none")
    with create_barrier_from_config(BarrierConfig("file_store", {"path": str(tmp_path / "s")})) as barrier:
        assert (barrier.rank, barrier.world_size) == (1, 3)
    with StoreBarrier("mem:") as barrier:
        assert (barrier.rank, barrier.world_size) == (1, 3)


def test_rank_that_is_given_nowhere_is_an_error(
    registry: dict[str, type[Barrier]], no_launcher: pytest.MonkeyPatch
) -> None:
    register_barrier(Recorded)
    for config in (BarrierConfig("store", {"store": "mem:"}), BarrierConfig("recorded")):
        with pytest.raises(ValueError, match="rank is not given"):
            create_barrier_from_config(config)


def test_argument_that_the_barrier_does_not_take_is_an_error() -> None:
    with pytest.raises((TypeError, ValueError), match="colour"):
        create_barrier_from_config(BarrierConfig("store", {"store": "mem:", "rank": 0, "world_size": 1, "colour": 1}))
