"""A process of the histories: it makes random calls on a store, and tells of each on its standard output.

``python worker.py ROLE JSON``. What it has told before it is killed has reached the pipe.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from linear import operations
from linear.models import EMPTY

from fscoord import FileStore, QueueEmptyError, StoreError, StoreTimeoutError, _system as system
from fscoord.recipes.lock import Lock

LIMIT_S = 60.0


def tell(*words: Any) -> None:
    os.write(1, repr(words).encode() + b"\n")


def history(path: str, name: int, seed: int, forks: int, options: dict[str, Any]) -> None:
    """Make calls until killed, and tell of each before and after it; soon, `forks` times, go on as two."""
    rng = random.Random(seed)
    store = FileStore(path, timeout=LIMIT_S, **options)
    fork_at = set(rng.sample(range(2, 20), forks))
    for number in itertools.count():
        if number in fork_at and os.fork() == 0:
            name, rng, fork_at = name + 100, random.Random(seed + 1), set()
        key = rng.choice(VALUES + QUEUES)
        draw = operations.draw_queue if key in QUEUES else operations.draw_value
        operation = draw(rng, number, name)
        tell(name, number, key, operation, time.monotonic_ns())
        try:
            result = operations.call(store, key, operation)
        except StoreError as error:
            tell(name, number, "maybe" if error.maybe_applied else "never", repr(error))
        except (StoreTimeoutError, ValueError, OverflowError) as error:
            tell(name, number, "never", repr(error))
        else:
            tell(name, number, "done", result, time.monotonic_ns())


VALUES = [f"v{number}" for number in range(6)]
QUEUES = [f"q{number}" for number in range(4)]


def hold(path: str, name: int) -> None:
    """Hold one lock again and again until killed, and tell of each call before and after it."""
    store = FileStore(path, timeout=LIMIT_S)
    lock = Lock(store, "lock")
    for number in itertools.count():
        tell(name, 2 * number, "acquire", time.monotonic_ns())
        lock.acquire()
        tell(name, 2 * number, "done", lock.token, time.monotonic_ns())
        tell(name, 2 * number + 1, "release", time.monotonic_ns())
        lock.release()
        tell(name, 2 * number + 1, "done", 0, time.monotonic_ns())


class KeepingOs(ModuleType):
    """`os`, but a generation is copied before it is removed: what was in it is the witness of its time."""

    def __init__(self, path: str, kept: str) -> None:
        super().__init__("os")
        vars(self).update(vars(os), unlink=self.keep_and_unlink)
        self._log, self._kept = path, kept

    def keep_and_unlink(self, path: str) -> None:
        name = os.path.basename(path)
        if name.startswith(os.path.basename(self._log) + ".") and name.rpartition(".")[2] not in (
            "new",
            "bell",
            "alive",
        ):
            copy = os.path.join(self._kept, f"{name}.{os.getpid()}")
            shutil.copyfile(path, copy)
            os.rename(copy, os.path.join(self._kept, name))
        os.unlink(path)


def testify(path: str, kept: str, name: int, seed: int, count: int, keys: int, options: dict[str, Any]) -> None:
    """Make `count` calls whose effects are all different, and tell of each after it: ``number, operation, key, start,
    end, result``.
    """
    system.os = KeepingOs(path, kept)
    rng, clock, line = random.Random(seed), time.monotonic_ns, os.write
    store = FileStore(path, timeout=LIMIT_S, **options)
    for number in range(count):
        mine = b"%d.%d" % (name, number)
        chance, key = rng.random(), str(rng.randrange(keys))
        start = clock()
        try:
            if chance < 0.3:
                what, result = b"get", store.get("v" + key)
            elif chance < 0.5:
                store.set("v" + key, mine)
                what, result = b"set", mine
            elif chance < 0.6:
                seen = store.get("v" + key)
                start = clock()
                found = store.compare_set("v" + key, seen, mine)
                what, result = (b"set", mine) if found == mine else (b"miss", found)
            elif chance < 0.8:
                what, result = b"add", b"%d" % store.add("c" + key, 1)
            elif chance < 0.9:
                store.queue_push("q" + key, mine)
                what, result = b"push", mine
            else:
                what, result = b"pop", store.queue_pop("q" + key, block=False)
        except QueueEmptyError:
            what, result = b"pop", EMPTY.encode()
        line(1, b"%d %d %s %s %d %d %s\n" % (name, number, what, key.encode(), start, clock(), result))
    store.close()


def write_all(path: Path, keys: int) -> None:
    """Give every key of `testify` its first value."""
    with FileStore(path) as store:
        store.multi_set([f"v{key}" for key in range(keys)], [f"first.{key}" for key in range(keys)])


if __name__ == "__main__":
    {"history": history, "hold": hold, "testify": testify}[sys.argv[1]](*json.loads(sys.argv[2]))
