"""A foreign store: it has the names of the contract of `Store`, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from support.places import Place

from fscoord._arguments import (
    Key,
    Timeout,
    Value,
    check_int64,
    counter_sum,
    key_bytes,
    key_text,
    keys_bytes,
    missing_message,
    pairs_bytes,
    to_seconds,
    value_bytes,
)
from fscoord.errors import QueueEmptyError, StoreClosedError, StoreTimeoutError
from fscoord.store import Store


class Shared:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, list[bytes]] = {}


class ThirdPartyStore(Store):
    """All abstract methods and no more, under one condition; it counts the operations it is asked for."""

    def __init__(self, shared: Shared | None = None) -> None:
        self.shared = shared or Shared()
        self.asked: list[str] = []
        self.closed = False

    def _do(self, name: str, step: Callable[[], Any]) -> Any:
        with self.shared.changed:
            self.asked.append(name)
            self._check_open()
            result = step()
            self.shared.changed.notify_all()
            return result

    def _until(
        self, name: str, missing: Callable[[], list[bytes]], timeout: float, take: Callable[[], Any] = lambda: None
    ) -> Any:
        end = time.monotonic() + timeout
        with self.shared.changed:
            self.asked.append(name)
            self._check_open()
            while missing():
                left = end - time.monotonic()
                if left <= 0:
                    names = list(dict.fromkeys(missing()))
                    message = missing_message("key", names, timeout)
                    raise StoreTimeoutError(message, keys=[key_text(name) for name in names], waited=timeout)
                self.shared.changed.wait(min(left, 60))
                self._check_open()
            return take()

    def _check_open(self) -> None:
        if self.closed:
            raise StoreClosedError("closed")

    def set(self, key: Key, value: Value) -> None:
        self._do("set", lambda: self.shared.values.update({key_bytes(key): value_bytes(value)}))

    def get(self, key: Key) -> bytes:
        name = key_bytes(key)
        values = self.shared.values
        return self._until("get", lambda: [name][: name not in values], self._timeout, lambda: values[name])

    def add(self, key: Key, amount: int) -> int:
        name, amount = key_bytes(key), check_int64("amount", amount)

        def step() -> int:
            total = counter_sum(self.shared.values.get(name), amount, name)
            self.shared.values[name] = str(total).encode()
            return total

        return self._do("add", step)

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        name, old, new = key_bytes(key), value_bytes(expected), value_bytes(desired)

        def step() -> bytes:
            current = self.shared.values.get(name)
            if current == old or (current is None and not old):
                self.shared.values[name] = new
                return new
            return old if current is None else current

        return self._do("compare_set", step)

    def _absent(self, names: list[bytes]) -> list[bytes]:
        return [name for name in names if name not in self.shared.values and not self.shared.queues.get(name)]

    def check(self, keys: Iterable[Key]) -> bool:
        names = keys_bytes(keys)
        return self._do("check", lambda: not self._absent(names))

    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        names = keys_bytes(keys)
        self._until("wait", lambda: self._absent(names), self._timeout if timeout is None else to_seconds(timeout))

    def delete_key(self, key: Key) -> bool:
        name = key_bytes(key)

        def step() -> bool:
            return bool(self.shared.queues.pop(name, [])) | (self.shared.values.pop(name, None) is not None)

        return self._do("delete_key", step)

    def num_keys(self) -> int:
        return self._do("num_keys", lambda: len(self.shared.values))

    def list_keys(self, prefix: Key = "") -> list[str]:
        start = key_bytes(prefix)
        return self._do("list_keys", lambda: [key_text(k) for k in sorted(self.shared.values) if k.startswith(start)])

    def append(self, key: Key, value: Value) -> None:
        name, more = key_bytes(key), value_bytes(value)
        values = self.shared.values
        self._do("append", lambda: values.update({name: value_bytes(values.get(name, b"") + more)}))

    def multi_get(self, keys: Iterable[Key]) -> list[bytes]:
        names = keys_bytes(keys)
        values = self.shared.values

        def absent() -> list[bytes]:
            return [name for name in names if name not in values]

        return self._until("multi_get", absent, self._timeout, lambda: [values[name] for name in names])

    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        pairs = pairs_bytes(keys, values)
        self._do("multi_set", lambda: self.shared.values.update(pairs))

    def queue_push(self, key: Key, value: Value) -> None:
        name, data = key_bytes(key), value_bytes(value)
        self._do("queue_push", lambda: self.shared.queues.setdefault(name, []).append(data))

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        name, queues = key_bytes(key), self.shared.queues
        if block:
            absent = [name]
            return self._until(
                "queue_pop", lambda: absent[: not queues.get(name)], self._timeout, lambda: queues[name].pop(0)
            )

        def step() -> bytes:
            if not queues.get(name):
                raise QueueEmptyError(f"queue {key_text(name)!r} is empty")
            return queues[name].pop(0)

        return self._do("queue_pop", step)

    def queue_len(self, key: Key) -> int:
        name = key_bytes(key)
        return self._do("queue_len", lambda: len(self.shared.queues.get(name, [])))

    def clone(self) -> ThirdPartyStore:
        self._check_open()
        other = ThirdPartyStore(self.shared)
        other.set_timeout(self.timeout)
        return other

    def close(self) -> None:
        self.closed = True


class ThirdPartyPlace(Place):
    """As `Place`, on a foreign store."""

    def __init__(self) -> None:
        self.prefixes, self.is_file, self.is_etcd, self._opened = [], False, False, []
        self.base = self._keep(ThirdPartyStore())


def place_of(kind: str, directory: str) -> Place:
    """Return a `Place` of that kind; ``"third-party"`` is one more."""
    return ThirdPartyPlace() if kind == "third-party" else Place(kind, directory)
