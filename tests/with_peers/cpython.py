"""CPython's own tests of the classes in `threading`, run on the recipes that have their methods.

The tests are the classes of `test.lock_tests` in the running Python's library. `own_tests.py` runs this file.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

from test import lock_tests

from fscoord import FileStore, recipes as ours

directory = tempfile.TemporaryDirectory(prefix="cpython-")
store = FileStore(Path(directory.name) / "store", timeout=30)


def on_the_store(kind: type[Any]) -> Callable[..., Any]:
    """Return a function with the arguments of a class of `threading`, which makes an object of `kind`."""
    return lambda *arguments, **named: kind(store, uuid.uuid4().hex, *arguments, **named)


# The store starts its threads here. The tests compare the number of threads before and after.
with ours.Lock(store, "first") as first:
    waiter = Thread(target=first.acquire, args=(True, 0.1))
    waiter.start()
    waiter.join()


class LockTests(lock_tests.LockTests):
    locktype = staticmethod(on_the_store(ours.Lock))


class RLockTests(lock_tests.RLockTests):
    locktype = staticmethod(on_the_store(ours.RLock))


class BoundedSemaphoreTests(lock_tests.BoundedSemaphoreTests):
    semtype = staticmethod(on_the_store(ours.Semaphore))
