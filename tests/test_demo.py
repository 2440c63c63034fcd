"""The demonstration with real processes: the work, the lost process, and that no process is left behind."""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fscoord import BrokenBarrierError, FileStore, FscoordError, HashStore, barrier
from fscoord._runtime import system
from fscoord._runtime.signals import Terminated
from fscoord.demo import worker
from fscoord.demo.launcher import run
from fscoord.demo.worker import Survivors

TEXTS = {
    "a.txt": "One two, two.",
    "b.txt": "three three\nTHREE",
    "deep/c.md": "zwei Gr\u00fc\u00dfe",
    "d.txt": "",
    "e.py": "x = 1",
}
COUNTS = Counter({"one": 1, "two": 2, "three": 3, "zwei": 1, "gr\u00fc\u00dfe": 1, "x": 1})
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demonstration puts its store; empty again at the end of every test."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield directory
    assert list(directory.iterdir()) == []


@pytest.fixture
def texts(tmp_path: Path) -> str:
    for name, text in TEXTS.items():
        file = tmp_path / "texts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return str(tmp_path / "texts")


class Events(list[dict[str, Any]]):
    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self if event["event"] == name]


def demo(directory: str | None, processes: int = 2, **options: Any) -> tuple[dict[str, Any], Events]:
    events = Events()
    report = run(processes, directory, on_event=events.append, **{"kill": False, "timeout": PATIENCE_S, **options})
    return report, events


# The work


def test_words_of_all_files_are_counted_exactly_once(texts):
    report, events = demo(texts)
    assert (report["input"], report["files"], report["words"]) == (texts, len(TEXTS), COUNTS.total())
    assert report["distinct_words"] == len(COUNTS)
    assert Counter(dict(report["top"])) == COUNTS
    assert sorted(event["file"] for event in events.named("delivered")) == sorted(TEXTS)
    assert report["lost"] == []


def test_processes_are_each_reported_with_their_share(texts):
    report, events = demo(texts)
    assert [each["rank"] for each in report["processes"]] == [0, 1]
    assert sum(each["files"] for each in report["processes"]) == len(TEXTS)
    assert sum(each["words"] for each in report["processes"]) == COUNTS.total()
    pids = {each["pid"] for each in report["processes"]}
    assert len(pids) == 2
    assert os.getpid() not in pids
    for each in report["processes"]:
        mine = [event for event in events.named("delivered") if event["rank"] == each["rank"]]
        assert each["files"] == len(mine)


def test_barriers_are_each_reported_with_their_shortest_and_longest_wait(texts):
    report, _ = demo(texts)
    assert [each["name"] for each in report["barriers"]] == ["queue filled", "first files taken", "work done"]
    assert all(0 < each["shortest_wait_s"] <= each["longest_wait_s"] for each in report["barriers"])


def test_sources_of_the_package_are_counted_by_default():
    report, _ = demo(None, 1)
    assert report["files"] >= len(list(Path(worker.OWN_SOURCES).rglob("*.py")))
    assert report["skipped"] == []


def test_file_that_can_not_be_read_is_skipped_and_named(texts, monkeypatch):
    """One process is enough to see it, and any store."""

    known = worker.count

    def count(path: str) -> Counter[str]:
        if path.endswith("b.txt"):
            raise OSError(errno.EIO, "Input/output error")
        return known(path)

    events = Events()
    monkeypatch.setattr(worker, "count", count)
    monkeypatch.setattr(worker, "tell", lambda event, **details: events.append({"event": event, **details}))
    worker.Worker(HashStore(), texts, 1, PATIENCE_S).work(last_holds=False)
    (told,) = events.named("report")
    assert told["report"]["skipped"] == [{"file": "b.txt", "reason": "Input/output error"}]
    assert told["report"]["words"] == COUNTS.total() - 3


def test_file_without_read_permission_is_counted_as_text_so_that_it_is_named(as_nobody, public_dir):
    for name, mode in (("open", 0o644), ("closed", 0o600)):
        (public_dir / name).write_text("word")
        (public_dir / name).chmod(mode)
    assert as_nobody(lambda: sorted(worker.text_files(str(public_dir)))) == ["closed", "open"]


def test_binary_files_links_and_pipes_are_no_text(texts):
    directory = Path(texts)
    (directory / "binary").write_bytes(b"text\0text")
    (directory / "link").symlink_to(directory / "a.txt")
    os.mkfifo(directory / "pipe")
    assert sorted(worker.text_files(texts)) == sorted(TEXTS)


def test_bytes_that_are_no_text_separate_words(tmp_path):
    (tmp_path / "f").write_bytes(b"caf\xc3\xa9 a\xffb don't 42 x_y")
    assert worker.count(str(tmp_path / "f")) == Counter(["caf\u00e9", "a", "b", "don", "t", "x", "y"])


def test_file_names_may_be_any_bytes(tmp_path):
    directory = tmp_path / "names"
    directory.mkdir()
    names = ["gr\u00fcn", os.fsdecode(b"\xff"), "line\nbreak"]
    for name in names:
        (directory / name).write_text("word")
    report, events = demo(str(directory))
    assert report["words"] == 3
    assert sorted(event["file"] for event in events.named("delivered")) == sorted(names)


# The loss


def test_process_that_is_killed_is_named_by_the_others_which_do_its_work(texts):
    report, events = demo(texts, 3, kill=True)
    (loss,) = report["lost"]
    (holding,) = events.named("holding")
    assert holding["rank"] == loss["rank"] == 2
    assert loss["cause"] == "SIGKILL"
    assert loss["named_by"] == [0, 1]
    assert loss["barrier"] == "work done"
    named = f"dead_ranks=[rank 2, process {loss['pid']} on {loss['host']}]"
    assert [named in event["error"] for event in events.named("lost")] == [True, True]
    assert all(event["error"].startswith("Barrier broken") for event in events.named("lost"))  # and not: timed out
    assert [each["file"] for each in loss["redone"]] == [holding["file"]]
    assert {each["by"] for each in loss["redone"]} <= {0, 1}
    assert [each["lost"] for each in report["processes"]] == [False, False, True]
    names = ["queue filled", "first files taken", "work done", "lost work queued", "work done again"]
    assert [each["name"] for each in report["barriers"]] == names
    assert report["words"] == COUNTS.total()


def test_process_that_is_killed_unasked_is_named_too(texts):
    """It is killed just before the launcher kills another worker, for which the rest waits anyway."""

    def kill_another(event: dict[str, Any]) -> None:
        if event["event"] == "met":
            pids[event["rank"]] = event["pid"]
        elif event["event"] == "holding":
            os.kill(pids[0], signal.SIGKILL)

    pids: dict[int, int] = {}
    report = run(3, texts, kill=True, timeout=PATIENCE_S, on_event=kill_another)
    assert [(loss["rank"], loss["cause"], loss["named_by"]) for loss in report["lost"]] == [
        (0, "SIGKILL", [1]),
        (2, "SIGKILL", [1]),
    ]
    assert report["reported_by"] == 1
    assert report["words"] == COUNTS.total()


def test_survivors_are_numbered_anew_and_each_death_is_still_reported(tmp_path):
    path = tmp_path / "store"
    handles = [FileStore(path, timeout=PATIENCE_S, rank=rank) for rank in range(4)]
    handles[0].close()  # a closed handle counts as dead
    left = [Survivors([1, 2, 3], handle) for handle in handles[1:]]
    for rank, store in enumerate(left):
        store.announce_rank(rank)
    assert left[0].dead_ranks([0, 1, 2]) == []
    handles[2].close()
    assert left[0].wait_alive(["k"], [1, 2]) == left[2].dead_ranks([0, 1, 2]) == [1]
    assert [(member.rank, member.alive) for member in left[2].members()] == [(0, "yes"), (1, "no"), (2, "yes")]
    with pytest.raises(BrokenBarrierError) as caught:
        barrier(left[0], 3, "b", rank=0, fail_fast=True)
    assert (caught.value.missing, caught.value.dead) == (("1", "2"), ("1",))
    for handle in handles:
        handle.close()


def test_barrier_that_keeps_breaking_for_none_of_the_living_ends_the_work(monkeypatch):
    one = worker.Worker.__new__(worker.Worker)
    one._store, one._rank, one._timeout, one._waits = HashStore(), 0, 5.0, {}
    one._living, one._facts = [0, 1], [{"pid": 1, "host": "h"}, {"pid": 2, "host": "h"}]

    def broken(*_, **__):
        raise BrokenBarrierError("broken", dead=["somebody else"])

    monkeypatch.setattr("fscoord.demo.worker.barrier", broken)
    with pytest.raises(BrokenBarrierError):
        one._meet("name")


def test_process_that_dies_before_all_have_met_ends_the_demonstration(texts, monkeypatch, tmp_path):
    block_workers(monkeypatch, tmp_path, "os._exit(7)")
    with pytest.raises(FscoordError, match=r"process \d+ ended with exit code 7"):
        demo(texts)


def test_processes_that_can_not_meet_report_the_reason(texts, monkeypatch, tmp_path):
    gate = tmp_path / "gate"  # one process makes it and waits for its end; the other passes
    block_workers(monkeypatch, tmp_path, f"try: os.mkdir({str(gate)!r}); os.read(0, 1)\nexcept FileExistsError: pass")
    with pytest.raises(FscoordError, match=r"StoreTimeoutError: .*on rank 0.*missing_ranks=\[1\]"):
        demo(texts, timeout=0.5)


# The end


def block_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Let every worker run `code` before anything else."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nif 'fscoord.demo.worker' in sys.orig_argv:\n{textwrap.indent(code, '    ')}\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_ends_every_process_and_leaves_nothing(texts, monkeypatch, tmp_path, number, code):
    block_workers(monkeypatch, tmp_path, "os.read(0, 1)")
    child = subprocess.Popen(
        [sys.executable, "-m", "fscoord", "demo", "-v", "-n", "3", "--input", texts],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with child:
        assert child.stderr is not None
        pids = [int(child.stderr.readline().rpartition(b" ")[2]) for _ in range(3)]
        assert all(map(is_there, pids))
        child.send_signal(number)
        out, said = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out) == (code, b"")
    assert b"Traceback" not in said
    assert not any(map(is_there, pids))


def test_signal_just_before_the_launcher_sleeps_ends_the_demonstration(texts, monkeypatch, tmp_path):
    """It comes after Python's last look for signals, and before the call into the kernel, which it does not end."""

    class Selector(selectors.EpollSelector):
        def select(self, timeout=None):
            assert timeout is not None, "the sleep would never end"
            sleep = partial(self._selector.poll, timeout)
            system.in_one_chain(partial(system.receive_signal, signal.SIGTERM), sleep)
            return []

    block_workers(monkeypatch, tmp_path, "os.read(0, 1)")
    monkeypatch.setattr(selectors, "DefaultSelector", Selector)
    with pytest.raises(Terminated):
        run(3, texts, kill=False, timeout=PATIENCE_S, on_event=lambda event: None)


def test_error_during_the_work_ends_every_process(texts):
    def refuse(event: dict[str, Any]) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        run(3, texts, kill=True, timeout=PATIENCE_S, on_event=refuse)


def test_process_ends_when_the_one_that_started_it_has_gone(texts, tmp_path):
    path = str(tmp_path / "store")
    with FileStore(path):
        pass
    child = subprocess.Popen(
        [sys.executable, "-m", "fscoord.demo.worker", path, texts, "2", "", "inf"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    with child, FileStore(path, timeout=PATIENCE_S) as store:
        store.wait(["facts/0"])  # it has come, and waits for the other, without limit
        assert child.stdin is not None
        child.stdin.close()  # as the system does for a launcher that is killed
        assert child.wait(PATIENCE_S) == 1


# The command


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fscoord", "demo", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_command_reports_one_file_and_one_word_in_the_singular(tmp_path):
    only = tmp_path / "only"
    only.mkdir()
    (only / "text").write_text("word", encoding="utf-8")
    done = command("-n", "1", "--input", only)
    assert f"1 word (1 different one) in 1 file below {only}" in done.stdout


def test_command_reports_the_work_of_each_process_and_the_time_of_each_barrier(texts):
    done = command("-n", "2", "--input", texts)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{COUNTS.total()} words ({len(COUNTS)} different ones) in {len(TEXTS)} files below {texts}" in done.stdout
    assert "three 3, two 2" in done.stdout
    for expected in ("rank", "barrier", "queue filled", "first files taken", "work done", " ms", "reported by rank 0"):
        assert expected in done.stdout
    assert "LOST" not in done.stdout


def test_command_exits_with_1_when_a_process_was_lost_and_the_others_name_it(texts):
    done = command("-n", "2", "--kill", "--input", texts)
    assert done.returncode == 1
    assert "fscoord: rank 0 names the lost: Barrier broken on rank 0" in done.stderr
    assert "is killed now" in done.stderr
    assert "was lost to SIGKILL: named by rank 0 at the barrier 'work done'" in done.stdout
    assert "(by rank 0)" in done.stdout
    assert "LOST" in done.stdout


def test_report_to_a_full_disk_is_an_output_error(texts):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fscoord", "demo", "-n", "1", "--input", texts],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=PATIENCE_S,
        )
    assert (done.returncode, done.stderr) == (74, b"fscoord: standard output: No space left on device\n")


def test_command_prints_the_report_as_json(texts):
    done = command("-n", "2", "--json", "--input", texts)
    report = json.loads(done.stdout)
    assert (done.returncode, report["words"], len(report["processes"])) == (0, COUNTS.total(), 2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-n", "0"], "not in the range"),
        (["-n", "1", "--kill"], "at least 2"),
        (["--input", "/nowhere"], "does not exist"),
        (["--input", "."], "no text file"),
        (["--timeout", "-1"], "not a number of seconds"),
    ],
)
def test_command_refuses_arguments_that_make_no_sense(tmp_path, monkeypatch, words, reason):
    monkeypatch.chdir(tmp_path)
    done = command(*words)
    assert (done.returncode, done.stdout) == (64, "")
    assert reason in done.stderr


def test_directory_named_like_the_package_does_not_get_in_the_way(texts, tmp_path):
    decoy = tmp_path / "decoy" / "fscoord"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("raise SystemExit('the wrong one')")
    code = "import sys; from fscoord.cli import main; import os; os.chdir(sys.argv[1]); main(['demo', '-n', '1'])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(decoy.parent)], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
