"""Coordination of processes through a shared file system: stores, barriers, locks, queues."""

from fscoord.collectives import barrier, broadcast, gather, get_all, store_timeout, synchronize
from fscoord.errors import (
    BarrierError,
    BrokenBarrierError,
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

__all__ = [
    # stores
    "Capabilities",
    "EtcdStore",
    "FileStore",
    "HashStore",
    "Member",
    "PrefixStore",
    "Store",
    "TCPStore",
    "open_store",
    # collectives
    "barrier",
    "broadcast",
    "gather",
    "get_all",
    "store_timeout",
    "synchronize",
    # errors: the names of `errors.__all__`, repeated here because mypy reads only a list of string literals
    "BarrierError",
    "BrokenBarrierError",
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
