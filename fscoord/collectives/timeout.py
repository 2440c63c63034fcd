"""`store_timeout`: another timeout for the body of a ``with``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

from fscoord._arguments import Timeout, to_seconds, to_timedelta
from fscoord._runtime import system
from fscoord.errors import StoreClosedError
from fscoord.store import Store

__all__ = ["store_timeout"]


@contextmanager
def store_timeout(store: Store, timeout: Timeout) -> Iterator[None]:
    """Set the timeout of `store` for the body of the ``with``, and restore the previous one at its end.

    The timeout belongs to the handle, and holds for all threads that use it. Several threads may do this on one handle,
    or on `PrefixStore` views of it: then the timeout that was set last holds, among those whose body is still running.
    After the last body, in whatever order the bodies end, the handle has the timeout that it had before the first. A
    thread that needs a timeout of its own uses a `Store.clone`.

    Args:
        store: the handle.
        timeout: seconds or a `timedelta`.
    """
    limit = to_timedelta(to_seconds(timeout))
    base = _base(store)
    token = _Token(limit)
    system.process_epoch()  # after a fork in C it makes the lock anew
    try:
        with _tokens_lock[0]:
            stack = _tokens.setdefault(base, [_Token(base.timeout)])
            base.set_timeout(limit)
            stack.append(token)
        yield
    finally:
        with _tokens_lock[0]:
            _pop(base, token)


class _Token:
    """One timeout, which holds until the body of its ``with`` ends. Compared by identity."""

    def __init__(self, limit: timedelta) -> None:
        self.limit = limit
        self.thread = system.threading.get_ident()


_tokens: WeakKeyDictionary[Store, list[_Token]] = WeakKeyDictionary()
_tokens_lock = [system.threading.Lock()]


def _after_fork_in_child() -> None:
    """Remove the timeouts that other threads of the parent set: those threads do not exist in the child."""
    _tokens_lock[0] = system.threading.Lock()
    me = system.threading.get_ident()
    for base, stack in list(_tokens.items()):
        stack[1:] = [token for token in stack[1:] if token.thread == me]
        _pop(base, _Token(stack[-1].limit))


system.after_fork_in_child("timeouts", _after_fork_in_child)


def _pop(base: Store, token: _Token) -> None:
    stack = _tokens.get(base, [])
    if token in stack:
        stack.remove(token)
    if stack:
        if len(stack) == 1:
            del _tokens[base]
        with suppress(StoreClosedError):  # closed in the body: there is no timeout to restore
            base.set_timeout(stack[-1].limit)


def _base(store: Store) -> Store:
    """Return the store that has the timeout of `store`: a view has none of its own."""
    inner = getattr(store, "underlying_store", None)
    return _base(inner) if isinstance(inner, Store) else store
