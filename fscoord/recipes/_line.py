"""A line: processes that wait for a recipe, in the order in which they came, and are woken one by one.

The whole line is one value of the store, changed by compare-and-set alone. So no reader sees a line that is half
changed, and its order is that of the store. A policy says how many entries at the head of the line are served at once.
An entry that is served gets a *token*, a number that only rises, also while the line is empty. A process that finds
the line empty enters it as served, by one write, and leaves it by another. The second write overtakes no entry, because
it succeeds only on the value in which there was no other.

The process that changes the line serves the entries whose turn has come in the same write. Then it sets a key for each
of them, for which the process of that entry alone waits. Each waiting process also watches the session of the entry
before its own. If that session is dead, the process removes the entry. A process that dies between serving the next
entry and waking it is the one before that entry, and so delays it by no more than a death is noticed. If several
entries were served at once, the others read the line again after `SLOW_LOOK_S`. The order of arrival, and the watch on
the predecessor alone, are those of ZooKeeper's lock recipe. Here the queue can be one value, because a value changes by
compare-and-set, which costs one write.

No wake key outlives its use, at whatever moment a process dies. The write that serves an entry also records in the line
which process is about to set its key. That record stays until the key was seen and deleted, or the setter is dead, or
the setter has recorded that it is done. Each change of the line removes what is due of entries that have left.

The value is text: the last token, a stamp that differs in every write, by which a writer recognises its own, and the
wake-ups that are under way; then a line for each `~fscoord.recipes._entry.Entry`.

`force_release` removes entries of other processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count, takewhile
from typing import Final

from fscoord._arguments import Key, MalformedText, check_positive, key_bytes, key_text, parse_uint63
from fscoord._runtime import system
from fscoord._waiting.timing import FREE_TRIES, SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps
from fscoord.errors import FscoordError, LockLostError, StoreTimeoutError
from fscoord.recipes._entry import ID_MAX, NO_LEASE, Entry, State, WakeUp, format_line, parse_line, with_new_sign
from fscoord.recipes._keys import Refusals, RefusedError, foreign_value_error
from fscoord.recipes._lease import LeaseMonitor, check_interval
from fscoord.store import Store

__all__ = ["Entry", "Line", "force_release", "not_acquired"]


SLOW_LOOK_S: Final = 1.0
"""How often one who waits looks by itself: somebody may have died after serving us and before waking us."""

_waking: set[str] = set()
"""Whose wake keys this process is about to set."""

_entry = tuple.__new__  # makes an `Entry` in half of the time that its own constructor takes

Policy = Callable[[list["Entry"]], int]
"""How many of the first of these are served at once; one who is alone always is."""


class Line:
    """The line `name` in `store`; `policy` is given the entries and returns how many of the first are served.

    With a `ttl` who is served here must be renewed again and again, or else is taken out after so many seconds.
    """

    def __init__(self, store: Store, name: Key, policy: Policy, ttl: float = 0.0) -> None:
        self.name = key_text(key_bytes(name))
        self._store = store
        self._prefix = key_bytes(name)
        self._key = self._prefix + b"/line"
        self._policy = policy
        self._lease = f"{ttl}:0" if ttl else NO_LEASE
        self._signs = LeaseMonitor()
        self._text: bytes | None = None  # the line as it was seen last: the first guess of the next change
        self._alone = ("", b"", b"")  # who of us was alone in line, the line then, and the one without it
        self._free = (b"", 0)  # a line that nobody is in, and its last token
        self._cleared: set[str] = set()  # whose wake keys it has deleted: they will not come again
        self._me: tuple[int, str, str, Iterator[int]] = (0, "", "", count())
        self._tail = (-1, "")  # a session, and what stands behind the token in a line of ours
        self._wake_key("0" * ID_MAX)  # a name that is too long fails here

    def entries(self) -> list[Entry]:
        """Return who is in line, first come first."""
        return self._parse(self._read()).entries

    def living(self) -> list[Entry]:
        """Return who is in line and not known dead: of the dead each is taken out by whoever comes next."""
        entries = self.entries()
        dead = self._dead(entries)
        return [entry for entry in entries if entry.session not in dead]

    def last_token(self) -> int:
        """Return the last token that was given; the next one is one more."""
        return self._parse(self._read()).last

    def new_id(self) -> str:
        """Return the id of an entry that is not in line yet."""
        life, _, start, numbers = self._me
        if life != system.process_epoch():  # also in a forked child, whose ids must not be its parent's
            start, numbers = system.random_bytes(7).hex(), count()
            self._me = system.process_epoch(), system.process_name(), start, numbers
            self._tail = -1, ""
        return f"{start}{next(numbers):x}"

    def take_free(self, name: str, mode: str) -> Entry | None:
        """Enter the line as `name`, served, if nobody is in it; None if somebody is, or was when it was seen last."""
        text, session, (known, tail), (free, token) = self._text, self._store.register(), self._tail, self._free
        if known != session:
            tail = f" {session} {self._me[1]} {self._lease}"
            self._tail = session, tail
        for _ in range(FREE_TRIES):  # after so many refusals `join` tries on, with pauses and a limit in time
            if text is None or text.count(b" ") != 1:  # somebody is in line, or a wake-up is under way
                return None
            if text is not free:
                try:
                    token = parse_uint63(text.partition(b" ")[0])
                except MalformedText:  # no line of ours: to be read, and complained of, by `join`
                    return None
            token += 1
            head = f"{token} {name}"
            new = f"{head}\n{name} {mode} {token}{tail}".encode()
            found = self._store.compare_set(self._key, text, new)
            if found == new:
                free = head.encode()
                self._alone, self._free, self._text = (name, new, free), (free, token), new
                return _entry(Entry, (name, mode, token, session, self._me[1], self._lease))
            self._text = text = found if found != text else None  # as expected and not changed: the key was deleted
        return None

    def join(self, name: str, mode: str, *, only_if_served: bool = False, limit: float = math.inf) -> Entry | None:
        """Let `name` join the line's end and return its entry: served already if its token is not 0.

        With `only_if_served` change nothing and return None if it would have to wait; or if others change the line
        before each try for `limit` seconds, where these are less than the store's timeout.
        """
        new = Entry(name, mode, 0, self._store.register(), self._me[1], self._lease)
        end = system.time.monotonic() + limit
        refusals = Refusals(self._store, self._key, end)
        try:
            while True:
                before = system.time.monotonic()
                entries = self._change(lambda entries: [*entries, new], name if only_if_served else None, end)
                if entries[-1:] and entries[-1].id == name:
                    return entries[-1]
                if not self._bury(entries, before):
                    return None
                refusals.add()
        except RefusedError:
            if system.time.monotonic() < end:
                raise
            return None

    def leave(self, name: str) -> bool:
        """Take `name` out, and serve whoever comes next; return whether it was still there."""
        alone, text, new = self._alone
        if alone == name:
            found = self._store.compare_set(self._key, text, new)
            if found == new:
                self._text = new
                return True
            self._text = found if found != text else None
        was_there = False

        def without(entries: list[Entry]) -> list[Entry]:
            nonlocal was_there
            rest = [other for other in entries if other.id != name]
            was_there = len(rest) < len(entries)
            return rest

        self._change(without)
        return was_there

    def leave_quietly(self, name: str) -> None:
        """Do as `leave`, on the way out with another error."""
        with suppress(FscoordError):
            self.leave(name)

    def await_turn(self, entry: Entry, timeout: float) -> WaitSteps[Entry | None]:
        """Wait until `entry` is served and return it, served; or, if the time runs out, take it out and return None.

        Raises:
            LockLostError: somebody took it out.
        """
        end, slow_logger = system.time.monotonic() + timeout, SlowWaitLogger(__name__, lambda: self._held_up(entry))
        wake = [self._wake_key(entry.id)]
        is_rung = is_last = False
        while True:
            before = system.time.monotonic()
            self._text = self._read()
            entries = self._parse(self._text).entries
            names = [other.id for other in entries]
            if entry.id not in names:
                raise self.lost(entry)
            place = names.index(entry.id)
            if entries[place].token:
                return entries[place]
            if is_rung:  # by something else than a line; it would ring for ever
                self._store.delete_key(wake[0])
            ahead = entries[:place]  # who is behind those who are served looks after all of them
            suspects = ahead if ahead[-1].token else ahead[-1:]
            left = end - system.time.monotonic()
            if left > 0 and self._signs.expired(suspects, before):
                self._bury(suspects, before)
                continue
            if left <= 0 and (is_last or not self._bury(ahead, before)):
                return self._give_up(entry)
            is_last = left <= 0  # some of the entries before this one were those of the dead: look once more
            is_rung = False
            with suppress(StoreTimeoutError):
                sessions = [other.session for other in suspects if other.session]
                longest = max(0.0, min(check_interval(suspects, SLOW_LOOK_S), left))
                dead = yield WaitRequest(KEYS, wake, longest, sessions=sessions, slow_logger=slow_logger)
                is_rung = not dead
                if dead:
                    self._bury(suspects, before)

    def renew(self, name: str) -> bool:
        """Let whoever waits see that `name` lives; return whether it is served still."""
        is_served = False

        def renewed(entries: list[Entry]) -> list[Entry]:
            nonlocal is_served
            is_served = bool([entry for entry in entries if entry.id == name and entry.token])
            return [with_new_sign(entry) if entry.id == name else entry for entry in entries]

        self._change(renewed)
        return is_served

    def still_holds(self, entry: Entry) -> bool:
        """Return whether `entry` is in line, served."""
        # No generator, which would be left half-way: Python drops a Ctrl-C that comes while it is thrown away.
        return bool([other for other in self.entries() if other.id == entry.id and other.token])

    def lost(self, entry: Entry) -> LockLostError:
        """Return the error for an entry that somebody took out."""
        return LockLostError(
            f"{entry.owner} is no longer in line for {self.name!r}: it was taken for dead, or somebody took it out"
        )

    def timed_out(self, what: str, timeout: float) -> StoreTimeoutError:
        """Return the error that names who is served, and how many wait."""
        entries = self.living()
        holders = [entry.owner for entry in entries if entry.token]
        return StoreTimeoutError(
            not_acquired(what, self.name, timeout, holders, len(entries) - len(holders)),
            keys=[self.name],
            holder=holders[0] if holders else None,
            waited=timeout,
        )

    def _held_up(self, entry: Entry) -> str:
        """Return the words for what `entry` waits for."""
        others = [other for other in self.living() if other.id != entry.id]
        holders = [other.owner for other in others if other.token]
        return f"a turn at {self.name!r} ({_in_line(holders, len(others) - len(holders))})"

    def _give_up(self, entry: Entry) -> Entry | None:
        """Take `entry` out, unless its turn has come at the last moment."""
        served: Entry | None = None

        def unless_served(entries: list[Entry]) -> list[Entry]:
            nonlocal served
            own = [other for other in entries if other.id == entry.id and other.token]
            served = own[0] if own else None
            return entries if served else [other for other in entries if other.id != entry.id]

        self._change(unless_served)
        return served

    def _bury(self, suspects: list[Entry], before: float) -> bool:
        """Take out those of `suspects`, read after the time `before`, whose sessions are dead, or who give no signs of
        life; return whether there were any.
        """
        dead = self._dead(suspects)
        buried = {entry.id for entry in suspects if entry.session in dead}
        silent = self._signs.expired(suspects, before)  # of whom it is asked once more, with the change
        gone = buried | {name for name, _ in silent}
        if gone:
            self._change(lambda entries: [e for e in entries if e.id not in buried and (e.id, e.lease) not in silent])
        return bool(gone)

    def _change(
        self, step: Callable[[list[Entry]], list[Entry]], or_nothing: str | None = None, end: float = math.inf
    ) -> list[Entry]:
        """Replace the entries by what `step` makes of them, serve and wake whose turn it is, and return the entries.

        With `or_nothing`, change nothing if that one would not be served. No try begins after `end`, by the monotonic
        clock; or when the store's timeout is over.
        """
        text = self._text
        fresh = text is None
        refusals = Refusals(self._store, self._key, end)
        while True:
            if text is None:
                text, fresh = self._read(), True
            state, stamp = self._parse(text), self.new_id()
            changed = step(state.entries)
            wake_ups = self._unsettled(state.wake_ups, changed)
            if changed != state.entries or wake_ups != state.wake_ups:
                knows = changed[-1].id if len(changed) > len(state.entries) else ""  # who has just joined
                new, served = self._serve(State(state.last, wake_ups, changed), knows)
                if not or_nothing or or_nothing in served:
                    found = self._replace(text, new, stamp, [name for name in served if name != knows])
                    if found is None:
                        self._cleared.difference_update(each.id for each in state.wake_ups)
                        return new.entries
                    refusals.add()
                    # If it is as expected and was not changed all the same, somebody has deleted the key.
                    text, fresh = (found, True) if found != text else (None, False)
                    continue
            if fresh:
                return state.entries
            text = None

    def _replace(self, text: bytes, state: State, stamp: str, called: list[str]) -> bytes | None:
        """Replace the line `text` by `state` and wake those who are `called`; return what is there if it is another."""
        new = format_line(state, stamp)
        _waking.update(called)
        try:
            found = self._store.compare_set(self._key, text, new)
            if found != new:
                return found
            self._text = new
            for name in called:
                self._store.set(self._wake_key(name), b"1")
        finally:
            _waking.difference_update(called)
        if called and not {entry.id for entry in self.entries()}.issuperset(called):
            self._change(list)  # who looked by itself has left already, and did not see its key
        return None

    def _unsettled(self, wake_ups: list[WakeUp], entries: list[Entry]) -> list[WakeUp]:
        """Delete the wake keys of those who are not among `entries`; return the wake-ups that are not over by that."""
        there = {entry.id for entry in entries}
        gone = [each for each in wake_ups if each.id not in there]
        if not gone:
            return wake_ups
        # In this order: who will not set a key any more, then the deletion of what it may have set before.
        dead = self._dead(gone)
        own = {self._store.register()} - {0}
        mine = {each for each in gone if (each.session in own or each.by == self._me[2]) and each.id not in _waking}
        over = mine.union([each for each in gone if each.session in dead])
        for each in gone:
            if each.id not in self._cleared and self._store.delete_key(self._wake_key(each.id)):
                self._cleared.add(each.id)  # it is set once only
        return [each for each in wake_ups if each not in over and each.id not in self._cleared]

    def _serve(self, state: State, knows: str) -> tuple[State, list[str]]:
        """Return the line when those have been served whose turn it is, and who they are.

        All but `knows`, who sees that by itself, will be woken.
        """
        last, wake_ups, entries = state.last, list(state.wake_ups), list(state.entries)
        served = []
        for index in range(self._policy(entries)):
            if not entries[index].token:
                last += 1
                entries[index] = entries[index]._replace(token=last)
                served.append(entries[index].id)
                if entries[index].id != knows:
                    wake_ups.append(WakeUp(entries[index].id, self._store.register(), self._me[2]))
        return State(last, wake_ups, entries), served

    def _dead(self, each: Iterable[Entry | WakeUp]) -> set[int]:
        """Return the sessions of these that are known dead."""
        return set(self._store.dead_sessions({one.session for one in each} - {0}))

    def _read(self) -> bytes:
        return self._store.get(self._key) if self._store.check([self._key]) else b""

    def _parse(self, text: bytes) -> State:
        try:
            return parse_line(text)
        except MalformedText as error:
            raise foreign_value_error(self._key, text, "line of waiters") from error

    def _wake_key(self, name: str) -> bytes:
        return key_bytes(self._prefix + b"/wake/" + name.encode())


def not_acquired(what: str, name: str, limit: float, holders: Sequence[str], waiting: int) -> str:
    """Return the words of a time-out: by `holders` it is held, and so many others wait for it."""
    return f"timeout: {what} {name!r} not acquired within {limit:g} s; {_in_line(holders, waiting)}"


def _in_line(holders: Sequence[str], waiting: int) -> str:
    held = f"held by {', '.join(holders)}" if holders else "held by nobody"
    others = {0: "nobody else waiting", 1: "1 other waiting"}.get(waiting, f"{waiting} others waiting")
    return f"{held}, {others}"


def force_release(store: Store, name: Key, token: int) -> bool:
    """Release the hold with the fencing token `token`, whichever process has it; the next in line gets it.

    This is for a holder that hangs, or that can't be told dead. It is not asked, and finds out only at its next
    ``check`` or ``release``, which raises `~fscoord.LockLostError`. Until then it may write at the same time as the
    next holder. Only a resource that refuses its token, such as `Fenced`, is safe from it. ``holders`` of any recipe
    returns the tokens of a name.

    Args:
        store: where the hold is.
        name: the name of a `Lock`, `RLock`, `ReadWriteLock`, `Semaphore` or `Election`, or of work under `once`.
        token: which of its holds: so it can't be another one's, who came meanwhile.

    Returns:
        Whether there was such a hold.
    """
    check_positive("token", token)
    line = Line(store, name, _admitted)
    held = [entry for entry in line.entries() if entry.token == token]
    entry = held[0] if held else None
    return entry is not None and line.leave(entry.id)


def _admitted(entries: list[Entry]) -> int:
    """Return how many of these are served: what the recipe would say that their modes are of."""
    mode = entries[0].mode if entries else ""
    if mode.isdigit():  # a semaphore's value
        return min(int(mode), len(entries))
    readers = sum(1 for _ in takewhile(lambda entry: entry.mode == "r", entries))
    return readers or min(1, len(entries))
