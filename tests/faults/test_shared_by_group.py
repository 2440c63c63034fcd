"""A log of two users of one group: each can go on after the other has created a file or compacted the log.

Root runs these tests, for it becomes both users in turn.
"""

from __future__ import annotations

import codecs
import logging
import os
import shutil
import signal
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.internals import copy_permissions, log_of, safe_files
from support.places import wait_in_vain

import fscoord
from fscoord import FileStore

HANG_S = 60
ALICE, BOB, ALICES_OWN, BOBS_OWN, TEAM, OTHERS = 2001, 2002, 3001, 3002, 2100, 2200

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")
pytestmark = needs_root


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory of the team, outside of pytest's own, which are for one user alone."""
    path = Path(tempfile.mkdtemp(prefix="fscoord-test-", dir="/tmp"))
    os.chown(path, 0, TEAM)
    path.chmod(0o770)
    yield path
    shutil.rmtree(path)


def as_user(uid: int, gid: int, call: Callable[[], object], groups: tuple[int, ...] = (TEAM,)) -> None:
    """Call `call` in a child that is this user for good; raise AssertionError with what it raised."""
    import portalocker.portalocker  # noqa: F401 - the child may not be able to read it
    import watchdog.observers.inotify_c  # noqa: F401

    codecs.lookup("ascii")

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        words = "died"
        try:
            os.close(reader)
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            try:
                call()
                words = ""
            except BaseException as error:
                words = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, words.encode()[:4000])
            os._exit(0)
    os.close(writer)
    timer = time.monotonic() + HANG_S
    with os.fdopen(reader, "rb") as answer:
        words = answer.read().decode()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert time.monotonic() < timer
    assert words == "", f"uid {uid}: {words}"


def alice(call: Callable[[], object]) -> None:
    as_user(ALICE, ALICES_OWN, call)


def bob(call: Callable[[], object]) -> None:
    as_user(BOB, BOBS_OWN, call)


def opened(path: Path) -> FileStore:
    return FileStore(path, mode=0o660, timeout=HANG_S, compact_bytes=None)


def begin(path: Path) -> None:
    """As Alice, and then as root, which gives her file to the team."""

    def write() -> None:
        with opened(path) as store:
            store.set("a", "1")

    alice(write)
    for name in os.listdir(path.parent):
        os.chown(path.parent / name, -1, TEAM)


USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
"""The tags of an access control list, as the kernel has it in an extended attribute (linux/posix_acl_xattr.h)."""


def give(path: Path, *entries: tuple[int, int, int], kind: str = "access") -> None:
    """Add the entries ``(tag, permissions, id)`` to the list of a file that has the group's permissions as its mask."""
    mode = path.stat().st_mode
    usual = [(USER_OBJ, mode >> 6 & 7), (GROUP_OBJ, mode >> 3 & 7), (MASK, 7), (OTHER, mode & 7)]
    everyone = sorted([*entries, *((tag, permissions, 0xFFFFFFFF) for tag, permissions in usual)])
    data = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in everyone)
    os.setxattr(path, f"system.posix_acl_{kind}", data)


def list_of(path: Path) -> set[tuple[int, int, int]]:
    try:
        data = os.getxattr(path, "system.posix_acl_access")
    except OSError:
        return set()
    return set(struct.iter_unpack("<HHI", data[4:]))  # type: ignore[arg-type]


def write_and_compact(path: Path) -> Callable[[], None]:
    def call() -> None:
        with opened(path) as store:
            store.set("b", "1")
            store.compact()
            store.set("c", "1")

    return call


def read_and_write(path: Path) -> Callable[[], None]:
    def call() -> None:
        with opened(path) as store:
            assert store.list_keys() == ["a", "b", "c"]
            store.set("a", "2")
            assert store.members(), "and can see who lives"

    return call


@pytest.mark.parametrize("setgid", [False, True])
def test_compaction_keeps_the_group(directory: Path, setgid: bool) -> None:
    directory.chmod(0o2770 if setgid else 0o770)
    path = directory / "s"
    begin(path)
    bob(write_and_compact(path))
    assert {file.name: file.stat().st_gid for file in directory.iterdir()} == dict.fromkeys(os.listdir(directory), TEAM)
    alice(read_and_write(path))
    alice(write_and_compact(path))
    bob(read_and_write(path))
    assert {file.stat().st_gid for file in directory.iterdir()} == {TEAM}
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o660}


def test_compaction_by_root_keeps_owner_and_group(directory: Path) -> None:
    path = directory / "s"
    begin(path)
    write_and_compact(path)()
    found = {file.name: (file.stat().st_uid, file.stat().st_gid) for file in directory.iterdir()}
    assert set(found.values()) == {(ALICE, TEAM)}
    alice(read_and_write(path))


def test_side_cars_have_the_group_of_the_log(directory: Path) -> None:
    """Any user of any group may make them: bell and liveness file are made when they are needed."""
    path = directory / "s"
    begin(path)
    for name in os.listdir(directory):
        if name != "s":
            (directory / name).unlink()

    def wait() -> None:
        with opened(path) as store:
            store.set("c", "1")
            wait_in_vain(store)

    bob(wait)
    assert sorted(os.listdir(directory)) == ["s", "s.alive", "s.bell"]
    assert {file.stat().st_gid for file in directory.iterdir()} == {TEAM}
    alice(wait)


def test_compaction_that_cannot_give_the_group_is_left_to_others(directory: Path) -> None:
    """Carol owns nothing and is not of the team; an access control list lets her write."""
    path = directory / "s"
    begin(path)
    carol = 2003
    for file in directory.iterdir():
        give(file, (USER, 6, carol))
    give(directory, (USER, 7, carol))

    def write() -> None:
        warnings: list[str] = []
        logging.getLogger("fscoord").addHandler(Keep(warnings))
        with FileStore(path, mode=0o660, timeout=HANG_S, compact_bytes=2000) as store:
            for number in range(300):
                store.set("b", str(number))
            assert log_of(store).handle.header.generation == 0
        assert len(warnings) == 1, warnings
        assert "could not be compacted" in warnings[0]
        assert "Operation not permitted" in warnings[0]

    as_user(carol, 3003, write, groups=())
    assert [name for name in os.listdir(directory) if name.startswith("s.1")] == []
    bob(write_and_compact(path))
    alice(read_and_write(path))


class Keep(logging.Handler):
    """Keeps the warnings."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_compaction_keeps_the_access_control_list(directory: Path) -> None:
    path = directory / "s"
    begin(path)
    for file in directory.iterdir():
        give(file, (USER, 6, BOB), (GROUP, 4, OTHERS))
    give(directory, (USER, 7, BOB))
    expected = list_of(path)
    assert (USER, 6, BOB) in expected
    write_and_compact(path)()
    (generation,) = directory.glob("s.1.*")
    assert list_of(generation) == expected
    as_user(BOB, BOBS_OWN, read_and_write(path), groups=())


def test_default_list_of_the_directory_is_not_added_to_a_log_without(directory: Path) -> None:
    path = directory / "s"
    begin(path)
    give(directory, (GROUP, 6, OTHERS), kind="default")
    expected = list_of(path)
    assert expected == set()
    bob(write_and_compact(path))
    (generation,) = directory.glob("s.1.*")
    assert list_of(generation) == expected
    alice(read_and_write(path))


def test_default_list_of_the_directory_serves_all_files_of_a_log(directory: Path) -> None:
    give(directory, (USER, 6, ALICE), (USER, 6, BOB), kind="default")
    give(directory, (USER, 7, ALICE), (USER, 7, BOB))
    path = directory / "s"

    def write() -> None:
        with opened(path) as store:
            store.set("a", "1")

    def write_only() -> None:
        with opened(path) as store:
            store.set("b", "1")
            with pytest.raises(fscoord.StoreUnavailableError, match="copying the group and access control list"):
                store.compact()  # Bob is not of Alice's group
            store.set("c", "1")

    as_user(ALICE, ALICES_OWN, write, groups=())
    as_user(BOB, BOBS_OWN, write_only, groups=())
    as_user(ALICE, ALICES_OWN, write_and_compact(path), groups=())
    as_user(BOB, BOBS_OWN, read_and_write(path), groups=())


def test_permissions_are_copied_or_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = directory / "source", directory / "target"
    for file in (source, target):
        file.write_text("")
    os.chown(source, ALICE, TEAM)
    source.chmod(0o640)
    with source.open() as wanted, target.open("w") as given:
        copy_permissions(wanted.fileno(), given.fileno())
    found = target.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (ALICE, TEAM, 0o640)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    os.chown(target, 0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(safe_files.system.os, "fchown", refuse)
        with source.open() as wanted, target.open("w") as given, pytest.raises(PermissionError):
            copy_permissions(wanted.fileno(), given.fileno())
