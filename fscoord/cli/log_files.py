"""The verbs on the log file of a file store: dump, verify, repair, cp, compact."""

from __future__ import annotations

from typing import Any

import click

from fscoord._runtime import system
from fscoord.cli.exit_codes import DAMAGED, FALSE
from fscoord.cli.options import as_json, common, file_path, store_option, store_url, time_limit, verbose
from fscoord.cli.output import Progress, field, printable, write, write_json
from fscoord.inspect import (
    Entry,
    Finding,
    Repair,
    Report,
    Skipped,
    copy,
    dump as entries,
    repair as copy_sound,
    verify as look,
)
from fscoord.stores.file import FileStore
from fscoord.stores.url import open_store

__all__ = ["compact", "cp", "dump", "log_path", "repair", "verify"]

SHORT = 60
"""How many bytes of a value are shown, unless all are asked for."""

_JSON_NAMES = {"skipped": "dropped", "skipped_bytes": "dropped_bytes"}
"""Fields of `Repair` whose names in JSON were fixed before."""


@click.command()
@click.option("--full", is_flag=True, help=f"Show values whole, not only their first {SHORT} bytes.")
@as_json
@store_option
@verbose
@click.pass_context
def dump(ctx: click.Context, full: bool, as_json: bool) -> None:
    """Print the records of a file store's log.

    Each is a line with its offset, time (UTC), writer, kind, key and value. Changes nothing, and works on a
    damaged log too: what stands before the damage is printed, then the error names the offset (exit code 65). With
    --json every record is one line, and value_size says how long its value is. Of a log that was compacted the
    oldest file, up to its seal, and the newest are shown.

    \b
    Examples:
      fscoord dump --store /shared/job/store
      fscoord dump --json | jq -r 'select(.kind == "set") | .key'
    """
    path = file_path(store_url(ctx))
    if path is None:
        raise click.UsageError("only the log of a file store can be dumped", ctx)
    for entry in entries(path):
        value = entry.value if full else _beginning(entry.value)
        if as_json:
            write_json(
                {
                    "generation": entry.generation,
                    "offset": entry.offset,
                    "time": entry.time,
                    "writer": entry.writer,
                    "kind": entry.kind,
                    **field("key", entry.key),
                    **field("value", value),
                    "value_size": len(entry.value),
                }
            )
        else:
            write(_entry_line(entry, value).encode())


def _entry_line(entry: Entry, value: bytes) -> str:
    rest = len(entry.value) - len(value)
    more = f" ... and {rest} bytes more" if rest else ""
    key = printable(entry.key).replace(" ", "\\x20") or "-"  # so that the value begins behind the same space
    head = f"{entry.offset:>10} {_utc_text(entry.time)} {entry.writer:>4} {entry.kind:<11}"
    return f"{head} {key} {printable(value)}{more}\n"


def _utc_text(seconds: float) -> str:
    try:
        text = system.time.strftime("%Y-%m-%dT%H:%M:%S", system.time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a writer's clock may have been set to anything
        return f"{seconds:<24g}"
    return f"{text}.{int(seconds % 1 * 1000):03}Z"


def _beginning(value: bytes) -> bytes:
    """Return the first bytes of `value`, without cutting a sign of UTF-8 in two."""
    end = SHORT
    while len(value) > end > SHORT - 4 and value[end] & 0xC0 == 0x80:
        end -= 1
    return value[:end]


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
        report = look(log_path(ctx, path), timeout=timeout, on_progress=progress.report)
    if as_json:
        write_json(_report_document(report))
    else:
        write(_report_text(report).encode())
    return DAMAGED if report.verdict == "damaged" else 0


def log_path(ctx: click.Context, path: str | None) -> str:
    """Return the path of the file store that the argument or the common options name."""
    found = file_path(store_url(ctx) if path is None else path)
    if found is None:
        raise click.UsageError("only file stores have a log", ctx)
    return found


def _report_document(report: Report) -> dict[str, Any]:
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


def _report_text(report: Report) -> str:
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


class _NewFile(click.Path):
    """A path, as the shell passed it."""

    name = "file"


@click.command()
@click.argument("path", required=False)
@click.option("-o", "--output", type=_NewFile(), required=True, help="Where the copy goes. Nothing may be there.")
@click.option("--salvage", is_flag=True, help="Copy what is sound behind the damage, too.")
@click.option("--yes", is_flag=True, help="Write the copy; without it only say what would be left out.")
@lock_option
@as_json
@store_option
@verbose
@click.pass_context
def repair(
    ctx: click.Context, path: str | None, output: str, salvage: bool, yes: bool, timeout: float, as_json: bool
) -> int:
    """Copy what is sound of a damaged log to another file.

    The log at PATH, or of the store that --store names, is only read; who writes to it waits meanwhile. Every record
    that is left out is printed. What stands behind the damage is left out, so that the copy holds what the store has
    once held; with --salvage it is copied, too, and may not fit together: a record that is lost may have been a
    delete, or half of a count.

    \b
    Exit codes:
        0  the copy is written
        1  it is not, for --yes was not given
       65  nothing can be copied, or only with --salvage

    \b
    Examples:
      fscoord repair /shared/job/store --output /shared/job/store.repaired
      fscoord repair /shared/job/store --output /shared/job/store.repaired --yes
    """
    with Progress("copying") as progress:
        found = copy_sound(
            log_path(ctx, path),
            output,
            salvage=salvage,
            write=yes,
            timeout=timeout,
            on_progress=progress.report,
            on_skipped=_print_skipped_json if as_json else _print_skipped,
        )
    if as_json:
        fields = {**found._asdict(), "notes": list(found.notes)}
        write_json({_JSON_NAMES.get(name, name): value for name, value in fields.items()})
    else:
        write(_repair_text(found).encode())
    return 0 if found.is_written else FALSE


def _print_skipped(skipped: Skipped) -> None:
    what = ""
    if skipped.kind:
        sure = "" if skipped.is_certain else ", as it says of itself"
        key = f" {printable(skipped.key)}" if skipped.key else ""
        what = f" ({skipped.kind}{key}, a value of {skipped.value_size} bytes, by session {skipped.writer}{sure})"
    write(f"left out: at {skipped.offset}, {skipped.size} bytes: {printable(skipped.why.encode())}{what}\n".encode())


def _print_skipped_json(skipped: Skipped) -> None:
    document: dict[str, Any] = {**skipped._asdict(), "file": _name(skipped.file)}
    del document["key"]
    write_json({**document, **field("key", skipped.key)})


def _repair_text(found: Repair) -> str:
    lines = [f"note: {_name(note)}" for note in found.notes]
    does = ("copied", "left out") if found.is_written else ("would be copied", "would be left out")
    left = f"{found.skipped} {does[1]} ({found.skipped_bytes} bytes)"
    lines.append(f"{_name(found.source)}: {found.kept} records {does[0]}, {left}")
    end = "is written: look at it with `fscoord verify`" if found.is_written else "was not written: that needs --yes"
    return "\n".join([*lines, f"{_name(found.output)} {end}", ""])


@click.command()
@click.argument("old")
@click.argument("new")
@lock_option
@as_json
@verbose
def cp(old: str, new: str, timeout: float, as_json: bool) -> int:
    """Copy the file store at OLD to NEW, where nothing may be.

    The log of a store may have several files, and cp(1) of the first one alone gives a second name to the others. This
    makes one complete file, and a store of its own. OLD may be in use: its writers wait for the copy.

    \b
    Exit codes:
        0  the copy is written
       65  OLD is damaged: see "fscoord repair"
       75  the lock of OLD did not come

    \b
    Examples:
      fscoord cp /shared/job/store /backup/store
    """
    with Progress("copying") as progress:
        made = copy(old, new, timeout=timeout, on_progress=progress.report)
    if as_json:
        write_json({"path": _name(made.path), "output": _name(made.output), "records": made.kept})
    else:
        write(f"{_name(made.output)}: {made.kept} records of {_name(made.source)}\n".encode())
    return 0


@click.command()
@common
@click.pass_context
def compact(ctx: click.Context) -> None:
    """Compact the log of a file store.

    What the store holds is written to a new file, in which the log goes on; whoever uses the store follows by itself.
    Stores that are written to compact their logs by themselves. This is for a log whose users have turned that off.

    \b
    Examples:
      fscoord compact --store /shared/job/store
    """
    url = store_url(ctx)
    if file_path(url) is None:
        raise click.UsageError("only the log of a file store can be compacted", ctx)
    open_store(url, read_only=True).close()  # so that a mistyped path makes no new store
    with open_store(url) as store:
        assert isinstance(store, FileStore), "file_path says so"
        store.compact()
