"""A line of people who wait for something: who comes first is served first, and nobody else is woken.

The whole line is one value of the store, changed by compare-and-set alone, so it is never seen half changed and its
order is that of the store. A policy says how many of the first in line are served at once. Who is served gets a
*token*, a number that only rises, also after everybody has gone.

Whoever changes the line serves those whose turn has come in the same write, and then sets a key of each, for which that
one alone waits. Each who waits also looks after the one before it: if that one's session is dead, it is taken out. So
the dead hold nothing for longer than `LOOK_S`, and one who dies between serving the next and waking it delays it by no
more. The order of arrival, and looking after one's predecessor only, are those of ZooKeeper's lock recipe; a queue in
one value is possible here because a value changes by compare-and-set, which costs one write.

The value is text: the last token; then a line for each entry: its id, mode, token (0: it waits), session and owner.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from fscoord import _system as system
from fscoord.arguments import Key, key_bytes, key_text
from fscoord.errors import FscoordError, HoldLostError, StoreTimeoutError
from fscoord.store import Store

__all__ = ["Entry", "Line"]

LOOK_S: Final = 0.04
"""How often one who waits looks after the one before it, on a store that can tell the dead."""
SLOW_LOOK_S: Final = 1.0
"""The same on other stores: somebody may have died after serving us and before waking us."""

Policy = Callable[[list["Entry"]], int]


class Entry(NamedTuple):
    """One in a line.

    Attributes:
        id: a random name.
        mode: what it asks for, one character that its policy knows.
        token: the number that it was served with; 0 while it waits.
        session: the number of its handle among the members of the store; 0 where the store keeps none.
        owner: ``host:pid``, for people.
    """

    id: str
    mode: str
    token: int
    session: int
    owner: str


class Line:
    """The line `name` in `store`; `policy` is given the entries and returns how many of the first are served."""

    def __init__(self, store: Store, name: Key, policy: Policy) -> None:
        self.name = key_text(key_bytes(name))
        self._store = store
        self._prefix = key_bytes(name)
        self._key = self._prefix + b"/line"
        self._policy = policy
        self._text: bytes | None = None  # the line as it was seen last: the first guess of the next change
        self._waited: set[str] = set()
        self._wake_key("0" * 16)  # a name that is too long fails here

    def entries(self) -> list[Entry]:
        """Return who is in line, first come first."""
        return self._parse(self._read())[1]

    def last_token(self) -> int:
        """Return the last token that was given; the next one is one more."""
        return self._parse(self._read())[0]

    def newcomer(self, mode: str) -> Entry:
        """Return an entry of this handle that is not in line yet."""
        owner = f"{system.hostname()}:{system.os.getpid()}"
        return Entry(system.random_bytes(8).hex(), mode, 0, self._store.session, owner)

    def join(self, new: Entry) -> Entry:
        """Let `new` join the line's end and return it: served already if its token is not 0."""
        return self._change(lambda entries: [*entries, new])[-1]

    def join_if_served(self, new: Entry) -> Entry | None:
        """Do as `join` if that means to be served at once; otherwise change nothing and return None."""
        entries = self._change(lambda entries: [*entries, new], or_nothing=new.id)
        if entries[-1:] and entries[-1].id == new.id:
            return entries[-1]
        if not self._bury(entries):
            return None
        return self.join_if_served(new)

    def leave(self, entry: Entry) -> bool:
        """Take `entry` out, and serve whoever comes next; return whether it was still there."""
        was_there = False

        def without(entries: list[Entry]) -> list[Entry]:
            nonlocal was_there
            rest = [other for other in entries if other.id != entry.id]
            was_there = len(rest) < len(entries)
            return rest

        self._change(without)
        if entry.id in self._waited:
            self._waited.discard(entry.id)
            self._store.delete_key(self._wake_key(entry.id))
        return was_there

    def leave_quietly(self, entry: Entry) -> None:
        """Do as `leave`, on the way out with another error."""
        with suppress(FscoordError):
            self.leave(entry)

    def await_turn(self, entry: Entry, timeout: float) -> Entry | None:
        """Wait until `entry` is served and return it, served; or, if the time runs out, take it out and return None.

        Raises:
            HoldLostError: somebody took it out.
        """
        end = system.time.monotonic() + timeout
        self._waited.add(entry.id)
        wake = [self._wake_key(entry.id)]
        look = LOOK_S if self._store.has_liveness else SLOW_LOOK_S
        while True:
            entries = self.entries()
            place = next((index for index, other in enumerate(entries) if other.id == entry.id), None)
            if place is None:
                raise self.lost(entry)
            if entries[place].token:
                return entries[place]
            before = entries[:place]  # who is behind those who are served looks after all of them
            if self._bury(before if before[-1].token else before[-1:]):
                continue
            left = end - system.time.monotonic()
            if left <= 0:
                return self._give_up(entry)
            with suppress(StoreTimeoutError):
                self._store.wait(wake, min(look, left))

    def still_holds(self, entry: Entry) -> bool:
        """Return whether `entry` is in line, served."""
        return any(other.id == entry.id and other.token for other in self.entries())

    def lost(self, entry: Entry) -> HoldLostError:
        """Return the error for an entry that somebody took out."""
        return HoldLostError(
            f"{entry.owner} is no longer in line for {self.name!r}: it was taken for dead, or somebody took it out"
        )

    def timed_out(self, what: str, timeout: float) -> StoreTimeoutError:
        """Return the error that names who is served, and how many wait."""
        entries = self.entries()
        held = ", ".join(entry.owner for entry in entries if entry.token) or "nobody"
        waiting = sum(not entry.token for entry in entries)
        return StoreTimeoutError(
            f"{what} {self.name!r} was not to be had within {timeout:g} s: {held} has it, and {waiting} others wait",
            keys=[self.name],
            holder=next((entry.owner for entry in entries if entry.token), None),
            waited=timeout,
        )

    def _give_up(self, entry: Entry) -> Entry | None:
        """Take `entry` out, unless its turn has come at the last moment."""
        served: Entry | None = None

        def unless_served(entries: list[Entry]) -> list[Entry]:
            nonlocal served
            served = next((other for other in entries if other.id == entry.id and other.token), None)
            return entries if served else [other for other in entries if other.id != entry.id]

        self._change(unless_served)
        return served

    def _bury(self, suspects: list[Entry]) -> bool:
        """Take out those of `suspects` whose sessions are dead; return whether there were any."""
        dead = set(self._store.dead_sessions(entry.session for entry in suspects if entry.session))
        gone = {entry.id for entry in suspects if entry.session in dead}
        if gone:
            self._change(lambda entries: [entry for entry in entries if entry.id not in gone])
            for name in gone:
                self._store.delete_key(self._wake_key(name))
        return bool(gone)

    def _change(self, step: Callable[[list[Entry]], list[Entry]], or_nothing: str | None = None) -> list[Entry]:
        """Replace the entries by what `step` makes of them, serve and wake whose turn it is, and return the entries.

        With `or_nothing`, change nothing if that one would not be served.
        """
        text = self._text
        fresh = text is None
        while True:
            if text is None:
                text, fresh = self._read(), True
            last, entries = self._parse(text)
            changed = step(entries)
            if changed != entries:
                last, changed, served = self._serve(last, changed)
                if not or_nothing or any(entry.id == or_nothing for entry in served):
                    new = self._format(last, changed)
                    found = self._store.compare_set(self._key, text, new)
                    if found == new:
                        break
                    # If it is as expected and was not changed all the same, somebody has deleted the key.
                    text, fresh = (found, True) if found != text else (None, False)
                    continue
            if fresh:
                return entries
            text = None
        self._text = new
        knows = changed[-1].id if len(changed) > len(entries) else ""  # who has just joined
        self._wake([entry.id for entry in served if entry.id != knows])
        return changed

    def _wake(self, names: list[str]) -> None:
        for name in names:
            self._store.set(self._wake_key(name), b"1")
        if names:
            # Who looked before it was woken may have left already: then nobody else removes its key.
            there = {entry.id for entry in self.entries()}
            for name in names:
                if name not in there:
                    self._store.delete_key(self._wake_key(name))

    def _serve(self, last: int, entries: list[Entry]) -> tuple[int, list[Entry], list[Entry]]:
        """Return the last token, the entries, and those of them whose turn has come with this."""
        served = []
        for index in range(self._policy(entries)):
            if not entries[index].token:
                last += 1
                entries[index] = entries[index]._replace(token=last)
                served.append(entries[index])
        return last, entries, served

    def _read(self) -> bytes:
        return self._store.get(self._key) if self._store.check([self._key]) else b""

    def _parse(self, text: bytes) -> tuple[int, list[Entry]]:
        if not text:
            return 0, []
        try:
            last, *lines = text.decode().split("\n")
            parts = [line.split(" ") for line in lines]
            return int(last), [Entry(name, mode, int(token), int(of), owner) for name, mode, token, of, owner in parts]
        except ValueError as error:
            raise FscoordError(
                f"key {key_text(self._key)!r} holds {text[:40]!r}, which is no line of waiters"
            ) from error

    def _format(self, last: int, entries: list[Entry]) -> bytes:
        return "\n".join([str(last), *("{} {} {} {} {}".format(*entry) for entry in entries)]).encode()

    def _wake_key(self, name: str) -> bytes:
        return key_bytes(self._prefix + b"/wake/" + name.encode())
