"""`store_timeout` changes the timeout of a store within a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol

from fscoord._arguments import Timeout, to_seconds, to_timedelta
from fscoord._runtime import system
from fscoord.errors import StoreClosedError
from fscoord.store import Store, needed_store


class TimeoutStore(Protocol):
    """A store whose timeout `~fscoord.store_timeout` can change: any `~fscoord.Store`, and any store of torch.

    The store must also have the attribute ``timeout``, a `timedelta`. The protocol does not declare the attribute,
    because torch's stubs do not declare it.
    """

    def set_timeout(self, timeout: timedelta, /) -> object:
        """Set how long operations wait by default. The result is ignored."""


FOREIGN_MIN: Final = timedelta(milliseconds=1)
FOREIGN_MAX: Final = timedelta(days=36_500)
"""The longest timeout that `store_timeout` sets on a store of another package. `FOREIGN_MIN` is the shortest."""


@contextmanager
def store_timeout(store: TimeoutStore, timeout: Timeout) -> Iterator[None]:
    """Set the timeout of `store` for the ``with`` block, and restore the previous timeout at the end.

    The timeout belongs to the handle, so all threads that use the handle get it. ``with`` blocks of several threads may
    overlap on one handle, or on `PrefixStore` views of one handle, and may end in any order. Then the handle has the
    timeout of the latest block that still runs. When no block runs, the handle gets back its timeout from before the
    first block. A thread that needs its own timeout uses a `Store.clone`.

    Args:
        store: the handle. It may also be a store of torch, or another object with ``timeout`` and ``set_timeout``.
        timeout: seconds or a `timedelta`.

    Raises:
        TypeError: `store` is not a store, or `timeout` is neither a number nor a `timedelta`.
        ValueError: `timeout` is negative or NaN.
        StoreClosedError: the handle is closed.
    """
    limit = to_timedelta(to_seconds(timeout))
    if not isinstance(store, Store):  # in torch 0 means no limit, and `timedelta.max` overflows
        limit = min(max(limit, FOREIGN_MIN), FOREIGN_MAX)
    base: Any = _base(needed_store(store, "set_timeout", "set"))  # torch's stubs leave out its `timeout`
    token = _Token(limit)
    system.process_epoch()  # in a child of a fork(2) in C this creates the lock again
    try:
        with _timeouts_lock[0]:
            timeouts = _timeouts.get(id(base))
            if timeouts is None:
                timeouts = _timeouts[id(base)] = _Timeouts(base, [_Token(base.timeout)])
            base.set_timeout(limit)
            timeouts.tokens.append(token)
        yield
    finally:
        with _timeouts_lock[0]:
            _pop(base, token)


class _Token:
    """The timeout of one ``with`` block. Tokens are compared by identity."""

    def __init__(self, limit: timedelta) -> None:
        self.limit = limit
        self.thread = system.threading.get_ident()


class _Timeouts(NamedTuple):
    """The timeouts of one handle.

    Attributes:
        base: the handle.
        tokens: the timeout from before the first ``with`` block, and then the timeout of each block that still runs.
    """

    base: TimeoutStore
    tokens: list[_Token]


_timeouts: dict[int, _Timeouts] = {}
"""Maps the `id` of each handle with running ``with`` blocks to its timeouts. A handle itself may be unhashable."""
_timeouts_lock = [system.mutex()]


def _after_fork_in_child() -> None:
    """Remove the timeouts that other threads of the parent process set. These threads do not exist in the child."""
    _timeouts_lock[0] = system.mutex()
    me = system.threading.get_ident()
    for base, stack in list(_timeouts.values()):
        stack[1:] = [token for token in stack[1:] if token.thread == me]
        _pop(base, _Token(stack[-1].limit))


system.after_fork_in_child("timeouts", _after_fork_in_child)


def _pop(base: TimeoutStore, token: _Token) -> None:
    stack = _timeouts[id(base)].tokens if id(base) in _timeouts else []
    if token in stack:
        stack.remove(token)
    if stack:
        if len(stack) == 1:
            del _timeouts[id(base)]
        with suppress(StoreClosedError):  # closed in the body: there is no timeout to restore
            base.set_timeout(stack[-1].limit)


def _base(store: TimeoutStore) -> TimeoutStore:
    """Return the store whose timeout `store` uses.

    A `PrefixStore` uses the timeout of its underlying store. A store of another package uses its own timeout, even if
    it wraps a store of fscoord as `TorchStore` does.
    """
    inner = getattr(store, "underlying_store", None)
    return _base(inner) if isinstance(store, Store) and isinstance(inner, Store) else store
