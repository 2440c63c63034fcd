"""The verb ps: the participants of a store, and the findings about them. `top` uses its rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple

import click

from fscoord._runtime import system
from fscoord._runtime.escaping import printable
from fscoord._waiting.rounds import RoundState
from fscoord.cli.exit_codes import FALSE
from fscoord.cli.options import (
    as_json,
    common,
    given_timeout,
    seconds_option,
    store_argument,
    store_url,
    time_between,
)
from fscoord.cli.output import can_redraw, flush, table_lines, utc_text, write, write_json, write_lines
from fscoord.recipes.holdings import LineState
from fscoord.status.findings import (
    SLOW_S,
    StatusFinding,
    duration,
    find_all,
    place_in_line,
    session_state,
    turns_of,
)
from fscoord.status.picture import Picture, SessionStatus
from fscoord.status.reading import observe

log = logging.getLogger(__name__)

HEADS: Final = ("RANK", "LABEL", "PROCESS", "STATE", "SINCE", "HOLDS", "WAITS FOR")
HOLDS_SHOWN: Final = 3
"""How many holds of a participant a row names. The row counts the other holds. The output of --json has all holds."""
DAY_S: Final = 86400
CLEAR: Final = b"\x1b[H\x1b[2J"
"""Moves the cursor of a terminal to its corner, and clears the screen."""

slow_option = seconds_option(
    "--slow",
    default=f"{SLOW_S:g}",
    help="Report a living participant as a finding if others have waited for it for longer than this time.",
)


class Row(NamedTuple):
    """The cells of one participant. `waits` is the wait with its duration; `waited` is the duration alone."""

    rank: str
    label: str
    process: str
    state: str
    since: str
    holds: str
    waits: str
    waited: str


@click.command()
@store_argument("STORE")
@click.option("-a", "--all", "is_all", is_flag=True, help="Show all sessions, also those that have ended.")
@click.option("-w", "--watch", is_flag=True, help="Show the table again and again, until Ctrl-C.")
@seconds_option("--interval", kind=time_between, default="2", help="With --watch: the time between two tables.")
@slow_option
@as_json
@common
@click.pass_context
def ps(ctx: click.Context, is_all: bool, watch: bool, interval: float, slow: float, as_json: bool) -> int:
    """Show what every participant of a store does now.

    First come the findings, the most urgent first: a deadlock, a barrier or a lock that waits for a process that has
    ended or is stopped, a process that keeps the log lock, and a participant that does nothing although other
    participants wait for it. Then each participant is a line: its rank, label, host:pid and state, the time (UTC) at
    which it opened the store, its first holds, and its wait with its duration. A wait is shown after it has lasted for
    a second. The state is stopped (as by SIGSTOP), or one of those that "fscoord members --help" explains.

    STORE is a path or an address. Without it, --store names the store. Changes nothing, and needs only permission to
    read. A store that is not a file may not show all of this; a note says what is missing. --timeout is how long to
    wait for the server of such a store; a file is read at once.

    \b
    Exit codes:
        0  nothing is wrong
        1  there are findings

    \b
    Examples:
      fscoord ps /shared/job/store
      fscoord ps --watch --slow 60
      fscoord ps --json | jq -r '.findings[].message'
    """
    with closing(observe(store_url(ctx), given_timeout(ctx))) as observer:
        while True:
            picture, _ = observer.look()
            findings = find_all(picture, slow)
            if watch and can_redraw() and not as_json:
                write(CLEAR)
            _show(picture, findings, is_all=is_all, as_json=as_json)
            if not watch:
                return FALSE if findings else 0
            flush()
            system.time.sleep(interval)


def _show(picture: Picture, findings: Sequence[StatusFinding], *, is_all: bool, as_json: bool) -> None:
    if as_json:
        write_json(_document(picture, findings))
        return
    lines = [*findings_lines(findings), *_table(picture, is_all=is_all)]
    lines += [f"note: {note}" for note in picture.notes]
    write_lines(lines)


def findings_lines(findings: Iterable[StatusFinding]) -> list[str]:
    """Return `findings` as lines of text."""
    return [f"{finding.kind.upper()}: {finding.message}" for finding in findings]


def _table(picture: Picture, *, is_all: bool) -> list[str]:
    shown = rows(picture, is_all=is_all)
    if not shown:
        came = "registered in this store" if not picture.participants else "this store open now"
        return [f"no process has {came}"]
    used = [column for column in range(len(HEADS)) if any(row[column] for row in shown) or column in (0, 2, 3, 6)]
    heads, *cells = [[row[column] for column in used] for row in (HEADS, *shown)]
    return table_lines(heads, cells, {"RANK"})


def chosen(picture: Picture) -> list[SessionStatus]:
    """Return the participants that are shown without --all, sorted by rank. Participants without a rank come last.

    Each command, such as ``fscoord set``, is a session, so an old store has many ended sessions. Only the last ended
    session of each rank is shown. A process may have several handles with the same rank and label, such as clones. Of
    these, the handles that wait or hold something are shown, or else the first handle.
    """
    busy = [each for each in picture.participants if each.holds or (each.waiting is not None and each.alive != "no")]
    numbers = {each.number for each in busy}
    known = {(each.host, each.pid, each.rank, each.label) for each in busy}
    for each in picture.participants:
        names = (each.host, each.pid, each.rank, each.label)
        if each.alive != "no" and names not in known:
            known.add(names)
            numbers.add(each.number)
    last = {sessions[-1] for sessions in picture.ranks.values() if sessions}
    numbers.update(each.number for each in picture.participants if each.alive == "no" and each.number in last)
    return in_order(each for each in picture.participants if each.number in numbers)


def in_order(participants: Iterable[SessionStatus]) -> list[SessionStatus]:
    """Return `participants` sorted by rank. Participants without a rank come last."""
    return sorted(participants, key=lambda each: (each.rank is None, each.rank or 0, each.number))


def rows(picture: Picture, *, is_all: bool = False) -> list[Row]:
    """Return a row for each participant of `chosen`, or for all participants if `is_all`."""
    found = in_order(picture.participants) if is_all else chosen(picture)
    return [row_of(each, picture) for each in found]


def row_of(each: SessionStatus, picture: Picture) -> Row:
    """Return the row of one participant."""
    return Row(
        "-" if each.rank is None else str(each.rank),
        each.label,
        f"{each.host}:{each.pid}",
        _state(each),
        since_text(each.since),
        _holds(each),
        _waits(each, picture),
        "" if each.waiting is None or each.alive == "no" else duration(each.waiting.seconds),
    )


def _state(each: SessionStatus) -> str:
    return "stopped" if each.alive != "no" and each.is_stopped else session_state(each.alive, each.found_dead)


def since_text(seconds: float) -> str:
    """Return `seconds` since the epoch as a time of day in UTC, with the date unless it is within the last 24 hours."""
    now = system.time.time()
    form = "%H:%M:%S" if now - DAY_S < seconds <= now else "%Y-%m-%d %H:%M"
    return utc_text(seconds, form)


def _holds(each: SessionStatus) -> str:
    """Return the first `HOLDS_SHOWN` holds of `each`, and the number of the other holds."""
    more = len(each.holds) - HOLDS_SHOWN
    return ", ".join(each.holds[:HOLDS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _waits(each: SessionStatus, picture: Picture) -> str:
    waiting = each.waiting
    if each.alive == "no":
        return ""
    if waiting is None:
        return ", ".join(turns_of(picture.lines, each.number)) if each.number else ""
    more = f" ({waiting.more} more)" if waiting.more else ""
    return f"{waiting.words()}{place_in_line(picture.lines, waiting)} for {duration(waiting.seconds)}{more}"


def _document(picture: Picture, findings: Sequence[StatusFinding]) -> dict[str, Any]:
    lock = picture.log_lock
    return {
        "store": picture.place,
        "findings": [
            {**_fields(each, "kind", "sessions", "seconds"), "message": printable(each.message)} for each in findings
        ],
        "participants": [_participant(each) for each in picture.participants],
        "locks": [
            {
                **_fields(line, "kind", "name"),
                "holders": [holder._asdict() for holder in line.holders],
                "waiters": [waiter._asdict() for waiter in line.waiters],
            }
            for line in picture.lines
        ],
        "barriers": [{**_fields(each, "name", "world_size", "missing"), "count": each.come} for each in picture.rounds],
        "log_lock": None if lock is None else lock._asdict(),
        "notes": list(map(printable, picture.notes)),
    }


def _fields(each: StatusFinding | LineState | RoundState, *names: str) -> dict[str, Any]:
    return {name: getattr(each, name) for name in names}


def _participant(each: SessionStatus) -> dict[str, Any]:
    waiting = each.waiting
    shown = None
    if waiting is not None:
        shown = {**waiting._asdict(), "words": printable(waiting.words())}
    return {**each._asdict(), "holds": list(map(printable, each.holds)), "waiting": shown}
