"""Starts the processes of the demonstration, follows what they tell, and leaves none behind."""

from __future__ import annotations

import json
import logging
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from fscoord import _system as system
from fscoord.demo.words import OWN_SOURCES, text_files
from fscoord.errors import FscoordError
from fscoord.stores.file import FileStore

__all__ = ["PROCESSES_MAX", "run"]

log = logging.getLogger(__name__)

PROCESSES_MAX = 256

Event = dict[str, Any]


def run(
    processes: int,
    directory: str | None,
    *,
    kill: bool,
    timeout: float,
    on_event: Callable[[Event], None],
) -> dict[str, Any]:
    """Count the words in a directory of text with several processes, and return what they report.

    Args:
        processes: how many to start, 256 at most.
        directory: where the text files are, at any depth; None for this package's own sources.
        kill: whether to kill one of them with SIGKILL while it holds a file.
        timeout: how many seconds they wait for each other at most.
        on_event: called with every step that they tell of, as a dict with the key ``event``.

    Returns:
        The report, as it is described in ``docs/cli.md``.

    Raises:
        ValueError: an argument makes no sense.
        FscoordError: the processes could not finish.
    """
    directory = system.os.path.abspath(OWN_SOURCES if directory is None else directory)
    if not 1 <= processes <= PROCESSES_MAX:
        raise ValueError(f"the number of processes is 1 to {PROCESSES_MAX}, not {processes}")
    if kill and processes < 2:
        raise ValueError("to kill one process takes at least 2, so that another can name it")
    if next(text_files(directory), None) is None:
        raise ValueError(f"there is no text file below {directory}")
    start = system.time.monotonic()
    with _signals_end_it(), FileStore() as store, _Crew(str(store.path)) as crew:
        for _ in range(processes):
            crew.hire([directory, str(processes), "kill" if kill else "", str(timeout)])
        report = crew.follow(on_event)
    return {"input": directory, "seconds": system.time.monotonic() - start, **report}


@contextmanager
def _signals_end_it() -> Iterator[None]:
    """Let SIGTERM and SIGHUP, which would end this process on the spot, clean up first."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if system.threading.current_thread() is not system.threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Crew:
    """The processes, each with a pipe that brings what it tells, and one that ends it when this process ends."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._members: list[subprocess.Popen[bytes]] = []
        self._readers: list[system.threading.Thread] = []
        self._events: queue.SimpleQueue[tuple[subprocess.Popen[bytes], Event | None]] = queue.SimpleQueue()

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.kill()  # does nothing to one that has been waited for
        for member in self._members:
            member.wait()
        for reader in self._readers:
            reader.join()
        for member in self._members:
            for pipe in (member.stdin, member.stdout):
                if pipe is not None:
                    pipe.close()

    def hire(self, arguments: list[str]) -> None:
        """Start one more process."""
        # In the directory of the store nothing can be imported by mistake, and with this process's own path the same
        # fscoord is found, however this one was. A session of its own keeps the terminal's Ctrl-C from it.
        member = subprocess.Popen(  # noqa: S603 - our own module and our own arguments
            [sys.executable, "-m", "fscoord.demo.worker", self._store, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=system.os.path.dirname(self._store),
            env={**system.os.environ, "PYTHONPATH": system.os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        self._members.append(member)
        log.info("started process %d", member.pid)
        reader = system.threading.Thread(target=self._read, args=[member], name="fscoord-demo", daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read(self, member: subprocess.Popen[bytes]) -> None:
        assert member.stdout is not None
        for line in member.stdout:
            if line.endswith(b"\n"):  # SIGKILL can come in the middle of one
                self._events.put((member, json.loads(line)))
        self._events.put((member, None))

    def follow(self, on_event: Callable[[Event], None]) -> dict[str, Any]:
        """Return the report when all have ended; raise if there is none, or as soon as there can't be one."""
        running, met = len(self._members), 0
        report: dict[str, Any] | None = None
        failures: list[str] = []
        causes: dict[int, str] = {}
        while running and not (failures and met < len(self._members)):
            member, event = self._events.get()
            if event is None:
                running -= 1
                causes[member.pid] = cause = _cause(member.wait())
                log.info("process %d ended with %s", member.pid, cause)
                if member.returncode:
                    failures.append(f"process {member.pid} ended with {cause}")
                continue
            log.debug("process %d tells %s", member.pid, event)
            on_event(event)
            if event["event"] == "met":
                met += 1
            elif event["event"] == "holding":
                member.kill()
            elif event["event"] == "failed":
                failures.insert(0, event["message"])
            elif event["event"] == "report":
                report = event["report"]
        if report is None:
            raise FscoordError(f"the processes could not finish: {failures[0] if failures else 'none reported'}")
        for loss in report["lost"]:
            loss["cause"] = causes[loss["pid"]]
        return report


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
