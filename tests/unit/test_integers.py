"""Integers that are not `int`, such as those of numpy, as amounts, ranks and sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fscoord import FileStore, HashStore, barrier, synchronize
from fscoord.recipes import Semaphore


class Integer:
    """An integer of another library."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number


@pytest.mark.parametrize("kind", ["file", "hash"])
def test_integer_of_another_library_is_an_amount_a_rank_and_a_size(kind: str, tmp_path: Path) -> None:
    one, zero = Integer(1), Integer(0)
    with FileStore(tmp_path / "s", one, rank=zero, timeout=20) if kind == "file" else HashStore(timeout=20) as store:  # type: ignore[arg-type]
        assert type(store.add("n", one)) is int  # type: ignore[arg-type]
        assert store.get("n") == b"1"
        store.announce_rank(zero)  # type: ignore[arg-type]
        store.barrier("b", one)  # type: ignore[arg-type]
        barrier(store, one, "c", rank=zero)  # type: ignore[arg-type]
        assert synchronize(store, b"d", zero, one, "e") == [b"d"]  # type: ignore[arg-type]
        with Semaphore(store, "s", one):  # type: ignore[arg-type]
            pass
        for value in (1.0, "1", True):
            with pytest.raises(TypeError):
                store.add("n", value)  # type: ignore[arg-type]
