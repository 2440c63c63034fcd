"""`Outcomes`: notes the records of requests that are under way, when the handle reads them.

An author that is not told what became of its request looks for its record. The record may come by in any read of the
handle, also in the read of another thread. So every read compares the records that it applies with the open tokens. A
read that finds none pays one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fscoord._log.combining.request import Token
from fscoord._log.io.spill import SpilledRecord
from fscoord._log.state_machine import StateMachine

Note = Callable[[SpilledRecord], Any]
"""Returns what the result of an operation depends on, given its record, which is about to be applied."""


class Watch:
    """The watch for the record of one request.

    Attributes:
        generation: the generation that the handle was in when the watch began. The record can't be in an earlier one.
        resets: how often the handle had discarded its state by then.
        is_found: whether the record was read.
        noted: what the note has returned.
    """

    def __init__(self, note: Note, generation: int, resets: int) -> None:
        self.note = note
        self.generation = generation
        self.resets = resets
        self.is_found = False
        self.noted: Any = None


class Outcomes:
    """A state machine that passes every call on to `state_machine`, and notes the records with open tokens.

    The process mutex guards every method but `open` and `close`, which other threads call at any time. Each of these
    is one operation on a dictionary.
    """

    def __init__(self, state_machine: StateMachine) -> None:
        self._state_machine = state_machine
        self.mark_spilled, self.relocate_spilled = state_machine.mark_spilled, state_machine.relocate_spilled
        self.snapshot, self.live_size = state_machine.snapshot, state_machine.live_size
        self._open: dict[Token, Watch] = {}
        self._resets = 0

    def open(self, token: Token, note: Note, generation: int) -> Watch:
        """Begin to watch for the record of `token`, before the request is published."""
        watch = self._open[token] = Watch(note, generation, self._resets)
        return watch

    def close(self, token: Token) -> None:
        """End the watch for the record of `token`."""
        self._open.pop(token, None)

    def is_certain(self, watch: Watch, generation: int) -> bool:
        """Return whether a handle that has read `generation` to its end would have found the record of `watch`.

        A handle that discards its state begins with the snapshot of the newest generation. A snapshot has no tokens, so
        a record before it was not seen.
        """
        return watch.is_found or watch.resets == self._resets or watch.generation == generation

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        """Apply the next records. A record with an open token is noted before it is applied, and after all others."""
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
