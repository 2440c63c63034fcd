"""Logs that are renamed, copied, archived and restored: no log loses data to another log, under any names.

Each test runs in whatever directory pytest is given: `pytest tests/faults/test_moved_logs.py --basetemp /mnt/xfs/x`
tries another file system.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.internals import (
    log_module as log_file,
    log_of,
    mount_module as mount,
    opened as opened_log,
    process_mutex_for,
)
from support.places import start_thread

from fscoord import CorruptLogError, FileStore, StoreError, StoreGoneError
from fscoord.inspect import copy, verify

HANG_S = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "job.store"


@contextmanager
def opened(path: Path, **arguments: object) -> Iterator[FileStore]:
    with FileStore(path, timeout=HANG_S, compact_bytes=None, **arguments) as store:  # type: ignore[arg-type]
        yield store


def make(path: Path, compactions: int = 2, value: str = "precious") -> None:
    """A log of some generations; 0: it was never compacted."""
    with opened(path) as store:
        store.set("k", value)
        for number in range(compactions):
            store.compact()
            store.set(f"later {number}", "x")


def generations(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if len(name.rsplit(".", 1)[-1]) == 12)


def read(path: Path) -> bytes:
    with opened(path, read_only=True) as store:
        return store.get("k")


def is_writable(path: Path) -> bool:
    """Write, compact twice, and write again: what every handle sees, and a fresh one."""
    with opened(path) as store, opened(path) as other:
        for number in range(3):
            store.set("written", str(number))
            assert other.get("written") == b"%d" % number
            store.compact()
            other.set("written", f"{number} too")
            assert store.get("written") == b"%d too" % number
    with opened(path, read_only=True) as store:
        return store.get("written") == b"2 too" and verify(path).verdict == "sound"


# -- moved -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compactions", [0, 1, 2])
def test_renamed_log_is_the_same_log(path: Path, compactions: int) -> None:
    make(path, compactions)
    archived = path.with_name("job.store.old")
    path.rename(archived)
    assert read(archived) == b"precious"
    assert is_writable(archived)
    assert read(archived) == b"precious"
    assert len(generations(path.parent)) == 1, "and its superseded files are removed, whatever name they have"


@pytest.mark.parametrize("compactions", [0, 1, 2])
def test_renamed_log_is_not_touched_by_the_next_at_its_old_name(path: Path, compactions: int) -> None:
    make(path, compactions)
    archived = path.with_name("job.store.old")
    path.rename(archived)
    make(path, 3, "new")
    assert is_writable(path)
    assert read(archived) == b"precious"
    assert is_writable(archived)
    assert is_writable(path)
    assert (read(archived), read(path)) == (b"precious", b"new")
    assert verify(archived).verdict == "sound"


def test_finished_log_removes_no_file_of_one_that_was_renamed(path: Path) -> None:
    make(path)
    archived = path.with_name("job.store.old")
    path.rename(archived)
    with FileStore(path, world_size=1, timeout=HANG_S) as store:
        store.set("k", "new")
        store.compact()
    assert not path.exists()
    assert read(archived) == b"precious"


def test_log_that_was_moved_with_its_files_is_the_same(path: Path) -> None:
    make(path)
    other = path.parent / "other"
    other.mkdir()
    for file in path.parent.glob("job.store*"):
        file.rename(other / file.name)
    assert read(other / path.name) == b"precious"
    assert is_writable(other / path.name)
    assert len(generations(other)) == 1


def test_log_moved_without_its_files_names_the_missing_one(path: Path) -> None:
    make(path)
    (missing,) = generations(path.parent)
    other = path.parent / "other"
    other.mkdir()
    moved = path.rename(other / path.name)
    for read_only in (True, False):
        with pytest.raises(StoreGoneError, match=rf"there is no {missing} in {other}.*move that file there"):
            FileStore(moved, read_only=read_only)
    assert verify(moved).verdict == "damaged"
    (path.parent / missing).rename(other / missing)
    assert read(moved) == b"precious"


def test_log_with_a_second_name_is_refused_to_writers(path: Path) -> None:
    make(path)
    os.link(path, path.with_name("second"))
    with pytest.raises(StoreError, match="several names"):
        FileStore(path)
    assert read(path) == b"precious"


# -- copied ------------------------------------------------------------------------------------------------------------


def copy_first_file(path: Path) -> Path:
    """`cp job.store job.bak`, for a backup before one tries something."""
    shutil.copy(path, path.with_name("job.bak"))
    return path.with_name("job.bak")


def test_copy_of_the_first_file_alone_is_refused_with_the_remedy(path: Path) -> None:
    make(path)
    copied = copy_first_file(path)
    before = {name: (path.parent / name).read_bytes() for name in os.listdir(path.parent)}
    for read_only in (True, False):
        with pytest.raises(StoreError, match=rf"is a copy of {path}, and .*`fscoord cp {copied} NEW` makes"):
            FileStore(copied, read_only=read_only)
    assert {name: (path.parent / name).read_bytes() for name in os.listdir(path.parent)} == before
    (finding,) = [finding for finding in verify(copied).findings if finding.is_damage]
    assert "fscoord cp" in finding.advice
    assert is_writable(path)


def test_copy_of_the_first_file_alone_can_be_made_a_log_by_cp(path: Path) -> None:
    make(path)
    copied = copy_first_file(path)
    made = path.with_name("made")
    assert copy(copied, made).kept > 0
    copied.unlink()
    assert is_writable(made)
    assert is_writable(path)
    assert (read(made), read(path)) == (b"precious", b"precious")


def test_copy_of_a_log_of_one_file_is_a_log_of_its_own(path: Path) -> None:
    make(path, 0)
    copied = copy_first_file(path)
    with opened(copied) as other, opened(path) as store:
        assert other.get("k") == b"precious"
        other.set("k", "overwritten through the copy")
        assert store.get("k") == b"precious"
        store.compact()
        other.compact()
    assert is_writable(path)
    assert is_writable(copied)
    assert (read(path), read(copied)) == (b"precious", b"overwritten through the copy")


@pytest.mark.parametrize("compactions", [0, 1, 2])
def test_copied_directory_holds_a_log_of_its_own(path: Path, compactions: int) -> None:
    make(path, compactions)
    other = path.parent / "other"
    shutil.copytree(path.parent, other, ignore=lambda *_: {"other"})
    copied = other / path.name
    before = generations(other)
    assert read(copied) == b"precious"
    assert generations(other) == before, "who reads begins nothing"
    with opened(copied) as store:
        store.set("k", "copy")
        assert len(generations(other)) == len(before) + 1, "the first write begins a lineage, and removes nothing"
    assert is_writable(copied)
    assert is_writable(path)
    assert (read(path), read(copied)) == (b"precious", b"copy")


def test_copy_of_a_copy_is_a_log_of_its_own_as_well(path: Path) -> None:
    make(path)
    second, third = path.parent / "second", path.parent / "third"
    shutil.copytree(path.parent, second, ignore=lambda *_: {"second"})
    assert is_writable(second / path.name)
    shutil.copytree(second, third)
    assert is_writable(third / path.name)
    shutil.copy(third / path.name, third / "half")
    with pytest.raises(StoreError, match="they would be one store"):
        FileStore(third / "half")
    assert {read(place / path.name) for place in (path.parent, second, third)} == {b"precious"}


def test_first_writers_of_a_copy_begin_one_lineage(path: Path) -> None:
    make(path)
    other = path.parent / "other"
    shutil.copytree(path.parent, other, ignore=lambda *_: {"other"})
    with opened(other / path.name) as one, opened(other / path.name) as two:
        threads = [start_thread(handle.add, "n", 1) for handle in (one, two) for _ in range(5)]
        for thread in threads:
            with thread:
                pass
        assert one.get("n") == b"10"
        assert len({log_of(handle).handle.header.lineage for handle in (one, two)}) == 1
    assert len(generations(other)) == 2


def test_handles_of_a_copy_share_nothing_with_those_of_the_original(path: Path) -> None:
    """The process's mutex was found by the log's id, which a copy has too."""
    make(path)
    other = path.parent / "other"
    shutil.copytree(path.parent, other, ignore=lambda *_: {"other"})
    with opened(path) as store, opened(path) as same, opened(other / path.name) as copied:
        assert log_of(store).handle.mutex is log_of(same).handle.mutex
        assert log_of(store).handle.mutex is not log_of(copied).handle.mutex
        assert process_mutex_for(log_of(store).handle.root.key) is not process_mutex_for(log_of(copied).handle.root.key)


def test_log_copied_while_it_is_written_is_whole_or_refused(path: Path) -> None:
    """As rsync(1) does it: file by file, while the log goes on and is compacted."""
    writer = """
import sys
from fscoord import FileStore
store = FileStore(sys.argv[1], timeout=60, compact_bytes=2000)
print("ready", flush=True)
while True:
    store.add("n", 1)
"""
    make(path, 0)
    command = [sys.executable, "-c", writer, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            outcomes = [copy_by_file(path, path.parent / f"copy {number}") for number in range(40)]
        finally:
            process.kill()
    assert set(outcomes) <= {"whole", "refused"}
    assert copy_by_file(path, path.parent / "copy at rest") == "whole"
    assert is_writable(path)


def copy_by_file(path: Path, target: Path) -> str:
    target.mkdir()
    for name in sorted(os.listdir(path.parent)):
        try:
            if name.startswith("job.store"):
                shutil.copy(path.parent / name, target / name)
        except FileNotFoundError:  # it was superseded meanwhile
            continue
    try:
        with opened(target / path.name) as store:
            number = int(store.get("n")) if store.check(["n"]) else 0
            assert store.add("n", 1) == number + 1
            assert store.get("k") == b"precious"
    except (StoreGoneError, CorruptLogError):
        return "refused"
    assert is_writable(target / path.name)
    return "whole"


# -- restored ----------------------------------------------------------------------------------------------------------


def back_up(path: Path) -> Path:
    backup = path.parent / "backup"
    backup.mkdir()
    for file in path.parent.glob("job.store*"):
        shutil.copy(file, backup / file.name)
    return backup


def test_backup_restored_beside_the_living_log_does_not_touch_it(path: Path) -> None:
    make(path)
    backup = back_up(path)
    with opened(path) as store:
        store.set("k", "newer")
        for file in backup.iterdir():  # under the names that they had, but for the first
            name = "job.restored" if file.name == "job.store" else file.name
            if not (path.parent / name).exists():
                shutil.copy(file, path.parent / name)
        with pytest.raises(StoreError, match=r"they would be one store"):
            FileStore(path.parent / "job.restored")
        store.compact()
        assert store.get("k") == b"newer"
    assert is_writable(path)


def test_backup_restored_in_place_of_a_removed_log_is_a_copy(path: Path) -> None:
    make(path)
    backup = back_up(path)
    for file in path.parent.glob("job.store*"):
        file.unlink()
    for file in backup.iterdir():
        shutil.copy(file, path.parent / file.name)
    assert read(path) == b"precious"
    assert is_writable(path)


def test_first_file_restored_over_the_living_one_is_a_copy(path: Path) -> None:
    """By a program that writes to a new file and renames it, as rsync(1) does. Nothing else leads to its files then."""
    make(path)
    backup = back_up(path)
    with opened(path) as store:
        shutil.copy(backup / path.name, path.with_name("temporary"))
        path.with_name("temporary").rename(path)
        with pytest.raises(StoreGoneError, match="was replaced by another file"):
            store.wait(["never"], HANG_S)
    assert read(path) == b"precious"
    assert is_writable(path)


def test_later_file_restored_over_the_living_one_is_a_copy(path: Path) -> None:
    make(path)
    (name,) = generations(path.parent)
    shutil.copy(path.parent / name, path.with_name("temporary"))
    path.with_name("temporary").rename(path.parent / name)
    assert verify(path).verdict == "sound"
    assert read(path) == b"precious"
    assert is_writable(path)


def test_copies_of_the_first_file_are_one_store_for_the_first_writer_only(path: Path) -> None:
    """The original is gone, so that either may go on; and the other one is refused from then on."""
    make(path)
    copies = [path.with_name("one"), path.with_name("two")]
    for copied in copies:
        shutil.copy(path, copied)
    path.unlink()
    assert [read(copied) for copied in copies] == [b"precious"] * 2
    with opened(copies[0]) as store:
        store.set("k", "first")
    with pytest.raises(StoreError, match="they would be one store"):
        FileStore(copies[1])
    assert is_writable(copies[0])
    assert read(copies[0]) == b"first"


def test_older_log_written_over_the_first_file_removes_no_later_file(path: Path) -> None:
    """`cp backup/job.store job.store` keeps the inode. The later files belong to the log, and hold what it lost."""
    make(path, 0)
    shutil.copy(path, path.with_name("backup"))
    with opened(path) as store:
        for number in range(3):
            store.set("k", f"newer {number}")
            store.compact()
    (newest,) = generations(path.parent)
    path.write_bytes(path.with_name("backup").read_bytes())
    with opened(path) as store:
        assert store.get("k") == b"precious"
        store.compact()
    assert newest in generations(path.parent), "it has a higher number than the new generation"


def test_rolled_back_file_system_holds_a_sound_log(path: Path) -> None:
    """A snapshot keeps inode numbers: all files are what they were, at one moment."""
    make(path)
    files = {file: (file.stat().st_ino, file.read_bytes()) for file in path.parent.glob("job.store*")}
    held = {file: file.open("rb") for file in files}  # so that no inode number is given again
    try:
        with opened(path) as store:
            store.set("k", "newer")
        for file, (inode, data) in files.items():
            assert file.stat().st_ino == inode
            file.write_bytes(data)
    finally:
        for reader in held.values():
            reader.close()
    assert read(path) == b"precious"
    assert is_writable(path)


# -- fscoord cp --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compactions", [0, 2])
def test_cp_makes_a_log_of_its_own_beside_a_writer(path: Path, compactions: int) -> None:
    make(path, compactions)
    with opened(path) as store:
        store.queue_push("queue", "item")
        store.append("text", "abc")
        made = path.with_name("made")
        copy(path, made)
        store.set("k", "newer")
        with opened(made) as other:
            assert other.get("k") == b"precious"
            assert other.queue_pop("queue", block=False) == b"item"
            assert other.append("text", "d") is None
            assert other.get("text") == b"abcd"
            other.compact()
        assert store.queue_len("queue") == 1
    assert is_writable(made)
    assert read(path) == b"newer"


def test_cp_overwrites_nothing_and_copies_no_damage(path: Path) -> None:
    make(path, 0)
    made = path.with_name("made")
    made.write_text("mine")
    with pytest.raises(ValueError, match="nothing is overwritten"):
        copy(path, made)
    assert made.read_text() == "mine"
    made.unlink()
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptLogError, match="is damaged at offset"):
        copy(path, made)
    assert not made.exists()
    assert not list(path.parent.glob("*.new"))


def test_cp_leaves_out_a_record_that_was_never_finished(path: Path) -> None:
    make(path, 0)
    os.truncate(path, path.stat().st_size - 3)
    with opened(path) as store:
        store.set("k", "after the torn one")
    os.truncate(path, path.stat().st_size - 3)
    made = path.with_name("made")
    copy(path, made)
    assert verify(made).verdict == "sound"
    assert is_writable(made)


# -- where inode numbers do not last -----------------------------------------------------------------------------------


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """All directories are on a file system like that of sshfs(1), but for its locks."""
    look_up: Callable[[str], mount.Mount] = mount.find_mount
    for module in (log_file, opened_log):
        monkeypatch.setattr(module, "find_mount", lambda path: look_up(path)._replace(kind="fuse.bindfs"))
    monkeypatch.setattr(mount.Mount, "is_local", property(lambda _: True))


def test_log_without_lasting_inode_numbers_removes_nothing(path: Path, fuse: None) -> None:
    make(path, 3)
    assert len(generations(path.parent)) == 3
    assert read(path) == b"precious"
    with opened(path) as store:
        header = log_of(store).handle.header
        assert (header.inode, header.root_inode) == (0, 0)
        store.set("k", "later")
    shutil.copytree(path.parent, path.parent / "other", ignore=lambda *_: {"other"})
    assert read(path.parent / "other" / path.name) == b"later"


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("ext4", True),
        ("nfs4", True),
        ("lustre", True),
        ("fuse.glusterfs", True),
        ("fuse.sshfs", False),
        ("fuse", False),
    ],
)
def test_mount_knows_whether_its_inode_numbers_last(kind: str, last: bool) -> None:
    assert mount.Mount(kind, "/", ()).inodes_last is last
