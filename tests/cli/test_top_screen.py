"""The screen of top in a narrow terminal: no column that tells ranks apart is cut short."""

from __future__ import annotations

import io
import re

from rich.console import Console

from fscoord.cli.top import Frame, Keys, screen
from fscoord.status import Picture, SessionStatus, ShownWait, StatusFinding

NAME = "train/epoch-00017/after-checkpoint"


def session(number: int, *, waits: bool = True, holds: tuple[str, ...] = (), label: str = "") -> SessionStatus:
    waiting = ShownWait("barrier", NAME, (f"{NAME}/complete",), 1, 8, 750.0 + number, 0) if waits else None
    host, pid = f"node{number:03}", 120000 + number
    return SessionStatus(number, number + 100, label, host, pid, 0.0, "yes", waiting=waiting, holds=holds)


def shown(*participants: SessionStatus, width: int = 80, findings: tuple[StatusFinding, ...] = ()) -> list[str]:
    """Return the lines of the screen."""
    ranks = {each.rank: (each.number,) for each in participants if each.rank is not None}
    frame = Frame(0.0, Picture("store", participants, ranks), findings, None)
    console = Console(file=io.StringIO(), width=width, height=24, color_system=None)
    with console.capture() as capture:
        console.print(screen(frame, Keys(), console))
    return capture.get().splitlines()


def test_top_in_80_columns_shows_rank_process_state_and_duration_in_full() -> None:
    lines = shown(session(1, label="the trainer of the eighth shard"), session(2, label="the other trainer"))
    heads = lines[2].split("  ")
    assert [head.strip() for head in heads if head] == [
        "RANK", "LABEL", "PROCESS", "STATE", "REC/S", "WAITED", "WAITS FOR",
    ]  # fmt: skip
    assert re.match(r" 102 .*node002:120002 +alive +0 +12 min 32 s +barrier", lines[3])
    assert re.match(r" 101 .*node001:120001 +alive +0 +12 min 31 s +barrier", lines[4])


def test_column_of_top_without_any_label_or_hold_is_left_out() -> None:
    assert "LABEL" not in shown(session(1))[2]
    assert "HOLDS" not in shown(session(1))[2]
    assert "lock 'a'" in shown(session(1, holds=("lock 'a'",)))[3]


def test_top_in_a_wide_terminal_cuts_nothing() -> None:
    lines = shown(session(1, label="trainer", holds=("lock 'a'",)), width=160)
    assert "…" not in "".join(lines)
    assert f"barrier '{NAME}' for 12 min 31 s" in lines[3]


def test_top_with_long_findings_and_many_ranks_fills_the_screen_exactly() -> None:
    finding = StatusFinding("barrier", f"barrier {NAME!r}: 7 of 8 came. " + "rank 5 does nothing; " * 9, (5,), 42.0, 2)
    lines = shown(*map(session, range(1, 41)), findings=(finding, finding))
    assert len(lines) == 24
    ranks = sum("barrier 'train" in line for line in lines[-15:])
    assert lines[-1] == f"{40 - ranks} more participants; s sort, p pause, q quit"
