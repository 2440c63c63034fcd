"""A plugin of pytest, with which huey's own tests run on a `PriorityQueue` and the keys of a store.

huey's storage in memory is replaced. Of its other storages the tests are left out.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import huey.api
import huey.storage
from huey.constants import EmptyData

from fscoord import FileStore, PrefixStore, QueueEmptyError, Store, StoreTimeoutError, recipes

FOREVER_S: Final = 3600
"""How long a call without a timeout waits, in seconds."""

os.environ["HUEY_SLOW_TESTS"] = "1"  # run those, too
directory = tempfile.TemporaryDirectory(prefix="huey-")
store = FileStore(Path(directory.name) / "store", timeout=30)


def first(items: list[bytes], limit: int | None) -> list[bytes]:
    return items[:limit] if limit else items


def values(part: Store) -> dict[str, bytes]:
    return {key: part.get(key) for key in part.list_keys()}


def clear(part: Store) -> None:
    for key in part.list_keys():
        part.delete_key(key)


class Storage(huey.storage.BaseStorage):  # type: ignore[misc]
    """Tasks are items of a queue. Results and counters are keys. Each object has a part of the store of its own."""

    def __init__(self, name: str = "huey", **options: object) -> None:
        super().__init__(name, **options)
        self._store = PrefixStore(uuid.uuid4().hex, store)
        self._queue = recipes.PriorityQueue(self._store, "queue")
        self._schedule = recipes.Queue(self._store, "schedule")
        self._results, self._numbers = PrefixStore("result", self._store), PrefixStore("counter", self._store)

    def enqueue(self, data: bytes, priority: float | None = None) -> None:
        self._queue.put(data, -int(priority or 0))

    def dequeue(self) -> bytes | None:
        try:
            item = self._queue.take(block=False)
        except QueueEmptyError:
            return None
        item.ack()
        return item.data

    def queue_size(self) -> int:
        return self._queue.size()

    def enqueued_items(self, limit: int | None = None) -> list[bytes]:
        return first([each.data for each in self._queue.items()], limit)

    def flush_queue(self) -> None:
        self._queue.purge()

    def add_to_schedule(self, data: bytes, ts: datetime) -> None:
        self._schedule.put(struct.pack("d", ts.timestamp()) + data)

    def _scheduled(self) -> list[tuple[float, bytes, str]]:
        return sorted((struct.unpack("d", each.data[:8])[0], each.data[8:], each.id) for each in self._schedule.items())

    def read_schedule(self, ts: datetime) -> list[bytes]:
        # huey decides by the time that it is given what is due. A `delay` of fscoord passes by the clock.
        return [data for due, data, item in self._scheduled() if due <= ts.timestamp() and self._schedule.cancel(item)]

    def schedule_size(self) -> int:
        return self._schedule.size()

    def scheduled_items(self, limit: int | None = None) -> list[bytes]:
        return first([data for _, data, _ in self._scheduled()], limit)

    def flush_schedule(self) -> None:
        self._schedule.purge()

    def put_data(self, key: str | bytes, value: bytes, is_result: bool = False) -> None:
        self._results.set(key, value)

    def peek_data(self, key: str | bytes) -> Any:
        return self._results.get(key, default=EmptyData)

    def pop_data(self, key: str | bytes) -> Any:
        value = self._results.pop(key)
        return EmptyData if value is None else value

    def wait_result(self, key: str | bytes, timeout: float | None = None, *_: float) -> bool:
        with contextlib.suppress(StoreTimeoutError):
            self._results.wait([key], FOREVER_S if timeout is None else timeout)
            return True
        return False

    def has_data_for_key(self, key: str | bytes) -> bool:
        return self._results.check([key])

    def put_if_empty(self, key: str | bytes, value: bytes, ttl: float | None = None) -> bool:
        return self._results.create(key, value)

    def incr(self, key: str | bytes, amount: int = 1) -> int:
        return self._numbers.add(key, amount)

    def delete_counter(self, key: str | bytes) -> None:
        self._numbers.delete_key(key)

    def result_store_size(self) -> int:
        return len(self._results.list_keys())

    def result_items(self) -> dict[str, bytes]:
        return values(self._results)

    def flush_results(self) -> None:
        clear(self._results)

    @property
    def _counters(self) -> dict[str, bytes]:
        """The counters. A test finds out by this name that none is left."""
        return values(self._numbers)

    def flush_counters(self) -> None:
        clear(self._numbers)


huey.storage.MemoryStorage = huey.api.MemoryStorage = huey.api.MemoryHuey.storage_class = Storage


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items[:] = [each for each in items if each.path.stem != "test_storage" or each.cls.__name__ == "TestMemoryStorage"]
