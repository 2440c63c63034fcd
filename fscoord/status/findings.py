"""`find_all` finds likely faults in a `Picture`, the most urgent first. The module does no I/O and reads no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from fscoord._arguments import key_text
from fscoord._waiting.awaited import BARRIER, EXCHANGE, ShownWait
from fscoord._waiting.rounds import RoundState
from fscoord.recipes.holdings import LineState
from fscoord.status.picture import Picture, SessionStatus

SLOW_S: Final = 10.0
"""If a wait for a running participant lasts this long, in seconds, the wait is a finding."""

RANKS_SHOWN: Final = 8
"""A finding describes at most this many missing ranks. If more ranks are missing, the finding has their number."""

LOG_LOCK: Final = "log-lock"
DEADLOCK: Final = "deadlock"
LOCK_HELD: Final = "lock"
MISSING: Final = "barrier"
IDLE: Final = "idle"

NEVER_ENDS, STOPPED, SLOW = range(3)
"""The urgency of a finding. `NEVER_ENDS`: the wait can't end. `STOPPED`: a process must be continued or killed. `SLOW`:
the wait may still end."""


class StatusFinding(NamedTuple):
    """A likely fault.

    Attributes:
        kind: ``log-lock``, ``deadlock``, ``lock``, ``barrier`` or ``idle``.
        message: the fault and, if there is one, the remedy.
        sessions: the sessions that cause the fault.
        seconds: how long the first waiting participant has waited; 0.0 if unknown.
        urgency: a lower number is more urgent.
    """

    kind: str
    message: str
    sessions: tuple[int, ...]
    seconds: float
    urgency: int


def find_all(picture: Picture, slow: float = SLOW_S) -> list[StatusFinding]:
    """Return the findings about `picture`, the most urgent first.

    Args:
        picture: the participants, what they hold and what they wait for.
        slow: if a wait for a running participant lasts this long, in seconds, the wait is a finding.
    """
    view = _View(picture)
    found = [
        *_log_lock(view, slow),
        *_deadlocks(view),
        *_barriers(view, slow),
        *_locks(view, slow),
    ]
    return sorted(found, key=lambda finding: (finding.urgency, -finding.seconds))


class _View:
    """A picture with indices of its participants and waits."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.by_number = {each.number: each for each in picture.participants}
        self.waits = [(each, each.waiting) for each in picture.participants if each.waiting and each.alive != "no"]
        self.by_key: dict[str, list[SessionStatus]] = {}
        for each, waiting in self.waits:
            for key in waiting.keys:
                self.by_key.setdefault(key, []).append(each)

    def of_rank(self, rank: int) -> SessionStatus | None:
        """Return the participant with `rank`, or None.

        Several participants may have the rank. First choose the newest participant that may be alive, or else the
        newest participant. If the process of this participant has several handles with the rank, such as clones, prefer
        a handle that waits.
        """
        named = [self.by_number[number] for number in self.picture.ranks.get(rank, ()) if number in self.by_number]
        newest = max(named, key=lambda each: (each.alive != "no", each.number), default=None)
        if newest is None:
            return None
        handles = [
            each for each in named if (each.host, each.pid, each.alive) == (newest.host, newest.pid, newest.alive)
        ]
        return max(handles, key=lambda each: (each.waiting is not None, each.idle is not None, each.number))

    def order(self, number: int) -> tuple[bool, int, int]:
        """Return a sort key for session `number`: first the sessions with a rank, by rank, then the other sessions."""
        rank = self.by_number[number].rank if number in self.by_number else None
        return rank is None, rank or 0, number

    def has_ended(self, number: int) -> bool:
        """Return whether session `number` is known to have ended."""
        return number in self.by_number and self.by_number[number].alive == "no"

    def may_live(self, number: int) -> bool:
        """Return whether the picture has session `number`, and the session is not known to have ended."""
        return number in self.by_number and not self.has_ended(number)

    def seconds(self, sessions: Iterable[int]) -> float:
        """Return the longest wait of `sessions`, in seconds; 0.0 if no session shows a wait."""
        waits = [self.by_number[number].waiting for number in sessions if number in self.by_number]
        return max((waiting.seconds for waiting in waits if waiting is not None), default=0.0)


# -- the log's lock ----------------------------------------------------------------------------------------------------


def _log_lock(view: _View, slow: float) -> Iterator[StatusFinding]:
    held = view.picture.log_lock
    if held is None:
        return
    holder = view.by_number.get(held.session or 0)
    title = held.holder if holder is None else _named(holder)
    sessions = () if holder is None else (holder.number,)
    if holder is not None and holder.is_stopped:
        urgency = STOPPED
        words = (
            f"{title} is stopped and holds the lock of the store's log: no process can write. Continue it"
            f" (kill -CONT {holder.pid}) or kill it"
        )
    elif held.seconds > 0:
        urgency = STOPPED if held.seconds >= slow else SLOW
        words = (
            f"{title} has held the lock of the store's log for {duration(held.seconds)} without writing: no other"
            " process can write. Check whether it is blocked in the kernel, and whether its host answers: a host that"
            " has vanished keeps the lock until the file server takes it back"
        )
    else:
        return
    yield StatusFinding(LOG_LOCK, words, sessions, held.seconds, urgency)


# -- cycles ------------------------------------------------------------------------------------------------------------


class _Edge(NamedTuple):
    """An edge of the wait-for graph: one session waits for the session `target`.

    Attributes:
        target: the session that is waited for.
        words: the reason, as text that follows the name of the waiter in a message.
    """

    target: int
    words: str


def _edges(view: _View) -> dict[int, list[_Edge]]:
    """Return the wait-for graph: for each session that waits for another session, its edges to these sessions."""
    edges: dict[int, list[_Edge]] = {}
    for line in view.picture.lines:
        if not (line.needs_all or len(line.holders) == 1):
            continue  # a release by any one of several holders ends the wait
        for waiter in line.waiters:
            for holder in line.holders:
                if view.may_live(waiter.session) and view.may_live(holder.session):
                    words = f"waits for {line.kind} {line.name!r}, which {_title(view, holder.session)} holds"
                    edges.setdefault(waiter.session, []).append(_Edge(holder.session, words))
    for state in view.picture.rounds:
        found = [(rank, view.of_rank(rank)) for rank in state.missing or ()]
        missing = [(rank, each) for rank, each in found if each is not None]
        comers = view.by_key.get(key_text(state.done_key), [])
        for comer in comers:
            for rank, absent in missing:
                # A session may have several ranks, one in each thread. If it waits at this barrier as one rank, its
                # other threads may still arrive as the other ranks.
                if view.may_live(absent.number) and absent not in comers:
                    words = f"waits at barrier {state.name!r}, to which rank {rank} has not come"
                    edges.setdefault(comer.number, []).append(_Edge(absent.number, words))
    return edges


def _deadlocks(view: _View) -> Iterator[StatusFinding]:
    edges = _edges(view)
    for found in _rings(edges):
        first = found.index(min(found, key=view.order))
        ring = (*found[first:], *found[:first])
        steps = []
        for number, following in zip(ring, (*ring[1:], ring[0]), strict=True):
            edge = next(each for each in edges[number] if each.target == following)
            steps.append(f"{_title(view, number)} {edge.words}")
        yield StatusFinding(
            DEADLOCK,
            f"{'; '.join(steps)}. This is a deadlock unless another thread of one of these processes releases its hold:"
            f" end one of them ({', '.join(_process(view.by_number[number]) for number in ring)})",
            ring,
            view.seconds(ring),
            NEVER_ENDS,
        )


def _rings(edges: Mapping[int, Sequence[_Edge]]) -> list[tuple[int, ...]]:
    """Return cycles in the wait-for graph that have no session in common.

    Each cycle is the shortest cycle through one of its sessions.
    """
    found: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for start in sorted(edges):
        if start in seen:
            continue
        ring = _shortest_ring(edges, start)
        if ring and not seen.intersection(ring):
            found.append(ring)
            seen.update(ring)
    return found


def _shortest_ring(edges: Mapping[int, Sequence[_Edge]], start: int) -> tuple[int, ...]:
    """Return the shortest cycle of at least two sessions through `start`; empty if there is none."""
    before: dict[int, int] = {}
    level = [start]
    while level:
        following = []
        for number in level:
            for edge in edges.get(number, ()):
                if edge.target == start and number != start:
                    ring = [number]
                    while ring[-1] != start:
                        ring.append(before[ring[-1]])
                    return tuple(reversed(ring))
                if edge.target not in before and edge.target != start:
                    before[edge.target] = number
                    following.append(edge.target)
        level = following
    return ()


# -- barriers ----------------------------------------------------------------------------------------------------------


def _barriers(view: _View, slow: float) -> Iterator[StatusFinding]:
    known = {key_text(state.done_key) for state in view.picture.rounds}
    for state in view.picture.rounds:
        waiters = view.by_key.get(key_text(state.done_key), [])
        if waiters:
            yield from _barrier(view, state, waiters, slow)
    groups: dict[tuple[str, str], list[SessionStatus]] = {}  # the waiters of exchanges, and of barriers without a round
    for each, waiting in view.waits:
        if waiting.kind in (BARRIER, EXCHANGE) and not known.intersection(waiting.keys):
            groups.setdefault((waiting.kind, waiting.name), []).append(each)
    for (kind, name), waiters in sorted(groups.items()):
        yield from _exchange(view, kind, name, waiters, slow)


def _barrier(view: _View, state: RoundState, waiters: list[SessionStatus], slow: float) -> Iterator[StatusFinding]:
    seconds = view.seconds(each.number for each in waiters)
    size = state.world_size or max((each.waiting.size for each in waiters if each.waiting), default=0)
    came = f"{state.come} of {size}" if size else f"{state.come}"
    head = f"barrier {state.name!r}: {came} came, and the first has waited for {duration(seconds)}"
    if state.missing is None:
        if seconds >= slow:
            words = f"{head}. The callers gave no ranks, so it is unknown which are missing"
            yield StatusFinding(MISSING, words, (), seconds, SLOW)
        return
    yield from _missing_ranks(view, head, list(state.missing), seconds, slow)


def _missing_ranks(view: _View, head: str, ranks: list[int], seconds: float, slow: float) -> Iterator[StatusFinding]:
    """Yield a finding about the missing `ranks`, if there is a reason for a finding.

    The reason is that one of the ranks has ended or is stopped, or that the wait has lasted `slow` seconds. `head` is
    the beginning of the message, and `seconds` is how long the wait has lasted.
    """
    found = {rank: view.of_rank(rank) for rank in ranks}
    urgency = min((_urgency(each) for each in found.values()), default=SLOW)
    if urgency == SLOW and seconds < slow:
        return
    ordered = sorted(ranks, key=lambda rank: (_urgency(found[rank]), rank))
    shown = [_rank_state(rank, found[rank]) for rank in ordered[:RANKS_SHOWN]]
    more = f"; and {len(ranks) - RANKS_SHOWN} more" if len(ranks) > RANKS_SHOWN else ""
    names = ", ".join(map(str, ranks[:RANKS_SHOWN])) + ("..." if len(ranks) > RANKS_SHOWN else "")
    words = f"{head}. Missing: {names} ({'; '.join(shown)}{more})" if ranks else f"{head}. No rank is missing"
    sessions = tuple(each.number for each in found.values() if each is not None)
    remedy = next((_remedy(each) for each in map(found.__getitem__, ordered) if each is not None), "")
    yield StatusFinding(MISSING, words + remedy, sessions, seconds, urgency)


def _exchange(view: _View, kind: str, name: str, waiters: list[SessionStatus], slow: float) -> Iterator[StatusFinding]:
    seconds = view.seconds(each.number for each in waiters)
    size = max(each.waiting.size for each in waiters if each.waiting)
    ranks = [rank for rank in range(size) if _lacks(waiters, rank)]
    head = f"{kind} {name!r} of {size} ranks: {len(waiters)} wait, the first for {duration(seconds)}"
    if ranks:
        yield from _missing_ranks(view, head, ranks, seconds, slow)
    elif seconds >= slow:
        yield StatusFinding(MISSING, head, (), seconds, SLOW)


def _lacks(waiters: list[SessionStatus], rank: int) -> bool:
    """Return whether `rank` is missing in an exchange.

    The rank is missing if one of `waiters` waits for the key that `rank` sets. The last rank that arrives sets the key
    named ``given``. If the waiters wait for this key, each rank that does not wait counts as missing.
    """
    ends = [key for each in waiters if each.waiting for key in each.waiting.keys]
    if any(key.endswith("/given") for key in ends):
        return rank not in {each.rank for each in waiters}
    return any(_number_at_end(key) == rank for key in ends)


def _number_at_end(key: str) -> int:
    digits = key[len(key.rstrip("0123456789")) :]
    return int(digits) if digits and len(digits) < 20 else -1


# -- locks -------------------------------------------------------------------------------------------------------------


def _locks(view: _View, slow: float) -> Iterator[StatusFinding]:
    for line in view.picture.lines:
        waiters = [each for each in line.waiters if not view.has_ended(each.session)]
        if not waiters or not line.holders:
            continue
        holders = [view.by_number.get(holder.session) for holder in line.holders]
        seconds = view.seconds(waiter.session for waiter in waiters)
        urgent = [each for each in holders if each is not None and _urgency(each) < SLOW]
        queue = "1 waits" if len(waiters) == 1 else f"{len(waiters)} wait"
        what = f"{line.kind} {line.name!r}"
        if urgent and (line.needs_all or len(urgent) == len(holders)):
            words = "; ".join(f"{_named(each)} holds it and {_fate(each)}" for each in urgent)
            remedy = "" if any(each.alive == "no" for each in urgent) else _remedy(urgent[0])
            numbers = tuple(each.number for each in urgent)
            urgency = min(map(_urgency, urgent))
            yield StatusFinding(LOCK_HELD, f"{what}: {words}, and {queue} for it{remedy}", numbers, seconds, urgency)
        elif seconds >= slow and all(each is not None and _does_nothing(view, each, slow) for each in holders):
            words = "; ".join(f"{_named(each)} {_state(each)}" for each in holders if each is not None)
            numbers = tuple(each.number for each in holders if each is not None)
            text = f"{what}: {queue} for it, the first for {duration(seconds)}, and its holder is idle in this store"
            yield StatusFinding(IDLE, f"{text}: {words}", numbers, seconds, SLOW)


def _does_nothing(view: _View, each: SessionStatus, slow: float) -> bool:
    if each.waiting is not None or turns_of(view.picture.lines, each.number):
        return False
    return each.idle is None or each.idle >= slow


# -- words -------------------------------------------------------------------------------------------------------------


def place_in_line(lines: Sequence[LineState], waiting: ShownWait) -> str:
    """Return the position of a waiter in the line of a lock, such as ``, 2nd in line``; ``""`` if no line has it.

    The holders are at the head of the line, so the first waiter of a lock is 2nd in line.
    """
    for line in lines:
        for index, key in enumerate(line.wake_keys):
            if key_text(key) in waiting.keys:
                return _place(line, index)
    return ""


def turns_of(lines: Sequence[LineState], session: int) -> list[str]:
    """Return a text such as ``lock 'dataset', 2nd in line`` for each lock for which `session` waits."""
    return [
        f"{line.kind} {line.name!r}{_place(line, index)}"
        for line in lines
        for index, waiter in enumerate(line.waiters)
        if waiter.session == session
    ]


def _place(line: LineState, index: int) -> str:
    place = len(line.holders) + index + 1
    ending = "th" if 10 <= place % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f", {place}{ending} in line"


def _urgency(each: SessionStatus | None) -> int:
    if each is None:
        return SLOW
    return NEVER_ENDS if each.alive == "no" else STOPPED if each.is_stopped else SLOW


def _rank_state(rank: int, each: SessionStatus | None) -> str:
    """Return the name, process and state of a missing rank for a message."""
    return (
        f"rank {rank} was not seen in this store" if each is None else f"rank {rank} ({_process(each)}) {_state(each)}"
    )


def _state(each: SessionStatus) -> str:
    """Return the state of a participant as text, such as ``is stopped``, that follows its name in a message."""
    if each.alive == "no" or each.is_stopped:
        return _fate(each)
    alive = "is alive" if each.alive == "yes" else "may be alive"
    what = f"waits for {each.waiting.words()}" if each.waiting else "waits for nothing in this store"
    idle = "" if each.idle is None else f", last wrote {duration(each.idle)} ago"
    return f"{alive}, {what}{idle}"


def _fate(each: SessionStatus) -> str:
    if each.alive != "no":
        return "is stopped"
    return "has ended" if each.found_dead is None else f"is dead, as found at {clock_text(each.found_dead)}"


def _remedy(each: SessionStatus) -> str:
    """Return ``. `` and a sentence that says how to replace or continue `each`; ``""`` if `each` runs."""
    if each.alive == "no":
        return "" if each.rank is None else f". Start rank {each.rank} again, or end the job"
    return f". Continue {each.pid} on {each.host} (kill -CONT {each.pid}) or kill it" if each.is_stopped else ""


def _process(each: SessionStatus) -> str:
    return f"{each.host}:{each.pid}"


def _named(each: SessionStatus) -> str:
    """Return the title of `each` and, if the title does not name the process, the process."""
    return each.title if each.rank is None else f"{each.title} ({_process(each)})"


def _title(view: _View, number: int) -> str:
    each = view.by_number.get(number)
    return f"session {number}" if each is None else each.title


def duration(seconds: float) -> str:
    """Return `seconds` in words of at most two units, such as ``42 s``, ``3 min 5 s`` or ``2 h 10 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{whole} s"


def session_state(alive: str, found_dead: float | None) -> str:
    """Return the state of a session as text: ``alive``, ``unknown``, ``ended``, or ``dead, found 12:03:11 UTC``.

    Args:
        alive: ``"yes"``, ``"no"`` or ``"unknown"``.
        found_dead: when the death was recorded, in seconds since the epoch; None if no death was recorded.
    """
    if alive != "no":
        return "alive" if alive == "yes" else "unknown"
    return "ended" if found_dead is None else f"dead, found {clock_text(found_dead)}"


def clock_text(seconds: float) -> str:
    """Return the UTC time of day, such as ``12:03:11 UTC``, of `seconds` since the epoch."""
    of_day = int(seconds) % 86400
    return f"{of_day // 3600:02}:{of_day // 60 % 60:02}:{of_day % 60:02} UTC"
