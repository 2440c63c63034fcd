"""`Slices`: waits in a few threads, for a moment each, on stores whose waits can't be slept through.

A store of another kind waits in its calls. So a task's wait is made of calls of a fraction of a second, in a bounded
number of threads, and whoever is behind in their queue gets its turn.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from fscoord._arguments import key_names, key_text, keys_bytes, missing_message
from fscoord._runtime import system
from fscoord._waiting.request import ITEM, KEYS, VALUES, Sought
from fscoord._waiting.slow_wait import Patience
from fscoord.aio._hands import Hands
from fscoord.errors import QueueEmptyError, StoreTimeoutError
from fscoord.store import Store

__all__ = ["Slices"]

WAITING_MAX: Final = 16
"""How many threads wait at most."""

SLICE_S: Final = 0.2
"""How long each wait has a thread; so long the end of one that was cancelled may take, too."""

PAUSE_S: Final = 0.02
"""How long to do nothing when a key has what is not sought: a queue instead of a value, or the other way round."""

WORDS: Final = {KEYS: "key", VALUES: "the value of key", ITEM: "a value in queue"}


class Slices:
    """The waits of a loop's tasks for `store`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._twin: Store | None = None  # one that only looks
        self._hands = Hands(WAITING_MAX, 0.0)
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Have a guard that nobody holds; in a forked child too."""
        self._guard = system.threading.Lock()

    async def seek(self, sought: Sought) -> Any:
        """Return who is dead, the values, or the item; see `Store._seek`."""
        patience = Patience()
        start = patience.started
        while True:
            patience.speak(__name__, lambda: f"{WORDS[sought.what]} {key_names(sought.names)} in {self._store!r}")
            left = max(0.0, sought.limit - (system.time.monotonic() - start))
            look = partial(self._look, sought._replace(limit=min(left, SLICE_S)))
            job = await self._hands.finish(look)
            if job.cancelled is not None and sought.what == ITEM and isinstance(job.value, bytes):
                await self._hands.finish(partial(self._store.queue_push, sought.names[0], job.value))
            try:
                found = job.result()
            except StoreTimeoutError as error:
                if left <= SLICE_S:
                    raise self._late(sought, error, system.time.monotonic() - start) from error
                continue
            if found is not None:
                return found
            if left <= 0:
                waited = system.time.monotonic() - start
                raise self._late(
                    sought, StoreTimeoutError("", keys=[key_text(name) for name in dict.fromkeys(sought.names)]), waited
                )
            await asyncio.sleep(min(left, PAUSE_S))

    def _look(self, sought: Sought) -> Any:
        """Return what is found, or None if there is something else under that key; in a thread."""
        if sought.what == KEYS:
            return sought.on(self._store)
        found = self._now(sought)
        if found is None:
            self._store.wait(sought.names, sought.limit)
            found = self._now(sought)
        return found

    def _now(self, sought: Sought) -> Any:
        if sought.what == ITEM:
            try:
                return self._store.queue_pop(sought.names[0], block=False)
            except QueueEmptyError:
                return None
        if not self._store.check(sought.names):  # cheaper than a wait that is too late
            return None
        system.process_epoch()
        with self._guard:
            if self._twin is None:
                self._twin = self._store.clone()
                self._twin.set_timeout(0)
        try:
            return self._twin.multi_get(sought.names)
        except StoreTimeoutError:
            return None

    @staticmethod
    def _late(sought: Sought, error: StoreTimeoutError, waited: float) -> StoreTimeoutError:
        message = missing_message(WORDS[sought.what], keys_bytes(error.keys), waited)
        return StoreTimeoutError(message, keys=error.keys, holder=error.holder, waited=waited)

    def close(self) -> None:
        """Close what was opened for the waits, and let the threads end."""
        twin, self._twin = self._twin, None
        if twin is not None:
            twin.close()
        self._hands.dismiss()


_all: WeakSet[Slices] = WeakSet()


def _after_fork_in_child() -> None:
    for slices in list(_all):
        slices.renew()


system.after_fork_in_child("slices", _after_fork_in_child)
