"""The bytes of a wait slot: what is written can be read, and nothing else is taken for a slot."""

from __future__ import annotations

import random
from zlib import crc32

from fscoord._log.format.wait_slot import SLOT_SIZE, WaitSlot

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
