"""The descriptors of a program that closes descriptors itself, becomes another user, or becomes a daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.internals import ProcessIdentity, log_of, symlink_lock, system

from fscoord import FileStore, StoreGoneError, StoreUnavailableError

HANG_S = 60

BEFORE = """
import os, sys, threading, time
from fscoord import FileStore, StoreError, StoreGoneError
from fscoord.recipes import Lock

path = sys.argv[1]
"""


def run(path: Path, program: str, *, closes: bool = False) -> str:
    """Run `program` after `BEFORE` in a process of its own, without its standard descriptors if it `closes` them."""
    command = [sys.executable, "-W", "ignore", "-c", BEFORE + program, str(path)]
    if closes:
        command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *command]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_descriptors_are_above_the_standard_ones_that_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    run(
        path,
        """
store = FileStore(path, timeout=30)
store.set("a", "1")
waiter = threading.Thread(target=store.get, args=("b",))
waiter.start()
shown = {number: os.readlink(f"/proc/self/fd/{number}") for number in range(3)}
os.write(2, b"message")
other = store.clone()
other.set("b", "2")
waiter.join()
with FileStore(path, timeout=30) as reader:
    reader.set("shown", repr(sorted(set(shown.values()))))
""",
        closes=True,
    )
    with FileStore(path, timeout=HANG_S) as store:
        assert store.multi_get(["a", "b", "shown"]) == [b"1", b"2", b"['/dev/null']"]


@pytest.mark.parametrize("pause", [0, 0.1])
def test_log_whose_descriptors_the_program_has_closed_ends_and_touches_nothing_else(
    tmp_path: Path, pause: float
) -> None:
    """Soon after the last look a record may be written to a file of the program. It is never confirmed."""
    shown = run(
        tmp_path / "store",
        f"""
store = FileStore(path, timeout=30)
lock = Lock(store, "l")
lock.acquire()
os.closerange(3, 100)
files = [open(f"{{path}}.{{number}}.own", "w+b", buffering=0) for number in range(100)]
for file in files:
    file.write(b"x" * 1000)
time.sleep({pause})  # the age of the last look, not a synchronisation
for _ in range(3):
    try:
        store.set("b", "2")
        print("confirmed")
    except StoreGoneError as error:
        print(str(error).partition(" was ")[2].partition(",")[0])
    if {pause} == 0:
        break
store.close()
changed = 0
for file in files:
    file.seek(0)
    changed += file.read() != b"x" * 1000
    file.close()
print(changed)
""",
    ).splitlines()
    assert set(shown[:-1]) == {"closed by other code of this process"}
    assert int(shown[-1]) == 0 or (pause == 0 and int(shown[-1]) == 1)


def test_descriptors_that_were_closed_are_not_closed_again_with_the_store(tmp_path: Path) -> None:
    run(
        tmp_path / "store",
        """
store = FileStore(path, timeout=30)
store.set("a", "1")
os.closerange(3, 100)
files = [open(f"{path}.{number}.own", "w+b", buffering=0) for number in range(100)]
store.close()
for file in files:
    os.fstat(file.fileno())
""",
    )


def test_record_that_is_written_to_a_truncated_log_is_not_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path, timeout=HANG_S) as store:
        store.set("a", "1")
        log_of(store).handle.path_checked_at = float("inf")  # no look at the path is due
        os.truncate(path, 0)
        for _ in range(2):
            with pytest.raises(StoreGoneError, match="was truncated by another program"):
                store.set("b", "2")


DROPS: dict[str, str] = {
    "another user": "os.setgroups([]); os.setgid(65534); os.setuid(65534)",
    "no search permission": (
        "place = os.open(os.path.dirname(path), os.O_RDONLY); os.fchown(place, 65534, 65534);"
        " os.setgroups([]); os.setgid(65534); os.setuid(65534); os.fchmod(place, 0)"
    ),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("how", DROPS)
def test_handle_that_can_write_goes_on_after_a_compaction_that_failed(tmp_path: Path, how: str) -> None:
    (tmp_path / "inner").mkdir()
    shown = run(
        tmp_path / "inner" / "store",
        f"""
store = FileStore(path, timeout=30, compact_bytes=4096, rank=0)
lock = Lock(store, "l")
lock.acquire()
{DROPS[how]}
for number in range(100):
    store.set("x", "y" * 200)
    time.sleep(0.06 * (number == 50))  # so that a look at the path is due
lock.release()
print(store.get("x") == b"y" * 200)
store.close()
""",
    )
    assert shown == "True\n"


def test_marker_of_a_process_of_another_container_says_so(tmp_path: Path) -> None:
    here = ProcessIdentity.find()
    marker = tmp_path / "log.lock"

    def foreign(boot: bytes, space: int, host: str = "") -> str:
        marker.unlink(missing_ok=True)
        marker.symlink_to(f"{host or here.host}:1:1:{boot.hex()}:{space}:1:1:x.1")
        return symlink_lock.foreign(str(marker))

    assert foreign(here.boot_id, here.pid_space) == ""
    assert foreign(here.boot_id, 7, "far-away") == ""
    assert "another container (pid namespace 7" in foreign(here.boot_id, 7)
    assert "another boot" in foreign(b"\1" * 16, 7)


@pytest.mark.parametrize(("mode", "said"), [(660, "did you mean 0o660"), (-1, "must be"), (0o444, "must be")])
def test_mode_that_is_not_sensible_is_refused(tmp_path: Path, mode: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FileStore(tmp_path / "store", mode=mode)
    assert not list(tmp_path.iterdir())


def test_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    FileStore(tmp_path / ("x" * 238)).close()
    with pytest.raises(StoreUnavailableError, match="has 239 bytes; use a name of at most 238"):
        FileStore(tmp_path / ("x" * 239))


def test_relative_path_in_a_directory_that_was_removed(tmp_path: Path) -> None:
    shown = run(
        tmp_path / "store",
        """
os.mkdir(path)
os.chdir(path)
os.rmdir(path)
try:
    FileStore("jobs.store")
except StoreError as error:
    print(error)
""",
    )
    assert shown.startswith("jobs.store: the working directory of this process was removed")


@pytest.mark.parametrize("now", [-(10**15), 95 * 10**18])
def test_clock_out_of_range_is_clamped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: int) -> None:
    monkeypatch.setattr(system.time, "time_ns", lambda: now)
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        store.set("a", "1")
        store.compact()
        store.set("a", "2")
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        assert store.get("a") == b"2"
