"""Processes that share nothing but a directory find each other and agree."""

from fscoord.errors import (
    BarrierError,
    BrokenBarrierError,
    CorruptLogError,
    FscoordError,
    InsecurePathError,
    LimitExceededError,
    QueueEmptyError,
    StaleRunError,
    StoreClosedError,
    StoreError,
    StoreGoneError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnsupportedFilesystemError,
)
from fscoord.store import Store
from fscoord.stores.memory import HashStore
from fscoord.stores.prefix import PrefixStore

__version__ = "0.1.0"

__all__ = [
    # stores
    "HashStore",
    "PrefixStore",
    "Store",
    # errors
    "BarrierError",
    "BrokenBarrierError",
    "CorruptLogError",
    "FscoordError",
    "InsecurePathError",
    "LimitExceededError",
    "QueueEmptyError",
    "StaleRunError",
    "StoreClosedError",
    "StoreError",
    "StoreGoneError",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "UnsupportedFilesystemError",
    # this package
    "__version__",
]
