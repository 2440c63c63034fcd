"""The bell by itself: what its marks mean, that it is made once and cheaply, and that it leaves nothing open."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_os, faulty_system
from support.interrupts import At
from support.logs import is_open
from support.places import start_thread

from fscoord._log.wakeup.doorbell import CELLS_END, FIFO_BYTE, Doorbell
from fscoord._runtime import system
from fscoord._runtime.file_events import FifoSource
from fscoord.errors import InsecurePathError


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "bell")


@pytest.fixture
def bell(path: str) -> Iterator[Doorbell]:
    bell = Doorbell(path, 0o600)
    yield bell
    bell.close()


def test_bell_that_is_refused_leaves_no_file_open(path: str) -> None:
    Path(path).write_bytes(bytes(CELLS_END))
    os.chmod(path, 0o622)
    with pytest.raises(InsecurePathError, match="others can write it") as caught:
        Doorbell(path, 0o600)
    assert not is_open(path), caught.value  # which keeps the frame, and so what was to be a bell


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


# The FIFO beside a bell


LIMIT_S = 60


@pytest.fixture
def ringer(bell: Doorbell) -> Iterator[Doorbell]:
    """The bell as another process has it, which reads no FIFO."""
    with closing(Doorbell(bell.path, 0o600)) as ringer:
        yield ringer


@pytest.fixture
def fifo(bell: Doorbell) -> Path:
    return Path(bell.path + ".fifo")


@pytest.fixture
def source(bell: Doorbell) -> Iterator[FifoSource]:
    with closing(FifoSource(bell.open_fifo())) as source:
        yield source


def ring(ringer: Doorbell, number: int = 7) -> None:
    ringer.arm(number)
    ringer.ring(number)


# Events


def set_alarm_and(call: Callable[[], object]) -> None:
    """Make `call`. The alarm comes meanwhile, or before it where the machine is slow, but always in this function."""
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    call()


def test_fifo_source_passes_on_the_exception_of_a_handler(source: FifoSource) -> None:
    def act(_: int, __: object) -> None:
        raise ValueError("time is up")

    before = signal.signal(signal.SIGALRM, act)
    try:
        with pytest.raises(ValueError, match="time is up"):
            set_alarm_and(lambda: source.wait(LIMIT_S))
    finally:
        signal.signal(signal.SIGALRM, before)


# Writers


def test_ring_interrupted_anywhere_leaves_no_fifo_open(source: FifoSource, ringer: Doorbell, fifo: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    number, reached, places = 0, True, set()
    while reached:
        number += 1
        ringer.arm(7)
        at = At(number, interrupt)
        with suppress(KeyboardInterrupt), at:
            ringer.ring(7)
        reached = at.reached
        places.add(at.where)
        source.wait(0)
        assert not system.loose
        ring(ringer)
        assert source.wait(0), at.where  # not if a descriptor for writing is still open
    assert any("_signal_fifo" in place for place in places)
    assert number > 5


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", ["open", "close"])
def test_ring_that_can_not_open_or_close_the_fifo_goes_on(
    name: str, error: int, source: FifoSource, ringer: Doorbell
) -> None:
    mark = ringer.arm(7)
    with faulty_system() as faulty, faulty.fail(0, error, names=(name,)) as failed:
        ringer.ring(7)
    assert failed == [name]
    assert ringer.is_rung(7, mark)
    ring(ringer)
    assert source.wait(0)


def test_fifo_is_made_once_by_many(tmp_path: Path) -> None:
    bells = [Doorbell(str(tmp_path / "bell"), 0o600) for _ in range(8)]
    all_there = threading.Barrier(8)

    def open_together(bell: Doorbell) -> int:
        all_there.wait(LIMIT_S)
        while True:
            try:
                return os.fstat(bell.open_fifo()).st_ino
            except InsecurePathError as error:  # the thread that has made it is about to remove its first name
                assert "several names" in str(error)

    with ExitStack() as stack:
        threads = [stack.enter_context(start_thread(open_together, bell)) for bell in bells]
    assert len({thread.result for thread in threads}) == 1
    assert sorted(os.listdir(tmp_path)) == ["bell", "bell.fifo"]
    for bell in bells:
        bell.close()


def make_writable(fifo: Path) -> None:
    os.mkfifo(fifo)
    fifo.chmod(0o622)


def make_foreign(fifo: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    os.mkfifo(fifo, 0o600)
    os.chown(fifo, 65534, 65534)


def make_linked(fifo: Path) -> None:
    os.mkfifo(fifo, 0o600)
    os.link(fifo, fifo.with_name("another name"))


def make_link(fifo: Path) -> None:
    os.mkfifo(fifo.with_name("target"), 0o600)
    fifo.symlink_to("target")


def make_file(fifo: Path) -> None:
    fifo.touch(0o600)


@pytest.mark.parametrize("make", [make_writable, make_foreign, make_linked, make_link, make_file, Path.mkdir])
def test_fifo_of_a_foreign_kind_or_owner_is_refused(make: Callable[[Path], None], bell: Doorbell, fifo: Path) -> None:
    make(fifo)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(InsecurePathError, match=r"bell\.fifo"):
        bell.open_fifo()
    assert os.listdir("/proc/self/fd") == before
    assert Path(bell.path).read_bytes()[FIFO_BYTE] == 0, "no writer may open it"
    assert not bell.is_lost


def test_opening_a_fifo_interrupted_anywhere_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    before = os.listdir("/proc/self/fd")
    number, reached = 0, True
    while reached:
        number += 1
        bell = Doorbell(str(tmp_path / "bell"), 0o600)
        at = At(number, interrupt)
        with suppress(KeyboardInterrupt), at:
            source = FifoSource(bell.open_fifo())
        reached = at.reached
        if not reached:
            source.close()
        bell.close()
        assert os.listdir("/proc/self/fd") == before, at.where
        left = set(os.listdir(tmp_path)) - {"bell", "bell.fifo"}
        is_removing = any(name in at.where for name in ("process_epoch", "_remove_draft", "raise_if_foreign"))
        assert not left or is_removing, at.where
        for name in left:
            shutil.rmtree(tmp_path / name)
        (tmp_path / "bell.fifo").unlink(missing_ok=True)
    assert number > 20
