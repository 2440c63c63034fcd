"""Estimates the offsets of several clocks from the barriers of their processes. No I/O.

The monotonic clocks of two hosts start at unknown times and have slightly different rates. No process leaves a barrier
before the last process has arrived. So for two processes i and j of one barrier, the arrival of i precedes the
departure of j. If the clock of i is ahead of true time by o(i), and the clock of j by o(j), then::

    o(j) - o(i)  <=  left(j) - arrived(i)

In this way each barrier bounds the difference of each pair of clocks from both sides. These bounds are a system of
difference constraints, which the shortest paths of a graph solve: R. Bellman, On a routing problem, 1958; L. Ford and
D. Fulkerson, Flows in Networks, 1962. The same bounds for pairs of messages are in A. Duda, G. Harrus, Y. Haddad and
G. Bernard, Estimating global time in distributed systems, ICDCS 1987.

The offsets change, because the clocks drift apart. So the barriers are divided into windows of time. For each window, a
clock has one offset, which holds at the middle of the window. A constraint of an earlier or later barrier is loosened
by the largest possible drift up to the middle (`DRIFT`). If clocks drift faster, the constraints of a window contradict
each other, and the window is split. Between the middles of two windows the offset is interpolated.

Every offset has an error bound: half of the interval in which the offset must lie, plus the largest possible drift
since the nearest middle. The bound holds if no two clocks drift apart faster than `DRIFT`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

Clock = tuple[str, int]
"""The boot id and the time namespace of a monotonic clock."""

DRIFT: Final = 100e-6
"""The highest rate at which two clocks drift apart. Quartz clocks are usually specified to 20 to 50 millionths."""

WINDOW_NS: Final = 60_000_000_000
"""The longest window, in ns."""

SHORT_WINDOW_NS: Final = 1_000_000_000
ENOUGH: Final = 32
"""A window longer than `SHORT_WINDOW_NS` ends when the window has this many barriers. A longer window would lose more
precision by the drift of the clocks than it would gain by more barriers."""


class Passage(NamedTuple):
    """The times at which processes that share a clock arrived at one barrier and left it.

    Attributes:
        clock: the clock, on which both times were taken.
        arrived: the last arrival of a process with this clock, in ns.
        left: the first departure of a process with this clock, in ns.
    """

    clock: Clock
    arrived: int
    left: int


Meeting = Sequence[Passage]
"""One barrier: a `Passage` for each clock of its processes."""


class Instant(NamedTuple):
    """A time on the reference clock of a group.

    Attributes:
        time: the estimate, in ns.
        bound: the largest difference between the true time and `time`, in ns.
    """

    time: int
    bound: int


class Fix(NamedTuple):
    """The estimated offset of one clock from the reference clock at one time. All numbers are in ns.

    At the time `at` of the reference clock, the true offset differs from `offset` by at most `bound`.
    """

    at: int
    offset: int
    bound: int


class Rough(NamedTuple):
    """An estimate, from one barrier, of the offset of a clock from its parent. All numbers are in ns.

    `_Group._find_parents` determines the parent of each clock.

    Attributes:
        at: the time on the clock at which the barrier was left.
        offset: the middle of the possible offsets.
        width: the highest possible offset minus the lowest possible offset.
    """

    at: int
    offset: int
    width: int


class Alignment:
    """The offsets of all clocks of a trace. Clocks that share a barrier form a group; each group has one time line.

    Attributes:
        groups: the clocks of each group, the reference first. Clocks of different groups are not comparable.
        discarded: the number of barriers that were not used, because their times are contradictory.
    """

    def __init__(self, groups: list[list[Clock]], fixes: dict[Clock, list[Fix]], discarded: int, drift: float) -> None:
        self.groups = groups
        self.discarded = discarded
        self._fixes = fixes
        self._drift = drift
        self._group = {clock: number for number, group in enumerate(groups) for clock in group}
        self._local = {clock: [fix.at + fix.offset for fix in found] for clock, found in fixes.items()}

    def group(self, clock: Clock) -> int:
        """Return the number of the group of `clock`."""
        return self._group[clock]

    def fixes(self, clock: Clock) -> list[Fix]:
        """Return the estimated offsets of `clock`, sorted by time. A reference clock has a single offset, 0."""
        return self._fixes[clock]

    def widest(self, clock: Clock) -> int:
        """Return the largest error bound (`Fix.bound`) of an estimated offset of `clock`, in ns."""
        return max(fix.bound for fix in self._fixes[clock])

    def to_reference(self, clock: Clock, time: int) -> Instant:
        """Convert `time`, in ns on `clock`, to the reference clock of the group."""
        found, local = self._fixes[clock], self._local[clock]
        if len(found) == 1 and found[0].bound == 0:
            return Instant(time - found[0].offset, 0)  # the reference
        place = bisect_right(local, time)
        if place in (0, len(found)):
            fix, at = (found[0], local[0]) if place == 0 else (found[-1], local[-1])
            return Instant(time - fix.offset, fix.bound + _drifted(self._drift, abs(time - at)))
        before, after = found[place - 1], found[place]
        since, until = time - local[place - 1], local[place] - time
        whole = since + until
        offset = (before.offset * until + after.offset * since) // whole
        bound = (before.bound * until + after.bound * since) // whole
        return Instant(time - offset, bound + _drifted(self._drift, 2 * since * until // whole))


def align(clocks: Iterable[Clock], meetings: Iterable[Meeting], drift: float = DRIFT) -> Alignment:
    """Estimate the offsets of `clocks` from the barriers `meetings`.

    Args:
        clocks: all clocks. The first clock of a group becomes its reference.
        meetings: the barriers, each with the passages of the clocks that took part.
        drift: the highest rate at which two clocks drift apart.
    """
    kept: list[Meeting] = []
    discarded = 0
    for meeting in meetings:
        if any(passage.arrived > passage.left for passage in meeting):
            discarded += 1
        elif len(meeting) > 1:
            kept.append(meeting)
    groups: list[list[Clock]] = []
    fixes: dict[Clock, list[Fix]] = {}
    placed: set[Clock] = set()
    for clock in clocks:
        if clock in placed:
            continue
        found, lost = _Group(clock, kept, drift).solve()
        discarded += lost
        groups.append(list(found))
        placed |= found.keys()
        fixes |= found
    return Alignment(groups, fixes, discarded, drift)


def _drifted(drift: float, nanoseconds: int) -> int:
    return int(drift * nanoseconds) + 1


class _Group:
    """Computes the offsets of all clocks that a chain of barriers connects with the clock `reference`."""

    def __init__(self, reference: Clock, meetings: list[Meeting], drift: float) -> None:
        self._reference = reference
        self._drift = drift
        self._parents = self._find_parents(meetings)
        self._meetings = [meeting for meeting in meetings if meeting[0].clock in self._parents]
        self._discarded = 0

    def _find_parents(self, meetings: list[Meeting]) -> dict[Clock, tuple[Clock, list[Rough]]]:
        """Return, for each clock of the group, its parent and its rough offsets from the parent.

        The parent shares a barrier with the clock, and is one step nearer to the reference. Rough offsets only serve to
        find the window of a barrier, and to estimate how long the clocks have drifted.
        """
        shared: dict[Clock, dict[Clock, list[Rough]]] = {}
        for meeting in meetings:
            for one in meeting:
                beside = shared.setdefault(one.clock, {})
                for other in meeting:
                    if other.clock != one.clock:
                        width = one.left - one.arrived + other.left - other.arrived
                        middle = (other.left + other.arrived - one.left - one.arrived) // 2
                        beside.setdefault(other.clock, []).append(Rough(other.left, middle, width))
        parents: dict[Clock, tuple[Clock, list[Rough]]] = {self._reference: (self._reference, [])}
        left = deque([self._reference])
        while left:
            parent = left.popleft()
            for child in shared.get(parent, ()):
                if child not in parents:
                    parents[child] = parent, sorted(shared[parent][child])
                    left.append(child)
        return parents

    def _rough(self, clock: Clock, time: int) -> Instant:
        """Convert `time` on `clock` to an approximate time on the reference clock."""
        error = 0
        while clock != self._reference:
            clock, offsets = self._parents[clock]
            place = min(bisect_right(offsets, (time,)), len(offsets) - 1)
            rough = offsets[place]
            error += rough.width // 2 + _drifted(2 * self._drift, abs(time - rough.at) + rough.width)
            time -= rough.offset
        return Instant(time, error)

    def solve(self) -> tuple[dict[Clock, list[Fix]], int]:
        """Return the offsets of each clock of the group, and how many barriers were discarded."""
        fixes: dict[Clock, list[Fix]] = {}
        timed = sorted(
            ((max(self._rough(*each[:2]).time for each in meeting), meeting) for meeting in self._meetings),
            key=lambda each: each[0],
        )
        for window in _windows(timed):
            for at, offsets in self._solve_window(window):
                for clock, (offset, bound) in offsets.items():
                    fixes.setdefault(clock, []).append(Fix(at, offset, bound))
        missing = self._parents.keys() - fixes.keys() - {self._reference}
        if missing and timed:
            # No window connects such a clock with the reference, so all barriers are taken as one window.
            whole = self._bounds(timed)
            for clock, (offset, bound) in (whole or {}).items():
                if clock in missing:
                    fixes[clock] = [Fix(timed[len(timed) // 2][0], offset, bound)]
        fixes = {clock: sorted(found, key=lambda fix: fix.at + fix.offset) for clock, found in fixes.items()}
        return {self._reference: [Fix(0, 0, 0)], **fixes}, self._discarded

    def _solve_window(self, window: list[tuple[int, Meeting]]) -> list[tuple[int, dict[Clock, tuple[int, int]]]]:
        """Return a list of (middle of the window, offsets of the clocks at this time).

        The list has one item for `window`. If the constraints of `window` conflict, it has the items of both halves.
        """
        found = self._bounds(window)
        if found is not None:
            return [(window[len(window) // 2][0], found)]
        if len(window) == 1:
            self._discarded += 1
            return []
        half = len(window) // 2
        return self._solve_window(window[:half]) + self._solve_window(window[half:])

    def _bounds(self, window: list[tuple[int, Meeting]]) -> dict[Clock, tuple[int, int]] | None:
        """Return the offset of each clock at the middle of `window`, and its bound; None if the constraints conflict.

        The largest drift up to the middle depends on the offset of the clock, and the offset is the unknown. So the
        method solves the constraints twice. The first solution uses rough offsets for the drift. The second solution
        uses the offsets of the first, which are more precise.
        """
        middle = window[len(window) // 2][0]
        known: dict[Clock, tuple[int, int]] = {}
        for at, meeting in window:
            for each in meeting:
                if each.clock not in known or at <= middle:  # of the barriers before the middle, take the last
                    about = self._rough(each.clock, each.left)
                    known[each.clock] = each.left - about.time, about.bound + _drifted(self._drift, abs(at - middle))
        known[self._reference] = 0, 0
        first = self._solve(window, middle, known)
        return first and self._solve(window, middle, {**known, **first})

    def _solve(
        self, window: list[tuple[int, Meeting]], middle: int, known: dict[Clock, tuple[int, int]]
    ) -> dict[Clock, tuple[int, int]] | None:
        """Solve the constraints of `window` once; see `_bounds`. `known` has approximate offsets and their bounds."""
        limits: dict[Clock, dict[Clock, int]] = {}  # limits[c][d]: o(d) - o(c) is at most this

        def loose_by(clock: Clock, time: int) -> int:
            """Return the largest drift of `clock`, in ns, between its time `time` and the middle of the window."""
            if clock == self._reference:
                return 0
            offset, error = known[clock]
            return _drifted(self._drift, abs(time - middle - offset) + error)

        for _, meeting in window:
            loose = [(each, loose_by(each.clock, each.arrived), loose_by(each.clock, each.left)) for each in meeting]
            for one, early, _ in loose:
                row = limits.setdefault(one.clock, {})
                for other, _, late in loose:
                    if other.clock != one.clock:
                        limit = other.left - one.arrived + early + late
                        if limit < row.get(other.clock, limit + 1):
                            row[other.clock] = limit
        highest = _shortest(limits, self._reference)
        backwards: dict[Clock, dict[Clock, int]] = {}
        for start, row in limits.items():
            for end, limit in row.items():
                backwards.setdefault(end, {})[start] = limit
        lowest = _shortest(backwards, self._reference)
        if highest is None or lowest is None:
            return None
        # Both the highest offsets and the lowest ones satisfy all constraints. So do their means, because the
        # constraints are linear.
        return {
            clock: ((highest[clock] - lowest[clock]) // 2, (highest[clock] + lowest[clock]) // 2 + 1)
            for clock in highest
            if clock != self._reference
        }


def _windows(timed: list[tuple[int, Meeting]]) -> list[list[tuple[int, Meeting]]]:
    """Divide the barriers, sorted by time, into windows."""
    windows: list[list[tuple[int, Meeting]]] = []
    for each in timed:
        length = each[0] - windows[-1][0][0] if windows else 0
        is_full = length > WINDOW_NS or (windows and length > SHORT_WINDOW_NS and len(windows[-1]) >= ENOUGH)
        if not windows or is_full:
            windows.append([])
        windows[-1].append(each)
    return windows


def _shortest(edges: dict[Clock, dict[Clock, int]], source: Clock) -> dict[Clock, int] | None:
    """Return the length of the shortest path from `source` to each reachable node; None if there is a negative cycle.

    The function uses the algorithm of Bellman and Ford with a queue.
    """
    found = {source: 0}
    steps = {source: 0}
    waiting = deque([source])
    queued = {source}
    while waiting:
        node = waiting.popleft()
        queued.discard(node)
        for other, length in edges.get(node, {}).items():
            total = found[node] + length
            if total < found.get(other, total + 1):
                found[other] = total
                steps[other] = steps[node] + 1
                if steps[other] > len(edges) + 1:
                    return None  # a path of so many steps has a cycle, and the cycle is negative
                if other not in queued:
                    queued.add(other)
                    waiting.append(other)
    return found
