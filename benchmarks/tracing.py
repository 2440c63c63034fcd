"""The cost of a trace: processor time for each span, and the cost of the check that remains without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Budget, Row, Settings, median, take_turns

ON = "with a trace"
OFF = "without a trace"

SPANS = """
import sys, time
from fscoord._runtime import tracing
count = int(sys.argv[1])
tracing.start(sys.argv[2])
recorder = tracing.recorder
begin = time.process_time_ns()
for number in range(count):
    span = recorder.begin("wait", f"epoch/{number}/complete", "3f2a9c81d0b4.0", 3)
    recorder.end(span, "passed", "by", "node17:12345", "by_rank", 12)
recorder.flush()
print((time.process_time_ns() - begin) / count / 1000)
"""

TESTS = """
import sys, timeit
from fscoord._runtime import tracing
count = int(sys.argv[1])
tested = min(timeit.repeat("tracing.recorder is not None", globals={"tracing": tracing}, number=count))
print((tested - min(timeit.repeat("None", number=count))) / count * 1e6)
"""

BARRIERS = """
import sys, time
from fscoord import FileStore, barrier
count = int(sys.argv[1])
with FileStore(sys.argv[2], trace=sys.argv[3] or None) as store:
    begin = time.process_time_ns()
    for number in range(count):
        barrier(store, 1, f"b/{number}", rank=0)
    print((time.process_time_ns() - begin) / count / 1000)
"""


def measure(settings: Settings) -> Iterator[Row]:
    """Yield rows for a span, for the check that remains without a trace, and for a barrier with and without one."""
    rounds = settings.rounds(7)
    count = "200" if settings.quick else "20000"

    def span(_: str) -> float:
        with tempfile.TemporaryDirectory(dir=settings.directory) as place:
            return float(_python(SPANS, count, place))

    found, missing = take_turns(settings, (ON,), rounds, span, "a span")
    yield _row("a span, processor time", found, missing, rounds, [Budget("at most 2", limit=2.0)])

    found, missing = take_turns(settings, (OFF,), rounds, lambda _: float(_python(TESTS, count)), "no span")
    yield _row("no span: the test of the global name", found, missing, rounds, [Budget("at most 0.1", limit=0.1)])

    def passed(name: str) -> float:
        with tempfile.TemporaryDirectory(dir=settings.directory) as place:
            path = os.path.join(place, "store")
            return float(_python(BARRIERS, count, path, os.path.join(place, "traces") if name == ON else ""))

    found, missing = take_turns(settings, (ON, OFF), rounds, passed, "a barrier")
    yield _row("barrier of one process, processor time", found, missing, rounds, [])


def _row(work: str, found: dict[str, list[float]], missing: dict[str, str], rounds: int, budgets: list[Budget]) -> Row:
    best = {name: min(times) for name, times in found.items()}
    details = {name: {"median of rounds": median(times)} for name, times in found.items()}
    return Row(work, "µs", f"best of {rounds} rounds", best, missing, details, budgets)


def _python(program: str, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "FSCOORD_TRACE"}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=Path(__file__).parent.parent,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    ).stdout
