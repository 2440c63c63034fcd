"""`static_rendezvous`: ranks that are known in advance find rank 0, and learn that it is dead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.internals import network, system
from support.places import HANG_S, Thread, start_thread, until

from fscoord import FileStore, HashStore, Store
from fscoord.errors import RendezvousError, RendezvousStateError, StoreClosedError, StoreTimeoutError, UsedBeforeError
from fscoord.rendezvous import RendezvousInfo, static_rendezvous
from fscoord.rendezvous.static import locate_rank, session_of

LAUNCHED = ("RANK", "WORLD_SIZE", "FSCOORD_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHED, "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)


class Ranks:
    """Handles on one file, each of which is one process's as far as the store can tell."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: list[Store] = []

    def handle(self) -> Store:
        self._open.append(FileStore(self._path, timeout=HANG_S))
        return self._open[-1]

    def close(self) -> None:
        for store in self._open:
            store.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path / "store")
    yield ranks
    ranks.close()


def begin(store: Store, rank: int, world_size: int, **options: Any) -> Thread:
    return start_thread(lambda: static_rendezvous(store, rank, world_size, **options))


def launch(handles: list[Store], **options: Any) -> list[RendezvousInfo]:
    threads = [begin(each, rank, len(handles), **options) for rank, each in enumerate(handles)]
    return [thread.join() for thread in threads]


def address(info: RendezvousInfo) -> tuple[str, int]:
    return info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port


# -- all come ----------------------------------------------------------------------------------------------------------


def test_ranks_get_the_address_of_rank_0_and_a_store_of_their_own(ranks: Ranks) -> None:
    found = launch([ranks.handle() for _ in range(3)])
    assert [(info.rank, info.world_size) for info in found] == [(0, 3), (1, 3), (2, 3)]
    assert len({address(info) for info in found}) == 1
    assert address(found[0])[0] == network.own_name()
    found[1].store.set("k", "v")
    assert found[2].store.get("k") == b"v"
    assert len({session_of(found[0].store, rank) for rank in range(3)}) == 3


def test_address_and_port_that_are_given_are_published(ranks: Ranks) -> None:
    found = launch([ranks.handle(), ranks.handle()], local_addr="fe80::1%lo", server_port=4711)
    assert [address(info) for info in found] == [("fe80::1%lo", 4711)] * 2


def test_rank_and_world_size_come_from_the_environment(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    info = static_rendezvous(ranks.handle())
    assert (info.rank, info.world_size) == (0, 1)


def test_threads_meet_on_a_store_without_sessions() -> None:
    store = HashStore(timeout=HANG_S)
    assert len({address(info) for info in launch([store, store])}) == 1
    with pytest.raises(UsedBeforeError, match="rank 0 arrived at 'static_rendezvous/-/0'"):
        static_rendezvous(store, 0, 2)


# -- again -------------------------------------------------------------------------------------------------------------


def test_second_launch_on_the_same_path_reads_its_own_address(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    first = [ranks.handle(), ranks.handle()]
    assert address(launch(first, server_port=1)[0])[1] == 1
    for store in first:
        store.close()
    other = begin(ranks.handle(), 1, 2)  # it comes before rank 0, when only the old address is there
    until(lambda: caplog.records)
    static_rendezvous(ranks.handle(), 0, 2, server_port=2)
    assert address(other.join())[1] == 2


def test_restarted_workers_do_not_see_the_address_of_a_living_rank_0(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch([ranks.handle(), ranks.handle()], server_port=1)
    for variable in ("TORCHELASTIC_RESTART_COUNT", "FSCOORD_RESTART_COUNT"):
        monkeypatch.setenv(variable, "7" if variable.startswith("FSCOORD") else "6")
        assert [address(info)[1] for info in launch([ranks.handle(), ranks.handle()], server_port=2)] == [2, 2]


def test_runs_of_one_job_do_not_see_each_other(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    for port, (job, restart) in enumerate([("1", "0"), ("1", "1"), ("2", "0")]):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        found = launch([ranks.handle(), ranks.handle()], server_port=port)
        assert [address(info)[1] for info in found] == [port, port]


@pytest.mark.parametrize("rank", [0, 1])
def test_name_that_one_process_uses_twice_is_refused(ranks: Ranks, rank: int) -> None:
    handles = [ranks.handle(), ranks.handle()]
    launch(handles)
    with pytest.raises(UsedBeforeError, match=f"rank {rank} arrived at 'static_rendezvous/-/0'"):
        static_rendezvous(handles[rank], rank, 2)
    assert len(launch(handles, name="another")) == 2


# -- some do not come --------------------------------------------------------------------------------------------------


def test_dead_rank_0_without_an_address_is_named(ranks: Ranks) -> None:
    first = ranks.handle()
    first.announce_rank(0)
    other = begin(ranks.handle(), 1, 2, restart_timeout=0.05)
    first.close()
    words = rf"rank 0 \({system.hostname()}:{system.os.getpid()}, found dead at .*\) is dead and published no address"
    with pytest.raises(RendezvousError, match=words + ".*; rank 1 of 2 gives up"):
        other.join()


def test_rank_0_that_was_dead_before_is_named_too(ranks: Ranks) -> None:
    first = ranks.handle()
    first.announce_rank(0)
    first.close()
    with pytest.raises(RendezvousError, match=r"no new rank 0 came within 0\.05 s"):
        static_rendezvous(ranks.handle(), 1, 2, restart_timeout=0.05)


def test_end_of_rank_0_is_logged_while_a_new_one_may_come(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = ranks.handle(), ranks.handle()
    first.announce_rank(0)
    looks = Looks(other, monkeypatch)
    waiting = begin(other, 1, 2)
    until(lambda: looks.count == 1)  # rank 0 lived then: its end must wake the wait
    first.close()
    until(lambda: caplog.records)
    assert re.match(r"rank 0 \(.*dead.*\) has ended: waiting 30 s for a new rank 0", caplog.messages[0])
    static_rendezvous(ranks.handle(), 0, 2, server_port=7)
    assert address(waiting.join())[1] == 7


def test_new_rank_0_that_is_slow_is_waited_for(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other, new = ranks.handle(), ranks.handle(), ranks.handle()
    first.announce_rank(0)
    first.close()
    looks = Looks(other, monkeypatch, after_first=lambda: new.announce_rank(0))
    waiting = begin(other, 1, 2, restart_timeout=0.01)
    until(lambda: looks.count >= 3)  # the time for a new rank 0 is over, and one has announced itself
    static_rendezvous(new, 0, 2, server_port=7)
    assert address(waiting.join())[1] == 7


class Looks:
    """Counts the looks of `store` for dead ranks."""

    def __init__(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, after_first: Callable[[], object] = lambda: None
    ) -> None:
        self.count = 0
        look = store.dead_ranks

        def dead_ranks(numbers: Iterable[int]) -> list[int]:
            found = look(numbers)
            if not self.count:
                after_first()
            self.count += 1
            return found

        monkeypatch.setattr(store, "dead_ranks", dead_ranks)


def test_rank_0_that_dies_after_it_published_is_named_at_once(ranks: Ranks) -> None:
    first, seen = ranks.handle(), ranks.handle()
    first_thread = begin(first, 0, 3, local_addr="here")
    other = begin(ranks.handle(), 1, 3)
    seen.wait(["static_rendezvous/-/0/1/rank/0", "static_rendezvous/-/0/1/rank/1"])
    first.close()
    with pytest.raises(RendezvousError, match=r"rank 0 \(.*\) died after it had published its address here"):
        other.join()
    with pytest.raises(StoreClosedError):
        first_thread.join()


def test_missing_ranks_are_named_at_the_deadline(ranks: Ranks) -> None:
    with pytest.raises(StoreTimeoutError, match=r"in the rendezvous on rank 0.*missing_ranks=\[1, 2\]") as caught:
        static_rendezvous(ranks.handle(), 0, 3, timeout=0.05)
    assert caught.value.missing_ranks == ("1", "2")
    with pytest.raises(StoreTimeoutError, match=r"waiting for the address of rank 0 on rank 1.*missing_ranks=\[0\]"):
        static_rendezvous(ranks.handle(), 1, 3, name="other", timeout=0.05)


def test_key_of_another_program_is_named(ranks: Ranks) -> None:
    store = ranks.handle()
    store.set("static_rendezvous/-/0/1/address", "http://here")
    with pytest.raises(RendezvousStateError, match="'address' holds b'http://here'"):
        static_rendezvous(store, 1, 2)


def test_rank_is_located_by_its_session(ranks: Ranks) -> None:
    first, second = ranks.handle(), ranks.handle()
    first.announce_rank(0)
    second.announce_rank(0)
    first.close()
    assert "dead" in locate_rank(second, 0, 1)
    assert "alive" in locate_rank(second, 0)
    assert locate_rank(second, 5) == "rank 5 (not seen in this store)"


# -- the address -------------------------------------------------------------------------------------------------------


def test_host_whose_name_nobody_knows_is_reached_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "hostname", lambda: "nowhere.invalid")
    assert network.is_ip_address(network.own_name())
