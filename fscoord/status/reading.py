"""`Observer` takes pictures of the participants of a store. `status` takes one picture and adds the findings.

An observer never writes. An observer of a file store reads the whole log. On any other store, an observer calls
operations of `fscoord.Store`. These operations return fewer facts, so the notes of the picture say which facts are
missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any, NamedTuple, Protocol

from fscoord._arguments import key_bytes, key_text
from fscoord._runtime import system
from fscoord._runtime.escaping import escape_word
from fscoord._waiting.awaited import RATE, ShownWait
from fscoord._waiting.rounds import is_of_barrier, open_rounds
from fscoord.recipes.holdings import LineState, is_of_recipe, items, lines
from fscoord.status.findings import SLOW_S, StatusFinding, find_all
from fscoord.status.picture import LogLock, Picture, SessionStatus
from fscoord.store import Member, Store
from fscoord.stores.file.observer import FileObserver, SeenSession
from fscoord.stores.prefix import PrefixStore
from fscoord.stores.url import convert, open_store, parse_url


class Status(NamedTuple):
    """The result of `status`: the participants of a store, and the findings about them.

    Attributes:
        picture: the participants, what they hold and what they wait for.
        findings: the findings, the most urgent first.
    """

    picture: Picture
    findings: tuple[StatusFinding, ...]


class Activity(NamedTuple):
    """Counts of the records that the observer of a file store has read.

    Attributes:
        writes: maps (session, kind) to the number of records of this kind that the session has written.
        barriers: how many barriers were completed.
        generation: the number of the log's current file. Each compaction increments it.
        size: the size of the log's current file, in bytes.
    """

    writes: Mapping[tuple[int, str], int]
    barriers: int
    generation: int
    size: int


class Observer(Protocol):
    """Takes pictures of one store."""

    def look(self) -> tuple[Picture, Activity | None]:
        """Return a new picture, and the `Activity` so far, which is None for any store that is not a file store."""

    def close(self) -> None:
        """Close the store, if this observer opened it."""


def status(store: Store | str | system.os.PathLike[str], slow: float = SLOW_S) -> Status:
    """Return the participants of `store`, what they hold and wait for, and the findings about them.

    The call writes nothing and waits for no process. The call works even while another process holds the log's lock.

    Args:
        store: the path or the address of a store, or a store.
        slow: if a wait for a running participant lasts this long, in seconds, the wait is a finding.

    Raises:
        StoreError: the store can't be read.
        ValueError: the address is invalid.
    """
    with closing(observe(store)) as observer:
        picture, _ = observer.look()
    return Status(picture, tuple(find_all(picture, slow)))


def observe(store: Store | str | system.os.PathLike[str], timeout: float | None = None) -> Observer:
    """Return an observer of `store`, which is a path, an address, or a store.

    `timeout` is how many seconds an operation waits for the server of the store; None means the store's default. This
    timeout has no effect on a file store.
    """
    if isinstance(store, Store):
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        place = getattr(store, "path", None)
        if place is None:
            return _StoreObserver(store, repr(store), owns=False)
        return _FileStoreObserver(place, getattr(store, "place_options", {}))
    scheme, host, path, options = parse_url(store)
    if scheme == "file" and host in {"", "localhost"}:
        return _FileStoreObserver(path, convert({name: options[name] for name in _READING if name in options}, scheme))
    limits: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    return _StoreObserver(open_store(store, **limits), str(store), owns=True)


_READING = ("lock", "coherence", "trust_locks")
"""The options of a `~fscoord.FileStore` that an observer needs."""


def _is_wanted(key: bytes) -> bool:
    return is_of_recipe(key) or is_of_barrier(key)


class _FileStoreObserver:
    """An `Observer` that reads the log of a file store."""

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        self._files = FileObserver(path, options, _is_wanted)

    def look(self) -> tuple[Picture, Activity | None]:
        seen = self._files.look()
        found = lines(seen.values, seen.keys)
        holds = _holds(found, seen.values)
        participants = tuple(
            _participant(number, each, tuple(holds.get(number, ()))) for number, each in seen.sessions.items()
        )
        rounds = tuple(open_rounds(seen.values, seen.keys))
        lock = None if seen.lock is None else LogLock(*seen.lock)
        picture = Picture(seen.path, participants, seen.ranks, tuple(found), rounds, lock, seen.notes)
        return picture, Activity(seen.writes, seen.barriers, seen.generation, seen.size)

    def close(self) -> None:
        self._files.close()


class _StoreObserver:
    """An `Observer` that calls the operations of a store other than a file store.

    Args:
        store: the store.
        place: the address of the store, for messages.
        owns: whether `close` closes the store.
    """

    def __init__(self, store: Store, place: str, *, owns: bool) -> None:
        self._store = store
        self._place = place
        self._owns = owns

    def look(self) -> tuple[Picture, Activity | None]:
        store = self._store
        keys = frozenset(map(key_bytes, store.list_keys()))
        values = store._peek_all([key for key in sorted(keys) if _is_wanted(key)])
        found = lines(values, keys)
        holds = _holds(found, values)
        members, waits = store._observe()
        participants = tuple(
            _member(each, tuple(holds.get(each.number, ())), waits.get(each.number)) for each in members
        )
        ranks: dict[int, tuple[int, ...]] = {}
        for each in members:
            if each.rank is not None:
                ranks[each.rank] = (*ranks.get(each.rank, ()), each.number)
        notes = []
        if not store._shows_waits:
            notes.append("this kind of store does not show what its participants wait for, or for how long")
        if not store.capabilities.sessions:
            notes.append("this kind of store has no sessions, so it shows neither its open handles nor deaths")
        rounds = tuple(open_rounds(values, keys))
        return Picture(self._place, participants, ranks, tuple(found), rounds, None, tuple(notes)), None

    def close(self) -> None:
        if self._owns:
            self._store.close()


def _holds(found: Iterable[LineState], values: Mapping[bytes, bytes]) -> dict[int, list[str]]:
    holds: dict[int, list[str]] = {}
    for line in found:
        for holder in line.holders:
            label = f" as {holder.label!r}" if holder.label else ""
            turn = "the turn of " if line.kind == RATE else ""
            holds.setdefault(holder.session, []).append(f"{turn}{line.kind} {line.name!r}{label}")
    taken: dict[tuple[int, str], int] = {}
    for item in items(values):
        taken[item.session, item.queue] = taken.get((item.session, item.queue), 0) + 1
    for (session, queue), count in taken.items():
        what = "an item" if count == 1 else f"{count} items"
        holds.setdefault(session, []).append(f"{what} of queue {queue!r}")
    return holds


def _participant(number: int, seen: SeenSession, holds: tuple[str, ...]) -> SessionStatus:
    session, slot = seen.session, seen.slot
    waiting = None
    if slot is not None:
        keys = tuple(map(key_text, slot.keys))
        waiting = ShownWait(slot.kind, slot.name, keys, slot.key_count, slot.size, seen.waited, slot.more)
    return SessionStatus(
        number,
        session.rank,
        session.label,
        escape_word(session.host),
        session.pid,
        session.since_ns / 1e9,
        seen.alive,
        seen.found_dead,
        seen.is_stopped,
        seen.idle,
        waiting,
        holds,
    )


def _member(member: Member, holds: tuple[str, ...], wait: ShownWait | None) -> SessionStatus:
    known = (member.number, member.rank, member.label, escape_word(member.host), member.pid, member.since)
    return SessionStatus(*known, member.alive, member.found_dead, waiting=wait, holds=holds)
