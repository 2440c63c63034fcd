"""Which log a file belongs to, by its header and the inode numbers that are there: the table of docs/format.md."""

from __future__ import annotations

import pytest

from fscoord._log.format.header import Header
from fscoord._log.format.identity import Identity, Standing, standing

LINEAGE = b"l" * 16
HEADER = Header(b"i" * 16, 1, generation=3, lineage=LINEAGE, root_inode=10, inode=13)


@pytest.mark.parametrize(
    ("root", "file", "expected"),
    [
        (10, 13, Standing.OWN),
        (20, 23, Standing.OTHER_ROOT),
        (20, 13, Standing.OTHER_ROOT),
        (10, 23, Standing.COPY),
        (0, 0, Standing.OWN),
        (0, 23, Standing.COPY),
        (20, 0, Standing.OTHER_ROOT),
    ],
)
def test_standing_follows_from_both_inode_numbers(root: int, file: int, expected: Standing) -> None:
    assert standing(HEADER, root, file) is expected


@pytest.mark.parametrize("numbers", [(1, 2), (10, 13), (0, 0)])
def test_standing_without_lasting_inode_numbers_is_own(numbers: tuple[int, int]) -> None:
    assert standing(HEADER._replace(root_inode=0, inode=0), *numbers) is Standing.OWN


def test_standing_of_generation_0_is_own_or_copy() -> None:
    first = HEADER._replace(generation=0, inode=10)
    assert standing(first, 10, 10) is Standing.OWN
    assert standing(first, 20, 20) is Standing.COPY


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
def test_identity_owns_what_names_it_in_every_field(header: Header, inode: int, owned: bool) -> None:
    assert Identity(LINEAGE, 10).owns(header, inode) is owned


def test_identity_owns_nothing_where_inode_numbers_do_not_last() -> None:
    assert not Identity(LINEAGE, 0).owns(HEADER._replace(root_inode=0), 13)
    assert not Identity(LINEAGE, 10).owns(HEADER._replace(inode=0), 0)
