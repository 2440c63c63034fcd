"""Requests and answers as bytes, the watch for records, and the times that name them."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from support.combining import share
from support.internals import log_of
from support.places import start_thread

from fscoord import FileStore
from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.session_table import SessionTable
from fscoord._log.shared.combining.outcomes import Outcomes
from fscoord._log.shared.combining.request import (
    DONE,
    WAITING,
    Answer,
    Author,
    decode_request,
    decode_seat,
    encode_request,
    encode_seat,
)
from fscoord._runtime import system
from fscoord.inspect import dump
from fscoord.stores.file.replay import KeyValueState

SESSION = Session("host", 1, 1, b"b" * 16)
AUTHOR = Author(7, b"x" * 16, 3)


def test_request_is_the_same_when_it_is_decoded() -> None:
    request = decode_request(encode_request(AUTHOR, 123, "1-ab", b"operation"))
    assert request is not None
    assert (request.session, request.time, request.address, request.operation) == (7, 123, "1-ab", b"operation")
    assert request.is_of(AUTHOR)
    for other in (
        AUTHOR._replace(session=8),
        AUTHOR._replace(alive_id=bytes(16)),
        AUTHOR._replace(run=4),
    ):
        assert not request.is_of(other)


def test_request_with_any_bit_flipped_or_byte_missing_is_none() -> None:
    whole = encode_request(AUTHOR, 123, "1-ab", b"operation")
    for number in range(len(whole) * 8):
        flipped = bytearray(whole)
        flipped[number // 8] ^= 1 << number % 8
        assert decode_request(bytes(flipped)) is None
    assert all(decode_request(whole[:size]) is None for size in range(len(whole)))


def test_answer_and_seat_are_the_same_when_they_are_decoded() -> None:
    answer = Answer(2**62, DONE, b"result")
    assert Answer.decode(answer.encode()) == answer
    assert Answer.decode(b"short") is None
    assert decode_seat(encode_seat(WAITING, 2**64 + 5)) == (WAITING, 5)
    assert decode_seat(b"") == (0, 0)


# The watch


def test_record_with_an_open_token_is_noted_right_before_it_is_applied() -> None:
    state = KeyValueState()
    outcomes = Outcomes(state, SessionTable())
    records: list[Any] = [(record.SET, b"k", b"%d" % number, 1, number) for number in range(5)]
    watches = [outcomes.open((1, number), lambda _: state.values.get(b"k"), 0) for number in (1, 4)]
    other = outcomes.open((2, 2), lambda _: None, 0)
    outcomes.apply(records)
    assert [watch.noted for watch in watches] == [b"0", b"3"]
    assert [watch.is_found for watch in (*watches, other)] == [True, True, False]
    assert state.values[b"k"] == b"4"


def test_missing_record_is_certain_unless_the_state_began_with_a_later_snapshot() -> None:
    outcomes = Outcomes(KeyValueState(), SessionTable())
    watch = outcomes.open((1, 1), lambda _: None, 3)
    assert outcomes.settle(watch, 3)
    assert outcomes.settle(watch, 4), "the handle has read on without a gap"
    outcomes.reset()
    assert outcomes.settle(watch, 3), "the generation is read again from its first record"
    assert not outcomes.settle(watch, 4), "this snapshot has no times"
    watch.is_found = True
    assert outcomes.settle(watch, 4)


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


def test_snapshot_keeps_the_last_times_of_its_sessions_if_all_are_known() -> None:
    table = SessionTable()
    outcomes = Outcomes(KeyValueState(), table)
    for number in (1, 2, 3):
        table.add(number, SESSION)
    outcomes.apply([(record.SET, b"k", b"", writer, time) for writer, time in [(1, 5), (2, 9), (2, 7)]])
    assert table.last_times() == [], "nobody appends for the handles of this log"
    table.keeps_times = True
    assert table.last_times() == [(1, 5), (2, 9), (3, 0)]
    table.add_death(1, 10)
    table.forget_dead()
    assert table.last_times() == [(2, 9), (3, 0)]
    assert 1 not in table.times
    table.reset(is_first=False)
    table.add(2, SESSION)
    outcomes.apply([(record.SET, b"k", b"", 2, 11)])
    assert table.last_times() == [], "session 2 may have written before a snapshot that has no times"


# The times of records


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    share(str(tmp_path), monkeypatch)
    return str(tmp_path / "log")


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


def test_record_of_an_older_clock_is_still_later_than_the_one_before(path: str) -> None:
    with FileStore(path, timeout=30) as store:
        writer = log_of(store).writer
        first = writer.next_time()
        assert abs(first - time.time_ns()) < 60e9
        assert writer.next_time() > first
