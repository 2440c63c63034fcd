"""Random operations on a store's keys and queues, and how to make them, as the models of `linear.models` have them."""

from __future__ import annotations

import random
from typing import Any

from linear.models import EMPTY

from fscoord.errors import QueueEmptyError, StoreTimeoutError
from fscoord.store import Store


def draw_value(rng: random.Random, number: int, seed: int) -> tuple[Any, ...]:
    mine = b"%d" % (seed % 1000 * 1000 + number)
    return rng.choice(
        [
            ("read",), ("read",), ("read",), ("set", mine), ("add", rng.randrange(1, 5)), ("append", b"7"),
            ("compare_set", b"", mine), ("compare_set", b"7", mine), ("compare_set", mine[:-1], b"7"), ("delete_key",),
            ("create", b"5"), ("take",), ("delete_if", b"5"),
        ]
    )  # fmt: skip


def draw_queue(rng: random.Random, number: int, seed: int) -> tuple[Any, ...]:
    return rng.choice([("push", b"%d.%d" % (seed, number)), ("push", b"same"), ("pop",), ("pop",), ("len",)])


def call(store: Store, key: str, operation: tuple[Any, ...]) -> Any:
    name, *given = operation
    if name == "read":
        return read(store, key)
    if name == "has":
        return store.check([key])
    if name == "push":
        return store.queue_push(key, given[0])
    if name == "pop":
        try:
            return store.queue_pop(key, block=False)
        except QueueEmptyError:
            return EMPTY
    if name == "take":
        return store.pop(key)
    if name == "delete_if":
        return store.delete_key(key, expected=given[0])
    if name == "len":
        return store.queue_len(key)
    return getattr(store, name)(key, *given)


def read(store: Store, key: str) -> bytes | None:
    """Return the value of `key`, or None if it has none. (To look once is not to wait for the lock either, where
    looking takes it: then nothing was seen, and it looks again.)
    """
    usual = store.timeout
    store.set_timeout(0)
    try:
        while True:
            try:
                return store.get(key)
            except StoreTimeoutError as error:
                if error.keys:
                    return None
    finally:
        store.set_timeout(usual)
