"""The FIFO beside a bell: the waiters that it wakes, files in its place, and that it stays open nowhere."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_system
from support.interrupts import At
from support.logs import is_open
from support.places import start_thread

from fscoord._log.files import safe_files
from fscoord._log.shared.node_poller import PollerElection
from fscoord._log.wakeup.doorbell import CELLS_END, FIFO_BYTE, Doorbell
from fscoord._runtime import system
from fscoord._runtime.file_events import FifoSource
from fscoord.errors import InsecurePathError

LIMIT_S = 60


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Doorbell]:
    with closing(Doorbell(str(tmp_path / "bell"), 0o600)) as bell:
        yield bell


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


def test_fifo_reports_each_ring_once(source: FifoSource, ringer: Doorbell) -> None:
    assert not source.wait(0)
    for _ in range(3):
        ring(ringer)
        assert source.wait(LIMIT_S)
        assert not source.wait(0)
    for _ in range(3):
        ring(ringer)
    assert source.wait(0)
    assert not source.wait(0)


def test_fifo_wakes_all_its_readers_and_not_those_of_later_rings(ringer: Doorbell, bell: Doorbell) -> None:
    with ExitStack() as stack:
        sources = []
        for _ in range(3):
            reader = stack.enter_context(closing(Doorbell(bell.path, 0o600)))
            sources.append(stack.enter_context(closing(FifoSource(reader.open_fifo()))))
        threads = [stack.enter_context(start_thread(source.wait, LIMIT_S)) for source in sources]
        time.sleep(0.01)
        ring(ringer)
        for thread in threads:
            thread.join()
            assert thread.result is True
        # The kernel reports a ring twice to a thread that runs before the ringer has woken all sleepers.
        for source in sources:
            source.wait(0)
        late = stack.enter_context(closing(FifoSource(bell.open_fifo())))
        assert [source.wait(0) for source in (*sources, late)] == [False] * 4


def test_ring_while_another_writer_has_the_fifo_open_is_reported_at_its_end(
    source: FifoSource, ringer: Doorbell, bell: Doorbell, fifo: Path
) -> None:
    stopped = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    ring(ringer)
    assert not source.wait(0)
    with closing(Doorbell(bell.path, 0o600)) as other, closing(FifoSource(other.open_fifo())) as late:
        os.close(stopped)
        assert source.wait(0)
        assert late.wait(0)


def test_data_in_the_fifo_wakes_nobody(source: FifoSource, ringer: Doorbell, fifo: Path) -> None:
    """Otherwise every waiter would spin, because no process reads the data."""
    stranger = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    os.write(stranger, b"x" * 4096)
    assert not source.wait(0)
    os.close(stranger)
    for _ in range(2):
        assert source.wait(0)
        assert not source.wait(0)
        ring(ringer)


def test_poller_of_a_node_rings_and_is_hurried_through_the_fifo(source: FifoSource, ringer: Doorbell) -> None:
    election = PollerElection(ringer, list)
    ringer.arm(7)
    assert election.notify([7])
    assert source.wait(0)
    assert not election.notify([7])
    assert not source.wait(0)
    election.heartbeat(0.1)
    election.hurry(ringer.read())
    assert source.wait(0)
    election.close()


def test_fifo_source_is_interrupted(source: FifoSource) -> None:
    source.interrupt()
    assert source.wait(0)
    assert not source.wait(0)
    with start_thread(source.wait, LIMIT_S) as thread:
        source.interrupt()
    assert thread.result is True


def test_fifo_source_reports_the_end_of_a_process(source: FifoSource, ringer: Doorbell) -> None:
    with start_thread(source.wait, LIMIT_S) as thread:
        processes = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
        try:
            for process in processes:
                assert source.watch_process(process.pid)
            assert not source.wait(0)
            processes[0].kill()
            processes[0].wait()
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert thread.result is True
    ring(ringer)
    assert source.reap_exited() == 2
    assert source.wait(0), "the search for ended processes took the ring"
    assert not source.wait(0)
    assert source.reap_exited() == 0


def test_fifo_source_has_one_descriptor_which_is_readable_while_there_is_an_event(
    source: FifoSource, ringer: Doorbell
) -> None:
    """An event loop registers it once, so it must stay the same."""
    (before,) = source.descriptors()
    source.watch_process(os.getpid())
    poll = system.select.poll()
    poll.register(before, system.select.POLLIN)
    for _ in range(3):
        assert not poll.poll(0)
        ring(ringer)
        assert poll.poll(0)
        assert source.wait(0)
    assert source.descriptors() == [before]


def test_fifo_source_that_is_closed_leaves_nothing_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    bell = Doorbell(str(tmp_path / "bell"), 0o600)
    source = FifoSource(bell.open_fifo())
    source.watch_process(os.getpid())
    source.close()
    bell.close()
    assert os.listdir("/proc/self/fd") == before
    assert source.descriptors() == []
    assert source.wait(LIMIT_S), "a waiter that comes too late must not sleep"
    assert bell.is_lost


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


def test_forked_child_reads_no_fifo_of_its_parent(source: FifoSource, bell: Doorbell, ringer: Doorbell) -> None:
    path = bell.path + ".fifo"
    source.watch_process(os.getpid())
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not is_open(path) and source._epoll.closed and source._pidfds.closed and bell.is_lost else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert is_open(path)
    ring(ringer)
    assert source.wait(0)


# Writers


def test_ring_opens_the_fifo_only_after_a_process_has_read_it(bell: Doorbell, ringer: Doorbell, fifo: Path) -> None:
    os.mkfifo(fifo, 0o600)
    for opens in (False, True):
        with faulty_system() as faulty:
            ring(ringer)
        assert (("open", str(fifo)) in faulty.calls) is opens
        bell.open_fifo()


def test_descriptor_of_a_ringer_is_recorded_while_it_is_open(
    source: FifoSource, ringer: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that another thread forks closes it. Else no ring would wake a reader while that child lives."""
    seen: list[int] = []

    class Loose(system.Descriptors):
        def update(self, *added: Any) -> None:
            super().update(*added)
            seen.extend(self)

    monkeypatch.setattr(system, "loose", Loose())
    ring(ringer)
    assert len(seen) == 1
    assert not system.loose
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(seen[0])
    assert source.wait(0)


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


def remove(fifo: Path) -> None:
    fifo.unlink()


def replace_by_a_file(fifo: Path) -> None:
    fifo.unlink()
    fifo.write_text("mine")


def replace_by_a_directory(fifo: Path) -> None:
    fifo.unlink()
    fifo.mkdir()


def replace_by_a_link(fifo: Path) -> None:
    fifo.unlink()
    fifo.with_name("target").write_text("mine")
    fifo.symlink_to("target")


def leave(_: Path) -> None:
    """No process reads it any longer."""


@pytest.mark.parametrize("change", [remove, replace_by_a_file, replace_by_a_directory, replace_by_a_link, leave])
def test_ring_without_a_reader_of_the_fifo_goes_on(
    change: Callable[[Path], None], bell: Doorbell, ringer: Doorbell, fifo: Path
) -> None:
    bell.open_fifo()
    bell.close()
    change(fifo)
    before = os.listdir("/proc/self/fd")
    mark = ringer.arm(7)
    ringer.ring(7)
    assert ringer.is_rung(7, mark)
    assert os.listdir("/proc/self/fd") == before
    if change in (replace_by_a_file, replace_by_a_link):
        assert fifo.read_text() == "mine"


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


# The file


# Without root, no directory can be used that a umask has made unreadable for its own user.
@pytest.mark.parametrize("umask", [0o000, 0o077, *[0o777] * (os.geteuid() == 0)])
@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_fifo_has_the_mode_of_the_bell_under_any_umask(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with closing(Doorbell(str(tmp_path / "bell"), mode)) as bell:
            bell.open_fifo()
    finally:
        os.umask(before)
    assert sorted(os.listdir(tmp_path)) == ["bell", "bell.fifo"]
    found = (tmp_path / "bell.fifo").stat()
    assert stat.S_ISFIFO(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
def test_fifo_gets_group_owner_and_mode_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    os.chown(log, 2001, 2100)
    log.chmod(0o660)
    with closing(Doorbell(str(tmp_path / "bell"), 0o660, like=str(log))) as bell:
        bell.open_fifo()
    found = (tmp_path / "bell.fifo").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (2001, 2100, 0o660)


def test_fifo_is_made_once_by_many(tmp_path: Path) -> None:
    bells = [Doorbell(str(tmp_path / "bell"), 0o600) for _ in range(8)]
    all_there = threading.Barrier(8)

    def open_together(bell: Doorbell) -> int:
        all_there.wait(LIMIT_S)
        return os.fstat(bell.open_fifo()).st_ino

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


def test_fifo_left_with_a_temporary_name_is_taken(bell: Doorbell, fifo: Path) -> None:
    """Its maker died between the two names."""
    os.mkfifo(fifo, 0o600)
    other = Path(safe_files.temporary_name(str(fifo)))
    os.link(fifo, other)
    bell.open_fifo()
    assert not other.exists()


@pytest.mark.parametrize("name", ["mkfifo", "link", "pwrite"])
def test_fifo_that_can_not_be_made_leaves_nothing(name: str, bell: Doorbell, fifo: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with (
        faulty_system() as faulty,
        faulty.fail(0, errno.ENOSPC, names=(name,)),
        pytest.raises(OSError, match="space"),
    ):
        bell.open_fifo()
    assert os.listdir("/proc/self/fd") == before
    assert set(os.listdir(fifo.parent)) <= {"bell", fifo.name}
    assert Path(bell.path).read_bytes()[FIFO_BYTE] == 0


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


def test_bell_is_lost_when_its_fifo_is_or_when_it_was_cut(bell: Doorbell, fifo: Path) -> None:
    """Only to processes that read the FIFO."""
    with closing(Doorbell(bell.path, 0o600)) as reader:
        reader.open_fifo()
        assert not reader.is_lost
        os.truncate(bell.path, CELLS_END)
        assert reader.is_lost
        reader.open_fifo()
        assert Path(bell.path).read_bytes()[FIFO_BYTE:] == b"\1"
        assert not reader.is_lost
        fifo.unlink()
        assert reader.is_lost
        assert not bell.is_lost
