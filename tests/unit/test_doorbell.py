"""The bell by itself: what its marks mean, that it is made once and cheaply, and that it leaves nothing open."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_os
from support.logs import is_open

from fscoord import InsecurePathError
from fscoord._log.wakeup.doorbell import SIZE, STATE_SIZE, Doorbell
from fscoord._runtime import system


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "bell")


@pytest.fixture
def bell(path: str) -> Iterator[Doorbell]:
    bell = Doorbell(path, 0o600)
    yield bell
    bell.close()


def test_bell_is_made_once_whole_and_never_synced(path: str) -> None:
    """It holds nothing that a power failure could cost."""
    with faulty_os() as faulty:
        one = Doorbell(path, 0o600)
        two = Doorbell(path, 0o600, create=False)
    assert (one.is_new, two.is_new) == (True, False)
    assert Path(path).read_bytes() == bytes(STATE_SIZE)
    assert "fsync" not in [name for name, _ in faulty.calls]
    one.close()
    two.close()


def test_bell_that_is_refused_leaves_no_file_open(path: str) -> None:
    Path(path).write_bytes(bytes(SIZE))
    os.chmod(path, 0o622)
    with pytest.raises(InsecurePathError, match="others can write it") as caught:
        Doorbell(path, 0o600)
    assert not is_open(path), caught.value  # which keeps the frame, and so what was to be a bell


def test_bell_armed_again_after_a_ring_does_not_hide_it_from_the_first_waiter(bell: Doorbell) -> None:
    """A byte counts on: were it set and cleared, the second mark would hide the ring from the first waiter."""
    for _ in range(300):  # past the highest that a byte counts
        first = bell.arm(7)
        assert bell.arm(7) == first
        assert not bell.is_rung(7, first)
        bell.ring(7)
        assert bell.is_rung(7, first)
        second = bell.arm(7)
        assert bell.is_rung(7, first)
        assert not bell.is_rung(7, second)


def test_marks_of_neighbouring_buckets_are_apart(bell: Doorbell) -> None:
    low, high = bell.arm(7), bell.arm(8)
    assert bell.arm(7) == low
    bell.ring(7)
    assert bell.is_rung(7, low)
    assert not bell.is_rung(8, high)


def test_ring_changes_the_times_of_the_file_or_is_one_read_without_a_waiter(bell: Doorbell) -> None:
    """A mark is a write, too, and must wake no waiter: waiters watch only for changes of attributes."""
    with faulty_os() as faulty:
        bell.arm(7)
        assert [name for name, _ in faulty.calls] == ["pread", "pwrite", "pread"]
        faulty.calls.clear()
        bell.ring(7)
        assert [name for name, _ in faulty.calls] == ["pread", "pwrite", "pwrite", "utime", "pread"]
        faulty.calls.clear()
        bell.ring(7)
        bell.ring(8)
    assert [name for name, _ in faulty.calls] == ["pread", "pread"]


def test_bell_is_lost_without_a_name_when_closed_and_when_it_cannot_be_checked(bell: Doorbell, path: str) -> None:
    assert not bell.is_lost
    with faulty_os() as faulty, faulty.fail(0, errno.ESTALE, names=("fstat",)):
        assert bell.is_lost
    os.unlink(path)
    assert bell.is_lost
    other = Doorbell(path, 0o600)
    other.close()
    with open(path):  # its descriptor has, most likely, the number of the one that was closed
        assert other.is_lost


def test_forked_child_closes_its_bells_and_its_parents_stay_open(bell: Doorbell) -> None:
    fd = bell.fd
    pid = os.fork()
    if pid == 0:
        os._exit(0 if bell.fd < 0 and not is_open(fd) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not bell.is_lost


class Between:
    """The `os` of the package, with a call of `step` after the `count`-th read of a bell."""

    def __init__(self, count: int, step: Callable[[], object]) -> None:
        self._count, self._step = count, step

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        data = os.pread(fd, size, offset)
        self._count -= 1
        if self._count == 0:
            self._step()
        return data


@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("is_rung", [False, True])
def test_waiter_that_loses_the_processor_as_it_arms_hides_no_ring(
    bell: Doorbell, monkeypatch: pytest.MonkeyPatch, is_rung: bool, is_stale: bool
) -> None:
    """Another waiter armed the same bucket between the read and the write, and slept."""
    bell.arm(7)
    bell.ring(7)  # from here on the byte that shows rings has the number of this process
    first = b""

    def step() -> None:
        nonlocal first
        first = bell.arm(7)
        if is_rung:
            assert bell.ring(7)

    for _ in range(300):
        if is_stale:
            state = bell.read()
            step()
            second = bell.arm(7, state)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(system, "os", Between(1, step))
                second = bell.arm(7)
        assert bell.is_rung(7, first) is is_rung
        assert bell.is_rung(7, second) is is_rung
        bell.ring(7)
        assert bell.is_rung(7, first)
        assert bell.is_rung(7, second)


def test_ring_of_several_buckets_wakes_the_armed_ones_with_one_signal(
    bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[None] = []
    monkeypatch.setattr(bell, "signal", lambda: signals.append(None))
    marks = {number: bell.arm(number) for number in (7, 9)}
    assert bell.ring(7, 8, 9)
    assert all(bell.is_rung(number, mark) for number, mark in marks.items())
    assert not bell.ring(7, 8, 9)
    assert len(signals) == 1


def test_waiter_of_a_truncated_bell_arms_it_and_rings_nobody(bell: Doorbell) -> None:
    os.truncate(bell.path, 0)
    armed = bell.arm(7, bell.read())
    assert not bell.is_rung(7, armed)
