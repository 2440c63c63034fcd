"""The beginning and the end of a `~fscoord.FileStore`: temporary files, side-cars, processes that just exit."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from fscoord._log.format.control_records import Session
from fscoord._log.io import safe_files
from fscoord._log.liveness.liveness_file import LIVENESS_SUFFIX, ProcessIdentity
from fscoord._log.log import Log
from fscoord._runtime import system
from fscoord.errors import FscoordError, StoreGoneError
from fscoord.stores.file.notifier import BELL_SUFFIX

if TYPE_CHECKING:
    from fscoord.stores.file import FileStore

__all__ = ["begin", "end", "ended", "introduction", "open_joined", "remove_side_cars", "temporary_file"]

SIDE_CARS: Final = (BELL_SUFFIX, LIVENESS_SUFFIX)
ATTEMPTS: Final = 20
"""How often a log may be removed while it is opened. One that has lost a generation is as often found wanting."""

_open_stores: weakref.WeakKeyDictionary[FileStore, int] = weakref.WeakKeyDictionary()
_participants: set[FileStore] = set()
_closing: weakref.WeakSet[FileStore] = weakref.WeakSet()


def begin(store: FileStore, *, is_participant: bool) -> None:
    """`store` is open. A participant remains one, thrown away or not, until it is closed or its process exits."""
    _open_stores[store] = system.os.getpid()
    if is_participant:
        _participants.add(store)


def end(store: FileStore) -> bool:
    """`store` closes; return whether it was open. If it was, the caller goes on to close its log."""
    _participants.discard(store)
    _closing.add(store)
    if _open_stores.pop(store, None) is not None:
        return True
    _closing.discard(store)
    return False


def ended(store: FileStore) -> None:
    """`store` is closed."""
    _closing.discard(store)


def _after_fork_in_child() -> None:
    """What a thread of the parent was closing is closed here: nobody else can do it any more."""
    for store in list(_closing):
        store._log.be_closed_by_fork()
    _closing.clear()


system.after_fork_in_child("stores", _after_fork_in_child)


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
    """Remove what stands beside a log that is being removed; the marker of a soft lock goes with the lock."""
    for suffix in SIDE_CARS:
        safe_files.unlink_quietly(path + suffix)


def open_joined(make: Callable[[], Log], limit: float, *, shows: bool) -> Log:
    """Return the log that `make` opens, in the run and life that it is to be used in; see `Log.join_run`.

    Should it end, and be removed, meanwhile, there is another: until it is joined nobody has seen anything of it.
    """
    for attempt in range(1, ATTEMPTS + 1):
        log: Log | None = None
        try:
            log = make()
            log.refresh(limit)
            log.join_run(limit, shows=shows)
            break
        except FscoordError as error:
            if log is not None:
                log.close()
            if attempt == ATTEMPTS or not isinstance(error, StoreGoneError):
                raise
    assert log is not None, "it was opened, or there was an error"
    return log


def introduction(options: Mapping[str, Any]) -> Session:
    """Return what a handle of this process, opened with these options, writes about itself."""
    home = ProcessIdentity.find()
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
