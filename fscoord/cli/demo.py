"""The verb demo: shows the progress of the processes, and their report."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from fscoord._runtime import system
from fscoord._runtime.escaping import printable
from fscoord.cli.exit_codes import FALSE
from fscoord.cli.options import as_json, time_limit, verbose
from fscoord.cli.output import counted, new_console, new_table, write_json
from fscoord.cli.trace import write_page
from fscoord.demo.launcher import PROCESSES_MAX, run

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

__all__ = ["demo"]

NUMBERS = {"files", "words"}


@click.command()
@click.option(
    "-n",
    "--processes",
    metavar="NUMBER",
    type=click.IntRange(1, PROCESSES_MAX),
    default=4,
    show_default=True,
    help="How many processes to start.",
)
@click.option(
    "--input",
    "directory",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="The directory with the text. [default: the sources of fscoord itself]",
)
@click.option("--kill", is_flag=True, help="Kill one process during its work. The others name it and do its work.")
@click.option(
    "--timeout",
    type=time_limit,
    metavar="SECONDS",
    default=60,
    show_default=True,
    help="How long the processes wait for each other.",
)
@click.option(
    "--trace",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Record a trace in DIR, and write the page DIR/report.html. The page also shows earlier runs that DIR has.",
)
@as_json
@verbose
def demo(processes: int, directory: str | None, kill: bool, timeout: float, trace: str | None, as_json: bool) -> int:
    """Start some processes that share work through one store.

    They count the words in a directory of text files. They find each other through the store, which is a temporary file
    in $TMPDIR, take the files from a queue, and meet at barriers. The report has the work of each process, and how long
    each barrier took. Exits with 1 if a process was lost, by --kill or in another way.

    \b
    Examples:
      fscoord demo
      fscoord demo -n 8 --input /usr/share/doc
      fscoord demo --kill
      fscoord demo -n 8 --trace traces              # then open traces/report.html in a browser
      TMPDIR=/shared/tmp fscoord demo               # try the file system that your job will use
    """
    with _Display() as display:
        report = run(processes, directory, kill=kill, timeout=timeout, on_event=display.show, trace=trace)
    if trace is not None:
        write_page(trace, system.os.path.join(trace, "report.html"))
    if as_json:
        write_json(report)
    else:
        _print(report)
    return FALSE if report["lost"] else 0


class _Display:
    """Shows a progress bar on standard error, if that is a terminal, and the names of lost processes in any case."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def __enter__(self) -> _Display:
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("meeting", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Show one event of the demonstration."""
        if event["event"] == "lost":
            self._say(f"rank {event['by']} names the lost: {event['error']}")
        elif event["event"] == "holding" and event["file"] is not None:
            self._say(f"rank {event['rank']} has taken {event['file']} and is killed now")
        elif self._bar is None:
            pass
        elif event["event"] == "filled":
            self._bar.update(self._task, description="counting", total=event["files"])
        elif event["event"] == "delivered":
            self._bar.advance(self._task)

    def _say(self, line: str) -> None:
        if self._bar is None:
            click.echo(f"fscoord: {line}", err=True)
        else:
            self._bar.console.print(f"fscoord: {line}", markup=False, highlight=False, soft_wrap=True)


def _print(report: dict[str, Any]) -> None:
    console = new_console()
    console.print(
        f"{counted(report['words'], 'word')} ({counted(report['distinct_words'], 'different one')}) in"
        f" {counted(report['files'], 'file')} below {printable(report['input'])}, in {report['seconds']:.2f} s",
        soft_wrap=True,
    )
    most = ", ".join(f"{word} {count}" for word, count in report["top"])
    console.print(f"most frequent: {most}\n", soft_wrap=True)
    console.print(_processes(report), "")
    console.print(_barriers(report), "")
    for skipped in report["skipped"]:
        console.print(f"skipped {printable(skipped['file'])}: {skipped['reason']}", soft_wrap=True)
    for loss in report["lost"]:
        console.print(_loss(loss), soft_wrap=True)
    console.print(f"(reported by rank {report['reported_by']})", soft_wrap=True)


def _processes(report: dict[str, Any]) -> Table:
    table = _table("rank", "process", "Python", "files", "words", "")
    for each in report["processes"]:
        where = f"{each['pid']} on {each['host']}"
        fate = "LOST" if each["lost"] else ""
        table.add_row(str(each["rank"]), where, each["python"], str(each["files"]), str(each["words"]), fate)
    return table


def _barriers(report: dict[str, Any]) -> Table:
    table = _table("barrier", "the last to come waited", "the first to come waited")
    for each in report["barriers"]:
        table.add_row(each["name"], _milliseconds(each["shortest_wait_s"]), _milliseconds(each["longest_wait_s"]))
    return table


def _table(*headings: str) -> Table:
    return new_table(headings, [heading for heading in headings if "waited" in heading or heading in NUMBERS])


def _loss(loss: dict[str, Any]) -> str:
    redone = ", ".join(f"{printable(each['file'])} (by rank {each['by']})" for each in loss["redone"])
    return (
        f"rank {loss['rank']}, process {loss['pid']} on {loss['host']}, was lost to {loss['cause']}:"
        f" named by rank {', '.join(map(str, loss['named_by']))} at the barrier {loss['barrier']!r};"
        f" what it had taken and others did again: {redone or 'nothing'}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"
