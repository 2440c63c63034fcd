"""`PrefixStore`: a view of those keys of another store that begin with a given prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeVar, cast

from fscoord._arguments import Key, Timeout, Transaction, key_bytes, key_text, keys_bytes
from fscoord._waiting.changes import Position, Watch
from fscoord._waiting.wait import ArrivalRequest, NeededRanks, Wait, WaitRequest, WaitSteps
from fscoord.errors import StoreClosedError
from fscoord.store import Choose, Store, StoreView, forwarded, on_key, shown_handle, wait_on

T = TypeVar("T")


class PrefixStore(StoreView):
    """A view of `store` in which the key ``k`` is the key ``{prefix}/k`` of `store`, as in c10d.

    `store` may be a view itself. `num_keys` and `list_keys` use only the keys with the prefix (c10d counts all keys).
    The view and the underlying store have a common timeout, which `set_timeout` sets. Errors name the full key of the
    underlying store.

    `close` closes the view, and leaves the underlying store open, because other views and the program itself may use
    it. `clone` returns a view of a clone of the underlying store. Closing the returned view also closes the cloned
    store.

    Args:
        prefix: the prefix of the view's keys in `store`, without the slash at its end. It may be empty.
        store: the underlying store.

    Raises:
        ValueError: `store` is None.
        TypeError: `store` is not a `~fscoord.Store`.
    """

    def __init__(self, prefix: Key, store: Store) -> None:
        if store is None:
            raise ValueError("store is None; pass the underlying store")
        super().__init__(store)
        self._typical_call_s = store._typical_call_s
        self._prefix = key_bytes(prefix) + b"/"
        self._owns_inner = False
        self._closed = False

    def __init_subclass__(cls, **given: Any) -> None:
        """Replace the hooks of `_COMPOSED` in a subclass by the defaults of `Store`.

        The defaults call the public operations, which the subclass may override. The hooks of this class would bypass
        the overridden operations.
        """
        super().__init_subclass__(**given)
        for name in _COMPOSED:
            if getattr(cls, name) is getattr(PrefixStore, name):
                setattr(cls, name, getattr(Store, name))

    def __repr__(self) -> str:
        text = f"{type(self).__name__}({key_text(self._prefix[:-1])!r}, {self._inner!r})"
        return shown_handle(text, is_closed=self._closed)

    @property
    def underlying_store(self) -> Store:
        """The store that was passed to the constructor."""
        return self._inner

    barrier = on_key(Store.barrier)

    def _do(self, operation: str, keys: list[bytes], call: Callable[[list[bytes]], T]) -> T:  # noqa: ARG002 - see there
        return call(self._full_all(keys))

    def num_keys(self) -> int:
        return len(self._open().list_keys(self._prefix))

    def list_keys(self, prefix: Key = "") -> list[str]:
        # The prefix ends in a slash, not in the middle of a character. So it can be removed from the decoded text.
        cut = len(key_text(self._prefix))
        return [name[cut:] for name in self._open().list_keys(self._full(prefix))]

    def wait_alive(self, keys: Iterable[Key], ranks: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        return self._open().wait_alive(self._full_all(keys), self._full_ranks(ranks), timeout)

    _notifier_for = forwarded(Store._notifier_for)

    def _watch(self, prefix: bytes, after: Position | None, limit: float) -> Watch:
        watch = self._open()._watch(self._prefix + prefix, after, limit)
        watch._cut += len(key_text(self._prefix))
        return watch

    def _trace_place(self, key: bytes) -> tuple[str, str]:
        return super()._trace_place(self._full(key))

    def _new_wait(self, request: WaitRequest, notifier: Any) -> Wait[Any]:
        return self._open()._new_wait(self._full_wait(request), notifier)

    def _wait(self, request: WaitRequest) -> Any:
        if not self._open()._shows_waits:  # the underlying store may override operations that wait
            return super()._wait(request)
        return wait_on(self._open(), self._full_wait(request))

    @property
    def _shows_waits(self) -> bool:
        return self._inner._shows_waits

    def _peek_all(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        found = self._open()._peek_all(self._full_all(keys))
        return {key: found[self._prefix + key] for key in keys if self._prefix + key in found}

    def _recall(self, key: bytes) -> bytes | None:
        return self._open()._recall(self._prefix + key)

    @property
    def _decides(self) -> bool:  # type: ignore[override]
        return self._inner._decides

    def _transact_by(self, choose: Choose) -> bool:
        prefix = self._prefix

        def choose_full(get: Callable[[bytes], bytes | None]) -> Transaction | None:
            chosen = choose(lambda key: get(prefix + key))
            if chosen is None:
                return None
            _, present, added, deleted = chosen
            full = {prefix + key: value for key, value in present.items()}
            sums = {prefix + key: amount for key, amount in added.items()}
            return Transaction({}, full, sums, [prefix + key for key in deleted])

        return self._open()._transact_by(choose_full)

    def _write_within(self, limit: float, key: bytes, value: bytes, *, appends: bool) -> None:
        self._open()._write_within(limit, self._full(key), value, appends=appends)

    def _meet(self, prefix: bytes, rank: int, world_size: int, timeout: float | None) -> object:
        return self._open()._meet(self._prefix + prefix, rank, world_size, timeout)

    def _arrive(self, request: ArrivalRequest) -> bytes | None:
        return self._open()._arrive(self._full_request(request))

    def _arrival_steps(self, request: ArrivalRequest) -> WaitSteps[bytes | None]:
        steps, cut = self._open()._arrival_steps(self._full_request(request)), len(self._prefix)
        try:
            wanted: Any = next(steps)
            while True:
                try:  # the caller waits on this view, so the keys are those of the view
                    answer = yield wanted._replace(keys=[name[cut:] for name in wanted.keys])
                except BaseException as error:  # noqa: BLE001 - raised in `steps`, which may catch it
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(answer)
        except StopIteration as end:
            return cast("bytes | None", end.value)
        finally:
            steps.close()

    def _new_arrival_wait(self, request: ArrivalRequest, notifier: Any) -> Wait[Any] | None:
        return self._open()._new_arrival_wait(self._full_request(request), notifier)

    def _full_wait(self, request: WaitRequest) -> WaitRequest:
        return request._replace(keys=self._full_all(request.keys), ranks=self._full_ranks(request.ranks))

    def _full_ranks(self, ranks: T) -> T | NeededRanks:
        return ranks.with_prefix(self._prefix) if isinstance(ranks, NeededRanks) else ranks

    def _full_request(self, request: ArrivalRequest) -> ArrivalRequest:
        return request._replace(key=self._full(request.key), done=self._full(request.done))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(PrefixStore, self._prefix[:-1]), (self._inner,), {"_owns_inner": True}

    def __copy__(self) -> PrefixStore:
        return self.clone()

    def clone(self) -> PrefixStore:
        other = PrefixStore(self._prefix[:-1], self._open().clone())
        other._owns_inner = True
        return other

    def close(self) -> None:
        """Close this view. The underlying store stays open, unless `clone` created it for this view."""
        self._closed = True
        if self._owns_inner:
            self._inner.close()

    def _open(self) -> Store:
        if self._closed:
            raise StoreClosedError("this PrefixStore has been closed; make another view of its underlying store")
        return self._inner

    def _full(self, key: Key) -> bytes:
        return self._prefix + key_bytes(key)

    def _full_all(self, keys: Iterable[Key]) -> list[bytes]:
        return [self._prefix + name for name in keys_bytes(keys)]


_COMPOSED: Final = (
    "_wait",
    "_transact",
    "_decides",
    "_peek_all",
    "_recall",
    "_write_within",
    "_meet",
    "_arrive",
    "_arrival_steps",
    "_new_arrival_wait",
)
