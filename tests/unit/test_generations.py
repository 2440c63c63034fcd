"""Compaction by generations: content of a new generation, the handles that follow, the files, and the time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faulty import faulty_os
from support.internals import log_of, notifier_of, watcher_of
from support.logs import tear
from support.places import start_thread, wait_in_vain
from support.plain_reader import read_log, read_newest

from fscoord import CorruptLogError, FileStore, StoreError, StoreGoneError, StoreUnavailableError
from fscoord._log.format.generation_ref import GenerationRef, generation_name, parse_generation_name
from fscoord._log.format.record import MalformedRecord
from fscoord._log.generations import forwarding
from fscoord._log.recovery import GENERATION
from fscoord._log.replay import cursor as reader
from fscoord.inspect import dump, repair, verify

LIMIT_S = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def names(path: Path) -> list[str]:
    """The files of the log beside generation 0."""
    return sorted(
        name for name in os.listdir(path.parent) if re.fullmatch(rf"{path.name}\.[0-9]+\.[0-9a-f]{{12}}", name)
    )


def generation(store: FileStore) -> int:
    return log_of(store).handle.header.generation


def content(store: FileStore) -> object:
    keys = store.list_keys()
    return dict(zip(keys, store.multi_get(keys), strict=True)), {q: store.queue_len(q) for q in ("q", "r")}


def fill(store: FileStore) -> None:
    store.multi_set(["a", "b"], ["1", bytes(range(256))])
    store.set("gone", "x")
    store.delete_key("gone")
    store.append("list", "one ")
    store.append("list", "two")
    store.add("n", -41)
    store.set("", "empty key")
    store.set("empty", "")
    store.queue_push("q", "first")
    store.queue_push("q", "")
    store.queue_push("q", "third")
    assert store.queue_pop("q") == b"first"


def until(condition: Callable[[], object]) -> None:
    """Return when `condition` holds: the other thread or process has come so far."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came so far"
        time.sleep(0.001)


@pytest.mark.parametrize("lock", ["ofd", "flock", "soft"])
@pytest.mark.parametrize("durable", [False, True])
def test_generation_holds_the_state_of_the_one_before(lock: str, durable: bool, path: Path) -> None:
    with FileStore(path, lock=lock, durable=durable) as store:
        fill(store)
        before = content(store)
        store.compact()
        assert content(store) == before
        assert generation(store) == 1
        with FileStore(path, lock=lock) as late, FileStore(path, read_only=True) as reader:
            assert content(late) == content(reader) == before
            assert [late.queue_pop("q"), late.queue_pop("q")] == [b"", b"third"]
            late.append("list", "!")
            assert store.get("list") == reader.get("list") == b"one two!"


def test_format_of_generations_is_as_documented(path: Path) -> None:
    with FileStore(path, rank=3) as store:
        fill(store)
        store.compact()
        store.set("behind", "the snapshot")
        store.compact()
        store.set("last", "1")
    old, new = read_log(path.read_bytes()), read_newest(path)
    (name,) = names(path)
    assert re.fullmatch(r"store\.2\.[0-9a-f]{12}", name)
    assert [kind for _, kind, *_ in old.records][-2:] == ["Z", "f"]
    assert old.successor == (2, new.header["id"], name)
    assert (new.header["generation"], new.ends) == (2, "whole")
    assert new.header["id"] != old.header["id"]
    assert new.values[b"list"] == b"one two"
    assert new.values[b"last"] == b"1"
    assert new.queues == {b"q": [b"", b"third"]}
    assert new.sessions[1]["rank"] == 3


def test_seal_names_the_end_of_the_snapshot_and_the_chain_there(path: Path) -> None:
    with FileStore(path) as store:
        fill(store)
        store.compact()
        store.set("behind", "1")
    old, new = read_log(path.read_bytes()), read_newest(path)
    size, chain = old.snapshot or (0, 0)
    data = path.with_name(names(path)[0]).read_bytes()
    assert data[:size].endswith(b"\n")
    (last,) = [record for record in new.records if record[2] == b"behind"]
    assert last[0] == size
    assert chain == zlib.crc32(data[size - 6 : size], int.from_bytes(data[size - 5 : size - 1], "little"))


@pytest.mark.parametrize("compactions", [0, 1, 2])
def test_copy_begins_a_lineage_and_records_its_own_inode_numbers(compactions: int, tmp_path: Path) -> None:
    path, copied = tmp_path / "original" / "store", tmp_path / "copied"
    path.parent.mkdir()
    with FileStore(path) as store:
        store.set("k", "1")
        for _ in range(compactions):
            store.compact()
    first = read_log(path.read_bytes()).header["lineage"]
    assert read_newest(path).header["lineage"] == first == read_log(path.read_bytes()).header["id"]
    shutil.copytree(path.parent, copied)
    copy, lineages = copied / path.name, set()
    for number in range(3):
        with FileStore(copy) as store:
            store.set("k", str(number))
            if number:
                store.compact()
        header = read_newest(copy).header
        lineages.add(header["lineage"])
        (newest,) = copied.glob(f"{path.name}.{header['generation']}.*")
        assert (header["root inode"], header["inode"]) == (copy.stat().st_ino, newest.stat().st_ino)
        if not number:
            assert header["lineage"] == header["id"]
    assert len(lineages) == 1
    assert first not in lineages
    assert read_newest(path).values == {b"k": b"1"}


def test_handle_that_is_up_to_date_rereads_nothing_after_a_compaction(path: Path) -> None:
    with FileStore(path) as store, FileStore(path) as other, FileStore(path, read_only=True) as reader:
        store.set("big", bytes(100_000))
        assert other.get("big") == reader.get("big") == bytes(100_000)
        for handle in (other, reader):
            kept = handle.get("big")
            store.compact()
            with faulty_os() as faulty:
                assert handle.get("big") is kept
                read = [fd for name, fd in faulty.calls if name == "read"]
            assert generation(handle) == generation(store)
            assert len(read) < 8


def test_handle_that_missed_generations_begins_again_at_the_newest(path: Path) -> None:
    with FileStore(path) as store, FileStore(path) as other, FileStore(path, read_only=True) as reader:
        fill(store)
        assert content(other) == content(reader)
        for number in range(5):
            store.set("n", str(number))
            store.delete_key("a")
            store.compact()
        assert content(other) == content(reader) == content(store)
        assert generation(other) == generation(reader) == 5
        other.set("n", "5")
        assert store.get("n") == b"5"


def test_superseded_generations_are_removed_and_generation_0_stays(path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        identity = path.stat().st_ino
        for number in range(1, 6):
            store.compact()
            assert [name.split(".")[1] for name in names(path)] == [str(number)]
        assert path.stat().st_ino == identity
        grown = path.stat().st_size
        store.compact()
        assert path.stat().st_size - grown < 80


def make_orphan(file: Path, store: FileStore) -> None:
    """What is left of a process that dies before it can seal the generation before."""
    file.touch()
    known = log_of(store).handle.header._replace(log_id=os.urandom(16), generation=1, inode=file.stat().st_ino)
    file.write_bytes(known.encode())


def test_orphan_is_removed_unless_it_is_locked(path: Path) -> None:
    with FileStore(path) as store, FileStore(path.with_name("other")) as unrelated:
        store.set("k", "v")
        unrelated.set("k", "v")
        unrelated.compact()
        (kept,) = names(path.with_name("other"))
        orphan, locked = path.with_name("store.1.00000000000a"), path.with_name("store.1.00000000000b")
        odd = [path.with_name(name) for name in ("store.1.x", "store.01.00000000000a", "store.x.00000000000a")]
        for file in (orphan, locked, *odd):
            make_orphan(file, store)
        with FileStore(path.with_name("holder")) as holder:
            lock = log_of(holder).handle.lock.next_on(os.open(locked, os.O_RDWR))
            lock.try_lock()
            store.compact()
            assert locked.exists()
            os.close(lock.fd)
        assert not orphan.exists()
        assert all(file.exists() for file in odd)
        assert path.with_name(kept).exists()
        store.compact()
        assert not locked.exists()


def test_sessions_keep_their_numbers_and_labels_through_a_compaction(path: Path) -> None:
    with FileStore(path, label="first") as first, FileStore(path, label="second") as second:
        first.set("k", "1")
        second.set("k", "2")
        first.compact()
        second.set("k", "3")
        first.set("k", "4")
        with FileStore(path, label="third") as third:
            third.set("k", "5")
            assert {number: who.label for number, who in log_of(third).sessions.items()} == {
                1: "first", 2: "second", 3: "third",
            }  # fmt: skip
    writers = [writer for _, kind, _, _, writer, _ in read_newest(path).records if kind == "S"]
    assert writers == [2, 1, 3]


def test_compaction_keeps_the_count_of_participants_that_left_and_the_bell(path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        FileStore(path, 3).close()
        with FileStore(path) as waiter:
            wait_in_vain(waiter)
        store.compact()
        assert (log_of(store).table.left, log_of(store).handle.bell) == ({2}, 1)
        with FileStore(path) as late:
            assert (log_of(late).table.left, log_of(late).handle.bell) == ({2}, 1)
            assert log_of(late).table.failure is None
    FileStore(path, 3).close()
    assert path.exists()
    FileStore(path, 3).close()
    assert not path.exists()
    assert names(path) == []


def test_torn_tail_is_voided_before_the_seal(path: Path) -> None:
    tear(str(path), 30, b"k", b"v" * 50)
    with FileStore(path) as store:
        store.compact()
        assert store.get("before") == b"the tear"
    assert [kind for _, kind, *_ in read_log(path.read_bytes()).records][-4:] == ["V", "s", "X", "Z"]


def kill_writer(file: Path, size: int) -> None:
    """Let a writer die after `size` bytes of a record that it appends to `file`."""
    with FileStore(file.parent / "store", compact_bytes=None) as store:
        store.set("introduced", "1")
        start = file.stat().st_size
        store.set("torn", "x" * 1000)
    os.truncate(file, start + size)


@pytest.mark.parametrize("again", [False, True])
def test_zeros_seen_in_one_generation_are_not_assumed_in_the_next(again: bool, path: Path) -> None:
    """A void at the same place of the next file is found by who has looked through the zeros of the one before."""
    with FileStore(path, compact_bytes=None) as store:
        store.set("k", "1")
        with FileStore(path, compact_bytes=None) as late, FileStore(path, read_only=True) as reader:
            for _ in range(1 + again):
                os.truncate(log_of(store).handle.file, os.path.getsize(log_of(store).handle.file) + 100_000)
                assert late.get("k") == reader.get("k") == b"1"
                store.compact()
                assert store.get("k") == late.get("k") == reader.get("k") == b"1"
            store.set("long", bytes(3000))
            kill_writer(Path(log_of(store).handle.file), 300)
            store.set("k", "2")
            assert [handle.get("k") for handle in (store, late, reader)] == [b"2"] * 3
            with FileStore(path, read_only=True) as fresh:  # which reads generation 0, if nothing leads past it
                assert fresh.get("k") == b"2"
            late.set("l", "3")
            assert store.get("l") == reader.get("l") == b"3"
    assert verify(path).verdict == "sound"


def test_torn_forward_record_is_voided_before_the_next_one(path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        store.compact()
        store.compact()
        with path.open("rb+") as file:
            file.truncate(path.stat().st_size - 5)
        store.compact()
        store.compact()
        with FileStore(path) as late:
            assert late.get("k") == b"v"
            assert generation(late) == 4
    assert [kind for _, kind, *_ in read_log(path.read_bytes()).records][-4:] == ["Z", "V", "f", "f"]


def read_of_the_root(path: Path, compact: Callable[[], object]) -> int:
    """How many bytes of generation 0 are read while `compact` is called."""
    got: list[int] = []
    with faulty_os() as faulty:
        real = faulty.read

        def read(fd: int, size: int) -> bytes:
            data: bytes = real(fd, size)
            if os.path.samestat(os.fstat(fd), path.stat()):
                got.append(len(data))
            return data

        faulty.read = read
        compact()
    return sum(got)


def test_repeated_compactions_read_no_forward_record_twice(path: Path) -> None:
    with FileStore(path, compact_bytes=None) as store, FileStore(path, compact_bytes=None) as other:
        for number in range(100):
            store.set(f"key.{number}", bytes(1000))
        store.compact()
        assert path.stat().st_size > 100_000
        assert len(other.list_keys()) == 100
        for compactor in (store, other, store, store, other, other, store):  # what others post is read
            assert 0 < read_of_the_root(path, compactor.compact) < 8192, "the header, and what is new"
        with FileStore(path) as late:
            assert generation(late) == 8
            assert read_of_the_root(path, late.compact) > 100_000, "it has not followed the seal of generation 0"
            assert read_of_the_root(path, late.compact) < 8192
    log = read_log(path.read_bytes())
    assert log.ends == "whole"
    assert [kind for _, kind, *_ in log.records][-10:] == ["Z", *"fffffffff"]


def test_newest_generation_is_found_through_seals_without_forward_records(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "post", lambda *_: None)
    with FileStore(path) as store:
        store.set("k", "v")
        for _ in range(3):
            store.compact()
        assert len(names(path)) == 3
        with FileStore(path) as late:
            assert late.get("k") == b"v"
            assert generation(late) == 3
        monkeypatch.undo()
        store.compact()
        with FileStore(path) as late:
            assert content(late) == content(store)


def test_log_is_compacted_when_garbage_outweighs_live_data(path: Path) -> None:
    least = 4096
    with FileStore(path, compact_bytes=least) as store:
        for number in range(2000):
            store.set(f"key.{number % 10}", str(number))
            total = sum(os.path.getsize(path.with_name(name)) for name in ["store", *names(path)])
            assert total < 4 * least
        assert generation(store) > 10
        assert store.get("key.9") == b"1999"
        held = sum(len(f"{number}") for number in range(1000))
        for number in range(1000):
            store.set(f"live.{number}", "x" * 100)
        assert generation(store) < 60, "what lives is copied again and again"
        live = 1000 * 108 + held
        assert sum(os.path.getsize(path.with_name(name)) for name in names(path)) < 2 * live + 4 * least


def test_follower_compacts_when_the_file_is_twice_the_size_of_its_snapshot(path: Path) -> None:
    with FileStore(path, compact_bytes=None) as store, FileStore(path, compact_bytes=4096) as other:
        for number in range(20):
            store.set(f"key.{number}", bytes(1000))
        assert other.num_keys() == 20
        store.compact()
        assert other.num_keys() == 20
        (name,) = names(path)
        snapshot = size = path.with_name(name).stat().st_size
        while generation(other) == 1:
            size = path.with_name(name).stat().st_size
            other.set("key.0", bytes(1000))
        assert 0 <= size - 2 * snapshot < 1100


@pytest.mark.parametrize("never", [None, 0])
def test_log_is_compacted_only_on_request_if_compact_bytes_is_off(never: int | None, path: Path) -> None:
    with FileStore(path, compact_bytes=never) as store:
        for number in range(100):
            store.set("k", bytes(10_000) + b"%d" % number)
        assert generation(store) == 0
        store.compact()
        for number in range(100):
            store.set("k", bytes(10_000) + b"%d" % number)
        assert generation(store) == 1


def test_generation_0_is_compacted_before_a_long_value_is_written_to_it(path: Path) -> None:
    with FileStore(path) as store:
        store.set("big", bytes(1 << 20))
        assert path.stat().st_size < 4096
        for _ in range(3):
            store.set("big", bytes(1 << 20))
            assert store.get("big") == bytes(1 << 20)
        assert generation(store) < 4


def test_dead_sessions_are_forgotten_when_the_log_is_compacted(path: Path) -> None:
    with FileStore(path, rank=0) as store:
        for number in range(60):
            with FileStore(path, rank=number % 3, label=f"handle {number}") as other:
                other.set("k", str(number))
            if number % 20 == 19:
                store.compact()
        store.compact()
        log = read_newest(path)
        assert sorted(session["rank"] for session in log.sessions.values()) == [0, 0, 1, 2]
        assert store.dead_ranks([0, 1, 2]) == [1, 2]
        assert path.with_name(names(path)[0]).stat().st_size < 1500


@pytest.mark.parametrize("compacts", ["itself", "another"])
def test_long_lived_handle_forgets_the_dead_sessions_a_compaction_dropped(compacts: str, path: Path) -> None:
    with FileStore(path, rank=0) as store, FileStore(path, rank=1) as other:
        for number in range(60):
            with FileStore(path, rank=number % 4, label=f"handle {number}") as third:
                third.set("k", str(number))
            if number % 20 == 19:
                (store if compacts == "itself" else other).compact()
                assert store.get("k") == b"%d" % number
                with FileStore(path, read_only=True) as late:
                    late.check(["k"])
                    assert log_of(store).sessions == log_of(late).sessions
                    assert log_of(store).deaths == log_of(late).deaths
                    assert log_of(store).table.ranks == log_of(late).table.ranks
        assert len(log_of(store).sessions) == 6  # the two that live, and the last of each rank
        assert store.dead_ranks(range(4)) == other.dead_ranks(range(4)) == [2, 3]
        assert store.dead_sessions(range(3, 60)) == list(range(3, 60))


@pytest.mark.parametrize("wrong", ["x", 1.5, True, -1])
def test_threshold_that_is_invalid_is_refused(wrong: object, path: Path) -> None:
    with pytest.raises((TypeError, ValueError)):
        FileStore(path, compact_bytes=wrong)  # type: ignore[arg-type]


def test_read_only_handle_cannot_compact(path: Path) -> None:
    FileStore(path).close()
    with FileStore(path, read_only=True) as reader, pytest.raises(StoreError, match="read_only"):
        reader.compact()


@pytest.mark.parametrize("read_only", [True, False])
def test_generation_that_was_deleted_is_reported_as_gone(read_only: bool, path: Path) -> None:
    with FileStore(path) as store, FileStore(path, read_only=read_only) as other:
        store.set("k", "v")
        store.compact()
        assert other.get("k") == b"v"
        path.with_name(names(path)[0]).unlink()
        log_of(other).handle.path_checked_at = 0.0
        with pytest.raises(StoreGoneError, match="generation 1"):
            other.get("k")
    with pytest.raises(StoreGoneError, match="generation 1"):
        FileStore(path, read_only=read_only)


@pytest.mark.parametrize("replaced", [True, False])
def test_log_that_was_removed_is_gone_in_a_later_generation_too(replaced: bool, path: Path) -> None:
    """Its inode number may be given to the next file at once."""
    with FileStore(path) as store:
        store.set("k", "v")
        store.compact()
        path.unlink()
        if replaced:
            FileStore(path).close()
        log_of(store).handle.path_checked_at = 0.0
        with pytest.raises(StoreGoneError):
            store.get("k")


def test_generation_of_another_log_is_refused(path: Path) -> None:
    with FileStore(path) as store, FileStore(path.with_name("other")) as other:
        for handle in (store, other):
            handle.set("k", "v")
            handle.compact()
    (mine,), (theirs,) = names(path), names(path.with_name("other"))
    path.with_name(mine).write_bytes(path.with_name(theirs).read_bytes())
    for read_only in (True, False):
        with pytest.raises(CorruptLogError, match="not the next generation"):
            FileStore(path, read_only=read_only)


def test_symbolic_link_in_place_of_a_generation_is_not_followed(path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        store.compact()
    (name,) = names(path)
    path.with_name(name).rename(path.with_name("moved"))
    path.with_name(name).symlink_to(path.with_name("moved"))
    with pytest.raises(StoreError, match="symbolic link"):
        FileStore(path)


def test_compaction_without_disk_space_is_an_error_only_if_requested(path: Path) -> None:
    with FileStore(path, compact_bytes=1000) as store, faulty_os() as faulty:
        store.set("k", "v")
        with faulty.fail(0, 28, names=("fsync",)), pytest.raises(StoreUnavailableError):
            store.compact()
        assert names(path) == []
        with faulty.fail(0, 28, names=("fsync",), for_good=True):
            for number in range(100):
                store.set("k", f"{number} {'x' * 50}")
                assert names(path) == []
        assert generation(store) == 0
        for number in range(100):
            store.set("k", f"{number} {'x' * 50}")
        assert generation(store) > 0


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("watch", ["auto", "inotify", "poll"])
def test_waiter_is_woken_by_a_write_to_a_later_generation(watch: str, read_only: bool, path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        with FileStore(path, read_only=read_only, watch=watch, timeout=LIMIT_S) as other:
            with start_thread(other.get, "awaited") as waiter:
                until(lambda: notifier_of(other)._waiters)
                for _ in range(3):
                    store.compact()
                    store.set("k", "w")
                until(lambda: generation(other) == 3)
                if watch != "poll" and read_only:  # it rings no bell, and watches the log itself
                    until(lambda: getattr(watcher_of(other), "_log_path", "").endswith(names(path)[0]))
                store.set("awaited", "1")
            assert waiter.result == b"1"


def test_dump_shows_the_first_and_the_newest_generation(path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        store.compact()
        store.set("lost", "1")
        store.compact()
        store.set("last", "1")
    entries = list(dump(path))
    assert [(entry.generation, entry.kind) for entry in entries] == [
        (0, "session"), (0, "set"), (0, "seal"), (0, "forward"), (2, "session"), (2, "multi_set"), (2, "set"),
    ]  # fmt: skip
    assert entries[3].value.decode() == names(path)[0]


def test_generation_names_and_references_are_parsed_and_others_rejected() -> None:
    name = generation_name(b"log.1", 12, b"\1\2\3\4\5\6")
    assert name == b"log.1.12.010203040506"
    assert parse_generation_name(name) == parse_generation_name(name, b"log.1") == 12
    for wrong in (b"log", b"log.1.x", b"log.0.010203040506", b"log.1.01020304050", b"log.1.01020304050G", b"a/" + name):
        assert parse_generation_name(wrong) is None
    assert parse_generation_name(name, b"log") is None
    successor = GenerationRef(12, b"i" * 16, 1 << 40, 7, name)
    assert GenerationRef.from_seal(successor.seal() + b"later") == successor
    assert GenerationRef.from_forward(successor.forward() + b"later") == successor._replace(size=0, chain=0)
    for cut in range(len(successor.forward())):
        with pytest.raises(MalformedRecord, match=r"cut short|not a name"):
            GenerationRef.from_forward(successor.forward()[:cut])


def test_generation_number_has_at_most_10_digits_and_its_name_255_bytes() -> None:
    random = b".010203040506"
    assert parse_generation_name(b"log.1234567890" + random) == 1234567890
    for wrong in (b"log.12345678901" + random, b"log.1" + random + b"0", b"1" + random, b"log.1.2" + random[:-1]):
        assert parse_generation_name(wrong) is None
    longest = GenerationRef(7, b"i" * 16, 100, 5, b"l" * (255 - 2 - len(random)) + b".7" + random)
    assert GenerationRef.from_seal(longest.seal(), 6) == longest
    for sealed in (5, 7):
        with pytest.raises(MalformedRecord, match="not the next"):
            GenerationRef.from_seal(longest.seal(), sealed)
    for cut in range(len(longest.seal())):
        with pytest.raises(MalformedRecord, match=r"cut short|not a name"):
            GenerationRef.from_seal(longest.seal()[:cut])
    for name in (b"l" + longest.name, longest.name.replace(b"l", b"\0", 1), longest.name.replace(b".7.", b".8.")):
        for value, decode in (
            (longest._replace(name=name).seal(), GenerationRef.from_seal),
            (longest._replace(name=name).forward(), GenerationRef.from_forward),
        ):
            with pytest.raises(MalformedRecord, match="is not a name for generation 7"):
                decode(value)


def test_watch_on_a_generation_just_removed_is_replaced(path: Path) -> None:
    with FileStore(path) as store, FileStore(path, read_only=True, watch="inotify", timeout=LIMIT_S) as reader:
        store.set("k", "v")
        store.compact()
        assert reader.get("k") == b"v"
        make = notifier_of(reader)._make_watcher
        stale = [2]

        def make_late() -> object:
            if stale[0]:
                stale[0] -= 1
                store.compact()
            return make()

        notifier_of(reader)._make_watcher = make_late
        with start_thread(reader.get, "awaited") as waiter:
            until(lambda: stale[0] == 0 and generation(reader) == 3)
            store.set("awaited", "1")
        assert waiter.result == b"1"


LONG_HISTORY = """
import os, sys
from fscoord import FileStore

def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

path, operations = sys.argv[1], int(sys.argv[2])
with FileStore(path) as store, FileStore(path) as reader:
    for number in range(operations):
        store.set(f"key.{number % 1000}", str(number))
        if number % 1000 == 0:
            reader.check(["key.0"])
        if number == operations // 2:  # behind the first compactions, which take what they will need
            before = resident()
    files = [os.path.join(os.path.dirname(path), name) for name in os.listdir(os.path.dirname(path))]
    print(store._log.handle.header.generation, resident() - before, sum(os.path.getsize(file) for file in files))
"""


def test_memory_and_files_do_not_grow_with_the_history(tmp_path: Path, scale: Callable[[int], int]) -> None:
    operations = max(40_000, scale(40_000))
    code = [sys.executable, "-c", LONG_HISTORY, str(tmp_path / "store"), str(operations)]
    done = subprocess.run(code, stdout=subprocess.PIPE, text=True, timeout=60 + operations / 1000, check=True)
    generations, grown, size = map(int, done.stdout.split())
    assert generations > operations // 10_000
    assert grown < 2 << 20
    assert size < 2 * 1000 * len("key.999" + str(operations)) + (1 << 20)


def test_damage_to_a_forward_record_keeps_old_files_and_loses_no_data(path: Path) -> None:
    """No process writes behind damage, so no file is removed any longer."""
    with FileStore(path) as store:
        store.set("k", "1")
        store.compact()
        size = path.stat().st_size
        (last,) = (path.with_name(name) for name in names(path))
        os.link(last, path.with_name("kept"))
        store.compact()
        before = generation(store)
    with path.open("r+b") as file:
        file.seek(size + 20)
        file.write(b"damage")
    path.with_name("kept").rename(last)  # or nothing would name a file that is there
    with FileStore(path) as store:
        assert (store.get("k"), generation(store)) == (b"1", before)
        store.set("k", "2")
        for _ in range(3):
            store.compact()
        with FileStore(path) as late:
            assert (late.get("k"), generation(late)) == (b"2", before + 3)
    assert len(names(path)) > 1
    assert verify(path).verdict == "damaged"
    copy = path.with_name("copy")
    repair(path, copy, write=True)
    assert verify(copy).verdict == "sound"
    with FileStore(copy) as store:
        assert store.get("k") == b"2"


@pytest.mark.parametrize(("end", "chunk"), [(b"", reader.CHUNK), (b"torn", reader.CHUNK), (b"torn", 1)])
def test_damage_to_a_superseded_generation_does_not_prevent_opening(
    end: bytes, chunk: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of the forward record may have died before it could remove the file, or torn a later forward record.

    What was read may end with the seal.
    """
    monkeypatch.setattr(reader, "CHUNK", chunk)
    with FileStore(path) as store:
        store.set("k", "1")
        store.compact()
        (first,) = names(path)
        data = path.with_name(first).read_bytes()
        store.compact()
    path.with_name(first).write_bytes(bytes([data[0] ^ 1]) + data[1:])
    path.with_name(first).chmod(0o600)
    with path.open("ab") as file:
        file.write(end)
    assert verify(path).verdict == "sound"
    for read_only in (True, False):
        with FileStore(path, read_only=read_only) as store:
            assert (store.get("k"), generation(store)) == (b"1", 2)


def test_handle_two_compactions_behind_follows_to_the_newest_generation(path: Path) -> None:
    with FileStore(path) as store, FileStore(path) as sleeper:
        store.set("k", "1")
        assert sleeper.get("k") == b"1"
        store.compact()
        (first,) = names(path)
        os.link(path.with_name(first), path.with_name("kept"))
        store.compact()
        path.with_name("kept").rename(path.with_name(first))
        os.truncate(path.with_name(first), 100)
        assert (sleeper.get("k"), generation(sleeper)) == (b"1", 2)
        assert sleeper.add("n", 1) == 1


def test_forward_record_without_a_seal_before_it_is_damage(path: Path) -> None:
    """A seal ends a generation. No process writes a forward record before the seal."""
    with FileStore(path) as store:
        store.set("k", "1")
        handle = log_of(store).handle
        session = handle.lock.session
    log = read_log(path.read_bytes())
    assert log.ends == "whole"
    named = GenerationRef(1, bytes(16), 0, 0, generation_name(os.fsencode(path.name), 1, bytes(6)))
    assert forwarding.post(handle, named, session, time.time_ns()) is not None
    found = verify(path)
    assert found.verdict == "damaged"
    assert "no seal before it" in str(found.findings[0].message)


def test_forward_record_follows_a_torn_one_without_o_append_too(path: Path) -> None:
    """On NFS a log with marker files is written past the cache, and O_DIRECT goes with no O_APPEND."""
    with FileStore(path) as store:
        store.set("k", "1")
        store.compact()
        handle = log_of(store).handle
    handle.write_flags = os.O_RDWR
    size = path.stat().st_size
    place = None
    for number in (2, 3):
        with path.open("ab") as file:
            file.write(b"torn")
        named = GenerationRef(number, bytes([number]) * 16, 0, 0, b"elsewhere")
        place = forwarding.post(handle, named, 1, time.time_ns(), place)
        assert place is not None
        assert place.offset == path.stat().st_size
        log = read_log(path.read_bytes())
        assert (log.ends, log.successor) == ("whole", (number, bytes([number]) * 16, "elsewhere"))
    assert path.stat().st_size > size


def test_generation_0_that_no_longer_names_a_later_one_is_another_file(path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        store.compact()
        assert store.get("k") == b"1"
        os.truncate(path, log_of(store).handle.root.start.offset)
        (name,) = names(path)
        path.with_name(name).unlink()
        log_of(store).handle.path_checked_at = 0.0
        with pytest.raises(StoreGoneError, match="another file, which names no later generation"):
            store.get("k")


def test_handle_of_unknown_generation_begins_again_at_the_newest(path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        for number in range(3):
            log_of(store).handle.recovery |= GENERATION
            assert store.get("k") == b"1"
            log_of(store).handle.recovery |= GENERATION
            assert store.add("n", 1) == number + 1
            assert log_of(store).handle.owned_fds == log_of(store).handle.fds_in_use() - {-1}
            store.compact()


@pytest.mark.parametrize("lives", [False, True])
def test_compaction_forgets_no_rank_that_a_session_has_announced(lives: bool, path: Path) -> None:
    """A session that has named several ranks is all of them. A rank is dead when all sessions that named it are."""
    with FileStore(path) as store:
        store.set("k", "v")
        first = FileStore(path, rank=5)
        first.announce_rank(6)
        with FileStore(path, rank=5):
            pass
        if not lives:
            first.close()
        dead = [] if lives else [5, 6]
        for _ in range(2):
            assert sorted(store.dead_ranks([5, 6])) == dead
            with FileStore(path) as late:
                assert sorted(late.dead_ranks([5, 6])) == dead
            store.compact()
        first.close()
        assert sorted(store.dead_ranks([5, 6])) == [5, 6]
