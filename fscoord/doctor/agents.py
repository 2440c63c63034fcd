"""A hand of this host: a process that is asked, waited for with a deadline, and given up if the kernel keeps it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final, Protocol

from fscoord._runtime import system
from fscoord._runtime.signals import interruptions_wait
from fscoord.errors import FscoordError

__all__ = ["ChildHand", "FailedError", "HandLike", "LostError", "Scribe", "SilentError", "StuckError"]

START_S: Final = 30.0
"""How long a process may take to start; the limit of what it is asked first counts from then on."""
END_S: Final = 2.0
PIECE: Final = 1 << 16


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


class SilentError(FscoordError):
    """The directory itself does not answer: no more can be found out there."""


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
    """A process that runs `fscoord.doctor.agent_process`; started by the first question, and again after `kill`."""

    def __init__(self, label: str, directory: str = "") -> None:
        self.label = label
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._act = ""
        self._limit = 0.0
        self._deadline = 0.0
        self._has_started = False
        self._rest = b""
        self._said = b""

    def ask(self, act: str, limit: float, **arguments: Any) -> Any:
        """See `HandLike.ask`."""
        self.begin(act, limit, **arguments)
        return self.finish()

    def begin(self, act: str, limit: float, **arguments: Any) -> None:
        """See `HandLike.begin`."""
        if self._process is None:
            self._start()
        self._send(act, arguments)
        self._limit = limit
        self._deadline = system.time.monotonic() + (limit if self._has_started else START_S)

    def finish(self) -> Any:
        """See `HandLike.finish`."""
        while True:
            answer = json.loads(self._line())
            if answer["n"] == self._number:
                break
            if not self._has_started:  # the first line says so
                self._has_started = True
                self._deadline = system.time.monotonic() + self._limit
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
        # directory under examination. A session of its own keeps the terminal's Ctrl-C from it; a pipe of its own for
        # standard error keeps whoever reads this process's from waiting for one that the kernel keeps.
        self._rest = self._said = b""
        self._has_started = False
        with interruptions_wait():  # or a process could start that nobody knows of
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fscoord.doctor.agent_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
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
        except BrokenPipeError:  # it has ended: `finish` will say so, and with which words
            pass

    def _line(self) -> bytes:
        if self._process is None or self._process.stdout is None or self._process.stderr is None:
            raise LostError(f"{self.label} was not asked anything")
        answers, words = self._process.stdout.fileno(), self._process.stderr.fileno()
        poll = system.select.poll()
        for fd in (answers, words):
            poll.register(fd, system.select.POLLIN)
        while b"\n" not in self._rest:
            left = self._deadline - system.time.monotonic()
            ready = dict(poll.poll(left * 1000)) if left > 0 else {}
            if not ready:
                raise self._late()
            if words in ready and (said := system.os.read(words, PIECE)):  # unread, a full pipe would stop it
                self._said = (self._said + said)[-PIECE:]
                continue
            data = system.os.read(answers, PIECE)
            if not data:
                raise self._lost()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _late(self) -> FscoordError:
        self.kill()
        if not self._has_started:
            return LostError(f"{self.label}: its process did not start within {START_S:g} s")
        return StuckError(f"{self.label}: {self._act} did not return in time")

    def _lost(self) -> LostError:
        self.kill()
        lines = self._said.decode(errors="replace").split("\n")
        last = next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
        return LostError(f"{self.label}: its process ended during {self._act}{last}")


class Scribe(ChildHand):
    """The hand that looks after the meeting place. Where it is stuck nothing goes on, and nothing is given up either:
    should its call return after all, it sees that nobody asks any more, and leaves the place.
    """

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.is_silent = False

    def _late(self) -> FscoordError:
        if not self._has_started:
            return super()._late()
        self.is_silent = True
        return SilentError(f"it did not answer within {self._limit:g} s ({self._act})")


def _import_path() -> list[str]:
    return [system.os.path.abspath(entry) for entry in sys.path if entry] or [""]


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                pass
