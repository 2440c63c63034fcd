"""`TorchStore`: any store of fscoord as a `torch.distributed.Store`, and ``init_method="fscoord:///path"``.

The import of this module registers the URL scheme. It needs the extra ``fscoord[torch]``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from fscoord import environment
from fscoord._arguments import Key, Timeout, Value, to_seconds
from fscoord._runtime import system
from fscoord._runtime.escaping import printable, shell_word
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import FscoordError, QueueEmptyError, StoreUnavailableError, UsedBeforeError, missing_extra
from fscoord.store import Store
from fscoord.stores import url as urls
from fscoord.stores.tcp import TCPStore
from fscoord.stores.url import open_store

try:
    import torch.distributed as dist
except ImportError as error:
    raise missing_extra("fscoord.integrations.torch", "torch", "torch") from error

__all__ = ["SCHEME", "TorchStore", "rendezvous"]

SCHEME = "fscoord"

P = ParamSpec("P")
R = TypeVar("R")

_NO_LIMIT = timedelta(0)
"""The timeout that means no limit to torch's file and hash stores."""


def _raise_torch_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Raise fscoord's errors as torch's errors, which callers in torch catch, such as elastic's barrier."""

    @wraps(method)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return method(*arguments, **named)
        except QueueEmptyError as error:
            raise dist.QueueEmptyError(str(error)) from error
        except FscoordError as error:
            raise dist.DistStoreError(str(error)) from error

    return call


_open_stores: set[TorchStore] = set()
"""Keeps each `TorchStore` alive until it is closed."""


class TorchStore(dist.Store):
    """`store` as a real ``torch.distributed.Store``, for ``init_process_group(store=...)`` and other code of torch.

    Every error of the store is raised as a ``DistStoreError``, with the original as its ``__cause__``. So torch's own
    ``elastic.utils.store.barrier`` names the missing ranks after a timeout. `ValueError` and `OverflowError` are raised
    unchanged. A timeout of zero means no limit, as in torch. With a negative timeout an operation tries once.

    torch's C++ base class keeps the timeout. Each operation passes its present value to `store`.

    torch's C++ keeps no reference to a Python store (pytorch issue 106633), and a process group whose store has been
    collected fails at its next use. So an object of this class lives until it is closed, or the process ends.

    Args:
        store: the store, which belongs to this object from now on and is closed with it.
    """

    timeout: timedelta  # of torch's C++, whose stubs leave it out

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
        """Return the store, after setting its timeout to the timeout of the C++ base class."""
        limit = self.timeout
        if limit != self._limit:
            self._store.set_timeout(_from_torch(limit))
            self._limit = limit
        return self._store

    # -- called by C++, under its own names ----------------------------------------------------------------------------

    @_raise_torch_errors
    def set(self, key: Key, value: Value) -> None:
        """See `Store.set`."""
        self._store_with_timeout().set(key, value)

    @_raise_torch_errors
    def get(self, key: Key) -> bytes:
        """See `Store.get`."""
        return self._store_with_timeout().get(key)

    @_raise_torch_errors
    def add(self, key: Key, amount: int) -> int:
        """See `Store.add`."""
        return self._store_with_timeout().add(key, amount)

    @_raise_torch_errors
    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """See `Store.compare_set`."""
        return self._store_with_timeout().compare_set(key, expected, desired)

    @_raise_torch_errors
    def check(self, keys: Iterable[Key]) -> bool:
        """See `Store.check`."""
        return self._store_with_timeout().check(keys)

    @_raise_torch_errors
    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        """See `Store.wait`; a timeout of zero has no limit."""
        store = self._store_with_timeout()
        store.wait(keys, None if timeout is None else _from_torch(timeout))

    @_raise_torch_errors
    def delete_key(self, key: Key) -> bool:
        """See `Store.delete_key`."""
        return self._store_with_timeout().delete_key(key)

    deleteKey = delete_key  # noqa: N815 - the name that C++ calls

    @_raise_torch_errors
    def num_keys(self) -> int:
        """See `Store.num_keys`."""
        return self._store_with_timeout().num_keys()

    getNumKeys = num_keys  # noqa: N815

    @_raise_torch_errors
    def append(self, key: Key, value: Value) -> None:
        """See `Store.append`."""
        self._store_with_timeout().append(key, value)

    @_raise_torch_errors
    def multi_get(self, keys: Iterable[Key]) -> list[bytes]:
        """See `Store.multi_get`."""
        return self._store_with_timeout().multi_get(keys)

    @_raise_torch_errors
    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        """See `Store.multi_set`."""
        self._store_with_timeout().multi_set(keys, values)

    def has_extended_api(self) -> bool:
        """See `Store.has_extended_api`."""
        return self._store.has_extended_api()

    @_raise_torch_errors
    def clone(self) -> TorchStore:
        """See `Store.clone`."""
        return TorchStore(self._store_with_timeout().clone())

    # -- reachable from Python only: torch does not forward these from C++ ---------------------------------------------

    @_raise_torch_errors
    def list_keys(self, prefix: Key = "") -> list[str]:
        """See `Store.list_keys`."""
        return self._store_with_timeout().list_keys(prefix)

    @_raise_torch_errors
    def queue_push(self, key: Key, value: Value) -> None:
        """See `Store.queue_push`."""
        self._store_with_timeout().queue_push(key, value)

    @_raise_torch_errors
    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """See `Store.queue_pop`."""
        return self._store_with_timeout().queue_pop(key, block)

    @_raise_torch_errors
    def queue_len(self, key: Key) -> int:
        """See `Store.queue_len`."""
        return self._store_with_timeout().queue_len(key)

    @_raise_torch_errors
    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        """See `Store.barrier`."""
        store = self._store_with_timeout()
        store.barrier(key, world_size, None if timeout is None else _from_torch(timeout))


def _to_torch(limit: timedelta) -> timedelta:
    """Return `limit` as torch represents it. torch rounds to milliseconds, and 0 would mean no limit."""
    return _NO_LIMIT if limit == timedelta.max else max(limit, timedelta(milliseconds=1))


def _from_torch(limit: Timeout) -> Timeout:
    left = limit.total_seconds() if isinstance(limit, timedelta) else limit
    return timedelta.max if left == 0 else max(left, 0)


def rendezvous(url: str, timeout: Timeout | None = None, **_: Any) -> Iterator[tuple[TorchStore, int, int]]:
    """Yield the store at `url`, the rank and the world size. ``init_method="fscoord:///path?..."`` calls this.

    The URL is that of `open_store` with another scheme, and takes the same options in its query. Three slashes and the
    path follow the scheme, or four slashes, as torch writes it. Only the host ``localhost`` is accepted. ``rank`` and
    ``world_size`` belong to the process group, and may be given in the URL or as arguments of ``init_process_group``.

    The keys of an earlier launch would lead the ranks of the next launch to addresses without a listener. So the store
    belongs to a run: to the ``run_id`` of the URL, or else to the run that `fscoord.environment.detect` finds. If there
    is neither, a new run begins as soon as all processes of the earlier launch have ended. With an empty ``run_id=`` in
    the URL a rank joins the present run. Ranks of one run meet however late they join. A new run begins with an empty
    store. Each rank records its process under a key of the run, so that no other process takes the same rank.

    Raises:
        ValueError: rank, world size or an option is missing or invalid, the environment is invalid, or the URL names a
            host.
        StaleRunError: a later run has begun there.
        UsedBeforeError: another process has taken this rank in the same run.
        StoreError: the store can't be opened.
    """
    from urllib.parse import quote

    path, options = _path_and_options(url)
    rank, world_size = (_number(url, options, name) for name in ("rank", "world_size"))
    if not 0 <= rank < world_size:
        raise ValueError(f"{url}: rank {rank} is not one of {world_size}; ranks go from 0 to world_size - 1")
    if timeout is not None:
        options.setdefault("timeout", repr(to_seconds(timeout)))
    options.setdefault("rank", str(rank))
    told = options.pop("run_id", None)
    run_id = environment.detect().run_id if told is None else told or None
    joins = told == "" or run_id is not None
    query = "&".join(f"{quote(name, **_QUOTING)}={quote(value, **_QUOTING)}" for name, value in options.items())
    address = f"file:{quote(path, **_QUOTING)}?{query}"
    store = open_store(address, run_id=run_id if joins else _run_after_the_ended(address))
    try:
        _take_rank(url, store, rank)
    except BaseException:
        store.close()
        raise
    yield TorchStore(store), rank, world_size
    raise RuntimeError(f"{url}: this store can make one process group only; use another path for another process group")


RANKS: Final = "fscoord/torch/rank/"
"""The prefix of the keys that hold which process is which rank of the process group: ``{session} {host}:{pid}``."""


def _run_after_the_ended(address: str) -> str | None:
    """Return the id of a new run if all processes that took a rank in the present run have ended, or else None.

    All ranks of the next launch return the same id, because it is made from the sessions of the ended processes. A
    process whose state is unknown counts as alive.
    """
    try:
        with open_store(address, read_only=True) as store:
            members = {member.number: member for member in store.members()}
            processes = sorted(store.multi_get(store.list_keys(RANKS)))
    except StoreUnavailableError:  # usually no store exists yet. The caller's own opening raises any other error again
        return None
    sessions = [members.get(_session(process)) for process in processes]
    if not processes or any(member is not None and member.alive != "no" for member in sessions):
        return None
    begun = repr([processes, [member and member.since for member in sessions]])
    return f"launch-{hashlib.blake2b(begun.encode(), digest_size=8).hexdigest()}"


def _session(process: bytes) -> int:
    return int(process.partition(b" ")[0])


def _take_rank(url: str, store: Store, rank: int) -> None:
    """Record that this process is `rank` in the present run of `store`.

    A process may take its rank again, for example when it repeats a call of ``init_process_group`` that has failed.

    Raises:
        UsedBeforeError: another process has taken the rank.
    """
    number = store.register()
    (own,) = (member for member in store.members([rank]) if member.number == number)
    place = b" " + f"{own.host}:{own.pid}".encode("utf-8", "surrogateescape")
    key, process = f"{RANKS}{rank}", b"%d%s" % (number, place)
    found = store.compare_set(key, "", process)
    while found != process:
        if not found.endswith(place):
            raise _rank_is_taken(url, store, rank, found)
        found = store.compare_set(key, found, process)


def _rank_is_taken(url: str, store: Store, rank: int, process: bytes) -> UsedBeforeError:
    states = {member.number: member.alive for member in store.members()}
    ranks = sorted((int(key[len(RANKS) :]), store.get(key)) for key in store.list_keys(RANKS))
    others = ", ".join(
        f"rank {other} ({_place(taken)})" for other, taken in ranks if states.get(_session(taken), "no") != "no"
    )
    state = {"yes": "is alive", "no": "has ended", "unknown": "may be alive"}[states.get(_session(process), "no")]
    path = shell_word(getattr(store, "path", ""))
    return UsedBeforeError(
        f"{url}: rank {rank} is process {_place(process)} already, which {state}. No other process can take its place"
        f" in the same run, because other ranks may have its address. Give each launch a path or a run_id of its own"
        f" (?run_id=ID, the same for all its ranks), and let workers that a launcher restarts use env://. Or end all"
        f" ranks (not known to have ended: {others or 'none'}), and remove the store: rm -f {path} {path}.*"
    )


def _place(process: bytes) -> str:
    return printable(process.partition(b" ")[2])


_QUOTING: Any = {"errors": "surrogateescape"}


def _path_and_options(url: str) -> tuple[str, dict[str, str]]:
    """Return the path and the options of `url`, decoded.

    ``fscoord:////path`` is how torch writes an absolute path after ``fscoord:///``. torch parses a URL and joins it
    again before it calls a handler. ``urllib`` of Python 3.12 and earlier then leaves two of the four slashes, so that
    the first directory looks like a host. If that directory exists, the URL is read as such a path.
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


def _number(url: str, options: dict[str, str], name: str) -> int:
    text = options.pop(name, None)
    if text is None:
        raise ValueError(f"{url}: {name} is missing; pass it to init_process_group, or in the URL as ?{name}=...")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{url}: {name}={text} is not an integer") from None


def _register() -> None:
    try:
        register: Any = dist.register_rendezvous_handler  # which has no types
        register(SCHEME, rendezvous)
    except RuntimeError as error:  # this module was imported before, and again after it was dropped from sys.modules
        raise_if_foreign(error, "torch")


_register()
