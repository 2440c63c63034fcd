"""The cost of a new process: the time of the import, and the time until its first write is done."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Budget, Row, Settings, median, take_turns
from benchmarks.stores import OURS, fresh

IMPORTED = "import fscoord"
TORCH = "torch: import torch.distributed"
NOTHING = "a bare interpreter"
WRITTEN = "import, open and set"

TIME_IMPORT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
PROGRAMS = {
    IMPORTED: "import fscoord",
    NOTHING: "pass",
    WRITTEN: "import sys; from fscoord import FileStore; FileStore(sys.argv[1]).set('key', 'value')",
}


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row for the import alone, and a row for the life of a whole process."""
    rounds = settings.rounds(15)

    def imported(name: str) -> float:
        return float(_python(TIME_IMPORT.format("fscoord" if name == IMPORTED else "torch.distributed"))) * 1e3

    found, missing = take_turns(settings, (IMPORTED,), rounds, imported, "import")
    few, missing_few = take_turns(settings, (TORCH,), min(rounds, 3), imported, "torch's import")
    found |= few
    yield Row(
        "import fscoord",
        "ms",
        f"best of {rounds} rounds",
        {name: min(times) for name, times in found.items()},
        missing | missing_few,
        {name: {"median of rounds": median(times)} for name, times in found.items()},
        [Budget("under 40", limit=40.0)],
    )

    def lived(name: str) -> float:
        with fresh(OURS, settings.directory) as place:
            before = time.perf_counter()
            _python(PROGRAMS[name], place.address)
            return (time.perf_counter() - before) * 1e3

    found, missing = take_turns(settings, (WRITTEN, IMPORTED, NOTHING), rounds, lived, "a whole process")
    yield Row(
        "a whole process: import, open, set",
        "ms",
        f"best of {rounds} rounds",
        {name: min(times) for name, times in found.items()},
        missing,
        {name: {"median of rounds": median(times)} for name, times in found.items()},
        [Budget("under twice", IMPORTED, 0.5)],
    )


def _python(program: str, *args: str) -> str:
    root = Path(__file__).parent.parent
    # Bytecode is there when a package was installed; without it the compiler is what would be measured.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, "-c", program, *args],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    ).stdout
