"""repair: it copies the sound records of a damaged log, reports the others, and leaves the log unchanged."""

from __future__ import annotations

import errno
import os
import random
import stat
from functools import partial
from pathlib import Path

import pytest
from faults.test_flips import LOGS, contents, flip
from support.faulty import faulty_os
from support.internals import FLOCK, GenerationRef, Header, generation_name, log_of, record
from support.logs import HEADER_SIZE, Step, complete, look_at, make, put, steps, tear, write_every_kind
from support.plain_reader import read_log

from fscoord import CorruptLogError, FileStore, InsecurePathError, StoreTimeoutError, StoreUnavailableError
from fscoord.inspect import Repair, Skipped, copy, repair, verify


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture
def output(tmp_path: Path) -> str:
    return str(tmp_path / "copy")


def mend(path: str, output: str, *, salvage: bool = False) -> tuple[Repair, list[Skipped]]:
    """Repair the log; a copy that is there is sound, and the log is as it was."""
    if os.path.exists(output):
        os.unlink(output)
    before = contents(path)
    skipped: list[Skipped] = []
    found = repair(path, output, salvage=salvage, write=True, on_skipped=skipped.append)
    assert contents(path) == before
    assert (found.skipped, found.skipped_bytes) == (len(skipped), sum(one.size for one in skipped))
    assert verify(output).verdict == "sound"
    return found, skipped


def content(path: str) -> object:
    with FileStore(path, read_only=True) as store:
        keys = store.list_keys()
        return dict(zip(keys, store.multi_get(keys), strict=True)), store.queue_len("queue")


def test_repair_of_a_sound_log_copies_all_that_it_holds(path: str, output: str) -> None:
    with FileStore(path, run_id=("job", 3), lock="flock", durable=True, label="me", mode=0o640) as store:
        store.set("k", "v")
        store.queue_push("queue", "x")
        store.add("n", 4)
    found, skipped = mend(path, output)
    assert (found.kept, skipped, found.notes, found.is_written) == (4, [], (), True)
    assert content(output) == content(path)
    one, other = (Header.decode(contents(name))[0] for name in (path, output))
    assert other.log_id != one.log_id
    fields = ("lock_kind", "durable", "run_ids", "generation", "run")
    assert [getattr(one, name) for name in fields] == [getattr(other, name) for name in fields]
    assert stat.S_IMODE(os.stat(output).st_mode) == 0o640
    assert [entry[1:] for entry in read_log(contents(path)).records] == [
        entry[1:] for entry in read_log(contents(output)).records
    ]
    with FileStore(output, run_id=("job", 3), lock="flock", mode=0o640) as store:
        assert store.add("n", 1) == 5


def data_of(found: list[Step]) -> list[record.Record]:
    return [step.record for step in found if step.record is not None]


def test_repair_keeps_all_before_the_damage_and_all_behind_it_if_asked_for(path: str, output: str) -> None:
    data = make(path, write_every_kind)
    found = steps(data)
    for bad in found[1:]:
        put(path, flip(data, 8 * (bad.end - 2)))
        done, skipped = mend(path, output)
        assert look_at(output) == complete(found, bad.start)
        assert [(one.offset, one.size) for one in skipped] == [
            (step.start, step.end - step.start) for step in found if step.start >= bad.start
        ]
        assert [one.is_certain for one in skipped] == [False] + [True] * (len(skipped) - 1)
        assert done.kept == len(
            [
                step
                for step in found
                if step.end <= bad.start and data[step.start + record.KIND_AT] not in (record.BELL, record.LEAVE)
            ]
        )
        done, skipped = mend(path, output, salvage=True)
        assert look_at(output) == data_of([step for step in found if step is not bad])
        assert [(one.offset, one.size) for one in skipped] == [(bad.start, bad.end - bad.start)]


def test_repair_names_each_record_left_out_by_kind_and_key(path: str, output: str) -> None:
    data = make(path, lambda handle: [handle.write(b"a", b"1"), handle.write(b"b", b"22"), handle.write(b"c", b"3")])
    bad = steps(data)[2]
    put(path, flip(data, 8 * (bad.end - 2)))
    _, (first, second) = mend(path, output)
    assert (first.kind, first.key, first.value_size, first.writer, first.is_certain) == ("set", b"b", 2, 1, False)
    assert "checksum" in first.why
    assert (second.kind, second.key, second.value_size, second.writer, second.is_certain) == ("set", b"c", 1, 1, True)
    assert "after the damage" in second.why
    put(path, flip(data, 8 * bad.start))
    _, (first, second) = mend(path, output)
    assert (first.kind, first.key, first.size) == ("", b"", bad.end - bad.start)


@pytest.mark.parametrize("name", LOGS)
def test_repair_of_any_damage_copies_only_records_that_were_written(name: str, path: str, output: str, rng) -> None:
    write, durable = LOGS[name]
    write(path, durable)
    data = contents(path)
    expected = data_of(steps(data))
    for _ in range(8):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 3])):
            start = rng.randrange(HEADER_SIZE, len(data))
            for offset in range(start, min(start + rng.choice([1, 5, 60, 600]), len(data))):
                damaged[offset] = rng.choice([0, 255, rng.randrange(256)])
        put(path, bytes(damaged))
        mend(path, output)
        kept = look_at(output)
        assert kept == expected[: len(kept)]
        mend(path, output, salvage=True)
        rest = iter(expected)
        salvaged = look_at(output)
        assert all(found in rest for found in salvaged), "a record that was never written, or not in this order"
        assert len(salvaged) >= len(kept)


def test_repair_leaves_out_a_torn_tail_and_reports_it(path: str, output: str) -> None:
    torn = tear(path, 30, b"k", b"v" * 50)
    _, (only,) = mend(path, output)
    assert (only.offset, only.size) == (torn, 30)
    assert "never finished" in only.why
    assert look_at(output) == look_at(path)


def test_session_whose_introduction_is_lost_keeps_its_number(path: str, output: str) -> None:
    with FileStore(path) as first:
        first.set("k", "1")
        start = os.path.getsize(path)
        with FileStore(path) as second:
            second.set("k", "2")
    put(path, flip(contents(path), 8 * (start + 30)))
    found, _ = mend(path, output, salvage=True)
    assert found.notes == ("the description of session 2 is lost",)
    with FileStore(output) as store:
        assert store.get("k") == b"2"
        store.set("k", "3")
        assert store.register() == 3
        assert [(one.host, one.pid) for number, one in log_of(store).table.sessions.items() if number == 2] == [
            ("unknown", 0)
        ]


def test_session_with_a_lost_introduction_is_introduced_and_reported_once(path: str, output: str) -> None:
    with FileStore(path) as first:
        first.set("k", "1")
        start = os.path.getsize(path)
        with FileStore(path) as second:
            for value in "234":
                second.set("k", value)
    put(path, flip(contents(path), 8 * (start + 30)))
    found, skipped = mend(path, output, salvage=True)
    assert found.notes == ("the description of session 2 is lost",)
    assert len(skipped) == 1
    kinds = [entry[1] for entry in read_log(contents(output)).records]
    assert kinds == ["s", "S", "s", "S", "S", "S"]


def test_repair_takes_lock_and_runs_from_the_headers_that_are_left(path: str, output: str) -> None:
    with FileStore(path, lock="flock", durable=True) as store:
        store.set("k", "1")
    with FileStore(path, lock="flock", durable=True, run_id=("job", 1)) as store:
        store.set("k", "2")
    (file,) = [name for name in os.listdir(os.path.dirname(path)) if name.startswith("log.1.")]
    file = os.path.join(os.path.dirname(path), file)
    mend(path, output)
    header, _ = Header.decode(contents(output))
    assert (header.lock_kind, header.durable, header.run_ids) == (FLOCK, True, ((b"job", 1),))
    put(file, flip(contents(file), 8 * 3))
    found, _ = mend(path, output, salvage=True)
    header, _ = Header.decode(contents(output))
    assert (header.lock_kind, header.durable, header.run_ids) == (FLOCK, True, ())
    assert not [note for note in found.notes if "no header" in note]


# -- generations


@pytest.fixture
def newest(path: str) -> str:
    """The file of generation 2 of the log at `path`."""
    with FileStore(path) as store:
        for number in range(3):
            store.set(f"k{number}", str(number))
            if number < 2:
                store.compact()
    (name,) = [name for name in os.listdir(os.path.dirname(path)) if name.startswith("log.2.")]
    return os.path.join(os.path.dirname(path), name)


def test_repair_copies_the_newest_generation(newest: str, path: str, output: str) -> None:
    expected = content(path)
    found, skipped = mend(path, output)
    assert (found.source, found.generation, found.notes, skipped) == (newest, 2, (), [])
    assert content(output) == expected
    assert Header.decode(contents(output))[0].generation == 0


def test_damage_in_an_old_generation_loses_nothing_and_is_reported(newest: str, path: str, output: str) -> None:
    expected = content(path)
    put(path, flip(contents(path), 8 * (steps(contents(path))[1].end - 2)))
    found, skipped = mend(path, output)
    assert (found.source, skipped) == (newest, [])
    assert "generation 0 is damaged" in found.notes[0]
    assert content(output) == expected


def test_generation_that_is_missing_is_passed_over_only_if_asked_for(newest: str, path: str, output: str) -> None:
    os.unlink(newest)
    with pytest.raises(CorruptLogError, match=r"generation 2 is missing.*--salvage") as caught:
        repair(path, output, write=True)
    assert (caught.value.path, caught.value.offset) == (path, 0)
    assert not os.path.exists(output)
    found, _ = mend(path, output, salvage=True)
    assert found.generation == 0
    assert "generation 2 is missing" in found.notes[0]
    assert content(output) == ({"k0": b"0"}, 0)


def test_generation_is_looked_for_twice_before_it_is_called_missing(newest: str, path: str, output: str) -> None:
    """It may have been superseded since another named it."""
    os.unlink(newest)
    with faulty_os() as faulty, pytest.raises(CorruptLogError, match="generation 2 is missing"):
        repair(path, output, write=True)
    assert faulty.calls.count(("open", newest)) == 2


def add_forward(path: str, generation: int, value: bytes | None = None) -> None:
    """Append a forward record to generation 0 that names `generation`, or one that names none."""
    data = contents(path)
    named = GenerationRef(generation, bytes(16), 0, 0, generation_name(b"log", generation, bytes(6)))
    chain = record.chain_at_end(data)
    put(path, data + record.encode(record.FORWARD, b"", named.forward() if value is None else value, 1, 2, chain)[0])


def test_generation_that_counts_is_the_newest_of_all_that_are_named(newest: str, path: str, output: str) -> None:
    expected = content(path)
    add_forward(path, 1)
    found, skipped = mend(path, output)
    assert (found.source, skipped) == (newest, [])
    assert content(output) == expected


def test_forward_record_that_names_no_generation_is_passed_over(path: str, output: str) -> None:
    data = make(path, write_every_kind)
    add_forward(path, 1, b"nonsense")
    found, skipped = mend(path, output)
    assert (found.source, [one.offset for one in skipped]) == (path, [len(data)])
    assert look_at(output) == data_of(steps(data))


def test_repair_reads_a_log_that_anybody_may_write_but_only_a_regular_file(path: str, output: str) -> None:
    data = make(path, write_every_kind)
    os.chmod(path, 0o666)
    mend(path, output)
    assert look_at(output) == data_of(steps(data))
    os.unlink(path)
    os.unlink(output)
    os.mkfifo(path)
    with pytest.raises(InsecurePathError, match="not a regular file"):
        repair(path, output, write=True)


def test_header_that_is_damaged_is_passed_over_only_if_asked_for(newest: str, path: str, output: str) -> None:
    expected = content(path)
    put(newest, flip(contents(newest), 8 * 40))
    with pytest.raises(CorruptLogError, match=r"header.*--salvage"):
        repair(path, output, write=True)
    found, skipped = mend(path, output, salvage=True)
    assert found.source == newest
    assert [(one.offset, one.size, one.why) for one in skipped] == [(0, HEADER_SIZE, "the header is damaged")]
    assert content(output) == expected


def test_log_whose_only_header_is_damaged_can_be_salvaged(path: str, output: str) -> None:
    data = make(path, write_every_kind)
    put(path, flip(data, 8 * 3))
    found, _ = mend(path, output, salvage=True)
    assert look_at(output) == data_of(steps(data))
    assert any("no header could be read" in note for note in found.notes)


def test_generation_that_no_readable_record_names_is_reported(newest: str, path: str, output: str) -> None:
    data = contents(path)
    for step in steps(data)[-2:]:
        data = flip(data, 8 * (step.end - 2))
    put(path, data)
    found, _ = mend(path, output)
    assert found.generation == 0
    assert newest in found.notes[-1]
    os.unlink(output)
    found, _ = mend(newest, output)
    assert content(output) == ({"k0": b"0", "k1": b"1", "k2": b"2"}, 0)


# -- what it must not do


def test_repair_writes_nothing_unless_asked_to(path: str, output: str, tmp_path: Path) -> None:
    make(path, write_every_kind)
    before = sorted(os.listdir(tmp_path))
    found = repair(path, output)
    assert (found.is_written, found.kept) == (False, 11)
    assert sorted(os.listdir(tmp_path)) == before


def test_repair_reports_its_progress_for_each_file(newest: str, path: str, output: str) -> None:
    told: list[tuple[str, int, int]] = []
    repair(path, output, write=True, on_progress=lambda *given: told.append(given))
    sizes = os.path.getsize(path), os.path.getsize(newest)
    assert told == [(path, sizes[0], sizes[0]), *[(newest, sizes[1], sizes[1])] * 2], "looked through, and copied"


@pytest.mark.parametrize("there", ["a file", "the log itself", "a link"])
def test_repair_overwrites_nothing(there: str, path: str, output: str) -> None:
    make(path, write_every_kind)
    if there == "a file":
        Path(output).write_text("mine")
    elif there == "a link":
        os.symlink(path, output)
    target = path if there == "the log itself" else output
    before = contents(target)
    with pytest.raises(ValueError, match="nothing is overwritten"):
        repair(path, target, write=True)
    assert contents(target) == before


def test_repair_does_not_overwrite_a_file_that_appears_meanwhile(path: str, output: str, tmp_path: Path) -> None:
    make(path, write_every_kind)
    with pytest.raises(ValueError, match="nothing is overwritten"):
        repair(path, output, write=True, on_progress=lambda *_: Path(output).write_text("mine"))
    assert Path(output).read_text() == "mine"
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".new")]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_repair_leaves_a_whole_copy_or_none_whichever_call_fails(
    error: int, path: str, output: str, tmp_path: Path
) -> None:
    data = make(path, write_every_kind)
    number = 0
    while True:
        is_done = False
        with faulty_os() as faulty, faulty.fail(number, error) as failed:
            try:
                repair(path, output, write=True)
                is_done = True
            except StoreUnavailableError as caught:
                assert caught.errno == error
        assert not is_done or os.path.exists(output)
        if os.path.exists(output):
            assert look_at(output) == data_of(steps(data))
            os.unlink(output)
        if not failed:
            break
        assert contents(path) == data
        number += 1
    assert number > 10


def test_repair_without_hard_links_makes_a_copy_that_appears_whole(path: str, output: str) -> None:
    data = make(path, write_every_kind)
    with faulty_os() as faulty, faulty.fail(0, errno.EPERM, names=("link",), for_good=True):
        repair(path, output, write=True)
    assert look_at(output) == data_of(steps(data))


def test_repair_keeps_writers_away_while_it_copies(path: str, output: str) -> None:
    with FileStore(path) as store:
        store.set("k", "v" * 100)
        seen = []

        def write_meanwhile(*_: object) -> None:
            store.set_timeout(0)
            with pytest.raises(StoreTimeoutError):
                store.set("k", "late")
            seen.append(1)

        repair(path, output, write=True, on_progress=write_meanwhile)
        assert seen
        store.set_timeout(60)  # the request that it gave up may hold the lock for a moment
        store.set("k", "now")
    assert content(output) == ({"k": b"v" * 100}, 0)


def test_repair_refuses_a_file_that_holds_no_record(path: str, output: str) -> None:
    put(path, b"hello, world")
    for salvage in (False, True):
        with pytest.raises(CorruptLogError) as caught:
            repair(path, output, write=True, salvage=salvage)
        assert caught.value.offset == 0
    assert not os.path.exists(output)


@pytest.mark.parametrize("size", [0, 8, 60])
def test_repair_and_copy_refuse_a_file_that_no_writer_has_opened(size: int, path: str, output: str) -> None:
    put(path, make(path, write_every_kind)[:size])
    for act in (partial(repair, write=True), partial(repair, write=True, salvage=True), copy):
        with pytest.raises(StoreUnavailableError) as caught:
            act(path, output)
        assert caught.value.errno == errno.ENOENT
    assert not os.path.exists(output)


def test_repair_leaves_out_a_record_of_a_newer_version(path: str, output: str, rng: random.Random) -> None:
    data = make(path, lambda handle: handle.write(b"k", b"v"))
    chain = record.chain_at_end(data)
    strange, chain = record.encode(ord("Q"), b"", b"", 1, 0, chain)
    behind, _ = record.encode(record.SET, b"k", b"w", 1, 0, chain)
    put(path, data + strange + behind)
    _, skipped = mend(path, output)
    assert ["newer" in one.why for one in skipped] == [True, False]
    assert content(output) == ({"k": b"v"}, 0)


def test_generation_removed_during_the_search_is_followed_to_the_next(path: str, output: str) -> None:
    """Nothing keeps writers away from a log with a marker file."""
    told: list[str] = []
    with FileStore(path, lock="soft") as store:
        store.set("k", "1")
        store.compact()

        def tell(file: str, done: int, size: int) -> None:
            told.append(file)
            if len(told) == 1:
                store.set("k", "2")
                store.compact()

        repair(path, output, write=True, on_progress=tell)
    assert told.count(path) == 2
    assert content(output) == ({"k": b"2"}, 0)


def test_generation_whose_place_another_file_has_taken_counts_as_missing(path: str, output: str) -> None:
    for name in (path, path + "x"):
        with FileStore(name) as store:
            store.set("k", name)
            store.compact()
            store.set("later", "1")
    (file,) = Path(path).parent.glob("log.1.*")
    file.write_bytes(Path(path + "x").read_bytes())
    with pytest.raises(CorruptLogError, match="not the next generation"):
        repair(path, output, write=True)
    found, _ = mend(path, output, salvage=True)
    assert "generation 1 is missing" in found.notes[0]
    assert content(output) == ({"k": path.encode()}, 0)
