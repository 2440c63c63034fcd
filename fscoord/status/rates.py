"""`Rates` computes how fast the participants of a file store write between two pictures. The module does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from fscoord.status.reading import Activity

CONTROL = frozenset({"session", "death", "bell", "leave", "void", "seal", "forward", "finished"})
"""The kinds of records that carry no data of users."""


class Speed(NamedTuple):
    """Rates per second between two pictures of a file store.

    Attributes:
        by_kind: records per second of each kind.
        by_session: records per second of each session.
        total: records per second of all sessions.
        barriers: completed barriers per second.
        compactions: how often the log was compacted since the first picture.
        size: the size of the log's current file, in bytes.
    """

    by_kind: Mapping[str, float]
    by_session: Mapping[int, float]
    total: float
    barriers: float
    compactions: int
    size: int


class Rates:
    """Computes the rates between each picture and the next."""

    def __init__(self) -> None:
        self._last: tuple[float, Activity] | None = None
        self._first_generation = 0

    def add(self, now: float, activity: Activity) -> Speed:
        """Return the rates since the previous call.

        The first call returns rates of 0. A call also returns rates of 0 if the observer has read the log again from
        its beginning since the previous call.

        Args:
            now: the present time, by the monotonic clock.
            activity: the present counts of records.
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
