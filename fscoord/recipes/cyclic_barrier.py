"""`CyclicBarrier`: a number of processes without ranks wait for each other, again and again."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Final

from fscoord._arguments import Key, Timeout, check_positive, key_bytes, refuse_copies, to_seconds
from fscoord._runtime import system
from fscoord._waiting.awaited import CYCLIC_BARRIER
from fscoord._waiting.wait import WaitSteps
from fscoord.errors import BrokenBarrierError, FscoordError
from fscoord.recipes._cleanup import Undoable, undone_by
from fscoord.recipes._entry import NO_LEASE, Entry
from fscoord.recipes._line import Line
from fscoord.store import Store, needed_store, shown

BROKEN: Final = "broken"
"""The id of the last entry in the line of a broken barrier. The entry belongs to no process and is never served."""

REASONS: Final = {
    "death": "died while it waited",
    "time-out": "waited for as long as its timeout",
    "interrupt": "was interrupted while it waited",
    "abort": "called abort()",
    "reset": "called reset()",
}
"""The mode of an entry whose round was broken, and what the process in its `owner` did. The mode of an entry whose
round was not broken is ``index/parties``."""


def _is_waiting(entry: Entry) -> bool:
    return not entry.token and entry.mode not in REASONS


def _passing(parties: int, entries: list[Entry]) -> int:
    """The `Policy` of a barrier: serve the waiters when all are there, or when their round is broken."""
    ended = sum(1 for _ in takewhile(lambda entry: not _is_waiting(entry) and entry.id != BROKEN, entries))
    return ended + (parties if sum(map(_is_waiting, entries)) >= parties else 0)


class _Arrivals(Line):
    """The line of the processes that have arrived at a `CyclicBarrier`. A process is served when it may go on."""

    _refuses = True

    def __init__(self, store: Store, name: Key, parties: int) -> None:
        super().__init__(store, name, partial(_passing, parties))
        self._parties = parties

    def broken_error(self, entry: Entry) -> BrokenBarrierError:
        """Return the error for `entry`, whose mode is the reason."""
        return BrokenBarrierError(
            f"the barrier {self.name!r} is broken: {entry.owner} {REASONS[entry.mode]}"
            + ("" if entry.mode == "reset" else "; call reset() before the next round")
        )

    def break_round(self, reason: str) -> None:
        """Make all waiters raise an error, because this process did `reason`. A "reset" leaves nothing `BROKEN`."""
        me, unwanted = system.process_name(), BROKEN if reason == "reset" else ""
        self._change(lambda entries: [each for each in _broken(entries, reason, me) if each.id != unwanted])

    def fail(self, names: set[str], reason: str, owner: str, *, removes: bool = True) -> list[Entry]:
        """If an entry of `names` waits, break the round, because `owner` did `reason`. Then remove these entries."""

        def failed(entries: list[Entry]) -> list[Entry]:
            if [entry for entry in entries if entry.id in names and _is_waiting(entry)]:
                entries = _broken(entries, reason, owner)
            return [entry for entry in entries if entry.id not in names] if removes else entries

        return self._change(failed)

    def _appended(self, entries: list[Entry], new: Entry) -> list[Entry]:
        waiting = [entry for entry in entries if _is_waiting(entry)]
        if entries and entries[-1].id == BROKEN:
            raise self.broken_error(entries[-1])
        if waiting and waiting[0].mode != f"0/{self._parties}":
            theirs = f"{waiting[0].mode.partition('/')[2]} for {waiting[0].owner}"
            raise ValueError(
                f"the barrier {self.name!r} has parties={self._parties} here and {theirs}: all must give the same"
            )
        # The process of a served entry may have died before it left. No waiter notices that if this call is served at
        # once.
        dead = self._dead(entry for entry in entries if entry.token)
        left = [entry for entry in entries if not entry.token or entry.session not in dead]
        return [*left, new._replace(mode=f"{len(waiting)}/{self._parties}")]

    def _watched(self, entries: list[Entry], place: int) -> list[Entry]:
        return [*entries[:place], *entries[place + 1 :]]  # the death of any waiter breaks the round

    def _bury(self, suspects: list[Entry], before: float) -> bool:  # noqa: ARG002 - there are no leases
        dead = self._dead(suspects)
        gone = [entry for entry in suspects if entry.session in dead]
        if gone:
            self.fail({entry.id for entry in gone}, "death", max(gone, key=_is_waiting).owner)
        return bool(gone)

    def _give_up(self, entry: Entry) -> Entry | None:
        entries = self.fail({entry.id}, "time-out", entry.owner, removes=False)
        own = [each for each in entries if each.id == entry.id]
        return own[0] if own else None

    def _held_up(self, entry: Entry) -> str:  # noqa: ARG002 - all wait for the missing ones
        arrived = sum(map(_is_waiting, self.entries()))
        return f"the cyclic barrier {self.name!r} ({arrived} of {self._parties} have arrived)"


def _broken(entries: list[Entry], reason: str, owner: str) -> list[Entry]:
    """Return `entries` with all waiters marked, because the process `owner` did `reason`, and `BROKEN` at the end."""
    if entries and entries[-1].id == BROKEN:
        return entries
    marked = [each._replace(mode=reason, owner=owner) if _is_waiting(each) else each for each in entries]
    return [*marked, Entry(BROKEN, reason, 0, 0, owner, NO_LEASE)]


class CyclicBarrier(Undoable):
    """A barrier for `parties` processes without ranks, that is used again and again, like `threading.Barrier`.

    Any processes, threads or tasks may call `wait`: each call counts. If a process that waits dies, times out or is
    interrupted, the barrier is *broken*: all waiters raise `~fscoord.BrokenBarrierError`, and so do later calls, until
    a process calls `reset`. A store that can't detect deaths (`~fscoord.Store.has_liveness`) notices only the time-out.

    Args:
        store: the store that all processes share.
        name: the barrier's name in the store. Keys that begin with the name and a slash belong to the barrier.
        parties: how many calls of `wait` complete a round. All processes must pass the same number.
        timeout: how long `wait` waits, in seconds or as a `timedelta`; None means the store's timeout.

    Raises:
        ValueError: `parties` is below 1. `wait` raises a `ValueError` if a waiting process has passed another number.
    """

    __reduce__ = refuse_copies

    def __init__(self, store: Store, name: Key, parties: int, timeout: Timeout | None = None) -> None:
        self._store = needed_store(store)
        self._name = key_bytes(name)
        self._parties = check_positive("parties", parties)
        self._timeout = None if timeout is None else to_seconds(timeout)
        self._line = _Arrivals(store, name, parties)

    def __repr__(self) -> str:
        return shown(self, self._store, self._name, f"{self._parties} parties")

    @property
    def parties(self) -> int:
        """The number of calls of `wait` that complete a round."""
        return self._parties

    def n_waiting(self) -> int:
        """Return the number of calls of `wait` that wait now. A process that has just died may count."""
        return sum(map(_is_waiting, self._line.entries()))

    def is_broken(self) -> bool:
        """Return whether the barrier is broken."""
        return BROKEN in [entry.id for entry in self._line.entries()]

    @undone_by(lambda barrier, made, _: barrier._undo(made))
    def wait(self, _made: list[str], _: object, timeout: Timeout | None = None) -> WaitSteps[int]:
        """Wait until `parties` calls wait, and return the number of calls that came before in this round.

        Args:
            timeout: how long to wait, in seconds or as a `timedelta`; None means this object's `timeout`, or else the
                store's timeout.

        Raises:
            BrokenBarrierError: the barrier was broken before or meanwhile, or not all have arrived within `timeout`.
                The error says which process has broken it and how.
            LockLostError: another process took this process for dead.
        """
        limit = self._timeout if timeout is None else to_seconds(timeout)
        name = self._line.new_id()
        _made.append(name)
        arrived = found = self._line.join(name, "")
        assert arrived is not None
        if not arrived.token:
            limit = to_seconds(self._store.timeout) if limit is None else limit
            found = yield from self._line.await_turn(arrived, limit, CYCLIC_BARRIER)
        if found is None:  # removed while it gave up
            raise self._line.lost(arrived)
        self._line.leave(name)
        if found.mode in REASONS:
            raise self._line.broken_error(found)
        return int(arrived.mode.partition("/")[0])

    def abort(self) -> None:
        """Break the barrier. Example: a process can't go on, and the others must not wait for it."""
        self._line.break_round("abort")

    def reset(self) -> None:
        """Make the barrier usable again. Processes that wait now raise `~fscoord.BrokenBarrierError`."""
        self._line.break_round("reset")

    def _undo(self, made: list[str]) -> None:
        """Undo a call of `wait` that raised an error. This method may be called twice."""
        with suppress(FscoordError):  # another error is propagating
            self._line.fail(set(made), "interrupt", system.process_name())
