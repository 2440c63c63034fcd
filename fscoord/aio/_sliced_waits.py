"""`SlicedWaits`: waits in a few threads, for a moment each, on stores that wait in their calls.

A task's wait is made of calls of a fraction of a second, in a bounded number of threads, so that the waits of all tasks
take turns.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from fscoord._arguments import key_names, key_text, keys_bytes, missing_message
from fscoord._runtime import system
from fscoord._waiting.request import ITEM, KEYS, VALUES, WaitRequest
from fscoord._waiting.slow_wait import SlowWaitLogger
from fscoord.aio._executor import CallExecutor
from fscoord.errors import QueueEmptyError, StoreTimeoutError
from fscoord.store import Store, wait_on

__all__ = ["SlicedWaits"]

THREADS_MAX: Final = 16
"""How many threads wait at most."""

SLICE_S: Final = 0.2
"""How long each wait has a thread, and so how long the end of one that was cancelled may take."""

PAUSE_S: Final = 0.02
"""How long to pause when a key has a queue where a value is waited for, or the other way round."""

WORDS: Final = {KEYS: "key", VALUES: "the value of key", ITEM: "a value in queue"}


class SlicedWaits:
    """The waits of a loop's tasks for `store`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reader: Store | None = None  # a clone that does not wait, for reading values
        self._executor = CallExecutor(THREADS_MAX, 0.0)
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Have a mutex that nobody holds; in a forked child too."""
        self._mutex = system.threading.Lock()  # guards `_reader`

    async def wait(self, request: WaitRequest) -> Any:
        """Carry out `request`, and return its answer; see `WaitRequest`."""
        slow_logger = request.slow_logger
        if slow_logger is None:
            words = f"{WORDS[request.kind]} {key_names(request.keys)} in {self._store!r}"
            slow_logger = SlowWaitLogger(__name__, lambda: words)
        start = system.time.monotonic()
        while True:
            left = max(0.0, request.timeout - (system.time.monotonic() - start))
            piece = request._replace(timeout=min(left, SLICE_S), slow_logger=None)
            look = partial(self._look, piece, slow_logger)
            call = await self._executor.complete(look)
            if call.cancelled is not None and request.kind == ITEM and isinstance(call.value, bytes):
                await self._executor.complete(partial(self._store.queue_push, request.keys[0], call.value))
            try:
                found = call.result()
            except StoreTimeoutError as error:
                if left <= SLICE_S:
                    raise self._late(request, error, system.time.monotonic() - start) from error
                continue
            if found is not None:
                return found
            if left <= 0:
                waited = system.time.monotonic() - start
                unnamed = StoreTimeoutError("", keys=[key_text(name) for name in dict.fromkeys(request.keys)])
                raise self._late(request, unnamed, waited)
            await asyncio.sleep(min(left, PAUSE_S))

    def _look(self, request: WaitRequest, slow_logger: SlowWaitLogger) -> Any:
        """Wait for one slice; return what is found, or None if there is something else under that key; in a thread."""
        slow_logger.warn_if_due()  # here and not in the loop, for its words may come from the store
        if request.kind == KEYS:
            return wait_on(self._store, request)
        found = self._read_now(request)
        if found is None:
            self._store.wait(request.keys, request.timeout)
            found = self._read_now(request)
        return found

    def _read_now(self, request: WaitRequest) -> Any:
        if request.kind == ITEM:
            try:
                return self._store.queue_pop(request.keys[0], block=False)
            except QueueEmptyError:
                return None
        if not self._store.check(request.keys):  # cheaper than a wait that is too late
            return None
        system.process_epoch()
        with self._mutex:
            if self._reader is None:
                self._reader = self._store.clone()
                self._reader.set_timeout(0)
        try:
            return self._reader.multi_get(request.keys)
        except StoreTimeoutError:
            return None

    @staticmethod
    def _late(request: WaitRequest, error: StoreTimeoutError, waited: float) -> StoreTimeoutError:
        message = missing_message(WORDS[request.kind], keys_bytes(error.keys), waited)
        return StoreTimeoutError(message, keys=error.keys, holder=error.holder, waited=waited)

    def close(self) -> None:
        """Close what was opened for the waits, and let the threads end."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        self._executor.dismiss()


_all: WeakSet[SlicedWaits] = WeakSet()


def _after_fork_in_child() -> None:
    for waits in list(_all):
        waits.renew()


system.after_fork_in_child("sliced waits", _after_fork_in_child)
