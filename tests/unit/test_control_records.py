"""The content of records with right checksums: opening a log and `fscoord verify` agree on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.internals import log_of

from fscoord import CorruptLogError, FileStore
from fscoord._log.format import record
from fscoord._log.format.control_records import Session, decode_control, encode_death
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import Header
from fscoord._log.format.record import MalformedRecord
from fscoord.inspect import verify

SESSION = Session("host", 7)
NEXT = GenerationRef(1, b"n" * 16, 500, 9, b"log.1.0123456789ab")
LATER = GenerationRef(5, b"n" * 16, 0, 0, b"log.5.0123456789ab")


def meaning(kind: str, value: bytes = b"", writer: int = 1, generation: int = 0, sealed: bool = False) -> object:
    return decode_control((ord(kind), b"", value, writer, 9), generation, is_sealed=sealed)


def test_record_of_each_kind_has_its_meaning() -> None:
    assert meaning("s", SESSION.encode()) == SESSION._replace(since_ns=9)
    assert meaning("X", encode_death(3, bytes(16))) == 3
    assert meaning("Z", NEXT.seal()) == NEXT
    assert meaning("f", LATER.forward(), sealed=True) == LATER
    for kind in "SICADPOMblE":
        assert meaning(kind) is None
    assert meaning("q") is None, "a later version's, which may be ignored"


MALFORMED = {
    "a session without a number": ("s", SESSION.encode(), 0),
    "a session cut short": ("s", SESSION.encode()[:-1], 1),
    "a session whose label is cut short": ("s", Session("h", 1, label="long").encode()[:-1], 1),
    "the death of session 0": ("X", encode_death(0, bytes(16)), 1),
    "a death cut short": ("X", b"\1\0\0\0", 1),
    "a seal cut short": ("Z", NEXT.seal()[:30], 1),
    "a seal that skips a generation": ("Z", NEXT._replace(generation=2, name=b"log.2.0123456789ab").seal(), 1),
    "a way without a seal": ("f", LATER.forward(), 1),
    "pairs cut short": ("M", b"\1", 1),
    "a key in a multi-set that is too long": ("M", record.encode_pairs([(b"k" * 1025, b"v")]), 1),
    "a capital letter of a later version": ("Q", b"", 1),
    "an arrival": ("B", b"", 1),
    "no letter": ("1", b"", 1),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_record_is_refused_with_words(name: str) -> None:
    with pytest.raises(MalformedRecord) as caught:
        meaning(*MALFORMED[name])
    assert str(caught.value)


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("later", [False, True])
def test_malformed_record_is_damage_to_openers_and_to_verify(name: str, later: bool, tmp_path: Path) -> None:
    kind, value, writer = MALFORMED[name]
    path = tmp_path / "log"
    data, chain = begin()
    if later:
        path.write_bytes(data)
        path.chmod(0o600)
        early = FileStore(path, read_only=True)
        assert early.get("k") == b"v"
    one, _ = record.encode(ord(kind), b"", value, writer, 9, chain)
    path.write_bytes(data + one)
    path.chmod(0o600)
    assert verify(path).verdict == "damaged"
    calls = [lambda: FileStore(path, read_only=True), lambda: FileStore(path)]
    if later:
        calls.append(lambda: early.get("k"))
    for call in calls:
        with pytest.raises(CorruptLogError):
            call()
    if later:
        early.close()


def begin(generation: int = 0) -> tuple[bytes, int]:
    """A log with a session and a key: its bytes, and the chain after them."""
    data = Header(bytes([65 + generation]) * 16, 1, generation=generation).encode()
    chain = Header.decode(data)[1].chain
    for kind, key, value in (("s", b"", SESSION.encode()), ("S", b"k", b"v")):
        one, chain = record.encode(ord(kind), key, value, 1, 5, chain)
        data += one
    return data, chain


@pytest.mark.parametrize("late", [("S", b"late", b"1"), ("O", b"k", b""), ("X", b"", encode_death(1, bytes(16)))])
@pytest.mark.parametrize("forward", [False, True])
def test_record_after_a_seal_counts_for_nobody(late: tuple[str, bytes, bytes], forward: bool, tmp_path: Path) -> None:
    """A handle that had read the seal goes on in the next file; one that reads both at once must not see more."""
    path = tmp_path / "log"
    following, chain_there = begin(1)
    name = b"log.1.0123456789ab"
    path.with_name(name.decode()).write_bytes(following)
    path.with_name(name.decode()).chmod(0o600)
    data, chain = begin()
    seal = GenerationRef(1, b"B" * 16, len(following), chain_there, name)
    path.write_bytes(data)
    path.chmod(0o600)
    early = FileStore(path, read_only=True)
    one, chain = record.encode(record.SEAL, b"", seal.seal(), 1, 6, chain)
    data += one
    path.write_bytes(data)
    early.get("k")
    one, chain = record.encode(ord(late[0]), late[1], late[2], 1, 7, chain)
    data += one
    if forward:
        data += record.encode(record.FORWARD, b"", seal.forward(), 1, 8, chain)[0]
    path.write_bytes(data)
    with early, FileStore(path, read_only=True) as fresh, FileStore(path) as writer:
        for store in (early, fresh, writer):
            assert store.list_keys() == ["k"]
            assert store.get("k") == b"v"
            assert not log_of(store).deaths
    assert verify(path).verdict == "damaged", "a writer was told that its record counts"


def test_forward_in_a_later_generation_is_malformed() -> None:
    with pytest.raises(MalformedRecord, match="only generation 0"):
        meaning("f", LATER.forward(), generation=2, sealed=True)


@pytest.mark.parametrize("kind", "SsXZEM")
def test_seal_is_followed_by_a_forward_only(kind: str) -> None:
    with pytest.raises(MalformedRecord, match="after the seal"):
        meaning(kind, sealed=True)
