"""The long campaign: `python tests/campaign.py --hours 8 [PART...]`, by `tox -e long -- --hours 8`.

It runs the tests that have a large size, in rounds, each with another seed, until the hours are over. It begins no part
that took longer the last time than the time that is left. The first round has the size of every change, so that each
part runs once; the others have the size of ``--scale``. A line reports the result of each part, and how to repeat it. A
file of JSON has the same results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree as ET

TESTS = Path(__file__).parent
SELECTED = "not torch and not etcd and not packages"
PARTS = (
    "contract/test_locks.py",
    "contract/test_queues.py",
    "faults/test_arrival_slots.py",
    "faults/test_combined_kills.py",
    "faults/test_compaction.py",
    "faults/test_crash_states.py",
    "faults/test_every_call.py",
    "faults/test_flips.py",
    "faults/test_fork.py",
    "faults/test_fork_at_every_call.py",
    "faults/test_kill.py",
    "faults/test_kill_at_every_call.py",
    "faults/test_leftover_keys.py",
    "faults/test_race.py",
    "faults/test_signals.py",
    "faults/test_starts.py",
    "fuzz/test_decoder.py",
    "fuzz/test_logs.py",
    "histories/test_histories.py",
    "linear/test_checker.py",
    "linear/test_witness.py",
    "rendezvous/test_processes.py",
    "rendezvous/test_state.py",
    "simulation/test_schedules.py",
    "unit/test_arrival_schedules.py",
    "unit/test_generations.py",
)
"""Every file with tests of a large size, but for those that need another machine or an etcd."""


def run(part: str, scale: float, seed: int, limit: float) -> dict[str, object]:
    """Run one part; return what became of it. It is ended after `limit` seconds, and that is a failure."""
    environment = {**os.environ, "FSCOORD_SEED": str(seed), "FSCOORD_SCALE": f"{scale:g}"}
    options = ["-q", "-m", SELECTED, "--timeout=0", "-p", "no:cacheprovider", "--tb=short"]
    with tempfile.TemporaryDirectory(prefix="fscoord-campaign-") as directory:
        report, said = Path(directory, "junit.xml"), Path(directory, "output")
        command = [sys.executable, "-m", "pytest", *options, f"--junit-xml={report}", f"tests/{part}"]
        started = time.monotonic()
        with said.open("wb") as output:  # no pipe: what a killed test leaves behind would keep it open
            process = subprocess.Popen(
                command, cwd=TESTS.parent, env=environment, start_new_session=True, stdout=output, stderr=output
            )
            try:
                process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                pass
            finally:  # Ctrl-C does not reach a session of its own
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        seconds = time.monotonic() - started
        lines = said.read_text(errors="replace").splitlines()
        suites = ET.parse(report).getroot().iter("testsuite") if report.exists() else ()
        counts = [{name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors")} for suite in suites]
    failed = sum(count["failures"] + count["errors"] for count in counts)
    is_good = process.returncode == 0 and bool(counts)
    if not is_good:
        print("\n".join(lines[-60:]), flush=True)
    return {
        "part": part, "scale": scale, "seed": seed, "seconds": round(seconds, 1), "good": is_good,
        "tests": sum(count["tests"] for count in counts), "failed": failed,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="words of the names of the parts to run; all without")
    parser.add_argument("--hours", type=float, default=8.0, help="when to come to an end")
    parser.add_argument("--rounds", type=int, default=10**9, help="end after so many rounds, if that is sooner")
    parser.add_argument("--scale", type=float, default=10.0, help="the size of all rounds but the first")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**8))
    parser.add_argument("--results", type=Path, default=Path("campaign.jsonl"))
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = [part for part in PARTS if not given.parts or any(word in part for word in given.parts)]
    until = time.monotonic() + given.hours * 3600
    last: dict[tuple[str, float], float] = {}
    bad = ran = 0
    for turn in range(given.rounds):
        scale, begun = 1.0 if turn == 0 else given.scale, 0
        for part in chosen:
            left = until - time.monotonic()
            expected = last.get((part, scale), last.get((part, 1.0), 0.0) * scale)
            if left <= expected:
                continue
            print(f"{time.strftime('%H:%M:%S')} round {turn + 1}: tests/{part}", flush=True)
            result = run(part, scale, given.seed + turn, max(left, 600.0))
            last[part, scale] = float(str(result["seconds"]))
            begun, ran, bad = begun + 1, ran + 1, bad + (not result["good"])
            print(
                f"{time.strftime('%H:%M:%S')} round {turn + 1} {'good' if result['good'] else 'BAD '}"
                f" {result['seconds']:7} s {result['tests']:5} tests  FSCOORD_SCALE={scale:g}"
                f" FSCOORD_SEED={given.seed + turn} pytest -m '{SELECTED}' --timeout=0 tests/{part}",
                flush=True,
            )
            with given.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
        if not begun:
            break
    print(f"{ran - bad} of {ran} parts were good")
    return 1 if bad or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
