"""`Event`: a flag that any process sets and clears, and for which any process waits."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial

from fscoord._arguments import Key, Timeout, key_bytes, key_text, to_seconds
from fscoord._runtime import system
from fscoord._waiting.awaited import EVENT, Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps
from fscoord.errors import StoreTimeoutError
from fscoord.recipes._cleanup import as_one_wait, in_steps
from fscoord.recipes._keys import change, parse_count
from fscoord.recipes._look import LOOK_S
from fscoord.store import Store, needed_store, shown


class Event:
    """A flag that processes set, clear and wait for, like `threading.Event`.

    A waiter returns if the event is set, even if another process clears it at once. The event stays as it is when the
    process that set it dies.

    Args:
        store: the store that all processes share.
        name: the event's name in the store. Keys that begin with the name and a slash belong to the event.
    """

    # `NAME/count` counts the changes, so the event is set while the count is odd. A waiter that finds the count even
    # sleeps until the *wake key* of the next odd count appears. There are two wake keys, which the counts use in turn:
    # the key of one setting stays until the next setting has been cleared, so a waiter that is late finds it.

    def __init__(self, store: Store, name: Key) -> None:
        self._store = needed_store(store)
        self._name = key_bytes(name)
        self._count, self._wake = self._name + b"/count", (self._name + b"/wake/0", self._name + b"/wake/1")
        key_bytes(self._wake[0])

    def __repr__(self) -> str:
        return shown(self, self._store, self._name)

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._read() % 2 == 1

    def set(self) -> None:
        """Set the event, and wake all waiters."""
        count = self._change(1)
        self._store.set(self._wake_key(count), b"1")  # also if the event was set, by a process that died before this

    def clear(self) -> None:
        """Clear the event, so that later calls of `wait` wait until the next `set`."""
        self._change(0)

    @in_steps
    def wait(self, timeout: Timeout | None = None) -> WaitSteps[bool]:
        """Wait until the event is set. Return False if the timeout is over before.

        Args:
            timeout: how long to wait, in seconds or as a `timedelta`; None means without limit, as in `threading`.
        """
        limit = math.inf if timeout is None else to_seconds(timeout)
        awaited = Awaited(EVENT, key_text(self._name))
        return as_one_wait(awaited, lambda: f"the {awaited}", partial(self._await_change, limit))

    def _await_change(self, limit: float, slow_logger: SlowWaitLogger) -> WaitSteps[bool]:
        end, first = system.time.monotonic() + limit, self._read()
        count, key = first, self._wake_key(first + 1)
        while count == first and count % 2 == 0:
            left = end - system.time.monotonic()
            if left <= 0:
                return False
            with suppress(StoreTimeoutError):
                yield WaitRequest(KEYS, [key], min(LOOK_S, left), slow_logger=slow_logger)
                if self._read() == first:  # a setter was late, or another program wrote the key: it ends every sleep
                    self._store.delete_key(key)
            count = self._read()
        return True

    def _read(self) -> int:
        return parse_count(self._count, self._store.get(self._count, default=b"0"))

    def _wake_key(self, count: int) -> bytes:
        """Return the wake key of the odd number `count`."""
        return self._wake[count // 2 % 2]

    def _change(self, parity: int) -> int:
        """Raise the count until it is odd (`parity` 1) or even (0), and return the count."""
        count = 0

        def changed(text: bytes) -> bytes | None:
            nonlocal count
            count = parse_count(self._count, text or b"0")
            if count % 2 == parity:
                return None
            if not parity:
                self._store.delete_key(self._wake_key(count + 2))
            count += 1
            return b"%d" % count

        change(self._store, self._count, changed)
        return count
