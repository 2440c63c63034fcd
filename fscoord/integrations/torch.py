"""torch: any store of fscoord as a `torch.distributed.Store`, and ``init_method="fscoord:///path"``.

Importing this module registers the URL scheme. It needs the extra ``fscoord[torch]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from fscoord import environment
from fscoord._arguments import Timeout, to_seconds
from fscoord._runtime import system
from fscoord.errors import FscoordError, QueueEmptyError, missing_extra
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
"""What torch's file and hash stores call no limit."""


def _in_torchs_words(method: Callable[P, R]) -> Callable[P, R]:
    """Raise the errors of fscoord as torch's: its callers, such as elastic's barrier, catch those."""

    @wraps(method)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return method(*arguments, **named)
        except QueueEmptyError as error:
            raise dist.QueueEmptyError(str(error)) from error
        except FscoordError as error:
            raise dist.DistStoreError(str(error)) from error

    return call


_held: set[TorchStore] = set()


class TorchStore(dist.Store):
    """`store` as a real ``torch.distributed.Store``, for ``init_process_group(store=...)`` and all that takes one.

    A time-out is a ``DistStoreError``, so that torch's own ``elastic.utils.store.barrier`` names the missing ranks; so
    is every other error of the store, with what happened as its ``__cause__``. `ValueError` and `OverflowError` stay
    what they are. A timeout of zero means no limit, as in torch, and a negative one looks once.

    The timeout is kept by torch's C++ base; whatever it is when an operation begins is given to `store`.

    torch's C++ keeps no reference to a Python store (pytorch issue 106633), and a process group whose store has been
    collected fails at its next use. So an object of this class lives until it is closed, or the process ends.

    Args:
        store: the store; it is this object's from now on, and closed with it.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._limit = store.timeout
        self.set_timeout(_to_torch(store.timeout))
        _held.add(self)

    def __repr__(self) -> str:
        return f"TorchStore({self._store!r})"

    @property
    def underlying_store(self) -> Store:
        """The store of fscoord that this one stands for."""
        return self._store

    @property
    def host(self) -> str:
        """Where the server listens, if the underlying store has one, as a `~fscoord.TCPStore` does."""
        return self._of_server("host").host

    @property
    def port(self) -> int:
        """The server's port, likewise."""
        return self._of_server("port").port

    def _of_server(self, name: str) -> TCPStore:
        if not isinstance(self._store, TCPStore):
            raise AttributeError(f"{self!r} has no {name}: only a TCPStore has a server", name=name, obj=self)
        return self._store

    def close(self) -> None:
        """Close the underlying store, and let this object be collected: nobody may use it any more."""
        _held.discard(self)
        self._store.close()

    def _timed(self) -> Store:
        """Return the store, with the timeout that the C++ base has by now."""
        limit = self.timeout
        if limit != self._limit:
            self._store.set_timeout(_from_torch(limit))
            self._limit = limit
        return self._store

    # -- what C++ calls, by its own names --------------------------------------------------------------------------

    @_in_torchs_words
    def set(self, key: str, value: str | bytes) -> None:
        """See `Store.set`."""
        self._timed().set(key, value)

    @_in_torchs_words
    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        return self._timed().get(key)

    @_in_torchs_words
    def add(self, key: str, amount: int) -> int:
        """See `Store.add`."""
        return self._timed().add(key, amount)

    @_in_torchs_words
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See `Store.compare_set`."""
        return self._timed().compare_set(key, expected, desired)

    @_in_torchs_words
    def check(self, keys: Sequence[str]) -> bool:
        """See `Store.check`."""
        return self._timed().check(keys)

    @_in_torchs_words
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """See `Store.wait`; a timeout of zero has no limit."""
        store = self._timed()
        store.wait(keys, None if timeout is None else _from_torch(timeout))

    @_in_torchs_words
    def delete_key(self, key: str) -> bool:
        """See `Store.delete_key`."""
        return self._timed().delete_key(key)

    deleteKey = delete_key  # noqa: N815 - by this name C++ calls it

    @_in_torchs_words
    def num_keys(self) -> int:
        """See `Store.num_keys`."""
        return self._timed().num_keys()

    getNumKeys = num_keys  # noqa: N815

    @_in_torchs_words
    def append(self, key: str, value: str | bytes) -> None:
        """See `Store.append`."""
        self._timed().append(key, value)

    @_in_torchs_words
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See `Store.multi_get`."""
        return self._timed().multi_get(keys)

    @_in_torchs_words
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """See `Store.multi_set`."""
        self._timed().multi_set(keys, values)

    def has_extended_api(self) -> bool:
        """See `Store.has_extended_api`."""
        return self._store.has_extended_api()

    @_in_torchs_words
    def clone(self) -> TorchStore:
        """See `Store.clone`."""
        return TorchStore(self._timed().clone())

    # -- what only Python reaches: torch has no way from C++ to these ----------------------------------------------

    @_in_torchs_words
    def list_keys(self) -> list[str]:
        """See `Store.list_keys`."""
        return self._timed().list_keys()

    @_in_torchs_words
    def queue_push(self, key: str, value: str | bytes) -> None:
        """See `Store.queue_push`."""
        self._timed().queue_push(key, value)

    @_in_torchs_words
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """See `Store.queue_pop`."""
        return self._timed().queue_pop(key, block)

    @_in_torchs_words
    def queue_len(self, key: str) -> int:
        """See `Store.queue_len`."""
        return self._timed().queue_len(key)

    @_in_torchs_words
    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """See `Store.barrier`."""
        store = self._timed()
        store.barrier(key, world_size, None if timeout is None else _from_torch(timeout))


def _to_torch(limit: timedelta) -> timedelta:
    """Return `limit` as torch writes it; below a millisecond, its unit, it would be no limit."""
    return _NO_LIMIT if limit == timedelta.max else max(limit, timedelta(milliseconds=1))


def _from_torch(limit: Timeout) -> Timeout:
    left = limit.total_seconds() if isinstance(limit, timedelta) else limit
    return timedelta.max if left == 0 else max(left, 0)


def rendezvous(url: str, timeout: Timeout | None = None, **_: Any) -> Iterator[tuple[TorchStore, int, int]]:
    """Yield the store at `url`, the rank and the world size: what ``init_method="fscoord:///path?..."`` calls.

    The URL is that of `open_store` with another scheme, and takes the same options in its query. After the scheme stand
    three slashes and the path, or four, as torch writes it; a host is refused, unless it is ``localhost``. ``rank`` and
    ``world_size`` belong to the process group, and may be given there or as arguments of ``init_process_group``.

    The keys of a launch that was killed would lead the ranks of the next to addresses where nobody listens. So the
    store belongs to a run: to the ``run_id`` of the URL, or else to the one that `fscoord.environment.detect` finds,
    unless the URL says ``run_id=`` and no more. Ranks of one run meet however late they come; a new run begins with an
    empty store.

    Raises:
        ValueError: rank, world size or an option is missing or makes no sense, or so does the environment; or the URL
            names a host.
        StaleRunError: a later run has begun there.
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
    query = "&".join(f"{quote(name, **_QUOTING)}={quote(value, **_QUOTING)}" for name, value in options.items())
    address = f"file:{quote(path, **_QUOTING)}?{query}"
    yield TorchStore(open_store(address, run_id=run_id)), rank, world_size
    raise RuntimeError(f"{url}: a process group of this store is made once; make another with another path")


_QUOTING: Any = {"errors": "surrogateescape"}


def _path_and_options(url: str) -> tuple[str, dict[str, str]]:
    """Return the path and the options of `url`, decoded.

    ``fscoord:////path`` is torch's own way to write an absolute path behind ``fscoord:///``. Before torch calls a
    handler it takes the URL apart and puts it together again, and then ``urllib`` of Python 3.12 and before leaves two
    of the four slashes: as if the first directory were a host. If the file's directory is there, that was meant.
    """
    from urllib.parse import urlsplit, urlunsplit

    _, host, path, options = urls._parse(url)
    if host not in ("", "localhost"):
        four = f"{SCHEME}:////{host}{path}"
        is_ambiguous = urlunsplit(urlsplit(four)) != four
        if not (is_ambiguous and path.strip("/") and system.os.path.isdir(system.os.path.dirname(f"/{host}{path}"))):
            raise ValueError(
                f"{url} names the host {host!r}, and a store is a file of this one;"
                f" an absolute path has three slashes: {SCHEME}:///path"
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
        raise ValueError(f"{url}: {name}={text} is no integer") from None


def _register() -> None:
    try:
        dist.register_rendezvous_handler(SCHEME, rendezvous)
    except RuntimeError:  # this module was imported before, and again after it was dropped from sys.modules
        pass


_register()
