"""The common part of the verbs that run a command under a hold: options, the wait, the command's environment."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, suppress
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar

import click

from fscoord._arguments import Timeout, to_seconds
from fscoord._runtime import system
from fscoord._runtime.signals import raise_on_termination
from fscoord.cli.exit_codes import FALSE, TIMEOUT
from fscoord.cli.options import absolute_url, limit_text, time_limit, time_span
from fscoord.cli.output import telling_if_slow
from fscoord.cli.ps import since_text
from fscoord.errors import StoreTimeoutError
from fscoord.launch import Console, Ending, run_held
from fscoord.recipes import Contender
from fscoord.recipes._line import in_line, not_acquired
from fscoord.status.findings import session_state
from fscoord.store import Member, Store

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

VERBATIM = {"allow_interspersed_args": False}
"""Options come before the first argument; everything after that belongs to the command."""


HOLDERS_SHOWN: Final = 4
"""How many holders a note about a wait names."""


class _Hold(Protocol):
    """A recipe that a process can hold, such as a lock."""

    @property
    def name(self) -> str: ...

    @property
    def token(self) -> int: ...

    def acquire(self, blocking: bool = True, timeout: Timeout | None = -1) -> bool: ...

    def release(self) -> None: ...

    def check(self) -> None: ...

    def holders(self) -> list[Contender]: ...

    def waiters(self) -> list[Contender]: ...


class HoldOptions(NamedTuple):
    """The options of a hold and of the command that runs under it.

    Attributes:
        command: the command.
        limit: how long to wait, in seconds; 0 tries once, without entering the queue.
        conflict_exit_code: the exit code if the hold can't be acquired within `limit`.
        grace: how long the command has from SIGTERM to SIGKILL when the hold is lost.
        ttl: how long the hold lasts without renewal, in seconds; None: until its holder dies.
        leaves_rest: whether processes that the command leaves behind go on without the hold.
    """

    command: list[str]
    limit: float
    conflict_exit_code: int
    grace: float
    ttl: float | None
    leaves_rest: bool


def command_options(function: Callable[P, R]) -> Callable[P, R]:
    """Add the argument COMMAND..., which `parse_command` reads, and the options that say how it runs."""
    for add in (
        click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND..."),
        click.option(
            "--grace",
            metavar="SECONDS",
            type=time_span,
            default="5",
            show_default=True,
            help="The time from SIGTERM to SIGKILL when COMMAND is stopped because the hold was lost.",
        ),
        click.option("-o", "--close", is_flag=True, help="Release when COMMAND exits, even if its children still run."),
        click.option("-c", "--command", "shell", metavar="TEXT", help="Run TEXT with the shell instead of COMMAND."),
    ):
        function = add(function)
    return function


def wait_options(function: Callable[P, R]) -> Callable[P, R]:
    """Add flock's options that say how to wait, and how long a hold lasts."""
    for add in (
        click.option(
            "--ttl",
            metavar="SECONDS",
            type=time_span,
            help="Let another process take over if this one has not renewed its hold for this long, because it was"
            " stopped or cut off. [default: never]",
        ),
        click.option(
            "-E",
            "--conflict-exit-code",
            "conflict_exit_code",
            metavar="NUMBER",
            type=click.IntRange(0, 255),
            help="The exit code if the hold is not acquired in time. [default: 1 with -n and -w, else 75]",
        ),
        click.option("-w", "--wait", metavar="SECONDS", type=time_limit, help="How long to wait. [default: --timeout]"),
        click.option("-n", "--nonblock", is_flag=True, help="Do not wait: try once."),
    ):
        function = add(function)
    return function


def parse_hold_options(store: Store, options: dict[str, Any]) -> HoldOptions:
    """Return the values of `wait_options` and `command_options`."""
    wait = 0.0 if options["nonblock"] else options["wait"]
    conflict_exit_code = options["conflict_exit_code"]
    if conflict_exit_code is None:
        conflict_exit_code = TIMEOUT if wait is None else FALSE
    ttl = options["ttl"]
    if ttl is not None and not 0 < ttl < math.inf:
        raise click.UsageError("--ttl must be above 0; without it a hold lasts as long as its holder")
    limit = to_seconds(store.timeout) if wait is None else wait
    command = parse_command(options)
    return HoldOptions(command, limit, conflict_exit_code, options["grace"], ttl, options["close"])


def parse_command(options: dict[str, Any]) -> list[str]:
    """Return the command to run: the arguments, or a shell with a text. As with flock(1), ``-c TEXT`` may come last."""
    rest: list[str] = list(options["command"])
    shell: str | None = options["shell"]
    if shell is None and len(rest) == 2 and rest[0] in {"-c", "--command"}:
        shell = rest.pop()
        rest.clear()
    if shell is not None:
        if rest:
            raise click.UsageError("give either -c TEXT or COMMAND, not both")
        return [system.os.environ.get("SHELL") or "/bin/sh", "-c", shell]
    is_marked = rest[:1] == ["--"]
    del rest[: int(is_marked)]
    if not rest or not rest[0]:
        raise click.UsageError("missing COMMAND (the last argument)")
    if rest[0].startswith("-") and not is_marked:
        raise click.UsageError(
            f"{rest[0]!r} found where COMMAND is expected: put options first, or '--' before COMMAND"
        )
    return rest


def environment(token: int | None) -> dict[str, str]:
    """Return the environment of a command: this process's environment, the store, and any fencing token of the hold."""
    own = {"FSCOORD_STORE": absolute_url(click.get_current_context())}
    if token is not None:
        own["FSCOORD_TOKEN"] = str(token)
    return {**system.os.environ, **own}


def run_under(store: Store, hold: _Hold, what: str, hold_options: HoldOptions) -> Ending | None:
    """Acquire `hold` on `store`, run the command, and release it; return None if `hold` was not acquired in time."""
    with raise_on_termination():
        start = system.time.monotonic()
        try:
            limit = hold_options.limit
            words = f"waiting for {what} {hold.name!r}, {limit_text(limit)}"
            with telling_if_slow(log, words, lambda: holders_text(store, hold)):
                is_acquired = hold.acquire(timeout=limit) if limit else hold.acquire(blocking=False)
            if not is_acquired:
                _report_conflict(store, hold, what, hold_options)
                return None
            waited = system.time.monotonic() - start
            log.info("has %s %r after %.3f s, with token %d", what, hold.name, waited, hold.token)
            ending = run_command(
                hold_options.command,
                environment(hold.token),
                hold.check,
                grace=hold_options.grace,
                patience=hold_options.ttl,
                leaves_rest=hold_options.leaves_rest,
            )
        except BaseException:
            with suppress(RuntimeError):  # it was not acquired yet, or is already lost
                hold.release()
            raise
        hold.release()
    return ending


def run_command(command: list[str], environment: dict[str, str], check: Callable[[], object], **options: Any) -> Ending:
    """Call `run_held`. The thread that checks the hold then logs without waiting for a reader of standard error."""
    with Console() as console, redirect_stderr(console.error_text()):
        return run_held(command, environment, check, **options)


def holders_text(store: Store, hold: _Hold, shown: int = HOLDERS_SHOWN) -> str:
    """Return the clause that names the holders of `hold`, for which this process waits, with their states.

    Args:
        store: the store of `hold`.
        hold: the recipe.
        shown: how many holders are named. The others are counted.
    """
    holders, waiting = hold.holders(), len(hold.waiters()) - 1
    members = {member.number: member for member in store.members()}
    stopped = store._stopped_sessions([holder.session for holder in holders])
    names = [_with_state(holder, members.get(holder.session), stopped) for holder in holders[:shown]]
    if len(holders) > shown:
        names[-1] += f" and {len(holders) - shown} more"
    return in_line(names, max(waiting, 0))


def _with_state(holder: Contender, member: Member | None, stopped: Collection[int]) -> str:
    if member is None:  # a store without sessions
        return holder.owner
    state = "stopped" if holder.session in stopped else session_state(member.alive, member.found_dead)
    return f"{holder.owner} ({state}, in the store since {since_text(member.since)} UTC)"


def _report_conflict(store: Store, hold: _Hold, what: str, hold_options: HoldOptions) -> None:
    """Report the holders, as an error or, with -n or -w, in the log that -v shows."""
    holders = [holder.owner for holder in hold.holders()]
    text = not_acquired(what, hold.name, hold_options.limit, holders, len(hold.waiters()))
    if hold_options.conflict_exit_code == TIMEOUT:
        raise StoreTimeoutError(
            text + store._closer_look(), keys=[hold.name], holder=next(iter(holders), None), waited=hold_options.limit
        )
    log.info("%s", text)
