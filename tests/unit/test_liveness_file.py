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
    opened = system.Descriptors()

    def open_(*, create: bool = True, read_only: bool = False) -> LivenessFile:
        file = open_liveness_file(path, 0o600, opened, create=create, read_only=read_only)
        assert file is not None
        return file

    yield open_
    system.close_all(os.close, opened)


def put(path: str, data: bytes) -> None:
    Path(path + ".alive").write_bytes(data)
    os.chmod(path + ".alive", 0o600)


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


@pytest.mark.parametrize("data", [b"x", b"x" * SIZE, b"x" + MAGIC[1:] + b"i" * 16, bytes(8) + b"i" * 16])
def test_file_that_is_no_liveness_file_is_never_written_to(data: bytes, open_one: Open, path: str) -> None:
    put(path, data)
    with pytest.raises(InsecurePathError, match="not a liveness file; remove it"):
        open_one()
    assert Path(path + ".alive").read_bytes() == data


def test_liveness_file_that_others_can_write_is_refused_except_to_a_reader(open_one: Open, path: str) -> None:
    open_one()
    os.chmod(path + ".alive", 0o622)
    keep: set[int] = set()
    with pytest.raises(InsecurePathError, match="others can write it"):
        open_liveness_file(path, 0o600, keep, create=True, read_only=False)
    assert not keep
    open_one(create=False, read_only=True)


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
