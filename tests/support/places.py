"""Where the contract suite runs: every kind of store, and more handles, threads and processes on one of them."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
from contract.opening import open_file
from support.etcd_server import Server
from support.internals import watcher_of

from fscoord.errors import StoreError, StoreTimeoutError
from fscoord.store import Store
from fscoord.stores.memory import HashStore
from fscoord.stores.prefix import PrefixStore
from fscoord.testing.contract.place import HANG_S, Place as AnyPlace, Thread, start_thread, state, until

__all__ = [
    "HANG_S",
    "KINDS",
    "Place",
    "Thread",
    "open_tcp",
    "start_thread",
    "state",
    "until",
    "wait_in_vain",
]

FILE_KINDS = ["file-ofd", "file-flock", "file-soft", "short file-ofd", "nested-file"]
"""A short file is compacted whenever there is the least to gain, and all its values but empty ones are left in it.

A nested one is a view of a view: the outer view is on a view, and the inner one on the store.
"""
HASH_KINDS = ["hash", "nested-hash"]
TCP_KINDS = ["tcp", "prefix-tcp"]
LEFT_TO_THE_COLLECTOR = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)
"""A Ctrl-C between two steps of urllib3 leaves a socket to Python's collector, which closes it and says so. That it is
closed, every test looks (`_nothing_leaks`)."""
ETCD, PREFIX_ETCD = (
    pytest.param(kind, marks=[pytest.mark.etcd, LEFT_TO_THE_COLLECTOR]) for kind in ("etcd", "prefix-etcd")
)
KINDS = [
    *HASH_KINDS,
    *FILE_KINDS,
    *(pytest.param(kind, marks=pytest.mark.torch) for kind in TCP_KINDS),
    *(ETCD, PREFIX_ETCD),
]
_numbers = itertools.count()
PREFIXES = {"prefix": ["job"], "nested": ["job", "a/b"]}


def open_tcp() -> Store:
    from fscoord.stores.tcp import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False)


etcd: list[Server] = []
"""The server of this session, if etcd is among the kinds; see `shared_etcd`."""


def open_etcd(place: int) -> Store:
    return etcd[0].open(f"place{place}", HANG_S)


class Place(AnyPlace):
    """One store of some kind, and the handles on it that a test opens."""

    def __init__(self, kind: str, directory: str) -> None:
        self.kind = kind
        family, _, rest = kind.partition("-")
        self.prefixes = PREFIXES.get(family, [])
        self.is_file = "file" in kind
        self.number = next(_numbers)
        self.is_etcd = "etcd" in kind
        self.is_server = "tcp" in kind
        """Whether all ends with the first handle, and keys that are no UTF-8 can't be listed."""
        self.path = os.path.join(directory, "store")
        self.is_short = family == "short file"
        self.lock = rest if family.endswith("file") else "ofd"
        self._opened: list[Store] = []
        if self.is_file:
            self.base = self._keep(open_file(self.path, self.lock, HANG_S, is_short=self.is_short))
        elif self.is_etcd:
            self.base = self._keep(open_etcd(self.number))
        elif self.is_server:
            self.base = self._keep(open_tcp())
        else:
            self.base = self._keep(HashStore(timeout=HANG_S))
        if self.prefixes:  # neighbours that nobody must see
            self.base.multi_set(["x", "job", "jobx", "job0/x", "a/b/x"], ["1", "2", "3", "4", "5"])
            try:
                self.base.queue_push("q", "neighbour")
            except StoreError as error:
                if "server of torch keeps no queues" not in str(error):
                    raise

    def _keep(self, store: Store) -> Store:
        self._opened.append(store)
        return store

    def open(self, timeout: float = HANG_S, how: str = "path") -> Store:
        """Open another handle: by the path, where there is one, or as a clone."""
        if self.is_file and how == "path":
            store = self._keep(open_file(self.path, self.lock, HANG_S, is_short=self.is_short))
        elif self.is_etcd and how == "path":
            store = self._keep(open_etcd(self.number))
        else:
            store = self._keep(self.base.clone())
        for prefix in self.prefixes:
            store = PrefixStore(prefix, store)
        store.set_timeout(timeout)
        return store

    def close_newest(self) -> None:
        """Close the handle that was opened last. A view on it, which a test gets, leaves it open."""
        self._opened[-1].close()

    def full(self, key: str) -> str:
        """Return the name that `key` has in errors."""
        return "/".join([*self.prefixes, key])

    def spec(self) -> dict[str, Any]:
        """Return what a process needs to open a handle of its own."""
        assert self.is_file
        return {"path": self.path, "lock": self.lock, "prefixes": self.prefixes, "is_short": self.is_short}


def wait_in_vain(store: Any) -> None:
    """Wait for what never comes until a file store listens: on a busy machine a short time is over before it does."""
    limit = 0.01
    while True:
        with pytest.raises(StoreTimeoutError):
            store.wait(["never"], limit)
        watch = watcher_of(store)
        if watch is not None and watch.is_announced and not watch.is_closed:  # as a parent's is in its forked child
            return
        assert limit < HANG_S
        limit *= 2
