"""The liveness file by itself: held bytes, their holders, its re-creation, and proofs by process ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.faulty import faulty_os

from fscoord import InsecurePathError
from fscoord._log.format.control_records import Session
from fscoord._log.liveness.liveness_file import MAGIC, SIZE, LivenessFile, ProcessIdentity, open_liveness_file
from fscoord._runtime import system

Open = Callable[..., LivenessFile]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture
def open_one(path: str) -> Iterator[Open]:
    """Open the liveness file as one more handle does, which closes it when the test ends."""
    opened: list[LivenessFile] = []

    def open_(*, create: bool = True, read_only: bool = False) -> LivenessFile:
        file = open_liveness_file(path, 0o600, set(), create=create, read_only=read_only)
        assert file is not None
        opened.append(file)
        return file

    yield open_
    for file in opened:
        file.close()


def put(path: str, data: bytes) -> None:
    Path(path + ".alive").write_bytes(data)
    os.chmod(path + ".alive", 0o600)


def test_byte_has_one_holder_and_leaves_other_bytes_free(open_one: Open) -> None:
    one, two = open_one(), open_one()
    assert one.id == two.id
    assert len(one.id) == 16
    assert one.hold(5)
    assert not two.hold(5)
    assert (one.number, two.number) == (5, 0)
    assert [number for number in range(1, 10) if two.is_held(number)] == [5]
    three = open_one()
    assert two.hold(6)
    assert three.hold(4)
    assert [number for number in range(1, 10) if one.is_held(number)] == [4, 5, 6]


def test_holding_another_byte_releases_the_first_and_the_same_byte_is_kept(open_one: Open) -> None:
    one, two = open_one(), open_one()
    assert one.hold(1)
    assert one.hold(2)
    assert not two.is_held(1)
    assert one.hold(2)
    assert two.is_held(2)
    assert not two.hold(2)
    assert two.hold(1)


def test_byte_is_released_when_its_liveness_file_is_closed(open_one: Open) -> None:
    keep: set[int] = set()
    other, one = open_one(), open_one()
    one._owned_fds = keep
    keep.add(one._fd)
    assert one.hold(3)
    one.close()
    assert not keep
    assert not other.is_held(3)


def test_read_only_liveness_file_sees_held_bytes_and_can_hold_none(open_one: Open, path: str) -> None:
    assert open_liveness_file(path, 0o600, set(), create=False, read_only=True) is None
    assert not os.path.exists(path + ".alive")
    one = open_one()
    reader = open_one(create=False, read_only=True)
    assert one.hold(1)
    assert reader.is_held(1)
    assert not reader.is_held(2)
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.hold(2)


def test_liveness_file_is_lost_once_its_name_leads_elsewhere_or_nowhere(open_one: Open, path: str) -> None:
    name = path + ".alive"
    one = open_one()
    assert not one.is_lost()
    os.link(name, path + ".second")
    assert not one.is_lost()
    os.unlink(name)
    assert one.is_lost()
    other = open_one()
    assert not other.is_lost()
    assert one.is_lost()
    os.unlink(path + ".second")
    os.link(name, path + ".third")
    assert not other.is_lost()
    os.unlink(path + ".third")
    one.close()
    with open(name):  # its descriptor has, most likely, the number of the one that was closed
        assert one.is_lost()


@pytest.mark.parametrize("data", [b"", MAGIC[:3], MAGIC, MAGIC + b"i" * 15, bytes(SIZE), bytes(5000)])
def test_liveness_file_left_unfinished_is_completed_by_a_creating_handle(
    data: bytes, open_one: Open, path: str
) -> None:
    put(path, data)
    with pytest.raises(InsecurePathError, match="not a liveness file; remove it"):
        open_liveness_file(path, 0o600, set(), create=False, read_only=False)
    keep: set[int] = set()
    with pytest.raises(InsecurePathError, match="not a liveness file; remove it"):
        open_liveness_file(path, 0o600, keep, create=False, read_only=True)
    assert not keep
    one = open_one()
    assert Path(path + ".alive").read_bytes()[:SIZE] == MAGIC + one.id
    assert any(one.id)
    assert open_one().id == one.id


@pytest.mark.parametrize("data", [b"x", b"x" * SIZE, b"x" + MAGIC[1:] + b"i" * 16, bytes(8) + b"i" * 16])
def test_file_that_is_no_liveness_file_is_never_written_to(data: bytes, open_one: Open, path: str) -> None:
    put(path, data)
    with pytest.raises(InsecurePathError, match="not a liveness file; remove it"):
        open_one()
    assert Path(path + ".alive").read_bytes() == data


@pytest.mark.parametrize("number", [0, 1, 7, 1 << 40])
def test_liveness_file_of_zeros_with_a_held_byte_is_not_initialised(number: int, open_one: Open, path: str) -> None:
    """A live session has seen the whole file: its present content does not come from a power failure."""
    one = open_one()
    assert one.hold(number)
    put(path, bytes(SIZE))
    with pytest.raises(InsecurePathError, match="not a liveness file; remove it"):
        open_one()
    assert Path(path + ".alive").read_bytes() == bytes(SIZE)


def test_liveness_file_that_others_can_write_is_refused_except_to_a_reader(open_one: Open, path: str) -> None:
    open_one()
    os.chmod(path + ".alive", 0o622)
    keep: set[int] = set()
    with pytest.raises(InsecurePathError, match="others can write it"):
        open_liveness_file(path, 0o600, keep, create=True, read_only=False)
    assert not keep
    open_one(create=False, read_only=True)


def test_liveness_file_with_extra_bytes_is_accepted_as_it_is(open_one: Open, path: str) -> None:
    put(path, MAGIC + b"0123456789abcdef" + b"of a later version")
    assert open_one().id == b"0123456789abcdef"


# Whose process number means something here


HERE = ProcessIdentity("host", b"b" * 16, 7, 9)
THERE = Session("host", 1234, 55, b"b" * 16, pid_space=7, time_space=9)


@pytest.mark.parametrize(
    ("home", "session", "shares"),
    [
        (HERE, THERE, True),
        (HERE._replace(pid_space=1), THERE._replace(pid_space=1), True),
        (HERE, THERE._replace(host="another"), False),
        (HERE, THERE._replace(boot_id=b"c" * 16), False),
        (HERE, THERE._replace(pid_space=8), False),
        (HERE._replace(pid_space=0), THERE._replace(pid_space=0), False),
        (HERE._replace(boot_id=bytes(16)), THERE._replace(boot_id=bytes(16)), False),
    ],
)
def test_pid_is_comparable_only_within_one_boot_host_and_known_namespace(
    home: ProcessIdentity, session: Session, shares: bool
) -> None:
    assert home.shares_processes_with(session) is shares


@pytest.mark.parametrize(("found", "another", "the_same"), [(55, False, True), (56, True, False), (0, False, False)])
def test_process_is_another_only_if_its_known_start_time_differs(
    found: int, another: bool, the_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "start_time", lambda pid: found if pid == 1234 else 0)
    assert HERE.is_other_process(THERE) is another
    assert HERE.is_same_process(THERE) is the_same
    for unknown in (THERE._replace(start_time=0), THERE._replace(time_space=8)):
        assert not HERE.is_other_process(unknown)
        assert not HERE.is_same_process(unknown)


@pytest.mark.parametrize("most", [1, 10, 23])
@pytest.mark.parametrize("behind", [b"", b"of a later version"])
def test_short_reads_and_writes_of_a_liveness_file_are_continued(
    most: int, behind: bytes, open_one: Open, path: str
) -> None:
    with faulty_os() as faulty:
        pread, pwrite = faulty.pread, faulty.pwrite
        faulty.pread = lambda fd, size, offset: pread(fd, min(size, most), offset)
        faulty.pwrite = lambda fd, data, offset: pwrite(fd, data[:most], offset)
        one = open_one()
        assert Path(path + ".alive").read_bytes() == MAGIC + one.id
        put(path, MAGIC + b"0123456789abcdef" + behind)
        assert open_one().id == b"0123456789abcdef"
