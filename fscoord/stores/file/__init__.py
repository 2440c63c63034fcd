"""`FileStore`: the store contract on one file in a directory that the processes share."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import EllipsisType
from typing import Any, Final, TypeVar, cast

from fscoord._arguments import (
    DEFAULT_TIMEOUT,
    Key,
    Timeout,
    Transaction,
    Value,
    check_choice,
    check_int64,
    key_bytes,
    key_text,
    keys_bytes,
    not_copied,
    pairs_bytes,
    to_seconds,
    value_bytes,
)
from fscoord._log.files import safe_files
from fscoord._log.files.opening import COMPACT_BYTES, SPILL_BYTES
from fscoord._log.files.safe_files import FilePath
from fscoord._log.files.spill import Fetch
from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._log.log import SEVERAL, Decide, Log
from fscoord._log.opened import open_log_file
from fscoord._log.wakeup.watcher import MODES
from fscoord._runtime import system, tracing
from fscoord._runtime.logging import logger
from fscoord._waiting.changes import Position
from fscoord._waiting.rounds import ARRIVALS, COMPLETE
from fscoord._waiting.wait import (
    CHANGES,
    KEYS,
    ArrivalRequest,
    NeededRanks,
    NotYet,
    WaitBackend,
    WaitRequest,
    new_tuple,
)
from fscoord.errors import FscoordError, QueueEmptyError, StoreTimeoutError
from fscoord.store import Capabilities, Choose, Member, Store, kept, shown_handle
from fscoord.stores.file import lifecycle
from fscoord.stores.file.arrival import Arrival
from fscoord.stores.file.arrival_slots import ArrivalSlots
from fscoord.stores.file.changes import FileWatch
from fscoord.stores.file.death_watch import ANSWERS
from fscoord.stores.file.lifecycle import check_platform, log_options, path_argument
from fscoord.stores.file.notifier import ChangeNotifier
from fscoord.stores.file.operations import ABSENT, EQUALS, PLAIN, PRESENT, Decisions, Operation
from fscoord.stores.file.replay import KeyValueState, WitnessedState
from fscoord.stores.file.traced_wait import trace_place
from fscoord.stores.file.wait_slots import WaitSlots
from fscoord.stores.file.waits import (
    Condition,
    FileWait,
    Values,
    answer_consistent,
    condition_of,
    pop_item,
    read_consistent,
)

D = TypeVar("D")
T = TypeVar("T")

TYPICAL_CALL_S: Final = 0.001
"""The longest usual duration, in seconds, of a call that only uses the page cache."""

MEMBERS_LOCK_S: Final = 0.02
"""The longest wait of `members` and `_session_states` for the log's lock, in seconds.

Both methods need the lock to record a death. `members` also needs it to register the handle.
"""


class FileStore(Store):
    """A store in one file: an append-only log under advisory locks. Each process replays the log in its memory.

    Every process that opens the same path shares the store. There is no server. The file remains when all processes
    have ended. The design is that of torch's c10d ``FileStore``. The page "Promises" of the documentation lists the
    guarantees that go beyond those of c10d.

    Args:
        path: the path of the file: `str`, `bytes` or an `os.PathLike`. If the file is missing, it is created, but its
            directory must exist. A path with a slash at its end is refused, and so is an address, such as
            ``"file:/shared/job"``, which `~fscoord.open_store` takes. None: a private temporary file, which is removed
            when this handle is closed or its process exits.
        world_size: the number of participants, including this handle. The last participant to close the store removes
            the file. If a participant fails, the next participant that opens the store begins a new run with an empty
            store, and the handles of the earlier run raise `~fscoord.StaleRunError`. A participant fails if it is
            closed because of an exception, or if its process dies. `close`, the end of a ``with`` and the exit of the
            process close the store, but ``del`` does not. ``None`` (or -1, as in c10d): not a participant.
        file_name: another name for `path`, as in c10d.
        timeout: the default timeout of operations, in seconds or as a `timedelta`; None means 300 seconds.
        rank: the rank of this process, for messages and for `members`. A handle with a world size, a rank or a label
            registers its session when it is opened. Any other handle registers with its first write, or with its first
            wait of a second.
        label: a name for this process, for messages and for `members`.
        lock: the kind of lock: ``"ofd"`` (open-file-description locks, on Linux), ``"flock"``, or ``"soft"``, a marker
            file for mounts without advisory locks. All participants must give the same kind. If a process dies on
            another host while it holds a soft lock, a user must remove its marker.
        watch: how a wait detects writes: ``"auto"`` (by file-system events if the system has them, otherwise by polls),
            ``"inotify"`` (by events, or raise an error) or ``"poll"``. If the user has no inotify instance left, a FIFO
            beside the file reports the events.
        durable: sync the log before each operation returns, so that acknowledged writes survive a power failure. If the
            creator of the log sets this option, every handle on the log is durable, even without the option. If the
            creator does not set it, a later handle that sets it is refused.
        read_only: never write, so that no write permission is needed. Writing operations raise `~fscoord.StoreError`.
        mode: the permissions of a new file. An existing file that more users can write is refused.
        coherence: how to read the writes of other hosts: ``"direct"`` (not from a cache), ``"locked"`` (under a lock)
            or ``"local"`` (from the cache). None: the default for the mount.
        trust_locks: use the mount even if its locks are known to exclude only processes of the same host. Without this
            option such a mount is refused. Set the option only if all participants are on one host, because writers on
            two hosts would damage the log.
        compact_bytes: the size in bytes from which the log is compacted automatically, 262144 by default. ``None``
            or 0: only `compact` compacts it.
        run_id: identifies the run: a job id with a restart count, or a plain id. A new run begins with an empty store.
            Then handles of an older run raise `~fscoord.StaleRunError`. The failure of a participant does not end a run
            with an id. ``None``: the current run; for a participant, the id of the job in the environment, if there is
            one, such as Slurm's.
        spill_bytes: the size in bytes from which a value is spilled, 131072 by default. A spilled value is not kept in
            memory, but read from the file at each request. ``None`` or 0: all values are kept in memory.
        trace: the directory in which this process records the spans of all its stores from now on, for ``fscoord
            trace``. A process can record in one directory only. ``None``: the directory in the environment variable
            ``FSCOORD_TRACE``, if the variable is set.

    Raises:
        StoreUnavailableError: the file can't be opened or created. The error is raised at once, not after a time-out.
        InsecurePathError: the path is a symbolic link or not a regular file, or a user to whom `mode` gives no write
            permission owns the file or can write it.
        CorruptLogError: the file is not a log of fscoord.
        StoreTimeoutError: another process held the log's lock for the whole timeout.
        StaleRunError: a later run than `run_id` has begun.
        UsedBeforeError: another participant, whose process is alive, has this rank.
        UnsupportedFilesystemError: the platform or the file system has no locks of this kind, or mount options make
            them unreliable.
        TypeError: an argument has a wrong type, or both `path` and `file_name` are given.
        ValueError: an argument has a wrong value, `read_only` is given without a path, or the other participants have
            given another world size.
    """

    _records_waits = True
    capabilities: Capabilities = Capabilities(
        processes=True,
        hosts=True,
        durable=True,
        survives_handles=True,
        sessions=True,
        changes_conditionally=True,
        transacts=True,
        reports_changes=True,
    )

    @system.serialized_on_fake_fs
    def __init__(
        self,
        path: FilePath | None = None,
        world_size: int | None = None,
        *,
        file_name: FilePath | None = None,
        timeout: Timeout | None = None,
        rank: int | None = None,
        label: str | None = None,
        lock: str = "ofd",
        watch: str = "auto",
        durable: bool = False,
        read_only: bool = False,
        mode: int = 0o600,
        coherence: str | None = None,
        trust_locks: bool = False,
        compact_bytes: int | None = COMPACT_BYTES,
        run_id: str | tuple[str, int] | None = None,
        spill_bytes: int | None = SPILL_BYTES,
        trace: str | system.os.PathLike[str] | None = None,
    ) -> None:
        self._timeout = to_seconds(DEFAULT_TIMEOUT if timeout is None else timeout)
        path = path_argument(path, file_name, read_only=read_only)
        check_platform(lock, path)
        world_size, rank, run_id = lifecycle.check_participant(world_size, rank, run_id)
        check_choice("watch", watch, MODES)
        log: dict[str, Any] = {"lock": lock, "durable": durable, "read_only": read_only, "mode": mode}
        log |= {
            "trust_locks": trust_locks,
            "coherence": coherence,
            "compact_bytes": compact_bytes,
            "run_id": run_id,
            "spill_bytes": spill_bytes,
        }
        self._wanted = log_options({**log, "world_size": world_size}, self._timeout)
        self._options: dict[str, Any] = {**log, "watch": watch, "rank": rank, "label": label}
        if trace is not None:
            tracing.start(trace)
        self._state = (KeyValueState if tracing.recorder is None else WitnessedState)(self._wanted.spill_bytes)
        self._remove_temporary: Callable[[], object] | None = None
        if path is None:
            path, self._remove_temporary = lifecycle.temporary_file(self)
        self.path = safe_files.resolve(path)
        session = partial(lifecycle.session_record, self._options)
        make = partial(open_log_file, self.path, self._state, self._wanted, session)
        self._exceptions = lifecycle.Exceptions()
        self._log: Log = lifecycle.open_and_join_run(make, self._timeout, shows=rank is not None or bool(label))
        self._decisions = Decisions(self._state, self._log.read_locked, self.path)
        self._decide = self._decisions.decide
        self._notifier = ChangeNotifier(self._log, self._wanted, watch)
        self._notifiers: weakref.WeakSet[ChangeNotifier] = weakref.WeakSet()
        self._combiner = lifecycle.new_combiner(self._log, self._state, self._notifier.notify)
        self._notifier.slots = WaitSlots(self._log, mode)
        self._slots = ArrivalSlots(self._log, self._state, self._notifier) if self._log.shared is None else None
        self._typical_call_s = TYPICAL_CALL_S if self._log.mount.is_local else math.inf
        lifecycle.register(self, is_participant=self._wanted.world_size > 0)
        if tracing.recorder is not None:
            tracing.event("open", self.path, trace_place(self._log), rank, "label", label or "")

    def __repr__(self) -> str:
        text = f"{type(self).__name__}({self.path!r})"
        return shown_handle(text, is_closed=self not in lifecycle._open_stores)

    @property
    def place_options(self) -> dict[str, Any]:
        """The options of this store that another store on the same file system also needs. Defaults are left out."""
        given = {name: self._options[name] for name in ("lock", "coherence", "trust_locks")}
        return {name: value for name, value in given.items() if value not in (None, False, "ofd")}

    @property
    def shared_options(self) -> dict[str, Any]:
        """The options with which another process should open this store. Options at their defaults are left out.

        These are the `place_options`, and the options for writes and waits. Options of this handle, such as its rank,
        are left out. ``mode`` is also left out, because the file exists already.
        """
        usual = {"watch": "auto", "durable": False, "compact_bytes": COMPACT_BYTES, "spill_bytes": SPILL_BYTES}
        given = {name: value for name in usual if (value := self._options[name]) not in (usual[name], None)}
        return {**self.place_options, **given}

    # -- writing ---------------------------------------------------------------------------------------------------

    def set(self, key: Key, value: Value) -> None:
        name = key_bytes(key)
        if self._combiner is not None:
            self._combiner.write(Operation(record.SET, name, value_bytes(value)), self._timeout)
            return
        self._log.update(record.SET, name, value_bytes(value), None, self._timeout)
        if self._log.handle.bell:
            self._notifier.notify((name,))

    def add(self, key: Key, amount: int) -> int:
        digits = b"%d" % check_int64("amount", amount)
        total: int = self._write(new_tuple(Operation, (record.ADD, key_bytes(key), digits, b"", PLAIN, b"", 0)))
        return total

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        found: bytes = self._write(
            new_tuple(
                Operation,
                (record.COMPARE_SET, key_bytes(key), value_bytes(desired), value_bytes(expected), PLAIN, b"", 0),
            )
        )
        return found

    def create(self, key: Key, value: Value) -> bool:
        name = key_bytes(key)
        return bool(self._write(Operation(record.COMPARE_SET, name, value_bytes(value), rule=ABSENT)))

    def pop(self, key: Key) -> bytes | None:
        operation = Operation(record.DELETE, key_bytes(key), rule=PRESENT)
        value: bytes | None = self._write(operation, decide=self._decide_delete)
        return value

    def delete_key(self, key: Key, *, expected: Value | None = None) -> bool:
        operation = Operation(record.DELETE, key_bytes(key))
        if expected is not None:
            operation = operation._replace(expected=value_bytes(expected), rule=EQUALS)
        return bool(self._write(operation, decide=self._decide_delete))

    def append(self, key: Key, value: Value) -> None:
        self._write(Operation(record.APPEND, key_bytes(key), value_bytes(value)))

    def _write_within(self, limit: float, key: bytes, value: bytes, *, appends: bool) -> None:
        self._write(Operation(record.APPEND if appends else record.SET, key, value), limit)

    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        pairs = pairs_bytes(keys, values)
        if pairs:
            self._set_all(pairs)

    def _set_all(self, pairs: list[tuple[bytes, bytes]]) -> None:
        changes = record.encode_pairs(pairs)  # before the lock is taken: the record does not depend on the state
        if self._combiner is not None:
            self._write(Operation(record.MULTI_SET, b"", changes))
            return
        self._log.update(record.MULTI_SET, b"", changes, None, self._timeout)
        if self._log.handle.bell:
            self._notifier.notify([key for key, _ in pairs])

    def _transact(self, transaction: Transaction) -> bool:
        compared, present, added, deleted = transaction
        if present and not (compared or added or deleted):
            self._set_all([*present.items()])
            return True
        if self._combiner is not None:
            return bool(self._write(Operation.of(transaction)))
        done: bool = self._log.update(record.TRANSACTION, b"", transaction, self._decide_transaction, self._timeout)
        if done and self._log.handle.bell:
            self._notifier.notify([*present, *deleted, *added])
        return done

    @property
    def _decides(self) -> bool:  # type: ignore[override]
        return self._combiner is None

    def _transact_by(self, choose: Choose) -> bool:
        done: Transaction | None = self._log.update(record.TRANSACTION, b"", choose, self._decide_by, self._timeout)
        if done is not None and self._log.handle.bell:
            self._notifier.notify([*done.set, *done.add])
        return done is not None

    def queue_push(self, key: Key, value: Value) -> None:
        self._write(Operation(record.PUSH, key_bytes(key), value_bytes(value)))

    def queue_pop(self, key: Key, block: bool = True, *, timeout: Timeout | None = None) -> bytes:
        if block:
            return super().queue_pop(key, timeout=timeout)
        name = key_bytes(key)
        value = pop_item(self._log, self._state, name, self._timeout, self._write)
        if isinstance(value, NotYet):
            raise QueueEmptyError(f"queue {key_text(name)!r} is empty", path=self.path)
        return value

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, key: Key, *, default: D | EllipsisType = ..., timeout: Timeout | None = None) -> bytes | D:
        name = key_bytes(key)
        values = self._state.values
        limit = self._timeout if timeout is None else self._seconds(timeout, default)
        self._log.refresh(limit)
        value = values.get(name)
        is_current = values is self._state.values  # see `KeyValueState.reset`
        if value.__class__ is bytes and is_current:
            return value
        if value is not None and is_current:  # appended or spilled; the log was read already
            found = answer_consistent(self._log, limit, partial(self._state.get, name))
            if found is not None:
                return found
        is_missing = value is None and is_current
        if not isinstance(default, EllipsisType):
            found = None if is_missing else self._peek(name)
            return default if found is None else found
        values_of = Values(self._log, self._state, [name])
        wait: FileWait[list[bytes]] = FileWait(self._notifier, values_of, limit, has_looked=is_missing)
        return wait.block()[0]

    def _recall(self, key: bytes) -> bytes | None:
        return answer_consistent(self._log, self._timeout, partial(self._state.get, key))

    def _peek(self, key: bytes) -> bytes | None:
        return read_consistent(self._log, self._timeout, partial(self._state.get, key))

    def _peek_all(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        get = self._state.get

        def answer(fetch: Fetch) -> dict[bytes, bytes]:
            return {key: value for key in keys if (value := get(key, fetch)) is not None}

        return read_consistent(self._log, self._timeout, answer)

    def check(self, keys: Iterable[Key]) -> bool:
        names = keys_bytes(keys)
        return not self._look(self._timeout, lambda: self._state.missing(names))

    multi_get = kept(Store.multi_get)

    def num_keys(self) -> int:
        return self._look(self._timeout, lambda: len(self._state.values))

    def list_keys(self, prefix: Key = "") -> list[str]:
        start = key_bytes(prefix)
        names = self._look(self._timeout, lambda: [name for name in self._state.values if name.startswith(start)])
        return [key_text(name) for name in sorted(names)]

    def queue_len(self, key: Key) -> int:
        name = key_bytes(key)
        return self._look(self._timeout, lambda: len(self._state.queues.get(name, ())))

    # -- the handle ------------------------------------------------------------------------------------------------

    def clone(self) -> FileStore:
        """Return a new handle on the same log that is not a participant.

        Closing the new handle does not count towards `world_size`. The new handle has the rank and the label of this
        one. In a forked child that has inherited this handle, the new handle has neither, like an unpickled one.
        """
        self._log.refresh(self._timeout)  # raises if this handle is closed or dead
        twin = FileStore(self.path, timeout=self._timeout, **self._options | {"rank": None, "label": None})
        if not lifecycle.is_inherited(self):
            twin._options.update(self._options)  # the clone registers with its first write
        try:
            self._log.refresh(self._timeout)  # raises if a later run has begun, to which the clone may belong
        except BaseException:
            twin.close()
            raise
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path and the options. The unpickled handle has no rank, and is not a participant."""
        if self._remove_temporary is not None:
            raise not_copied(self, f"this store has a temporary file: pass its path {self.path!r}, or use clone()")
        options = self._options | {"rank": None, "label": None}
        return partial(FileStore, self.path, timeout=self._timeout, **options), ()

    def compact(self) -> None:
        """Replace the file of the log by a new file with only the current contents.

        The log is also compacted automatically; see ``compact_bytes``. All other handles use the new file from their
        next operation on.

        Raises:
            StoreUnavailableError: a system call failed, for example because the disk is full. The log is unchanged,
                unless ``maybe_applied`` is true.
            StoreTimeoutError: another process did not release the log's lock in time.
        """
        self._log.compact(self._timeout)

    @system.serialized_on_fake_fs
    def close(self) -> None:
        """Close the handle.

        Remove the file if this is the last of `world_size` participants to close, or if the file is temporary.
        """
        self._log.refuse_reentry()
        if not lifecycle.unregister(self, self._log):
            return
        session, reason = self._log.handle.lock.session, self._exceptions.reason()
        try:
            if self._log.handle.options.world_size:  # not in a forked child
                self._log.leave(reason, self._timeout, lifecycle.remove_side_cars)
        except FscoordError as error:
            logger(__name__).debug("closing %s: %s", self.path, error)  # if the file is left, the next run removes it
        finally:
            if self._combiner is not None:
                self._combiner.close()
            self._log.close()
            self._notifier.close(session)
            for notifier in list(self._notifiers):
                notifier.close(0)
            if self._remove_temporary is not None:
                self._remove_temporary()
            lifecycle.mark_closed(self._log)
            if tracing.recorder is not None:  # a child of multiprocessing ends without calling exit functions
                tracing.recorder.flush()

    # -- sessions and waits --------------------------------------------------------------------------------------------

    @property
    def has_liveness(self) -> bool:
        """Whether dead sessions can be detected on this platform and with the locks of this log."""
        return self._log.liveness.is_supported

    def register(self) -> int:
        number = self._log.session_if_ready
        if not number:
            self._log.refresh(self._timeout)
            number = self._log.register(self._timeout)
        return number

    def announce_rank(self, rank: int) -> None:
        log = self._log
        if rank.__class__ is int and log.has_announced(rank):
            return
        rank = check_int64("rank", rank)
        if not log.read_only:
            log.refresh(self._timeout)
            log.register(self._timeout, rank)

    def members(self, ranks: Iterable[int] | None = None) -> list[Member]:
        wanted = None if ranks is None else [check_int64("rank", rank) for rank in ranks]
        self._log.refresh(self._timeout)
        if not self._log.read_only:
            with suppress(StoreTimeoutError):  # don't fail: the caller may be looking for the holder of the lock
                self._log.register(min(self._timeout, MEMBERS_LOCK_S))
        found = self._probe_quickly(self._log.inspect(lambda: self._log.table.presumed_alive(wanted)))

        def answer() -> list[Member]:
            log = self._log
            named = set[int]().union(*(log.table.ranks.get(rank, ()) for rank in wanted or ()))
            return [
                _member(number, session, self._state_of(number, found), log.table.deaths.get(number, 0))
                for number, session in sorted(log.table.sessions.items())
                if wanted is None or number in named
            ]

        return self._log.inspect(answer)

    def _session_states(self, numbers: Iterable[int]) -> dict[int, str]:
        wanted = set(numbers)
        self._log.refresh(self._timeout)
        found = self._probe_quickly(self._log.inspect(lambda: self._log.table.presumed_alive_among(wanted)))

        def answer() -> dict[int, str]:
            known = sorted(wanted & self._log.table.sessions.keys())
            forgotten = dict.fromkeys(self._log.table.dead_sessions(wanted.difference(known)), "no")
            return {number: self._state_of(number, found) for number in known} | forgotten

        return self._log.inspect(answer)

    def _probe(self, numbers: Iterable[int], limit: float) -> dict[int, bool | None]:
        """Probe the sessions `numbers`, and record those that are dead. Return the results of the probes.

        `limit` is how long to wait for the log's lock for each death, in seconds. A read-only handle records nothing.
        """
        home, log = ProcessIdentity.find(), self._log
        found = {number: log.is_alive(number, home) for number in numbers}
        for number in [number for number, lives in found.items() if lives is False and not log.read_only]:
            if not log.record_death(number, limit):  # probed again, and alive
                found[number] = log.is_alive(number, home)
        return found

    def _probe_quickly(self, numbers: Iterable[int]) -> dict[int, bool | None]:
        """Probe as `_probe` does. Return nothing if the lock is not free soon: `_state_of` then probes again."""
        with suppress(StoreTimeoutError):
            return self._probe(numbers, min(self._timeout, MEMBERS_LOCK_S))
        return {}

    def _state_of(self, number: int, found: dict[int, bool | None]) -> str:
        """Return `Member.alive` of session `number`. `found` is a result of `_probe`. The caller holds the mutex."""
        log = self._log
        if number in log.table.deaths:
            return ANSWERS[False]
        return ANSWERS[found[number] if number in found else log.liveness.is_alive(number, ProcessIdentity.find())]

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        wanted = [check_int64("rank", rank) for rank in ranks]
        self._log.refresh(self._timeout)
        log, table = self._log, self._log.table
        self._probe(log.inspect(lambda: table.presumed_alive(wanted)), self._timeout)
        return log.inspect(lambda: table.dead_ranks(wanted))

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:
        wanted = [check_int64("session", number) for number in numbers]
        if wanted:
            self._log.refresh(self._timeout)
            table = self._log.table
            known = [number for number in wanted if number in table.sessions and number not in table.deaths]
            self._probe(known, self._timeout)
        return self._log.inspect(lambda: self._log.table.dead_sessions(wanted))

    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        self._wait(WaitRequest(KEYS, keys_bytes(keys), self._seconds(timeout)))

    def wait_alive(self, keys: Iterable[Key], ranks: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        needed = ranks if isinstance(ranks, NeededRanks) else [check_int64("rank", rank) for rank in ranks]
        return cast(list[int], self._wait(WaitRequest(KEYS, keys_bytes(keys), self._seconds(timeout), ranks=needed)))

    def wait_sessions(self, keys: Iterable[Key], numbers: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        needed = [check_int64("session", number) for number in numbers]
        return cast(list[int], self._wait(WaitRequest(KEYS, keys_bytes(keys), self._seconds(timeout), sessions=needed)))

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wait(self, request: WaitRequest) -> Any:
        return self._new_wait(request, self._notifier).block()

    def _meet(self, prefix: bytes, rank: int, world_size: int, timeout: float | None) -> object:
        if self._slots is None:
            return None
        if timeout is None:
            timeout = self._timeout
        met = self._slots.meet(prefix, rank, world_size, timeout)
        if isinstance(met, bool):
            return met or None
        begun, is_full = met
        if is_full:
            names = prefix + ARRIVALS, b"%d/%d " % (rank, world_size), prefix + COMPLETE
            request = new_tuple(ArrivalRequest, (*names, world_size, timeout, None, None, True, True, begun))
            arrival = Arrival(self._log, self._state, request, self._write, self._decide, self._slots)
            with suppress(StoreTimeoutError):  # the caller continues with an `Arrival`, which raises the error
                if arrival.decide(timeout) is None:
                    return True
        return begun

    def _arrive(self, request: ArrivalRequest) -> bytes | None:
        return self._new_arrival_wait(request, self._notifier).block()

    def _new_arrival_wait(self, request: ArrivalRequest, notifier: ChangeNotifier) -> FileWait[bytes | None]:
        arrival = Arrival(self._log, self._state, request, self._write, self._decide, self._slots)
        return FileWait(notifier, arrival, request.timeout, None, request.started)

    def _trace_place(self, key: bytes) -> tuple[str, str]:
        return trace_place(self._log), key_text(key)

    def _notifier_for(self, backend: WaitBackend, log: Log | None = None) -> ChangeNotifier:
        """Return an additional notifier for this handle. Closing the handle also ends the waits of this notifier.

        If `log` is given, the waits end at a change of any key, and read this log.
        """
        watch, watches_every_key = self._options["watch"], log is not None
        notifier = ChangeNotifier(log or self._log, self._wanted, watch, backend, watches_every_key=watches_every_key)
        notifier.slots = self._notifier.slots
        self._notifiers.add(notifier)
        return notifier

    def _new_wait(self, request: WaitRequest, notifier: ChangeNotifier) -> FileWait[Any]:
        if request.kind == CHANGES:
            return cast("FileWatch", request.watch).new_wait(notifier.backend, request.timeout)
        condition: Condition[Any] = condition_of(request, self._log, self._state, notifier, self._write)
        return FileWait(notifier, condition, request.timeout, request.slow_logger)

    def _watch(self, prefix: bytes, after: Position | None, limit: float) -> FileWatch:
        return FileWatch(self, prefix, after, limit)

    @property
    def _has_participants(self) -> bool:  # type: ignore[override]
        return self._log.table.world_size > 0

    @property
    def _shows_waits(self) -> bool:
        return type(self).wait is FileStore.wait  # otherwise a subclass has its own wait

    def _stopped_sessions(self, numbers: Iterable[int]) -> frozenset[int]:
        home, known = ProcessIdentity.find(), self._log.table.sessions
        found = [(number, known.get(number)) for number in numbers]
        return frozenset(number for number, session in found if session is not None and home.is_stopped(session))

    def _closer_look(self) -> str:
        return self._log.closer_look()

    # -- between the contract and the log --------------------------------------------------------------------------

    def _write(
        self,
        operation: Operation,
        limit: float | None = None,
        started: float | None = None,
        arm: Callable[[], None] | None = None,
        decide: Decide | None = None,
    ) -> Any:
        """Perform `operation`, notify the waiters, and return the result.

        Args:
            operation: the operation.
            limit: the timeout, in seconds; None: the store's timeout.
            started: when the caller's call began, by the monotonic clock; None: now.
            arm: a function that arms the wait for the end of the barrier, if the operation is an arrival.
            decide: computes the records to append, on a log that only this host mounts; None: `Decisions.decide`.
        """
        if self._combiner is not None:
            if arm is not None:
                arm()  # before the arrival is in the log, because another rank may end the barrier at once
            return self._combiner.write(operation, self._timeout if limit is None else limit, started)
        result = self._log.update(
            operation.kind,
            operation.key,
            operation,
            self._decide if decide is None else decide,
            self._timeout if limit is None else limit,
            arm,
        )
        if self._log.handle.bell:
            self._notify(operation, result)
        return result

    def _notify(self, operation: Operation, result: Any) -> None:
        kind, key, done = operation.kind, operation.key, operation.done
        if kind != record.POP:  # nothing waits for the end of a queue
            self._notifier.notify((key, done) if done and result.is_last else (key,))

    def _decide_delete(self, key: bytes, operation: Operation) -> tuple[Any, int, Any]:
        decided = self._decide(key, operation)
        if self._slots is not None and (decided[1] or operation.rule != EQUALS):  # even if the key is not in the log
            self._slots.clear(key)
        return decided

    def _decide_transaction(self, _: bytes, transaction: Transaction) -> tuple[bool, int, bytes]:
        decided = self._decisions.decide_transaction(transaction)
        if self._slots is not None and decided[0]:  # as in `_decide_delete`
            for name in transaction.delete:
                self._slots.clear(name)
        return decided

    def _decide_by(self, _: bytes, choose: Choose) -> tuple[Transaction | None, int, Any]:
        chosen = choose(self._decisions._get)
        if chosen is None:
            return None, 0, b""
        if len(chosen.set) == 1 and not (chosen.add or chosen.delete):  # all processes apply this record faster
            return chosen, SEVERAL, [(record.SET, *pair) for pair in chosen.set.items()]
        return chosen, *self._decide_transaction(b"", chosen)[1:]

    def _look(self, limit: float, answer: Callable[[], T]) -> T:
        """Read the new records of the log, call `answer` while no thread changes the state, and return its result."""
        result: T = self._log.refresh(limit, answer)
        return result


def _member(number: int, session: Session, alive: str, found_dead_ns: int) -> Member:
    return Member(
        number=number,
        host=session.host,
        pid=session.pid,
        rank=session.rank,
        label=session.label,
        since=session.since_ns / 1e9,
        alive=alive,
        found_dead=found_dead_ns / 1e9 if found_dead_ns else None,
    )
