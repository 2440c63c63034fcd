"""Operations as data: what a draft decides for a batch is what the memory store does one by one."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from fscoord import HashStore, LimitExceededError, QueueEmptyError, StoreUnavailableError
from fscoord._arguments import CounterRangeError, NotACounterError, Transaction
from fscoord._log.files.spill import Spilled
from fscoord._log.format import record
from fscoord._log.handle import NeedsLock
from fscoord._waiting.wait import NOT_YET
from fscoord.stores.file import operations
from fscoord.stores.file.operations import (
    ABSENT,
    EQUALS,
    PRESENT,
    RANKS,
    RESULT_MAX,
    Arrived,
    Draft,
    KeyValueDecider,
    MustWriteAlone,
    Operation,
)
from fscoord.stores.file.replay import KeyValueState

REFUSED = "refused"
BATCHES, LONGEST = 400, 12


def no_fetch(value: Spilled) -> bytes:
    raise AssertionError(f"{value} is read")


def draft_of(state: KeyValueState) -> Draft:
    return Draft(state, no_fetch, "/log")


def applied(state: KeyValueState, records: list[tuple[int, bytes, bytes]]) -> None:
    state.apply([(kind, key, value, 1, 0) for kind, key, value in records])


def some_operation(draw: random.Random) -> Operation:
    key = draw.choice([b"a", b"b", b"c"])
    text = draw.choice([b"", b"1", b"-7", b"x", b"12345678901234567890"])
    kinds = [record.SET, record.ADD, record.COMPARE_SET, record.APPEND, record.DELETE, record.TRANSACTION]
    kind = draw.choice([*kinds, record.PUSH, record.POP, record.POP])
    rule = draw.choice([0, ABSENT, EQUALS, PRESENT])
    if rule == ABSENT and kind == record.COMPARE_SET:
        return Operation(kind, key, text, rule=rule)
    if rule in (EQUALS, PRESENT) and kind == record.DELETE:
        return Operation(kind, key, expected=text if rule == EQUALS else b"", rule=rule)
    if kind == record.ADD:
        return Operation(kind, key, b"%d" % draw.choice([0, 1, -3, 2**62]))
    if kind == record.COMPARE_SET:
        return Operation(kind, key, text, draw.choice([b"", b"1", b"x"]))
    if kind == record.TRANSACTION:
        names = [b"a", b"b", b"c"]
        draw.shuffle(names)
        expected = [(key, draw.choice([None, b"", b"1"]))] if draw.random() < 0.5 else []
        changes = [(names[0], text), (names[1], None), (names[2], b"3")]
        draw_from = draw.randrange(3)
        return Operation(
            kind,
            b"",
            record.encode_pairs(changes[draw_from:]),
            record.encode_pairs(expected),
            world_size=draw.randrange(2),
        )
    return Operation(kind, key, b"" if kind in (record.DELETE, record.POP) else text)


def do(store: HashStore, operation: Operation) -> Any:
    """Return what the memory store makes of `operation`."""
    kind, key, value = operation.kind, operation.key, operation.value
    try:
        if operation.rule == ABSENT:
            return store.create(key, value)
        if operation.rule == EQUALS:
            return store.delete_key(key, expected=operation.expected)
        if operation.rule == PRESENT:
            return store.pop(key)
        if kind == record.SET:
            return store.set(key, value)
        if kind == record.ADD:
            return store.add(key, int(value))
        if kind == record.COMPARE_SET:
            return store.compare_set(key, operation.expected, value)
        if kind == record.APPEND:
            return store.append(key, value)
        if kind == record.DELETE:
            return store.delete_key(key)
        if kind == record.TRANSACTION:
            changes = list(record.decode_changes(value))
            last = len(changes) - operation.world_size
            return store.transact(
                compare=dict(record.decode_changes(operation.expected)),
                set={name: new for name, new in changes[:last] if new is not None},
                delete=[name for name, new in changes[:last] if new is None],
                add={name: int(amount or 0) for name, amount in changes[last:]},
            )
        if kind == record.PUSH:
            return store.queue_push(key, value)
        return store.queue_pop(key, block=False)
    except QueueEmptyError:
        return None
    except (ValueError, OverflowError):
        return REFUSED


def contents(store: HashStore) -> Any:
    return {key.encode(): value for key in store.list_keys() if (value := store.compare_set(key, "\0", "\0")) != b"\0"}


def test_batch_decides_what_the_memory_store_does_one_by_one() -> None:
    """The operations of a batch see the changes of those before them, and the state changes by the records alone."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    with HashStore(timeout=0) as model:
        state = KeyValueState()
        for _ in range(BATCHES):
            batch = [some_operation(draw) for _ in range(draw.randrange(1, LONGEST))]
            draft, records = draft_of(state), []
            before = [(dict(state.values), {key: list(queue) for key, queue in state.queues.items()})]
            for operation in batch:
                assert Operation.decode(operation.encode()).encode() == operation.encode()
                try:
                    found, result = draft.add(operation, is_own=draw.random() < 0.5)
                except (NotACounterError, CounterRangeError, LimitExceededError):
                    found, result = [], REFUSED
                assert result == do(model, operation), f"seed {seed}: {operation}"
                records += found
            assert before == [(dict(state.values), {key: list(queue) for key, queue in state.queues.items()})]
            applied(state, records)
            values = {key: state.get(key, no_fetch) for key in state.values}
            assert values == contents(model), f"seed {seed}: {batch}"
            assert {key: len(queue) for key, queue in state.queues.items()} == {
                key: length for key in (b"a", b"b", b"c") if (length := model.queue_len(key))
            }


def test_append_beyond_the_limit_counts_the_pieces_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "VALUE_MAX", 10)
    draft = draft_of(KeyValueState())
    draft.add(Operation(record.APPEND, b"k", b"123456"), is_own=False)
    with pytest.raises(LimitExceededError):
        draft.add(Operation(record.APPEND, b"k", b"78901"), is_own=False)
    assert draft.add(Operation(record.APPEND, b"k", b"7890"), is_own=False)[0] == [(record.APPEND, b"k", b"7890")]


@pytest.mark.parametrize("kind", [record.ADD, record.COMPARE_SET])
def test_value_in_the_file_is_left_to_the_author(kind: int) -> None:
    state = KeyValueState(1)
    state.apply([(record.SET, b"k", Spilled(0, 100, 0), 1, 0)])
    with pytest.raises(MustWriteAlone):
        draft_of(state).add(Operation(kind, b"k", b"1", b"1"), is_own=False)
    draft = Draft(state, lambda _: b"1", "/log")
    assert draft.add(Operation(kind, b"k", b"1", b"1"), is_own=True)[0]


def test_long_value_is_left_to_the_author_even_if_the_batch_made_it_long() -> None:
    state = KeyValueState()
    applied(state, [(record.SET, b"long", bytes(RESULT_MAX + 1)), (record.PUSH, b"q", bytes(RESULT_MAX + 1))])
    draft = draft_of(state)
    for operation in (Operation(record.COMPARE_SET, b"long", b"1", b"2"), Operation(record.POP, b"q")):
        with pytest.raises(MustWriteAlone):
            draft.add(operation, is_own=False)
    draft.add(Operation(record.APPEND, b"grown", bytes(RESULT_MAX)), is_own=False)
    draft.add(Operation(record.APPEND, b"grown", b"1"), is_own=False)
    with pytest.raises(MustWriteAlone):
        draft.add(Operation(record.COMPARE_SET, b"grown", b"1", b"2"), is_own=False)
    assert len(draft.add(Operation(record.POP, b"q"), is_own=True)[1]) == RESULT_MAX + 1


# Arrivals


def rank(number: int, size: int) -> Operation:
    own = b"%d/%d " % (number, size)
    return Operation(record.APPEND, b"b/arrivals", own, rule=RANKS, done=b"b/complete", world_size=size)


@pytest.mark.parametrize(("came", "left"), [(2, 0), (3, 1)])
def test_arrival_that_is_found_in_the_log_gets_what_is_missing(came: int, left: int) -> None:
    """A batch that was torn between the two records of the last arrival would let all ranks wait for ever."""
    state = KeyValueState()
    decider = KeyValueDecider(state, no_fetch, no_fetch, "/log")
    noted = None
    for number in range(came):
        found = (record.APPEND, b"b/arrivals", b"%d/3 " % number, 1, number)
        noted = decider.note(rank(number, 3), found)
        state.apply([found])
    records, result = decider.begin().resume(rank(came - 1, 3), noted)
    assert records == [(record.SET, b"b/complete", b"1")] * left
    assert result == Arrived(None if left else NOT_YET, bool(left))


def test_long_result_that_can_not_be_read_any_more_is_an_error_that_says_so() -> None:
    state = KeyValueState(1)
    state.queues[b"q"] = deque([Spilled(0, 5, 0)])

    def refuse(_: Spilled) -> bytes:
        raise NeedsLock

    decider = KeyValueDecider(state, no_fetch, refuse, "/log")
    for operation, value in [(Operation(record.POP, b"q"), b""), (Operation(record.ADD, b"n", b"2"), Spilled(0, 1, 0))]:
        noted = decider.note(operation, (operation.kind, operation.key, value, 1, 1))
        with pytest.raises(StoreUnavailableError, match="took effect, but its result is lost") as caught:
            decider.begin().resume(operation, noted)
        assert caught.value.maybe_applied


# Encoding


@pytest.mark.parametrize(
    "result",
    [
        None,
        True,
        False,
        0,
        -5,
        2**63 - 1,
        b"",
        b"\0x",
        Arrived(NOT_YET, False),
        Arrived(None, True),
        Arrived(b"t", False),
    ],
)
def test_result_is_the_same_when_it_is_decoded(result: Any) -> None:
    decoded = KeyValueDecider.decode_result(KeyValueDecider.encode_result(result))
    assert decoded == result
    assert type(decoded) is type(result)


def test_long_result_is_not_sent() -> None:
    with pytest.raises(MustWriteAlone):
        KeyValueDecider.encode_result(bytes(RESULT_MAX + 1))


def test_operation_that_is_cut_or_unknown_is_left_to_its_author() -> None:
    whole = rank(3, 8).encode()
    for size in range(len(whole)):
        with pytest.raises(MustWriteAlone):
            Operation.decode(whole[:size])
    for strange in (whole + b"x", b"Q" + whole[1:], whole[:1] + b"\7" + whole[2:]):
        with pytest.raises(MustWriteAlone):
            Operation.decode(strange)
    decoded = Operation.decode(whole)
    assert decoded == rank(3, 8)


@pytest.mark.parametrize(
    "transaction",
    [
        Transaction({}, {b"k": b"1"}, {}, []),
        Transaction({b"a": b"1", b"b": None, b"c": b""}, {b"a": b"2", b"e": b""}, {b"n": -3, b"m": 4}, [b"d", b"f"]),
        Transaction({b"a": None}, {}, {}, []),
    ],
    ids=["set", "all", "compare"],
)
def test_transaction_is_the_same_when_its_operation_is_decoded(transaction: Transaction) -> None:
    operation = Operation.of(transaction)
    assert Operation.decode(operation.encode()).transaction() == transaction
