"""`LocalAgent` performs operations in a process of this host, and abandons a process that hangs in the kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from typing import Any, Final, Protocol

from fscoord._runtime import system
from fscoord._runtime.signals import defer_signals
from fscoord.errors import FscoordError

START_S: Final = 30.0
"""How many seconds a process may take to start. The time limit of its first operation begins after the start."""
END_S: Final = 2.0
PIECE: Final = 1 << 16


class FailedError(FscoordError):
    """An operation of an agent raised an exception.

    `kind` is the name of the exception's class. `errno` is the exception's error number, or None.
    """

    def __init__(self, message: str, *, errno: int | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.errno = errno
        self.kind = kind


class StuckError(FscoordError):
    """An operation did not return in time. The kernel may block the process of the operation for ever."""


class LostError(FscoordError):
    """An agent is gone: its process has ended, or its host has stopped answering."""


class SilentError(FscoordError):
    """The examined directory does not answer, so the examination ends."""


class AgentProtocol(Protocol):
    """Performs operations on request, in a process of this host or of another host."""

    label: str

    def begin(self, act: str, limit: float, **arguments: Any) -> None:
        """Start the operation `act`, which may take `limit` seconds."""

    def finish(self) -> Any:
        """Return the result of the operation that was started last.

        Raises:
            FailedError: the operation failed.
            StuckError: the operation did not return within its limit.
            LostError: the agent is gone.
        """

    def ask(self, act: str, limit: float, **arguments: Any) -> Any:
        """Start the operation `act`, wait for its result, and return the result. Raise the errors of `finish`."""
        self.begin(act, limit, **arguments)
        return self.finish()

    def kill(self) -> None:
        """Kill the agent's process with SIGKILL. The next operation starts a new process."""


class LocalAgent(AgentProtocol):
    """Performs operations in a child, `fscoord.doctor.agent_process`. An operation starts the child if none runs."""

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

    def begin(self, act: str, limit: float, **arguments: Any) -> None:
        if self._process is None:
            self._start()
        self._send(act, arguments)
        self._limit = limit
        self._deadline = system.time.monotonic() + (limit if self._has_started else START_S)

    def finish(self) -> Any:
        while True:
            answer = json.loads(self._line())
            if answer["n"] == self._number:
                break
            if not self._has_started:  # this is the first line, which the process writes when it has started
                self._has_started = True
                self._deadline = system.time.monotonic() + self._limit
        if "error" not in answer:
            return answer["result"]
        error = answer["error"]
        raise FailedError(error["message"], errno=error["errno"], kind=error["type"])

    def kill(self) -> None:
        process = self._process
        if process is None:
            return
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # the process is blocked in the kernel; it ends when its call returns
            process.wait(END_S)
        _close(process)
        self._process = None  # last, so that a further call can kill the process if this call is interrupted

    def dismiss(self, seconds: float) -> bool:
        """Make the process clean up and end. Return whether it has ended within `seconds`."""
        process = self._process
        if process is None:
            return True
        _close(process)  # the process cleans up even if this wait is interrupted
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._process = None
        return True

    def _start(self) -> None:
        # With this process's import path the agent finds the same fscoord, and imports nothing from the examined
        # directory. A session of its own protects the agent from the terminal's Ctrl-C. Its standard error is a pipe:
        # an agent that hangs in the kernel must not keep this process's standard error open.
        self._rest = self._said = b""
        self._has_started = False
        with defer_signals():  # otherwise an interruption could leave a process that no attribute names
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fscoord.doctor.agent_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd="/",
                env={**system.os.environ, "PYTHONPATH": system.import_path()},
                start_new_session=True,
            )
        if self._directory:
            self._send("settle", {"directory": self._directory})

    def _send(self, act: str, arguments: dict[str, Any]) -> None:
        self._number += 1
        self._act = act
        question = json.dumps({"n": self._number, "act": act, "with": arguments}).encode("ascii") + b"\n"
        with suppress(BrokenPipeError):  # the agent has ended: `finish` raises `LostError`
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(question)  # an agent that still performs the previous operation reads it later

    def _line(self) -> bytes:
        if self._process is None or self._process.stdout is None or self._process.stderr is None:
            raise LostError(f"{self.label}: its process was ended before the operation returned")
        answers, words = self._process.stdout.fileno(), self._process.stderr.fileno()
        poll = system.select.poll()
        for fd in (answers, words):
            poll.register(fd, system.select.POLLIN)
        while b"\n" not in self._rest:
            left = self._deadline - system.time.monotonic()
            ready = dict(poll.poll(left * 1000)) if left > 0 else {}
            if not ready:
                raise self._late()
            if words in ready and (said := system.os.read(words, PIECE)):  # the agent would stop at a full pipe
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


class MailboxAgent(LocalAgent):
    """The agent that uses the mailbox. If this agent hangs, the examination ends, but the agent's process continues.

    When the hanging call returns, the process reads the end of its standard input, and leaves the mailbox.
    """

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.is_silent = False

    def _late(self) -> FscoordError:
        if not self._has_started:
            return super()._late()
        self.is_silent = True
        return SilentError(f"the file system did not answer within {self._limit:g} s ({self._act})")


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
