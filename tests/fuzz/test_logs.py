"""Random logs, also by Hypothesis: only fscoord's own errors, no hang, and no byte changed by a reader."""

from __future__ import annotations

import os
import random
import resource
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz.build import Source, build
from fuzz.exercise import run
from hypothesis import given, settings, strategies as st
from support.internals import MAGIC, GenerationRef, Header, MalformedRecord, Session, decode_death, record
from support.logs import make, put, write_every_kind

from fscoord import FileStore
from fscoord.inspect import dump, repair, verify

pytestmark = pytest.mark.once

SIZE = 400
"""How many bytes of decisions a log is made of."""


@pytest.mark.parametrize("part", range(4))
def test_log_of_any_fixed_seed_raises_errors_of_fscoord_only(part: int, tmp_path: Path) -> None:
    """The same logs each time: to find others is for the campaign."""
    verdicts: Counter[str] = Counter()
    for number in range(12 * part, 12 * part + 12):
        directory = tmp_path / str(number)
        directory.mkdir()
        verdicts[run(random.Random(number).randbytes(SIZE), directory)] += 1
    assert verdicts["damaged"] > 0
    assert verdicts["damaged"] < 12


@pytest.mark.long
def test_log_of_any_random_seed_raises_errors_of_fscoord_only(
    tmp_path: Path, rng: random.Random, scale: Callable[[int], int], record_property
) -> None:
    verdicts: Counter[str] = Counter()
    for number in range(scale(400)):
        directory = tmp_path / str(number)
        directory.mkdir()
        verdicts[run(rng.randbytes(SIZE), directory)] += 1
    record_property("verdicts", dict(verdicts))


def test_log_builder_makes_neither_only_sound_nor_only_damaged_logs() -> None:
    """Of a thousand seeds; a change of the builder may shift the balance, but must not lose either side."""
    headers = Counter()
    for seed in range(1000):
        files = build(Source(random.Random(seed).randbytes(SIZE)))
        try:
            header, (size, chain) = Header.decode(files["log"])
        except MalformedRecord:
            headers["no header"] += 1
            continue
        *_, missing = record.decode(files["log"][size:], chain)
        headers[{0: "whole", -1: "bad"}.get(missing, "short")] += 1
        headers["several files"] += len(files) > 1
        headers["generation"] += header.generation == 0
    assert min(headers[name] for name in ("no header", "whole", "bad", "short", "several files", "generation")) > 10


# -- the decoder, on anything


@given(st.binary(max_size=300), st.integers(0, (1 << 32) - 1))
def test_decoder_takes_any_bytes(data: bytes, chain: int) -> None:
    records, others, used, _, missing = record.decode(data, chain)
    assert 0 <= used <= len(data)
    assert missing >= -1
    assert len(records) + len(others) <= used // record.RECORD_MIN
    for part in (data, data[:12]):
        assert -1 <= record.record_length(part, chain) <= record.RECORD_MAX
        record.decode_void(part, chain)


@given(st.binary(max_size=200))
def test_record_content_is_read_or_refused_with_words(data: bytes) -> None:
    for decode in (
        lambda value: list(record.decode_pairs(value)),
        Session.decode,
        decode_death,
        lambda value: GenerationRef.decode(record.SEAL, value),
        lambda value: GenerationRef.decode(record.FORWARD, value),
        Header.decode,
        lambda value: Header.decode(MAGIC + b"\2\0" + value),
    ):
        try:
            decode(data)
        except MalformedRecord as error:
            assert str(error)


@pytest.mark.long
@settings(max_examples=400)
@given(data=st.binary(min_size=20, max_size=SIZE))
def test_log_found_by_hypothesis_raises_errors_of_fscoord_only(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run(data, tmp_path_factory.mktemp("log"))


# -- bombs: small files that promise much


MEMORY = 640 << 20
"""Four times the longest record, and some."""


def bounded(call: Callable[[], object]) -> str:
    """Call in a child that can't have more memory than this process has by now and `MEMORY`; say how it ends."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        outcome = "died"
        try:
            with open("/proc/self/statm", encoding="ascii") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            try:
                call()
                outcome = "done"
            except BaseException as error:
                outcome = type(error).__name__
        finally:
            os.write(writer, outcome.encode())
            os._exit(0)
    os.close(writer)
    try:
        return os.read(reader, 100).decode()
    finally:
        os.close(reader)
        os.waitpid(pid, 0)


def bombs() -> dict[str, Callable[[bytes, int, int], bytes]]:
    """Logs that promise more than they hold, made of the bytes, the size and the chain of an empty one."""

    def prefix(length: int, chain: int) -> bytes:
        return struct.pack("<II", length, (length * 2_654_435_761 + chain) % 2**32) + bytes(15)

    return {
        "the longest record": lambda data, _, chain: data + prefix(record.RECORD_MAX, chain),
        "a record longer than any": lambda data, _, chain: data + prefix(0xFFFFFFFF, chain),
        "a hole of a gigabyte": lambda data, _, chain: data + prefix(record.RECORD_MAX, chain) + bytes(100),
        "a header that names many runs": lambda data, *_: data[:108] + b"\xff\xff" + data[110:],
        "a header of 64 KiB": lambda data, *_: data[:12] + (65536).to_bytes(4, "little") + data[16:],
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if "gigabyte" in name else []) for name in bombs()]
)
def test_file_that_announces_much_is_given_no_memory_for_it(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    data = make(path, write_every_kind)[: Header.decode(make(path + "2", write_every_kind))[1].offset]
    _, (size, chain) = Header.decode(data)
    put(path, bombs()[name](data, size, chain))
    if name == "a hole of a gigabyte":
        os.truncate(path, 1 << 30)
    calls = {
        "read": lambda: FileStore(path, read_only=True, timeout=0).close(),
        "verify": lambda: verify(path),
        "dump": lambda: list(dump(path)),
        "repair": lambda: repair(path, path + ".copy", salvage=True),
    }
    for what, call in calls.items():
        assert bounded(call) in ("done", "CorruptLogError"), what


def test_memory_limit_takes_effect() -> None:
    assert bounded(lambda: bytes(2 * MEMORY)) == "MemoryError"


def test_record_of_a_million_keys_is_read_within_bounds(tmp_path: Path) -> None:
    """A key bomb: the keys cost what any dictionary of them costs, and one that is too long is refused when written."""
    path = str(tmp_path / "log")
    pairs = [(b"%d" % number, b"") for number in range(100_000)]
    make(path, lambda handle: handle.write(b"", record.encode_pairs(pairs), record.MULTI_SET))
    assert bounded(lambda: FileStore(path, read_only=True).close()) == "done"
    assert bounded(lambda: verify(path)) == "done"
    with FileStore(path) as store:
        assert store.num_keys() == len(pairs)
        with pytest.raises(ValueError, match="1024"):
            store.set("k" * 1025, "")
