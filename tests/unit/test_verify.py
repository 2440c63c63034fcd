"""The report of `verify`: each file, the part that was read, and the place of each finding."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_os, faulty_system
from support.internals import (
    OFD,
    Generation,
    GenerationRef,
    Header,
    LogPosition,
    Report,
    generation_name,
    log_of,
    record,
    scan,
    write_copy,
)
from support.logs import make, put, write_every_kind
from support.plain_reader import read_log

from fscoord import CorruptLogError, FileStore, InsecurePathError, StoreUnavailableError
from fscoord._log.files import opening
from fscoord.inspect import dump, verify


@pytest.fixture
def path(memory: Path) -> str:
    return str(memory / "log")


def contents(path: str) -> bytes:
    return Path(path).read_bytes()


def generation(path: str, number: int) -> str:
    """The file of a later generation."""
    (found,) = Path(path).parent.glob(f"log.{number}.*")
    return str(found)


def file_of(path: str, number: int, name: int) -> str:
    """How the file of `number` is called if its random part is `name`."""
    directory, base = os.path.split(path)
    return os.path.join(directory, generation_name(base.encode(), number, bytes([name]) * 6).decode())


def compacted(path: str, times: int = 1) -> None:
    """Make a log in its generation `times`, the snapshot of which is a session and a value, and a value follows."""
    with FileStore(path) as store:
        store.set("k", "v")
        for _ in range(times):
            store.compact()
        store.set("k", "w")


def told(report: Report) -> list[tuple[str, int, int]]:
    """Where something is damaged, and how many bytes that is."""
    return [finding[:3] for finding in report.findings if finding.is_damage]


def with_header(file: str, **fields: object) -> None:
    """Give the file a header in which `fields` are others, and nothing behind it."""
    header, _ = Header.decode(contents(file))
    put(file, header._replace(**fields).encode())  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "lacks"), [(0, "no writer has opened it yet"), (8, "died before the header")])
def test_verify_reports_an_incomplete_header_as_empty_and_not_as_damage(size: int, lacks: str, path: str) -> None:
    put(path, make(path, lambda handle: None)[:size])
    report = verify(path)
    (finding,) = report.findings
    assert finding[:4] == (path, 0, size, False)
    assert lacks in finding.message
    assert report.generations == (Generation(path, 0, size, 0, 0, "empty"),)
    assert (report.verdict, report.more) == ("empty", 0)


def test_verify_reports_a_bad_header_with_the_file_size_and_no_records(path: str) -> None:
    put(path, b"hello, world")
    assert verify(path).generations == (Generation(path, 0, 12, 0, 0, "damaged"),)
    os.unlink(path)
    compacted(path)
    file = generation(path, 1)
    put(file, contents(file)[:20])
    report = verify(path)
    assert told(report) == [(file, 0, 20)]
    assert report.generations[1:] == (Generation(file, 1, 20, 0, 0, "damaged"),)
    assert report.verdict == "damaged"


@pytest.mark.parametrize("field", ["lock_kind", "durable"])
def test_verify_reports_a_generation_of_another_lock_kind_or_durability(field: str, path: str) -> None:
    compacted(path, 2)
    file = generation(path, 2)
    assert verify(path).verdict == "sound"
    header, _ = Header.decode(contents(file))
    with_header(file, **{field: 1 - getattr(header, field)})
    report = verify(path)
    assert told(report) == [(file, 0, os.path.getsize(file))]
    assert path in report.findings[0].message


@pytest.mark.parametrize(("field", "value"), [("log_id", b"x" * 16), ("generation", 3)])
def test_verify_reports_a_generation_that_does_not_match_its_seal(field: str, value: object, path: str) -> None:
    compacted(path)
    file = generation(path, 1)
    with_header(file, **{field: value})
    assert "not the next generation" in verify(path).findings[0].message


def test_verify_reports_a_missing_generation_by_its_name(path: str) -> None:
    compacted(path)
    file = generation(path, 1)
    os.unlink(file)
    report = verify(path)
    assert told(report) == [(file, 0, 0)]
    assert "put this file back" in report.findings[0].advice


def hinted(path: str, number: int) -> bytes:
    """A forward record to generation `number`, and what makes it look as if it were the value of a torn record."""
    named = GenerationRef(number, bytes(16), 0, 0, generation_name(b"log", number, bytes(6)))
    forward, _ = record.encode(record.FORWARD, b"", named.forward(), 1, 2, 3)
    data = contents(path)
    chain = record.chain_at_end(data)
    last, _ = record.encode(record.SET, b"k", forward + b"more", 1, 2, chain)
    return last[: -len(b"more") - record.TAIL_SIZE]


def test_forward_record_in_the_torn_tail_of_generation_0_is_damage(path: str) -> None:
    """Openers read the end of that file first, and would go by it."""
    data = make(path, lambda handle: handle.write(b"k", b"v"))
    tail = hinted(path, 4)
    put(path, data + tail)
    report = verify(path)
    assert (path, len(data), len(tail)) in told(report)
    assert "names generation 4" in next(finding.message for finding in report.findings if finding.is_damage)
    assert report.generations[0].ends == "damaged"


@pytest.mark.parametrize(("number", "verdict"), [(1, "sound"), (2, "damaged")])
def test_forward_record_in_the_tail_that_names_no_later_generation_is_ignored(
    number: int, verdict: str, path: str
) -> None:
    compacted(path)
    put(path, contents(path) + hinted(path, number))
    assert verify(path).verdict == verdict


# -- logs made by hand


def encoded(chain: int, *values: bytes, kind: int = record.SET) -> tuple[bytes, int]:
    """Records with these values, and the chain behind them."""
    data = b""
    for value in values:
        more, chain = record.encode(kind, b"k", value, 1, 2, chain)
        data += more
    return data, chain


def seal(path: str, snapshot: bytes, chain: int, *, forward: bool = False) -> str:
    """Let the log at `path` be sealed and go on, with `snapshot`, whose last record has this `chain`; return where."""
    header = Header(b"0" * 16, OFD)
    file = file_of(path, 1, 1)
    first = header._replace(log_id=b"1" * 16, generation=1).encode()
    named = GenerationRef(1, b"1" * 16, len(first) + len(snapshot), chain, os.fsencode(os.path.basename(file)))
    root = header.encode()
    data, end = record.encode(record.SEAL, b"", named.seal(), 1, 2, Header.decode(root)[1].chain)
    if forward:
        data += record.encode(record.FORWARD, b"", named.forward(), 1, 2, end)[0]
    put(path, root + data)
    put(file, first + snapshot)
    return file


FIRST_CHAIN = Header.decode(Header(b"1" * 16, OFD, generation=1).encode())[1].chain
"""What the first record of the generation that `seal` makes is chained over."""


@pytest.mark.parametrize("forward", [False, True])
def test_snapshot_that_ends_elsewhere_is_damage_from_its_beginning(forward: bool, path: str) -> None:
    """Whatever a forward record says of the same generation: it names no snapshot."""
    data, chain = encoded(FIRST_CHAIN, b"1", b"2")
    for kept, promised in ((data[: len(data) // 2], chain), (data, chain ^ 1)):
        file = seal(path, data, promised, forward=forward)
        size = os.path.getsize(file) - len(data) + len(kept)
        os.truncate(file, size)
        assert told(verify(path)) == [(file, 0, size)]


def test_snapshot_with_a_damaged_record_is_reported_once(path: str) -> None:
    data, chain = encoded(FIRST_CHAIN, b"1", b"2")
    behind, _ = encoded(chain, b"3", b"4")
    file = seal(path, data, chain)
    start = os.path.getsize(file) - len(data) // 2
    damaged = contents(file) + behind[:-4]
    put(file, damaged[: start + 14] + b"?" + damaged[start + 15 :])
    report = verify(path)
    assert told(report) == [(file, start, len(data) // 2)]
    assert "checksum" in report.findings[0].message


# -- how what follows damage is found


def found_behind(path: str, junk: bytes, data: bytes) -> LogPosition | None:
    """Where a record is found again behind a damage that is followed by `junk` and `data`."""
    put(path, b"?" + junk + data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return scan.find_next(fd, LogPosition(0, 3))
    finally:
        os.close(fd)


def test_record_is_found_at_any_place_of_the_search_window(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_WINDOW", 64)
    data, _ = record.encode(record.SET, b"", b"", 1, 2, 5)
    for size in range(200):
        assert found_behind(path, b"?" * size, data) == LogPosition(1 + size, 5)


def test_length_beyond_the_end_of_the_file_costs_no_search(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_WORK_MIN", 0)
    data, _ = record.encode(record.SET, b"", b"", 1, 2, 5)
    junk = b"\1\1\1\0\1\1A\1\1\1\1\0\1\1\1\1" * 500  # each the beginning of a record of 65 kB
    assert found_behind(path, junk, data) == LogPosition(1 + len(junk), 5)


# A copy in the making


def test_copy_is_written_in_pieces_each_once_and_synced_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "BUFFER", 1000)
    path = tmp_path / "copy"
    records = [(record.SET, b"%d" % number, bytes([number]) * 400, 1, number) for number in range(10)]
    done: list[str] = []

    def note(name: str, _: object, arguments: tuple[Any, ...]) -> None:
        if name == "fsync":
            done.append(os.readlink(f"/proc/self/fd/{arguments[0]}"))
        elif name in ("write", "link"):
            done.append(name)

    def given() -> Iterator[record.Record]:
        yield from records
        assert done == ["write"] * 3
        assert not path.exists()

    with faulty_os() as faulty, faulty.instead(note):
        write_copy(str(path), Header(b"i" * 16, OFD, False), 0o640, given())
        birth = done.pop(4)
    assert done == [*["write"] * 4, "link", str(tmp_path)]
    assert birth.startswith(f"{path}.")
    log = read_log(path.read_bytes())
    assert log.ends == "whole"
    assert log.values == {key: value for _, key, value, *_ in records}
    assert os.listdir(tmp_path) == ["copy"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_copy_that_is_given_up_or_comes_too_late_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "copy"

    def given(last: Callable[[], object]) -> Iterator[record.Record]:
        yield record.SET, b"k", b"v", 1, 1
        last()

    with pytest.raises(ZeroDivisionError):
        write_copy(str(path), Header(b"i" * 16, OFD, False), 0o600, given(lambda: 1 // 0))
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="nothing is overwritten"):
        write_copy(str(path), Header(b"i" * 16, OFD, False), 0o600, given(lambda: path.write_bytes(b"another's")))
    assert os.listdir(tmp_path) == ["copy"]
    assert path.read_bytes() == b"another's"


# dump


@pytest.fixture
def log_path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


def test_dump_of_a_file_that_is_no_log_is_an_error(log_path: str, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError):
        list(dump(log_path))
    with pytest.raises(InsecurePathError):
        list(dump(tmp_path))
    Path(log_path).write_bytes(b"text")
    with pytest.raises(CorruptLogError, match="not a log of fscoord"):
        list(dump(log_path))


def compact_once(log_path: str) -> str:
    """Make a log that has a second generation; return the path of that."""
    with FileStore(log_path) as store:
        store.set("k", "1")
        store.compact()
        assert store.get("k") == b"1"
        return log_of(store).handle.file


def next_record(data: bytes, kind: int, value: bytes) -> bytes:
    """A record that follows the last of the whole log `data`."""
    return record.encode(kind, b"", value, 9, 1, record.chain_at_end(data))[0]


@pytest.mark.parametrize("how", ["header", "another"])
def test_generation_that_is_not_the_expected_one_is_damage_at_its_beginning(how: str, log_path: str) -> None:
    file = compact_once(log_path)
    make(log_path + "2", write_every_kind)
    Path(file).write_bytes(b"no log" * 100 if how == "header" else Path(log_path + "2").read_bytes())
    opened: list[str] = []
    closed: list[str] = []

    def note(name: str, _: object, arguments: tuple[Any, ...]) -> None:
        if name == "open":
            opened.append(arguments[0])
        elif name == "close":
            link = f"/proc/self/fd/{arguments[0]}"
            closed.append(os.readlink(link) if os.path.lexists(link) else "what may be another's by now")

    with (
        faulty_system() as faulty,
        faulty.instead(note),
        pytest.raises(
            CorruptLogError, match="not a log of fscoord" if how == "header" else "not the next generation"
        ) as caught,
    ):
        list(dump(log_path))
    assert (caught.value.offset, caught.value.path) == (0, log_path)
    assert opened == closed == [log_path, file]


def test_prefix_that_is_bad_at_the_very_end_is_damage_and_not_torn(log_path: str) -> None:
    data = make(log_path, write_every_kind)
    put(log_path, data + b"no prefix" + b"\xff" * 4)
    with pytest.raises(CorruptLogError) as caught:
        list(dump(log_path))
    assert caught.value.offset == len(data)


def test_session_record_that_describes_nobody_is_damage(log_path: str) -> None:
    data = make(log_path, write_every_kind)
    put(log_path, data + next_record(data, record.SESSION, b"nobody"))
    with pytest.raises(CorruptLogError, match="cut short") as caught:
        list(dump(log_path))
    assert caught.value.offset == len(data)
