"""Power failures while a forward record is written into generation 0: no superseded file stays for good.

The record that tells of it, the forward record, is synced before and behind, on a log that is not durable, too. So of
all that follows the seal of generation 0 a power failure can harm the last record only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.persistence import (
    SECTOR,
    Disk,
    State,
    Step,
    Write,
    changed,
    file_choices,
    named,
    put_state,
    recording,
    repeatable,
    same_files,
)
from support.plain_reader import read_log

from fscoord import FileStore
from fscoord.inspect import dump, verify

LIMIT_S = 60
SIZE = 71
CUTS = [1, 7, 8, 9, 22, 40, 65, 70]
"""How many of its bytes lie in the sector where it begins; 8 are its prefix."""


@pytest.fixture
def work(memory: Path, mounts_stay: None) -> Iterator[Path]:
    (memory / "work").mkdir()
    with same_files():
        yield memory / "work"


def open_store(directory: Path, durable: bool) -> FileStore:
    return FileStore(directory / "store", durable=durable, timeout=LIMIT_S, compact_bytes=None)


def fill(work: Path, cut: int, *, durable: bool, killed: bool = False) -> None:
    """Make a log of which the next forward record will have `cut` bytes in the sector where it begins.

    `killed`: the next but one.
    """
    padding = 0
    for _ in range(2):
        put_state(str(work), {})
        with repeatable(2000), open_store(work, durable) as store:
            store.set("k", "v" * (1 + padding))
            store.compact()
            sealed = (work / "store").stat().st_size
            store.compact()
        begin = (work / "store").stat().st_size
        assert begin == sealed + SIZE
        begin += SIZE * killed
        padding = -(begin + cut) % SECTOR
    assert begin % SECTOR == SECTOR - cut


def root_states(before: State, steps: list[Step]) -> Iterator[State]:
    """Every state that the power may leave while not all of generation 0 is synced, which alone is harmed."""
    disk = Disk(before)
    for step in steps:
        disk.take(step)
        if 0 in disk.changes:
            files = {number: changed(disk.files.get(number, b""), todo) for number, todo in disk.changes.items()}
            names = named(disk.names, disk.renamed)
            for data in dict.fromkeys(file_choices(disk.files[0], disk.changes[0])):
                found = disk.files | files | {0: data}
                yield {name: found.get(file, b"") for name, file in sorted(names.items())}


def compact_and_fail(work: Path, *, durable: bool, start: int = 0, killed: bool = False) -> list[State]:
    """Compact the log in `work`; return the states that the power may leave meanwhile. `killed`: as whoever comes after
    one that died when it had written its forward record, and had not synced it.
    """
    with repeatable(start), recording(str(work)) as recorder, open_store(work, durable) as store:
        store.compact()
        if killed:
            written = max(n for n, step in enumerate(recorder.steps) if isinstance(step, Write) and step.file == 0)
            del recorder.steps[written + 1 :]
            store.compact()
    states = list(root_states(recorder.before, recorder.steps))
    return list({tuple(state.items()): state for state in states}.values())


def go_on(work: Path, state: State, *, durable: bool) -> None:
    """The next process finds everything, and leaves one file beside generation 0, and no damage."""
    path = work / "store"
    put_state(str(work), state)
    assert verify(path).verdict in ("sound", "torn")
    assert {"seal", "set"} <= {entry.kind for entry in dump(path)}
    with open_store(work, durable) as store, open_store(work, durable) as other:
        assert store.get("k").strip(b"v") == b""
        store.compact()
        store.set("after", "1")
        store.compact()
        store.compact()
        assert other.get("after") == b"1"  # the way of one who was left behind
    assert len(list(work.glob("store.[0-9]*"))) == 1
    assert verify(path).verdict == "sound"
    log = read_log(path.read_bytes())
    assert (log.ends, log.records[-1][1]) == ("whole", "f")


@pytest.mark.parametrize(("cut", "durable"), [*((cut, False) for cut in CUTS), (7, True), (40, True)])
def test_power_failure_while_a_forward_record_is_written_does_no_harm(cut: int, durable: bool, work: Path) -> None:
    fill(work, cut, durable=durable)
    states = compact_and_fail(work, durable=durable)
    assert len(states) > 4
    for state in states:
        go_on(work, state, durable=durable)


@pytest.mark.parametrize("cut", [8, 40])
def test_power_failure_behind_an_unsynced_record_of_a_killed_writer_is_harmless(cut: int, work: Path) -> None:
    fill(work, cut, durable=False, killed=True)
    states = compact_and_fail(work, durable=False, killed=True)
    assert len(states) > 8
    for state in states:
        go_on(work, state, durable=False)


@pytest.mark.parametrize("cut", [7, 40])
def test_power_failure_during_the_recovery_from_another_does_no_harm(cut: int, work: Path) -> None:
    fill(work, cut, durable=False)
    for number, state in enumerate(compact_and_fail(work, durable=False)):
        put_state(str(work), state)
        for again in compact_and_fail(work, durable=False, start=1000 * (number + 1)):
            go_on(work, again, durable=False)
