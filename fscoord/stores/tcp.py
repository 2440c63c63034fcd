"""`TCPStore`: torch's TCP store behind the contract of `Store`, for jobs that have a port but no directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from fscoord import _system as system
from fscoord.arguments import (
    DEFAULT_TIMEOUT,
    Key,
    Timeout,
    Value,
    counter_sum,
    integer,
    key_bytes,
    key_text,
    keys_bytes,
    missing_message,
    pairs_bytes,
    seconds,
    value_bytes,
)
from fscoord.capabilities import Capabilities
from fscoord.errors import (
    LimitExceededError,
    QueueEmptyError,
    StoreError,
    StoreTimeoutError,
)
from fscoord.store import Store
from fscoord.stores.tcp_connections import Connections
from fscoord.stores.tcp_waits import Channel, Waits

__all__ = ["TCPStore"]

R = TypeVar("R")
T = TypeVar("T")

PAYLOAD_MAX: Final = 8 << 20
"""The most that torch's server takes in one piece; at more it drops the connection."""

AGAIN_S: Final = 0.5
"""How often who waits for a queue asks anew: the server wakes one for each value, who may be interrupted then."""

RECHECK_S: Final = 0.01
"""How soon to look again, after a second look in vain, at what the server says is there: a queue, but no value."""


class TCPStore(Store):
    """A store in a server that one of the processes runs, by torch's own ``TCPStore`` (extra ``torch``).

    What differs from torch's: a deadline is met to the millisecond by every operation, Ctrl-C ends a wait at once, one
    in vain prints nothing, and a server that hangs meanwhile is found out; an `add` to what is no integer leaves the
    connection whole, threads do not wait for each other, and errors are of fscoord's tree and name the missing keys.

    What can't be had by this protocol: a value over 8 MiB is refused; `delete_key` of a key that has both a value and a
    queue is not one step; keys that are no UTF-8 can't be listed; `add` beside somebody who writes, at the same moment,
    what is no integer loses that connection, and says so. When the master closes its store, the store is gone. torch's
    server asks the resolver for the name of each client that connects, and serves nobody meanwhile: where no name
    server answers, each connection costs all of them seconds, and deadlines are late by as much.

    Args:
        host_name: where the server listens.
        port: its port; 0 lets the master choose a free one, see `port`.
        world_size: how many stores the master waits for.
        is_master: run the server in this process.
        timeout: how long operations wait by default, connecting included.
        wait_for_workers: whether the master waits until `world_size` stores are connected.
        multi_tenant: share the server with others of this process on the same port.
        master_listen_fd: a listening socket for the server.
        use_libuv: which of torch's two servers.

    Raises:
        ImportError: there is no torch.
        StoreUnavailableError: there is no server, or its port is taken.
    """

    capabilities = Capabilities(
        processes=True,
        hosts=True,
        survives_first_handle=False,
        lists_any_key=False,
        deletes_at_once=False,
        value_max=PAYLOAD_MAX,
    )

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        self._timeout = seconds(timeout)
        self._use_libuv = use_libuv
        self._connections = Connections(
            host_name,
            integer("port", port),
            self._timeout,
            use_libuv=use_libuv,
            world_size=world_size,
            is_master=is_master,
            wait_for_workers=wait_for_workers,
            multi_tenant=multi_tenant,
            master_listen_fd=master_listen_fd,
        )
        self._waits = Waits(self._connections)
        self._call = self._connections.call
        self._errors = self._connections.torch

    def __repr__(self) -> str:
        return f"TCPStore({self.host!r}, {self.port})"

    @property
    def host(self) -> str:
        """Where the server listens."""
        return self._connections.host

    @property
    def port(self) -> int:
        """The server's port."""
        return self._connections.port

    def _await(
        self, limit: float, names: list[bytes], what: str, read: Callable[[Channel], R], take: Callable[[R], T | None]
    ) -> T:
        """Return what `take` makes of what `read` finds once the server has all of `names`; else name the missing ones.

        If `take` returns None that was not it, and the wait goes on.
        """
        started = system.time.monotonic()
        left, pause = limit, 0.0
        while True:
            found = self._waits.until(names, min(left, AGAIN_S) if what == _QUEUE else left, read)
            taken = None if found is None else take(found)
            if taken is not None:
                return taken
            waited = system.time.monotonic() - started
            if waited >= limit:
                missing = [name for name in dict.fromkeys(names) if not self._has(name, what)] or names
                raise StoreTimeoutError(
                    f"{self._connections}: {missing_message(what, missing, waited)}",
                    keys=[key_text(name) for name in missing],
                    waited=waited,
                )
            if found is not None:
                system.time.sleep(min(pause, limit - waited))
                pause = RECHECK_S
            left = max(0.0, started + limit - system.time.monotonic())

    def _put(self, name: bytes, write: Callable[[Any], object]) -> None:
        """Have `write` done, and know it: the server answers no such request, but it takes them in order."""

        def put(connection: Any) -> None:
            write(connection)
            connection.check([name])

        self._call(put, writes=True)

    def _has(self, name: bytes, what: str) -> bool:
        there = bool(self._call(lambda connection: connection.check([name])))
        return there and not (what == _VALUE and self._value(name) is None)

    # -- values ----------------------------------------------------------------------------------------------------

    def set(self, key: Key, value: Value) -> None:
        """See `Store.set`."""
        name, data = key_bytes(key), _small(value_bytes(value))
        self._put(name, lambda connection: connection.set(name, data))

    def get(self, key: Key) -> bytes:
        """See `Store.get`."""
        name = key_bytes(key)
        return self._values([name])[0]

    def add(self, key: Key, amount: int) -> int:
        """See `Store.add`. The server drops who adds to what is no integer, so that is looked at first."""
        name = key_bytes(key)
        integer("amount", amount)

        def add(connection: Any) -> int:
            counter_sum(_value(connection, name), amount, name)
            return int(connection.add(name, amount))

        return self._call(add, writes=True)

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """See `Store.compare_set`."""
        name, wanted, data = key_bytes(key), _small(value_bytes(expected)), _small(value_bytes(desired))
        return bytes(self._call(lambda connection: connection.compare_set(name, wanted, data), writes=True))

    def append(self, key: Key, value: Value) -> None:
        """See `Store.append`."""
        name, data = key_bytes(key), _small(value_bytes(value))
        self._put(name, lambda connection: connection.append(name, data))

    def delete_key(self, key: Key) -> bool:
        """See `Store.delete_key`. The server keeps a queue apart from a value, so it is emptied one by one."""
        name = key_bytes(key)
        there = bool(self._call(lambda connection: connection.delete_key(name), writes=True))
        for _ in range(self.queue_len(name)):  # no more than there were: others may push faster than this takes
            if self._pop(name) is None:
                break
            there = True
        return there

    def multi_get(self, keys: Iterable[Key]) -> list[bytes]:
        """See `Store.multi_get`."""
        names = keys_bytes(keys)

        return self._values(names) if names else []

    def _values(self, names: list[bytes]) -> list[bytes]:
        return self._await(
            self._timeout, names, _VALUE, lambda channel: channel.values(names), lambda values: self._all(names, values)
        )

    def _all(self, names: list[bytes], values: list[bytes]) -> list[bytes] | None:
        """Return `values`, unless one of them is none.

        The server ends a wait also when there is none: for a queue, and after a `compare_set` that wrote nothing. Then
        it answers with the empty value.
        """
        found = []
        for name, read in zip(names, values, strict=True):
            value = read or self._value(name)
            if value is None:
                return None
            found.append(value)
        return found

    def _value(self, name: bytes) -> bytes | None:
        return self._call(lambda connection: _value(connection, name))

    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        """See `Store.multi_set`."""
        pairs = pairs_bytes(keys, values)
        _small(b"", sum(len(name) + len(value) for name, value in pairs))
        if pairs:
            names, contents = zip(*pairs, strict=True)
            self._put(names[0], lambda connection: connection.multi_set(names, contents))

    # -- keys ------------------------------------------------------------------------------------------------------

    def check(self, keys: Iterable[Key]) -> bool:
        """See `Store.check`."""
        names = keys_bytes(keys)
        return bool(self._call(lambda connection: connection.check(names))) if names else True

    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        """See `Store.wait`."""
        names = keys_bytes(keys)
        limit = self._timeout if timeout is None else seconds(timeout)
        if names:
            self._await(limit, names, "key", lambda channel: channel.check(names), lambda there: there or None)

    def num_keys(self) -> int:
        """See `Store.num_keys`."""
        return int(self._call(lambda connection: connection.num_keys()))

    def list_keys(self, prefix: Key = "") -> list[str]:
        """See `Store.list_keys`."""
        start = key_bytes(prefix)
        try:
            names = self._call(lambda connection: connection.list_keys())
        except UnicodeDecodeError as error:
            raise StoreError(
                f"{self._connections}: a key is no UTF-8, and torch's store can't list such keys"
            ) from error
        return [key_text(name) for name in sorted(map(key_bytes, names)) if name.startswith(start)]

    # -- queues ----------------------------------------------------------------------------------------------------

    def queue_push(self, key: Key, value: Value) -> None:
        """See `Store.queue_push`."""
        name, data = key_bytes(key), _small(value_bytes(value))
        self._put(name, lambda connection: connection.queue_push(name, data))

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """See `Store.queue_pop`."""
        name = key_bytes(key)
        if block:
            return self._await(self._timeout, [name], _QUEUE, lambda _: True, lambda _: self._pop(name))
        value = self._pop(name)
        if value is None:
            raise QueueEmptyError(f"queue {key_text(name)!r} is empty")
        return value

    def _pop(self, name: bytes) -> bytes | None:
        try:
            return bytes(self._call(lambda connection: connection.queue_pop(name, False), writes=True))
        except self._errors.QueueEmptyError:
            return None

    def queue_len(self, key: Key) -> int:
        """See `Store.queue_len`."""
        name = key_bytes(key)
        return int(self._call(lambda connection: connection.queue_len(name)))

    # -- the handle ------------------------------------------------------------------------------------------------

    def clone(self) -> TCPStore:
        """See `Store.clone`."""
        self._connections.refuse_if_closed()
        limit = self._connections.limit  # to connect takes its time, also where a look may take none
        clone = TCPStore(self.host, self.port, timeout=limit, wait_for_workers=False, use_libuv=self._use_libuv)
        clone._timeout = self._timeout
        return clone

    def close(self) -> None:
        """See `Store.close`. The master's ends the server."""
        self._connections.close()
        self._waits.close()


_VALUE: Final = "the value of key"
_QUEUE: Final = "a value in queue"


def _value(connection: Any, name: bytes) -> bytes | None:
    """Return the value of `name`, or None; without waiting, whatever it is, and whether there is a queue or not."""
    nonce = system.random_bytes(16)
    value = bytes(connection.compare_set(name, nonce, nonce))
    return None if value == nonce else value


def _small(data: bytes, size: int | None = None) -> bytes:
    size = len(data) if size is None else size
    if size > PAYLOAD_MAX:
        raise LimitExceededError(f"{size} bytes are over the {PAYLOAD_MAX} that torch's TCP store takes at once")
    return data
