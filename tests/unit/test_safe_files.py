"""The owner and the kind of a file by stat(2), and the creation of files without hard links."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.faulty import FaultyOs, faulty_os
from support.internals import safe_files

from fscoord import InsecurePathError

STRANGER = 4711


class Owned(FaultyOs):
    """`os`, in which a file may have another owner than it has.

    Attributes:
        owners: the owner that fstat(2) shows, by the end of a file's name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[str, int] = {}
        counted = self.fstat

        def fstat(fd: int) -> os.stat_result:
            found = list(counted(fd))
            name = os.readlink(f"/proc/self/fd/{fd}")
            found[4] = next((uid for end, uid in self.owners.items() if name.endswith(end)), found[4])
            return os.stat_result(found)

        self.fstat = fstat


@pytest.fixture
def path(memory: Path) -> str:
    return str(memory / "log")


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> Owned:
    found = Owned()
    monkeypatch.setattr(safe_files.system, "os", found)
    return found


@pytest.fixture
def fd(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("mode", [0o600, 0o601, 0o644, 0o755])
def test_log_of_another_user_is_refused_unless_it_is_only_read(mode: int, path: str, fd: int, owned: Owned) -> None:
    owned.owners = {"log": STRANGER}
    with pytest.raises(InsecurePathError, match=f"belongs to uid {STRANGER}"):
        safe_files.check(path, fd, mode, read_only=False)
    safe_files.check(path, fd, mode, read_only=True)
    assert os.listdir(os.path.dirname(path)) == ["log"]


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o666])
def test_log_of_another_user_is_accepted_if_its_mode_lets_others_write(
    mode: int, path: str, fd: int, owned: Owned
) -> None:
    owned.owners = {"log": STRANGER}
    safe_files.check(path, fd, mode, read_only=False)


def test_log_is_accepted_if_our_new_files_show_the_same_owner(path: str, fd: int, owned: Owned) -> None:
    """Root squash, and id mapping."""
    owned.owners = {"log": STRANGER, safe_files.TEMPORARY_SUFFIX: STRANGER}
    safe_files.check(path, fd, 0o600, read_only=False)
    assert os.listdir(os.path.dirname(path)) == ["log"]
    owned.owners[safe_files.TEMPORARY_SUFFIX] = STRANGER + 1
    with pytest.raises(InsecurePathError, match="belongs to uid"):
        safe_files.check(path, fd, 0o600, read_only=False)
    owned.owners[safe_files.TEMPORARY_SUFFIX] = STRANGER
    with owned.fail(0, errno.EACCES, names=("open",)), pytest.raises(InsecurePathError, match="belongs to uid"):
        safe_files.check(path, fd, 0o600, read_only=False)


@pytest.mark.parametrize(("mode", "is_refused"), [(0o600, False), (0o755, False), (0o620, True), (0o602, True)])
def test_log_writable_by_others_is_refused_by_its_write_bits_alone(
    mode: int, is_refused: bool, path: str, fd: int, owned: Owned
) -> None:
    os.chmod(path, mode)
    if is_refused:
        with pytest.raises(InsecurePathError, match="others can write it"):
            safe_files.check(path, fd, 0o600, read_only=False)
    else:
        safe_files.check(path, fd, 0o600, read_only=False)
    assert {name for name, _ in owned.calls} == {"fstat"}


def test_temporary_names_from_the_creation_of_the_log_are_removed(path: str, fd: int) -> None:
    births = [f"{path}.1{safe_files.TEMPORARY_SUFFIX}", f"{path}.2{safe_files.TEMPORARY_SUFFIX}"]
    others = [f"{path}.backup", f"{path}2{safe_files.TEMPORARY_SUFFIX}"]
    for name in births + others:
        os.link(path, name)
    link, stranger = f"{path}.3{safe_files.TEMPORARY_SUFFIX}", f"{path}.4{safe_files.TEMPORARY_SUFFIX}"
    os.symlink(path, link)
    Path(stranger).touch()
    with pytest.raises(InsecurePathError, match="several names"):
        safe_files.check(path, fd, 0o600, read_only=False)
    assert {str(name) for name in Path(path).parent.iterdir()} == {path, *others, link, stranger}
    for name in others:
        os.unlink(name)
    os.link(path, births[0])
    safe_files.check(path, fd, 0o600, read_only=False)
    assert not os.path.lexists(births[0])


def test_symbolic_link_to_a_file_is_not_one_of_its_names(path: str, fd: int) -> None:
    found = os.fstat(fd)
    identity = (found.st_dev, found.st_ino)
    os.symlink(path, path + ".link")
    assert safe_files.names_same_file(path, identity)
    assert not safe_files.names_same_file(path + ".link", identity)
    assert not safe_files.names_same_file(path + ".nothing", identity)
    assert not safe_files.names_same_file(path, (found.st_dev, found.st_ino + 1))


def test_files_with_one_inode_number_on_two_devices_differ(fd: int) -> None:
    found = os.fstat(fd)
    elsewhere, beside = list(found), list(found)
    elsewhere[2] += 1
    beside[1] += 1
    assert safe_files.same_file(found, found)
    assert not safe_files.same_file(found, os.stat_result(elsewhere))
    assert not safe_files.same_file(found, os.stat_result(beside))


def test_log_is_created_empty_where_hard_links_are_missing(path: str) -> None:
    old = os.umask(0o077)
    try:
        with faulty_os() as faulty, faulty.fail(0, errno.EPERM, names=("link",)):
            safe_files.create(path, lambda _: b"header", 0o640, durable=False)
    finally:
        os.umask(old)
    assert Path(path).read_bytes() == b""
    assert os.stat(path).st_mode & 0o777 == 0o640
    assert os.listdir(os.path.dirname(path)) == ["log"]


def test_link_that_fails_with_eio_is_an_error_and_leaves_no_file(path: str) -> None:
    failing = pytest.raises(OSError, match="Input/output error")
    with faulty_os() as faulty, faulty.fail(0, errno.EIO, names=("link",)), failing:
        safe_files.create(path, lambda _: b"header", 0o600, durable=False)
    assert os.listdir(os.path.dirname(path)) == []


def test_log_that_a_forked_child_has_linked_and_tidied_counts_as_created(path: str) -> None:
    """A signal handler forks before link(2): the child links the file, opens it, and removes the temporary name."""

    def link_in_child(name: str, real: Callable[..., None], given: tuple[str, ...]) -> None:
        if name == "link":
            real(*given)
            os.unlink(given[0])

    with faulty_os() as faulty, faulty.instead(link_in_child):
        safe_files.create(path, lambda _: b"header", 0o600, durable=False)
    assert Path(path).read_bytes() == b"header"


def test_temporary_name_that_a_forked_child_has_taken_is_replaced_and_left_alone(path: str) -> None:
    """A signal handler forks before open(2), and the child is the first to create the file of that name."""
    taken: list[str] = []

    def open_in_child(name: str, _: object, given: tuple[str, ...]) -> None:
        if name == "open" and not taken:
            taken.append(given[0])
            Path(given[0]).write_bytes(b"the child's")

    with faulty_os() as faulty, faulty.instead(open_in_child):
        safe_files.create(path, lambda _: b"header", 0o600, durable=False)
    assert Path(path).read_bytes() == b"header"
    assert Path(*taken).read_bytes() == b"the child's"
    assert len(os.listdir(os.path.dirname(path))) == 2


def test_temporary_name_that_another_process_removed_is_an_error_that_leaves_no_log(path: str) -> None:
    def remove(name: str, _: object, given: tuple[str, ...]) -> None:
        if name == "link":
            os.unlink(given[0])

    with faulty_os() as faulty, faulty.instead(remove), pytest.raises(FileNotFoundError):
        safe_files.create(path, lambda _: b"header", 0o600, durable=False)
    assert os.listdir(os.path.dirname(path)) == []


def test_log_whose_mode_cannot_be_set_is_removed(path: str) -> None:
    """Where there are no hard links, so that it has its own name from the beginning."""

    def fail(name: str, _: object, given: tuple[object, ...]) -> None:
        if name == "link":
            raise OSError(errno.EPERM, "no links")
        if name == "fchmod":
            raise OSError(errno.EIO, "refused")

    old = os.umask(0o077)
    try:
        failing = pytest.raises(OSError, match="refused")
        with faulty_os() as faulty, faulty.instead(fail), failing:
            safe_files.create(path, lambda _: b"header", 0o640, durable=False)
    finally:
        os.umask(old)
    assert os.listdir(os.path.dirname(path)) == []


def test_file_already_at_the_path_of_a_new_log_is_left_unchanged(path: str) -> None:
    Path(path).write_bytes(b"somebody's")

    def fail(name: str, _: object, given: tuple[object, ...]) -> None:
        if name == "link":
            raise OSError(errno.EPERM, "no links")
        if name == "open" and given[0] == path:
            raise OSError(errno.EACCES, "refused")

    failing = pytest.raises(OSError, match="refused")
    with faulty_os() as faulty, faulty.instead(fail), failing:
        safe_files.create(path, lambda _: b"header", 0o600, durable=False)
    assert Path(path).read_bytes() == b"somebody's"


def test_directory_whose_sync_is_interrupted_is_closed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def interrupt(path: str, keep: set[int]) -> None:
        keep.add(os.open(os.path.dirname(path), os.O_RDONLY))
        opened.extend(keep)
        raise KeyboardInterrupt

    monkeypatch.setattr(safe_files, "sync_directory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        safe_files.create(path, lambda _: b"header", 0o600, durable=True)
    (fd,) = opened
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("error", [errno.EPERM, errno.EIO])
@pytest.mark.parametrize("exists", [False, True])
def test_publishing_a_file_overwrites_none_and_needs_no_hard_links(exists: bool, error: int, path: str) -> None:
    Path(f"{path}.1").write_bytes(b"new")
    if exists:
        Path(path).write_bytes(b"old")
    with faulty_os() as faulty, faulty.fail(0, error, names=("link",)):
        if exists or error == errno.EIO:
            with pytest.raises(OSError) as caught:
                safe_files.publish(f"{path}.1", path)
            assert caught.value.errno == (errno.EIO if error == errno.EIO else errno.EEXIST)
        else:
            safe_files.publish(f"{path}.1", path)
    assert os.path.exists(path) is (exists or error == errno.EPERM)
    if os.path.exists(path):
        assert Path(path).read_bytes() == (b"old" if exists else b"new")
