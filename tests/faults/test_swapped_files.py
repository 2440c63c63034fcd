"""A user who may rename in the directory swaps each new file before the next call, for a link or for another file.

No permission, owner or content of a file elsewhere may change. The operation may fail.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_system
from support.internals import log_of

from fscoord import FileStore, FscoordError
from fscoord._log.files import safe_files
from fscoord._log.liveness.liveness_file import open_liveness_file
from fscoord._log.wakeup.doorbell import Doorbell
from fscoord._runtime import system
from fscoord.doctor.mailbox import Mailbox
from fscoord.launch.agent import Access, RoundStore
from fscoord.stores.file.wait_slots import write_slot

GROUP = 2100
STRANGER = 2001
IS_ROOT = os.geteuid() == 0


class Victim:
    """What the user of the process has outside of the shared directory: a file, and a directory with a file."""

    def __init__(self, home: Path) -> None:
        self.file, self.directory = home / "secret", home / "private"
        self.file.write_text("secret")
        self.directory.mkdir()
        (self.directory / "store").write_text("also secret")
        for path, mode in ((self.file, 0o600), (self.directory, 0o700), (self.directory / "store", 0o600)):
            path.chmod(mode)
        self._before = self.state()

    def state(self) -> list[Any]:
        found: list[Any] = []
        for path in (self.file, self.directory, self.directory / "store"):
            status = path.stat()
            found.append((stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid))
        return [*found, self.file.read_text(), (self.directory / "store").read_text(), os.listdir(self.directory)]

    def is_unharmed(self) -> bool:
        return self.state() == self._before


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    home = tmp_path / "home"
    home.mkdir()
    return Victim(home)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory with a log that others may write. The umask makes every creation set permissions afterwards."""
    path = tmp_path / "shared"
    path.mkdir()
    before = os.umask(0o077)
    try:
        with FileStore(path / "log", mode=0o660, timeout=5) as store:
            store.set("k", "v")
        (path / "log.alive").unlink()
        if IS_ROOT:
            for each in path.iterdir():
                os.chown(each, STRANGER, GROUP)
        yield path
    finally:
        os.umask(before)


@contextmanager
def swapping(shared: Path, victim: Victim, first: int) -> Iterator[list[str]]:
    """Swap each new name in `shared` for a link, before the `first` call that comes after its creation.

    Yield the list of the names that were swapped.
    """
    known = set(os.listdir(shared))
    ages: dict[str, int] = {}
    swapped: list[str] = []

    def swap(*_: object) -> None:
        for name in set(os.listdir(shared)) - known:
            ages[name] = ages.get(name, 0) + 1
            path = shared / name
            if ages[name] == first:
                known.update((name, f"swapped {name}"))
                is_directory = path.is_dir()
                path.rename(shared / f"swapped {name}")
                path.symlink_to(victim.directory if is_directory else victim.file)
                swapped.append(name)

    with faulty_system() as faulty, faulty.instead(swap):
        yield swapped


def compact(shared: Path) -> None:
    with FileStore(shared / "log", mode=0o660, timeout=5) as store:
        store.compact()


def create_log(shared: Path) -> None:
    safe_files.create(str(shared / "new"), lambda _: b"header", 0o660, durable=True, like=str(shared / "log"))


def create_log_without_links(shared: Path) -> None:
    safe_files._create_empty(str(shared / "new"), 0o660)


def open_bell_and_fifo(shared: Path) -> None:
    with closing(Doorbell(str(shared / "bell"), 0o660, like=str(shared / "log"))) as bell:
        bell.open_fifo()


def open_fifo(shared: Path) -> None:
    (shared / "bell").write_bytes(bytes(20000))
    (shared / "bell").chmod(0o660)
    with closing(Doorbell(str(shared / "bell"), 0o660)) as bell:
        bell.open_fifo()


def make_liveness_file(shared: Path) -> None:
    owned: set[int] = set()
    try:
        open_liveness_file(str(shared / "log"), 0o660, owned, create=True, read_only=False)
    finally:
        for fd in owned:
            os.close(fd)


def write_wait(shared: Path) -> None:
    with FileStore(shared / "log", mode=0o660, timeout=5) as store:
        write_slot(log_of(store), 0o660, store.register(), b"x" * 512)


def make_log_directories(shared: Path) -> None:
    with FileStore(shared / "log", mode=0o660, timeout=5) as store:
        access = Access(store)
        fds = [access.open_log_directory(str(shared / "logs"))]
        try:
            fds.append(access.make_directory_in(fds[0], "round-0"))
        finally:
            system.close_quietly(*fds)


def make_and_remove_round_store(shared: Path) -> None:
    with FileStore(shared / "log", mode=0o660, timeout=5) as store, RoundStore(store, "0", is_first=True):
        pass


def enter_mailbox(shared: Path) -> None:
    mailbox = Mailbox(str(shared / "mailbox"), "one")
    mailbox._make_shared(GROUP if IS_ROOT else os.getegid())


OPERATIONS = [
    compact,
    create_log,
    create_log_without_links,
    open_bell_and_fifo,
    open_fifo,
    make_liveness_file,
    write_wait,
    make_log_directories,
    make_and_remove_round_store,
    enter_mailbox,
]


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_swapped_new_file_gives_no_other_file_its_permissions(
    operation: Callable[[Path], None], first: int, shared: Path, victim: Victim
) -> None:
    descriptors = os.listdir("/proc/self/fd")
    with swapping(shared, victim, first) as swapped, suppress(OSError, FscoordError):
        operation(shared)
    assert swapped or first > 1
    assert victim.is_unharmed()
    assert os.listdir("/proc/self/fd") == descriptors


def test_round_store_removes_no_file_through_a_link(shared: Path, victim: Victim) -> None:
    with FileStore(shared / "log", mode=0o660, timeout=5) as store:
        with RoundStore(store, "0", is_first=True):
            (shared / "log.round-0").rename(shared / "elsewhere")
            (shared / "log.round-0").symlink_to(victim.directory)
        assert victim.is_unharmed()
        with suppress(OSError), RoundStore(store, "0", is_first=True):
            pytest.fail("a link was taken for the directory")
    assert victim.is_unharmed()


def test_mailbox_removes_no_file_of_another_directory(shared: Path, victim: Victim) -> None:
    mailbox = Mailbox(str(shared / "mailbox"), "one")
    assert mailbox.enter({})
    (shared / "mailbox").rename(shared / "elsewhere")
    (shared / "mailbox").symlink_to(victim.directory)
    mailbox.leave()
    assert victim.is_unharmed()


def test_mailbox_removes_no_directory_that_was_moved_into_it(
    shared: Path, victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fscoord.doctor.mailbox.REMOVE_S", 0.1)
    mailbox = Mailbox(str(shared / "mailbox"), "one")
    assert mailbox.enter({})
    moved = shared / "mailbox" / "private"
    victim.directory.rename(moved)
    mailbox.leave()
    (moved,) = shared.rglob("private")
    assert (moved / "store").read_text() == "also secret"


def test_new_directory_that_another_user_has_replaced_gets_nothing(shared: Path) -> None:
    """It is not private, so that user could replace what is made in it."""
    made: list[str] = []

    def replace(name: str, _: object, given: tuple[Any, ...]) -> None:
        if name == "open" and str(given[0]).endswith(".new"):
            os.chmod(given[0], 0o777)
        if name == "fchmod":
            made.append(name)

    with (
        FileStore(shared / "log", mode=0o660, timeout=5) as store,
        faulty_system() as faulty,
        faulty.instead(replace),
        pytest.raises(PermissionError) as caught,
    ):
        Access(store).make_directory(str(shared / "new"))
    assert caught.value.errno == errno.EPERM
    assert made == []
    assert sorted(os.listdir(shared)) == sorted(each for each in os.listdir(shared) if not each.startswith("new"))
