"""Helpers of the suite: `Place` for the store under test and its handles, threads, and the common fixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fscoord._runtime import system
from fscoord.store import Store

HANG_S = 60
"""The timeout, in seconds, of handles that are not meant to time out."""

QUEUES = ("q", "k", "", "bad", "other")


class Place:
    """A fresh store, and the handles that a test opens on it.

    Args:
        first: the first handle, on an empty store.
        another: returns one more handle on the store of `first`. Without `another`, ``clone`` of `first` is called.
        full: returns the name that a key has in errors. Without `full`, this name is the key itself.
    """

    def __init__(
        self, first: Store, another: Callable[[Store], Store] | None = None, full: Callable[[str], str] | None = None
    ) -> None:
        self.first = first
        self.full = full or str
        """Return the name that a key has in errors."""
        self._another = another or (lambda store: store.clone())
        self._opened = [first]

    def open(self, timeout: float = HANG_S, how: str = "path") -> Store:
        """Open another handle with a timeout in seconds.

        If `how` is ``"clone"``, the new handle is a clone of the first handle.
        """
        store = self.first.clone() if how == "clone" else self._another(self.first)
        self._opened.append(store)
        store.set_timeout(timeout)
        return store

    def close(self) -> None:
        """Close every handle, the first handle last."""
        for store in reversed(self._opened):
            store.close()


def state(store: Store) -> dict[str, Any]:
    """Return the visible state of `store`: all values, and the lengths of the queues that tests use."""
    keys = store.list_keys()
    return {
        "values": dict(zip(keys, store.multi_get(keys), strict=True)),
        "num_keys": store.num_keys(),
        "queues": {name: store.queue_len(name) for name in QUEUES},
        "timeout": store.timeout,
    }


class Thread:
    """Runs `call` in a thread. The end of the ``with`` calls `join`."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.result: Any = None
        self._error: BaseException | None = None
        # A daemon thread: if a faulty store makes it hang, the process of the tests can end all the same.
        self._thread = system.threading.Thread(target=self._run, args=(call, arguments), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self.result = call(*arguments)
        except BaseException as error:  # noqa: BLE001 - `join` raises it
            self._error = error

    def is_alive(self) -> bool:
        """Return whether `call` still runs."""
        return self._thread.is_alive()

    def join(self) -> Any:
        """Wait for the end of `call`. Return its result, or raise its exception."""
        self._thread.join(2 * HANG_S)
        assert not self._thread.is_alive(), "the thread hangs"
        if self._error:
            raise self._error
        return self.result

    def __enter__(self) -> Thread:
        return self

    def __exit__(self, *_: object) -> None:
        self.join()


def start_thread(call: Callable[..., Any], *arguments: Any) -> Thread:
    """Start a `Thread` that runs `call`."""
    return Thread(call, *arguments)


def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition` returns a true value. Fail after `HANG_S` seconds."""
    end = system.time.monotonic() + HANG_S
    while not condition():
        assert system.time.monotonic() < end
        system.time.sleep(0.001)


class ContractTests:
    """The base class of the tests. A subclass has a fixture ``place``, which is a `Place` with an empty store."""

    @pytest.fixture
    def store(self, place: Place) -> Store:
        """Yield a handle on the store."""
        return place.open()

    @pytest.fixture
    def other(self, place: Place) -> Store:
        """Yield a second handle on the store."""
        return place.open()
