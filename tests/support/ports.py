"""A port that a test keeps for a server of its own, or on which nobody listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Give a port of 127.0.0.1 that no other program gets in the ``with``. A connection to it is refused.

    A server that sets SO_REUSEADDR can listen on it all the same, because the socket that holds it does not listen
    (socket(7)). etcd and torch do so.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
