"""`Connections` holds one process's connections to a server of torch's `TCPStore`.

Each call uses a connection alone, so threads don't wait for each other. `BlockingCalls` makes the calls that wait for
keys.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from fscoord._arguments import called, missing_error
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_unless_absent
from fscoord.errors import StoreClosedError, StoreTimeoutError, StoreUnavailableError
from fscoord.stores.tcp.wire import ANSWER_MIN_S, GRACE_S, Channel, Deadline, Disconnected, Unanswered

T = TypeVar("T")

Find = Callable[[Channel], T | None]
"""A function that returns the result of a wait, or None if the wait must continue."""

FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 0.5
"""The longest pause, in seconds, between two tries to connect to a server that does not listen yet."""

QUEUE_WAIT_S: Final = 0.5
"""How many seconds one request waits for a queue.

The server wakes only one waiter for each value. If the call of the woken waiter was interrupted, the other waiters find
the value with their next requests.
"""

RECHECK_S: Final = 0.01
"""The pause, in seconds, before the next read of a key that exists but has no value, usually because it has a queue."""

KEY, VALUE, ITEM, BARRIER = "key", "the value of key", "a value in queue", "the last caller of barrier"


class Failure(Exception):
    """Raised if a call failed.

    Attributes:
        errno: the error number that describes the failure, as in `OSError`, or None.
        has_received: whether any byte of an answer was received in this call.
        maybe_applied: whether the call had begun to send a write.
    """

    def __init__(self, message: str, errno: int | None, channel: Channel | None) -> None:
        super().__init__(message)
        self.errno = errno
        self.has_received = channel is not None and channel.has_received
        self.maybe_applied = channel is not None and channel.has_written

    def store_error(self) -> StoreUnavailableError:
        """Return the error to raise to the user of the store."""
        doubt = "; this write may or may not have taken effect" if self.maybe_applied else ""
        return StoreUnavailableError(f"{self}{doubt}", maybe_applied=self.maybe_applied, errno=self.errno)


class Connections:
    """The connections to the server at `host` and `port`.

    A connection belongs to one thread from `_take` to `_give_back`. `_idle` is the list of the other connections. No
    lock guards it, because `list.pop` and `list.append` are atomic. `_busy` is the set of connections in use, so that
    `close` and `after_fork` can interrupt or close them.

    When a call ends at its deadline, or by an exception such as Ctrl-C, its connection is closed. If the connection
    were used again, the next call could read the late answer as its own answer. Nothing else remains of the call,
    except at most one thread that waits for the resolver.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.is_closed = False
        self._network = system.import_uninterrupted("fscoord._runtime.network")
        self._reset()
        _all.add(self)

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def _reset(self) -> None:
        """Forget all connections."""
        self._idle: list[Channel] = []
        self._busy: set[Channel] = set()
        self._endpoints: list[object] = []
        self._resolving = system.threading.Lock()

    def deadline(self, limit: float) -> Deadline:
        """Return the deadline of a call: `limit` seconds from now, or `ANSWER_MIN_S` seconds if that is longer."""
        return Deadline(max(limit, ANSWER_MIN_S), lambda: f"an answer of {self}")

    def await_server(self, deadline: Deadline) -> None:
        """Try to connect until the server answers. The server need not be listening yet.

        Raises:
            StoreUnavailableError: the server has not answered by `deadline`.
        """
        pause = FIRST_PAUSE_S
        while True:
            try:
                return self.attempt(Channel.ping, deadline)
            except Failure as failure:
                if deadline.left() <= pause:
                    raise StoreUnavailableError(
                        f"{failure}; check that one process is the master there, and that the port is free and open",
                        errno=failure.errno,
                    ) from failure.__cause__
            deadline.remind()
            system.time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def call(self, operation: Callable[[Channel], T], deadline: Deadline) -> T:
        """Call `operation` with a connection, and return its result.

        Raises:
            StoreClosedError: the store was closed before or during the call.
            StoreUnavailableError: the server has ended, or has not answered by `deadline`.
        """
        try:
            return self.attempt(operation, deadline)
        except Failure as failure:
            raise failure.store_error() from failure.__cause__

    def attempt(self, operation: Callable[[Channel], T], deadline: Deadline) -> T:
        """Do the same as `call`, but raise a `Failure` instead of a `StoreUnavailableError`."""
        self.refuse_if_closed()
        channel = None
        try:
            channel = self._take(deadline)
            channel.begin(deadline)
            self._busy.add(channel)
            self.refuse_if_closed()  # again: another thread may have called `close` before this channel was in `_busy`
            return operation(channel)
        except (Unanswered, Disconnected, OSError) as error:
            if isinstance(error, OSError) and error.errno is None:  # a signal handler raised it
                raise
            self.refuse_if_closed()
            raise self._failure(error, channel, deadline) from error
        finally:
            if channel is not None:
                self._give_back(channel)

    def refuse_if_closed(self) -> None:
        """Raise `StoreClosedError` if `close` was called."""
        if self.is_closed:
            raise StoreClosedError(f"{self} is closed; open the store again")

    def close(self) -> None:
        """Interrupt the calls of other threads, and close all connections."""
        self.is_closed = True
        system.process_epoch()
        for channel in list(self._busy):
            channel.interrupt()
        self._close_idle()

    def _take(self, deadline: Deadline) -> Channel:
        """Return an idle connection, or a new one."""
        system.process_epoch()  # in the child of a fork by C code, this closes the parent's connections
        try:
            return self._idle.pop()
        except IndexError as error:
            raise_unless_absent(error)
            return deadline.run(lambda: self._connect(deadline))

    def _give_back(self, channel: Channel) -> None:
        self._busy.discard(channel)
        if channel.is_whole:
            self._idle.append(channel)
            if self.is_closed:
                self._close_idle()
        else:
            # Close this connection, because an answer may still arrive on it. Close the idle connections, because they
            # may have failed for the same reason.
            channel.abandon()
            self._close_idle()

    def _failure(self, error: Exception, channel: Channel | None, deadline: Deadline) -> Failure:
        errno = error.errno if isinstance(error, OSError) else None
        if isinstance(error, Unanswered) or errno == system.errno.ETIMEDOUT:
            what = "connection" if channel is None else "answer"
            return Failure(
                f"timeout: {self}: no {what} within {deadline.waited():.3g} s; its server is stopped or overloaded, or"
                " the network is cut",
                system.errno.ETIMEDOUT,
                channel,
            )
        words = "the server can't be reached" if channel is None else "the server has ended or closed the connection"
        return Failure(f"{self}: {error}; {words}", errno, channel)

    def after_fork(self) -> None:
        """Close the inherited connections in a forked child.

        If two processes used one connection, a process could read the answers to requests of the other process.
        """
        for channel in [*self._idle, *self._busy]:
            channel.close()
        self._reset()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _connect(self, deadline: Deadline) -> Channel:
        """Open a new connection. The caller must call this method in a new thread.

        In that thread, no Ctrl-C can interrupt the method and lose the new connection. The main thread, which gets the
        Ctrl-C, need not wait for the resolver.
        """
        endpoints = self._endpoints
        if not endpoints:
            if not self._resolving.acquire(timeout=min(deadline.left(), system.threading.TIMEOUT_MAX)):
                raise Unanswered
            try:
                endpoints = self._endpoints or self._network.resolve(self.host, self.port)
            finally:
                self._resolving.release()
        try:
            channel = Channel(self._network.connect(endpoints, deadline.ends))
        except OSError:
            self._endpoints = []
            raise
        self._endpoints = endpoints
        return channel


_all = system.reset_in_child("tcp connections", Connections.after_fork)


class BlockingCalls:
    """Makes the calls that wait for keys, over `connections`.

    Each call raises `StoreTimeoutError` after `limit` seconds, and `StoreUnavailableError` if the server has ended or
    has never answered. If the server answered at the beginning of a wait but not at the end of the wait, the call
    raises `StoreTimeoutError`. In this case it is unknown which of the keys are missing.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def wait(self, names: list[bytes], limit: float) -> None:
        """Wait until the server has all keys `names`."""
        self._await(limit, names, KEY, lambda channel: channel.check(names) or None)

    def get(self, names: list[bytes], limit: float) -> list[bytes]:
        """Wait until all keys `names` have values, and return the values."""
        return self._await(limit, names, VALUE, lambda channel: _read_values(channel, names))

    def pop(self, name: bytes, limit: float, started: float) -> bytes:
        """Wait until the queue `name` has a value. Remove the oldest value, and return it.

        `started` is the time when the call began, by the monotonic clock.
        """
        return self._await(limit, [name], ITEM, lambda channel: channel.queue_pop(name), started)

    def arrive(self, name: bytes, world_size: int, limit: float) -> int | None:
        """Arrive at the barrier `name`, and wait until `world_size` callers have arrived.

        Returns:
            None if the barrier has completed. If `world_size` callers had arrived before this call: the number of this
            call's arrival, which is greater than `world_size`.
        """
        started = system.time.monotonic()
        deadline = Deadline(
            max(limit + GRACE_S, ANSWER_MIN_S), lambda: f"{called(BARRIER, [name])} in {self._connections}"
        )

        def operate(channel: Channel) -> int | bool:
            count = channel.arrivals(name) + 1  # the server does not refuse callers above `world_size`
            return count if count > world_size else channel.barrier(name, world_size, started + limit)

        passed = self._connections.call(operate, deadline)
        if passed is False:
            raise missing_error(self._connections, BARRIER, [name], system.time.monotonic() - started)
        return None if passed is True else passed

    def _await(self, limit: float, names: list[bytes], what: str, find: Find[T], started: float | None = None) -> T:
        """Wait until the server has all keys `names` and `find` returns a result other than None. Return the result.

        The wait times out `limit` seconds after `started`, a time of the monotonic clock. If `started` is None, the
        wait starts now.
        """
        started = system.time.monotonic() if started is None else started
        ends = started + limit
        left = max(0.0, ends - system.time.monotonic())
        deadline = Deadline(max(left + GRACE_S, ANSWER_MIN_S), lambda: f"{called(what, names)} in {self._connections}")
        pause, may_retry, is_granted = 0.0, True, False

        def look(channel: Channel) -> T | None:
            nonlocal is_granted
            until = min(ends, system.time.monotonic() + QUEUE_WAIT_S) if what == ITEM else ends
            is_granted = channel.wait(names, until)  # whether the server had all of `names`
            return find(channel) if is_granted else None

        while True:
            is_granted = False
            try:
                found = self._connections.attempt(look, deadline)
            except Failure as failure:
                if not failure.has_received or failure.maybe_applied:
                    raise failure.store_error() from failure.__cause__
                if failure.errno != system.errno.ETIMEDOUT and may_retry:
                    may_retry = False  # torch's server without libuv hangs up if a key is deleted between two requests
                    continue
                if failure.errno != system.errno.ETIMEDOUT or is_granted:
                    raise failure.store_error() from failure.__cause__
                raise self._timeout_error(what, names, None, started) from None
            if found is not None:
                return found
            if system.time.monotonic() >= ends:
                raise self._timeout_error(what, names, self._missing(names, what, deadline), started)
            if is_granted:
                system.time.sleep(min(pause, max(0.0, ends - system.time.monotonic())))
                pause = RECHECK_S

    def _timeout_error(
        self, what: str, names: list[bytes], missing: list[bytes] | None, started: float
    ) -> StoreTimeoutError:
        """Return the error for the keys `missing`. If `missing` is None, it is unknown which of `names` are missing."""
        waited = system.time.monotonic() - started
        doubt = "; at the end the server no longer answered, so some of these keys may exist" if missing is None else ""
        keys = missing or list(dict.fromkeys(names))
        return missing_error(self._connections, what, keys, waited, doubt)

    def _missing(self, names: list[bytes], what: str, deadline: Deadline) -> list[bytes] | None:
        """Return those of the keys `names` that are missing, or None if the server does not answer."""
        names = list(dict.fromkeys(names))

        def look(channel: Channel) -> list[bytes]:
            if what == VALUE:
                return [name for name, value in zip(names, channel.value_of_each(names), strict=True) if value is None]
            return [name for name, there in zip(names, channel.check_each(names), strict=True) if not there]

        with suppress(Failure):
            return self._connections.attempt(look, deadline)
        return None


def _read_values(channel: Channel, names: list[bytes]) -> list[bytes] | None:
    """Return the values of the keys `names`, or None if a key has no value.

    The server returns an empty value also for a key without a value: for a key that has only a queue, or that a failed
    `compare_set` has left. So after an empty value, this function sends another request, which distinguishes a key with
    an empty value from a key without a value.
    """
    found = []
    for name, read in zip(names, channel.values(names), strict=True):
        value = read or channel.value(name)
        if value is None:
            return None
        found.append(value)
    return found
