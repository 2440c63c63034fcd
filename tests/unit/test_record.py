"""Bytes to records and back, and no further than the limits."""

from __future__ import annotations

import struct
from zlib import crc32

import pytest
from hypothesis import given, strategies as st

from fscoord import LimitExceededError
from fscoord._log import record
from fscoord._log.record import Header, Session, decode, encode

KINDS = sorted(record.NAMES.keys() - {record.VOID})
CHAIN = 0x1234_5678

records = st.tuples(
    st.sampled_from(KINDS),
    st.binary(max_size=40),
    st.binary(max_size=300),
    st.integers(0, 2**32 - 1),
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
def test_what_is_encoded_is_decoded(written: list[record.Record]) -> None:
    data, chain, _ = encode_all(written)
    found, others, used, last, missing = decode(data, CHAIN)
    assert found == list(filter(is_data, written))
    assert others == [record for record in written if not is_data(record)]
    assert (used, last, missing) == (len(data), chain, 0)


@given(st.lists(records, min_size=1, max_size=3), st.data())
def test_of_any_beginning_the_whole_records_are_decoded(written: list[record.Record], draw: st.DataObject) -> None:
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
def test_another_chain_decodes_nothing(written: list[record.Record], draw: st.DataObject) -> None:
    data, _, _ = encode_all(written)
    other = draw.draw(st.integers(0, 2**32 - 1).filter(lambda chain: chain != CHAIN))
    assert decode(data, other) == ([], [], 0, other, -1)


def frame(length: int, body: bytes) -> bytes:
    """A frame that is sound, whatever it promises."""
    start = struct.pack("<II", length, crc32(body, CHAIN))
    return start + struct.pack("<I", crc32(start, CHAIN))


def body(key_size: int = 0, rest: bytes = b"S") -> bytes:
    return struct.pack("<IQH", 1, 2, key_size) + rest


@pytest.mark.parametrize(
    "content",
    [
        body(0, b"V"),
        body(0, b"\0"),
        body(1, b"S"),
        body(65535, b"kS"),
        body()[:-1],
    ],
    ids=["a void", "a zero for a kind", "no room for the key", "a key beyond the end", "no kind"],
)
def test_a_sound_checksum_is_not_enough(content: bytes) -> None:
    assert decode(frame(len(content), content) + content, CHAIN)[2:] == (0, CHAIN, -1)


@pytest.mark.parametrize("length", [0, 14, record.BODY_MAX + 1, 2**31, 2**32 - 1])
def test_a_length_that_no_record_has_is_believed_no_more_than_a_wrong_checksum(length: int) -> None:
    assert decode(frame(length, b"") + bytes(100), CHAIN)[4] == -1
    assert record.frame_length(frame(length, b""), CHAIN) == -1


@pytest.mark.parametrize("length", [15, record.BODY_MAX])
def test_a_length_that_a_record_may_have_is_waited_for(length: int) -> None:
    assert decode(frame(length, b""), CHAIN) == ([], [], 0, CHAIN, length)
    assert record.frame_length(frame(length, b""), CHAIN) == length


def test_no_kind_is_one_bit_away_from_zero() -> None:
    """So that one flipped bit can't let a complete record look like one whose end was never written."""
    assert all(kind.bit_count() > 1 for kind in record.NAMES)
    assert len(record.NAMES) == len(set(record.NAMES.values()))


def test_the_largest_key_and_value_fit_and_so_does_the_largest_multi_set() -> None:
    assert record.BODY_MAX >= record.BODY_MIN + record.KEY_MAX + record.VALUE_MAX
    assert record.encode_pairs([(b"k" * record.KEY_MAX, b"v" * (record.VALUE_MAX - record.KEY_MAX))])


def test_a_multi_set_that_fits_into_no_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are limited together, but their number is not, and each takes 6 bytes more."""
    monkeypatch.setattr(record, "BODY_MAX", record.BODY_MIN + 600)
    assert len(record.encode_pairs([(b"", b"")] * 100)) == 600
    with pytest.raises(LimitExceededError, match="101 keys and values are too many"):
        record.encode_pairs([(b"", b"")] * 101)


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=6))
def test_pairs_come_back(pairs: list[tuple[bytes, bytes]]) -> None:
    assert record.decode_pairs(record.encode_pairs(pairs)) == pairs


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), min_size=1, max_size=3), st.data())
def test_pairs_that_are_cut_short_are_an_error_or_fewer(pairs: list[tuple[bytes, bytes]], draw: st.DataObject) -> None:
    data = record.encode_pairs(pairs)
    cut = data[: draw.draw(st.integers(0, len(data) - 1))]
    ends = [len(record.encode_pairs(pairs[:count])) for count in range(len(pairs))]
    if len(cut) in ends:
        assert record.decode_pairs(cut) == pairs[: ends.index(len(cut))]
    else:
        with pytest.raises(ValueError, match="cut short"):
            record.decode_pairs(cut)


def test_pairs_that_end_with_an_empty_one_come_back() -> None:
    for pairs in ([(b"", b"")], [(b"k", b"v"), (b"", b"")]):
        assert record.decode_pairs(record.encode_pairs(pairs)) == pairs


@pytest.mark.parametrize(("key", "value"), [(b"", b""), (b"key", b""), (b"", b"value"), (b"key", b"value" * 99)])
def test_of_a_body_whose_checksum_is_wrong_all_is_told_but_the_value(key: bytes, value: bytes) -> None:
    data, _ = encode(record.SET, key, value, 7, 9, CHAIN)
    assert record.unchecked(data[record.FRAME_SIZE :]) == (record.SET, key, len(value), 7, 9)


def test_a_key_that_goes_beyond_a_body_ends_with_it() -> None:
    assert record.unchecked(body(65535, b"keyS")) == (record.SET, b"key", 0, 1, 2)


# -- voids -------------------------------------------------------------------------------------------------------------


def test_a_void_is_what_was_written_and_nothing_else() -> None:
    data, chain = record.encode_void(5000, 7, 9, CHAIN)
    assert len(data) == record.VOID_SIZE == 35
    assert record.decode_void(data + b"more", CHAIN) == (5000, chain, 7, 9)
    assert record.decode_void(data, CHAIN ^ 1) is None
    assert record.decode_void(data[:-1], CHAIN) is None
    set_like, _ = encode(record.SET, b"", bytes(8), 7, 9, CHAIN)
    with_key, _ = encode(record.VOID, b"key", bytes(5), 7, 9, CHAIN)
    assert len(set_like) == len(with_key) == len(data)
    assert record.decode_void(set_like, CHAIN) is None
    assert record.decode_void(with_key, CHAIN) is None


def test_only_the_beginning_of_a_void_may_be_a_torn_one() -> None:
    data, _ = record.encode_void(5000, 7, 9, CHAIN)
    for size in range(1, len(data)):
        assert record.is_torn_void(data[:size])
        assert record.is_torn_void(data[:size].ljust(len(data), b"\0"))
    assert not record.is_torn_void(data)
    for other in (b"\x16", b"\x17\1", b"\0\x17", b"x" * 34, bytes(35)):
        assert not record.is_torn_void(other)


# -- sessions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "session",
    [
        Session("host", 1),
        Session("h\u00f6st\udcff", 2**32 - 1, 2**64 - 1, b"b" * 16, b"a" * 16, 2**63 - 1, "lab\u00e9l"),
        Session("", 0, rank=0),
    ],
)
def test_a_session_comes_back(session: Session) -> None:
    assert Session.decode(session.encode()) == session
    assert Session.decode(session.encode() + b"of a later version") == session


def test_a_name_too_long_for_a_session_is_cut() -> None:
    session = Session.decode(Session("h" * 300, 1, label="l" * 300).encode())
    assert (session.host, session.label) == ("h" * 255, "l" * 255)
    assert str(session) == "h" * 255 + ":1"


def test_a_session_that_is_cut_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="cut short"):
        Session.decode(Session("host", 1).encode()[:55])


# -- headers -----------------------------------------------------------------------------------------------------------

HEADERS = [
    Header(b"i" * 16, 1),
    Header(b"i" * 16, 3, True, 7, b"a" * 16, 2**64 - 1, runs=((b"job", 3), (b"", -1), (b"x" * 300, -(2**63)))),
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_comes_back(header: Header) -> None:
    data = header.encode()
    assert Header.decode(data + b"records") == (header, len(data), crc32(data[:-4]))


@pytest.mark.parametrize("header", HEADERS)
def test_every_bit_of_a_header_counts(header: Header) -> None:
    data = header.encode()
    for bit in range(8 * len(data)):
        flipped = bytearray(data + bytes(100))
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"no fscoord log|version|size|checksum"):
            Header.decode(bytes(flipped))


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_tells_how_much_of_it_is_missing(header: Header) -> None:
    data = header.encode()
    for size in range(len(data)):
        missing = Header.missing(data[:size])
        assert 0 < missing <= len(data) - size
        with pytest.raises(ValueError, match=r"no fscoord log|incomplete"):
            Header.decode(data[:size])
        assert Header.is_partial(data[:size]) == (size == 0 or 8 <= size < 82)
    assert Header.missing(data) == 0
    assert not Header.is_partial(data)


def test_a_header_that_promises_more_than_any_has_is_not_waited_for() -> None:
    data = bytearray(HEADERS[0].encode())
    data[12:16] = b"\xff" * 4
    assert Header.missing(bytes(data)) == record.HEADER_MAX - len(data)


def test_a_later_version_of_the_format_is_not_taken_for_this_one() -> None:
    for version in (0, 2, 0x101, 0x100):
        data = bytearray(HEADERS[0].encode()[:-4])
        data[8:10] = struct.pack("<H", version)
        with pytest.raises(ValueError, match=rf"format version {version}, and .* upgrade it"):
            Header.decode(bytes(data) + struct.pack("<I", crc32(data)))
    with pytest.raises(ValueError, match="no fscoord log"):
        Header.decode(b"another file" + bytes(100))


@pytest.mark.parametrize("size", [0, 4, 74, 76, 78, 80, 81])
def test_a_header_shorter_than_any_is_no_header_though_its_checksum_is_right(size: int) -> None:
    data = bytearray(HEADERS[0].encode())
    data[12:16] = struct.pack("<I", size)
    if size >= 4:
        data[size - 4 : size] = struct.pack("<I", crc32(data[: size - 4]))
    with pytest.raises(ValueError, match=r"its size is damaged|version|no fscoord log"):
        Header.decode(bytes(data))


def test_runs_that_are_cut_short_are_an_error() -> None:
    for count, runs in ((2, b"\3\0" + bytes(8) + b"job"), (1, b"\4\0" + bytes(8) + b"job"), (1, bytes(9))):
        data = bytearray(HEADERS[0].encode()[:-4] + runs)
        data[12:16] = struct.pack("<I", len(data) + 4)
        data[76:78] = struct.pack("<H", count)
        with pytest.raises(ValueError, match="list of runs is cut short"):
            Header.decode(bytes(data) + struct.pack("<I", crc32(data)))


@pytest.mark.parametrize(("rank", "written"), [(None, -1), (0, 0), (7, 7)])
def test_a_session_that_has_no_rank_says_minus_one(rank: int | None, written: int) -> None:
    assert struct.unpack_from("<q", Session("host", 1, rank=rank).encode(), 4 + 8 + 16 + 16) == (written,)


def test_a_session_without_names_and_spaces_is_one() -> None:
    """As a writer that knew no more would have it."""
    session = Session("", 7, 8, b"b" * 16, b"a" * 16)
    assert Session.decode(session.encode()[:-16]) == session


def test_what_is_reserved_in_a_header_is_zero() -> None:
    """docs/format.md: behind the kind of lock."""
    assert Header(b"i" * 16, 7).encode()[16:20] == b"\7\0\0\0"


def test_of_the_first_part_of_a_header_it_is_known_how_long_it_is() -> None:
    data = Header(b"i" * 16, 1, runs=((b"job", 3),)).encode()
    assert Header.missing(data[: record.HEADER_SIZE]) == len(data) - record.HEADER_SIZE
    assert Header.missing(data) == 0


def test_the_version_is_read_before_anything_that_another_may_have_changed() -> None:
    with pytest.raises(ValueError, match="format version 2"):
        Header.decode(record.MAGIC + b"\2\0")


def test_a_run_without_a_name_at_the_end_of_a_header_is_one() -> None:
    header = Header(b"i" * 16, 1, runs=((b"job", 3), (b"", 5)))
    assert Header.decode(header.encode())[0] == header
