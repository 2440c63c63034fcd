"""`TorchStore` wraps a store as a `torch.distributed.Store`. `rendezvous` serves ``init_method="fscoord:///path"``.

The import of this module registers the URL scheme. The module needs the extra ``fscoord[torch]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from types import EllipsisType
from typing import Any, Final, ParamSpec, TypeVar

from fscoord import environment
from fscoord._arguments import Key, Timeout, Value, key_bytes, to_seconds
from fscoord._runtime import system
from fscoord._runtime.escaping import printable
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.collectives.arrivals import Attempt
from fscoord.errors import (
    FscoordError,
    QueueEmptyError,
    StaleRunError,
    StoreGoneError,
    StoreTimeoutError,
    UsedBeforeError,
    joined,
    needed_extra,
)
from fscoord.store import Store
from fscoord.stores import url as urls
from fscoord.stores.prefix import PrefixStore
from fscoord.stores.tcp import TCPStore
from fscoord.stores.url import open_store

with needed_extra("fscoord.integrations.torch", "torch", "torch"):
    import torch.distributed as dist

__all__ = ["SCHEME", "TorchStore", "rendezvous"]

SCHEME = "fscoord"

D = TypeVar("D")
P = ParamSpec("P")
R = TypeVar("R")
N = TypeVar("N", int, float)

_NO_LIMIT = timedelta(0)
"""The timeout that means no limit to torch's file and hash stores."""


def _raise_torch_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Convert fscoord's errors to torch's, which callers in torch catch, such as elastic's barrier."""

    @wraps(method)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return method(*arguments, **named)
        except QueueEmptyError as error:
            raise joined(error, getattr(dist, "QueueEmptyError", dist.DistStoreError)) from error  # none in torch 2.6
        except FscoordError as error:
            raise joined(error, dist.DistStoreError) from error

    # torch's class is the only base of `TorchStore`, so its methods inherit no text from the contract.
    call.__doc__ = getattr(Store, method.__name__, method).__doc__
    return call


_open_stores: set[TorchStore] = set()
"""The open `TorchStore` objects. This set keeps each object alive until the object is closed."""


class TorchStore(dist.Store):
    """Wraps `store` as a real ``torch.distributed.Store``, for ``init_process_group(store=...)`` and other torch code.

    An error of the store is raised as an error of a new class, which inherits from the class of the error and from
    ``DistStoreError``. The original error is the ``__cause__`` of the new error. So torch's own
    ``elastic.utils.store.barrier`` names the missing ranks after a timeout. `ValueError` and `OverflowError` are raised
    unchanged. A timeout of zero means no limit, as in torch. With a negative timeout an operation tries once.

    torch's C++ base class keeps the timeout. Each operation first sets the timeout of `store` to this timeout.

    torch's C++ keeps no reference to a Python store (pytorch issue 106633), and a process group whose store has been
    collected fails at its next use. So an object of this class lives until it is closed, or the process ends.

    Args:
        store: the store. `close` of this object closes the store.
    """

    timeout: timedelta  # an attribute of torch's C++ class, which the stubs leave out

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._limit = store.timeout
        self.set_timeout(_to_torch(store.timeout))
        _open_stores.add(self)

    def __repr__(self) -> str:
        return f"TorchStore({self._store!r})"

    @property
    def underlying_store(self) -> Store:
        """The store of fscoord that this object wraps."""
        return self._store

    @property
    def host(self) -> str:
        """The host of the server, if the underlying store is a `~fscoord.TCPStore`."""
        return self._tcp_store("host").host

    @property
    def port(self) -> int:
        """The port of the server, if the underlying store is a `~fscoord.TCPStore`."""
        return self._tcp_store("port").port

    def _tcp_store(self, name: str) -> TCPStore:
        if not isinstance(self._store, TCPStore):
            raise AttributeError(f"{self!r} has no {name}: only a TCPStore has a server", name=name, obj=self)
        return self._store

    def close(self) -> None:
        """Close the underlying store. This object may be garbage-collected afterwards, so do not use it any more."""
        _open_stores.discard(self)
        self._store.close()

    def _store_with_timeout(self) -> Store:
        """Set the store's timeout to that of the C++ base class, and return the store."""
        limit = self.timeout
        if limit != self._limit:
            self._store.set_timeout(_from_torch(limit))
            self._limit = limit
        return self._store

    # -- called by C++, under its own names ----------------------------------------------------------------------------

    @_raise_torch_errors
    def set(self, key: Key, value: Value) -> None:
        self._store_with_timeout().set(key, value)

    @_raise_torch_errors
    def get(self, key: Key, *, default: D | EllipsisType = ..., timeout: Timeout | None = None) -> bytes | D:
        return self._store_with_timeout().get(key, default=default, timeout=_call_timeout(timeout))

    @_raise_torch_errors
    def add(self, key: Key, amount: int) -> int:
        return self._store_with_timeout().add(key, amount)

    @_raise_torch_errors
    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        return self._store_with_timeout().compare_set(key, expected, desired)

    @_raise_torch_errors
    def check(self, keys: Iterable[Key]) -> bool:
        return self._store_with_timeout().check(keys)

    @_raise_torch_errors
    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        self._store_with_timeout().wait(keys, _call_timeout(timeout))

    @_raise_torch_errors
    def delete_key(self, key: Key, *, expected: Value | None = None) -> bool:
        return self._store_with_timeout().delete_key(key, expected=expected)

    deleteKey = delete_key  # noqa: N815 - the name that C++ calls

    @_raise_torch_errors
    def num_keys(self) -> int:
        return self._store_with_timeout().num_keys()

    getNumKeys = num_keys  # noqa: N815

    @_raise_torch_errors
    def append(self, key: Key, value: Value) -> None:
        self._store_with_timeout().append(key, value)

    @_raise_torch_errors
    def multi_get(self, keys: Iterable[Key], *, timeout: Timeout | None = None) -> list[bytes]:
        return self._store_with_timeout().multi_get(keys, timeout=_call_timeout(timeout))

    @_raise_torch_errors
    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        self._store_with_timeout().multi_set(keys, values)

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    @_raise_torch_errors
    def clone(self) -> TorchStore:
        return TorchStore(self._store_with_timeout().clone())

    # -- reachable from Python only: torch does not forward these from C++ ---------------------------------------------

    @_raise_torch_errors
    def list_keys(self, prefix: Key = "") -> list[str]:
        return self._store_with_timeout().list_keys(prefix)

    @_raise_torch_errors
    def create(self, key: Key, value: Value) -> bool:
        return self._store_with_timeout().create(key, value)

    @_raise_torch_errors
    def pop(self, key: Key) -> bytes | None:
        return self._store_with_timeout().pop(key)

    @_raise_torch_errors
    def transact(self, **changes: Any) -> bool:
        return self._store_with_timeout().transact(**changes)

    @_raise_torch_errors
    def queue_push(self, key: Key, value: Value) -> None:
        self._store_with_timeout().queue_push(key, value)

    @_raise_torch_errors
    def queue_pop(self, key: Key, block: bool = True, *, timeout: Timeout | None = None) -> bytes:
        return self._store_with_timeout().queue_pop(key, block, timeout=_call_timeout(timeout))

    @_raise_torch_errors
    def queue_len(self, key: Key) -> int:
        return self._store_with_timeout().queue_len(key)

    @_raise_torch_errors
    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        self._store_with_timeout().barrier(key, world_size, _call_timeout(timeout))


def _to_torch(limit: timedelta) -> timedelta:
    """Convert `limit` for torch, at least 1 ms: torch rounds to milliseconds, and 0 would mean no limit."""
    return _NO_LIMIT if limit == timedelta.max else max(limit, timedelta(milliseconds=1))


def _from_torch(limit: Timeout) -> Timeout:
    left = limit.total_seconds() if isinstance(limit, timedelta) else limit
    return timedelta.max if left == 0 else max(left, 0)


def _call_timeout(timeout: Timeout | None) -> Timeout | None:
    return None if timeout is None else _from_torch(timeout)


def rendezvous(url: str, timeout: Timeout | None = None, **_: Any) -> Iterator[tuple[TorchStore, int, int]]:
    """Yield the store at `url`, the rank and the world size. ``init_method="fscoord:///path?..."`` calls this.

    Apart from its scheme, the URL is that of `open_store`, with the same options in its query. ``fscoord:///path`` and
    ``fscoord:////path`` mean the same, because torch writes four slashes. Only the host ``localhost`` is accepted.
    ``rank`` and ``world_size`` belong to the process group. The caller gives both in the URL, or as arguments of
    ``init_process_group``.

    The store is opened with ``world_size``, so each launch is a run of the store (see `FileStore`), and reads no
    addresses of an earlier launch. The run has the ``run_id`` of the URL or of the environment, if there is one. A
    process stays a participant until it exits, and uses the same handle for all its groups in this run.

    Each group has keys of its own, and begins when all ranks have joined it. A call joins the latest group of its world
    size, or begins the next group if this process has joined the latest group before. If ranks are missing at the end
    of the timeout, all ranks give up the group. Ranks that still wait, or come later, join the next group. So the n-th
    group of one rank is the n-th of all ranks, and a failed call can be repeated.

    Raises:
        DistStoreError: its cause is `StoreTimeoutError` if ranks are missing, `StaleRunError` if a later run has begun,
            `UsedBeforeError` if another process has this rank, or another `StoreError` if the store can't be opened. If
            the run has no id, a process may take the rank of a process that has ended.
        ValueError: rank, world size or an option is missing or invalid, the URL names a host, or the other participants
            have opened the store with another world size.
    """
    try:
        store, rank, world_size = _join_group(url, timeout)
    except BaseException:
        if not dist.is_initialized():
            # torch names a group by the number of groups so far, and counts failed calls, too. Without this reset, a
            # rank that repeats a failed call would use another name than the other ranks. torch has no public name for
            # the number, and sets it to 0 itself when the last group is destroyed.
            vars(dist.distributed_c10d)["_group_count"] = 0
        raise
    yield TorchStore(store), rank, world_size
    raise RuntimeError(f"{url}: this store can make one process group only; call init_process_group again")


@_raise_torch_errors
def _join_group(url: str, timeout: Timeout | None) -> tuple[Store, int, int]:
    path, options = _path_and_options(url)
    rank, world_size = (_number(url, options, name, int) for name in ("rank", "world_size"))
    if not 0 <= rank < world_size:
        raise ValueError(f"{url}: rank {rank} is not one of {world_size}; ranks go from 0 to world_size - 1")
    limit = _number(url, options, "timeout", float) if "timeout" in options else timeout
    key = system.os.getpid(), system.os.path.realpath(path), options.get("run_id"), options.get("restart")
    if key in _participants and _participants[key].is_over():
        _participants.pop(key).store.close()
    if key not in _participants:
        opened = open_store(urls.file_url(path, options), rank=rank, world_size=world_size, timeout=limit)
        _participants[key] = _Participant(opened, rank, has_run_id="run_id" in options)
    if limit is not None:
        _participants[key].store.set_timeout(limit)
    return _participants[key].next_group(url, rank, world_size), rank, world_size


RANKS: Final = "fscoord/rank/"
"""The prefix of the keys of a process group's ranks. The value names the rank's process: ``{session} {host}:{pid}``."""

OUTCOME: Final = "fscoord/outcome"
"""The key for the outcome of a group: all ranks have joined, or a rank has given up. Only the first write counts."""

COMPLETE: Final = b"complete"
GIVEN_UP: Final = b"given up"


class _Participant:
    """Joins this process to the process groups at one path and in one run.

    Args:
        store: the store, which is closed when the process exits. Each group uses a view of the store.
        rank: the rank with which the store was opened. The process may have another rank in a later group.
        has_run_id: whether the URL names the run.
    """

    def __init__(self, store: Store, rank: int, *, has_run_id: bool) -> None:
        self.store = store
        self._has_run_id = has_run_id or environment.find_job() is not None
        self._joined: dict[int, int] = {}  # the number of the last group that was joined, by world size
        number = store.register()
        (own,) = (member for member in store.members([rank]) if member.number == number)
        self._process = b"%d " % number + f"{own.host}:{own.pid}".encode("utf-8", "surrogateescape")

    def is_over(self) -> bool:
        """Return whether the run of the store is over, so that another run may have begun at the path."""
        try:
            self.store.num_keys()
        except (StaleRunError, StoreGoneError):
            return True
        return False

    def next_group(self, url: str, rank: int, world_size: int) -> Store:
        """Join the next process group as `rank`, and wait for the other ranks. Return the store of the group."""
        latest, start = f"fscoord/torch/{world_size}", system.time.monotonic()
        attempt = Attempt(key_bytes(latest), rank, world_size, to_seconds(self.store.timeout), start)
        while True:
            # The latest number is not below that of the group that was joined last. So the operation either begins the
            # next group or returns a later one. A process never joins a group again, because its old keys are there.
            joined = self._joined.get(world_size, 0)
            number = int(self.store.compare_set(latest, str(joined or ""), str(joined + 1)))
            self._joined[world_size] = number
            group = PrefixStore(f"{latest}/{number}", self.store)
            process = group.compare_set(f"{RANKS}{rank}", "", self._process)
            if process == self._process:
                if _is_complete(group, attempt):
                    return group
                continue  # a rank has given up
            session, _, place = process.partition(b" ")
            state = group._session_states([int(session)]).get(int(session), "no")
            # In a run without an id, a process that has ended has left in good order, because a death ends the run.
            # Otherwise it may have died, and the ranks of the group may use its address.
            if state != "no" or self._has_run_id:
                words = {"yes": "is alive", "no": "has ended", "unknown": "may be alive"}[state]
                raise UsedBeforeError(
                    f"{url}: rank {rank} is already taken by process {printable(place)}, which {words}. The other ranks"
                    " may have its address, so this process can't take the rank. Give each launch a path or a run_id of"
                    " its own (?run_id=ID, the same for all its ranks). Workers that a launcher restarts need"
                    f" env://{group._closer_look()}"
                )


def _is_complete(group: Store, attempt: Attempt) -> bool:
    """Wait until all ranks have joined `group`, or a rank has given up. Return whether all have joined.

    No rank writes an address before this function returns. All ranks agree, because the outcome is one key, even if the
    time of one rank ends when the last rank joins.
    """
    keys = [f"{RANKS}{rank}" for rank in range(attempt.world_size)]
    try:
        if not group.check(keys):
            group.wait([OUTCOME], attempt.left())
        return group.compare_set(OUTCOME, "", COMPLETE) == COMPLETE
    except StoreTimeoutError as error:
        if group.compare_set(OUTCOME, "", GIVEN_UP) == COMPLETE:
            return True
        missing = [rank for rank, key in enumerate(keys) if not group.check([key])]
        raise attempt.time_out("in the rendezvous", missing, error, group) from error
    except BaseException:
        with suppress(FscoordError):  # the run may be over
            group.compare_set(OUTCOME, "", GIVEN_UP)
        raise


_participants: dict[tuple[int, str, str | None, str | None], _Participant] = {}


def _path_and_options(url: str) -> tuple[str, dict[str, str]]:
    """Return the path and the options of `url`, decoded.

    torch writes an absolute path after ``fscoord:///``, so there are four slashes. Before torch calls a handler, it
    parses the URL and joins it again. ``urllib`` of Python 3.12 and earlier then leaves two slashes, so that the first
    directory looks like a host. If that directory exists, this function takes the host as a directory.
    """
    from urllib.parse import urlsplit, urlunsplit

    _, host, path, options = urls.parse_url(url)
    if host not in ("", "localhost"):
        four = f"{SCHEME}:////{host}{path}"
        is_ambiguous = urlunsplit(urlsplit(four)) != four
        if not (is_ambiguous and path.strip("/") and system.os.path.isdir(system.os.path.dirname(f"/{host}{path}"))):
            raise ValueError(
                f"{url} names the host {host!r}, but a store is a file of this host;"
                f" write an absolute path with three slashes: {SCHEME}:///path"
            )
        path = f"/{host}{path}"
    return (f"/{path.lstrip('/')}" if path.startswith("/") else path), options


def _number(url: str, options: dict[str, str], name: str, kind: type[N]) -> N:
    text = options.pop(name, None)
    if text is None:
        raise ValueError(f"{url}: {name} is missing; pass it to init_process_group, or in the URL as ?{name}=...")
    try:
        return kind(text)
    except ValueError:
        what = "a number" if name == "timeout" else "an integer"
        raise ValueError(f"{url}: {name}={text} is not {what}") from None


def _register() -> None:
    try:
        register: Any = dist.register_rendezvous_handler  # which has no types
        register(SCHEME, rendezvous)
    except RuntimeError as error:  # this module was imported before, and again after it was dropped from sys.modules
        raise_if_foreign(error, "torch")


_register()
