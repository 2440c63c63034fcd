"""Tasks that take turns in one process: a seeded scheduler chooses the next task at every step, and keeps the clock.

A task is a thread of which only one runs at a time: at each step it hands on the baton, if the draw says so. So a seed
gives one schedule, the same each time. The clock stands still but for a moment per step, and jumps to the next deadline
when everybody waits. If nobody has a deadline that is a deadlock.
"""

from __future__ import annotations

import functools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

HANG_S = 60
"""How long a run may take in real time. It takes milliseconds; a task that calls the real system may wait for ever."""
MOMENT_S = 1e-6
TRACED = 60


class Killed(BaseException):
    """This task's process was killed: nothing that it does on its way out has an effect."""


class ScheduleError(AssertionError):
    """A deadlock, or tasks that go on for ever."""


class Process:
    """The tasks that die together.

    Attributes:
        number: the process's number, given once.
        host: the name of its host.
        alone: what each process has of its own: the registries of modules.
    """

    def __init__(self, number: int, host: str) -> None:
        self.number = number
        self.host = host
        self.is_dead = False
        self.stopped_until = 0.0
        self.alone: dict[str, Any] = {}
        self.tasks: list[Task] = []


class Task:
    """One thread of a process. With `ready` it waits until that is true, or for `until`."""

    def __init__(self, scheduler: Scheduler, process: Process, call: Callable[[], object], name: str) -> None:
        self.process, self.call, self.name = process, call, name
        self.ready: Callable[[], bool] | None = None
        self.until = math.inf
        self.rank = scheduler.rng.random()
        self.number = len(scheduler.threads) + 1
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread = threading.Thread(target=scheduler.run_task, args=(self,), name=f"simulated-{name}", daemon=True)
        process.tasks.append(self)

    def can_run(self, now: float) -> bool:
        process = self.process
        if process.is_dead:
            return True
        if process.stopped_until > now:
            return False
        return self.ready is None or self.until <= now or self.ready()

    def wakes_at(self) -> float:
        """Until when it waits, should nothing happen."""
        waits = self.ready is not None and not self.ready()
        return max(self.until if waits else 0.0, self.process.stopped_until)


class Scheduler:
    """Runs tasks, one at a time.

    Args:
        rng: draws who is next.
        steps_max: how many steps all tasks may take together.

    Attributes:
        now: the clock.
        steps: how many steps were taken.
        trace: a checksum over all of them.
        threads: the threads of all tasks so far.
        failures: what tasks raised, and `ScheduleError`.
        meddle: called before each step from number `meddle_at` on.
    """

    def __init__(self, rng: random.Random, steps_max: int = 60_000) -> None:
        self.rng = rng
        self.now = 1000.0
        self.steps = 0
        self.trace = 0
        self.last: deque[tuple[int, str, str, str]] = deque(maxlen=TRACED)
        self.failures: list[BaseException] = []
        self.meddle: Callable[[], None] = lambda: None
        self.meddle_at = math.inf
        self.is_over = False
        self._steps_max = steps_max
        self._tasks: list[Task] = []
        self.threads: list[threading.Thread] = []
        self._current: Task | None = None
        self._done = threading.Event()
        self._processes: list[Process] = []
        # Who is next: now and then anybody; or always the first by rank, which changes now and then (S. Burckhardt
        # and others, "A randomized scheduler with probabilistic guarantees of finding bugs", 2010).
        self._is_ranked = rng.random() < 0.4
        self._chance = rng.choice([0.02, 0.1, 0.3]) if self._is_ranked else rng.choice([0.03, 0.15, 0.5, 0.9])

    # -- from outside ----------------------------------------------------------------------------------------------

    def make_process(self, host: str) -> Process:
        process = Process(len(self._processes) + 1, host)
        self._processes.append(process)
        return process

    def start_thread(self, name: str, call: Callable[..., object], *arguments: Any) -> Task:
        """Start a thread of the process that runs, as `fscoord._runtime.system.try_thread` does."""
        if self.process.is_dead:
            raise Killed
        return self.spawn(self.process, functools.partial(call, *arguments), "helper")

    def spawn(self, process: Process, call: Callable[[], object], name: str) -> Task:
        """Let `call` be a task of `process`."""
        task = Task(self, process, call, f"{process.number}.{name}{len(process.tasks)}")
        self._tasks.append(task)
        self.threads.append(task.thread)
        task.thread.start()
        return task

    def run(self) -> None:
        """Run all tasks to their ends. Raises what the first raised that was not expected to."""
        if self._tasks:
            first = self._choose(None)
            assert first is not None
            self._current = first
            first.baton.release()
            if not self._done.wait(HANG_S):
                self.failures.append(ScheduleError(f"{self._current} did not come back"))
        self.is_over = True
        for thread in self.threads:
            thread.join(HANG_S)
        if self.failures:
            raise self.failures[0]

    def describe(self) -> str:
        """Return the last steps."""
        lines = [f"{step:6d} {task:8} {what} {given}" for step, task, what, given in self.last]
        return "\n".join(["the last steps:", *lines])

    # -- from tasks ------------------------------------------------------------------------------------------------

    @property
    def task(self) -> Task:
        """The one that runs."""
        assert self._current is not None
        return self._current

    @property
    def process(self) -> Process:
        """The process of the task that runs."""
        return self.task.process

    def run_task(self, task: Task) -> None:
        task.baton.acquire()
        try:
            if not task.process.is_dead:
                task.call()
        except Killed:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            task.call = _nothing  # what only this task has is collected before it is another's turn
            self._end(task)

    def step(self, what: str, given: object = "") -> None:
        """The task that runs is about to do `what`: it may be another's turn before that.

        Raises:
            Killed: its process is dead.
        """
        me = self._current
        assert me is not None
        if me.process.is_dead:
            raise Killed
        self.steps += 1
        self.now += MOMENT_S
        text = str(given)
        self.trace = crc32(f"{me.name} {what} {text}".encode(), self.trace)
        self.last.append((self.steps, me.name, what, text))
        if self.steps >= self.meddle_at:
            self.meddle()
        if self.steps > self._steps_max:
            self._fail(ScheduleError(f"after {self.steps} steps they still go on\n{self.describe()}"))
        if self._is_ranked:
            if self.rng.random() < self._chance:
                me.rank = self.rng.random()
        elif me.process.stopped_until <= self.now and self.rng.random() >= self._chance and not me.process.is_dead:
            return
        self._hand_on(me)

    def give_way(self) -> None:
        """Let others run first."""
        me = self._current
        assert me is not None
        me.rank = min(task.rank for task in self._tasks) - 1
        self.step("give way")

    def block(self, ready: Callable[[], bool], until: float) -> bool:
        """Return True when `ready()`, at once if it is by then, or False when the clock says `until`."""
        me = self._current
        assert me is not None
        if me.process.is_dead:
            raise Killed
        me.ready, me.until = ready, until
        try:
            self._hand_on(me)
            return ready()
        finally:
            me.ready, me.until = None, math.inf

    def kill(self, process: Process) -> None:
        """Mark `process` as dead; its tasks end at their next turn."""
        process.is_dead = True

    def stop(self, process: Process, seconds: float) -> None:
        process.stopped_until = self.now + seconds

    # -- whose turn it is ------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        self.failures.append(error)
        for process in self._processes:
            process.is_dead = True

    def _hand_on(self, me: Task) -> None:
        following = self._choose(me)
        if following is not me:
            self._current = following
            following.baton.release()
            me.baton.acquire()
        if me.process.is_dead:
            raise Killed

    def _end(self, me: Task) -> None:
        self._tasks.remove(me)
        me.process.tasks.remove(me)
        if not self._tasks:
            self._current = None
            self._done.set()
            return
        self._current = self._choose(None)
        self._current.baton.release()

    def _choose(self, me: Task | None) -> Task:
        while True:
            able = [task for task in self._tasks if task.can_run(self.now)]
            if able:
                return max(able, key=lambda task: task.rank) if self._is_ranked else self.rng.choice(able)
            until = min(task.wakes_at() for task in self._tasks)
            if until == math.inf:
                waiting = ", ".join(task.name for task in self._tasks)
                self._fail(ScheduleError(f"deadlock of {waiting}\n{self.describe()}"))
            else:
                self.now = max(self.now, until)


# The threading of tasks


class Lock:
    """A lock that threads of one process share."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_locked = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        if scheduler.is_over:
            return True
        if len(scheduler.process.tasks) > 1:
            scheduler.step("acquire")
        if self._is_locked:
            if not blocking:
                return False
            until = math.inf if timeout < 0 else scheduler.now + timeout
            if not scheduler.block(lambda: not self._is_locked, until):
                return False
        self._is_locked = True
        return True

    def release(self) -> None:
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """One that its owner may take again."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Task | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        if scheduler.is_over:
            return True
        me = scheduler._current
        if self._owner is not me:
            if len(scheduler.process.tasks) > 1:
                scheduler.step("acquire")
            if self._owner is not None:
                if not blocking:
                    return False
                until = math.inf if timeout < 0 else scheduler.now + timeout
                if not scheduler.block(lambda: self._owner is None, until):
                    return False
            self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        if self._scheduler.is_over:
            return
        if self._owner is not self._scheduler._current:
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Threading:
    """`threading`, as far as fscoord uses it."""

    TIMEOUT_MAX = threading.TIMEOUT_MAX

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def get_ident(self) -> int:
        return self._scheduler.task.number

    def Lock(self) -> Lock:
        return Lock(self._scheduler)

    def RLock(self) -> RLock:
        return RLock(self._scheduler)


class Time:
    """`time`, as far as fscoord uses it."""

    gmtime, strftime = staticmethod(time.gmtime), staticmethod(time.strftime)

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return self._scheduler.now

    def time_ns(self) -> int:
        return int(self._scheduler.now * 1e9)

    monotonic_ns = time_ns

    def sleep(self, seconds: float) -> None:
        scheduler = self._scheduler
        scheduler.step("sleep", f"{seconds:.6f}")
        scheduler.block(lambda: False, scheduler.now + seconds)


def _nothing() -> None:
    """Do nothing."""


def drawn(rng: random.Random, count: int, most: int) -> Iterator[int]:
    """Draw `count` numbers of steps, up to `most`, in order; more of them are early."""
    yield from sorted(int(most * rng.random() ** 2) for _ in range(count))
