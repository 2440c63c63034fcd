"""`Registration`: make a handle a session of its log, by a session record."""

from __future__ import annotations

from collections.abc import Callable

from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.handle import HandleState
from fscoord._log.io.writer import LogWriter
from fscoord._log.liveness.own_byte import Liveness
from fscoord.errors import LimitExceededError

__all__ = ["Registration"]


class Registration:
    """The session record of one handle, which it appends before its first write.

    Args:
        introduce: returns the session record's content: host, process, label.

    Attributes:
        rank: the rank that the next session record names.
    """

    def __init__(
        self, handle: HandleState, liveness: Liveness, writer: LogWriter, introduce: Callable[[], Session]
    ) -> None:
        self._handle = handle
        self._liveness = liveness
        self._writer = writer
        self._introduce = introduce
        self.rank: int | None = None

    def append(self) -> int:
        """With the log's lock: register this handle; return its number, which the lock's range shows from now on."""
        handle, liveness = self._handle, self._liveness
        session = self._introduce()
        if self.rank is not None:
            session = session._replace(rank=self.rank)
        number = liveness.take_byte()
        if number > record.WRITER_MAX:
            raise LimitExceededError(
                f"{handle.path}: all numbers for sessions are used up; begin another log, or another run",
                path=handle.path,
            )
        alive_id = bytes(16) if liveness.file is None else liveness.file.id
        self._writer.append(record.SESSION, b"", session._replace(alive_id=alive_id).encode(), number)
        handle.lock.bind(handle.lock.fd, number)
        return number
