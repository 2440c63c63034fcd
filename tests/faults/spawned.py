"""What spawned children of tests run: a module of their own, which a fresh interpreter finds."""

from __future__ import annotations

from support.places import HANG_S

from fscoord import FileStore


def be_second_member(path: str) -> None:
    with FileStore(path, timeout=HANG_S) as store:
        assert [member.alive for member in store.members()] == ["yes", "yes"]
