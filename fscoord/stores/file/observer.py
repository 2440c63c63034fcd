"""`FileObserver` reads the states and the waits of all sessions of a file store. It writes nothing.

The observer reads the log with a state machine of its own. The state machine also notes when each session wrote its
last record, and counts the records of each kind. The observer reads the waits of sessions from their wait slots
(`wait_slots`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fscoord._log.files import safe_files
from fscoord._log.files.opening import LogOptions, read_header
from fscoord._log.files.spill import SpilledRecord
from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.format.header import Header
from fscoord._log.format.record import MalformedRecord
from fscoord._log.format.wait_slot import WaitSlot
from fscoord._log.handle import NeedsLock
from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._log.locking.log_lock import FLOCK, KIND_NAMES, OFD
from fscoord._log.log import Log
from fscoord._log.opened import open_log_file
from fscoord._log.state_machine import StateMachine
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign
from fscoord.errors import FscoordError, StoreTimeoutError
from fscoord.stores.file.death_watch import ANSWERS
from fscoord.stores.file.lifecycle import log_options, open_and_join_run
from fscoord.stores.file.replay import KeyValueState
from fscoord.stores.file.wait_slots import read_slots

READ_S: Final = 2.0
"""How long the observer waits for the log's lock if a read needs the lock, in seconds."""

HELD_S: Final = 0.25
"""How long the same process must hold the log's lock before the observer reports it as the holder, in seconds."""

HELD_POLL_S: Final = 0.01

HOLDER_S: Final = 2.0
"""How long the observer searches the processes of this host for the holder of the log's lock, in seconds. The search is
made if the holder has no session."""

COMPLETED: Final = (b"/complete", b"/last_member")
"""The suffixes of the keys that the last rank at a barrier sets."""


class SeenSession(NamedTuple):
    """The observed state of one session.

    Attributes:
        session: the record of the session.
        alive: ``"yes"``, ``"no"`` or ``"unknown"``.
        found_dead: when the session's death was recorded, in seconds since the epoch; None if no death was recorded.
        is_stopped: whether its process is stopped; False for a process of another host.
        idle: the seconds since the session's last record; None if the current file of the log has no record of the
            session.
        slot: its wait slot, or None if it shows no wait.
        waited: how long the session has waited, in seconds; 0.0 if it shows no wait.
    """

    session: Session
    alive: str
    found_dead: float | None
    is_stopped: bool
    idle: float | None
    slot: WaitSlot | None
    waited: float


class HeldLock(NamedTuple):
    """The process that holds the log's lock.

    Attributes:
        session: the number of the holder's session; 0 if the holder has not registered, None if unknown.
        holder: a description of the holder.
        seconds: how long the observer has seen the process hold the lock without writing.
    """

    session: int | None
    holder: str
    seconds: float


class Observation(NamedTuple):
    """The result of one `FileObserver.look`.

    Attributes:
        path: the path of the log.
        sessions: {session number: its state}.
        ranks: {rank: the numbers of the sessions that have announced it}.
        values: the values that the caller requested.
        keys: all keys that have a value.
        lock: the holder of the log's lock, or None.
        generation: the number of the log's current file. Each compaction adds 1.
        size: the size of the current file, in bytes.
        writes: {(session number, kind): number of records}, in the records that this observer has read.
        barriers: how many barriers were completed, in the records that this observer has read.
        notes: sentences for the user, for example about a fact that could not be determined.
    """

    path: str
    sessions: dict[int, SeenSession]
    ranks: dict[int, tuple[int, ...]]
    values: dict[bytes, bytes]
    keys: frozenset[bytes]
    lock: HeldLock | None
    generation: int
    size: int
    writes: Mapping[tuple[int, str], int]
    barriers: int
    notes: tuple[str, ...]


class WriteNotes:
    """A state machine that passes every call on to `state_machine`, and also counts records.

    Attributes:
        last_ns: {session number: the time of its last record}, in ns of the session's wall clock.
        writes: {(session number, kind): number of records}.
        barriers: how many barriers were completed.
    """

    def __init__(self, state_machine: StateMachine) -> None:
        self._state_machine = state_machine
        self.mark_spilled, self.relocate_spilled = state_machine.mark_spilled, state_machine.relocate_spilled
        self.snapshot, self.live_size = state_machine.snapshot, state_machine.live_size
        self.last_ns: dict[int, int] = {}
        self.writes: Counter[tuple[int, str]] = Counter()
        self.barriers = 0

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        """Apply the next records."""
        self._state_machine.apply(records)
        for kind, key, value, writer, time_ns in records:
            self.last_ns[writer] = time_ns
            self.writes[writer, record.NAMES.get(kind, "?")] += 1
            if kind == record.SET:
                self.barriers += key.endswith(COMPLETED)
            elif kind == record.MULTI_SET:  # the end of a barrier by slots
                self.barriers += sum(name.endswith(COMPLETED) for name in record.changed_keys(kind, key, value))

    def reset(self) -> None:
        """Discard the state, because the log is going to be read again from its first record."""
        self._state_machine.reset()
        self.last_ns.clear()
        self.writes.clear()
        self.barriers = 0


class FileObserver:
    """Observes the log at `path`, and writes nothing.

    Args:
        path: the path of the log, as in `FileStore`.
        options: the options of `FileStore` for reading: ``lock``, ``coherence`` and ``trust_locks``. Without ``lock``,
            the kind of lock is read from the header of the log.
        wants: returns whether `Observation.values` should include the value of a given key.

    Raises:
        StoreUnavailableError, InsecurePathError, CorruptLogError: the log can't be read.
    """

    def __init__(self, path: str, options: Mapping[str, Any], wants: Callable[[bytes], bool]) -> None:
        self.path = safe_files.resolve(path)
        wanted: LogOptions = log_options(
            {
                "lock": options.get("lock") or _lock_of(self.path),
                "coherence": options.get("coherence"),
                "trust_locks": options.get("trust_locks", False),
                "run_id": None,
                "world_size": 0,
                "durable": False,
                "read_only": True,
                "mode": 0o600,
                "compact_bytes": None,
                "spill_bytes": options.get("spill_bytes", 1 << 17),
            },
            READ_S,
        )
        self._wants = wants
        self._state = KeyValueState(wanted.spill_bytes)
        self._notes = WriteNotes(self._state)
        self._held: tuple[object, float] | None = None

        def make() -> Log:
            return open_log_file(self.path, self._notes, wanted, ProcessIdentity.find().session)

        self._log = open_and_join_run(make, READ_S, shows=False)

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def look(self) -> Observation:
        """Read the new records, and return the states and waits of all sessions.

        If another process holds the log's lock for a long time, return the state at the last successful read.
        """
        log, notes = self._log, list[str]()
        try:
            log.refresh(READ_S)
        except StoreTimeoutError as error:
            notes.append(f"the newest records can't be read: {error}")
        lock = self._find_lock(notes)
        sessions, deaths, ranks, values, keys = log.inspect(self._copy)
        home = ProcessIdentity.find()
        alive = {number: False if number in deaths else log.is_alive(number, home) for number in sessions}
        living = {number: session for number, session in sessions.items() if alive[number] is not False}
        reading = read_slots(self.path, living, is_shared=log.handle.is_shared)
        if reading.problem is not None:
            notes.append(f"the waits of the participants are unknown: {reading.problem}")
        if reading.torn:
            notes.append(f"these wait slots can't be read: {_numbers(reading.torn)}")
        if log.table.previous is not None:
            notes.append(f"the start before this one ended because {log.table.previous}")
        if log.table.failure is not None:
            notes.append(
                f"this start has failed: {log.table.failure}. The next start of the job begins with an empty store"
            )
        if not log.liveness.is_supported:
            notes.append("this store has no liveness file, so the death of a process of another host is not known")
        seen = {
            number: self._seen(number, session, alive[number], deaths.get(number), reading.slots.get(number), home)
            for number, session in sessions.items()
        }
        return Observation(
            self.path,
            seen,
            ranks,
            values,
            keys,
            lock,
            log.handle.header.generation,
            self._size(),
            dict(self._notes.writes),
            self._notes.barriers,
            tuple(notes),
        )

    def _copy(self) -> tuple[dict[int, Session], dict[int, int], dict[int, tuple[int, ...]], Any, frozenset[bytes]]:
        """Return a copy of the state that was read from the log. The caller must hold the process mutex."""
        table, state, fetch = self._log.table, self._state, self._log.read_unlocked
        values = {}
        for key in filter(self._wants, state.values):
            try:
                value = state.get(key, fetch)
            except NeedsLock:  # a long value; recipes and barriers don't write such values
                continue
            if value is not None:
                values[key] = value
        ranks = {rank: tuple(sorted(numbers)) for rank, numbers in table.ranks.items()}
        return dict(sorted(table.sessions.items())), dict(table.deaths), ranks, values, frozenset(state.values)

    def _seen(
        self,
        number: int,
        session: Session,
        alive: bool | None,
        death_ns: int | None,
        slot: WaitSlot | None,
        home: ProcessIdentity,
    ) -> SeenSession:
        last_ns = self._notes.last_ns.get(number)
        idle = None if last_ns is None else max(0.0, (system.time.time_ns() - last_ns) / 1e9)
        is_stopped = alive is not False and home.is_stopped(session)
        waited = 0.0 if slot is None else _waited(slot, session, home)
        found_dead = None if death_ns is None else death_ns / 1e9
        return SeenSession(session, ANSWERS[alive], found_dead, is_stopped, idle, slot, waited)

    # -- the log's lock --------------------------------------------------------------------------------------------

    def _find_lock(self, notes: list[str]) -> HeldLock | None:
        """Return the holder of the log's lock, if the same process holds it for `HELD_S` seconds without writing.

        A busy log is locked most of the time, by one writer after the other. So the method returns a holder only if
        neither the holder nor the end of the log changes for `HELD_S` seconds.
        """
        log = self._log
        try:
            found = log.handle.lock.holder()
            mark = (found, log.position())
            if found is None:
                self._held = None
                return None
            if self._held is None or self._held[0] != mark:
                self._held = mark, system.time.monotonic()
            end = self._held[1] + HELD_S
            while system.time.monotonic() < end:
                system.time.sleep(HELD_POLL_S)
                log.refresh(0)
                if (log.handle.lock.holder(), log.position()) != mark:
                    self._held = None
                    return None
        except StoreTimeoutError:  # the read itself needs the lock
            found = log.handle.lock.holder()
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            notes.append(f"the holder of the log's lock is not known: {error}")
            return None
        began = self._held[1] if self._held else system.time.monotonic()
        return self._named(found, max(system.time.monotonic() - began, 0.0))

    def _named(self, found: int | str | None, seconds: float) -> HeldLock:
        log = self._log
        if isinstance(found, int) and found in log.table.sessions:
            return HeldLock(found, str(log.table.sessions[found]), seconds)
        if isinstance(found, str):
            numbers = [number for number, session in log.table.sessions.items() if str(session) == found]
            return HeldLock(numbers[-1] if numbers else None, found, seconds)
        other = self._search() if log.handle.lock.kind in (OFD, FLOCK) else None
        return HeldLock(found, other or "an unknown process", seconds)

    def _search(self) -> str | None:
        """Search this host for a process that holds the log's lock. Called if the lock does not name a session."""
        with ignoring(OSError):
            return system.range_lock_holder(system.os.stat(self._log.handle.file).st_ino, HOLDER_S)
        return None

    def _size(self) -> int:
        with ignoring(OSError):
            return int(system.os.stat(self._log.handle.file).st_size)
        return self._log.handle.offset


def _lock_of(path: str) -> str:
    """Return the kind of lock from the header of the log at `path`; ``"ofd"`` if the header can't be read."""
    opened = system.Descriptors()
    try:
        fd = safe_files.open_descriptor(path, system.os.O_RDONLY, owned_fds=opened)
        return KIND_NAMES.get(Header.decode(read_header(fd))[0].lock_kind, "ofd")
    except (OSError, FscoordError, MalformedRecord) as error:  # opening the log raises a better error for it
        raise_if_foreign(error)
        return "ofd"
    finally:
        system.close_all(system.os.close, opened)


def _waited(slot: WaitSlot, session: Session, home: ProcessIdentity) -> float:
    """Return how long the wait of `slot` has lasted, in seconds.

    For a session of this host and this boot, the monotonic clock measures it exactly. For any other session it is
    approximate, because the wall clocks of two hosts may differ.
    """
    if any(session.boot_id) and (session.boot_id, session.time_space) == (home.boot_id, home.time_space):
        return max(0.0, system.time.monotonic() - slot.began_monotonic_ns / 1e9)
    return max(0.0, system.time.time() - slot.began_ns / 1e9)


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
