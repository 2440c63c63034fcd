"""A process of the histories: it makes random calls on a store, and reports each on its standard output.

``python worker.py ROLE JSON``. What it has told before it is killed has reached the pipe.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from linear import operations
from linear.models import EMPTY
from support.internals import system

from fscoord import FileStore, QueueEmptyError, StoreError, StoreTimeoutError, UsedBeforeError, barrier
from fscoord.recipes.lock import Lock

LIMIT_S = 60.0
CHILDREN = 100
"""By how much the name of a forked child is above its parent's."""


def tell(*words: Any) -> None:
    os.write(1, repr(words).encode() + b"\n")


def history(path: str, name: int, seed: int, forks: int, options: dict[str, Any]) -> None:
    """Make calls until killed, and soon, `forks` times, go on as two."""
    store = FileStore(path, timeout=LIMIT_S, **options)
    make_calls(store, tell, name, seed, VALUES + QUEUES, forks=forks)


def make_calls(
    store: FileStore,
    tell: Callable[..., object],
    name: int,
    seed: int,
    keys: list[str],
    count: float = math.inf,
    forks: int = 0,
    before: Callable[[int], object] = int,
) -> None:
    """Make `count` random calls on `keys`, and tell of each before and after it.

    That is ``name, number, key, operation, time``, then ``name, number, "done", result, time``.
    A call that fails without effect is ``"never"``, one that may have had one ``"maybe"``. ``before(number)`` comes
    before each call. Soon, `forks` times, the process goes on as two, of which the other has no such hook.
    """
    rng = random.Random(seed)
    fork_at = set(rng.sample(range(2, 20), forks))
    number = 0
    try:
        while number < count:
            if number in fork_at and os.fork() == 0:
                try:
                    make_calls(store, tell, name + CHILDREN, seed + 1, keys, count)
                finally:
                    os._exit(0)
            before(number)
            key = rng.choice(keys)
            operation = (operations.draw_queue if key.startswith("q") else operations.draw_value)(rng, number, name)
            tell(name, number, key, operation, time.monotonic_ns())
            try:
                result = operations.call(store, key, operation)
            except StoreError as error:
                tell(name, number, "maybe" if error.maybe_applied else "never", repr(error))
            except (StoreTimeoutError, ValueError, OverflowError) as error:
                tell(name, number, "never", repr(error))
            else:
                tell(name, number, "done", result, time.monotonic_ns())
            number += 1
    except BaseException:
        tell(name, number, "failed", traceback.format_exc()[-3000:])  # whole in the pipe, as all lines
        raise


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


def meet(path: str, rank: int, size: int, first: int, options: dict[str, Any]) -> None:
    """Meet the other ranks at one barrier after the other until killed, from barrier `first` on, and tell of each call.

    Rank 0 deletes the keys of the last barrier but one, which no rank needs any more.
    """
    store = FileStore(path, timeout=LIMIT_S, **options)
    for number in itertools.count(first):
        if rank == 0 and number > 1:
            for key in ("arrivals", "complete"):
                store.delete_key(f"{number - 2}/{key}")
        tell(rank, number, "begin", time.monotonic_ns())
        with contextlib.suppress(UsedBeforeError):  # a process before this one has arrived
            barrier(store, size, str(number), rank=rank)
        tell(rank, number, "end", time.monotonic_ns())


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
            copy = os.path.join(self._kept, f"{name}.{os.uname().nodename}.{os.getpid()}")
            self.copy(path, copy)
            os.rename(copy, os.path.join(self._kept, name))
        os.unlink(path)

    def copy(self, path: str, copy: str) -> None:
        shutil.copyfile(path, copy)


def testify(path: str, kept: str, name: int, seed: int, count: int, keys: int, options: dict[str, Any]) -> None:
    """Bear witness, and let the generations of the log be kept."""
    system.os = KeepingOs(path, kept)
    with FileStore(path, timeout=LIMIT_S, **options) as store:
        bear_witness(store, lambda line: os.write(1, line + b"\n"), name, seed, count, keys)


def bear_witness(
    store: FileStore, line: Callable[[bytes], object], name: int, seed: int, count: int, keys: int
) -> None:
    """Make `count` calls whose effects are all different, and give a line of each after it: ``name, number, operation,
    key, start, end, result``. The operation is ``"maybe"`` for a call that failed and may have had an effect; its
    result is the error.
    """
    rng, clock = random.Random(seed), time.monotonic_ns
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
        except StoreError as error:
            if not error.maybe_applied:
                raise
            what, result = b"maybe", repr(error).encode()
        line(b"%d %d %s %s %d %d %s" % (name, number, what, key.encode(), start, clock(), result))


def write_all(path: Path, keys: int) -> None:
    """Give every key of `testify` its first value."""
    with FileStore(path) as store:
        store.multi_set([f"v{key}" for key in range(keys)], [f"first.{key}" for key in range(keys)])


if __name__ == "__main__":
    {"history": history, "hold": hold, "meet": meet, "testify": testify}[sys.argv[1]](*json.loads(sys.argv[2]))
