"""`RateLimiter`: all processes of all hosts together do something at most so many times per second."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from fscoord._arguments import Key, Timeout, check_positive, key_bytes, refuse_copies, to_seconds
from fscoord._runtime import system
from fscoord._waiting.awaited import RATE, Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps
from fscoord.errors import LockLostError, StoreTimeoutError
from fscoord.recipes._cleanup import Undoable, as_one_wait, undone_by
from fscoord.recipes._keys import change, parse_count
from fscoord.recipes.lock import Lock
from fscoord.store import Store, needed_store, shown

R = TypeVar("R", bound="RateLimiter")

TURN: Final = "t"
"""The mode of the entries. No lock has this mode, so `holdings` can tell the line of a limiter from that of a lock."""

LOOK_S: Final = 1.0
"""The longest sleep of the first process in line. It then reads the clock and the bucket again."""


class _Turn(Lock):
    """The lock of the process that takes tokens. Its line makes the limiter fair."""

    _what = "tokens of the rate limiter"
    _kind = RATE
    _mode = TURN


_acquiring: Final = undone_by(lambda limiter, got, _: limiter._turn._undo(got))


class RateLimiter(Undoable):
    """A token bucket that all processes share: it gets `rate` tokens per `per` seconds, and holds at most `burst`.

    Tokens are given out in the order of the requests. A process that dies or is interrupted while it waits takes none.
    The limiter limits how often work begins, and not how much work runs at the same time: see `Semaphore` for that. A
    ``with`` statement acquires one token at its beginning, and does nothing at its end.

    Time is the wall clock. If the clocks of two hosts differ, the bucket follows the clock that is ahead; and where the
    clock is behind, or was set back, the bucket fills only while a process waits for tokens. So no clock lets more
    tokens out than `burst` at once, and then `rate`, for each time that a clock is set forward.

    Args:
        store: the store that all processes share.
        name: the limiter's name in the store. Keys that begin with the name and a slash belong to the limiter.
        rate: how many tokens the bucket gets in `per`. All processes must pass the same `rate`, `per` and `burst`.
        per: a time, in seconds or as a `timedelta`.
        burst: the greatest number of tokens in the bucket. With 1, tokens are evenly spaced.
        ttl: as for `fscoord.recipes.Lock`: a process that is stopped while it is first in line holds up the others.
        label: as for `fscoord.recipes.Lock`.

    Raises:
        ValueError: `rate`, `per` or `burst` is not above zero, or is not finite; or `label` is too long.
    """

    __reduce__ = refuse_copies

    def __init__(
        self,
        store: Store,
        name: Key,
        rate: float,
        per: Timeout = 1.0,
        burst: int = 1,
        ttl: Timeout | None = None,
        *,
        label: str = "",
    ) -> None:
        self._store = needed_store(store)
        self._name = key_bytes(name)
        self._turn = _Turn(store, name, ttl=ttl, label=label)
        self._burst = check_positive("burst", burst)
        if not (0 < rate < math.inf and 0 < to_seconds(per, "per") < math.inf):
            raise ValueError(f"rate and per must be finite and above zero, not {rate!r} and {per!r}")
        self._interval = max(1, round(to_seconds(per) / rate * 1e9))  # from one token to the next one, in ns
        self._bucket, self._never = self._name + b"/bucket", self._name + b"/never"
        key_bytes(self._bucket)

    def __repr__(self) -> str:
        return shown(self, self._store, self._name, f"a token each {self._interval / 1e9:g} s, burst {self._burst}")

    @_acquiring
    def acquire(self, _got: list[str], _here: object, n: int = 1, timeout: Timeout | None = None) -> WaitSteps[None]:
        """Wait for `n` tokens, and take them.

        Args:
            n: how many tokens to take.
            timeout: how long to wait, in seconds or as a `timedelta`; None means the store's timeout.

        Raises:
            StoreTimeoutError: the tokens are not there within the timeout. The error comes as soon as this is certain.
                No token was taken.
            LockLostError: another process removed this process from the line before its turn. No token was taken.
            ValueError: `n` is not between 1 and `burst`.
        """
        return self._acquire(_got, _here, n, self._turn._patience() if timeout is None else to_seconds(timeout))

    @_acquiring
    def try_acquire(self, got: list[str], here: object, n: int = 1) -> WaitSteps[bool]:
        """Take `n` tokens if they are there and no other process waits for tokens. Return whether they were taken.

        Raises:
            ValueError: `n` is not between 1 and `burst`.
        """
        self._check(n)
        found = self._turn._acquire(got, here, False, None)
        if not (found if isinstance(found, bool) else (yield from found)):
            return False
        missing = self._take(n, 0)
        self._end_turn(here)
        return not missing

    @_acquiring
    def __enter__(self: R, got: list[str], here: object) -> WaitSteps[R]:  # noqa: PLE0302 - they are not given
        yield from self._acquire(got, here, 1, self._turn._patience())
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: a token is not given back."""

    def _check(self, n: int) -> None:
        if check_positive("n", n) > self._burst:
            raise ValueError(f"n={n} tokens are never in a bucket with burst={self._burst}; take fewer at a time")

    def _acquire(self, got: list[str], here: object, n: int, limit: float) -> WaitSteps[None]:
        self._check(n)
        end = system.time.monotonic() + limit
        yield from self._turn._entering(self._turn._acquire(got, here, True, limit), limit)
        if self._take(n, 0):
            awaited = Awaited(RATE, self._turn.name)
            yield from as_one_wait(awaited, lambda: f"the {awaited}", partial(self._await_tokens, n, limit, end))
        self._end_turn(here)

    def _end_turn(self, here: object) -> None:
        """Leave the line. If the turn was lost, the tokens are taken nevertheless, so that is not an error."""
        with suppress(LockLostError):
            self._turn._release_one([], here)

    def _await_tokens(self, n: int, limit: float, end: float, slow_logger: SlowWaitLogger) -> WaitSteps[None]:
        began = system.time.monotonic()
        while missing := self._take(n, int((system.time.monotonic() - began) * 1e9)):
            now = system.time.monotonic()
            if now + missing / 1e9 > end:
                raise StoreTimeoutError(
                    f"timeout: {n} of the {self._turn._what} {self._turn.name!r} would come in {missing / 1e9:.3g} s,"
                    f" after the timeout of {limit:g} s; none was taken. Use a longer timeout or a higher rate",
                    keys=[self._turn.name],
                    waited=now - end + limit,
                )
            with suppress(StoreTimeoutError):
                yield WaitRequest(KEYS, [self._never], min(LOOK_S, missing / 1e9), slow_logger=slow_logger)
                self._store.delete_key(self._never)  # another program wrote it: it would end every further sleep

    def _take(self, n: int, waited: int) -> int:
        """Take `n` tokens if they are in the bucket. Return how long it takes until they are there, in ns; 0: taken.

        The value of the bucket is the time at which it was empty, from which the time now shows how many tokens it has.
        If the clock is behind this time, the bucket has filled only for the `waited` ns since the caller is first in
        line. The value never falls. So what the clocks show can only fill the bucket once.
        """
        missing = 0

        def taken(text: bytes) -> bytes | None:
            nonlocal missing
            now = system.wall_time_ns()
            full = now - self._burst * self._interval
            empty = parse_count(self._bucket, text) if text else full
            due = max(empty, full, 0) + n * self._interval
            missing = due - max(now, empty + waited)
            return None if missing > 0 else b"%d" % due

        change(self._store, self._bucket, taken)
        return max(missing, 0)
