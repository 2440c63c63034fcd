"""`FileChanges`: the changes of the keys of a `~fscoord.FileStore`, which a watch reads from the records of the log.

A watch has a handle on the log of its own, which only reads. A handle that has read the seal of a generation continues
after the snapshot of the next generation, so a watch reads each change once. If the file of the next generation was
removed, changes are lost, and the watch raises `CompactedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from fscoord._log.files.opening import LogOptions
from fscoord._log.files.spill import Fetch, SpilledRecord, Spot
from fscoord._log.format import record
from fscoord._log.handle import HandleState
from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._log.log import Log
from fscoord._log.opened import open_log_file
from fscoord._waiting.changes import CHANGE_OF, Changes, Position, compacted, foreign
from fscoord._waiting.wait import NOT_YET, THREAD_BACKEND, NotYet, WaitBackend
from fscoord.stores.file.lifecycle import open_and_join_run
from fscoord.stores.file.notifier import ChangeNotifier
from fscoord.stores.file.replay import _ASSIGN
from fscoord.stores.file.waits import Condition, FileWait

Values = dict[bytes, bytes]


def changes_of(kind: int, key: bytes, value: bytes, values: Values) -> list[tuple[bytes, bytes | None]]:
    """Return (key, new value) for each change that a record makes to `values`; None as the value is a deletion."""
    if kind in _ASSIGN:
        return [(key, value)]
    if kind == record.APPEND:
        return [(key, values.get(key, b"") + value)]
    if kind == record.MULTI_SET:
        return [*record.decode_pairs(value)]
    return [(key, None)] if kind == record.DELETE and key in values else []  # the other records are about queues


class ChangeMachine:
    """The state machine of a watch: it adds the changes that records make to `changes`.

    Attributes:
        handle: the handle that reads the records. Its ``spill_at`` is `ENDS`.
        seen: the position up to which the changes were found. None: no change is to be found yet.
    """

    handle: HandleState

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._values: Values = {}
        self.seen = changes.position

    def place(self, offset: int) -> Position:
        """Return the position of `offset` in the generation that is being read."""
        header = self.handle.header
        return Position(header.generation, offset, header.log_id[:4].hex())

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        values, prefix = self._values, self._changes.prefix
        # After an interruption the log applies all records of the generation again, so the changes tell what was found.
        seen = self.seen and max(self.seen, self._changes.found)
        for kind, key, value, _, end in records:
            assert isinstance(value, bytes), "a watch spills no value"
            found = changes_of(kind, key, value, values)
            # Each change of a record has a position, so that a watch can begin between two of them.
            for offset, (name, new) in enumerate(found, end - len(found) + 1):
                if not name.startswith(prefix):
                    continue
                if new is None:
                    del values[name]
                else:
                    values[name] = new
                position = self.place(offset)
                if seen is not None and position > seen and position.generation == seen.generation:
                    self._changes.add(name, new, position)
        if seen is not None and records:
            last = self.place(records[-1][4])
            self.seen = max(seen, last) if last.generation == seen.generation else seen

    def mark_spilled(self, keys: set[bytes]) -> None:
        """Do nothing: no value is spilled."""

    def relocate_spilled(self, spots: Iterable[Spot]) -> bool:  # noqa: ARG002 - no value is spilled
        """Note that the log has followed a seal, and continues after the snapshot of the next generation."""
        if self.seen is not None:
            self.seen = self.place(self.handle.offset)
        return True

    def reset(self) -> None:
        self._values = {}

    def snapshot(self, fetch: Fetch) -> Iterator[tuple[int, bytes, bytes]]:
        """Raise an error: a handle that only reads makes no snapshot."""
        raise NotImplementedError(fetch)

    def live_size(self) -> int:
        return sum(map(len, self._values.values()))


class FileChanges(Changes):
    """The changes in the log at `path`.

    Args:
        path: the path of the log.
        prefix: the beginning of the watched keys.
        after: the position after which the watch begins; None: now.
        options: the options of the handle that reads the log.
        limit: how long a read waits for the log's lock if it needs the lock, in seconds.
        new_notifier: `Sessions._new_notifier`.
    """

    def __init__(
        self,
        path: str,
        prefix: bytes,
        after: Position | None,
        options: LogOptions,
        limit: float,
        new_notifier: Callable[..., ChangeNotifier],
    ) -> None:
        super().__init__(prefix, after)
        self._machine = machine = ChangeMachine(self)

        def make() -> Log:
            log = open_log_file(path, machine, options, ProcessIdentity.find().session)
            machine.handle = log.handle
            return log

        self.log = open_and_join_run(make, limit, shows=False)
        self._new_notifier = partial(new_notifier, log=self.log)
        self._notifiers = {THREAD_BACKEND: self._new_notifier(THREAD_BACKEND)}
        now = self.log.inspect(lambda: machine.place(self.log.handle.offset))
        if after is None:
            self.position = machine.seen = now
        try:
            self.check(now)
            if after is not None and after > now:
                raise foreign(path, after, now)
        except BaseException:
            self.close()
            raise

    def check(self, now: Position) -> None:
        """Raise `CompactedError` if the log is read at `now`, in a generation that does not follow the changes."""
        seen = self._machine.seen
        if seen is not None and (seen.generation, seen.log) != (now.generation, now.log) and seen < now:
            raise compacted(self.log.path, seen, now)

    def read(self, limit: float) -> bool:
        """Find the new changes, and return whether a change is pending. The errors are those of `Log.refresh`."""
        self.check(self.log.refresh(limit, lambda: self._machine.place(self.log.handle.offset)))
        if not self.pending:
            self.position = self._machine.seen
        return bool(self.pending)

    def wait(self, limit: float) -> bool:
        return self.new_wait(THREAD_BACKEND, limit).block()

    def new_wait(self, backend: WaitBackend, limit: float) -> FileWait[bool]:
        """Return the `Wait` for the next change."""
        notifier = self._notifiers.get(backend)
        if notifier is None:
            notifier = self._notifiers[backend] = self._new_notifier(backend)
        return FileWait(notifier, _NextChange(self), limit)

    def close(self) -> None:
        for notifier in self._notifiers.values():
            notifier.close(0)


class _NextChange(Condition[bool]):
    """The condition that a change is pending. The answer is True."""

    what = CHANGE_OF
    is_logged = False

    def __init__(self, changes: FileChanges) -> None:
        self._changes, self._log = changes, changes.log
        self.missing = [changes.prefix]

    def look(self, timeout: float, *, reads: bool) -> bool | NotYet:  # noqa: ARG002 - another handle has read
        return self._changes.read(timeout) or NOT_YET
