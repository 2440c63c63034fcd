"""The verbs on the log file of a file store: dump, verify, repair, cp, compact."""

from __future__ import annotations

from typing import Any

import click

from fscoord import inspect
from fscoord._runtime.escaping import printable, shell_word
from fscoord.cli.exit_codes import DAMAGED, FALSE
from fscoord.cli.options import (
    as_json,
    common,
    complete_file,
    json_option,
    named_url,
    seconds_option,
    store_argument,
    store_option,
    store_url,
    time_limit,
    verbose,
)
from fscoord.cli.output import Progress, show, utc_text, write, write_json
from fscoord.cli.records import RecordWords
from fscoord.stores.file import FileStore
from fscoord.stores.url import file_path, open_store

SHORT = 60
"""How many bytes of a value are shown without --full."""

HEADINGS = f"{'OFFSET':>10} {'TIME (UTC)':<24} {'WRITER':>6} {'KIND':<11} KEY VALUE\n"

_JSON_NAMES = {"skipped": "dropped", "skipped_bytes": "dropped_bytes"}
"""Fields of `Repair` that have another name in JSON."""


@click.command()
@click.option("--full", is_flag=True, help=f"Print whole values instead of their first {SHORT} bytes.")
@json_option("Print each record as one line of JSON.")
@store_argument("STORE")
@store_option
@verbose
@click.pass_context
def dump(ctx: click.Context, full: bool, as_json: bool) -> None:
    """Print the records of a file store's log.

    Each record is a line: its offset in bytes, its time, the number of the session that wrote it, its kind, its key
    and its value. The values that fscoord itself writes are put into words: which session was found dead, which rank
    arrived, which process holds a lock.

    With --json each record is one line of JSON. Its field value_size is the number of bytes of the whole value.

    The verb changes nothing. It also works on a damaged log: it prints the records before the damage, and then the
    error names the offset (exit code 65). The log of a compacted store has several files. The verb prints the oldest
    file, up to the record that refers to the next file, and then the newest file.

    \b
    Examples:
      fscoord dump /shared/job/store
      fscoord dump --json | jq -r 'select(.kind == "set") | .key'
    """
    path = log_path(store_url(ctx), ctx)
    in_words, headings = RecordWords(), HEADINGS
    for entry in inspect.dump(path):
        value = entry.value if full else _beginning(entry.value)
        if as_json:
            write_json({**entry._asdict(), "value": value, "value_size": len(entry.value)})
        else:
            write((headings + _entry_line(entry, value, in_words.words(entry))).encode())
            headings = ""


def _entry_line(entry: inspect.Entry, value: bytes, words: str | None) -> str:
    rest = len(entry.value) - len(value)
    more = f" ... and {rest} bytes more" if rest else ""
    key = printable(entry.key).replace(" ", "\\x20") or "-"  # so that the value begins after the same space
    time = utc_text(entry.time, f"%Y-%m-%dT%H:%M:%S.{int(entry.time % 1 * 1000):03}Z")
    head = f"{entry.offset:>10} {time:<24} {entry.writer:>6} {entry.kind:<11}"
    return f"{head} {key} {printable(value) + more if words is None else words}".rstrip() + "\n"


def _beginning(value: bytes) -> bytes:
    """Return the first bytes of `value`, without splitting a character of UTF-8."""
    end = SHORT
    while len(value) > end > SHORT - 4 and value[end] & 0xC0 == 0x80:
        end -= 1
    return value[:end]


lock_option = seconds_option("--timeout", kind=time_limit, default=10, help="How long to wait for the log lock.")


@click.command()
@store_argument("PATH")
@lock_option
@as_json
@store_option
@verbose
@click.pass_context
def verify(ctx: click.Context, timeout: float, as_json: bool) -> int:
    """Check whether the log of a file store is sound.

    Reads the log at PATH, or that of the store that --store names, from end to end, with all its generations. For each
    fault it prints the place, the number of bytes concerned, and what is safe to do.

    Changes nothing, and needs only permission to read. The store may be in use.

    \b
    Exit codes:
        0  sound, also if the last record was never finished, or if no writer has opened the log yet
       65  damaged, or not a log
       75  another process kept the log lock, so nothing is certain

    \b
    Examples:
      fscoord verify /shared/job/store
      fscoord verify --json /shared/job/store | jq -r .verdict
    """
    with Progress("reading") as progress:
        report = inspect.verify(log_path(store_url(ctx), ctx), timeout=timeout, on_progress=progress.report)
    show(as_json, _report_document(report), _report_lines(report))
    return DAMAGED if report.verdict == "damaged" else 0


def log_path(url: str, ctx: click.Context) -> str:
    """Return the path of the file store at `url`. Raise `click.UsageError` for another kind of store."""
    path = file_path(url)
    if path is None:
        raise click.UsageError("only file stores have a log", ctx)
    return path


def _report_document(report: inspect.Report) -> dict[str, Any]:
    return {
        "path": report.path,
        "verdict": report.verdict,
        "files": [entry._asdict() for entry in report.generations],
        "findings": [_finding(finding) for finding in report.findings],
        "more_findings": report.more,
    }


def _finding(finding: inspect.Finding) -> dict[str, Any]:
    fields = {**finding._asdict(), "message": printable(finding.message), "advice": printable(finding.advice)}
    return {"says" if name == "message" else name: value for name, value in fields.items()}


def _report_lines(report: inspect.Report) -> list[str]:
    lines = [f"{report.path}: {report.verdict.upper()}"]
    for entry in report.generations:
        voids = f", {entry.voids} voided" if entry.voids else ""
        lines.append(
            f"  generation {entry.generation}: {entry.records} records{voids}, {entry.size} bytes, {entry.ends}:"
            f" {entry.file}"
        )
    for finding in report.findings:
        place = f"at {finding.offset}, {finding.size} bytes: " if finding.offset or finding.size else ""
        kind = "DAMAGED" if finding.is_damage else "note"
        lines += [
            f"{kind}: {finding.file}: {place}{finding.message}",
            f"  do: {finding.advice}",
        ]
    if report.more:
        lines.append(f"... and {report.more} more findings")
    return lines


@click.command()
@store_argument("PATH")
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    required=True,
    shell_complete=complete_file,
    help="The path of the copy. No file may be there.",
)
@click.option("--salvage", is_flag=True, help="Also copy the sound records after the damage.")
@click.option("--yes", is_flag=True, help="Write the copy. Without it only report what would be left out.")
@lock_option
@json_option("Print each record that is left out as one line of JSON, and the report as the last line.")
@store_option
@verbose
@click.pass_context
def repair(ctx: click.Context, output: str, salvage: bool, yes: bool, timeout: float, as_json: bool) -> int:
    """Copy the sound records of a damaged log to a new file.

    Reads the log at PATH, or that of the store that --store names, and does not change it. Processes that write to the
    store wait until the verb ends. Prints each record that is left out. Without --yes it writes nothing.

    All records after the first damage are left out, so the copy is a state that the store has really had. With
    --salvage the sound records after the damage are copied, too. Then the copy may be a state that the store never had,
    because a lost record may have been a delete, or one of two records that belong together.

    \b
    Exit codes:
        0  the copy is written
        1  nothing was written, because --yes was not given
       65  nothing can be copied, or only with --salvage

    \b
    Examples:
      fscoord repair /shared/job/store --output /shared/job/repaired
      fscoord repair /shared/job/store --output /shared/job/repaired --yes
    """
    with Progress("copying") as progress:
        found = inspect.repair(
            log_path(store_url(ctx), ctx),
            output,
            salvage=salvage,
            write=yes,
            timeout=timeout,
            on_progress=progress.report,
            on_skipped=_print_skipped_json if as_json else _print_skipped,
        )
    fields = {**found._asdict(), "notes": list(map(printable, found.notes))}
    document = {_JSON_NAMES.get(name, name): value for name, value in fields.items()}
    show(as_json, document, _repair_lines(found))
    return 0 if found.is_written else FALSE


def _print_skipped(skipped: inspect.Skipped) -> None:
    what = ""
    if skipped.kind:
        sure = "" if skipped.is_certain else ", unverified"
        key = f" {printable(skipped.key)}" if skipped.key else ""
        what = f" ({skipped.kind}{key}, a value of {skipped.value_size} bytes, by session {skipped.writer}{sure})"
    write(f"left out: at {skipped.offset}, {skipped.size} bytes: {printable(skipped.why.encode())}{what}\n".encode())


def _print_skipped_json(skipped: inspect.Skipped) -> None:
    write_json({**skipped._asdict(), "why": printable(skipped.why)})


def _repair_lines(found: inspect.Repair) -> list[str]:
    lines = [f"note: {note}" for note in found.notes]
    does = ("copied", "left out") if found.is_written else ("would be copied", "would be left out")
    left = f"{found.skipped} {does[1]} ({found.skipped_bytes} bytes)"
    lines.append(f"{found.source}: {found.kept} records {does[0]}, {left}")
    end = (
        f"is written: check it with `fscoord verify {shell_word(found.output)}`"
        if found.is_written
        else "was not written: that needs --yes"
    )
    return [*lines, f"{found.output} {end}"]


@click.command()
@click.argument("old", shell_complete=complete_file)
@click.argument("new", shell_complete=complete_file)
@lock_option
@as_json
@verbose
@click.pass_context
def cp(ctx: click.Context, old: str, new: str, timeout: float, as_json: bool) -> int:
    """Copy the file store at OLD to NEW, where no file may exist yet.

    The log of a store may have several files. cp(1) copies only the first file, and that copy refers to the
    other files of OLD. This verb makes one complete file, which is a store of its own. OLD may be in use. Its writers
    wait for the end of the copy.

    \b
    Exit codes:
        0  the copy is written
       65  OLD is damaged: see "fscoord repair"
       75  another process kept the lock of OLD

    \b
    Examples:
      fscoord cp /shared/job/store /backup/store
    """
    paths = [log_path(named_url(ctx, argument), ctx) for argument in (old, new)]
    with Progress("copying") as progress:
        made = inspect.copy(paths[0], paths[1], timeout=timeout, on_progress=progress.report)
    document = {"path": made.path, "output": made.output, "records": made.kept}
    line = f"{made.output}: {made.kept} records of {made.source}"
    show(as_json, document, [line])
    return 0


@click.command()
@store_argument("STORE")
@common
@click.pass_context
def compact(ctx: click.Context) -> None:
    """Compact the log of a file store.

    Writes the contents of the store to a new file, and continues the log there. Processes that use the store need do
    nothing. Most stores compact their logs by themselves. The verb is for stores opened with compact_bytes=0.

    \b
    Examples:
      fscoord compact /shared/job/store
    """
    url = store_url(ctx)
    log_path(url, ctx)  # refuses a store without a log
    open_store(url, read_only=True).close()  # so that a mistyped path makes no new store
    with open_store(url, world_size=None) as store:
        assert isinstance(store, FileStore), "file_path says so"
        store.compact()
