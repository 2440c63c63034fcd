"""The verbs join and group: take part in a group while a command runs, see who takes part."""

from __future__ import annotations

import logging
from typing import Any

import click

from fscoord._runtime.signals import signals_end_it
from fscoord.cli.holding import VERBATIM, command_options, environment, words
from fscoord.cli.options import as_json, raw, with_store
from fscoord.cli.output import field, printable, write, write_json
from fscoord.errors import LockLostError
from fscoord.launch import run_held
from fscoord.recipes import Membership, Participant
from fscoord.store import Store

__all__ = ["group", "join"]

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
    command = words(options)
    with signals_end_it(), Membership(store, name, data) as membership:
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
        write_json([_document(each) for each in found])
        return
    for each in found:
        owner = printable(each.owner.encode("utf-8", "surrogateescape"))
        write(f"{each.number:>5} {owner:<24} {printable(each.data)}".rstrip().encode() + b"\n")


def _document(each: Participant) -> dict[str, Any]:
    return {"number": each.number, "owner": each.owner, "session": each.session, **field("data", each.data)}
