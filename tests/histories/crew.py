"""Processes that work on one store, and what befalls them: kill -9, SIGSTOP, a limit on the size of files."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fscoord

TESTS = Path(__file__).parent.parent
HANG_S = 120
STOPPED_S = 0.02
"""How long one stays stopped if nobody else gets on meanwhile."""


class Member:
    """A process, and the lines that it has printed so far."""

    def __init__(self, name: int, process: subprocess.Popen[bytes]) -> None:
        self.name, self.process = name, process
        self.lines: list[bytes] = []
        self.rest = b""
        self.was_killed = self.is_over = False


class Crew:
    """Processes of `worker`, which tell of what they do; killed and reaped at the end of the ``with``."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._selector = selectors.DefaultSelector()
        root = str(Path(fscoord.__file__).parent.parent)
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, str(TESTS)])}
        self.members: list[Member] = []
        self.happened: dict[str, int] = {"kill": 0, "stop": 0, "full": 0}

    def start(self, name: int, role: str, *arguments: Any) -> Member:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), role, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )
        member = Member(name, process)
        self.members.append(member)
        assert process.stdout is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # so that nobody runs far ahead of what was heard
        self._selector.register(process.stdout, selectors.EVENT_READ, member)
        return member

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            try:
                os.killpg(member.process.pid, signal.SIGKILL)  # with its forked children
            except ProcessLookupError:
                pass
            member.process.wait()
            assert member.process.stdout is not None
            member.process.stdout.close()
        self._selector.close()

    @property
    def at_work(self) -> list[Member]:
        return [member for member in self.members if not member.is_over and not member.was_killed]

    def told(self) -> int:
        return sum(len(member.lines) for member in self.members)

    def listen(self, limit: float = HANG_S) -> bool:
        """Take in the reports; return False if none came for `limit` seconds, or if all processes have ended."""
        ready = self._selector.select(limit)
        for key, _ in ready:
            member = key.data
            data = os.read(key.fd, 1 << 20)
            *lines, member.rest = (member.rest + data).split(b"\n")
            member.lines += lines
            if not data:
                self._selector.unregister(key.fileobj)
                member.is_over = True
        return bool(ready)

    def listen_until(self, enough: Callable[[], bool]) -> None:
        while self._selector.get_map() and not enough():
            assert self.listen(), f"for {HANG_S} s nobody has got on"

    def finish(self) -> None:
        """Listen until all have ended; each must end well unless it was killed."""
        self.listen_until(lambda: False)
        for member in self.members:
            code = member.process.wait(HANG_S)
            assert code == (-signal.SIGKILL if member.was_killed else 0), f"{member.name} ended with {code}"

    def kill_all(self) -> None:
        """Kill all running processes and their forked children; take in their reports."""
        for member in self.members:
            try:
                os.killpg(member.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            member.was_killed = True
        self.listen_until(lambda: False)

    # -- what befalls them -----------------------------------------------------------------------------------------

    def kill_one(self) -> Member | None:
        """Kill one running process, if there is one."""
        able = self.at_work
        if not able:
            return None
        victim = self._rng.choice(able)
        victim.process.kill()
        victim.was_killed = victim.process.wait() == -signal.SIGKILL  # else it had ended, and not all was heard
        self.happened["kill"] += victim.was_killed
        return victim

    def stop_one(self) -> None:
        """Stop one until others have got on a little, or can't."""
        if self.at_work:
            victim = self._rng.choice(self.at_work)
            victim.process.send_signal(signal.SIGSTOP)
            before = self.told()
            while self.told() < before + 20 and self._selector.get_map() and self.listen(STOPPED_S):
                pass
            victim.process.send_signal(signal.SIGCONT)
            self.happened["stop"] += 1

    def let_disk_be_full(self, path: str) -> None:
        """Let one write no further than a little past the end of the newest file of the log, as if the disk were full,
        until others have got on.
        """
        if self.at_work:
            victim = self._rng.choice(self.at_work)
            directory, base = os.path.split(path)
            sizes = [0]
            for name in os.listdir(directory):
                try:
                    sizes.append(os.stat(os.path.join(directory, name)).st_size if name.startswith(base) else 0)
                except FileNotFoundError:
                    continue
            try:
                hard = resource.prlimit(victim.process.pid, resource.RLIMIT_FSIZE)[1]
                end = max(sizes) + self._rng.randrange(1, 60)
                resource.prlimit(victim.process.pid, resource.RLIMIT_FSIZE, (end, hard))
                before = self.told()
                while self.told() < before + 20 and self._selector.get_map() and self.listen(STOPPED_S):
                    pass
                resource.prlimit(victim.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
            except ProcessLookupError:
                return
            self.happened["full"] += 1
