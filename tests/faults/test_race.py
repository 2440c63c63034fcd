"""Readers without a lock beside writers that tear and void all the time: no false damage, no phantom, no zeros."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.race_worker import Counter, value
from support.logs import opened
from support.plain_reader import read_log
from support.processes import Processes, result, wait_until_ready

WRITERS = 2


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on the disk's file system, and one on tmpfs."""
    if request.param == "disk":
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="fscoord-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


def race(path: str, count: int, rng: random.Random, limit: float) -> dict[str, int]:
    """Let the writers write `count` records each; every reader checks all of them."""
    with opened(path):
        pass
    counts = dict.fromkeys(range(1, WRITERS + 1), count)
    with Processes("race_worker") as processes:
        readers = [
            processes.start_role("follow", path, counts, True),
            processes.start_role("follow", path, counts, False),
            processes.start_role("reopen", path, counts, rng.randrange(1 << 32)),
        ]
        for reader in readers:
            wait_until_ready(reader)
        writers = [processes.start_role("write", path, writer, count, rng.randrange(1 << 32)) for writer in counts]
        torn = [result(process, limit) for process in writers]
        seen = [result(process, limit) for process in readers]
    return {
        "tears": sum(found["tears"] for found in torn),
        "looks": sum(found.get("looks", 0) for found in seen),
        "doubts": sum(found.get("doubts", 0) for found in seen),
        "opens": sum(found.get("opens", 0) for found in seen),
    }


def test_readers_beside_tearing_writers_see_every_record_once_and_whole(place: Path, rng: random.Random) -> None:
    count = 1000
    path = str(place / "log")
    found = race(path, count, rng, limit=200)
    assert found["tears"] > count / 2
    assert found["looks"] > count / 2, "the readers were not there"
    log = read_log(Path(path).read_bytes())
    assert log.ends == "whole"
    assert len([kind for _, kind, *_ in log.records if kind == "S"]) == WRITERS * count
    assert found["doubts"] == 0, "on a local file system no look should need the lock"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_race_of_half_a_million_records_with_tearing_writers_is_read_correctly(
    place: Path, rng: random.Random, capsys
) -> None:
    count = 250_000
    found = race(str(place / "log"), count, rng, limit=3000)
    with capsys.disabled():
        print(f" {place}: {WRITERS * count} records, {found}")
    assert found["tears"] > count / 2


def test_checking_reader_notices_zeros_phantoms_gaps_and_repeats(tmp_path: Path) -> None:
    """Zeros, a phantom, a record missing or given twice: the state machine of these tests fails for each."""
    good = [(ord("S"), b"1", value(1, number), 1, 0) for number in range(40)]
    Counter().apply(good)
    zeros = [(ord("S"), b"1", value(1, 3)[:40] + bytes(len(value(1, 3)) - 40), 1, 0)]
    for bad in (good[1:], good[:2] + good[1:], good[:2] + good[3:], good[:3] + zeros, good[:3] + zeros * 2):
        with pytest.raises(AssertionError):
            Counter().apply([*bad, *good[4:5]])
