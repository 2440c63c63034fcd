"""`Sessions`, the base class of `~fscoord.FileStore`: the methods that list sessions, detect deaths, and wait."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from fscoord._arguments import Key, Timeout, check_int64, key_text, keys_bytes, to_seconds
from fscoord._log.files.opening import LogOptions
from fscoord._log.format.control_records import Session
from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._log.log import Decide, Log
from fscoord._waiting.changes import Position
from fscoord._waiting.rounds import ARRIVALS, COMPLETE
from fscoord._waiting.wait import (
    CHANGES,
    KEYS,
    ArrivalRequest,
    NeededRanks,
    WaitBackend,
    WaitRequest,
    new_tuple,
)
from fscoord.errors import StoreTimeoutError
from fscoord.store import Member, Store
from fscoord.stores.file.arrival import Arrival
from fscoord.stores.file.arrival_slots import ArrivalSlots
from fscoord.stores.file.changes import FileWatch
from fscoord.stores.file.notifier import ChangeNotifier
from fscoord.stores.file.operations import Operation
from fscoord.stores.file.replay import KeyValueState
from fscoord.stores.file.traced_wait import trace_place
from fscoord.stores.file.waits import Condition, FileWait, condition_of

if TYPE_CHECKING:
    from fscoord._log.shared.combining.combiner import Combiner

MEMBERS_LOCK_S: Final = 0.02
"""The longest wait of `members` and `_session_states` for the log's lock, in seconds.

Both methods need the lock to record a death. `members` also needs it to register the handle.
"""

ANSWERS: Final = {True: "yes", False: "no", None: "unknown"}


class Sessions(Store):
    """A store in a log, which records a session for each registered handle."""

    path: str
    _log: Log
    _state: KeyValueState
    _wanted: LogOptions
    _options: dict[str, Any]
    _notifier: ChangeNotifier
    _combiner: Combiner | None
    _decide: Decide
    _slots: ArrivalSlots | None
    _notifiers: weakref.WeakSet[ChangeNotifier]
    _records_waits = True

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
        found = self._probe(self._log.inspect(lambda: self._log.table.presumed_alive(wanted)))

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
        found = self._probe(self._log.inspect(lambda: self._log.table.presumed_alive_among(wanted)))

        def answer() -> dict[int, str]:
            known = sorted(wanted & self._log.table.sessions.keys())
            forgotten = dict.fromkeys(self._log.table.dead_sessions(wanted.difference(known)), "no")
            return {number: self._state_of(number, found) for number in known} | forgotten

        return self._log.inspect(answer)

    def _probe(self, numbers: Iterable[int]) -> dict[int, bool | None]:
        """Probe each of the sessions `numbers`, and return {number: result of `Liveness.is_alive`}.

        Also record the detected deaths, unless the handle is read-only or another process holds the log's lock for too
        long.
        """
        home, log = ProcessIdentity.find(), self._log
        found = {number: log.is_alive(number, home) for number in numbers}
        if not log.read_only:
            with suppress(StoreTimeoutError):
                for number in [number for number, lives in found.items() if lives is False]:
                    if not log.record_death(number, min(self._timeout, MEMBERS_LOCK_S)):  # probed again, and alive
                        found[number] = log.is_alive(number, home)
        return found

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
        self._record_deaths(log.inspect(lambda: table.presumed_alive(wanted)), self._timeout)
        return log.inspect(lambda: table.dead_ranks(wanted))

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:
        wanted = [check_int64("session", number) for number in numbers]
        if wanted:
            self._log.refresh(self._timeout)
            self._record_deaths([number for number in wanted if number in self._log.table.sessions], self._timeout)
        return self._log.inspect(lambda: self._log.table.dead_sessions(wanted))

    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        self._wait(WaitRequest(KEYS, keys_bytes(keys), self._timeout if timeout is None else to_seconds(timeout)))

    def wait_alive(self, keys: Iterable[Key], ranks: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        limit = self._timeout if timeout is None else to_seconds(timeout)
        needed = ranks if isinstance(ranks, NeededRanks) else [check_int64("rank", rank) for rank in ranks]
        return cast(list[int], self._wait(WaitRequest(KEYS, keys_bytes(keys), limit, ranks=needed)))

    def wait_sessions(self, keys: Iterable[Key], numbers: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        limit = self._timeout if timeout is None else to_seconds(timeout)
        needed = [check_int64("session", number) for number in numbers]
        return cast(list[int], self._wait(WaitRequest(KEYS, keys_bytes(keys), limit, sessions=needed)))

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wait(self, request: WaitRequest) -> Any:
        return self._new_wait(request, self._notifier).block()

    @abstractmethod
    def _write(
        self,
        operation: Operation,
        limit: float | None = None,
        started: float | None = None,
        arm: Callable[[], None] | None = None,
        decide: Decide | None = None,
    ) -> Any:
        """Perform `operation`, and return its result; see `FileStore`."""

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

    def _notifier_for(self, backend: WaitBackend) -> ChangeNotifier:
        return self._new_notifier(backend)

    def _new_notifier(self, backend: WaitBackend, log: Log | None = None) -> ChangeNotifier:
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
        return type(self).wait is Sessions.wait  # otherwise a subclass has its own wait

    def _stopped_sessions(self, numbers: Iterable[int]) -> frozenset[int]:
        home, known = ProcessIdentity.find(), self._log.table.sessions
        found = [(number, known.get(number)) for number in numbers]
        return frozenset(number for number, session in found if session is not None and home.is_stopped(session))

    def _closer_look(self) -> str:
        return self._log.closer_look()

    def _record_deaths(self, numbers: Iterable[int], limit: float) -> None:
        """Append a death record for each of the sessions `numbers` that is certainly dead."""
        home = ProcessIdentity.find()
        for number in numbers:
            if (
                number not in self._log.table.deaths
                and not self._log.read_only
                and self._log.is_alive(number, home) is False
            ):
                self._log.record_death(number, limit)


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
