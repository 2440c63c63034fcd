"""The verb trace: tables, Chrome trace events and a page, from the files that traced processes have written."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import click

from fscoord._runtime import system
from fscoord._runtime.escaping import shell_word
from fscoord._runtime.tracing import ENVIRONMENT_VARIABLE
from fscoord.cli.exit_codes import USAGE
from fscoord.cli.options import DirectoryPath, as_json, verbose
from fscoord.cli.output import counted, say, show, table_lines

if TYPE_CHECKING:
    from fscoord.trace.reading import Trace

ROWS: Final = 20
"""The most rows of a table. The output of --json has all rows."""

_directory = click.argument("directory", metavar="DIR", type=DirectoryPath(file_okay=False))


class _Verbs(click.Group):
    """A group that answers a directory without a verb with a whole command."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in self.commands and system.os.path.isdir(args[0]):
            raise click.UsageError(f"a verb is missing: type 'fscoord trace report {shell_word(args[0])}'", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Verbs, invoke_without_command=True, subcommand_metavar="VERB [ARGUMENTS]...")
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
    waits. Times are in seconds. The cost of a rank is the sum of the times for which the other ranks waited for that
    rank, in rank-seconds. The clocks of two hosts are compared by the barriers that both hosts have passed. If the
    comparison does not show which rank came last, the table says "uncertain".

    \b
    Examples:
      fscoord trace report traces
      fscoord trace report --json traces | jq '.last_to_come[0].rank'
    """
    from fscoord.trace.report import make_report

    found = make_report(_read(directory))
    show(as_json, found, _lines(found))


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
    write_whole(output, json.dumps(document, separators=(",", ":")))
    say(f"{output} has {len(document['traceEvents'])} events")


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

    write_whole(output, make_page(_read(directory)))
    say(f"{output} shows the trace in {directory}")


def _read(directory: str) -> Trace:
    """Return the trace in `directory`, and print which files in it can't be read.

    Raises:
        OSError: the directory can't be read. The error names the environment variable that should hold its path.
    """
    from fscoord.trace.reading import read

    try:
        trace = read(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = f"{error.strerror}; name the directory that {ENVIRONMENT_VARIABLE} had"
        raise OSError(error.errno, reason, directory) from error
    for text in trace.unreadable:
        say(text)
    return trace


def write_whole(path: str, text: str) -> None:
    """Write `text` to the file `path` atomically. A device is written to directly.

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


def _lines(found: dict[str, Any]) -> list[str]:
    from fscoord.trace.report import tables

    processes = found["processes"]
    hosts = {process["host"] for process in processes}
    spans = counted(sum(process["spans"] for process in processes), "span")
    places = f"{counted(len(processes), 'process')} on {counted(len(hosts), 'host')}"
    lines = [f"{spans} of {places}, in {found['directory']}"]
    for process in processes:
        if process["damaged_lines"] or process["overwritten"]:
            lost = f"{process['damaged_lines']} damaged lines were skipped" if process["damaged_lines"] else ""
            old = "its oldest spans were overwritten" if process["overwritten"] else ""
            lines.append(f"{process['title']}: {', and '.join(filter(None, [lost, old]))}")
    for table in tables(found):
        numbers = {heading for heading, is_numeric in zip(table.headings, table.numeric(), strict=True) if is_numeric}
        lines += ["", table.title]
        lines += table_lines(table.headings, [tuple(map(_text, row)) for row in table.rows[:ROWS]], numbers)
        if len(table.rows) > ROWS:
            lines.append(f"and {len(table.rows) - ROWS} more, which --json shows")
    return lines


def _text(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.6f}" if abs(value) < 1 else f"{value:.3f}"
