"""The verb break-lock: show who holds, ask, and take it away."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

from fscoord.cli.exits import FALSE
from fscoord.cli.options import as_json, raw, with_existing_store, with_store
from fscoord.cli.output import printable, write, write_json
from fscoord.recipes import Contender, Lock, force_release
from fscoord.store import Store

__all__ = ["break_lock", "holders", "lives_of", "owner_of"]

name_argument = click.argument("name", type=raw)


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
    if as_json:
        write_json(
            {
                "holders": [{**each._asdict(), "alive": lives(each)} for each in holders],
                "waiters": [{**each._asdict(), "alive": lives(each)} for each in waiters],
            }
        )
    else:
        write(_lines(holders, waiters, lives).encode())
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
    click.echo(_lines(holders, found.waiters(), lives_of(store)), err=True, nl=False)
    if not yes and not _is_asked():
        click.echo("fscoord: nothing was changed: that needs --yes, where nobody can be asked", err=True)
        return FALSE
    if not yes and not click.confirm("The holder goes on until it looks. Take it away?", err=True):
        return FALSE
    broken = [each for each in holders if force_release(store, name, each.token)]
    for each in holders:
        end = "was taken from" if each in broken else "had been given back by"
        write(f"token {each.token} {end} {owner_of(each)}\n".encode())
    return 0 if broken else FALSE


def _is_asked() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def lives_of(store: Store) -> Callable[[Contender], str]:
    """Return what tells whether somebody lives, in the words of `fscoord.Member`."""
    known = {member.number: member.alive for member in store.members()}
    return lambda waiter: known.get(waiter.session, "unknown")


def _lines(holders: list[Contender], waiters: list[Contender], lives: Callable[[Contender], str]) -> str:
    lines = [f"holds {each.token:>5} {lives(each):<7} {owner_of(each)}" for each in holders]
    lines += [f"waits     - {lives(each):<7} {owner_of(each)}" for each in waiters]
    return "".join(f"{line}\n" for line in lines)


def owner_of(waiter: Contender) -> str:
    """Return its ``host:pid`` as a terminal can show it."""
    return printable(waiter.owner.encode("utf-8", "surrogateescape"))
