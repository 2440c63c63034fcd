"""`once`: one does the work, and everybody gets what came of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import overload

from fscoord._runtime import system
from fscoord.arguments import Key, Timeout, Value, key_bytes, key_text, value_bytes
from fscoord.errors import LockLostError, WorkFailedError
from fscoord.recipes._cleanup import await_end, go_on_in_thread
from fscoord.recipes._hold import _Held
from fscoord.recipes._keys import foreign
from fscoord.recipes.lock import Lock
from fscoord.store import Store

__all__ = ["once"]

Work = Callable[[], Value]


class Turn(Lock):
    """The lock of those who would do the work. If it was taken away, another one has done it, and its value counts."""

    _what = "the result of"

    def _release(self, gone: list[_Held | str], here: object) -> bool:
        with suppress(LockLostError):
            return super()._release(gone, here)
        return True


@overload
def once(store: Store, name: Key, work: Work, *, timeout: Timeout | None = None) -> bytes: ...


@overload
def once(store: Store, name: Key, *, timeout: Timeout | None = None) -> Callable[[Work], Callable[[], bytes]]: ...


def once(
    store: Store, name: Key, work: Work | None = None, *, timeout: Timeout | None = None
) -> bytes | Callable[[Work], Callable[[], bytes]]:
    """Call `work` in one of the processes that call this, and return its value in all of them, now and later.

    The others wait. If the one dies, or is interrupted, the next of them does the work: as long as somebody is there,
    it is done. So it may have been begun more than once; but only one value counts, for all. Without `work` this is a
    decorator for it::

        @once(store, "dataset")
        def path() -> bytes: ...

    Args:
        store: where they meet.
        name: names the work; keys that begin with it and a slash belong to it. The value stays under ``{name}/result``.
        work: is called without arguments and returns a value for the store.
        timeout: how long to wait for another's value, in seconds or as a `timedelta`; None means the store's.

    Raises:
        WorkFailedError: the work raised in another process. In that process its own exception comes out.
        StoreTimeoutError: another one has not finished in time. It names it.
    """
    if work is None:

        def decorate(function: Work) -> Callable[[], bytes]:
            @wraps(function)
            def call() -> bytes:
                return _once(store, name, function, timeout)

            return call

        return decorate
    return _once(store, name, work, timeout)


def _once(store: Store, name: Key, work: Work, timeout: Timeout | None) -> bytes:
    key = result_key(name)
    if not store.check([key]):
        _do_in_turn(Turn(store, name, timeout), store, key, work)
    return value_of(name, store.get(key))


def _do_in_turn(turn: Turn, store: Store, key: bytes, work: Work) -> None:
    """Do the work when it is this one's turn, unless it is done by then; nobody else has `turn`, to give it back."""
    got: list[str] = []
    over: list[object] = []
    try:
        turn._enter(turn._mode, got)
        if not store.check([key]):
            _do(store, key, work)
        turn.release()
    except BaseException:  # each line of this is explained in `_cleanup`
        try:
            turn._undo(got)
        except BaseException:
            go_on_in_thread((over, turn._undo, got))
            await_end(over)
            raise
        raise


def _do(store: Store, key: bytes, work: Work) -> None:
    """Do the work and set what came of it, unless it is there already."""
    try:
        text = success(work())
    except Exception as error:
        store.compare_set(key, b"", failure(error))
        raise
    store.compare_set(key, b"", text)


def success(value: Value) -> bytes:
    """Return what is written under the key of a result: the work returned `value`."""
    return b"=" + value_bytes(value)


def failure(error: Exception) -> bytes:
    """Return what is written there: the work raised `error`, here."""
    words = f"{system.process_name()} raised {type(error).__name__}: {error}"
    return b"!" + words.encode(errors="replace")


def result_key(name: Key) -> bytes:
    """Return the key of the result of the work `name`."""
    return key_bytes(name) + b"/result"


def value_of(name: Key, text: bytes) -> bytes:
    """Return the value that `text`, from that key, says.

    Raises:
        WorkFailedError: it says that the work raised.
        FscoordError: it says neither.
    """
    if text[:1] == b"=":
        return text[1:]
    if text[:1] != b"!":
        raise foreign(result_key(name), text, "result")
    raise WorkFailedError(
        f"the work {key_text(key_bytes(name))!r} failed: {text[1:].decode(errors='replace')}; delete the key"
        f" {key_text(result_key(name))!r} to have it done again"
    )
