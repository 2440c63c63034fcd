"""The verbs for several processes: barrier, once, members, join and group."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable
from typing import Final

import click

from fscoord import collectives
from fscoord._arguments import VALUE_MAX, key_text
from fscoord._runtime.escaping import printable, shell_word
from fscoord._runtime.signals import Terminated, raise_on_termination
from fscoord.cli.completion import complete_name
from fscoord.cli.options import (
    as_json,
    limit_text,
    number_option,
    raw,
    recipe_name,
    store_argument,
    store_url,
    with_existing_store,
    with_store,
    with_store_to_read,
)
from fscoord.cli.output import say, show, table_lines, tell, telling_if_slow, utc_text, write
from fscoord.cli.run_command import VERBATIM, Command, command_options, environment, holders_text
from fscoord.errors import FscoordError, LockLostError
from fscoord.recipes import Lock, Membership, once as once_for_all
from fscoord.status.findings import session_state
from fscoord.store import Member, Store
from fscoord.stores.url import absolute

HEADS: Final = ("RANK", "SESSION", "PROCESS", "STATE", "SINCE", "LABEL")


@click.command()
@store_argument("STORE")
@as_json
@with_store_to_read
def members(store: Store, as_json: bool) -> None:
    """List the sessions of the store, sorted by rank.

    A session is a handle that has the store open, or had it open. Each session is a line: its rank and number,
    host:pid, its state, the time (UTC) at which it registered, and its label. The state is one of these:

    \b
        alive             the process runs and has the store open
        ended             the process has ended or closed the store, and no death is recorded
        dead, found TIME  another process recorded the death at TIME (UTC); it may have happened earlier
        unknown           this host, or this user, can't tell

    Changes nothing.

    \b
    Examples:
      fscoord members /shared/job/store
      fscoord members --json | jq -r '.[] | select(.alive == "no") | .rank'
    """
    found = sorted(store.members(), key=lambda each: (each.rank is None, each.rank or 0, each.number))
    show(as_json, [member._asdict() for member in found], table_lines(HEADS, map(_row, found), {"RANK", "SESSION"}))


def _row(member: Member) -> tuple[str, ...]:
    rank = "-" if member.rank is None else str(member.rank)
    place = f"{member.host}:{member.pid}"
    state = session_state(member.alive, member.found_dead)
    return rank, str(member.number), place, state, utc_text(member.since, "%Y-%m-%dT%H:%M:%SZ"), member.label


log = logging.getLogger(__name__)

name_argument = click.argument("name", type=recipe_name, shell_complete=complete_name("/joined"))


@click.command(context_settings=VERBATIM)
@click.option(
    "--data", metavar="TEXT", type=raw, default="", help='Text that "fscoord group" prints about this process.'
)
@name_argument
@command_options
@with_store
def join(store: Store, /, name: bytes, data: bytes, command: Command) -> int:
    """Run COMMAND while this process is a member of the group NAME.

    "fscoord group" lists the members. A member that dies is removed from the list. COMMAND finds the store in
    FSCOORD_STORE. As with "fscoord lock", COMMAND is stopped if this process is killed. It is also stopped if another
    process takes this process for dead.

    \b
    Examples:
      fscoord join --data "$(hostname):8080" workers -- ./serve --port 8080
    """
    with raise_on_termination(), Membership(store, name, data) as membership:
        log.info("joined the group %r", membership.name)
        own = store.register()

        def check() -> None:
            if own and not any(each.session == own for each in membership.members()):
                raise LockLostError(
                    f"this process is no longer a member of {membership.name!r}: another process took it for dead"
                )

        return command.run(environment(None), check).code


@click.command()
@name_argument
@as_json
@with_existing_store
def group(store: Store, name: bytes, as_json: bool) -> None:
    """List the members of the group NAME, in the order of joining.

    Each member is a line: its number, host:pid, and its data (see "fscoord join --data"). A member that has died is
    not listed.

    \b
    Examples:
      fscoord group workers
      fscoord group --json workers | jq -r '.[].data'
    """
    found = Membership(store, name).members()
    rows = [(str(each.number), each.owner, printable(each.data)) for each in found]
    lines = table_lines(("NUMBER", "PROCESS", "DATA"), rows, {"NUMBER"}) if found else []
    show(as_json, [each._asdict() for each in found], lines)
    if not found:
        log.info("the group %r has no members", key_text(name))


@click.command()
@click.argument("key", type=raw, shell_complete=complete_name("/arrivals", "/num_members"))
@number_option("-n", "--world-size", required=True, help="How many processes must arrive.")
@number_option("--rank", metavar="RANK", least=0, help="The rank of this process, counted from 0.")
@click.option("--fail-fast", is_flag=True, help="With --rank: fail as soon as a missing rank is known dead.")
@with_store
def barrier(store: Store, key: bytes, world_size: int, rank: int | None, fail_fast: bool) -> None:
    """Wait at the barrier KEY until all processes have arrived.

    --world-size is the number of processes. A key can be used once. On a terminal the verb prints what it waits for.

    With --rank, a process can arrive again after a time-out, and counts once. If all processes give their rank, the
    error of a time-out (exit code 75) names the missing ranks.

    A rank counts as dead when its last process has ended. So use --fail-fast only if each rank is one process that
    keeps the store open, and not if a rank runs several commands, one after the other.

    \b
    Examples:
      fscoord barrier -n 4 epoch-1
      srun sh -c 'fscoord barrier -n "$SLURM_NTASKS" --rank "$SLURM_PROCID" --timeout 60 loaded'
    """
    place = "" if rank is None else f" as rank {rank}"
    who = "1 process has" if world_size == 1 else f"{world_size} processes have"
    tell(log, f"waiting at barrier {key_text(key)!r}{place} until {who} arrived, {limit_text(store.timeout)}")
    collectives.barrier(store, world_size, key, store.timeout, rank, fail_fast=fail_fast)


OUTPUT_MAX = VALUE_MAX - 64
"""The longest output of a command, in bytes. The stored value also has the exit code and a prefix of the recipe."""


class _NoResult(BaseException):
    """Carries the error `cause` out of `fscoord.recipes.once`.

    The recipe stores an `Exception` of the work as the result for all callers. So this class is a `BaseException`.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@click.command(context_settings=VERBATIM)
@click.argument("name", type=recipe_name, shell_complete=complete_name("/result"))
@command_options
@with_store
def once(store: Store, /, name: bytes, command: Command) -> int:
    """Run COMMAND once, for all processes that call this with NAME.

    One of the processes runs it, and the others wait. The standard output and the exit code of COMMAND are kept in the
    store under NAME/result, and each caller prints and returns them, now and later.

    If the process that runs COMMAND dies, is interrupted or can't run it, the next process runs it. So COMMAND may be
    started more than once. A COMMAND that fails counts as done: to run it again, delete NAME/result. After
    such a failure, each later call prints on standard error that it did not run its COMMAND.

    \b
    Examples:
      path=$(fscoord once dataset -- ./download.sh)
      fscoord delete dataset/result                 # the next call runs it again
    """
    end_wait: Callable[[], object] = int  # until the wait begins
    has_run: list[bool] = []

    def work() -> bytes:
        end_wait()
        has_run.append(True)
        try:
            return _run_once(store, name, command)
        except Exception as error:
            raise _NoResult(error) from error

    words = f"waiting for the result of {key_text(name)!r}, {limit_text(store.timeout)}"
    turn = Lock(store, name)
    try:
        with raise_on_termination(), telling_if_slow(log, words, lambda: holders_text(store, turn)) as end_wait:
            result = once_for_all(store, name, work)
    except _NoResult as error:
        raise error.cause from None
    code, _, output = result.partition(b"\n")
    if not re.fullmatch(rb"[0-9]{1,3}", code):
        raise FscoordError(
            f"the result of {key_text(name)!r} has no exit code: another program has written it; use another NAME"
        )
    write(output)
    if int(code) and not has_run:
        address, key = absolute(store_url(click.get_current_context())), f"{turn.name}/result"
        say(
            f"the command of {turn.name!r} was not run, because another call has run it, with exit code"
            f" {int(code)}; to run it again, first run fscoord --store {shell_word(address)} delete {shell_word(key)}"
        )
    return int(code)


def _run_once(store: Store, name: bytes, command: Command) -> bytes:
    """Run the command for all callers. Return its exit code, a newline and its output."""
    turn = Lock(store, name)
    token = turn.holders()[0].token

    def check() -> None:
        if token not in {holder.token for holder in turn.holders()}:
            raise LockLostError(
                f"the work {turn.name!r} was given to another process, which took this process for dead"
            )

    log.info("running the command of %r for all callers", turn.name)
    ending = command.run(environment(token), check, output_max=OUTPUT_MAX)
    if ending.status and ending.interruption:
        raise KeyboardInterrupt if ending.interruption == signal.SIGINT else Terminated(ending.interruption)
    return b"%d\n" % ending.code + ending.output
