"""`Rates`: how fast the participants of a file store write, from one look to the next. Data in, data out: no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from fscoord.status.reading import Activity

CONTROL = frozenset({"session", "death", "bell", "leave", "void", "seal", "forward", "finished"})
"""The kinds of records that carry no data of users."""


class Speed(NamedTuple):
    """The rates between two looks, per second.

    Attributes:
        by_kind: records of each kind.
        by_session: records of each session.
        total: records of all sessions.
        barriers: barriers that were completed.
        compactions: how often the log was compacted since the first look.
        size: the size of the log's file in use, in bytes.
    """

    by_kind: Mapping[str, float]
    by_session: Mapping[int, float]
    total: float
    barriers: float
    compactions: int
    size: int


class Rates:
    """Compares each look with the previous look."""

    def __init__(self) -> None:
        self._last: tuple[float, Activity] | None = None
        self._first_generation = 0

    def add(self, now: float, activity: Activity) -> Speed:
        """Return the speed since the last look.

        It is 0 at the first look, and after the log was read again from its beginning.

        Args:
            now: the time of this look, by the monotonic clock.
            activity: the counts of records at this look.
        """
        last, self._last = self._last, (now, activity)
        if last is None:
            self._first_generation = activity.generation
        seconds = 0.0 if last is None else now - last[0]
        before = activity if last is None else last[1]
        grown = Counter(activity.writes)
        grown.subtract(Counter(before.writes))
        if seconds <= 0 or any(count < 0 for count in grown.values()):
            return Speed({}, {}, 0.0, 0.0, self._compactions(activity), activity.size)
        kinds: Counter[str] = Counter()
        sessions: Counter[int] = Counter()
        for (session, kind), count in grown.items():
            if count and kind not in CONTROL:
                kinds[kind] += count
                sessions[session] += count
        return Speed(
            {kind: count / seconds for kind, count in kinds.most_common()},
            {session: count / seconds for session, count in sessions.items()},
            sum(kinds.values()) / seconds,
            (activity.barriers - before.barriers) / seconds,
            self._compactions(activity),
            activity.size,
        )

    def _compactions(self, activity: Activity) -> int:
        return max(0, activity.generation - self._first_generation)
