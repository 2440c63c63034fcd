"""`EtcdStore`: the store contract on etcd, for jobs whose hosts share no file system.

This module expresses each operation of the contract as transactions of etcd. The module `requests` builds the JSON of
the transactions. Only `client` uses HTTP. `transactions` has reads, writes and waits, with their retries. `sessions`
renews the lease of a handle. Processes need no lock between them, because etcd orders the transactions. A session is
dead when its lease has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast

from fscoord._arguments import (
    DEFAULT_TIMEOUT,
    CounterRangeError,
    Key,
    NotACounterError,
    Timeout,
    Transaction,
    Value,
    check_int64,
    check_positive,
    counter_sum,
    key_bytes,
    key_given,
    key_text,
    keys_bytes,
    timeout_given,
    to_seconds,
    value_bytes,
)
from fscoord._runtime import system
from fscoord._waiting.awaited import ShownWait
from fscoord._waiting.changes import Position, refuse_later
from fscoord._waiting.shown_waits import ShownWaits
from fscoord._waiting.timing import Backoff
from fscoord._waiting.wait import VALUES, WaitRequest
from fscoord.errors import QueueEmptyError
from fscoord.store import Capabilities, Member, Store, kept, shown_handle
from fscoord.stores.etcd.changes import EtcdWatch
from fscoord.stores.etcd.requests import (
    KeySpace,
    Request,
    after_prefix,
    compare,
    delete,
    key_values,
    put,
    range_of,
    unb64,
)
from fscoord.stores.etcd.sessions import LeaseSession
from fscoord.stores.etcd.transactions import KeySnapshot, KeyWatcher, Transactions, TxnResult, WatchRange

__all__ = ["EtcdStore", "GatewayClient", "cas_delay"]


T = TypeVar("T")

VALUE_MAX: Final = 3 << 19
"""1.5 MiB: the largest request that a server accepts by default (``--max-request-bytes``)."""

CACHED_KEYS_MAX: Final = 1024
"""How many keys a handle caches with their last revision. A change of a cached key takes one request instead of two."""

CACHED_VALUE_BYTES_MAX: Final = 64

QUEUE_HEADS_MAX: Final = 16
"""How many values one request reads from the head of a queue.

etcd sorts the whole queue for each request, so the handle caches the keys of these values. The cached keys stay at the
head, because later values have higher creation revisions. If another handle has removed a value whose key is cached,
the condition of this handle's deletion fails.
"""


class GatewayClient(Protocol):
    """The attributes of an etcd3gw client from which `EtcdStore` reads the address and the TLS files."""

    @property
    def host(self) -> str:
        """The host of the member of the cluster."""

    @property
    def port(self) -> int:
        """The port of the member."""

    @property
    def protocol(self) -> str:
        """``"http"`` or ``"https"``."""

    @property
    def session(self) -> Any:
        """A ``requests.Session``, whose ``verify`` and ``cert`` are the TLS files."""


class EtcdStore(Store):
    """A store in the keys of an etcd cluster (version 3.4 or newer) that begin with a prefix. Needs the extra ``etcd``.

    A wait watches the keys from the revision after its last read. So the wait misses no change and does not poll. Waits
    continue when the servers restart. If the response of a write is lost, the write raises an error with
    ``maybe_applied`` set. A write that has reached no member is sent to the next member, until the timeout. A server
    that accepts a connection and then does not answer is given five seconds, even if the timeout is shorter.

    A `multi_set` may have at most 4096 keys, and a `transact` may compare and add to at most 120. A request may
    have at most 1.5 MiB, unless the server is configured otherwise. Beyond these limits
    `~fscoord.LimitExceededError` is raised, and nothing is written. `add`, `append` and `compare_set` retry if
    another process has changed the key first. Each push wakes a blocked `queue_pop`. `wait` also takes its timeout
    as `override_timeout`, as in torch.

    When a handle announces its rank or calls `register`, it acquires a lease of etcd, and a thread renews the lease.
    When the process dies, its lease expires, and its session is dead. The lease also expires if the process was stopped
    or cut off for `session_ttl` seconds. Then the writes of this process raise `~fscoord.SessionDeadError`.

    Args:
        client_or_url: the address of the cluster, such as ``"etcd://h1:2379,h2:2379"`` (or ``http://``, ``https://``,
            or no scheme). Or a client of etcd3gw, whose address and TLS files are used.
        prefix: the beginning of all keys of this store in etcd, ``str`` or ``bytes``. A slash is added if the prefix
            does not end in a slash. Stores with different prefixes don't see each other's keys. No part of the prefix
            may begin with an equals sign.
        timeout: the default timeout of operations, in seconds or as a `timedelta`; None means 300 seconds.
        etcd_client: another name for `client_or_url`, as in torch.
        etcd_store_prefix: another name for `prefix`, as in torch.
        user: the name to log in with, if the cluster requires a login.
        password: the user's password.
        tls: whether to use TLS. An ``https://`` address and each of the next three arguments imply TLS.
        cacert: the file with the certificates to trust, instead of the system's certificates.
        cert: the file with the certificate of the client.
        key: the file with the key of that certificate.
        session_ttl: the time to live of a session's lease, in seconds. If the lease is not renewed for this time, etcd
            deletes it, and the session is dead.

    Attributes:
        client: the argument `client_or_url`, as in torch.

    Raises:
        ImportError: urllib3 is not installed.
        ValueError: an address or the prefix is malformed.
    """

    capabilities: Capabilities = Capabilities(
        processes=True,
        hosts=True,
        durable=True,
        survives_handles=True,
        sessions=True,
        changes_conditionally=True,
        transacts=True,
        reports_changes=True,
        value_max=VALUE_MAX,
    )

    def __init__(
        self,
        client_or_url: str | GatewayClient | None = None,
        prefix: Key | None = None,
        timeout: Timeout | None = None,
        *,
        etcd_client: str | GatewayClient | None = None,
        etcd_store_prefix: Key | None = None,
        user: str | None = None,
        password: str = "",
        tls: bool = False,
        cacert: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        session_ttl: int = 10,
    ) -> None:
        from fscoord.stores.etcd.client import Client, parse_access

        self._timeout = to_seconds(DEFAULT_TIMEOUT if timeout is None else timeout)
        session_ttl = check_positive("session_ttl", session_ttl)
        self._prefix = _check_prefix(key_given(prefix, "etcd_store_prefix", etcd_store_prefix, "prefix"))
        given: Any = cast(Any, key_given)(client_or_url, "etcd_client", etcd_client, "client_or_url")
        self.client: str | GatewayClient = given
        access = parse_access(self.client, tls=tls, cacert=cacert, cert=cert, key=key)
        self._client = Client(access._replace(user=user, password=password))
        self._keys = KeySpace(self._prefix)
        self._transactions = Transactions(self._client, self._keys)
        self._session = LeaseSession(self._client, self._keys, self._transactions, session_ttl)
        self._watcher = KeyWatcher(self._client, ShownWaits(self._session.write_wait).show)
        self._revision_cache: dict[bytes, tuple[int, bytes]] = {}
        self._queue_heads: dict[bytes, list[dict[str, Any]]] = {}

    def __repr__(self) -> str:
        text = f"EtcdStore({str(self._client)!r}, {key_text(self._prefix)!r})"
        return shown_handle(text, is_closed=self._client.is_closed)

    @property
    def prefix(self) -> str:
        """The beginning of all keys of this store in etcd; it ends in a slash."""
        return key_text(self._prefix)

    @property
    def address(self) -> str:
        """The address of this store for `~fscoord.open_store`. It contains the password, if there is one."""
        return self._client.access.url(self._prefix, session_ttl=self._session.ttl)

    def below(self, name: str) -> EtcdStore:
        """Return a store with the prefix ``{prefix}/{name}/``. The two stores don't see each other's keys."""
        return self._with_prefix(self._prefix + key_bytes(name))

    def erase(self) -> None:
        """Delete all keys of this store in etcd, including its sessions. No process may use the store any more."""
        own = self._prefix + b"="
        self._transactions.write([delete(own, after_prefix(own))], self._timeout)

    # -- values ----------------------------------------------------------------------------------------------------

    def set(self, key: Key, value: Value) -> None:
        name, data = key_bytes(key), value_bytes(value)
        self._transactions.write([put(self._keys.value(name), data)], self._timeout)

    get = kept(Store.get)
    multi_get = kept(Store.multi_get)

    def _peek(self, key: bytes) -> bytes | None:
        answers, _ = self._transactions.read([range_of(self._keys.value(key))], self._timeout)
        return _value_in(answers[0])

    def _peek_all(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        answers, _ = self._transactions.read([range_of(self._keys.value(key)) for key in keys], self._timeout)
        found = dict(zip(keys, map(_value_in, answers), strict=True))
        return {key: value for key, value in found.items() if value is not None}

    def add(self, key: Key, amount: int) -> int:
        name = key_bytes(key)
        amount = check_int64("amount", amount)
        return int(self._change(name, lambda current: b"%d" % counter_sum(current, amount, name)) or 0)

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        name, old, new = key_bytes(key), value_bytes(expected), value_bytes(desired)
        value = self._change(name, lambda current: new if current == old or not (current or old) else None)
        return old if value is None else value

    def append(self, key: Key, value: Value) -> None:
        name, more = key_bytes(key), value_bytes(value)
        self._change(name, lambda current: value_bytes((current or b"") + more))

    def create(self, key: Key, value: Value) -> bool:
        name = self._keys.value(key_bytes(key))
        return self._transactions.write(
            [put(name, value_bytes(value))], self._timeout, [compare(name, "mod", 0)]
        ).is_done

    def pop(self, key: Key) -> bytes | None:
        name = key_bytes(key)
        done = self._delete(name, [compare(self._keys.value(name), "mod", 0, "GREATER")], prev_kv=True)
        return _value_in(done.answers[0]) if done.is_done else None

    def delete_key(self, key: Key, *, expected: Value | None = None) -> bool:
        name = key_bytes(key)
        wanted = [] if expected is None else [compare(self._keys.value(name), "value", value_bytes(expected))]
        return any(int(answer.get("deleted", 0)) for answer in self._delete(name, wanted).answers)

    def _delete(self, name: bytes, conditions: list[Request], **options: Any) -> TxnResult:
        items = self._queue_range(name)
        success = [delete(self._keys.value(name), **options), delete(items.key, items.end)]
        return self._transactions.write(success, self._timeout, conditions)

    multi_set = kept(Store.multi_set)

    def _transact(self, transaction: Transaction) -> bool:
        # The sums are computed here, so the counters must still have the revisions that were read. If one has changed,
        # the transaction is retried.
        compared, present, added, deleted = transaction
        wanted = [
            compare(self._keys.value(name), *(("mod", 0) if value is None else ("value", value)))
            for name, value in compared.items()
        ]
        changes = [put(self._keys.value(name), value) for name, value in present.items()]
        for name in deleted:
            items = self._queue_range(name)
            changes += [delete(self._keys.value(name)), delete(items.key, items.end)]
        backoff = Backoff(self._timeout)
        while True:
            conditions, sums = list(wanted), []
            if added:
                reads = [range_of(self._keys.value(name)) for name in (*compared, *added)]
                answers, _ = self._transactions.read(reads, self._timeout)
                if [_value_in(answer) for answer in answers[: len(compared)]] != list(compared.values()):
                    return False
                for (name, amount), answer in zip(added.items(), answers[len(compared) :], strict=True):
                    key, found = self._keys.value(name), key_values(answer)
                    sums.append(put(key, b"%d" % counter_sum(_value_in(answer), amount, name)))
                    conditions.append(compare(key, "mod", int(found[0]["mod_revision"]) if found else 0))
            done = self._transactions.write([*changes, *sums], self._timeout, conditions).is_done
            if done or not added:
                return done
            self._transactions.pause_before_retry(backoff, "changed a counter of the transaction")

    # -- keys ------------------------------------------------------------------------------------------------------

    def check(self, keys: Iterable[Key]) -> bool:
        names = keys_bytes(keys)
        return not names or self._look(names, self._timeout) is True

    def wait(
        self, keys: Iterable[Key], timeout: Timeout | None = None, *, override_timeout: Timeout | None = None
    ) -> None:
        names = keys_bytes(keys)
        limit = self._seconds(timeout_given(timeout, "override_timeout", override_timeout))
        if names:
            self._watcher.wait(limit, lambda left: self._look(names, left), "key")

    def _trace_place(self, key: bytes) -> tuple[str, str]:
        return f"etcd:{key_text(self._prefix)}", key_text(key)

    def num_keys(self) -> int:
        values = self._keys.values
        answers, _ = self._transactions.read([range_of(values, after_prefix(values), count_only=True)], self._timeout)
        return int(answers[0].get("count", 0))

    def list_keys(self, prefix: Key = "") -> list[str]:
        start = self._keys.value(key_bytes(prefix))
        answers, _ = self._transactions.read([range_of(start, after_prefix(start), keys_only=True)], self._timeout)
        return [key_text(unb64(each["key"])[len(self._keys.values) :]) for each in key_values(answers[0])]

    # -- queues ----------------------------------------------------------------------------------------------------

    def queue_push(self, key: Key, value: Value) -> None:
        # The values of the queue are in the order in which etcd creates them.
        name, data = key_bytes(key), value_bytes(value)
        item = self._keys.queue(name) + system.random_bytes(16).hex().encode()
        self._transactions.write([put(item, data)], self._timeout)

    def queue_pop(self, key: Key, block: bool = True, *, timeout: Timeout | None = None) -> bytes:
        name, limit = key_bytes(key), self._seconds(timeout)
        if block:
            return self._watcher.wait(limit, lambda left: self._pop(name, left), "a value in queue")
        value = self._pop(name, self._timeout)
        if isinstance(value, KeySnapshot):
            raise QueueEmptyError(f"queue {key_text(name)!r} is empty")
        return value

    def queue_len(self, key: Key) -> int:
        items = self._queue_range(key_bytes(key))
        answers, _ = self._transactions.read([range_of(items.key, items.end, count_only=True)], self._timeout)
        return int(answers[0].get("count", 0))

    # -- sessions --------------------------------------------------------------------------------------------------

    @property
    def has_liveness(self) -> bool:
        """Always true: the store detects dead sessions."""
        return True

    def register(self) -> int:
        return self._session.register(None, self._timeout)

    def announce_rank(self, rank: int) -> None:
        self._session.register(check_int64("rank", rank), self._timeout)

    def members(self, ranks: Iterable[int] | None = None) -> list[Member]:
        wanted = None if ranks is None else {check_int64("rank", rank) for rank in ranks}
        self._session.register(None, self._timeout)
        return [
            _member(number, record, lives=lives)
            for number, (record, lives) in self._session.roster(self._timeout).items()
            if wanted is None or wanted & set(record["ranks"])
        ]

    def _observe(self) -> tuple[list[Member], dict[int, ShownWait]]:
        # The clocks of two hosts may differ, so the duration of a wait may be wrong by the difference.
        roster, waits = self._session.roster(self._timeout), self._session.waits(self._timeout)
        members = [_member(number, record, lives=lives) for number, (record, lives) in roster.items()]
        return members, {number: wait for number, wait in waits.items() if number in roster and roster[number][1]}

    @property
    def _shows_waits(self) -> bool:
        return type(self).wait is EtcdStore.wait  # otherwise a subclass has its own wait

    def _wait_in_call(self, request: WaitRequest, timeout: float) -> Any:
        if request.kind != VALUES:
            return super()._wait_in_call(request, timeout)
        return self._values(request.keys, timeout) if request.keys else []

    def _wait(self, request: WaitRequest) -> Any:
        with self._watcher.part_of(request.slow_logger):
            return super()._wait(request)

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        wanted = [check_int64("rank", rank) for rank in ranks]
        return self._session.dead_ranks(wanted, self._timeout)

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:
        wanted = [check_int64("session", number) for number in numbers]
        roster = self._session.roster(self._timeout) if wanted else {}
        return [number for number in wanted if number in roster and not roster[number][1]]

    def _wait_beside(self, names: list[bytes], limit: float, find: Callable[[], list[int]]) -> list[int]:
        # The deletion of any session's lease key ends the sleep.
        lives = self._keys.lives
        deaths = WatchRange(lives, after_prefix(lives), deletions=True)

        def look(left: float) -> list[int] | KeySnapshot:
            seen = self._look(names, left)
            if not isinstance(seen, KeySnapshot):
                return []
            # The dead are read after the snapshot, and the watch starts at the snapshot. So no death is missed.
            dead = find()
            if not dead:
                return seen._replace(also=[deaths])
            # A dead process may have set the keys before it died, so check them again.
            return dead if isinstance(self._look(names, left), KeySnapshot) else []

        return self._watcher.wait(limit, look, "key")

    def _watch(self, prefix: bytes, after: Position | None, limit: float) -> EtcdWatch:
        _, revision = self._transactions.read([range_of(self._keys.values)], self._timeout)
        start = refuse_later(self._client, after, Position(revision, 0))
        return EtcdWatch(self._client, self._watcher, self._keys.values, prefix, start, limit)

    # -- the handle ------------------------------------------------------------------------------------------------

    def clone(self) -> EtcdStore:
        return self._with_prefix(self._prefix)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the address, the prefix and the timeout. The user and the password are not pickled."""
        access: Any = self._client.access._replace(user=None, password="")
        return partial(EtcdStore, access, self._prefix, self._timeout, session_ttl=self._session.ttl), ()

    def _with_prefix(self, prefix: bytes) -> EtcdStore:
        self._client.refuse_if_closed()
        access: Any = self._client.access  # only this class passes an `Access`
        return EtcdStore(
            access, prefix, self._timeout, user=access.user, password=access.password, session_ttl=self._session.ttl
        )

    def close(self) -> None:
        """Close the handle and end its session. Waits in other threads raise `~fscoord.StoreClosedError`."""
        self._session.end()
        self._client.close()

    # -- looks and changes -----------------------------------------------------------------------------------------

    def _look(self, names: list[bytes], limit: float) -> bool | KeySnapshot:
        """Return True if each of `names` has a value or a queue. Otherwise return a snapshot of the missing names."""
        operations = []
        for name in names:
            items = self._queue_range(name)
            operations.append(range_of(self._keys.value(name), keys_only=True))
            operations.append(range_of(items.key, items.end, keys_only=True, limit=1))
        answers, revision = self._transactions.read(operations, limit)
        missing = dict.fromkeys(
            name
            for name, *found in zip(names, answers[::2], answers[1::2], strict=True)
            if not any(map(key_values, found))
        )
        if not missing:
            return True
        watched = [[WatchRange(self._keys.value(name)), self._queue_range(name)] for name in missing]
        return KeySnapshot(revision, list(missing), watched)

    def _queue_range(self, name: bytes) -> WatchRange:
        queue = self._keys.queue(name)
        return WatchRange(queue, after_prefix(queue))

    def _values(self, names: list[bytes], limit: float) -> list[bytes]:
        operations = [range_of(self._keys.value(name)) for name in names]

        def look(left: float) -> list[bytes] | KeySnapshot:
            answers, revision = self._transactions.read(operations, left)
            values = [key_values(answer) for answer in answers]
            missing = dict.fromkeys(name for name, value in zip(names, values, strict=True) if not value)
            if missing:
                return KeySnapshot(revision, list(missing), [[WatchRange(self._keys.value(name))] for name in missing])
            return [unb64(value[0].get("value")) for value in values]

        return self._watcher.wait(limit, look, "key", (lambda value: [value]) if len(names) == 1 else None)

    def _change(self, name: bytes, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Set the key `name` to the value that `change` computes from its current value.

        The transaction has a condition: the key still has the revision of the value that was passed to `change`. If the
        condition fails, nothing was written, the answer contains the new value, and the transaction is retried. If the
        response is lost, the transaction is not retried, because etcd may have committed the first try.

        The first try uses the revision and the value in the cache, which may be out of date. So if `change` raises or
        returns None for a cached value, the key is read, and `change` is called again.

        Args:
            name: the key.
            change: a function that is called with the current value (None if the key is missing), and returns the new
                value. If the result is None, nothing is written.

        Returns:
            The value of the key after the call.

        Raises:
            StoreTimeoutError: other processes changed the key before each try.
        """
        key = self._keys.value(name)
        revision, current = self._revision_cache.pop(name, (0, None))
        backoff = Backoff(self._timeout)
        is_certain = False
        while True:
            try:
                value = change(current)
            except (NotACounterError, CounterRangeError):
                if is_certain:
                    raise
                value = None
            if value is not None:
                done = self._transactions.write(
                    [put(key, value)], self._timeout, [compare(key, "mod", revision)], [range_of(key)]
                )
                answers = done.answers
                if done.is_done:
                    if len(value) <= CACHED_VALUE_BYTES_MAX:  # for the next `_change`
                        _keep(self._revision_cache, name, (done.revision, value))
                    return value
            elif is_certain:
                return current
            else:
                answers, _ = self._transactions.read([range_of(key)], self._timeout)
            now = key_values(answers[0])
            revision, current = (int(now[0]["mod_revision"]), unb64(now[0].get("value"))) if now else (0, None)
            if is_certain:
                self._transactions.pause_before_retry(backoff, f"changed key {key_text(name)!r}", name)
            is_certain = True

    def _pop(self, name: bytes, limit: float) -> bytes | KeySnapshot:
        """Remove and return the oldest value of queue `name`. If the queue is empty, return a snapshot for a watch.

        The deletion has the condition that the first key still has its creation revision, so two handles never remove
        the same value. If the condition fails, the answer contains the new first keys. If the response is lost, the
        value may have been removed.
        """
        items = self._queue_range(name)
        oldest = range_of(
            items.key, items.end, keys_only=True, sort_target="CREATE", sort_order="ASCEND", limit=QUEUE_HEADS_MAX
        )
        heads, revision = self._queue_heads.pop(name, []), 0
        if not heads:
            answers, revision = self._transactions.read([oldest], limit)
            heads = key_values(answers[0])
        backoff = Backoff(limit)
        while heads:
            head, known = unb64(heads[0]["key"]), int(heads[0]["create_revision"])
            done = self._transactions.write(
                [delete(head, prev_kv=True)], self._timeout, [compare(head, "create", known)], [oldest]
            )
            if done.is_done:
                _keep(self._queue_heads, name, heads[1:])
                return unb64(key_values(done.answers[0])[0].get("value"))
            heads, revision = key_values(done.answers[0]), done.revision
            if heads:
                self._transactions.pause_before_retry(
                    backoff, f"took the first value of queue {key_text(name)!r}", name
                )
        return KeySnapshot(revision, [name], [[items]])


def cas_delay() -> None:
    """Sleep for a random time up to 0.1 s, as torch's ``etcd_store.cas_delay`` does.

    A program may call this function between its retries. The store itself does not call it, but uses a `Backoff`.
    """
    system.time.sleep(system.random_bytes(1)[0] / 2560)


def _keep(cache: dict[bytes, T], name: bytes, value: T) -> None:
    """Set ``cache[name]`` to `value`. If the cache is full, remove all its entries first."""
    if len(cache) >= CACHED_KEYS_MAX:
        cache.clear()
    cache[name] = value


def _value_in(answer: dict[str, Any]) -> bytes | None:
    """Return the value from `answer`, the answer to a read or a deletion of one key. None: the key had no value."""
    found = key_values(answer)
    return unb64(found[0].get("value")) if found else None


def _check_prefix(prefix: Key) -> bytes:
    """Check `prefix`, and return it as bytes that end with a slash."""
    name = key_bytes(prefix)
    if not name.strip(b"/"):
        raise ValueError(f"the prefix {prefix!r} is empty: give the store a name of its own in etcd, such as 'job42/'")
    if b"\0" in name or any(part.startswith(b"=") for part in name.split(b"/")):
        raise ValueError(
            f"the prefix {prefix!r} has a NUL, or a part that begins with an equals sign: choose another prefix"
        )
    return name if name.endswith(b"/") else name + b"/"


def _member(number: int, record: dict[str, Any], *, lives: bool) -> Member:
    return Member(
        number=number,
        host=record["host"],
        pid=record["pid"],
        rank=record["ranks"][-1] if record["ranks"] else None,
        label=record["label"],
        since=record["since"],
        alive="yes" if lives else "no",
    )
