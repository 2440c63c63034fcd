"""Reports by clocks that differ: no call counts as shorter than it was, and no false report is accepted."""

from __future__ import annotations

import pytest
from support.told import Ahead, Witnessed, errors, judge, take_history

WRITER = [(1, 0, "v1", ("set", b"new"), 1000), (1, 0, "done", None, 2000)]
WITNESS = [b"1 0 set 1 1000 2000 1.0"]
RECORDS = [("M", b"", b""), ("S", b"v1", b"first.1"), ("S", b"v1", b"1.0")]
SURE, FAST, SLOW = (500, 500), (400, 600), (-600, -400)
"""How far the reader's clock is ahead: just that, about as much, and about as much behind."""


def reader(start: int, end: int, result: bytes | None) -> list[tuple[object, ...]]:
    return [(2, 0, "v1", ("read",), start), (2, 0, "done", result, end)]


@pytest.mark.parametrize(
    ("start", "end", "ahead", "is_right"),
    [
        (3100, 3200, SURE, False),
        (3100, 3200, FAST, False),
        (2700, 2800, FAST, False),
        (2450, 2550, FAST, True),
        (2550, 2650, FAST, True),
        (2550, 2650, SURE, False),
        (1100, 1200, SLOW, True),
        (1500, 1600, SLOW, True),
        (1650, 1700, SLOW, False),
    ],
)
def test_read_of_an_old_value_is_right_if_it_may_begin_before_the_write_ends(
    start: int, end: int, ahead: Ahead, is_right: bool
) -> None:
    calls = take_history(WRITER) + take_history(reader(start, end, None), ahead)
    witnessed = Witnessed()
    witnessed.take(1, WITNESS, was_killed=False)
    witnessed.take(2, [b"2 0 get 1 %d %d first.1" % (start, end)], was_killed=False, ahead=ahead)
    if is_right:
        judge(calls, ["v1"])
        assert witnessed.compare(RECORDS) == 2
    else:
        with pytest.raises(AssertionError, match="not linearizable"):
            judge(calls, ["v1"])
        with pytest.raises(AssertionError, match="began after"):
            witnessed.compare(RECORDS)


@pytest.mark.parametrize("records", [RECORDS[:2], RECORDS])
def test_call_that_may_have_had_an_effect_is_right_with_and_without_it(records: list[tuple[str, bytes, bytes]]) -> None:
    witnessed = Witnessed()
    witnessed.take(1, [b"1 0 maybe 1 1000 2000 gone(1)"], was_killed=False)
    assert witnessed.compare(records) == 0
    assert witnessed.undecided == ["gone(1)"]


def test_effect_that_belongs_to_no_undecided_call_is_found() -> None:
    witnessed = Witnessed()
    witnessed.take(1, [b"1 1 maybe 1 1000 2000 gone(1)"], was_killed=False)
    with pytest.raises(AssertionError, match="nobody says to have written"):
        witnessed.compare(RECORDS)
    counted = Witnessed()
    counted.take(1, [b"1 0 maybe 1 1000 2000 gone(1)"], was_killed=False)
    with pytest.raises(AssertionError, match="1 are undecided"):
        counted.compare([*RECORDS, ("I", b"c1", b"1")])


def test_error_that_a_full_disk_does_not_explain_is_found() -> None:
    full, damaged = "StoreUnavailableError('... File too large')", "CorruptLogError('... is damaged')"
    told = [(1, 0, "v1", ("read",), 1), (1, 0, "never", damaged), (1, 1, "v1", ("read",), 2), (1, 1, "maybe", full)]
    assert errors(told) == [damaged]


def test_process_that_failed_fails_the_history() -> None:
    with pytest.raises(AssertionError, match="process 1 at call 0: it is so"):
        take_history([(1, 0, "v1", ("read",), 1), (1, 0, "failed", "it is so")])
