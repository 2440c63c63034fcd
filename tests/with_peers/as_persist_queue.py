"""A plugin of pytest, with which persist-queue's own tests of its queues run on those of `fscoord.recipes`.

The log of the store has the name of persist-queue's first file, because some tests write garbage to the end of it.
"""

from __future__ import annotations

import io
import os
import weakref
from typing import Any

import persistqueue
from with_peers import queues

from fscoord import FileStore


class Queue(queues.Queue):
    """A queue in a directory, with the arguments of persist-queue's class. The file has no chunks."""

    empty_error, full_error = persistqueue.Empty, persistqueue.Full

    def __init__(
        self,
        path: str,
        maxsize: int = 0,
        chunksize: int = 100,
        tempdir: str | None = None,
        serializer: Any = persistqueue.serializers.pickle,
        autosave: bool = False,
    ) -> None:
        os.makedirs(path, exist_ok=True)
        self._serializer = serializer
        store = FileStore(os.path.join(path, "q00000"))
        weakref.finalize(self, store.close)  # with `del`, the tests return the items that are not done
        super().__init__(store, "queue", maxsize, acks_at_once=autosave)

    def pack(self, item: Any) -> bytes:
        file = io.BytesIO()
        self._serializer.dump(item, file)
        return file.getvalue()

    def unpack(self, data: bytes) -> Any:
        return self._serializer.load(io.BytesIO(data))


class PriorityQueue(Queue, queues.PriorityQueue):
    """A priority queue in a directory."""


persistqueue.Queue = Queue
persistqueue.PriorityQueue = PriorityQueue
