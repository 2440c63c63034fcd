"""A plugin of pytest, with which kazoo's own tests run on the locks and semaphores of `fscoord.recipes`.

A client of kazoo is a handle of a store. An identifier is a label.
"""

from __future__ import annotations

import sys
import tempfile
import time
import unittest
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kazoo.exceptions import CancelledError, LockTimeout

from fscoord import AcquireCancelledError, FileStore, recipes
from fscoord.recipes._hold import contender_of


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


class Client:
    """A handle of the store, with the methods of a `kazoo.client.KazooClient`."""

    handler = SimpleNamespace(sleep_func=time.sleep)

    def __init__(self, path: Path) -> None:
        self._store = FileStore(path, timeout=30)
        self.stop = self._store.close

    def start(self) -> None:
        """Do nothing: the handle is open."""

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
