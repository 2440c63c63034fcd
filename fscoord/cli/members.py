"""The verb members: who has the store open, and who of them lives."""

from __future__ import annotations

import click

from fscoord._runtime import system
from fscoord.cli.options import as_json, with_existing_store
from fscoord.cli.output import printable, write, write_json
from fscoord.store import Member, Store

__all__ = ["members"]


@click.command()
@as_json
@with_existing_store
def members(store: Store, as_json: bool) -> None:
    """Print who has, or had, the store open.

    Each is a line with its number, whether it lives (yes, no, unknown), host:pid, rank, since when (UTC), and label.
    Changes nothing: a death that no other process has recorded yet is shown as the kernel tells it now.

    \b
    Examples:
      fscoord members
      fscoord members --json | jq -r '.[] | select(.alive == "no") | .rank'
    """
    found = store.members()
    if as_json:
        write_json([member._asdict() for member in found])
        return
    for member in found:
        write(_line(member).encode())


def _line(member: Member) -> str:
    rank = "-" if member.rank is None else str(member.rank)
    place = printable(f"{member.host}:{member.pid}".encode("utf-8", "surrogateescape"))
    label = printable(member.label.encode("utf-8", "surrogateescape"))
    return f"{member.number:>5} {member.alive:<7} {place:<24} {rank:>5} {_when(member.since)} {label}".rstrip() + "\n"


def _when(seconds: float) -> str:
    try:
        return system.time.strftime("%Y-%m-%dT%H:%M:%SZ", system.time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # its clock may have been set to anything
        return f"{seconds:g}"
