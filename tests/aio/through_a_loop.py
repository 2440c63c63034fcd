"""A store that the contract's suite uses through an `AsyncStore`, in a loop of a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

from fscoord.aio import AsyncStore
from fscoord.store import Store

__all__ = ["Loop", "ThroughALoop"]


class Loop:
    """An event loop that runs in a thread until `stop`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class ThroughALoop(Store):
    """`store`, each operation of which is a coroutine of `loop`."""

    def __init__(self, store: Store, loop: Loop) -> None:
        self._asynchronous, self._loop = AsyncStore(store), loop
        self.capabilities = store.capabilities

    def _run(self, name: str, *arguments: Any, **named: Any) -> Any:
        return self._loop.run(getattr(self._asynchronous, name)(*arguments, **named))

    @property
    def timeout(self) -> timedelta:
        return self._asynchronous.timeout

    def set_timeout(self, timeout: Any) -> None:
        self._asynchronous.set_timeout(timeout)

    def set(self, key: Any, value: Any) -> None:
        self._run("set", key, value)

    def get(self, key: Any, *, default: Any = ..., timeout: Any = None) -> Any:
        return self._run("get", key, default=default, timeout=timeout)

    def add(self, key: Any, amount: int) -> int:
        return self._run("add", key, amount)

    def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
        return self._run("compare_set", key, expected, desired)

    def check(self, keys: Any) -> bool:
        return self._run("check", keys)

    def wait(self, keys: Any, timeout: Any = None) -> None:
        self._run("wait", keys, timeout)

    def delete_key(self, key: Any, *, expected: Any = None) -> bool:
        return self._run("delete_key", key, expected=expected)

    def create(self, key: Any, value: Any) -> bool:
        return self._run("create", key, value)

    def pop(self, key: Any) -> bytes | None:
        return self._run("pop", key)

    def num_keys(self) -> int:
        return self._run("num_keys")

    def list_keys(self, prefix: Any = "") -> list[str]:
        return self._run("list_keys", prefix)

    def append(self, key: Any, value: Any) -> None:
        self._run("append", key, value)

    def multi_get(self, keys: Any, *, timeout: Any = None) -> list[bytes]:
        return self._run("multi_get", keys, timeout=timeout)

    def multi_set(self, keys: Any, values: Any) -> None:
        self._run("multi_set", keys, values)

    def queue_push(self, key: Any, value: Any) -> None:
        self._run("queue_push", key, value)

    def queue_pop(self, key: Any, block: bool = True, *, timeout: Any = None) -> bytes:
        return self._run("queue_pop", key, block, timeout=timeout)

    def queue_len(self, key: Any) -> int:
        return self._run("queue_len", key)

    def barrier(self, key: Any, world_size: int, timeout: Any = None) -> None:
        self._run("barrier", key, world_size, timeout)

    @property
    def has_liveness(self) -> bool:
        return self._asynchronous.has_liveness

    def register(self) -> int:
        return self._run("register")

    def members(self, ranks: Any = None) -> Any:
        return self._run("members", ranks)

    def announce_rank(self, rank: int) -> None:
        self._run("announce_rank", rank)

    def dead_ranks(self, ranks: Any) -> list[int]:
        return self._run("dead_ranks", ranks)

    def dead_sessions(self, numbers: Any) -> list[int]:
        return self._run("dead_sessions", numbers)

    def wait_alive(self, keys: Any, ranks: Any, timeout: Any = None) -> list[int]:
        return self._run("wait_alive", keys, ranks, timeout)

    def wait_sessions(self, keys: Any, numbers: Any, timeout: Any = None) -> list[int]:
        return self._run("wait_sessions", keys, numbers, timeout)

    def clone(self) -> ThroughALoop:
        return ThroughALoop(self._run("clone").store, self._loop)

    def close(self) -> None:
        self._run("close")
