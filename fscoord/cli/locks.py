"""The verbs that run a command while they hold a lock or a semaphore: lock, rwlock, sem."""

from __future__ import annotations

from typing import Any

import click

from fscoord.cli.holding import VERBATIM, command_options, how_to_hold, run_under, wait_options, words
from fscoord.cli.options import raw, with_store
from fscoord.recipes import ReadWriteLock, Semaphore
from fscoord.store import Store

__all__ = ["lock", "rwlock", "sem"]

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
    how = how_to_hold(store, options)
    command = words(options)
    ending = run_under(Semaphore(store, name, slots, ttl=how.ttl), "the semaphore", how, command)
    return ending.code if ending else how.late


def _lock(store: Store, name: bytes, side: str, options: dict[str, Any]) -> int:
    how = how_to_hold(store, options)
    command = words(options)
    sides = ReadWriteLock(store, name, ttl=how.ttl)
    ending = run_under(sides.reader if side == "reader" else sides.writer, "the lock", how, command)
    return ending.code if ending else how.late
