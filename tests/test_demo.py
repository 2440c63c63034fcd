"""The demonstration with real processes: the work, the lost process, and that no process is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fscoord import FileStore, HashStore
from fscoord.cli.demo import OWN_SOURCES
from fscoord.demo import fill, work

TEXTS = {
    "a.txt": "One two, two.",
    "b.txt": "three three\nTHREE",
    "deep/c.md": "zwei Gr\u00fc\u00dfe",
    "d.txt": "",
    "e.py": "x_y = don't 42",
}
COUNTS = Counter(["one", "two", "two", "three", "three", "three", "zwei", "gr\u00fc\u00dfe", "x", "y", "don", "t"])
HANG_S = 60


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


def command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "fscoord", "demo", *words)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(words, text=True, check=False, timeout=HANG_S, **options)


def block_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Let every worker run `code` before anything else."""
    code = f"import os, sys\nif 'fscoord.demo' in sys.orig_argv:\n{textwrap.indent(code, '    ')}\n"
    (tmp_path / "sitecustomize.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))


def test_words_of_all_files_are_counted_exactly_once(texts):
    done = command("-n", "2", "--json", "--input", texts)
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (report["input"], report["files"], report["words"]) == (texts, len(TEXTS), COUNTS.total())
    assert (report["distinct_words"], report["top"][0]) == (len(COUNTS), ["three", 3])
    assert report["lost"] == report["redone"] == report["skipped"] == []
    shares = report["processes"]
    assert [each["rank"] for each in shares] == [0, 1]
    assert len({each["pid"] for each in shares}) == 2
    assert (sum(each["files"] for each in shares), sum(each["words"] for each in shares)) == (5, COUNTS.total())


def test_sources_of_the_package_are_counted_by_default():
    report = json.loads(command("-n", "1", "--json").stdout)
    assert report["files"] >= len(list(Path(OWN_SOURCES).rglob("*.py")))


def test_file_that_can_not_be_read_is_skipped_and_named(as_nobody, public_dir):
    for name, mode in (("open", 0o644), ("closed", 0o600)):
        (public_dir / name).write_text("word")
        (public_dir / name).chmod(mode)

    def count_alone() -> list[dict[str, Any]]:
        store = HashStore()
        files = fill(store, str(public_dir))
        work(store, str(public_dir), 0, 1, kill=False)
        return [
            json.loads(store.get(f"counts/{number}", timeout=0)) | {"file": file} for number, file in enumerate(files)
        ]

    closed, opened = as_nobody(count_alone)
    assert (closed["file"], closed["error"]) == ("closed", "Permission denied")
    assert (opened["file"], opened["words"]) == ("open", {"word": 1})


def test_binary_files_links_and_pipes_are_no_text(texts):
    directory = Path(texts)
    (directory / "binary").write_bytes(b"text\0text")
    (directory / "link").symlink_to(directory / "a.txt")
    os.mkfifo(directory / "pipe")
    assert fill(HashStore(), texts) == sorted(TEXTS)


def test_file_names_and_contents_may_be_any_bytes(tmp_path):
    directory = tmp_path / "names"
    directory.mkdir()
    for name in ("gr\u00fcn", os.fsdecode(b"\xff"), "line\nbreak"):
        (directory / name).write_bytes(b"a\xffb")
    assert json.loads(command("--json", "--input", str(directory)).stdout)["top"] == [["a", 3], ["b", 3]]


def test_process_that_is_killed_is_named_by_the_others_which_do_its_work(texts):
    done = command("-n", "3", "--kill", "--json", "--input", texts)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    (loss,) = report["lost"]
    assert (loss["rank"], loss["cause"]) == (2, "SIGKILL")
    for rank in range(2):
        (line,) = [line for line in done.stderr.splitlines() if f"rank {rank} goes on without the lost ranks" in line]
        assert f"Barrier broken on rank {rank}" in line
        assert "dead_ranks=[2])" in line  # and none that has left after its work
    (redone,) = report["redone"]
    assert f"rank 2 has taken {redone['file']!r} and dies now" in done.stderr
    assert [each["lost"] for each in report["processes"]] == [False, False, True]
    assert report["words"] == COUNTS.total()


@pytest.mark.parametrize("code", ["os._exit(7)", "os.kill(os.getpid(), 9)"])
def test_processes_that_all_die_end_the_demonstration(texts, monkeypatch, tmp_path, code):
    block_workers(monkeypatch, tmp_path, code)
    done = command("--input", texts)
    cause = "exit code 7" if "exit" in code else "SIGKILL"
    assert (done.returncode, done.stdout) == (69, "")
    assert "the processes could not finish: process " in done.stderr
    assert f"ended with {cause}" in done.stderr


def test_process_that_dies_before_it_has_come_ends_the_demonstration(texts, monkeypatch, tmp_path):
    gate = tmp_path / "gate"  # one process makes it and dies; the others wait for it
    block_workers(monkeypatch, tmp_path, f"try: os.mkdir({str(gate)!r}); os._exit(7)\nexcept FileExistsError: pass")
    done = command("-n", "3", "--timeout", "inf", "--input", texts)
    assert (done.returncode, done.stdout) == (69, "")
    assert "the processes could not finish: process " in done.stderr
    assert "ended with exit code 7" in done.stderr


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
    )
    with child:
        assert child.stderr is not None
        pids = [int(child.stderr.readline().rpartition(b" ")[2]) for _ in range(3)]
        assert all(map(is_there, pids))
        child.send_signal(number)
        out, said = child.communicate(timeout=HANG_S)
    assert (child.returncode, out) == (code, b"")
    assert b"Traceback" not in said
    assert not any(map(is_there, pids))


def test_process_ends_when_the_one_that_started_it_has_gone(texts, tmp_path):
    path = str(tmp_path / "store")
    with FileStore(path, timeout=HANG_S) as store:
        fill(store, texts)
        child = subprocess.Popen(
            [sys.executable, "-m", "fscoord.demo", path, texts, "0", "2", "inf"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with child:
            store.wait(["all have come/arrivals"])  # it has come, and waits for the other, without limit
            assert child.stdin is not None
            child.stdin.close()  # as the system does for a launcher that is killed
            assert child.wait(HANG_S) == 1


def test_command_reports_the_work_of_each_process(texts):
    done = command("-n", "2", "--kill", "--input", texts)
    assert f"{COUNTS.total()} words ({len(COUNTS)} different ones) in {len(TEXTS)} files below {texts}" in done.stdout
    for expected in ("three 3, two 2", "rank", "LOST", "was lost to SIGKILL", "was taken again, by rank 0"):
        assert expected in done.stdout


def test_command_reports_one_file_and_one_word_in_the_singular(tmp_path):
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "text").write_text("word", encoding="utf-8")
    done = command("-n", "1", "--input", str(tmp_path / "only"))
    assert f"1 word (1 different one) in 1 file below {tmp_path / 'only'}" in done.stdout
    assert "LOST" not in done.stdout


def test_report_to_a_full_disk_is_an_output_error(texts):
    with open("/dev/full", "wb") as full:
        done = command("-n", "1", "--input", texts, stdout=full)
    assert (done.returncode, done.stderr) == (74, "fscoord: standard output: No space left on device\n")


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
def test_command_refuses_arguments_that_make_no_sense(tmp_path, words, reason):
    (tmp_path / "empty").mkdir()
    done = command(*words, cwd=tmp_path / "empty")
    assert (done.returncode, done.stdout) == (64, "")
    assert reason in done.stderr


def test_directory_named_like_the_package_does_not_get_in_the_way(tmp_path):
    decoy = tmp_path / "decoy" / "fscoord"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("raise SystemExit('the wrong one')")
    code = "import sys; from fscoord.cli import main; import os; os.chdir(sys.argv[1]); main(['demo', '-n', '1'])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(decoy.parent)], capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
