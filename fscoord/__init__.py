"""Coordination of processes through a shared file system: stores, barriers, locks, queues.

All processes open one store, such as a file on a directory that they share::

    with fscoord.FileStore("/shared/job.store", world_size=8, rank=rank, run_id=job_id) as store:
        store.set("address", "node1:4711")
        fscoord.barrier(store, 8, "ready", rank=rank)

Stores      FileStore, HashStore, PrefixStore, TCPStore, EtcdStore; open_store(address) opens any of them.
            help(fscoord.Store) explains their operations: set, get, add, wait, queue_push and others.
Ranks       barrier, synchronize, gather, broadcast, get_all, store_timeout.
Errors      FscoordError is the base class of all; a wait that ends without success raises StoreTimeoutError.

Each of these modules is imported at its first use, such as fscoord.recipes.Lock:

recipes         Lock, RLock, ReadWriteLock, Semaphore, Election, Queue, PriorityQueue, Membership, Latch, once, ...
aio             the stores, the ranks' functions and the recipes for asyncio
barriers        barriers for programs that save checkpoints
rendezvous      nodes that come and go; launch: the launcher, which is the command fscoord run
integrations    torch, optuna, jax, dask, lightning, tooz, filelock
testing         stores that fail on demand, and a test suite for a store of your own
environment     rank, world size and run id, as the launcher gives them; preemption: all ranks stop at the same step
visibility      wait until this host sees a file of another host
status          what each process does now; events: call your function when a wait ends or a death is found
inspect         read, check, repair and copy the log of a file store

Shell: fscoord --help. A job hangs: fscoord ps PATH.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from fscoord._waiting.changes import Change, Position, Watch
from fscoord.collectives import barrier, broadcast, gather, get_all, store_timeout, synchronize
from fscoord.errors import (
    AcquireCancelledError,
    BarrierError,
    BrokenBarrierError,
    CompactedError,
    CorruptLogError,
    FscoordError,
    InsecurePathError,
    LimitExceededError,
    LockLostError,
    NoProcessGroupError,
    QueueEmptyError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExit,
    RendezvousStateError,
    RendezvousTimeoutError,
    SessionDeadError,
    StaleRunError,
    StaleTokenError,
    StoreClosedError,
    StoreError,
    StoreGoneError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnsupportedFilesystemError,
    UsedBeforeError,
    WorkFailedError,
)
from fscoord.store import Capabilities, Member, Store
from fscoord.stores.etcd import EtcdStore
from fscoord.stores.file import FileStore
from fscoord.stores.memory import HashStore
from fscoord.stores.prefix import PrefixStore
from fscoord.stores.tcp import TCPStore
from fscoord.stores.url import open_store

__version__ = "0.1.0"

_MODULES = (
    "aio barriers environment events inspect integrations launch preemption recipes rendezvous status testing"
    " visibility"
).split()
"""The public modules that `import fscoord` does not import."""


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


if not _TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Import the public module `name` at its first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        return _import_module(f"{__name__}.{name}")


__all__ = [
    # stores
    "Capabilities",
    "Change",
    "EtcdStore",
    "FileStore",
    "HashStore",
    "Member",
    "Position",
    "PrefixStore",
    "Store",
    "TCPStore",
    "Watch",
    "open_store",
    # collectives
    "barrier",
    "broadcast",
    "gather",
    "get_all",
    "store_timeout",
    "synchronize",
    # errors: the names of `errors.__all__`, repeated here because mypy reads only a list of string literals
    "AcquireCancelledError",
    "BarrierError",
    "BrokenBarrierError",
    "CompactedError",
    "CorruptLogError",
    "FscoordError",
    "InsecurePathError",
    "LimitExceededError",
    "LockLostError",
    "NoProcessGroupError",
    "QueueEmptyError",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExit",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "SessionDeadError",
    "StaleRunError",
    "StaleTokenError",
    "StoreClosedError",
    "StoreError",
    "StoreGoneError",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "UnsupportedFilesystemError",
    "UsedBeforeError",
    "WorkFailedError",
    # this package
    "__version__",
]
