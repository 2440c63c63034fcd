"""`Election`: one candidate leads, the other candidates wait, and every process can find out which candidate leads."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import suppress
from typing import NamedTuple

from fscoord._arguments import Key, MalformedText, Timeout, Value, key_bytes, parse_uint63, to_seconds, value_bytes
from fscoord._runtime import tracing
from fscoord._waiting.awaited import ELECTION, LEADER, Awaited
from fscoord._waiting.wait import WaitSteps
from fscoord.errors import FscoordError
from fscoord.recipes._cleanup import in_steps
from fscoord.recipes._entry import Entry
from fscoord.recipes._hold import Exclusive, HeldEntry, acquiring, releasing
from fscoord.recipes._look import Unchanged, look_again
from fscoord.store import Store, begin_span


class Leader(NamedTuple):
    """The leader of an `Election` in one term.

    Attributes:
        term: the number of the term, a fencing token that rises with each leader.
        owner: the leader's process, ``host:pid``.
        data: the data that the leader publishes, such as its address.
    """

    term: int
    owner: str
    data: bytes


class Election(Exclusive):
    """A candidate in a leader election. The first candidate in line leads, until it resigns or dies.

    An election is a `fscoord.recipes.Lock` whose holder publishes data. `campaign` acquires the lock, `resign` releases
    the lock, and `term` is the fencing token. An election has all guarantees and errors of a lock. A ``with`` statement
    campaigns at its beginning and resigns at its end. The methods have the names of etcd's ``concurrency.Election``.

    Args:
        store: the store that all candidates and observers share.
        name: the election's name in the store. Keys that begin with the name and a slash belong to the election.
        data: the data that this candidate publishes when it leads.
        timeout: how long ``with`` waits, in seconds or as a `timedelta`; None means the store's timeout.
        ttl, label, auto_renew: as for `fscoord.recipes.Lock`.
    """

    _what = "the leadership of"
    _kind = ELECTION
    _span_kind = "election"

    def __init__(
        self,
        store: Store,
        name: Key,
        data: Value = b"",
        timeout: Timeout | None = None,
        ttl: Timeout | None = None,
        *,
        label: str = "",
        auto_renew: bool = True,
    ) -> None:
        self._data = value_bytes(data)
        self._terms = key_bytes(name) + b"/term/"
        super().__init__(store, name, timeout, ttl, label=label, auto_renew=auto_renew)

    @acquiring
    def campaign(self, _got: list[str], _here: object, timeout: Timeout | None = math.inf) -> bool | WaitSteps[bool]:
        """Wait in line until this candidate leads. Return False if this candidate does not lead within the timeout.

        Args:
            timeout: how long to wait, in seconds or as a `timedelta`; by default without limit. None means this
                object's `timeout`, or else the store's timeout.

        Raises:
            LockLostError: another process removed this candidate from the line.
        """
        return self._acquire(_got, _here, True, None if timeout is None else to_seconds(timeout))

    @releasing
    def resign(self, gone: list[HeldEntry | str], here: object) -> None:
        """Stop leading. The next candidate in line becomes the leader.

        Raises:
            RuntimeError: this candidate does not lead.
            LockLostError: this candidate lost the leadership before, because another process took the candidate for
                dead.
        """
        self._release_one(gone, here)

    @property
    def term(self) -> int:
        """The term in which this candidate leads: its fencing `token`."""
        return self.token

    def leader(self) -> Leader | None:
        """Return the leader, or None if there is none.

        The result is also None if the leader is known dead, or has not published its term yet.
        """
        leading = [entry for entry in self._line.living() if entry.token]  # no generator: see `_line._served`
        if not leading:
            return None
        first = leading[0]
        data = self._store.get(self._term_key(first.token), default=None)
        return None if data is None else Leader(first.token, first.owner, data)

    @in_steps
    def observe(self, after: int = 0, timeout: Timeout | None = None) -> WaitSteps[Leader]:
        """Wait for a leader of a later term than `after`, and return the leader.

        Args:
            after: the last term that the caller has seen; 0 before the first.
            timeout: how long to wait, in seconds or as a `timedelta`; None means the store's timeout.

        Raises:
            StoreTimeoutError: no candidate led in a later term within the timeout.
        """
        limit = to_seconds(self._store.timeout if timeout is None else timeout)

        def look() -> Leader | Unchanged:
            # `coming` is the term that is published next: the present leader's term if its key does not exist yet,
            # else the next term. It is determined before the leader is read, so no publication is missed.
            last = self._line.last_token()
            coming = last if last > after and not self._store.check([self._term_key(last)]) else last + 1
            found = self.leader()
            if found and found.term > after:
                return found
            term = f" in a later term than {after}" if after else ""
            waited = f", and none was elected within {limit:g} s" if limit else ""
            return Unchanged([self._term_key(coming)], f"{self.name!r} has no leader{term}{waited}")

        words = f"a leader of {self.name!r} in a later term than {after}"
        steps = look_again(self._store, Awaited(LEADER, self.name), words, limit, look)
        span = begin_span("observe", self._store, key_bytes(self.name), None, "after", after)
        return tracing.record_steps(span, steps, lambda leader: ("token", leader.term, "by", leader.owner))

    def watch(self, timeout: Timeout | None = math.inf) -> Generator[Leader, None, None]:
        """Yield the present leader and then each new leader, without end.

        Args:
            timeout: how long to wait for each leader, in seconds or as a `timedelta`; by default without limit. None
                means the store's timeout.

        Raises:
            StoreTimeoutError: no other candidate began to lead within the timeout.
        """
        term = 0
        while True:
            leader = self.observe(term, timeout)
            term = leader.term
            yield leader

    def _begin(self, served: Entry) -> None:
        own = self._term_key(served.token)
        self._store.set(own, self._data)
        # Delete the keys of all earlier terms: an earlier leader may have died before it deleted older keys.
        for key in map(key_bytes, self._store.list_keys(self._terms)):
            with suppress(MalformedText):  # not the key of a term
                if parse_uint63(key[len(self._terms) :]) < served.token:
                    self._store.delete_key(key)
        if not self._line.still_holds(served):  # then the next leader may have listed these keys already
            self._store.delete_key(own)
            raise self._line.lost(served)

    def _undo(self, got: list[str]) -> None:
        for held in [held for held in list(self._held) if held.entry.id in got]:
            with suppress(FscoordError):
                self._store.delete_key(self._term_key(held.entry.token))
        super()._undo(got)

    def _term_key(self, term: int) -> bytes:
        return self._terms + b"%d" % term
