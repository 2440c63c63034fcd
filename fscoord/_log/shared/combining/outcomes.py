"""`SharedLogWriter`: append records for several sessions. `Outcomes`: find the record that a leader has appended.

An author that receives no answer must find out whether the log has the record of its request. Any read of the handle
may return this record, even a read by another thread. So each read compares the records that it applies with the tokens
of all requests whose outcome is open.

If other hosts have compacted the log more than once, the handle reads a snapshot, which has no tokens. The snapshot
contains the time of the last record of each session (`SessionTable.times`). The times of a session's records rise. So a
request with a later time was not appended before the snapshot, and a request with exactly this time was appended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, count, repeat
from operator import add
from typing import Any, Final

from fscoord._log.files.spill import SpilledRecord
from fscoord._log.format import record
from fscoord._log.format.record import Record
from fscoord._log.handle import HandleState
from fscoord._log.recovery import APPLYING, POSITION
from fscoord._log.replay.cursor import Cursor
from fscoord._log.replay.writer import LogWriter, append_each
from fscoord._log.session_table import SessionTable
from fscoord._log.shared.combining.request import Token
from fscoord._log.state_machine import StateMachine
from fscoord._runtime import system
from fscoord._runtime.system import TIME_MAX
from fscoord.errors import StoreUnavailableError

TIMES: Final = 2
"""How many consecutive times `SharedLogWriter.next_time` reserves. An arrival at a barrier may need two records."""


class SharedLogWriter(LogWriter):
    """A `LogWriter` for a handle whose records a leader in another process may append.

    The author of an operation chooses the time of the record before it takes any lock, and several threads may choose
    times at once. A record is identified by its session and its time. So no two records of a session may have the same
    time, even if different processes append them.
    """

    def __init__(self, handle: HandleState, cursor: Cursor, write: Callable[[bytes], None]) -> None:
        super().__init__(handle, cursor, write)
        # The latest time by the clock so far, plus a counter that rises by `TIMES`. So each time is later than the time
        # before, even if the clock steps back. `next` on this chain is one C function, which neither another thread nor
        # a signal handler can interrupt.
        clamped = map(min, map(max, iter(system.time.time_ns, None), repeat(0)), repeat(TIME_MAX))
        latest = accumulate(clamped, max)
        self._times = map(add, latest, count(step=TIMES))

    def next_time(self) -> int:
        """Reserve `TIMES` consecutive times for the next records. Return the first (wall time in nanoseconds).

        Any thread may call this method, without a lock.
        """
        self.last_time = found = int(next(self._times))
        return found

    def append(self, kind: int, key: bytes, value: bytes, session: int) -> None:
        self.append_batch([(kind, key, value, session, self.next_time())])

    def append_batch(self, records: Sequence[Record]) -> None:
        """Write `records` in one write(2), and apply them. Several records must all be data records.

        In a durable log, the records are written and synced one by one. Otherwise a power failure could lose a sector
        in the middle of the batch. Sound records would follow the lost sector, and readers would report damage.

        If the write fails, or the process dies during it, the first records of the batch may be complete. The complete
        records then take effect.

        Raises:
            StoreUnavailableError: the write failed; ``maybe_applied`` is true if a record may have been written.
        """
        handle = self._handle
        if handle.root.header.durable and len(records) > 1:  # a power loss may only harm the last record
            append_each(self.append_batch, [([each],) for each in records])
            return
        parts, chain = [], handle.chain
        for kind, key, value, session, time_ns in records:
            data, chain = record.encode(kind, key, value, session, time_ns, chain)
            parts.append(data)
        data = b"".join(parts)
        try:
            self._write(data)
        except StoreUnavailableError as error:
            error.maybe_applied = error.maybe_applied or len(records) > 1
            raise
        handle.recovery = APPLYING  # as in `LogWriter.append`
        if system.os.lseek(handle.lock.fd, 0, 1) != handle.offset + len(data):  # likewise
            self._cursor.check_landing()
        system.os.lseek(handle.reader_fd, len(data), 1)
        self._cursor.apply(records, data)
        handle.offset += len(data)
        handle.chain = chain
        handle.recovery = POSITION


Note = Callable[[SpilledRecord], Any]
"""A function that gets the record of an operation, just before the record is applied. It returns the part of the state
that the result of the operation depends on."""


class Watch:
    """Watches for the record of one request.

    Attributes:
        token: identifies the record.
        note: the function to call when the record is found.
        generation: the generation in use when the watch began. The record can't be in an earlier generation.
        resets: how often the handle had discarded its state when the watch began.
        is_found: whether the record was read, or a snapshot proves that it was appended.
        noted: the result of `note`; None if only a snapshot proves that the record was appended.
    """

    def __init__(self, token: Token, note: Note, generation: int, resets: int) -> None:
        self.token = token
        self.note = note
        self.generation = generation
        self.resets = resets
        self.is_found = False
        self.noted: Any = None


class Outcomes:
    """A `StateMachine` that forwards every call to `state_machine`, and finds the record of each open `Watch`.

    The process mutex guards all methods except `open` and `close`. Any thread may call `open` and `close` at any time,
    because each of these calls is one operation on a dictionary.
    """

    def __init__(self, state_machine: StateMachine, table: SessionTable) -> None:
        self._state_machine = state_machine
        self._table = table
        self.mark_spilled, self.relocate_spilled = state_machine.mark_spilled, state_machine.relocate_spilled
        self.snapshot, self.live_size = state_machine.snapshot, state_machine.live_size
        self._open: dict[Token, Watch] = {}
        self._resets = 0

    def open(self, token: Token, note: Note, generation: int) -> Watch:
        """Begin to watch for the record with `token`. The caller publishes the request after this call."""
        watch = self._open[token] = Watch(token, note, generation, self._resets)
        return watch

    def close(self, token: Token) -> None:
        """Stop watching for the record with `token`."""
        self._open.pop(token, None)

    def settle(self, watch: Watch, generation: int) -> bool:
        """Find out whether the record of `watch` is in the log. Return whether ``watch.is_found`` is certain now.

        The caller holds the log's lock, and has read `generation` to its end. If the handle has discarded its state
        since the watch began, the handle may have skipped the record. Then the times in the snapshot decide.
        """
        if watch.is_found or watch.resets == self._resets or watch.generation == generation:
            return True
        session, time_ns = watch.token
        last = self._table.times.get(session) if self._table.has_all_times else None
        if last is None or last >= time_ns + TIMES:  # another thread of the author has written later
            return False
        watch.is_found = last >= time_ns
        return True

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        """Apply the next records. Call the note function of each watched record just before it is applied."""
        times = self._table.times
        for found in records:
            if found[4] > times.get(found[3], 0):
                times[found[3]] = found[4]
        if self._open:
            start = 0
            for index, found in enumerate(records):
                watch = self._open.get(found[3:])
                if watch is not None:
                    if index > start:
                        self._state_machine.apply(records[start:index])
                    start = index
                    watch.noted = watch.note(found)
                    watch.is_found = True
            records = records[start:] if start else records
        self._state_machine.apply(records)

    def reset(self) -> None:
        self._resets += 1
        self._state_machine.reset()
