"""The suite itself: a foreign store that keeps the contract passes it, and a store that does not fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.internals import Timeout
from support.third_party import ThirdPartyStore

from fscoord import HashStore, Store
from fscoord.errors import QueueEmptyError
from fscoord.store import Key, Value
from fscoord.testing import StoreContract
from fscoord.testing.contract.place import HANG_S, ContractTests, Place
from fscoord.testing.contract.waiting import Interrupts


class TestSomebodyElsesStore(StoreContract):
    """All abstract methods of `Store` and no more."""

    def make_store(self, tmp_path: Any) -> ThirdPartyStore:
        return ThirdPartyStore()


WRONG = """
import threading

import pytest

from fscoord.testing.contract import place, waiting

for module in (place, waiting):
    module.HANG_S = 3  # what hangs is known to

from fscoord import Capabilities, HashStore, StoreTimeoutError
from fscoord.testing import StoreContract


class Contract(StoreContract):
    def make_store(self, tmp_path):
        return self.wrong()

    def another(self, store):
        other = self.wrong()
        other._shared = store._shared
        return other


class TestEqualAppendIsLost(Contract):
    class wrong(HashStore):
        def append(self, key, value):
            if self.compare_set(key, value, value) != value:
                super().append(key, value)


class TestPopLeavesItem(Contract):
    class wrong(HashStore):
        def queue_pop(self, key, block=True):
            value = super().queue_pop(key, block)
            if self.queue_len(key) == 0:
                self.queue_push(key, value)
            return value


class TestCompareSetCompares(Contract):
    class wrong(HashStore):
        def compare_set(self, key, expected, desired):
            self.set(key, desired)
            return desired.encode()


class TestUnequalLengths(Contract):
    class wrong(HashStore):
        def multi_set(self, keys, values):
            for key, value in zip(keys, values):
                self.set(key, value)


class TestNamesOneKey(Contract):
    class wrong(HashStore):
        def wait(self, keys, timeout=None):
            for key in keys:
                super().wait([key], timeout)


class TestClosed(Contract):
    class wrong(HashStore):
        def close(self):
            pass


class TestKeysOfQueues(Contract):
    class wrong(HashStore):
        def num_keys(self):
            return super().num_keys() + len(self._shared.queues)


class TestKindsOfKeys(Contract):
    class wrong(HashStore):
        def get(self, key):
            return super().get(key) + b"!" * isinstance(key, bytes)


class TestClaimsLimit(Contract):
    class wrong(HashStore):
        capabilities = Capabilities(value_max=10)


class TestClaimsLiveness(Contract):
    class wrong(HashStore):
        has_liveness = True


class TestWaitsForNothing(Contract):
    class wrong(HashStore):
        def wait(self, keys, timeout=None):
            pass

        def get(self, key):
            return super().get(key) if self.check([key]) else b""


class DeafToCtrlC(HashStore):
    is_deaf = threading.Event()

    def get(self, key):
        while True:
            try:
                self.is_deaf.set()
                return super().get(key)
            except KeyboardInterrupt:
                pass


class TestDeafToCtrlC(Contract):
    wrong = DeafToCtrlC

    @pytest.fixture
    def ctrl_c(self):
        class LateCtrlC(waiting.CtrlC):
            def press(self):  # no sooner than the store can hear it
                DeafToCtrlC.is_deaf.wait()
                super().press()

        with LateCtrlC() as ctrl_c:
            yield ctrl_c


class TestSwallowsCtrlC(Contract):
    class wrong(HashStore):
        def multi_get(self, keys):
            try:
                return super().multi_get(keys)
            except KeyboardInterrupt:
                return []

        def queue_pop(self, key, block=True):
            try:
                return super().queue_pop(key, block)
            except KeyboardInterrupt:
                return b""


class TestLosesItems(Contract):
    class wrong(HashStore):
        def queue_len(self, key):
            return 1 if key == "q" else super().queue_len(key)


class TestNeverCounts(Contract):
    class wrong(HashStore):
        def compare_set(self, key, expected, desired):
            return self.get(key)


class TestHasNoStore(StoreContract):
    pass
"""
FOUND_BY = {
    "EqualAppendIsLost": "append_appends_always_even_an_equal_value",
    "PopLeavesItem": "queue_gives_its_values_in_their_order_once",
    "CompareSetCompares": "compare_set_by_many_threads_on_a_new_key_lets_one_win",
    "UnequalLengths": "multi_set_of_unequal_lengths_writes_nothing",
    "NamesOneKey": "wait_has_one_deadline_and_names_every_missing_key[float]",
    "Closed": "handle_that_is_closed_raises_in_every_call",
    "KeysOfQueues": "keys_with_a_value_are_listed_sorted",
    "KindsOfKeys": "key_may_be_any_text_and_its_bytes_are_the_same_key['']",
    "ClaimsLimit": "value_over_the_limit_that_the_store_claims_is_refused",
    "ClaimsLiveness": "store_with_liveness_keeps_sessions",
    "WaitsForNothing": "ctrl_c_ends_a_wait_at_once_and_leaves_the_store_usable",
    "DeafToCtrlC": "ctrl_c_ends_a_wait_at_once_and_leaves_the_store_usable[get]",
    "SwallowsCtrlC": "value_pushed_while_a_pop_is_interrupted_reaches_another_pop",
    "LosesItems": "value_pushed_while_a_pop_is_interrupted_reaches_another_pop",
    "NeverCounts": "compare_set_counts_as_well_as_add",
    "HasNoStore": "fresh_store_has_no_keys",
}


def test_store_that_breaks_the_contract_fails_the_suite(tmp_path: Path) -> None:
    (tmp_path / "test_wrong.py").write_text(WRONG)
    tests = [f"test_wrong.py::Test{kind}::test_{test}" for kind, test in FOUND_BY.items()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "--basetemp=tmp", *tests],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    found = re.findall(r"^(?:FAILED|ERROR) test_wrong.py::Test(\w+)", done.stdout, re.MULTILINE)
    assert sorted(set(found)) == sorted(FOUND_BY), done.stdout + done.stderr
    assert done.returncode == 1, done.stdout + done.stderr


class ServerThatPopsLate(HashStore):
    """A pop that Ctrl-C ends is executed later all the same, as by a server that has the request already."""

    def __init__(self, timeout: Timeout | None = None) -> None:
        super().__init__(timeout=timeout)
        self.late: list[Key] = []
        """The queues of interrupted pops that take the next value."""

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        if block:
            try:
                self._await_turn(key)
            except KeyboardInterrupt:
                if not self.queue_len(key):
                    self.late.append(key)
                    raise
                late = threading.Timer(0.01, self._pop_late, [key])
                late.daemon = True
                late.start()
                raise
        return super().queue_pop(key, block)

    def _await_turn(self, key: Key) -> None:
        """Sleep for so long that the late pop comes first, and in the main thread until Ctrl-C."""
        if key == "q" and threading.current_thread() is threading.main_thread():
            while not self.queue_len("never"):
                time.sleep(0.001)
        while not self.queue_len(key):
            time.sleep(0.1)

    def _pop_late(self, key: Key) -> None:
        with suppress(QueueEmptyError):
            self.queue_pop(key, block=False)

    def queue_push(self, key: Key, value: Value) -> None:
        """Push `value`, which a late pop takes at once."""
        super().queue_push(key, value)
        if key in self.late:
            self.late.remove(key)
            self.queue_pop(key, block=False)


class TestServerThatPopsLate(ContractTests):
    """The contract allows it."""

    ctrl_c = Interrupts.ctrl_c
    test_ctrl_c_ends_a_wait = Interrupts.test_ctrl_c_ends_a_wait_at_once_and_leaves_the_store_usable
    test_value_reaches_another_pop = Interrupts.test_value_pushed_while_a_pop_is_interrupted_reaches_another_pop

    @pytest.fixture
    def place(self) -> Place:
        first = ServerThatPopsLate(timeout=HANG_S)

        def another(_: Store) -> Store:
            store = ServerThatPopsLate(timeout=HANG_S)
            store._shared, store.late = first._shared, first.late
            return store

        return Place(first, another)
