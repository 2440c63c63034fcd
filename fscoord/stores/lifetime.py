"""The beginning and the end of a `~fscoord.FileStore`: temporary files, side-cars, processes that just exit."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from fscoord import _system as system
from fscoord._log import path as paths
from fscoord._log.alive import ALIVE_SUFFIX, Home
from fscoord._log.record import Session
from fscoord.stores.waiting import BELL_SUFFIX

if TYPE_CHECKING:
    from fscoord.stores.file import FileStore

__all__ = ["begin", "end", "introduction", "remove_side_cars", "temporary_file"]

SIDE_CARS: Final = (BELL_SUFFIX, ALIVE_SUFFIX, ".lock")

_open_stores: weakref.WeakKeyDictionary[FileStore, int] = weakref.WeakKeyDictionary()
_participants: set[FileStore] = set()


def begin(store: FileStore, *, is_participant: bool) -> None:
    """`store` is open. A participant remains one, thrown away or not, until it is closed or its process exits."""
    _open_stores[store] = system.os.getpid()
    if is_participant:
        _participants.add(store)


def end(store: FileStore) -> bool:
    """`store` closes; return whether it was open."""
    _participants.discard(store)
    return _open_stores.pop(store, None) is not None


def _close_at_exit() -> None:
    for store, owner in list(_open_stores.items()):
        if owner == system.os.getpid():  # and not a forked child, whose parent goes on
            store.close()


atexit.register(_close_at_exit)


def temporary_file(store: FileStore) -> tuple[str, Callable[[], object]]:
    """Return the path of a private temporary file, and what removes it: at the latest when `store` is thrown away."""
    directory = system.make_private_directory()
    remove = weakref.finalize(store, system.remove_directory, directory, system.os, system.os.getpid())
    return system.os.path.join(directory, "store"), remove


def remove_side_cars(path: str) -> None:
    """Remove what stood beside a log that has been removed."""
    for suffix in SIDE_CARS:
        paths.unlink_quietly(path + suffix)


def introduction(options: Mapping[str, Any]) -> Session:
    """Return what a handle of this process, opened with these options, writes about itself."""
    home = Home.find()
    return Session(
        host=home.host,
        pid=system.os.getpid(),
        start_time=system.start_time(),
        boot_id=home.boot_id,
        rank=options["rank"],
        label=options["label"] or "",
        pid_space=home.pid_space,
        time_space=home.time_space,
    )
