"""`Waiter`: the sleeps of one wait on a log, by a thread or a task. It decides when each sleep ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

from fscoord._log.shared.extent import Extent
from fscoord._log.shared.node_poller import QUEUE_AFTER_S, PollerElection
from fscoord._log.wakeup.doorbell import SIZE, Doorbell, cell
from fscoord._log.wakeup.watcher import ChangeWatcher
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

SLOW_FIRST_S, SLOW_LAST_S = 0.1, 1.0
POLL_FIRST_S = 0.001
NEWS_POLL_S = 0.04
NEWS_POLLS = 25
"""The longest pause between two polls of the poller while news is coming, in seconds, and the number of such polls
after the last news. At the beginning of a wait its own process has usually just written, so that is news as well."""
DEATH_WATCH_FIRST_S = 0.005
OWN_POLL_S = 10.0
"""How long a waiter relies on the poller of its node before it polls once by itself, in seconds."""


class Waiter:
    """One wait, from its first arming to its last look.

    Args:
        watcher: wakes this waiter.
        longest_sleep: returns the longest sleep in seconds of a wait that also watches for deaths. The death of a
            watched process then also ends a sleep. None for any other wait.
        other_buckets: further buckets. A ring of one of them ends a sleep, as a ring of the armed bucket does.
        is_check_due: for a wait that also watches for deaths, where another process polls for the node: returns
            whether a look is needed, because a session seems dead or was not probed lately.

    Attributes:
        waker: ends the sleep of this waiter.
        was_rung: whether a ring ended the last sleep. Otherwise the sleep ended because it was time for a poll.
        is_over: whether the wait is over, because the store was closed.
        is_reusable: whether the waiter keeps nothing of its wait after `close`.
        role_changed: whether the waiter must check if it has become the poller of its node.
    """

    was_rung = False
    is_over = False
    role_changed = False
    _bucket = 0
    _mark = b""
    _other_marks: Sequence[bytes] = ()
    _wakes_at: float | None = None  # the end of the current sleep without a ring; None: no sleep
    _is_beside_election = False
    _is_poller = False
    _has_hurried = False
    _may_queue = False  # whether the wait is long enough to queue for the poller's lock
    _pause = 0.0  # the length of the last sleep without a ring; 0.0 before the first
    _poll_pause = POLL_FIRST_S
    _quick_polls = NEWS_POLLS  # how many more polls are quick, unless there is news
    _heartbeats = -1
    _last_own_poll = 0.0

    def __init__(
        self,
        watcher: ChangeWatcher,
        longest_sleep: Callable[[], float] | None = None,
        other_buckets: Sequence[int] = (),
        is_check_due: Callable[[], bool] | None = None,
    ) -> None:
        self.watcher = watcher
        self.waker = watcher.backend.new_waker()
        self._longest_sleep = longest_sleep
        self._is_check_due = is_check_due
        # The ranks that such a wait needs become fewer, and it reads that in the log. So it looks sooner at first.
        self._own_poll_s = SLOW_LAST_S
        self._other_buckets = other_buckets
        # A waiter beside an election counts the polls of its wait, and a death watch belongs to its wait.
        self.is_reusable = watcher.election is None and longest_sleep is None and not other_buckets
        self.event_count = watcher.event_count
        self._deaths = watcher.deaths
        if watcher.election is not None:
            watcher.election.add(self)

    def stand_for_election(self) -> None:
        """Become the poller now if there is none, instead of at the next sleep.

        A new poller rings every key. If a waiter armed before that ring, the ring causes a useless look. So a waiter
        that first writes and then sleeps calls this method before it arms. If many waiters begin at once, only the
        first few are then rung.
        """
        election = self.watcher.election
        if election is not None:
            try:
                self._is_poller = election.try_elect(self, may_queue=False)
            except OSError as error:
                raise_if_foreign(error)
                self.watcher.fall_back_to_polling(error)

    def close(self) -> None:
        """End the wait. If `is_reusable` is true, another wait may use the waiter from now on."""
        watcher = self.watcher
        if self._wakes_at is not None:
            self._end_sleep()
        self._pause = 0.0
        if watcher.election is not None:
            watcher.election.remove(self)

    def arm(self, bucket: int, *, stands: bool = False) -> None:
        """Arm `bucket` before a look at the log, so that a write to it after that look ends the next sleep.

        With `stands`, do first what `stand_for_election` does.
        """
        watcher = self.watcher
        self.event_count, self._deaths, bell = watcher.event_count, watcher.deaths, watcher.bell
        if bell is not None:
            try:
                state = None
                if watcher.election is not None:
                    state = self._meet_poller(watcher.election, bell, stands=stands)
                self._bucket, self._mark = bucket, bell.arm(bucket, state)
                if self._other_buckets:
                    self._other_marks = [bell.arm(number, state) for number in self._other_buckets]
            except OSError as error:
                raise_if_foreign(error)
                watcher.fall_back_to_polling(error)

    def _meet_poller(self, election: PollerElection, bell: Doorbell, *, stands: bool) -> bytes:
        """Read the bell of the node, make a slow poller poll faster, and stand for election if `stands` is true.

        Return what `Doorbell.read` returns. One read serves all that this wait needs to know before its look.
        """
        state = bell.read()
        if not self._has_hurried:
            self._has_hurried = True
            election.hurry(state)
        if stands:
            self._is_poller = election.try_elect(self, may_queue=False, state=state)
            if self._is_poller:  # the election has rung every key
                state = bell.read()
        return state

    def notify_node(self, buckets: Collection[int], extent: Callable[[], Extent | None] | None = None) -> None:
        """Ring the node's bell for `buckets`, which a look found changed. Only the poller of the node rings.

        `extent` returns what the look has read, for the waiters that are rung; see `shared_extent`.

        The poller then polls more quickly. It polls at the highest rate only if a waiter was armed for one of the
        buckets. Otherwise a thousand ranks that come to a barrier would make each host send a request every
        millisecond.
        """
        election = self.watcher.election
        if election is not None and buckets and election.is_poller(self):
            try:
                self._expect_news(POLL_FIRST_S if election.notify(buckets, extent) else NEWS_POLL_S)
            except OSError as error:
                raise_if_foreign(error)
                self.watcher.fall_back_to_polling(error)

    def probe_for_node(self, undead: Callable[[], list[int]], is_alive: Callable[[int], bool | None]) -> None:
        """Probe sessions for the waiters of the node, if this waiter is its poller; see `NodeProbes.probe_due`."""
        election = self.watcher.election
        if election is not None and election.is_poller(self):
            try:
                if election.probes.probe_due(undead, is_alive):
                    election.notify(range(SIZE))
            except OSError as error:
                raise_if_foreign(error)
                self.watcher.fall_back_to_polling(error)

    def is_rung(self) -> bool:
        """Return whether the log may have changed for this wait, or the wait is over.

        A ring is an event. If no event was read since the waiter was armed, then the next `block` ends at once, or no
        ring has come; neither needs a system call here.
        """
        watcher = self.watcher
        if self.is_over or self.role_changed or (self._longest_sleep and self._deaths != watcher.deaths):
            return True
        bell, election = watcher.bell, watcher.election
        if self.event_count == watcher.event_count and election is None:
            return False
        if bell is None:
            return self.event_count != watcher.event_count
        try:
            if election is None:
                is_rung = bell.is_rung
                return is_rung(self._bucket, self._mark) or any(map(is_rung, self._other_buckets, self._other_marks))
            state = bell.read()
            others = zip(self._other_buckets, self._other_marks, strict=False) if self._other_buckets else ()
            if cell(state, self._bucket) != self._mark or any(cell(state, number) != mark for number, mark in others):
                return True
            if self._is_poller:
                return election.is_hurried(self, state)
            # Looked at now that this waiter is among the sleepers: an earlier poller could not wake it.
            if election.is_vacant(state):
                self.role_changed = True
            return self.role_changed
        except OSError as error:
            raise_if_foreign(error)
            self.watcher.fall_back_to_polling(error)
            return True

    def max_sleep(self, deadline: float) -> float:
        """Return the longest time to sleep, in seconds. 0.0 means to look now, and `was_rung` then gives the reason.

        Args:
            deadline: the end of the wait, by the monotonic clock. No sleep lasts beyond it.
        """
        watcher = self.watcher
        try:
            while True:
                now = None
                if self._wakes_at is None:
                    now = system.time.monotonic()
                    self._wakes_at = self._begin_sleep(now, deadline)
                    watcher.begin_sleep(self)
                # The usual case is decided without a call: without an event or an election, only `close` ends a sleep.
                if self.event_count != watcher.event_count or self.is_over or watcher.election is not None:
                    is_rung = self.is_rung()
                else:
                    is_rung = False
                if not is_rung:
                    seconds = self._wakes_at - (system.time.monotonic() if now is None else now)
                    if seconds > 0:
                        return seconds
                watcher.end_sleep(self)
                self._wakes_at = None  # as in `_end_sleep`
                if is_rung and watcher.election is None:
                    self.was_rung = True
                    return 0.0
                if self._must_look(deadline, is_rung=is_rung):
                    return 0.0
        except OSError as error:  # only the election raises it
            self._fail(error)
            return 0.0

    def block(self, seconds: float) -> None:
        """Sleep in this thread until woken, or for `seconds`."""
        try:
            self.watcher.block(self, seconds)
        except OSError as error:
            if not self._is_beside_election:
                raise
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Change to polling, because the bell of the node failed, and look at once."""
        raise_if_foreign(error)
        self.watcher.fall_back_to_polling(error)
        if self._wakes_at is not None:
            self._end_sleep()
        self.was_rung = False

    def _begin_sleep(self, now: float, deadline: float) -> float:
        """Begin a sleep at `now`. Return the monotonic time at which it ends unless a ring comes first."""
        has_cause, self.role_changed = self.role_changed, False
        election = self.watcher.election
        self._is_beside_election = election is not None
        if election is None:
            pause = self._pause
            if not pause:
                first = DEATH_WATCH_FIRST_S if self._longest_sleep else SLOW_FIRST_S
                pause = self._pause = first if self.watcher.has_events else POLL_FIRST_S
            if not self.watcher.has_events:
                pause *= random.uniform(0.75, 1.25)  # so that many waiters do not poll at once
        else:
            was_poller = self._is_poller
            self._last_own_poll = self._last_own_poll or now  # the wait has just looked
            # A vacancy is seen by `is_rung`, once this waiter is among the sleepers, and is then the cause.
            if has_cause or was_poller or self._may_queue:
                self._is_poller = election.try_elect(self, may_queue=self._may_queue)
            if self._is_poller and not was_poller:
                # The election has rung every key, this waiter's too. A look for that ring would be a request in vain:
                # the waiter has just looked, and its first poll comes in a millisecond. A death still ends the sleep,
                # because `_deaths` stays.
                bell = self.watcher.bell
                if bell is not None:
                    state = bell.read()
                    self._mark = bell.arm(self._bucket, state)
                    self._other_marks = [bell.arm(number, state) for number in self._other_buckets]
            if self._is_poller:
                pause = self._poll_pause * random.uniform(0.75, 1.25)
            else:
                pause = SLOW_LAST_S if self._may_queue else QUEUE_AFTER_S * random.uniform(0.75, 1.25)
        return min(now + pause, deadline)

    def _end_sleep(self) -> None:
        self.watcher.end_sleep(self)
        self._wakes_at = None  # last: if a signal handler raises before this line, `close` ends the sleep again

    def _must_look(self, deadline: float, *, is_rung: bool) -> bool:
        """Return, after a sleep, whether to look at the log. Otherwise the waiter sleeps again."""
        self.was_rung = is_rung
        election = self.watcher.election
        if election is not None:
            return self._must_look_beside(election, deadline, is_rung=is_rung)
        longest = SLOW_LAST_S if self.watcher.has_events else self.watcher.poll_last
        if self._longest_sleep and self.watcher.has_events:
            longest = self._longest_sleep()
        self._pause = min(self._pause * 2, longest)
        return True

    def _expect_news(self, pause: float) -> None:
        """Poll quickly for a while, the first time after at most `pause` seconds."""
        self._poll_pause = min(self._poll_pause, pause)
        self._quick_polls = NEWS_POLLS

    def _must_look_beside(self, election: PollerElection, deadline: float, *, is_rung: bool) -> bool:
        """Return what `_must_look` returns, where one process polls for the whole node."""
        if self._is_poller:
            if not is_rung:
                longest = NEWS_POLL_S if self._quick_polls else self.watcher.poll_last
                self._quick_polls = max(self._quick_polls - 1, 0)
                self._poll_pause = min(self._poll_pause * 2, longest)
                election.heartbeat(self._poll_pause)
                return True
            if election.is_hurried(self):
                election.ack_hurry()
                self._expect_news(POLL_FIRST_S)
                self.was_rung = False
                return True
        elif not is_rung:
            # The poller is another process. As long as its heartbeat changes, it polls, and rings for each change.
            now, before = system.time.monotonic(), self._heartbeats
            if not self._may_queue and now < deadline:
                self._may_queue = True
                return False
            self._heartbeats = election.heartbeat_count()
            is_alone = self._heartbeats == before
            is_due = now - self._last_own_poll > (self._own_poll_s if self._longest_sleep else OWN_POLL_S)
            if is_due or now >= deadline or is_alone or (self._is_check_due is not None and self._is_check_due()):
                self._last_own_poll = now
                self._own_poll_s = min(4 * self._own_poll_s, OWN_POLL_S)
                return True
            return False
        return not self.role_changed
