"""`read` returns the processes and spans of a trace directory. Processes with common barriers share a time line.

`docs/trace.md` specifies the files. A process may die while it writes a file, so a file may end anywhere, and any line
may be damaged. Damaged lines are counted and left out. Files that can't be read are left out, too, because other users
may have put anything into the directory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final, NamedTuple

from fscoord._runtime import system, tracing
from fscoord.errors import FscoordError
from fscoord.trace.clocks import Alignment, Meeting, Passage, align

SUFFIX = ".trace"
FILE_MAX: Final = 4 * tracing.SEGMENT_BYTES
"""At most this many bytes of a file are read. A file is a *segment* of the trace of a process. A segment exceeds
`SEGMENT_BYTES` only by its last write."""
HEADER_MAX: Final = 1 << 16
MEETS = ("barrier", "exchange")


class Span(NamedTuple):
    """One operation of a process, such as a wait.

    Times are in ns on the reference clock of the group of clocks to which the clock of the process belongs.

    Attributes:
        process: the index of the process in `Trace.processes`.
        kind: the kind of the operation; ``docs/trace.md`` lists the kinds.
        name: the name of the barrier, key, lock or queue.
        store: the text that identifies the store.
        rank: the rank of the caller, or None.
        begin: the time at which the operation began.
        end: the time at which the operation ended. For an open span: the recorded death or the exit of the process, or
            else the end of the trace.
        outcome: how the operation ended; empty for an open span.
        thread: the number of the thread. The threads of a process count from 0, in the order of their first spans.
        facts: further facts about the operation, by name.
    """

    process: int
    kind: str
    name: str
    store: str
    rank: int | None
    begin: int
    end: int
    outcome: str
    thread: int
    facts: dict[str, Any]

    @property
    def is_open(self) -> bool:
        """Whether the trace has no end of the operation, because the process was killed or still runs."""
        return not self.outcome

    @property
    def is_held(self) -> bool:
        """Whether the span is open, and its lock or election was acquired."""
        return self.is_open and "token" in self.facts and self.kind in tracing.HOLDS

    @property
    def length(self) -> int:
        """The length of the span in ns."""
        return self.end - self.begin


@dataclass
class Process:
    """One process of a trace.

    Attributes:
        host: the name of the host.
        pid: the process id.
        token: the random text that distinguishes this process from other processes with the same process id.
        clock: the boot id and the time namespace, which together identify the monotonic clock of the process.
        wall_minus_clock: the wall clock minus the monotonic clock, in ns, when the oldest segment was begun.
        rank: the rank with which the process opened a store, or else the rank in most of its barriers, or else the rank
            that another process recorded for it; None if no rank is known.
        label: the label with which the process opened a store.
        has_exited: whether the process recorded its exit. A process that was killed did not record an exit.
        group: the number of the group of comparable clocks to which `clock` belongs.
        first, last: the first and the last time that the process recorded, in ns on the reference clock of the group.
        skipped: the number of lines that could not be read.
        overwritten: whether older spans were overwritten, because both segments of the process were full.
    """

    host: str
    pid: int
    token: str
    clock: tuple[str, int]
    wall_minus_clock: int
    rank: int | None = None
    label: str = ""
    has_exited: bool = False
    group: int = 0
    first: int = 0
    last: int = 0
    skipped: int = 0
    overwritten: bool = False
    rows: dict[int, list[Any]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """``host:pid``. Spans of other processes identify the process by this text."""
        return f"{self.host}:{self.pid}"

    @property
    def title(self) -> str:
        """The name of the process in tables and pictures."""
        return f"rank {self.rank}" if self.rank is not None else self.label or self.address


class Crossing(NamedTuple):
    """One barrier or exchange of all ranks, as the processes of the trace have recorded it.

    Attributes:
        name: the name of the barrier or exchange.
        spans: the spans of the processes that passed the barrier, in the order of their arrivals.
        is_sound: whether each rank arrived once and passed, so that the times can be used to compare clocks.
    """

    name: str
    spans: list[Span]
    is_sound: bool


class Trace:
    """A trace that was read.

    Attributes:
        directory: the directory of the trace files.
        processes: the processes of the trace, sorted by group of clocks, rank and host.
        spans: all spans, sorted by beginning. Times of different groups of clocks are not comparable.
        crossings: the barriers and the exchanges of all ranks, sorted by the last arrival.
        alignment: the estimated offsets of the clocks from the reference clocks.
        hosts: the name of one host for each clock.
        unreadable: for each file that can't be read, its path and the reason.
    """

    def __init__(self, directory: str, processes: list[Process], unreadable: list[str]) -> None:
        self.directory = directory
        self.unreadable = unreadable
        counts = Counter(process.clock for process in processes)
        clocks = [clock for clock, _ in sorted(counts.items(), key=lambda each: (-each[1], each[0]))]
        raw = [span for number, process in enumerate(processes) for span in _raw_spans(number, process)]
        _find_ranks_told_by_others(raw, processes)
        crossings = _crossings(raw)
        self.alignment: Alignment = align(clocks, _meetings(crossings, processes))
        self.hosts = {process.clock: process.host for process in processes}
        order = sorted(range(len(processes)), key=lambda number: self._order(processes[number]))
        place = {old: new for new, old in enumerate(order)}
        self.processes = [processes[number] for number in order]
        self.spans = sorted(
            (self._aligned(span, processes[span.process].clock, place) for span in raw), key=lambda span: span.begin
        )
        self._note_ends()
        self._end_open_spans()
        self.crossings = sorted(_crossings(self.spans), key=lambda crossing: crossing.spans[-1].begin)

    def _order(self, process: Process) -> tuple[Any, ...]:
        process.group = self.alignment.group(process.clock)
        return process.group, process.rank is None, process.rank or 0, process.host, process.pid, process.token

    def _aligned(self, span: Span, clock: tuple[str, int], place: dict[int, int]) -> Span:
        begin = self.alignment.to_reference(clock, span.begin).time
        end = max(begin, self.alignment.to_reference(clock, span.end).time)
        return span._replace(process=place[span.process], begin=begin, end=end)

    def _note_ends(self) -> None:
        met: set[int] = set()
        for span in self.spans:  # by beginning
            process = self.processes[span.process]
            if span.process not in met:
                met.add(span.process)
                process.first = process.last = span.begin
            process.last = max(process.last, span.end)

    def _end_open_spans(self) -> None:
        """Set the end of each open span: the recorded death or the exit of its process, or the end of the trace."""
        ends: dict[int, int] = {}
        deaths: dict[tuple[int, str], int] = {}
        for span in self.spans:
            group = self.processes[span.process].group
            ends[group] = max(ends.get(group, 0), span.end)
            if span.kind == "death" and not span.is_open:
                deaths.setdefault((group, span.name), span.end)
        for number, span in enumerate(self.spans):
            if span.is_open:
                process = self.processes[span.process]
                end = process.last if process.has_exited else ends[process.group]
                self.spans[number] = span._replace(
                    end=max(span.begin, deaths.get((process.group, process.address), end))
                )

    def bound(self, one: int, other: int) -> int:
        """Return the largest possible error, in ns, of the difference between two times in the trace.

        Both times must be in the same group of clocks.

        Args:
            one: the index of the process that recorded one time.
            other: the index of the process that recorded the other time.
        """
        mine, theirs = self.processes[one].clock, self.processes[other].clock
        return 0 if mine == theirs else self.alignment.widest(mine) + self.alignment.widest(theirs)

    def begins(self) -> list[int]:
        """Return, for each group of clocks, the time at which the first span of the group begins, in ns."""
        return [
            min((process.first for process in self.processes if process.group == group), default=0)
            for group in range(len(self.alignment.groups))
        ]

    def processes_by_address(self) -> dict[str, list[int]]:
        """Map each ``host:pid`` to the indices of its processes, which may be several: process ids are reused."""
        found: dict[str, list[int]] = {}
        for number, process in enumerate(self.processes):
            found.setdefault(process.address, []).append(number)
        return found


def read(directory: Any) -> Trace:
    """Return the trace in `directory`.

    Raises:
        FscoordError: there is no trace in the directory.
        OSError: the directory can't be read.
    """
    path = system.os.fspath(directory)
    found: dict[str, list[tuple[int, Process]]] = {}
    unreadable = []
    for name in sorted(system.os.listdir(path)):
        if name.endswith(SUFFIX):
            file = system.os.path.join(path, name)
            try:
                segment = _segment(file)
            except OSError as error:
                unreadable.append(f"{file} is left out of the trace: {error.strerror}")
                continue
            if segment is not None:
                found.setdefault(f"{segment[1].token} {segment[1].address}", []).append(segment)
    if not found:
        raise FscoordError(
            f"{path} holds no trace: no file in it ends in {SUFFIX} and has the header of a trace. Set"
            f" {tracing.ENVIRONMENT_VARIABLE} to a directory, run the program, and name that directory"
            + "".join(f"; {text}" for text in unreadable[:1])
        )
    processes = [
        _joined([segment for _, segment in sorted(each, key=lambda numbered: numbered[0])]) for each in found.values()
    ]
    return Trace(path, processes, unreadable)


def _joined(segments: list[Process]) -> Process:
    """Merge `segments`, which one process wrote. The oldest segment is the first."""
    process = segments[0]
    for other in segments[1:]:
        process.skipped += other.skipped
        for number, row in other.rows.items():
            if row[tracing.END] or not process.rows.get(number, row)[tracing.END]:
                process.rows[number] = row
    process.has_exited = any(row[tracing.KIND] == "process" for row in process.rows.values())
    _name(process)
    return process


def _name(process: Process) -> None:
    """Set the rank and the label of `process` from its spans."""
    ranks: Counter[int] = Counter()
    for row in process.rows.values():
        rank = row[tracing.RANK]
        if row[tracing.KIND] == "open":
            process.rank = process.rank if rank is None else rank
            process.label = process.label or str(_facts(row).get("label", ""))
        elif row[tracing.KIND] in MEETS and rank is not None:
            ranks[rank] += 1
    if process.rank is None and ranks:
        process.rank = ranks.most_common(1)[0][0]


def _find_ranks_told_by_others(spans: Iterable[Span], processes: Iterable[Process]) -> None:
    """Set the rank of each process that recorded no rank of its own.

    The rank comes from the span in which another process recorded the death, or from the worker's span of
    ``fscoord run``.
    """
    told: dict[str, int] = {}
    for span in spans:
        if span.kind == "death":
            address, rank = span.name, span.facts.get("dead_rank")
        elif span.kind == "worker":
            address, rank = str(span.facts.get("address")), span.facts.get("worker_rank")
        else:
            continue
        if isinstance(rank, int) and abs(rank) < _NUMBER_MAX:
            told[address] = rank
    for process in processes:
        if process.rank is None:
            process.rank = told.get(process.address)


def _segment(path: str) -> tuple[int, Process] | None:
    """Return the number and the contents of the segment in the file `path`; None if the file has no header of a trace.

    Raises:
        OSError: the file can't be read, is a symbolic link, or is not a regular file.
    """
    with system.open_regular(path) as file:
        first = file.readline(HEADER_MAX)
        try:
            header = json.loads(first)
            if not first.endswith(b"\n") or header["fscoord_trace"] != tracing.VERSION:
                return None
            process = Process(
                str(header["host"]),
                int(header["pid"]),
                str(header["process"]),
                (str(header["boot_id"]), int(header["time_namespace"])),
                _limited(header["wall_ns"]) - _limited(header["monotonic_ns"]),
                overwritten=int(header["segment"]) > 2,
            )
            serial = int(header["segment"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        for line in _lines(file):
            if line == b"\n":
                continue
            rows = _rows(line)
            if rows is None:
                process.skipped += 1
                continue
            for row in rows:
                known = process.rows.get(row[tracing.NUMBER])
                if known is None or row[tracing.END] or not known[tracing.END]:
                    process.rows[row[tracing.NUMBER]] = row
    return serial, process


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of `file`, up to `FILE_MAX` bytes in total, because a line of a sparse file may be huge."""
    left = FILE_MAX
    while left > 0 and (line := file.readline(left)):
        left -= len(line)
        yield line


def _limited(value: Any) -> int:
    """Return `value` as an integer. Raise `ValueError` if `value` is out of the range of a clock."""
    number = int(value)
    if abs(number) >= _NUMBER_MAX:
        raise ValueError(value)
    return number


_SHAPE: Final[tuple[Any, ...]] = (str, int, int, int, int, str, str, (int, type(None)), str)


def _rows(line: bytes) -> list[list[Any]] | None:
    """Return the spans in `line`, or None if the line is damaged."""
    try:
        rows = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(rows, list):
        return None
    for row in rows:
        if not isinstance(row, list) or len(row) < len(_SHAPE) or len(row) % 2 != len(_SHAPE) % 2:
            return None
        if not all(isinstance(value, shape) for value, shape in zip(row, _SHAPE, strict=False)):
            return None
        if any(isinstance(value, int) and abs(value) >= _NUMBER_MAX for value in row[: len(_SHAPE)]):
            return None
    return rows


_NUMBERS: Final = frozenset(("token", "waited_ns", "world_size"))
_NUMBER_MAX: Final = 1 << 63


def _facts(row: list[Any]) -> dict[str, Any]:
    """Return the facts of the span in `row`. Leave out each fact whose type is wrong for the tables of the report."""
    rest = row[len(_SHAPE) :]
    facts = dict(zip(map(str, rest[::2]), rest[1::2], strict=True))
    for name in _NUMBERS & facts.keys():
        if not isinstance(facts[name], int) or not 0 <= facts[name] < _NUMBER_MAX:
            del facts[name]
    if not isinstance(facts.get("dead", []), list):
        del facts["dead"]
    return facts


def _raw_spans(number: int, process: Process) -> Iterator[Span]:
    """Yield the spans of `process`, with times on its own clock."""
    last = max((max(row[tracing.BEGIN], row[tracing.END]) for row in process.rows.values()), default=0)
    threads: dict[int, int] = {}
    for row in process.rows.values():
        kind, _, thread, begin, end, name, place, rank, outcome = row[: len(_SHAPE)]
        thread = threads.setdefault(thread, len(threads))
        is_ended = end > 0
        yield Span(
            number, kind, name, place, rank, begin, end or last, outcome if is_ended else "", thread, _facts(row)
        )
    process.rows = {}


def _crossings(spans: Iterable[Span]) -> list[Crossing]:
    """Return the crossings in `spans`: the barriers, and the exchanges that no rank leaves before all have arrived."""
    met: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        if span.kind in MEETS and span.facts.get("operation", "synchronize") == "synchronize":
            met.setdefault((span.store, span.name), []).append(span)
    found = []
    for (_, name), group in met.items():
        passed = sorted((span for span in group if span.outcome == "passed"), key=lambda span: span.begin)
        if not passed:
            continue
        sizes = {span.facts.get("world_size") for span in passed}
        size = sizes.pop() if len(sizes) == 1 else None
        ranks = [span.rank for span in passed]
        is_repeated = any(span.facts.get("repeated") for span in passed)
        has_ranks = None not in ranks and len(set(ranks)) == len(ranks)
        is_sound = (
            isinstance(size, int)
            and len(passed) == len(group)
            and not is_repeated
            and (has_ranks or set(ranks) == {None})
            and len(ranks) <= size
        )
        found.append(Crossing(name, passed, is_sound))
    return found


def _meetings(crossings: Iterable[Crossing], processes: list[Process]) -> Iterator[Meeting]:
    """Yield a `Meeting` for each sound crossing whose processes have several clocks."""
    for crossing in crossings:
        if crossing.is_sound:
            passages: dict[Any, Passage] = {}
            for span in crossing.spans:
                clock = processes[span.process].clock
                known = passages.get(clock)
                arrived = span.begin if known is None else max(known.arrived, span.begin)
                left = span.end if known is None else min(known.left, span.end)
                passages[clock] = Passage(clock, arrived, left)
            if len(passages) > 1:
                yield list(passages.values())


def assign_lanes(spans: Iterable[Span]) -> list[int]:
    """Return the number of the lane of each span. A lane is one of the rows in which a viewer draws a process.

    `spans` must be sorted by beginning. Two spans in one lane are nested or disjoint. So a process with concurrent
    threads or tasks needs several lanes.
    """
    by_process: dict[int, list[list[Span]]] = {}
    found = []
    for span in spans:
        lanes = by_process.setdefault(span.process, [])
        for stack in lanes:
            while stack and stack[-1].end <= span.begin:
                stack.pop()
        fitting = (number for number, stack in enumerate(lanes) if not stack or span.end <= stack[-1].end)
        lane = next(fitting, len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(span)
        found.append(lane)
    return found
