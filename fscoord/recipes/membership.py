"""`Membership`: who takes part, with something to say, and who left or died; kazoo's ``Party``, with deaths told."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple, TypeVar

from fscoord._arguments import (
    Key,
    MalformedText,
    Timeout,
    Value,
    key_bytes,
    key_text,
    parse_uint63,
    to_seconds,
    value_bytes,
    words_in,
)
from fscoord._runtime import system
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps
from fscoord.errors import FscoordError, StoreTimeoutError
from fscoord.recipes._cleanup import await_end, go_on_in_thread
from fscoord.recipes._keys import Refusals, add_checked, foreign_value_error, get_or_none, parse_count
from fscoord.store import Store, run_blocking

__all__ = ["Membership", "Participant"]

LOOK_S: Final = 1.0
"""How often one who watches looks by itself: who came or left may have died before it could say so."""

KEPT: Final = 64
"""How many changes may pass between a look and the wait that follows it, before that wait ends only by `LOOK_S`."""

M = TypeVar("M", bound="Membership")


class Participant(NamedTuple):
    """One who takes part.

    Attributes:
        number: counts those who joined.
        owner: its process, ``host:pid``.
        session: the number of its handle among the members of the store; 0 where the store keeps none.
        data: what it has to say, such as its address.
    """

    number: int
    owner: str
    session: int
    data: bytes


class Membership:
    """A group that processes join and leave, and that anybody may look at.

    A process that dies, or closes its store, is no longer in it, where the store can tell (`store.has_liveness`); and
    those who watch are told. Nothing has to be sent again and again. As a context manager it joins and leaves.

    Args:
        store: where all meet.
        name: the group's name there; keys that begin with it and a slash belong to it.
        data: what others should know of this process when it takes part.
    """

    def __init__(self, store: Store, name: Key, data: Value = b"") -> None:
        self._store = store
        self._name = key_bytes(name)
        self._data = value_bytes(data)
        self._joined: tuple[int, bytes] | None = None  # the process, and the key
        self._members, self._changed = self._name + b"/member/", self._name + b"/changed/"
        self._changes = self._name + b"/changes"
        key_bytes(self._changed + b"%016x" % 0)  # a name that is too long fails here

    @property
    def name(self) -> str:
        """What it is called in the store."""
        return key_text(self._name)

    def join(self) -> None:
        """Take part from now on.

        Raises:
            RuntimeError: this object takes part already.
        """
        made: list[bytes] = []
        over: list[object] = []
        try:
            self._join(made)
        except BaseException:  # nobody knows whether it stands there; each line of this is explained in `_cleanup`
            try:
                self._unjoin(made)
            except BaseException:
                go_on_in_thread((over, self._unjoin, made))
                await_end(over)
                raise
            raise

    def update(self, data: Value) -> None:
        """Have something else to say, and tell those who watch.

        Raises:
            RuntimeError: this object does not take part; or no longer, because another one evicted it, or because it
                was taken for dead.
        """
        key = self._key()
        if key is None:
            raise RuntimeError(f"this object does not take part in {self.name!r}")
        said = value_bytes(data)
        new, refusals = self._text(said), Refusals(self._store, key)
        while True:
            known = get_or_none(self._store, key)
            if known is None:
                self._joined = None
                raise RuntimeError(
                    f"this object takes part no longer in {self.name!r}: it was evicted, or taken for dead; join again"
                )
            if self._store.compare_set(key, known, new) == new:
                break
            refusals.add()
        self._data = said
        self._tell()

    def leave(self) -> bool:
        """Take part no longer, and return whether this object did until now."""
        over: list[object] = []
        try:
            return self._leave()
        except FscoordError:
            raise
        except BaseException:
            try:
                self._leave_quietly()
            except BaseException:
                go_on_in_thread((over, self._leave_quietly))
                await_end(over)
                raise
            raise

    def evict(self, member: Participant) -> bool:
        """Take `member` out of the group, and return whether it was in it until now.

        Its process is not stopped, and finds out by its next `update` or `leave`; it may join again. This object need
        not take part itself.
        """
        was_there = self._store.delete_key(self._members + b"%016x" % member.number)
        if was_there:
            self._tell()
        return was_there

    def members(self) -> list[Participant]:
        """Return who takes part, in the order of joining. Who is found dead is taken out."""
        present = self._read()
        dead = set(self._store.dead_sessions({each.session for each in present} - {0}))
        for each in present:
            if each.session in dead and self._store.delete_key(self._members + b"%016x" % each.number):
                self._tell()
        return [each for each in present if each.session not in dead]

    def observe(self, known: Sequence[Participant] = (), timeout: Timeout | None = None) -> list[Participant]:
        """Wait until those who take part are others than `known`, or say something else, and return them.

        Args:
            known: what this returned last.
            timeout: seconds or a `timedelta`; None means the store's.

        Raises:
            StoreTimeoutError: nothing changed.
        """
        return run_blocking(self._store, self._observing(known, timeout))

    def _observing(self, known: Sequence[Participant], timeout: Timeout | None) -> WaitSteps[list[Participant]]:
        limit = to_seconds(self._store.timeout if timeout is None else timeout)
        end = system.time.monotonic() + limit
        while True:
            # Counted before the look: what changes behind the look has a higher number.
            count = parse_count(self._changes, get_or_none(self._store, self._changes) or b"0")
            present = self.members()
            if present != list(known):
                return present
            left = end - system.time.monotonic()
            if left <= 0:
                raise StoreTimeoutError(
                    f"nobody joined or left {self.name!r} within {limit:g} s", keys=[self.name], waited=limit
                )
            with suppress(StoreTimeoutError):
                others = [each.session for each in present if each.session]
                yield WaitRequest(KEYS, [self._changed + b"%d" % (count + 1)], min(LOOK_S, left), sessions=others)

    def watch(self, timeout: Timeout | None = math.inf) -> Iterator[list[Participant]]:
        """Yield who takes part: at once, if it is anybody, and whenever it has changed.

        Args:
            timeout: how long to wait for each change, in seconds or as a `timedelta`; without limit, unless it is
                given. None means the store's.

        Raises:
            StoreTimeoutError: nothing changed for that long.
        """
        known: list[Participant] = []
        while True:
            known = self.observe(known, timeout)
            yield known

    def __enter__(self: M) -> M:
        made: list[bytes] = []
        over: list[object] = []
        try:
            self._join(made)
            return self
        except BaseException:
            try:
                self._unjoin(made)
            except BaseException:
                go_on_in_thread((over, self._unjoin, made))
                await_end(over)
                raise
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        over: list[object] = []
        try:
            self._leave()
        except FscoordError:
            raise
        except BaseException:
            try:
                self._leave_quietly()
            except BaseException:
                go_on_in_thread((over, self._leave_quietly))
                await_end(over)
                raise
            raise

    def _join(self, made: list[bytes]) -> None:
        """Do what `join` does, and put the key into `made` before anything stands there."""
        if self._key() is not None:
            raise RuntimeError(f"this object takes part in {self.name!r} already")
        key = self._members + b"%016x" % add_checked(self._store, self._name + b"/joined")
        made.append(key)
        self._joined = system.os.getpid(), key
        self._write(key)

    def _unjoin(self, made: list[bytes]) -> None:
        """Take back what `_join` did. It may be called twice, the first time not to the end."""
        for key in made:
            if self._joined and self._joined[1] == key:
                self._joined = None
            with suppress(FscoordError):
                if self._store.delete_key(key):
                    self._tell()

    def _leave(self) -> bool:
        key = self._key()
        if key is None:
            return False
        was_there = self._store.delete_key(key)
        self._joined = None
        if was_there:
            self._tell()
        return was_there

    def _leave_quietly(self) -> None:
        """Do what `_leave` was interrupted in. It may be called twice."""
        with suppress(FscoordError):
            self._leave()

    def _key(self) -> bytes | None:
        if self._joined and self._joined[0] != system.os.getpid():
            self._joined = None  # it was forked: its parent takes part
        return self._joined[1] if self._joined else None

    def _write(self, key: bytes) -> None:
        self._store.set(key, self._text(self._data))
        self._tell()

    def _text(self, data: bytes) -> bytes:
        return f"{self._store.register()} {system.process_name()}\n".encode() + data

    def _tell(self) -> None:
        count = add_checked(self._store, self._changes)
        self._store.set(self._changed + b"%d" % count, b"1")
        if count > KEPT:
            self._store.delete_key(self._changed + b"%d" % (count - KEPT))
        if count % KEPT == 0:  # also those whose turn it was when somebody died who should have done that
            for key in map(key_bytes, self._store.list_keys(self._changed)):
                if parse_count(key, key[len(self._changed) :]) <= count - KEPT:
                    self._store.delete_key(key)

    def _read(self) -> list[Participant]:
        found = []
        for key in self._store.list_keys(self._members):
            value = get_or_none(self._store, key_bytes(key))
            if value is not None:
                found.append(self._participant(key, value))
        return found

    def _participant(self, key: str, value: bytes) -> Participant:
        head, _, data = value.partition(b"\n")
        try:
            session, owner = words_in(head, " ", 2)
            return Participant(_number(key), owner, parse_uint63(session), data)
        except MalformedText as error:
            raise foreign_value_error(key_bytes(key), value, "participant") from error


def _number(key: str) -> int:
    """Return which of those who joined `key` is of."""
    digits = key[-16:]
    if not (len(digits) == 16 and set("0123456789abcdef").issuperset(digits)):
        raise MalformedText(f"{digits!r} is no number of 16 hexadecimal digits")
    return int(digits, 16)
