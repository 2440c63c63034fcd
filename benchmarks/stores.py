"""The stores that are compared: their names, the place of each store, and how a process opens it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import fscoord

OURS = "fscoord FileStore"
OURS_GROWING = "fscoord FileStore, never compacted"
OUR_HASH = "fscoord HashStore"
ETCD = "fscoord EtcdStore"
ETCD_REREADING = "the same, read as torch's EtcdStore does"
TORCH_FILE = "torch FileStore"
TORCH_TCP = "torch TCPStore"
TORCH_HASH = "torch HashStore"

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # TCPStore warns of each time-out, which is what is measured
os.environ["RES_OPTIONS"] = "attempts:0"  # TCPStore's server asks for clients' names, and serves nobody meanwhile

LIMIT_S = 60
NO_ETCD = "there is no etcd: put one on PATH, and pip install 'fscoord[etcd]'"
NO_TORCH = "torch is not installed: pip install 'fscoord[torch]'"


@dataclass(frozen=True)
class Place:
    """The place of a store: a path, or a port of this host. With it another process opens the same store."""

    store: str
    address: str

    def open(self) -> Any:
        """Return a handle of its own on the store."""
        if self.store == OURS:
            return fscoord.FileStore(self.address, timeout=LIMIT_S)
        if self.store == OURS_GROWING:
            return fscoord.FileStore(self.address, timeout=LIMIT_S, compact_bytes=None)
        if self.store == OUR_HASH:
            return fscoord.HashStore()
        if self.store == ETCD:
            return fscoord.EtcdStore(self.address, "benchmark", timeout=LIMIT_S)
        if self.store == ETCD_REREADING:
            from benchmarks.etcd import ReReading

            return ReReading(self.address, "benchmark", timeout=LIMIT_S)
        import torch.distributed as dist

        if self.store == TORCH_FILE:
            handle = dist.FileStore(self.address, -1)
        elif self.store == TORCH_TCP:
            handle = dist.TCPStore("127.0.0.1", int(self.address), is_master=False)
        else:
            handle = dist.HashStore()
        handle.set_timeout(timedelta(seconds=LIMIT_S))
        return handle


def is_missing(store: str) -> str:
    """Return why `store` can't be measured here, or an empty text."""
    if store in (ETCD, ETCD_REREADING):
        return "" if shutil.which("etcd") and importlib.util.find_spec("urllib3") else NO_ETCD
    return NO_TORCH if store.startswith("torch") and importlib.util.find_spec("torch") is None else ""


@contextmanager
def fresh(store: str, directory: str) -> Iterator[Place]:
    """Yield a place for an empty store, with a server if the store needs one. Remove both afterwards.

    TCPStore's server is a thread of this process that runs no Python code. Meanwhile the process only waits.
    """
    if store == TORCH_TCP:
        import torch.distributed as dist

        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield Place(store, str(server.port))
        return
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory) as place:
        if store in (ETCD, ETCD_REREADING):
            from benchmarks.etcd import server

            with server(place) as address:
                yield Place(store, address)
            return
        yield Place(store, str(Path(place, "store")))
