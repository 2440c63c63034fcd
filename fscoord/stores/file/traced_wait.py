"""`TracedWait` records one wait of a `~fscoord.FileStore` as a span, in a process that records a trace."""

from __future__ import annotations

from typing import Any, Final

from fscoord._arguments import key_text
from fscoord._log.log import Log
from fscoord._runtime import tracing
from fscoord.stores.file.replay import KeyValueState, Witness, WitnessedState

PLACES_MAX: Final = 256


class TracedWait:
    """Records one wait as a span. The object is created when the wait first sleeps, or times out without a sleep.

    The start time of the span is `started`, so the span includes the reads before the first sleep.

    Args:
        log: the log of the store.
        state: the state of the store, or None if the wait is not for keys.
        kind: the kind of the span.
        keys: the first few of the missing keys, and also another key if its change may end the wait.
        missing: the number of missing keys.
        started: when the wait began, by the monotonic clock.
    """

    def __init__(
        self, log: Log, state: KeyValueState | None, kind: str, keys: list[bytes], missing: int, started: float
    ) -> None:
        self._log = log
        self._keys = keys
        self._state = state if isinstance(state, WitnessedState) else None
        self._witness = self._state.attend(self._keys) if self._state is not None else Witness()
        facts = ("keys", missing) if missing > 1 else ()
        self._span = tracing.begin(kind, key_text(keys[0]), trace_place(log), None, *facts)
        if self._span is not None:
            self._span[tracing.BEGIN] = int(started * 1e9)

    def before_sleep(self, seconds: float) -> None:
        """Write the open span to the trace if the next sleep, of at most `seconds`, is long."""
        if self._span is not None and tracing.recorder is not None:
            tracing.recorder.before_sleep(self._span, seconds)

    def end(self, found: object) -> None:
        """End the span of a successful wait. `found` is the answer to its request."""
        witness = self._witness
        if isinstance(found, list) and found and isinstance(found[0], int):  # the dead ranks or sessions
            tracing.end(self._span, "death", "dead", found)
        elif witness.writer:
            session = self._log.table.sessions.get(witness.writer)
            facts: tuple[Any, ...] = ("session", witness.writer)
            if session is not None:
                facts = ("by", f"{session.host}:{session.pid}", "by_rank", session.rank)
            if witness.key != self._keys[0]:
                facts += ("key", key_text(witness.key))
            tracing.end(self._span, "passed", *facts)
        else:
            tracing.end(self._span, "passed")

    def time_out(self) -> None:
        """End the span of a wait that has timed out."""
        tracing.end(self._span, "time-out")

    def close(self) -> None:
        """End the span if it is still open, because an exception has ended the wait. May be called twice."""
        tracing.end(self._span, "interrupted")
        if self._state is not None:
            self._state.dismiss(self._witness, self._keys)


def trace_place(log: Log) -> str:
    """Return a text that identifies the store of `log` on all hosts: the id of the log, and the number of its run."""
    header = log.handle.header
    key = header.lineage, header.run
    place = _places.get(key)
    if place is None:
        place = f"{header.lineage.hex()[:12]}.{header.run}"
        if len(_places) >= PLACES_MAX:
            _places.clear()
        _places[key] = place
    return place


_places: dict[tuple[bytes, int], str] = {}
