"""The verb repair: what is sound of a damaged log, in another file."""

from __future__ import annotations

from typing import Any

import click

from fscoord._runtime import system
from fscoord.cli.exits import FALSE
from fscoord.cli.options import as_json, store_option, verbose
from fscoord.cli.output import field, printable, write, write_json
from fscoord.cli.progress import Progress
from fscoord.cli.verify import lock_option, log_path
from fscoord.inspect import Repair, Skipped, repair as copy_sound

__all__ = ["repair"]

_JSON_NAMES = {"skipped": "dropped", "skipped_bytes": "dropped_bytes"}


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
            on_progress=progress.tell,
            on_skipped=_report_json if as_json else _report,
        )
    if as_json:
        fields = {**found._asdict(), "notes": list(found.notes)}
        write_json({_JSON_NAMES.get(name, name): value for name, value in fields.items()})
    else:
        write(_text(found).encode())
    return 0 if found.is_written else FALSE


def _report(skipped: Skipped) -> None:
    what = ""
    if skipped.kind:
        sure = "" if skipped.is_certain else ", as it says of itself"
        key = f" {printable(skipped.key)}" if skipped.key else ""
        what = f" ({skipped.kind}{key}, a value of {skipped.value_size} bytes, by session {skipped.writer}{sure})"
    write(f"left out: at {skipped.offset}, {skipped.size} bytes: {printable(skipped.why.encode())}{what}\n".encode())


def _report_json(skipped: Skipped) -> None:
    document: dict[str, Any] = {**skipped._asdict(), "file": _name(skipped.file)}
    del document["key"]
    write_json({**document, **field("key", skipped.key)})


def _text(found: Repair) -> str:
    lines = [f"note: {_name(note)}" for note in found.notes]
    does = ("copied", "left out") if found.is_written else ("would be copied", "would be left out")
    left = f"{found.skipped} {does[1]} ({found.skipped_bytes} bytes)"
    lines.append(f"{_name(found.source)}: {found.kept} records {does[0]}, {left}")
    end = "is written: look at it with `fscoord verify`" if found.is_written else "was not written: that needs --yes"
    return "\n".join([*lines, f"{_name(found.output)} {end}", ""])


def _name(text: str) -> str:
    return printable(system.os.fsencode(text))
