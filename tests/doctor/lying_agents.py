"""Hands in this very process, on file systems that lie in one way each."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from fscoord.doctor import probe_file
from fscoord.doctor.agent_process import Agent
from fscoord.doctor.agents import FailedError, StuckError

PATIENCE_S = 180  # a direct read waits until the disk has written all that was appended


class ThreadAgent:
    """An agent that does its acts in a thread, on files that `ProbeFile` opens."""

    def __init__(self, directory: Path, opened: type[probe_file.ProbeFile] = probe_file.ProbeFile):
        self.label = opened.__name__
        self._acts = Agent()
        self._acts.settle(str(directory))
        self._opened = opened
        self._thread: threading.Thread | None = None
        self._outcome: Any = None

    def begin(self, act: str, limit: float, **arguments: Any) -> None:
        self._thread = threading.Thread(target=self._run, args=[act, arguments])
        self._thread.start()

    def _run(self, act: str, arguments: dict[str, Any]) -> None:
        try:
            name = arguments.get("name")
            if name and name not in self._acts.files and act not in {"count", "speed"}:
                self._acts.files[name] = self._opened(os.path.join(self._acts.directory, name))
            self._outcome = (getattr(self._acts, act)(**arguments), None)
        except Exception as error:
            self._outcome = (None, error)

    def finish(self) -> Any:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        result, error = self._outcome
        if isinstance(error, OSError):
            raise FailedError(str(error), errno=error.errno)
        if error is not None:
            raise error
        return result

    def ask(self, act: str, limit: float, **arguments: Any) -> Any:
        self.begin(act, limit, **arguments)
        return self.finish()

    def kill(self) -> None:
        self._acts.close()


class OwnLocks(probe_file.ProbeFile):
    """As on NFS with local_lock=all: each host's locks are its own."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._shadow = probe_file.ProbeFile(f"{path}.{threading.get_ident()}.{time.monotonic_ns()}")

    def lock(self, kind: str, *, shared: bool = False) -> Any:
        return self._shadow.lock(kind, shared=shared)

    def close(self) -> None:
        self._shadow.close()
        super().close()


class OldData(probe_file.ProbeFile):
    """As on GlusterFS by default: what was seen is believed for a while, also under the lock.

    There it is a second; here it is a number of looks, so that it lasts for as long as it matters on any machine.
    """

    BELIEVED = 3

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._looks: dict[int, int] = {}

    def _forward(self, fd: int) -> list[probe_file.ProbeRecord | None]:
        if self._looks.get(fd, 0):
            self._looks[fd] -= 1
            return []
        found = super()._forward(fd)
        if not found:
            self._looks[fd] = self.BELIEVED
        return found


class Zeros(probe_file.ProbeFile):
    """As a plain look on NFS beside a writer: the right length, and zeros, in every third look that finds a line."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._looks = 0

    def _forward(self, fd: int) -> list[probe_file.ProbeRecord | None]:
        found = super()._forward(fd)
        self._looks += bool(found)
        return [*found[:-1], None] if found and self._looks % 3 == 0 else found


class Forgetful(probe_file.ProbeFile):
    """Some appends are acknowledged and never reach the file."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._appends = 0
        self._kept, self._nowhere = self.writer, os.open(os.devnull, os.O_WRONLY)

    def take(self, kind: str, *, shared: bool = False) -> bool:
        self.writer = self._kept
        taken = super().take(kind, shared=shared)
        self._appends += taken and not shared
        if self._appends % 7 == 6:
            self.writer = self._nowhere
        return taken

    def close(self) -> None:
        self.writer = self._kept
        os.close(self._nowhere)
        super().close()


class Refusing:
    """An agent whose lock calls fail with one error, and do nothing else."""

    def __init__(self, agent: ThreadAgent, errno: int) -> None:
        self.label = "refusing"
        self._agent = agent
        self._errno = errno

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def ask(self, act: str, limit: float, **arguments: Any) -> Any:
        if act == "lock" and arguments["kind"] != "soft":
            raise FailedError(os.strerror(self._errno), errno=self._errno)
        return self._agent.ask(act, limit, **arguments)


class Silent(Refusing):
    """An agent whose lock calls never return, as beside a dead lock manager."""

    def ask(self, act: str, limit: float, **arguments: Any) -> Any:
        if act == "lock" and arguments["kind"] != "soft":
            raise StuckError("lock did not return in time")
        return self._agent.ask(act, limit, **arguments)
