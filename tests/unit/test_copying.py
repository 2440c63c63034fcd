"""A copy of a log in the making: written piece by piece, synced before it appears, and gone if it does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_os
from support.plain_reader import read_log

from fscoord._log.format import record
from fscoord._log.format.header import Header
from fscoord._log.inspect import repair
from fscoord._log.inspect.repair import LogCopy
from fscoord._log.locking.log_lock import OFD
from fscoord._runtime import system


def test_copy_is_written_in_pieces_each_once_and_synced_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_BUFFER", 1000)
    path = tmp_path / "copy"
    records = [(record.SET, b"%d" % number, bytes([number]) * 400, 1, number) for number in range(10)]
    done: list[str] = []

    def note(name: str, _: object, arguments: tuple[Any, ...]) -> None:
        if name == "fsync":
            done.append(os.readlink(f"/proc/self/fd/{arguments[0]}"))
        elif name in ("write", "link"):
            done.append(name)

    with faulty_os() as faulty, faulty.instead(note), LogCopy(str(path), Header(b"i" * 16, OFD, False), 0o640) as copy:
        for found in records:
            copy.add(found)
        assert done == ["write"] * 3
        assert not path.exists()
        copy.finish()
        birth = done.pop(4)
    assert done == [*["write"] * 4, "link", str(tmp_path)]
    assert birth.startswith(f"{path}.")
    log = read_log(path.read_bytes())
    assert log.ends == "whole"
    assert log.values == {key: value for _, key, value, *_ in records}
    assert os.listdir(tmp_path) == ["copy"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_copy_that_is_given_up_or_comes_too_late_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "copy"
    with LogCopy(str(path), Header(b"i" * 16, OFD, False), 0o600) as copy:
        copy.add((record.SET, b"k", b"v", 1, 1))
    assert os.listdir(tmp_path) == []
    with LogCopy(str(path), Header(b"i" * 16, OFD, False), 0o600) as copy:
        path.write_bytes(b"another's")
        with pytest.raises(ValueError, match="nothing is overwritten"):
            copy.finish()
    assert os.listdir(tmp_path) == ["copy"]
    assert path.read_bytes() == b"another's"


def test_copy_given_up_by_a_child_of_a_signal_handler_stays_the_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "copy"
    copy = LogCopy(str(path), Header(b"i" * 16, OFD, False), 0o600)
    life = system.process_epoch()
    with copy:
        with monkeypatch.context() as patch:
            patch.setattr(system, "process_epoch", lambda: life + 1)
            copy.__exit__()
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []
