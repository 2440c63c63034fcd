"""`Sessions`: the part of a `~fscoord.FileStore` that waits, and knows who else has it open and who of them lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar, cast

from fscoord._arguments import Key, Timeout, check_int64, key_names, key_text, keys_bytes, missing_message, to_seconds
from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.handle import NeedsLock
from fscoord._log.io.opening import LogOptions
from fscoord._log.io.spill import Fetch
from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._log.log import Log
from fscoord._runtime import system
from fscoord._waiting.parking import THREADS, Naps, Sleepers, sleep_through
from fscoord._waiting.request import ITEM, KEYS, VALUES, Sought
from fscoord._waiting.slow_wait import Patience
from fscoord.errors import StoreTimeoutError
from fscoord.store import Member, Store
from fscoord.stores.file.death_watch import Vigil
from fscoord.stores.file.notifier import MISSING, Missing, Waiting
from fscoord.stores.file.replay import KeyValueState, materialize

__all__ = ["Sessions"]

T = TypeVar("T")

PATIENCE_S: Final = 0.02
"""How long `Sessions.members` waits for the lock."""

ANSWERS: Final = {True: "yes", False: "no", None: "unknown"}


class Sessions(Store):
    """A store whose handles are the sessions of a log."""

    path: str
    _log: Log
    _state: KeyValueState
    _wanted: LogOptions
    _options: dict[str, Any]
    _waiting: Waiting
    _listeners: weakref.WeakSet[Waiting]
    _for_all: Waiting | None = None

    @property
    def has_liveness(self) -> bool:
        """Whether `members` can tell who lives: on this platform, with the locks of this log."""
        return self._log.has_liveness

    def register(self) -> int:
        """See `Store.register`. The first call of a handle appends a record, under the log's lock."""
        number = self._log.session_if_ready
        if not number:
            self._log.refresh(self._timeout)
            number = self._log.register(self._timeout)
        return number

    def announce_rank(self, rank: int) -> None:
        """See `Store.announce_rank`. It writes a record unless the store knows already."""
        if not self._log.read_only:
            self._log.refresh(self._timeout)
            self._log.register(self._timeout, check_int64("rank", rank))

    def members(self, ranks: Iterable[int] | None = None) -> list[Member]:
        """See `Store.members`. Deaths that it finds are recorded, unless the handle is read-only or the lock is not to
        be had at once.
        """
        wanted = None if ranks is None else [check_int64("rank", rank) for rank in ranks]
        self._log.refresh(self._timeout)
        if not self._log.read_only:
            with suppress(StoreTimeoutError):  # whoever is stuck with the lock is what the caller may be looking for
                self._log.register(min(self._timeout, PATIENCE_S))
                self._bury(self._log.presumed_alive(wanted), min(self._timeout, PATIENCE_S))
        home = ProcessIdentity.find()

        def answer() -> list[Member]:
            log = self._log
            named = set[int]().union(*(log.table.ranks.get(rank, ()) for rank in wanted or ()))
            return [
                _member(number, session, log.liveness.is_alive(number, home), log.deaths.get(number, 0))
                for number, session in sorted(log.sessions.items())
                if wanted is None or number in named
            ]

        return self._log.inspect(answer)

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        """See `Store.dead_ranks`. Deaths that it finds are recorded, unless the handle is read-only."""
        wanted = [check_int64("rank", rank) for rank in ranks]
        self._log.refresh(self._timeout)
        self._bury(self._log.presumed_alive(wanted), self._timeout)
        return self._log.dead_ranks(wanted)

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:
        """See `Store.dead_sessions`. Deaths that it finds are recorded, unless the handle is read-only."""
        wanted = [check_int64("session", number) for number in numbers]
        if wanted:
            self._log.refresh(self._timeout)
            self._bury([number for number in wanted if number in self._log.sessions], self._timeout)
        return self._log.dead_sessions(wanted)

    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        """See `Store.wait`."""
        self._sleep(Sought(KEYS, keys_bytes(keys), self._timeout if timeout is None else to_seconds(timeout)))

    def wait_alive(self, keys: Iterable[Key], ranks: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        """See `Store.wait_alive`. The death of a process of this host ends the wait at once: the kernel tells of it."""
        limit = self._timeout if timeout is None else to_seconds(timeout)
        needed = [check_int64("rank", rank) for rank in ranks]
        return cast(list[int], self._sleep(Sought(KEYS, keys_bytes(keys), limit, ranks=needed)))

    def wait_sessions(self, keys: Iterable[Key], numbers: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        """See `Store.wait_sessions`, and `wait_alive`."""
        limit = self._timeout if timeout is None else to_seconds(timeout)
        needed = [check_int64("session", number) for number in numbers]
        return cast(list[int], self._sleep(Sought(KEYS, keys_bytes(keys), limit, sessions=needed)))

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _sleep(self, sought: Sought) -> Any:
        return sleep_through(self._seek(sought, self._waiting))

    def _listener(self, sleepers: Sleepers) -> Waiting:
        return self._listening(sleepers)

    def _listening(self, sleepers: Sleepers = THREADS, *, is_for_all: bool = False) -> Waiting:
        """Return how others than `_waiting` sleep; closing the handle ends their sleeps, too."""
        waiting = Waiting(self._log, self._wanted, self._options["watch"], sleepers, is_for_all=is_for_all)
        self._listeners.add(waiting)
        return waiting

    def _await_change(self, known: object, limit: float) -> object:
        """See `Store._await_change`. What is known is how much of the log; any record more is a change."""

        def look(left: float) -> tuple[int, int] | Missing:
            self._log.refresh(left)
            now = self._log.position()
            return MISSING if now == known else now

        if self._for_all is None:
            self._for_all = self._listening(is_for_all=True)
        found = sleep_through(self._for_all.until(limit, look, bytes))
        return known if isinstance(found, Missing) else found

    def _seek(self, sought: Sought, listener: Waiting) -> Naps[Any]:
        names = sought.names
        if sought.what == ITEM:

            def look_for_item(left: float, absent: list[bytes]) -> bytes | Missing:
                absent[:] = names
                return self._take(names[0], left)

            return self._await(sought.limit, look_for_item, "a value in queue", listener)
        if sought.what == VALUES:

            def look_for_values(left: float, absent: list[bytes]) -> list[bytes] | Missing:
                absent[:], found = self._look_into(left, lambda fetch: self._state.values_of(names, fetch))
                return MISSING if absent else found

            return self._await(sought.limit, look_for_values, "the value of key", listener)
        vigil = self._vigil(sought, listener)

        def look_for_keys(left: float, absent: list[bytes]) -> list[int] | Missing:
            self._log.refresh(left)
            absent[:] = self._log.inspect(lambda: self._state.missing(names))
            if not absent:
                return []
            return (vigil.dead(left) if vigil else None) or MISSING

        return self._await(sought.limit, look_for_keys, "key", listener, vigil)

    def _vigil(self, sought: Sought, listener: Waiting) -> Vigil | None:
        """Return the watch over those who must live for what is sought to come."""
        log, ranks, sessions = self._log, sought.ranks, sought.sessions
        if sessions is not None:
            dead, undead = partial(log.dead_sessions, sessions), partial(log.presumed_alive_among, sessions)
            return Vigil(log, listener, dead, undead, ends=sessions)
        if ranks is not None:
            return Vigil(log, listener, partial(log.dead_ranks, ranks), partial(log.presumed_alive, ranks))
        return None

    def _take(self, name: bytes, limit: float) -> bytes | Missing:
        """Take the oldest value from the queue `name`."""

        def decide(name: bytes, _: bytes) -> tuple[bytes | None, int, bytes]:
            queue = self._state.queues.get(name)
            return (materialize(queue[0], self._log.read_locked), record.POP, b"") if queue else (None, 0, b"")

        self._log.refresh(limit)
        if name not in self._state.queues:
            return MISSING
        value = self._log.update(record.POP, name, b"", decide, limit)
        return MISSING if value is None else bytes(value)

    def _look_into(self, limit: float, answer: Callable[[Fetch], T]) -> T:
        """Return `answer` of one moment; the bytes of long values, if they can't be had otherwise, with the lock."""
        self._log.refresh(limit)
        try:
            return self._log.inspect(lambda: answer(self._log.read_unlocked))
        except NeedsLock:
            return cast(T, self._log.update(0, b"", b"", lambda _, __: (answer(self._log.read_locked), 0, b""), limit))

    def _await(
        self,
        limit: float,
        look: Callable[[float, list[bytes]], T | Missing],
        what: str,
        listener: Waiting,
        vigil: Vigil | None = None,
    ) -> Naps[T]:
        """Return what `look` finds, looking again whenever it may have changed, until `limit` seconds are over.

        `look` is given the seconds that are left, and a list to fill with the keys that it lacks.
        """
        patience = Patience()
        absent: list[bytes] = []

        def look_again(left: float) -> T | Missing:
            found = look(left, absent)
            if left > 0 and isinstance(found, Missing):
                patience.speak(__name__, lambda: f"{what} {key_names(absent)} in {self.path}")
            return found

        pace, ends = (vigil.pace, vigil.ends) if vigil else (None, ())
        found = yield from listener.until(limit, look_again, lambda: absent[0], pace, ends)
        if isinstance(found, Missing):
            waited = system.time.monotonic() - patience.started
            raise StoreTimeoutError(
                f"{self.path}: {missing_message(what, absent, waited)}",
                keys=[key_text(name) for name in absent],
                waited=waited,
            )
        return found

    def _bury(self, numbers: Iterable[int], limit: float) -> None:
        """Record the deaths among the sessions `numbers` that show."""
        home = ProcessIdentity.find()
        for number in numbers:
            if number not in self._log.deaths and not self._log.read_only and self._log.is_alive(number, home) is False:
                self._log.record_death(number, limit)


def _member(number: int, session: Session, lives: bool | None, found_dead_ns: int) -> Member:
    return Member(
        number=number,
        host=session.host,
        pid=session.pid,
        rank=session.rank,
        label=session.label,
        since=session.since_ns / 1e9,
        alive=ANSWERS[lives],
        found_dead=found_dead_ns / 1e9 if found_dead_ns else None,
    )
