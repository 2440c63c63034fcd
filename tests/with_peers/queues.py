"""The methods of `queue.Queue` on the queues of `fscoord.recipes`, for the tests of CPython and of persist-queue."""

from __future__ import annotations

import pickle
import queue
from collections import deque
from typing import Any, ClassVar, Final

from fscoord import QueueEmptyError, Store, StoreTimeoutError, recipes as ours

FOREVER_S: Final = 3600
"""How long a call without a timeout waits, in seconds."""


class Queue:
    """A `recipes.Queue` with the methods of `queue.Queue`.

    `get` takes an item, and `task_done` acknowledges the item that was taken first. For `recipes.Queue`, an item counts
    until it is acknowledged. For `queue.Queue`, it has left the queue when it is taken. So `get` acknowledges the item
    at once in a queue with a `maxsize`, and with `acks_at_once`.
    """

    kind: ClassVar[type[ours.Queue]] = ours.Queue
    empty_error: ClassVar[type[Exception]] = queue.Empty
    full_error: ClassVar[type[Exception]] = queue.Full

    def __init__(self, store: Store, name: str, maxsize: int = 0, *, acks_at_once: bool = False) -> None:
        self._store, self._name = store, name
        self._taken: deque[ours.Item] = deque()
        self._acks_at_once = acks_at_once
        self.maxsize = maxsize

    @property
    def maxsize(self) -> int:
        return self._maxsize

    @maxsize.setter
    def maxsize(self, maxsize: int) -> None:
        self._maxsize = maxsize
        self._queue = self.kind(self._store, self._name, maxsize=maxsize or None)

    def put(self, item: Any, block: bool = True, timeout: float | None = None, **terms: int) -> None:
        limit = 0 if not block else FOREVER_S if timeout is None else timeout
        try:
            self._queue.put(self.pack(item), timeout=limit, **terms)
        except StoreTimeoutError as error:
            raise self.full_error from error

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        try:
            item = self._queue.take(block, FOREVER_S if timeout is None else timeout)
        except (StoreTimeoutError, QueueEmptyError) as error:
            raise self.empty_error from error
        if self._acks_at_once or self.maxsize:
            item.ack()
        self._taken.append(item)
        return self.unpack(item.data)

    def put_nowait(self, item: Any, **terms: int) -> None:
        self.put(item, False, **terms)

    def get_nowait(self) -> Any:
        return self.get(False)

    def task_done(self) -> None:
        if not self._taken:
            raise ValueError("task_done() called too many times")
        item = self._taken.popleft()
        if not (self._acks_at_once or self.maxsize):
            item.ack()

    def join(self) -> None:
        self._queue.join(FOREVER_S)

    def qsize(self) -> int:
        return self._queue.size()

    def empty(self) -> bool:
        return self.qsize() == 0

    def full(self) -> bool:
        return 0 < self.maxsize <= self.qsize()

    def pack(self, item: Any) -> bytes:
        return pickle.dumps(item)

    def unpack(self, data: bytes) -> Any:
        return pickle.loads(data)


class PriorityQueue(Queue):
    """A `recipes.PriorityQueue` with the methods of `queue.PriorityQueue`."""

    kind = ours.PriorityQueue
