"""What a forked child does before it uses anything that it has inherited: one hook, whose order stands here.

fork(2) copies the memory of all threads, and one thread. Whatever another thread was in the middle of stays as it was:
its locks are taken for ever, its half of a change is never followed by the other half, and descriptors that the child
has inherited keep the parent's locks. So a child renews every lock of the package and closes every descriptor.

The modules that have such things say what a child does to them, under one of the names of `ORDER`. The steps are taken
in that order, whatever the order of imports, and all of them again if the child is interrupted (by Ctrl-C, say) before
the last. A step takes no lock that an earlier one has not renewed, asks nobody for the `life`, and does no harm when it
is taken twice. docs/forks.md lists what each does.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from typing import Any, Final

__all__ = ["ORDER", "after_fork_in_child", "life", "own_process", "recover_from_fork"]

ORDER: Final = (
    "imports",  # first, because any later step may have to import something
    "descriptors",  # closed before anything is opened
    "faked files",  # the mutex of all logs on files that are not real
    "mutexes",  # of each log
    "handles",  # which take the mutexes that are new by now
    "stores",  # those that were being closed; needs `handles`
    "lock waits",
    "poller elections",
    "bells",
    "events",
    "watches",  # which use the last three
    "names",
    "calls",
    "memory stores",
    "tcp connections",
    "etcd connections",
    "etcd sessions",
    "timeouts",
    "hands",
    "slices",
    "keepers",
    "faults",
)
"""The names of the steps."""

_steps: dict[str, Callable[[], None]] = {}
_life = [1]
_guards: dict[int, Any] = {}
"""Keeps the threads of one child apart that find out at once that it was forked; by process, for no child can use the
guard of its parent."""


def after_fork_in_child(step: str, call: Callable[[], None]) -> None:
    """Have `call` be the step of this name: taken by Python's own hook, or at the next operation after a fork in C."""
    if step not in ORDER:
        raise ValueError(f"{step!r} is not a step of a forked child: give it its place in {__name__}.ORDER")
    _steps[step] = call


def recover_from_fork() -> None:
    """In a forked child: take the steps. A child that has taken them does nothing."""
    with _guards.setdefault(os.getpid(), threading.RLock()):
        if own_process[0]:
            return
        _life[0] += 1
        for name in ORDER:
            step = _steps.get(name)
            if step is not None:
                step()
        own_process[0] = 1
        _guards.clear()


def life() -> int:
    """Return a number that is another one in a forked child than in its parent; getpid(2) takes ten times as long."""
    if not own_process[0]:
        recover_from_fork()
    return _life[0]


class _PidMark:
    """`own_process` where the kernel has no MADV_WIPEONFORK."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __getitem__(self, _: int) -> int:
        return self._pid == os.getpid()

    def __setitem__(self, _: int, __: int) -> None:
        self._pid = os.getpid()


def _make_mark() -> Any:
    wipe_on_fork = 18  # MADV_WIPEONFORK, madvise(2), Linux 4.14
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(wipe_on_fork)
    except (AttributeError, OSError, TypeError):
        return _PidMark()
    page[0] = 1
    return page


own_process = _make_mark()
"""``own_process[0]`` is 0 in a child that was forked without Python's knowledge, until `recover_from_fork`.

The kernel wipes this page in a child. Looking at it takes 15 ns; getpid(2), which says as much, ten times that.
"""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=recover_from_fork)
