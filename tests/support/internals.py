"""The inside of a `FileStore` for tests. Only this module names the private attributes."""

from __future__ import annotations

from fscoord import FileStore
from fscoord._log.log import Log
from fscoord._log.shared.sharing import Sharing
from fscoord._log.wakeup.watcher import ChangeWatcher
from fscoord.stores.file.notifier import ChangeNotifier
from fscoord.stores.file.replay import KeyValueState

__all__ = ["log_of", "notifier_of", "sharing_of", "state_of", "watcher_of"]


def log_of(store: FileStore) -> Log:
    """Return the handle of `store` on its log."""
    return store._log


def sharing_of(store: FileStore) -> Sharing:
    """Return what the log of `store`, on a mount that hosts share, has because of these hosts."""
    sharing = log_of(store).shared
    assert sharing is not None
    return sharing


def state_of(store: FileStore) -> KeyValueState:
    """Return the values and queues that `store` has replayed so far."""
    return store._state


def notifier_of(store: FileStore) -> ChangeNotifier:
    """Return what wakes the waiting threads of `store`."""
    return store._notifier


def watcher_of(store: FileStore) -> ChangeWatcher | None:
    """Return the watcher of the waiting threads of `store`; None while no thread has waited."""
    return notifier_of(store)._watcher
