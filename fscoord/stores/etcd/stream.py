"""`Stream`: answers of etcd that come one after the other on one connection, such as those of a watch."""

from __future__ import annotations

import json
from typing import Any

from fscoord._runtime import system

__all__ = ["Stream"]


class Stream:
    """The answers on one connection, one after the other."""

    def __init__(self, response: Any, failures: Any) -> None:
        self._response = response
        self._failures = failures
        self._chunks = response.stream(1 << 16)
        self._rest = b""

    def next(self, limit: float) -> dict[str, Any] | None:
        """Return the next answer, or None if none comes within `limit` seconds, or the connection is lost."""
        ends = system.time.monotonic() + limit
        while b"\n" not in self._rest:
            left = ends - system.time.monotonic()
            if left <= 0:
                return None
            try:
                self._response.connection.sock.settimeout(left)
                self._rest += next(self._chunks)
            except (self._failures.HTTPError, OSError, StopIteration, AttributeError, ValueError):
                return None  # over time, cut off, at its end, or interrupted, which leaves no connection
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            return dict(json.loads(line).get("result") or {"canceled": True})
        except ValueError:
            return None

    def interrupt(self) -> None:
        """Have `next` return, in whichever thread it is."""
        try:
            self._response.shutdown()
        except (OSError, ValueError, RuntimeError):  # it is closed already
            pass

    def close(self) -> None:
        """Give the connection back; the server ends the watch."""
        self._response.close()
