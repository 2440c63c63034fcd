"""`LeaseSession`: the session of one `~fscoord.EtcdStore` handle. It lives as long as its lease.

A session has a number, a permanent record key, and a lease key. etcd deletes the lease key when the lease has not been
renewed for `session_ttl` seconds (https://etcd.io/docs/v3.5/learning/api/#lease-api). Then the session is dead. All
readers agree on the death, because the deletion has one revision. A dead session can't write, because each of its
writes has the condition that the lease key exists (see `Transactions.write`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from weakref import finalize

from fscoord._arguments import MalformedText, key_text, parse_uint63
from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord._waiting.awaited import ShownWait
from fscoord._waiting.shown_waits import Shown
from fscoord._waiting.timing import Backoff
from fscoord.errors import FscoordError, StoreError
from fscoord.stores.etcd.requests import KeySpace, after_prefix, compare, delete, key_values, put, range_of, unb64
from fscoord.stores.etcd.transactions import Transactions

if TYPE_CHECKING:
    from fscoord.stores.etcd.client import Access, Client

RENEWALS_PER_TTL: Final = 3
"""The number of renewals of a lease during its time to live."""

WAIT_WRITE_S: Final = 2.0
"""The timeout, in seconds, of the write that shows the wait of a session."""

KEYS_SHOWN: Final = 32
"""How many missing keys are listed in a shown wait. The other keys are only counted."""

END_TIMEOUT_S: Final = 1.0
"""The timeout, in seconds, of the revocation of a lease. If the revocation fails, the lease expires by itself."""


class Lease:
    """Renews a lease in a thread until `end` is called.

    Args:
        access: the address of the cluster. The thread opens its own connections.
        number: the id of the lease.
        ttl: the time to live, in seconds. If the lease is not renewed for this time, etcd ends it.
    """

    def __init__(self, access: Access, number: int, ttl: int) -> None:
        from fscoord.stores.etcd.client import Client

        self.number = number
        self._ttl = ttl
        self._client = Client(access)
        self._owner = system.os.getpid()
        self._over = system.AutoResetEvent()
        self._thread = system.start_thread("fscoord-etcd-lease", self._renew)

    def _renew(self) -> None:
        pause = self._ttl / RENEWALS_PER_TTL
        while not self._over.wait(pause) and self._owner == system.os.getpid():
            try:
                reply = self._client.call("lease/keepalive", {"ID": str(self.number)}, pause)
            except FscoordError:  # the next renewal may still be in time
                continue
            if int(reply.get("result", {}).get("TTL", 0)) <= 0:
                return  # it has expired, and the next write raises

    def end(self) -> None:
        """Revoke the lease. Do nothing in a forked child, because the lease belongs to the parent."""
        if self._owner != system.os.getpid():
            return
        self._over.set()
        with suppress(FscoordError):  # it expires by itself
            self._client.call("lease/revoke", {"ID": str(self.number)}, END_TIMEOUT_S)
        self._client.close()
        self._thread.join(END_TIMEOUT_S)


class LeaseSession:
    """Registers the session of one handle, and reads the records of all sessions.

    The session begins with the first call of `register`. `_lock` is held while the session is registered or its ranks
    change. Without this lock, two threads could register the handle twice.
    """

    def __init__(self, client: Client, keys: KeySpace, transactions: Transactions, ttl: int) -> None:
        self._client = client
        self._keys = keys
        self._transactions = transactions
        self.ttl = ttl
        self.reset()
        _all.add(self)

    def reset(self) -> None:
        """Set the state of a handle without a session. Called in the constructor and in a forked child."""
        self._lock = system.mutex()
        self._lease: Lease | None = None
        self._ranks: tuple[int, ...] = ()
        self._transactions.session_number = 0

    def register(self, rank: int | None, limit: float) -> int:
        """Register the session if it is not registered yet, and return its number. Also record `rank`, if it is new."""
        system.process_epoch()
        with self._lock:
            ranks = self._ranks if rank is None or rank in self._ranks else (*self._ranks, rank)
            number = self._transactions.session_number
            if not number:
                number = self._begin(_new_record(ranks), limit)
            elif ranks != self._ranks:
                self._transactions.write([put(self._keys.member(number), _new_record(ranks))], limit)
            self._ranks = ranks
            return number

    def end(self) -> None:
        """Revoke the lease, if there is one."""
        lease = self._lease
        if lease is not None:
            self._finalizer.detach()
            self._lease = None
            lease.end()

    def roster(self, limit: float) -> dict[int, tuple[dict[str, Any], bool]]:
        """Return {session number: (its record, whether it lives)}, read at one revision.

        Raises:
            StoreError: a record is not the record of a session.
        """
        members, lives = self._keys.members, self._keys.lives
        (records, living), _ = self._transactions.read(
            [range_of(members, after_prefix(members)), range_of(lives, after_prefix(lives), keys_only=True)], limit
        )
        alive = {unb64(each["key"])[len(lives) :] for each in key_values(living)}
        roster = {}
        for each in key_values(records):
            name = unb64(each["key"])
            number = name[len(members) :]
            try:
                roster[parse_uint63(number)] = (parse_record(unb64(each["value"])), number in alive)
            except MalformedText as error:
                raise StoreError(f"{self._client}: key {name!r} is not the record of a session; delete it") from error
        return roster

    def write_wait(self, longest: Shown | None, more: int) -> None:
        """Show the wait `longest` of this session to other processes. If `longest` is None, stop showing a wait.

        The wait is written to a key with the session's lease. A handle without a session is registered first. If a
        write fails, the wait is not shown, and no error is raised.
        """
        try:
            if longest is not None:
                self.register(None, WAIT_WRITE_S)
            number, lease = self._transactions.session_number, self._lease
            if not number or lease is None:
                return
            key = self._keys.wait(number)
            change = delete(key) if longest is None else put(key, _wait_text(longest, more), lease.number)
            self._transactions.write([change], WAIT_WRITE_S)
        except FscoordError as error:
            logger(__name__).info(
                "%s: the wait of this process can't be shown to other processes: %s", self._client, str(error)
            )

    def waits(self, limit: float) -> dict[int, ShownWait]:
        """Return {session number: its shown wait}. Malformed values are left out."""
        waits = self._keys.waits
        answers, _ = self._transactions.read([range_of(waits, after_prefix(waits))], limit)
        found = {}
        for each in key_values(answers[0]):
            with suppress(MalformedText):
                found[parse_uint63(unb64(each["key"])[len(waits) :])] = _parse_wait(unb64(each.get("value")))
        return found

    def dead_ranks(self, ranks: list[int], limit: float) -> list[int]:
        """Return the dead ranks among `ranks`.

        A rank is dead if at least one session has announced it, and all sessions that have announced it are dead.
        """
        alive: dict[int, list[bool]] = {}
        for record, lives in self.roster(limit).values():
            for rank in record["ranks"]:
                alive.setdefault(rank, []).append(lives)
        return [rank for rank in ranks if rank in alive and not any(alive[rank])]

    def _begin(self, record: bytes, limit: float) -> int:
        """Register a session with `record`, and return its number.

        One transaction writes the counter, the record and the lease key. Otherwise a reader could find a session
        without a lease key, and consider it dead. The registration fails if the response is lost, or if other processes
        take the next number first in each try. After a failure, the new lease is never renewed, and expires.
        """
        lease = int(self._client.call("lease/grant", {"TTL": str(self.ttl)}, limit)["ID"])
        counter = self._keys.counter
        last, revision = 0, 0
        backoff = Backoff(limit)
        while True:
            number = last + 1
            written = self._transactions.write(
                [
                    put(counter, b"%d" % number),
                    put(self._keys.member(number), record),
                    put(self._keys.life(number), b"", lease),
                ],
                limit,
                [compare(counter, "mod", revision)],
                [range_of(counter)],
            )
            if written.is_done:
                break
            self._transactions.pause_before_retry(backoff, "began a session")
            now = key_values(written.answers[0])
            last, revision = (
                (self._parse_counter(unb64(now[0]["value"])), int(now[0]["mod_revision"])) if now else (0, 0)
            )
        self._lease = Lease(self._client.access, lease, self.ttl)
        self._finalizer = finalize(self, self._lease.end)
        self._transactions.session_number = number  # last: from here on each write requires the lease key to exist
        return number

    def _parse_counter(self, text: bytes) -> int:
        try:
            return parse_uint63(text)
        except MalformedText as error:
            raise StoreError(
                f"{self._client}: key {self._keys.counter!r} holds {text[:40]!r}, not the number of a session; use"
                " another prefix"
            ) from error


_all = system.reset_in_child("etcd sessions", LeaseSession.reset)


def _new_record(ranks: tuple[int, ...]) -> bytes:
    import json

    host, pid, since = system.hostname(), system.os.getpid(), system.time.time()
    return json.dumps({"host": host, "pid": pid, "ranks": ranks, "label": "", "since": since}).encode()


def _wait_text(longest: Shown, more: int) -> bytes:
    """Return the text of a shown wait: `longest`, and the number `more` of other waits."""
    import json

    began = system.time.time() - (system.time.monotonic() - longest.started)
    keys = [key_text(key) for key in longest.keys[:KEYS_SHOWN]]
    awaited = longest.awaited
    document = {"kind": awaited.kind, "name": awaited.name, "size": awaited.size, "keys": keys}
    return json.dumps({**document, "key_count": len(longest.keys), "more": more, "began": began}).encode()


_WAIT_KINDS: Final[dict[str, type]] = {
    "kind": str, "name": str, "size": int, "keys": list, "key_count": int, "more": int, "began": float,
}  # fmt: skip
_RECORD_KINDS: Final[dict[str, type]] = {"host": str, "pid": int, "ranks": list, "label": str, "since": float}


def _parse_wait(text: bytes) -> ShownWait:
    """Parse `text` as the shown wait of a session.

    Raises:
        MalformedText: `text` is not the text of a shown wait.
    """
    found = _parse(text, _WAIT_KINDS, "keys", str)
    seconds = max(0.0, system.time.time() - found["began"])
    words = found["kind"], found["name"], tuple(found["keys"]), found["key_count"], found["size"]
    return ShownWait(*words, seconds, found["more"])


def parse_record(text: bytes) -> dict[str, Any]:
    """Parse `text` as the record of a session.

    Raises:
        MalformedText: `text` is not the record of a session.
    """
    return _parse(text, _RECORD_KINDS, "ranks", int)


def _parse(text: bytes, kinds: dict[str, type], listed: str, item: type) -> dict[str, Any]:
    """Parse `text` as a JSON object.

    `kinds` has the types of the values of the object. `item` is the type of each item in the list `listed`.
    """
    import json  # here, so that `import fscoord` does not load it

    try:
        found = json.loads(text, parse_int=_parse_int)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedText(f"{type(error).__name__}: {error}") from error
    if not isinstance(found, dict) or [name for name, kind in kinds.items() if not isinstance(found.get(name), kind)]:
        raise MalformedText("a value is missing or of the wrong type")
    if [each for each in found[listed] if not isinstance(each, item)]:
        raise MalformedText(f"one of the {listed} is not of type {item.__name__}")
    return found


def _parse_int(digits: str) -> int:
    """Convert `digits` to an integer. A long text raises `MalformedText`, because `int` may raise a `ValueError`."""
    if len(digits) > 20:
        raise MalformedText(f"a number of {len(digits)} digits")
    return int(digits)
