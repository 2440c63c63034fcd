"""`once`: one process does the work, and all processes get the result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Final, Literal, get_args, overload

from fscoord._arguments import Key, Timeout, Value, check_choice, key_bytes, key_text, value_bytes
from fscoord._runtime import system
from fscoord._waiting.awaited import WORK
from fscoord._waiting.wait import WaitSteps
from fscoord.errors import LockLostError, WorkFailedError
from fscoord.recipes._cleanup import undone_by
from fscoord.recipes._hold import HeldEntry
from fscoord.recipes._keys import foreign_value_error
from fscoord.recipes.lock import Lock
from fscoord.store import Store, needed_store

Work = Callable[[], Value]
Scope = Literal["store", "host"]
SCOPES: Final = get_args(Scope)


class OnceLock(Lock):
    """The lock under which `once` does the work.

    A release of a lost lock raises no error. Another process may have done the work a second time after the loss, but
    only the first result is stored.
    """

    _what = "the result of"
    _kind = WORK

    def _release(self, gone: list[HeldEntry | str], here: object) -> bool:
        with suppress(LockLostError):
            return super()._release(gone, here)
        return True


@overload
def once(store: Store, name: Key, work: Work, *, timeout: Timeout | None = None, scope: Scope = "store") -> bytes: ...


@overload
def once(
    store: Store, name: Key, *, timeout: Timeout | None = None, scope: Scope = "store"
) -> Callable[[Work], Callable[[], bytes]]: ...


def once(
    store: Store, name: Key, work: Work | None = None, *, timeout: Timeout | None = None, scope: Scope = "store"
) -> bytes | Callable[[Work], Callable[[], bytes]]:
    """Call `work` in one process, and return its value in every process that calls this function with the same `name`.

    Later callers get the stored value. A caller that comes while `work` runs waits for the value. If the process that
    runs `work` dies or is interrupted, the next waiting process runs it. So `work` may run more than once, but all
    processes get the same value. ``std::call_once`` in C++ and ``sync.Once`` in Go are similar functions for threads.
    Without `work`, `once` is a decorator::

        @once(store, "dataset")
        def path() -> bytes: ...

    Args:
        store: the store that the processes share.
        name: the name of the work. Keys that begin with the name and a slash belong to the work. The result is kept
            under ``{name}/result``.
        work: called without arguments; returns a value for the store.
        timeout: how long to wait while another process runs the work, in seconds or as a `timedelta`; None means the
            store's timeout.
        scope: ``"host"``: the work is done once on each host, and its value or its error is that of the host. The
            result is kept under ``{name}/host/{host}/result``. A host is its name together with the id of its boot. So
            a host that has restarted does the work again, and two hosts with the same name are two hosts. The
            processes of a container belong to its host if the container has the name of that host. Where the system
            has no boot id, the name alone counts.

    Raises:
        WorkFailedError: the work raised an exception in another process. The process that ran the work gets the
            exception itself.
        StoreTimeoutError: another process did not finish the work within the timeout. The error names the process.
        TypeError: the work returned neither ``str`` nor a bytes-like object.
    """
    needed_store(store)
    name = scoped(name, scope)
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
    text = store.get(key, default=None)
    if text is None:
        _do_under_lock(OnceLock(store, name, timeout), store, key, work)
        text = store.get(key)
    return value_of(name, text)


@undone_by(lambda lock, got, _: lock._undo(got))
def _do_under_lock(
    lock: OnceLock, got: list[str], here: object, store: Store, key: bytes, work: Work
) -> WaitSteps[None]:
    """Acquire `lock`, do the work unless its result exists by then, and release `lock`."""
    limit = lock._patience()
    yield from lock._entering(lock._acquire(got, here, True, limit), limit)
    if not store.check([key]):
        _do(store, key, work)
    lock.release()


def _do(store: Store, key: bytes, work: Work) -> None:
    """Do the work, and store its result or its error unless a result exists already."""
    try:
        text = success(work())
    except Exception as error:
        store.compare_set(key, b"", failure(error))
        raise
    store.compare_set(key, b"", text)


def success(value: Value) -> bytes:
    """Return the text that is stored if the work returned `value`."""
    return b"=" + value_bytes(value)


def failure(error: BaseException, rank: str = "") -> bytes:
    """Return the text that is stored if the work raised `error` in this process. `rank` is put before its name."""
    words = f"{rank}{system.process_name()} raised {type(error).__name__}: {error}"
    return b"!" + words.encode(errors="replace")


def scoped(name: Key, scope: Scope) -> Key:
    """Return the name under which the work `name` is done once in `scope`.

    Raises:
        ValueError: `scope` is not a scope.
    """
    if check_choice("scope", scope, SCOPES) == "store":
        return name
    return key_bytes(name) + b"/host/" + key_bytes(system.host_identity())


def result_key(name: Key) -> bytes:
    """Return the key of the result of the work `name`."""
    return key_bytes(name) + b"/result"


def value_of(name: Key, text: bytes) -> bytes:
    """Return the value in `text`, the stored result of the work `name`.

    Raises:
        WorkFailedError: `text` is the result of work that raised an error.
        FscoordError: `text` is not a result.
    """
    if text[:1] == b"=":
        return text[1:]
    if text[:1] != b"!":
        raise foreign_value_error(result_key(name), text, "result")
    raise WorkFailedError(
        f"the work {key_text(key_bytes(name))!r} failed: {text[1:].decode(errors='replace')}; delete the key"
        f" {key_text(result_key(name))!r} to have the work done again"
    )
