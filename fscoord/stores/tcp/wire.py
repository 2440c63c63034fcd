"""`Channel`: one connection to a server of torch's `TCPStore`, and the requests that go over it, each with a deadline.

torch's own client is not used. Its calls wait for a stopped server without limit, hear no Ctrl-C, and `list_keys` keeps
all other threads of Python from running meanwhile. What the requests look like was seen between torch 2.13.0's client
and both of its servers: a byte says what is wanted; a number has 8 bytes, in the order of the host; a text has its
length before it; every key but torch's own begins with a slash. A server answers in the order in which it was asked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, MutableSet, Sequence
from typing import Any, Final, TypeVar

from fscoord._runtime import system
from fscoord.stores.tcp.deadline import Deadline, Unanswered

__all__ = ["Channel", "Disconnected"]

T = TypeVar("T")

VALIDATE, SET, COMPARE_SET, ADD, CHECK, WAIT, NUM_KEYS, DELETE = 0, 1, 2, 4, 5, 6, 7, 8
APPEND, MULTI_GET, MULTI_SET, CANCEL, PING = 9, 10, 11, 12, 13
QUEUE_PUSH, QUEUE_POP, QUEUE_LEN, LIST_KEYS = 14, 15, 16, 17

GREETING: Final = struct.pack("=BI", VALIDATE, 0x3C85F7CE)
"""What a client says first, and gets no answer to."""

ECHO: Final = b"fsco"
PINGED: Final = struct.pack("=B", PING) + ECHO
CANCELLING: Final = struct.pack("=B", CANCEL)
"""Ends the wait that is under way. The server always answers that it has; what it had granted before comes first."""

GRANTED, CANCELLED, ECHOED = 0, 1, ECHO[0]
"""What the server says of a wait; and how an echo begins."""

STRANGE: Final = "it answers what was not asked"

SOON_S: Final = 0.05
"""How long a wait goes on before the server is asked whether it is there."""

LARGE, LARGEST = 1 << 14, 1 << 18
"""How many bytes are taken at once: of an answer as it comes, and of one that is known to be longer than that."""

WORKERS: Final = b"init/"
"""torch's own key, in which those who connect are counted; a caller's key can't be it, for want of a slash."""

TOGETHER: Final = 256
"""How many questions are sent before the first answer is read: neither side's buffers are full then."""


class Disconnected(Exception):
    """The server closed the connection, or answers what was not asked."""


class Channel:
    """One connection, by one thread at a time.

    Each request raises `Unanswered` when its deadline comes, and `Disconnected` or an `OSError` with an ``errno`` when
    the connection is lost. After these, and after any exception that comes from elsewhere, such as Ctrl-C, an answer
    may still be on its way, and the connection can't be used.

    Attributes:
        is_whole: whether each request that was begun has been answered.
        is_heard: whether the server has answered anything in this call.
        has_written: whether a request that changes the store was begun in this call.
    """

    def __init__(self, socket: Any) -> None:
        socket.setblocking(False)
        self._socket = socket
        self._readable, self._writable = system.select.poll(), system.select.poll()
        self._readable.register(socket.fileno(), system.select.POLLIN)
        self._writable.register(socket.fileno(), system.select.POLLOUT)
        self._unsent = GREETING
        self._received = bytearray()
        self.is_whole = True

    def begin(self, deadline: Deadline) -> None:
        """Let the next requests belong to a call that has until `deadline`."""
        self._deadline, self._ends = deadline, deadline.ends
        self.is_heard = self.has_written = False

    def interrupt(self) -> None:
        """Have the request that is under way in another thread raise."""
        try:
            self._socket.shutdown(2)
        except OSError:  # it is closed already
            pass

    def close(self) -> None:
        """Give the connection back; the server forgets its wait."""
        self._socket.close()

    __del__ = close

    def abandon(self) -> None:
        """Close a connection that is not whole, without leaving what is still to be sent to the kernel."""
        system.import_uninterrupted("fscoord._runtime.network").drop_unsent(self._socket)
        self.close()

    # -- requests --------------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Return when the server has answered."""
        self._ask(PINGED, self._read_echo)

    def wait(self, names: Sequence[bytes], until: float) -> bool:
        """Return whether the server has all of `names`, now or by the moment `until`.

        A server that says nothing may have nothing to say. So one that does not answer soon is asked for an echo.
        """
        self._begin(_several(WAIT, names))
        awaited = {GRANTED}
        soon = system.time.monotonic() + SOON_S
        try:
            self._ends = min(until, soon, self._deadline.ends)
            try:
                self._read_sign(awaited)
            except Unanswered:
                if until <= soon:
                    raise
                self._ends = min(until, self._deadline.ends)
                self._send(PINGED)
                awaited.add(ECHOED)
                while GRANTED in awaited:
                    self._read_sign(awaited)
            self._ends = self._deadline.ends
        except Unanswered:
            self._ends = self._deadline.ends
            self._send(CANCELLING)
            awaited.add(CANCELLED)
            while CANCELLED in awaited:
                self._read_sign(awaited)
        if ECHOED in awaited:
            self._read_sign(awaited)
        self.is_whole = True
        return GRANTED not in awaited

    def check(self, names: Sequence[bytes]) -> bool:
        """Return whether the server has all of `names`: values, or queues that are not empty."""
        return self._ask(_several(CHECK, names), self._byte) == 0

    def check_each(self, names: Sequence[bytes]) -> list[bool]:
        """Return of each of `names` whether the server has it."""
        return self._ask_each([_several(CHECK, [name]) for name in names], lambda: self._byte() == 0)

    def values(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the values of `names`; that of one that has none is empty."""
        return self._ask(_several(MULTI_GET, names), lambda: [self._text() for _ in names])

    def value(self, name: bytes) -> bytes | None:
        """Return the value of `name`, or None, without waiting; a queue is no value."""
        return self.value_of_each([name])[0]

    def value_of_each(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Return of each of `names` the value, or None; not all at the same moment."""
        nonce = system.random_bytes(16)
        found = self._ask_each([_compare_set(name, nonce, nonce) for name in names], self._text)
        return [None if value == nonce else value for value in found]

    def set(self, name: bytes, data: bytes) -> None:
        """Give `name` the value `data`."""
        self._write(_one(SET, name) + _text(data), name)

    def append(self, name: bytes, data: bytes) -> None:
        """Append `data` to the value of `name`."""
        self._write(_one(APPEND, name) + _text(data), name)

    def multi_set(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Give each name its value."""
        texts = (_key(name) + _text(data) for name, data in pairs)
        self._write(struct.pack("=BQ", MULTI_SET, len(pairs)) + b"".join(texts), pairs[0][0])

    def queue_push(self, name: bytes, data: bytes) -> None:
        """Append `data` to the queue `name`."""
        self._write(_one(QUEUE_PUSH, name) + _text(data), name)

    def compare_set(self, name: bytes, expected: bytes, desired: bytes) -> bytes:
        """Set `name` to `desired` if its value is `expected`; return its value, or `expected` if it has none."""
        return self._ask(_compare_set(name, expected, desired), self._text, writes=True)

    def add(self, name: bytes, amount: int) -> int:
        """Add `amount` to the value of `name`; the server closes the connection if that is not an integer."""
        return self._ask(_one(ADD, name) + struct.pack("=q", amount), self._number, writes=True)

    def delete(self, name: bytes) -> bool:
        """Remove the value of `name`, and return whether it had one."""
        return self._ask(_one(DELETE, name), self._number, writes=True) > 0

    def queue_pop(self, name: bytes) -> bytes | None:
        """Take the oldest value from the queue `name`, or None."""
        return self._ask(_one(QUEUE_POP, name), lambda: self._text() if self._number() else None, writes=True)

    def queue_len(self, name: bytes) -> int:
        """Return how many values the queue `name` holds."""
        return self._ask(_one(QUEUE_LEN, name), self._number)

    def num_keys(self) -> int:
        """Return how many keys have a value, torch's own not among them."""
        own = struct.pack("=BQ", CHECK, 1) + _text(WORKERS)
        while True:
            before, count, after = self._ask(
                own + struct.pack("=B", NUM_KEYS) + own, lambda: (self._byte(), self._number(), self._byte())
            )
            if before == after:  # otherwise somebody has just connected, and may be counted or not
                return count if before else count - 1

    def list_keys(self) -> list[bytes]:
        """Return the keys that have a value, torch's own not among them."""
        names = self._ask(struct.pack("=B", LIST_KEYS), lambda: [self._text() for _ in range(self._number())])
        return [name[1:] for name in names if name.startswith(b"/")]

    def add_worker(self, amount: int) -> int:
        """Count `amount` more among those who have connected, and return how many there are."""
        request = struct.pack("=B", ADD) + _text(WORKERS) + struct.pack("=q", amount)
        return self._ask(request, self._number, writes=True)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _write(self, request: bytes, name: bytes) -> None:
        """Have `request` done, and know it: the server does not answer it, but it answers the question after it."""
        self._ask(request + _several(CHECK, [name]), self._byte, writes=True)

    def _ask_each(self, requests: Sequence[bytes], read: Callable[[], T]) -> list[T]:
        answers: list[T] = []
        for first in range(0, len(requests), TOGETHER):
            some = requests[first : first + TOGETHER]
            answers += self._ask(b"".join(some), lambda: [read() for _ in some])  # noqa: B023 - it is called at once
        return answers

    def _ask(self, request: bytes, read: Callable[[], T], *, writes: bool = False) -> T:
        self.has_written |= writes
        self._begin(request)
        answer = read()
        self.is_whole = True
        return answer

    def _begin(self, request: bytes) -> None:
        self.is_whole = False
        if self._received:
            raise Disconnected(STRANGE)
        self._send(request)

    def _send(self, data: bytes) -> None:
        left = memoryview(self._unsent + data)
        self._unsent = b""
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                self._sleep(self._writable)

    def _read_sign(self, awaited: MutableSet[int]) -> None:
        """Read the next of the signs `awaited` that may come during a wait, and take it out of them."""
        self._fill(1)
        sign = self._received[0]
        if sign not in awaited:
            raise Disconnected(STRANGE)
        if sign == ECHOED:
            self._read_echo()
        else:
            self._byte()
        awaited.discard(sign)

    def _read_echo(self) -> None:
        if self._receive(len(ECHO)) != ECHO:
            raise Disconnected(STRANGE)

    def _byte(self) -> int:
        return self._receive(1)[0]

    def _number(self) -> int:
        number: int = struct.unpack("=q", self._receive(8))[0]
        return number

    def _text(self) -> bytes:
        size = self._number()
        if size < 0:
            raise Disconnected(STRANGE)
        return self._receive(size)

    def _receive(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        if size > LARGE:
            return self._receive_large(size)
        self._fill(size)
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def _fill(self, size: int) -> None:
        """Have `size` bytes received; what has come of them when the deadline does is kept."""
        while len(self._received) < size:
            self._sleep(self._readable)
            self._received += self._some(LARGE)

    def _receive_large(self, size: int) -> bytes:
        parts = [bytes(self._received[:size])]
        del self._received[:size]
        size -= len(parts[0])
        while size > 0:
            try:
                parts.append(self._some(min(size, LARGEST)))
                size -= len(parts[-1])
            except BlockingIOError:
                self._sleep(self._readable)
        return b"".join(parts)

    def _some(self, most: int) -> bytes:
        part: bytes = self._socket.recv(most)
        if not part:
            raise Disconnected("it has closed the connection")
        self.is_heard = True
        return part

    def _sleep(self, poll: Any) -> None:
        """Return when the connection is ready for what `poll` asks. The last look is at the deadline or after it."""
        while True:
            pause = self._deadline.pause(self._ends)
            if poll.poll(math.ceil(pause * 1000)):
                return
            if pause <= 0 and self._ends <= system.time.monotonic():
                raise Unanswered
            self._deadline.remind()


def _text(data: bytes) -> bytes:
    return struct.pack("=Q", len(data)) + data


def _key(name: bytes) -> bytes:
    return struct.pack("=Q", len(name) + 1) + b"/" + name


def _one(kind: int, name: bytes) -> bytes:
    return struct.pack("=B", kind) + _key(name)


def _several(kind: int, names: Sequence[bytes]) -> bytes:
    return struct.pack("=BQ", kind, len(names)) + b"".join(map(_key, names))


def _compare_set(name: bytes, expected: bytes, desired: bytes) -> bytes:
    return _one(COMPARE_SET, name) + _text(expected) + _text(desired)
