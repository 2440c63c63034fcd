"""`store_timeout`: another timeout for a while."""

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
    """Set the timeout of `store` for the body of the ``with``, and the old one again afterwards, after an error too.

    It is the handle's timeout, for all its threads: where several nest this on one handle, or on `PrefixStore` views
    of it, the latest still in force holds, and when the last leaves, in whatever order, the handle has the timeout
    that it had before the first. A thread that wants a timeout of its own works on a `Store.clone`.

    Args:
        store: the handle.
        timeout: seconds or a `timedelta`.
    """
    limit = to_timedelta(to_seconds(timeout))
    base = _base(store)
    token = _Token(limit)
    system.process_epoch()  # after a fork in C it renews the lock
    try:
        with _tokens_lock[0]:
            stack = _tokens.setdefault(base, [_Token(base.timeout)])
            base.set_timeout(limit)
            stack.append(token)
        yield
    finally:
        with _tokens_lock[0]:
            _take_away(base, token)


class _Token:
    """One timeout that holds until its thread takes it away; told from others by identity."""

    def __init__(self, limit: timedelta) -> None:
        self.limit = limit
        self.thread = system.threading.get_ident()


_tokens: WeakKeyDictionary[Store, list[_Token]] = WeakKeyDictionary()
_tokens_lock = [system.threading.Lock()]


def _after_fork_in_child() -> None:
    """Take away what threads would have to that are not here."""
    _tokens_lock[0] = system.threading.Lock()
    me = system.threading.get_ident()
    for base, stack in list(_tokens.items()):
        stack[1:] = [token for token in stack[1:] if token.thread == me]
        _take_away(base, _Token(stack[-1].limit))


system.after_fork_in_child("timeouts", _after_fork_in_child)


def _take_away(base: Store, token: _Token) -> None:
    stack = _tokens.get(base, [])
    if token in stack:
        stack.remove(token)
    if stack:
        if len(stack) == 1:
            del _tokens[base]
        with suppress(StoreClosedError):  # in the body: no timeout is left to restore
            base.set_timeout(stack[-1].limit)


def _base(store: Store) -> Store:
    """Return the store whose timeout `store` shows: a view has none of its own."""
    inner = getattr(store, "underlying_store", None)
    return _base(inner) if isinstance(inner, Store) else store
