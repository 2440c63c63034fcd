"""The fixtures `make_executor` and `every_call_is_an_await`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fscoord.aio import AsyncStore, _executor
from fscoord.aio._executor import CallExecutor
from fscoord.store import Store


@pytest.fixture
def make_executor(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], CallExecutor]:
    """Give a function that makes an executor of two threads, each of which stays so many seconds without work."""

    def make(idle_s: float) -> CallExecutor:
        monkeypatch.setattr(_executor, "IDLE_S", idle_s)
        return CallExecutor(2, 0.0)

    return make


@pytest.fixture
def every_call_is_an_await(monkeypatch: pytest.MonkeyPatch) -> Callable[[Store], AsyncStore]:
    """Give a function that makes an `AsyncStore` which makes each call while the task of the call waits.

    So it is with threads, too, but here the order is the same each time.
    """

    def submit(self: CallExecutor, call: Any) -> None:
        asyncio.get_running_loop().call_soon(call.run)

    monkeypatch.setattr(CallExecutor, "_submit", submit)

    def make(store: Store) -> AsyncStore:
        monkeypatch.setattr(store, "_typical_call_s", Store._typical_call_s)  # as where calls may take long
        return AsyncStore(store)

    return make
