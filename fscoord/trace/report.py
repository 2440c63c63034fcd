"""`make_report` makes the tables of a trace: ranks that came last, waits by name, locks, deaths, the longest waits."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from fscoord._runtime.tracing import HOLDS, PARTS, WAITS, pattern_of
from fscoord.trace.reading import Crossing, Process, Span, Trace

SLACK_NS: Final = 1_000_000
"""The end of a hold may be recorded up to this many ns after the next acquisition of the lock, because a holder records
the end after it has released the lock."""

APART_MAX: Final = 64
LONGEST: Final = 10
"""The number of waits in the report's table of the longest waits."""

Document = dict[str, Any]


def make_report(trace: Trace) -> Document:
    """Return the report on `trace`, as ``docs/trace.md`` describes it. All times are in seconds."""
    waits = outer_waits(trace)
    holds = Holds(trace)
    return {
        "directory": trace.directory,
        "processes": [_process(trace, number) for number in range(len(trace.processes))],
        "clocks": _clocks(trace),
        "last_to_come": _last_to_come(trace),
        "waiting": _waiting(trace, waits),
        "contention": holds.contention(),
        "deaths": _deaths(trace),
        "longest": [_wait(trace, span, holds) for span in sorted(waits, key=waited, reverse=True)[:LONGEST]],
        "open": [_wait(trace, span, holds) for span in waits if span.is_open and not span.is_held],
        "time_outs": _time_outs(trace, waits),
    }


def waited(span: Span) -> int:
    """Return how many ns the process of `span` waited.

    The span of a lock covers the wait for the lock and then the hold. The hold does not count.
    """
    if span.kind in HOLDS:
        found = span.facts.get("waited_ns", span.length)
        return found if isinstance(found, int) else span.length
    return span.length


def outer_waits(trace: Trace) -> list[Span]:
    """Return the spans in which a process waits, except spans that are a part of another such span.

    For example, the acquisition of a lock waits for keys whose names begin with the name of the lock. The waits for
    these keys are left out.
    """
    found = []
    around: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        if span.kind in WAITS:
            outer = [each for each in around[span.process] if each.end >= span.begin]
            around[span.process] = outer
            if span.kind not in PARTS or not any(_contains(each, span) for each in outer):
                found.append(span)
            if span.kind not in PARTS:
                outer.append(span)
    return found


def _contains(outer: Span, inner: Span) -> bool:
    is_inside = outer.begin <= inner.begin and (inner.end <= outer.end or inner.is_open)
    return is_inside and outer.store == inner.store and inner.name.startswith(outer.name)


def seconds(nanoseconds: float) -> float:
    """Convert nanoseconds to seconds."""
    return round(nanoseconds / 1e9, 9)


def _process(trace: Trace, number: int) -> Document:
    process = trace.processes[number]
    return {
        "title": process.title,
        "rank": process.rank,
        "label": process.label,
        "host": process.host,
        "pid": process.pid,
        "group": process.group,
        "begin": seconds(process.first),
        "end": seconds(process.last),
        "began_at": round((process.wall_minus_clock + process.first) / 1e9, 3),
        "exited": process.has_exited,
        "spans": sum(1 for span in trace.spans if span.process == number),
        "damaged_lines": process.skipped,
        "overwritten": process.overwritten,
    }


def _clocks(trace: Trace) -> list[Document]:
    """Return a row for each group of comparable clocks: its hosts, and the largest error bound of each clock."""
    alignment = trace.alignment
    return [
        {
            "group": number,
            "reference": trace.hosts[group[0]],
            "hosts": [
                {
                    "host": trace.hosts[clock],
                    "bound": seconds(alignment.widest(clock)),
                    "fixes": len(alignment.fixes(clock)),
                }
                for clock in group
            ],
            "discarded_barriers": alignment.discarded if number == 0 else 0,
        }
        for number, group in enumerate(alignment.groups)
    ]


# -- barriers ----------------------------------------------------------------------------------------------------------


class Arrivals(NamedTuple):
    """The order in which the processes arrived at a crossing.

    Attributes:
        last: the span of the last process to arrive.
        cost: the sum of the times that the other processes waited for the last process, in ns.
        avoidable: how much lower `cost` would be if the last two processes had arrived together, in ns.
        is_certain: whether the clocks are exact enough to show that no other process arrived after `last`.
    """

    last: Span
    cost: int
    avoidable: int
    is_certain: bool


def arrivals_of(trace: Trace, crossing: Crossing) -> Arrivals | None:
    """Return the order of the arrivals; None if fewer than two arrivals are on comparable clocks.

    Also return None if a process passed twice with one rank, because then the spans are of two barriers with one name.
    """
    if len({(span.process, span.rank) for span in crossing.spans if span.rank is not None}) < sum(
        span.rank is not None for span in crossing.spans
    ):
        return None
    *others, last = crossing.spans
    group = trace.processes[last.process].group
    others = [span for span in others if trace.processes[span.process].group == group]
    if not others:
        return None
    cost = sum(last.begin - span.begin for span in others)
    lead = last.begin - others[-1].begin
    bounds = [trace.bound(span.process, last.process) for span in others if last.begin - span.begin < 1e9]
    is_certain = lead > max(bounds, default=0)
    return Arrivals(last, cost, lead * len(others), is_certain)


def _last_to_come(trace: Trace) -> list[Document]:
    """Return a row for each process that arrived last at a crossing.

    The row says how often the process was last, and how long the other processes waited for this process.
    """
    came: dict[int, int] = defaultdict(int)
    rows: dict[int, Document] = {}
    for crossing in trace.crossings:
        for span in crossing.spans:
            came[span.process] += 1
        found = arrivals_of(trace, crossing)
        if found is not None:
            row = rows.setdefault(
                found.last.process, {"times": 0, "uncertain": 0, "cost": 0, "avoidable": 0, "worst": 0}
            )
            row["times"] += 1
            row["uncertain"] += not found.is_certain
            row["cost"] += found.cost
            row["avoidable"] += found.avoidable
            if found.cost >= row["worst"]:
                row["worst"], row["worst_name"] = found.cost, crossing.name
    return sorted(
        (
            {
                **_who(trace.processes[number]),
                "barriers": came[number],
                "last": row["times"],
                "uncertain": row["uncertain"],
                "cost_rank_s": seconds(row["cost"]),
                "avoidable_rank_s": seconds(row["avoidable"]),
                "worst": {"name": row["worst_name"], "cost_rank_s": seconds(row["worst"])},
            }
            for number, row in rows.items()
        ),
        key=lambda row: -row["cost_rank_s"],
    )


def _who(process: Process) -> Document:
    return {"title": process.title, "rank": process.rank, "process": process.address}


# -- waits -------------------------------------------------------------------------------------------------------------


def _waiting(trace: Trace, waits: Sequence[Span]) -> list[Document]:
    """Return a row of waiting times for each name. Names that differ only in numbers share a row."""
    groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in waits:
        groups[span.kind, pattern_of(span.name)].append(span)
    rows = []
    for (kind, pattern), spans in groups.items():
        names = {span.name for span in spans}
        longest = max(spans, key=waited)
        rows.append(
            {
                "kind": kind,
                "name": names.pop() if len(names) == 1 else pattern,
                "waits": len(spans),
                "total": seconds(sum(map(waited, spans))),
                "longest": seconds(waited(longest)),
                "longest_by": trace.processes[longest.process].title,
                "processes": len({span.process for span in spans}),
            }
        )
    return sorted(rows, key=lambda row: -row["total"])


class Ended(NamedTuple):
    """The event that ended a wait.

    Attributes:
        words: the event as text.
        process: the index of the process that caused the event, or None if it is not known or not in the trace.
        time: the time of the event, or None if it is not known.
    """

    words: str
    process: int | None = None
    time: int | None = None


class Holds:
    """Finds which processes held the locks and elections of a trace while other processes waited."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._addresses = trace.processes_by_address()
        self._by_name: dict[tuple[str, str, str], list[Span]] = defaultdict(list)
        for span in trace.spans:
            if span.kind in HOLDS and "token" in span.facts:
                self._by_name[span.kind, span.store, span.name].append(span)
        for spans in self._by_name.values():
            spans.sort(key=lambda span: span.end)
        self._ends = {key: [span.end for span in spans] for key, spans in self._by_name.items()}
        self.crossings = {
            (span.process, span.begin): crossing for crossing in trace.crossings for span in crossing.spans
        }

    def process_of(self, address: object, rank: object) -> int | None:
        """Return the index of the process ``host:pid`` with the given rank; None if the trace has no such process."""
        found = self._addresses.get(str(address), [])
        ranked = [number for number in found if self._trace.processes[number].rank == rank]
        return next(iter(ranked or found), None)

    def before(self, span: Span) -> Span | None:
        """Return the hold whose end ended the wait of `span` for the same lock.

        Return None if `span` did not wait, or if this hold is not in the trace.
        """
        key = span.kind, span.store, span.name
        holds, served = self._by_name[key], span.begin + waited(span)
        for place in range(bisect_right(self._ends[key], served + SLACK_NS) - 1, -1, -1):
            other = holds[place]
            if other.end < span.begin:
                return None
            if other.facts["token"] < span.facts["token"] and self._are_comparable(span, other) and not other.is_open:
                return other
        return None

    def _are_comparable(self, one: Span, other: Span) -> bool:
        return self._trace.processes[one.process].group == self._trace.processes[other.process].group

    def contention(self) -> list[Document]:
        """Return a row for each lock: the times of waits and holds, and how long each waiter waited for each holder."""
        rows = []
        for (kind, store, name), spans in self._by_name.items():
            pairs: dict[tuple[str, str], int] = defaultdict(int)
            contended = 0
            for span in spans:
                blockers = self._blockers(span, spans, self._ends[kind, store, name])
                contended += bool(blockers)
                for other, length in blockers:
                    pairs[self._title(span), self._title(other)] += length
            rows.append(
                {
                    "kind": kind,
                    "name": name,
                    "acquired": len(spans),
                    "contended": contended,
                    "waited": seconds(sum(map(waited, spans))),
                    "held": seconds(sum(span.length - waited(span) for span in spans)),
                    "pairs": [
                        {"waiter": waiter, "holder": holder, "seconds": seconds(length)}
                        for (waiter, holder), length in sorted(pairs.items(), key=lambda each: -each[1])
                    ],
                }
            )
        return sorted(rows, key=lambda row: -row["waited"])

    def _title(self, span: Span) -> str:
        return self._trace.processes[span.process].title

    def _blockers(self, waiter: Span, holds: list[Span], ends: list[int]) -> list[tuple[Span, int]]:
        """Return each hold of another process during the wait of `waiter`, and how many ns of the wait it covers."""
        found = []
        until, apart = waiter.begin + waited(waiter), 0
        for place in range(bisect_right(ends, waiter.begin), len(holds)):
            holder = holds[place]
            length = min(until, holder.end) - max(waiter.begin, holder.begin + waited(holder))
            if length > 0 and holder.process != waiter.process and self._are_comparable(waiter, holder):
                found.append((holder, length))
            apart = apart + 1 if length <= 0 else 0
            if apart > APART_MAX:  # the holds are sorted by their ends, and so nearly by their beginnings
                break
        return found


def ended_by(trace: Trace, span: Span, holds: Holds) -> Ended:
    """Return the event that ended the wait of `span`."""
    if span.is_open and not span.is_held:
        process = trace.processes[span.process]
        return Ended(
            "nothing: the process was killed, or still runs" if not process.has_exited else "the process's exit"
        )
    if span.kind in HOLDS and "token" in span.facts:
        other = holds.before(span)
        if other is None:
            return Ended("free when asked for")
        return Ended(f"release by {trace.processes[other.process].title}", other.process, other.end)
    if span.outcome == "death":
        return Ended(f"death of {', '.join(map(str, span.facts.get('dead', [])))}")
    if span.outcome != "passed":
        return Ended(span.outcome)
    crossing = holds.crossings.get((span.process, span.begin))
    if crossing is not None:
        last = crossing.spans[-1]
        if last.process == span.process:
            return Ended("its own arrival, which was the last", last.process, last.begin)
        return Ended(f"arrival of {trace.processes[last.process].title}", last.process, last.begin)
    if "by" in span.facts:
        number = holds.process_of(span.facts["by"], span.facts.get("by_rank"))
        title = trace.processes[number].title if number is not None else str(span.facts["by"])
        did = f", which set {span.facts.get('key', span.name)!r}" if span.kind in PARTS else ""
        return Ended(title + did, number, span.end)
    return Ended("passed")


def _wait(trace: Trace, span: Span, holds: Holds) -> Document:
    ended = ended_by(trace, span, holds)
    return {
        **_who(trace.processes[span.process]),
        "kind": span.kind,
        "name": span.name,
        "seconds": seconds(waited(span)),
        "begin": seconds(span.begin),
        "outcome": span.outcome or "open",
        "ended_by": ended.words,
    }


def _time_outs(trace: Trace, waits: Iterable[Span]) -> list[Document]:
    return [
        {**_who(trace.processes[span.process]), "kind": span.kind, "name": span.name, "seconds": seconds(span.length)}
        for span in waits
        if span.outcome == "time-out"
    ]


# -- deaths ------------------------------------------------------------------------------------------------------------


def _deaths(trace: Trace) -> list[Document]:
    """Return a row for each death that a process of the trace recorded.

    The row has two delays of the record. ``since_exit`` counts from the exit of the dead process that ``fscoord run``
    recorded. ``since_last_sign`` counts from the last time in the trace file of the dead process. An unknown delay is
    None.
    """
    addresses = trace.processes_by_address()
    exits = {str(span.facts.get("address")): span for span in trace.spans if span.kind == "worker" and not span.is_open}
    rows = []
    for span in trace.spans:
        if span.kind != "death" or span.is_open:
            continue
        group = trace.processes[span.process].group
        ended = exits.get(span.name)
        known = [
            trace.processes[number].last
            for number in addresses.get(span.name, [])
            if trace.processes[number].group == group and trace.processes[number].last <= span.end
        ]
        rows.append(
            {
                "process": span.name,
                "rank": span.facts.get("dead_rank"),
                "session": span.facts.get("session"),
                "recorded_by": trace.processes[span.process].title,
                "at": seconds(span.end),
                "since_exit": seconds(span.end - ended.end)
                if ended and trace.processes[ended.process].group == group
                else None,
                "since_last_sign": seconds(span.end - max(known)) if known else None,
            }
        )
    return rows


# -- the tables --------------------------------------------------------------------------------------------------------


class Seconds(float):
    """A time in seconds."""


class Bar(Seconds):
    """A time in seconds that the page shows as a bar, to compare the times of a column."""


class Table(NamedTuple):
    """A table of the report, as shown to people.

    Attributes:
        title: the title of the table.
        note: a sentence that explains the figures; may be empty.
        headings: the heading of each column.
        rows: the rows of the table. A cell is a text, a number or a `Seconds`.
    """

    title: str
    note: str
    headings: Sequence[str]
    rows: Sequence[Sequence[object]]

    def numeric(self) -> list[bool]:
        """Return for each column whether all its values are numbers."""
        return [all(isinstance(value, (int, float)) for value in column) for column in zip(*self.rows, strict=True)]


def tables(report: Document) -> Iterator[Table]:
    """Yield the tables of `report` that have rows."""
    yield from filter(lambda table: table.rows, _all_tables(report))


def _all_tables(report: Document) -> Iterator[Table]:
    of_waits = ("rank", "kind", "name", "waited", "outcome", "ended by")
    yield Table(
        "Ranks that came last to barriers",
        "The cost is the time that the others waited for the rank, in rank-seconds. The avoidable part is the time"
        " that they would not have waited if the rank had come together with the rank before it. A barrier is"
        " uncertain if the clocks do not tell which rank was last.",
        ("rank", "last", "of barriers", "uncertain", "cost", "avoidable", "worst barrier", "its cost"),
        [
            (
                row["title"],
                row["last"],
                row["barriers"],
                row["uncertain"],
                Bar(row["cost_rank_s"]),
                Seconds(row["avoidable_rank_s"]),
                row["worst"]["name"],
                Seconds(row["worst"]["cost_rank_s"]),
            )
            for row in report["last_to_come"]
        ],
    )
    yield Table("The longest waits", "", of_waits, _wait_rows(report["longest"]))
    yield Table(
        "Waits without an end", "Their processes were killed, or still run.", of_waits, _wait_rows(report["open"])
    )
    yield Table(
        "Waiting time by name",
        "Names that differ only in numbers share a row.",
        ("kind", "name", "waits", "total", "longest", "by"),
        [
            (row["kind"], row["name"], row["waits"], Bar(row["total"]), Seconds(row["longest"]), row["longest_by"])
            for row in report["waiting"]
        ],
    )
    yield Table(
        "Locks and elections",
        "",
        ("kind", "name", "acquired", "contended", "waited", "held"),
        [
            (row["kind"], row["name"], row["acquired"], row["contended"], Bar(row["waited"]), Seconds(row["held"]))
            for row in report["contention"]
        ],
    )
    yield Table(
        "Waiters and holders of locks",
        "",
        ("name", "waiter", "holder", "waited"),
        [
            (row["name"], pair["waiter"], pair["holder"], Bar(pair["seconds"]))
            for row in report["contention"]
            for pair in row["pairs"]
        ],
    )
    yield Table(
        "Deaths",
        "How long after the exit that fscoord run saw, and after the last entry in the trace, a death was recorded.",
        ("process", "rank", "recorded by", "after its exit", "after its last entry"),
        [
            (
                row["process"],
                "" if row["rank"] is None else row["rank"],
                row["recorded_by"],
                *("unknown" if row[name] is None else Seconds(row[name]) for name in ("since_exit", "since_last_sign")),
            )
            for row in report["deaths"]
        ],
    )
    yield Table(
        "Time-outs",
        "",
        of_waits[:4],
        [(row["title"], row["kind"], row["name"], Seconds(row["seconds"])) for row in report["time_outs"]],
    )
    groups = report["clocks"]
    yield Table(
        "Clocks",
        "Hosts of different groups are not comparable: no chain of barriers connects them.",
        ("group", "host", "compared with", "wrong by at most", "offsets"),
        [
            (group["group"] + 1, host["host"], group["reference"], Seconds(host["bound"]), host["fixes"])
            for group in groups
            for host in group["hosts"]
            if len(groups) > 1 or len(group["hosts"]) > 1
        ],
    )


def _wait_rows(waits: Iterable[Document]) -> list[tuple[object, ...]]:
    return [
        (row["title"], row["kind"], row["name"], Bar(row["seconds"]), row["outcome"], row["ended_by"]) for row in waits
    ]
