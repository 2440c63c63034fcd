"""`Recorder` writes the spans of this process to its trace files. A recorder never blocks and never fails the program.

A span is a period in which the process waited, held a lock or ran an operation of interest. `docs/trace.md` specifies
the files. The module is in the lowest layer, so that every part of the package may record spans. If the global
`recorder` is None, the callers don't call this module. `fscoord.events` receives the spans by `subscribe`, whether or
not the process writes files.

These rules keep the cost for the program low:

- A finished span is appended to a deque, which needs no lock. The thread whose span completes a batch writes the batch.
  While one thread writes, other threads only append their spans to the deque. A signal handler that interrupts the
  writing thread does the same.
- A batch is written by one write(2) to the page cache, without a sync. The file is not in append mode, because an
  append would request the length of the file from a file server.
- A failed system call may lose spans, but never fails an operation. The first error is logged. After an error the
  recorder drops spans for `RETRY_S` seconds, and then tries again.
- The deque, the open spans and the files are bounded. A process has two files, called segments, and fills the segments
  in turn.
"""

from __future__ import annotations

import atexit
import re
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
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
"""A span that ends more than this many ns after the last write is written at once."""

LONG_SLEEP_S: Final = 0.1
"""A wait or a sleep is long if it lasts for more than this many seconds. Open spans are written before the next sleep
of a long wait, and before a long sleep."""

PENDING_MAX: Final = 8192
OPEN_MAX: Final = 8192

ROUNDS: Final = 8
"""How many batches one thread writes in one call of `flush`, if other threads keep recording spans."""

RETRY_S: Final = 10.0
"""How long the recorder drops spans after a failed system call, in seconds."""

Span = list[Any]
"""One span: a list of `KIND`, number, thread, `BEGIN`, `END`, name, place, rank and `OUTCOME`, followed by facts.

A list takes a quarter of the time that an object with attributes takes, and can be encoded directly. The facts are
names and values in turn: ``"world_size", 64``. `docs/trace.md` lists the kinds, the outcomes and the facts. Other
modules pass spans on, but don't read the items of a span.
"""

KIND, NUMBER, THREAD, BEGIN, END, NAME, PLACE, RANK, OUTCOME, FACTS = range(10)
"""The indices of a span. `BEGIN` and `END` are in ns of the monotonic clock; the `END` of an open span is 0. The place
is a text that identifies the store on all hosts. The rank is the caller's rank, or None. The facts begin at `FACTS`."""

HOLDS: Final = ("lock", "election")
"""The kinds of spans that cover a wait for a lock, and then the hold. The fact ``waited_ns`` is the length of the
wait."""

PARTS: Final = ("wait", "queue")
"""The kinds of spans of waits for keys. Such a wait may be a part of the wait for a barrier, a lock or the like."""

WAITS: Final = (
    *("barrier", "exchange", *PARTS, *HOLDS, "observe", "take", "rendezvous"),
    *("latch", "members", "work"),
)
"""The kinds of spans in which a process waits."""


class Recorder:
    """Records the spans of this process. All threads share it.

    A forked child writes files of its own, and drops the spans of its parent.

    Args:
        directory: the absolute path of the directory of the files. The recorder creates it with the first file. Empty:
            the recorder writes no files.
        segment_bytes: the size in bytes at which a segment is full. Then the recorder replaces the other segment.
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
        """Drop all spans and files in a forked child, because the spans and files belong to its parent."""
        self._busy = system.threading.Lock()  # held by the thread that writes; no thread waits for it
        self._numbers = count(1)
        self._pending: deque[Span] = deque(maxlen=PENDING_MAX)
        self._open: dict[int, Span] = {}
        self._written: set[int] = set()  # the numbers of the open spans that are in the file
        self._publishing: set[int] = set()  # the threads that call a subscriber
        self._descriptors.clear()
        self._is_fake = False  # whether the descriptor belongs to a fake file system
        self._fd = -1
        self._token = ""
        self._serial = 0
        self._size = 0
        self._is_torn = False
        self._due = 0  # a span that ends after this time is written at once
        self._tries_at = 0.0

    # -- spans -----------------------------------------------------------------------------------------------------

    def begin(self, kind: str, name: str, place: str = "", rank: int | None = None, *facts: Any) -> Span:
        """Return a new, open span. Call `end` to complete the span. `Span` describes the arguments."""
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
        if self.directory:
            self._pending.append(span)
            if span[NUMBER] in self._written or now > self._due or len(self._pending) >= BATCH:
                self._written.discard(span[NUMBER])  # the file shows the span as open
                self.flush()
        if subscribers:
            self._publish(span)

    def end_later(self, span: Span, outcome: str) -> None:
        """End `span` without a write to the file. Use it while a lock is held for which other processes wait.

        A thread of its own passes the span to the subscribers, because a subscriber may need the lock.
        """
        if self._open.pop(span[NUMBER], None) is span:
            span[END], span[OUTCOME] = system.time.monotonic_ns(), outcome
            if self.directory:
                self._pending.append(span)
            if subscribers:
                system.start_thread("fscoord events", self._publish, span)

    def acquired(self, span: Span, *facts: Any) -> None:
        """Add `facts` to the open span `span`, whose wait is over and whose hold begins.

        A span that is in the file already will be written again.
        """
        span += facts
        self._written.discard(span[NUMBER])
        if subscribers:
            self._publish(span)

    def event(self, kind: str, name: str, place: str = "", rank: int | None = None, *facts: Any) -> None:
        """Record a span without duration."""
        self.end(self.begin(kind, name, place, rank, *facts), "done")

    def before_sleep(self, span: Span, seconds: float) -> None:
        """Write the open spans before a long sleep, so that a kill of the process during the sleep does not lose them.

        Args:
            span: the span of the wait that is going to sleep.
            seconds: the longest duration of the sleep; ``math.inf`` for a call that may block.
        """
        if self.directory and span[NUMBER] not in self._written:
            waited = (system.time.monotonic_ns() - span[BEGIN]) / 1e9
            if max(waited, seconds) > LONG_SLEEP_S:
                self.flush(with_open=True)

    # -- subscribers -----------------------------------------------------------------------------------------------

    def _publish(self, span: Span) -> None:
        """Pass `span` to the subscribers, unless the span is a part of another wait or a subscriber's own."""
        me = get_ident()
        if me in self._publishing or (
            span[KIND] in PARTS and any(map(partial(_is_part, span), [*self._open.values()]))
        ):
            return
        self._publishing.add(me)
        try:
            for receive in list(subscribers):
                receive(span)
        finally:
            self._publishing.discard(me)

    # -- the file --------------------------------------------------------------------------------------------------

    def flush(self, *, with_open: bool = False) -> None:
        """Write the finished spans, and with `with_open` also the open spans. If another thread writes, return."""
        if with_open:
            still_open = self._open
            self._written.intersection_update(list(still_open))
            for span in list(still_open.values()):
                if span[NUMBER] not in self._written:
                    self._written.add(span[NUMBER])
                    self._pending.append(span[:])  # a copy, because the span may end before it is encoded
        # Another thread that finds the lock held leaves its spans in the deque. So this thread checks the deque again
        # after it has released the lock, at most `ROUNDS` times, because other threads may never stop recording.
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
        # Only the holder of the lock removes spans, so the deque can't become shorter meanwhile.
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
            return  # a test has begun or ended to fake the file system, so the descriptor is not valid in this `os`
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
        """Begin the next segment. Write its header, and the open spans that the previous segment contains.

        The old file of this name is removed and not truncated, because another user may have replaced it.
        """
        if not self._token:
            self._token = system.random_bytes(4).hex()
            system.os.makedirs(self.directory, exist_ok=True)
        host = system.hostname()
        name = f"{host.replace('/', '_')}-{system.os.getpid()}-{self._token}.{self._serial % 2}.trace"
        path = system.os.path.join(self.directory, name)
        self._fd = -1  # until the header is written: without a header the lines of a segment can't be read
        system.close_all(system.os.close, self._descriptors)
        with ignoring(FileNotFoundError):
            system.os.unlink(path)
        flags = system.os.O_WRONLY | system.os.O_CREAT | system.os.O_EXCL
        fd = system.open_file(path, flags, 0o600, self._descriptors)
        written = self._written if self._serial else ()  # the caller writes them to the first segment
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
        """Return one line of JSON for `spans`. Encoding all spans at once takes half the time of encoding each span."""
        try:
            return self._encode(spans) + "\n"
        except (TypeError, ValueError):  # a fact of a foreign type, such as a rank of numpy
            return self._encode(list(map(_plain, spans))) + "\n"


def _plain(span: Span) -> Span:
    return [each if isinstance(each, (int, str, list, tuple, type(None))) else str(each) for each in span]


_all = system.reset_in_child("trace", Recorder.forget)


def _is_part(span: Span, outer: Span) -> bool:
    """Return whether `span`, the span of a wait for keys, is a part of the wait of the open span `outer`.

    A task of asyncio waits for keys in other threads than its own. So the names decide in another thread: the keys of a
    barrier or a lock begin with its name.
    """
    if outer[KIND] not in WAITS or outer[KIND] in PARTS or outer[BEGIN] > span[BEGIN] or "waited_ns" in outer:
        return False
    is_named_so: bool = outer[PLACE] == span[PLACE] and span[NAME].startswith(outer[NAME])
    return is_named_so or bool(outer[THREAD] == span[THREAD])


recorder: Recorder | None = None
"""The recorder of this process, or None if the process records no spans."""

subscribers: Final[dict[Callable[[Span], object], None]] = {}
"""The functions that receive each finished span, and the span of a lock when the lock is acquired."""


def subscribe(receive: Callable[[Span], object]) -> None:
    """Call `receive` with each finished span from now on. The process then records spans until it exits.

    The recorder stays when the last subscription ends, because other threads may be using it.
    """
    global recorder
    subscribers[receive] = None
    if recorder is None:
        made = Recorder("")
        if recorder is None:  # no other thread can run between this line and the next
            recorder = made


def start(directory: str | system.os.PathLike[str]) -> None:
    """Record the spans of this process in `directory` from now on.

    Raises:
        ValueError: the process records its spans in another directory already.
    """
    global recorder
    path = system.os.path.abspath(system.os.fspath(directory))
    if recorder is None:
        recorder = Recorder("")
    if not recorder.directory:
        recorder.directory = path
        atexit.register(recorder.close)
    elif recorder.directory != path:
        raise ValueError(
            f"this process records its trace in {recorder.directory} already, and a process has one trace; pass the"
            f" same directory, or unset {ENVIRONMENT_VARIABLE}"
        )


def begin(kind: str, name: str, place: str = "", rank: int | None = None, *facts: Any) -> Span | None:
    """Return a new span, or None if this process records no spans; see `Recorder.begin`."""
    return None if recorder is None else recorder.begin(kind, name, place, rank, *facts)


def end(span: Span | None, outcome: str, *facts: Any) -> None:
    """End `span`, unless it is None; see `Recorder.end`."""
    if span is not None and recorder is not None:
        recorder.end(span, outcome, *facts)


def event(kind: str, name: str, place: str = "", rank: int | None = None, *facts: Any) -> None:
    """Record a span without duration, if this process records spans."""
    if recorder is not None:
        recorder.event(kind, name, place, rank, *facts)


def record_steps(
    span: Span | None, steps: Generator[Any, Any, T], describe: Callable[[T], tuple[Any, ...]] | None = None
) -> Generator[Any, Any, T]:
    """Delegate to the generator `steps` of a recipe or a collective, and end `span` when the generator ends.

    Args:
        span: the span, or None if the process records no spans.
        steps: the generator.
        describe: given the result of `steps`, returns facts for the end of the span.
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


def pattern_of(name: str) -> str:
    """Return `name` with a star for each number, so that ``epoch-1`` and ``epoch-2`` share a row.

    A hexadecimal id of 8 or more characters, such as a part of a UUID, counts as a number.
    """
    return re.sub(r"\b(?=[a-f]*\d)[\da-f]{8,}\b|\d+", "*", name)


def outcome_of(error: BaseException) -> str:
    """Return the outcome of a span that ends with `error`, as one word. `_OUTCOMES` lists the usual outcomes."""
    name = type(error).__name__
    word = _OUTCOMES.get(name)
    if word is None and isinstance(error, FscoordError):
        word = next((_OUTCOMES[base.__name__] for base in type(error).__mro__ if base.__name__ in _OUTCOMES), None)
    return word or name


def _start_from_environment() -> None:
    """Start the recorder if the environment names a directory. An error is logged, so that the import succeeds."""
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
