"""Ctrl-C and forks in the middle of combined writes: the seat is free, no request stays, each write is done once."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.combining import AlwaysLeader, Seat, Thread, combiner_of, share, station_of, until
from support.interrupts import At, interrupt
from support.plain_reader import read_newest

from fscoord import FileStore, StoreTimeoutError
from fscoord._log.shared.combining import combiner
from fscoord._log.shared.combining.request import DONE
from fscoord._log.shared.combining.station import Slot, Station
from fscoord.inspect import verify

LIMIT_S = 60


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    share(str(tmp_path), monkeypatch)
    # A thread or child that the machine holds up is not taken for one that is stopped: its followers go on to wait.
    monkeypatch.setattr(combiner, "STALLED_S", LIMIT_S)
    monkeypatch.setattr(combiner, "SILENT_S", LIMIT_S)
    return str(tmp_path / "log")


@pytest.fixture
def store(path: str) -> Iterator[FileStore]:
    with FileStore(path, timeout=LIMIT_S) as store:
        store.set("registered", "1")
        yield store
    written = [(writer, time) for *_, writer, time in read_newest(Path(path)).records]
    assert len(set(written)) == len(written), "no two records of a session have the same time"
    assert verify(path).verdict == "sound"


@pytest.mark.exhaustive
def test_follower_that_is_interrupted_anywhere_leaves_no_request(store: FileStore, path: str) -> None:
    number = 0
    with Seat(store) as seat:
        while True:
            seat.show_life()
            number += 1
            store.set_timeout(0.001)
            at = At(number, interrupt)
            with suppress(KeyboardInterrupt, StoreTimeoutError), at:
                store.add("n", 1)
            assert seat.station.requests() == [], at.where
            if not at.reached:
                break
    assert number > 100
    store.set_timeout(LIMIT_S)
    assert store.add("n", 1) == 1, "nobody had the seat to do one of them"


@pytest.mark.exhaustive
def test_follower_that_is_interrupted_anywhere_is_done_once_or_never(store: FileStore, path: str) -> None:
    number = total = 0
    with AlwaysLeader(path) as leader:
        while True:
            number += 1
            at, found = At(number, interrupt), 0
            with suppress(KeyboardInterrupt), at:
                found = store.add("n", 1)
            now = store.add("n", 0)
            assert found in (0, now), at.where
            assert total <= now <= total + 1, at.where
            total = now
            if not at.reached:
                break
        assert number > 60
        assert leader.served > number


@pytest.mark.exhaustive
def test_leader_that_is_interrupted_anywhere_leaves_the_seat_and_its_follower_ends(
    store: FileStore, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(combiner, "LOOK_S", 0.01)
    number = total = missed = 0
    with FileStore(path, timeout=LIMIT_S) as other:
        other.set("registered", "1")
        while True:
            number += 1
            with Seat(store) as seat:
                thread = Thread(lambda: other.add("n", 1))
                seat.requests(1)
                monkeypatch.setattr(combiner, "LOOK_S", 0.01)
            at, found = At(number, interrupt), 0
            with suppress(KeyboardInterrupt), at:
                found = store.add("n", 1)
            followed = thread.join()
            now = store.add("n", 0)
            assert followed in (total + 1, total + 2), at.where
            assert found in (0, total + 1, total + 2), at.where
            assert found != followed
            assert now - total in ((2,) if found else (1, 2)), at.where
            assert station_of(store).requests() == [], at.where
            total = now
            # The other one may take the seat first. The way of a follower is shorter, and says nothing.
            missed = 0 if at.reached else missed + (found < followed)
            if missed == 5:
                break
    assert number > 150


def test_leader_that_is_interrupted_when_it_has_just_left_the_seat_can_lead_again(store: FileStore) -> None:
    """The profiler of `At` does not see the end of this call, because it is the call of a `functools.partial`."""
    (slot,) = station_of(store)._free_slots
    leave = slot.free

    def leave_and_interrupt() -> None:
        slot.free = leave
        leave()
        raise KeyboardInterrupt

    slot.free = leave_and_interrupt
    with pytest.raises(KeyboardInterrupt):
        store.add("n", 1)
    with Seat(store):
        pass  # the seat is free
    assert store.add("n", 1) == 2


def test_fork_beside_a_pending_request_leaves_it_to_the_parent(store: FileStore) -> None:
    """The child neither removes the request nor takes its answer. Both write on."""
    with Seat(store) as seat:
        thread = Thread(lambda: store.add("n", 10))
        seat.requests(1)
        pid = os.fork()
        if not pid:
            status = 1
            with suppress(BaseException):
                store.set_timeout(0.02)
                with suppress(StoreTimeoutError):
                    store.add("n", 100)  # the seat is the parent's, and shows no life
                store.close()
                status = 0
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(seat.station.requests()) == 1, "the request of the parent is still there"
        seat.tell(seat.claim(), DONE, b"I42")
        assert thread.join() == 42
    assert store.add("n", 1) in (1, 101)


def test_fork_in_a_signal_handler_of_a_follower_goes_on_in_both(store: FileStore, path: str) -> None:
    children: list[int] = []

    def fork() -> None:
        children.append(os.fork())

    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    reached, number, draw = [True], 0, random.Random(seed)
    while reached[0]:
        number += draw.randrange(1, 30)  # some of the points
        children.clear()
        before = store.add("n", 0)
        with AlwaysLeader(path):
            at, found = At(number, fork), 0
            try:
                with at:
                    found = store.add("n", 1)
            finally:
                if children == [0]:
                    os._exit(0 if found > before else 3)
        reached[0] = at.reached
        if children:
            assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0, at.where
        assert store.add("n", 0) - before in (1, 2), at.where
    assert number > 60
    assert combiner_of(store)


def test_fork_of_a_follower_before_its_answer_leaves_the_record_to_the_parent(
    store: FileStore, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has the parent's watch for the record, but the record is not that of its own call."""
    try_seat, calls, children = Station.try_seat, itertools.count(1), list[int]()

    def fork_after_the_publishing(station: Station, slot: Slot) -> bool:
        if threading.current_thread() is threading.main_thread() and next(calls) == 2:
            children.append(os.fork())
            if not children[0]:
                until(lambda: read_newest(Path(path)).values.get(b"n") == b"1")
        return try_seat(station, slot)

    found = 0
    with AlwaysLeader(path):
        monkeypatch.setattr(Station, "try_seat", fork_after_the_publishing)
        try:
            found = store.add("n", 1)
        finally:
            if children == [0]:
                os._exit(found)
        assert found == 1
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 2
    assert store.add("n", 0) == 2
