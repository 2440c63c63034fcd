"""The verb verify: whether the log of a file store is sound, for people and for programs."""

from __future__ import annotations

from typing import Any

import click

from fscoord._runtime import system
from fscoord.cli.exits import DAMAGED
from fscoord.cli.options import as_json, file_path, store_option, store_url, time_limit, verbose
from fscoord.cli.output import printable, write, write_json
from fscoord.cli.progress import Progress
from fscoord.inspect import Finding, Report, verify as look

__all__ = ["log_path", "verify"]

LOCK_LIMIT_S = 10.0

lock_option = click.option(
    "--timeout",
    type=time_limit,
    default=LOCK_LIMIT_S,
    metavar="SECONDS",
    show_default=True,
    help="How long to wait for the log's lock.",
)


@click.command()
@click.argument("path", required=False)
@lock_option
@as_json
@store_option
@verbose
@click.pass_context
def verify(ctx: click.Context, path: str | None, timeout: float, as_json: bool) -> int:
    """Tell whether the log of a file store is sound.

    Reads the log at PATH, or of the store that --store names, from end to end with all its later files, and says of
    everything that is wrong where it is, how much it concerns and what is safe to do. Changes nothing, needs no more
    than the right to read, and the store may be in use meanwhile.

    \b
    Exit codes:
        0  sound; a last record that was never finished is, too
       65  damaged
       75  somebody has kept the log's lock, so that nothing is certain

    \b
    Examples:
      fscoord verify /shared/job/store
      fscoord verify --json /shared/job/store | jq -r .verdict
    """
    with Progress("reading") as progress:
        report = look(log_path(ctx, path), timeout=timeout, on_progress=progress.tell)
    if as_json:
        write_json(_document(report))
    else:
        write(_text(report).encode())
    return DAMAGED if report.verdict == "damaged" else 0


def log_path(ctx: click.Context, path: str | None) -> str:
    """Return the path of the file store that is meant, by an argument or by the common options."""
    found = file_path(store_url(ctx) if path is None else path)
    if found is None:
        raise click.UsageError("only file stores have a log", ctx)
    return found


def _document(report: Report) -> dict[str, Any]:
    return {
        "path": _name(report.path),
        "verdict": report.verdict,
        "files": [{**entry._asdict(), "file": _name(entry.file)} for entry in report.generations],
        "findings": [_finding(finding) for finding in report.findings],
        "more_findings": report.more,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    fields = {**finding._asdict(), "file": _name(finding.file)}
    return {"says" if name == "message" else name: value for name, value in fields.items()}


def _text(report: Report) -> str:
    lines = [f"{_name(report.path)}: {report.verdict.upper()}"]
    for entry in report.generations:
        voids = f", {entry.voids} voided" if entry.voids else ""
        lines.append(
            f"  generation {entry.generation}: {entry.records} records{voids}, {entry.size} bytes, {entry.ends}:"
            f" {_name(entry.file)}"
        )
    for finding in report.findings:
        place = f"at {finding.offset}, {finding.size} bytes: " if finding.offset or finding.size else ""
        lines += [
            f"{'DAMAGED' if finding.is_damage else 'note'}: {_name(finding.file)}: {place}{_name(finding.message)}",
            f"  do: {finding.advice}",
        ]
    if report.more:
        lines.append(f"... and {report.more} more of the kind")
    return "\n".join(lines) + "\n"


def _name(text: str) -> str:
    return printable(system.os.fsencode(text))
