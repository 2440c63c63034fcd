"""`Waits`: waiting at a server of torch's `TCPStore` on connections of our own, a part of `stores.tcp`.

torch's own client hears no Ctrl-C while it waits, and for each wait that ends in vain it prints two lines and asks the
resolver for the name of its own address. So the four requests that a wait is made of are spoken here. What they look
like on the wire was seen with strace(1) at torch 2.13.0, both of its servers: a byte says what is wanted; a number has
8 bytes and a text its length before it, in the order of the host; every key begins with a slash.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, TypeVar
from weakref import WeakSet

from fscoord import _system as system
from fscoord.errors import StoreUnavailableError
from fscoord.stores.tcp_connections import Connections

__all__ = ["Channel", "Waits"]

T = TypeVar("T")

HELLO: Final = struct.pack("=BI", 0, 0x3C85F7CE)
"""What a client says first, and gets no answer to."""

CHECK, WAIT, MULTI_GET = 5, 6, 10
CANCEL: Final = b"\x0c"
"""Give up the wait. The server always answers that it is, but what it had said before comes first."""

GRANTED, CANCELLED = 0, 1

STRANGE: Final = "it answers what was not asked"

ANSWER_S: Final = 60.0
"""How long a server may take, at the end of a wait, for what it answers at once; else it hangs. So long because torch's
server asks the resolver for the name of each client that connects, and does nothing else until that gives up."""

NEVER_S: Final = 1e6
"""A wait as long as this one has no end."""


class Waits:
    """The waits of one process at the server of `connections`, each on a channel that no other is on."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._connect = system.load("fscoord._network").connect
        self.begin()
        _all.add(self)

    def begin(self) -> None:
        """Begin without channels; in a forked child too, for the parent's would mix two processes' answers."""
        self._idle: list[Channel] = []
        self._busy: set[Channel] = set()

    def until(self, names: list[bytes], limit: float, read: Callable[[Channel], T]) -> T | None:
        """Return what `read` finds once the server has all of `names`; None if that is not within `limit` seconds.

        Raises:
            StoreClosedError: the store was closed, before or meanwhile.
            StoreUnavailableError: the server is gone, or does not answer.
        """
        self._connections.refuse_if_closed()
        is_whole = False
        channel = None
        try:
            channel = self._take()
            self._busy.add(channel)
            self._connections.refuse_if_closed()  # again: whoever closes it now finds this channel
            found = read(channel) if channel.wait(names, limit) else None
            is_whole = True
        except OSError as error:
            self._connections.refuse_if_closed()
            raise StoreUnavailableError(f"{self._connections}: {error}; its server is gone, or hung up") from error
        finally:
            if channel is not None:
                self._busy.discard(channel)
                if is_whole:
                    self._idle.append(channel)
                else:
                    channel.close()
        return found

    def close(self) -> None:
        """End the waits, whose store is closed, and give the channels back."""
        system.life()  # after a fork in C it makes the child leave its parent's channels alone
        for channel in list(self._busy):
            channel.interrupt()
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> Channel:
        system.life()
        try:
            return self._idle.pop()
        except IndexError:
            return self._open()

    def _open(self) -> Channel:
        """Connect, in a thread: Ctrl-C need not wait for a resolver then, nor leave a connection that nobody knows."""
        opened: list[Channel | Exception] = []
        server = self._connections

        def connect() -> None:
            try:
                opened.append(Channel(self._connect(server.host, server.port, server.limit)))
            except Exception as error:  # noqa: BLE001 - it is raised below
                opened.append(error)

        try:
            thread = system.start_thread("fscoord-tcp", connect)
        except RuntimeError:  # no thread is left, or none is allowed here
            connect()
        else:
            thread.join()
        (channel,) = opened
        if isinstance(channel, Exception):
            raise channel
        return channel


_all: WeakSet[Waits] = WeakSet()


def _after_fork_in_child() -> None:
    for waits in list(_all):
        waits.begin()


system.after_fork_in_child("tcp waits", _after_fork_in_child)


class Channel:
    """One connection, by one thread at a time. Each call raises `OSError` when it is of no more use."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._limit = -1.0
        self._rest = b""
        self._end_within(ANSWER_S)
        self._socket.sendall(HELLO)

    def wait(self, names: list[bytes], limit: float) -> bool:
        """Return whether the server has all of `names`, at once or within `limit` seconds.

        It has as long, and `ANSWER_S` at least, for the answer to what is asked next.
        """
        patience = max(limit, ANSWER_S)
        self._end_within(patience)
        self._socket.sendall(_request(WAIT, names))
        try:
            self._end_within(max(limit, 0.001))
            answer = self._byte()
        except TimeoutError:
            self._end_within(patience)
            self._socket.sendall(CANCEL)
            answer = self._byte()
            if answer == CANCELLED:
                return False
            if self._byte() != CANCELLED:
                raise OSError(STRANGE) from None
        self._end_within(patience)
        if answer != GRANTED:
            raise OSError(STRANGE)
        return True

    def check(self, names: list[bytes]) -> bool:
        """Return whether the server has all of `names` now."""
        self._socket.sendall(_request(CHECK, names))
        return self._byte() == 0

    def values(self, names: list[bytes]) -> list[bytes]:
        """Return the values of `names`; that of one that has none is empty."""
        self._socket.sendall(_request(MULTI_GET, names))
        return [self._receive(*struct.unpack("=Q", self._receive(8))) for _ in names]

    def interrupt(self) -> None:
        """Have the call that is under way in another thread raise."""
        try:
            self._socket.shutdown(2)
        except OSError:  # it is closed already
            pass

    def close(self) -> None:
        """Give the connection back; the server forgets its wait."""
        self._socket.close()

    __del__ = close

    def _end_within(self, limit: float) -> None:
        """Have each step of a call end within so many seconds; said anew only when it changes, for it takes a while."""
        if limit != self._limit:
            self._limit = limit
            self._socket.settimeout(None if limit >= NEVER_S else limit)

    def _byte(self) -> int:
        return self._receive(1)[0]

    def _receive(self, size: int) -> bytes:
        parts = [self._rest]
        size -= len(self._rest)
        while size > 0:
            part = self._socket.recv(1 << 16)
            if not part:
                raise OSError("it has closed the connection")
            parts.append(part)
            size -= len(part)
        data = b"".join(parts)
        self._rest = data[len(data) + size :] if size else b""
        return data[: len(data) + size]


def _request(kind: int, names: list[bytes]) -> bytes:
    texts = (struct.pack("=Q", len(name) + 1) + b"/" + name for name in names)
    return struct.pack("=BQ", kind, len(names)) + b"".join(texts)
