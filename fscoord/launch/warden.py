"""Runs one command and leaves nothing of it behind without need, whatever happens to whom.

It is a program by itself, ``python -I -S warden.py MANNER ORDERS REPORT PATIENCE COMMAND...``, and imports nothing of
the package. ORDERS and REPORT are descriptors.

The warden is the command's parent, and whatever the command starts and abandons, daemons too, falls back to it
(PR_SET_CHILD_SUBREAPER, prctl(2)). It reads orders: a byte is the number of a signal for the command, ``EVERYBODY``
more one for all that it has started, too. ``KILL_ALL``, and the end of the orders, which comes when who gives them has
died, mean: kill everything.

A warden is two processes, because one may be killed itself: by the kernel when memory runs out, or by a command that
kills its parent. The *guard* is the process that was started; the warden proper is its child. When the warden is
killed, the kernel kills the command (PR_SET_PDEATHSIG), and all that the command has started falls to the guard, which
is the next subreaper, and kills it. When the guard is killed, a pipe between the two ends, and the warden kills
everything. Only a SIGKILL of both at the same moment leaves something. Without prctl(2), that is on other platforms
than Linux, what the command has started outlives a killed warden.

Who gives orders may be stopped, or hang, instead. With a PATIENCE other than 0, in seconds, ``ALIVE`` is to come again
and again: after half of that time without one all get SIGTERM, after three quarters they are killed; for at the end of
it others may have what the command believes to have.

There are three manners. A *worker* runs in a session of its own, without input; when it has ended, all that it left
behind is killed. A *held* command runs where the warden was started: on its terminal, with its input, in its process
group. What it leaves behind may finish, and the warden with it; of one that is *alone* it goes its own way. A signal
that the whole group has got, as Ctrl-C is, is not passed on to such a command once more, and one that was ignored from
the start, as nohup(1) has it, stays ignored.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

__all__ = ["ALIVE", "ALONE", "EVERYBODY", "HELD", "KILL_ALL", "PASSED", "WORKER", "Pulse", "main", "program"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

WORKER, HELD, ALONE = "worker", "held", "alone"
KILL_ALL = 0
ALIVE = 127
EVERYBODY = 128
"""Added to the number of a signal: it is for everybody."""

PASSED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
"""The signals by which others may want something of the command, but not of the warden."""

OWN = tuple(getattr(signal, name) for name in PASSED if hasattr(signal, name))

Prctl = Callable[..., int]


def program(manner: str, orders: int, report: int, patience: float = 0) -> list[str]:
    """Return the words that start a warden; the command's own come behind them."""
    return [sys.executable, "-I", "-S", __file__, manner, str(orders), str(report), str(patience)]


def main(manner: str, orders: int, report: int, patience: float, command: list[str]) -> None:
    """Run `command`; tell its pid, then its end, as lines of JSON on the descriptor `report`.

    The end is ``{"status": n}``: the exit code, or a signal's number as a negative one. A command that can't be started
    ends with 127 or 126, as in a shell, and ``{"error": text}`` comes before. ``{"lost": true}``: patience has run out.
    There is no end if the warden was killed: then the report is closed when nothing of the command is left.
    """
    _prctl()(PR_SET_CHILD_SUBREAPER, 1)  # for this process: a child made by fork(2) is none until it says so itself
    guard, life = os.pipe()
    # They stay blocked in the guard: they may come to the whole group, or the whole job, and the warden handles them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, OWN)
    child = os.fork()
    if child:
        _guard(child, (guard, orders))
    os.close(life)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _Warden(manner, orders, report, patience, guard).run(command)


def _guard(child: int, not_ours: Iterable[int]) -> NoReturn:
    """Be the guard of the warden `child`: wait for its end and, if it was killed, kill all that it has left behind."""
    status = 1
    try:
        for descriptor in not_ours:
            os.close(descriptor)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # whoever reads them waits for the last process that has them
            os.dup2(nowhere, descriptor)
        try:
            os.setsid()  # a SIGKILL of the warden's whole process group is not for us
        except PermissionError:  # it was started in a session of its own
            pass
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            _kill_children()
    finally:
        if status < 0:
            _end_by(-status)
        os._exit(status if status >= 0 else 1)


def _end_by(number: int) -> None:
    """End by the signal `number`, as the warden did: its end is what the process that waits for us wants to know."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def _kill_children() -> None:
    """Kill every descendant, generation after generation, until there is none."""
    while True:
        _send(_children("thread-self"), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


class Pulse:
    """The signs of life of who gives orders: how many quarters of the time `patience` have passed without one.

    No quarter counts for more than one, however long it has lasted: if this process stood still, so did the others, as
    when a shell stops them all.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._quarter = patience / 4
        self._clock = clock
        self._next = clock() + self._quarter
        self._missed = 0

    def left(self) -> float | None:
        """Return in how many seconds to ask what was `missed`; None: never."""
        return max(0.0, self._next - self._clock()) if self._quarter else None

    def beat(self) -> None:
        """Note a sign of life."""
        self._missed = 0
        self._next = self._clock() + self._quarter

    def missed(self) -> int:
        """Return how many quarters have been missed, if another one was just now; else 0."""
        now = self._clock()
        if not self._quarter or now < self._next:
            return 0
        self._missed += 1
        self._next = now + self._quarter
        return self._missed


class _Warden:
    def __init__(self, manner: str, orders: int, report: int, patience: float, guard: int) -> None:
        self._guard = guard
        self._pulse = Pulse(patience)
        self._is_worker = manner == WORKER
        self._awaits_rest = manner == HELD
        self._orders = orders
        self._report = report
        self._prctl = _prctl()
        self._leader = 0
        self._status: int | None = None
        self._is_empty = False  # nobody is left
        self._had: set[int] = set()  # the signals that came to us since the last order of their kind
        self._kept = {number for number in OWN if not self._is_worker and signal.getsignal(number) == signal.SIG_IGN}

    def run(self, command: list[str]) -> None:
        for descriptor in (self._orders, self._report):
            os.set_inheritable(descriptor, False)
        if self._is_worker:
            os.setsid()  # a SIGKILL of the guard's whole process group is not for us
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        ends, wake = os.pipe()
        for end in (ends, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, _note)
        for number in set(OWN) - self._kept:
            signal.signal(number, signal.SIG_IGN if self._is_worker else _note)
        # What comes before the command stands on its own feet must not find the warden's handlers in it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, OWN)
        self._leader = os.fork()
        if self._leader == 0:
            self._become(command, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._tell(pid=self._leader)
        if not self._follow(ends) or self._is_worker:
            self._kill_all()
        if self._is_worker:
            self._tell(status=self._status)

    def _become(self, command: list[str], mask: Iterable[int]) -> None:
        """Be the command: this is the forked child, and does not return."""
        code = 126
        try:
            parent = os.getppid()
            if self._is_worker:
                os.setsid()
            self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for number in {signal.SIGCHLD, *OWN} - self._kept:
                signal.signal(number, signal.SIG_DFL)
            for number in (signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)):
                signal.signal(number, signal.SIG_DFL)  # Python ignores them, and exec passes that on
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if self._is_worker:
                nowhere = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nowhere, 0)
                os.close(nowhere)
            if os.getppid() == parent:  # else the warden died before it could be known
                os.execvp(command[0], command)  # noqa: S606 - a shell would only stand between
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            self._tell(error=f"{command[0]}: {error.strerror}")
        finally:
            os._exit(code)

    def _follow(self, ends: int) -> bool:
        """Return whether the command has ended, and what is to be waited for beside it; False: all is to be killed."""
        while True:
            ready, _, _ = select.select([self._orders, ends, self._guard], [], [], self._pulse.left())
            orders = os.read(self._orders, 64) if self._orders in ready else None
            try:  # behind that: a signal that has come to all of us must be known before the order to pass it on
                self._had.update(os.read(ends, 4096))
            except BlockingIOError:
                pass
            self._reap()
            if self._is_empty or (self._status is not None and not self._awaits_rest):
                return True
            if orders == b"" or KILL_ALL in (orders or b"") or self._guard in ready:
                return False
            for number in orders or b"":
                self._obey(number)
            if self._loses_patience(self._pulse.missed()):
                return False

    def _obey(self, number: int) -> None:
        if number == ALIVE:
            self._pulse.beat()
        elif number >= EVERYBODY:
            _send(_descendants(), number - EVERYBODY)
        elif self._status is not None:
            _send(_descendants(), number)
        elif number in self._had:
            self._had.discard(number)
        else:
            self._signal(number)

    def _loses_patience(self, missed: int) -> bool:
        if missed == 2:
            self._tell(lost=True)
            _send(_descendants(), signal.SIGTERM)
        return missed > 2

    def _reap(self) -> None:
        """Bury all who have ended."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._bury(pid, status)
        except ChildProcessError:
            self._is_empty = True

    def _bury(self, pid: int, status: int) -> None:
        """Keep how the leader has ended, and tell it; a worker's end is told when nothing of it is left."""
        if pid == self._leader:
            self._status = os.waitstatus_to_exitcode(status)
            if not self._is_worker:
                self._tell(status=self._status)

    def _kill_all(self) -> None:
        """Kill every descendant, generation after generation, until there is none."""
        while True:
            if self._status is None:  # a leader that was not buried keeps the number of its group
                self._signal(signal.SIGKILL)
            _send(_children("thread-self"), signal.SIGKILL)
            try:
                self._bury(*os.waitpid(-1, 0))
            except ChildProcessError:
                return

    def _signal(self, number: int) -> None:
        """Send a signal to the command: a worker's whole group, which is its own."""
        try:
            (os.killpg if self._is_worker else os.kill)(self._leader, number)
        except (ProcessLookupError, PermissionError):
            _send([self._leader], number)  # it has not got its session yet

    def _tell(self, **facts: object) -> None:
        try:
            os.write(self._report, json.dumps(facts).encode() + b"\n")
        except OSError:  # nobody listens any more
            pass


def _note(*_: object) -> None:
    """The byte in the pipe is what counts."""


def _prctl() -> Prctl:
    try:
        call: Prctl = ctypes.CDLL(None, use_errno=True).prctl
        return call
    except (OSError, AttributeError):  # not Linux: process groups have to do
        return lambda *_: -1


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def _children(task: str) -> list[int]:
    """Return the children of a task, such as ``7/task/7``, below /proc."""
    try:
        with open(f"/proc/{task}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _descendants() -> list[int]:
    found = _children("thread-self")
    for pid in found:  # which grows meanwhile
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for task in tasks:
            found += _children(f"{pid}/task/{task}")
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
