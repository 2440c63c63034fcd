"""One wait, of a thread or a task: how long it sleeps between looks at the log, and what ends a sleep early."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

from fscoord._log.wakeup.node_poller import PollerElection
from fscoord._log.wakeup.watcher import Watch
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._waiting.parking import Naps

__all__ = ["Ticket"]

SLOW_FIRST_S, SLOW_LAST_S = 0.1, 1.0
POLL_FIRST_S = 0.001
VIGIL_FIRST_S = 0.005
OWN_LOOK_S = 10.0
"""How long to believe another process of the node that there is nothing new."""


class Ticket:
    """One wait, from its first look at the log to its last.

    With a `vigil` the death of a watched process ends its sleeps, too, and that returns how long they may be at most.
    So do rings for the buckets `others`, beside that for which it is armed.
    """

    def __init__(self, watch: Watch, vigil: Callable[[], float] | None = None, others: Sequence[int] = ()) -> None:
        self._watch = watch
        self._vigil = vigil
        self._others = others
        self._other_marks: list[bytes] = []
        self._deaths = watch.deaths
        self._bucket = 0
        self._mark = b""
        self._heard = watch.heard
        self._pause = VIGIL_FIRST_S if vigil and watch.hears else SLOW_FIRST_S if watch.hears else POLL_FIRST_S
        self.wake = watch.sleepers.new_wake()
        self.is_over = False
        self.is_called = False
        self._pace = POLL_FIRST_S
        self._beats = -1
        self._own_look = system.time.monotonic()
        self._join()

    def _join(self) -> None:
        post = self._watch.post
        if post is not None:
            try:
                post.add(self)
            except OSError as error:
                raise_if_foreign(error)
                self._watch.lose_bell(error)

    def leave(self) -> None:
        """The wait is over."""
        post = self._watch.post
        if post is not None:
            post.remove(self)

    def pass_on(self, buckets: Collection[int]) -> None:
        """After a look that brought news for `buckets`: who asks for the whole node rings for them."""
        post = self._watch.post
        if post is not None and buckets and post.is_poller(self):
            try:
                if post.notify(buckets):
                    self._pace = POLL_FIRST_S
            except OSError as error:
                raise_if_foreign(error)
                self._watch.lose_bell(error)

    def arm(self, number: int) -> None:
        """Before a look at the log: what is written to bucket `number` after that look ends the next `sleep`."""
        self._heard, self._deaths = self._watch.heard, self._watch.deaths
        bell = self._watch.bell
        if bell is not None:
            try:
                self._bucket, self._mark = number, bell.arm(number)
                if self._others:
                    self._other_marks = list(map(bell.arm, self._others))
            except OSError as error:
                raise_if_foreign(error)
                self._watch.lose_bell(error)

    def is_rung(self) -> bool:
        """Whether the log may have news for this wait, or the wait is over."""
        bell = self._watch.bell
        if self.is_over or self.is_called or (self._vigil and self._deaths != self._watch.deaths):
            return True
        if bell is None:
            return self._heard != self._watch.heard
        try:
            post = self._watch.post
            return (
                bell.is_rung(self._bucket, self._mark)
                or (post is not None and post.is_hurried(self))
                or any(map(bell.is_rung, self._others, self._other_marks))
            )
        except OSError as error:
            raise_if_foreign(error)
            self._watch.lose_bell(error)
            return True

    def sleep(self, left: float) -> Naps[bool]:
        """Sleep until the log may have changed, at most `left` seconds; False when it was only time for a poll."""
        post = self._watch.post
        if post is not None:
            try:
                return (yield from self._sleep_beside(post, system.time.monotonic() + left))
            except OSError as error:
                raise_if_foreign(error)
                self._watch.lose_bell(error)
                return False
        pause = min(self._pause, left)
        if not self._watch.hears:
            pause = min(pause * random.uniform(0.75, 1.25), left)
        if (yield from self._watch.sleep(self, system.time.monotonic() + pause)):
            return True
        longest = SLOW_LAST_S if self._watch.hears else self._watch.poll_last
        if self._vigil and self._watch.hears:
            longest = self._vigil()
        self._pause = min(self._pause * 2, longest)
        return False

    def _sleep_beside(self, post: PollerElection, until: float) -> Naps[bool]:
        """As `sleep`, where one asks the server for all of the node: this one if the post falls to it."""
        while True:
            self.is_called = False
            now = system.time.monotonic()
            if post.try_elect(self):
                soon = min(until, now + self._pace * random.uniform(0.75, 1.25))
                if not (yield from self._watch.sleep(self, soon)):
                    self._pace = min(self._pace * 2, self._watch.poll_last)
                    post.heartbeat(self._pace)
                    return False
                if post.is_hurried(self):
                    post.ack_hurry()
                    self._pace = POLL_FIRST_S
                    return False
            elif not (yield from self._watch.sleep(self, min(until, now + SLOW_LAST_S))):
                now, beats, known = system.time.monotonic(), post.heartbeat_count(), self._beats
                self._beats = beats
                if self._vigil or now >= until or beats == known or now - self._own_look > OWN_LOOK_S:
                    self._own_look = now
                    return False
                continue
            if not self.is_called:
                return True
