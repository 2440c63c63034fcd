"""The verb cp: a new store that holds what another one holds."""

from __future__ import annotations

import click

from fscoord._runtime import system
from fscoord.cli.options import as_json, verbose
from fscoord.cli.output import printable, write, write_json
from fscoord.cli.progress import Progress
from fscoord.cli.verify import lock_option
from fscoord.inspect import copy

__all__ = ["cp"]


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
        made = copy(old, new, timeout=timeout, on_progress=progress.tell)
    if as_json:
        write_json({"path": _name(made.path), "output": _name(made.output), "records": made.kept})
    else:
        write(f"{_name(made.output)}: {made.kept} records of {_name(made.source)}\n".encode())
    return 0


def _name(text: str) -> str:
    return printable(system.os.fsencode(text))
