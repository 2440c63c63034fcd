"""The verbs elect and leader: run a command while leading, see who leads."""

from __future__ import annotations

import logging
from typing import Any

import click

from fscoord._runtime import system
from fscoord.cli.options import as_json, content, raw, with_store
from fscoord.cli.output import field, printable, write, write_json
from fscoord.cli.run_command import (
    VERBATIM,
    command_options,
    parse_command,
    parse_hold_options,
    run_under,
    wait_options,
)
from fscoord.errors import LockLostError
from fscoord.recipes import Election
from fscoord.store import Store

__all__ = ["elect", "leader"]

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""How long a candidate rests whose command has failed, so that one that always fails does not keep the machine busy."""

name_argument = click.argument("name", type=raw)


@click.command(context_settings=VERBATIM)
@click.option("--data", type=raw, default="", help="What others should know of this candidate when it leads.")
@click.option(
    "--again", is_flag=True, help="Stand again when COMMAND fails or the office is lost, until it ends with 0."
)
@wait_options
@name_argument
@command_options
@with_store
def elect(store: Store, /, name: bytes, data: bytes, again: bool, **options: Any) -> int:
    """Run COMMAND while leading in the office NAME.

    Waits in line to be elected; the first leads until its COMMAND has ended, or it dies. "fscoord leader" tells who
    leads. COMMAND finds the term, which is a fencing token, in FSCOORD_TOKEN. The rest is as with "fscoord lock".

    \b
    Examples:
      fscoord elect --timeout inf scheduler -- ./scheduler
      fscoord elect --again --data "$(hostname):8080" front -- ./serve --port 8080
    """
    hold_options = parse_hold_options(store, options)
    command = parse_command(options)
    candidate = Election(store, name, content(data), ttl=hold_options.ttl)
    while True:
        try:
            ending = run_under(candidate, "the office", hold_options, command)
        except LockLostError as error:
            if not again:
                raise
            log.warning("%s", error)
        else:
            if ending is None:
                return hold_options.conflict_exit_code
            if not again or ending.code == 0 or ending.interruption:
                return ending.code
            log.warning("the command failed with exit code %d", ending.code)
        system.time.sleep(PAUSE_S)


@click.command()
@name_argument
@click.option("--after", type=click.IntRange(min=0), default=0, help="Wait for a later term than this one.")
@as_json
@with_store
def leader(store: Store, name: bytes, after: int, as_json: bool) -> None:
    """Print who leads in the office NAME.

    Waits until somebody does. It is a line of the term, host:pid, and what the leader has to say.

    \b
    Examples:
      fscoord leader front
      while read -r term owner address < <(fscoord leader --timeout inf --after "${term:-0}" front); do
          echo "now $address"
      done
    """
    log.info("waiting for a leader of %r, up to %s", name, store.timeout)
    found = Election(store, name).observe(after)
    if as_json:
        write_json({"term": found.term, "owner": found.owner, **field("data", found.data)})
    else:
        owner = printable(found.owner.encode("utf-8", "surrogateescape"))
        write(f"{found.term} {owner} {printable(found.data)}".rstrip().encode() + b"\n")
