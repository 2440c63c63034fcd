"""CPython's own tests of the classes in `threading` and `queue`, run on the recipes that do the same.

The tests are classes of `test.lock_tests` and `test.test_queue` in the running Python's library. `own_tests.py` runs
this file. `FailingQueueTest` is left out, because it overrides private methods of `queue.Queue`.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import unittest
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from test import lock_tests, test_queue
from with_peers import barriers, queues

from fscoord import FileStore, recipes as ours

directory = tempfile.TemporaryDirectory(prefix="cpython-")
store = FileStore(Path(directory.name) / "store", timeout=30)


def on_the_store(kind: type[Any]) -> Callable[..., Any]:
    """Return a function with the arguments of a class of `threading`, which makes an object of `kind`."""
    return lambda *arguments, **named: kind(store, uuid.uuid4().hex, *arguments, **named)


# The store starts its threads here. The tests compare the number of threads before and after.
with ours.Lock(store, "first") as first:
    waiter = threading.Thread(target=first.acquire, args=(True, 0.1))
    waiter.start()
    waiter.join()


class LockTests(lock_tests.LockTests):
    locktype = staticmethod(on_the_store(ours.Lock))


class RLockTests(lock_tests.RLockTests):
    locktype = staticmethod(on_the_store(ours.RLock))


class BoundedSemaphoreTests(lock_tests.BoundedSemaphoreTests):
    semtype = staticmethod(on_the_store(ours.Semaphore))


class EventTests(lock_tests.EventTests):
    eventtype = staticmethod(on_the_store(ours.Event))


class ConditionTests(lock_tests.ConditionTests):
    @staticmethod
    def condtype(lock: Any = None) -> Any:
        return ours.Condition(store, uuid.uuid4().hex, lock)


class BarrierTests(lock_tests.BarrierTests):
    barriertype = staticmethod(on_the_store(barriers.Barrier))


class Queue(queues.Queue):
    """A queue in a part of the store of its own. The tests compare the name of the class."""

    def __init__(self, maxsize: int = 0, **options: bool) -> None:
        super().__init__(store, uuid.uuid4().hex, maxsize, **options)


class PriorityQueue(Queue, queues.PriorityQueue):
    """A queue whose items are their own priorities."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None, **_: int) -> None:
        super().put(item, block, timeout, priority=item if isinstance(item, int) else 0)


class QueueTests(test_queue.BaseQueueTestMixin, unittest.TestCase):
    queue, type2test = queue, Queue


class PriorityQueueTests(test_queue.BaseQueueTestMixin, unittest.TestCase):
    queue, type2test = queue, PriorityQueue


class SimpleQueueTests(test_queue.BaseSimpleQueueTest, unittest.TestCase):
    queue, type2test = queue, staticmethod(partial(Queue, acks_at_once=True))
