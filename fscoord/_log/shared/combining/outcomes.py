"""`Outcomes`: recognises the records of pending requests when the handle reads them.

An author that receives no answer looks for the record of its request. Any read of the handle may meet this record, also
the read of another thread. So every read compares the records that it applies with the open tokens.

If other hosts have compacted the log more than once, a handle begins again with a snapshot, which has no tokens. The
snapshot gives the time of the last record of each session (`SessionTable.times`). The times of a session rise. So a
request with a later time was not appended before the snapshot, and a request with exactly that time was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fscoord._log.files.spill import SpilledRecord
from fscoord._log.replay.writer import TIMES
from fscoord._log.session_table import SessionTable
from fscoord._log.shared.combining.request import Token
from fscoord._log.state_machine import StateMachine

Note = Callable[[SpilledRecord], Any]
"""Returns what the result of an operation depends on, given its record, which is about to be applied."""


class Watch:
    """Watches for the record of one request.

    Attributes:
        token: identifies the record.
        generation: the generation that the handle was in when the watch began. The record can't be in an earlier
            generation.
        resets: how often the handle had discarded its state when the watch began.
        is_found: whether the record was read, or is known to be before a snapshot that was read.
        noted: the result of the note function; None if the record is before a snapshot.
    """

    def __init__(self, token: Token, note: Note, generation: int, resets: int) -> None:
        self.token = token
        self.note = note
        self.generation = generation
        self.resets = resets
        self.is_found = False
        self.noted: Any = None


class Outcomes:
    """Passes every call on to `state_machine`, and recognises the records with open tokens.

    The process mutex guards every method but `open` and `close`, which other threads call at any time. Each of these
    is one operation on a dictionary.
    """

    def __init__(self, state_machine: StateMachine, table: SessionTable) -> None:
        self._state_machine = state_machine
        self._table = table
        self.mark_spilled, self.relocate_spilled = state_machine.mark_spilled, state_machine.relocate_spilled
        self.snapshot, self.live_size = state_machine.snapshot, state_machine.live_size
        self._open: dict[Token, Watch] = {}
        self._resets = 0

    def open(self, token: Token, note: Note, generation: int) -> Watch:
        """Begin to watch for the record of `token`, before the request is published."""
        watch = self._open[token] = Watch(token, note, generation, self._resets)
        return watch

    def close(self, token: Token) -> None:
        """End the watch for the record of `token`."""
        self._open.pop(token, None)

    def settle(self, watch: Watch, generation: int) -> bool:
        """Find out whether the record of `watch` is in the log. Return whether ``watch.is_found`` is certain now.

        The caller has the log's lock, and has read `generation` to its end. If the handle has discarded its state since
        the watch began, it has not read all records before the snapshot of that generation.
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
        """Apply the next records.

        The note of a record with an open token is taken after all records before it are applied, and before it is
        applied.
        """
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
        """Discard the state. All records are applied again, from the first."""
        self._resets += 1
        self._state_machine.reset()
