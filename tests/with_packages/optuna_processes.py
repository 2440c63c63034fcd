"""Processes for test_optuna, forked because the import of Optuna takes a second: workers of a study, and appenders."""

from __future__ import annotations

import itertools
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import optuna
from optuna.storages import JournalStorage

from fscoord.integrations.optuna import FscoordJournalBackend

SET_STUDY_ATTR = 2
"""The operation of Optuna's journal that says nothing of trials."""


def entry(number: int) -> dict[str, Any]:
    """Return an entry of the journal, for a study that is not there, so that Optuna passes over it."""
    return {"op_code": SET_STUDY_ATTR, "worker_id": "w", "study_id": 0, "user_attr": {"n": number}}


def numbers(backend: FscoordJournalBackend, start: int = 0) -> list[int]:
    return [each["user_attr"]["n"] for each in backend.read_logs(start)]


def start(body: Callable[[], None]) -> int:
    """Fork a child that does `body`, and ends with 0, or with 1 after an exception; return its number."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def in_child(body: Callable[[], None]) -> int:
    """Do `body` in a child; return its exit code, which is negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(start(body), 0)[1])


class Worker:
    """A process that works on the study until it is killed. It prints each trial that it was given, and has told.

    Args:
        address: the address of the store.
        asks: after so many trials, which it does not tell, it ends by itself; 0 for never.
    """

    def __init__(self, address: str, *, asks: int = 0) -> None:
        reader, writer = os.pipe()

        def body() -> None:
            os.close(reader)
            storage = JournalStorage(FscoordJournalBackend(address))
            study = optuna.load_study(study_name="s", storage=storage, sampler=optuna.samplers.RandomSampler())
            for _ in range(asks) if asks else itertools.count():
                trial = study.ask()
                os.write(writer, b"asked %d\n" % trial.number)
                if not asks:
                    x = trial.suggest_float("x", -1, 1)
                    trial.report(x, 0)
                    study.tell(trial, x)
                    os.write(writer, f"told {trial.number} {x!r}\n".encode())

        self._pid = start(body)
        os.close(writer)
        self._lines = os.fdopen(reader)

    def read_until(self, count: int) -> list[str]:
        """Return the next `count` lines."""
        lines = [self._lines.readline() for _ in range(count)]
        assert all(lines), "the worker has ended"
        return lines

    def kill(self) -> list[str]:
        """Kill the process; return what it had printed. A line is one write of few bytes, and so it is whole."""
        os.kill(self._pid, signal.SIGKILL)
        lines = self._lines.readlines()
        self._lines.close()
        os.waitpid(self._pid, 0)
        return lines
