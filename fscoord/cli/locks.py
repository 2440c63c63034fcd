"""The verbs on what a process can hold: lock, rwlock, sem, elect and leader, holders and break-lock."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Final

import click

from fscoord._runtime import system
from fscoord.cli.exit_codes import FALSE
from fscoord.cli.options import as_json, content, raw, with_existing_store, with_store
from fscoord.cli.output import field, printable, show, table_lines, write
from fscoord.cli.run_command import VERBATIM, command_options, parse_hold_options, run_under, wait_options
from fscoord.errors import LockLostError
from fscoord.recipes import Contender, Election, Lock, ReadWriteLock, Semaphore, force_release
from fscoord.store import Store

__all__ = ["STATES", "break_lock", "elect", "holders", "leader", "lives_of", "lock", "rwlock", "sem"]

log = logging.getLogger(__name__)

STATES: Final = {"yes": "alive", "no": "dead", "unknown": "unknown"}
"""The states of a contender in tables, by the words of `fscoord.Member`."""

name_argument = click.argument("name", type=raw)
shared = click.option("-s", "--shared", "side", flag_value="reader", help="Share it with others that say so.")
exclusive = click.option("-x", "-e", "--exclusive", "side", flag_value="writer", help="Share it with nobody.")


@click.command(context_settings=VERBATIM)
@shared
@exclusive
@wait_options
@name_argument
@command_options
@with_store
def lock(store: Store, /, name: bytes, side: str | None, **options: Any) -> int:
    """Run COMMAND while holding the lock NAME.

    Who comes first has it first. The options and exit codes are those of flock(1). COMMAND finds the fencing token in
    FSCOORD_TOKEN and the store in FSCOORD_STORE; signals are passed on to it. The lock is held until everything that
    COMMAND has started has ended. If the lock is lost meanwhile, or this command killed in whatever way, all of that is
    stopped: nothing goes on that believes it has the lock.

    Exits as COMMAND does; with 1 if the lock was not to be had (-n, -w), and with 69 if it was lost or COMMAND can't be
    run.

    \b
    Examples:
      fscoord lock backup rsync -a data/ /backup/
      fscoord lock -n nightly -- ./job.sh || echo "still running elsewhere, or failed"
      fscoord lock -w 10 -E 99 counter -c 'expr $(cat n) + 1 > n.new && mv n.new n'
    """
    return _lock(store, name, side or "writer", options)


@click.command(context_settings=VERBATIM)
@shared
@exclusive
@wait_options
@name_argument
@command_options
@with_store
def rwlock(store: Store, /, name: bytes, side: str | None, **options: Any) -> int:
    """Run COMMAND while reading or writing what NAME locks.

    Many share it for reading (-s), one has it for writing (-x), and nobody starves: a reader that comes behind a writer
    waits, too. It is "fscoord lock", but which of the two has to be said.

    \b
    Examples:
      fscoord rwlock -s dataset -- ./train.py
      fscoord rwlock -x dataset -- ./rebuild.sh
    """
    if side is None:
        raise click.UsageError("for reading (-s) or for writing (-x)?")
    return _lock(store, name, side, options)


@click.command(context_settings=VERBATIM)
@click.option(
    "-j", "--slots", type=click.IntRange(min=1), required=True, help="How many may hold it; the same for all."
)
@wait_options
@name_argument
@command_options
@with_store
def sem(store: Store, /, name: bytes, slots: int, **options: Any) -> int:
    """Run COMMAND while holding a slot of the semaphore NAME.

    Who comes first has it first. The rest is as with "fscoord lock".

    \b
    Examples:
      fscoord sem -j 4 downloads -- curl -O "$url"
    """
    hold_options = parse_hold_options(store, options)
    ending = run_under(Semaphore(store, name, slots, ttl=hold_options.ttl), "the semaphore", hold_options)
    return ending.code if ending else hold_options.conflict_exit_code


def _lock(store: Store, name: bytes, side: str, options: dict[str, Any]) -> int:
    hold_options = parse_hold_options(store, options)
    sides = ReadWriteLock(store, name, ttl=hold_options.ttl)
    ending = run_under(sides.reader if side == "reader" else sides.writer, "the lock", hold_options)
    return ending.code if ending else hold_options.conflict_exit_code


@click.command()
@name_argument
@as_json
@with_existing_store
def holders(store: Store, name: bytes, as_json: bool) -> int:
    """Print who holds NAME, and who waits for it.

    NAME is that of a lock, a semaphore, an office or work that is done once. Each is a line: "holds" with the fencing
    token, or "waits"; whether it lives (yes, no, unknown), and host:pid. Exits with 1 if nobody holds it.

    \b
    Examples:
      fscoord holders backup
      fscoord holders --json backup | jq '.waiters | length'
    """
    found = Lock(store, name)
    holders, waiters, lives = found.holders(), found.waiters(), lives_of(store)
    document = {
        "holders": [{**each._asdict(), "alive": lives(each)} for each in holders],
        "waiters": [{**each._asdict(), "alive": lives(each)} for each in waiters],
    }
    show(as_json, document, _holder_lines(holders, waiters, lives))
    return 0 if holders else FALSE


@click.command("break-lock")
@name_argument
@click.option("--token", type=click.IntRange(min=1), help="Only the hold with this token.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@with_store
def break_lock(store: Store, name: bytes, token: int | None, yes: bool) -> int:
    """Take NAME away from whoever holds it.

    For a holder that hangs, or that can't be told dead; those who died lose what they held by themselves. NAME is that
    of a lock, a semaphore, an office or work that is done once. Shows who holds it and asks; exits with 1 if the answer
    is no or nobody holds it.

    The holder is not stopped by this, and the next in line begins at once. A command under "fscoord lock" and the like
    is stopped within some seconds, on whatever host; any other holder finds out when it next looks. What it writes in
    the meantime only its fencing token tells from what the new holder writes, and only to what asks for tokens.

    \b
    Examples:
      fscoord break-lock backup
      fscoord break-lock --yes --token 17 backup
    """
    found = Lock(store, name)
    holders = [each for each in found.holders() if token in {None, each.token}]
    if not holders:
        click.echo(f"fscoord: nobody holds {printable(name)}" + (f" with token {token}" if token else ""), err=True)
        return FALSE
    click.echo("\n".join(_holder_lines(holders, found.waiters(), lives_of(store))), err=True)
    if not yes and not _is_asked():
        click.echo("fscoord: nothing was changed: that needs --yes, where nobody can be asked", err=True)
        return FALSE
    if not yes and not click.confirm("The holder goes on until it looks. Take it away?", err=True):
        return FALSE
    broken = [each for each in holders if force_release(store, name, each.token)]
    for each in holders:
        end = "was taken from" if each in broken else "had been given back by"
        write(f"token {each.token} {end} {printable(each.owner)}\n".encode())
    return 0 if broken else FALSE


def _is_asked() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def lives_of(store: Store) -> Callable[[Contender], str]:
    """Return a function that tells whether a contender is alive, in the words of `fscoord.Member`."""
    known = {member.number: member.alive for member in store.members()}
    return lambda waiter: known.get(waiter.session, "unknown")


def _holder_lines(holders: list[Contender], waiters: list[Contender], lives: Callable[[Contender], str]) -> list[str]:
    rows = [("holds", str(each.token), STATES[lives(each)], each.owner) for each in holders]
    rows += [("waits", "-", STATES[lives(each)], each.owner) for each in waiters]
    return table_lines(("TURN", "TOKEN", "STATE", "PROCESS"), rows, {"TOKEN"}) if rows else []


PAUSE_S = 1.0
"""How long a candidate rests whose command has failed, so that one that always fails does not keep the machine busy."""


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
    candidate = Election(store, name, content(data), ttl=hold_options.ttl)
    while True:
        try:
            ending = run_under(candidate, "the office", hold_options)
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
    line = f"{found.term} {printable(found.owner)} {printable(found.data)}".rstrip()
    show(as_json, {"term": found.term, "owner": found.owner, **field("data", found.data)}, [line])
