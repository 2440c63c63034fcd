"""The report of `verify`: each file, the part that was read, and the place of each finding."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.logs import make, put, steps

from fscoord import FileStore
from fscoord._log.format import record
from fscoord._log.format.generation_ref import GenerationRef, generation_name
from fscoord._log.format.header import Header
from fscoord._log.format.record import LogPosition
from fscoord._log.inspect import scan
from fscoord._log.inspect.verify import Generation, Report
from fscoord._log.locking.log_lock import OFD
from fscoord.inspect import verify


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


def test_verify_reports_sizes_counts_and_progress_of_each_file(path: str) -> None:
    compacted(path)
    data = contents(path)
    put(path, data)
    seen: list[tuple[str, int, int]] = []
    report = verify(path, on_progress=lambda *given: seen.append(given))
    file = generation(path, 1)
    sizes = os.path.getsize(path), os.path.getsize(file)
    assert report.generations == (
        Generation(path, 0, sizes[0], len(steps(data)), 0, "sealed"),
        Generation(file, 1, sizes[1], len(steps(contents(file))), 0, "whole"),
    )
    assert seen == [(path, sizes[0], sizes[0]), (file, sizes[1], sizes[1])]


def test_verify_reports_a_torn_record_with_its_offset_and_size(path: str) -> None:
    data = make(path, lambda handle: handle.write(b"k", b"v" * 50))
    start = steps(data)[-1].start
    put(path, data[:-20])
    report = verify(path)
    assert [finding[:4] for finding in report.findings] == [(path, start, len(data) - 20 - start, False)]
    assert report.generations == (Generation(path, 0, start, len(steps(data)) - 1, 0, "torn"),)
    assert report.verdict == "torn"
    with FileStore(path) as store:
        store.set("k", "over it")
    (found,) = verify(path).generations
    assert (found.voids, found.ends, found.size) == (1, "whole", os.path.getsize(path))


def test_verify_reports_files_beside_the_log_named_like_a_generation(path: str) -> None:
    compacted(path, 2)
    later, same, before = file_of(path, 3, 7), file_of(path, 2, 8), file_of(path, 1, 9)
    for file in (later, same, before, f"{path}.2.x", f"{path}.alive", file_of(path + "2", 3, 1)):
        put(file, b"")
    report = verify(path)
    assert report.verdict == "sound"
    assert [finding[:4] for finding in report.findings] == [(file, 0, 0, False) for file in (before, same, later)]
    assert ["no seal names it" in finding.message for finding in report.findings] == [False, False, True]


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


def test_snapshot_that_fills_its_file_is_sound(path: str) -> None:
    file = seal(path, *encoded(FIRST_CHAIN, b"1", b"2"))
    report = verify(path)
    assert (report.verdict, report.findings) == ("sound", ())
    assert report.generations[1] == Generation(file, 1, os.path.getsize(file), 2, 0, "whole")


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


def test_multi_set_with_an_invalid_list_of_keys_is_damage(path: str) -> None:
    header = Header(b"0" * 16, OFD).encode()
    data, _ = encoded(Header.decode(header)[1].chain, b"?", kind=record.MULTI_SET)
    put(path, header + data)
    assert told(verify(path)) == [(path, len(header), len(data))]


# -- how what follows damage is found


@pytest.mark.parametrize("more", [1, 2, 3])
def test_smallest_record_is_found_after_a_few_other_bytes(more: int, path: str) -> None:
    header = Header(b"0" * 16, OFD).encode()
    data, _ = record.encode(record.SET, b"", b"", 1, 2, 5)
    put(path, header + b"?" * more + data)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert scan.find_next(fd, LogPosition(len(header), 3)) == LogPosition(len(header) + more, 5)
    finally:
        os.close(fd)


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


def test_record_whose_kind_is_no_letter_is_not_found_after_damage(path: str) -> None:
    data, _ = record.encode(ord("1"), b"", b"", 1, 2, 5)
    assert found_behind(path, b"", data) is None
    data, _ = record.encode(ord("q"), b"", b"", 1, 2, 5)
    assert found_behind(path, b"", data) == LogPosition(1, 5)
