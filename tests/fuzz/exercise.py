"""Use a log, or words, in every way that a user can; only the documented errors may come out."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fuzz.build import NAME, Source, build

from fscoord import CorruptLogError, FileStore, FscoordError
from fscoord.inspect import dump, repair, verify

EXPECTED = (FscoordError, ValueError, OverflowError)
"""What the operations of a store may raise: its own errors, and those for values that are no numbers."""


def write(directory: Path, files: dict[str, bytes]) -> Path:
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)
        (directory / name).chmod(0o600)
    return directory / NAME


def operations(store: FileStore) -> list[Callable[[], Any]]:
    """A bit of everything."""
    return [
        lambda: store.get("k"),
        lambda: store.list_keys(),
        lambda: store.set("k", "new"),
        lambda: store.add("n", 1),
        lambda: store.append("a", "more"),
        lambda: store.compare_set("k", "new", "newer"),
        lambda: store.multi_set(["x", "y"], ["1", "2"]),
        lambda: store.queue_push("k", "item"),
        lambda: store.queue_pop("k", block=False),
        lambda: store.delete_key("k"),
        lambda: store.members(),
        lambda: store.dead_ranks([0, 5]),
        lambda: store.compact(),
        lambda: store.get("x"),
    ]


def exercise_log(files: dict[str, bytes], tmp: Path) -> str:
    """Use the log in every way; return what `verify` says of it.

    A log that `verify` calls sound can be opened, and `verify` reports each log that can't be opened.
    """
    path = write(tmp / "read", files)
    before = {name: (path.parent / name).read_bytes() for name in files}
    verdict = told(lambda: verify(path, timeout=0).verdict)
    with suppress(FscoordError):
        list(dump(path))
    opened = told(lambda: FileStore(path, read_only=True, timeout=0).close() or "opened")
    if opened == "CorruptLogError":
        assert verdict == "damaged", f"{verdict}, but it can't be opened"
    salvage(path, tmp / "copy")
    assert {name: (path.parent / name).read_bytes() for name in files} == before, "a reader has written"
    use(write(tmp / "used", files))
    return verdict


def told(call: Callable[[], str]) -> str:
    """Return what `call` returns, or the name of the error of our own that it raises."""
    try:
        return call()
    except FscoordError as error:
        return type(error).__name__


def salvage(path: Path, output: Path) -> None:
    """A copy of what is sound is sound itself, and holds no less if more is asked for."""
    kept = []
    for is_thorough in (False, True):
        try:
            kept.append(repair(path, output, salvage=is_thorough, write=True, timeout=0).kept)
        except FscoordError:
            continue
        assert verify(output).verdict == "sound"
        os.unlink(output)
    assert kept == sorted(kept)


def use(path: Path) -> None:
    """Write to it; a log that took one write takes the next, and is sound behind it."""
    try:
        store = FileStore(path, timeout=0, lock="flock" if path.read_bytes()[16:17] == b"\2" else "ofd")
    except FscoordError:
        return
    with store:
        for operation in operations(store):
            with suppress(*EXPECTED):
                operation()


def run(data: bytes, tmp: Path) -> str:
    """Build a log of `data`, and use it."""
    return exercise_log(build(Source(data)), tmp)


__all__ = ["CorruptLogError", "exercise_log", "run"]
