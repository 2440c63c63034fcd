"""The witness itself: it rejects every history that a search rejects, and accepts those of a right store."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from histories.worker import KeepingOs
from linear import models
from linear.checker import LINEARIZABLE, Call, check
from linear.witness import Done, Places, mistakes, read_generations, unclaimed
from support.internals import system

from fscoord import FileStore

pytestmark = pytest.mark.once

KEY = b"k"
KINDS = {"value": ("set", "get"), "counter": ("add", "get"), "queue": ("push", "pop")}
MODELS = {"value": (models.value, b"first"), "counter": (models.value, b"0"), "queue": (models.queue, ())}
Record = tuple[str, bytes, bytes]


def draw(rng: random.Random, kind: str, size: int) -> tuple[list[Record], list[Done]]:
    """The records of a right store, and its calls, which overlap at random; of each the effect is at its moment."""
    state = MODELS[kind][1]
    records: list[Record] = [] if kind == "queue" else [("S", KEY, state)]
    calls = []
    for moment in range(1, size + 1):
        what = rng.choice(KINDS[kind])
        result = b"%d" % moment
        if what == "get":
            result = state
        elif what == "pop":
            result = state[0] if state else models.EMPTY.encode()
            if state:
                records.append(("O", KEY, b""))
                state = state[1:]
        elif what == "add":
            state = result = b"%d" % (int(state) + 1)
            records.append(("I", KEY, result))
        elif what == "set":
            state = result
            records.append(("S", KEY, result))
        else:
            state = (*state, result)
            records.append(("P", KEY, result))
        start, end = (int(1000 * (moment + sign * 3 * rng.random())) for sign in (-1, 1))
        calls.append(Done(what, start, end, result))
    return records, calls


def lie(rng: random.Random, calls: list[Done]) -> list[Done]:
    """Let some calls have been told what others were, or at another time."""
    lies = list(calls)
    for number, call in enumerate(calls):
        if rng.random() < 0.2:
            others = [other for other in calls if other.what == call.what]
            lies[number] = rng.choice(others)._replace(start=call.start, end=call.end)
        elif rng.random() < 0.1:
            shift = rng.randrange(-6000, 6000)
            lies[number] = call._replace(start=call.start + shift, end=call.end + shift)
    return lies


def search(kind: str, calls: list[Done]) -> str:
    """Let the search judge the same calls."""
    names = {"get": lambda _: ("read",), "set": lambda r: ("set", r), "add": lambda _: ("add", 1),
             "push": lambda r: ("push", r), "pop": lambda _: ("pop",)}  # fmt: skip

    def result(call: Done) -> object:
        if call.what in ("set", "push"):
            return None
        if call.what == "add":
            return int(call.result)
        return models.EMPTY if call.result == models.EMPTY.encode() else call.result

    searched = [Call(call.start, call.end, names[call.what](call.result), result(call)) for call in calls]
    return check(searched, *MODELS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_history_of_a_right_store_passes_the_witness(kind: str, rng: random.Random) -> None:
    for size in (1, 10, 100, 1000):
        records, calls = draw(rng, kind, size)
        places = Places(records)
        assert mistakes(KEY, calls, places) == []
        assert len(unclaimed({KEY: calls}, places)) == (kind != "queue"), "the first value is nobody's"


@pytest.mark.parametrize("kind", KINDS)
def test_history_that_a_search_finds_wrong_does_not_pass_the_witness(
    kind: str, rng: random.Random, scale: Callable[[int], int]
) -> None:
    """The other way round it may be: a search may find another order than that of the log."""
    wrong, first = 0, int(kind != "queue")
    for _ in range(scale(300)):
        records, calls = draw(rng, kind, 12)
        lies = lie(rng, calls)
        verdict = search(kind, lies)
        if verdict != LINEARIZABLE:
            wrong += 1
            places = Places(records)
            assert mistakes(KEY, lies, places) or unclaimed({KEY: lies}, places)[first:], (verdict, lies)
    assert wrong > scale(300) // 10, "hardly any lie was one"


def test_record_that_is_in_the_log_twice_is_found() -> None:
    with pytest.raises(AssertionError, match="twice in the log"):
        Places([("S", KEY, b"1"), ("S", KEY, b"1")])


def test_counter_that_skips_is_found() -> None:
    with pytest.raises(AssertionError):
        Places([("I", KEY, b"1"), ("I", KEY, b"3")])


def test_call_that_is_not_in_the_log_is_found() -> None:
    assert "not in the log" in mistakes(KEY, [Done("set", 1, 2, b"x")], Places([]))[0]


def test_effect_that_two_calls_had_is_found() -> None:
    calls = [Done("set", 1, 9, b"1"), Done("set", 2, 8, b"1")]
    assert "two calls" in mistakes(KEY, calls, Places([("S", KEY, b"1")]))[0]


def test_queue_that_was_not_empty_is_found() -> None:
    places = Places([("P", KEY, b"1"), ("O", KEY, b"")])
    pushed, popped = Done("push", 1, 2, b"1"), Done("pop", 5, 6, b"1")
    empty = models.EMPTY.encode()
    assert mistakes(KEY, [pushed, Done("pop", 3, 4, empty), popped], places)
    assert not mistakes(KEY, [pushed, Done("pop", 1, 4, empty), popped], places)
    assert not mistakes(KEY, [pushed, Done("pop", 3, 7, empty), popped], places)


def test_records_of_all_generations_are_read_and_no_snapshot_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = tmp_path / "log", tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr(system, "os", KeepingOs(str(path), str(kept)))
    with FileStore(path) as store:
        for number in range(5):
            store.set("k", str(number))
            store.queue_push("q", str(number))
            store.compact()
        store.set("k", "last")
    records = [record for record in read_generations(path, kept) if record[0] in "SP"]
    expected = [(kind, key, b"%d" % n) for n in range(5) for kind, key in (("S", b"k"), ("P", b"q"))]
    assert records == [*expected, ("S", b"k", b"last")]
    assert len(list(kept.iterdir())) == 4
