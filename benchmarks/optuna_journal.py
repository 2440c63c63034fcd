"""Optuna's storages: trials in a second, by one process and several, and the time to open a study.

Only on request (``--only optuna``): it needs the extra ``optuna``. Each trial samples one parameter at random and
reports one value, so that the storages are measured and not the sampler. A trial is six operations of the storage.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import crew
from benchmarks.measure import Row, Settings, median, take_turns

OURS = "fscoord FileStore"
OURS_DURABLE = "fscoord FileStore, durable"
JOURNAL = "Optuna JournalFileBackend"
SQLITE = "Optuna RDBStorage, SQLite"
STORAGES = (OURS, OURS_DURABLE, JOURNAL, SQLITE)
NO_OPTUNA = "Optuna is not installed: pip install 'fscoord[optuna]'"

STUDY = "s"
SIZES, SIZES_QUICK = (1, 4, 8), (1, 2)
TRIALS, TRIALS_QUICK = 200, 4
"""How many trials all processes do together."""
LONG, LONG_QUICK = 1000, 20
"""How many trials the study has that is opened."""
LIMIT_S = 240


@contextmanager
def storage_of(kind: str, directory: str) -> Iterator[Any]:
    """Open a storage of this kind in `directory`, and close it: NFS keeps a file that is removed while it is open."""
    import optuna

    from fscoord.integrations.optuna import FscoordJournalBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = str(Path(directory, "study"))
    if kind == SQLITE:
        arguments = {"connect_args": {"timeout": LIMIT_S}}
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs=arguments)
        yield storage
        storage.engine.dispose()
    elif kind == JOURNAL:
        yield optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
    else:
        with FscoordJournalBackend(path, durable=kind == OURS_DURABLE, timeout=LIMIT_S) as backend:
            yield optuna.storages.JournalStorage(backend)


def work(member: crew.Member, kind: str, directory: str, trials: int) -> tuple[float, float]:
    """In each process: do `trials` trials; return when they began and ended, on the clock that all processes share."""
    import optuna

    with storage_of(kind, directory) as storage:
        study = optuna.load_study(study_name=STUDY, storage=storage, sampler=optuna.samplers.RandomSampler(member.rank))
        member.start()
        begin = time.monotonic()
        for _ in range(trials):
            trial = study.ask()
            x = trial.suggest_float("x", -1, 1)
            trial.report(x, 0)
            study.tell(trial, x * x)
        return begin, time.monotonic()


def rate(kind: str, directory: str, size: int, trials: int) -> float:
    """Return how many trials `size` processes do in a second, in a new study."""
    import optuna

    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory) as place:
        with storage_of(kind, place) as storage:
            optuna.create_study(study_name=STUDY, storage=storage)
        each = max(1, trials // size)
        times = crew.run(work, size, kind, place, each)
        with storage_of(kind, place) as storage:
            numbers = sorted(trial.number for trial in optuna.load_study(study_name=STUDY, storage=storage).trials)
        if numbers != list(range(each * size)):
            raise RuntimeError(f"{kind} has {len(numbers)} trials of {each * size}")
    return each * size / (max(end for _, end in times) - min(begin for begin, _ in times))


def fill(kind: str, directory: str, trials: int) -> None:
    """Make a study of `trials` trials."""
    import optuna

    with storage_of(kind, directory) as storage:
        study = optuna.create_study(study_name=STUDY, storage=storage, sampler=optuna.samplers.RandomSampler(0))
        for _ in range(trials):
            trial = study.ask()
            study.tell(trial, trial.suggest_float("x", -1, 1) ** 2)


def opening(member: crew.Member, kind: str, directory: str, trials: int) -> float:
    """In a process of its own: return the time in seconds until all trials of the study are there."""
    import optuna

    import fscoord.integrations.optuna  # noqa: F401 - not part of what is measured

    member.start()
    begin = time.monotonic()
    with storage_of(kind, directory) as storage:
        found = len(optuna.load_study(study_name=STUDY, storage=storage).trials)
        taken = time.monotonic() - begin
    if found != trials:
        raise RuntimeError(f"{kind} has {found} trials of {trials}")
    return taken


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row for each number of processes, one for the opening of a long study, and one for its files."""
    absent = {} if importlib.util.find_spec("optuna") else dict.fromkeys(STORAGES, NO_OPTUNA)
    rounds = settings.rounds(5)
    trials = TRIALS_QUICK if settings.quick else TRIALS
    for size in SIZES_QUICK if settings.quick else SIZES:

        def once(kind: str, size: int = size) -> float:
            return rate(kind, settings.directory, size, trials)

        found, missing = take_turns(settings, STORAGES, rounds, once, f"trials of {size} processes", absent)
        yield Row(
            f"Optuna: trials of {size} processes together",
            "1/s",
            f"median of {rounds} rounds",
            {kind: median(rates) for kind, rates in found.items()},
            missing,
            details={kind: {"least": min(rates), "most": max(rates)} for kind, rates in found.items()},
            more_is_better=True,
        )
    yield from long_study(settings, rounds, absent)


def long_study(settings: Settings, rounds: int, absent: dict[str, str]) -> Iterator[Row]:
    """Yield the rows for a long study: how long it takes to open, and how long its files are."""
    trials = LONG_QUICK if settings.quick else LONG
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=settings.directory) as place:
        sizes = {}
        for number, kind in enumerate(STORAGES):
            directory = os.path.join(place, str(number))
            os.mkdir(directory)
            if not absent:
                settings.report(f"a study of {trials} trials in {kind}")
                fill(kind, directory, trials)
                sizes[kind] = sum(file.stat().st_size for file in Path(directory).iterdir()) / 1024

        def once(kind: str) -> float:
            return float(crew.run(opening, 1, kind, os.path.join(place, str(STORAGES.index(kind))), trials)[0] * 1e3)

        found, missing = take_turns(settings, STORAGES, rounds, once, "opening a study", absent)
    what = f"median of {rounds} rounds"
    opened = {kind: median(times) for kind, times in found.items()}
    yield Row(f"Optuna: open a study of {trials} trials", "ms", what, opened, missing)
    yield Row(f"Optuna: files of a study of {trials} trials", "KiB", "one round", sizes, missing)
