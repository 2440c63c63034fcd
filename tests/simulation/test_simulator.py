"""The simulator itself: one seed is one schedule, what is dead does nothing, and it finds what it should."""

from __future__ import annotations

import errno
import math
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from simulation import arrivals, nodes, waits, workload
from simulation.files import FOREVER, Fcntl, Files
from simulation.scheduler import ScheduleError
from simulation.world import World
from support.internals import system

import fscoord

pytestmark = pytest.mark.once

FILE = f"{Files.DIRECTORY}/file"
TESTS = Path(__file__).parent.parent


def test_seed_gives_the_same_schedule_here_and_in_another_interpreter(seed: int) -> None:
    seeds = [seed + number for number in range(5)]
    here = [workload.run(seed).counted["trace"] for seed in seeds] + [waits.run(seed).trace for seed in seeds]
    again = [workload.run(seed).counted["trace"] for seed in seeds] + [waits.run(seed).trace for seed in seeds]
    assert here == again
    assert [arrivals.run(seed).trace for seed in seeds] == [arrivals.run(seed).trace for seed in seeds]
    both = [[nodes.run(seed).counted["trace"] for seed in seeds] for _ in range(2)]
    assert both[0] == both[1]
    assert len(set(here)) == len(here)
    program = (
        "from simulation import arrivals, waits, workload\n"
        f"for seed in {seeds}: print(workload.run(seed).counted['trace'], waits.run(seed).trace)\n"
    )
    paths = os.pathsep.join([str(Path(fscoord.__file__).parent.parent), str(TESTS)])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "7"}
    there = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    assert there.stdout.split() == [str(trace) for pair in zip(here[:5], here[5:], strict=True) for trace in pair]


def test_deadlock_is_found_and_reported_with_the_last_steps() -> None:
    def take(first: str, second: str) -> None:
        for name in (first, second):
            fd = system.os.open(name, os.O_RDWR | os.O_CREAT)
            system.fcntl.fcntl(fd, Fcntl.F_OFD_SETLKW, lock(Fcntl.F_WRLCK))

    found = []
    for seed in range(100):
        world = World(seed)
        with world.installed():
            world.start(lambda: take(FILE, FILE + "2"))
            world.start(lambda: take(FILE + "2", FILE))
            try:
                world.scheduler.run()
            except ScheduleError as error:
                found.append(str(error))
    assert found
    assert all("deadlock of" in text and "SETLKW" in text for text in found)


def lock(kind: int) -> bytes:
    return struct.pack("hhqqi4x", kind, 0, 10, 1, 0)


def test_wait_for_an_event_that_never_comes_is_a_deadlock() -> None:
    world = World(1)
    with world.installed():
        world.start(lambda: world.scheduler.block(lambda: False, math.inf))
        with pytest.raises(ScheduleError, match="deadlock"):
            world.scheduler.run()


def test_task_that_goes_on_for_ever_is_found() -> None:
    world = World(1, steps_max=1000)

    def spin() -> None:
        while True:
            system.os.sched_yield()

    with world.installed():
        world.start(spin)
        with pytest.raises(ScheduleError, match="still go on"):
            world.scheduler.run()


def test_clock_jumps_to_the_next_deadline_when_all_tasks_wait() -> None:
    world, woken = World(1), []

    def sleep(seconds: float) -> None:
        system.time.sleep(seconds)
        woken.append((seconds, round(system.time.monotonic() - began)))

    began = world.scheduler.now
    with world.installed():
        for seconds in (3600, 60, 86400):
            world.start(lambda seconds=seconds: sleep(seconds))
        world.scheduler.run()
    assert woken == [(60, 60), (3600, 3600), (86400, 86400)]


def test_killed_process_does_no_more_and_frees_its_locks_and_may_tear_a_write(rng: random.Random) -> None:
    """At whatever step: what the other finds is a beginning of what was written, and the lock free in the end."""
    sizes: set[int] = set()
    for number in range(2000):
        if number >= 100 and len(sizes) > 5:  # a hundred schedules may have fewer by chance
            break
        world = World(rng.randrange(2**32))
        size: list[int] = []

        def write(world: World = world) -> None:
            fd = system.os.open(FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            system.fcntl.fcntl(fd, Fcntl.F_OFD_SETLKW, lock(Fcntl.F_WRLCK))
            try:
                system.os.write(fd, b"0123456789")
                system.os.sched_yield()
            finally:
                system.os.write(fd, b"more")
            world.exit()

        def look(world: World = world, size: list[int] = size) -> None:
            fd = system.os.open(FILE, os.O_RDWR | os.O_CREAT)
            world.scheduler.block(lambda: not world.lives(1), math.inf)
            system.fcntl.fcntl(fd, Fcntl.F_OFD_SETLK, lock(Fcntl.F_WRLCK))
            data = system.os.read(fd, 100)
            assert b"0123456789more".startswith(data)
            size.append(len(data))
            world.exit()

        with world.installed():
            victim = world.start(write)
            world.start(look)
            world.scheduler.meddle_at = world.rng.randrange(1, 9)
            world.scheduler.meddle = lambda world=world, victim=victim: world.lives(1) and world.kill(victim)
            world.scheduler.run()
        sizes.update(size)
    assert len(sizes) > 5, f"only {sizes}"


def test_ranges_are_locked_and_unlocked_in_parts() -> None:
    files = Files(World(1).scheduler, random.Random(1))
    inode = files.make(0o600)
    files.set_lock(inode, 1, Fcntl.F_WRLCK, 10, 20)
    files.set_lock(inode, 1, Fcntl.F_UNLCK, 12, 15)
    assert sorted(inode.locks) == [(1, Fcntl.F_WRLCK, 10, 12), (1, Fcntl.F_WRLCK, 15, 20)]
    assert files.conflict(inode, 2, Fcntl.F_RDLCK, 12, 15) is None
    assert files.conflict(inode, 2, Fcntl.F_RDLCK, 0, FOREVER) is not None
    assert files.conflict(inode, 1, Fcntl.F_WRLCK, 0, FOREVER) is None
    files.set_lock(inode, 2, Fcntl.F_RDLCK, 30, 40)
    assert files.conflict(inode, 3, Fcntl.F_RDLCK, 30, 40) is None
    assert files.conflict(inode, 3, Fcntl.F_WRLCK, 39, 41) is not None


@pytest.mark.parametrize("kind", ["nfs4", "lustre"])
def test_flock_and_ranges_exclude_each_other_on_lustre_alone(kind: str) -> None:
    world, free = World(1, hosts=nodes.HOSTS, kind=kind), []

    def try_both(path: str) -> None:
        one, other = (system.os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
        fcntl = system.fcntl
        fcntl.flock(one, Fcntl.LOCK_EX | Fcntl.LOCK_NB)
        fcntl.fcntl(one, Fcntl.F_OFD_SETLK, lock(Fcntl.F_WRLCK))  # the same open file
        fcntl.fcntl(one, Fcntl.F_OFD_SETLK, lock(Fcntl.F_UNLCK))
        try:
            fcntl.fcntl(other, Fcntl.F_OFD_SETLK, lock(Fcntl.F_WRLCK).replace(b"\x0a", b"\x0b"))
            free.append(True)
        except BlockingIOError:
            free.append(False)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, Fcntl.LOCK_SH | Fcntl.LOCK_NB)
        fcntl.flock(one, Fcntl.LOCK_UN)
        fcntl.flock(other, Fcntl.LOCK_EX)

    with world.installed():
        world.start(lambda: [try_both(FILE), try_both(f"{Files.LOCAL}/file")])
        world.scheduler.run()
    assert free == [kind != "lustre", True]


def test_wait_may_be_called_a_deadlock_on_lustre(rng: random.Random) -> None:
    calls = []

    def wait(world: World) -> None:
        fd = system.os.open(FILE, os.O_RDWR | os.O_CREAT)
        try:
            system.fcntl.fcntl(fd, Fcntl.F_OFD_SETLKW, lock(Fcntl.F_WRLCK))
            system.os.sched_yield()
        except OSError as error:
            assert error.errno == errno.EDEADLK
            calls.append(world.kind)
        world.exit()

    for kind in ["nfs4"] * 50 + ["lustre"] * 1000:  # of 50 waits on Lustre, none may be called one by chance
        world = World(rng.randrange(2**32), hosts=nodes.HOSTS, kind=kind)
        with world.installed():
            for host in nodes.HOSTS:
                world.start(lambda world=world: wait(world), host=host)
            world.scheduler.run()
        if calls:
            break
    assert set(calls) == {"lustre"}


def test_times_of_files_have_whole_seconds_and_links_are_refused_on_lustre() -> None:
    world, found = World(1, hosts=nodes.HOSTS, kind="lustre"), []

    def touch() -> None:
        for seconds in (0.4, 0.4, 0.4):
            fd = system.os.open(FILE, os.O_RDWR | os.O_CREAT)
            system.time.sleep(seconds)
            system.os.write(fd, b"x")
            found.append(system.os.fstat(fd).st_mtime_ns)
        with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
            system.os.symlink("text", FILE + "2")
        system.os.symlink("text", f"{Files.LOCAL}/link")

    with world.installed():
        world.start(touch)
        world.scheduler.run()
    assert found == sorted(found)
    assert all(time % 10**9 == 0 for time in found)
    assert world.scheduler.now % 1


@pytest.mark.parametrize("is_locked", [False, True])
def test_counter_without_a_lock_loses_counts_and_one_with_a_lock_does_not(is_locked: bool, rng: random.Random) -> None:
    results = set()
    for _ in range(100):
        world = World(rng.randrange(2**32))

        def count() -> None:
            fd = system.os.open(FILE, os.O_RDWR | os.O_CREAT)
            for _ in range(3):
                if is_locked:
                    system.fcntl.fcntl(fd, Fcntl.F_OFD_SETLKW, lock(Fcntl.F_WRLCK))
                total = int.from_bytes(system.os.pread(fd, 1, 0), "little") + 1
                system.os.pwrite(fd, bytes([total]), 0)
                system.fcntl.fcntl(fd, Fcntl.F_OFD_SETLK, lock(Fcntl.F_UNLCK))

        with world.installed():
            for _ in range(3):
                world.start(count)
            world.scheduler.run()
        results.add(world.files.names[FILE].data[0])
    assert results == {9} if is_locked else len(results) > 2


def test_inode_number_is_given_again_at_once() -> None:
    world, numbers = World(1), []

    def recreate() -> None:
        for _ in range(3):
            fd = system.os.open(FILE, os.O_RDWR | os.O_CREAT)
            numbers.append(system.os.fstat(fd).st_ino)
            system.os.unlink(FILE)
            assert system.os.fstat(fd).st_nlink == 0
            system.os.close(fd)

    with world.installed():
        world.start(recreate)
        world.scheduler.run()
    assert len(set(numbers)) == 1


def test_inode_numbers_of_files_that_are_there_are_distinct() -> None:
    """The directory, which was opened and closed to be synced, has another number, too."""
    world, numbers = World(1), []

    def create() -> None:
        for name in ("", "2", "3"):
            system.os.close(system.os.open(Files.DIRECTORY, os.O_RDONLY))
            numbers.append(system.os.fstat(system.os.open(FILE + name, os.O_RDWR | os.O_CREAT)).st_ino)

    with world.installed():
        world.start(create)
        world.scheduler.run()
    assert len({world.files.directory.number, *numbers}) == 4


def test_call_that_the_simulation_lacks_is_not_done_to_real_files() -> None:
    world = World(1)
    with world.installed():
        world.start(lambda: system.os.replace(FILE, FILE + "2"))
        with pytest.raises(AttributeError, match=r"the simulation has no os\.replace"):
            world.scheduler.run()
