"""`Server`: torch's server of a `TCPStore`, in this process; a part of `stores.tcp`, and its only one that needs torch.

To start and to stop a server are the two calls into torch's C++ that a `TCPStore` makes. Either may last: the server
asks the resolver for the names of its clients, and is not stopped meanwhile. So a thread makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from fscoord._runtime import system
from fscoord.errors import StoreUnavailableError, missing_extra
from fscoord.stores.tcp.deadline import LEAST_ANSWER_S, Deadline, Unanswered

__all__ = ["Server"]

LOOPBACK: Final = "127.0.0.1"
"""Where torch's own client, which comes with a server, connects to: that listens on all addresses."""

LONGEST_S: Final = 1e9


class Server:
    """A server at `port` of all addresses of this host, or on the socket that listens already, `master_listen_fd`.

    Attributes:
        port: its port.

    Raises:
        ImportError: there is no torch.
        StoreUnavailableError: its port is taken, or it did not start within `limit` seconds.
    """

    def __init__(
        self, host: str, port: int, limit: float, *, use_libuv: bool, multi_tenant: bool, master_listen_fd: int | None
    ) -> None:
        self._life = system.process_epoch()
        self._store: Any = None
        self._preserve = _preserver()
        torch = _torch()
        self._where = f"tcp://{host}:{port}"
        self._limit = min(max(limit, LEAST_ANSWER_S), LONGEST_S)

        def start() -> Any:
            return torch.TCPStore(
                LOOPBACK if master_listen_fd is None else host,
                port,
                is_master=True,
                timeout=timedelta(seconds=self._limit),
                wait_for_workers=False,
                multi_tenant=multi_tenant,
                master_listen_fd=master_listen_fd,
                use_libuv=use_libuv,
            )

        try:
            self._store = self._deadline(f"torch's server at {self._where} to start").run(start)
        except Unanswered:
            raise StoreUnavailableError(
                f"timeout: {self._where}: torch's server did not start within {self._limit:.3g} s",
                errno=system.errno.ETIMEDOUT,
            ) from None
        except torch.DistError as error:
            raise StoreUnavailableError(
                f"{self._where}: {_first_line(error)}; see that no other process listens on the port, and that it is"
                " free and open"
            ) from error
        self.port = int(self._store.port)

    def stop(self) -> None:
        """End the server, if no other store of this process shares it.

        It is not waited for beyond `LEAST_ANSWER_S`: then a thread is left, until the server has stopped.
        """
        if self._life != system.process_epoch():
            self._leave()
            return
        holder, self._store = [self._store], None
        self._limit = LEAST_ANSWER_S
        try:
            self._deadline(f"torch's server at {self._where} to stop").run(holder.clear)
        except Unanswered:
            pass

    def __del__(self) -> None:
        if self._life != system.process_epoch():
            self._leave()

    def _leave(self) -> None:
        """In a forked child: the server's thread is not there, and its C++ would end the process for want of it."""
        if self._store is not None:
            self._preserve(self._store)
            self._store = None

    def _deadline(self, waiting_for: str) -> Deadline:
        return Deadline(self._limit, lambda: waiting_for)


def _first_line(error: Exception) -> str:
    """Return what torch says, without the stack of its C++."""
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def _preserver() -> Callable[[object], None]:
    """Return a function that keeps an object from ever being destroyed, also when the interpreter ends."""
    import ctypes

    preserve = ctypes.pythonapi.Py_IncRef
    preserve.argtypes, preserve.restype = [ctypes.py_object], None
    return preserve


def _torch() -> Any:
    try:
        import torch.distributed
    except ImportError as error:
        raise missing_extra("a TCPStore that is the master", "torch", "torch") from error
    return torch.distributed
