"""`Server` runs torch's server for a `TCPStore` in this process. Only this module of `stores.tcp` needs torch.

The calls of torch that start and stop the server may block: the server asks the resolver for the names of its clients,
and can't be stopped until the resolver answers. So a separate thread makes these calls, with a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from fscoord._runtime import system
from fscoord.errors import StoreUnavailableError, needed_extra
from fscoord.stores.tcp.wire import ANSWER_MIN_S, Deadline, Unanswered

LOOPBACK: Final = "127.0.0.1"
"""The address for the client that torch creates with each server. The server itself listens on all addresses."""

TIMEOUT_MAX_S: Final = 1e9


class Server:
    """Runs torch's server on `port` of all addresses of this host, or on the listening socket `master_listen_fd`.

    Attributes:
        port: the port of the server.

    Raises:
        ImportError: torch is not installed.
        ValueError: this torch was built without libuv, or its server with libuv accepts no listening socket.
        StoreUnavailableError: the port is taken, or the server did not start within `limit` seconds.
    """

    def __init__(
        self, host: str, port: int, limit: float, *, use_libuv: bool, multi_tenant: bool, master_listen_fd: int | None
    ) -> None:
        self._life = system.process_epoch()
        self._store: Any = None
        self._preserve = _preserver()
        with needed_extra("a TCPStore that is the master", "torch", "torch"):
            import torch.distributed as dist
        torch: Any = dist
        self._where = f"tcp://{host}:{port}"
        self._limit = min(max(limit, ANSWER_MIN_S), TIMEOUT_MAX_S)

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
            self._store = Deadline(self._limit, lambda: f"torch's server at {self._where} to start").run(start)
        except Unanswered:
            raise StoreUnavailableError(
                f"timeout: {self._where}: torch's server did not start within {self._limit:.3g} s",
                errno=system.errno.ETIMEDOUT,
            ) from None
        except RuntimeError as error:  # torch.DistError is one
            if "libuv" in str(error):
                raise ValueError(
                    f"{self._where}: {_first_line(error)}; pass use_libuv=False, or add ?use_libuv=0 to the address"
                ) from error
            # An older torch raises a plain RuntimeError if the port is taken.
            if not (isinstance(error, torch.DistError) or "server socket" in str(error)):
                raise
            raise StoreUnavailableError(
                f"{self._where}: {_first_line(error)}; check that no other process listens on the port, and that it is"
                " free and open"
            ) from error
        self.port = int(self._store.port)

    def stop(self) -> None:
        """Stop the server, unless another store of this process shares it.

        The call returns after at most `ANSWER_MIN_S` seconds. If the server has not stopped by then, one thread remains
        until the server stops.
        """
        if self._life != system.process_epoch():
            self._abandon()
            return
        holder, self._store = [self._store], None
        self._limit = ANSWER_MIN_S
        with suppress(Unanswered):
            Deadline(self._limit, lambda: f"torch's server at {self._where} to stop").run(holder.clear)

    def __del__(self) -> None:
        if self._life != system.process_epoch():
            self._abandon()

    def _abandon(self) -> None:
        """Prevent the destruction of torch's object in a forked child.

        Its C++ destructor would end the process, because the thread of the server does not exist in the child.
        """
        if self._store is not None:
            self._preserve(self._store)
            self._store = None


def _first_line(error: Exception) -> str:
    """Return the message of `error` without the C++ stack that torch appends."""
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def _preserver() -> Callable[[object], None]:
    """Return a function that prevents the destruction of an object, even when the interpreter exits."""
    import ctypes

    preserve = ctypes.pythonapi.Py_IncRef
    preserve.argtypes, preserve.restype = [ctypes.py_object], None
    return preserve
