"""The verb trace: tables, Chrome trace events and a page, from the files that traced processes have written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import click

from fscoord._runtime import system
from fscoord._runtime.escaping import printable
from fscoord._runtime.tracing import ENVIRONMENT_VARIABLE
from fscoord.cli.exit_codes import USAGE
from fscoord.cli.options import DirectoryPath, as_json, verbose
from fscoord.cli.output import counted, new_console, new_table, write_json

if TYPE_CHECKING:
    from fscoord.trace.reading import Trace

ROWS: Final = 20
"""The most rows of a table. The JSON has all."""

NUMBERS: Final = {
    "barriers", "last", "uncertain", "cost", "avoidable", "waits", "total", "longest", "acquired", "contended",
    "waited", "held", "seconds", "after its exit", "after its last sign", "wrong by at most", "offsets",
}  # fmt: skip

_directory = click.argument("directory", metavar="DIR", type=DirectoryPath(file_okay=False))


@click.group(invoke_without_command=True, subcommand_metavar="VERB [ARGUMENTS]...")
@click.pass_context
def trace(ctx: click.Context) -> int:
    """Show where the processes of a job waited for each other.

    A process records a trace in the directory that FSCOORD_TRACE names. "fscoord run --trace DIR" sets it for a job.
    These verbs read the trace, also while the processes still run, and change nothing in its directory.

    \b
    Examples:
      fscoord run --trace traces --nproc-per-node 4 train.py
      fscoord trace report traces
      fscoord trace html traces --output report.html
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        return USAGE
    return 0


def _output(default: str) -> Callable[[Any], Any]:
    return click.option(
        "-o",
        "--output",
        metavar="FILE",
        type=click.Path(dir_okay=False),
        default=default,
        show_default=True,
        help="The file to write.",
    )


@trace.command()
@_directory
@as_json
@verbose
def report(directory: str, as_json: bool) -> None:
    """Print the ranks that came last, and the longest waits.

    The tables have the ranks that came last to barriers, the waits by name, and the events that ended the longest
    waits. Times are in seconds. The time that others wait for a rank is in rank-seconds. The clocks of hosts are
    compared by the barriers at which the hosts met. If the comparison does not show which rank came last, the table
    says "uncertain".

    \b
    Examples:
      fscoord trace report traces
      fscoord trace report --json traces | jq '.last_to_come[0].rank'
    """
    from fscoord.trace.report import make_report

    found = make_report(_read(directory))
    if as_json:
        write_json(found)
    else:
        _print(found)


@trace.command()
@_directory
@_output("trace.json")
@verbose
def export(directory: str, output: str) -> None:
    """Write Chrome trace events, for Perfetto.

    The file has a row for each rank, grouped by host, and an arrow from the rank that ended a wait to the rank that
    waited. Perfetto and chrome://tracing open it.

    \b
    Examples:
      fscoord trace export traces --output trace.json         # then open it on https://ui.perfetto.dev
    """
    from fscoord.trace.chrome import chrome_events

    document = chrome_events(_read(directory))
    _write_whole(output, json.dumps(document, separators=(",", ":")))
    click.echo(f"fscoord: {printable(output)} has {len(document['traceEvents'])} events", err=True)


@trace.command()
@_directory
@_output("report.html")
@verbose
def html(directory: str, output: str) -> None:
    """Write a page with the time line and the tables.

    The page is one file, which needs no network.

    \b
    Examples:
      fscoord trace html traces --output report.html
    """
    write_page(directory, output)


def write_page(directory: str, output: str) -> None:
    """Write the page of the trace in `directory` to the file `output`, and print the path."""
    from fscoord.trace.page import make_page

    _write_whole(output, make_page(_read(directory)))
    click.echo(f"fscoord: {printable(output)} shows the trace in {printable(directory)}", err=True)


def _read(directory: str) -> Trace:
    """Return the trace in `directory`, and print which files in it can't be read.

    Raises:
        OSError: the directory can't be read. The error says which directory is meant.
    """
    from fscoord.trace.reading import read

    try:
        trace = read(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = f"{error.strerror}; name the directory that {ENVIRONMENT_VARIABLE} had"
        raise OSError(error.errno, reason, directory) from error
    for text in trace.unreadable:
        click.echo(f"fscoord: {printable(text)}", err=True)
    return trace


def _write_whole(path: str, text: str) -> None:
    """Write `text` to the file `path`, which appears or changes as a whole, or not at all.

    Raises:
        OSError: the file can't be written. The error names `path`.
    """
    try:
        if system.os.path.exists(path) and not system.os.path.isfile(path):  # a device, such as /dev/stdout
            _write(path, text, 0)
        else:
            _replace(system.os.path.realpath(path), text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _replace(target: str, text: str) -> None:
    draft = f"{target}.{system.random_bytes(4).hex()}"
    try:
        _write(draft, text, system.os.O_CREAT | system.os.O_EXCL)
        system.os.replace(draft, target)
    except BaseException:
        with suppress(OSError):
            system.os.unlink(draft)
        raise


def _write(path: str, text: str, flags: int) -> None:
    fd = system.os.open(path, system.os.O_WRONLY | system.O_CLOEXEC | flags, 0o644)
    with system.os.fdopen(fd, "w", encoding="utf-8") as file:
        if not flags and system.stat.S_ISREG(system.os.fstat(fd).st_mode):  # another user has just put it there
            raise FileExistsError(system.errno.EEXIST, system.os.strerror(system.errno.EEXIST), path)
        file.write(text)


# -- tables ------------------------------------------------------------------------------------------------------------


def _print(found: dict[str, Any]) -> None:
    console = new_console()
    processes = found["processes"]
    hosts = {process["host"] for process in processes}
    spans = sum(process["spans"] for process in processes)
    console.print(
        f"{counted(spans, 'span')} of {counted(len(processes), 'process')} on {counted(len(hosts), 'host')}, in"
        f" {printable(found['directory'])}",
        soft_wrap=True,
    )
    for process in processes:
        if process["damaged_lines"] or process["overwritten"]:
            lost = f"{process['damaged_lines']} damaged lines were skipped" if process["damaged_lines"] else ""
            old = "its oldest spans were overwritten" if process["overwritten"] else ""
            console.print(f"{printable(process['title'])}: {', and '.join(filter(None, [lost, old]))}", soft_wrap=True)
    tables = (
        ("The ranks that came last to barriers, and the rank-seconds that the others waited", _last(found)),
        ("Waiting time by name", _waiting(found)),
        ("Locks and elections", _contention(found)),
        ("The processes that waited for a lock, and its holders meanwhile", _pairs(found)),
        ("Deaths", _deaths(found)),
        ("The longest waits", _longest(found["longest"])),
        ("Waits without an end", _longest(found["open"])),
        ("Time-outs", _time_outs(found)),
        ("Clocks", _clocks(found)),
    )
    for title, (headings, rows) in tables:
        if rows:
            console.print(f"\n{title}", style="bold")
            table = new_table(headings, NUMBERS)
            for row in rows[:ROWS]:
                table.add_row(*map(printable, row))
            console.print(table)
            if len(rows) > ROWS:
                console.print(f"and {len(rows) - ROWS} more, which --json shows")


Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _last(found: dict[str, Any]) -> Rows:
    headings = ("", "last", "barriers", "uncertain", "cost", "avoidable", "worst")
    return headings, [
        (
            row["title"],
            str(row["last"]),
            str(row["barriers"]),
            str(row["uncertain"]),
            _time(row["cost_rank_s"]),
            _time(row["avoidable_rank_s"]),
            f"{row['worst']['name']} ({_time(row['worst']['cost_rank_s'])})",
        )
        for row in found["last_to_come"]
    ]


def _waiting(found: dict[str, Any]) -> Rows:
    headings = ("kind", "name", "waits", "total", "longest", "by")
    return headings, [
        (row["kind"], row["name"], str(row["waits"]), _time(row["total"]), _time(row["longest"]), row["longest_by"])
        for row in found["waiting"]
    ]


def _contention(found: dict[str, Any]) -> Rows:
    headings = ("kind", "name", "acquired", "contended", "waited", "held")
    return headings, [
        (row["kind"], row["name"], *_numbers(row, "acquired", "contended"), _time(row["waited"]), _time(row["held"]))
        for row in found["contention"]
    ]


def _numbers(row: dict[str, Any], *names: str) -> Iterable[str]:
    return (str(row[name]) for name in names)


def _pairs(found: dict[str, Any]) -> Rows:
    return ("name", "waiter", "holder", "seconds"), [
        (row["name"], pair["waiter"], pair["holder"], _time(pair["seconds"]))
        for row in found["contention"]
        for pair in row["pairs"]
    ]


def _deaths(found: dict[str, Any]) -> Rows:
    headings = ("process", "rank", "recorded by", "after its exit", "after its last sign")
    return headings, [
        (
            row["process"],
            "" if row["rank"] is None else str(row["rank"]),
            row["recorded_by"],
            *("unknown" if row[name] is None else _time(row[name]) for name in ("since_exit", "since_last_sign")),
        )
        for row in found["deaths"]
    ]


def _longest(waits: list[dict[str, Any]]) -> Rows:
    headings = ("", "kind", "name", "seconds", "outcome", "ended by")
    return headings, [
        (row["title"], row["kind"], row["name"], _time(row["seconds"]), row["outcome"], row["ended_by"])
        for row in waits
    ]


def _time_outs(found: dict[str, Any]) -> Rows:
    return ("", "kind", "name", "seconds"), [
        (row["title"], row["kind"], row["name"], _time(row["seconds"])) for row in found["time_outs"]
    ]


def _clocks(found: dict[str, Any]) -> Rows:
    headings = ("hosts that can be compared", "reference", "wrong by at most", "offsets")
    return headings, [
        (host["host"], group["reference"], _time(host["bound"]), str(host["fixes"]))
        for group in found["clocks"]
        for host in group["hosts"]
        if len(found["clocks"]) > 1 or len(group["hosts"]) > 1
    ]


def _time(seconds: float) -> str:
    return f"{seconds:.6f}" if abs(seconds) < 1 else f"{seconds:.3f}"
