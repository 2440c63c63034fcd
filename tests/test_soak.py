"""The soak, in small: it comes to a good end, and a store that disagrees with the journals makes it fail.

That it passes at its full length, `tox -e soak` shows.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from soaking.verdict import Left, judge_journals, judge_keys, judge_observer, key_patterns
from soaking.worker import MANY, SINGLE
from support.places import until

import fscoord

pytestmark = pytest.mark.once

SOAK = Path(__file__).with_name("soak.py")


def start(directory: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SOAK), f"--directory={directory}", "--workers=3", *options]
    environment = os.environ | {"PYTHONPATH": str(Path(fscoord.__file__).parent.parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_soak_of_a_few_seconds_ends_well(tmp_path: Path, seed: int) -> None:
    result = tmp_path / "result"
    with start(tmp_path / "soak", "--minutes=0.1", f"--seed={seed}", f"--json={result}") as soak:
        said, _ = soak.communicate()
    assert soak.returncode == 0, said
    facts = json.loads(result.read_text())
    assert sum(facts["happened"].get(what, 0) for what in ("kills", "clean ends")) > 0
    assert facts["operations"] > 10  # a busy machine has done 110 in the six seconds
    assert facts["left"]["verify"] == "sound"
    assert len(facts["samples"]) > 2


def test_soak_fails_if_the_store_lacks_an_acknowledged_operation(tmp_path: Path, seed: int) -> None:
    (tmp_path / "soak" / "journals").mkdir(parents=True)
    (tmp_path / "soak" / "journals" / "forged").write_text("B 1.0 own 77 5\nA 1.0 own 77 5\n")
    with start(tmp_path / "soak", "--minutes=0.03", f"--seed={seed}") as soak:
        said, _ = soak.communicate()
    assert soak.returncode == 1, said
    assert "own/77 is 0: 5 acknowledged, 5 begun" in said


def test_ctrl_c_ends_the_soak_and_every_process_of_it(tmp_path: Path, seed: int) -> None:
    (tmp_path / "soak").mkdir()
    os.mkfifo(tmp_path / "soak" / "errors")  # each process has it open for writing, and so have its children
    reader = os.open(tmp_path / "soak" / "errors", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with start(tmp_path / "soak", "--minutes=5", f"--seed={seed}") as soak:
            journal = tmp_path / "soak" / "journals" / "worker0"
            while not journal.exists() and soak.poll() is None:
                select.select([], [], [], 0.01)
            soak.send_signal(signal.SIGINT)
            said, _ = soak.communicate()
        assert soak.returncode == 1, said
        assert "ended early" in said
        until(lambda: is_abandoned(reader))  # a child that was killed last may need a moment to end
    finally:
        os.close(reader)


def is_abandoned(reader: int) -> bool:
    """Return whether no process has the FIFO open for writing any more."""
    try:
        while os.read(reader, 4096):
            pass
    except BlockingIOError:
        return False
    return True


GOOD = [
    "B 1 own 0 1", "A 2 own 0 1", "B 3 own 0 2", "R 4 own 0 2",
    "B 1 add 5", "A 2 add 5 5", "B 3 add 2",
    "B 1 put jobs 10", "A 2 put jobs 10", "A 4 take jobs 10 3", "B 5 done jobs 10", "A 6 done jobs 10",
    "B 1 put jobs 11", "A 2 put jobs 11", "A 4 take jobs 11 3",
    "B 1 push 20", "A 2 push 20", "B 3 pop", "A 4 pop 20", "B 5 pop", "E 6 pop",
    "B 1 section 1 1", "A 2 section 1 1",
    "B 1 work 0 30", "A 2 once 0 30",
    "B 3 token 1",
    "B 1 row 0 0", "B 2 row 1 0", "A 3 row 0 0", "A 3 row 1 0",
]  # fmt: skip
LEFT = Left({"own/0": 2, "sum": 5}, {"jobs": ["11"], "tasks": []}, [], {1: 1, 3: 0}, {0: 1, 1: 1})


def test_journals_and_a_store_that_agree_are_good() -> None:
    assert judge_journals(GOOD, LEFT) == []


@pytest.mark.parametrize(
    ("lines", "left", "words"),
    [
        ([], {"counters": {"own/0": 0, "sum": 5}}, "own/0 is 0: 1 acknowledged, 2 begun"),
        ([], {"counters": {"own/0": 3, "sum": 5}}, "own/0 is 3: 1 acknowledged, 2 begun"),
        (["A 5 own 0 1"], {}, "own 0 is acknowledged as 1 after 1"),
        (["R 5 own 0 0"], {}, "own 0 is 0: 1 acknowledged, 2 begun"),
        ([], {"counters": {"own/0": 2, "sum": 4}}, "the sum is 4: 5 acknowledged, 7 begun"),
        ([], {"counters": {"own/0": 2, "sum": 8}}, "the sum is 8: 5 acknowledged, 7 begun"),
        (["B 4 add 0", "A 5 add 0 5"], {}, "2 calls of add returned 5"),
        (["A 7 done jobs 10"], {}, "item 10 of jobs is done twice"),
        (["A 8 take jobs 10 7"], {}, "item 10 of jobs was handed out after it was done"),
        (["B 8 put jobs 12", "A 9 put jobs 12"], {}, "item 12 of jobs was put and is lost"),
        ([], {"drained": {"jobs": [], "tasks": []}}, "item 11 of jobs was taken, nobody was done with it"),
        ([], {"drained": {"jobs": ["10", "11"], "tasks": []}}, "item 10 of jobs is done and was left"),
        ([], {"drained": {"jobs": ["11", "99"], "tasks": []}}, "item 99 of jobs was taken, and nobody put it"),
        (["B 7 pop", "A 8 pop 20"], {}, "20 is popped twice"),
        (["B 7 pop", "A 8 pop 21"], {}, "21 was popped, and nobody pushed it"),
        (["B 7 push 22", "A 8 push 22"], {}, "1 values that were pushed are lost"),
        ([], {"given": ["20"]}, "20 was popped and is left"),
        ([], {"sections": {1: 0, 3: 0}}, "section/1 is 0: 1 acknowledged, 1 begun"),
        (["A 3 once 0 31"], {}, "once/0 has more than one value"),
        (["A 3 once 1 31"], {}, "once/1 has the value 31, which nobody worked out"),
        (["B 4 latch 0", "A 5 latch 0"], {}, "latch/0 is open after 1 of"),
        (["B 3 row 0 1", "B 9 row 1 1", "A 4 row 0 1"], {"rows": {0: 2, 1: 1}}, "rank 0 passed barrier 1 before [1]"),
        ([], {"rows": {0: 1, 1: 0}}, "rank 1 is at barrier 0, and has passed 0"),
        (["A 1 own 5 0"], {}, "own/5: 0 is acknowledged and was never begun"),
        (["A 1 nonsense"], {}, "nobody writes"),
        (["B 9 put jobs 10"], {}, "the soak has a mistake: item 10 of jobs is begun twice"),
        (["B 9 push 20"], {}, "the soak has a mistake: 20 is begun twice"),
    ],
)
def test_journals_and_a_store_that_disagree_are_found(lines: list[str], left: dict[str, object], words: str) -> None:
    wrong = judge_journals([*GOOD, *lines], LEFT._replace(**left))  # type: ignore[arg-type]
    assert any(words in each for each in wrong), wrong


LINES = ["lock/line", "places/line", "both/line", "office/line"]


def test_documented_keys_are_good() -> None:
    assert judge_keys([*LINES, "office/term/7", "jobs/number", "group/changed/9", "once/3/result", "sum"], 3) == []


@pytest.mark.parametrize("key", ["lock/wake/1a", "jobs/item/1", "jobs/claim/1", "group/member/1", "office/term/x", "k"])
def test_keys_that_are_not_documented_are_found(key: str) -> None:
    assert [f"the key {key!r} is left, which no page lists"] == judge_keys([*LINES, key], 3)


def test_keys_in_larger_number_than_documented_are_found() -> None:
    assert "2 keys like" in judge_keys([*LINES, "office/term/7", "office/term/8"], 3)[0]
    assert judge_keys(LINES[1:], 3) == ["the key 'lock/line' is gone"]


def test_page_on_the_recipes_lists_the_keys_of_all_that_are_soaked() -> None:
    for name, recipe in [*SINGLE.items(), *MANY.items()]:
        assert re.match(r"\(\?:", key_patterns(name, recipe)), recipe


@pytest.mark.parametrize(
    ("rss", "fds", "number"), [((100, 200, 100, 100.9), 9, 0), ((100, 100, 100, 101), 9, 1), ((1, 1, 1, 1), 8, 1)]
)
def test_observer_that_grows_is_found(rss: tuple[float, ...], fds: int, number: int) -> None:
    samples = [
        {"at": at, "rss": size, "watched": 2, "fds": 9 if at < 2000 else fds}
        for at, size in zip((0, 60, 600, 3600), rss, strict=True)
    ]
    wrong, early = judge_observer(samples, 3600)
    assert (len(wrong), early) == (number, [])
    wrong, early = judge_observer(samples, 300)
    assert wrong == []
