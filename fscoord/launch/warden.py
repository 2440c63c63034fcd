"""A program that runs one command, and kills every process that the command leaves behind.

The program is started as ``python -I -S warden.py MODE ORDERS REPORT LEASE_S COMMAND...``, and imports nothing of the
package. ORDERS and REPORT are descriptors of pipes. The *master* is the process that writes the orders.

The warden is the parent of the command. Processes that the command starts and abandons, including daemons, are
reparented to the warden (PR_SET_CHILD_SUBREAPER, prctl(2)). Each order is one byte: the number of a signal for the
command, or that number plus ``EVERYBODY`` for the command and all its descendants. ``KILL_ALL`` kills everything. The
end of the orders, which means that the master has died, kills everything, too.

A warden is two processes, because a single process may be killed: by the kernel when memory runs out, or by a command
that kills its parent. The *guard* is the process that was started, and the warden proper is a child of the guard. When
the warden is killed, the kernel kills the command (PR_SET_PDEATHSIG). The descendants of the command are reparented to
the guard, which is the next subreaper and kills them. When the guard is killed, a pipe between the two ends, and the
warden kills everything. When a stopped warden has not ended `OBEY_S` seconds after the end of the orders, the guard
kills it. Only a SIGKILL or SIGSTOP of both at the same moment leaves processes behind. On platforms other than Linux
there is no prctl(2), and the descendants of the command outlive a killed warden.

The master may also be stopped, or hang. If LEASE_S, in seconds, is not 0, the master must send ``ALIVE`` regularly.
After half of that time without ``ALIVE`` all processes get SIGTERM. After three quarters all processes are killed,
because at the end of the lease other processes may acquire the resource that the command needs.

The mode is one of three. A *worker* runs in a session of its own, without input. When it has ended, all its remaining
descendants are killed. A *held* command runs where the warden was started: on its terminal, with its input, in its
process group. The warden waits until the descendants of a held command have finished. The warden does not wait for the
descendants of an *alone* command. A held or alone command gets a signal for the whole group, such as Ctrl-C, from the
kernel. So the warden does not forward such a signal. If the warden was started with a signal ignored, as by nohup(1),
the signal stays ignored.

psutil can't replace this module, because psutil has no prctl(2). psutil is also slower: to find the 100 descendants of
a process among the 325 processes of a host, psutil took 6.9 ms of processor time, because it reads the status of every
process. The lists of children in /proc took 1.2 ms.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

WORKER, HELD, ALONE = "worker", "held", "alone"
KILL_ALL = 0
ALIVE = 127
EVERYBODY = 128
"""An order for the command and all its descendants is this number plus the number of the signal."""

PASSED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
"""The signals that are meant for the command rather than for the warden."""

OBEY_S = 2.0
"""How long after the end of the orders the guard waits for the end of the warden, in seconds."""

OWN = tuple(getattr(signal, name) for name in PASSED if hasattr(signal, name))

USER = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""The signals that only the command gets, because its descendants may have no handler and would die."""

Prctl = Callable[..., int]


def program(mode: str, orders: int, report: int, lease_s: float = 0) -> list[str]:
    """Return the arguments that start a warden. The caller appends the arguments of the command.

    Raises:
        ImportError: this Python has no ``_ctypes``, which a warden needs to kill all processes of the command.
    """
    import ctypes  # noqa: F401 - not at the top, because all that needs no warden works without ctypes

    itself = [__file__]
    if not os.path.exists(__file__):  # an archive, such as a zipapp, has no file that a new process could execute
        from inspect import getsource

        itself = ["-c", getsource(sys.modules[__name__])]
    return [sys.executable, "-I", "-S", *itself, mode, str(orders), str(report), str(lease_s)]


def main(mode: str, orders: int, report: int, lease_s: float, command: list[str]) -> None:
    """Run `command`. Report its pid and then its end, as lines of JSON on the descriptor `report`.

    The end is ``{"status": n}``: the exit code, or the negative number of a signal. A command that can't be started
    ends with 127 or 126, as in a shell, after ``{"error": text}``. ``{"lost": true}`` means that the lease has ended.
    If the warden is killed, no end is reported, and the report is closed when no process of the command is left.
    """
    _prctl()(PR_SET_CHILD_SUBREAPER, 1)  # for this process only: a child of fork(2) does not inherit the attribute
    guard, life = map(_above_standard, os.pipe())
    # The signals stay blocked in the guard: they may be sent to the whole group or job, and the warden handles them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, OWN)
    child = os.fork()
    if child:
        os.close(guard)
        _guard(child, orders)
    os.close(life)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _Warden(mode, orders, report, lease_s, guard).run(command)


def _above_standard(descriptor: int) -> int:
    """Return `descriptor`. If its number is 0, 1 or 2, close it and return a copy with a higher number.

    The guard redirects the descriptors 0, 1 and 2. A pipe gets one of these numbers if the warden was started with
    closed standard streams, as by ``<&- >&- 2>&-``.
    """
    low = []
    while descriptor <= 2:
        low.append(descriptor)
        descriptor = os.dup(descriptor)  # the lowest free number
    for number in low:
        os.close(number)
    return descriptor


def _guard(child: int, orders: int) -> NoReturn:
    """Act as the guard of the warden `child`: wait for its end and, if it was killed, kill the remaining processes."""
    status = 1
    try:
        orders = _above_standard(orders)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # a reader of these pipes waits until the last process has closed them
            os.dup2(nowhere, descriptor)
        with suppress(PermissionError):  # the guard was started in a session of its own
            os.setsid()  # so that a SIGKILL of the warden's process group does not reach the guard
        status = _await_warden(child, orders)
        if status:
            _kill_children()
    finally:
        if status < 0:
            _end_by(-status)
        os._exit(status if status >= 0 else 1)


def _await_warden(child: int, orders: int) -> int:
    """Wait for the end of the warden `child`, and return its exit code or the negative number of its signal.

    The caller is the guard, the parent process of the warden. The end of the pipe `orders` asks the warden to end. A
    warden that was stopped by a signal can't obey. So the guard watches the pipe, too, without reading its data. The
    guard kills a warden that still runs `OBEY_S` seconds after the end of the pipe.
    """
    ends = _wake_up_by_children()
    poll = select.poll()
    poll.register(ends, select.POLLIN)
    poll.register(orders, 0)  # only for its end, which poll(2) always reports
    limit = None
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        ready = [descriptor for descriptor, _ in poll.poll(limit)]
        if orders in ready:
            poll.unregister(orders)
            limit = OBEY_S * 1000
        elif not ready:
            os.kill(child, signal.SIGKILL)  # `child` has not been reaped, so its number is not reused
            limit = None
        with suppress(BlockingIOError):
            os.read(ends, 4096)


def _wake_up_by_children() -> int:
    """Return a descriptor from which a byte can be read after a child has ended or stopped."""
    ends, wake = os.pipe()
    for end in (ends, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, _note)
    return ends


def _end_by(number: int) -> None:
    """End this process by the signal `number`, which killed the warden, so that the parent gets the warden's status."""
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


class Watchdog:
    """Counts the quarters of `lease_s` that have passed without ``ALIVE`` from the master.

    A call of `missed` counts one quarter, even if the call is late by several. The reason for a late call is probably
    that this process was stopped together with the master, as when a shell stops the whole job.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._quarter = lease_s / 4
        self._clock = clock
        self._next = clock() + self._quarter
        self._missed = 0

    def left(self) -> float | None:
        """Return after how many seconds to call `missed`; None if there is no lease."""
        return max(0.0, self._next - self._clock()) if self._quarter else None

    def beat(self) -> None:
        """Record that the master has sent ``ALIVE``."""
        self._missed = 0
        self._next = self._clock() + self._quarter

    def missed(self) -> int:
        """Return the number of quarters since the last ``ALIVE``; 0 if no quarter has ended since the last call."""
        now = self._clock()
        if not self._quarter or now < self._next:
            return 0
        self._missed += 1
        self._next = now + self._quarter
        return self._missed


class _Warden:
    def __init__(self, mode: str, orders: int, report: int, lease_s: float, guard: int) -> None:
        self._guard = guard
        self._watchdog = Watchdog(lease_s)
        self._is_worker = mode == WORKER
        self._awaits_rest = mode == HELD
        self._orders = orders
        self._report = report
        self._prctl = _prctl()
        self._leader = 0
        self._status: int | None = None
        self._is_empty = False  # whether no child is left
        self._had: set[int] = set()  # signals that this process has received itself, until the order for each comes
        self._kept = {number for number in OWN if not self._is_worker and signal.getsignal(number) == signal.SIG_IGN}

    def run(self, command: list[str]) -> None:
        for descriptor in (self._orders, self._report):
            os.set_inheritable(descriptor, False)
        if self._is_worker or os.getsid(0) == os.getppid():  # the guard was started in a session of its own
            os.setsid()  # so that a SIGKILL of the guard's process group does not reach the warden
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        ends = _wake_up_by_children()
        for number in set(OWN) - self._kept:
            signal.signal(number, signal.SIG_IGN if self._is_worker else _note)
        # A signal that comes before the command has been executed must not run the warden's handlers in it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, OWN)
        self._leader = os.fork()
        if self._leader == 0:
            self._become(command, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._report_facts(pid=self._leader)
        if not self._follow(ends) or self._is_worker:
            self._kill_all()
        if self._is_worker:
            self._report_facts(status=self._status)

    def _become(self, command: list[str], mask: Iterable[int]) -> None:
        """Execute the command in the forked child; does not return."""
        code = 126
        try:
            parent = os.getppid()
            if self._is_worker:
                os.setsid()
            self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for number in {signal.SIGCHLD, *OWN} - self._kept:
                signal.signal(number, signal.SIG_DFL)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)  # Python ignores them, and exec passes that on
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if self._is_worker:
                nowhere = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nowhere, 0)
                os.close(nowhere)
            if os.getppid() == parent:  # otherwise the warden died before PR_SET_PDEATHSIG took effect
                os.execvp(command[0], command)  # noqa: S606 - a shell would only stand between
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            self._report_facts(error=f"{command[0]}: {error.strerror}")
        finally:
            os._exit(code)

    def _follow(self, ends: int) -> bool:
        """Wait for the end of the command and, for a held command, of its descendants.

        Return False if everything must be killed instead: by an order, at the end of the lease, or because the guard
        or the master has died.
        """
        while True:
            ready, _, _ = select.select([self._orders, ends, self._guard], [], [], self._watchdog.left())
            orders = os.read(self._orders, 64) if self._orders in ready else None
            with suppress(BlockingIOError):
                # After the orders: a signal to the whole group must be known before the order to forward it.
                self._had.update(os.read(ends, 4096))
            self._reap()
            if self._is_empty or (self._status is not None and not self._awaits_rest):
                return True
            if orders == b"" or KILL_ALL in (orders or b"") or self._guard in ready:
                return False
            for number in orders or b"":
                self._obey(number)
            if self._has_expired(self._watchdog.missed()):
                return False

    def _obey(self, number: int) -> None:
        if number == ALIVE:
            self._watchdog.beat()
        elif number >= EVERYBODY:
            _send(_descendants(), number - EVERYBODY)
        elif self._status is not None:
            _send(_descendants(), number)
        elif number in self._had:
            self._had.discard(number)
        else:
            self._signal(number)

    def _has_expired(self, missed: int) -> bool:
        if missed == 2:
            self._report_facts(lost=True)
            _send(_descendants(), signal.SIGTERM)
        return missed > 2

    def _reap(self) -> None:
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._record_end(pid, status)
        except ChildProcessError:
            self._is_empty = True

    def _record_end(self, pid: int, status: int) -> None:
        """Record the status of the command, and report it. A worker's status is reported at the very end."""
        if pid == self._leader:
            self._status = os.waitstatus_to_exitcode(status)
            if not self._is_worker:
                self._report_facts(status=self._status)

    def _kill_all(self) -> None:
        """Kill every descendant, generation after generation, until there is none."""
        while True:
            if self._status is None:  # as long as the leader has not been reaped, its group's number is not reused
                self._signal(signal.SIGKILL)
            _send(_children("thread-self"), signal.SIGKILL)
            try:
                self._record_end(*os.waitpid(-1, 0))
            except ChildProcessError:
                return

    def _signal(self, number: int) -> None:
        """Send a signal to the command. A signal that ends processes goes to the whole process group of a worker."""
        try:
            (os.killpg if self._is_worker and number not in USER else os.kill)(self._leader, number)
        except (ProcessLookupError, PermissionError):
            _send([self._leader], number)  # the leader is not in its own session yet

    def _report_facts(self, **facts: object) -> None:
        with suppress(OSError):  # the reader has gone
            os.write(self._report, json.dumps(facts).encode() + b"\n")


def _note(*_: object) -> None:
    """Do nothing. Python also writes a byte to the wake-up descriptor, which the warden reads."""


def _prctl() -> Prctl:
    import ctypes

    try:
        call: Prctl = ctypes.CDLL(None, use_errno=True).prctl
        return call
    except (OSError, AttributeError):  # not Linux: only process groups are available
        return lambda *_: -1


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _children(task: str) -> list[int]:
    """Return the children of a task, such as ``7/task/7``, below /proc."""
    try:
        with open(f"/proc/{task}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _descendants() -> list[int]:
    found = _children("thread-self")
    for pid in found:  # the loop also visits the pids that it appends
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for task in tasks:
            found += _children(f"{pid}/task/{task}")
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
