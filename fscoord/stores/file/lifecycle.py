"""Opens and closes a `~fscoord.FileStore`: its arguments, joining a run, temporary files, the exit of the process."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from fscoord._arguments import check_choice, check_int64, check_positive
from fscoord._log.files import safe_files
from fscoord._log.files.opening import LogOptions
from fscoord._log.files.safe_files import FilePath
from fscoord._log.format.control_records import Session
from fscoord._log.format.header import parse_run_id
from fscoord._log.liveness.liveness_file import LIVENESS_SUFFIX, ProcessIdentity
from fscoord._log.locking.log_lock import KINDS, no_ofd_locks
from fscoord._log.log import Log
from fscoord._log.mount import COHERENCES
from fscoord._log.wakeup.doorbell import FIFO_SUFFIX
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import FscoordError, StoreGoneError, UnsupportedFilesystemError
from fscoord.stores.file.notifier import BELL_SUFFIX
from fscoord.stores.file.operations import KeyValueDecider
from fscoord.stores.file.replay import KeyValueState
from fscoord.stores.file.wait_slots import WAITS_SUFFIX

if TYPE_CHECKING:
    from fscoord._log.shared.combining.combiner import Combiner
    from fscoord.stores.file import FileStore

SIDE_CARS: Final = (BELL_SUFFIX, BELL_SUFFIX + FIFO_SUFFIX, LIVENESS_SUFFIX, WAITS_SUFFIX)
ATTEMPTS: Final = 20
"""The maximum number of tries to open a log. A try fails if the log is removed during the try, or if a file of the log
is missing.
"""

_open_stores: weakref.WeakKeyDictionary[FileStore, int] = weakref.WeakKeyDictionary()
_ending: set[int] = set()  # the ids of the processes, this one or its parents, that have called `at_end_of_child`
_participants: set[FileStore] = set()
_closing: weakref.WeakSet[Log] = weakref.WeakSet()


def check_platform(lock: str, path: FilePath | None) -> None:
    """Check that the platform has locks of the kind `lock`. Call it before the file `path` is created.

    Raises:
        UnsupportedFilesystemError: the platform has no advisory locks, or no locks of this kind.
    """
    if system.fcntl is None:
        raise UnsupportedFilesystemError(
            f"FileStore needs the advisory locks of a POSIX system, which {system.platform()!r} does not have; use"
            " HashStore in one process, and TCPStore or EtcdStore between processes"
        )
    if lock == "ofd" and not system.has_ofd_locks():
        raise no_ofd_locks("a temporary file" if path is None else system.os.fsdecode(path))


_ADDRESSES: Final = ("file:", "tcp:", "etcd:", "mem:")


def path_argument(path: FilePath | None, file_name: FilePath | None, *, read_only: bool) -> FilePath | None:
    """Return the argument that is given, `path` or `file_name`. Return None if the store is a temporary file.

    Raises:
        TypeError: both `path` and `file_name` are given.
        ValueError: a read-only store has neither a `path` nor a `file_name`. Or the argument is a `str` with the
            address of a store: a process that opens this address would have another store.
    """
    if path is not None and file_name is not None:
        raise TypeError("path and file_name are two names for one argument; pass one")
    if read_only and path is None and file_name is None:
        raise ValueError("a read-only store needs a path; pass the path of an existing store")
    given = file_name if path is None else path
    if isinstance(given, str) and given.startswith(_ADDRESSES):
        raise ValueError(f"{given!r} is an address: pass it to open_store; the file with this name is ./{given}")
    return given


def check_participant(world_size: int | None, rank: int | None, run_id: Any) -> tuple[int, int | None, Any]:
    """Check the arguments of a participant. Return the world size (0: not a participant), the rank and the run id.

    If a participant gives no `run_id`, the run id is the id of the job in the environment, if there is a job.

    Raises:
        ValueError: the rank is negative, or not below `world_size`.
    """
    size = 0 if world_size in (None, -1) else check_positive("world_size", world_size)
    rank = None if rank is None else check_int64("rank", rank)
    if rank is not None and (rank < 0 or 0 < size <= rank):
        among = f"0 to {size - 1}, because world_size is {size}" if size else "not negative"
        raise ValueError(f"rank is {rank}, but ranks are {among}; pass the rank of this process, counted from 0")
    if size and run_id is None:  # imported here, because few programs need its dataclasses, which load slowly
        run_id = system.import_uninterrupted("fscoord.environment").find_job()
    return size, rank, run_id


_DECIMAL_MODES: Final = {f"{owner}{group}{others}" for owner in "67" for group in "0246" for others in "0246"}
"""Decimal numbers, such as ``600``, that were probably meant as octal modes."""


def log_options(options: Mapping[str, Any], limit: float) -> LogOptions:
    """Check the `options` of a `~fscoord.FileStore`, and convert them to options of the log.

    Raises:
        ValueError: the kind of lock, the coherence or the mode is invalid, or a size is below 1.
        TypeError: a size is not an integer.
    """
    lock, coherence, run = options["lock"], options["coherence"], parse_run_id(options["run_id"])
    durable, read_only, mode = options["durable"], options["read_only"], options["mode"]
    world_size = 0 if read_only else options["world_size"]
    compact, spill = options["compact_bytes"], options["spill_bytes"]
    if not isinstance(mode, int) or mode & ~0o777 or mode & 0o600 != 0o600:
        meant = f"; did you mean 0o{mode}?" if str(mode) in _DECIMAL_MODES else ""
        shown = f"{mode} (0o{mode:o})" if isinstance(mode, int) and mode >= 0 else repr(mode)
        raise ValueError(f"mode is {shown}, but must be permissions with which the owner can read and write{meant}")
    check_choice("lock", lock, KINDS)
    if coherence is not None:
        check_choice("coherence", coherence, COHERENCES)
    compact = 0 if compact in (None, 0) else check_positive("compact_bytes", compact)
    spill = 0 if spill in (None, 0) else check_positive("spill_bytes", spill)
    spill = 0 if system.is_fake_fs() else spill
    log = LogOptions(KINDS[lock], durable, read_only, mode, limit, coherence, compact, run, spill)
    return log._replace(trust_locks=options["trust_locks"], world_size=world_size)


def register(store: FileStore, *, is_participant: bool) -> None:
    """Close `store` when the process exits. If `store` is a participant, keep a reference to it until the exit."""
    _open_stores[store] = system.os.getpid()
    if is_participant:
        _participants.add(store)
    if _open_stores[store] not in _ending:
        _ending.add(_open_stores[store])
        system.at_end_of_child(_close_at_exit)


def is_inherited(store: FileStore) -> bool:
    """Return whether a parent of this process opened `store`, and this process is a forked child."""
    return _open_stores.get(store) not in (None, system.os.getpid())


def unregister(store: FileStore, log: Log) -> bool:
    """Begin to close `store`. Return whether it was open. If so, the caller must close `log` and call `mark_closed`."""
    _participants.discard(store)
    _closing.add(log)
    if _open_stores.pop(store, None) is not None:
        return True
    _closing.discard(log)
    return False


def mark_closed(log: Log) -> None:
    """Record that the caller of `unregister` has closed `log`."""
    _closing.discard(log)


def _after_fork_in_child() -> None:
    """Close the logs that other threads of the parent were closing, because these threads don't exist in the child."""
    for log in list(_closing):
        log.be_closed_by_fork()
    _closing.clear()


system.after_fork_in_child("stores", _after_fork_in_child)


def _close_at_exit() -> None:
    system.exiting.append(system.os.getpid())
    for store, owner in list(_open_stores.items()):
        if owner == system.os.getpid():  # not in a forked child: its parent continues
            store.close()


# Exit functions run in the reverse order. `weakref` registers the function that runs all finalizers when the first
# finalizer is created. Create one now, so that finalizers remove temporary files only after the stores are closed.
weakref.finalize(_close_at_exit, int)
atexit.register(_close_at_exit)


class Exceptions:
    """Finds the exception because of which a participant is closed.

    An exception that was handled when the participant was opened does not count. Only the id of such an exception is
    kept, because a reference would keep the frames of its traceback alive.
    """

    def __init__(self) -> None:
        self._known = {id(sys.exc_info()[1]), id(getattr(sys, "last_value", None))}

    def reason(self) -> str:
        """Return the name of the exception because of which the participant is closed, or "" if there is none.

        The exception is the one that is handled at this moment, for example in a ``with``, ``finally`` or ``except``.
        At the exit of the process, the exception is the one that has ended the main thread. GeneratorExit, and
        SystemExit without an error code, are not failures.
        """
        for error in (sys.exc_info()[1], getattr(sys, "last_value", None) if system.exiting else None):
            is_plain = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)
            if error is not None and not is_plain and id(error) not in self._known:
                return type(error).__name__
        return ""


def temporary_file(store: FileStore) -> tuple[str, Callable[[], object]]:
    """Return the path of a private temporary file, and a function that removes the file.

    When `store` is garbage-collected, the function is called automatically.
    """
    directory = system.make_private_directory()
    remove = weakref.finalize(store, system.remove_directory, directory, system.os, system.os.getpid())
    return system.os.path.join(directory, "store"), remove


def remove_side_cars(path: str) -> None:
    """Remove the files beside the log at `path`, except the marker of a soft lock, which the lock removes itself."""
    for suffix in SIDE_CARS:
        safe_files.unlink_quietly(path + suffix)


def open_and_join_run(make: Callable[[], Log], limit: float, *, shows: bool) -> Log:
    """Open a log with `make`, join its run (see `Log.join_run`), and return the log.

    If the log is removed before the handle has joined a run, open the next log at the same path. The caller notices no
    difference, because the handle has read no data from the first log.
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
    assert log is not None, "the loop ends with a log or an error"
    return log


def new_combiner(log: Log, state: KeyValueState, notify: Callable[[Iterable[bytes]], None]) -> Combiner | None:
    """Return the combiner, which combines the writes of this handle and of other processes on its host, or None.

    The result None means that the handle appends its own writes, as on every log that only one host uses.
    """
    outcomes = None if log.shared is None else log.shared.outcomes
    if outcomes is None:
        return None
    try:
        combining = system.import_uninterrupted("fscoord._log.shared.combining.combiner")
    except (OSError, ImportError) as error:  # no descriptor or thread is left
        raise_if_foreign(error)
        return None
    decider = KeyValueDecider(state, log.read_locked, log.read_unlocked, log.path)
    made: Combiner = combining.Combiner(log, decider, notify, outcomes)
    return made


def session_record(options: Mapping[str, Any]) -> Session:
    """Return the session record for a handle that this process opens with `options`."""
    return ProcessIdentity.find().session(options["rank"], options["label"] or "")
