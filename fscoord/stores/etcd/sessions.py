"""`EtcdSessions`: the part of an `~fscoord.EtcdStore` that knows who else has it open and who of them lives.

A session is a number, a key that says who it is and stays, and a key that etcd deletes when it has not heard of the
session for `session_ttl` seconds: a lease (https://etcd.io/docs/v3.5/learning/api/#lease-api). That deletion is the
death, at one revision for all; the session itself writes no more from then on, because each of its writes asks for that
key in the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final
from weakref import WeakSet, finalize

from fscoord._runtime import system
from fscoord._waiting.backoff import Backoff
from fscoord.arguments import MalformedText, integer, natural
from fscoord.errors import FscoordError, StoreError
from fscoord.members import Member
from fscoord.stores.etcd.address import Access
from fscoord.stores.etcd.handle import EtcdHandle, Look, Watched
from fscoord.stores.etcd.requests import after_prefix, compare, decoded, found, put, range_of

__all__ = ["EtcdSessions", "Lease", "read_record"]

END_S: Final = 1.0
"""How long the end of a session may take; after that it ends by itself, when its time to live is over."""


class Lease:
    """A lease that a thread keeps alive until `end`.

    Args:
        access: the cluster; the thread has connections of its own.
        number: the lease's id.
        ttl: how many seconds etcd waits for a sign of life.
    """

    def __init__(self, access: Access, number: int, ttl: int) -> None:
        from fscoord.stores.etcd.client import Cluster

        self.number = number
        self._ttl = ttl
        self._cluster = Cluster(access)
        self._owner = system.os.getpid()
        self._over = system.Wakeup()
        self._thread = system.start_thread("fscoord-etcd-lease", self._keep)

    def _keep(self) -> None:
        pause = self._ttl / 3
        while not self._over.wait(pause):
            try:
                reply = self._cluster.call("lease/keepalive", {"ID": str(self.number)}, pause)
            except FscoordError:
                continue
            if int(reply.get("result", {}).get("TTL", 0)) <= 0:
                return  # it is over, as the next write will find

    def end(self) -> None:
        """End the lease, if this process began it."""
        if self._owner != system.os.getpid():
            return
        self._over.set()
        try:
            self._cluster.call("lease/revoke", {"ID": str(self.number)}, END_S)
        except FscoordError:  # then it ends by itself
            pass
        self._cluster.close()
        self._thread.join(END_S)


class EtcdSessions(EtcdHandle):
    """A store whose handles may be sessions: from the first time that they are asked who they are."""

    _session_ttl: int
    _lock: system.threading.Lock
    _lease: Lease | None = None
    _ranks: tuple[int, ...] = ()

    @property
    def has_liveness(self) -> bool:
        """Whether `members` can tell who lives: it can."""
        return True

    def register(self) -> int:
        """See `Store.register`. The first call of a handle makes its lease."""
        return self._introduced(None)

    def announce_rank(self, rank: int) -> None:
        """See `Store.announce_rank`. It writes unless the store knows already."""
        if integer("rank", rank) not in self._ranks or not self._own_session():
            self._introduced(rank)

    def members(self, ranks: Iterable[int] | None = None) -> list[Member]:
        """See `Store.members`."""
        wanted = None if ranks is None else {integer("rank", rank) for rank in ranks}
        self._introduced(None)
        return [
            Member(
                number=number,
                host=record["host"],
                pid=record["pid"],
                rank=record["ranks"][-1] if record["ranks"] else None,
                label=record["label"],
                since=record["since"],
                alive="yes" if lives else "no",
            )
            for number, (record, lives) in self._roster(self._timeout)[0].items()
            if wanted is None or wanted & set(record["ranks"])
        ]

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        """See `Store.dead_ranks`."""
        wanted = [integer("rank", rank) for rank in ranks]
        return self._dead_among(wanted, self._timeout)

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:
        """See `Store.dead_sessions`."""
        wanted = [integer("session", number) for number in numbers]
        roster = self._roster(self._timeout)[0] if wanted else {}
        return [number for number in wanted if number in roster and not roster[number][1]]

    def _wait_beside(self, names: list[bytes], limit: float, find: Callable[[], list[int]]) -> list[int]:
        """See `~fscoord.members.Liveness`. A deletion among the lives ends the sleep."""
        lives = self._names.lives
        deaths = Watched(lives, after_prefix(lives), deletions=True)

        def look(left: float) -> list[int] | Look:
            seen = self._look(names, left)
            if not isinstance(seen, Look):
                return []
            return find() or seen._replace(also=[deaths])

        return self._await(limit, look, "key")

    def _look(self, names: list[bytes], limit: float) -> bool | Look:
        """Return true if every one of `names` has a value or a queue, or what is missing."""
        operations = [operation for name in names for operation in self._signs(name)]
        answers, revision = self._read(operations, limit)
        absent = dict.fromkeys(
            name for name, *signs in zip(names, answers[::2], answers[1::2], strict=True) if not any(map(found, signs))
        )
        if not absent:
            return True
        watched = [[Watched(self._names.value(name)), self._items(name)] for name in absent]
        return Look(revision, list(absent), watched)

    def _items(self, name: bytes) -> Watched:
        """Return the keys of queue `name`."""
        queue = self._names.queue(name)
        return Watched(queue, after_prefix(queue))

    def _signs(self, name: bytes) -> list[dict[str, Any]]:
        items = self._items(name)
        return [
            range_of(self._names.value(name), keys_only=True),
            range_of(items.key, items.end, keys_only=True, limit=1),
        ]

    def _begin_without_session(self) -> None:
        """Begin as a handle that nobody knows yet; in a forked child too, which is another session."""
        self._lock = system.threading.Lock()
        self._session_number, self._lease, self._ranks = 0, None, ()
        _handles.add(self)

    def _own_session(self) -> int:
        system.life()
        return self._session_number

    def _introduced(self, rank: int | None) -> int:
        """Return the number of this handle's session, after making it one and noting that it is `rank`, if given."""
        self._own_session()
        with self._lock:
            ranks = self._ranks if rank is None else (*(each for each in self._ranks if each != rank), rank)
            if not self._session_number:
                self._begin(self._record(ranks))
            elif ranks != self._ranks:
                self._write([put(self._names.member(self._session_number), self._record(ranks))])
            self._ranks = ranks
            return self._session_number

    def _begin(self, record: bytes) -> None:
        """Begin a session that says `record` of itself."""
        body = {"TTL": str(self._session_ttl)}
        lease = int(self._cluster.call("lease/grant", body, self._timeout)["ID"])
        counter = self._names.counter
        last, revision = 0, 0
        backoff = Backoff(self._timeout)
        while True:
            number = last + 1
            written = self._write(
                [
                    put(counter, b"%d" % number),
                    put(self._names.member(number), record),
                    put(self._names.life(number), b"", lease),
                ],
                [compare(counter, "mod", revision)],
                [range_of(counter)],
            )
            if written.is_done:
                break
            self._pause(backoff, "began a session")
            now = found(written.answers[0])
            last, revision = (self._last(decoded(now[0]["value"])), int(now[0]["mod_revision"])) if now else (0, 0)
        self._lease = Lease(self._cluster.access, lease, self._session_ttl)
        self._ended = finalize(self, self._lease.end)
        self._session_number = number

    def _last(self, text: bytes) -> int:
        try:
            return natural(text)
        except MalformedText as error:
            message = f"{self._cluster}: key {self._names.counter!r} holds no number of a session; use another prefix"
            raise StoreError(message) from error

    def _record(self, ranks: tuple[int, ...]) -> bytes:
        import json

        about = {
            "host": system.hostname(),
            "pid": system.os.getpid(),
            "ranks": ranks,
            "label": "",
            "since": system.time.time(),
        }
        return json.dumps(about).encode()

    def _roster(self, limit: float) -> tuple[dict[int, tuple[dict[str, Any], bool]], int]:
        """Return what each session says of itself and whether it lives, by number, and the revision of that."""
        members, lives = self._names.members, self._names.lives
        (records, living), revision = self._read(
            [range_of(members, after_prefix(members)), range_of(lives, after_prefix(lives), keys_only=True)], limit
        )
        alive = {decoded(each["key"])[len(lives) :] for each in found(living)}
        roster = {}
        for each in found(records):
            name = decoded(each["key"])
            number = name[len(members) :]
            try:
                roster[natural(number)] = (read_record(decoded(each["value"])), number in alive)
            except MalformedText as error:
                raise StoreError(
                    f"{self._cluster}: key {name!r} says nothing that a session would; delete it"
                ) from error
        return roster, revision

    def _dead_among(self, ranks: list[int], limit: float) -> list[int]:
        said: dict[int, list[bool]] = {}
        for record, lives in self._roster(limit)[0].values():
            for rank in record["ranks"]:
                said.setdefault(rank, []).append(lives)
        return [rank for rank in ranks if rank in said and not any(said[rank])]


_handles: WeakSet[EtcdSessions] = WeakSet()


def _after_fork_in_child() -> None:
    for handle in list(_handles):
        handle._begin_without_session()


system.after_fork_in_child("etcd sessions", _after_fork_in_child)


def _whole(digits: str) -> int:
    """Return the number; `int` refuses very long ones by a plain `ValueError`."""
    if len(digits) > 20:
        raise MalformedText(f"a number of {len(digits)} digits")
    return int(digits)


def read_record(text: bytes) -> dict[str, Any]:
    """Return what a session says of itself as `text`.

    Raises:
        MalformedText: no session would say that.
    """
    import json  # as the connections do; `import fscoord` loads neither

    kinds: dict[str, type] = {"host": str, "pid": int, "ranks": list, "label": str, "since": float}
    try:
        said = json.loads(text, parse_int=_whole)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedText(f"{type(error).__name__}: {error}") from error
    if not isinstance(said, dict) or [name for name, kind in kinds.items() if not isinstance(said.get(name), kind)]:
        raise MalformedText("a value is missing, or of the wrong kind")
    if [rank for rank in said["ranks"] if not isinstance(rank, int)]:
        raise MalformedText("a rank of the wrong kind")
    return said
