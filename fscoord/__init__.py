"""Coordination of processes through a shared file system: stores, barriers, locks, queues."""

from fscoord import errors
from fscoord.collectives import barrier, broadcast, gather, get_all, store_timeout, synchronize
from fscoord.errors import *  # noqa: F403 - all of them, by `errors.__all__`
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
    # this package
    "__version__",
]
__all__ += errors.__all__
