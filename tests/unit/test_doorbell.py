"""The bell by itself: what its marks mean, that it is made once and cheaply, and that it leaves nothing open."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_os
from support.logs import is_open

from fscoord import InsecurePathError
from fscoord._log.wakeup.doorbell import CELLS_END, STATE_SIZE, Doorbell
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
    Path(path).write_bytes(bytes(CELLS_END))
    os.chmod(path, 0o622)
    with pytest.raises(InsecurePathError, match="others can write it") as caught:
        Doorbell(path, 0o600)
    assert not is_open(path), caught.value  # which keeps the frame, and so what was to be a bell


def test_bell_armed_again_after_a_ring_does_not_hide_it_from_the_first_waiter(bell: Doorbell) -> None:
    """No token is written twice: else the second arming could hide the ring from the first waiter."""
    for _ in range(300):
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
        assert [name for name, _ in faulty.calls] == ["pread", "pwrite"]
        faulty.calls.clear()
        bell.ring(7)
        assert [name for name, _ in faulty.calls] == ["pread", "pwrite", "utime", "pread"]
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


def test_waiter_with_an_older_state_is_rung_if_the_cell_has_changed(bell: Doorbell) -> None:
    first, armed = bell.arm(7), bell.read()
    bell.ring(7)
    cleared = bell.read()
    late = bell.arm(7, armed)
    assert late == first
    assert bell.is_rung(7, late)
    second = bell.arm(7)
    third = bell.arm(7, cleared)
    assert bell.is_rung(7, second)
    assert not bell.is_rung(7, third)


def test_objects_of_one_process_write_different_tokens(bell: Doorbell) -> None:
    with closing(Doorbell(bell.path, 0o600)) as other:
        tokens = set()
        for each in (bell, other) * 100:
            each.ring(7)
            tokens.add(each.arm(7))
    assert len(tokens) == 200


class Interrupted:
    """The `os` of the package. Ctrl-C comes in the call `name` of the system, which has its effect."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        if name not in ("pwrite", "utime", "open"):
            return call

        def observed(*given: Any) -> Any:
            self.calls.append(name)
            result = call(*given)
            if name == self._name:
                raise KeyboardInterrupt
            return result

        return observed


@pytest.mark.parametrize("name", ["pwrite", "utime"])
def test_ring_that_is_interrupted_wakes_every_waiter(
    bell: Doorbell, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The next writer finds the cell cleared, and relies on this signal."""
    bell.open_fifo()
    bell.arm(7)
    interrupted = Interrupted(name)
    with monkeypatch.context() as patch:
        patch.setattr(system, "os", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bell.ring(7)
    assert interrupted.calls == ["pwrite", "utime", "open"], "the FIFO is opened last"
    assert not bell.ring(7)


def test_ring_of_several_buckets_wakes_the_armed_ones_with_one_signal(bell: Doorbell) -> None:
    marks = {number: bell.arm(number) for number in (7, 9)}
    with faulty_os() as faulty:
        assert bell.ring(7, 8, 9)
        assert all(bell.is_rung(number, mark) for number, mark in marks.items())
        assert not bell.ring(7, 8, 9)
    assert [name for name, _ in faulty.calls].count("utime") == 1


def test_waiter_of_a_truncated_bell_arms_it_and_rings_nobody(bell: Doorbell) -> None:
    os.truncate(bell.path, 0)
    armed = bell.arm(7, bell.read())
    assert not bell.is_rung(7, armed)
