"""`FileWatch`: the watch of a `~fscoord.FileStore`, which reads the changes of keys from the records of the log.

A watch has a handle on the log of its own, which only reads. A handle that has read the seal of a generation continues
after the snapshot of the next generation, so a watch reads each change once. If the file of the next generation was
removed, changes are lost, and the watch raises `CompactedError`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fscoord._log.files.spill import ENDS, SpilledRecord, Spot
from fscoord._log.format import record
from fscoord._log.handle import HandleState
from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._log.log import Log
from fscoord._log.opened import open_log_file
from fscoord._waiting.awaited import CHANGE_OF
from fscoord._waiting.changes import Change, Position, Watch, change_of, compacted, refuse_later
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import NOT_YET, THREAD_BACKEND, NotYet, WaitBackend
from fscoord.stores.file.lifecycle import open_and_join_run
from fscoord.stores.file.replay import _ASSIGN, KeyValueState
from fscoord.stores.file.waits import Condition, FileWait

if TYPE_CHECKING:
    from fscoord.stores.file import FileStore

Values = dict[bytes, bytes]


def changes_of(kind: int, key: bytes, value: bytes, values: Values) -> list[tuple[bytes, bytes | None]]:
    """Return (key, new value) for each change in a record that is applied to `values`. None as the value is a deletion.

    The list also has the deletions of keys without a value. So its length does not depend on the watched keys.
    """
    if kind in _ASSIGN:
        return [(key, value)]
    if kind == record.APPEND:
        return [(key, values.get(key, b"") + value)]
    if kind in record.OF_SEVERAL_KEYS:
        return list(record.decode_changes(value))
    return [(key, None)] if kind == record.DELETE else []  # the other records are about queues


class ChangeMachine:
    """The state machine of a watch: it finds the changes that records make to the keys that begin with `prefix`.

    It does not refer to the watch, so that a watch that is dropped is freed at once, and the descriptors of its log are
    closed.

    Attributes:
        handle: the handle that reads the records. Its ``spill_at`` is `ENDS`.
        found: the position up to which changes were found. None: no change is to be found yet.
        pending: the changes that were found.
    """

    handle: HandleState

    def __init__(self, prefix: bytes, after: Position | None) -> None:
        self._prefix = prefix
        self._values: Values = {}
        self.found = after
        self.pending: deque[Change] = deque()
        nothing = KeyValueState()  # a handle that only reads makes no snapshot
        self.mark_spilled, self.snapshot, self.live_size = nothing.mark_spilled, nothing.snapshot, nothing.live_size

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        """Apply the next records."""
        values, found = self._values, self.found
        for kind, key, value, _, end in records:
            assert isinstance(value, bytes), "a watch spills no value"
            changes = changes_of(kind, key, value, values)
            # Each change of a record has a position, so that a watch can begin between two of them.
            for offset, (name, new) in enumerate(changes, end - len(changes) + 1):
                if not name.startswith(self._prefix) or (new is None and name not in values):
                    continue
                if new is None:
                    del values[name]
                else:
                    values[name] = new
                position = self.place(offset)
                # If the log applies the records of a generation again, or a snapshot, it yields no changes.
                if found is not None and position > found and position.generation == found.generation:
                    self.pending.append(change_of(name, new, position))
        if found is not None and self.handle.header.generation == found.generation:
            self.found = max(found, self.place(records[-1][4]))

    def place(self, offset: int | None = None) -> Position:
        """Return the position of `offset` in the generation that is read. None: the end of the last record."""
        header = self.handle.header
        return Position(header.generation, offset or self.handle.offset, header.log_id[:4].hex())

    def relocate_spilled(self, spots: Iterable[Spot]) -> bool:  # noqa: ARG002 - no value is spilled
        """Note that the log has followed a seal, and continues after the snapshot of the next generation."""
        self.found = self.found and self.place()
        return True

    def reset(self) -> None:
        """Discard the state, because the log is going to be read again from its first record."""
        self._values = {}


class FileWatch(Watch):
    """A watch of `store`; see `Store._watch` for the other arguments."""

    def __init__(self, store: FileStore, prefix: bytes, after: Position | None, limit: float) -> None:
        self._machine = machine = ChangeMachine(prefix, after)
        options = store._wanted._replace(read_only=True, world_size=0, spill_bytes=ENDS)

        def make() -> Log:
            log = open_log_file(store.path, machine, options, ProcessIdentity.find().session)
            machine.handle = log.handle
            return log

        self._log = open_and_join_run(make, store._timeout, shows=False)
        self._new_notifier = partial(store._notifier_for, log=self._log)
        self._notifiers = {THREAD_BACKEND: self._new_notifier(THREAD_BACKEND)}
        try:
            store._log.refresh(store._timeout)  # raises if the store is closed, or if a later run has begun
            now = self._log.inspect(machine.place)
            super().__init__(prefix, refuse_later(store.path, after, now), limit)
            self._pending = machine.pending
            machine.found = machine.found or now
            self._refuse_gap(now)
        except BaseException:
            self.close()
            raise

    def _refuse_gap(self, now: Position) -> None:
        """Raise `CompactedError` if the log is read at `now`, in a generation that does not follow the changes."""
        found = self._machine.found
        if found is not None and found._replace(offset=0) != now._replace(offset=0):
            raise compacted(self._log.path, found, now)

    def look(self, limit: float) -> bool:
        """Read the log, and return whether a change is pending. The errors are those of `Log.refresh`."""
        machine = self._machine
        machine.found = machine.found and max(machine.found, self._found)  # after an interruption of `apply`
        now = self._log.refresh(limit, machine.place)
        if not self._pending:  # otherwise a gap comes after these changes
            self._refuse_gap(now)
            self._position = machine.found or self._position
        return bool(self._pending)

    def _wait(self, limit: float) -> bool:
        return self.new_wait(THREAD_BACKEND, limit).block()

    def new_wait(self, backend: WaitBackend, limit: float) -> FileWait[bool]:
        """Return the `Wait` for the next change."""
        notifier = self._notifiers.get(backend)
        if notifier is None:
            notifier = self._notifiers[backend] = self._new_notifier(backend)
        return FileWait(notifier, _NextChange(self, self._log, self._prefix), limit)

    def close(self) -> None:
        for notifier in self._notifiers.values():
            notifier.close(0)
        super().close()


class _NextChange(Condition[bool]):
    """The condition that `watch` has found a change. The answer is True."""

    what = CHANGE_OF

    def __init__(self, watch: FileWatch, log: Log, prefix: bytes) -> None:
        self._watch, self._log, self.missing = watch, log, [prefix]

    def new_slow_logger(self, started: float) -> SlowWaitLogger:
        return self._watch._new_slow_logger(started)

    def look(self, timeout: float, *, reads: bool) -> bool | NotYet:  # noqa: ARG002 - another handle has read
        return self._watch.look(timeout) or NOT_YET
