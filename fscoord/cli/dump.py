"""The verb dump: the records of a log, for people and for programs."""

from __future__ import annotations

import click

from fscoord._runtime import system
from fscoord.cli.options import as_json, file_path, store_option, store_url, verbose
from fscoord.cli.output import field, printable, write, write_json
from fscoord.inspect import Entry, dump as entries

__all__ = ["dump"]

SHORT = 60
"""How many bytes of a value are shown, unless all are asked for."""


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
            write(_line(entry, value).encode())


def _line(entry: Entry, value: bytes) -> str:
    rest = len(entry.value) - len(value)
    more = f" ... and {rest} bytes more" if rest else ""
    key = printable(entry.key).replace(" ", "\\x20") or "-"  # so that the value begins behind the same space
    return f"{entry.offset:>10} {_when(entry.time)} {entry.writer:>4} {entry.kind:<11} {key} {printable(value)}{more}\n"


def _when(seconds: float) -> str:
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
