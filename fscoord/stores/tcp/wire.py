"""`Channel`: one connection to a server of torch's `TCPStore`. It sends requests, each with a `Deadline`.

torch's own client is not used. Its calls wait without limit for a stopped server and ignore Ctrl-C. Its `list_keys`
blocks all Python threads until the server answers.

The format of the requests was observed with the client and both servers of torch 2.13.0. The first byte of a request is
its kind. An integer has 8 bytes in the host's byte order. The length of a text comes before the text. Every key begins
with a slash, except torch's own key. A server answers the requests of a connection in their order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, MutableSet, Sequence
from typing import Any, Final, TypeVar

from fscoord._arguments import counter_sum
from fscoord._runtime import system
from fscoord._runtime.interrupts import BareCall, ignoring
from fscoord._waiting.timing import SlowWaitLogger

T = TypeVar("T")

ANSWER_MIN_S: Final = 2.0
"""The shortest time, in seconds, to wait for an answer of the server. torch's server asks the resolver for the name of
each new client, and does nothing else until the resolver answers."""

GRACE_S: Final = 0.1
"""How many seconds after the deadline of a wait the client still waits for the server's answer to a cancellation."""

FIRST_SLEEP_MAX_S: Final = 1.0
SLEEP_MAX_S: Final = 1e6


class Unanswered(Exception):
    """Raised if the deadline passed before the answer came."""


class Deadline:
    """The deadline of a call, `limit` seconds from now.

    A long call is logged as a wait, with the text that `waiting_for` returns (see `SlowWaitLogger`).

    Attributes:
        started: when the call began, by the monotonic clock.
        ends: when the call must be over, by the monotonic clock.
    """

    def __init__(self, limit: float, waiting_for: Callable[[], str]) -> None:
        self.started = system.time.monotonic()
        self.ends = self.started + limit
        self._waiting_for = waiting_for
        self._slow_logger: SlowWaitLogger | None = None

    def waited(self) -> float:
        """Return the number of seconds since the call began."""
        return system.time.monotonic() - self.started

    def left(self) -> float:
        """Return the number of seconds until the deadline, at least 0."""
        return max(0.0, self.ends - system.time.monotonic())

    def pause(self, ends: float) -> float:
        """Return the number of seconds until `ends`, or until the caller must call `remind` if that is sooner."""
        longest = FIRST_SLEEP_MAX_S if self._slow_logger is None else self._slow_logger.until_next()
        return min(max(0.0, ends - system.time.monotonic()), longest, SLEEP_MAX_S)

    def remind(self) -> None:
        """Log a warning that the call still waits, if a warning is due."""
        if self._slow_logger is None:  # created only here, because most calls need none
            self._slow_logger = SlowWaitLogger(__name__, self._waiting_for)
        self._slow_logger.warn_if_due()

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread of its own, wait for it until the deadline, and return its result.

        The thread is not interrupted. If `work` returns after the deadline, its result is dropped.

        Raises:
            Unanswered: the deadline passed before `work` returned.
        """
        call = BareCall(work)
        if call.refusal is not None:
            return work()
        pause = self.pause(self.ends)
        while not call.wait(pause):
            if call.is_lost or not self.left():
                raise Unanswered
            if pause <= 0:
                self.remind()
            pause = self.pause(self.ends)
        if call.error is not None:
            raise call.error
        return call.result


VALIDATE, SET, COMPARE_SET, ADD, CHECK, WAIT, NUM_KEYS, DELETE = 0, 1, 2, 4, 5, 6, 7, 8
APPEND, MULTI_GET, MULTI_SET, CANCEL, PING = 9, 10, 11, 12, 13
QUEUE_PUSH, QUEUE_POP, QUEUE_LEN, LIST_KEYS, BARRIER = 14, 15, 16, 17, 18

GREETING: Final = struct.pack("=BI", VALIDATE, 0x3C85F7CE)
"""The first request of a client. The server does not answer it."""

ECHO: Final = b"fsco"
PINGED: Final = struct.pack("=B", PING) + ECHO
CANCELLING: Final = struct.pack("=B", CANCEL)
"""The request that cancels the current wait. The server always confirms the request. If the server has already answered
the wait, the client receives the answer to the wait before the confirmation.
"""

GRANTED, CANCELLED, ECHOED = 0, 1, ECHO[0]
"""The first bytes of the three markers that a server sends during a wait."""

OUT_OF_PROTOCOL: Final = "its answer does not fit the request"

ECHO_AFTER_S: Final = 0.05
"""The time from the beginning of a wait, in seconds, after which the client requests an echo from a silent server."""

RECEIVE_MAX, RECEIVE_LARGE_MAX = 1 << 14, 1 << 18
"""How many bytes one recv(2) requests: `RECEIVE_MAX`; up to `RECEIVE_LARGE_MAX` for a text longer than `RECEIVE_MAX`.
"""

WORKERS: Final = b"init/"
"""torch's own key, the counter of connected stores. It does not begin with a slash, so it equals no key of a caller."""

PIPELINED_MAX: Final = 256
"""How many requests are sent before the first answer is read. This number of requests fits into the buffers of both
sides.
"""


class Disconnected(Exception):
    """Raised if the server closed the connection, or sent an answer that does not fit the request."""


class Channel:
    """One connection, for one thread at a time. Only `interrupt` may be called by another thread.

    Each request raises `Unanswered` at its deadline, and `Disconnected` or an `OSError` with an ``errno`` when the
    connection is lost. After any exception, such as one of these or a Ctrl-C, the connection can't be used again: the
    next request could read the late answer as its own answer. So `is_whole` becomes false before the first byte of a
    request is sent, and true only when the whole answer has been read.

    Attributes:
        is_whole: whether all requests have been answered completely.
        has_received: whether any byte has been received in this call.
        has_written: whether a request that changes the store was begun in this call.
    """

    def __init__(self, socket: Any) -> None:
        socket.setblocking(False)
        self._socket = socket
        self._readable = system.readiness(socket.fileno())
        self._writable = system.readiness(socket.fileno(), writing=True)
        self._unsent = GREETING
        self._received = bytearray()
        self.is_whole = True

    def begin(self, deadline: Deadline) -> None:
        """Begin a call of one or more requests, which must be over by `deadline`."""
        self._deadline, self._ends = deadline, deadline.ends
        self.has_received = self.has_written = False

    def interrupt(self) -> None:
        """Make the request of another thread raise an exception."""
        with ignoring(OSError):  # it is closed already
            self._socket.shutdown(2)

    def close(self) -> None:
        """Close the connection. The server then drops a wait that uses it."""
        self._socket.close()

    __del__ = close

    def abandon(self) -> None:
        """Close a connection with an unfinished request, and discard its unsent bytes.

        If the unsent bytes were kept, the kernel could send the rest of a write after the deadline of the write, when a
        stopped server continues.
        """
        system.import_uninterrupted("fscoord._runtime.network").drop_unsent(self._socket)
        self.close()

    # -- requests --------------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Send a request that changes nothing, and wait for the answer."""
        self._request(PINGED, self._read_echo)

    def wait(self, names: Sequence[bytes], until: float) -> bool:
        """Wait until the server has all keys `names`, or until the time `until`. Return whether it has all keys."""
        return self._wait(_keys_request(WAIT, names), until)

    def barrier(self, name: bytes, world_size: int, until: float) -> bool:
        """Add 1 to the counter `name`, and wait until the counter is `world_size`, or until the time `until`.

        Return whether the counter has become `world_size`. If the counter is greater, return True at once. A server
        that does not know the request closes the connection.
        """
        self.has_written = True
        return self._wait(_key_request(BARRIER, name) + struct.pack("=q", world_size), until)

    def _wait(self, request: bytes, until: float) -> bool:
        """Send `request`, and wait for its answer until the time `until`. Return whether the answer has come.

        A silent server may be waiting, or its process may be stopped. So the client requests an echo after
        `ECHO_AFTER_S` seconds. At the time `until`, the client cancels the wait and reads the confirmation. Without the
        cancellation, the server could answer the wait later, in the middle of the answer to the next request.
        """
        self._begin(request)
        awaited = {GRANTED}
        soon = system.time.monotonic() + ECHO_AFTER_S
        try:
            self._ends = min(until, soon, self._deadline.ends)
            try:
                self._read_marker(awaited)
            except Unanswered:
                if until <= soon:
                    raise
                self._ends = min(until, self._deadline.ends)
                self._send(PINGED)
                awaited.add(ECHOED)
                while GRANTED in awaited:
                    self._read_marker(awaited)
            self._ends = self._deadline.ends
        except Unanswered:
            self._ends = self._deadline.ends
            self._send(CANCELLING)
            awaited.add(CANCELLED)
            while CANCELLED in awaited:
                self._read_marker(awaited)
        if ECHOED in awaited:
            self._read_marker(awaited)
        self.is_whole = True
        return GRANTED not in awaited

    def check(self, names: Sequence[bytes]) -> bool:
        """Return whether all keys `names` have a value or a non-empty queue."""
        return self._request(_keys_request(CHECK, names), self._read_byte) == 0

    def check_each(self, names: Sequence[bytes]) -> list[bool]:
        """Return a list that states for each of the keys `names` whether it has a value or a non-empty queue."""
        return self._request_each([_keys_request(CHECK, [name]) for name in names], lambda: self._read_byte() == 0)

    def values(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the values of the keys `names`. The result for a key without a value is empty."""
        return self._request(_keys_request(MULTI_GET, names), lambda: [self._read_text() for _ in names])

    def arrivals(self, name: bytes) -> int:
        """Return the number of callers that have arrived at the barrier `name`.

        `value` is not used, because its request would end the waits of the other callers. The key is checked before it
        is read, because the server without libuv closes the connection when a missing key is read.
        """
        return counter_sum(self.values([name])[0] if self.check([name]) else None, 0, name)

    def value(self, name: bytes) -> bytes | None:
        """Return the value of the key `name` at once. Return None if the key has no value."""
        return self.value_of_each([name])[0]

    def value_of_each(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each of the keys `names`, or None for a key without a value.

        The values may be read at different times. Each read is a compare-and-set that never succeeds, because it
        expects a random text. The server writes nothing and returns the value of the key. If the key has no value, the
        server returns the random text.
        """
        nonce = system.random_bytes(16)
        found = self._request_each([_compare_set_request(name, nonce, nonce) for name in names], self._read_text)
        return [None if value == nonce else value for value in found]

    def set(self, name: bytes, data: bytes) -> None:
        """Set `name` to `data`."""
        self._write(_key_request(SET, name) + _length_prefixed(data), name)

    def append(self, name: bytes, data: bytes) -> None:
        """Append `data` to the value of `name`."""
        self._write(_key_request(APPEND, name) + _length_prefixed(data), name)

    def multi_set(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Set each name to its value."""
        texts = (_key_text(name) + _length_prefixed(data) for name, data in pairs)
        self._write(struct.pack("=BQ", MULTI_SET, len(pairs)) + b"".join(texts), pairs[0][0])

    def queue_push(self, name: bytes, data: bytes) -> None:
        """Append `data` to the queue `name`."""
        self._write(_key_request(QUEUE_PUSH, name) + _length_prefixed(data), name)

    def compare_set(self, name: bytes, expected: bytes, desired: bytes) -> bytes:
        """Set `name` to `desired` if its value is `expected`.

        Return the value of `name` after the call. If `name` has no value, return `expected`.
        """
        return self._request(_compare_set_request(name, expected, desired), self._read_text, writes=True)

    def add(self, name: bytes, amount: int) -> int:
        """Add `amount` to the value of `name`. The server closes the connection if the value is not an integer."""
        return self._request(_key_request(ADD, name) + struct.pack("=q", amount), self._read_number, writes=True)

    def delete(self, name: bytes) -> bool:
        """Remove the value of `name`, and return whether there was a value."""
        return self._request(_key_request(DELETE, name), self._read_number, writes=True) > 0

    def queue_pop(self, name: bytes) -> bytes | None:
        """Remove the oldest value of the queue `name`, and return it. Return None if the queue is empty."""
        return self._request(
            _key_request(QUEUE_POP, name), lambda: self._read_text() if self._read_number() else None, writes=True
        )

    def queue_len(self, name: bytes) -> int:
        """Return the number of values in the queue `name`."""
        return self._request(_key_request(QUEUE_LEN, name), self._read_number)

    def num_keys(self) -> int:
        """Return the number of keys with a value, without torch's own key."""
        own = struct.pack("=BQ", CHECK, 1) + _length_prefixed(WORKERS)
        while True:
            before, count, after = self._request(
                own + struct.pack("=B", NUM_KEYS) + own,
                lambda: (self._read_byte(), self._read_number(), self._read_byte()),
            )
            if before == after:  # otherwise torch's key has just been created, and `count` may or may not include it
                return count if before else count - 1

    def list_keys(self) -> list[bytes]:
        """Return the keys with a value, without torch's own key."""
        names = self._request(
            struct.pack("=B", LIST_KEYS), lambda: [self._read_text() for _ in range(self._read_number())]
        )
        return [name[1:] for name in names if name.startswith(b"/")]

    def add_worker(self, amount: int) -> int:
        """Add `amount` to the number of connected stores, and return the sum."""
        request = struct.pack("=B", ADD) + _length_prefixed(WORKERS) + struct.pack("=q", amount)
        return self._request(request, self._read_number, writes=True)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _write(self, request: bytes, name: bytes) -> None:
        """Send `request`, which the server does not answer, and a second request, which the server answers.

        The answer to the second request shows that the server has read both requests.
        """
        self._request(request + _keys_request(CHECK, [name]), self._read_byte, writes=True)

    def _request_each(self, requests: Sequence[bytes], read: Callable[[], T]) -> list[T]:
        answers: list[T] = []
        for first in range(0, len(requests), PIPELINED_MAX):
            some = requests[first : first + PIPELINED_MAX]
            answers += self._request(b"".join(some), lambda: [read() for _ in some])  # noqa: B023 - called at once
        return answers

    def _request(self, request: bytes, read: Callable[[], T], *, writes: bool = False) -> T:
        self.has_written |= writes
        self._begin(request)
        answer = read()
        self.is_whole = True
        return answer

    def _begin(self, request: bytes) -> None:
        self.is_whole = False
        if self._received:
            raise Disconnected(OUT_OF_PROTOCOL)
        self._send(request)

    def _send(self, data: bytes) -> None:
        left = memoryview(self._unsent + data)
        self._unsent = b""
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                self._poll(self._writable)

    def _read_marker(self, awaited: MutableSet[int]) -> None:
        """Read one of the markers `awaited`, and remove it from `awaited`. The markers may come in any order."""
        self._fill(1)
        marker = self._received[0]
        if marker not in awaited:
            raise Disconnected(OUT_OF_PROTOCOL)
        if marker == ECHOED:
            self._read_echo()
        else:
            self._read_byte()
        awaited.discard(marker)

    def _read_echo(self) -> None:
        if self._receive(len(ECHO)) != ECHO:
            raise Disconnected(OUT_OF_PROTOCOL)

    def _read_byte(self) -> int:
        return self._receive(1)[0]

    def _read_number(self) -> int:
        number: int = struct.unpack("=q", self._receive(8))[0]
        return number

    def _read_text(self) -> bytes:
        size = self._read_number()
        if size < 0:
            raise Disconnected(OUT_OF_PROTOCOL)
        return self._receive(size)

    def _receive(self, size: int) -> bytes:
        if size > RECEIVE_MAX:
            return self._receive_large(size)
        self._fill(size)
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def _fill(self, size: int) -> None:
        """Receive until `_received` has `size` bytes. At the deadline, keep the received bytes for the next call."""
        while len(self._received) < size:
            self._poll(self._readable)
            self._received += self._receive_some(RECEIVE_MAX)

    def _receive_large(self, size: int) -> bytes:
        parts = [bytes(self._received[:size])]
        del self._received[:size]
        size -= len(parts[0])
        while size > 0:
            try:
                parts.append(self._receive_some(min(size, RECEIVE_LARGE_MAX)))
                size -= len(parts[-1])
            except BlockingIOError:
                self._poll(self._readable)
        return b"".join(parts)

    def _receive_some(self, most: int) -> bytes:
        part: bytes = self._socket.recv(most)
        if not part:
            raise Disconnected("it has closed the connection")
        self.has_received = True
        return part

    def _poll(self, is_ready: Callable[[float], Any]) -> None:
        """Wait until `is_ready` (see `system.readiness`) returns true, or until the deadline."""
        while True:
            pause = self._deadline.pause(self._ends)
            if is_ready(math.ceil(pause * 1000)):
                return
            if pause <= 0 and self._ends <= system.time.monotonic():
                raise Unanswered
            self._deadline.remind()


def _length_prefixed(data: bytes) -> bytes:
    return struct.pack("=Q", len(data)) + data


def _key_text(name: bytes) -> bytes:
    return struct.pack("=Q", len(name) + 1) + b"/" + name


def _key_request(kind: int, name: bytes) -> bytes:
    return struct.pack("=B", kind) + _key_text(name)


def _keys_request(kind: int, names: Sequence[bytes]) -> bytes:
    return struct.pack("=BQ", kind, len(names)) + b"".join(map(_key_text, names))


def _compare_set_request(name: bytes, expected: bytes, desired: bytes) -> bytes:
    return _key_request(COMPARE_SET, name) + _length_prefixed(expected) + _length_prefixed(desired)
