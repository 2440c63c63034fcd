"""`HashStore`: the store contract in the memory of one process.

`HashStore` is also the model with which tests compare the other stores. So the implementation is simple: one lock
guards a dict of values and a dict of queues. A waiter registers its waker under the first missing key, and sleeps until
a writer of this key sets the waker. A write wakes no waiters of other keys, and a sleeping waiter uses no CPU time.
`threading.Condition` is not used, because a Ctrl-C in its methods can leave its lock locked for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, cast
from weakref import WeakValueDictionary

from fscoord._arguments import (
    DEFAULT_TIMEOUT,
    Key,
    Timeout,
    Transaction,
    Value,
    called,
    check_int64,
    counter_sum,
    key_bytes,
    key_text,
    keys_bytes,
    missing_error,
    not_copied,
    to_seconds,
    value_bytes,
)
from fscoord._runtime import system
from fscoord._waiting.awaited import CHANGE_OF
from fscoord._waiting.changes import Position, Watch, compacted, refuse_later
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import (
    CHANGES,
    ITEM,
    KEYS,
    NOT_YET,
    THREAD_BACKEND,
    VALUES,
    NotYet,
    Wait,
    WaitBackend,
    WaitRequest,
    Waker,
    block_on,
)
from fscoord.errors import QueueEmptyError, StoreClosedError
from fscoord.store import Capabilities, Choose, Store, kept, shown_handle

_Waiters = dict[bytes, list[Waker]]
_History = deque[tuple[Position, bytes, bytes | None]]
"""(position, key, new value) of the newest changes; None as the value is a deletion."""

HISTORY: Final = 4096
"""How many changes a store keeps for its watches, from the first watch on."""


class _Shared:
    """The data and the waiters of one store. All handles of the store share this object, and `lock` guards it."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.history: _History | None = None  # None until the first watch
        self.begin()
        _all_shared.add(self)

    def begin(self) -> None:
        """Create the lock, and forget all waiters. The constructor calls this method, and so does a forked child."""
        # Rule 2 in `interrupts`: a Ctrl-C can't interrupt between the moment when ``with`` acquires it and the block.
        self._lock = system.mutex()
        self.readers: _Waiters = {}  # waiters for a value or a non-empty queue: a write wakes all of them
        self.poppers: _Waiters = {}  # waiters that take a value from a queue: each value wakes one of them
        self.watchers: _Waiters = {}  # watches, by their prefix: each change wakes all of them

    @property
    def lock(self) -> Any:
        if not system.fork_marker[0]:
            system.recover_from_fork()
        return self._lock

    # Ctrl-C may interrupt a write between any two steps. So a write first wakes the waiters, and then changes the data
    # in one step. The waiters need the lock to read the data, so they read after the write. In the reverse order, an
    # interrupted write could change the data and wake no waiter. The history changes in the same step as the data, so
    # that a watch yields a change if and only if the change was made.

    def put(self, pairs: list[tuple[bytes, bytes]], deleted: Sequence[bytes] = ()) -> None:
        for key, _ in pairs:
            notify(self.readers, key)
        if not deleted and self.history is None:
            self.values.update(pairs)
            return
        removals = [partial(each.pop, key, None) for key in deleted for each in (self.values, self.queues)]
        notes = self.notes([*pairs, *((key, None) for key in deleted if key in self.values)])
        _in_one_step(partial(self.values.update, pairs), *removals, *notes)

    def remove(self, key: bytes) -> tuple[bytes | None, bool]:
        """Remove the value and the queue of `key`. Return the value, and whether there was a queue."""
        notes = self.notes([(key, None)] if key in self.values else [])
        removals = partial(self.values.pop, key, None), partial(self.queues.pop, key, None)
        value, queue, *_ = _in_one_step(*removals, *notes)
        return value, bool(queue)

    def notes(self, pairs: Sequence[tuple[bytes, bytes | None]]) -> list[Callable[[], object]]:
        """Wake the watches, and return the calls that add `pairs` to the history: one call, or none."""
        if self.history is None:
            return []
        for prefix in list(self.watchers):
            notify(self.watchers, prefix)
        first = self.newest.offset + 1
        changes = [(Position(0, number), *pair) for number, pair in enumerate(pairs, first)]
        return [partial(self.history.extend, changes)]

    @property
    def newest(self) -> Position:
        """The position of the last change since the first watch began."""
        return self.history[-1][0] if self.history else Position(0, 0)

    def push(self, key: bytes, value: bytes) -> None:
        notify(self.readers, key)
        notify(self.poppers, key, 1)
        queue = self.queues.get(key)
        if queue is None:
            self.queues[key] = deque([value])
        else:
            queue.append(value)

    def pop(self, key: bytes) -> bytes | None:
        queue = self.queues.get(key)
        if not queue:
            return None
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return value

    def values_of(self, keys: list[bytes]) -> list[bytes] | None:
        return [self.values[key] for key in keys] if self.values.keys() >= set(keys) else None

    def first_missing(self, keys: list[bytes]) -> bytes | None:
        for key in keys:  # not a generator: Python drops an exception of a signal handler while it destroys one
            if key not in self.values and not self.queues.get(key):
                return key
        return None


def _in_one_step(*calls: Callable[[], object]) -> list[Any]:
    """Return the results of `calls`, which run C code only: no signal handler runs between two of them."""
    return list(map(partial.__call__, cast("tuple[partial[Any], ...]", calls)))


_named: WeakValueDictionary[str, _Shared] = WeakValueDictionary()
_named_lock = [system.mutex()]


def _renew(shared: _Shared) -> None:
    """In a forked child, reset `shared` and the lock that guards the names of stores."""
    _named_lock[0] = system.mutex()
    shared.begin()


_all_shared = system.reset_in_child("memory stores", _renew)


class HashStore(Store):
    """A store in the memory of this process, for threads and for tests, named like torch's ``HashStore``.

    To get another handle on the same data, use `clone`, or use `named` or ``open_store("mem:NAME")`` several times with
    the same name. The data exists as long as a handle is open. A forked child has its own copy of the data and shares
    nothing with its parent.

    Args:
        timeout: the default timeout of operations, in seconds or as a `timedelta`; None means 300 seconds.
    """

    capabilities: Capabilities = Capabilities(
        knows_write_outcome=True, changes_conditionally=True, transacts=True, reports_changes=True
    )
    _typical_call_s = 0.0
    _name = ""

    def __init__(self, *, timeout: Timeout | None = None) -> None:
        self._timeout = to_seconds(DEFAULT_TIMEOUT if timeout is None else timeout)
        self._shared = _Shared()
        self._closed = False

    @classmethod
    def named(cls, name: str, *, timeout: Timeout | None = None) -> HashStore:
        """Return a new handle on this process's store named `name`. The first call creates the store.

        `timeout` is the default timeout of the new handle, as in the constructor.
        """
        store = cls(timeout=timeout)
        store._name = name
        system.process_epoch()
        with _named_lock[0]:
            store._shared = _named.setdefault(name, store._shared)
        return store

    def __repr__(self) -> str:
        text = f"HashStore.named({self._name!r})" if self._name else "HashStore()"
        return shown_handle(text, is_closed=self._closed)

    def set(self, key: Key, value: Value) -> None:
        name, data = key_bytes(key), value_bytes(value)
        with self._shared.lock:
            self._check_open()
            self._shared.put([(name, data)])

    get = kept(Store.get)
    multi_get = kept(Store.multi_get)

    def _peek(self, key: bytes) -> bytes | None:
        with self._shared.lock:
            self._check_open()
            return self._shared.values.get(key)

    def add(self, key: Key, amount: int) -> int:
        name, amount = key_bytes(key), check_int64("amount", amount)
        with self._shared.lock:
            self._check_open()
            total = counter_sum(self._shared.values.get(name), amount, name)
            self._shared.put([(name, b"%d" % total)])
            return total

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        name, old, new = key_bytes(key), value_bytes(expected), value_bytes(desired)
        with self._shared.lock:
            self._check_open()
            current = self._shared.values.get(name)
            if current == old or (current is None and not old):
                self._shared.put([(name, new)])
                return new
            return old if current is None else current

    def check(self, keys: Iterable[Key]) -> bool:
        names = keys_bytes(keys)
        with self._shared.lock:
            self._check_open()
            return self._shared.first_missing(names) is None

    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        self._wait(WaitRequest(KEYS, keys_bytes(keys), self._seconds(timeout)))

    def create(self, key: Key, value: Value) -> bool:
        name, data = key_bytes(key), value_bytes(value)
        with self._shared.lock:
            self._check_open()
            if name in self._shared.values:
                return False
            self._shared.put([(name, data)])
            return True

    def pop(self, key: Key) -> bytes | None:
        name = key_bytes(key)
        with self._shared.lock:
            self._check_open()
            return self._shared.remove(name)[0] if name in self._shared.values else None

    def delete_key(self, key: Key, *, expected: Value | None = None) -> bool:
        name, wanted = key_bytes(key), None if expected is None else value_bytes(expected)
        with self._shared.lock:
            self._check_open()
            if wanted is not None and self._shared.values.get(name) != wanted:
                return False
            value, had_queue = self._shared.remove(name)
            return value is not None or had_queue

    def num_keys(self) -> int:
        with self._shared.lock:
            self._check_open()
            return len(self._shared.values)

    def list_keys(self, prefix: Key = "") -> list[str]:
        beginning = key_bytes(prefix)
        with self._shared.lock:
            self._check_open()
            return [key_text(name) for name in sorted(self._shared.values) if name.startswith(beginning)]

    def append(self, key: Key, value: Value) -> None:
        name, more = key_bytes(key), value_bytes(value)
        with self._shared.lock:
            self._check_open()
            self._shared.put([(name, value_bytes(self._shared.values.get(name, b"") + more))])

    multi_set = kept(Store.multi_set)

    def _transact(self, transaction: Transaction) -> bool:
        return self._transact_by(
            lambda get: transaction if all(get(key) == value for key, value in transaction.compare.items()) else None
        )

    _decides = True

    def _transact_by(self, choose: Choose) -> bool:
        with self._shared.lock:
            self._check_open()
            values = self._shared.values
            chosen = choose(values.get)
            if chosen is None:
                return False
            _, present, added, deleted = chosen
            sums = {key: b"%d" % counter_sum(values.get(key), amount, key) for key, amount in added.items()}
            self._shared.put([*present.items(), *sums.items()], deleted)
            return True

    def queue_push(self, key: Key, value: Value) -> None:
        name, data = key_bytes(key), value_bytes(value)
        with self._shared.lock:
            self._check_open()
            self._shared.push(name, data)

    def queue_pop(self, key: Key, block: bool = True, *, timeout: Timeout | None = None) -> bytes:
        if block:
            return super().queue_pop(key, timeout=timeout)
        name = key_bytes(key)
        with self._shared.lock:
            self._check_open()
            value = self._shared.pop(name)
        if value is None:
            raise QueueEmptyError(f"queue {key_text(name)!r} is empty")
        return value

    def queue_len(self, key: Key) -> int:
        name = key_bytes(key)
        with self._shared.lock:
            self._check_open()
            return len(self._shared.queues.get(name, ()))

    def __reduce__(self) -> tuple[Any, ...]:
        raise not_copied(self, "use clone() in this process, or pass the address of a store that processes can share")

    def clone(self) -> HashStore:
        with self._shared.lock:
            self._check_open()
        other = HashStore(timeout=self._timeout)
        other._shared, other._name = self._shared, self._name
        return other

    def close(self) -> None:
        """Close this handle. Its waits in other threads raise `~fscoord.StoreClosedError`. Other handles stay open."""
        with self._shared.lock:
            self._closed = True
            for waiters in (self._shared.readers, self._shared.poppers, self._shared.watchers):
                for name in list(waiters):
                    notify(waiters, name)
            self._shared = _Shared()  # a closed handle must not keep the data

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("this HashStore handle was closed; open another handle with open_store or clone")

    def _wait(self, request: WaitRequest) -> Any:
        return block_on(self._new_wait(request, THREAD_BACKEND))

    def _watch(self, prefix: bytes, after: Position | None, limit: float) -> Watch:
        with self._shared.lock:
            self._check_open()
            if self._shared.history is None:
                self._shared.history = deque(maxlen=HISTORY)
            return _Watch(self, prefix, refuse_later(self, after, self._shared.newest), limit)

    def _notifier_for(self, backend: WaitBackend) -> WaitBackend:
        return backend

    def _new_wait(self, request: WaitRequest, notifier: WaitBackend) -> Wait[Any]:
        return _Wait(self, request, notifier.new_waker())


class _Wait:
    """One wait on a `HashStore`; see `Wait`.

    Args:
        store: the handle that waits.
        request: the request of the caller.
        waker: ends the sleeps of the wait.
    """

    def __init__(self, store: HashStore, request: WaitRequest, waker: Waker) -> None:
        self.waker = waker
        self._store = store
        self._shared = store._shared
        self._keys = request.keys
        self._kind = request.kind
        self._timeout = request.timeout
        self._what = "a value in queue" if request.kind == ITEM else "key"
        self._watch = cast("_Watch | None", request.watch)
        if self._watch is not None:
            self._keys, self._what = [self._watch._prefix], CHANGE_OF
        self._missing: list[bytes] = []
        self._slow_logger = request.slow_logger or SlowWaitLogger(__name__, self._describe)
        self._started = system.time.monotonic()
        self._beside: bytes | None = None  # the key under which the waker is registered
        self._has_found = False

    def _find(self) -> Any:
        """Return the answer to the request, or None if the wait must continue. The caller must hold the lock."""
        if self._kind == ITEM:
            return self._shared.pop(self._keys[0])
        if self._watch is not None:
            return self._watch.find(self._shared) or None
        if self._kind == VALUES:
            return self._shared.values_of(self._keys)
        # The answer lists no dead sessions, because this store has no sessions.
        return [] if self._shared.first_missing(self._keys) is None else None

    def look(self) -> Any | NotYet:
        # The test of the condition and the registration of the waker are one step under one lock.
        self._disarm()
        with self._shared.lock:
            self._store._check_open()
            found = self._find()
            if found is not None:
                self._has_found = True
                return found
            missing = self._missing = self._absent()
            waited = system.time.monotonic() - self._started
            if waited >= self._timeout:
                raise missing_error("", self._what, missing, waited)
            self._beside = missing[0]
            self._waiters.setdefault(missing[0], []).append(self.waker)
        self._slow_logger.warn_if_due()
        return NOT_YET

    def max_sleep(self) -> float:
        beside = self._beside
        if beside is None:  # the first look has not been made yet
            return 0.0
        with self._shared.lock:
            if self.waker not in self._waiters.get(beside, ()):
                return 0.0
        left = self._timeout - (system.time.monotonic() - self._started)
        return max(0.0, min(left, self._slow_logger.until_next()))

    def sleep(self) -> None:
        while (seconds := self.max_sleep()) > 0:
            cast(system.AutoResetEvent, self.waker).wait(seconds)

    def close(self) -> None:
        self._disarm()
        if self._kind == ITEM and not self._has_found:
            # A push may have woken only this waiter. It leaves the value in the queue, so wake the other waiters.
            with self._shared.lock:
                notify(self._shared.poppers, self._keys[0])

    @property
    def _waiters(self) -> _Waiters:
        if self._kind == CHANGES:
            return self._shared.watchers
        return self._shared.poppers if self._kind == ITEM else self._shared.readers

    def _disarm(self) -> None:
        beside = self._beside
        if beside is not None:
            with self._shared.lock:
                waiting = self._waiters.get(beside, [])
                if self.waker in waiting:  # otherwise a write has woken and removed it
                    waiting.remove(self.waker)
                if not waiting:
                    self._waiters.pop(beside, None)
            self._beside = None

    def _absent(self) -> list[bytes]:
        keys, shared = dict.fromkeys(self._keys), self._shared
        if self._kind == KEYS:
            return [name for name in keys if shared.first_missing([name]) is not None]
        return [name for name in keys if self._kind in (CHANGES, ITEM) or name not in shared.values]

    def _describe(self) -> str:
        return f"{called(self._what, self._missing)} in this process"


class _Watch(Watch):
    """A watch of `store`. The ``offset`` of a position is the number of the change."""

    def __init__(self, store: HashStore, prefix: bytes, position: Position, limit: float) -> None:
        super().__init__(prefix, position, limit)
        self._store = store

    def find(self, shared: _Shared) -> bool:
        """Find the new changes, and return whether a change is pending. The caller must hold the lock of `shared`."""
        history, newest = shared.history or (), shared.newest
        new = newest.offset - self._found.offset
        if new > len(history):
            raise compacted(self._store, self._found, newest)
        for position, key, value in islice(history, len(history) - new, None):
            self._add(key, value, position)
        self._position = self._position if self._pending else newest
        return bool(self._pending)

    def _wait(self, limit: float) -> bool:
        request = self._request()
        return request is None or bool(self._store._wait(request._replace(timeout=limit)))


def notify(waiters: _Waiters, key: bytes, count: int | None = None) -> None:
    """Wake the first `count` waiters of `key`, in the order of their arrival. If `count` is None, wake all of them."""
    waiting = waiters.get(key, [])
    while waiting and count != 0:
        waiting[0].set()
        del waiting[0]
        count = None if count is None else count - 1
    if not waiting:
        waiters.pop(key, None)
