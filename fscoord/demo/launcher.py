"""Starts the processes of the demonstration, reads their reports, and leaves no process behind."""

from __future__ import annotations

import json
import logging
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fscoord._runtime import system, tracing
from fscoord._runtime.signals import defer_signals, raise_on_termination
from fscoord.demo.worker import OWN_SOURCES, text_files
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
    trace: str | None = None,
) -> dict[str, Any]:
    """Count the words in a directory of text with several processes, and return their report.

    Args:
        processes: how many processes to start, 256 at most.
        directory: the directory of the text files, which may be at any depth; None: this package's own sources or, if
            they are in an archive, those of Python's ``json``.
        kill: whether to kill one process with SIGKILL while it holds a file.
        timeout: the longest wait of the processes for each other, in seconds.
        on_event: called with every step that the processes report, as a dict with the key ``event``.
        trace: the directory in which the processes record their traces; None: the setting of the environment.

    Returns:
        The report, which ``docs/cli/demo.md`` describes.

    Raises:
        ValueError: an argument is invalid.
        FscoordError: the processes could not finish.
    """
    directory = system.os.path.abspath(OWN_SOURCES if directory is None else directory)
    if not 1 <= processes <= PROCESSES_MAX:
        raise ValueError(f"the number of processes is 1 to {PROCESSES_MAX}, not {processes}")
    if kill and processes < 2:
        raise ValueError("kill needs at least 2 processes, so that one can report the death of the other")
    if next(text_files(directory), None) is None:
        raise ValueError(f"there is no text file below {directory}")
    start = system.time.monotonic()
    with raise_on_termination(), FileStore() as store, _Processes(str(store.path), trace) as group:
        for _ in range(processes):
            group.start([directory, str(processes), "kill" if kill else "", str(timeout)])
        report = group.follow(on_event)
    return {"input": directory, "seconds": system.time.monotonic() - start, **report}


class _Processes:
    """The processes, each with a pipe for its reports, and with a pipe whose end shows it that this process has ended.

    There are no threads: a signal may come between any two steps, and a half-started process must still be stopped.
    """

    def __init__(self, store: str, trace: str | None) -> None:
        self._store = store
        own = {"PYTHONPATH": system.import_path()}
        if trace is not None:
            own[tracing.ENVIRONMENT_VARIABLE] = system.os.path.abspath(trace)
        self._environment = {**system.os.environ, **own}
        self._members: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        with defer_signals():
            for member in self._members:
                member.kill()  # does nothing to one that has been waited for
        for member in self._members:  # Ctrl-C ends the wait for a process that is stuck in the kernel
            member.wait()
            for pipe in (member.stdin, member.stdout):
                if pipe is not None:
                    pipe.close()

    def start(self, arguments: list[str]) -> None:
        """Start one more process."""
        # In the directory of the store nothing can be imported by mistake. This process's import path finds the same
        # fscoord. A session of its own protects the new process from the terminal's Ctrl-C.
        with defer_signals():
            member = subprocess.Popen(  # noqa: S603 - our own module and our own arguments
                [sys.executable, "-m", "fscoord.demo.worker", self._store, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=system.os.path.dirname(self._store),
                env=self._environment,
                start_new_session=True,
            )
            self._members.append(member)
        log.info("started process %d", member.pid)

    def _events(self) -> Iterator[tuple[subprocess.Popen[bytes], Event | None]]:
        """Yield the reports of the processes as they arrive, and None for each process that has ended."""
        begun = {member.pid: b"" for member in self._members}
        with selectors.DefaultSelector() as pipes:
            for member in self._members:
                assert member.stdout is not None
                pipes.register(member.stdout, selectors.EVENT_READ, member)
            while pipes.get_map():
                # A signal between Python's last look for signals and the system call does not end the call.
                for key, _ in pipes.select(system.SLEEP_MAX_S):
                    member = key.data
                    told = system.os.read(key.fd, 65536)
                    *lines, begun[member.pid] = (begun[member.pid] + told).split(b"\n")
                    yield from ((member, json.loads(line)) for line in lines)
                    if not told:  # what it had begun to say is left out: SIGKILL can come in the middle of a line
                        pipes.unregister(key.fileobj)
                        yield member, None

    def follow(self, on_event: Callable[[Event], None]) -> dict[str, Any]:
        """Return the report when all processes have ended.

        Raise if there is no report, or as soon as none is possible.
        """
        met = 0
        report: dict[str, Any] | None = None
        failures: list[str] = []
        causes: dict[int, str] = {}
        for member, event in self._events():
            if event is None:
                causes[member.pid] = cause = _cause(member.wait())
                log.info("process %d ended with %s", member.pid, cause)
                if member.returncode:
                    failures.append(f"process {member.pid} ended with {cause}")
                    if met < len(self._members):
                        break
                continue
            log.debug("process %d reports %s", member.pid, event)
            on_event(event)
            if event["event"] == "met":
                met += 1
            elif event["event"] == "holding":
                member.kill()
            elif event["event"] == "failed":
                failures.insert(0, event["message"])
                if met < len(self._members):
                    break
            elif event["event"] == "report":
                report = event["report"]
        if report is None:
            raise FscoordError(f"the processes could not finish: {failures[0] if failures else 'none reported'}")
        for loss in report["lost"]:
            loss["cause"] = causes[loss["pid"]]
        return report


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
