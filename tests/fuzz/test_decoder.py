"""Records with randomly changed bytes, by the hundred thousand: the decoder returns the records before the change."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import pytest
from support.internals import Record, record

pytestmark = pytest.mark.once

KINDS = sorted(
    {*record.DATA_KINDS, record.SESSION, record.BELL, record.LEAVE, record.DEATH, record.SEAL, record.LAST_TIME}
)
RECORDS = 10
TIMES = 250
"""How often the bytes of one log are changed."""


class Written(NamedTuple):
    """A log without its header: its bytes, its records, where each ends, and the checksum of each; both from 0 on."""

    data: bytes
    records: list[Record]
    ends: list[int]
    chains: list[int]


def write(rng: random.Random) -> Written:
    records, parts, chains = [], [], [rng.getrandbits(32)]
    for _ in range(RECORDS):
        key, value = rng.randbytes(rng.randrange(12)), rng.randbytes(rng.choice((0, 1, 8, 40)))
        value += bytes(rng.choice((0, 0, 30)))  # as a torn record that zeros were appended to
        made = (rng.choice(KINDS), key, value, rng.getrandbits(32), rng.getrandbits(63))
        part, chain = record.encode(*made, chains[-1])
        records.append(made)
        parts.append(part)
        chains.append(chain)
    return Written(b"".join(parts), records, [0, *accumulate(map(len, parts))], chains)


# -- what disks, file systems and other programs do to bytes -----------------------------------------------------------

Change = Callable[[random.Random, Written, Written], bytes]


def xor(data: bytes, bits: int) -> bytes:
    return (int.from_bytes(data, "little") ^ bits).to_bytes(len(data), "little")


def one_bit(rng: random.Random, log: Written, _: Written) -> bytes:
    return xor(log.data, 1 << rng.randrange(8 * len(log.data)))


def two_bits(rng: random.Random, log: Written, _: Written) -> bytes:
    first, second = rng.sample(range(8 * len(log.data)), 2)
    return xor(log.data, 1 << first | 1 << second)


def a_burst(rng: random.Random, log: Written, _: Written) -> bytes:
    """Some of at most 32 neighbouring bits."""
    return xor(log.data, (rng.getrandbits(32) | 1) << rng.randrange(8 * len(log.data) - 31))


def zeros(rng: random.Random, log: Written, _: Written) -> bytes:
    start = rng.randrange(len(log.data))
    part = log.data[start : start + rng.choice((1, 4, 16, 512))]
    return log.data[:start] + bytes(len(part)) + log.data[start + len(part) :]


def cut(rng: random.Random, log: Written, _: Written) -> bytes:
    return log.data[: rng.randrange(len(log.data))]


def cut_and_filled(rng: random.Random, log: Written, _: Written) -> bytes:
    return log.data[: rng.randrange(len(log.data))] + bytes(rng.choice((1, 16, 512)))


def taken_out(rng: random.Random, log: Written, _: Written) -> bytes:
    start = rng.randrange(len(log.data))
    return log.data[:start] + log.data[start + rng.choice((1, 2, 12, 100)) :]


def put_in(rng: random.Random, log: Written, _: Written) -> bytes:
    start = rng.randrange(len(log.data))
    return log.data[:start] + rng.randbytes(rng.choice((1, 2, 12, 100))) + log.data[start:]


def a_record_again(rng: random.Random, log: Written, _: Written) -> bytes:
    number, place = rng.randrange(RECORDS), log.ends[rng.randrange(RECORDS + 1)]
    return log.data[:place] + log.data[log.ends[number] : log.ends[number + 1]] + log.data[place:]


def without_a_record(rng: random.Random, log: Written, _: Written) -> bytes:
    number = rng.randrange(RECORDS)
    return log.data[: log.ends[number]] + log.data[log.ends[number + 1] :]


def the_rest_of_another(rng: random.Random, log: Written, other: Written) -> bytes:
    number = rng.randrange(RECORDS)
    return log.data[: log.ends[number]] + other.data[other.ends[number] :]


def noise_behind(rng: random.Random, log: Written, _: Written) -> bytes:
    return log.data + rng.randbytes(rng.choice((1, 12, 40)))


CHANGES: tuple[Change, ...] = (
    *(one_bit, two_bits, a_burst, zeros, cut, cut_and_filled, taken_out, put_in),
    *(a_record_again, without_a_record, the_rest_of_another, noise_behind),
)


def same(one: bytes, two: bytes) -> int:
    """Return how many bytes `one` and `two` have in common, from their beginnings."""
    size = min(len(one), len(two))
    different = int.from_bytes(one[:size], "little") ^ int.from_bytes(two[:size], "little")
    return size if not different else ((different & -different).bit_length() - 1) // 8


def judge(log: Written, data: bytes) -> str:
    """Fail unless the decoder finds in `data` the records of `log` before its first other byte, and nothing else."""
    sound = same(log.data, data)
    count = bisect_right(log.ends, sound) - 1
    whole = log.records[:count]
    records, others, used, chain, missing = record.decode(data, log.chains[0])
    assert records == [each for each in whole if each[0] in record.DATA_KINDS]
    assert others == [each for each in whole if each[0] not in record.DATA_KINDS]
    assert (used, chain) == (log.ends[count], log.chains[count])
    left = len(data) - used
    is_promised = count < RECORDS and sound >= used + record.PREFIX_SIZE
    size = log.ends[count + 1] - used if is_promised else record.HEAD_SIZE
    has_no_writer = data[used + record.PREFIX_SIZE : used + record.PREFIX_SIZE + 4] == bytes(4)
    if 0 < left < (size if is_promised else record.PREFIX_SIZE) and not has_no_writer:
        assert missing == size - left
        return "unfinished"
    assert missing == (-1 if left else 0)
    return "no record" if left else "whole"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_decoder_takes_the_records_before_a_changed_byte_and_no_other(
    change: Change, rng: random.Random, scale: Callable[[int], int], record_property: Callable[[str, object], None]
) -> None:
    verdicts: Counter[str] = Counter()
    for _ in range(scale(100_000) // len(CHANGES) // TIMES):
        log, other = write(rng), write(rng)
        assert judge(log, log.data) == "whole"
        verdicts.update(judge(log, change(rng, log, other)) for _ in range(TIMES))
    record_property("verdicts", dict(verdicts))
    assert verdicts["no record"] + verdicts["unfinished"] > verdicts.total() // 2
