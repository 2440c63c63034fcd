"""A hand of this host: a process that is asked, waited for with a deadline, and given up if the kernel keeps it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final, Protocol

from fscoord import _system as system
from fscoord._interruptions import interruptions_wait
from fscoord.errors import FscoordError

__all__ = ["ChildHand", "FailedError", "HandLike", "LostError", "StuckError"]

START_S: Final = 30.0
"""How much longer the first answer may take: the process must start."""
END_S: Final = 2.0


class FailedError(FscoordError):
    """An act failed: `errno` and the error's own words."""

    def __init__(self, message: str, *, errno: int | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.errno = errno
        self.kind = kind


class StuckError(FscoordError):
    """An act did not return in time; the kernel may keep its process for ever."""


class LostError(FscoordError):
    """A hand is gone: its process ended, or its host does not answer any more."""


class HandLike(Protocol):
    """Whoever can be asked for an act: a process of this host, or an instance on another."""

    label: str

    def begin(self, act: str, limit: float, **arguments: Any) -> None:
        """Ask for `act`, which may take `limit` seconds."""

    def finish(self) -> Any:
        """Return the answer to what was asked last.

        Raises:
            FailedError: the act failed.
            StuckError: it did not return within its limit.
            LostError: nobody is there to answer.
        """

    def ask(self, act: str, limit: float, **arguments: Any) -> Any:
        """Ask for `act` and return the answer, see `finish`."""

    def kill(self) -> None:
        """Kill the process with SIGKILL, whatever it is at; the next question starts another."""


class ChildHand:
    """A process that runs `fscoord.doctor.hand`; started by the first question, and again after `kill`."""

    def __init__(self, label: str, directory: str = "") -> None:
        self.label = label
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._act = ""
        self._deadline = 0.0
        self._rest = b""

    def ask(self, act: str, limit: float, **arguments: Any) -> Any:
        """See `HandLike.ask`."""
        self.begin(act, limit, **arguments)
        return self.finish()

    def begin(self, act: str, limit: float, **arguments: Any) -> None:
        """See `HandLike.begin`."""
        if self._process is None:
            self._start()
            limit += START_S
        self._send(act, arguments)
        self._deadline = system.time.monotonic() + limit

    def finish(self) -> Any:
        """See `HandLike.finish`."""
        while True:
            answer = json.loads(self._line())
            if answer["n"] == self._number:
                break
        if "error" not in answer:
            return answer["result"]
        error = answer["error"]
        raise FailedError(error["message"], errno=error["errno"], kind=error["type"])

    def kill(self) -> None:
        """See `HandLike.kill`."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass  # the kernel keeps it; it ends when its call does
        _close(process)

    def dismiss(self, seconds: float) -> bool:
        """Let the process put its things in order and end; return whether it did within so many seconds."""
        process, self._process = self._process, None
        if process is None:
            return True
        _close(process)  # also if this wait is interrupted, it will put them in order
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _start(self) -> None:
        # With this process's own path the same fscoord is found, however this one was; and nothing is imported from the
        # directory under examination. A session of its own keeps the terminal's Ctrl-C from it.
        self._rest = b""
        with interruptions_wait():  # or a process could start that nobody knows of
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fscoord.doctor.hand"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                cwd="/",
                env={**system.os.environ, "PYTHONPATH": system.os.pathsep.join(_import_path())},
                start_new_session=True,
            )
        if self._directory:
            self._send("settle", {"directory": self._directory})

    def _send(self, act: str, arguments: dict[str, Any]) -> None:
        self._number += 1
        self._act = act
        question = json.dumps({"n": self._number, "act": act, "with": arguments}).encode("ascii") + b"\n"
        try:
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(question)  # a hand that still does what was asked before reads it later
        except BrokenPipeError:
            raise self._lost() from None

    def _line(self) -> bytes:
        if self._process is None or self._process.stdout is None:
            raise LostError(f"{self.label} was not asked anything")
        fd = self._process.stdout.fileno()
        poll = system.select.poll()
        poll.register(fd, system.select.POLLIN)
        while b"\n" not in self._rest:
            left = self._deadline - system.time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                act = self._act
                self.kill()
                raise StuckError(f"{self.label}: {act} did not return in time")
            data = system.os.read(fd, 1 << 16)
            if not data:
                raise self._lost()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _lost(self) -> LostError:
        self.kill()
        return LostError(f"{self.label}: its process ended during {self._act}")


def _import_path() -> list[str]:
    return [system.os.path.abspath(entry) for entry in sys.path if entry] or [""]


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                pass
