"""`FscoordJournalBackend` keeps the journal of Optuna's ``JournalStorage`` in a store. It needs ``fscoord[optuna]``.

`FscoordJournalStorage` is a ``JournalStorage`` that also fails the trials of dead processes.

The backend implements ``BaseJournalBackend`` and ``BaseJournalSnapshot`` of ``optuna/storages/journal/_base.py``
(Optuna 4.7 to 5.0). The journal is a list of log entries, which are numbered from 0. Optuna appends entries, and reads
all entries from a given number on.

**Layout.** The entries are stored in *segments*, which are values of the store. The key of a segment is the number of
its first entry. One call of `~FscoordJournalBackend.append_logs` is one line, which one `Store.append` adds to the
newest segment. So a call takes effect completely or not at all, even if the process is killed.

When a segment has become long, a writer *seals* it: it appends a line that marks the end. From then on the number of
the next entry is fixed. This number is the key of the next segment, so all processes compute the same key. A line after
the seal does not count. After each append, the writer looks at the segment. If its own line is after the seal, it
appends the line again, to the next segment. Each line begins with random digits, by which its writer recognizes it.

**No entry is ever dropped.** A sealed segment is *packed*: one `Store.compare_set` replaces it by its compressed lines.
If a slow writer appends a line to the packed value, the line is ignored. Entries before a snapshot can't be dropped,
because Optuna loads the snapshot only for a new ``JournalStorage``. A storage that was pickled, and a storage whose
snapshot another version of Optuna wrote, read the journal from entry 0.

**Owners of trials.** Optuna writes the id of the worker into each entry. In a `FscoordJournalStorage` this id begins
with the number of the writer's session. So the entry that starts a trial also says which session runs the trial, and
a running trial always has an owner. Each storage finds the owners when it reads the journal.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from fscoord._arguments import Key, key_text
from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord.errors import LimitExceededError, StoreError, StoreTimeoutError, needed_extra
from fscoord.store import Store
from fscoord.stores.file import FileStore
from fscoord.stores.prefix import PrefixStore
from fscoord.stores.url import ENVIRONMENT_VARIABLE, absolute, open_store, parse_url

with needed_extra("fscoord.integrations.optuna", "optuna", "optuna"):
    from optuna import Study, __version__ as optuna_version
    from optuna.storages import JournalStorage
    from optuna.storages._heartbeat import BaseHeartbeat  # this and the next two have no other names
    from optuna.storages.journal import BaseJournalBackend
    from optuna.storages.journal._base import BaseJournalSnapshot
    from optuna.storages.journal._storage import JournalStorageReplayResult
    from optuna.trial import FrozenTrial, TrialState

__all__ = ["FscoordJournalBackend", "FscoordJournalStorage"]

SEGMENT_BYTES: Final = 64 * 1024
"""A segment is sealed when it has this many bytes, or earlier if the store's longest value is short."""

SEGMENTS_IN_VALUE: Final = 64
"""How many segments fit into the longest value of the store. `EtcdStore` rewrites a whole segment to append a line."""

NEAR: Final = 1000
"""The most entries that a reader skips one by one. To skip more entries, a reader lists the segments in the store."""

HEARTBEAT_S: Final = 24 * 3600
"""The interval at which Optuna calls `FscoordJournalStorage.record_heartbeat`, which does nothing."""

LOG: Final = "log/"
SNAPSHOT: Final = "snapshot"
SEAL: Final = b"sealed\n"
PACKED: Final = b"packed\n"

Address = str | system.os.PathLike[str]


class _Place(NamedTuple):
    """A position in the journal, between two lines.

    Attributes:
        segment: the number of the first entry of the segment.
        offset: how many bytes of the segment's lines are before the position.
        number: how many entries of the journal are before the position.
    """

    segment: int
    offset: int
    number: int


class _Segment(NamedTuple):
    """The content of a segment.

    Attributes:
        lines: the lines. Lines after `end` do not count.
        end: the length in bytes of the lines that count.
        is_sealed: whether no further line can count.
        is_packed: whether the value has the compressed form.
    """

    lines: bytes
    end: int
    is_sealed: bool
    is_packed: bool


class _Line(NamedTuple):
    """A line of the journal: the entries of one call of `append_logs`, or the reference to the next segment.

    Attributes:
        first: the number of the first entry.
        size: the number of entries; 0 for the reference to the next segment.
        text: the entries, as JSON.
        after: the position after the line.
    """

    first: int
    size: int
    text: bytes
    after: _Place


class FscoordJournalBackend(BaseJournalBackend, BaseJournalSnapshot):
    """Keeps the journal of an ``optuna.storages.JournalStorage`` in a store.

    `append_logs` is atomic: a process that is killed in the call has appended all its entries or none, and the journal
    stays readable. When the call has returned, the entries survive the death of any process and, if the store is
    durable, a power failure. All processes read the entries in the same order.

    Threads may share an object. A forked child may use the object of its parent if several processes can share the
    store. The object can be pickled if it was made from an address. The copy opens the same address, and a relative
    path still means the same file.

    Args:
        store: the store, or its address for `fscoord.open_store`; None: the address in ``FSCOORD_STORE``. `close` does
            not close a store that was passed open.
        prefix: the keys of the journal begin with this text and a slash. A store can hold several journals.
        snapshots: whether Optuna's snapshots are saved and loaded. A snapshot is a pickle, and loading a pickle
            executes the code in it. Pass False if other users can write to the store.
        options: options of the store, if `store` is an address.

    Raises:
        TypeError: `store` is neither a store nor an address, or options are given with a store.
        ValueError: the address has the option ``world_size``, with which the last participant would remove the file.
        StoreError: the store can't be opened; see the store.
    """

    def __init__(
        self, store: Store | Address | None = None, *, prefix: Key = "optuna", snapshots: bool = True, **options: Any
    ) -> None:
        self._address: Address | None = None
        if isinstance(store, Store):
            if options:
                raise TypeError(f"{', '.join(map(repr, options))}: options are for an address, not for {store!r}")
            self._store = store
        elif store is None or isinstance(store, (str, system.os.PathLike)):
            self._address = _absolute(system.os.environ.get(ENVIRONMENT_VARIABLE) if store is None else store, options)
            self._store = open_store(self._address, **options)
        else:
            raise TypeError(f"store must be a fscoord.Store or an address, not {type(store).__name__}: {store!r}")
        self._options = options
        self._prefix = prefix
        self._view = PrefixStore(prefix, self._store)
        self._has_snapshots = snapshots
        self._owner = None if self._store.capabilities.processes else system.os.getpid()
        value_max = self._store.capabilities.value_max
        self._segment_bytes = min(SEGMENT_BYTES, value_max // SEGMENTS_IN_VALUE)
        self._line_max = value_max // 2
        # The next three are caches. Each is replaced in one step, so that threads need no lock for them.
        self._place = _Place(0, 0, 0)  # where the last read ended
        self._newest_seen = -1  # the newest segment that is known to exist
        self._open = -1  # the segment for the next line, as last seen; -1: list the segments

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r}, prefix={self._prefix!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._address is None:
            raise TypeError(
                f"{self!r} was made from an open store, and can't be pickled: make it from the address of the store"
            )
        return _reopen, (self._address, self._prefix, self._has_snapshots, self._options, self._owner)

    def __enter__(self) -> FscoordJournalBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store, unless the constructor was given an open store."""
        self._view.close()
        if self._address is not None:
            self._store.close()

    # -- BaseJournalBackend --------------------------------------------------------------------------------------------

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the entries with the number `log_number_from` and higher. Only their segments are read.

        Raises:
            StoreError: the store failed, or a value of the journal was not written by this class.
        """
        for line in self._lines_from(self._place_before(log_number_from)):
            passed = max(0, log_number_from - line.first)
            if passed < line.size:
                yield from self._entries(line)[passed:]
            self._place = line.after

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append `logs` in one step.

        Raises:
            TypeError: an entry can't be written as JSON. Nothing was written.
            LimitExceededError: the entries are too long for a value of the store. Nothing was written.
            StoreError: the store failed. ``maybe_applied`` of the error says whether the entries may have been written.
            StoreTimeoutError: the store did not answer within its timeout. The error has ``maybe_applied``, too.
        """
        self._refuse_other_process()
        if not logs:
            return
        mark = system.random_bytes(8).hex().encode()
        line = b"%s %d %s\n" % (mark, len(logs), json.dumps(logs, separators=(",", ":")).encode())
        if len(line) > self._line_max:
            raise LimitExceededError(
                f"{len(logs)} entries of {len(line)} bytes are too long for {self!r}: at most {self._line_max} bytes"
                " can be appended at once; nothing was appended"
            )
        number = max(self._open, self._place.segment or -1)
        if number < 0:
            number = max(self._segments(), default=0)
        counts = False
        while not counts:
            counts, number = self._append(number, line, mark)
        self._open = number

    # -- BaseJournalSnapshot -------------------------------------------------------------------------------------------

    def save_snapshot(self, snapshot: bytes) -> None:
        """Save `snapshot`, which new storages load. An error is only logged, because no data depends on a snapshot.

        A compressed snapshot that is too long for a value of the store is such an error.
        """
        if not self._has_snapshots:
            return
        value = _snapshot_tag() + zlib.compress(snapshot, 1)
        try:
            if len(value) > self._store.capabilities.value_max:
                raise LimitExceededError(f"a snapshot of {len(value)} bytes is longer than a value of the store can be")
            self._view.set(SNAPSHOT, value)
        except (StoreError, StoreTimeoutError) as error:
            logger(__name__).warning("%r: no snapshot was saved, so storages open more slowly: %s", self, error)

    def load_snapshot(self) -> bytes | None:
        """Return the last snapshot; None if there is none, or if another version of Optuna or Python has saved it.

        Optuna could fail to load the pickle of another version. If the result is None, Optuna reads the whole journal.
        """
        tag = _snapshot_tag()
        value = self._view.get(SNAPSHOT, default=b"") if self._has_snapshots else b""
        if not value.startswith(tag):
            return None
        try:
            return zlib.decompress(value[len(tag) :])
        except zlib.error as error:
            logger(__name__).warning("%s. The whole journal is read instead: %s", self._foreign(SNAPSHOT), error)
            return None

    # -- the segments --------------------------------------------------------------------------------------------------

    def compact(self) -> int:
        """Pack the sealed segments that are not packed yet, and compact the file of a `~fscoord.FileStore`.

        A writer packs a segment as soon as the segment is sealed. So this call is useful only if a writer was killed
        before it packed a segment, or before the file is archived. No entry is dropped. Other processes may read and
        append at the same time.

        Returns:
            The number of segments that this call has packed.
        """
        self._refuse_other_process()
        packed = sum(self._pack(_key(segment)) for segment in self._segments())
        if isinstance(self._store, FileStore):
            self._store.compact()
        return packed

    def _append(self, number: int, line: bytes, mark: bytes) -> tuple[bool, int]:
        """Append `line` to the segment `number`. Return whether `line` counts, and the segment for the next line.

        A line that was appended after the seal of a segment does not count. `mark` is the beginning of `line`.
        """
        key = _key(number)
        self._view.append(key, line)
        try:
            # A `FileStore` knows the segment up to the line, which it has appended after it has read to the end. Only
            # if another process has appended the line for this one, the segment must be read from the file.
            known = self._view._recall(key.encode())
            segment, counts = self._find(key, b"" if known is None else known, mark)
            if not counts and not segment.is_sealed:
                segment, counts = self._find(key, self._view.get(key), mark)
        except (StoreError, StoreTimeoutError) as error:
            error.maybe_applied = True  # the append itself was acknowledged by the store
            raise
        if not counts and not segment.is_sealed:
            raise self._foreign(key)
        if counts and segment.end >= self._segment_bytes:
            segment = self._seal(key, segment)
        if segment.is_sealed:
            number += sum(each.size for each in self._lines_of(segment, _Place(number, 0, number)))
        return counts, number

    def _find(self, key: str, value: bytes, mark: bytes) -> tuple[_Segment, bool]:
        """Return the segment in `value`, and whether the line that begins with `mark` counts in it."""
        segment = self._decode(key, value)
        return segment, segment.lines.rfind(mark, 0, segment.end) >= 0

    def _seal(self, key: str, segment: _Segment) -> _Segment:
        """Seal, pack and return the segment `key`. A failure is only logged, because the entries are written already.

        If the process dies here, the next writer seals the segment.
        """
        try:
            if not segment.is_sealed:
                self._view.append(key, SEAL)
                segment = self._decode(key, self._view.get(key))
            self._pack(key)
        except (StoreError, StoreTimeoutError) as error:
            logger(__name__).warning("%r: a segment was not sealed and packed: %s", self, error)
        return segment

    def _pack(self, key: str) -> bool:
        """Pack the segment `key` if it is sealed and not packed. Return whether this call has packed the segment.

        If another process changes the value at the same time, the call does nothing.
        """
        value = self._view.get(key)
        segment = self._decode(key, value)
        if segment.is_packed or not segment.is_sealed:
            return False
        packed = PACKED + zlib.compress(segment.lines[: segment.end])
        return self._view.compare_set(key, value, packed) == packed

    def _segments(self) -> list[int]:
        """Return the numbers of the first entries of all segments, in their order."""
        names = self._view.list_keys(LOG)
        try:
            return [int(name.removeprefix(LOG)) for name in names]
        except ValueError as error:
            raise self._foreign(LOG) from error

    def _place_before(self, number: int) -> _Place:
        """Return a position from which a reader reaches the entry `number`."""
        place = self._place
        if place.number <= number <= place.number + NEAR:
            return place
        if place.segment <= number <= place.number:
            return _Place(place.segment, 0, place.segment)
        if number <= NEAR:
            return _Place(0, 0, 0)
        first = max((each for each in self._segments() if each <= number), default=0)
        return _Place(first, 0, first)

    def _lines_from(self, place: _Place) -> Iterator[_Line]:
        """Yield all lines from `place` on. After the last line of a segment, yield a line of size 0."""
        while True:
            key = _key(place.segment)
            if place.segment > self._newest_seen:
                if not self._view.check([key]):
                    return
                self._newest_seen = place.segment
            segment = self._decode(key, self._view.get(key), place.offset)
            for line in self._lines_of(segment, place):
                yield line
                place = line.after
            if not segment.is_sealed:
                return
            if place.number == place.segment:
                raise self._foreign(key)  # a segment is sealed because it is long
            place = _Place(place.number, 0, place.number)
            yield _Line(place.number, 0, b"", place)

    def _lines_of(self, segment: _Segment, place: _Place) -> Iterator[_Line]:
        while place.offset < segment.end:
            try:
                stop = segment.lines.index(b"\n", place.offset, segment.end)
                _, digits, text = segment.lines[place.offset : stop].split(b" ", 2)
                size = int(digits)
            except ValueError as error:
                raise self._foreign(_key(place.segment)) from error
            if size < 1:
                raise self._foreign(_key(place.segment))
            line = _Line(place.number, size, text, _Place(place.segment, stop + 1, place.number + size))
            yield line
            place = line.after

    def _entries(self, line: _Line) -> list[dict[str, Any]]:
        try:
            entries = json.loads(line.text)
        except ValueError as error:
            raise self._foreign(_key(line.after.segment)) from error
        if not isinstance(entries, list) or len(entries) != line.size:
            raise self._foreign(_key(line.after.segment))
        return entries

    def _decode(self, key: str, value: bytes, offset: int = 0) -> _Segment:
        """Decode the segment in `value`. The caller knows that there is no seal before `offset`."""
        if value.startswith(PACKED):
            # A slow writer may have appended a line to the compressed lines.
            stream = zlib.decompressobj()
            try:
                lines = stream.decompress(value[len(PACKED) :])
            except zlib.error as error:
                raise self._foreign(key) from error
            if not stream.eof:
                raise self._foreign(key)
            return _Segment(lines, len(lines), is_sealed=True, is_packed=True)
        seal = value.find(b"\n" + SEAL, max(0, offset - 1))
        return _Segment(value, len(value) if seal < 0 else seal + 1, seal >= 0, is_packed=False)

    def _foreign(self, key: str) -> StoreError:
        name = f"{key_text(self._prefix) if isinstance(self._prefix, bytes) else self._prefix}/{key}"
        return StoreError(
            f"{self._store!r}: the value of {name!r} was not written by {type(self).__name__}, or was changed by"
            " another program: give the journal a prefix of its own",
            path=getattr(self._store, "path", None),
        )

    def _refuse_other_process(self) -> None:
        """Raise `StoreError` if a forked child would write to its own copy of a store in memory."""
        if self._owner is not None and self._owner != system.os.getpid():
            raise StoreError(
                f"{self._store!r} is in the memory of process {self._owner}, and process {system.os.getpid()} would"
                " write to a copy: use a FileStore for a study of several processes"
            )


class FscoordJournalStorage(JournalStorage, BaseHeartbeat):
    """A ``JournalStorage`` in which ``study.optimize`` fails the trials of dead processes, before each of its trials.

    A trial belongs to the session of the handle that started it. When the store reports that session as dead, the next
    worker that starts a trial sets the trial to ``FAIL``. A trial of a process that is slow or stopped stays
    ``RUNNING``, because its session is alive. Trials that a plain ``JournalStorage`` started also stay ``RUNNING``.

    Args:
        backend: the journal. Its store must detect deaths.
        failed_trial_callback: called with the study and each trial that this storage has failed, for example
            ``optuna.storages.RetryHeartbeatStaleTrialCallback()``, which enqueues the trial again. If several workers
            find the same dead session, only one of them calls it for a trial.

    Raises:
        TypeError: `backend` is not a `FscoordJournalBackend`.
        StoreError: the store of `backend` can't detect deaths.
    """

    _backend: FscoordJournalBackend
    _replay_result: JournalStorageReplayResult

    def __init__(
        self,
        backend: FscoordJournalBackend,
        *,
        failed_trial_callback: Callable[[Study, FrozenTrial], None] | None = None,
    ) -> None:
        if not isinstance(backend, FscoordJournalBackend):
            raise TypeError(f"backend must be a FscoordJournalBackend, not {type(backend).__name__}: {backend!r}")
        if not backend._store.has_liveness:
            raise StoreError(
                f"{backend._store!r} can't detect the death of a process, so no trial could be failed: use a FileStore"
                " or an EtcdStore, or optuna.storages.JournalStorage in place of this class",
                path=getattr(backend._store, "path", None),
            )
        self._failed_trial_callback = failed_trial_callback
        super().__init__(backend)

    # -- BaseHeartbeat -------------------------------------------------------------------------------------------------

    def record_heartbeat(self, trial_id: int) -> None:
        """Do nothing: the lock of the session is the sign of life."""

    def get_heartbeat_interval(self) -> int:
        """Return a long interval. Optuna looks for stale trials only if the storage has an interval."""
        return HEARTBEAT_S

    def get_heartbeat_stale_trial_callback(self) -> Callable[[Study, FrozenTrial], None] | None:
        """Return `failed_trial_callback`."""
        return self._failed_trial_callback

    def get_failed_trial_callback(self) -> Callable[[Study, FrozenTrial], None] | None:
        """Return `failed_trial_callback`, for Optuna before version 4.9."""
        return self._failed_trial_callback

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        """Return the running trials of the study whose sessions are known dead.

        A process may have finished its trial after the journal was read here, and before its death. Then Optuna's call
        that fails the trial finds it finished, and changes nothing.
        """
        with self._thread_lock:
            self._sync_with_backend()
            replayed = self._replayed()
            owners = {
                trial: session
                for trial, session in replayed.owners.items()
                if replayed._trial_id_to_study_id[trial] == study_id
            }
        dead = set(self._backend._store.dead_sessions(sorted(set(owners.values()))))
        return [trial for trial, session in owners.items() if session in dead]

    # -- JournalStorage ------------------------------------------------------------------------------------------------

    def _write_log(self, op_code: int, extra_fields: dict[str, Any]) -> None:
        # Each call asks for the session, because a forked child has another session than its parent.
        self._replayed().session = self._backend._store.register()
        super()._write_log(op_code, extra_fields)

    def _sync_with_backend(self) -> None:
        self._replayed()
        super()._sync_with_backend()

    def _replayed(self) -> _Owners:
        """Return what was read of the journal.

        Optuna puts an object of its own class here when it makes or unpickles a storage, and when it loads a snapshot
        that a plain ``JournalStorage`` saved. Such an object has no owners, so the journal is read again from entry 0.
        """
        if not isinstance(self._replay_result, _Owners):
            self._replay_result = _Owners(self._worker_id_prefix)
        return self._replay_result


class _Owners(JournalStorageReplayResult):
    """The state that a storage has replayed from the journal, with the session that runs each running trial.

    Optuna pickles the object as the snapshot.

    Attributes:
        session: the session of this storage; 0 before its first write.
        owners: {trial id: session}, without the trials that a plain ``JournalStorage`` runs.
    """

    def __init__(self, worker_id_prefix: str) -> None:
        super().__init__(worker_id_prefix)
        self.session = 0
        self.owners: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A plain JournalStorage that loads the snapshot must not write in the name of the session that saved it.
        return self.__dict__ | {"session": 0}

    @property
    def worker_id(self) -> str:
        worker_id: str = super().worker_id
        return f"{self.session}/{worker_id}" if self.session else worker_id

    def _apply_create_trial(self, log: dict[str, Any]) -> None:
        trial = len(self._trials)
        super()._apply_create_trial(log)
        self._note_owner(trial, log)

    def _apply_set_trial_state_values(self, log: dict[str, Any]) -> None:
        trial = log["trial_id"]
        was_running = trial in self._trials and self._trials[trial].state == TrialState.RUNNING
        super()._apply_set_trial_state_values(log)
        # An entry that starts a running trial again came too late: another worker has taken the trial.
        if not was_running or self._trials[trial].state != TrialState.RUNNING:
            self._note_owner(trial, log)

    def _note_owner(self, trial: int, log: dict[str, Any]) -> None:
        """Record the writer of `log` as the owner of the trial if the trial runs. Otherwise the trial has no owner."""
        self.owners.pop(trial, None)
        session, _, worker = log["worker_id"].partition("/")
        if worker and session.isdecimal() and trial in self._trials and self._trials[trial].state == TrialState.RUNNING:
            self.owners[trial] = int(session)


def _key(number: int) -> str:
    return f"{LOG}{number:020}"


def _snapshot_tag() -> bytes:
    """Return the first line of a snapshot that this process can load. Its last word stands for `_Owners`."""
    return f"optuna {optuna_version}, python {sys.version_info.major}.{sys.version_info.minor}, owners\n".encode()


def _absolute(address: Address | None, options: Iterable[str]) -> Address | None:
    """Return `address` in a form that means the same in another directory.

    Raises:
        ValueError: see the constructor of `FscoordJournalBackend`.
    """
    if address is None:
        return None  # `open_store` says what is missing
    scheme, host, _, query = parse_url(address)
    if scheme != "file" or host not in ("", "localhost"):
        return address
    if "world_size" in {*query, *options}:
        raise ValueError(
            f"{address!r} has the option world_size: the last participant would remove the file, and the study with it;"
            " leave the option out"
        )
    return absolute(address)


def _reopen(
    address: Address, prefix: Key, snapshots: bool, options: dict[str, Any], owner: int | None
) -> FscoordJournalBackend:
    """Return a backend for an unpickled object. If the store is in the memory of `owner`, only `owner` can open it."""
    if owner is not None and owner != system.os.getpid():
        raise StoreError(
            f"the store {address!r} is in the memory of process {owner}, and process {system.os.getpid()} can't open"
            " it: use a FileStore for a study of several processes"
        )
    return FscoordJournalBackend(address, prefix=prefix, snapshots=snapshots, **options)
