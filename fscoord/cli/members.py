"""The verbs on participants: members, which lists the sessions of a store, and join and group for its groups."""

from __future__ import annotations

import logging
from typing import Any

import click

from fscoord._runtime import system
from fscoord._runtime.signals import raise_on_termination
from fscoord.cli.options import as_json, raw, with_existing_store, with_store
from fscoord.cli.output import field, printable, write, write_json
from fscoord.cli.run_command import VERBATIM, command_options, environment, parse_command
from fscoord.errors import LockLostError
from fscoord.launch import run_held
from fscoord.recipes import Membership, Participant
from fscoord.store import Member, Store

__all__ = ["group", "join", "members"]


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
        write(_member_line(member).encode())


def _member_line(member: Member) -> str:
    rank = "-" if member.rank is None else str(member.rank)
    place = printable(f"{member.host}:{member.pid}".encode("utf-8", "surrogateescape"))
    label = printable(member.label.encode("utf-8", "surrogateescape"))
    return (
        f"{member.number:>5} {member.alive:<7} {place:<24} {rank:>5} {_utc_text(member.since)} {label}".rstrip() + "\n"
    )


def _utc_text(seconds: float) -> str:
    try:
        return system.time.strftime("%Y-%m-%dT%H:%M:%SZ", system.time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # its clock may have been set to anything
        return f"{seconds:g}"


log = logging.getLogger(__name__)

name_argument = click.argument("name", type=raw)


@click.command(context_settings=VERBATIM)
@click.option("--data", type=raw, default="", help="What others should know of this process.")
@name_argument
@command_options
@with_store
def join(store: Store, /, name: bytes, data: bytes, **options: Any) -> int:
    """Run COMMAND while taking part in the group NAME.

    "fscoord group" tells who takes part. Who dies does so no longer. COMMAND finds the store in FSCOORD_STORE, and the
    rest is as with "fscoord lock": it ends with this process, and if that was taken for dead.

    \b
    Examples:
      fscoord join --data "$(hostname):8080" workers -- ./serve --port 8080
    """
    command = parse_command(options)
    with raise_on_termination(), Membership(store, name, data) as membership:
        log.info("takes part in %r", membership.name)
        own = store.register()

        def check() -> None:
            if own and not any(each.session == own for each in membership.members()):
                raise LockLostError(f"this process takes part in {membership.name!r} no longer: it was taken for dead")

        ending = run_held(command, environment(None), check, grace=options["grace"], leaves_rest=options["close"])
    return ending.code


@click.command()
@name_argument
@as_json
@with_store
def group(store: Store, name: bytes, as_json: bool) -> None:
    """Print who takes part in the group NAME.

    Each is a line, in the order of joining: a number, host:pid, and what it has to say. Who has died is taken out.

    \b
    Examples:
      fscoord group workers
      fscoord group --json workers | jq -r '.[].data'
    """
    found = Membership(store, name).members()
    if as_json:
        write_json([_participant_document(each) for each in found])
        return
    for each in found:
        owner = printable(each.owner.encode("utf-8", "surrogateescape"))
        write(f"{each.number:>5} {owner:<24} {printable(each.data)}".rstrip().encode() + b"\n")


def _participant_document(each: Participant) -> dict[str, Any]:
    return {"number": each.number, "owner": each.owner, "session": each.session, **field("data", each.data)}
