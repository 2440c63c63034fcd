"""The checker itself: against trying every order, and on stores that are wrong on purpose."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Hashable
from typing import Any

import pytest
from linear import models
from linear.checker import BROKEN, LINEARIZABLE, UNDECIDED, UNKNOWN, Call, Model, check, check_each

pytestmark = pytest.mark.once


def possible(calls: list[Call], model: Model, state: Hashable) -> bool:
    """Try every order of every choice of the unreturned calls."""
    returned = [call for call in calls if call.end != math.inf]
    unreturned = [call for call in calls if call.end == math.inf]
    return any(
        all(first.start <= later.end for first, later in itertools.combinations(order, 2)) and fits(order, model, state)
        for size in range(len(unreturned) + 1)
        for chosen in itertools.combinations(unreturned, size)
        for order in itertools.permutations([*returned, *chosen])
    )


def fits(order: tuple[Call, ...], model: Model, state: Hashable) -> bool:
    for call in order:
        state, result = model(state, call.operation)
        if call.result is not UNKNOWN and call.result != result:
            return False
    return True


def draw_value(rng: random.Random) -> tuple[Any, ...]:
    text = rng.choice([b"1", b"2"])
    return rng.choice(
        [
            ("read",), ("set", text), ("add", 1), ("compare_set", rng.choice([b"", b"1", b"2"]), text),
            ("delete_key",), ("append", text), ("create", text), ("take",), ("delete_if", text),
        ]
    )  # fmt: skip


def draw_queue(rng: random.Random) -> tuple[Any, ...]:
    return rng.choice([("push", rng.choice([b"1", b"2"])), ("pop",), ("pop",), ("len",)])


def draw_counter(rng: random.Random) -> tuple[Any, ...]:
    return rng.choice([("read",), ("add", 1), ("add", 1)])


def draw_lock(rng: random.Random) -> tuple[Any, ...]:
    who = rng.choice([b"x", b"y"])
    return rng.choice([("acquire", who, rng.randrange(1, 5)), ("release", who), ("die", who)])


KINDS = {
    "value": (models.value, None, draw_value),
    "counter": (models.value, None, draw_counter),
    "queue": (models.queue, (), draw_queue),
    "lock": (models.lock, (None, 0), draw_lock),
}


def draw_history(rng: random.Random, kind: str, size: int, lies: bool) -> list[Call]:
    """Results of a right store for calls that overlap at random; with `lies` some results are exchanged."""
    model, state, draw = KINDS[kind]
    calls = []
    for moment in range(size):
        operation = draw(rng)
        state, result = model(state, operation)
        start, end = moment - 3 * rng.random(), moment + 3 * rng.random()
        if rng.random() < 0.15:
            end, result = math.inf, UNKNOWN
        calls.append(Call(start, end, operation, result))
    if lies:
        for i, call in enumerate(calls):
            if rng.random() < 0.3:
                calls[i] = call._replace(result=rng.choice(calls).result)
        calls = [c._replace(result=UNKNOWN) if c.end == math.inf else c for c in calls]
    rng.shuffle(calls)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_checker_agrees_with_trying_every_order(kind: str, rng: random.Random, scale: Callable[[int], int]) -> None:
    model, state, _ = KINDS[kind]
    seen = {True: 0, False: 0}
    for _ in range(scale(300)):
        calls = draw_history(rng, kind, 5, lies=True)
        expected = possible(calls, model, state)
        assert check(calls, model, state) == (LINEARIZABLE if expected else BROKEN), calls
        seen[expected] += 1
    assert min(seen.values()) > scale(300) // 20, f"drawn one-sidedly: {seen}"


@pytest.mark.parametrize("kind", KINDS)
def test_history_of_a_right_store_is_linearizable(kind: str, rng: random.Random) -> None:
    model, state, _ = KINDS[kind]
    for size in (1, 10, 100, 1000):
        assert check(draw_history(rng, kind, size, lies=False), model, state) == LINEARIZABLE


def read(start: float, end: float, result: bytes | None) -> Call:
    return Call(start, end, ("read",), result)


def test_stale_read_is_found() -> None:
    write = Call(0, 1, ("set", b"1"), None)
    assert check([write, read(2, 3, None)], models.value, None) == BROKEN
    assert check([write, read(1, 3, None)], models.value, None) == LINEARIZABLE  # at one instant: in either order
    assert check([write, read(0.5, 3, None), read(4, 5, b"1")], models.value, None) == LINEARIZABLE


def test_value_that_comes_and_goes_is_found() -> None:
    write = Call(0, 9, ("set", b"1"), None)
    assert check([write, read(1, 2, b"1"), read(3, 4, None)], models.value, None) == BROKEN
    assert check([write, read(1, 2, None), read(3, 4, b"1")], models.value, None) == LINEARIZABLE


def test_call_that_never_returned_may_take_effect_late_or_never_but_once() -> None:
    lost = Call(0, math.inf, ("add", 1), UNKNOWN)
    assert check([lost, read(1, 2, None), read(3, 4, b"1")], models.value, None) == LINEARIZABLE
    assert check([lost, read(1, 2, None)], models.value, None) == LINEARIZABLE
    assert check([lost, read(1, 2, b"1"), read(3, 4, b"2")], models.value, None) == BROKEN
    assert check([lost, read(-2, -1, b"1")], models.value, None) == BROKEN


def test_compare_and_set_that_two_won_is_found() -> None:
    won = [Call(0, 5, ("compare_set", b"", name), name) for name in (b"x", b"y")]
    assert check(won, models.value, None) == BROKEN
    lost = [won[0], Call(0, 5, ("compare_set", b"", b"y"), b"x")]
    assert check(lost, models.value, None) == LINEARIZABLE


def test_queue_item_taken_twice_lost_or_out_of_turn_is_found() -> None:
    pushes = [Call(i, i + 0.5, ("push", b"%d" % i), None) for i in range(2)]
    twice = [Call(3, 4, ("pop",), b"0"), Call(3, 4, ("pop",), b"0")]
    vanished = [Call(3, 4, ("pop",), b"0"), Call(5, 6, ("pop",), models.EMPTY)]
    out_of_turn = [Call(3, 4, ("pop",), b"1")]
    for wrong in (twice, vanished, out_of_turn):
        assert check(pushes + wrong, models.queue, ()) == BROKEN
    right = [Call(3, 4, ("pop",), b"1"), Call(3, 4, ("pop",), b"0"), Call(5, 6, ("pop",), models.EMPTY)]
    assert check(pushes + right, models.queue, ()) == LINEARIZABLE


def test_lock_held_by_two_token_repeated_and_release_too_many_are_found() -> None:
    def acquire(start: float, end: float, who: str, token: Any) -> Call:
        return Call(start, end, ("acquire", who), token)

    def release(start: float, end: float, who: str, result: Any = True) -> Call:
        return Call(start, end, ("release", who), result)

    first = [acquire(0, 1, "a", 1), release(4, 5, "a")]
    assert check([*first, acquire(2, 6, "b", 2)], models.counting_lock, (0, "")) == LINEARIZABLE
    assert check([*first, acquire(2, 3, "b", 2)], models.counting_lock, (0, "")) == BROKEN
    assert check([*first, acquire(2, 6, "b", 1)], models.counting_lock, (0, "")) == BROKEN
    assert check([*first, release(6, 7, "a")], models.counting_lock, (0, "")) == BROKEN
    dead = [acquire(0, 1, "a", 1), release(2, math.inf, "a", UNKNOWN)]
    assert check([*dead, acquire(1, 4, "b", 2)], models.counting_lock, (0, "")) == LINEARIZABLE
    assert check([*dead, acquire(1, 1.5, "b", 2)], models.counting_lock, (0, "")) == BROKEN


def test_write_that_is_taken_after_a_newer_one_is_found() -> None:
    newer, older = Call(0, 1, ("write", 2), True), Call(2, 3, ("write", 1), True)
    assert check([newer, older], models.fenced, 0) == BROKEN
    assert check([newer, older._replace(result=False)], models.fenced, 0) == LINEARIZABLE
    assert check([newer, older._replace(start=0.5)], models.fenced, 0) == LINEARIZABLE


def test_history_too_hard_for_the_budget_is_undecided() -> None:
    calls = [Call(0, 10, ("add", 1 << i), 0) for i in range(12)]  # no order gives 0, and every subset another state
    assert check(calls, models.value, None) == BROKEN
    calls = [Call(0, 10, ("append", b"%d" % i), None) for i in range(6)] + [read(11, 12, b"none of these")]
    assert check(calls, models.value, None, budget=1000) == UNDECIDED
    assert check(calls, models.value, None) == BROKEN


def test_keys_are_judged_separately() -> None:
    calls = [("x", Call(0, 1, ("set", b"1"), None)), ("y", Call(2, 3, ("read",), b"1"))]
    assert check_each(calls, lambda _: (models.value, None)) == {"x": LINEARIZABLE, "y": BROKEN}


class Wrong:
    """A store that makes `mistake` at every seventh operation; it shows only between two processes."""

    def __init__(self, mistake: str) -> None:
        self.mistake, self.state, self.before, self.count = mistake, None, None, 0

    def do(self, operation: tuple[Any, ...]) -> Any:
        self.count += 1
        slips = self.count % 7 == 0
        name = operation[0]
        if slips and self.mistake == "reads what was before" and name == "read":
            return self.before
        following, result = models.value(self.state, operation)
        if slips and self.mistake == "loses an acknowledged write" and name in ("set", "append", "add"):
            return result
        if slips and self.mistake == "counts twice" and name == "add":
            following = b"%d" % (result + 1)
        if following != self.state:
            self.before, self.state = self.state, following
        return result


@pytest.mark.parametrize("mistake", ["reads what was before", "loses an acknowledged write", "counts twice", ""])
def test_store_with_a_mistake_is_detected_and_one_without_is_not(mistake: str, rng: random.Random) -> None:
    verdicts = set()
    for _ in range(5):
        store, calls = Wrong(mistake), []
        for moment in range(400):  # of 200, one history in 10,000 has no slip that shows
            operation = rng.choice([("read",), ("add", 1), ("add", 1), ("read",), ("set", b"%d" % moment)])
            calls.append(Call(moment - rng.random(), moment + rng.random(), operation, store.do(operation)))
        verdicts.add(check(calls, models.value, None))
    assert verdicts == {BROKEN if mistake else LINEARIZABLE}
