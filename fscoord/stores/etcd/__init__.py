"""`EtcdStore`: the store contract on etcd, for jobs that outgrow one file system."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from fscoord._runtime import system
from fscoord._waiting.backoff import Backoff
from fscoord.arguments import (
    DEFAULT_TIMEOUT,
    CounterRangeError,
    Key,
    NotACounterError,
    Timeout,
    Value,
    counter_sum,
    integer,
    key_bytes,
    key_text,
    keys_bytes,
    pairs_bytes,
    positive,
    seconds,
    value_bytes,
)
from fscoord.capabilities import Capabilities
from fscoord.errors import QueueEmptyError
from fscoord.stores.etcd.address import access_of
from fscoord.stores.etcd.handle import Look, Watched
from fscoord.stores.etcd.requests import Names, after_prefix, compare, decoded, delete, found, put, range_of
from fscoord.stores.etcd.sessions import EtcdSessions

__all__ = ["EtcdStore"]

VALUE_MAX: Final = 3 << 19
"""1.5 MiB: what a server takes in one request, if it was told no other ``--max-request-bytes``."""

HINTS_MAX: Final = 1024
"""Of how many keys a handle remembers the revision, so that the next change of one takes one request instead of two."""

HINT_BYTES_MAX: Final = 64

HEADS_MAX: Final = 16
"""How many values at a queue's head are asked for: etcd sorts the whole queue for that. A handle remembers them: what
was older is gone for good, and what comes is younger, so that each is the oldest as soon as those before it are taken.
"""


class EtcdStore(EtcdSessions):
    """A store in the keys of an etcd cluster, version 3.4 or newer, below one prefix (extra ``etcd``).

    A wait is one watch from the revision of the last look, so that nothing is missed and nothing is polled. It survives
    that the servers restart. A write whose answer was lost raises with ``maybe_applied``; one that never left is sent
    to the next member, until the timeout. Time-outs are met; only a server that takes a connection and then says
    nothing has five seconds for its answer, however short the timeout.

    One transaction takes 4096 keys (more in one `multi_set` are refused) and one request 1.5 MiB, unless the server
    was told otherwise; what is over raises `~fscoord.LimitExceededError`, and nothing is written. `add`, `append` and
    `compare_set` try again when somebody else was quicker. A blocked `queue_pop` is woken by each push.

    A handle that announces a rank, or is registered by `register`, holds a lease of etcd from then on, which a
    thread keeps alive. A process that dies is called dead when the lease is over; one that can't keep it (stopped, or
    cut off, for longer than `session_ttl`) too, and its writes raise `~fscoord.SessionDeadError` from
    then on.

    Args:
        client_or_url: where the cluster is: ``"etcd://h1:2379,h2:2379"`` (or ``http://``, ``https://``, or nothing in
            front), or a client of etcd3gw, whose address and TLS files are taken.
        prefix: what all keys of this store begin with in etcd, ``str`` or ``bytes``; it gets a slash at its end if it
            has none. Stores with other prefixes see nothing of it. No part of it begins with an equals sign.
        timeout: how long operations wait by default, in seconds or as a `timedelta`; None means 300 seconds.
        user: the name to log in with, where the cluster wants one.
        password: its password.
        tls: speak TLS; a ``https://`` address or one of the next three says so too.
        cacert: the file with the certificates to trust, instead of the system's.
        cert: the file with the client's own certificate.
        key: the file with its key.
        session_ttl: after how many seconds without a sign of life etcd takes a session for dead.

    Raises:
        ImportError: there is no urllib3.
        ValueError: an address or the prefix makes no sense.
    """

    capabilities = Capabilities(
        processes=True, hosts=True, durable=True, survives_handles=True, sessions=True, value_max=VALUE_MAX
    )

    def __init__(
        self,
        client_or_url: Any,
        prefix: Key,
        timeout: Timeout | None = None,
        *,
        user: str | None = None,
        password: str = "",
        tls: bool = False,
        cacert: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        session_ttl: int = 10,
    ) -> None:
        from fscoord.stores.etcd.client import Cluster

        self._timeout = seconds(DEFAULT_TIMEOUT if timeout is None else timeout)
        self._session_ttl = positive("session_ttl", session_ttl)
        self._prefix = _checked(prefix)
        self._names = Names(self._prefix)
        self._begin_without_session()
        access = access_of(client_or_url, tls=tls, cacert=cacert, cert=cert, key=key)
        self._cluster = Cluster(access._replace(user=user, password=password))
        self._hints: dict[bytes, tuple[int, bytes]] = {}
        self._heads: dict[bytes, list[dict[str, Any]]] = {}

    def __repr__(self) -> str:
        return f"EtcdStore({str(self._cluster)!r}, {key_text(self._prefix)!r})"

    @property
    def address(self) -> str:
        """Where this store is, for `~fscoord.open_store`; the password, if there is one, stands in it."""
        return self._cluster.access.url(self._prefix, session_ttl=self._session_ttl)

    def below(self, name: str) -> EtcdStore:
        """Return a store with the prefix ``{prefix}/{name}/``, of which this one sees nothing."""
        return self._with_prefix(self._prefix + key_bytes(name))

    def erase(self) -> None:
        """Delete all that this store keeps in etcd, its sessions too: for when nobody uses it any more."""
        own = self._prefix + b"="
        self._write([delete(own, after_prefix(own))])

    # -- values ----------------------------------------------------------------------------------------------------

    def set(self, key: Key, value: Value) -> None:
        """See `Store.set`."""
        name, data = key_bytes(key), value_bytes(value)
        self._write([put(self._names.value(name), data)])

    def get(self, key: Key) -> bytes:
        """See `Store.get`."""
        return self._values([key_bytes(key)])[0]

    def add(self, key: Key, amount: int) -> int:
        """See `Store.add`."""
        name = key_bytes(key)
        integer("amount", amount)
        return int(self._change(name, lambda current: b"%d" % counter_sum(current, amount, name)) or 0)

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """See `Store.compare_set`."""
        name, old, new = key_bytes(key), value_bytes(expected), value_bytes(desired)
        value = self._change(name, lambda current: new if current == old or not (current or old) else None)
        return old if value is None else value

    def append(self, key: Key, value: Value) -> None:
        """See `Store.append`."""
        name, more = key_bytes(key), value_bytes(value)
        self._change(name, lambda current: value_bytes((current or b"") + more))

    def delete_key(self, key: Key) -> bool:
        """See `Store.delete_key`."""
        name = key_bytes(key)
        items = self._items(name)
        done = self._write([delete(self._names.value(name)), delete(items.key, items.end)])
        return any(int(answer.get("deleted", 0)) for answer in done.answers)

    def multi_get(self, keys: Iterable[Key]) -> list[bytes]:
        """See `Store.multi_get`."""
        names = keys_bytes(keys)
        return self._values(names) if names else []

    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        """See `Store.multi_set`."""
        pairs = dict(pairs_bytes(keys, values))  # etcd refuses a key that is there twice; here the last one counts
        if pairs:
            self._write([put(self._names.value(name), value) for name, value in pairs.items()])

    # -- keys ------------------------------------------------------------------------------------------------------

    def check(self, keys: Iterable[Key]) -> bool:
        """See `Store.check`."""
        names = keys_bytes(keys)
        return not names or self._look(names, self._timeout) is True

    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        """See `Store.wait`."""
        names = keys_bytes(keys)
        limit = self._timeout if timeout is None else seconds(timeout)
        if names:
            self._await(limit, lambda left: self._look(names, left), "key")

    def num_keys(self) -> int:
        """See `Store.num_keys`."""
        values = self._names.values
        answers, _ = self._read([range_of(values, after_prefix(values), count_only=True)])
        return int(answers[0].get("count", 0))

    def list_keys(self, prefix: Key = "") -> list[str]:
        """See `Store.list_keys`."""
        start = self._names.value(key_bytes(prefix))
        answers, _ = self._read([range_of(start, after_prefix(start), keys_only=True)])
        return [key_text(decoded(each["key"])[len(self._names.values) :]) for each in found(answers[0])]

    # -- queues ----------------------------------------------------------------------------------------------------

    def queue_push(self, key: Key, value: Value) -> None:
        """See `Store.queue_push`. The order is that in which etcd created the values."""
        name, data = key_bytes(key), value_bytes(value)
        self._write([put(self._names.queue(name) + system.random_bytes(16).hex().encode(), data)])

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """See `Store.queue_pop`."""
        name = key_bytes(key)
        if block:
            return self._await(self._timeout, lambda left: self._pop(name, left), "a value in queue")
        value = self._pop(name, self._timeout)
        if isinstance(value, Look):
            raise QueueEmptyError(f"queue {key_text(name)!r} is empty")
        return value

    def queue_len(self, key: Key) -> int:
        """See `Store.queue_len`."""
        items = self._items(key_bytes(key))
        answers, _ = self._read([range_of(items.key, items.end, count_only=True)])
        return int(answers[0].get("count", 0))

    # -- the handle ------------------------------------------------------------------------------------------------

    def clone(self) -> EtcdStore:
        """See `Store.clone`."""
        return self._with_prefix(self._prefix)

    def _with_prefix(self, prefix: bytes) -> EtcdStore:
        self._cluster.refuse_if_closed()
        access = self._cluster.access
        return EtcdStore(
            access,
            prefix,
            self._timeout,
            user=access.user,
            password=access.password,
            session_ttl=self._session_ttl,
        )

    def close(self) -> None:
        """See `Store.close`. It ends the session; threads that wait get a `~fscoord.StoreClosedError`."""
        lease = self._lease
        if lease is not None:
            self._ended.detach()
            self._lease = None
            lease.end()
        self._cluster.close()

    def _values(self, names: list[bytes]) -> list[bytes]:
        operations = [range_of(self._names.value(name)) for name in names]

        def look(left: float) -> list[bytes] | Look:
            answers, revision = self._read(operations, left)
            values = [found(answer) for answer in answers]
            absent = dict.fromkeys(name for name, value in zip(names, values, strict=True) if not value)
            if absent:
                return Look(revision, list(absent), [[Watched(self._names.value(name))] for name in absent])
            return [decoded(value[0].get("value")) for value in values]

        return self._await(self._timeout, look, "key", (lambda value: [value]) if len(names) == 1 else None)

    def _change(self, name: bytes, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Give `name` the value that `change` makes of the one it has (None: none), unless that is None.

        Returns:
            The value that it has then.

        Raises:
            StoreTimeoutError: others were quicker, again and again.
        """
        key = self._names.value(name)
        revision, current = self._hints.pop(name, (0, None))
        backoff = Backoff(self._timeout)
        is_certain = False  # what is remembered may be long past, and then says nothing
        while True:
            try:
                value = change(current)
            except (NotACounterError, CounterRangeError):
                if is_certain:
                    raise
                value = None
            if value is not None:
                done = self._write([put(key, value)], [compare(key, "mod", revision)], [range_of(key)])
                answers = done.answers
                if done.is_done:
                    self._remember(name, done.revision, value)
                    return value
            elif is_certain:
                return current
            else:
                answers, _ = self._read([range_of(key)])
            now = found(answers[0])
            revision, current = (int(now[0]["mod_revision"]), decoded(now[0].get("value"))) if now else (0, None)
            if is_certain:
                self._pause(backoff, f"changed key {key_text(name)!r}", name)
            is_certain = True

    def _remember(self, name: bytes, revision: int, value: bytes) -> None:
        """Keep for the next `_change` what `name` has now."""
        if len(value) <= HINT_BYTES_MAX:
            if len(self._hints) >= HINTS_MAX:
                self._hints.clear()
            self._hints[name] = (revision, value)

    def _pop(self, name: bytes, limit: float) -> bytes | Look:
        """Return the oldest value of queue `name`, after taking it, or what to wait for."""
        items = self._items(name)
        oldest = range_of(
            items.key, items.end, keys_only=True, sort_target="CREATE", sort_order="ASCEND", limit=HEADS_MAX
        )
        heads, revision = self._heads.pop(name, []), 0
        if not heads:
            answers, revision = self._read([oldest], limit)
            heads = found(answers[0])
        backoff = Backoff(limit)
        while heads:
            head, known = decoded(heads[0]["key"]), int(heads[0]["create_revision"])
            done = self._write([delete(head, prev_kv=True)], [compare(head, "create", known)], [oldest])
            if done.is_done:
                if len(self._heads) >= HINTS_MAX:
                    self._heads.clear()
                self._heads[name] = heads[1:]
                return decoded(found(done.answers[0])[0].get("value"))
            heads, revision = found(done.answers[0]), done.revision
            if heads:
                self._pause(backoff, f"took the first value of queue {key_text(name)!r}", name)
        return Look(revision, [name], [[items]])


def _checked(prefix: Key) -> bytes:
    name = key_bytes(prefix)
    if not name.strip(b"/"):
        raise ValueError(f"the prefix {prefix!r} is empty: give the store a name of its own in etcd, such as 'job42/'")
    if b"\0" in name or any(part.startswith(b"=") for part in name.split(b"/")):
        raise ValueError(f"the prefix {prefix!r} has a NUL, or a part that begins with an equals sign: choose another")
    return name if name.endswith(b"/") else name + b"/"
