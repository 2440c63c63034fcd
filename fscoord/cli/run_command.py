"""The common part of the verbs that run a command under a hold: options, the wait, the command's environment."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, suppress
from typing import Any, Final, NamedTuple

import click

from fscoord._arguments import to_seconds
from fscoord._runtime import system
from fscoord._runtime.signals import raise_on_termination
from fscoord.cli.exit_codes import FALSE, TIMEOUT
from fscoord.cli.options import limit_text, seconds_option, store_url, time_limit
from fscoord.cli.output import telling_if_slow
from fscoord.cli.ps import since_text
from fscoord.errors import StoreTimeoutError
from fscoord.launch import Console, Ending, run_held
from fscoord.recipes import Contender
from fscoord.recipes._hold import Exclusive
from fscoord.recipes._line import in_line, not_acquired
from fscoord.status.findings import session_state
from fscoord.store import Member, Store
from fscoord.stores.url import absolute

log = logging.getLogger(__name__)

VERBATIM = {"allow_interspersed_args": False}
"""Options come before the first argument; everything after that belongs to the command."""


HOLDERS_SHOWN: Final = 4
"""How many holders a note about a wait names. The note counts the other holders."""


class Command(NamedTuple):
    """The command of a verb.

    Attributes:
        words: the program and its arguments.
        grace: how long the command has from SIGTERM to SIGKILL when the hold is lost, in seconds.
        leaves_rest: whether processes that the command leaves behind go on without the hold.
        is_text: whether the last word is the text of -c, which a shell runs.
    """

    words: list[str]
    grace: float
    leaves_rest: bool
    is_text: bool

    def run(self, environment: dict[str, str], check: Callable[[], object], **options: Any) -> Ending:
        """Run the command by `run_held`.

        The `Console` keeps a slow reader of standard error from blocking the checks of the hold.
        """
        with Console() as console, redirect_stderr(console.error_text()):
            return run_held(self.words, environment, check, grace=self.grace, leaves_rest=self.leaves_rest, **options)


class HoldOptions(NamedTuple):
    """How to acquire a hold: a lock, a slot of a semaphore or the leadership of an election.

    Attributes:
        limit: how long to wait, in seconds; 0 tries once, without entering the queue; None is the store's timeout.
        conflict_exit_code: the exit code if the hold can't be acquired within `limit`.
        ttl: how long the hold lasts without renewal, in seconds; None: until its holder dies.
        label: a text that tools show beside the process.
    """

    limit: float | None
    conflict_exit_code: int
    ttl: float | None
    label: str


def command_argument(function: Callable[..., int]) -> Callable[..., int]:
    """Add the argument COMMAND... and -c, for a command that runs without a hold. `function` gets it as `command`."""

    @click.option("-c", "--command", "shell", metavar="TEXT", help="Run TEXT with the shell instead of COMMAND.")
    @click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")
    @functools.wraps(function)
    def call(*args: Any, command: tuple[str, ...], shell: str | None, **options: Any) -> int:
        words, is_text = _words(list(command), shell)
        return function(*args, command=Command(words, 0.0, leaves_rest=True, is_text=is_text), **options)

    return call


def command_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add `command_argument` and the options for a command that runs under a hold."""

    @click.option("-o", "--close", is_flag=True, help="Release when COMMAND exits, even if its children still run.")
    @seconds_option(
        "--grace",
        default="5",
        help="The time from SIGTERM to SIGKILL when COMMAND is stopped because the hold was lost.",
    )
    @functools.wraps(function)
    def call(*args: Any, command: Command, grace: float, close: bool, **options: Any) -> int:
        return function(*args, command=command._replace(grace=grace, leaves_rest=close), **options)

    return command_argument(call)


def wait_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add flock's options for the wait, --ttl and --label. `function` gets the values of these options as `waits`."""

    @click.option("-n", "--nonblock", is_flag=True, help="Do not wait: try once.")
    @seconds_option("-w", "--wait", kind=time_limit, help="How long to wait. [default: --timeout]")
    @click.option(
        "-E",
        "--conflict-exit-code",
        "conflict",
        metavar="NUMBER",
        type=click.IntRange(0, 255),
        help="The exit code if the hold is not acquired in time. [default: 1 with -n and -w, else 75]",
    )
    @seconds_option(
        "--ttl",
        help="Let another process take over if this one has not renewed its hold for this long, because it was"
        " stopped or cut off. [default: never]",
    )
    @click.option(
        "--label", metavar="TEXT", default="", help='Text that "fscoord holders" and "fscoord ps" show for the hold.'
    )
    @functools.wraps(function)
    def call(
        *args: Any,
        nonblock: bool,
        wait: float | None,
        conflict: int | None,
        ttl: float | None,
        label: str,
        **options: Any,
    ) -> int:
        if ttl is not None and not 0 < ttl < math.inf:
            raise click.UsageError("--ttl must be a finite time above 0; omit it for a hold that does not expire")
        limit = 0.0 if nonblock else wait
        usual = TIMEOUT if limit is None else FALSE
        return function(*args, waits=HoldOptions(limit, usual if conflict is None else conflict, ttl, label), **options)

    return call


def _words(rest: list[str], shell: str | None) -> tuple[list[str], bool]:
    """Return the command to run, `rest`, and False; or a shell that runs the text `shell`, and True.

    As with flock(1), ``-c TEXT`` may come last.
    """
    if shell is None and len(rest) == 2 and rest[0] in {"-c", "--command"}:
        shell = rest.pop()
        rest.clear()
    if shell is not None:
        if rest:
            raise click.UsageError("give either -c TEXT or COMMAND, not both")
        return [system.os.environ.get("SHELL") or "/bin/sh", "-c", shell], True
    is_marked = rest[:1] == ["--"]
    del rest[: int(is_marked)]
    if not rest or not rest[0]:
        raise click.UsageError("missing COMMAND (the last argument)")
    if rest[0].startswith("-") and not is_marked:
        raise click.UsageError(
            f"{rest[0]!r} found where COMMAND is expected: put options first, or '--' before COMMAND"
        )
    return rest, False


def environment(token: int | None) -> dict[str, str]:
    """Return this process's environment, with FSCOORD_STORE and, unless `token` is None, FSCOORD_TOKEN."""
    own = {"FSCOORD_STORE": absolute(store_url(click.get_current_context()))}
    if token is not None:
        own["FSCOORD_TOKEN"] = str(token)
    return {**system.os.environ, **own}


def run_under(store: Store, hold: Exclusive, what: str, waits: HoldOptions, command: Command) -> Ending | None:
    """Acquire `hold`, run the command, and release `hold`. Return None if `hold` was not acquired in time."""
    limit = to_seconds(store.timeout) if waits.limit is None else waits.limit
    with raise_on_termination():
        start = system.time.monotonic()
        try:
            words = f"waiting for {what} {hold.name!r}, {limit_text(limit)}"
            with telling_if_slow(log, words, lambda: holders_text(store, hold)):
                is_acquired = hold.acquire(timeout=limit) if limit else hold.acquire(blocking=False)
            if not is_acquired:
                _report_conflict(store, hold, what, limit, is_error=waits.conflict_exit_code == TIMEOUT)
                return None
            waited = system.time.monotonic() - start
            log.info("has %s %r after %.3f s, with token %d", what, hold.name, waited, hold.token)
            ending = command.run(environment(hold.token), hold.check, patience=waits.ttl)
        except BaseException:
            with suppress(RuntimeError):  # `hold` was not acquired yet, or is already lost
                hold.release()
            raise
        hold.release()
    return ending


def holders_text(store: Store, hold: Exclusive) -> str:
    """Return a clause with the first holders of `hold`, their states, and the number of waiters besides the caller."""
    holders, waiting = hold.holders(), len(hold.waiters()) - 1
    members = {member.number: member for member in store.members()}
    stopped = store._stopped_sessions([holder.session for holder in holders])
    names = [_with_state(holder, members.get(holder.session), stopped) for holder in holders[:HOLDERS_SHOWN]]
    if len(holders) > HOLDERS_SHOWN:
        names[-1] += f" and {len(holders) - HOLDERS_SHOWN} more"
    return in_line(names, max(waiting, 0))


def _with_state(holder: Contender, member: Member | None, stopped: Collection[int]) -> str:
    if member is None:  # a store without sessions
        return holder.owner
    state = "stopped" if holder.session in stopped else session_state(member.alive, member.found_dead)
    return f"{holder.owner} ({state}, in the store since {since_text(member.since)} UTC)"


def _report_conflict(store: Store, hold: Exclusive, what: str, limit: float, *, is_error: bool) -> None:
    """Report the holders of `hold`: raise an error if `is_error`, otherwise log them."""
    holders = [holder.owner for holder in hold.holders()]
    text = not_acquired(what, hold.name, limit, holders, len(hold.waiters()))
    if is_error:
        raise StoreTimeoutError(
            text + store._closer_look(), keys=[hold.name], holder=next(iter(holders), None), waited=limit
        )
    log.info("%s", text)
