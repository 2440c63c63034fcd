"""Compaction by generations: content of a new generation, the handles that follow, the files, and the time."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faulty import FaultyOs, faulty_os
from support.internals import (
    DESCRIPTORS,
    GENERATION,
    GenerationRef,
    Header,
    MalformedRecord,
    forwarding,
    generation_name,
    log_of,
    notifier_of,
    open_root,
    parse_generation_name,
    record,
    state_of,
    system,
    unlock_of_a_closed_lock as _nothing,
    watcher_of,
)
from support.places import start_thread, wait_in_vain
from support.plain_reader import read_log, read_newest

from fscoord import CorruptLogError, FileStore, InsecurePathError, StaleRunError, StoreError, StoreGoneError
from fscoord.inspect import repair, verify
from fscoord.stores.file import lifecycle

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
                    assert log_of(store).table.sessions == log_of(late).table.sessions
                    assert log_of(store).table.deaths == log_of(late).table.deaths
                    assert log_of(store).table.ranks == log_of(late).table.ranks
        assert len(log_of(store).table.sessions) == 6  # the two that live, and the last of each rank
        assert store.dead_ranks(range(4)) == other.dead_ranks(range(4)) == [2, 3]
        assert store.dead_sessions(range(3, 60)) == list(range(3, 60))


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


def test_generation_names_and_references_are_parsed_and_others_rejected() -> None:
    name = generation_name(b"log.1", 12, b"\1\2\3\4\5\6")
    assert name == b"log.1.12.010203040506"
    assert parse_generation_name(name) == parse_generation_name(name, b"log.1") == 12
    for wrong in (b"log", b"log.1.x", b"log.0.010203040506", b"log.1.01020304050", b"log.1.01020304050G", b"a/" + name):
        assert parse_generation_name(wrong) is None
    assert parse_generation_name(name, b"log") is None
    successor = GenerationRef(12, b"i" * 16, 1 << 40, 7, name)
    assert GenerationRef.decode(record.SEAL, successor.seal() + b"later") == successor
    forward = successor.forward()
    assert GenerationRef.decode(record.FORWARD, forward + b"later") == successor._replace(size=0, chain=0)
    for cut in range(len(forward)):
        with pytest.raises(MalformedRecord, match=r"cut short|not a name"):
            GenerationRef.decode(record.FORWARD, forward[:cut])


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


# The making of a generation


@pytest.fixture
def kernel() -> Iterator[FaultyOs]:
    with faulty_os() as faulty:
        yield faulty


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_generation_has_the_mode_of_the_one_before_and_is_changed_only_if_not(
    mode: int, path: Path, kernel: FaultyOs
) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        path.chmod(mode)
        kernel.calls.clear()
        store.compact()
        (name,) = names(path)
        assert stat.S_IMODE(path.with_name(name).stat().st_mode) == mode
        assert ("fchmod" in [call for call, _ in kernel.calls]) is (mode != 0o600)


def test_name_that_a_forked_child_has_taken_for_the_next_generation_is_replaced(path: Path, kernel: FaultyOs) -> None:
    """A signal handler forks before open(2), and the child is the first to create the file of that name."""
    taken: list[Path] = []

    def open_in_child(name: str, _: object, given: tuple[Any, ...]) -> None:
        if name == "open" and given[1] & os.O_EXCL and not taken:
            taken.append(Path(given[0]))
            taken[0].write_bytes(b"")

    with FileStore(path) as store:
        store.set("k", "1")
        with kernel.instead(open_in_child):
            store.compact()
        assert generation(store) == 1
        assert log_of(store).handle.file != str(taken[0])
        assert store.get("k") == b"1"


# The way from one generation to the next


@pytest.fixture
def log_path(memory: Path) -> str:
    return str(memory / "log")


def generation_file(log_path: str, number: int) -> Path:
    (found,) = Path(log_path).parent.glob(f"log.{number}.*")
    return found


def held(store: FileStore) -> list[str]:
    """The files to which the descriptors of its log lead, by name."""
    return sorted(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) for fd in log_of(store).handle.owned_fds)


def resets(store: FileStore) -> list[bool]:
    """A list that grows whenever the handle begins to read all anew."""
    seen: list[bool] = []
    reset = state_of(store).reset
    state_of(store).reset = lambda: (seen.append(True), reset())[1]  # type: ignore[method-assign]
    return seen


# -- what a forked child does first


def be_forked(log: Any) -> None:
    """Do to `log` what a forked child does, in the order in which it does so."""
    system.close_all(os.close, log.handle.owned_fds)
    log.handle.shared.renew()
    log.after_fork()


@pytest.mark.parametrize("compactions", [0, 1, 2])
def test_forked_child_opens_its_own_descriptors_and_is_a_new_session(compactions: int, log_path: str) -> None:
    with FileStore(log_path) as store:
        store.set("k", "1")
        for _ in range(compactions):
            store.compact()
        store.set("k", "2")
        log: Any = log_of(store)
        before, session, seen, old = held(store), log.handle.lock.session, resets(store), log.handle.lock
        be_forked(log)
        assert log.handle.mutex is log.handle.shared.mutex
        assert log.handle.recovery & DESCRIPTORS
        assert (held(store), log.liveness.file, log.liveness._fds, log.handle.lock.session) == ([], None, set(), 0)
        assert store.get("k") == b"2"
        assert (held(store), seen) == (before, []), "the same files, and nothing is read twice"
        assert (log.handle.root_fd >= 0) is (compactions > 0)
        assert old.is_closed
        assert old.unlock is _nothing, "the number of its descriptor is another's by now"
        store.set("k", "3")
        assert log.handle.lock.session > session
        with FileStore(log_path) as other:
            assert other.get("k") == b"3"


def test_handle_that_lost_its_generation_begins_again_at_generation_0(log_path: str) -> None:
    """As who was interrupted on the way into one whose maker has died."""
    with FileStore(log_path) as store:
        store.set("k", "1")
        log: Any = log_of(store)
        log.handle.file, log.handle.file_identity = f"{log_path}.nothing", (0, 0)
        log.handle.recovery |= GENERATION
        assert store.get("k") == b"1"
        assert log.handle.file == log_path


# -- opening


def test_generation_0_is_reopened_only_if_it_still_has_the_name_of_the_log(log_path: str) -> None:
    for way, says in (("deleted", "was deleted"), ("replaced", "was replaced by another file")):
        with FileStore(log_path) as store:
            store.compact()
            count = len(held(store))
            os.rename(log_path, f"{log_path}.old")
            if way == "replaced":
                Path(log_path).touch()
            with pytest.raises(StoreGoneError, match=says):
                open_root(log_of(store).handle)
            assert len(held(store)) == count
            with pytest.raises(StoreGoneError, match=says):
                store.get("k")
        Path(log_path).unlink(missing_ok=True)
        generation_file(log_path, 1).unlink()


# -- following


def test_generation_that_others_can_write_is_refused(log_path: str) -> None:
    with FileStore(log_path) as store, FileStore(log_path) as other:
        store.set("k", "1")
        other.compact()
        file = generation_file(log_path, 1)
        file.chmod(0o666)
        with pytest.raises(InsecurePathError, match="others can write it"):
            store.get("k")
        assert file.name not in held(store)
        with pytest.raises(InsecurePathError):
            FileStore(log_path)
        file.chmod(0o600)
        assert store.get("k") == b"1"


@pytest.mark.parametrize("field", ["lock_kind", "durable"])
def test_generation_with_another_lock_kind_or_durability_is_refused(field: str, log_path: str) -> None:
    with FileStore(log_path) as store:
        store.compact()
    file = generation_file(log_path, 1)
    header, _ = Header.decode(file.read_bytes())
    file.write_bytes(header._replace(**{field: 1 - getattr(header, field)}).encode())
    with pytest.raises(StoreError, match="its kind of lock or its durability differs from that of") as caught:
        FileStore(log_path)
    assert caught.value.path == str(file)


def test_generation_with_a_bad_header_is_damaged_at_offset_0(log_path: str) -> None:
    with FileStore(log_path) as store:
        store.compact()
    file = generation_file(log_path, 1)
    file.write_bytes(b"?" + file.read_bytes()[1:])
    with pytest.raises(CorruptLogError) as caught:
        FileStore(log_path)
    assert caught.value.offset == 0


# -- runs


def test_session_keeps_its_number_through_compactions_of_its_run(
    log_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "ATTEMPTS", 1)  # who begins a run goes on in it
    with FileStore(log_path, run_id=("first", 0)) as first:
        first.set("k", "1")
    with FileStore(log_path, run_id=("second", 0)) as store:
        store.set("k", "2")
        assert len(log_of(store).handle.header.run_ids) == 2
        session = log_of(store).handle.lock.session
        assert session in log_of(store).table.sessions
        for _ in range(2):
            store.compact()
            store.set("k", "3")
            assert log_of(store).handle.lock.session == session, "the header names two runs, and the first one counts"


@pytest.mark.parametrize(
    ("by", "says"),
    [
        (None, "belongs to a new start of the job by now; end"),
        ((b"opaque", -1), "belongs to run 'opaque' by now"),
        ((b"job", 0), "belongs to run 'job', restart 0, by now"),
        ((b"job", 7), "belongs to run 'job', restart 7, by now"),
    ],
)
def test_superseding_run_is_named_in_the_stale_run_error(
    by: tuple[bytes, int] | None, says: str, log_path: str
) -> None:
    with FileStore(log_path) as store:
        ids = () if by is None else (by,)
        assert says in str(log_of(store).follower.superseded(Header(b"", 1, run_ids=ids)))
        with pytest.raises(StaleRunError, match=says):
            store.check(["k"])
