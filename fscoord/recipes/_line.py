"""A line: the fair wait queue of a lock, a semaphore or an election.

A line has an entry for each contender, in the order of arrival. An entry that acquires the resource is *served*: it
gets a fencing token. Tokens only rise, even if the line was empty meanwhile. A policy decides how many entries at the
head of the line are served at once. The whole line is one value of the store, and every change is a compare-and-set.
So no reader sees a half-changed line. A process that finds the line empty acquires by one write and releases by a
second write. The second write succeeds only if no other entry has joined.

Each process that changes the line also serves, in the same write, the entries whose turn has come. Then it sets the
*wake key* of each of these entries. Only the process of the entry waits for this key. Each waiting process also watches
the session of its predecessor in line, and removes the predecessor's entry if the session is dead. A process may die
after it has served the next entry and before it has set the wake key. The next process watches the dead process. So the
next process notices the death, and reads the line. If the dead process served several entries at once, the other served
processes read the line again within `SLOW_LOOK_S`. ZooKeeper's lock recipe has the same order, and also watches only
the predecessor.

No wake key stays in the store, whenever a process dies. The write that serves an entry also records in the line that
the process is about to set the key. The record stays until the key has been deleted, or until the process that sets the
key has finished or is dead. Each change of the line deletes the wake keys of entries that have left.

On a store with the capability ``transacts`` the line and the wake keys change in one transaction, so a release is one
transaction. On another store a release is three operations: delete the wake key of the released entry, change the line,
and set the next wake key. Processes of both kinds may share a line: a view may lack a capability of its store.

The value is text. The first row has the last token, a stamp that differs in every write, and the pending wake-ups. Each
further row is one `~fscoord.recipes._entry.Entry`.

`force_release` removes the entry of another process.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, takewhile
from typing import Any, Final

from fscoord._arguments import Key, MalformedText, check_positive, key_bytes, key_text, parse_uint63
from fscoord._runtime import system
from fscoord._runtime.escaping import escape_word, unescape_word
from fscoord._waiting.awaited import Awaited
from fscoord._waiting.timing import FREE_TRIES, SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps
from fscoord.errors import AcquireCancelledError, FscoordError, LockLostError, StoreTimeoutError
from fscoord.recipes._cleanup import as_one_wait
from fscoord.recipes._entry import (
    ID_MAX,
    IN_STEP,
    NO_LEASE,
    Entry,
    State,
    WakeUp,
    format_line,
    parse_line,
    with_new_sign,
)
from fscoord.recipes._keys import Refusals, RefusedError, foreign_value_error
from fscoord.recipes._lease import LeaseMonitor, check_interval
from fscoord.store import Store, needed_store

SLOW_LOOK_S: Final = 1.0
"""A waiter that is not woken reads the line again after this many seconds. The process that was to wake the waiter may
have died."""

_waking: set[str] = set()
"""The ids of the entries whose wake keys this process is about to set."""

_cancelled: set[str] = set()
"""The ids of the entries for which `Line.cancel` was called, and whose waiters in this process have not ended yet."""

callers: Final[dict[str, weakref.ref[Any]]] = {}
"""Maps the id of each entry of this process to its thread or task, until the entry leaves the line. References are
weak, so that a task of a closed loop is collected and its entry leaves the line."""

_entry = tuple.__new__  # makes an `Entry` in half of the time that its own constructor takes

Policy = Callable[[list["Entry"]], int]
"""Returns how many entries at the head of the given line hold the resource at once. A single entry always holds the
resource."""


def one(entries: list[Entry]) -> int:
    """The `Policy` of a lock: serve the first entry."""
    return min(1, len(entries))


def readers_or_writer(entries: list[Entry]) -> int:
    """The `Policy` of a read-write lock: serve all readers at the head of the line, or the writer at its head."""
    return sum(1 for _ in takewhile(lambda entry: entry.mode == "r", entries)) or one(entries)


class Line:
    """Reads and changes the line `name` in `store`, the wait queue of a lock, a semaphore or an election.

    An entry is *served* when it acquires the resource. `policy` decides how many entries are served at once.

    With a `ttl` in seconds, the entries of this object have leases. A holder must renew its lease, because other
    contenders remove an entry whose lease was not renewed for `ttl` seconds. The entries of this object have `label`.
    """

    _refuses = False
    """Whether a step of `_change` may raise an error because of the entries. Then the entries must not be old ones."""

    def __init__(self, store: Store, name: Key, policy: Policy, ttl: float = 0.0, label: str = "") -> None:
        self.name = key_text(key_bytes(name))
        self._store = needed_store(store)
        self._prefix = key_bytes(name)
        self._key = self._prefix + b"/line"
        self._transacts = store.capabilities.transacts  # whether a change of the line and of wake keys is one step
        self._policy = policy
        self._lease = f"{ttl}:0" if ttl else NO_LEASE
        self._label = escape_word(label)
        self._signs = LeaseMonitor()
        self._text: bytes | None = None  # the line as last read: the value that the next change expects
        self._alone = ("", b"", b"")  # the id of our entry that was alone in line, that line, the line without it
        self._free = (b"", 0)  # a line without entries, and its last token
        self._cleared: set[str] = set()  # ids of entries whose wake keys were deleted here; no key is set again
        self._me: tuple[int, str, str, Iterator[int]] = (0, "", "", count())
        self._tail = (-1, "")  # a session, and the text that follows the token in each entry of this session
        self._wake_key("0" * ID_MAX)  # raises an error for a name that is too long

    def entries(self) -> list[Entry]:
        """Return the entries in the order of their arrival."""
        return self._parse(self._read()).entries

    def living(self) -> list[Entry]:
        """Return the entries whose sessions are not known dead. Dead entries are not removed from the line."""
        entries = self.entries()
        dead = self._dead(entries)
        return [entry for entry in entries if entry.session not in dead]

    def last_token(self) -> int:
        """Return the last token that was assigned; the next token is higher by 1."""
        return self._parse(self._read()).last

    def new_id(self) -> str:
        """Return an id for a new entry."""
        life, _, start, numbers = self._me
        if life != system.process_epoch():  # also in a forked child, which must not repeat its parent's ids
            start, numbers = system.random_bytes(7).hex(), count()
            self._me = system.process_epoch(), system.process_name(), start, numbers
            self._tail = -1, ""
        return f"{start}{next(numbers):x}"

    def take_free(self, name: str, mode: str) -> Entry | None:
        """Acquire at once if the line is empty, and return the new entry, whose id is `name`.

        Return None if the line has an entry, or had an entry when this object last read it. Also return None after
        `FREE_TRIES` failed compare-and-sets.
        """
        text, session, (known, tail), (free, token) = self._text, self._store.register(), self._tail, self._free
        if known != session:
            tail = f" {session} {self._me[1]} {self._lease} {self._label}".rstrip()
            self._tail = session, tail
        for _ in range(FREE_TRIES):  # after these tries the caller uses `join`, which pauses between tries
            if text is None or text.count(b" ") != 1:  # the line has an entry, or a wake-up is under way
                return None
            if text is not free:
                try:
                    token = parse_uint63(text.partition(b" ")[0])
                except MalformedText:  # not a line: `join` reads it and raises the error
                    return None
            token += 1
            head = f"{token} {name}"
            new = f"{head}\n{name} {mode} {token}{tail}".encode()
            found = self._store.compare_set(self._key, text, new)
            if found == new:
                free = head.encode()
                self._alone, self._free, self._text = (name, new, free), (free, token), new
                return _entry(Entry, (name, mode, token, session, self._me[1], self._lease, self._label))
            self._text = text = found if found != text else None  # the expected text, but no write: the key was deleted
        return None

    def join(self, name: str, mode: str, *, only_if_served: bool = False, limit: float = math.inf) -> Entry | None:
        """Append an entry with the id `name` and return the entry. If its token is not 0, the entry holds the resource.

        Return None and change nothing if `only_if_served` is true and the entry would have to wait. Also return None if
        no compare-and-set succeeds within `limit` seconds, and `limit` is less than the store's timeout.
        """
        new = Entry(name, mode, 0, self._store.register(), self._me[1], self._lease, self._label)
        end = system.time.monotonic() + limit
        refusals = Refusals(self._store, self._key, end)
        try:
            while True:
                before = system.time.monotonic()
                entries = self._change(
                    lambda entries: self._appended(entries, new), name if only_if_served else None, end
                )
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
        """Remove the entry `name`, so that the next entries acquire. Return whether `name` was still in line."""
        alone, text, new = self._alone
        if alone == name:
            found = self._store.compare_set(self._key, text, new)
            if found == new:
                self._text = new
                return True
            self._text = found if found != text else None
        return self._remove(name)

    def leave_quietly(self, name: str) -> None:
        """Call `leave` and suppress its errors, because another error is propagating."""
        with suppress(FscoordError):
            self.leave(name)

    def await_turn(self, entry: Entry, timeout: float, kind: str) -> WaitSteps[Entry | None]:
        """Wait until `entry` acquires the resource.

        Return the entry with its fencing token. After the timeout, remove `entry` and return None.

        Args:
            entry: an entry of this process that waits in line.
            timeout: the longest wait, in seconds.
            kind: the kind of the recipe, for tools that show waits; see `Awaited`.

        Raises:
            LockLostError: another process removed the entry.
            AcquireCancelledError: `cancel` was called for the entry.
        """
        service = partial(self._await_service, entry, timeout)
        return as_one_wait(Awaited(kind, self.name), lambda: self._held_up(entry), service)

    def _await_service(self, entry: Entry, timeout: float, slow_logger: SlowWaitLogger) -> WaitSteps[Entry | None]:
        end = system.time.monotonic() + timeout
        wake = [self._wake_key(entry.id)]
        is_rung = is_last = False
        while True:
            before = system.time.monotonic()
            self._text = self._read()
            entries = self._parse(self._text).entries
            names = [other.id for other in entries]
            if entry.id in _cancelled and not _served(entries, entry.id):
                raise self._cancel_error()
            if entry.id not in names:
                raise self.lost(entry)
            place = names.index(entry.id)
            if entries[place].token:
                return entries[place]
            if is_rung:  # another program set the wake key: it would end every further wait at once
                self._store.delete_key(wake[0])
            ahead, suspects = entries[:place], self._watched(entries, place)
            left = end - system.time.monotonic()
            if left > 0 and self._signs.expired(suspects, before):
                self._bury(suspects, before)
                continue
            if left <= 0 and (is_last or not self._bury(ahead, before)):
                return self._give_up(entry)
            is_last = left <= 0  # dead entries before this one were removed, so read the line once more
            is_rung = False
            with suppress(StoreTimeoutError):
                sessions = [other.session for other in suspects if other.session]
                longest = max(0.0, min(check_interval(suspects, SLOW_LOOK_S), left))
                dead = yield WaitRequest(KEYS, wake, longest, sessions=sessions, slow_logger=slow_logger)
                is_rung = not dead
                if dead:
                    self._bury(suspects, before)

    def cancel(self, name: str) -> None:
        """End the wait of the entry `name` of this object in another thread, unless the entry acquires first."""
        _cancelled.add(name)  # before the change: the waiter may read the line at any time
        _waking.add(name)
        try:
            if self._remove(name, cancels=True):
                self._store.set(self._wake_key(name), b"1")
        finally:
            _waking.discard(name)

    def _remove(self, name: str, *, cancels: bool = False) -> bool:
        """Remove the entry `name`, or with `cancels` only if it waits. Return whether the entry was removed."""
        was_removed = False

        def without(entries: list[Entry]) -> list[Entry]:
            nonlocal was_removed
            rest = [other for other in entries if other.id != name or (cancels and other.token)]
            was_removed = len(rest) < len(entries)
            return rest

        self._change(without, called=name if cancels else "")
        return was_removed

    def _cancel_error(self) -> AcquireCancelledError:
        return AcquireCancelledError(
            f"the wait for {self.name!r} was cancelled by this process, and its place in line was given up; acquire"
            " again if the work is still wanted"
        )

    def end_wait(self, name: str) -> None:
        """Forget that `cancel` was called for the entry `name`. The next change of the line deletes its wake key."""
        _cancelled.discard(name)

    def settle(self) -> None:
        """Delete the wake keys of entries that have left."""
        self._change(list)

    def _appended(self, entries: list[Entry], new: Entry) -> list[Entry]:
        """Return `entries` with the new entry `new`."""
        return [*entries, new]

    def _watched(self, entries: list[Entry], place: int) -> list[Entry]:
        """Return the entries whose deaths the waiter at `place` must notice."""
        ahead = entries[:place]
        return ahead if ahead and ahead[-1].token else ahead[-1:]  # the first waiter watches all served entries

    def renew(self, name: str) -> bool:
        """Renew the lease of the entry `name`. Return whether the entry still holds the resource."""
        entries = self._change(lambda entries: [with_new_sign(each) if each.id == name else each for each in entries])
        return bool(_served(entries, name))

    def set_mode(self, name: str, mode: str) -> bool:
        """Change the mode of the entry `name`. Return whether the entry still holds the resource."""
        entries = self._change(lambda entries: [e._replace(mode=mode) if e.id == name else e for e in entries])
        return bool(_served(entries, name))

    def still_holds(self, entry: Entry) -> bool:
        """Return whether `entry` is in line and holds the resource."""
        return bool(_served(self.entries(), entry.id))

    def lost(self, entry: Entry) -> LockLostError:
        """Return the error for `entry`, which another process has removed from the line."""
        return LockLostError(
            f"{entry.owner} is no longer in line for {self.name!r}: another process took it for dead, or removed it;"
            " stop the work, and wait in line again"
        )

    def timed_out(self, what: str, timeout: float) -> StoreTimeoutError:
        """Return the error of an acquisition that timed out. The error names the holders and the number of waiters."""
        entries = self.living()
        holders = [entry.owner for entry in entries if entry.token]
        shown = [_owner_text(entry) for entry in entries if entry.token]
        return StoreTimeoutError(
            not_acquired(what, self.name, timeout, shown, len(entries) - len(holders)) + self._store._closer_look(),
            keys=[self.name],
            holder=holders[0] if holders else None,
            waited=timeout,
        )

    def _held_up(self, entry: Entry) -> str:
        """Return text for the warning that `entry` has waited long. The text names the line and the holders."""
        others = [other for other in self.living() if other.id != entry.id]
        stopped = self._store._stopped_sessions([other.session for other in others if other.token])
        holders = [
            f"{other.owner}, which is stopped" if other.session in stopped else _owner_text(other)
            for other in others
            if other.token
        ]
        return f"a turn at {self.name!r} ({in_line(holders, len(others) - len(holders))})"

    def _give_up(self, entry: Entry) -> Entry | None:
        """Remove `entry` and return None. If `entry` has acquired the resource meanwhile, keep and return `entry`."""
        entries = self._change(lambda entries: [other for other in entries if other.token or other.id != entry.id])
        served = _served(entries, entry.id)
        if not served and entry.id in _cancelled:
            raise self._cancel_error()
        return served[0] if served else None

    def _bury(self, suspects: list[Entry], before: float) -> bool:
        """Remove the entries in `suspects` whose sessions are dead or whose leases have expired.

        Args:
            suspects: entries that were just read from the store.
            before: the time of the monotonic clock before this read.

        Returns:
            Whether any entry was dead or expired.
        """
        dead = self._dead(suspects)
        buried = {entry.id for entry in suspects if entry.session in dead}
        silent = self._signs.expired(suspects, before)  # an entry whose lease is renewed before the change stays
        gone = buried | {name for name, _ in silent}
        if gone:
            self._change(lambda entries: [e for e in entries if e.id not in buried and (e.id, e.lease) not in silent])
        return bool(gone)

    def _change(
        self,
        step: Callable[[list[Entry]], list[Entry]],
        or_nothing: str | None = None,
        end: float = math.inf,
        called: str = "",
    ) -> list[Entry]:
        """Replace the entries by ``step(entries)``, serve and wake the next entries, and return the new entries.

        If `or_nothing` is the id of an entry, make the change only if the change serves this entry. No try begins after
        the time `end` of the monotonic clock, or after the store's timeout. If `called` is the id of an entry that the
        change removes, the caller will set the wake key of this entry: the same write records that.
        """
        text = None if self._refuses else self._text
        fresh = text is None
        refusals = Refusals(self._store, self._key, end)
        while True:
            if text is None:
                text, fresh = self._read(), True
            state, stamp = self._parse(text), self.new_id()
            changed = step(state.entries)
            wake_ups = state.wake_ups and self._unsettled(state.wake_ups, changed)
            if called and len(changed) < len(state.entries):
                wake_ups = [*wake_ups, WakeUp(called, self._store.register(), self._me[2])]
            if changed != state.entries or wake_ups != state.wake_ups:
                knows = changed[-1].id if len(changed) > len(state.entries) else ""  # the entry that has just joined
                new, served = self._serve(State(state.last, wake_ups, changed), knows)
                if not or_nothing or or_nothing in served:
                    found = self._replace(text, state, new, stamp, [name for name in served if name != knows])
                    if found is None:
                        self._cleared.difference_update(each.id for each in state.wake_ups)
                        return new.entries
                    refusals.add()
                    # If the value was as expected but was not replaced, another process has deleted the key.
                    text, fresh = (found, True) if found != text else (None, False)
                    continue
            if fresh:
                return state.entries
            text = None

    def _replace(self, text: bytes, old: State, state: State, stamp: str, called: list[str]) -> bytes | None:
        """Replace the value `text` of the line, whose state is `old`, by `state`. Wake the entries `called`.

        Returns:
            None, or the current value of the line if the compare-and-set failed.
        """
        new = format_line(state, stamp)
        gone = [each for each in old.wake_ups if each.by == IN_STEP and each not in state.wake_ups]
        if self._transacts and (called or gone):
            present = {self._key: new, **{self._wake_key(name): b"1" for name in called}}
            if not self._store.transact(
                compare={self._key: text}, set=present, delete=[self._wake_key(each.id) for each in gone]
            ):
                return text
            self._text = new
            return None
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
            self._change(list)  # an entry left before its wake key was set: this change deletes the key
        return None

    def _unsettled(self, wake_ups: list[WakeUp], entries: list[Entry]) -> list[WakeUp]:
        """Delete the wake keys of entries that have left. Return the records of `wake_ups` that the line must keep."""
        there = {entry.id for entry in entries}
        gone = [each for each in wake_ups if each.id not in there]
        if not gone:
            return wake_ups
        # First find the wake-ups whose processes can no longer set a key, then delete the keys. In the other order a
        # process could set a key after its deletion.
        over = {each for each in gone if each.by == IN_STEP}
        later = [each for each in gone if each.by != IN_STEP]
        if later:
            dead = self._dead(later)
            own = {self._store.register()} - {0}
            mine = [
                each
                for each in later
                if (each.session in own or each.by == self._me[2]) and not {each.id} & (_waking | _cancelled)
            ]
            over.update(mine, [each for each in later if each.session in dead])
        for each in later if self._transacts else gone:  # `_replace` deletes the key of an `IN_STEP`
            if not {each.id} & (self._cleared | _cancelled) and self._store.delete_key(self._wake_key(each.id)):
                self._cleared.add(each.id)  # a wake key is set only once
        return [each for each in wake_ups if each not in over and each.id not in self._cleared]

    def _serve(self, state: State, knows: str) -> tuple[State, list[str]]:
        """Serve the entries that may now hold the resource. Return the new line and the ids of these entries.

        The new line has a wake-up for each of these entries except `knows`, the caller's own entry.
        """
        last, wake_ups, entries = state.last, list(state.wake_ups), list(state.entries)
        served = []
        for index in range(self._policy(entries)):
            if not entries[index].token:
                last += 1
                entries[index] = entries[index]._replace(token=last)
                served.append(entries[index].id)
                if entries[index].id != knows:
                    session, by = (0, IN_STEP) if self._transacts else (self._store.register(), self._me[2])
                    wake_ups.append(WakeUp(entries[index].id, session, by))  # the process that sets the wake key
        return State(last, wake_ups, entries), served

    def _dead(self, each: Iterable[Entry | WakeUp]) -> set[int]:
        """Return the sessions of the entries or wake-ups `each` that are known dead."""
        return set(self._store.dead_sessions({other.session for other in each} - {0}))

    def _read(self) -> bytes:
        return self._store.get(self._key, default=b"")

    def _parse(self, text: bytes) -> State:
        try:
            return parse_line(text)
        except MalformedText as error:
            raise foreign_value_error(self._key, text, "line of waiters") from error

    def _wake_key(self, name: str) -> bytes:
        return key_bytes(self._prefix + b"/wake/" + name.encode())


def _served(entries: list[Entry], name: str) -> list[Entry]:
    """Return a list of the entry `name` if this entry is in `entries` and is served; otherwise an empty list."""
    # Not a generator, which would be left half-way: Python drops a Ctrl-C that arrives while it is deallocated.
    return [entry for entry in entries if entry.id == name and entry.token]


def caller_of(entry: Entry) -> object | None:
    """Return the thread or task of `entry`, or None.

    The result is None if the thread or task was collected, or if `entry` belongs to another process.
    """
    # A forked child inherits the `callers` of its parent. Their entries have the parent as owner.
    reference = callers.get(entry.id) if entry.owner == system.process_name() else None
    return None if reference is None else reference()


def _owner_text(entry: Entry) -> str:
    """Return the owner of `entry` for messages: ``host:pid``, or the thread or task of an entry of this process."""
    caller: Any = caller_of(entry)
    label = f" ({unescape_word(entry.label)!r})" if entry.label else ""
    if caller is None:
        return entry.owner + label
    name = f"thread {caller.name}" if isinstance(caller, system.threading.Thread) else f"task {caller.get_name()}"
    return f"this process ({name}) as {entry.owner}{label}"


def not_acquired(what: str, name: str, limit: float, holders: Sequence[str], waiting: int) -> str:
    """Return the message of an acquisition that timed out. `waiting` is the number of other contenders that wait."""
    return f"timeout: {what} {name!r} not acquired within {limit:g} s; {in_line(holders, waiting)}"


def in_line(holders: Sequence[str], waiting: int) -> str:
    """Return the part of a message that names the `holders`, and the number `waiting` of other contenders."""
    held = f"held by {', '.join(holders)}" if holders else "held by nobody"
    others = {0: "nobody else waiting", 1: "1 other waiting"}.get(waiting, f"{waiting} others waiting")
    return f"{held}, {others}"


def force_release(store: Store, name: Key, token: int) -> bool:
    """Release the hold with the fencing token `token`, even if the hold belongs to another process.

    The next contender in line acquires.

    Use this function for a holder that hangs, or whose death the store can't detect. The holder is not informed: its
    next ``check`` or ``release`` raises `~fscoord.LockLostError`. Until then it may write at the same time as the next
    holder. Only a resource that refuses old tokens, such as `Fenced`, is protected from these writes. The method
    ``holders`` of each recipe returns the tokens.

    Args:
        store: the store that the contenders share.
        name: the name of a `Lock`, `RLock`, `ReadWriteLock`, `Semaphore` or `Election`, or of work under `once`.
        token: the token of the hold. No later hold has the same token, so no later hold is released by mistake.

    Returns:
        Whether there was a hold with this token.

    Raises:
        ValueError: `token` is below 1.
    """
    token = check_positive("token", token)
    line = Line(store, name, _admitted)
    held = [entry for entry in line.entries() if entry.token == token]
    return bool(held) and line.leave(held[0].id)


def _admitted(entries: list[Entry]) -> int:
    """The `Policy` for a line of any recipe. The mode of the entries shows to which recipe the line belongs."""
    mode = entries[0].mode if entries else ""
    if mode.isdigit():  # a semaphore's value
        return min(int(mode), len(entries))
    return readers_or_writer(entries)
