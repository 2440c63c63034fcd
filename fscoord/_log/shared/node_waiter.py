"""`NodeWaiter`: a waiter on a mount that hosts share. One process of a node (a host) polls the server for all waiters.

If the node's bell has failed, there is no election of a poller, and a `NodeWaiter` polls by itself like any `Waiter`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

from fscoord._log.shared.extent import Extent
from fscoord._log.shared.node_poller import QUEUE_AFTER_S, PollerElection
from fscoord._log.wakeup import watcher as sleeps
from fscoord._log.wakeup.doorbell import SIZE, Doorbell, cell
from fscoord._log.wakeup.watcher import ChangeWatcher, Waiter
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

NEWS_POLL_S = 0.04
NEWS_POLLS = 25
"""`NEWS_POLL_S`: the longest pause between two quick polls, in seconds. `NEWS_POLLS`: how many quick polls the poller
makes after the log has changed. The beginning of a wait counts as a change, because the process that waits has usually
just written."""
OWN_POLL_S = 10.0
"""How often a waiter polls by itself although another process is the poller, in seconds."""


class NodeWaiter(Waiter):
    """A `Waiter` that takes part in the election of the node's poller.

    Args:
        watcher: wakes this waiter.
        election: the election of the node's poller.
        longest_sleep: as in `Waiter`.
        other_buckets: as in `Waiter`.
        is_check_due: a function that returns whether a session seems dead or was not probed lately. If so, this waiter
            reads the log although another process is the poller. The function also shows a long wait to other
            processes.
    """

    _is_poller = False
    _has_hurried = False
    _may_queue = False  # whether the wait is long enough to queue for the poller's lock
    _poll_pause = sleeps.POLL_FIRST_S
    _quick_polls = NEWS_POLLS  # how many more polls are quick, unless there is news
    _heartbeats = -1
    _last_own_poll = 0.0
    # A wait with a death watch reads in the log which ranks it still needs, and their number falls. So its first own
    # poll comes sooner.
    _own_poll_s = sleeps.SLOW_LAST_S

    def __init__(
        self,
        watcher: ChangeWatcher,
        election: PollerElection,
        longest_sleep: Callable[[], float] | None = None,
        other_buckets: Sequence[int] = (),
        is_check_due: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(watcher, longest_sleep, other_buckets)
        self.is_reusable = False  # it counts the polls of its wait
        self._election = election
        self._is_check_due = is_check_due
        election.add(self)

    @property
    def _is_beside_election(self) -> bool:
        """Whether this waiter takes part in an election. After a failure of the node's bell, it does not."""
        return self.watcher.election is not None

    def stand_for_election(self) -> None:
        """If there is no poller, become the poller now. Without this call, the waiter tries only at its next sleep.

        A new poller rings every bucket. This ring makes each armed waiter read the log for nothing. So a waiter that
        first writes and then sleeps calls this method before it arms. If many waiters begin at once, most of them are
        not armed yet at the ring.
        """
        if self._is_beside_election:
            try:
                self._is_poller = self._election.try_elect(self, may_queue=False)
            except OSError as error:
                self.fail(error)

    def close(self) -> None:
        """End the wait. If this waiter is the poller, another waiter becomes the poller."""
        super().close()
        self._election.remove(self)

    def arm(self, bucket: int) -> None:
        """Arm `bucket`. The first call also asks the poller to poll faster."""
        bell = self.watcher.bell
        if not self._is_beside_election or bell is None:
            super().arm(bucket)
            return
        self.event_count, self._deaths = self.watcher.event_count, self.watcher.deaths
        try:
            state = bell.read()  # one read serves all that this wait needs to know before its look
            if not self._has_hurried:
                self._has_hurried = True
                self._election.hurry(state)
            self._bucket = bucket
            self._arm_by(bell, state)
        except OSError as error:
            self.fail(error)

    def _arm_by(self, bell: Doorbell, state: bytes) -> None:
        self._mark = bell.arm(self._bucket, state)
        self._other_marks = [bell.arm(number, state) for number in self._other_buckets]

    def notify_node(self, buckets: Collection[int], extent: Extent | None = None) -> None:
        """Ring the node's bell for the changed `buckets`. Do nothing if this waiter is not the node's poller.

        `extent` has the bytes that the caller has read. Waiters that wake apply these bytes (see the module `extent`).
        The poller then polls faster. It polls at the highest rate only if a waiter was armed for one of the buckets.
        Otherwise, while a thousand ranks arrive at a barrier, each host would send a request every millisecond.
        """
        if buckets and self._is_beside_election and self._election.is_poller(self):
            try:
                self._expect_news(sleeps.POLL_FIRST_S if self._election.notify(buckets, extent) else NEWS_POLL_S)
            except OSError as error:
                self.fail(error)

    def probe_for_node(self, undead: Callable[[], list[int]], is_alive: Callable[[int], bool | None]) -> None:
        """If this waiter is the poller, probe the sessions that the node's waiters need; see `NodeProbes.probe_due`."""
        if self._is_beside_election and self._election.is_poller(self):
            try:
                if self._election.probes.probe_due(undead, is_alive):
                    self._election.notify(range(SIZE))
            except OSError as error:
                self.fail(error)

    def is_rung(self) -> bool:
        """Return whether the caller must read the log again, or this waiter must check whether it is the poller now."""
        bell = self.watcher.bell
        if not self._is_beside_election or bell is None or self.role_changed:
            return self.role_changed or super().is_rung()
        if self.is_over or (self._longest_sleep and self._deaths != self.watcher.deaths):
            return True
        try:
            state = bell.read()
            others = zip(self._other_buckets, self._other_marks, strict=False) if self._other_buckets else ()
            if cell(state, self._bucket) != self._mark or any(cell(state, number) != mark for number, mark in others):
                return True
            if self._is_poller:
                return self._election.is_hurried(self, state)
            # This waiter is among the sleepers now. Check the vacancy, because an earlier poller could not wake it.
            if self._election.is_vacant(state):
                self.role_changed = True
            return self.role_changed
        except OSError as error:
            raise_if_foreign(error)
            self.watcher.fall_back_to_polling(error)
            return True

    def max_sleep(self, deadline: float) -> float:
        watcher = self.watcher
        try:
            while self._is_beside_election:
                if self._wakes_at is None:
                    self._wakes_at = self._begin_sleep(system.time.monotonic(), deadline)
                    watcher.begin_sleep(self)
                self.was_rung = self.is_rung()
                seconds = self._wakes_at - system.time.monotonic()
                if not self.was_rung and seconds > 0:
                    return seconds
                watcher.end_sleep(self)
                self._wakes_at = None  # as in `Waiter.max_sleep`
                if self._must_look(deadline):
                    return 0.0
        except OSError as error:
            self.fail(error)
            return 0.0
        return super().max_sleep(deadline)

    def fail(self, error: OSError) -> None:
        """Change to polling, because the node's bell failed with `error`. The next `max_sleep` polls at once."""
        raise_if_foreign(error)
        self.watcher.fall_back_to_polling(error)
        if self._wakes_at is not None:
            self.watcher.end_sleep(self)
            self._wakes_at = None
        self.was_rung = False

    def _begin_sleep(self, now: float, deadline: float) -> float:
        """Begin a sleep at `now`. Return when it ends if there is no ring (monotonic, in seconds)."""
        has_cause, self.role_changed = self.role_changed, False
        was_poller, bell = self._is_poller, self.watcher.bell
        self._last_own_poll = self._last_own_poll or now  # the wait has just looked
        # `is_rung` detects a vacancy when this waiter is among the sleepers, and then sets `role_changed`.
        if has_cause or was_poller or self._may_queue:
            self._is_poller = self._election.try_elect(self, may_queue=self._may_queue)
        if self._is_poller and not was_poller and bell is not None:
            # The election has rung every bucket. Arm again, so that this ring does not end the sleep: the waiter has
            # just read the log, and its first poll comes in a millisecond. A death still ends the sleep, because
            # `_deaths` stays.
            self._arm_by(bell, bell.read())
        if self._is_poller:
            pause = self._poll_pause * random.uniform(0.75, 1.25)
        else:
            pause = sleeps.SLOW_LAST_S if self._may_queue else QUEUE_AFTER_S * random.uniform(0.75, 1.25)
        return min(now + pause, deadline)

    def _expect_news(self, pause: float) -> None:
        """Poll quickly for the next `NEWS_POLLS` polls. Make the first of these polls after at most `pause` seconds."""
        self._poll_pause = min(self._poll_pause, pause)
        self._quick_polls = NEWS_POLLS

    def _must_look(self, deadline: float) -> bool:
        """Return, after a sleep, whether to read the log. If not, the waiter sleeps again."""
        if self._is_poller:
            if not self.was_rung:
                longest = NEWS_POLL_S if self._quick_polls else self.watcher.poll_last
                self._quick_polls = max(self._quick_polls - 1, 0)
                self._poll_pause = min(self._poll_pause * 2, longest)
                self._election.heartbeat(self._poll_pause)
                return True
            if self._election.is_hurried(self):
                self._election.ack_hurry()
                self._expect_news(sleeps.POLL_FIRST_S)
                self.was_rung = False
                return True
        elif not self.was_rung:
            # The poller is another process. As long as its heartbeat changes, it polls, and rings for each change.
            now, before = system.time.monotonic(), self._heartbeats
            if not self._may_queue and now < deadline:
                self._may_queue = True
                return False
            self._heartbeats = self._election.heartbeat_count()
            is_alone = self._heartbeats == before
            is_due = now - self._last_own_poll > (self._own_poll_s if self._longest_sleep else OWN_POLL_S)
            if is_due or now >= deadline or is_alone or (self._is_check_due is not None and self._is_check_due()):
                self._last_own_poll = now
                self._own_poll_s = min(4 * self._own_poll_s, OWN_POLL_S)
                return True
            return False
        return not self.role_changed
