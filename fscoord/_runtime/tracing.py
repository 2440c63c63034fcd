"""`Recorder`: writes the spans of this process to a file of its own. It never blocks and never fails the program.

A span is a piece of time in which the process waited, held a lock or ran an operation of interest. `docs/trace.md`
specifies the file. The module is in the lowest layer, so that every part of the package may record spans. Code that
waits first tests whether the global `recorder` is None, and then calls nothing of this module.

These rules keep the recorder out of the program's way:

- A finished span is appended to a deque, which needs no lock. The thread whose span completes a batch writes the batch.
  While one thread writes, other threads only append their spans to the deque. So does a signal handler that interrupts
  the writing thread.
- One write(2) to the page cache writes a batch. There is no sync. The file is not in append mode, because an append
  would request the length of the file from a file server.
- An error of the system may lose spans, and never fails an operation. The first error is logged. After an error the
  recorder tries again only `RETRY_S` later.
- The deque, the open spans and the files are bounded. A process has two files, its segments, which it fills in turn.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Generator
from itertools import count
from typing import Any, Final, TypeVar

from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError

T = TypeVar("T")

get_ident: Final = system.threading.get_ident

__all__ = ["ENVIRONMENT_VARIABLE", "VERSION", "Recorder", "Span", "begin", "end", "event", "record_steps", "start"]

ENVIRONMENT_VARIABLE: Final = "FSCOORD_TRACE"

VERSION: Final = 1

SEGMENT_BYTES: Final = 32 << 20

BATCH: Final = 128
"""The number of finished spans that are written at once."""

LONGEST_DELAY_NS: Final = 1_000_000_000
"""A span that ends so long after the last write is written at once."""

LONG_SLEEP_S: Final = 0.1
"""Before a sleep that may last longer, in a wait or after a wait of that length, the open spans are written."""

PENDING_MAX: Final = 8192
OPEN_MAX: Final = 8192

ROUNDS: Final = 8
"""How often one thread writes at most before it goes on, if other threads record spans meanwhile."""

RETRY_S: Final = 10.0
"""How long the recorder drops spans after an error of the system, in seconds."""

Span = list[Any]
"""One span: a list of `KIND`, number, thread, `BEGIN`, `END`, name, place, rank, `OUTCOME`, and facts after these.

A list costs a quarter of an object with attributes, and is encoded as it is. The facts are names and values in turn:
``"world_size", 64``. `docs/trace.md` lists the kinds, the outcomes and the facts. Other modules only pass spans on.
"""

KIND, NUMBER, THREAD, BEGIN, END, NAME, PLACE, RANK, OUTCOME = range(9)
"""The indices of a span. `BEGIN` and `END` are in ns of the monotonic clock. The end of an open span is 0. The place is
the text that identifies the store on all hosts. The rank is that of the caller, or None."""


class Recorder:
    """The recorder of this process.

    Threads share it. A forked child has files of its own, and none of the spans of its parent.

    Args:
        directory: the directory of the files, absolute. The recorder makes it with the first file.
        segment_bytes: the size in bytes at which a segment is full. The other segment is then begun anew.
    """

    def __init__(self, directory: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        import json.encoder

        self.directory = directory
        self._segment_bytes = segment_bytes
        self._encode: Callable[[Any], str] = json.encoder.JSONEncoder(
            check_circular=False, separators=(",", ":"), default=str
        ).encode
        self._descriptors = system.Descriptors()
        self._has_failed = self._is_closed = False
        self.forget()
        _all.add(self)

    def forget(self) -> None:
        """Drop all spans and files, because they belong to the parent of this process, which was just forked."""
        self._busy = system.threading.Lock()  # held by the thread that writes; no thread waits for it
        self._numbers = count(1)
        self._pending: deque[Span] = deque(maxlen=PENDING_MAX)
        self._open: dict[int, Span] = {}
        self._written: set[int] = set()  # the numbers of the open spans that are in the file
        self._descriptors.clear()
        self._is_fake = False  # whether the descriptor is of a faked file
        self._fd = -1
        self._token = ""
        self._serial = 0
        self._size = 0
        self._is_torn = False
        self._due = 0  # the time of the next write, if a span ends then
        self._tries_at = 0.0

    # -- spans -----------------------------------------------------------------------------------------------------

    def begin(self, kind: str, name: str, place: str = "", rank: int | None = None, *facts: Any) -> Span:
        """Return a new span, which `end` completes. `Span` describes the arguments."""
        if not system.fork_marker[0]:
            system.recover_from_fork()
        number = next(self._numbers)
        span = [kind, number, get_ident(), system.time.monotonic_ns(), 0, name, place, rank, "", *facts]
        if len(self._open) < OPEN_MAX:
            self._open[number] = span
        return span

    def end(self, span: Span, outcome: str, *facts: Any) -> None:
        """End `span`. The call does nothing if the span has ended, or belongs to the parent of this process."""
        now = system.time.monotonic_ns()
        if self._open.pop(span[NUMBER], None) is not span:
            return
        span[END] = now
        span[OUTCOME] = outcome
        span += facts
        self._pending.append(span)
        if span[NUMBER] in self._written or now > self._due or len(self._pending) >= BATCH:
            self._written.discard(span[NUMBER])  # the file shows the span as open
            self.flush()

    def end_later(self, span: Span, outcome: str) -> None:
        """End `span` without a write, because the caller holds a lock for which other processes wait."""
        if self._open.pop(span[NUMBER], None) is span:
            span[END], span[OUTCOME] = system.time.monotonic_ns(), outcome
            self._pending.append(span)

    def add(self, span: Span, *facts: Any) -> None:
        """Add `facts` to the open `span`. If the file has the span already, the span is written again."""
        span += facts
        self._written.discard(span[NUMBER])

    def event(self, kind: str, name: str, place: str = "", rank: int | None = None, *facts: Any) -> None:
        """Record a span without duration."""
        self.end(self.begin(kind, name, place, rank, *facts), "done")

    def before_sleep(self, span: Span, seconds: float) -> None:
        """Write the open spans before a long sleep, so that they are not lost if the process is killed in the sleep.

        Args:
            span: the span of the wait that sleeps.
            seconds: the length of the sleep at most; ``math.inf`` for a call that may block.
        """
        if span[NUMBER] not in self._written:
            waited = (system.time.monotonic_ns() - span[BEGIN]) / 1e9
            if max(waited, seconds) > LONG_SLEEP_S:
                self.flush(with_open=True)

    # -- the file --------------------------------------------------------------------------------------------------

    def flush(self, *, with_open: bool = False) -> None:
        """Write the finished spans, and with `with_open` also the open spans, unless another thread is writing."""
        if with_open:
            still_open = self._open
            self._written.intersection_update(list(still_open))
            for span in list(still_open.values()):
                if span[NUMBER] not in self._written:
                    self._written.add(span[NUMBER])
                    self._pending.append(span[:])  # a copy, because the span may end before it is encoded
        # Another thread that finds the lock held leaves its spans in the deque. So this thread looks there again after
        # it has released the lock, but not for ever, because other threads may record spans all the time.
        for _ in range(ROUNDS):
            if not self._pending or not self._busy.acquire(False):
                return
            try:
                self._write_pending()
            finally:
                self._busy.release()

    def close(self) -> None:
        """Write the remaining spans when the process exits. Later spans are dropped."""
        if self._token:
            self.event("process", "exit")
        self.flush(with_open=True)
        self._is_closed = True
        system.close_all(system.os.close, self._descriptors)

    def _write_pending(self) -> None:
        # Only the holder of the lock takes spans, so there are at least as many as the deque had.
        take = self._pending.popleft
        spans = [take() for _ in range(len(self._pending))]
        self._due = system.time.monotonic_ns() + LONGEST_DELAY_NS
        if self._is_closed or system.time.monotonic() < self._tries_at:
            return
        try:
            self._write(self._line(spans))
        except OSError as error:
            raise_if_foreign(error)
            self._tries_at = system.time.monotonic() + RETRY_S
            if not self._has_failed:
                self._has_failed = True
                logger(__name__).warning(
                    "the trace in %s loses spans (%s); the program goes on. Free space there, or set %s to another"
                    " directory",
                    self.directory,
                    error.strerror,
                    ENVIRONMENT_VARIABLE,
                )

    def _write(self, text: str) -> None:
        if self._fd >= 0 and self._is_fake != system.is_fake_fs():
            return  # a test has put faked files under the package, or removed them: the descriptor is of the others
        if self._fd < 0 or self._size + len(text) > self._segment_bytes:
            self._next_segment()
        if self._is_torn:
            text = "\n" + text  # the disk was full in the middle of a line
        data = text.encode("ascii")
        self._is_torn = True
        written = system.os.write(self._fd, data)
        self._size += written
        self._is_torn = written < len(data)

    def _next_segment(self) -> None:
        """Begin the next segment, and write its header and those open spans that the file has shown.

        The segment before the last one is removed, not emptied: another user may have put another file at its name.
        """
        if not self._token:
            self._token = system.random_bytes(4).hex()
            system.os.makedirs(self.directory, exist_ok=True)
        host = system.hostname()
        name = f"{host.replace('/', '_')}-{system.os.getpid()}-{self._token}.{self._serial % 2}.trace"
        path = system.os.path.join(self.directory, name)
        self._fd = -1  # until the header is there: without it no line after it could be read
        system.close_all(system.os.close, self._descriptors)
        with ignoring(FileNotFoundError):
            system.os.unlink(path)
        flags = system.os.O_WRONLY | system.os.O_CREAT | system.os.O_EXCL
        fd = system.open_file(path, flags, 0o600, self._descriptors)
        written = self._written if self._serial else ()  # the first segment gets them from the caller
        known = [span[:] for number, span in list(self._open.items()) if number in written]
        data = (self._header(host) + (self._line(known) if known else "")).encode("ascii")
        self._size = system.os.write(fd, data)
        if self._size < len(data):
            raise OSError(system.errno.ENOSPC, system.os.strerror(system.errno.ENOSPC))
        self._is_fake = system.is_fake_fs()
        self._serial += 1
        self._is_torn = False
        self._fd = fd

    def _header(self, host: str) -> str:
        facts = {
            "fscoord_trace": VERSION,
            "host": host,
            "pid": system.os.getpid(),
            "start_time": system.start_time(),
            "boot_id": system.boot_id().hex(),
            "time_namespace": system.namespace("time"),
            "process": self._token,
            "segment": self._serial + 1,
            "monotonic_ns": system.time.monotonic_ns(),
            "wall_ns": system.time.time_ns(),
        }
        return self._encode(facts) + "\n"

    def _line(self, spans: list[Span]) -> str:
        """Return the line of `spans`. Encoding them together takes half the time of encoding each."""
        try:
            return self._encode(spans) + "\n"
        except (TypeError, ValueError):  # a fact of a foreign type, such as a rank of numpy
            return self._encode(list(map(_plain, spans))) + "\n"


def _plain(span: Span) -> Span:
    return [each if isinstance(each, (int, str, list, tuple, type(None))) else str(each) for each in span]


_all = system.reset_in_child("trace", Recorder.forget)

recorder: Recorder | None = None
"""The recorder of this process, or None if it records no trace."""


def start(directory: str | system.os.PathLike[str]) -> None:
    """Record the spans of this process in `directory` from now on.

    Raises:
        ValueError: the process records its spans in another directory already.
    """
    global recorder
    path = system.os.path.abspath(system.os.fspath(directory))
    if recorder is None:
        recorder = Recorder(path)
        atexit.register(recorder.close)
    elif recorder.directory != path:
        raise ValueError(
            f"this process records its trace in {recorder.directory} already, and a process has one trace; pass the"
            f" same directory, or unset {ENVIRONMENT_VARIABLE}"
        )


def begin(kind: str, name: str, place: str = "", rank: int | None = None, *facts: Any) -> Span | None:
    """Return a new span, or None if this process records no trace; see `Recorder.begin`."""
    return None if recorder is None else recorder.begin(kind, name, place, rank, *facts)


def end(span: Span | None, outcome: str, *facts: Any) -> None:
    """End `span`, unless it is None; see `Recorder.end`."""
    if span is not None and recorder is not None:
        recorder.end(span, outcome, *facts)


def event(kind: str, name: str, place: str = "", rank: int | None = None, *facts: Any) -> None:
    """Record a span without duration, if this process records a trace."""
    if recorder is not None:
        recorder.event(kind, name, place, rank, *facts)


def record_steps(
    span: Span | None, steps: Generator[Any, Any, T], describe: Callable[[T], tuple[Any, ...]] | None = None
) -> Generator[Any, Any, T]:
    """Run `steps`, the generator of a recipe or a collective, and end `span` when they end.

    Args:
        span: the span.
        steps: the generator.
        describe: returns further facts of the span for the result of `steps`.
    """
    try:
        result = yield from steps
    except BaseException as error:
        end(span, outcome_of(error))
        raise
    end(span, "passed", *(() if describe is None else describe(result)))
    return result


_OUTCOMES: Final = {
    "StoreTimeoutError": "time-out",
    "RendezvousTimeoutError": "time-out",
    "QueueEmptyError": "empty",
    "BrokenBarrierError": "broken",
    "LockLostError": "lost",
    "StoreClosedError": "closed",
    "StoreGoneError": "gone",
    "KeyboardInterrupt": "interrupted",
    "GeneratorExit": "cancelled",
    "CancelledError": "cancelled",
}


def outcome_of(error: BaseException) -> str:
    """Return the word for the outcome of a span that `error` has ended."""
    name = type(error).__name__
    word = _OUTCOMES.get(name)
    if word is None and isinstance(error, FscoordError):
        word = next((_OUTCOMES[base.__name__] for base in type(error).__mro__ if base.__name__ in _OUTCOMES), None)
    return word or name


def _start_from_environment() -> None:
    """Start the recorder if the environment names a directory. An error is logged, so that the import does not fail."""
    directory = system.os.environ.get(ENVIRONMENT_VARIABLE)
    if directory:
        try:
            start(directory)
        except OSError as error:  # a relative path, and the working directory is gone
            raise_if_foreign(error)
            logger(__name__).warning(
                "%s=%s: no trace is recorded (%s); set it to an absolute path",
                ENVIRONMENT_VARIABLE,
                directory,
                error.strerror,
            )


_start_from_environment()
