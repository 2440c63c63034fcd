"""Files at the path: only a log is used, and any other file is neither followed nor changed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of, notifier_of, watcher_of
from support.logs import HEADER_SIZE
from support.places import Thread, wait_in_vain
from support.plain_reader import read_log

from fscoord import (
    CorruptLogError,
    FileStore,
    FscoordError,
    InsecurePathError,
    StoreError,
    StoreGoneError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from fscoord._log import recovery
from fscoord._runtime import system
from fscoord.inspect import copy, dump, repair, verify

HANG_S = 60
"""No call of these tests waits so long: one that does, hangs."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def until_gone(call: Callable[[], Any]) -> StoreGoneError:
    """Repeat `call` until it says that the log is gone: a handle looks at the path now and then, not in every call."""
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        try:
            call()
        except StoreGoneError as error:
            return error
    pytest.fail("the handle goes on with a log that is gone")


# -- the log goes away -------------------------------------------------------------------------------------------------


def replace_by_a_log(path: Path) -> None:
    with FileStore(str(path) + "2") as other:
        other.set("k", "of another log")
    os.replace(str(path) + "2", path)


def create_again(path: Path) -> None:
    path.unlink()
    replace_by_a_log(path)


def replace_by_a_link(path: Path) -> None:
    moved = path.rename(str(path) + "2")
    path.symlink_to(moved)


def remove_directory(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.mkdir()


def rename_directory(path: Path) -> None:
    path.parent.rename(str(path.parent) + "2")
    path.parent.mkdir()


def truncate_to(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


WAYS: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (lambda path: path.unlink(), "was deleted"),
    "renamed": (lambda path: path.rename(str(path) + "2") and None, "was deleted"),
    "with its directory": (remove_directory, "was deleted"),
    "directory renamed": (rename_directory, "was deleted"),
    "replaced": (replace_by_a_log, "was replaced by another file"),
    "deleted and created": (create_again, "was replaced by another file"),
    "replaced by a link": (replace_by_a_link, "was replaced by another file"),
    "truncated to nothing": (truncate_to(0), "was truncated to"),
    "truncated to its header": (truncate_to(HEADER_SIZE), f"was truncated to {HEADER_SIZE} bytes"),
    "truncated by a byte": (lambda path: os.truncate(path, path.stat().st_size - 1), "was truncated"),
}
IN_TWO_STEPS = {"deleted and created", "replaced by a link"}
"""Who looks between the two finds nothing there."""


@pytest.fixture
def inner(tmp_path: Path) -> Path:
    """A path whose directory may go, too."""
    (tmp_path / "inner").mkdir()
    return tmp_path / "inner" / "store"


@pytest.mark.parametrize("way", WAYS)
def test_log_that_goes_away_is_gone_for_every_handle(way: str, inner: Path) -> None:
    spoil, words = WAYS[way]
    with FileStore(inner, timeout=HANG_S) as writer, FileStore(inner, read_only=True, timeout=HANG_S) as reader:
        writer.set("k", "v")
        assert reader.get("k") == b"v"
        spoil(inner)
        with FileStore(inner) if inner.exists() and "link" not in way else FileStore() as other:
            seen = other.list_keys()
            for call in (lambda: reader.get("k"), lambda: writer.set("k", "w"), lambda: writer.get("k")):
                error = until_gone(call)
                assert words in str(error)
                assert str(inner) in str(error)
                assert "open the store again" in str(error)
            assert seen == other.list_keys()
        for call in (lambda: reader.get("k"), lambda: writer.set("k", "w"), lambda: writer.check(["k"])):
            with pytest.raises(StoreGoneError):
                call()


@pytest.mark.parametrize(("watch", "read_only"), [("auto", False), ("poll", True)])
@pytest.mark.parametrize("way", WAYS)
def test_wait_ends_when_the_log_goes_away(way: str, watch: str, read_only: bool, inner: Path) -> None:
    """It looks once a second at the latest, and does not wait for its own deadline."""
    spoil, words = WAYS[way]
    with FileStore(inner) as writer:
        writer.set("k", "v")
    with FileStore(inner, read_only=read_only, watch=watch, timeout=10 * HANG_S) as waiter:
        until = time.monotonic() + HANG_S
        with Thread(wait_until_gone, waiter) as waiting:
            while not (notifier_of(waiter)._waiters and watcher_of(waiter).is_announced):  # it makes nothing any more
                assert time.monotonic() < until
            spoil(inner)
            error = str(waiting.join())
            assert words in error or (way in IN_TWO_STEPS and "was deleted" in error)


def wait_until_gone(waiter: FileStore) -> StoreGoneError:
    with pytest.raises(StoreGoneError) as caught:
        waiter.wait(["never"])
    return caught.value


def test_handle_does_not_write_into_a_file_that_took_the_logs_place(path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        path.unlink()
        path.write_bytes(b"precious")
        path.chmod(0o600)
        until_gone(lambda: store.set("k", "w"))
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize("compactions", [0, 1])
def test_handle_that_was_interrupted_does_not_go_on_in_a_replacement_file(compactions: int, path: Path) -> None:
    """It opens the file anew, at the place that it had read to, before the next look at the name is due."""
    with FileStore(path) as store:
        store.set("k", "v")
        for _ in range(compactions):
            store.compact()
            store.set("k", "w")
        file = Path(log_of(store).handle.file)
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data + data)
        file.chmod(0o600)
        log_of(store).handle.recovery = recovery.POSITION
        log_of(store).handle.path_checked_at = time.monotonic() + 3600
        with pytest.raises(StoreGoneError):
            store.get("k")


# -- what is at the path already ---------------------------------------------------------------------------------------


def snapshot(directory: Path) -> dict[str, tuple[os.stat_result, bytes | None]]:
    """All that can be seen of the files of a directory, but for when they were read."""
    found = {}
    for entry in directory.iterdir():
        status = entry.stat(follow_symlinks=False)
        content = entry.read_bytes() if stat.S_ISREG(status.st_mode) else None
        found[entry.name] = (status[:7], status.st_mtime_ns, content)
    return found


@contextmanager
def untouched(directory: Path) -> Iterator[None]:
    before = snapshot(directory)
    yield
    assert snapshot(directory) == before


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_log(path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v")


def link_to_a_log(path: Path) -> None:
    make_log(path.with_name("target"))
    path.symlink_to(path.with_name("target"))


def another_name_of_a_log(path: Path) -> None:
    make_log(path.with_name("target"))
    path.hardlink_to(path.with_name("target"))


INSECURE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link": (link_to_a_log, "is a symbolic link"),
    "a dangling link": (lambda path: path.symlink_to("nowhere"), "is a symbolic link"),
    "a link to itself": (lambda path: path.symlink_to(path), "is a symbolic link"),
    "a directory": (
        lambda path: path.mkdir(),
        "is not a regular file, but a directory; name a file in it, such as .*/store",
    ),
    "a FIFO": (lambda path: os.mkfifo(path), "is not a regular file"),
    "a socket": (make_socket, "is not a regular file"),
}
FOR_WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a second name": (another_name_of_a_log, "has several names"),
    "written by all": (lambda path: (make_log(path), path.chmod(0o666)), "has mode 0o666"),
    "written by the group": (lambda path: (make_log(path), path.chmod(0o620)), "has mode 0o620"),
}


@pytest.mark.parametrize("what", [*INSECURE, *FOR_WRITERS])
def test_path_to_a_file_that_is_not_the_users_alone_is_refused_and_left_alone(what: str, path: Path) -> None:
    make, words = {**INSECURE, **FOR_WRITERS}[what]
    make(path)
    with untouched(path.parent):
        with pytest.raises(InsecurePathError, match=words) as caught:
            FileStore(path)
        assert str(path) in str(caught.value)
        assert caught.value.path == str(path)
        if what in INSECURE:
            with pytest.raises(InsecurePathError, match=words):
                FileStore(path, read_only=True)
            with pytest.raises(InsecurePathError, match=words):
                list(dump(path))
        else:
            with FileStore(path, read_only=True) as store:
                assert store.get("k") == b"v"


@pytest.mark.parametrize("end", ["/", "//", "/."])
@pytest.mark.parametrize("make", [lambda _: None, make_log], ids=["nothing", "a log"])
def test_name_of_a_directory_that_is_not_there_is_refused(make: Callable[[Path], object], end: str, path: Path) -> None:
    """Such as that of a directory which its user has forgotten to create: a file with its name would be in the way."""
    make(path)
    source = path.with_name("source")
    make_log(source)
    with untouched(path.parent):
        for name in (f"{path}{end}", f"{path}{end}".encode()):
            for call in (
                lambda name=name: FileStore(name),
                lambda name=name: FileStore(name, read_only=True),
                lambda name=name: list(dump(name)),
                lambda name=name: verify(name),
                lambda name=name: copy(source, name),
                lambda name=name: repair(source, name),
            ):
                with pytest.raises(InsecurePathError, match="so it names a directory, which does not exist") as caught:
                    call()
                assert f"{path}{end}" in str(caught.value)
                assert caught.value.path == f"{path}{end}"


@pytest.mark.parametrize("end", ["/", "//", "/.", "/./"])
def test_slash_after_a_directory_changes_no_message(end: str, path: Path) -> None:
    path.mkdir()
    with untouched(path.parent):
        for read_only in (False, True):
            with pytest.raises(InsecurePathError, match=f"a directory; name a file in it, such as {path}/store$"):
                FileStore(f"{path}{end}", read_only=read_only)


def test_device_is_refused() -> None:
    for read_only in (False, True):
        with pytest.raises(InsecurePathError, match="is not a regular file"):
            FileStore("/dev/null", read_only=read_only)


def test_link_to_the_directory_is_followed_and_means_the_same_store(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with FileStore(tmp_path / "real" / "store") as one, FileStore(tmp_path / "link" / "store") as other:
        one.set("k", "v")
        assert other.get("k") == b"v"
        assert one.path == other.path


FOREIGN = {
    "text": b"hello, world\n",
    "zeros": bytes(4096),
    "a few zeros": bytes(3),
    "an archive": b"PK\3\4" + bytes(100),
    "the beginning of the magic": b"fsco",
    "the magic's lower half": b"fscoord",
    "something like the magic": b"fscoord\r\n" + bytes(90),
    "a header that is cut at its end, and more": b"fscoord\n\2\0" + bytes(HEADER_SIZE - 10),
    "a header of version 1 and nothing more": b"fscoord\n\1\0" + bytes(72),
    "the beginning of a header of version 4": b"fscoord\n\4\0",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_file_is_refused_and_left_alone(what: str, path: Path) -> None:
    path.write_bytes(FOREIGN[what])
    path.chmod(0o600)
    with untouched(path.parent):
        for read_only in (False, True):
            with pytest.raises(CorruptLogError) as caught:
                FileStore(path, read_only=read_only)
            assert caught.value.offset == 0
            assert "Nothing was changed" in str(caught.value)
        with pytest.raises(CorruptLogError):
            list(dump(path))


def test_empty_file_becomes_a_log_but_not_for_a_reader(path: Path) -> None:
    path.touch(0o600)
    with untouched(path.parent), pytest.raises(StoreUnavailableError, match="no writer has opened it yet") as caught:
        FileStore(path, read_only=True)
    assert caught.value.errno == errno.ENOENT
    inode = path.stat().st_ino
    make_log(path)
    assert read_log(path.read_bytes()).values == {b"k": b"v"}
    assert path.stat().st_ino == inode


def test_header_that_its_writer_did_not_finish_is_written_anew(path: Path) -> None:
    make_log(path)
    header = path.read_bytes()[:HEADER_SIZE]
    for size in range(8, HEADER_SIZE):
        path.write_bytes(header[:size])
        with untouched(path.parent), pytest.raises(StoreUnavailableError, match="only a part of a header"):
            FileStore(path, read_only=True)
        make_log(path)
        assert read_log(path.read_bytes()).values == {b"k": b"v"}
    path.write_bytes(header)
    with FileStore(path, read_only=True) as store:
        assert store.num_keys() == 0


def test_name_that_a_crash_left_at_a_log_is_removed(path: Path) -> None:
    """A maker that died between link(2) and unlink(2)."""
    make_log(path)
    birth = path.with_name(path.name + ".0123456789ab.new")
    birth.hardlink_to(path)
    with FileStore(path) as store:
        assert store.get("k") == b"v"
    assert not birth.exists()


# -- birth -------------------------------------------------------------------------------------------------------------


def join(path: str, rank: int, gate: tuple[int, int]) -> None:
    os.close(gate[1])
    os.read(gate[0], 1)  # returns when the parent opens the gate, by closing its end
    with FileStore(path, timeout=HANG_S) as store:
        store.set(f"rank {rank}", "1")


@pytest.mark.parametrize("there", ["nothing", "an empty file", "a part of a header"])
def test_processes_that_open_at_once_agree_on_one_log(there: str, path: Path) -> None:
    if there != "nothing":
        path.write_bytes(b"fscoord\n\3\0" if "part" in there else b"")
        path.chmod(0o600)
    context = multiprocessing.get_context("fork")
    gate = os.pipe()
    children = [context.Process(target=join, args=(str(path), rank, gate)) for rank in range(6)]
    for child in children:
        child.start()
    for end in gate:
        os.close(end)
    for child in children:
        child.join(HANG_S)
        assert child.exitcode == 0
    with FileStore(path, read_only=True) as store:
        assert store.list_keys() == [f"rank {rank}" for rank in range(6)]
    assert sorted(os.listdir(path.parent)) == [path.name, path.name + ".alive"]


def test_log_is_born_empty_and_then_initialised_without_hard_links(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(system.os, "link", link)
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "v")
        assert other.get("k") == b"v"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(os.listdir(path.parent)) == [path.name, path.name + ".alive"]


def test_link_that_appears_is_not_followed_without_hard_links(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        path.symlink_to("elsewhere")
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(system.os, "link", link)
    with pytest.raises(InsecurePathError, match="symbolic link"):
        FileStore(path)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
@pytest.mark.parametrize("mode", [0o600, 0o660, 0o644])
def test_mode_is_as_requested_under_any_umask(umask: int, mode: int, path: Path) -> None:
    before = os.umask(umask)
    try:
        with FileStore(path, mode=mode) as store:
            wait_in_vain(store)  # makes a bell
    finally:
        os.umask(before)
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in path.parent.iterdir()}
    assert modes == {"store": mode, "store.alive": mode, "store.bell": mode}


def test_mode_is_exact_in_a_directory_that_hands_its_group_on(tmp_path: Path) -> None:
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o2770)
    with FileStore(directory / "store") as store:
        wait_in_vain(store)
        store.compact()
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in directory.iterdir()} == {0o600}


def test_log_that_gets_a_second_name_goes_on_for_open_handles_and_keeps_both(path: Path) -> None:
    """No other process may open it, because the other name may belong to another user. So its end removes nothing."""
    second = path.with_name("second")
    with FileStore(path, world_size=1, timeout=HANG_S) as store, FileStore(path, read_only=True) as reader:
        store.set("k", "v")
        os.link(path, second)
        store.set("k", "w")
        assert reader.get("k") == store.get("k") == b"w"
        for name in (path, second):
            with pytest.raises(InsecurePathError, match="hard link"):
                FileStore(name)
        store.compact()
        assert store.get("k") == b"w"
    assert path.exists()
    assert second.exists()


def test_log_that_others_may_write_is_opened_only_with_that_mode(path: Path) -> None:
    make_log(path)
    path.chmod(0o666)
    with FileStore(path, mode=0o666) as store:
        assert store.get("k") == b"v"
    with pytest.raises(InsecurePathError, match="pass mode=0o666"):
        FileStore(path, mode=0o660)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a b", "a\nb", "\u00e9", "'\"$(x)", "-", ".hidden", "x" * 200, os.fsdecode(b"\xff\xfe")]
)
def test_path_may_have_any_name(name: str, tmp_path: Path) -> None:
    with (
        FileStore(tmp_path / name) as store,
        FileStore(os.path.join(tmp_path, name)) as other,
        Thread(other.get, "k") as waiting,
    ):
        store.set("k", "v")
        assert waiting.join() == b"v"
    assert {entry.name for entry in tmp_path.iterdir()} <= {name, name + ".alive", name + ".bell", name + ".waits"}


@pytest.mark.parametrize(
    ("name", "number"), [("x" * 300, errno.ENAMETOOLONG), ("absent/store", errno.ENOENT), ("file/store", errno.ENOTDIR)]
)
def test_path_that_is_impossible_is_an_error_at_once(name: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for read_only in (False, True):
        with pytest.raises(StoreUnavailableError) as caught:
            FileStore(tmp_path / name, read_only=read_only)
        assert caught.value.errno == number


def test_path_with_a_nul_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="null"):
        FileStore(f"{tmp_path}/a\0b")


# -- other users -------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_stranger(as_nobody: Callable[..., Any]) -> Callable[..., Any]:
    """`as_nobody`, with all imported that a store imports at its first use: nobody may not be able to read it."""
    with FileStore() as store:
        store.set("k", "v")
        wait_in_vain(store)
    return as_nobody


def what_a_reader_sees(path: str) -> tuple[bytes, str, list[str]]:
    with FileStore(path, read_only=True, timeout=HANG_S) as store:
        value = store.get("k")
        kinds = [entry.kind for entry in dump(path)]
        error = ""
        try:
            store.set("k", "w")
        except StoreError as raised:
            error = str(raised)
        with pytest.raises(StoreTimeoutError):
            store.wait(["never"], 0.2)
        return value, error, kinds


def test_read_only_handle_needs_no_write_permission_and_writes_no_side_car(as_stranger, public_dir: Path) -> None:
    path = public_dir / "store"
    make_log(path)
    path.chmod(0o644)
    public_dir.chmod(0o755)
    with untouched(public_dir):
        value, error, kinds = as_stranger(what_a_reader_sees, str(path))
    assert value == b"v"
    assert "read_only" in error
    assert kinds == ["session", "set"]


def wait_as_reader(path: str) -> bytes:
    with FileStore(path, read_only=True, timeout=HANG_S) as store:
        return store.get("late")


def test_read_only_wait_is_ended_by_the_write_of_another_user(as_stranger, public_dir: Path) -> None:
    path = public_dir / "store"
    with FileStore(path, mode=0o644) as store:
        waits = threading.Thread(target=lambda: store.set("late", "value"))
        waits.start()
        assert as_stranger(wait_as_reader, str(path)) == b"value"
        waits.join()


def try_to_open(path: str) -> tuple[str, str]:
    for read_only in (True, False):
        try:
            FileStore(path, read_only=read_only).close()
        except FscoordError as error:
            return type(error).__name__, str(error)
    return "", ""


def test_log_of_another_user_is_refused(as_stranger, public_dir: Path) -> None:
    path = public_dir / "store"
    assert as_stranger(try_to_open, str(path))[0] == "StoreUnavailableError"  # there is none to read
    as_stranger(make_log, path)
    with untouched(public_dir), pytest.raises(InsecurePathError, match="belongs to uid 65534, not to 0"):
        FileStore(path)
    with FileStore(path, read_only=True) as store:
        assert store.get("k") == b"v"


def test_log_that_may_not_be_read_is_reported(as_stranger, public_dir: Path) -> None:
    path = public_dir / "store"
    make_log(path)
    with untouched(public_dir):
        name, text = as_stranger(try_to_open, str(path))
    assert name == "StoreUnavailableError"
    assert "Permission denied; check the owners and modes of the log" in text


def test_log_for_all_users_is_shared_if_each_asks_for_that_mode(as_stranger, public_dir: Path) -> None:
    path = public_dir / "store"
    with FileStore(path, mode=0o666, timeout=HANG_S) as store:
        store.set("mine", "1")
        as_stranger(write_as_member, str(path))
        assert store.get("theirs") == b"2"


def write_as_member(path: str) -> None:
    with FileStore(path, mode=0o666, timeout=HANG_S) as store:
        assert store.get("mine") == b"1"
        store.set("theirs", "2")


def test_directory_that_may_not_be_written_to_is_reported(as_stranger, public_dir: Path) -> None:
    public_dir.chmod(0o755)
    with untouched(public_dir):
        name, text = as_stranger(make_and_tell, str(public_dir / "store"))
    assert name == "StoreUnavailableError"
    assert "Permission denied" in text


def make_and_tell(path: str) -> tuple[str, str]:
    try:
        FileStore(path).close()
    except FscoordError as error:
        return type(error).__name__, str(error)
    return "", ""
