"""Runs one worker and leaves nothing of it behind, whatever happens to whom.

It is a program by itself, ``python -I -S warden.py REPORT_FD COMMAND...``, and imports nothing of the package.

A worker runs in a session of its own, with the warden as its parent. Whatever the worker starts and abandons, daemons
too, falls back to the warden (PR_SET_CHILD_SUBREAPER, prctl(2)), which kills all of it when the worker has ended. The
warden reads orders from its standard input: a byte is the number of a signal for the worker's process group; the end,
which comes when the agent wants it or has died, means: kill everything. If the warden itself is killed, the kernel
kills the worker (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Callable

__all__ = ["main"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

Prctl = Callable[..., int]


def main(report: int, command: list[str]) -> None:
    """Run `command`; tell its pid, then its end, as lines of JSON on the descriptor `report`.

    The end is ``{"status": n}``: the exit code, or a signal's number as a negative one. A command that can't be started
    ends with 127 or 126, as in a shell, and ``{"error": text}`` comes before.
    """
    os.set_inheritable(report, False)
    prctl = _prctl()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    ends, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # the byte in the pipe is what counts
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    leader = os.fork()
    if leader == 0:
        _become(command, report, prctl)
    _tell(report, pid=leader)
    status = _follow(leader, ends)
    status = _kill_all(leader, status)
    _tell(report, status=status)


def _prctl() -> Prctl:
    try:
        call: Prctl = ctypes.CDLL(None, use_errno=True).prctl
        return call
    except (OSError, AttributeError):  # not Linux: process groups have to do
        return lambda *_: -1


def _become(command: list[str], report: int, prctl: Prctl) -> None:
    """Be the worker: this is the forked child, and does not return."""
    code = 126
    try:
        parent = os.getppid()
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them, and exec passes that on
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
        if os.getppid() == parent:  # else the warden died before it could be known
            os.execvp(command[0], command)  # noqa: S606 - a shell would only stand between
    except FileNotFoundError as error:
        code = 127
        _tell(report, error=f"{command[0]}: {error.strerror}")
    except OSError as error:
        _tell(report, error=f"{command[0]}: {error.strerror}")
    finally:
        os._exit(code)


def _follow(leader: int, ends: int) -> int | None:
    """Return how the worker ended, or None when it is to be killed."""
    while True:
        ready, _, _ = select.select([0, ends], [], [])
        if 0 in ready:
            orders = os.read(0, 64)
            if not orders:
                return None
            for number in orders:
                _signal_group(leader, number)
        if ends in ready:
            os.read(ends, 4096)
            status = _reap(leader)
            if status is not None:
                return status


def _reap(leader: int) -> int | None:
    """Bury all who have ended; return how the leader did, if it is among them."""
    found = None
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return found
            if pid == leader:
                found = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return found


def _kill_all(leader: int, status: int | None) -> int:
    """Kill every descendant, generation after generation, until there is none; return how the leader ended."""
    while True:
        if status is None:  # a leader that was not buried keeps the number of its group
            _signal_group(leader, signal.SIGKILL)
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        try:
            pid, found = os.waitpid(-1, 0)
        except ChildProcessError:
            return -signal.SIGKILL if status is None else status
        if pid == leader:
            status = os.waitstatus_to_exitcode(found)


def _children() -> list[int]:
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _signal_group(leader: int, number: int) -> None:
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        try:
            os.kill(leader, number)  # it has not got its session yet
        except (ProcessLookupError, PermissionError):
            pass


def _tell(report: int, **facts: object) -> None:
    try:
        os.write(report, json.dumps(facts).encode() + b"\n")
    except OSError:  # nobody listens any more
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
