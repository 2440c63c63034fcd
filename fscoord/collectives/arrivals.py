"""`Arrivals` records and reads which ranks have arrived at a barrier, and makes the errors that name missing ranks.

Arrivals are tokens in the value of one key. If ranks die before they arrive, a further token, a *verdict*, may name the
dead ranks. A verdict breaks the present *round* of the barrier: all ranks that have arrived raise an error, and a new
round begins. `fscoord._waiting.rounds` describes and parses the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from fscoord._arguments import (
    KEY_MAX,
    MalformedText,
    key_bytes,
    key_text,
)
from fscoord._runtime import system
from fscoord._runtime.escaping import escape_word
from fscoord._waiting.awaited import BARRIER, Awaited
from fscoord._waiting.rounds import ARRIVALS, COMPLETE, Rounds, Verdict, parse
from fscoord._waiting.timing import Backoff, SlowWaitLogger
from fscoord._waiting.wait import KEYS, ArrivalRequest, NeededRanks, WaitRequest, WaitSteps, new_tuple
from fscoord.errors import BarrierError, BrokenBarrierError, FscoordError, StoreTimeoutError, UsedBeforeError
from fscoord.store import Member, Store, how_to_run_again

MISSING_MAX = 16
"""A message names at most this many missing ranks, as in torch."""

TRACE_TIMEOUT_S = 0.05
"""How many seconds after its deadline a call may take to write its time-out token, unless `trace_timeout` is given."""

Decoder = Callable[[int], str]


class MissingRanks(NamedTuple):
    """Describes the missing ranks of a barrier or an exchange.

    Attributes:
        dead: the ranks that are known dead, as text.
        words: the end of the error message. This text begins with ``"; "``, and lists the dead and the late ranks. The
            text is empty if the store can't tell dead ranks from late ranks.
    """

    dead: tuple[str, ...]
    words: str


def describe_missing(store: Store, missing: Sequence[int], first: int = 0) -> MissingRanks:
    """Describe the ranks `missing`.

    The description adds `first` to each rank, because the ranks of a group in a tree barrier count from 0. The
    description is empty if `store` can't detect dead sessions, or fails.
    """
    if not store.has_liveness:
        return MissingRanks((), "")
    try:
        members = store.members(missing)
    except FscoordError:
        return MissingRanks((), "")
    known: dict[int, list[Member]] = {}
    for member in members:
        if member.rank is not None:
            known.setdefault(member.rank, []).append(member)
    dead = [rank for rank in missing if rank in known and all(member.alive == "no" for member in known[rank])]
    late = [rank for rank in missing if rank not in dead]
    stopped = store._stopped_sessions([member.number for member in members if member.alive != "no"])
    words = ""
    for name, ranks in (("dead", dead), ("late", late)):
        if ranks:
            near = ranks[:MISSING_MAX]
            shown = [f"rank {first + rank} ({location_of(known.get(rank, []), stopped)})" for rank in near]
            words += f"; {name}: {', '.join(shown)}{_more(ranks)}"
    return MissingRanks(tuple(str(first + rank) for rank in dead), words)


def _more(ranks: Sequence[int]) -> str:
    """Return `` and N more``, where N is the number of `ranks` beyond `MISSING_MAX`; empty if N is 0."""
    return f" and {len(ranks) - MISSING_MAX} more" if len(ranks) > MISSING_MAX else ""


def location_of(members: Sequence[Member], stopped: Collection[int] = ()) -> str:
    """Return ``host:pid`` and the state of one of `members`, the sessions of a rank.

    Take the newest session that may be alive. If all sessions are dead, take the newest session. `stopped` are the
    numbers of sessions whose processes are stopped.
    """
    if not members:
        return "not seen in this store"
    last = max(members, key=lambda member: (member.alive != "no", member.number))
    place = f"{escape_word(last.host)}:{last.pid}"
    if last.alive == "no":
        return f"{place}, {_clock('found dead at', last.found_dead)}{_clock(', registered at', last.since)}"
    if last.number in stopped:
        return f"{place}, stopped"
    return f"{place}, {'alive' if last.alive == 'yes' else 'not known whether alive'}"


def _clock(what: str, when: float | None) -> str:
    return f"{what} {system.time.strftime('%H:%M:%S', system.time.gmtime(when))} UTC" if when else "dead"


class Attempt(NamedTuple):
    """The checked arguments of one rank's call. `start` is the time when the call began. All times are in seconds."""

    prefix: bytes
    rank: int
    world_size: int
    timeout: float
    start: float
    trace_timeout: float = TRACE_TIMEOUT_S
    decoder: Decoder | None = None

    def waited(self) -> float:
        """Return how many seconds the call has taken so far."""
        return system.time.monotonic() - self.start

    def left(self) -> float:
        """Return how many seconds the call may still wait."""
        return max(0.0, self.timeout - (system.time.monotonic() - self.start))

    def trace_left(self) -> float:
        """Return how many seconds are left to find and name the missing ranks."""
        return max(0.0, self.timeout + self.trace_timeout - self.waited())

    def absent(self, came: Collection[int]) -> list[int]:
        """Return the ranks that are not in `came`, the ranks that have arrived."""
        return [rank for rank in range(self.world_size) if rank not in came]

    def time_out(
        self, what: str, missing: list[int], cause: StoreTimeoutError, store: Store, hint: str = ""
    ) -> StoreTimeoutError:
        """Return the error of a time-out. Its message begins as in torch, and then lists dead ranks and late ranks."""
        names, more = self._names(missing)
        fates = describe_missing(store, missing)
        holder = f"; {cause.holder} holds the store's lock" if cause.holder else ""
        return StoreTimeoutError(
            f"Timed out {what} on rank {self.rank}, for key prefix: {key_text(self.prefix)}"
            f" (world_size={self.world_size}, missing_ranks=[{', '.join(names)}{more}], timeout={self.timeout:g})"
            f"{hint}{fates.words}{holder}{store._closer_look()}",
            keys=cause.keys,
            missing_ranks=names,
            dead_ranks=fates.dead,
            holder=cause.holder,
            waited=self.waited(),
        )

    def broken(self, verdict: Verdict, store: Store) -> BrokenBarrierError:
        """Return the error for a round that `verdict` broke."""
        missing = self.absent(verdict.came)
        names, more = self._names(missing)
        dead = [self._named(rank) for rank in verdict.dead[:MISSING_MAX]]
        return BrokenBarrierError(
            f"Barrier broken on rank {self.rank}, for key prefix: {key_text(self.prefix)}"
            f" (world_size={self.world_size}, missing_ranks=[{', '.join(names)}{more}], dead_ranks=[{', '.join(dead)}])"
            f"{describe_missing(store, missing).words}",
            missing=names,
            dead=dead,
        )

    def _names(self, missing: list[int]) -> tuple[list[str], str]:
        return [self._named(rank) for rank in missing[:MISSING_MAX]], _more(missing)

    def data_prefix(self) -> bytes:
        """Return the prefix of the keys of the ranks' data. The number of the rank follows this prefix.

        The result is the prefix of the call. If this prefix ends in a digit or a colon, the result has a further colon.
        Without the colon, rank 0 under the prefix ``a1`` and rank 10 under the prefix ``a`` would use the same key,
        ``a10``.
        """
        ambiguous = self.prefix[-1:].isdigit() or self.prefix.endswith(b":")
        return self.prefix + b":" if ambiguous else self.prefix

    def used_before(self, store: Store) -> UsedBeforeError:
        """Return the error for a call with a prefix that was used before in `store`."""
        return UsedBeforeError(
            f"rank {self.rank} arrived at {key_text(self.prefix)!r} (world_size={self.world_size}), which has"
            f" completed: the prefix was used before, or two callers use the same rank; {how_to_run_again(store)}"
        )

    def _named(self, rank: int) -> str:
        """Return the decoder's name for `rank`, or the number of the rank if there is no decoder or no time is left."""
        if self.decoder is None or not self.trace_left():
            return str(rank)
        try:
            return str(self.decoder(rank))
        except Exception as error:  # noqa: BLE001 - the time-out matters more
            return f"{rank} (rank_tracing_decoder raised {error!r})"


class Arrivals:
    """Appends the arrival of one rank at the barrier `prefix`, and reads the arrivals of all ranks.

    Args:
        store: the store that has the arrivals.
        prefix: the prefix of the barrier's keys.
        call: the call of the rank that uses this object.

    Attributes:
        is_repeated: whether an earlier call of the rank had already arrived in this round.
    """

    is_repeated = False

    def __init__(self, store: Store, prefix: bytes, call: Attempt) -> None:
        self._store = store
        self._call = call
        self._arrivals = prefix + ARRIVALS
        self._complete = prefix + COMPLETE  # both keys have the same length, so one check is enough
        if len(self._arrivals) > KEY_MAX:
            key_bytes(self._arrivals)  # raises the error

    def request(self, *, waits: bool, all_wait: bool = True, begun: object = None) -> ArrivalRequest:
        """Return the request to append this rank's arrival. With `waits`, the request ends when all ranks have arrived.

        If the answer to the request is a text, pass the text to `settle`. For the other arguments see `ArrivalRequest`.
        """
        call = self._call
        self._store.announce_rank(call.rank)
        own, size = b"%d/%d " % (call.rank, call.world_size), call.world_size
        make, start = self._new_slow_logger, call.start
        values = (self._arrivals, own, self._complete, size, call.timeout, make, start, waits, all_wait, begun)
        return new_tuple(ArrivalRequest, values)

    def settle(self, text: bytes, *, waits: bool) -> WaitSteps[None]:
        """Finish the arrival of this rank. `text` is the answer to a `request`: the value of the key ``arrivals``.

        With `waits`, wait until all ranks have arrived.

        Raises:
            UsedBeforeError: the barrier is complete without this call. An earlier call of this rank arrived, and did
                not time out.
            BarrierError: `text` is not a list of tokens, or another rank gave another world size.
        """
        if not self._has_ended(self._parse(text)) and waits:
            slow_logger = self._new_slow_logger()
            try:
                yield WaitRequest(KEYS, [self._complete], self._call.left(), slow_logger=slow_logger)
            finally:
                slow_logger.end()

    def time_out(self, error: StoreTimeoutError) -> None:
        """Record that this rank's wait timed out with `error`, and raise the error that names the missing ranks.

        If no rank is missing, return, because the barrier is complete.
        """
        call, missing = self._call, self.record_time_out()
        if missing:
            mixed = self._store.check([call.prefix + b"/num_members"])
            hint = "; some callers gave no rank: all callers must give a rank, or none" if mixed else ""
            raise call.time_out("waiting on barrier", missing, error, self._store, hint) from None

    def _has_ended(self, rounds: Rounds) -> bool:
        """Return whether all ranks have arrived in the present round, to which this rank has added its arrival.

        This method is called only if the quick test `is_last` of `fscoord._waiting.rounds` can't tell: for example, a
        rank has arrived twice, or there is a verdict.
        """
        call, events = self._call, rounds.events
        own = max((index for index, event in enumerate(events) if event == (call.rank, True)), default=-1)
        if own < 0:  # the round of this arrival has been broken
            return False
        before = rounds.came(own)
        self.is_repeated = call.rank in before
        if len(before | {call.rank}) == call.world_size:
            self._store.set(self._complete, b"1")  # the last rank may have died before it set this key
        if len(before) == call.world_size:
            self._refuse_unless_timed_out(rounds, own)
        return len(rounds.came()) == call.world_size

    def _new_slow_logger(self, started: float | None = None) -> SlowWaitLogger:
        awaited = Awaited(BARRIER, key_text(self._call.prefix), self._call.world_size)
        return SlowWaitLogger(__name__, self._progress, started, awaited)

    def _progress(self) -> str:
        missing, size = self.missing(), self._call.world_size
        ranks = f"{', '.join(map(str, missing[:MISSING_MAX]))}{_more(missing)}"
        came = f"{size - len(missing)} of {size} arrived, missing ranks {ranks}"
        words = describe_missing(self._store, missing).words
        return f"barrier {key_text(self._call.prefix)!r} on rank {self._call.rank} ({came}{words})"

    def wait_alive(self) -> WaitSteps[None]:
        """Wait until all ranks have arrived or a missing rank is known dead. This rank must have arrived already.

        If a rank dies after its arrival, this wait does not report the death.

        Raises:
            BrokenBarrierError: a missing rank is dead. All ranks that arrived before the verdict raise the same error.
        """
        slow_logger = self._new_slow_logger()
        try:
            yield from self._wait_until_complete(slow_logger)
        finally:
            slow_logger.end()

    def _wait_until_complete(self, slow_logger: SlowWaitLogger) -> WaitSteps[None]:
        """Wait until all ranks have arrived. Raise `BrokenBarrierError` if a verdict breaks this rank's round."""
        text = self._read()
        before, own, _ = text.rpartition(b"%d/%d " % (self._call.rank, self._call.world_size))
        if not own:
            raise self._foreign(text)
        joined = len(self._parse(before).verdicts)
        dead: list[int] = []
        is_complete, backoff = False, Backoff(self._call.left())
        while True:
            rounds = self._parse(text)
            if len(rounds.verdicts) > joined:
                raise self._call.broken(rounds.verdicts[joined], self._store)
            if len(rounds.verdicts) < joined:
                raise BarrierError(
                    f"key {key_text(self._arrivals)!r} was deleted after rank {self._call.rank} had arrived; use a"
                    " different prefix for every barrier and exchange, and delete keys only when all ranks have passed"
                )
            missing = self._call.absent(rounds.came())
            if is_complete or not missing:
                return
            fatal = [rank for rank in missing if rank in dead]
            if fatal:
                self._store.append(self._arrivals, b"!%d:%s " % (joined, b",".join(b"%d" % rank for rank in fatal)))
                if not backoff.pause():  # no verdict was valid, because each time an arrival preceded the verdict
                    raise StoreTimeoutError("", keys=[key_text(self._complete)], waited=self._call.waited())
            else:
                left = self._call.left()
                needed = NeededRanks(missing, key_bytes(self._arrivals), partial(self._needed, joined))
                dead = yield WaitRequest(KEYS, [self._complete], left, ranks=needed, slow_logger=slow_logger)
                is_complete = not dead
            text = self._read()

    def _needed(self, joined: int, text: bytes) -> list[int]:
        """Return the ranks for which this rank must wait: the ranks that have not arrived. Empty if the wait is over.

        Args:
            joined: how many rounds were broken before this rank's round.
            text: the value of the key ``arrivals``.
        """
        try:
            rounds = self._parse(text)
        except BarrierError:  # the wait ends, and `wait_alive` raises the error
            return []
        return self._call.absent(rounds.came()) if len(rounds.verdicts) == joined else []

    def missing(self) -> list[int]:
        """Return the ranks that have not arrived."""
        return self._call.absent(self._parse(self._read()).came())

    def record_time_out(self, *, is_over: bool = True) -> list[int]:
        """Record that this rank's wait has timed out, and return the ranks that have not arrived.

        If a rank is missing, append this rank's time-out token. If no rank is missing, set the key ``complete``,
        because the last rank has not set the key yet. `is_over` is False in a tree barrier, where a further wait
        follows the arrivals. Then the token is appended even if no rank is missing. The write takes at most
        `Attempt.trace_left` seconds.
        """
        missing, call = self.missing(), self._call
        try:
            if missing or not is_over:
                token = b"-%d/%d " % (call.rank, call.world_size)
                self._store._write_within(call.trace_left(), self._arrivals, token, appends=True)
            else:
                self._store._write_within(call.trace_left(), self._complete, b"1", appends=False)
        except FscoordError:
            pass  # the caller raises its time-out; without the token, a later call of this rank may be refused
        return missing

    def refuse_if_finished(self, data_key: bytes) -> None:
        """Raise `UsedBeforeError` if this rank has passed before, or if other ranks passed without this rank's data.

        Args:
            data_key: the key with the data of this rank.
        """
        rounds = self._parse(self._read())
        if (self._call.rank, True) in rounds.events:
            self._refuse_unless_timed_out(rounds)
        elif rounds.events and not self._store.check([data_key]):
            raise self._call.used_before(self._store)

    def _refuse_unless_timed_out(self, rounds: Rounds, end: int | None = None) -> None:
        if [came for rank, came in rounds.events[:end] if rank == self._call.rank][-1]:
            raise self._call.used_before(self._store)

    def _read(self) -> bytes:
        return self._store.get(self._arrivals, default=b"")

    def _parse(self, text: bytes) -> Rounds:
        """Parse `text`, the value of ``{prefix}/arrivals``.

        Raises:
            BarrierError: `text` is not a list of tokens, or another rank gave another world size.
        """
        try:
            rounds = parse(text)
        except MalformedText as error:
            raise self._foreign(error.args[0]) from None
        for theirs, rank in rounds.world_sizes.items():
            if theirs != self._call.world_size:
                raise BarrierError(
                    f"rank {rank} called {key_text(self._call.prefix)!r} with world_size={theirs}, and rank"
                    f" {self._call.rank} with world_size={self._call.world_size}: all ranks must give the same"
                    " world_size, and every barrier and exchange needs a different prefix"
                )
        return rounds

    def _foreign(self, text: bytes) -> BarrierError:
        return BarrierError(
            f"key {key_text(self._arrivals)!r} holds {text[:40]!r}, which is not an arrival: another program wrote"
            " it; use a different prefix for every barrier and exchange"
        )
