"""`TCPStore`: the store contract on torch's TCP store, for jobs whose hosts share a network but no directory.

This module translates each operation of the contract into requests. The module `wire` sends requests over one
connection, and has `Deadline`, the time limit of a call. `connections` gives each call a connection of its own, so that
no call waits for another call. `server` starts and stops torch's server; only `server` needs torch. Processes need no
lock between them, because the server answers one request after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, TypeVar

from fscoord._arguments import (
    DEFAULT_TIMEOUT,
    Key,
    Timeout,
    Value,
    check_int64,
    counter_sum,
    key_bytes,
    key_text,
    keys_bytes,
    pairs_bytes,
    to_seconds,
    value_bytes,
)
from fscoord._runtime import system
from fscoord._waiting.wait import KEYS, VALUES, ArrivalRequest, WaitRequest, WaitSteps
from fscoord.errors import LimitExceededError, QueueEmptyError, StoreError, StoreTimeoutError, StoreUnavailableError
from fscoord.store import NUM_MEMBERS, Capabilities, Store, kept, shown_handle
from fscoord.stores.tcp.connections import BlockingCalls, Connections
from fscoord.stores.tcp.server import Server
from fscoord.stores.tcp.wire import Channel, Deadline

__all__ = ["TCPStore"]

T = TypeVar("T")

PAYLOAD_MAX: Final = 8 << 20
"""The longest key or value in a request, in bytes. torch's server closes the connection if a key or value is longer."""

WORKERS_POLL_S: Final = 0.02
"""The interval, in seconds, at which the master asks how many stores have connected."""


POLL_S: Final = 0.1
"""The interval, in seconds, at which a task of an event loop reads the counter of a barrier."""


class TCPStore(Store):
    """A store in a server that one of the processes, the master, runs: the server of torch's own ``TCPStore``.

    The master needs the extra ``torch``. The other processes use the server's protocol without torch.

    These are the differences from torch's own ``TCPStore``:

    - Every operation keeps its deadline, even if the server's process is stopped or the network is cut.
    - Ctrl-C ends an operation at once.
    - A wait that times out prints nothing.
    - An `add` to a value that is not an integer does not break the connection.
    - Threads do not wait for each other.
    - Errors are those of fscoord, and name the missing keys.

    While the server answers, operations keep their deadlines to the millisecond. If the server does not answer, an
    operation waits at least 2 s for the answer, and a wait ends 0.1 s after its deadline. Then the operation raises
    `~fscoord.StoreUnavailableError`. If a write was sent, the error has ``maybe_applied`` set, because the write may
    take effect when the server continues. The connection is closed, and the next operation opens a new connection. So
    the store works again as soon as the server does. Nothing else remains of a failed call, except one thread if the
    resolver does not answer.

    The protocol has these limits:

    - A value over 8 MiB is refused.
    - `delete_key` of a key that has both a value and a queue is not atomic.
    - If another process sets the key to a value that is not an integer during an `add`, the server closes the
      connection, and the `add` raises an error that names this cause.
    - If two callers arrive at a `barrier` at the same moment and only one is missing, both may pass.
    - If the answer to a `queue_pop` is lost, the value is lost, because the server has removed it from the queue.
    - When the master closes its store, the data of the store is lost.
    - torch's server asks the resolver for the name of each new client, and serves no client meanwhile. If no name
      server answers, each new connection delays all clients by seconds.

    Args:
        host_name: the host on which the server listens.
        port: the port on which the server listens. 0: the master chooses a free port. The property `port` has its
            number.
        world_size: the number of stores for which the master waits.
        is_master: whether to run the server in this process.
        timeout: the default timeout of operations, also for connecting, in seconds or as a `timedelta`; None means 300
            seconds.
        wait_for_workers: whether the master waits until `world_size` stores are connected.
        multi_tenant: whether to share the server with other stores of this process on the same port.
        master_listen_fd: the descriptor of a listening socket for the server; None: the server opens one.
        use_libuv: whether the master runs torch's server with libuv. If False, it runs torch's other server, which has
            no queues.

    Raises:
        ValueError: `world_size` is 0, or `port` is 0 and this process is not the master. Or `use_libuv` is True, and
            the installed torch has no such server, or one that does not accept `master_listen_fd`, as torch 2.6.
        ImportError: this process is the master, and torch is not installed.
        StoreUnavailableError: no server answers at the address, or the port is taken.
        StoreTimeoutError: fewer than `world_size` stores connected in time.
    """

    capabilities: Capabilities = Capabilities(
        processes=True, hosts=True, survives_first_handle=False, deletes_at_once=False, value_max=PAYLOAD_MAX
    )

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout | None = None,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        if world_size == 0:
            raise ValueError("world_size is 0; give the number of stores that connect, the master's included, or None")
        if check_int64("port", port) == 0 and not is_master:
            raise ValueError("port is 0, but only a master can choose a free port; pass the port of the server")
        self._timeout = self._limit = to_seconds(DEFAULT_TIMEOUT if timeout is None else timeout)
        self._keeps_queues: bool | None = None
        self._has_barriers: bool | None = None
        started = system.time.monotonic()
        self._server = None
        if is_master:
            self._server = Server(
                host_name,
                port,
                self._limit,
                use_libuv=use_libuv,
                multi_tenant=multi_tenant,
                master_listen_fd=master_listen_fd,
            )
            port = self._server.port
        self._connections = Connections(host_name, port)
        self._blocking = BlockingCalls(self._connections)
        try:
            deadline = self._connections.deadline(self._limit - (system.time.monotonic() - started))
            self._connections.await_server(deadline)
            if wait_for_workers and world_size is not None and world_size >= 0:
                self._await_workers(world_size, deadline)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return shown_handle(f"TCPStore({self.host!r}, {self.port})", is_closed=self._connections.is_closed)

    @property
    def host(self) -> str:
        """The host on which the server listens."""
        return self._connections.host

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return self._connections.port

    def _call(self, operation: Callable[[Channel], T]) -> T:
        return self._connections.call(operation, self._deadline())

    def _deadline(self) -> Deadline:
        return self._connections.deadline(self._timeout)

    def _await_workers(self, world_size: int, deadline: Deadline) -> None:
        """Count this store as connected. In the master, also wait until `world_size` stores are connected."""
        present = self._connections.call(lambda channel: channel.add_worker(1), deadline)
        workers = Deadline(deadline.left(), lambda: f"{world_size} stores to connect to {self._connections}")
        while self._server is not None and present < world_size:
            if not deadline.left():
                waited = deadline.waited()
                raise StoreTimeoutError(
                    f"{self._connections}: {present} of {world_size} stores connected within {waited:.3g} s",
                    waited=waited,
                )
            workers.remind()
            system.time.sleep(min(WORKERS_POLL_S, deadline.left()))
            answer = self._connections.deadline(deadline.left())  # a server under load may need longer than is left
            present = self._connections.call(lambda channel: channel.add_worker(0), answer)

    def _has_queues(self, deadline: Deadline) -> bool:
        """Return whether the server has queues. torch's server without libuv and older servers have none."""
        if self._keeps_queues is None:
            length = self._answer_if_known(lambda channel: channel.queue_len(b""), deadline)
            self._keeps_queues = length is not None
        return self._keeps_queues

    def _answer_if_known(self, request: Callable[[Channel], T], deadline: Deadline) -> T | None:
        """Return the server's answer to `request`, which must change nothing, or None if the server does not know it.

        torch's server closes the connection when it receives a request that it does not know. If the connection is
        lost, a ping on a new connection shows whether the server still runs. If the server runs, the request is sent
        once more.
        """
        for _ in range(2):
            try:
                return self._connections.call(request, deadline)
            except StoreUnavailableError as error:
                if error.errno == system.errno.ETIMEDOUT:
                    raise
                self._connections.call(Channel.ping, deadline)  # raises if the server is gone
        return None

    def _queue_call(self, operation: Callable[[Channel], T]) -> T:
        deadline = self._deadline()
        self._refuse_without_queues(deadline)
        return self._connections.call(operation, deadline)

    def _refuse_without_queues(self, deadline: Deadline) -> None:
        if not self._has_queues(deadline):
            raise StoreError(
                f"{self._connections}: this server of torch keeps no queues; start it with use_libuv=True, with a torch"
                " whose TCPStore has the method queue_push"
            )

    # -- values ----------------------------------------------------------------------------------------------------

    def set(self, key: Key, value: Value) -> None:
        name, data = key_bytes(key), _check_payload(value_bytes(value))
        self._call(lambda channel: channel.set(name, data))

    get = kept(Store.get)
    multi_get = kept(Store.multi_get)

    def _peek(self, key: bytes) -> bytes | None:
        return self._call(lambda channel: channel.value(key))

    def _wait_in_call(self, request: WaitRequest, timeout: float) -> Any:
        if request.kind != VALUES:
            return super()._wait_in_call(request, timeout)
        return self._blocking.get(request.keys, timeout) if request.keys else []

    def add(self, key: Key, amount: int) -> int:
        # The value is read first: if it were not an integer, the server would close the connection.
        name = key_bytes(key)
        amount = check_int64("amount", amount)

        def add(channel: Channel) -> int:
            counter_sum(channel.value(name), amount, name)
            return channel.add(name, amount)

        return self._call(add)

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        name, wanted, data = key_bytes(key), _check_payload(value_bytes(expected)), _check_payload(value_bytes(desired))
        return self._call(lambda channel: channel.compare_set(name, wanted, data))

    def append(self, key: Key, value: Value) -> None:
        name, data = key_bytes(key), _check_payload(value_bytes(value))
        self._call(lambda channel: channel.append(name, data))

    def delete_key(self, key: Key, *, expected: Value | None = None) -> bool:
        # The server has no request that deletes a queue, so the values of the queue are popped.
        if expected is not None:
            return super().delete_key(key, expected=expected)
        name = key_bytes(key)
        deadline = self._deadline()
        has_queues = self._has_queues(deadline)

        def delete(channel: Channel) -> bool:
            there = channel.delete(name)
            count = channel.queue_len(name) if has_queues else 0
            for _ in range(count):  # a limit, because other processes may push faster than this process pops
                if channel.queue_pop(name) is None:
                    break
                there = True
            return there

        return self._connections.call(delete, deadline)

    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        pairs = pairs_bytes(keys, values)
        _check_payload(b"", sum(len(name) + len(value) for name, value in pairs))
        if pairs:
            self._call(lambda channel: channel.multi_set(pairs))

    # -- keys ------------------------------------------------------------------------------------------------------

    def check(self, keys: Iterable[Key]) -> bool:
        names = keys_bytes(keys)
        return self._call(lambda channel: channel.check(names)) if names else True

    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        names = keys_bytes(keys)
        limit = self._seconds(timeout)
        if names:
            self._blocking.wait(names, limit)

    def _trace_place(self, key: bytes) -> tuple[str, str]:
        return f"tcp:{self.host}:{self.port}", key_text(key)

    def num_keys(self) -> int:
        return self._call(Channel.num_keys)

    def list_keys(self, prefix: Key = "") -> list[str]:
        start = key_bytes(prefix)
        names = self._answer_if_known(Channel.list_keys, self._deadline())
        if names is None:
            raise StoreError(
                f"{self._connections}: this server of torch does not list its keys; start it with a torch whose"
                " TCPStore has the method list_keys"
            )
        return [key_text(name) for name in sorted(names) if name.startswith(start)]

    # -- queues ----------------------------------------------------------------------------------------------------

    def queue_push(self, key: Key, value: Value) -> None:
        name, data = key_bytes(key), _check_payload(value_bytes(value))
        self._queue_call(lambda channel: channel.queue_push(name, data))

    def queue_pop(self, key: Key, block: bool = True, *, timeout: Timeout | None = None) -> bytes:
        name, limit = key_bytes(key), self._seconds(timeout)
        if block:
            deadline = self._connections.deadline(limit)
            self._refuse_without_queues(deadline)
            return self._blocking.pop(name, limit, deadline.started)
        value = self._queue_call(lambda channel: channel.queue_pop(name))
        if value is None:
            raise QueueEmptyError(f"queue {key_text(name)!r} is empty")
        return value

    def queue_len(self, key: Key) -> int:
        name = key_bytes(key)
        return self._queue_call(lambda channel: channel.queue_len(name))

    # -- barriers --------------------------------------------------------------------------------------------------

    def _arrive(self, request: ArrivalRequest) -> bytes | None:
        """Arrive with the server's barrier request, so that clients of torch can take part in the same barrier.

        The server of an older torch does not know this request and closes the connection. Then all callers use the keys
        of `Store.barrier`.
        """
        if request.token or self._has_barriers is False:
            return super()._arrive(request)
        name = request.key.removesuffix(NUM_MEMBERS)
        try:
            count = self._blocking.arrive(name, request.world_size, request.timeout)
        except StoreTimeoutError:
            self._has_barriers = True  # the server has confirmed the end of the wait
            raise
        except StoreUnavailableError as error:
            # Either the server is old, or the connection was lost after the arrival. Only a probe can tell.
            if self._has_barriers or error.errno == system.errno.ETIMEDOUT or self._probe_barriers():
                raise
            return super()._arrive(request)
        self._has_barriers = True
        return None if count is None else b"%d" % count

    def _arrival_steps(self, request: ArrivalRequest) -> WaitSteps[bytes | None]:
        # The arrival does not wait. Then poll the counter, because the server sets no key when the last caller arrives.
        if request.token or self._has_barriers is False:
            return (yield from super()._arrival_steps(request))
        name, ends = request.key.removesuffix(NUM_MEMBERS), system.time.monotonic() + request.timeout
        try:
            return self._arrive(request._replace(timeout=0.0))
        except StoreTimeoutError as error:
            late = error
        while True:
            left = max(0.0, ends - system.time.monotonic())
            if self._has_barriers and self._call(lambda channel: channel.arrivals(name)) >= request.world_size:
                return None
            try:  # this key is only set on the server of an older torch
                yield WaitRequest(KEYS, [request.done], min(left, POLL_S) if self._has_barriers else left)
                return None
            except StoreTimeoutError:
                if left <= POLL_S or not self._has_barriers:
                    raise late from None

    def _probe_barriers(self) -> bool:
        """Return whether the server knows the barrier request. Test it with a random key."""
        deadline, probe = self._deadline(), system.random_bytes(16).hex().encode()
        try:
            self._connections.call(lambda channel: channel.barrier(probe, 1, deadline.ends), deadline)
            self._call(lambda channel: channel.delete(probe))
            self._has_barriers = True
        except StoreUnavailableError as error:
            if error.errno == system.errno.ETIMEDOUT:
                raise
            self._connections.call(Channel.ping, deadline)  # raises if the server is gone
            self._has_barriers = False
        return self._has_barriers

    # -- the handle ------------------------------------------------------------------------------------------------

    def clone(self) -> TCPStore:
        self._connections.refuse_if_closed()
        clone = TCPStore(self.host, self.port, timeout=self._limit)  # the timeout may be 0, but connecting takes time
        clone._timeout = self._timeout
        return clone

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the address and the timeout. The unpickled store is a client, even if this store is the master."""
        return partial(TCPStore, self.host, self.port, timeout=self._limit), (), {"_timeout": self._timeout}

    def close(self) -> None:
        """Close the handle. The master also stops the server."""
        self._connections.close()
        server, self._server = self._server, None
        if server is not None:
            server.stop()


def _check_payload(data: bytes, size: int | None = None) -> bytes:
    """Return `data`. Raise `LimitExceededError` if `size` (None: the size of `data`) is over `PAYLOAD_MAX`."""
    size = len(data) if size is None else size
    if size > PAYLOAD_MAX:
        raise LimitExceededError(
            f"{size} bytes are over the limit of {PAYLOAD_MAX} bytes that torch's TCPStore takes in one request;"
            " nothing was written"
        )
    return data
