"""Long values: the part in memory, the place in the file, and the error if a value is missing."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_os
from support.internals import LogPosition, log_of, record, spill_module as spill, state_of

from fscoord import (
    CorruptLogError,
    FileStore,
    HashStore,
    StoreClosedError,
    StoreGoneError,
)

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


def test_long_value_of_a_handle_closed_by_another_thread_is_not_read(path: Path) -> None:
    """Its descriptor may be another file's by then."""
    store = FileStore(path, spill_bytes=LEAST)
    store.set("k", bytes(LEAST))
    log = log_of(store)
    inspect = log.inspect

    def close_and_inspect(answer: Callable[[], Any]) -> Any:
        log.inspect = inspect  # type: ignore[method-assign]
        store.close()
        return inspect(answer)

    log.inspect = close_and_inspect  # type: ignore[method-assign]
    with faulty_os() as faulty, pytest.raises(StoreClosedError):
        store.get("k")
    assert "pread" not in [name for name, _ in faulty.calls]


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
