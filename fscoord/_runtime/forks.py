"""Resets the package in a forked child: one hook runs a step of each module, in a fixed order.

fork(2) copies the whole memory of the process, but only the calling thread. If another thread was changing data, the
change is never completed in the child, and the locks of that thread are never released. Descriptors that the child
inherits keep the parent's file locks. So a child creates every mutex of the package again and closes every descriptor.

A module with a mutex, a thread or a descriptor registers a step under one of the names in `ORDER`. The steps run in the
order of `ORDER`, whatever the order of imports. If a signal handler interrupts a step, for example after Ctrl-C, all
steps run again. So it must be safe to run each step twice. A step may only acquire mutexes that the same step or an
earlier step has created again. A step does not call `process_epoch`. docs/contributors/forks.md lists them.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar
from weakref import ref

from fscoord._runtime.mutexes import atomic

T = TypeVar("T")

ORDER: Final = (
    "imports",  # first, because a later step may import a module
    "descriptors",  # closed before anything is opened
    "faked files",  # the mutex of all logs under pyfakefs
    "mutexes",  # of each log
    "handles",  # each takes its log's new mutex
    "stores",  # closes the stores that another thread was closing; needs `handles`
    "lock waits",
    "poller elections",
    "bells",
    "events",
    "watchers",  # they use poller elections, bells and events
    "names",
    "stations",
    "calls",
    "memory stores",
    "tcp connections",
    "etcd connections",
    "etcd sessions",
    "timeouts",
    "executors",
    "keepers",
    "trace",
    "faults",
)
"""The names of the steps, first to last."""

_steps: dict[str, Callable[[], None]] = {}
_life = [1]
_guards: dict[int, Any] = {}
"""{process id: the mutex of `recover_from_fork`}. After a fork by C code, several threads of the child may call
`recover_from_fork` at the same time. A child never uses the mutex of its parent, because that mutex may be locked
for ever."""


class WeakObjects(Generic[T]):
    """A set of weak references. Unlike `weakref.WeakSet`, it runs no Python function when an object is collected.

    If a signal handler interrupted such a function with an exception, Python would drop the exception.
    """

    def __init__(self) -> None:
        self._references: set[ref[T]] = set()

    def add(self, item: T) -> None:
        """Add `item`, which must be hashable."""
        self._references.add(ref(item, self._references.discard))

    def __iter__(self) -> Iterator[T]:
        found = [reference() for reference in list(self._references)]
        return (item for item in found if item is not None)


def after_fork_in_child(step: str, call: Callable[[], None]) -> None:
    """Register `call` as the step named `step`.

    After `os.fork`, Python runs the steps in the child. After a fork by C code, the first operation of the child runs
    the steps.

    Raises:
        ValueError: `ORDER` has no such name.
    """
    if step not in ORDER:
        raise ValueError(f"{step!r} is not a step of fork recovery: add it to {__name__}.ORDER")
    _steps[step] = call


def reset_in_child(step: str, reset: Callable[[T], None]) -> WeakObjects[T]:
    """Return a new, empty set, and register a step named `step` that calls `reset` for each object of the set.

    The caller adds each new object of a class to the set.
    """
    objects: WeakObjects[T] = WeakObjects()

    def reset_all() -> None:
        for each in objects:
            reset(each)

    after_fork_in_child(step, reset_all)
    return objects


def recover_from_fork() -> None:
    """Run all steps in a forked child, unless the child has run them already."""
    with _guards.setdefault(os.getpid(), atomic(threading.RLock())):
        if fork_marker[0]:
            return
        _life[0] += 1
        for name in ORDER:
            step = _steps.get(name)
            if step is not None:
                step()
        fork_marker[0] = 1
        _guards.clear()


def process_epoch() -> int:
    """Return a number that is higher in a forked child than in its parent. The call is faster than getpid(2).

    In a child that has not been reset, the call runs all steps first.
    """
    if not fork_marker[0]:
        recover_from_fork()
    return _life[0]


class _PidMark:
    """The `fork_marker` for a kernel without MADV_WIPEONFORK. This marker compares process ids."""

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


fork_marker = _make_mark()
"""A page of memory. The first byte is 0 in a forked child until `recover_from_fork` has run, and otherwise 1.

The kernel fills the page with zeros in each child (MADV_WIPEONFORK), also after a fork by C code. Reading the byte
takes 15 ns, a tenth of the time of getpid(2).
"""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=recover_from_fork)
