"""`Channel`: one connection to a server of torch's `TCPStore`, and the requests over it, each with a deadline.

`Deadline` is the time limit of one call.

torch's own client is not used. Its calls wait for a stopped server without limit and ignore Ctrl-C, and its `list_keys`
blocks all other threads of Python meanwhile.

The format of the requests was observed between the client of torch 2.13.0 and both of its servers. The first byte of a
request is its kind. An integer has 8 bytes in the host's order. The length of a text comes before the text. Every key
except torch's own begins with a slash. A server answers the requests of a connection in their order.
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
"""The least time in seconds that the server has for its answer. torch's server asks the resolver for the name of each
client that connects, and does nothing else until the resolver answers."""

GRACE_S: Final = 0.1
"""How many seconds the server has, at the end of a wait, to confirm that it has cancelled the wait."""

FIRST_SLEEP_MAX_S: Final = 1.0
SLEEP_MAX_S: Final = 1e6


class Unanswered(Exception):
    """The deadline passed before the answer came."""


class Deadline:
    """The moment, `limit` seconds from now, by which a call must be over.

    A call that takes long is logged as a wait, with the text that `waiting_for` returns (see `SlowWaitLogger`).

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
        """Return the seconds since the call began."""
        return system.time.monotonic() - self.started

    def left(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self.ends - system.time.monotonic())

    def pause(self, ends: float) -> float:
        """Return how many seconds the caller may sleep before it must call `remind`. The sleep ends by `ends`."""
        longest = FIRST_SLEEP_MAX_S if self._slow_logger is None else self._slow_logger.until_next()
        return min(max(0.0, ends - system.time.monotonic()), longest, SLEEP_MAX_S)

    def remind(self) -> None:
        """Log a warning that the call still waits, if a warning is due."""
        if self._slow_logger is None:  # made here, because most calls end before they need one
            self._slow_logger = SlowWaitLogger(__name__, self._waiting_for)
        self._slow_logger.warn_if_due()

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread of its own, and return its result. No signal and no deadline interrupts the thread.

        Args:
            work: the function to call. If it returns after the deadline, its result is dropped.

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
"""The first bytes that a client sends. The server does not answer them."""

ECHO: Final = b"fsco"
PINGED: Final = struct.pack("=B", PING) + ECHO
CANCELLING: Final = struct.pack("=B", CANCEL)
"""The request that cancels the wait under way. The server always confirms it. If the server has already sent an answer
to the wait, this answer comes first."""

GRANTED, CANCELLED, ECHOED = 0, 1, ECHO[0]
"""The first bytes of the three markers that a server sends during a wait."""

OUT_OF_PROTOCOL: Final = "its answer does not fit the request"

ECHO_AFTER_S: Final = 0.05
"""How many seconds a wait is silent before the client requests an echo, as a sign that the server is alive."""

RECEIVE_MAX, RECEIVE_LARGE_MAX = 1 << 14, 1 << 18
"""The number of bytes that one recv(2) requests: the first number by default, and the second number for the rest of an
answer that is known to be longer than the first number."""

WORKERS: Final = b"init/"
"""torch's own key, the counter of the stores that have connected. It has no slash, so it equals no caller's key."""

PIPELINED_MAX: Final = 256
"""How many requests are sent before the first answer is read. So few requests can't fill the buffers of either side."""


class Disconnected(Exception):
    """The server closed the connection, or sent an answer that does not fit the request."""


class Channel:
    """One connection, for one thread at a time. Only `interrupt` may be called by another thread.

    Each request raises `Unanswered` at its deadline, and `Disconnected` or an `OSError` with an ``errno`` when the
    connection is lost. After each of these exceptions, and after any other, such as that of a Ctrl-C, a part of the
    answer may still arrive. The next request would read this part as its own answer, so the connection can't be used
    any more. Therefore `is_whole` becomes false before the first byte of a request is sent, and true only when the
    whole answer has been read.

    Attributes:
        is_whole: whether each request that was begun has been answered.
        has_received: whether the server has answered anything in this call.
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
        """Close the connection. The server then drops the wait of this connection."""
        self._socket.close()

    __del__ = close

    def abandon(self) -> None:
        """Close a connection with an unfinished request, and discard the bytes that the kernel has not sent yet.

        Otherwise the kernel could send the rest of a write after its deadline, when the server reads again.
        """
        system.import_uninterrupted("fscoord._runtime.network").drop_unsent(self._socket)
        self.close()

    # -- requests --------------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Send a request that changes nothing, and wait for the answer."""
        self._request(PINGED, self._read_echo)

    def wait(self, names: Sequence[bytes], until: float) -> bool:
        """Wait until the server has all of `names`, or until the moment `until`; return whether they were there."""
        return self._wait(_keys_request(WAIT, names), until)

    def barrier(self, name: bytes, world_size: int, until: float) -> bool:
        """Add 1 to `name`, and wait until it is `world_size`, or until the moment `until`; return whether it was.

        A caller that comes later passes at once. A server that does not know the request closes the connection.
        """
        self.has_written = True
        return self._wait(_key_request(BARRIER, name) + struct.pack("=q", world_size), until)

    def _wait(self, request: bytes, until: float) -> bool:
        """Send `request`, which the server answers later, and wait until the moment `until`; return whether it did.

        A silent server may be alive, with nothing to answer yet, or it may be stopped. So the client requests an echo
        after `ECHO_AFTER_S`. At the end the client cancels the wait and reads the server's confirmation. Otherwise the
        server could grant the wait later, in the middle of the answer to the next request.
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
        """Return whether each of `names` has a value or a queue that is not empty."""
        return self._request(_keys_request(CHECK, names), self._read_byte) == 0

    def check_each(self, names: Sequence[bytes]) -> list[bool]:
        """Return for each of `names` whether it has a value or a queue that is not empty."""
        return self._request_each([_keys_request(CHECK, [name]) for name in names], lambda: self._read_byte() == 0)

    def values(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the values of `names`. A key without a value counts as empty."""
        return self._request(_keys_request(MULTI_GET, names), lambda: [self._read_text() for _ in names])

    def arrivals(self, name: bytes) -> int:
        """Return the number of callers that have arrived at the barrier `name`.

        `value` would end the waits of the other callers, and a server without libuv ends a connection that requests a
        value that is not there. The number never falls.
        """
        return counter_sum(self.values([name])[0] if self.check([name]) else None, 0, name)

    def value(self, name: bytes) -> bytes | None:
        """Return the value of `name`, or None if it has no value.

        The request does not wait, and a queue is not a value.
        """
        return self.value_of_each([name])[0]

    def value_of_each(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each of `names`, or None for a name without a value.

        The values may come from different moments. Each read is a compare-and-set that never succeeds, because it
        expects a random text. The server writes nothing and returns the value, or the random text if there is no value.
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
        """Set `name` to `desired` if its value is `expected`; return its value, or `expected` if it has no value."""
        return self._request(_compare_set_request(name, expected, desired), self._read_text, writes=True)

    def add(self, name: bytes, amount: int) -> int:
        """Add `amount` to the value of `name`. The server closes the connection if the value is not an integer."""
        return self._request(_key_request(ADD, name) + struct.pack("=q", amount), self._read_number, writes=True)

    def delete(self, name: bytes) -> bool:
        """Remove the value of `name`, and return whether there was a value."""
        return self._request(_key_request(DELETE, name), self._read_number, writes=True) > 0

    def queue_pop(self, name: bytes) -> bytes | None:
        """Take the oldest value from the queue `name`, and return it. Return None if the queue is empty."""
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
            if before == after:  # otherwise torch's key was just made, and `count` may or may not include it
                return count if before else count - 1

    def list_keys(self) -> list[bytes]:
        """Return the keys with a value, without torch's own key."""
        names = self._request(
            struct.pack("=B", LIST_KEYS), lambda: [self._read_text() for _ in range(self._read_number())]
        )
        return [name[1:] for name in names if name.startswith(b"/")]

    def add_worker(self, amount: int) -> int:
        """Add `amount` to the number of stores that have connected, and return the sum."""
        request = struct.pack("=B", ADD) + _length_prefixed(WORKERS) + struct.pack("=q", amount)
        return self._request(request, self._read_number, writes=True)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _write(self, request: bytes, name: bytes) -> None:
        """Send `request`, which the server does not answer, and then a second request that the server answers.

        The answer shows that the server has read both requests.
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
        """Receive until `size` bytes are there. At a deadline, the received bytes are kept for the next call."""
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
        """Wait until `is_ready` (`system.readiness`) returns true. The last try is at the deadline or later."""
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
