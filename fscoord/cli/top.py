"""The verb top: the table of `ps`, live, with rates and the longest waits first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from fscoord._runtime import system
from fscoord._runtime.escaping import printable
from fscoord.cli.options import (
    common,
    complete_file,
    given_timeout,
    number_option,
    seconds_option,
    store_argument,
    store_url,
    time_between,
)
from fscoord.cli.output import can_redraw, flush, size_text, write_lines
from fscoord.cli.ps import chosen, findings_lines, row_of, slow_option
from fscoord.status.findings import StatusFinding, clock_text, find_all
from fscoord.status.picture import Picture, SessionStatus
from fscoord.status.rates import Rates, Speed
from fscoord.status.reading import Activity, Observer, observe

if TYPE_CHECKING:
    from rich.console import Console, Group

ORDERS: Final = ("wait", "rank", "rate")
"""The orders of the rows. Each press of the key ``s`` chooses the next order."""

HEADS: Final = ("RANK", "LABEL", "PROCESS", "STATE", "REC/S", "WAITED", "HOLDS", "WAITS FOR")
NUMBERS: Final = ("RANK", "REC/S", "WAITED")
OPTIONAL: Final = ("LABEL", "HOLDS")
"""The columns that are left out if they are empty."""
ELASTIC: Final = ("LABEL", "STATE", "HOLDS", "WAITS FOR")
"""The columns that are cut short if the terminal is too narrow."""

KEY_POLL_S: Final = 0.1
"""The longest sleep between two checks for a pressed key, in seconds."""

FINDINGS_SHOWN: Final = 5
KINDS_SHOWN: Final = 6


class Frame(NamedTuple):
    """The state of a store, from one read.

    Attributes:
        time: the time of day, in seconds since the epoch.
        picture: the participants and their waits.
        findings: the faults in the picture, such as a deadlock.
        speed: the rates since the previous frame; None for a store that does not report them.
        activity: the counts of records; None for a store that does not report them.
    """

    time: float
    picture: Picture
    findings: Sequence[StatusFinding]
    speed: Speed | None
    activity: Activity | None = None


class Keys:
    """The state that the pressed keys control: the order of the rows (one of `ORDERS`), the pause, and the end."""

    def __init__(self) -> None:
        self.order = ORDERS[0]
        self.is_paused = False
        self.is_over = False

    def press(self, key: str) -> bool:
        """Apply the effect of `key`. Return whether the screen must change."""
        if key == "q":
            self.is_over = True
        elif key == "s":
            self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
        elif key in ("p", " "):
            self.is_paused = not self.is_paused
        else:
            return False
        return True


@click.command()
@store_argument("STORE")
@seconds_option("--interval", kind=time_between, default="1", help="The time between two screens.")
@number_option("-n", "--count", help="End after this many screens. [default: no limit]")
@click.option("--sort", type=click.Choice(ORDERS), default=ORDERS[0], show_default=True, help="The order of the rows.")
@click.option(
    "--prometheus",
    metavar="FILE|[HOST:]PORT",
    shell_complete=complete_file,
    help="Print nothing. Write metrics to this file, or serve them at this port, by default of the loopback interface.",
)
@slow_option
@common
@click.pass_context
def top(ctx: click.Context, interval: float, count: int | None, sort: str, slow: float, prometheus: str | None) -> None:
    """Show what every participant of a store does, live.

    The rows are those of "fscoord ps", the longest wait first, with the records that each participant writes in a
    second. Above them are the findings, the records of each kind in a second, the barriers in a second, the size of
    the log, and the number of compactions.

    \b
    Keys:
        s           sort by wait, rank or rate, in turn
        p or space  pause, and go on
        q           quit

    If standard output is not a terminal, or is a terminal that cannot move its cursor (TERM=dumb), the verb prints a
    line for each interval, and a line for each finding. Changes nothing.

    With --prometheus the verb publishes the participants, their waits, the findings and the counts of records as
    metrics, anew for each interval. A file is for the textfile collector of node_exporter and is replaced atomically.
    A port is for a scrape of /metrics. Port 0 is any free port; the verb prints its address.

    \b
    Examples:
      fscoord top /shared/job/store
      fscoord top --sort rate --interval 5
      fscoord top --interval 10 >> job.top          # a line every ten seconds
      fscoord top --interval 15 --prometheus /var/lib/node_exporter/job.prom
    """
    keys = Keys()
    keys.order = sort
    with closing(observe(store_url(ctx), given_timeout(ctx))) as observer:
        looks = _looks(observer, slow)
        if prometheus is not None:
            _publish(_at_intervals(looks, interval, count), prometheus)
        elif can_redraw():
            _show_live(looks, keys, interval, count)
        else:
            for frame in _at_intervals(looks, interval, count):
                write_lines(lines_of(frame))
                flush()


def _at_intervals(looks: Iterator[Frame], interval: float, count: int | None) -> Iterator[Frame]:
    for number, frame in enumerate(looks, 1):
        yield frame
        if number == count:
            return
        system.time.sleep(interval)


def _looks(observer: Observer, slow: float) -> Iterator[Frame]:
    """Yield frames for ever. The store is read when the caller requests a frame."""
    rates = Rates()
    while True:
        picture, activity = observer.look()
        speed = None if activity is None else rates.add(system.time.monotonic(), activity)
        yield Frame(system.time.time(), picture, find_all(picture, slow), speed, activity)


def _publish(frames: Iterator[Frame], target: str) -> None:
    """Publish the frames as metrics at `target`."""
    from fscoord.cli.prometheus import Publisher, metrics_text

    if not target:
        raise click.UsageError("--prometheus is empty: name a file or a port")
    with closing(Publisher(target)) as publisher:
        for frame in frames:
            publisher.publish(metrics_text(frame.picture, frame.findings, frame.activity))


# -- lines -------------------------------------------------------------------------------------------------------------


def lines_of(frame: Frame) -> list[str]:
    """Return `frame` as lines of text, for output that is not a terminal: a summary, and a line for each finding."""
    longest = [each for each in ordered(frame, "wait")[:1] if each.waiting is not None]
    words = [f"{clock_text(frame.time)}: {_crowd(frame.picture)}", *_speed_words(frame.speed)]
    words += [f"longest wait: {each.title} for {row_of(each, frame.picture).waits}" for each in longest]
    return ["; ".join(words), *(f"  {line}" for line in findings_lines(frame.findings))]


def _crowd(picture: Picture) -> str:
    living = [each for each in picture.participants if each.alive != "no"]
    waiting = sum(each.waiting is not None for each in living)
    return f"{len(living)} here, {waiting} wait"


def _speed_words(speed: Speed | None) -> list[str]:
    if speed is None:
        return []
    kinds = ", ".join(f"{kind} {_rate(each)}" for kind, each in list(speed.by_kind.items())[:KINDS_SHOWN])
    return [
        f"{_rate(speed.total)} records/s" + (f" ({kinds})" if kinds else ""),
        f"{_rate(speed.barriers)} barriers/s",
        f"log {size_text(speed.size)}",
        f"{speed.compactions} compactions",
    ]


def _rate(number: float) -> str:
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"


def ordered(frame: Frame, order: str) -> list[SessionStatus]:
    """Return the participants of `frame` that `chosen` selects, sorted by `order`, one of `ORDERS`."""
    speeds = {} if frame.speed is None else frame.speed.by_session
    found = chosen(frame.picture)
    if order == "wait":
        found.sort(key=lambda each: -1.0 if each.waiting is None else each.waiting.seconds, reverse=True)
    elif order == "rate":
        found.sort(key=lambda each: speeds.get(each.number, 0.0), reverse=True)
    return found


# -- a terminal --------------------------------------------------------------------------------------------------------


def _show_live(looks: Iterator[Frame], keys: Keys, interval: float, count: int | None) -> None:
    """Show the frames on the whole screen, and apply the keys, until q is pressed or `count` frames were shown."""
    from rich.live import Live

    with _single_keys() as pressed, Live(screen=True, auto_refresh=False) as live:
        shown = 0
        frame = next(looks)
        while True:
            shown += 1
            live.update(screen(frame, keys, live.console), refresh=True)
            if shown == count:
                return
            due = system.time.monotonic() + interval
            while keys.is_paused or system.time.monotonic() < due:
                key = pressed(min(KEY_POLL_S, max(0.0, due - system.time.monotonic())) or KEY_POLL_S)
                if key and keys.press(key):
                    live.update(screen(frame, keys, live.console), refresh=True)
                if keys.is_over:
                    return
            frame = next(looks)


@contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to a number of seconds for a key, and returns the key or an empty text.

    Inside the ``with``, the terminal passes on each key at once and does not show it. Ctrl-C still interrupts. If
    standard input is not a terminal, there are no keys.
    """
    poll = system.select.poll()

    def pressed(seconds: float) -> str:
        for fd, _ in poll.poll(seconds * 1000):
            return str(system.os.read(fd, 1), "ascii", "replace")
        return ""

    if sys.stdin is None or not sys.stdin.isatty():
        yield pressed  # polls no descriptor, so it only sleeps
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    poll.register(fd, system.select.POLLIN)
    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def screen(frame: Frame, keys: Keys, console: Console) -> Group:
    """Return the screen for `console`: a summary, the findings, and as many participants as fit."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    summary = "; ".join([_crowd(frame.picture), *_speed_words(frame.speed)])
    state = "  [paused]" if keys.is_paused else ""
    head = f"{printable(frame.picture.place)}  {clock_text(frame.time)}  by {keys.order}{state}"
    parts = [Text(head, style="bold", no_wrap=True, overflow="ellipsis"), Text(summary)]
    told = findings_lines(frame.findings[:FINDINGS_SHOWN])
    parts += [Text(printable(line), style="bold red") for line in told]
    if len(frame.findings) > FINDINGS_SHOWN:
        parts.append(Text(f"... and {len(frame.findings) - FINDINGS_SHOWN} more findings: fscoord ps", style="red"))
    found = ordered(frame, keys.order)
    taken = sum(1 if part.no_wrap else len(part.wrap(console, console.width)) for part in parts)
    room = max(3, console.height - taken - 2)  # less a line for the headings, and one for the keys
    speeds = {} if frame.speed is None else frame.speed.by_session
    rows = []
    for each in found[:room]:
        row = row_of(each, frame.picture)
        rate = _rate(speeds.get(each.number, 0.0))
        rows.append((row.rank, row.label, row.process, row.state, rate, row.waited, row.holds, row.waits))
    used = [column for column, head in enumerate(HEADS) if head not in OPTIONAL or any(row[column] for row in rows)]
    table = Table(box=None, pad_edge=False, expand=True)
    for head in map(HEADS.__getitem__, used):
        # rich narrows the columns that may wrap before all others, the widest first.
        table.add_column(
            Text(head, no_wrap=True), justify="right" if head in NUMBERS else "left", no_wrap=head not in ELASTIC
        )
    for each, row_cells in zip(found, rows, strict=False):
        style = "red" if each.alive == "no" or each.is_stopped else "yellow" if each.waiting else ""
        cells = [Text(printable(row_cells[column]), no_wrap=True, overflow="ellipsis") for column in used]
        table.add_row(*cells, style=style)
    rest = f"{len(found) - room} more participants; " if len(found) > room else ""
    return Group(*parts, table, Text(f"{rest}s sort, p pause, q quit", style="dim"))
