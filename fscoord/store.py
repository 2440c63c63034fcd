"""`Store`: the contract that every store keeps.

The names and their meaning follow torch's c10d ``Store``; where c10d's own stores disagree with each other, the
meaning chosen is stated here, once. This module knows no concrete store.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

from fscoord._arguments import (
    DEFAULT_TIMEOUT,
    VALUE_MAX,
    CounterRangeError,
    Key,
    NotACounterError,
    Timeout,
    Value,
    check_positive,
    key_bytes,
    key_text,
    keys_bytes,
    to_seconds,
    to_timedelta,
)
from fscoord._runtime import system
from fscoord._waiting.parking import Naps, Sleepers
from fscoord._waiting.request import KEYS, Sought, Turns, take_turns
from fscoord.errors import BarrierError, StoreTimeoutError

__all__ = ["Capabilities", "Member", "Store"]

S = TypeVar("S", bound="Store")

UNHEARD_S: Final = 0.1
"""How often to look at a store that does not tell when something changes."""


LOOK_S: Final = 0.02
"""How often a wait asks who is dead, on a store that is not told of deaths."""


class Capabilities(NamedTuple):
    """What a kind of store can do beside the contract, and the few things in which it falls short of it.

    As it stands here: what the contract alone says. The suite in ``fscoord.testing`` reads these flags and tests each
    store by what it claims; the table in the documentation, "Stores compared", is made of them.

    Attributes:
        processes: several processes can share one store.
        hosts: so can several hosts.
        durable: it can be told to keep what is acknowledged through a power failure.
        survives_handles: what it holds is still there when the last handle has been closed and another is opened.
        survives_first_handle: no handle's end takes the store with it, not even that of the first one.
        sessions: it knows who has it open, and, where `Store.has_liveness` is true, who of them is dead.
        certain: whether a failed write has taken effect is always known; otherwise its error may say ``maybe_applied``.
        lists_any_key: keys that are no UTF-8 can be listed, too; otherwise `Store.list_keys` raises when there are any.
        deletes_at_once: a key's value and its queue vanish in one step.
        value_max: the longest value, in bytes. It may also bound what one `Store.multi_set` carries.
    """

    processes: bool = False
    hosts: bool = False
    durable: bool = False
    survives_handles: bool = False
    survives_first_handle: bool = True
    sessions: bool = False
    certain: bool = False
    lists_any_key: bool = True
    deletes_at_once: bool = True
    value_max: int = VALUE_MAX


class Member(NamedTuple):
    """One session of a store: a handle that somebody has, or had, open.

    Attributes:
        number: its number; each is given once.
        host: the name of its host.
        pid: its process.
        rank: the last rank that it said it is, or None.
        label: what it was opened with, or the empty text.
        since: when it registered, in seconds since the epoch by its own clock; for people only.
        alive: ``"yes"``, ``"no"`` (its process is gone, or it was closed) or ``"unknown"``.
        found_dead: when its death was recorded, in seconds since the epoch by the finder's clock, or None.
    """

    number: int
    host: str
    pid: int
    rank: int | None
    label: str
    since: float
    alive: str
    found_dead: float | None = None


class Store(ABC):
    """Named values, counters and queues that several processes share.

    Keys are ``str`` or ``bytes``: a ``str`` is its UTF-8 bytes (with ``surrogateescape``), so ``"k"`` and ``b"k"``
    are one key. Values go in as ``str`` or any bytes-like object and come out as ``bytes``. Timeouts are seconds or
    `timedelta`; ``None`` means the store's own, ``0`` look once, ``math.inf`` or ``timedelta.max`` no limit.

    Every operation takes effect once, between its call and its return. Every handle may be used by several threads.
    Bad arguments change nothing: `TypeError` for a wrong type, `ValueError` for a wrong value,
    `~fscoord.LimitExceededError` for a key over 1 KiB or a value over 64 MiB.

    Any operation may raise `~fscoord.StoreTimeoutError` when the store itself can't be had within the store's
    timeout, and `~fscoord.StoreError` or one of its kinds when the store fails. A failed write's ``maybe_applied``
    says whether it may have taken effect.
    """

    capabilities: Capabilities = Capabilities()
    """In what this kind of store differs from others; see `Capabilities`."""

    _timeout: float = DEFAULT_TIMEOUT

    _call_s: float = math.inf
    """For how many seconds a call that waits for nobody may take, as a rule; 0: it only touches memory."""

    @abstractmethod
    def set(self, key: Key, value: Value) -> None:
        """Give `key` the value `value`, whatever it had before."""

    @abstractmethod
    def get(self, key: Key) -> bytes:
        """Return the value of `key`, waiting up to the store's timeout for somebody to set it.

        Raises:
            StoreTimeoutError: the key did not appear.
        """

    @abstractmethod
    def add(self, key: Key, amount: int) -> int:
        """Add `amount` to the integer in `key` and return the sum; a missing key counts as 0.

        The sum is kept as decimal text, so `get` returns e.g. ``b"-2"``.

        Raises:
            ValueError: the value is not an integer in decimal text; it is left as it is. (c10d accepts ``"12abc"``.)
            OverflowError: the sum does not fit in 64 bits; the value is left as it is. (c10d wraps.)
        """

    @abstractmethod
    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """Set `key` to `desired` if its value is `expected`; return the value it has afterwards.

        On a missing key an empty `expected` creates it; any other `expected` writes nothing and is returned itself,
        as in c10d.
        """

    @abstractmethod
    def check(self, keys: Iterable[Key]) -> bool:
        """Return at once whether every one of `keys` has a value or a non-empty queue."""

    @abstractmethod
    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        """Wait until `check` of `keys` is true. One deadline holds for all of them.

        Raises:
            StoreTimeoutError: its ``keys`` names every key that is still missing.
        """

    @abstractmethod
    def delete_key(self, key: Key) -> bool:
        """Remove `key`, its value and its queue; return whether there was anything to remove."""

    @abstractmethod
    def num_keys(self) -> int:
        """Return how many keys have a value. Nothing internal is counted, and queues are not (as in c10d)."""

    @abstractmethod
    def list_keys(self, prefix: Key = "") -> list[str]:
        """Return the keys with a value that begin with `prefix`, as text, in the order of their bytes."""

    @abstractmethod
    def append(self, key: Key, value: Value) -> None:
        """Append `value` to the value of `key`, atomically; a missing key counts as empty."""

    @abstractmethod
    def multi_get(self, keys: Iterable[Key]) -> list[bytes]:
        """Return the values of `keys`, in their order, waiting for all of them under one deadline.

        Raises:
            StoreTimeoutError: its ``keys`` names every key that is still missing.
        """

    @abstractmethod
    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        """Set every key to its value, all at once or not at all.

        Raises:
            ValueError: there are not as many values as keys; nothing is written.
        """

    @abstractmethod
    def queue_push(self, key: Key, value: Value) -> None:
        """Append `value` to the queue `key`. A queue and a value of one name do not touch each other."""

    @abstractmethod
    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """Take the oldest value from the queue `key`; each is given out exactly once.

        Raises:
            QueueEmptyError: with ``block=False``, the queue is empty.
            StoreTimeoutError: with ``block=True``, it stayed empty for the store's timeout.
        """

    @abstractmethod
    def queue_len(self, key: Key) -> int:
        """Return how many values the queue `key` holds."""

    @abstractmethod
    def clone(self: S) -> S:
        """Return an independent handle on the same store, with the same timeout, for use from another thread."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the handle holds. Closing twice is harmless; any other use afterwards raises
        `~fscoord.StoreClosedError`.
        """

    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until `world_size` callers have called this with `key`. A key serves once.

        The keys ``{key}/num_members`` and ``{key}/last_member`` are c10d's, so that both can meet at one barrier.

        Raises:
            BarrierError: more than `world_size` callers came, or under the barrier's keys stands something else.
            StoreTimeoutError: not all came.
        """
        take_turns(self, self._meeting(key, world_size, self._timeout if timeout is None else to_seconds(timeout)))

    def _meeting(self, key: Key, world_size: int, limit: float) -> Turns[None]:
        check_positive("world_size", world_size)
        name = key_bytes(key)
        counter = key_bytes(name + b"/num_members")
        try:
            arrived = self.add(counter, 1)
        except (NotACounterError, CounterRangeError) as error:
            raise BarrierError(f"{error}; it is no barrier's, so give every barrier a key of its own") from error
        if arrived > world_size:
            raise BarrierError(
                f"barrier {key_text(name)!r} got arrival {arrived} of {world_size}: it was used before, or by too many;"
                " give every barrier a key of its own"
            )
        if arrived == world_size:
            self.set(name + b"/last_member", b"1")
        else:
            yield Sought(KEYS, [name + b"/last_member"], limit)

    @property
    def has_liveness(self) -> bool:
        """Whether this store can tell the living from the dead. If not, nobody is ever called dead."""
        return False

    def register(self) -> int:
        """Register this handle as a session, unless it is one already, and return the session's number.

        That number is the handle's among `members`. Where sessions are kept, the first call writes to the store. On a
        store that keeps no sessions the number is 0.

        Raises:
            StoreError: the handle can't write, because it is read-only.
            SessionDeadError: the store says that this handle's session is dead.
        """
        return 0

    def members(self, ranks: Iterable[int] | None = None) -> list[Member]:  # noqa: ARG002 - see `has_liveness`
        """Return who has, or had, this store open, in the order of their numbers; empty where that is not kept.

        It registers this handle and records the deaths that it finds, unless the handle is read-only.

        Args:
            ranks: ask only for those who said to be one of these ranks.
        """
        return []

    def announce_rank(self, rank: int) -> None:  # noqa: B027 - nothing to do is an answer
        """Record that this handle is rank `rank`. A handle may be several ranks, and several handles one rank."""

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:  # noqa: ARG002 - see `has_liveness`
        """Return those of `ranks` that are known dead: somebody said to be that rank, and all who did are dead.

        A rank that nobody said to be, or of whom it can't be known, is not among them. The answer is the same for all
        handles: a death is recorded before it is told.
        """
        return []

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:  # noqa: ARG002 - see `has_liveness`
        """Return those of the sessions `numbers` that are known dead, as `dead_ranks` does for ranks."""
        return []

    def wait_alive(self, keys: Iterable[Key], ranks: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        """Wait for `keys` as `wait` does, but only as long as all of `ranks` may come.

        Returns:
            The ranks that are known dead, at once, while keys are missing; or nothing when all keys are there.

        Raises:
            StoreTimeoutError: neither happened.
        """
        needed = list(ranks)
        limit = self._timeout if timeout is None else to_seconds(timeout)
        return self._wait_beside(list(keys_bytes(keys)), limit, lambda: self.dead_ranks(needed))

    def wait_sessions(self, keys: Iterable[Key], numbers: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        """Do as `wait_alive`, but for the sessions `numbers`, and return those of them that are known dead."""
        needed = list(numbers)
        limit = self._timeout if timeout is None else to_seconds(timeout)
        return self._wait_beside(list(keys_bytes(keys)), limit, lambda: self.dead_sessions(needed))

    def _wait_beside(self, names: list[bytes], limit: float, find: Callable[[], list[int]]) -> list[int]:
        """Wait for the keys `names`, or until `find` finds somebody who is dead."""
        if not self.has_liveness:
            self.wait(names, limit)
            return []
        started = system.time.monotonic()
        while True:
            left = limit - (system.time.monotonic() - started)
            try:
                self.wait(names, max(0.0, min(left, LOOK_S)))
                return []
            except StoreTimeoutError:
                dead = find()
                if dead:
                    return dead
                if left <= LOOK_S:
                    raise

    def _await_change(self, known: object, limit: float) -> object:
        """Wait until something may have changed since the call that returned `known`, or for `limit` seconds.

        Return what is to be `known` next time; with None return at once. A store that hears of nothing sleeps for
        `UNHEARD_S`, and may have changed then.
        """
        if known is not None:
            system.time.sleep(min(UNHEARD_S, limit))
        return True

    def _listener(self, sleepers: Sleepers) -> Any:  # noqa: ARG002 - see there
        """Return what `_seek` needs to have `sleepers` woken; None if this store's waits can't be slept through so."""
        return None

    def _seek(self, sought: Sought, listener: Any) -> Naps[Any]:
        """Wait for `sought`, with what `_listener` returned; return who is dead, the values, or the item."""
        raise TypeError(
            f"{type(self).__name__} has no listener {listener!r}, and waits for {sought} in its calls alone"
        )

    @property
    def timeout(self) -> timedelta:
        """How long operations wait by default; no limit is ``timedelta.max``."""
        return to_timedelta(self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long operations of this handle wait when they are not told otherwise."""
        self._timeout = to_seconds(timeout)

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` are there. They are, on every store of fscoord."""
        return True

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
