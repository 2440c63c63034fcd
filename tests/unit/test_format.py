"""docs/contributors/format.md, and logs of its version 3, readable by fscoord and by a reader written from the page."""

from __future__ import annotations

import re
import runpy
import shutil
import struct
import zlib
from functools import partial
from pathlib import Path

import pytest
from support.plain_reader import Log, Refused, read_log, read_newest

from fscoord import CorruptLogError, FileStore, StaleRunError, StoreError
from fscoord.inspect import dump, verify

DATA = Path(__file__).parent.parent / "data"
GOLDEN = DATA / "v3"
GENERATIONS = DATA / "v3-generations"
PRE_RELEASES = [DATA / version / "torn.log" for version in ("v1", "v2")]
NEWEST = {b"a": b"1", b"behind": b"the snapshot"}

EVERY_KIND = {
    b"text": b"bye",
    b"\xff\0\n": bytes(range(256)),
    b"": b"",
    b"counter": b"-1",
    b"lock": b"yours",
    b"list": b"one two ",
    b"a": b"",
    b"b": bytes(7),
}
VALUES = {
    "every-kind": EVERY_KIND,
    "torn": {b"writers": b"2", b"kept": b"value"},
    "voided": {b"writers": b"5", b"one": b"1", b"two": b"2", b"three": b"3"},
    "durable": {b"writers": b"5", b"one": b"1", b"two": b"two", b"three": b"three"},
}
KINDS = {
    "every-kind": "ssbSSSIICCAAMSPDPPPOPOlF",
    "torn": "sISsI",
    "voided": "sISsIVsISsIVsIS",
    "durable": "sISsIVsISsIVsIS",
}
NAMES = {
    "S": "set", "I": "add", "C": "compare_set", "A": "append", "M": "multi_set", "D": "delete", "P": "queue_push",
    "O": "queue_pop", "V": "void", "s": "session", "b": "bell", "l": "leave", "E": "finished", "F": "failure",
}  # fmt: skip

golden = pytest.mark.parametrize("name", VALUES)


def plain(name: str) -> Log:
    return read_log((GOLDEN / f"{name}.log").read_bytes())


@golden
def test_plain_reader_finds_the_golden_contents(name: str) -> None:
    log = plain(name)
    assert log.ends == ("torn" if name == "torn" else "whole")
    assert "".join(kind for _, kind, *_ in log.records) == KINDS[name]
    assert log.values == VALUES[name]
    assert log.queues == ({b"queue": [b"second", b"\0"]} if name == "every-kind" else {})
    assert log.header["durable"] == (name == "durable")
    assert (log.header["lock"], log.header["generation"], log.header["run ids"]) == (1, 0, [])
    assert log.header["lineage"] == log.header["id"]
    assert log.header["inode"] == log.header["root inode"] == 0, "or a checkout would be a copy"


def test_plain_reader_finds_the_writer_of_each_record() -> None:
    log = plain("every-kind")
    process = {"pid": 4242, "start": 123456, "boot": bytes(range(16)), "host": b"node1"}
    process |= {"pid space": 4026531836, "time space": 4026531834, "world size": 3, "replaces": 0}
    assert log.sessions == {1: process | {"rank": 0, "label": b"first"}, 2: process | {"rank": 1, "label": b""}}
    assert log.left == {2}
    assert log.failures == [log.sessions[1] | {"previous": False, "reason": b"KeyError"}]
    times = [time for *_, time in log.records]
    assert times == sorted(times)
    signed = [(writer, time) for *_, writer, time in log.records]
    assert len(set(signed)) == len(signed), "no two records of a session have the same time"
    assert times[0] == log.header["created"] == 1_767_225_600_000_000_000


@golden
def test_file_store_reads_every_golden_log(name: str) -> None:
    with FileStore(GOLDEN / f"{name}.log", read_only=True, timeout=0) as store:
        keys = store.list_keys()
        assert {key.encode("utf-8", "surrogateescape"): store.get(key) for key in keys} == VALUES[name]
        assert store.queue_len("queue") == (2 if name == "every-kind" else 0)
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(f"{name}.log" for name in VALUES)


@golden
def test_file_store_appends_to_every_golden_log(name: str, tmp_path: Path) -> None:
    path = Path(shutil.copy(GOLDEN / f"{name}.log", tmp_path))
    path.chmod(0o600)
    with FileStore(path, timeout=60) as store:
        store.set("new", "value")
    data = path.read_bytes()
    assert data.startswith((GOLDEN / path.name).read_bytes())
    log = read_log(data)
    assert log.ends == "whole"
    assert log.values == VALUES[name] | {b"new": b"value"}
    assert "".join(kind for _, kind, *_ in log.records) == KINDS[name] + ("VsS" if name == "torn" else "sS")


@golden
def test_dump_agrees_with_the_plain_reader(name: str) -> None:
    entries = list(dump(GOLDEN / f"{name}.log"))
    found = [(entry.offset, entry.kind, entry.key, entry.writer, entry.time) for entry in entries]
    assert found == [
        (offset, NAMES[kind], key, writer, time / 1e9) for offset, kind, key, _, writer, time in plain(name).records
    ]


def test_operations_still_produce_the_golden_bytes(tmp_path: Path) -> None:
    runpy.run_path(str(DATA / "make_logs.py"))["make_logs"](tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in GOLDEN.iterdir()
    }


# -- a log of several generations, and of two runs ---------------------------------------------------------------------


def test_plain_reader_follows_a_golden_log_to_its_newest_generation() -> None:
    first, newest = (
        read_log((GENERATIONS / "generations.log").read_bytes()),
        read_newest(GENERATIONS / "generations.log"),
    )
    assert "".join(kind for _, kind, *_ in first.records) == "sSZff"
    assert "".join(kind for _, kind, *_ in newest.records) == "sMPS"
    assert (first.header["generation"], first.header["run ids"]) == (0, [(b"job", 3)])
    assert (newest.header["generation"], newest.header["run ids"]) == (3, [(b"job", 4)])
    assert newest.header["lineage"] == first.header["lineage"] == first.header["id"]
    assert (newest.ends, newest.values, newest.queues) == ("whole", NEWEST, {b"queue": [b"first"]})
    assert {number: session["rank"] for number, session in newest.sessions.items()} == {1: 2}


def test_file_store_reads_a_golden_log_of_several_generations() -> None:
    with FileStore(GENERATIONS / "generations.log", read_only=True, timeout=0) as store:
        assert {key.encode(): store.get(key) for key in store.list_keys()} == NEWEST
        assert store.queue_len("queue") == 1
    with pytest.raises(StaleRunError):
        FileStore(GENERATIONS / "generations.log", read_only=True, run_id=("job", 3))


def test_file_store_appends_to_a_golden_log_of_several_generations(tmp_path: Path) -> None:
    for golden in GENERATIONS.iterdir():
        Path(shutil.copy(golden, tmp_path)).chmod(0o600)
    path = tmp_path / "generations.log"
    with FileStore(path, run_id=("job", 4), timeout=0) as store:
        store.set("new", "value")
    for golden in GENERATIONS.iterdir():
        assert (tmp_path / golden.name).read_bytes().startswith(golden.read_bytes())
    assert read_newest(path).values == NEWEST | {b"new": b"value"}


def test_generations_still_have_the_golden_bytes(tmp_path: Path) -> None:
    runpy.run_path(str(DATA / "make_logs.py"))["make_generations"](tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in GENERATIONS.iterdir()
    }


# -- what a reader of version 3 does with what it does not know --------------------------------------------------------


def header_bytes(
    version: int = 3,
    flags: int = 0,
    limits: tuple[int, int] = (1024, 1 << 26),
    reserved: tuple[bytes, bytes] = (b"", b""),
    more: bytes = b"",
) -> bytes:
    runs = struct.pack("<Hq", 3, 2) + b"job"
    start = struct.pack("<8sHHI", b"fscoord\n", version, flags, 110 + len(runs) + len(more) + 4)
    named = (b"i" * 16, b"i" * 16, 0, 0, 0)
    rest = struct.pack("<B3sII16s16sQQQII16sH", 1, reserved[0], 0, 0, *named, *limits, reserved[1], 1)
    data = start + rest + runs + more
    return data + struct.pack("<I", zlib.crc32(data))


def record_bytes(kind: str, key: bytes, value: bytes, chain: int, writer: int = 1) -> bytes:
    length = 29 + len(key) + len(value)
    check = (length * 2_654_435_761 + chain) % 2**32
    data = struct.pack("<IIIQHB", length, check, writer, 0, len(key), ord(kind)) + key + value
    return data + b"\n" + struct.pack("<I", zlib.crc32(data, chain)) + b"\n"


def log_bytes(header: bytes, *records: tuple[str, bytes, bytes]) -> bytes:
    data, chain = header, int.from_bytes(header[-4:], "little")
    for kind, key, value in records:
        record = record_bytes(kind, key, value, chain)
        chain = zlib.crc32(record, chain)
        data += record
    return data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.touch(0o600)
    return path


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (header_bytes(version=2), "version 2 and was written by a pre-release: remove it"),
        (header_bytes(version=4), "version 4, .*upgrade"),
        (header_bytes(flags=2), "upgrade"),
        (header_bytes(flags=1 << 15), "upgrade"),
        (header_bytes(limits=(2048, 1 << 26)), "upgrade"),
        (header_bytes(limits=(1024, 1 << 27)), "upgrade"),
        (header_bytes(reserved=(b"\0\0\1", b"")), "upgrade"),
        (header_bytes(reserved=(b"", b"\1")), "upgrade"),
        (header_bytes(reserved=(b"", bytes(15) + b"\1")), "upgrade"),
        (header_bytes()[:-1] + b"\0", "checksum"),
        (header_bytes()[:-1], "incomplete"),
        (b"", "no writer has opened it yet"),
    ],
)
def test_header_with_another_meaning_is_refused_by_both_readers(header: bytes, reason: str, path: Path) -> None:
    path.write_bytes(header)
    with pytest.raises(StoreError, match=reason):
        FileStore(path, read_only=True)
    with pytest.raises(Refused):
        read_log(header)
    if header:
        with pytest.raises(CorruptLogError, match=reason) as caught:
            FileStore(path)
        assert caught.value.offset == 0
        assert path.read_bytes() == header


@pytest.mark.parametrize("version", [1, 2])
def test_log_of_a_pre_release_is_refused_with_the_remedy_and_not_changed(version: int, path: Path) -> None:
    data = PRE_RELEASES[version - 1].read_bytes()
    path.write_bytes(data)
    remedy = f"it has format version {version} and was written by a pre-release: remove it"
    for use in (FileStore, partial(FileStore, read_only=True), lambda path: list(dump(path))):
        with pytest.raises(CorruptLogError, match=remedy):
            use(path)
    report = verify(path)
    assert (report.verdict, [finding.message for finding in report.findings]) == ("damaged", [remedy])
    with pytest.raises(Refused, match="another version"):
        read_log(data)
    assert path.read_bytes() == data
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_unknown_small_letter_kinds_and_extra_bytes_are_ignored(path: Path) -> None:
    fixed = struct.pack("<IQ16s16sqQQIIHH", 1, 2, b"b" * 16, b"a" * 16, -1, 0, 0, 0, 0, 4, 2)
    session = fixed + b"hostlb" + b"what comes later"
    records = [("s", b"", session), ("S", b"k", b"v"), ("z", b"x", b"unknown"), ("S", b"l", b"w")]
    data = log_bytes(header_bytes(more=b"what comes later"), *records)
    path.write_bytes(data)
    log = read_log(data)
    assert log.values == {b"k": b"v", b"l": b"w"}
    assert log.header["run ids"] == [(b"job", 2)]
    assert log.sessions[1]["label"] == b"lb"
    with FileStore(path, timeout=0) as store:
        assert store.multi_get(["k", "l"]) == [b"v", b"w"]
        store.set("m", "x")
    assert read_log(path.read_bytes()).values == {b"k": b"v", b"l": b"w", b"m": b"x"}
    assert [entry.kind for entry in dump(path)][:4] == ["session", "set", "kind 122", "set"]


def test_changes_of_a_transaction_apply_in_their_order_for_both_readers(path: Path) -> None:
    def change(key: bytes, value: bytes | None) -> bytes:
        return struct.pack("<HI", len(key), 0xFFFFFFFF if value is None else len(value)) + key + (value or b"")

    removals = change(b"gone", None) + change(b"back", None) + change(b"back", b"2") + change(b"never there", None)
    before = [("S", b"gone", b"1"), ("P", b"gone", b"item"), ("S", b"back", b"1"), ("P", b"back", b"item")]
    data = log_bytes(header_bytes(), *before, ("T", b"", removals + change(b"new", b"")))
    path.write_bytes(data)
    log = read_log(data)
    assert (log.ends, log.values, log.queues) == ("whole", {b"back": b"2", b"new": b""}, {})
    with FileStore(path, timeout=0) as store:
        assert store.multi_get(["back", "new"]) == [b"2", b""]
        assert [store.queue_len(key) for key in ("gone", "back")] == [0, 0]
        assert store.num_keys() == 2


def test_transaction_of_a_store_is_read_by_the_plain_reader(path: Path) -> None:
    with FileStore(path, timeout=20) as store:
        store.set("gone", "1")
        store.queue_push("gone", "item")
        assert store.transact(compare={"gone": "1"}, set={"a": "1"}, add={"n": 2}, delete=["gone", "never there"])
    log = read_log(path.read_bytes())
    assert [kind for _, kind, *_ in log.records if kind.isupper()] == ["S", "P", "T"]
    assert (log.ends, log.values, log.queues) == ("whole", {b"a": b"1", b"n": b"2"}, {})


@pytest.mark.parametrize("kind", ["B", "Q", "1", "\xff"])
def test_unknown_capital_letter_kind_ends_the_readable_part(kind: str, path: Path) -> None:
    data = log_bytes(header_bytes(), ("S", b"k", b"v"), (kind, b"", b"?"), ("S", b"k", b"w"))
    path.write_bytes(data)
    assert (read_log(data).ends, read_log(data).values) == ("unknown", {b"k": b"v"})
    for read_only in (True, False):
        with pytest.raises(CorruptLogError, match=re.escape(f"kind {kind!r} needs a newer fscoord")):
            FileStore(path, read_only=read_only)
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("Z", b"x" * 33),
        ("M", b"\1"),
        ("M", struct.pack("<HI", 1, 1) + b"k"),
        ("M", struct.pack("<HI", 9, 0) + b"k"),
        ("s", b"short"),
        ("X", b"short"),
        ("F", b"\0"),
        ("F", b"\0\3\0abc"),
    ],
)
def test_value_that_breaks_the_rules_of_its_kind_is_damage(kind: str, value: bytes, path: Path) -> None:
    path.write_bytes(log_bytes(header_bytes(), ("S", b"k", b"v"), (kind, b"", value)))
    with pytest.raises(CorruptLogError, match="cut short"):
        FileStore(path)


SESSION = struct.pack("<IQ16s16sqQQIIHH", 1, 2, b"b" * 16, b"a" * 16, -1, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "value", "writer"), [("s", SESSION, 0), ("X", bytes(4) + b"a" * 16, 1)], ids=["session", "death"]
)
def test_session_number_below_1_is_damage(kind: str, value: bytes, writer: int, path: Path) -> None:
    header = header_bytes()
    data = header + record_bytes(kind, b"", value, int.from_bytes(header[-4:], "little"), writer)
    path.write_bytes(data)
    for use in (FileStore, partial(FileStore, read_only=True)):
        with pytest.raises(CorruptLogError, match="sessions are numbered from 1 on") as caught:
            use(path)
        assert caught.value.offset == len(header)
    assert verify(path).verdict == "damaged"
    assert path.read_bytes() == data
