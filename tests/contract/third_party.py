"""A store that somebody else wrote: it has what the contract of `Store` names, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from contract.places import Place

from fscoord.arguments import (
    Key,
    Timeout,
    Value,
    counter_sum,
    key_bytes,
    key_text,
    seconds,
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
            if self.closed:
                raise StoreClosedError("closed")
            result = step()
            self.shared.changed.notify_all()
            return result

    def _until(self, name: str, missing: Callable[[], list[bytes]], timeout: float) -> None:
        end = time.monotonic() + timeout
        with self.shared.changed:
            self.asked.append(name)
            while missing():
                left = end - time.monotonic()
                if left <= 0:
                    raise StoreTimeoutError("too late", keys=[key_text(key) for key in missing()], waited=timeout)
                self.shared.changed.wait(min(left, 60))

    def set(self, key: Key, value: Value) -> None:
        self._do("set", lambda: self.shared.values.update({key_bytes(key): value_bytes(value)}))

    def get(self, key: Key) -> bytes:
        name = key_bytes(key)
        self._until("get", lambda: [name][: name not in self.shared.values], self._timeout)
        return self.shared.values[name]

    def add(self, key: Key, amount: int) -> int:
        name = key_bytes(key)

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
        names = [key_bytes(key) for key in keys]
        return self._do("check", lambda: not self._absent(names))

    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        names = [key_bytes(key) for key in keys]
        self._until("wait", lambda: self._absent(names), self._timeout if timeout is None else seconds(timeout))

    def delete_key(self, key: Key) -> bool:
        name = key_bytes(key)
        return self._do("delete_key", lambda: self.shared.values.pop(name, None) is not None)

    def num_keys(self) -> int:
        return len(self.shared.values)

    def list_keys(self, prefix: Key = "") -> list[str]:
        start = key_bytes(prefix)
        return self._do("list_keys", lambda: [key_text(k) for k in sorted(self.shared.values) if k.startswith(start)])

    def append(self, key: Key, value: Value) -> None:
        name, more = key_bytes(key), value_bytes(value)
        values = self.shared.values
        self._do("append", lambda: values.update({name: values.get(name, b"") + more}))

    def multi_get(self, keys: Iterable[Key]) -> list[bytes]:
        names = [key_bytes(key) for key in keys]
        values = self.shared.values
        self._until("multi_get", lambda: [name for name in names if name not in values], self._timeout)
        return [values[name] for name in names]

    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        pairs = {key_bytes(key): value_bytes(value) for key, value in zip(keys, values, strict=True)}
        self._do("multi_set", lambda: self.shared.values.update(pairs))

    def queue_push(self, key: Key, value: Value) -> None:
        name, data = key_bytes(key), value_bytes(value)
        self._do("queue_push", lambda: self.shared.queues.setdefault(name, []).append(data))

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        queue = self.shared.queues.setdefault(key_bytes(key), [])
        if not queue and not block:
            raise QueueEmptyError("empty")
        self._until("queue_pop", lambda: [] if queue else [key_bytes(key)], self._timeout)
        return queue.pop(0)

    def queue_len(self, key: Key) -> int:
        return len(self.shared.queues.get(key_bytes(key), []))

    def clone(self) -> ThirdPartyStore:
        other = ThirdPartyStore(self.shared)
        other.set_timeout(self.timeout)
        return other

    def close(self) -> None:
        self.closed = True


class ThirdPartyPlace(Place):
    """As `Place`, on a store of somebody else's."""

    def __init__(self) -> None:
        self.prefixes, self.is_file, self._opened = [], False, []
        self.base = self._keep(ThirdPartyStore())


def place_of(kind: str, directory: str) -> Place:
    """Return a `Place` of that kind; ``"third-party"`` is one more."""
    return ThirdPartyPlace() if kind == "third-party" else Place(kind, directory)
