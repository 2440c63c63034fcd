"""`Announcer` prints one line on standard error for each event of an agent."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection

from fscoord._runtime import system
from fscoord._runtime.escaping import printable
from fscoord.launch.worker import STDERR, Console, Failure
from fscoord.rendezvous.handler import Progress, short_names

FIRST_WAIT_S = 1.0
"""A wait for other nodes is first printed after this time, in seconds."""

CHANGE_S = 5.0
"""The shortest time between two lines about a wait, in seconds, if the number of nodes has changed."""

REPEAT_S = 60.0
"""The time in seconds between two lines about a wait, if nothing has changed."""

ENDLESS_S = 10 * 366 * 86400.0
"""A time limit above this number of seconds is printed as no limit."""

ERROR_FILE_MAX = 1 << 24
"""At most this many bytes of an error file are read."""

LINES_MAX = 20
"""How many lines of a failed worker's last output are printed."""


class Announcer:
    """Prints the events of an agent on the console.

    Args:
        console: the console. The console does not mix these lines with the lines of the workers.
        quiet: whether nothing is printed.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._is_quiet = quiet
        self._told: Progress | None = None  # printed in the last line about the present wait

    def say(self, text: str) -> None:
        """Print `text` as one line."""
        if not self._is_quiet:
            self._console.write(STDERR, f"fscoord: {printable(text)}\n".encode())

    def waiting(self, progress: Progress) -> None:
        """Print a line about a wait for other nodes, if a line is due.

        The first line is due after `FIRST_WAIT_S`. Another line is due when the number of nodes has changed and
        `CHANGE_S` has passed, or after `REPEAT_S` without a change.
        """
        told = self._told
        if told is not None and told.waited > progress.waited:  # another wait has begun
            told = self._told = None
        if told is None:
            is_due = progress.waited >= FIRST_WAIT_S
        else:
            has_changed = told[:3] != progress[:3] or told.is_running != progress.is_running
            is_due = progress.waited >= told.waited + (CHANGE_S if has_changed else REPEAT_S)
        if is_due:
            self._told = progress
            self.say(_wait_text(progress))

    def round_begins(self, number: int, sizes: list[int], rank: int, reason: str) -> None:
        """Report that the workers of a round start.

        `sizes` has the number of workers on each node. `rank` is the index of this node in `sizes`.
        """
        first = sum(sizes[:rank])
        own = _count(sizes[rank], "worker")
        ranks = f"rank {first}" if sizes[rank] == 1 else f"ranks {first} to {first + sizes[rank] - 1}"
        whole = f"{_count(len(sizes), 'node')}, {_count(sum(sizes), 'worker')}"
        self.say(f"round {number} begins{reason}: {whole}; this node is number {rank} and starts {own}, {ranks}")

    def round_broken(self, number: int, own: str, lost: Collection[str]) -> None:
        """Report that round `number` is over.

        Args:
            number: the number of the round.
            own: the name of this node. If `lost` contains `own`, the other nodes took this node for dead.
            lost: the nodes that have died or left. If `lost` is empty, the round is over because nodes have joined.
        """
        if own in lost:
            cause = "the other nodes took this node for dead"
        else:
            cause = f"lost {short_names(lost)}, which died or left" if lost else "more nodes have come"
        self.say(f"round {number} is over: {cause}; the workers stop, and the next round forms")

    def worker_failed(self, failure: Failure, restart: int, max_restarts: int) -> None:
        """Report that a worker has failed and that all workers start again. Also print the worker's last output."""
        what = f"all workers stop, and start again (restart {restart} of {max_restarts})"
        self.say(f"{describe_failure(failure)}; {what}")
        for line in last_lines(failure):
            self.say(f"  | {line}")

    def stopping(self, number: int, grace: float) -> None:
        """Report that the signal `number` ends this node, and that its workers have `grace` seconds to end."""
        self.say(
            f"{_signal_name(number)}: the workers of this node have {grace:g} s to end; a second signal kills them"
        )

    def signal_came(self, number: int, is_forwarded: bool, has_workers: bool) -> None:
        """Report a signal that does not end this node, and whether the workers get it."""
        name = _signal_name(number)
        if not is_forwarded:
            option = f"--forward-signals {name.removeprefix('SIG')}"
            self.say(f"{name}: received; the workers do not get it without {option}")
        else:
            self.say(f"{name}: {'forwarded to the workers of this node' if has_workers else 'no worker runs here now'}")


def describe_failure(failure: Failure) -> str:
    """Return one line about a `Failure`: the rank, how the worker ended, and where."""
    place = f"local rank {failure.local_rank}, process {failure.pid} on {failure.host}"
    return f"rank {failure.rank} failed in round {failure.round}: {_ending(failure.status)} ({place})"


def last_lines(failure: Failure) -> list[str]:
    """Return the last lines of the worker's traceback.

    If the worker wrote no traceback, or its error file is not on this host, return its last lines on standard error.
    """
    return (_traceback(failure) or str(failure.message)).rstrip().splitlines()[-LINES_MAX:]


def _wait_text(progress: Progress) -> str:
    since = _clock(-progress.waited)
    if progress.is_running:
        return f"waiting for a place since {since}: the present round runs with {_count(progress.nodes, 'node')}"
    until = "without limit" if progress.left > ENDLESS_S else f"until {_clock(progress.left)}"
    if progress.nodes >= progress.min_nodes:
        return (
            f"waiting for more nodes: {progress.nodes} of at most {progress.max_nodes} here, since {since}; the"
            f" round begins with these at {_clock(progress.left)} at the latest"
        )
    return f"waiting for nodes: {progress.nodes} of {progress.min_nodes} here, since {since}, {until}"


def _clock(seconds: float) -> str:
    """Return, as text in UTC, the time that is `seconds` after now."""
    then = system.time.gmtime(system.time.time() + seconds)
    return system.time.strftime("%H:%M:%S UTC" if abs(seconds) < 43200 else "%Y-%m-%d %H:%M:%S UTC", then)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _ending(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"killed by {_signal_name(-status)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _traceback(failure: Failure) -> str:
    """Return the traceback in the error file; ``""`` if the file is not on this host, or not in torch's format.

    The path comes from the store, so it may name any file. At most `ERROR_FILE_MAX` bytes are read.
    """
    try:
        with system.open_regular(failure.error_file) as file:
            return str(
                json.loads(file.read(ERROR_FILE_MAX).decode("utf-8", "replace"))["message"]["extraInfo"]["py_callstack"]
            )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
