"""Bytes to records and back, up to the limits."""

from __future__ import annotations

import struct
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given, strategies as st

from fscoord import CorruptLogError, FileStore, LimitExceededError
from fscoord._log.format import record
from fscoord._log.format.control_records import Session, decode_control, encode_death
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import HEADER_MAX, HEADER_SIZE, MAGIC, Header, LogIdentity, Provenance, provenance_of
from fscoord._log.format.record import MalformedRecord, decode, encode
from fscoord.inspect import verify

KINDS = sorted(record.NAMES.keys() - {record.VOID})
CHAIN = 0x1234_5678

records = st.tuples(
    st.sampled_from(KINDS),
    st.binary(max_size=40),
    st.binary(max_size=300),
    st.integers(1, 2**32 - 1),
    st.integers(0, 2**64 - 1),
)


def encode_all(given: list[record.Record]) -> tuple[bytes, int, list[int]]:
    """The records as bytes, the last checksum, and where each ends."""
    data, chain, ends = b"", CHAIN, []
    for kind, key, value, writer, time in given:
        piece, chain = encode(kind, key, value, writer, time, chain)
        data += piece
        ends.append(len(data))
    return data, chain, ends


def is_data(found: record.Record) -> bool:
    return found[0] in record.DATA_KINDS


@given(st.lists(records, max_size=5))
def test_records_survive_encoding_and_decoding(written: list[record.Record]) -> None:
    data, chain, _ = encode_all(written)
    found, others, used, last, missing = decode(data, CHAIN)
    assert found == list(filter(is_data, written))
    assert others == [record for record in written if not is_data(record)]
    assert (used, last, missing) == (len(data), chain, 0)


@given(st.lists(records, min_size=1, max_size=3), st.data())
def test_records_that_are_complete_are_decoded_from_any_prefix_of_the_data(
    written: list[record.Record], draw: st.DataObject
) -> None:
    data, _, ends = encode_all(written)
    size = draw.draw(st.integers(0, len(data)))
    found, others, used, chain, missing = decode(data[:size], CHAIN)
    whole = [end for end in ends if end <= size]
    assert len(found) + len(others) == len(whole)
    assert used == (whole[-1] if whole else 0)
    assert missing >= 0
    assert (missing == 0) == (size == used)
    assert missing <= min(end for end in ends if end >= size) - size  # never more than the record has
    rest = decode(data[used:], chain)
    assert rest[2] == len(data) - used


@given(st.lists(records, min_size=1, max_size=3), st.data())
def test_records_are_not_decoded_with_another_chain(written: list[record.Record], draw: st.DataObject) -> None:
    data, _, _ = encode_all(written)
    other = draw.draw(st.integers(0, 2**32 - 1).filter(lambda chain: chain != CHAIN))
    assert decode(data, other) == ([], [], 0, other, -1)


def prefix(length: int, chain: int = CHAIN) -> bytes:
    """The first bytes of a record, sound whatever they promise."""
    return struct.pack("<II", length, (length * 2_654_435_761 + chain) % 2**32)


def record_of(rest: bytes, end: bytes = b"") -> bytes:
    """A record whose checksum is right, whatever it holds between its prefix and its end."""
    front = prefix(8 + len(rest) + 6) + rest
    return front + (end or b"\n" + struct.pack("<I", crc32(front, CHAIN)) + b"\n")


def head(key_size: int, kind: bytes) -> bytes:
    return struct.pack("<IQH", 1, 2, key_size) + kind


@pytest.mark.parametrize(
    "rest",
    [
        head(0, b"V"),
        head(0, b"\0"),
        head(1, b"S"),
        head(65535, b"S") + b"k",
        head(1025, b"S") + b"k" * 1030,
        head(0, b""),
    ],
    ids=["a void", "a zero for a kind", "no room for the key", "a key beyond the end", "a key too long", "no kind"],
)
def test_record_with_a_right_checksum_but_invalid_fields_is_rejected(rest: bytes) -> None:
    assert decode(record_of(rest), CHAIN)[2:] == (0, CHAIN, -1)


@pytest.mark.parametrize("place", [-1, -6])
def test_record_ends_in_newlines_around_its_checksum(place: int) -> None:
    data = bytearray(record_of(head(0, b"S")))
    assert decode(bytes(data), CHAIN)[4] == 0
    data[place] ^= 1
    assert decode(bytes(data), CHAIN)[2:] == (0, CHAIN, -1)


@pytest.mark.parametrize("length", [0, 28, record.RECORD_MAX + 1, 2**31, 2**32 - 1])
def test_length_outside_the_limits_of_a_record_is_rejected(length: int) -> None:
    assert decode(prefix(length) + bytes(100), CHAIN)[4] == -1
    assert record.record_length(prefix(length), CHAIN) == -1


@pytest.mark.parametrize("length", [29, record.RECORD_MAX])
def test_length_within_the_limits_of_a_record_is_accepted_before_its_data(length: int) -> None:
    assert decode(prefix(length), CHAIN) == ([], [], 0, CHAIN, length - 8)
    assert record.record_length(prefix(length), CHAIN) == length


def test_length_check_differs_by_many_bits_for_any_two_flipped() -> None:
    """One bit of a length changes at least three of its check, so that no two flipped bits go unnoticed in a prefix."""
    for length in (29, 30, 61, 511, 512, 65535, 65536, 1 << 26, record.RECORD_MAX):
        for bit in range(28):
            flipped = length ^ 1 << bit
            if not record.RECORD_MIN <= flipped <= record.RECORD_MAX:
                continue
            for chain in (0, CHAIN, 2**32 - 1):
                one, other = prefix(length, chain), prefix(flipped, chain)
                changed = int.from_bytes(one[4:], "little") ^ int.from_bytes(other[4:], "little")
                assert changed.bit_count() > 1, (length, bit, chain)


@given(st.lists(records, min_size=1, max_size=4), st.data())
def test_chain_follows_from_a_prefix_alone(written: list[record.Record], draw: st.DataObject) -> None:
    data, chain, ends = encode_all(written)
    number = draw.draw(st.integers(0, len(ends) - 1))
    start = [0, *ends][number]
    before = record.decode(data[:start], CHAIN)[3]
    assert record.chain_at_end(data) == chain
    is_letter = chr(written[number][0]).isalpha()
    assert record.chain_if_sound(data, start) == (before if is_letter else None)
    assert record.chain_if_sound(data[:-1], start) == (None if number == len(ends) - 1 else before)


def test_chain_depends_on_every_record_before() -> None:
    """A checksum that directly follows the bytes that it covers would leave the same chain after any of them."""
    chains = {encode(record.SET, b"k", b"%d" % number, 1, 2, CHAIN)[1] for number in range(1000)}
    chains |= {encode(record.SET, b"k", b"v", 1, 2, chain)[1] for chain in range(1000)}
    assert len(chains) == 2000


@given(st.lists(records, min_size=1, max_size=4))
def test_chain_is_the_crc_of_all_bytes_in_order(written: list[record.Record]) -> None:
    data, chain, _ = encode_all(written)
    assert chain == crc32(data, CHAIN)


def test_first_record_of_a_kind_is_found_by_its_end() -> None:
    data, _, ends = encode_all([(kind, b"k", b"v" * 9, 1, 2) for kind in b"SZSZ"])
    assert record.end_of_first(data, record.SEAL) == ends[1]
    assert record.end_of_first(data, record.SET) == ends[0]


def test_end_of_a_record_is_not_one_bit_away_from_zero() -> None:
    """So that one flipped bit can't let a complete record look like one whose end was never written."""
    assert record.NEWLINE.bit_count() > 1
    assert len(record.NAMES) == len(set(record.NAMES.values()))


def test_record_fits_the_largest_key_and_value_and_the_largest_multi_set() -> None:
    assert record.RECORD_MAX >= record.RECORD_MIN + record.KEY_MAX + record.VALUE_MAX
    assert record.encode_pairs([(b"k" * record.KEY_MAX, b"v" * (record.VALUE_MAX - record.KEY_MAX))])
    for size, decoded in ((record.KEY_MAX, 1), (record.KEY_MAX + 1, 0)):
        data, _ = record.encode(record.SET, b"k" * size, b"", 1, 2, 3)
        records, _, _, _, missing = record.decode(data, 3)
        assert (len(records), missing) == (decoded, decoded - 1)


def test_multi_set_too_large_for_a_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are limited together, but their number is not, and each takes 6 bytes more."""
    monkeypatch.setattr(record, "RECORD_MAX", record.RECORD_MIN + 600)
    assert len(record.encode_pairs([(b"", b"")] * 100)) == 600
    with pytest.raises(LimitExceededError, match="101 keys and values are too many"):
        record.encode_pairs([(b"", b"")] * 101)


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=6))
def test_pairs_survive_encoding_and_decoding(pairs: list[tuple[bytes, bytes]]) -> None:
    assert list(record.decode_pairs(record.encode_pairs(pairs))) == pairs


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), min_size=1, max_size=3), st.data())
def test_pairs_that_are_cut_short_are_an_error_or_fewer(pairs: list[tuple[bytes, bytes]], draw: st.DataObject) -> None:
    data = record.encode_pairs(pairs)
    cut = data[: draw.draw(st.integers(0, len(data) - 1))]
    ends = [len(record.encode_pairs(pairs[:count])) for count in range(len(pairs))]
    if len(cut) in ends:
        assert list(record.decode_pairs(cut)) == pairs[: ends.index(len(cut))]
    else:
        with pytest.raises(MalformedRecord, match="cut short"):
            list(record.decode_pairs(cut))


@pytest.mark.parametrize(("key", "value", "is_fine"), [(1024, 1, True), (1025, 1, False)])
def test_pairs_keep_the_limits_of_keys_and_values(key: int, value: int, is_fine: bool) -> None:
    data = record.encode_pairs([(b"k", b"v"), (b"k" * key, b"v" * value)])
    if is_fine:
        assert len(list(record.decode_pairs(data))) == 2
    else:
        with pytest.raises(MalformedRecord, match=f"a key of {key} bytes"):
            list(record.decode_pairs(data))


def test_pairs_keep_the_limit_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "VALUE_MAX", 10)
    assert list(record.decode_pairs(record.encode_pairs([(b"k", b"v" * 10)])))
    with pytest.raises(MalformedRecord, match="to 11 bytes"):
        list(record.decode_pairs(record.encode_pairs([(b"k", b"v" * 11)])))


def test_pairs_that_end_with_an_empty_one_are_decoded() -> None:
    for pairs in ([(b"", b"")], [(b"k", b"v"), (b"", b"")]):
        assert list(record.decode_pairs(record.encode_pairs(pairs))) == pairs


@pytest.mark.parametrize(("key", "value"), [(b"", b""), (b"key", b""), (b"", b"value"), (b"key", b"value" * 99)])
def test_record_with_a_wrong_checksum_is_described_without_its_value(key: bytes, value: bytes) -> None:
    data, _ = encode(record.SET, key, value, 7, 9, CHAIN)
    assert record.decode_unverified(data) == (record.SET, key, len(value), 7, 9)


def test_key_that_exceeds_its_unverified_record_is_cut() -> None:
    assert record.decode_unverified(record_of(head(65535, b"S") + b"key")) == (record.SET, b"key", 0, 1, 2)


# -- voids -------------------------------------------------------------------------------------------------------------


def test_void_is_decoded_only_from_its_exact_bytes() -> None:
    data, chain = record.encode_void(5000, 7, 9, CHAIN)
    assert len(data) == record.VOID_SIZE == 37
    assert record.decode_void(data + b"more", CHAIN) == (5000, chain, 7, 9)
    assert record.decode_void(data, CHAIN ^ 1) is None
    assert record.decode_void(data[:-1], CHAIN) is None
    set_like, _ = encode(record.SET, b"", bytes(8), 7, 9, CHAIN)
    with_key, _ = encode(record.VOID, b"key", bytes(5), 7, 9, CHAIN)
    assert len(set_like) == len(with_key) == len(data)
    assert record.decode_void(set_like, CHAIN) is None
    assert record.decode_void(with_key, CHAIN) is None


def test_torn_void_is_a_proper_prefix_of_a_void() -> None:
    data, _ = record.encode_void(5000, 7, 9, CHAIN)
    for size in range(1, len(data)):
        assert record.is_torn_void(data[:size])
        assert record.is_torn_void(data[:size].ljust(len(data), b"\0"))
    assert not record.is_torn_void(data)
    for other in (b"\x24", b"\x25\1", b"\0\x25", b"x" * 36, bytes(37)):
        assert not record.is_torn_void(other)


# -- sessions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "session",
    [
        Session("host", 1),
        Session("h\u00f6st\udcff", 2**32 - 1, 2**64 - 1, b"b" * 16, b"a" * 16, 2**63 - 1, "lab\u00e9l"),
        Session("", 0, rank=0),
        Session("host", 1, pid_space=2**64 - 1, time_space=3),
    ],
)
def test_session_survives_encoding_and_decoding(session: Session) -> None:
    assert Session.decode(session.encode()) == session
    assert Session.decode(session.encode() + b"of a later version") == session


def test_session_names_that_are_too_long_are_cut() -> None:
    session = Session.decode(Session("h" * 300, 1, label="l" * 300).encode())
    assert (session.host, session.label) == ("h" * 255, "l" * 255)
    assert str(session) == "h" * 255 + ":1"


def test_session_that_is_cut_short_is_an_error() -> None:
    data = Session("host", 1, label="label").encode()
    for size in range(len(data)):
        with pytest.raises(MalformedRecord, match="cut short"):
            Session.decode(data[:size])


# -- headers -----------------------------------------------------------------------------------------------------------

HEADERS = [
    Header(b"i" * 16, 1),
    Header(
        b"i" * 16,
        3,
        True,
        7,
        b"a" * 16,
        2**64 - 1,
        3,
        2**64 - 2,
        run_ids=((b"job", 3), (b"", -1), (b"x" * 300, -(2**63))),
    ),
]


@pytest.mark.parametrize("header", HEADERS)
def test_header_survives_encoding_and_decoding(header: Header) -> None:
    data = header.encode()
    assert Header.decode(data + b"records") == (header, (len(data), crc32(data[:-4])))


@pytest.mark.parametrize("header", HEADERS)
def test_header_with_a_flipped_bit_is_rejected(header: Header) -> None:
    data = header.encode()
    for bit in range(8 * len(data)):
        flipped = bytearray(data + bytes(100))
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedRecord, match=r"not a log of fscoord|version|size|checksum"):
            Header.decode(bytes(flipped))


@pytest.mark.parametrize("header", HEADERS)
def test_header_prefix_shows_how_much_is_missing(header: Header) -> None:
    data = header.encode()
    for size in range(len(data)):
        missing = Header.missing(data[:size])
        assert 0 < missing <= len(data) - size
        with pytest.raises(MalformedRecord, match=r"not a log of fscoord|incomplete"):
            Header.decode(data[:size])
        assert Header.is_partial(data[:size]) == (size == 0 or 8 <= size < 114)
    assert Header.missing(data) == 0
    assert not Header.is_partial(data)


def test_header_of_excessive_size_is_read_up_to_the_maximum_only() -> None:
    data = bytearray(HEADERS[0].encode())
    data[12:16] = b"\xff" * 4
    assert Header.missing(bytes(data)) == HEADER_MAX - len(data)


def with_checksum(data: bytes) -> bytes:
    return data + struct.pack("<I", crc32(data))


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (0, "written by a pre-release: remove it"),
        (1, "written by a pre-release: remove it"),
        (2, "written by a pre-release: remove it"),
        (4, "upgrade it"),
        (0x103, "upgrade it"),
        (0x300, "upgrade it"),
    ],
)
def test_header_of_another_version_is_refused_with_the_remedy(version: int, says: str) -> None:
    data = bytearray(HEADERS[0].encode()[:-4])
    data[8:10] = struct.pack("<H", version)
    with pytest.raises(MalformedRecord, match=rf"format version {version} .*{says}|format version {version}, .*{says}"):
        Header.decode(with_checksum(bytes(data)))


def test_header_of_another_file_is_refused() -> None:
    with pytest.raises(MalformedRecord, match="not a log of fscoord"):
        Header.decode(b"another file" + bytes(100))


@pytest.mark.parametrize("place", [*range(17, 20), *range(92, 108)])
def test_header_with_reserved_bytes_that_are_used_is_refused(place: int) -> None:
    """Another version may use them for what must not be ignored."""
    data = bytearray(HEADERS[0].encode()[:-4])
    assert data[place] == 0
    data[place] = 1
    with pytest.raises(MalformedRecord, match="new fields need a newer fscoord"):
        Header.decode(with_checksum(bytes(data)))


def test_header_with_other_flags_or_limits_is_refused() -> None:
    for place in (10, 84, 88):
        data = bytearray(HEADERS[0].encode()[:-4])
        data[place] ^= 2
        with pytest.raises(MalformedRecord, match="need a newer fscoord"):
            Header.decode(with_checksum(bytes(data)))


def test_header_may_be_longer_in_a_later_version() -> None:
    data = bytearray(HEADERS[1].encode()[:-4] + b"more")
    data[12:16] = struct.pack("<I", len(data) + 4)
    assert Header.decode(with_checksum(bytes(data)))[0] == HEADERS[1]


@pytest.mark.parametrize("size", [0, 4, 106, 108, 110, 112, 113])
def test_header_shorter_than_the_minimum_is_refused_despite_its_checksum(size: int) -> None:
    data = bytearray(HEADERS[0].encode())
    data[12:16] = struct.pack("<I", size)
    if size >= 4:
        data[size - 4 : size] = struct.pack("<I", crc32(data[: size - 4]))
    with pytest.raises(MalformedRecord, match=r"its size is damaged|version|not a log of fscoord"):
        Header.decode(bytes(data))


def test_runs_that_are_cut_short_are_an_error() -> None:
    for count, runs in ((2, b"\3\0" + bytes(8) + b"job"), (1, b"\4\0" + bytes(8) + b"job"), (1, bytes(9))):
        data = bytearray(HEADERS[0].encode()[:-4] + runs)
        data[12:16] = struct.pack("<I", len(data) + 4)
        data[108:110] = struct.pack("<H", count)
        with pytest.raises(MalformedRecord, match="list of run ids is cut short"):
            Header.decode(bytes(data) + struct.pack("<I", crc32(data)))


@pytest.mark.parametrize(("rank", "written"), [(None, -1), (0, 0), (7, 7)])
def test_session_without_a_rank_is_encoded_with_rank_minus_one(rank: int | None, written: int) -> None:
    assert struct.unpack_from("<q", Session("host", 1, rank=rank).encode(), 4 + 8 + 16 + 16) == (written,)


def test_header_has_zeros_in_its_reserved_bytes() -> None:
    """docs/contributors/format.md: behind the kind of lock."""
    assert Header(b"i" * 16, 7).encode()[16:20] == b"\7\0\0\0"


def test_header_size_is_known_from_its_first_part() -> None:
    data = Header(b"i" * 16, 1, run_ids=((b"job", 3),)).encode()
    assert Header.missing(data[:HEADER_SIZE]) == len(data) - HEADER_SIZE
    assert Header.missing(data) == 0


def test_header_version_is_checked_before_other_fields() -> None:
    with pytest.raises(MalformedRecord, match="format version 4"):
        Header.decode(MAGIC + b"\4\0")


def test_header_keeps_a_last_run_without_a_name() -> None:
    header = Header(b"i" * 16, 1, run_ids=((b"job", 3), (b"", 5)))
    assert Header.decode(header.encode())[0] == header


# The content of records


SESSION = Session("host", 7)
NEXT = GenerationRef(1, b"n" * 16, 500, 9, b"log.1.0123456789ab")
LATER = GenerationRef(5, b"n" * 16, 0, 0, b"log.5.0123456789ab")


def meaning(kind: str, value: bytes = b"", writer: int = 1, generation: int = 0, sealed: bool = False) -> object:
    return decode_control((ord(kind), b"", value, writer, 9), generation, is_sealed=sealed)


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


def test_forward_in_a_later_generation_is_malformed() -> None:
    with pytest.raises(MalformedRecord, match="only generation 0"):
        meaning("f", LATER.forward(), generation=2, sealed=True)


@pytest.mark.parametrize("kind", "SsXZEM")
def test_seal_is_followed_by_a_forward_only(kind: str) -> None:
    with pytest.raises(MalformedRecord, match="after the seal"):
        meaning(kind, sealed=True)


# Which log a file belongs to: the table of docs/contributors/format.md


LINEAGE = b"l" * 16
IN_GENERATION_3 = Header(b"i" * 16, 1, generation=3, lineage=LINEAGE, root_inode=10, inode=13)


@pytest.mark.parametrize(
    ("root", "file", "expected"),
    [
        (10, 13, Provenance.OWN),
        (20, 23, Provenance.OTHER_ROOT),
        (20, 13, Provenance.OTHER_ROOT),
        (10, 23, Provenance.COPY),
        (0, 0, Provenance.OWN),
        (0, 23, Provenance.COPY),
        (20, 0, Provenance.OTHER_ROOT),
    ],
)
def test_provenance_follows_from_both_inode_numbers(root: int, file: int, expected: Provenance) -> None:
    assert provenance_of(IN_GENERATION_3, root, file) is expected


@pytest.mark.parametrize("numbers", [(1, 2), (10, 13), (0, 0)])
def test_provenance_without_lasting_inode_numbers_is_own(numbers: tuple[int, int]) -> None:
    assert provenance_of(IN_GENERATION_3._replace(root_inode=0, inode=0), *numbers) is Provenance.OWN


def test_provenance_of_generation_0_is_own_or_copy() -> None:
    first = IN_GENERATION_3._replace(generation=0, inode=10)
    assert provenance_of(first, 10, 10) is Provenance.OWN
    assert provenance_of(first, 20, 20) is Provenance.COPY


@pytest.mark.parametrize(
    ("header", "inode", "owned"),
    [
        (IN_GENERATION_3, 13, True),
        (IN_GENERATION_3, 14, False),
        (IN_GENERATION_3._replace(lineage=b"x" * 16), 13, False),
        (IN_GENERATION_3._replace(root_inode=11), 13, False),
        (IN_GENERATION_3._replace(inode=14), 13, False),
        (IN_GENERATION_3._replace(generation=99), 13, True),
    ],
)
def test_identity_owns_a_file_that_names_it_in_every_field(header: Header, inode: int, owned: bool) -> None:
    assert LogIdentity(LINEAGE, 10).owns(header, inode) is owned


def test_identity_owns_nothing_without_lasting_inode_numbers() -> None:
    assert not LogIdentity(LINEAGE, 0).owns(IN_GENERATION_3._replace(root_inode=0), 13)
    assert not LogIdentity(LINEAGE, 10).owns(IN_GENERATION_3._replace(inode=0), 0)
