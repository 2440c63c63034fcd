"""A plugin of pytest, with which kazoo's own tests run on the recipes of `fscoord.recipes` that do the same.

A client of kazoo is a handle of a store. An identifier is a label.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kazoo.exceptions import CancelledError, LockTimeout
from kazoo.recipe.partitioner import PartitionState

from fscoord import (
    AcquireCancelledError,
    FileStore,
    LockLostError,
    QueueEmptyError,
    Store,
    StoreTimeoutError,
    recipes,
)
from fscoord.recipes._hold import contender_of
from fscoord.recipes.partitioner import _balanced


class Hold:
    """Gives an object of `fscoord.recipes` the methods and results of kazoo's class."""

    def __init__(self, hold: Any) -> None:
        self._hold = hold
        self.cancel = hold.cancel

    @property
    def is_acquired(self) -> bool:
        return bool(self._hold.is_acquired)

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        was_acquired = self.is_acquired
        try:
            is_acquired = bool(self._hold.acquire(blocking, -1 if timeout is None else timeout))
        except AcquireCancelledError as error:
            raise CancelledError from error
        if blocking and not is_acquired and not was_acquired:
            raise LockTimeout
        return is_acquired

    def release(self) -> bool:
        is_acquired = self.is_acquired
        if is_acquired:
            self._hold.release()
        return is_acquired

    def contenders(self) -> list[str]:
        return [contender_of(entry).label for entry in self._hold._line.living()]  # of one moment

    def lease_holders(self) -> list[str]:
        return [each.label for each in self._hold.holders()]

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Queue:
    """A `PriorityQueue` with the methods of kazoo's queues."""

    def __init__(self, store: Store, path: str) -> None:
        self.path = path
        self._queue = recipes.PriorityQueue(store, path)
        self._item: recipes.Item | None = None

    def __len__(self) -> int:
        return len(self._queue.items())

    def put(self, value: bytes, priority: int = 100) -> None:
        self._queue.put(value, priority)

    def get(self) -> bytes | None:
        try:
            item = self._queue.take(block=False)
        except QueueEmptyError:
            return None
        item.ack()
        return item.data


class LockingQueue(Queue):
    """The same, where a consumer has one item until it calls `consume`."""

    def put_all(self, values: list[bytes], priority: int = 100) -> None:
        self._queue.put_all(values, priority)

    def get(self, timeout: float | None = None) -> bytes | None:
        if self._item is None:
            try:
                self._item = self._queue.take(timeout=timeout)
            except StoreTimeoutError:
                return None
        return self._item.data

    def holds_lock(self) -> bool:
        return self._item is not None

    def consume(self) -> bool:
        return self._end(recipes.Item.ack)

    def release(self) -> bool:
        return self._end(recipes.Item.release)

    def _end(self, end: Callable[[recipes.Item], None]) -> bool:
        item, self._item = self._item, None
        if item is not None:
            end(item)
        return item is not None


class SetPartitioner:
    """A `Partitioner` with the states of kazoo's class. It has joined from its beginning to `finish`."""

    def __init__(self, store: Store, path: str, set: Iterable[Any], **_: object) -> None:
        self._set = list(set)
        self._group = recipes.Partitioner(store, path, len(self._set))
        self._group.join()
        self.failed = False
        self.finish = self._group.leave
        self.state_change_event = threading.Event()

    @property
    def state(self) -> str:
        """RELEASE if the group has changed, so that this member has partitions to give up or to take."""
        if self.failed:
            return PartitionState.FAILURE
        group = self._group._parse(self._group._store.get(self._group._key))
        is_settled = _balanced(group, self._group._own().decode()) == group
        return PartitionState.ACQUIRED if is_settled else PartitionState.RELEASE

    @property
    def release(self) -> bool:
        return self.state == PartitionState.RELEASE

    def release_set(self) -> None:
        try:
            self._group.rebalance()
        except LockLostError:
            self.failed = True

    def wait_for_acquire(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.release and time.monotonic() < end:
            self._group.wait_changed(end - time.monotonic())

    def _fail_out(self) -> None:
        """Do what another process does that takes this one for dead."""
        self._group._remove(self._group._own())

    def __iter__(self) -> Iterator[Any]:
        return iter([self._set[number] for number in sorted(self._group.partitions)])


class Client:
    """A handle of the store, with the methods of a `kazoo.client.KazooClient`."""

    handler = SimpleNamespace(
        sleep_func=time.sleep,
        event_object=threading.Event,
        spawn=lambda function, *arguments: threading.Thread(target=function, args=arguments).start(),
    )

    def __init__(self, path: Path) -> None:
        self._store = FileStore(path, timeout=30)
        self.stop = self._store.close

    def start(self) -> None:
        """Do nothing: the handle is open."""

    def server_version(self) -> tuple[int, ...]:
        return 3, 9  # of a server that has what kazoo's queues need

    def Queue(self, path: str) -> Queue:
        return Queue(self._store, path)

    def LockingQueue(self, path: str) -> LockingQueue:
        return LockingQueue(self._store, path)

    def SetPartitioner(self, path: str, set: Iterable[Any], **named: object) -> SetPartitioner:
        return SetPartitioner(self._store, path, set, **named)

    def Lock(self, path: str, identifier: str = "") -> Hold:
        return Hold(recipes.Lock(self._store, path, label=identifier))

    def ReadLock(self, path: str, identifier: str = "") -> Hold:
        return Hold(recipes.ReadWriteLock(self._store, path, label=identifier).reader)

    def WriteLock(self, path: str, identifier: str = "") -> Hold:
        return Hold(recipes.ReadWriteLock(self._store, path, label=identifier).writer)

    def Semaphore(self, path: str, identifier: str = "", max_leases: int = 1) -> Hold:
        return Hold(recipes.Semaphore(self._store, path, max_leases, label=identifier))


class StoreTestCase(unittest.TestCase):
    """In the place of `kazoo.testing.KazooTestCase`, which starts a server."""

    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory(prefix="kazoo-")
        self.addCleanup(directory.cleanup)
        self._path = Path(directory.name) / "store"
        self.client = self._get_client()

    def _get_client(self) -> Client:
        client = Client(self._path)
        self.addCleanup(client.stop)
        return client


testing: Any = ModuleType("kazoo.testing")  # kazoo's own module needs the packages of its server
testing.KazooTestCase = StoreTestCase
sys.modules["kazoo.testing"] = testing
