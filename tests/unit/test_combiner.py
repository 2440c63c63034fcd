"""Combined writes in one process: leader, followers, and an author that learns its result from the log."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.combining import (
    HeldLock,
    Seat,
    combiner_of,
    left_behind,
    share,
    station_of,
    until,
)
from support.faulty import faulty_os, faulty_system
from support.internals import log_of
from support.places import start_thread, wait_in_vain
from support.plain_reader import read_newest

from fscoord import FileStore, StoreTimeoutError, StoreUnavailableError, barrier
from fscoord._log import mount
from fscoord._log.format import record
from fscoord._log.format.control_records import Failure, Session
from fscoord._log.log import LOCK_GRACE_S
from fscoord._log.recovery import GENERATION
from fscoord._log.session_table import SessionTable
from fscoord._log.shared.combining import batch, combiner
from fscoord._log.shared.combining.batch import Batch, Write
from fscoord._log.shared.combining.combiner import Combiner
from fscoord._log.shared.combining.outcomes import Outcomes, SharedLogWriter
from fscoord._log.shared.combining.request import (
    ALONE,
    DONE,
    LEAD,
    REQUEST_MAX,
    WAITING,
    Answer,
    Author,
    decode_seat,
    encode_request,
    encode_seat,
)
from fscoord._log.shared.combining.station import ANSWER_MAX, LINK_MAX, SWEEP_S, VERSION, Slot, Station
from fscoord._log.shared.network import NetworkAccess
from fscoord._runtime import system
from fscoord.inspect import dump, repair, verify
from fscoord.stores.file.operations import Operation
from fscoord.stores.file.replay import KeyValueState

LIMIT_S = 60
NEVER_S = 1000.0


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A log whose leaders may be slow: a busy machine must not make followers write alone, unless a test lets it."""
    share(str(tmp_path), monkeypatch)
    for name in ("STALLED_S", "SILENT_S"):
        monkeypatch.setattr(combiner, name, NEVER_S)
    return str(tmp_path / "log")


@pytest.fixture
def only_told(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Followers look at the seat once, right after the publishing, and then only if they are told to.

    The list has the lengths of the sleeps that have begun after that look.
    """
    sleeps: list[float] = []
    receive = Station.receive

    def note_and_receive(station: Station, slot: Slot, seconds: float) -> bytes | None:
        if seconds:
            sleeps.append(seconds)
        return receive(station, slot, seconds)

    monkeypatch.setattr(combiner, "LOOK_S", NEVER_S)
    monkeypatch.setattr(Station, "receive", note_and_receive)
    return sleeps


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each write appends."""
    found: list[int] = []
    append = SharedLogWriter.append_batch

    def append_batch(writer: SharedLogWriter, records: Any) -> None:
        found.append(len(records))
        append(writer, records)

    monkeypatch.setattr(SharedLogWriter, "append_batch", append_batch)
    return found


def opened(path: str, stack: ExitStack, count: int) -> list[FileStore]:
    """Return handles that have registered, so that others may write for them."""
    stores = [stack.enter_context(FileStore(path, timeout=LIMIT_S)) for _ in range(count)]
    for store in stores:
        store.set("registered", "1")
    return stores


def let_write_alone(store: FileStore, seat: Seat) -> None:
    """Let `store` take the leader on `seat` for stopped, until it shows life: the next write waits for no answer."""
    combiner_of(store)._stalled = seat.station.seat_state()


class Deadlines:
    """Lets no author end its call at the deadline of the call before a test says so, however slow the test is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_come = threading.Event()
        give_up = Combiner._give_up

        def wait_and_give_up(*given: Any) -> Any:
            assert self._may_come.wait(LIMIT_S)
            return give_up(*given)

        monkeypatch.setattr(Combiner, "_give_up", wait_and_give_up)

    def come(self) -> None:
        self._may_come.set()


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> Deadlines:
    return Deadlines(monkeypatch)


def records_of(path: str, kind: str) -> list[Any]:
    return [entry for entry in read_newest(Path(path)).records if entry[1] == kind]


def append_for(leader: FileStore, request: Any) -> None:
    """Append the record of `request`, an addition of 1 to ``n``, without an answer to its author."""
    writer = log_of(leader).writer
    assert isinstance(writer, SharedLogWriter)
    leader.num_keys()
    with log_of(leader).handle.mutex:
        writer.append_batch([(record.ADD, b"n", b"1", request.author.session, request.time)])


# One batch for all


def test_batch_is_not_longer_than_one_request_to_the_server(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader's flush, or a lost connection, could leave a hole in a batch of two requests."""
    written: list[int] = []
    append = SharedLogWriter.append_batch

    def append_batch(writer: SharedLogWriter, records: Any) -> None:
        written.append(sum(29 + len(key) + len(value) for _, key, value, _, _ in records))
        append(writer, records)

    monkeypatch.setattr(batch, "BATCH_MAX", 4096)
    with ExitStack() as stack:
        stores = opened(path, stack, 12)
        monkeypatch.setattr(SharedLogWriter, "append_batch", append_batch)
        with HeldLock(path) as held:
            threads = [start_thread(store.set, f"k{n}", b"x" * 1000) for n, store in enumerate(stores)]
            until(lambda: len(station_of(stores[0]).requests()) == len(stores) - 1)
            held.release()
            for thread in threads:
                thread.join()
        assert stores[0].num_keys() == 13
    assert max(written) <= 4096
    assert len(written) < 12


# The seat


def test_author_looks_at_the_seat_once_more_behind_the_publishing(
    path: str, only_told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader may have left between the first try and the publishing, and then no leader comes."""
    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        publish = Station.publish
        with Seat(store) as seat:

            def publish_late(station: Station, *given: Any) -> None:
                publish(station, *given)
                seat.leave()

            monkeypatch.setattr(Station, "publish", publish_late)
            assert store.add("n", 1) == 1
            assert seat.station.requests() == []


def test_leader_that_gets_no_lock_calls_the_next_one(
    path: str, only_told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_out(*_: Any) -> None:
        """The time-out comes when the follower has looked at the seat after its publishing, and sleeps."""
        until(lambda: only_told)
        raise log_of(first).lock_timeout(1.0)

    with ExitStack() as stack:
        first, second = opened(path, stack, 2)
        with HeldLock(path) as held:
            second.set_timeout(NEVER_S)
            monkeypatch.setattr(log_of(first), "_wait_for_lock", time_out)
            leading = start_thread(first.add, "n", 1)
            until(lambda: log_of(first).handle.shared.leader)
            following = start_thread(second.add, "n", 1)
            with pytest.raises(StoreTimeoutError) as caught:
                leading.join()
            assert not caught.value.maybe_applied
            until(lambda: not station_of(second).requests())  # it leads: nobody else is there
            held.release()
            assert following.join() == 1


def test_author_that_takes_the_seat_although_it_need_not_lead_calls_the_next_one(
    path: str, only_told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader claims its request and leaves just before it tries the seat. The one whom the leader calls meanwhile
    finds the seat taken, and is not called again by the leader.
    """
    take, tries = Station.try_seat, list[FileStore]()
    tell, calls = Station.tell, list[Station]()

    def note_call(station: Station, slot: Slot, address: str, answer: Answer) -> bool:
        if answer.verdict == LEAD:
            calls.append(station)
        return tell(station, slot, address, answer)

    with ExitStack() as stack:
        first, second = opened(path, stack, 2)
        seat = stack.enter_context(Seat(first))

        def try_seat(station: Station, slot: Slot) -> bool:
            store = first if station is station_of(first) else second
            is_late = store is first and tries.count(first) == 1
            if is_late:
                later, earlier = (station.read(each) for each in reversed(seat.station.requests()))
                assert later is not None
                assert earlier is not None
                assert station.remove(seat.station.requests()[-1])
                seat.leave()
            try:
                return take(station, slot)
            finally:
                tries.append(store)
                if is_late:
                    request = batch.decode_request(earlier)
                    assert request is not None
                    seat.tell(request, LEAD)
                    until(lambda: tries.count(second) == 3)

        monkeypatch.setattr(Station, "try_seat", try_seat)
        monkeypatch.setattr(Station, "tell", note_call)
        waiting = start_thread(second.add, "n", 1)
        until(lambda: tries.count(second) == 2)
        try:
            assert first.add("m", 1) == 1
            assert calls == [seat.station, station_of(first)]
        finally:
            first.add("m", 1)  # leads, so the other thread ends in any case
        assert waiting.join() == 1


class ClockOfLife:
    """The clock of followers: it stands still, and goes on by almost the patience of a follower with each sign of life.

    So a follower that overlooks a sign of life loses its patience, and no delay of a thread makes it lose that.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._began, self.signs = system.time.monotonic(), 0
        show = Station.show

        def show_and_go_on(station: Station, *given: Any) -> None:
            show(station, *given)
            self.signs += 1

        monkeypatch.setattr(Station, "show", show_and_go_on)

    def __getattr__(self, name: str) -> Any:
        return getattr(system, name)

    @property
    def time(self) -> ClockOfLife:
        return self

    def monotonic(self) -> float:
        return self._began + 0.9 * combiner.STALLED_S * min(self.signs, 20)


def test_leader_that_waits_long_and_shows_life_keeps_its_followers(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise combining would end just where many hosts contend for the lock."""
    monkeypatch.setattr(combiner, "STALLED_S", 1.0)
    bypassed: list[Any] = []
    monkeypatch.setattr(Combiner, "_bypass", lambda *given: bypassed.append(given))
    with ExitStack() as stack:
        stores = opened(path, stack, 3)
        with HeldLock(path) as held:
            monkeypatch.setattr(combiner, "system", clock := ClockOfLife(monkeypatch))
            threads = [start_thread(store.add, "n", 1) for store in stores]
            until(lambda: len(station_of(stores[0]).requests()) == 2)
            signs = clock.signs
            until(lambda: clock.signs >= signs + 8)
            held.release()
            assert sorted(thread.join() for thread in threads) == [1, 2, 3]
    assert bypassed == []


@pytest.mark.parametrize("phase", ["WAITING", "HOLDING"])
def test_followers_of_a_leader_that_shows_no_life_write_alone_until_it_moves(
    phase: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(combiner, "STALLED_S", 0.1)
    monkeypatch.setattr(combiner, "SILENT_S", 0.1)
    published: list[Any] = []
    publish = Station.publish
    monkeypatch.setattr(Station, "publish", lambda *given: published.append(given) or publish(*given))
    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        with Seat(store) as seat:
            seat.show_life(getattr(combiner.requests, phase))
            assert store.add("n", 1) == 1
            assert store.add("n", 1) == 2
            assert len(published) == 1, "the second write waits for nobody"
            seat.show_life()
            assert store.add("n", 1) == 3
            assert len(published) == 2
            assert seat.station.requests() == []


@pytest.mark.parametrize("where", ["the seat", "an answer"])
def test_leader_that_is_interrupted_behind_its_write_answers_all_its_followers(
    where: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, interruptions = set[str](), [KeyboardInterrupt]
    tell = Station.tell

    def interrupt() -> None:
        if interruptions:
            raise interruptions.pop()

    def tell_and_interrupt(station: Station, slot: Slot, address: str, answer: Answer) -> bool:
        if slot is its_slot:
            told.add(address)
        done = tell(station, slot, address, answer)
        if slot is its_slot and where == "an answer":
            interrupt()
        return done

    def leave_and_interrupt() -> None:
        leave()
        interrupt()

    with ExitStack() as stack:
        leader, *followers = opened(path, stack, 3)
        (its_slot,) = station_of(leader)._free_slots
        leave = its_slot.free
        with HeldLock(path) as held:
            leading = start_thread(leader.set, "led", "1")
            until(lambda: log_of(leader).handle.shared.leader)
            threads = [start_thread(store.add, "n", 1) for store in followers]
            until(lambda: len(station_of(leader).requests()) == 2)
            monkeypatch.setattr(Station, "tell", tell_and_interrupt)
            if where == "the seat":
                its_slot.free = leave_and_interrupt
            held.release()
            with pytest.raises(KeyboardInterrupt):
                leading.join()
            assert sorted(thread.join() for thread in threads) == [1, 2]
        assert told == {slot.name for store in followers for slot in station_of(store)._slots}


# A write whose call has begun long before


@pytest.fixture
def late(path: str) -> Iterator[tuple[FileStore, Callable[[], Any]]]:
    """A store, and an addition in a call whose time would be over if the time of the write counted from the call.

    The call is that of a barrier, which has waited to announce its rank.
    """
    with FileStore(path, timeout=LIMIT_S) as store:
        store.set("registered", "1")
        operation, started = Operation(record.ADD, b"n", b"1"), system.time.monotonic() - 2 * LIMIT_S
        yield store, lambda: combiner_of(store).write(operation, LIMIT_S, started)


Late = tuple[FileStore, Callable[[], Any]]


def test_late_write_of_a_follower_has_its_whole_time(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write = late
    looks: list[bytes] = []
    seat_state = Station.seat_state
    monkeypatch.setattr(Station, "seat_state", lambda station: looks.append(seat_state(station)) or looks[-1])
    with Seat(store) as seat:
        thread = start_thread(write)
        seat.requests(1)
        until(lambda: len(looks) == 2 or not thread.is_alive())
        assert thread.is_alive()
        seat.tell(seat.claim(), DONE, b"I5")
        assert thread.join() == 5


@pytest.mark.parametrize("way", ["alone", "leads", "takes over"])
def test_late_write_that_waits_for_the_lock_has_its_whole_time(
    way: str, late: Late, path: str, only_told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write = late
    publish = Station.publish
    with ExitStack() as stack:
        seat = Seat(store)
        stack.callback(lambda: (seat.station.give_back(seat.slot), seat.station.close()))
        if way == "alone":
            monkeypatch.setattr(Combiner, "_station_for", lambda *_: None)
        if way == "takes over":
            assert seat.station.try_seat(seat.slot)
            monkeypatch.setattr(Station, "publish", lambda *given: (publish(*given), seat.leave()))
        held = stack.enter_context(HeldLock(path))
        thread = start_thread(write)
        began = system.time.monotonic()
        until(lambda: system.time.monotonic() - began > 3 * LOCK_GRACE_S or not thread.is_alive())
        held.release()
        assert thread.join() == 1


def test_time_of_a_late_write_begins_once() -> None:
    now = system.time.monotonic()
    write = Write(Operation(record.ADD, b"n", b"1"), 1, LIMIT_S, now - 3 * LIMIT_S)
    write.begin_by(now - LIMIT_S)
    assert write.left() == 0.0


# What became of a request


def test_request_that_is_withdrawn_at_the_deadline_is_never_appended(path: str) -> None:
    with ExitStack() as stack:
        store, other = opened(path, stack, 2)
        with Seat(store) as seat:
            store.set_timeout(0.005)
            with pytest.raises(StoreTimeoutError) as caught:
                store.add("n", 1)
            assert not caught.value.maybe_applied
            assert seat.station.requests() == []
        assert other.add("n", 1) == 1


@pytest.mark.parametrize("tail", [b"", b"\xff" * 100], ids=["readable", "unreadable"])
def test_request_that_was_claimed_and_not_answered_may_be_applied_at_the_deadline(
    tail: bytes, path: str, deadlines: Deadlines
) -> None:
    """The author reads the log. Bytes that do not fit can be judged only under the lock, which the leader holds."""
    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        with Seat(store) as seat, HeldLock(path):
            store.set_timeout(0.05)
            thread = start_thread(store.add, "n", 1)
            seat.claim()
            with open(path, "ab") as log:
                log.write(tail)
            deadlines.come()
            with pytest.raises(StoreTimeoutError) as caught:
                thread.join()
            assert caught.value.maybe_applied


TOLD: list[tuple[str, Callable[[FileStore], Any], Any]] = [
    ("add", lambda store: store.add("n", 1), 1),
    ("set", lambda store: store.set("k", "1"), None),
    ("append", lambda store: store.append("text", "x"), None),
    ("compare_set", lambda store: store.compare_set("c", "", "new"), b"new"),
    ("delete_key", lambda store: store.delete_key("old"), True),
    ("queue_push", lambda store: store.queue_push("q", "x"), None),
    ("queue_pop", lambda store: store.queue_pop("full", block=False), b"first"),
    ("multi_set", lambda store: store.multi_set(["m"], ["1"]), None),
    ("transact", lambda store: store.transact(compare={"old": "1"}, set={"m": "1"}, delete=["old"]), True),
]


def test_leader_rings_for_each_key_of_its_own_transaction_and_of_a_follower(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[bytes] = []
    with ExitStack() as stack:
        leader, author = opened(path, stack, 2)
        wait_in_vain(author)
        monkeypatch.setattr(combiner_of(leader), "_notify", rung.extend)
        with HeldLock(path) as held:
            leading = start_thread(leader.multi_set, ["a", "b"], ["1", "2"])
            until(lambda: log_of(leader).handle.shared.leader)
            following = start_thread(lambda: author.transact(set={"c": "1"}, add={"d": 1}, delete=["a"]))
            until(lambda: station_of(author).requests())
            held.release()
            leading.join()
        assert following.join() is True
        assert leader.check(["b", "c", "d"])
        assert not leader.check(["a"])
    assert sorted(set(rung)) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "late"])
@pytest.mark.parametrize(("call", "result"), [each[1:] for each in TOLD], ids=[each[0] for each in TOLD])
def test_author_that_is_not_told_finds_its_record_and_does_not_append_it_again(
    call: Callable[[FileStore], Any], result: Any, is_late: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader was killed between its write and the telling. Meanwhile others go on.

    A record that is late comes after the author's look without the lock, so the author finds it under the lock.
    """
    with ExitStack() as stack:
        leader, author, third = opened(path, stack, 3)
        leader.set("old", "1")
        for item in ("first", "second", "third"):
            leader.queue_push("full", item)
        author.num_keys()
        with HeldLock(path) as held:
            leading = start_thread(leader.set, "led", "1")
            until(lambda: log_of(leader).handle.shared.leader)
            following = start_thread(call, author)
            until(lambda: station_of(author).requests())
            monkeypatch.setattr(Combiner, "_tell", lambda *_, **__: None)
            monkeypatch.setattr(combiner, "LOOK_S", 0.2)
            if is_late:
                monkeypatch.setattr(Combiner, "_is_complete", lambda *_: False)
            held.release()
            leading.join()
        third.queue_pop("full", block=False)
        third.delete_key("c")
        assert following.join() == result
        before = log_of(third).position()
        third.num_keys()
        assert log_of(third).position()[1] - before[1] == 0, "the author has appended nothing"


def test_author_that_is_not_told_looks_although_the_seat_is_never_free(path: str) -> None:
    """Where many writers contend for the seat, such an author might not get it before the deadline of its call."""
    with ExitStack() as stack:
        leader, author = opened(path, stack, 2)
        author.set_timeout(NEVER_S)
        with Seat(leader) as seat:
            thread = start_thread(author.add, "n", 1)
            request = seat.claim()
            append_for(leader, request)
            until(lambda: seat.show_life() or not thread.is_alive())
            assert thread.join() == 1


def test_author_waits_for_the_answer_as_long_as_its_leader_is_at_work(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each author would read the log where the server is slow."""
    looks: list[bytes] = []
    seat_state = Station.seat_state
    monkeypatch.setattr(Station, "seat_state", lambda station: looks.append(seat_state(station)) or looks[-1])
    with ExitStack() as stack:
        leader, author = opened(path, stack, 2)
        with Seat(leader) as seat:
            thread = start_thread(author.add, "n", 1)
            request = seat.claim()
            before = len(looks)
            until(lambda: len(looks) >= before + 4 or not thread.is_alive())
            seat.tell(request, DONE, b"I5")
            assert thread.join() == 5


def test_long_result_that_is_not_told_outlives_a_compaction(path: str) -> None:
    """The author leaves the item in the file, finds its record in one generation, and returns in the next."""
    with ExitStack() as stack:
        (leader,) = opened(path, stack, 1)
        author = stack.enter_context(FileStore(path, timeout=LIMIT_S, spill_bytes=1))
        author.set("registered", "1")
        leader.queue_push("q", "item")
        with Seat(leader) as seat:
            thread = start_thread(lambda: author.queue_pop("q", block=False))
            request = seat.claim()
            writer = log_of(leader).writer
            assert isinstance(writer, SharedLogWriter)
            leader.num_keys()
            with log_of(leader).handle.mutex:
                writer.append_batch([(record.POP, b"q", b"", request.author.session, request.time)])
            author.num_keys()
            let_write_alone(leader, seat)
            leader.compact()
            leader.set("other", "bytes at the old place" * 20)
            author.num_keys()
            seat.leave()
            assert thread.join() == b"item"


def left_behind_by_compactions(
    path: str, call: Callable[[FileStore], Any], *, writes: bool, old: bool = False, answer: bytes = b""
) -> Any:
    """Return what an author gets whose request was claimed, before the log was compacted and its file was removed.

    Args:
        path: the path of the log.
        call: the call of the author.
        writes: whether the leader has appended the record.
        old: whether the log is compacted by a handle that does not keep the times of others.
        answer: the result that the leader sends after the author has read the log; empty if it sends none.
    """
    with ExitStack() as stack:
        leader, author = opened(path, stack, 2)
        with Seat(leader) as seat:
            thread = start_thread(call, author)
            request = seat.claim()
            leader.num_keys()
            if writes:
                operation, writer = Operation.decode(request.operation), log_of(leader).writer
                assert isinstance(writer, SharedLogWriter)
                found = (operation.kind, operation.key, operation.value, request.author.session, request.time)
                with log_of(leader).handle.mutex:
                    writer.append_batch([found])
            if old:
                stack.enter_context(FileStore(path, timeout=LIMIT_S, coherence="locked")).compact()
            else:
                leader.compact()
            with log_of(author).handle.mutex:
                log_of(author).handle.recovery |= GENERATION
            seat.leave()
            if answer:
                until(lambda: log_of(author).handle.header.generation == log_of(leader).handle.header.generation)
                seat.tell(request, DONE, answer)
            return thread.join()


def test_snapshot_tells_when_each_session_has_written_last(path: str) -> None:
    with ExitStack() as stack:
        one, two = opened(path, stack, 2)
        three = stack.enter_context(FileStore(path, timeout=LIMIT_S))
        three.register()
        numbers = [log_of(store).handle.lock.session for store in (one, two, three)]
        written = {writer: time for *_, writer, time in records_of(path, "S")}
        for _ in range(2):
            three.compact()
            told = {writer: time for *_, writer, time in records_of(path, "t")}
            assert told == {numbers[0]: written[numbers[0]], numbers[1]: written[numbers[1]], numbers[2]: 0}
        one.set("k", "1")
        assert FileStore(path, timeout=LIMIT_S, coherence="local", read_only=True).get("k") == b"1"
    assert verify(path).verdict == "sound"
    assert "last_time" in {entry.kind for entry in dump(path)}
    copy = path + ".copy"
    repair(path, copy, write=True)
    assert records_of(copy, "t") == []
    with FileStore(copy, timeout=LIMIT_S) as store:
        assert store.get("k") == b"1"
        assert store.add("n", 1) == 1


@pytest.mark.parametrize("writes", [False, True])
def test_author_that_compactions_have_left_behind_learns_from_the_snapshot(writes: bool, path: str) -> None:
    assert left_behind_by_compactions(path, lambda store: store.append("k", "x"), writes=writes) is None
    with FileStore(path, timeout=LIMIT_S) as store:
        assert store.get("k") == b"x"


def test_sum_that_a_snapshot_does_not_tell_is_an_error_that_says_that_it_was_added(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert left_behind_by_compactions(path, lambda store: store.add("n", 1), writes=False) == 1
    monkeypatch.setattr(combiner, "SILENT_S", 0.3)  # no late answer will come
    with pytest.raises(StoreUnavailableError, match="took effect, but its result is lost") as caught:
        left_behind_by_compactions(path, lambda store: store.add("n", 1), writes=True)
    assert caught.value.maybe_applied


def test_sum_that_a_snapshot_does_not_tell_is_the_answer_of_a_leader_that_is_slow(path: str) -> None:
    assert left_behind_by_compactions(path, lambda store: store.add("n", 1), writes=True, answer=b"I1") == 1


@pytest.mark.parametrize("writes", [False, True])
def test_author_does_not_guess_what_a_snapshot_without_times_does_not_tell(writes: bool, path: str) -> None:
    """Such a snapshot has no times: it was made by an older version, or by a handle that reads in another way."""
    with pytest.raises(StoreUnavailableError, match="was compacted before the record of this") as caught:
        left_behind_by_compactions(path, lambda store: store.append("k", "x"), writes=writes, old=True)
    assert caught.value.maybe_applied
    with FileStore(path, timeout=LIMIT_S) as store:
        assert store.check(["k"]) is writes


def test_answer_to_an_earlier_request_of_the_address_is_dropped(path: str, deadlines: Deadlines) -> None:
    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        with Seat(store) as seat:
            store.set_timeout(0.05)
            with HeldLock(path):
                late = start_thread(store.add, "n", 1)
                first = seat.claim()
                deadlines.come()
                with pytest.raises(StoreTimeoutError):
                    late.join()
            seat.tell(first, DONE, b"I99")
            store.set_timeout(LIMIT_S)
            thread = start_thread(store.add, "n", 1)
            second = seat.claim()
            assert second.address == first.address
            seat.tell(second, DONE, b"I99", time=first.time)
            seat.tell(second, DONE, b"I5")
            assert thread.join() == 5


def test_claims_of_an_attempt_that_is_repeated_are_not_repeated(path: str) -> None:
    """Their authors may have found, under the lock, that nothing was appended, and decided by themselves."""
    with ExitStack() as stack:
        leader, author = opened(path, stack, 2)
        with Seat(leader) as seat:
            thread = start_thread(author.add, "n", 1)
            seat.requests(1)
            write = Write(Operation(record.SET, b"k", b"1"), log_of(leader).writer.next_time(), LIMIT_S)
            decider = combiner_of(leader)._decider
            plan = Batch(log_of(leader), decider, write, seat.station, seat.slot)
            leader.num_keys()
            assert len(plan.decide(1)) == 2
            assert len(plan.decide(1)) == 1
            assert (len(plan.claims), len(plan.failed)) == (0, 1)
            seat.leave()
            assert thread.join() == 1


def test_second_record_of_an_arrival_lost_in_a_torn_batch_is_appended_by_its_author(path: str) -> None:
    with ExitStack() as stack:
        leader, author = opened(path, stack, 2)
        author.announce_rank(0)
        with Seat(leader) as seat:
            thread = start_thread(lambda: barrier(author, 1, "b", LIMIT_S, 0))
            request = seat.claim()
            writer = log_of(leader).writer
            assert isinstance(writer, SharedLogWriter)
            leader.num_keys()
            operation = Operation.decode(request.operation)
            found = (operation.kind, operation.key, operation.value, request.author.session, request.time)
            with log_of(leader).handle.mutex:
                writer.append_batch([found])
            seat.leave()
            thread.join()
        assert leader.get("b/complete") == b"1"
        assert leader.get("b/arrivals") == b"0/1 "


def test_request_that_is_withdrawn_while_the_leader_reads_it_is_not_appended(
    path: str, only_told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[Any] = []
    follow = Combiner._follow
    monkeypatch.setattr(Combiner, "_follow", lambda *given: writes.append(given[3]) or follow(*given))
    with ExitStack() as stack:
        leader, author = opened(path, stack, 2)
        author.set_timeout(NEVER_S)
        with Seat(author):
            thread = start_thread(author.add, "n", 1)
            until(lambda: only_told)  # before, it would find the seat free, and lead
        is_there = Station.is_there

        def when_withdrawn(station: Station, slot: Any, address: str) -> bool:
            found = is_there(station, slot, address)
            writes[0].deadline = 0.0
            station.tell(slot, address, Answer(0, LEAD))  # so that the author looks at the clock
            until(lambda: not thread.is_alive())
            return found

        monkeypatch.setattr(Station, "is_there", when_withdrawn)
        leader.set("led", "1")
        with pytest.raises(StoreTimeoutError) as caught:
            thread.join()
        assert not caught.value.maybe_applied
        assert leader.add("n", 0) == 0


# Requests that nobody may write


def foreign_request(path: str, store: FileStore, change: Callable[[Author], Author]) -> bytes | None:
    """Publish a request of `store` with another author; return what its author is told."""
    log, station = log_of(store), station_of(store)
    session = log.handle.lock.session
    author = Author(session, log.table.sessions[session].alive_id, log.follower.run)
    with ExitStack() as stack:
        waiting = Seat(store)
        stack.callback(lambda: (waiting.station.give_back(waiting.slot), waiting.station.close()))
        data = encode_request(change(author), 5, waiting.slot.name, Operation(record.SET, b"foreign", b"1").encode())
        waiting.station.publish(waiting.slot, data, waiting.station.request_path(0.0, "x"))
        assert len(station.requests()) == 1
        store.set("k", "1")
        assert station.requests() == []
        return waiting.station.receive(waiting.slot, 1.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda author: author._replace(session=author.session + 77),
        lambda author: author._replace(alive_id=bytes(16)),
        lambda author: author._replace(run=author.run + 1),
    ],
    ids=["session", "liveness", "run"],
)
def test_request_of_another_run_or_session_is_left_to_its_author(change: Callable[[Author], Author], path: str) -> None:
    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        told = foreign_request(path, store, change)
        assert told is not None
        assert told[8] == ALONE
        assert not store.check(["foreign"])
        told = foreign_request(path, store, lambda author: author)
        assert told is not None
        assert told[8] == DONE
        assert store.check(["foreign"])


def test_request_of_a_session_with_a_death_record_is_left_to_its_author(path: str) -> None:
    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        with FileStore(path, timeout=LIMIT_S) as other:
            number = other.register()
        assert store.dead_sessions([number]) == [number]
        told = foreign_request(path, store, lambda author: author._replace(session=number))
        assert told is not None
        assert told[8] == ALONE
        assert not store.check(["foreign"])


OBSTACLES: dict[str, tuple[Callable[[str], None], bool]] = {
    "directory": (os.mkdir, False),
    "FIFO": (os.mkfifo, True),
    "empty file": (lambda path: Path(path).touch(), True),
    "long file": (lambda path: Path(path).write_bytes(bytes(ANSWER_MAX + 1)), True),
    "link of the longest text": (lambda path: os.symlink("A" * 4095, path), True),
    "link of base64 that is cut short": (lambda path: os.symlink("AAAAA", path), True),
    "link of other text": (lambda path: os.symlink("../a/\u00e4", path), True),
    "link of any bytes": (lambda path: os.symlink(b"\xff\xfe", path), True),
}
"""What a name in the directory of the requests may be, and whether a leader removes it."""


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_name_that_is_no_request_keeps_no_leader_from_the_requests_after_it(
    obstacle: str, path: str, batches: list[int]
) -> None:
    make, is_removed = OBSTACLES[obstacle]
    with ExitStack() as stack:
        leader, follower = opened(path, stack, 2)
        access = log_of(leader).access
        assert isinstance(access, NetworkAccess)
        access.piece = 1 << 15  # as with the mount option wsize=32768
        first = station_of(leader).request_path(0.0, "first")
        make(first)
        with HeldLock(path) as held:
            leading = start_thread(leader.set, "led", "1")
            until(lambda: log_of(leader).handle.shared.leader)
            following = start_thread(follower.add, "n", 1)
            until(lambda: len(station_of(leader).requests()) == 2)
            batches.clear()
            held.release()
            leading.join()
            assert following.join() == 1
        assert batches == [2], "both in one write"
        assert os.path.lexists(first) is not is_removed
        if not is_removed:
            os.rmdir(first)


# The files of the host


def test_writers_go_on_alone_where_the_directory_is_removed_meanwhile(path: str) -> None:
    with ExitStack() as stack:
        store, other = opened(path, stack, 2)
        with Seat(store) as seat:
            thread = start_thread(store.add, "n", 1)
            seat.requests(1)
            for folder in ("q", "a"):
                directory = os.path.join(seat.station.directory, folder)
                for name in os.listdir(directory):
                    os.unlink(os.path.join(directory, name))
                os.rmdir(directory)
            os.unlink(os.path.join(seat.station.directory, "seat"))
            os.rmdir(seat.station.directory)
            seat.leave()
            assert thread.join() == 1
        assert other.add("n", 1) == 2
        assert store.add("n", 1) == 3


@pytest.mark.parametrize(
    ("name", "size"), [("mkdir", 1), ("symlink", 1), ("open", LINK_MAX), ("write", LINK_MAX), ("rename", LINK_MAX)]
)
def test_writers_go_on_alone_where_the_files_of_the_host_fail(name: str, size: int, path: str) -> None:
    failed: list[str] = []

    def fails(called: str, _: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        where = arguments[1] if called == "symlink" else arguments[0]
        if called != name:
            return
        where = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.fspath(where)
        if VERSION + "/" in where + "/" and "/node/" in where:
            failed.append(where)
            raise OSError(system.errno.ENOSPC, "no space left on device")

    with ExitStack() as stack:
        if name != "mkdir":
            (store,) = opened(path, stack, 1)
            stack.enter_context(Seat(store))
        with faulty_system() as faulty, faulty.instead(fails):
            store = stack.enter_context(FileStore(path, timeout=LIMIT_S))
            for _ in range(3):
                store.append("k", "x" * size)
            assert store.get("k") == b"x" * 3 * size
    assert failed
    assert left_behind(os.path.dirname(path)) == []


@pytest.mark.parametrize("is_claimed", [False, True])
@pytest.mark.parametrize("size", [1, LINK_MAX])
def test_request_whose_publishing_ends_with_an_error_of_a_handler_is_appended_once(
    size: int, is_claimed: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler has written to a closed pipe: its error has a number, as if it came from the publishing."""
    publish = Station.publish

    def publish_and_fail(station: Station, *given: Any) -> None:
        publish(station, *given)
        if is_claimed:
            seat.leave()
            leader.set("led", "1")
            assert seat.station.requests() == []
        raise BrokenPipeError(system.errno.EPIPE, "broken pipe")

    with ExitStack() as stack:
        leader, author = opened(path, stack, 2)
        with Seat(leader) as seat:
            monkeypatch.setattr(Station, "publish", publish_and_fail)
            author.append("k", b"x" * size)
            assert seat.station.requests() == []
        leader.set("led", "2")
        assert author.get("k") == b"x" * size


@pytest.mark.parametrize("size", [0, 1, LINK_MAX - 200, LINK_MAX, REQUEST_MAX - 200])
def test_request_of_any_length_is_published_whole_and_leaves_nothing(size: int, path: str) -> None:
    with ExitStack() as stack:
        leader, follower = opened(path, stack, 2)
        with Seat(leader) as seat:
            value = bytes(number % 256 for number in range(size))
            thread = start_thread(follower.append, "k", value)
            (request,) = seat.requests(1)
            assert os.path.islink(request) is (size < LINK_MAX)
            assert seat.claim().operation == Operation(record.APPEND, b"k", value).encode()
            seat.leave()
        leader.set("another", "1")
        thread.join()
        assert leader.get("k") == value
        directory = station_of(leader).directory
        assert os.listdir(os.path.join(directory, "q")) == []
        assert not [name for name in os.listdir(os.path.join(directory, "a")) if "new" in name]


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("is_empty", [False, True])
def test_directory_is_listed_unless_its_size_shows_that_it_is_empty(
    shows: bool, is_empty: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ext4 each directory has the size of a block, and on tmpfs it grows with each name."""
    listed: list[str] = []
    listdir = os.listdir

    class Os:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def stat(self, name: str, *, follow_symlinks: bool = True) -> Any:
            size = 40 + 20 * len(listdir(name)) if shows else 4096
            return os.stat_result((*os.stat(name, follow_symlinks=follow_symlinks)[:6], size, 0, 0, 0))

        def listdir(self, name: str) -> list[str]:
            listed.append(os.path.basename(name))
            return listdir(name)

    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        late = Path(station_of(store).request_path(0.0, "late"))
        if not is_empty:
            late.touch()
        monkeypatch.setattr(system, "os", Os())
        station = Station(log_of(store).handle.root.key)
        stack.callback(station.close)
        late.unlink(missing_ok=True)
        listed.clear()
        assert station.requests() == []
        assert listed == ([] if shows and is_empty else ["q"])
        late.touch()
        listed.clear()
        assert station.requests() == [str(late)]
        assert listed == ["q"]
        late.unlink()


def test_size_of_an_empty_directory_that_was_measured_too_large_is_corrected(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request was there when the size was read, and withdrawn before the directory was listed."""
    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        station = station_of(store)
        late = Path(station.request_path(0.0, "late"))
        names = {0: 40, 1: 60}

        class Os:
            def __getattr__(self, name: str) -> Any:
                return getattr(os, name)

            def stat(self, name: str) -> Any:
                return os.stat_result((*os.stat(name)[:6], names[len(os.listdir(name))], 0, 0, 0))

        monkeypatch.setattr(system, "os", Os())
        station._empty_size = 60
        assert station.requests() == []
        late.touch()
        stack.callback(late.unlink)
        assert station.requests() == [str(late)]


def test_directory_of_addresses_that_has_grown_does_not_hide_requests(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ext4 it takes another block once it has had some hundred names, and keeps the block when they are gone."""

    class Os:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def stat(self, name: str, *, follow_symlinks: bool = True) -> Any:
            size = 20480 if name.endswith("/a") else 4096
            return os.stat_result((*os.stat(name, follow_symlinks=follow_symlinks)[:6], size, 0, 0, 0))

    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        monkeypatch.setattr(system, "os", Os())
        station = Station(log_of(store).handle.root.key)
        stack.callback(station.close)
        late = Path(station.request_path(0.0, "late"))
        late.touch()
        stack.callback(late.unlink)
        assert station.requests() == [str(late)]


@pytest.mark.parametrize("obstacle", ["foreign", "file", "link", "absent"])
def test_writers_write_alone_where_the_directory_of_the_host_can_not_be_used(
    obstacle: str, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tmp_path / "node"
    place = node / f"fscoord-{os.geteuid()}"
    if obstacle == "foreign":
        place.mkdir(0o777)
        place.chmod(0o777)
    elif obstacle == "file":
        place.write_text("")
    elif obstacle == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    else:
        node.rmdir()
    with FileStore(path, timeout=LIMIT_S) as store:
        assert [store.add("n", 1) for _ in range(3)] == [1, 2, 3]
        assert not combiner_of(store)._stations


@pytest.mark.parametrize("name", ["outcomes", "combiner"])
def test_writers_write_alone_if_the_code_of_combined_writes_can_not_be_imported(
    name: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is imported with the first store that needs it, when no descriptor may be left."""
    module = f"fscoord._log.shared.combining.{name}"
    usual = system.import_uninterrupted
    refused: list[str] = []

    def import_or_refuse(wanted: str) -> Any:
        if wanted != module:
            return usual(wanted)
        refused.append(wanted)
        raise ImportError("no descriptor is left", name=wanted)

    monkeypatch.setattr(system, "import_uninterrupted", import_or_refuse)
    with FileStore(path, timeout=LIMIT_S) as store:
        assert store.add("n", 1) == 1
        assert store.get("n") == b"1"
    assert refused == [module]
    assert left_behind(os.path.dirname(path)) == []


def test_leader_whose_files_of_the_host_fail_after_the_write_has_written_once(path: str) -> None:
    def fails(name: str, _: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        is_sweep = name == "listdir" and arguments[0].endswith("/a")
        is_look = name == "read" and "/q/" in os.readlink(f"/proc/self/fd/{arguments[0]}")
        if is_sweep or is_look:
            failed.append(name)
            raise OSError(system.errno.EIO, "input/output error")

    failed: list[str] = []
    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        station = station_of(store)
        station._swept_at = -NEVER_S
        late = Path(station.request_path(0.0, "late"))
        late.touch()
        stack.callback(late.unlink)
        faulty = stack.enter_context(faulty_os())
        stack.enter_context(faulty.instead(fails))
        assert store.add("n", 1) == 1
        assert set(failed) == {"listdir", "read"}
        assert store.add("n", 0) == 1


def test_leader_removes_the_address_of_a_dead_process_although_it_has_one_thread(path: str) -> None:
    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        station = station_of(store)
        addresses = Path(station.directory, "a")
        (own,) = os.listdir(addresses)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
            gone.bind(f"{station._way}gone")
        store.set("k", "1")
        assert sorted(os.listdir(addresses)) == [own, "gone"], "it is not time yet"
        station._swept_at -= SWEEP_S
        store.set("k", "2")
        assert os.listdir(addresses) == [own]


@pytest.mark.parametrize("event", ["close", "fork"])
def test_address_of_another_process_outlives_what_comes_between_its_removals(event: str, path: str) -> None:
    """Another thread closes the handle, or a signal handler forks, while a leader removes addresses."""
    children: list[int] = []

    def comes_between(name: str, _: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "listdir" and arguments[0].endswith("/a"):
            if event == "close":
                station.close()
            else:
                children.append(os.fork())

    with ExitStack() as stack:
        store, other = opened(path, stack, 2)
        station = station_of(store)
        station._add_slot(station._free_slots.append)  # as of another thread
        station._swept_at -= SWEEP_S
        pid = os.getpid()
        try:
            with faulty_os() as faulty, faulty.instead(comes_between):
                store.set("k", "1")
        finally:
            if os.getpid() != pid:
                os._exit(0)
        for child in children:
            os.waitpid(child, 0)
        assert len(children) == (event == "fork")
        assert {slot.name for slot in station_of(other)._slots} <= set(os.listdir(Path(station.directory, "a")))


def test_thread_that_gets_no_address_leaves_no_directory(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as its error is kept, so is the address. The last other thread must not wait for that."""

    def fail(*_: Any) -> None:
        raise OSError(system.errno.EMFILE, "too many open files")

    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        with HeldLock(path) as held:
            leading = start_thread(store.add, "n", 1)
            until(lambda: log_of(store).handle.shared.leader)
            monkeypatch.setattr(Slot, "open", fail)
            following = start_thread(store.add, "n", 1)
            until(lambda: not combiner_of(store)._stations)
            held.release()
            assert {leading.join(), following.join()} == {1, 2}
        assert left_behind(os.path.dirname(path)) == []


def test_station_that_is_closed_uses_no_file_that_has_got_its_descriptors(path: str, tmp_path: Path) -> None:
    """Another thread closes it, and opens files, while a writer is about to take a slot, or leads."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("content")
    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        station = Station(log_of(store).handle.root.key)
        numbers = int(os.path.basename(station._way.rstrip("/"))), station._seat_fd
        station.close()
        for number, name in zip(numbers, (other, other / "file"), strict=True):
            fd = os.open(name, os.O_RDONLY if name == other else os.O_RDWR)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
            stack.callback(os.close, number)
        for call in (partial(station.take_slot, []), partial(station.show, 1, 1), station.seat_state):
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno in (system.errno.EBADF, system.errno.ENOENT)
        assert os.listdir(other) == ["file"]
        assert (other / "file").read_text() == "content"


def test_station_that_opens_while_another_thread_closes_the_handle_is_closed_too(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(path, timeout=LIMIT_S)

    def open_late(key: Any) -> Station:
        station = Station(key)
        start_thread(store.close).join()
        return station

    monkeypatch.setattr(combiner, "Station", open_late)
    operation = Operation(record.SET, b"k", b"1")
    assert combiner_of(store)._station_for(operation, system.time.monotonic()) is None
    assert left_behind(os.path.dirname(path)) == []


def test_author_that_reads_under_a_lock_by_now_writes_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mount has refused a direct read. Where reads lag, a follower would not see what it was told."""
    published: list[Any] = []
    publish = Station.publish
    monkeypatch.setattr(Station, "publish", lambda *given: published.append(given) or publish(*given))
    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        with Seat(store):
            access = log_of(store).access
            assert isinstance(access, NetworkAccess)
            access._set_mode(mount.LOCKED)
            assert store.add("n", 1) == 1
    assert published == []


# A write that fails


def test_batch_that_meets_a_full_disk_at_any_byte_counts_as_far_as_it_is_whole(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader reports no result, and each author finds out the fate of its own record."""
    step = random.randrange(5, 9)
    print(f"step {step}")
    is_full: list[int] = []

    def fills(called: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if called != "write" or not is_full or os.readlink(f"/proc/self/fd/{arguments[0]}") != path:
            return
        if is_full[0] < len(arguments[1]):
            real(arguments[0], arguments[1][: is_full.pop()])
            raise OSError(system.errno.ENOSPC, "no space left on device")

    room = 0
    with ExitStack() as stack:
        leader, *others = opened(path, stack, 3)
        faulty = stack.enter_context(faulty_os())
        stack.enter_context(faulty.instead(fills))
        total = 0
        while True:
            with HeldLock(path) as held:
                leading = start_thread(leader.set, "led", "x")
                until(lambda: log_of(leader).handle.shared.leader)
                threads = [start_thread(store.add, "n", 1) for store in others]
                until(lambda: len(station_of(leader).requests()) == 2)
                is_full.append(room)
                held.release()
                try:
                    leading.join()
                    is_done = True
                except StoreUnavailableError:
                    is_done = False
                assert sorted(thread.join() for thread in threads) == [total + 1, total + 2]
            is_full.clear()
            total += 2
            assert leader.add("n", 0) == total, f"{room} bytes"
            with FileStore(path, timeout=LIMIT_S) as fresh:
                assert fresh.get("n") == b"%d" % total
            if is_done:
                break
            room += step
        assert room > 90
    written = [(writer, time) for *_, writer, time in read_newest(Path(path)).records]
    assert len(set(written)) == len(written), "no two records of a session have the same time"


def test_close_of_a_handle_ends_the_write_that_waits_for_an_answer(path: str) -> None:
    with ExitStack() as stack:
        (store,) = opened(path, stack, 1)
        with Seat(store) as seat:
            thread = start_thread(store.add, "n", 1)
            seat.requests(1)
            store.close()
            with pytest.raises(Exception, match="is closed"):
                thread.join()
            assert seat.station.requests() == []


def calls_on(path: str, made: list[str]) -> Callable[..., None]:
    """Return what notes the writes and syncs of the log in `made`."""

    def see(name: str, _: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name in ("write", "fdatasync") and os.readlink(f"/proc/self/fd/{arguments[0]}") == path:
            made.append(name)

    return see


def test_batch_in_a_durable_log_is_synced_record_by_record_before_anybody_is_told(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    tell = Station.tell

    def note_and_tell(station: Station, *given: Any) -> bool:
        made.append("tell")
        return tell(station, *given)

    monkeypatch.setattr(Station, "tell", note_and_tell)
    with ExitStack() as stack:
        stack.enter_context(FileStore(path, timeout=LIMIT_S, durable=True))
        stores = opened(path, stack, 4)
        with HeldLock(path) as held:
            threads = [start_thread(store.add, "n", 1) for store in stores]
            until(lambda: len(station_of(stores[0]).requests()) == len(stores) - 1)
            faulty = stack.enter_context(faulty_os())
            stack.enter_context(faulty.instead(calls_on(path, made)))
            made.clear()
            held.release()
            assert sorted(thread.join() for thread in threads) == [1, 2, 3, 4]
    of_batch = made[made.index("write") :]  # what was read is synced before
    assert of_batch[:8] == ["write", "fdatasync"] * 4
    assert of_batch[8:11] == ["tell"] * 3


def test_batch_in_a_durable_log_is_short(path: str, monkeypatch: pytest.MonkeyPatch, batches: list[int]) -> None:
    """Its leader syncs each record, and shows no life meanwhile."""
    monkeypatch.setattr(batch, "SYNCED_MAX", 3)
    with ExitStack() as stack:
        stack.enter_context(FileStore(path, timeout=LIMIT_S, durable=True))
        stores = opened(path, stack, 8)
        with HeldLock(path) as held:
            threads = [start_thread(store.add, "n", 1) for store in stores]
            until(lambda: len(station_of(stores[0]).requests()) == len(stores) - 1)
            batches.clear()
            held.release()
            assert sorted(thread.join() for thread in threads) == list(range(1, 9))
    assert batches[0] == 4, "its own record, and three more"


def test_author_does_not_return_what_it_read_in_a_durable_log_and_could_not_sync(path: str) -> None:
    def fails(name: str, _: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "fdatasync" and os.readlink(f"/proc/self/fd/{arguments[0]}") == path:
            raise OSError(system.errno.EIO, "input/output error")

    with ExitStack() as stack:
        stack.enter_context(FileStore(path, timeout=LIMIT_S, durable=True))
        leader, author = opened(path, stack, 2)
        author.set_timeout(NEVER_S)
        with Seat(leader) as seat:
            thread = start_thread(author.add, "n", 1)
            request = seat.claim()
            append_for(leader, request)
            faulty = stack.enter_context(faulty_os())
            stack.enter_context(faulty.instead(fails))
            seat.leave()
            with pytest.raises(StoreUnavailableError) as caught:
                thread.join()
            assert caught.value.maybe_applied


def test_arrival_in_a_durable_log_is_written_and_synced_record_by_record(path: str) -> None:
    """Of a batch that lost a sector in its middle, a sound record would follow, which is damage."""
    made: list[str] = []
    with FileStore(path, rank=0, durable=True, timeout=LIMIT_S) as store:
        store.set("registered", "1")
        wait_in_vain(store)
        with faulty_os() as faulty, faulty.instead(calls_on(path, made)):
            barrier(store, 1, "b", LIMIT_S, 0)
    assert made == ["write", "fdatasync"] * 2


def fail_to_remove_requests(called: str, _: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if called == "unlink" and "/q/" in os.fspath(arguments[0]):
        raise OSError(system.errno.EIO, "input/output error")


def test_request_that_can_not_be_withdrawn_may_still_be_applied(path: str) -> None:
    """If its author wrote alone, a later leader could claim the request, and append its record a second time."""
    with ExitStack() as stack:
        store, other = opened(path, stack, 2)
        with Seat(store) as seat:
            store.set_timeout(0.005)
            refused = pytest.raises(StoreUnavailableError, match=r"can't be withdrawn.*input/output error")
            with faulty_os() as faulty, faulty.instead(fail_to_remove_requests), refused as caught:
                store.add("n", 1)
            assert caught.value.maybe_applied
            assert caught.value.errno == system.errno.EIO
            (request,) = seat.station.requests()
        os.unlink(request)
        assert other.add("n", 1) == 1


# Answers as bytes, and the times of records


def test_answer_and_seat_are_the_same_when_they_are_decoded() -> None:
    answer = Answer(2**62, DONE, b"result")
    assert Answer.decode(answer.encode()) == answer
    assert Answer.decode(b"short") is None
    assert decode_seat(encode_seat(WAITING, 2**64 + 5)) == (WAITING, 5)
    assert decode_seat(b"") == (0, 0)


# The watch


@pytest.mark.parametrize(
    ("last", "is_certain", "is_found"),
    [(0, True, False), (9, True, False), (10, True, True), (11, True, True), (12, False, False)],
    ids=["never", "before", "then", "its second record", "later"],
)
def test_record_before_a_snapshot_is_found_by_the_last_time_of_its_session(
    last: int, is_certain: bool, is_found: bool
) -> None:
    table = SessionTable()
    outcomes = Outcomes(KeyValueState(), table)
    watch = outcomes.open((1, 10), lambda _: None, 3)
    outcomes.reset()
    table.reset(is_first=False)
    outcomes.apply([(record.SET, b"k", b"of the snapshot", 2, 99)])
    assert not outcomes.settle(watch, 4), "nothing is known before the times are read"
    outcomes.apply([(record.SET, b"k", b"that follows it in the same read", 1, 3)])
    table.set_last_time(1, last)
    assert outcomes.settle(watch, 4) is is_certain
    assert watch.is_found is is_found


# The times of records


class ClockThatSteps:
    """A clock that steps back every few readings."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time_ns(self) -> int:
        number = next(self._numbers)
        return 10**18 + number - (number % 7) * 1000


def test_times_of_a_session_differ_if_the_clock_steps_back_and_threads_race(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "time", ClockThatSteps())
    with FileStore(path, timeout=30) as store:
        times: list[list[int]] = [[] for _ in range(4)]
        writer = log_of(store).writer

        def draw(found: list[int]) -> None:
            for number in range(500):
                found.append(writer.next_time())
                if number % 50 == 0:
                    store.add("n", 1)

        threads = [start_thread(lambda found=found: draw(found)) for found in times]
        for thread in threads:
            thread.join()
        used = [round(entry.time * 1e9) for entry in dump(path)]
        everything = sorted(each for found in times for each in found)
    assert len(set(everything)) == len(everything) == 2000
    assert min(b - a for a, b in itertools.pairwise(everything)) >= 2, "the second record of an arrival needs a time"
    assert len(used) > 40


PARTICIPANT = Session("host", 1, rank=7, world_size=3)


def test_last_time_of_a_snapshot_does_not_replace_a_later_one() -> None:
    table = SessionTable()
    table.times[3] = 200
    table.set_last_time(3, 100)
    table.set_last_time(4, 100)
    assert table.times == {3: 200, 4: 100}


def test_failure_says_which_participant_and_when() -> None:
    at = (3 * 3600 + 4 * 60 + 5) * 10**9
    assert str(Failure(PARTICIPANT, "KeyError", time_ns=at)) == "rank 7 (host:1) left by KeyError at 03:04:05 UTC"
    assert str(Failure(Session("h", 2), time_ns=at)) == "h:2 was found dead at 03:04:05 UTC"
    found = Failure.decode(Failure(PARTICIPANT, "KeyError", is_previous=True).encode(), 9)
    assert found == Failure(PARTICIPANT, "KeyError", is_previous=True, time_ns=9)
