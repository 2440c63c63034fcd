"""Programs whose threads are green, as gevent's and eventlet's: a wait lets the others run, and has its deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.internals import lock_range as _range, system
from support.places import HANG_S

from fscoord import FileStore

pytestmark = pytest.mark.packages

PROGRAM = Path(__file__).with_name("green_program.py")
ORDERS = ("first", "last")
SAID = ["b'v'", "set", "timeout True", "taken", "taken", "taken", "left", "refused"]

COUNTER = """
import time
from fscoord import FileStore, StoreTimeoutError
store, count = FileStore({path!r}, timeout=2), []
def write():
    try:
        store.set("k", "v")
    except StoreTimeoutError as error:
        return error.waited < {hang_s}
def tick():
    while not writer.dead if hasattr(writer, "dead") else not writer.ready():
        count.append(1)
        sleep(0.01)
for _ in range(10):  # a busy machine may stand still for as long as a write waits
    count.clear()
    writer = spawn(write)
    result_of(spawn(tick))
    if len(count) > 5:
        break
print(result_of(writer), len(count) > 5)
"""


def run(*words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words], capture_output=True, text=True, timeout=3 * HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("place", ["file", "mem"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_green_thread_that_waits_lets_the_others_run(library: str, order: str, place: str, tmp_path: Path) -> None:
    assert run(str(PROGRAM), library, order, str(tmp_path / "s") if place == "file" else "mem") == SAID


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_green_thread_that_waits_for_the_logs_lock_stops_no_other(library: str, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    FileStore(path).close()
    begin = PROGRAM.read_text().partition("if ORDER")[0].replace("LIBRARY, ORDER, PATH = sys.argv[1:4]", "")
    counter = COUNTER.format(path=path, hang_s=HANG_S)
    text = f"{begin}\nLIBRARY = {library!r}\nspawn, sleep, result_of = patch()\n{counter}"
    with FileStore(path) as store:
        store.set("a", "")
        fd = os.open(path, os.O_RDWR)
        try:
            system.fcntl.fcntl(fd, system.fcntl.F_OFD_SETLK, _range(system.fcntl.F_WRLCK, 0))
            assert run("-c", text.replace("from __future__ import annotations", "")) == ["True True"]
        finally:
            os.close(fd)
