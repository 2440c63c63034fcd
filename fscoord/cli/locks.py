"""The verbs on locks, rates and elections: lock, rwlock, sem, rate, elect, leader, holders and break-lock."""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Callable
from typing import Final, NamedTuple

import click

from fscoord._arguments import key_text, to_seconds
from fscoord._runtime import system
from fscoord._runtime.escaping import printable
from fscoord._runtime.signals import raise_on_termination
from fscoord.cli.completion import complete_name
from fscoord.cli.exit_codes import FALSE, TIMEOUT
from fscoord.cli.options import (
    as_json,
    content,
    limit_text,
    number_option,
    raw,
    recipe_name,
    with_store,
    with_store_that_appears,
    with_store_to_read,
)
from fscoord.cli.output import say, show, table_lines, telling_if_slow, write_lines
from fscoord.cli.run_command import (
    VERBATIM,
    Command,
    HoldOptions,
    command_argument,
    command_options,
    environment,
    run_under,
    wait_options,
)
from fscoord.errors import LockLostError, StoreTimeoutError
from fscoord.recipes import Contender, Election, Lock, RateLimiter, ReadWriteLock, Semaphore, force_release
from fscoord.status.findings import session_state
from fscoord.store import Store

log = logging.getLogger(__name__)

name_argument = click.argument("name", type=recipe_name, shell_complete=complete_name("/line"))
election_argument = click.argument("name", type=recipe_name, shell_complete=complete_name("/term/"))
shared = click.option(
    "-s", "--shared", "side", flag_value="reader", help="Share the lock with other processes that give -s."
)
exclusive = click.option("-x", "-e", "--exclusive", "side", flag_value="writer", help="Hold the lock alone.")


def _lock_verb(choose_side: Callable[[str | None], str]) -> click.Command:
    """Return a verb that runs a command under a lock. `choose_side` maps the option -s or -x to reader or writer."""

    @click.command(context_settings=VERBATIM)
    @shared
    @exclusive
    @wait_options
    @name_argument
    @command_options
    @with_store
    @functools.wraps(choose_side)
    def call(store: Store, /, name: bytes, side: str | None, waits: HoldOptions, command: Command) -> int:
        chosen, sides = choose_side(side), ReadWriteLock(store, name, ttl=waits.ttl, label=waits.label)
        hold = sides.reader if chosen == "reader" else sides.writer
        ending = run_under(store, hold, "the lock", waits, command)
        return ending.code if ending else waits.conflict_exit_code

    return call


@_lock_verb
def lock(side: str | None) -> str:
    """Run COMMAND while holding the lock NAME.

    Waits for the lock in the order of arrival. The options and exit codes are those of flock(1). COMMAND finds the
    fencing token of the hold in FSCOORD_TOKEN and the store in FSCOORD_STORE.

    The lock is held until all processes that COMMAND has started have ended. Signals are passed on to COMMAND. If this
    process loses the lock or is killed, in whatever way, all of these processes are stopped: none goes on without the
    lock.

    Exits with the exit code of COMMAND, with 1 if the lock was not acquired in time (-n, -w), and with 69 if the lock
    was lost or COMMAND can't be run.

    \b
    Examples:
      fscoord lock backup rsync -a data/ /backup/
      fscoord lock -n nightly -- ./job.sh || echo "still running elsewhere, or failed"
      fscoord lock -w 10 -E 99 counter -c 'expr $(cat n) + 1 > n.new && mv n.new n'
    """
    return side or "writer"


@_lock_verb
def rwlock(side: str | None) -> str:
    """Run COMMAND while holding the lock NAME to read or to write.

    Many readers (-s) share the lock; a writer (-x) has it alone. Neither side starves, because a reader that comes
    after a waiting writer waits, too. Unlike with "fscoord lock", -s or -x must be given.

    \b
    Examples:
      fscoord rwlock -s dataset -- ./train.py
      fscoord rwlock -x dataset -- ./rebuild.sh
    """
    if side is None:
        raise click.UsageError("give -s to read or -x to write")
    return side


@click.command(context_settings=VERBATIM)
@number_option(
    "-j",
    "--slots",
    required=True,
    help="How many processes may hold the semaphore. All processes must give the same number.",
)
@wait_options
@name_argument
@command_options
@with_store
def sem(store: Store, /, name: bytes, slots: int, waits: HoldOptions, command: Command) -> int:
    """Run COMMAND while holding a slot of the semaphore NAME.

    Waits for a slot in the order of arrival. The rest is as with "fscoord lock".

    \b
    Examples:
      fscoord sem -j 4 downloads -- curl -O "$url"
    """
    ending = run_under(
        store, Semaphore(store, name, slots, ttl=waits.ttl, label=waits.label), "the semaphore", waits, command
    )
    return ending.code if ending else waits.conflict_exit_code


RATE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)/(\d{1,9}(?:\.\d{1,9})?)?(s|min|h|d)")
UNITS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def rate_of(text: str) -> tuple[float, float]:
    """Parse a rate such as ``10/s`` or ``3/5min`` as a number and the time for it, in seconds."""
    found = RATE.fullmatch(text)
    number, per = (float(found[1]), float(found[2] or 1) * UNITS[found[3]]) if found else (0.0, 0.0)
    if not number or not per:
        raise click.BadParameter(f"{text!r} is not a rate above zero, such as 10/s, 100/min, 5/h, 2/d or 1/10s.")
    return number, per


@click.command(context_settings=VERBATIM)
@number_option("--burst", default=1, help="How many commands may begin at once after a pause.")
@wait_options
@name_argument
@click.argument("rate", type=rate_of)
@command_argument
@with_store
def rate(
    store: Store, /, name: bytes, rate: tuple[float, float], burst: int, waits: HoldOptions, command: Command
) -> int:
    """Run COMMAND when the rate limiter NAME allows it.

    RATE is a number and a time: 10/s, 100/min, 5/h, 2/d or 1/10s. All processes that give the same NAME, on all hosts,
    begin their commands in the order of arrival, and together at this rate. Nothing is held while COMMAND runs. The
    options and exit codes for the wait are those of "fscoord lock".

    \b
    Examples:
      fscoord rate api 10/s -- curl "$url"
      fscoord rate --burst 5 -w 60 mail 100/h -- ./send.sh
    """
    limiter, shown_name = RateLimiter(store, name, *rate, burst, ttl=waits.ttl, label=waits.label), key_text(name)
    limit = to_seconds(store.timeout) if waits.limit is None else waits.limit
    with raise_on_termination():
        try:
            with telling_if_slow(log, f"waiting for the rate limiter {shown_name!r}, {limit_text(limit)}"):
                limiter.acquire(timeout=limit)
        except StoreTimeoutError as error:
            if waits.conflict_exit_code == TIMEOUT or error.keys != (shown_name,):  # the latter: the store is blocked
                raise
            log.info("%s", error)
            return waits.conflict_exit_code
        return command.run(environment(None), int).code


@click.command()
@name_argument
@as_json
@with_store_to_read
def holders(store: Store, name: bytes, as_json: bool) -> int:
    """List the processes that hold NAME, and those that wait for it.

    NAME is the name of a lock, a semaphore, an election or the work of "fscoord once". Each process is a line: whether
    it holds or waits, the fencing token of its hold, its state (see "fscoord members"), host:pid, and its label.
    Waiters are in the order of arrival. Exits with 1 if no process holds NAME.

    \b
    Examples:
      fscoord holders backup
      fscoord holders --json backup | jq '.waiters | length'
    """
    lock = Lock(store, name)
    holders, waiters, state_of = lock.holders(), lock.waiters(), states_of(store)
    document = {
        name: [{**each._asdict(), "alive": state_of(each).alive} for each in found]
        for name, found in (("holders", holders), ("waiters", waiters))
    }
    show(as_json, document, _holder_lines(holders, waiters, state_of))
    return 0 if holders else FALSE


@click.command("break-lock")
@name_argument
@number_option("--token", help="Take away only the hold with this token.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@with_store
def break_lock(store: Store, name: bytes, token: int | None, yes: bool) -> int:
    """Take NAME away from its holder.

    Use it for a holder that hangs, or whose death can't be detected. If a process is known dead, its hold ends without
    this verb. NAME is the name of a lock, a semaphore, an election or the work of "fscoord once". Shows the holders and
    asks for confirmation. Exits with 1 if the answer is no, or if no process holds NAME.

    This does not stop the holder, and the next process in line begins at once. A command that a verb such as "fscoord
    lock" runs is stopped within some seconds, on any host. Any other holder notices the loss at its next check, and
    until then it may write. Only a target that checks fencing tokens refuses these writes.

    \b
    Examples:
      fscoord break-lock backup
      fscoord break-lock --yes --token 17 backup
    """
    found = Lock(store, name)
    holders = [each for each in found.holders() if token in {None, each.token}]
    if not holders:
        say(f"no process holds {key_text(name)!r}" + (f" with token {token}" if token else ""))
        return FALSE
    click.echo("\n".join(_holder_lines(holders, found.waiters(), states_of(store))), err=True)
    if not yes and not _is_asked():
        say("nothing was changed: standard input is not a terminal, so give --yes")
        return FALSE
    if not yes and not click.confirm("The holder goes on until its next check. Take its hold away?", err=True):
        return FALSE
    broken = [each for each in holders if force_release(store, name, each.token)]
    for each in holders:
        end = "was taken from" if each in broken else "had been given back by"
        write_lines([f"token {each.token} {end} {each.owner}"])
    return 0 if broken else FALSE


def _is_asked() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


class ContenderState(NamedTuple):
    """The state of a contender's session. `alive` is as in `fscoord.Member`; `word` is shown to people."""

    alive: str = "unknown"
    word: str = "unknown"


def states_of(store: Store) -> Callable[[Contender], ContenderState]:
    """Read the sessions of `store`, and return a function from a contender to its state."""
    known = {
        member.number: ContenderState(member.alive, session_state(member.alive, member.found_dead))
        for member in store.members()
    }
    return lambda contender: known.get(contender.session, ContenderState())


def _holder_lines(
    holders: list[Contender], waiters: list[Contender], state_of: Callable[[Contender], ContenderState]
) -> list[str]:
    rows = [("holds", str(each.token), state_of(each).word, each.owner, printable(each.label)) for each in holders]
    rows += [("waits", "-", state_of(each).word, each.owner, printable(each.label)) for each in waiters]
    head = ("TURN", "TOKEN", "STATE", "PROCESS", "LABEL")
    width = 5 if any(row[4] for row in rows) else 4
    return table_lines(head[:width], [row[:width] for row in rows], {"TOKEN"}) if rows else []


PAUSE_S = 1.0
"""How many seconds a candidate pauses after its command failed, so that a faulty command does not run all the time."""


@click.command(context_settings=VERBATIM)
@click.option(
    "--data", metavar="TEXT", type=raw, default="", help='Text that "fscoord leader" prints while this process leads.'
)
@click.option(
    "--again",
    is_flag=True,
    help="Be a candidate again when COMMAND fails or the lead is lost, until COMMAND exits with 0.",
)
@wait_options
@election_argument
@command_options
@with_store
def elect(store: Store, /, name: bytes, data: bytes, again: bool, waits: HoldOptions, command: Command) -> int:
    """Run COMMAND while leading in the election NAME.

    The candidates are elected in the order of arrival. The leader leads until its COMMAND has ended, or until it dies.
    "fscoord leader" prints the leader. COMMAND finds the term, which is a fencing token, in FSCOORD_TOKEN. The rest is
    as with "fscoord lock".

    \b
    Examples:
      fscoord elect --timeout inf scheduler -- ./scheduler
      fscoord elect --again --data "$(hostname):8080" front -- ./serve --port 8080
    """
    candidate = Election(store, name, content(data), ttl=waits.ttl, label=waits.label)
    while True:
        try:
            ending = run_under(store, candidate, "the leadership of", waits, command)
        except LockLostError as error:
            if not again:
                raise
            log.warning("%s", error)
        else:
            if ending is None:
                return waits.conflict_exit_code
            if not again or ending.code == 0 or ending.interruption:
                return ending.code
            log.warning("the command failed with exit code %d", ending.code)
        system.time.sleep(PAUSE_S)


@click.command()
@election_argument
@number_option("--after", metavar="TERM", least=0, default=0, help="Wait for a leader whose term is later than TERM.")
@as_json
@with_store_that_appears
def leader(store: Store, name: bytes, after: int, as_json: bool) -> None:
    """Print the leader of the election NAME. Wait until there is one.

    Prints one line: the term, host:pid, and the data of the leader (see "fscoord elect --data").

    \b
    Examples:
      fscoord leader front
      while read -r term owner address < <(fscoord leader --timeout inf --after "${term:-0}" front); do
          echo "now $address"
      done
    """
    with telling_if_slow(log, f"waiting for a leader of {key_text(name)!r}, {limit_text(store.timeout)}"):
        found = Election(store, name).observe(after)
    line = f"{found.term} {found.owner} {printable(found.data)}".rstrip()
    show(as_json, {"term": found.term, "owner": found.owner, "data": found.data}, [line])
