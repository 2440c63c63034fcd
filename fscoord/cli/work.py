"""The verb work: a pool of workers that run a command for each item of a queue."""

from __future__ import annotations

import math
import re
import shlex
from contextlib import ExitStack, redirect_stderr
from functools import partial
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import click

from fscoord._runtime import system
from fscoord._runtime.escaping import shell_word
from fscoord._runtime.signals import forward_signals
from fscoord.cli.options import given_timeout, number_option, seconds_option, with_store_to_work
from fscoord.cli.output import BEGIN_S, _is_watched, counted, say
from fscoord.cli.queues import (
    check_failed,
    environment_of,
    failed_option,
    items_argument,
    next_item,
    stdin_option,
    work_on,
)
from fscoord.cli.run_command import VERBATIM, Command, command_options, environment
from fscoord.errors import QueueEmptyError, StoreTimeoutError
from fscoord.launch import Console, Ending
from fscoord.launch.held import HeldCommand, SignalRelay
from fscoord.launch.warden import PASSED
from fscoord.launch.worker import STDERR, STDOUT
from fscoord.recipes import Item, PriorityQueue
from fscoord.recipes.queue import LOOK_S
from fscoord.store import Store

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

FAILED_MAX: Final = 63
"""The highest exit code that is a number of failed items. The codes from 64 on are those of errors."""

JOBLOG: Final = ("Seq", "Host", "Starttime", "JobRuntime", "Send", "Receive", "Exitval", "Signal", "Command")
"""The columns of the log, which are those of GNU parallel."""

LINE_S: Final = 5.0
"""Without a terminal, the progress is a line each time that this many seconds have passed."""

PIECE: Final = 1 << 16

DOUBLINGS_MAX: Final = 30


class Halt(NamedTuple):
    """When the pool ends early: after `fails` failed items. If `is_now` is true, commands that run are stopped."""

    fails: float
    is_now: bool


def _parse_halt(text: str) -> Halt:
    if text == "never":
        return Halt(math.inf, is_now=False)
    match = re.fullmatch(r"(now|soon),fail=([1-9][0-9]*)", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is neither never nor soon,fail=NUMBER nor now,fail=NUMBER.")
    return Halt(int(match[2]), match[1] == "now")


@click.command(context_settings=VERBATIM)
@number_option(
    "-n", "-j", "--jobs", help="How many commands run at once. [default: the number of processors of this process]"
)
@number_option("--retries", least=0, default=0, help="Run COMMAND again for an item for which it fails, so often.")
@seconds_option("--backoff", default="0", help="The time before the first retry of an item. It doubles for each retry.")
@failed_option("The queue for items whose retries have failed. [default: QUEUE.failed]")
@click.option(
    "--halt",
    metavar="WHEN",
    type=_parse_halt,
    default="never",
    show_default=True,
    help="Take no more items after so many have failed: soon,fail=NUMBER. With now,fail=NUMBER also stop the commands"
    " that run.",
)
@click.option("--joblog", metavar="FILE", type=click.Path(dir_okay=False), help="Append a line for each run to FILE.")
@click.option("--eta", is_flag=True, help="Print the progress also if standard error is not a terminal.")
@click.option("--keep-waiting", is_flag=True, help="Wait for further items when the queue is empty.")
@stdin_option
@items_argument
@command_options
@with_store_to_work
def work(
    store: Store,
    /,
    queue: bytes,
    jobs: int | None,
    retries: int,
    backoff: float,
    failed: bytes | None,
    halt: Halt,
    joblog: str | None,
    eta: bool,
    keep_waiting: bool,
    by_stdin: bool,
    command: Command,
) -> int:
    """Run COMMAND for each item of QUEUE, several at once.

    In the arguments of COMMAND, {} is replaced by the item. If no argument has {}, the item is the last argument. The
    text of -c gets the item quoted. As with "fscoord take-item", the item is also in the variable FSCOORD_ITEM. With
    --stdin it is on standard input instead, and nothing is replaced. Otherwise standard input is empty.

    Several hosts may work on the same queue. The verb ends when the queue is empty: it also waits for the items that
    other processes have, because these items come back if their processes die. With --keep-waiting it goes on. It
    exits with 75 if no item comes within --timeout, and other processes still have items.

    An item for which COMMAND fails goes back to its place in the queue, and to the queue OTHER if it was handed out
    more than --retries times. An item also goes back if this process is killed, and all processes of COMMAND are killed
    with it. The variable FSCOORD_DELIVERIES has the number of times.

    The output of a run of COMMAND is printed when the run ends, so that the outputs of several runs do not mix. The
    lines of --joblog have the columns of GNU parallel.

    Exits with the number of items that have failed, but at most 63: higher codes are errors of fscoord. After --halt,
    exits with the exit code of the COMMAND that failed. Signals are passed on to COMMAND. After Ctrl-C (130), SIGTERM
    (143) or SIGHUP (129) the verb takes no more items. The items whose COMMAND then fails go back.

    \b
    Examples:
      fscoord put-item images *.png && fscoord work images -- optipng {}
      fscoord work -n 8 --retries 2 --backoff 10 --joblog log shards -- ./train --shard {}
      fscoord work --halt now,fail=1 images -c 'convert {} {}.jpg && rm {}'
      fscoord work --keep-waiting --stdin mails -- sendmail -t
    """
    other = queue + b".failed" if failed is None else failed
    check_failed(queue, other)
    given = given_timeout(click.get_current_context())
    limit = math.inf if given is None else max(given, LOOK_S)
    source = PriorityQueue(store, queue, timeout=limit)
    settings = _Settings(jobs or system.usable_processors(), retries, backoff, halt, keep_waiting, by_stdin, limit)
    with ExitStack() as stack:
        log_file = _opened(joblog, stack)
        console = stack.enter_context(Console())
        stack.enter_context(redirect_stderr(console.error_text()))
        report = _Report(console, log_file, has_lines=eta)
        stack.callback(report.close)
        return _Pool(source, PriorityQueue(store, other), command, settings, report).run()


class _Settings(NamedTuple):
    jobs: int
    retries: int
    backoff: float
    halt: Halt
    keep_waiting: bool
    by_stdin: bool
    limit: float


class _Pool:
    """Runs `command` for each item of `source`, in threads. Items that have failed are put into `refuse`.

    The threads take items and run commands. One thread at a time waits for an item. The main thread passes on signals,
    releases items after their back-off, and finds out whether the pool has finished.
    """

    def __init__(
        self, source: PriorityQueue, refuse: PriorityQueue, command: Command, settings: _Settings, report: _Report
    ) -> None:
        self._source = source
        self._refuse = refuse
        self._command = command
        self._settings = settings
        self._report = report
        self._environment = environment(None)  # by the context of click, which only the main thread has
        self._relay = SignalRelay()
        self._news = system.AutoResetEvent()
        self._turn = system.mutex()
        self._lock = system.mutex()  # guards the attributes below
        self._is_over = self._has_waited = False
        self._started = self._running = self._done = self._failed = 0
        self._halted: Ending | None = None
        self._errors: list[BaseException] = []
        self._delayed: list[tuple[float, Item]] = []

    def run(self) -> int:
        """Run the command until the pool has finished. Return the exit code of the verb."""
        received: list[int] = []
        kill_at: float | None = None

        def note(number: int) -> None:
            received.append(number)
            self._news.set()

        with forward_signals(note, PASSED):
            for _ in range(self._settings.jobs):
                system.start_thread("fscoord-work", self._work)
            while not self._is_finished():
                while received:
                    self._relay.send(received.pop(0))
                if self._halted is not None and self._settings.halt.is_now and kill_at is None:
                    self._relay.terminate()
                    kill_at = system.time.monotonic() + self._command.grace
                elif kill_at is not None and system.time.monotonic() >= kill_at:
                    self._relay.is_killing = True
                    kill_at = math.inf
                if self._relay.interruption:
                    self._is_over = True
                    self._report.console.hurry()
                self._release_due()
                self._show()
                self._news.wait(max(0.0, min(LOOK_S, self._next_due() - system.time.monotonic())))
        self._show(is_last=True)
        return self._exit_code()

    def _exit_code(self) -> int:
        if self._failed:
            say(f"{counted(self._failed, 'item')} failed, and went to the queue {self._refuse.name!r}")
        if self._errors:
            raise self._errors[0]
        if self._halted is not None:
            return self._halted.code
        if self._relay.interruption:
            return 128 + self._relay.interruption
        if self._has_waited and self._left():
            owners = ", ".join(sorted({each.owner for each in self._source.taken()}))
            raise StoreTimeoutError(
                f"timeout: no item came into the queue {self._source.name!r}, and {counted(self._left(), 'item')} of it"
                f" did not end: {f'taken by {owners}' if owners else 'not taken now'}"
            )
        return min(self._failed, FAILED_MAX)

    def _left(self) -> int:
        """Return the number of items in the queue, including the items that a consumer has."""
        return len(self._source._items.order_keys()[0])

    # These are functions, because other threads change the attributes between two tests.

    def _is_idle(self) -> bool:
        return not (self._running or self._delayed)

    def _takes_no_more(self) -> bool:
        return self._is_over

    def _is_finished(self) -> bool:
        if not self._is_idle():
            return False
        if not self._is_over and (self._settings.keep_waiting or self._left()):
            return False
        with self._lock:
            self._is_over |= not self._running  # it runs if an item was put after the count
            return self._is_idle()

    def _show(self, *, is_last: bool = False) -> None:
        if self._report.is_due(is_last=is_last):
            self._report.show(self._done, self._failed, self._running, self._left())

    def _next_due(self) -> float:
        with self._lock:
            return min((due for due, _ in self._delayed), default=math.inf)

    def _release_due(self) -> None:
        now = system.time.monotonic()
        with self._lock:
            due = [each for each in self._delayed if self._is_over or each[0] <= now]
            self._delayed = [each for each in self._delayed if each not in due]
        for _, item in due:
            item.release()

    def _release_later(self, item: Item) -> None:
        seconds = self._settings.backoff * 2 ** min(item.deliveries - 1, DOUBLINGS_MAX)
        with self._lock:
            self._delayed.append((system.time.monotonic() + seconds, item))

    def _work(self) -> None:
        """Take items and run the command for each, in a thread of the pool. Errors are kept for the main thread."""
        item: Item | None = None
        try:
            while True:
                with self._turn:
                    item, number = self._next(), self._started
                if item is None:
                    return
                refuse = self._refuse if item.deliveries > self._settings.retries else None
                give_back = self._release_later if self._settings.backoff else Item.release
                ending = work_on(item, partial(self._run, item, number), refuse, give_back)
                item = None
                self._count(ending, is_final=refuse is not None)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            with self._lock:
                self._errors.append(error)
                self._is_over = True
                self._running -= item is not None
        finally:
            self._news.set()

    def _next(self) -> Item | None:
        """Take an item. Return None if the pool takes no more items."""
        while not self._takes_no_more():
            try:
                item = next_item(self._source, self._settings.limit, waits=True, is_last=False)
            except QueueEmptyError:
                with self._lock:
                    if self._is_idle():
                        self._has_waited = self._is_over = True
                continue
            with self._lock:
                if not self._takes_no_more():
                    self._started += 1
                    self._running += 1
                    return item
            item.release()
        return None

    def _run(self, item: Item, number: int) -> Ending:
        own = environment_of(item, self._environment, by_stdin=self._settings.by_stdin)
        words = self._command.words if self._settings.by_stdin else _filled(self._command, item.data)
        with ExitStack() as stack:
            sent = item.data if self._settings.by_stdin else b""
            files = [stack.enter_context(system.unnamed_file(data)) for data in (sent, b"", b"")]
            given, out, err = files
            begin, start = system.time.time(), system.time.monotonic()
            leaves_rest = self._command.leaves_rest
            with HeldCommand(words, own, leaves_rest, None, given, out, err, self._relay) as held:
                ending = held.follow(item.check, self._command.grace, 0.0)
            seconds = system.time.monotonic() - start
            self._report.add(_Run(number, begin, seconds, len(sent), out, err, ending.status, words))
        return ending

    def _count(self, ending: Ending, *, is_final: bool) -> None:
        with self._lock:
            self._running -= 1
            if not ending.status:
                self._done += 1
            elif is_final and not ending.interruption:
                self._failed += 1
                if self._failed >= self._settings.halt.fails and not self._is_over:
                    self._halted = ending
                    self._is_over = True
        self._news.set()


def _filled(command: Command, data: bytes) -> list[str]:
    """Return the words of `command` with `data` in the place of {}, or else as the last word."""
    item = system.os.fsdecode(data)
    if not any("{}" in word for word in command.words):
        return [*command.words, item]
    return [word.replace("{}", shlex.quote(item) if command.is_text else item) for word in command.words]


class _Run(NamedTuple):
    """One run of the command. `status` is the exit code, or the negative number of a signal."""

    number: int
    begin: float
    seconds: float
    sent: int
    out: IO[bytes]
    err: IO[bytes]
    status: int
    words: list[str]

    def log_line(self) -> bytes:
        """Return the line in the columns of `JOBLOG`."""
        received = system.os.fstat(self.out.fileno()).st_size
        cells = (
            *(self.number, system.hostname(), f"{self.begin:.3f}", f"{self.seconds:10.3f}", self.sent, received),
            *(max(self.status, 0), max(-self.status, 0), " ".join(map(shell_word, self.words))),
        )
        return "\t".join(map(str, cells)).encode() + b"\n"


class _Report:
    """Prints the output of each run as a whole, writes the log of the runs, and shows the progress.

    Args:
        console: prints the output.
        joblog: the descriptor of the log, or None.
        has_lines: whether to print the progress if standard error is not a terminal.
    """

    def __init__(self, console: Console, joblog: int | None, *, has_lines: bool) -> None:
        self.console = console
        self._joblog = joblog
        self._has_bar = _is_watched()
        self._has_lines = has_lines and not self._has_bar
        self._lock = system.mutex()
        self._begin = system.time.monotonic()
        self._due = self._begin + (BEGIN_S if self._has_bar else LINE_S)
        self._most = 0
        self._bar: Bar | None = None

    def close(self) -> None:
        """Erase the bar."""
        if self._bar is not None:
            self._bar.stop()

    def add(self, run: _Run) -> None:
        """Print the output of `run`, and append its line to the log."""
        with self._lock:
            if self._bar is not None:
                self._bar.stop()  # erases the bar
            for stream, file in ((STDOUT, run.out), (STDERR, run.err)):
                file.seek(0)
                while piece := file.read(PIECE):
                    self.console.write(stream, piece, lambda: False)
            if self._joblog is not None:
                system.os.write(self._joblog, run.log_line())
            if self._bar is not None:
                self._bar.start()

    def is_due(self, *, is_last: bool) -> bool:
        """Return whether to call `show`. After the last item a line is printed, but a bar is not."""
        return (
            self._has_lines if is_last else (self._has_bar or self._has_lines) and self._due <= system.time.monotonic()
        )

    def show(self, done: int, failed: int, running: int, left: int) -> None:
        """Show the progress. `left` is the number of items in the queue, which other pools may empty, too."""
        self._most = max(self._most, done + failed + left)
        ended = self._most - left
        seconds = (system.time.monotonic() - self._begin) / ended * left if ended else math.inf
        words = f"{ended} of {counted(self._most, 'item')} finished, {failed} failed, {running} running"
        words += f", about {seconds:.0f} s left" if left and ended else ""
        if not self._has_bar:
            self._due = system.time.monotonic() + LINE_S
            say(words)
        elif self._lock.acquire(blocking=False):  # otherwise a thread prints, and may wait for a slow reader
            try:
                self._bar = self._bar or _make_bar()
                self._bar.update(
                    self._bar.task_ids[0], description=words, completed=ended, total=self._most, refresh=True
                )
            finally:
                self._lock.release()


def _make_bar() -> Bar:
    from rich.console import Console as Screen
    from rich.progress import BarColumn, Progress as Bar, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    bar = Bar(*columns, console=Screen(stderr=True, force_terminal=True), transient=True, auto_refresh=False)
    bar.add_task("")
    bar.start()
    return bar


def _opened(joblog: str | None, stack: ExitStack) -> int | None:
    """Open the log, with its headings if it is new. `stack` closes it."""
    if joblog is None:
        return None
    flags = system.os.O_WRONLY | system.os.O_CREAT | system.os.O_APPEND | system.O_CLOEXEC
    file = stack.enter_context(system.os.fdopen(system.os.open(joblog, flags, 0o666), "wb"))
    if not system.os.fstat(file.fileno()).st_size:
        system.os.write(file.fileno(), "\t".join(JOBLOG).encode() + b"\n")
    return file.fileno()
