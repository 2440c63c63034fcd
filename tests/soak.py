"""The soak: `python tests/soak.py --minutes 60`, by `tox -e soak -- --minutes 60`.

Processes use one store in all ways while they are killed and started again, stopped, interrupted, and fork beside their
threads. Each writes down what it begins and what was acknowledged. At the end the store must hold exactly what the
journals say, with the keys and files that the documentation lists, and a process that has looked on all the time must
have grown by less than 1 % since the tenth minute. A line says every minute how it stands; the exit code is 0 if all
was well, else 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from soaking.verdict import FLAT_FROM_S, judge_journals, judge_observer, settle, window_means

import fscoord

TESTS = Path(__file__).parent
SILENT_S = 150.0
"""After how long without a word a process that is not stopped hangs."""

ORPHAN_S = 150.0
"""How long the forked children of a killed process may outlive it."""

ENOUGH = 50
"""After how many faults the soak ends early."""


class Process:
    """A process, which leads a group of its own, and what it has printed so far."""

    def __init__(self, program: str, told: dict[str, Any], directory: Path) -> None:
        root = str(Path(fscoord.__file__).parent.parent)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, str(TESTS)])}
        with (directory / "errors").open("ab") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, str(TESTS / "soaking" / program), json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        assert self.popen.stdout is not None
        self.output = self.popen.stdout
        os.set_blocking(self.output.fileno(), False)
        self.rest = b""
        self.heard = time.monotonic()
        self.ended = 0.0
        self.ends_with: int | None = None  # the exit code that is expected; None: it should go on
        self.is_ready = self.is_silent = False

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal. The process is reaped only by `reap`, so its number is nobody else's until then."""
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.popen.pid, number)

    def exit_code(self) -> int | None:
        """Return the exit code, or minus the signal, of a process that has ended; it is not reaped by this."""
        found = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def lines(self) -> list[dict[str, Any]]:
        """Return what it has printed meanwhile. It is silent when it and all its children have ended."""
        try:
            data = os.read(self.output.fileno(), 1 << 20)
        except BlockingIOError:
            return []
        self.heard, self.is_ready, self.is_silent = time.monotonic(), True, not data
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def reap(self) -> None:
        """End it and its children."""
        self.signal(signal.SIGKILL, group=True)
        self.popen.wait()
        self.output.close()


class Soak:
    """The processes, and what befalls them."""

    def __init__(self, given: argparse.Namespace, directory: Path) -> None:
        self.given, self.directory = given, directory
        self.rng = random.Random(given.seed)
        self.seconds = given.minutes * 60
        self.sample_s = min(10.0, self.seconds / 36)
        self.start = time.monotonic()
        self.options: dict[str, Any] = {"lock": "flock" if self.rng.random() < 0.2 else "ofd"}
        if self.rng.random() < 0.1:
            self.options["durable"] = True
        self.options |= json.loads(given.options)
        self.selector = selectors.DefaultSelector()
        self.slots: list[Process] = []
        self.ghosts: list[Process] = []  # those who have ended, and may have children
        self.observer: Process | None = None
        self.stopped: dict[Process, tuple[float, bool]] = {}
        self.counts: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []  # of the observer
        self.weighed: list[dict[str, float]] = []  # of the last worker, which is not judged by them
        self.wrong: list[str] = []
        self.incarnations = itertools.count()

    def launch(self, program: str, **told: Any) -> Process:
        """Start a process, and listen to it."""
        told |= {"directory": str(self.directory), "seed": self.given.seed, "options": self.options}
        process = Process(program, told, self.directory)
        self.selector.register(process.output, selectors.EVENT_READ, process)
        return process

    def launch_worker(self, slot: int) -> Process:
        """Start one of the workers."""
        return self.launch(
            "worker.py", slot=slot, size=self.given.workers, incarnation=next(self.incarnations), start=self.start,
            weighs_s=self.sample_s if slot == self.given.workers - 1 else 1e9,
            pause=[self.given.pause / 2, self.given.pause * 2],
        )  # fmt: skip

    def run(self) -> None:
        """Let things happen until the time is over."""
        self.slots = [self.launch_worker(slot) for slot in range(self.given.workers)]
        self.observer = self.launch("observer.py", sample_s=self.sample_s)
        while not all(each.is_ready for each in (*self.slots, self.observer)):  # on a busy machine this takes a while
            self.hear(0.05)
            self.look_after(replace=False)
            if self.wrong:
                return
        begin = time.monotonic()
        due = {self.kill: begin + 2, self.stop: begin + 1, self.interrupt: begin + 1}
        between = {self.kill: (1, 3), self.stop: (1, 4), self.interrupt: (0.2, 2)}
        says = begin + 60
        while (now := time.monotonic()) < begin + self.seconds:
            for act in due:
                if now >= due[act]:
                    due[act] = now + self.rng.uniform(*between[act])
                    some = self.slots[:-1] if act == self.kill else self.slots  # the last lives as long as the soak
                    ready = [each for each in some if each.is_ready and each.ends_with is None]
                    if ready:
                        act(self.rng.choice(ready))
            if now >= says:
                says += 60
                self.say()
            self.resume()
            self.hear(min(0.05, max(0.0, min(due.values()) - now)))
            self.look_after(replace=True)
            if len(self.wrong) >= ENOUGH:
                return

    # -- what befalls them -----------------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """Kill a process, sometimes with its children; now and then ask it to end instead."""
        if self.rng.random() < 0.12:
            process.ends_with = 0
            process.signal(signal.SIGTERM)
            self.happened["clean ends"] += 1
        else:
            process.ends_with = -signal.SIGKILL
            process.signal(signal.SIGKILL, group=self.rng.random() < 0.2)
            self.happened["kills"] += 1

    def stop(self, process: Process) -> None:
        """Stop a process for a while, sometimes with its children. No more than two are stopped at a time."""
        if process in self.stopped or len(self.stopped) > 1:
            return
        with_children = self.rng.random() < 0.3
        process.signal(signal.SIGSTOP, group=with_children)
        lasts = self.rng.choice([0.01, 0.1, 0.5, self.rng.uniform(0, 3)])
        self.stopped[process] = time.monotonic() + lasts, with_children
        self.happened["stops"] += 1

    def resume(self, *, everybody: bool = False) -> None:
        """Let the processes go on that were stopped for long enough."""
        for process, (until, with_children) in list(self.stopped.items()):
            if everybody or time.monotonic() >= until:
                process.signal(signal.SIGCONT, group=with_children)
                del self.stopped[process]

    def interrupt(self, process: Process) -> None:
        """Send SIGINT, once or twice within a millisecond."""
        process.signal(signal.SIGINT)
        self.happened["interruptions"] += 1
        if self.rng.random() < 0.3:
            time.sleep(self.rng.uniform(0, 0.001))
            process.signal(signal.SIGINT)
            self.happened["interruptions"] += 1

    # -- what becomes of them --------------------------------------------------------------------------------------

    def hear(self, limit: float) -> None:
        """Take in the output of the processes."""
        for key, _ in self.selector.select(limit):
            process: Process = key.data
            for line in process.lines():
                if "bad" in line:
                    self.blame(line["bad"])
                if "sample" in line:
                    self.samples.append(line["sample"])
                if "weighed" in line:
                    self.weighed.append(line["weighed"])
                self.counts.update(line.get("counts", {}))
            if process.is_silent:
                self.selector.unregister(process.output)

    def look_after(self, *, replace: bool) -> None:
        """Replace the processes that have ended, reap those whose children have ended, and detect those that hang."""
        now = time.monotonic()
        for slot, process in enumerate(self.slots):
            code = process.exit_code()
            if code is None:
                if now > process.heard + SILENT_S:
                    self.blame(f"worker {slot} has not said a word for {SILENT_S:g} s")
                    process.ends_with, process.heard = -signal.SIGABRT, now
                    process.signal(signal.SIGABRT)  # faulthandler says where it hangs
            elif process not in self.ghosts:
                if code != process.ends_with:
                    self.blame(f"worker {slot} ended with {code}; its last words stand among the errors")
                if self.stopped.pop(process, None):
                    process.signal(signal.SIGCONT, group=True)
                process.ended = now
                self.ghosts.append(process)
                if replace:
                    self.slots[slot] = self.launch_worker(slot)
        for process in list(self.ghosts):
            if now > process.ended + ORPHAN_S and not process.is_silent:
                self.blame(f"a child of process {process.popen.pid} lives {ORPHAN_S:g} s after it")
                process.signal(signal.SIGKILL, group=True)
                process.ended = now
            if process.is_silent and process not in self.slots:
                process.reap()
                self.ghosts.remove(process)

    def finish(self) -> None:
        """Let all end, some by being killed."""
        self.resume(everybody=True)
        for process in self.slots:
            if process.ends_with is None:
                is_ended = process.is_ready and self.rng.random() < 0.5
                process.ends_with = 0 if is_ended else -signal.SIGKILL
                process.signal(signal.SIGTERM if is_ended else signal.SIGKILL)
        while not all(each.is_silent and each in self.ghosts for each in self.slots) or len(self.ghosts) > len(
            self.slots
        ):
            self.hear(0.1)
            self.look_after(replace=False)
        assert self.observer is not None
        self.observer.signal(signal.SIGTERM)
        while self.observer.exit_code() is None:
            self.hear(0.1)
            if time.monotonic() > self.observer.heard + SILENT_S:
                self.blame(f"the observer has not ended in {SILENT_S:g} s")
                break
        code = self.observer.exit_code()
        if code != 0:
            self.blame(f"the observer ended with {code}; its last words stand among the errors")

    def end(self) -> None:
        """Kill and reap the remaining processes."""
        observer = [self.observer] if self.observer is not None else []
        for process in {*self.slots, *self.ghosts, *observer}:
            process.reap()
        self.selector.close()

    def judge(self) -> dict[str, Any]:
        """Return what has come of it, when all have ended."""
        left, facts, wrong = settle(self.directory, self.given.workers, self.options)
        for words in wrong:
            self.blame(words)
        for words in judge_journals(self.journal_lines(), left):
            self.blame(words)
        hung = (self.directory / "hung").read_text() if (self.directory / "hung").exists() else ""
        if hung:
            self.blame(f"forked children have hung:\n{hung[:4000]}")
        wrong, early = judge_observer(self.samples, self.seconds)
        for words in wrong:
            self.blame(words)
        for words in early:
            print(f"(too short to count: {words})")
        return {
            "seed": self.given.seed, "minutes": self.given.minutes, "workers": self.given.workers,
            "options": self.options, "operations": sum(self.counts.values()), "counts": dict(self.counts),
            "happened": dict(self.happened), "processes": next(self.incarnations), "samples": self.samples,
            "weighed": self.weighed,
            "left": facts, "wrong": self.wrong,
        }  # fmt: skip

    def journal_lines(self) -> Iterator[str]:
        """Yield every line of every journal."""
        for path in sorted((self.directory / "journals").iterdir()):
            with path.open() as file:
                yield from file

    def blame(self, words: str) -> None:
        """Say what is wrong, and remember it."""
        self.wrong.append(words)
        print(f"{time.strftime('%H:%M:%S')} WRONG: {words}", flush=True)

    def say(self) -> None:
        """Say how it stands."""
        last = self.samples[-1] if self.samples else {}
        worker = self.weighed[-1] if self.weighed else {}
        happened = ", ".join(f"{number} {what}" for what, number in sorted(self.happened.items()))
        print(
            f"{time.strftime('%H:%M:%S')} minute {(time.monotonic() - self.start) / 60:.0f}:"
            f" {sum(self.counts.values())} operations, {self.counts['forks']} forks, {happened};"
            f" observer {last.get('rss')} KiB, {last.get('fds')} descriptors, {last.get('threads')} threads;"
            f" the last worker {worker.get('rss')} KiB, {worker.get('fds')} descriptors;"
            f" {last.get('keys')} keys; {len(self.wrong)} wrong",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long; memory is judged from ten minutes on")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**8))
    parser.add_argument("--pause", type=float, default=0.03, help="seconds between two operations of a thread")
    parser.add_argument("--options", default="{}", help='JSON, of FileStore: {"lock": "flock"}; else the seed decides')
    parser.add_argument("--json", type=Path, help="write what has come of it to this file")
    parser.add_argument("--directory", type=Path, help="where the store and the journals are made, and stay")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
    directory = (given.directory or Path(tempfile.mkdtemp(prefix="fscoord-soak-"))).absolute()
    (directory / "store").mkdir(parents=True)
    (directory / "journals").mkdir(exist_ok=True)
    soak = Soak(given, directory)
    print(f"seed {given.seed}, {given.workers} workers, {soak.options}, {given.minutes:g} minutes", flush=True)
    try:
        soak.run()
        soak.finish()
    except KeyboardInterrupt:
        soak.blame("ended early")
        return 1
    finally:
        soak.end()
        if not given.directory and soak.wrong == ["ended early"]:
            shutil.rmtree(directory)
    result = soak.judge()
    soak.say()
    if soak.wrong:
        print((directory / "errors").read_text(errors="replace")[-8000:])
        print(f"the journals and the store are in {directory}")
    elif not given.directory:
        shutil.rmtree(directory)
    counted = [sample for sample in soak.samples if sample["at"] >= min(FLAT_FROM_S, soak.seconds / 3)]
    if counted:
        begin, end = window_means(counted)
        print(f"observer: {begin:.0f} KiB, then {end:.0f} KiB: {end / begin - 1:+.2%}")
    print(f"left: {result['left']}")
    print(f"counts: {result['counts']}")
    print(f"{len(soak.wrong)} things were wrong" if soak.wrong else "all was well")
    if given.json:
        given.json.write_text(json.dumps(result) + "\n")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
