"""CPython's own tests of the queues of `multiprocessing`, run on `fscoord.recipes.Queue`.

The tests are in `test._test_multiprocessing`. They run with children that are forked. Those that start children run
with spawned ones, too, which get the queue by pickle. One test is left out, because it overrides a private method of
`multiprocessing.queues.Queue`.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import unittest
import uuid
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from test import _test_multiprocessing as theirs
from with_peers import queues

from fscoord import FileStore, Store, recipes as ours


class Queue(queues.Queue):
    """A queue in a part of the store of its own. It arrives in another process with a clone of the store."""

    def __init__(
        self, maxsize: int = 0, store: Store | None = None, name: str = "", *, acks_at_once: bool = True
    ) -> None:
        super().__init__(store or QueueTests.store, name or uuid.uuid4().hex, maxsize, acks_at_once=acks_at_once)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Queue, acks_at_once=self._acks_at_once), (self.maxsize, self._store, self._name)

    def close(self) -> None:
        """Do nothing: the store is closed, and not its queues."""


class QueueTests(theirs._TestQueue, unittest.TestCase):  # type: ignore[misc, name-defined]
    TYPE = "processes"
    Process = multiprocessing.get_context("fork").Process
    Queue, JoinableQueue = Queue, partial(Queue, acks_at_once=False)
    test_queue_feeder_on_queue_feeder_error = None
    store: ClassVar[FileStore]

    @classmethod
    def setUpClass(cls) -> None:
        directory = tempfile.TemporaryDirectory(prefix="cpython-")
        cls.addClassCleanup(directory.cleanup)
        QueueTests.store = FileStore(Path(directory.name) / "store", timeout=30)
        cls.addClassCleanup(QueueTests.store.close)
        cls.addClassCleanup(os.chdir, os.getcwd())
        os.chdir(directory.name)  # a test writes a module

    def setUp(self) -> None:
        for name in ("Queue", "JoinableQueue"):  # some tests make their queues by the functions of the module
            change = mock.patch.object(multiprocessing, name, getattr(self, name))
            change.start()
            self.addCleanup(change.stop)

    def Event(self) -> ours.Event:
        return ours.Event(self.store, uuid.uuid4().hex)


class SpawnedQueueTests(QueueTests):
    Process = multiprocessing.get_context("spawn").Process  # type: ignore[assignment]
    # These start no process.
    test_closed_queue_put_get_exceptions = test_no_import_lock_contention = test_qsize = test_timeout = None
    test_queue_feeder_donot_stop_onexc = None
