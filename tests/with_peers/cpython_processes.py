"""CPython's own tests of the classes of `multiprocessing`, run on the recipes that do the same.

The tests are in `test._test_multiprocessing`. They run with children that are forked. Those of queues that start
children run with spawned ones, too, which get the queue by pickle. Tests of semaphores are left out, because theirs
count from 0, and so is a test that overrides a private method of `multiprocessing.queues.Queue`.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import unittest
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from test import _test_multiprocessing as theirs
from with_peers import barriers, queues

from fscoord import FileStore, Store, recipes as ours


def made(kind: Callable[..., Any]) -> Any:
    return staticmethod(lambda *arguments: kind(SharedStore.store, uuid.uuid4().hex, *arguments))


class Queue(queues.Queue):
    """A queue in a part of the store of its own. It arrives in another process with a clone of the store."""

    def __init__(
        self, maxsize: int = 0, store: Store | None = None, name: str = "", *, acks_at_once: bool = True
    ) -> None:
        super().__init__(store or SharedStore.store, name or uuid.uuid4().hex, maxsize, acks_at_once=acks_at_once)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Queue, acks_at_once=self._acks_at_once), (self.maxsize, self._store, self._name)

    def close(self) -> None:
        """Do nothing: the store is closed, and not its queues."""


class Barrier(barriers.Barrier):
    """A barrier with the arguments of `multiprocessing.Barrier`, of which it has no `action`."""

    def __init__(self, parties: int, action: None = None, timeout: float | None = None) -> None:
        if action is not None:
            raise TypeError("a CyclicBarrier has no action")
        super().__init__(SharedStore.store, uuid.uuid4().hex, parties, timeout)


class SharedStore:
    """Makes what the tests use, in a store that their processes share."""

    TYPE = "processes"
    Process = multiprocessing.get_context("fork").Process
    Queue, JoinableQueue, Barrier = Queue, partial(Queue, acks_at_once=False), Barrier
    store: ClassVar[FileStore]

    @classmethod
    def setUpClass(cls) -> None:
        directory = tempfile.TemporaryDirectory(prefix="cpython-")
        cls.addClassCleanup(directory.cleanup)
        SharedStore.store = FileStore(Path(directory.name) / "store", timeout=30)
        cls.addClassCleanup(SharedStore.store.close)
        cls.addClassCleanup(os.chdir, os.getcwd())
        os.chdir(directory.name)  # a test writes a module

    Event, Lock, RLock, Condition = map(made, (ours.Event, ours.Lock, ours.RLock, ours.Condition))
    # What the tests use beside.
    Pipe, Semaphore, Value = map(staticmethod, (multiprocessing.Pipe, multiprocessing.Semaphore, multiprocessing.Value))


class QueueTests(SharedStore, theirs._TestQueue, unittest.TestCase):  # type: ignore[misc, name-defined]
    test_queue_feeder_on_queue_feeder_error = None

    def setUp(self) -> None:
        for name in ("Queue", "JoinableQueue"):  # some tests make their queues by the functions of the module
            change = mock.patch.object(multiprocessing, name, getattr(self, name))
            change.start()
            self.addCleanup(change.stop)


class SpawnedQueueTests(QueueTests):
    Process = multiprocessing.get_context("spawn").Process  # type: ignore[assignment]
    # These start no process.
    test_closed_queue_put_get_exceptions = test_no_import_lock_contention = test_qsize = test_timeout = None
    test_queue_feeder_donot_stop_onexc = None


class EventTests(SharedStore, theirs._TestEvent, unittest.TestCase):  # type: ignore[misc, name-defined]
    pass


class LockTests(SharedStore, theirs._TestLock, unittest.TestCase):  # type: ignore[misc, name-defined]
    pass


class ConditionTests(SharedStore, theirs._TestCondition, unittest.TestCase):  # type: ignore[misc, name-defined]
    def check_invariant(self, _: object) -> None:
        """Do nothing: theirs reads private attributes."""


class BarrierTests(SharedStore, theirs._TestBarrier, unittest.TestCase):  # type: ignore[misc, name-defined]
    pass
