"""The exit of the process while daemon threads of the program use stores: the interpreter ends them without a word."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

HANG_S = 120

PROGRAM = """
import atexit, sys, threading

closed = threading.Semaphore(0)  # counts the threads that sleep because their store is closed
begun = threading.Semaphore(0)

def last():  # registered before the import of fscoord, so it runs when the stores are closed
    {last}

atexit.register(last)
import asyncio
from fscoord import FileStore, PrefixStore, StoreClosedError, aio
from fscoord._runtime import system
from fscoord.recipes import Lock, Queue

pause = system.time.sleep
def sleep(seconds):
    if seconds == system.EXIT_MAX_S:
        closed.release()
    pause(seconds)
system.time.sleep = sleep
path = sys.argv[1]
{open}
store.set("k", "v")

async def forever():
    here = aio.AsyncStore(store)
    begun.release()
    await here.get("never")

def work():
    {work}

threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    begun.acquire()
"""

OPEN = "store = FileStore(path, timeout=600)"
SLEEPS = "print([closed.acquire(timeout=60) for _ in threads])"


def run(path: Path, **parts: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-W", "error", "-c", PROGRAM.format(**parts), str(path)]
    return subprocess.run(program, capture_output=True, text=True, timeout=HANG_S, check=False)


OPENINGS = {
    "open": OPEN,
    "held": f"{OPEN}; held = Lock(FileStore(path), 'held'); held.acquire()",
    "temporary": "store = FileStore(timeout=600)",
    "last participant": "first = FileStore(path, 1); store = first.clone()",
    "prefix": "store = PrefixStore('p', FileStore(path, coherence='locked'))",
}
WORKS = {
    "get": "begun.release(); store.get('never')",
    "wait": "begun.release(); store.wait(['never'])",
    "take": "begun.release(); Queue(store, 'q').take()",
    "writes": "begun.release()\n    while True: store.add('n', 1)",
    "reads": "begun.release()\n    while True: store.check(['n'])",
}


@pytest.mark.parametrize(
    ("opening", "work"),
    [*(("open", work) for work in WORKS), *product(list(OPENINGS)[1:], ["wait", "writes"])],
)
def test_daemon_thread_sleeps_on_silently_when_its_process_exits(tmp_path: Path, opening: str, work: str) -> None:
    done = run(tmp_path / "store", last=SLEEPS, open=OPENINGS[opening], work=WORKS[work])
    assert (done.returncode, done.stdout, done.stderr) == (0, "[True, True, True]\n", "")


@pytest.mark.parametrize(
    ("opening", "work"),
    [
        (OPEN, "asyncio.run(forever())"),
        # From Python 3.12 on, the interpreter refuses a thread before it has called the first exit function.
        (
            f"{OPEN}; go = threading.Semaphore(0); atexit.register(go.release, 3)",
            "begun.release(); go.acquire(); asyncio.run(forever())",
        ),
    ],
    ids=["before", "during"],
)
def test_event_loop_of_a_daemon_thread_sleeps_on_silently_when_its_process_exits(
    tmp_path: Path, opening: str, work: str
) -> None:
    done = run(tmp_path / "store", last=SLEEPS, open=opening, work=work)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[True, True, True]\n", "")


def test_exit_function_may_join_a_daemon_thread(tmp_path: Path) -> None:
    work = "begun.release()\n    try: store.get('never')\n    except StoreClosedError as error: "
    work += "print(f'{error}\\n', end='')  # in one write, because three threads print"
    last = "system.EXIT_MAX_S = 0.1\n    for thread in threads: thread.join()"
    done = run(tmp_path / "store", last=last, open=OPEN, work=work)
    text = f"{tmp_path / 'store'} is closed, because the process is exiting; join this thread before the program ends\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, text * 3, "")


def test_main_thread_gets_the_error_of_a_store_that_the_exit_has_closed(tmp_path: Path) -> None:
    last = "try: store.set('k', 'v')\n    except StoreClosedError: print('closed')"
    done = run(tmp_path / "store", last=last, open=OPEN, work="begun.release()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
