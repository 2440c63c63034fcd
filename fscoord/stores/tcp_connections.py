"""`Connections`: one process's connections to a server of torch's `TCPStore`, one for each call that is under way."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

from fscoord import _system as system
from fscoord.errors import StoreClosedError, StoreUnavailableError

__all__ = ["Connections"]

T = TypeVar("T")

_inherited: list[object] = []
"""What a forked child must neither use nor destroy: two processes would mix their answers, and the server's thread is
not in the child."""


class Connections:
    """Connections to the server at `host` and `port`; the first may be the server itself.

    Attributes:
        torch: the module ``torch.distributed``.
        port: the server's port.
        limit: how many seconds each connection may take to be made.

    Raises:
        ImportError: there is no torch.
        StoreUnavailableError: there is no server, or its port is taken.
    """

    def __init__(self, host: str, port: int, timeout: float, *, use_libuv: bool, **server: Any) -> None:
        self.host, self.port = host, port
        self.limit = min(max(timeout, 0.001), 1e9)
        self._use_libuv = use_libuv
        self._is_closed = False
        self.torch = _torch()
        first = self._connect(**server)
        self.port = int(first.port)
        self._server = first if server["is_master"] else None
        self._idle = [first]
        _all.add(self)

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def call(self, operation: Callable[[Any], T], *, writes: bool = False) -> T:
        """Return what `operation` makes of a connection; torch's own time-outs and empty queues pass."""
        connection = self._take()
        try:
            result = operation(connection)
        except self.torch.DistNetworkError as error:
            raise StoreUnavailableError(
                f"{self}: {_first_line(error)}; its server is gone, or hung up", maybe_applied=writes
            ) from error
        except (self.torch.DistStoreError, UnicodeDecodeError):
            self._idle.append(connection)
            raise
        self._idle.append(connection)
        return result

    def refuse_if_closed(self) -> None:
        """Raise `StoreClosedError` after `close`."""
        if self._is_closed:
            raise StoreClosedError(f"{self} is closed; open the store again")

    def close(self) -> None:
        """Give the connections back, and the server, if it is here."""
        system.life()
        self._is_closed = True
        self._server, self._idle = None, []

    def _take(self) -> Any:
        """Return a connection that no other thread uses."""
        self.refuse_if_closed()
        system.life()  # after a fork in C it makes the child leave what is its parent's
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect(is_master=False, wait_for_workers=False)

    def after_fork(self) -> None:
        """In a forked child: begin without connections."""
        _inherited.append((self._server, self._idle))
        self._server, self._idle = None, []

    def _connect(self, **server: Any) -> Any:
        try:
            return self.torch.TCPStore(
                self.host, self.port, timeout=timedelta(seconds=self.limit), use_libuv=self._use_libuv, **server
            )
        except self.torch.DistError as error:
            raise StoreUnavailableError(
                f"{self}: {_first_line(error)}; see that one process is the master there, and that the port is free and"
                " open"
            ) from error


def _first_line(error: Exception) -> str:
    """Return what torch says, without the stack of its C++."""
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def _torch() -> Any:
    try:
        import torch.distributed
    except ImportError as error:
        raise ImportError("TCPStore needs torch: install the extra, pip install 'fscoord[torch]'") from error
    return torch.distributed


_all: WeakSet[Connections] = WeakSet()


def _after_fork_in_child() -> None:
    for connections in list(_all):
        connections.after_fork()


system.after_fork_in_child("tcp connections", _after_fork_in_child)
