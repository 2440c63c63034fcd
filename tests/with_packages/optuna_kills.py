"""A program for test_optuna: children append to a journal and are killed, and the journal is checked after each.

``python -m with_packages.optuna_kills HOW SEGMENT_BYTES STRIDE DIRECTORY`` prints the first number at which no child
was killed: that of a call of the system, if HOW is ``before``, or of a byte that is written, if it is ``cut``.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from optuna.storages import JournalStorage
from support.faulty import faulty_system
from with_packages.optuna_processes import entry, in_child, numbers

from fscoord.integrations import optuna as integration
from fscoord.integrations.optuna import FscoordJournalBackend

CHILDREN_PER_JOURNAL = 50
"""Each child reads all that was torn before."""


def append_and_die(path: str, logs: list[dict[str, Any]], *, before: int | None = None, cut: int | None = None) -> bool:
    """Append in a child that dies; return whether it died, which it does not if there is no such call or byte.

    Args:
        path: the file of the store.
        logs: what to append.
        before: die before the call of this number.
        cut: die when so many bytes are written, in one call or several.
    """
    left = [before, cut]

    def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        calls, size = left
        if calls is not None:
            left[0] = calls - 1
            if calls == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        if size is not None and name in ("write", "pwrite"):
            data = arguments[1]
            left[1] = size - len(data)
            if size < len(data):
                real(arguments[0], data[:size], *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)

    def body() -> None:
        with faulty_system() as faulty:
            backend = FscoordJournalBackend(path)
            for _ in backend.read_logs(0):
                pass
            with faulty.instead(does):
                backend.append_logs(logs)

    code = in_child(body)
    assert code in (0, -signal.SIGKILL)
    return code != 0


class Journals:
    """The journals in `directory`, one after the other, and the entries that were acknowledged in the present one."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._attempts = itertools.count()
        self._acknowledged: set[int] = set()

    def step(self, **how: int) -> bool:
        """Append three entries in a child that dies as `how` says; return whether it died, after all is checked.

        The next child continues the same journal, with what the dead one has left.
        """
        number = next(self._attempts)
        path = os.path.join(self._directory, f"journal{number // CHILDREN_PER_JOURNAL}")
        if number % CHILDREN_PER_JOURNAL == 0:
            self._acknowledged.clear()
            assert not self._append(path, number)
            number = next(self._attempts)
        died = self._append(path, number, **how)
        with FscoordJournalBackend(path, timeout=0) as backend:  # a lock that is held is an error at once
            found = numbers(backend)
            assert JournalStorage(backend).get_all_studies() == []
        batches = [found[at : at + 3] for at in range(0, len(found), 3)]
        assert batches == [[batch[0], batch[0] + 1, batch[0] + 2] for batch in batches], f"{how}: a part of a batch"
        firsts = [batch[0] for batch in batches]
        assert firsts == sorted(set(firsts)), f"{how}: out of order, or twice"
        assert self._acknowledged <= set(firsts), f"{how}: lost"
        return died

    def _append(self, path: str, number: int, **how: int) -> bool:
        died = append_and_die(path, [entry(3 * number + each) for each in range(3)], **how)
        if not died:
            self._acknowledged.add(3 * number)
        return died


def main(how: str, segment_bytes: str, stride: str, directory: str) -> None:
    """Kill children at 0, `stride`, and so on, until one ends by itself."""
    integration.SEGMENT_BYTES = int(segment_bytes)  # type: ignore[misc]
    gc.collect()
    gc.freeze()  # so that no child copies the pages of all objects
    journals = Journals(directory)
    number = 0
    while journals.step(**{how: number}):
        number += int(stride)
    print(number)


if __name__ == "__main__":
    main(*sys.argv[1:])
