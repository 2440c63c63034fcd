"""A server of torch's `TCPStore`, played: it keeps its keys in this process, and can stop as if by SIGSTOP."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress


def number(value: int) -> bytes:
    return struct.pack("=q", value)


def text(data: bytes) -> bytes:
    return number(len(data)) + data


class PlayedServer:
    """A server with a thread for each connection.

    Attributes:
        has_queues: whether it knows of queues, as torch's server with libuv does; the other one hangs up.
        connections: how many there have been.
        open: those that are open.
        asked: how often it was asked for what, by the byte that begins a request.
        falls_silent_before: it stops when it has read the byte that begins such a request.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.has_queues = True
        self.connections = 0
        self.open: set[socket.socket] = set()
        self.asked: Counter[int] = Counter()
        self.falls_silent_before = -1
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._lock = threading.RLock()
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[socket.socket, list[bytes]] = {}
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stop(self) -> None:
        """Answer nothing any more. The kernel goes on to take connections, and what is sent on them."""
        self._goes_on.clear()

    @property
    def is_stopped(self) -> bool:
        return not self._goes_on.is_set()

    def go_on(self) -> None:
        self.falls_silent_before = -1
        self._goes_on.set()

    def hang_up(self) -> None:
        """Close every connection."""
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Be as empty as a new server."""
        with self._lock:
            self._values.clear()
            self._queues.clear()

    def end(self) -> None:
        self.go_on()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # an answer is several small writes
            self.connections += 1
            self.open.add(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        def read(size: int) -> bytes:
            data = b""
            while len(data) < size:
                self._goes_on.wait()
                part = connection.recv(size - len(data))
                if not part:
                    raise EOFError
                data += part
            return data

        try:
            while True:
                kind = read(1)[0]
                self.asked[kind] += 1
                if kind == self.falls_silent_before:
                    self.stop()
                self._answer(kind, read, connection)
        except (EOFError, OSError, ValueError):
            pass
        with self._lock:
            self._waiting.pop(connection, None)
            self.open.discard(connection)
            connection.close()

    def _answer(self, kind: int, read: Callable[[int], bytes], connection: socket.socket) -> None:
        def read_number() -> int:
            found: int = struct.unpack("=q", read(8))[0]
            return found

        def read_text() -> bytes:
            return read(read_number())

        self._goes_on.wait()
        say = connection.sendall
        if kind == 0:
            assert read(4) == struct.pack("=I", 0x3C85F7CE)
        elif kind == 13:
            say(read(4))
        elif kind in (5, 6, 10):
            names = [read_text() for _ in range(read_number())]
            with self._lock:
                if kind == 10:
                    say(b"".join(text(self._values.get(name, b"")) for name in names))
                elif self._has(names):
                    say(b"\0")
                elif kind == 5:
                    say(b"\1")
                else:
                    self._waiting[connection] = names
        elif kind == 12:
            with self._lock:
                self._waiting.pop(connection, None)
                say(b"\1")
        else:
            arguments = {1: 2, 2: 3, 4: 1, 8: 1, 9: 2, 11: 0, 14: 2, 15: 1, 16: 1}.get(kind, 0)
            names = [read_text() for _ in range(arguments)]
            if kind == 4:
                names.append(read(8))
            elif kind == 11:
                names += [read_text() for _ in range(2 * read_number())]
            with self._lock:
                say(self._do(kind, names))
                for waiter, awaited in list(self._waiting.items()):
                    if self._has(awaited):
                        del self._waiting[waiter]
                        with suppress(OSError):  # the waiter has hung up
                            waiter.sendall(b"\0")

    def _has(self, names: list[bytes]) -> bool:
        return all(name in self._values or self._queues.get(name) for name in names)

    def _do(self, kind: int, given: list[bytes]) -> bytes:
        values, queues = self._values, self._queues
        if kind in (1, 11):
            values.update(zip(given[::2], given[1::2], strict=True))
        elif kind == 2:
            name, expected, desired = given
            if (name in values or not expected) and values.setdefault(name, b"") == expected:
                values[name] = desired
            return text(values.get(name, expected))
        elif kind == 4:
            total = int(values.get(given[0], b"0")) + struct.unpack("=q", given[1])[0]
            values[given[0]] = b"%d" % total
            return number(total)
        elif kind == 7:
            return number(len(values))
        elif kind == 8:
            return number(values.pop(given[0], None) is not None)
        elif kind == 9:
            values[given[0]] = values.get(given[0], b"") + given[1]
        elif kind == 17:
            return number(len(values)) + b"".join(map(text, values))
        elif not self.has_queues:
            raise EOFError
        elif kind == 14:
            queues.setdefault(given[0], deque()).append(given[1])
        elif kind == 15:
            queue = queues.get(given[0])
            return number(1) + text(queue.popleft()) if queue else number(0)
        elif kind == 16:
            return number(len(queues.get(given[0], ())))
        else:
            raise EOFError
        return b""
