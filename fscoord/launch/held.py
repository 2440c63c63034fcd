"""`run_held` runs a command while this process has a *hold*, such as a lock or an item of a queue.

The command runs under a warden (`fscoord.launch.warden`). If this process dies in any way, the warden kills the command
and everything that the command has started. A thread checks once a second that the hold is not lost. This process only
waits and forwards signals.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Final, NamedTuple

from fscoord import errors
from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord._runtime.signals import forward_signals
from fscoord.launch import warden

CHECK_INTERVAL_S: Final = 1.0
"""The time in seconds between two checks that the hold is not lost."""

CHECKS_PER_LEASE: Final = 8
"""How many checks of the hold are made during one lease. `warden.Watchdog` divides the lease into quarters, and each
quarter has two checks."""

SIGNAL_POLL_S: Final = 0.1
"""The longest sleep in one system call, in seconds. A signal that arrives just before the call does not interrupt the
sleep. So this time is also the longest delay of a signal handler."""

LAST_CHECK_S: Final = 5.0
"""After the end of the command, a check of the hold that has begun may take this many seconds more."""

_PIECE: Final = 1 << 16
_ALL: Final = 1 << 62

_INTERRUPTIONS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_LOST = (errors.LockLostError, errors.StoreGoneError, errors.StoreClosedError, errors.StaleRunError)


class Ending(NamedTuple):
    """How a command ended.

    Attributes:
        status: the exit code, or the negative number of the signal that killed the command.
        passed: the numbers of the signals that this process received and forwarded while the command ran.
        output: the command's standard output, if the caller requested it.
    """

    status: int
    passed: frozenset[int]
    output: bytes

    @property
    def interruption(self) -> int:
        """The lowest number in `passed` of a signal that ends a program (HUP, INT or TERM); 0 if there is none."""
        return next((number for number in sorted(self.passed) if number in _INTERRUPTIONS), 0)

    @property
    def code(self) -> int:
        """The exit code as a shell reports it: 128 + n if the signal n killed the command, else `status`."""
        return self.status if self.status >= 0 else 128 - self.status


def run_held(
    command: Sequence[str],
    environment: Mapping[str, str],
    check: Callable[[], object],
    *,
    grace: float,
    patience: float | None = None,
    leaves_rest: bool = False,
    output_max: int | None = None,
    stdin: IO[bytes] | None = None,
) -> Ending:
    """Run `command` on this process's terminal and with this process's input, until the command has ended.

    The command also inherits the descriptors that this process has inherited. The signals INT, TERM, HUP, QUIT, USR1
    and USR2 are forwarded to the command. After the end of the command, these signals are forwarded to the descendants
    of the command.

    Args:
        command: the program and its arguments.
        environment: the command's environment.
        check: raises `~fscoord.LockLostError` when the hold is lost; called in a thread, once a second.
        grace: the time from SIGTERM to SIGKILL for all processes when the hold is lost, in seconds.
        patience: the length of the hold's lease in seconds; None if the hold has no lease. If no `check` returns for
            half of the lease, for example because this process is stopped, the processes of the command get SIGTERM.
            After three quarters they get SIGKILL, because other processes may acquire the hold after the lease.
        leaves_rest: whether to return when the command has ended, even if its descendants still run. Otherwise this
            function waits for the descendants, too.
        output_max: if not None, the command's standard output is returned, and may have at most this many bytes. If
            None, the command writes to the standard output of this process.
        stdin: an open file with a descriptor. The command reads this file instead of the input of this process.

    Raises:
        LockLostError: the hold was lost, and the command and its descendants were stopped.
        FscoordError: the command could not be started, or its warden was killed.
        LimitExceededError: the command wrote more than `output_max` bytes, and was killed with its descendants.
    """
    with HeldCommand(command, environment, leaves_rest, output_max, stdin) as held:
        return held.follow(check, grace, patience or 0.0)


class SignalRelay:
    """Passes signals on to the commands of all threads whose `HeldCommand` has this object.

    A signal that ends a program also reaches the commands that begin later. The methods must not be called by a signal
    handler, because they acquire a lock.
    """

    def __init__(self) -> None:
        self.is_killing = False  # whether all commands and their descendants are to be killed
        self._lock = system.mutex()
        self._commands: list[HeldCommand] = []
        self._sent: list[int] = []

    def send(self, number: int) -> None:
        """Send the signal `number` to the commands and their descendants, but SIGUSR1 and SIGUSR2 to the commands only.

        Descendants may have no handler for these two signals, and would die.
        """
        with self._lock:
            if number in _INTERRUPTIONS:
                self._sent.append(number)
            for command in self._commands:
                command.pass_to_all(number)

    def terminate(self) -> None:
        """Send SIGTERM to the commands and their descendants."""
        self.send(signal.SIGTERM)

    @property
    def interruption(self) -> int:
        """The number of the first HUP, INT or TERM that `send` has sent; 0 if it has sent none of these signals."""
        return next(iter(self._sent), 0)

    def _add(self, command: HeldCommand) -> None:
        with self._lock:
            self._commands.append(command)
            for number in self._sent:
                command.pass_to_all(number)

    def _remove(self, command: HeldCommand) -> None:
        with self._lock:
            if command in self._commands:
                self._commands.remove(command)


@dataclass(eq=False)
class HeldCommand:
    """Runs one command by a warden, a process that kills the command if this process dies.

    One pipe leads to the warden, and one pipe leads from the warden to this process. With a `relay`, the command runs
    in a session of its own, and several threads may run commands at once. A Ctrl-C on the terminal then reaches only
    this process. `Ending.passed` has the signals that came from the relay, so the caller can distinguish a command that
    failed from a command that was interrupted.

    Attributes:
        command, environment, leaves_rest, output_max, stdin: see `run_held`.
        stdout, stderr: open files with descriptors for the command's output; None is that of this process.
        relay: passes signals on to the command.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    leaves_rest: bool
    output_max: int | None
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None = None
    stderr: IO[bytes] | None = None
    relay: SignalRelay | None = None
    _orders: int = -1
    _report: IO[bytes] | None = None
    _process: subprocess.Popen[bytes] | None = None
    _passed: set[int] = field(default_factory=set)

    def __enter__(self) -> HeldCommand:
        return self

    def __exit__(self, *_: object) -> None:
        _order(self._orders, warden.KILL_ALL)  # after an error; otherwise no process is left
        self._close_orders()
        if self._report is not None:
            self._report.close()
        if self._process is not None:
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process.wait()

    def follow(self, check: Callable[[], object], grace: float, patience: float) -> Ending:
        """Run the command until its end; see `run_held`."""
        theirs, self._orders = system.os.pipe()
        system.os.set_blocking(self._orders, False)  # a warden that was stopped does not read its orders
        reader, report = system.os.pipe()
        self._report = system.os.fdopen(reader, "rb")
        mode = warden.ALONE if self.leaves_rest else warden.HELD
        if self.relay is not None:
            self.relay._add(self)
        with forward_signals(self._pass_on, warden.PASSED):
            try:
                self._process = subprocess.Popen(  # noqa: S603 - the command is what the user wants to run
                    [*warden.program(mode, theirs, report, patience), *self.command],
                    env=dict(self.environment),
                    pass_fds=[theirs, report, *_inherited()],
                    stdin=self.stdin,
                    stdout=self.stdout if self.output_max is None else subprocess.PIPE,
                    stderr=self.stderr,
                    start_new_session=self.relay is not None,
                )
            finally:
                system.close_quietly(theirs, report)
            with _HoldMonitor(check, system.os.dup(self._orders), grace, patience) as watch:
                output = self._read(watch)
                facts = self._facts(watch)
        if watch.lost is None and "lost" in facts:
            raise errors.LockLostError(
                f"the command was stopped: the hold could not be renewed for most of its lease of {patience:g} s. Check"
                " that the store answers and that this process was not stopped, or use a longer lease"
            )
        if watch.lost is not None:
            raise errors.LockLostError(f"the command was stopped: {watch.lost}") from watch.lost
        if self.output_max is not None and len(output) > self.output_max:
            raise errors.LimitExceededError(f"the command was killed: it wrote more than {self.output_max} bytes")
        return Ending(self._status(facts), frozenset(self._passed), output)

    def _pass_on(self, number: int) -> None:
        self._passed.add(number)
        _order(self._orders, number)

    def pass_to_all(self, number: int) -> None:
        """Pass a signal on to the command, and to its descendants unless the signal is SIGUSR1 or SIGUSR2."""
        self._passed.add(number)
        _order(self._orders, number if number in warden.USER else warden.EVERYBODY + number)

    def _close_orders(self) -> None:
        """Close the pipe of the orders. A signal must not be written to a descriptor that is used anew."""
        if self.relay is not None:
            self.relay._remove(self)
        orders, self._orders = self._orders, -1
        system.close_quietly(orders)

    def _read(self, watch: _HoldMonitor) -> bytes:
        """Return the command's standard output, at most `output_max` + 1 bytes.

        If the output exceeds `output_max` bytes, kill the command and all its descendants.
        """
        if self._process is None or self._process.stdout is None or self.output_max is None:
            return b""
        output = b"".join(self._pieces(self._process.stdout, watch, self.output_max + 1))
        if len(output) > self.output_max:
            _order(self._orders, warden.KILL_ALL)
            watch.end()
        return output

    def _facts(self, watch: _HoldMonitor) -> dict[str, object]:
        """Read the warden's report until the warden ends, and return the facts in it."""
        assert self._report is not None
        facts: dict[str, object] = {}
        for line in b"".join(self._pieces(self._report, watch)).splitlines():
            facts.update(json.loads(line))
        return facts

    def _pieces(self, file: IO[bytes], watch: _HoldMonitor, most: int = _ALL) -> Iterator[bytes]:
        """Yield the data from the pipe `file`, up to its end or `most` bytes. Signal handlers run during the wait."""
        is_ready = system.readiness(file.fileno())
        while most > 0:
            while not is_ready(SIGNAL_POLL_S * 1000):
                if self.relay is not None and self.relay.is_killing:
                    _order(self._orders, warden.KILL_ALL)
                    watch.end()
                if watch.is_over:
                    # A warden that was stopped has not read the order. Its guard sees the end of the orders. Only this
                    # thread may close them: otherwise a signal's handler could write to a descriptor that is used anew.
                    self._close_orders()
            piece = system.os.read(file.fileno(), min(most, _PIECE))
            if not piece:
                return
            most -= len(piece)
            yield piece

    def _status(self, facts: dict[str, object]) -> int:
        if "error" in facts:
            raise errors.FscoordError(f"can't run {facts['error']}")
        status = facts.get("status")
        if isinstance(status, int):
            return status
        assert self._process is not None
        status = self._process.wait()
        if "pid" not in facts and -status in self._passed:
            return status  # a signal for the whole group came before the warden had set its handlers
        raise errors.FscoordError(
            f"the warden of the command, a child of process {self._process.pid}, was killed, and with it the command"
            " and all processes that it had started"
        )


def _inherited() -> list[int]:
    """Return the descriptors above 2 that this process has inherited, such as those of make's job server.

    The command inherits these descriptors, as under flock(1). With ``close_fds=False`` instead of this list, the pipes
    to the warden would have to be inheritable. A command that another thread starts at this moment would then keep
    these pipes open.
    """
    found = []
    with suppress(OSError):  # there is no /dev/fd
        for number in map(int, system.os.listdir("/dev/fd")):
            with suppress(OSError):  # the descriptor was closed since, such as the one of listdir
                if number > 2 and system.os.get_inheritable(number):
                    found.append(number)
    return found


def _order(descriptor: int, number: int) -> None:
    with suppress(OSError):  # the warden has ended
        system.os.write(descriptor, bytes([number]))


class _HoldMonitor:
    """Checks the hold regularly in a thread, and stops the command when the hold is lost.

    The thread owns the descriptor `orders` and closes it, because a check that hangs may outlive this object.
    """

    def __init__(self, check: Callable[[], object], orders: int, grace: float, patience: float) -> None:
        self.lost: errors.FscoordError | None = None
        self.is_over = False
        self._check = check
        self._orders = orders
        self._grace = grace
        self._patience = patience
        self._over = system.AutoResetEvent()

    def __enter__(self) -> _HoldMonitor:
        self._thread = system.start_thread("fscoord-hold", self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(LAST_CHECK_S)

    def _run(self) -> None:
        try:
            self._look()
        finally:
            system.close_quietly(self._orders)

    def _look(self) -> None:
        pause = min(CHECK_INTERVAL_S, self._patience / CHECKS_PER_LEASE) if self._patience else CHECK_INTERVAL_S
        has_failed = False
        while not self._over.wait(pause):
            try:
                self._check()
                has_failed = False
                _order(self._orders, warden.ALIVE)
            except errors.FscoordError as error:
                if isinstance(error, _LOST):
                    logger(__name__).info("the hold is lost, so the command is stopped: %s", error)  # it is also raised
                    self._end(error)
                    return
                if not has_failed:
                    logger(__name__).warning("the check of the hold failed: %s", error)
                has_failed = True

    def _end(self, error: errors.FscoordError) -> None:
        self.lost = error
        _order(self._orders, warden.EVERYBODY + signal.SIGTERM)
        if not self._over.wait(self._grace):
            _order(self._orders, warden.KILL_ALL)
            self.end()

    def end(self) -> None:
        """End the thread. Call this method only after the order ``KILL_ALL`` to the warden."""
        self.is_over = True
        self._over.set()
