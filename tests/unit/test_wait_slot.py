"""The bytes of a wait slot: what is written can be read, and nothing else is taken for a slot."""

from __future__ import annotations

import random
from zlib import crc32

import pytest

from fscoord._log.format.control_records import Session
from fscoord._log.format.wait_slot import EMPTY, SLOT_SIZE, WaitSlot, is_blank

SESSION = Session("node1", 4711, 12345, b"b" * 16, since_ns=1_700_000_000_000_000_000)
SLOT = WaitSlot(
    number=3,
    pid=4711,
    start_time=12345,
    boot_id=b"b" * 16,
    since_ns=1_700_000_000_000_000_000,
    more=2,
    began_ns=1_700_000_001_000_000_000,
    began_monotonic_ns=99,
    kind="barrier",
    name="epoch 7",
    size=64,
    keys=(b"epoch 7/complete", b"\xff", b""),
    key_count=5,
)


def test_slot_is_read_as_it_was_written() -> None:
    data = SLOT.encode()
    assert len(data) == SLOT_SIZE
    assert WaitSlot.decode(data) == SLOT
    assert not is_blank(data)


def test_slot_of_zeros_is_blank_and_no_slot() -> None:
    assert is_blank(EMPTY)
    assert WaitSlot.decode(EMPTY) is None


@pytest.mark.exhaustive
def test_slot_with_a_flipped_bit_is_none() -> None:
    data = bytearray(SLOT.encode())
    for bit in range(8 * SLOT_SIZE):
        data[bit // 8] ^= 1 << bit % 8
        assert WaitSlot.decode(bytes(data)) is None
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("size", [0, 1, 512, SLOT_SIZE - 1, SLOT_SIZE + 1])
def test_slot_of_another_length_is_none(size: int) -> None:
    assert WaitSlot.decode((SLOT.encode() + b"\0")[:size]) is None


def test_slot_that_is_half_old_and_half_new_is_none() -> None:
    old, new = SLOT.encode(), SLOT._replace(name="epoch 8", more=0).encode()
    for cut in (4, 16, 48, 90):
        assert WaitSlot.decode(new[:cut] + old[cut:]) is None


def test_foreign_bytes_with_a_right_checksum_never_raise() -> None:
    rng = random.Random(random.randrange(1 << 32))
    for _ in range(2000):
        body = rng.randbytes(SLOT_SIZE - 4) if rng.random() < 0.5 else bytes(rng.choices((0, 1, 255), k=SLOT_SIZE - 4))
        WaitSlot.decode(crc32(body).to_bytes(4, "little") + body)


def test_keys_that_do_not_fit_are_left_out_and_counted() -> None:
    keys = tuple(b"%04d" % number * 100 for number in range(50))
    found = WaitSlot.decode(SLOT._replace(keys=keys, key_count=50).encode())
    assert found is not None
    assert 5 < len(found.keys) < 20
    assert found.keys == keys[: len(found.keys)]
    assert found.key_count == 50


def test_longest_names_fit() -> None:
    name = "\N{SNOWMAN}" * 5000
    found = WaitSlot.decode(SLOT._replace(kind=name, name=name, keys=(b"k" * 1024,), key_count=1 << 40).encode())
    assert found is not None
    assert found.kind.startswith("\N{SNOWMAN}" * 300)
    assert found.keys == (b"k" * 1024,)


@pytest.mark.parametrize(
    ("number", "change"),
    [(4, {}), (3, {"pid": 1}), (3, {"start_time": 1}), (3, {"boot_id": bytes(16)}), (3, {"since_ns": 1})],
)
def test_slot_of_another_session_is_stale(number: int, change: dict[str, object]) -> None:
    assert SLOT.is_of(3, SESSION)
    assert not SLOT.is_of(number, SESSION._replace(**change))
