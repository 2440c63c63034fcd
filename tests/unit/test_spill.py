"""Long values: the part in memory, the place in the file, and the error if a value is missing."""

from __future__ import annotations

import errno
import os
import random
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from support.faulty import faulty_os
from support.internals import log_of, state_of

from fscoord import (
    CorruptLogError,
    FileStore,
    HashStore,
    StoreClosedError,
    StoreGoneError,
    StoreUnavailableError,
    open_store,
)
from fscoord._log.files import spill
from fscoord._log.files.opening import SPILL_BYTES
from fscoord._log.format import record
from fscoord._log.format.record import LogPosition

LIMIT_S = 60
LEAST = 100
LONG = 1 << 18


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def is_left(store: FileStore, key: str) -> bool:
    """Whether the store remembers only where the value of `key` is."""
    return isinstance(state_of(store).values[key.encode()], spill.Spilled)


def long_value(number: int, size: int = LONG) -> bytes:
    return random.Random(number).randbytes(16) * (size // 16) + bytes(size % 16)


def place(path: Path, part: bytes) -> tuple[Path, int]:
    """The file of the log, of all its generations, that holds `part`, and where."""
    for file in sorted(path.parent.glob(f"{path.name}*"), reverse=True):
        offset = file.read_bytes().find(part)
        if offset >= 0:
            return file, offset
    raise AssertionError("it is nowhere")


def damage(path: Path, value: bytes) -> int:
    """Flip a bit in the middle of `value`, which is in the log, and return where it begins."""
    file, offset = place(path, value)
    with file.open("r+b") as opened:
        opened.seek(offset + len(value) // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))
    return offset


def test_long_values_take_no_memory(path: Path) -> None:
    count = 16
    with FileStore(path) as store:
        store.set("warm", bytes(LONG))
        store.get("warm")
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for number in range(count):
                store.set(f"set {number}", long_value(number))
                store.queue_push("queue", long_value(number))
            store.multi_set([f"multi {number}" for number in range(count)], map(long_value, range(count)))
            with FileStore(path) as late:
                late.check(["warm"])
                store.compact()
                for handle in (store, late):
                    for number in range(count):
                        assert handle.get(f"set {number}") == handle.get(f"multi {number}") == long_value(number)
                held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert held < 2 * LONG, "two handles on 12 MiB"


@pytest.mark.parametrize("spill_bytes", [LEAST, SPILL_BYTES])
def test_value_is_left_in_the_file_from_exactly_the_threshold_on(spill_bytes: int, path: Path) -> None:
    with FileStore(path, spill_bytes=spill_bytes) as store:
        store.set("at", bytes(spill_bytes))
        store.multi_set(["m at", "m below"], [bytes(spill_bytes), bytes(spill_bytes - 1)])
        store.set("below", bytes(spill_bytes - 1))
        with FileStore(path, spill_bytes=spill_bytes, read_only=True) as late:
            for _ in range(4):  # what was found again in one file is found in the next
                for handle in (store, late):
                    assert handle.get("at") == handle.get("m at") == bytes(spill_bytes)
                    assert handle.get("below") == handle.get("m below") == bytes(spill_bytes - 1)
                    assert [is_left(handle, key) for key in ("at", "m at")] == [True, True]
                    assert [is_left(handle, key) for key in ("below", "m below")] == [False, False]
                store.compact()


def test_spill_threshold_is_128_kib_by_default(path: Path) -> None:
    with FileStore(path) as store, FileStore(path, spill_bytes=None) as all_kept:
        store.multi_set(["below", "at"], [bytes((1 << 17) - 1), bytes(1 << 17)])
        assert [is_left(store, key) for key in ("below", "at")] == [False, True]
        assert all_kept.get("at") == bytes(1 << 17)
        assert not is_left(all_kept, "at")
        with store.clone() as twin, all_kept.clone() as other:
            assert twin.get("at") == other.get("at") == bytes(1 << 17)
            assert (is_left(twin, "at"), is_left(other, "at")) == (True, False)
    address = open_store(f"file:{path}?spill_bytes=50")
    assert isinstance(address, FileStore)
    with address as store:
        store.set("k", bytes(50))
        assert is_left(store, "k")


@pytest.mark.parametrize("wrong", ["x", 1.5, True, -1])
def test_threshold_that_is_invalid_is_refused(wrong: Any, path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match="spill_bytes"):
        FileStore(path, spill_bytes=wrong)


def test_short_value_is_read_from_memory_and_a_long_one_with_one_pread(path: Path) -> None:
    with FileStore(path, spill_bytes=LEAST) as store:
        store.multi_set(["short", "long"], [bytes(LEAST - 1), bytes(LEAST)])
        store.get("long")
        for key, wanted in (("short", []), ("long", ["pread"])):
            with faulty_os() as faulty:
                store.get(key)
            assert [name for name, _ in faulty.calls if name == "pread"] == wanted


def step(store: Any, rng: random.Random, keys: list[str]) -> Any:
    """Do something to `store`, the same for the same `rng`; return what it answered."""
    key, value = rng.choice(keys), rng.randbytes(rng.choice([0, 5, LEAST - 1, LEAST, LEAST + 1, 3 * LEAST]))
    what = rng.randrange(9)
    if what == 0:
        return store.set(key, value)
    if what in (1, 2):
        return store.append(key, value)
    if what == 3:
        return store.delete_key(key) if rng.random() < 0.3 else None
    if what == 4:
        return store.multi_set([key, "fixed"], [value, value + b"!"])
    if what in (5, 6):
        return store.queue_push(key, value)
    if what == 7:
        return store.queue_pop(key, block=False) if store.queue_len(key) else None
    current = store.get(key) if key in store.list_keys() else b""
    return store.compare_set(key, current, value)


def content(store: Any) -> Any:
    keys = store.list_keys()
    return dict(zip(keys, store.multi_get(keys), strict=True)), {key: store.queue_len(key) for key in ("a", "b", "c")}


@pytest.mark.parametrize("lock", ["ofd", "flock", "soft"])
def test_handles_that_follow_or_open_late_agree_with_a_model(lock: str, path: Path, seed: int) -> None:
    keys, model = ["a", "b", "c"], HashStore()
    one, other = random.Random(seed), random.Random(seed)
    opened = partial(FileStore, path, lock=lock, timeout=LIMIT_S)
    with (
        opened(spill_bytes=LEAST) as store,
        opened(spill_bytes=LEAST) as second,
        opened(spill_bytes=LEAST, read_only=True) as follower,
    ):
        for number in range(240):
            assert step(store if number % 3 else second, one, keys) == step(model, other, keys)
            if number % 20 == 7:
                store.compact()
            if number % 10 == 9:
                with opened(spill_bytes=LEAST // 2) as late:
                    expected = content(model)
                    for handle in (store, second, follower, late):
                        assert content(handle) == expected
        for key in keys:
            while model.queue_len(key):
                assert second.queue_pop(key) == model.queue_pop(key)
    model.close()


def test_follower_finds_long_values_in_a_new_generation_without_reading_them(path: Path) -> None:
    count = 8
    with FileStore(path) as store, FileStore(path) as other, FileStore(path, read_only=True) as reader:
        for number in range(count):
            store.set(f"value {number}", long_value(number))
            store.queue_push("queue", long_value(-number))
        store.append("value 0", b"!")
        store.append("value 0", long_value(0))
        for handle in (other, reader):
            assert handle.get("value 0") == long_value(0) + b"!" + long_value(0)
        store.compact()
        for handle in (other, reader):
            with faulty_os() as faulty:
                handle.check(["queue"])
            calls = [name for name, _ in faulty.calls]
            assert log_of(handle).handle.file != str(path)
            assert calls.count("read") < 8
            assert count <= calls.count("pread") <= 8 * count  # of 4 KiB each
            assert is_left(handle, "value 0")
            for number in range(1, count):
                assert handle.get(f"value {number}") == long_value(number)
            assert handle.get("value 0") == long_value(0) + b"!" + long_value(0)
        assert [other.queue_pop("queue") for _ in range(count)] == [long_value(-number) for number in range(count)]


def test_superseded_generation_is_not_held_open_for_long_values(path: Path) -> None:
    with FileStore(path) as store, FileStore(path) as other:
        for number in range(4):
            store.set(f"value {number}", long_value(number))
            assert other.get("value 0") == long_value(0)
            store.compact()
        assert other.get("value 3") == long_value(3)
        assert log_of(other).handle.header.generation >= 4
        assert all(os.fstat(fd).st_nlink for fd in log_of(other).handle.owned_fds)


@pytest.mark.parametrize("read_only", [False, True])
def test_value_that_grew_long_is_left_in_the_file_after_a_compaction(read_only: bool, path: Path) -> None:
    with FileStore(path, spill_bytes=LEAST) as store, FileStore(path, spill_bytes=LEAST, read_only=read_only) as other:
        for number in range(LEAST):
            store.append("k", bytes([number]))
        for handle in (store, other):
            assert handle.get("k") == bytes(range(LEAST))
            assert not is_left(handle, "k")
        store.compact()
        for handle in (store, other):
            assert handle.get("k") == bytes(range(LEAST))
            assert is_left(handle, "k")


@pytest.mark.parametrize("lacking", ["values", "queues", "sizes of values", "sizes of queues"])
def test_handle_that_misses_a_long_value_in_the_new_file_reads_all_of_it(
    lacking: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = spill.find_long

    def find_less(*arguments: Any) -> Iterator[spill.Spot]:
        for spot in find(*arguments):
            is_meant = (spot.kind == record.PUSH) == lacking.endswith("queues")
            if is_meant and lacking.startswith("sizes"):
                yield spot._replace(size=spot.size + 1)
            elif not is_meant:
                yield spot

    with FileStore(path, spill_bytes=LEAST) as store, FileStore(path, spill_bytes=LEAST) as other:
        store.set("k", bytes(LEAST))
        store.queue_push("q", bytes(LEAST))
        store.append("short", "1")
        assert other.get("k") == bytes(LEAST)
        store.compact()
        monkeypatch.setattr(spill, "find_long", find_less)
        other.append("short", "2")
        assert (other.get("k"), other.get("short"), other.queue_pop("q")) == (bytes(LEAST), b"12", bytes(LEAST))
        assert store.get("short") == b"12"


@pytest.mark.parametrize("compactions", [0, 1])
@pytest.mark.parametrize("read_only", [False, True])
def test_long_value_that_was_damaged_is_never_returned(compactions: int, read_only: bool, path: Path) -> None:
    value = random.Random(1).randbytes(3 * LEAST)
    with FileStore(path, spill_bytes=LEAST) as store, FileStore(path, spill_bytes=LEAST, read_only=read_only) as other:
        store.set("sound", bytes(LEAST))
        store.set("bad", value)
        store.queue_push("queue", value[::-1])
        for _ in range(compactions):
            store.compact()
        assert other.get("bad") == value
        offset = damage(path, value)
        damage(path, value[::-1])
        reads: list[Callable[[], object]] = [lambda: other.get("bad"), lambda: other.multi_get(["sound", "bad"])]
        writes: list[Callable[[], object]] = [
            lambda: other.compare_set("bad", "x", "y"),
            lambda: other.add("bad", 1),
            other.compact,
            lambda: other.queue_pop("queue"),
        ]
        for call in reads + ([] if read_only else writes):
            with pytest.raises(CorruptLogError, match="a long value have changed") as raised:
                call()
            if call != writes[-1]:
                assert raised.value.offset == offset
        assert other.queue_len("queue") == 1
        store.set("later", "1")
        assert other.get("sound") == bytes(LEAST)
        assert other.get("later") == b"1"
        store.set("bad", "good")
        assert other.get("bad") == b"good"


def test_log_with_a_damaged_long_value_grows_and_logs_the_reason(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    value = random.Random(1).randbytes(LEAST)
    with FileStore(path, spill_bytes=LEAST, compact_bytes=1000) as store:
        store.set("bad", value)
        store.compact()
        damage(path, value)
        for number in range(200):
            store.set("k", f"{number} {'x' * 50}")
        assert log_of(store).handle.header.generation == 1
        assert store.get("k").startswith(b"199 ")
    assert "could not be compacted" in caplog.text
    assert "a long value have changed" in caplog.text


def test_long_value_whose_file_was_truncated_means_the_store_is_gone(path: Path) -> None:
    value = random.Random(1).randbytes(LEAST)
    with FileStore(path, spill_bytes=LEAST) as store:
        store.set("k", value)
        assert store.get("k") == value
        file, offset = place(path, value)
        os.truncate(file, offset + LEAST // 2)
        with pytest.raises(StoreGoneError, match="truncated"):
            store.get("k")
        with pytest.raises(StoreGoneError, match="truncated"):
            store.set("k", "1")


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_long_value_that_fails_to_be_read_is_an_error_and_can_be_retried(error: int, path: Path) -> None:
    with FileStore(path, spill_bytes=LEAST) as store:
        store.set("k", bytes(LEAST))
        store.queue_push("q", bytes(LEAST))
        calls: list[Callable[[], object]] = [
            lambda: store.get("k"),
            lambda: store.multi_get(["k"]),
            lambda: store.compare_set("k", "", ""),
            lambda: store.queue_pop("q"),
            store.compact,
        ]
        for call in calls:
            with faulty_os() as faulty, faulty.fail(0, error, names=("pread",), for_good=True):
                with pytest.raises(StoreUnavailableError, match="reading a long value failed") as raised:
                    call()
                assert raised.value.errno == error
                assert not raised.value.maybe_applied
        assert store.get("k") == bytes(LEAST)
        assert store.queue_pop("q") == bytes(LEAST)


def test_short_read_of_a_long_value_is_repeated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = random.Random(1).randbytes(LEAST)
    with FileStore(path, spill_bytes=LEAST) as store, faulty_os() as faulty:
        store.set("k", value)
        real = faulty.pread
        monkeypatch.setattr(faulty, "pread", lambda fd, size, offset: real(fd, min(size, 7), offset))
        assert store.get("k") == value


def test_long_value_of_a_handle_closed_by_another_thread_is_not_read(path: Path) -> None:
    """Its descriptor may be another file's by then."""
    store = FileStore(path, spill_bytes=LEAST)
    store.set("k", bytes(LEAST))
    inspect = log_of(store).inspect

    def close_and_inspect(answer: Callable[[], Any]) -> Any:
        store.close()
        return inspect(answer)

    log_of(store).inspect = close_and_inspect  # type: ignore[method-assign]
    with faulty_os() as faulty, pytest.raises(StoreClosedError):
        store.get("k")
    assert "pread" not in [name for name, _ in faulty.calls]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_long_value_that_comes_in_several_reads_is_joined(
    size: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b"..abcdef")
    real = os.pread
    fd = os.open(path, os.O_RDONLY)
    try:
        with faulty_os() as faulty:
            faulty.pread = lambda fd, count, offset: real(fd, -(-6 // size), offset)[:count]
            assert spill.read(fd, spill.Spilled(2, 6, crc32(b"abcdef"))) == b"abcdef"
    finally:
        os.close(fd)


def test_checksum_of_both_parts_is_that_of_their_concatenation(rng: random.Random) -> None:
    for _ in range(200):
        first, second = (rng.randbytes(rng.choice([0, 1, 7, 65536, rng.randrange(200_000)])) for _ in range(2))
        assert spill.checksum_of_both(crc32(first), crc32(second), len(second)) == crc32(first + second)


def test_long_values_of_a_snapshot_are_found_with_their_offsets(path: Path, rng: random.Random) -> None:
    values = {f"key {number}": rng.randbytes(rng.choice([10, LEAST - 1, LEAST, 9 * LEAST])) for number in range(500)}
    queue = deque(rng.randbytes(rng.choice([10, LEAST])) for _ in range(500))
    with FileStore(path, spill_bytes=LEAST) as store:
        store.multi_set(values, values.values())
        for item in queue:
            store.queue_push("queue", item)
        store.compact()
        store.check(["queue"])
        log = log_of(store)
        with open(log.handle.file, "rb") as file:
            found = list(
                spill.find_long(
                    file.fileno(), log.handle.start, LogPosition(log.handle.offset, log.handle.chain), LEAST
                )
            )
            data = file.read()
        known = [(spot.key.decode(), data[spot.offset : spot.offset + spot.size]) for spot in found]
        assert known == [item for item in values.items() if len(item[1]) >= LEAST] + [
            ("queue", item) for item in queue if len(item) >= LEAST
        ]
        torn = data[: found[3].offset - 40]  # the frame of a record is gone, or is not sound
        Path(log.handle.file).write_bytes(torn)
        with open(log.handle.file, "rb") as file:
            found = list(
                spill.find_long(
                    file.fileno(), log.handle.start, LogPosition(log.handle.offset, log.handle.chain), LEAST
                )
            )
        assert len(found) < 10


def test_long_value_search_finds_only_data_that_is_long_itself(path: Path) -> None:
    """It is longer by the key and what stands around both; other records hold nothing that is asked for."""
    least, chain, data = 20, 77, b""
    expected: list[spill.Spot] = []

    def add(kind: int, key: bytes, value: bytes) -> int:
        nonlocal chain, data
        more, chain = record.encode(kind, key, value, 1, 2, chain)
        data += more
        return len(data) - 6 - len(value)

    add(record.SESSION, b"", bytes(100))
    add(record.BELL, b"", b"")
    for kind in (record.SET, record.APPEND, record.PUSH):
        add(kind, b"k" * 30, bytes(least - 1))
        expected.append(spill.Spot(kind, b"long", add(kind, b"long", bytes(least)), least))
    pairs = [(b"a", bytes(least - 1)), (b"b", bytes(least)), (b"", bytes(least + 1)), (b"c", b"")]
    at = add(record.MULTI_SET, b"", record.encode_pairs(pairs))
    for name, value in pairs:
        at += 6 + len(name)
        if len(value) >= least:
            expected.append(spill.Spot(record.SET, name, at, len(value)))
        at += len(value)
    end = len(data)
    add(record.SET, b"behind", bytes(least))
    path.write_bytes(data)
    with path.open("rb") as file:
        found = list(spill.find_long(file.fileno(), LogPosition(0, 77), LogPosition(end, 0), least))
    assert found == expected


def test_interrupted_search_for_long_values_is_closed_at_once(path: Path) -> None:
    """The collector would lose a Ctrl-C that comes while it does that."""
    with FileStore(path, spill_bytes=LEAST) as store, FileStore(path, spill_bytes=LEAST) as other:
        other.set("k", bytes(LEAST))
        assert len(store.get("k")) == LEAST
        looks: list[Any] = []

        def relocate_spilled(spots: Any) -> bool:
            looks.append(spots)
            assert next(spots).key == b"k"
            raise KeyboardInterrupt

        log: Any = log_of(store)
        log.machine.relocate_spilled, known = relocate_spilled, log.machine.relocate_spilled
        other.compact()
        with pytest.raises(KeyboardInterrupt):
            store.get("k")
        assert looks[0].gi_frame is None
        log.machine.relocate_spilled = known
        assert len(store.get("k")) == LEAST


@pytest.mark.parametrize("has_long", [False, True])
def test_record_of_many_small_pairs_takes_a_few_times_its_length_of_memory(path: Path, has_long: bool) -> None:
    """Each empty key with an empty value has 6 bytes in the file. A list of such pairs has twelve times as many."""
    many = bytes(6 * 200_000)
    long = record.encode_pairs([(b"k", bytes(LEAST))]) if has_long else b""
    with FileStore(path, spill_bytes=LEAST) as store, FileStore(path, spill_bytes=LEAST) as other:
        assert not other.check(["k"])
        log_of(store).update(record.MULTI_SET, b"", many + long + many, None, 60)
        tracemalloc.start()
        try:
            assert other.check(["k"]) == has_long
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 8 * len(many + long + many)
        assert other.get("") == b""
        assert not has_long or other.get("k") == bytes(LEAST)


def test_long_values_between_short_ones_in_one_record_are_set_in_their_order(path: Path) -> None:
    pairs = [(b"a", b"1"), (b"b", bytes(LEAST)), (b"b", b"2"), (b"c", b"3"), (b"a", bytes(LEAST)), (b"d", bytes(LEAST))]
    with FileStore(path, spill_bytes=LEAST) as store, FileStore(path, spill_bytes=LEAST) as other:
        log_of(store).update(record.MULTI_SET, b"", record.encode_pairs(pairs), None, 60)
        for handle in (store, other):
            assert {name: handle.get(name) for name in "abcd"} == {key.decode(): value for key, value in pairs}
