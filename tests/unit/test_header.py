"""Which log a file belongs to, by its header and the inode numbers that are there: the table of docs/format.md."""

from __future__ import annotations

import pytest

from fscoord._log.format.header import Header, LogIdentity, Provenance, provenance_of

LINEAGE = b"l" * 16
HEADER = Header(b"i" * 16, 1, generation=3, lineage=LINEAGE, root_inode=10, inode=13)


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
    assert provenance_of(HEADER, root, file) is expected


@pytest.mark.parametrize("numbers", [(1, 2), (10, 13), (0, 0)])
def test_provenance_without_lasting_inode_numbers_is_own(numbers: tuple[int, int]) -> None:
    assert provenance_of(HEADER._replace(root_inode=0, inode=0), *numbers) is Provenance.OWN


def test_provenance_of_generation_0_is_own_or_copy() -> None:
    first = HEADER._replace(generation=0, inode=10)
    assert provenance_of(first, 10, 10) is Provenance.OWN
    assert provenance_of(first, 20, 20) is Provenance.COPY


@pytest.mark.parametrize(
    ("header", "inode", "owned"),
    [
        (HEADER, 13, True),
        (HEADER, 14, False),
        (HEADER._replace(lineage=b"x" * 16), 13, False),
        (HEADER._replace(root_inode=11), 13, False),
        (HEADER._replace(inode=14), 13, False),
        (HEADER._replace(generation=99), 13, True),
    ],
)
def test_identity_owns_a_file_that_names_it_in_every_field(header: Header, inode: int, owned: bool) -> None:
    assert LogIdentity(LINEAGE, 10).owns(header, inode) is owned


def test_identity_owns_nothing_without_lasting_inode_numbers() -> None:
    assert not LogIdentity(LINEAGE, 0).owns(HEADER._replace(root_inode=0), 13)
    assert not LogIdentity(LINEAGE, 10).owns(HEADER._replace(inode=0), 0)
