"""`WorkerGroup` starts a node's workers in a round, each under a warden, copies their output and stops the workers.

The output of a worker goes to the console, with the worker's rank before each line, to files, or to both (`Streams`).
One worker may write to the console directly.
"""

from __future__ import annotations

import itertools
import json
import math
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from string import Template
from typing import IO, Any, NamedTuple, TextIO, cast

from fscoord._runtime import system, tracing
from fscoord._runtime.logging import logger
from fscoord._waiting.timing import Backoff
from fscoord.launch import warden

OUTPUT_END_S = 5.0
"""How long to wait for the last output of a worker after its end, in seconds."""

KILL_S = 30.0
"""How long to wait for killed processes to end, in seconds."""


class Failure(NamedTuple):
    """How a worker ended. The nodes record the first failure of each round.

    Attributes:
        rank: the worker's rank.
        local_rank: the worker's rank on its node.
        host: the address of the node; empty until the agent has added it.
        pid: the worker's process id, or 0 if the worker could not be started.
        status: the exit code, or the negative number of the signal that killed the worker.
        message: the last lines of the worker's standard error, or the reason why the worker could not be started.
        error_file: the path in ``TORCHELASTIC_ERROR_FILE``, if the worker has written a traceback there, else ``""``.
        round: the number of the round; -1 until the agent has added it.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    status: int
    message: str
    error_file: str
    round: int


class WorkerGroup:
    """Runs the workers of one node.

    The end of the ``with`` kills each worker that still runs, and all descendants of the worker.

    Args:
        command: the program and its arguments.
        console: the console to which the workers' output is copied.
        streams: which streams go to files, and which to the console.
        file_mode: the permissions of the files; None: 0644 less the umask.
    """

    def __init__(
        self, command: Sequence[str], console: Console, streams: Streams, file_mode: int | None = None
    ) -> None:
        self._command = list(command)
        self._console = console
        self._streams = streams
        self._file_mode = file_mode
        self._workers: list[_Worker] = []
        self._ends: queue.SimpleQueue[Failure] = queue.SimpleQueue()
        self._ended = 0
        self._filtered: dict[int, _FilteredFile] = {}

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close()
        for file in self._filtered.values():
            file.close()

    def open_filtered_files(self, directory: str, dir_fd: int) -> None:
        """Create the files of `Streams.filters` in `directory`, of which `dir_fd` is a descriptor."""
        for stream, name in ((STDOUT, "filtered_stdout.log"), (STDERR, "filtered_stderr.log")):
            if stream in self._streams.filters:
                file = _create(system.os.path.join(directory, name), dir_fd, self._file_mode)
                self._filtered[stream] = _FilteredFile(file, self._streams.filters[stream], self._console)

    @property
    def running(self) -> int:
        """The number of workers whose end `next_end` has not returned yet."""
        return len(self._workers) - self._ended

    def start(self, rank: int, local_rank: int, environment: Mapping[str, str], directory: str, dir_fd: int) -> None:
        """Start a worker.

        Args:
            rank: the worker's rank.
            local_rank: the worker's rank on this node.
            environment: variables that are added to the environment of this process.
            directory: the path of an existing directory for the worker's files. The files must not exist yet.
            dir_fd: a descriptor of `directory`.
        """
        error_file = system.os.path.join(directory, "error.json")
        values = {**system.os.environ, **environment, "TORCHELASTIC_ERROR_FILE": error_file}
        worker = _Worker(rank, local_rank, error_file, self._ends.put)
        try:
            passed = {
                stream: self._console.descriptor(stream)
                for stream in (STDOUT, STDERR)
                if self._streams.is_passed(rank, local_rank, stream)
            }
            worker.start(self._command, values, passed)
            header = self._streams.header(rank, local_rank, environment.get("ROLE_NAME", ""))
            for stream, name in ((STDOUT, "stdout.log"), (STDERR, "stderr.log")):
                prefix = header if self._streams.is_shown(local_rank, stream) else None
                path = system.os.path.join(directory, name)
                is_file = self._streams.is_file(local_rank, stream)
                file = _create(path, dir_fd, self._file_mode) if is_file else None
                filtered = self._filtered.get(stream) if self._streams.is_filtered(local_rank, stream) else None
                worker.follow(self._console, stream, prefix, file, filtered)
        except BaseException:  # `next_end` would never return the end of this worker
            worker.kill()
            worker.close()
            raise
        self._workers.append(worker)

    def next_end(self, seconds: float) -> Failure | None:
        """Wait for the end of any worker, and return its description; None if no worker ends within `seconds`."""
        try:
            end = self._ends.get(timeout=seconds) if seconds > 0 else self._ends.get_nowait()
        except queue.Empty:
            return None
        self._ended += 1
        return end

    def order(self, number: int) -> None:
        """Send the signal `number` to all workers."""
        for worker in self._workers:
            worker.order(number)

    def stop(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Send the signal `number` to all workers, and SIGKILL after `grace` seconds.

        The method waits until all workers have ended.
        """
        self.order(number)
        deadline = system.time.monotonic() + grace
        while self.running and (left := deadline - system.time.monotonic()) > 0:
            self.next_end(left)
        for worker in self._workers:
            worker.kill()
        while self.running:
            if self.next_end(OUTPUT_END_S) is None:
                logger(__name__).warning(
                    "%d workers were killed and have not ended: they are blocked in the kernel", self.running
                )
                return


class _Worker:
    """One worker: its warden, and the threads that read the worker's output and the warden's report.

    The warden is the process that starts the worker, and kills it with all its descendants.
    """

    def __init__(self, rank: int, local_rank: int, error_file: str, on_end: Callable[[Failure], None]) -> None:
        self._rank = rank
        self._local_rank = local_rank
        self._error_file = error_file
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[system.threading.Thread] = []
        self._tails: dict[int, list[bytes]] = {STDOUT: [], STDERR: []}
        self._report: IO[bytes] | None = None
        self._has_ended = system.threading.Event()  # the worker, with all its descendants
        self._unused: list[IO[bytes] | None] = []  # the pipes and files that no thread uses
        self._span: tracing.Span | None = None

    def start(self, command: list[str], environment: Mapping[str, str], passed: Mapping[int, int]) -> None:
        """Start the warden, which starts the worker. `passed` has a descriptor for each stream that is not copied."""
        self._span = tracing.begin("worker", f"worker {self._rank}", "", None, "worker_rank", self._rank)
        reader, writer = system.os.pipe()
        self._report = system.os.fdopen(reader, "rb")
        self._unused.append(self._report)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the command is what the user wants to run
                [*warden.program(warden.WORKER, 0, writer), *command],
                stdin=subprocess.PIPE,
                stdout=passed.get(STDOUT, subprocess.PIPE),
                stderr=passed.get(STDERR, subprocess.PIPE),
                env=dict(environment),
                pass_fds=[writer],
                start_new_session=True,  # so that the terminal sends Ctrl-C to the agent alone
            )
            self._unused += [self._process.stdout, self._process.stderr]
        finally:
            system.os.close(writer)

    def follow(
        self,
        console: Console,
        stream: int,
        prefix: bytes | None,
        file: IO[bytes] | None,
        filtered: _FilteredFile | None,
    ) -> None:
        """Start a thread that copies the output `stream`, unless `start` got a descriptor for `stream`.

        For `STDERR`, which must be the last stream, also start a thread that reads the warden's report.
        """
        assert self._process is not None
        pipe = self._process.stdout if stream == STDOUT else self._process.stderr
        if pipe is not None:
            self._unused.append(file)
            tail, has_ended = self._tails[stream], self._has_ended.is_set
            self._spawn(console.follow, pipe, stream, prefix, file, tail, has_ended, filtered and filtered.add)
            self._unused.remove(file)
            self._unused.remove(pipe)
        if stream == STDERR:
            self._spawn(self._listen, list(self._threads))
            self._unused.remove(self._report)

    def order(self, number: int) -> None:
        """Make the warden send the signal `number` to the worker."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):
                system.os.write(self._process.stdin.fileno(), bytes([number]))

    def kill(self) -> None:
        """Make the warden kill the worker and all its descendants."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # the warden has ended without reading an order
                self._process.stdin.close()

    def close(self) -> None:
        """Wait for the warden and the threads to end. The wait has a limit: the kernel may block a killed process."""
        if self._process is not None:
            try:
                self._process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                text = "rank %d was killed %g s ago and is blocked in the kernel: inspect the children of process %d"
                logger(__name__).warning(text, self._rank, KILL_S, self._process.pid)
        for thread in self._threads:
            thread.join(OUTPUT_END_S)
        for file in self._unused:
            if file is not None:
                file.close()

    def _spawn(self, call: Callable[..., None], *arguments: object) -> None:
        self._threads.append(system.start_thread("fscoord-run", call, *arguments))

    def _listen(self, outputs: list[system.threading.Thread]) -> None:
        """Read the warden's report, wait for the last output, and pass the worker's end to `on_end`."""
        assert self._report is not None
        facts: dict[str, object] = {}
        with self._report as report:
            for line in report:
                facts.update(json.loads(line))
        self._has_ended.set()
        self._end_span(facts)
        for thread in outputs:
            thread.join(OUTPUT_END_S)
        message = str(facts.get("error") or b"".join(self._tails[STDERR]).decode("utf-8", "replace"))
        if "status" not in facts:
            message += "the warden of this worker was killed, and the worker with it"
        status, pid = facts.get("status", -signal.SIGKILL), facts.get("pid", 0)
        assert isinstance(status, int)
        assert isinstance(pid, int)
        error_file = self._error_file if system.os.path.exists(self._error_file) else ""
        self._on_end(Failure(self._rank, self._local_rank, "", pid, status, message, error_file, -1))

    def _end_span(self, facts: Mapping[str, object]) -> None:
        """End the worker's span, with the exit that the warden has reported."""
        status, pid = facts.get("status"), facts.get("pid", 0)
        outcome = "failed to start" if "error" in facts else "warden killed" if status is None else "exit"
        tracing.end(self._span, outcome, "status", status, "pid", pid, "address", system.process_name(str(pid)))


STDOUT, STDERR = 1, 2
_MODES = ("0", "1", "2", "3")
TAIL = 20
LINE_MAX = 65536


def parse_streams(text: str) -> Mapping[int | None, int]:
    """Parse `text`, which selects streams in the syntax of torchrun. Return a mapping of local ranks to streams.

    ``0`` selects no stream of any local rank, ``1`` standard output, ``2`` standard error and ``3`` both. ``0:3,1:1``
    selects streams of single local ranks. The key None stands for every local rank that `text` does not name.

    Raises:
        ValueError: `text` has another form.
    """
    if text.strip() in _MODES:
        return {None: int(text)}
    streams: dict[int | None, int] = {None: 0}
    for item in text.split(","):
        rank, _, mode = item.strip().partition(":")
        if mode not in _MODES or not rank.isascii() or not rank.isdigit():
            raise ValueError(f"{text!r}: streams are 0, 1, 2 or 3 for all, or 0:3,1:1 for each local rank")
        if int(rank) in streams:
            raise ValueError(f"{text!r} names the local rank {rank} twice")
        streams[int(rank)] = int(mode)
    return streams


@dataclass(frozen=True)
class Streams:
    """The destinations of the workers' streams.

    A stream that neither `redirects` nor `tee` names goes to the console only.

    Attributes:
        redirects: the streams that go to files only, as `parse_streams` returns them.
        tee: the streams that go to files as well as to the console.
        shown_ranks: the local ranks whose streams may go to the console; None: all local ranks.
        console_rank: the rank of one worker; None: no worker. A stream of this worker that goes to the console only is
            not copied: the worker writes directly to the console. So no rank is printed before the lines of the stream.
            If the stream is standard error, the worker's `Failure` has no last lines.
        filters: for each stream, 1 or 2, texts. The lines that `tee` copies to the console, and that contain one of the
            texts, also go to one file of all workers of the node.
        prefix: the template of the text before each line, with ``${role_name}``, ``${rank}`` and ``${local_rank}``.
    """

    redirects: Mapping[int | None, int] = field(default_factory=dict)
    tee: Mapping[int | None, int] = field(default_factory=dict)
    shown_ranks: frozenset[int] | None = None
    console_rank: int | None = None
    filters: Mapping[int, Sequence[str]] = field(default_factory=dict)
    prefix: str = "[$rank] "

    def header(self, rank: int, local_rank: int, role: str) -> bytes:
        """Return the text before each line of a worker. As with torchrun, unknown variables stay as they are."""
        text = Template(self.prefix).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)
        return text.encode(errors="surrogateescape")

    def is_filtered(self, local_rank: int, stream: int) -> bool:
        """Return whether lines of `stream`, 1 or 2, of the worker with this local rank go to the filtered file."""
        return self.is_shown(local_rank, stream) and bool(_mode(self.tee, local_rank) & stream)

    def is_file(self, local_rank: int, stream: int) -> bool:
        """Return whether `stream`, 1 or 2, of the worker with this local rank goes to a file."""
        return bool((_mode(self.redirects, local_rank) | _mode(self.tee, local_rank)) & stream)

    def is_shown(self, local_rank: int, stream: int) -> bool:
        """Return whether `stream`, 1 or 2, of the worker with this local rank goes to the console."""
        if self.shown_ranks is not None and local_rank not in self.shown_ranks:
            return False
        return not _mode(self.redirects, local_rank) & stream or bool(_mode(self.tee, local_rank) & stream)

    def is_passed(self, rank: int, local_rank: int, stream: int) -> bool:
        """Return whether the worker writes its `stream`, 1 or 2, directly to the console."""
        return rank == self.console_rank and self.is_shown(local_rank, stream) and not self.is_file(local_rank, stream)


def _mode(streams: Mapping[int | None, int], local_rank: int) -> int:
    return streams.get(local_rank, streams.get(None, 0))


_ASK_TORCH = """
import torch
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
print("\\n", "none" if device is None else device.type, torch.accelerator.device_count())
"""


def find_accelerators() -> tuple[str, int]:
    """Return the type of this node's accelerators, such as ``cuda``, and the number that torch reports.

    The type is ``none`` if the node has no accelerator, and ``""`` if torch can't be imported. A short child process
    imports torch. In this process torch would occupy memory for as long as the job runs.
    """
    command = [sys.executable, "-c", _ASK_TORCH]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)  # noqa: S603 - our own
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        logger(__name__).info("torch can't count the accelerators: %s", reason)
        return "", 0
    kind, count = done.stdout.decode().split()[-2:]
    return kind, int(count)


BAR_S = 0.25
"""The console gets a new state of a progress bar at most once in this many seconds."""

LINES_MAX = 1000
"""If this many lines are queued for a slow reader, the workers must wait for the reader."""

DRAIN_POLL_S = 0.05
"""The time in seconds between two checks whether a reader takes data again."""

STUCK_S = 1.0
"""While the launcher ends, a reader that has taken no data for this many seconds counts as stuck."""

PIECE = 4096
"""The size in bytes of the largest write. A pipe takes such a write as a whole or not at all (PIPE_BUF)."""


class _Sink:
    """Writes lines to a file in a thread, because the reader of the file may pause at any time.

    The lines pass through a `SimpleQueue`, whose `put` is reentrant. Signal handlers call `put`, too. With a lock
    instead of the queue, a signal handler would deadlock if the interrupted code of the main thread held the lock.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self._write: Callable[[memoryview], int | None] = file.write
        self.problem = ""
        self._lines: queue.SimpleQueue[bytes | system.AutoResetEvent] = queue.SimpleQueue()
        self._dropped = itertools.count()
        self._since: float | None = None  # when the present write began, or None
        self._hurried: float | None = None
        system.start_thread("fscoord-console", self._run)

    def put(self, line: bytes, has_ended: Callable[[], bool]) -> None:
        """Queue `line` for the thread. If too many lines are queued, wait first, unless `has_ended` returns True.

        After `hurry`, drop `line` if the reader is stuck.
        """
        if self._lines.qsize() < LINES_MAX or self._has_place(has_ended):
            self._lines.put(line)
        else:
            next(self._dropped)

    def _has_place(self, has_ended: Callable[[], bool]) -> bool:
        backoff = Backoff(math.inf)
        while self._lines.qsize() >= LINES_MAX and not has_ended():
            if self._is_stuck():
                return False
            backoff.pause()
        return True

    def hurry(self) -> None:
        """From now on, drop lines if the reader takes no data for `STUCK_S` seconds."""
        self._hurried = self._hurried or system.time.monotonic()

    def drain(self) -> bool:
        """Wait until the queued lines have been written. After `hurry`, return False if the reader is stuck."""
        mark = system.AutoResetEvent()
        self._lines.put(mark)
        while not mark.wait(DRAIN_POLL_S):
            if self._is_stuck():
                return False
        return True

    def close(self) -> int:
        """End the thread, and return how many lines were dropped."""
        if not self.drain():
            self.problem = "its reader takes no data"
            nowhere = system.open_file(system.os.devnull, system.os.O_WRONLY, 0, set())
            system.os.dup2(nowhere, self.file.fileno())  # so that the rest of this process does not block
            system.os.close(nowhere)
            with suppress(queue.Empty):
                while True:
                    if isinstance(self._lines.get_nowait(), bytes):
                        next(self._dropped)
            next(self._dropped)  # the line that is being written
        self._lines.put(b"")
        return next(self._dropped)

    def _is_stuck(self) -> bool:
        since, hurried = self._since, self._hurried
        return not (since is None or hurried is None) and system.time.monotonic() - max(since, hurried) > STUCK_S

    def _run(self) -> None:
        while entry := self._lines.get():
            if isinstance(entry, bytes):
                self._write_line(entry)
            else:
                entry.set()

    def _write_line(self, line: bytes) -> None:
        """Write `line`. If a write fails, for example to a closed pipe, drop this line and all further lines."""
        rest, self._since = memoryview(line), system.time.monotonic()
        try:
            while rest and not self.problem:
                written = self._write(rest[:PIECE])
                if written is None:  # another process has made the file non-blocking, and it is full
                    system.time.sleep(DRAIN_POLL_S)
                else:
                    rest, self._since = rest[written:], system.time.monotonic()
            self.file.flush()
        except (OSError, ValueError) as error:
            self.problem = getattr(error, "strerror", None) or str(error)
        self._since = None
        if self.problem:
            next(self._dropped)


class Console:
    """Writes whole lines from many threads to the standard output and standard error of this process.

    A reader of the output, such as a pager, may pause for long. Then the workers wait for the reader, and the launcher
    does not. The end of the ``with`` waits until the readers have taken all lines. If the ``with`` ends by an
    exception, or after `hurry`, the lines that a reader does not take are dropped and counted. If both streams are one
    file, one thread writes both, which keeps the lines in order.

    Args:
        out: the binary file for the workers' standard output; None: ``sys.stdout``.
        err: the binary file for the workers' standard error and for the launcher's own lines; None: ``sys.stderr``.
    """

    def __init__(self, out: IO[bytes] | None = None, err: IO[bytes] | None = None) -> None:
        self._sinks: dict[int, _Sink] = {}
        for stream, file in ((STDOUT, out or _binary(sys.stdout)), (STDERR, err or _binary(sys.stderr))):
            same = [sink for sink in self._sinks.values() if file is not None and _are_one(sink.file, file)]
            if file is not None:  # it is None if this process was started without the stream, as by ``>&-``
                self._sinks[stream] = same[0] if same else _Sink(file)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.hurry()
            for sink in dict.fromkeys(self._sinks.values()):
                if lost := sink.close():
                    name = "standard output" if sink is self._sinks.get(STDOUT) else "standard error"
                    words = f"fscoord: {name}: {sink.problem}; {lost} lines of output were dropped\n"
                    self.write(STDERR, words.encode())

    def flush(self) -> None:
        """Wait until the readers have taken all lines of earlier calls."""
        for sink in self._sinks.values():
            sink.drain()

    def hurry(self) -> None:
        """From now on, drop lines that a reader does not take within `STUCK_S` seconds, because this process ends."""
        for sink in self._sinks.values():
            sink.hurry()

    def write(self, stream: int, line: bytes, has_ended: Callable[[], bool] = lambda: True) -> None:
        """Write one whole line to `stream`, 1 or 2.

        If too many lines are queued, wait for the reader, unless `has_ended` returns True.
        """
        sink = self._sinks.get(stream)
        if sink is not None:
            sink.put(line, has_ended)

    def descriptor(self, stream: int) -> int:
        """Return the descriptor of `stream`, 1 or 2, for a child process."""
        sink = self._sinks.get(stream)
        return subprocess.DEVNULL if sink is None else sink.file.fileno()

    def error_text(self) -> TextIO | None:
        """Return a text file for ``sys.stderr`` that writes to stream 2.

        A thread that writes to this file does not wait for the reader of the stream.
        """
        sink = self._sinks.get(STDERR)
        return None if sink is None else cast("TextIO", _ErrorText(sink))

    def follow(
        self,
        pipe: IO[bytes],
        stream: int,
        prefix: bytes | None,
        file: IO[bytes] | None,
        tail: list[bytes],
        has_ended: Callable[[], bool] = lambda: False,
        filtered: Callable[[bytes, bytes], None] | None = None,
    ) -> None:
        """Copy `pipe` line by line, up to its end, and keep the last lines in `tail`.

        `has_ended` returns whether all writers of the pipe have ended. After their end, the method no longer waits for
        the reader of the console.

        The console gets `prefix` and the line. If `prefix` is None, the console gets no line. A carriage return begins
        a new state of the line, as in a progress bar. The console gets one state in `BAR_S` seconds, and the last
        state. `tail` gets only the last state, and so does a console that is a regular file. `file` gets all bytes
        unchanged, unless `file` is None. `filtered` is called with `prefix` and each line that a console gets. At the
        end, the pipe and the file are closed.

        If a write to the file fails, for example on a full disk, the file is closed, and the console gets a message.
        The pipe is still read, because the worker would die of SIGPIPE without a reader.
        """
        is_live = prefix is not None and stream in self._sinks and not _is_regular(self._sinks[stream].file)
        rest = shown = b""  # the line that has not ended, and its state on the console
        due = -math.inf
        try:
            while True:
                state = _last_state(rest) if is_live and b"\r" in rest else b""
                if prefix is not None and state.strip() and state != shown:
                    left = due - system.time.monotonic()
                    if left <= 0 or not _has_data(pipe, left):
                        self.write(stream, prefix + state + b"\n", has_ended)
                        shown, due = state, system.time.monotonic() + BAR_S
                        continue
                piece = pipe.read1(LINE_MAX)  # type: ignore[attr-defined] # all that is there; it waits for the first
                if piece and file is not None and not self.log(file, piece):
                    file = None
                lines, rest = _split(rest + piece) if piece else ([rest] if rest else [], b"")
                for line in lines:
                    last = _last_state(line)
                    if prefix is not None and not (shown and last == shown):
                        self.write(stream, prefix + last + b"\n", has_ended)
                    if prefix is not None and filtered is not None:
                        filtered(prefix, last)
                    tail.append(last + b"\n")
                    shown = b""
                del tail[:-TAIL]
                if not piece:
                    return
        finally:
            pipe.close()
            if file is not None:
                file.close()

    def log(self, file: IO[bytes], piece: bytes) -> bool:
        """Write `piece` to `file`. After an error close the file, print the error, and return False."""
        try:
            file.write(piece)
            file.flush()
        except OSError as error:
            with suppress(OSError):  # close() tries once more to write the buffer
                file.close()
            words = f"fscoord: {file.name}: {error.strerror}; the file ends here, and the worker goes on\n"
            self.write(STDERR, words.encode(errors="surrogateescape"))
            return False
        return True


class _FilteredFile:
    """The file that gets the lines of all workers of a node that contain one of some texts. Many threads write to it.

    Args:
        file: the file, which this object closes.
        texts: the texts.
        console: the console that gets a message if a write fails.
    """

    def __init__(self, file: IO[bytes], texts: Sequence[str], console: Console) -> None:
        self._file: IO[bytes] | None = file
        self._texts = [text.encode(errors="surrogateescape") for text in texts]
        self._console = console
        self._lock = system.mutex()

    def add(self, prefix: bytes, line: bytes) -> None:
        """Write `prefix` and `line`, if the line contains one of the texts. After an error, write no further line."""
        if any(text in line for text in self._texts):
            with self._lock:
                if self._file is not None and not self._console.log(self._file, prefix + line + b"\n"):
                    self._file = None

    def close(self) -> None:
        """Close the file. Later lines are dropped."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()


class _ErrorText:
    """A text file for ``sys.stderr``. A `_Sink` writes the text in a thread, so `write` never waits for a reader."""

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, sink: _Sink) -> None:
        self._sink = sink
        self.fileno, self.isatty = sink.file.fileno, sink.file.isatty

    def write(self, text: str) -> int:
        self._sink.put(text.encode(self.encoding, self.errors), lambda: True)
        return len(text)

    def flush(self) -> None:
        pass


def _split(text: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete lines of `text` without their ends, and the last state of the incomplete line."""
    *lines, rest = text.split(b"\n")
    if b"\r" in rest:  # drop earlier states, or a bar that runs for long would become a long line
        rest = b"\r" + _last_state(rest) + b"\r" * rest.endswith(b"\r")
    while len(rest) > LINE_MAX:
        lines.append(rest[:LINE_MAX])
        rest = rest[LINE_MAX:]
    return lines, rest


def _last_state(line: bytes) -> bytes:
    r"""Return the part of `line` after its last carriage return, without the ``\r`` of a ``\r\n`` at the end."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _has_data(pipe: IO[bytes], seconds: float) -> bool:
    """Wait until `pipe` has data or has ended, for at most `seconds`. Return False if the time is over."""
    return bool(system.readiness(pipe.fileno())(seconds * 1000))


def _is_regular(file: IO[bytes]) -> bool:
    try:
        return system.stat.S_ISREG(system.os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # the file is in memory
        return False


def _binary(text: IO[str] | None) -> IO[bytes] | None:
    """Return the binary file of `text`, unbuffered if possible.

    A buffered file has a lock. A thread that writes to the file would hold the lock while it waits for a reader.
    """
    file = getattr(text, "buffer", None)
    return getattr(file, "raw", file)


def _are_one(file: IO[bytes], other: IO[bytes]) -> bool:
    try:
        return system.os.path.sameopenfile(file.fileno(), other.fileno())
    except (OSError, ValueError):  # one of them is in memory
        return file is other


def _create(path: str, dir_fd: int, mode: int | None) -> IO[bytes]:
    """Create the file `path`, in the directory `dir_fd`, with the permissions `mode`; None: 0644 less the umask."""
    name, flags = system.os.path.basename(path), system.os.O_WRONLY | system.os.O_CREAT | system.os.O_EXCL
    fd = system.open_file(name, flags, 0o644 if mode is None else 0o600, set(), dir_fd=dir_fd)
    file = system.os.fdopen(fd, "wb")
    raw: Any = file.raw
    raw.name = path  # as tempfile does: errors then name the path instead of the descriptor
    if mode is not None:
        system.os.fchmod(fd, mode)
    return file
