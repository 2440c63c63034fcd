"""Mutexes that a ``with`` acquires as one step, so that no signal handler runs before the block of the ``with``.

CPython runs signal handlers after it has called a C function. Up to Python 3.13, the interpreter calls the
``__enter__`` of a ``with`` in an instruction of its own, after which no handler runs. Since Python 3.14, the call of
``__enter__`` is a call like any other. A handler that raises after the ``__enter__`` of a `threading.Lock` leaves the
lock locked, because the block that would release the lock has not begun.
"""

from __future__ import annotations

import sys
from types import MethodDescriptorType
from typing import Any

_BLOCKING = (True,)


class Mutex:
    """A `threading.Lock` or a `threading.RLock` whose ``__enter__`` is a Python function.

    After a Python function has returned, the interpreter runs no handler before it enters the block. Inside
    ``__enter__``, the interpreter acquires the lock while it unpacks a sequence. After this instruction, no handler
    runs either.
    """

    __slots__ = ("__exit__", "acquire", "locked", "release")

    def __init__(self, lock: Any) -> None:
        self.acquire = lock.acquire
        self.release = lock.release
        self.locked = getattr(lock, "locked", None)  # Python 3.14 added the method to `threading.RLock`
        # This must be the C function itself. At the entry of a Python function, a handler could raise before the lock
        # is released.
        self.__exit__ = lock.__exit__

    def __enter__(self) -> None:
        (_,) = map(self.acquire, _BLOCKING)


def atomic(lock: Any) -> Any:
    """Return `lock`, or a `Mutex` in its place if ``with lock`` would let a signal handler in before the block.

    Args:
        lock: a new `threading.Lock` or `threading.RLock`. A test or gevent may have replaced these classes by others,
            which are written in Python. Then the function returns `lock`.
    """
    if sys.version_info >= (3, 14) and isinstance(getattr(type(lock), "__enter__", None), MethodDescriptorType):
        return Mutex(lock)
    return lock
