"""FileStore against HashStore, by Hypothesis: all operations have the same results, through any handle."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.internals import INT64_MAX, INT64_MIN
from support.places import state

from fscoord.errors import FscoordError, StoreTimeoutError
from fscoord.store import Store
from fscoord.stores.file import FileStore
from fscoord.stores.memory import HashStore

SCALE = float(os.environ.get("FSCOORD_SCALE", "1"))

HANDLES = 3
KEYS = st.sampled_from(["", "k", b"k", "q", "other", "a/b", "\0", "\udcff", b"\xff", "я", "bad\ud800", 7])
VALUES = st.one_of(
    st.sampled_from(["", "1", "-1", "x", b"\xff\0", str(INT64_MAX), " 1", "я", None]),
    st.integers(-3, 3).map(str),
    st.binary(max_size=20),
    st.integers(0, 3000).map(bytes),
)
AMOUNTS = st.one_of(st.integers(-3, 3), st.sampled_from([INT64_MAX, INT64_MIN, 2**63, 1.0, True]))
SOME_KEYS = st.lists(KEYS, max_size=3)
HANDLE = st.integers(0, HANDLES - 1)


def result(call: Callable[[], Any]) -> Any:
    """Return what the call returns, or the kind of its error; of two bad arguments either may be the one refused."""
    try:
        return call()
    except StoreTimeoutError as error:
        return StoreTimeoutError, error.keys
    except (TypeError, ValueError, OverflowError):
        return "refused"
    except FscoordError as error:
        return type(error)


class FileAgainstModel(RuleBasedStateMachine):
    """Three handles on one file, each opened and closed at random, and one HashStore that says what is right."""

    lock = "ofd"

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="fscoord-model-")
        self.handles: list[Store] = []
        self.model = HashStore(timeout=0)

    @initialize()
    def begin(self) -> None:
        self.handles = [self.fresh() for _ in range(HANDLES)]

    def fresh(self) -> Store:
        return FileStore(os.path.join(self.directory, "store"), timeout=0, lock=self.lock)

    def both(self, handle: int, call: Callable[[Store], Any]) -> None:
        found = result(lambda: call(self.handles[handle]))
        right = result(lambda: call(self.model))
        assert found == right, f"the file says {found!r}, the model {right!r}"

    @rule(handle=HANDLE, key=KEYS, value=VALUES)
    def set(self, handle: int, key: Any, value: Any) -> None:
        self.both(handle, lambda store: store.set(key, value))

    @rule(handle=HANDLE, key=KEYS)
    def get(self, handle: int, key: Any) -> None:
        self.both(handle, lambda store: store.get(key))

    @rule(handle=HANDLE, key=KEYS, amount=AMOUNTS)
    def add(self, handle: int, key: Any, amount: Any) -> None:
        self.both(handle, lambda store: store.add(key, amount))

    @rule(handle=HANDLE, key=KEYS, expected=VALUES, desired=VALUES)
    def compare_set(self, handle: int, key: Any, expected: Any, desired: Any) -> None:
        self.both(handle, lambda store: store.compare_set(key, expected, desired))

    @rule(handle=HANDLE, key=KEYS, desired=VALUES)
    def compare_set_that_matches(self, handle: int, key: Any, desired: Any) -> None:
        expected = result(lambda: self.model.get(key))
        if isinstance(expected, bytes):
            self.both(handle, lambda store: store.compare_set(key, expected, desired))

    @rule(handle=HANDLE, keys=SOME_KEYS)
    def check(self, handle: int, keys: list[Any]) -> None:
        self.both(handle, lambda store: store.check(keys))

    @rule(handle=HANDLE, keys=SOME_KEYS)
    def wait(self, handle: int, keys: list[Any]) -> None:
        self.both(handle, lambda store: store.wait(keys))

    @rule(handle=HANDLE, key=KEYS)
    def delete_key(self, handle: int, key: Any) -> None:
        self.both(handle, lambda store: store.delete_key(key))

    @rule(handle=HANDLE, key=KEYS)
    def look(self, handle: int, key: Any) -> None:
        self.both(handle, lambda store: store.get(key, default=None))

    @rule(handle=HANDLE, key=KEYS, value=VALUES)
    def create(self, handle: int, key: Any, value: Any) -> None:
        self.both(handle, lambda store: store.create(key, value))

    @rule(handle=HANDLE, key=KEYS)
    def pop(self, handle: int, key: Any) -> None:
        self.both(handle, lambda store: store.pop(key))

    @rule(handle=HANDLE, key=KEYS, expected=VALUES)
    def delete_key_if(self, handle: int, key: Any, expected: Any) -> None:
        self.both(handle, lambda store: store.delete_key(key, expected=expected))

    @rule(handle=HANDLE, prefix=KEYS)
    def list_keys(self, handle: int, prefix: Any) -> None:
        self.both(handle, lambda store: (store.num_keys(), store.list_keys(prefix)))

    @rule(handle=HANDLE, key=KEYS, value=VALUES)
    def append(self, handle: int, key: Any, value: Any) -> None:
        self.both(handle, lambda store: store.append(key, value))

    @rule(handle=HANDLE, keys=SOME_KEYS)
    def multi_get(self, handle: int, keys: list[Any]) -> None:
        self.both(handle, lambda store: store.multi_get(keys))

    @rule(handle=HANDLE, keys=SOME_KEYS, values=st.lists(VALUES, max_size=3))
    def multi_set(self, handle: int, keys: list[Any], values: list[Any]) -> None:
        self.both(handle, lambda store: store.multi_set(keys, values))

    @rule(
        handle=HANDLE,
        compared=st.dictionaries(KEYS, st.none() | VALUES, max_size=1),
        present=st.dictionaries(KEYS, VALUES, max_size=2),
        added=st.dictionaries(KEYS, AMOUNTS, max_size=1),
        deleted=SOME_KEYS,
    )
    def transact(self, handle: int, compared: Any, present: Any, added: Any, deleted: list[Any]) -> None:
        self.both(handle, lambda store: store.transact(compare=compared, set=present, add=added, delete=deleted))

    @rule(handle=HANDLE, key=KEYS, value=VALUES)
    def queue_push(self, handle: int, key: Any, value: Any) -> None:
        self.both(handle, lambda store: store.queue_push(key, value))

    @rule(handle=HANDLE, key=KEYS, block=st.booleans())
    def queue_pop(self, handle: int, key: Any, block: bool) -> None:
        self.both(handle, lambda store: store.queue_pop(key, block))

    @rule(handle=HANDLE, key=KEYS)
    def queue_len(self, handle: int, key: Any) -> None:
        self.both(handle, lambda store: store.queue_len(key))

    @rule(handle=HANDLE, key=st.sampled_from(["k", "b"]), size=st.integers(0, 2))
    def barrier(self, handle: int, key: str, size: int) -> None:
        self.both(handle, lambda store: store.barrier(key, size))

    @rule(handle=HANDLE)
    def reopen(self, handle: int) -> None:
        self.handles[handle].close()
        self.handles[handle] = self.fresh()

    @rule(handle=HANDLE, source=HANDLE)
    def replace_by_a_clone(self, handle: int, source: int) -> None:
        clone = self.handles[source].clone()
        self.handles[handle].close()
        self.handles[handle] = clone

    @invariant()
    def every_handle_sees_what_the_model_holds(self) -> None:
        for handle in self.handles:
            assert state(handle) == state(self.model)

    def teardown(self) -> None:
        for handle in self.handles:
            handle.close()
        shutil.rmtree(self.directory)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("lock", "examples"), [("ofd", 100), ("flock", 30), ("soft", 30)])
def test_file_store_and_the_model_agree_on_any_history(lock: str, examples: int) -> None:
    machine = type("FileAgainstModel", (FileAgainstModel,), {"lock": lock})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(1, round(examples * SCALE)),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
