"""`Membership`: a group of processes, in which each member publishes data and every process can watch the changes."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar

from fscoord._arguments import (
    Key,
    MalformedText,
    Timeout,
    Value,
    key_bytes,
    key_text,
    parse_uint63,
    refuse_copies,
    to_seconds,
    value_bytes,
    words_in,
)
from fscoord._runtime import system, tracing
from fscoord._waiting.awaited import MEMBERS, Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps
from fscoord.errors import FscoordError, StoreTimeoutError
from fscoord.recipes._cleanup import Undoable, as_one_wait, in_steps, undone_by
from fscoord.recipes._keys import Refusals, add_checked, announce, foreign_value_error, parse_count
from fscoord.store import Store, begin_span, needed_store, shown

LOOK_S: Final = 1.0
"""An observer reads the group again after this many seconds: a process may have died before it announced its change."""

KEPT: Final = 64
"""How many *change keys* are kept. Each change of the group sets a new change key, and then deletes the oldest key.

An observer reads the group, and then waits for the next change key. If more than `KEPT` changes come between the read
and the wait, this key is deleted already. The observer then notices the changes after `LOOK_S`.
"""

M = TypeVar("M", bound="Membership")


class Participant(NamedTuple):
    """A process in a `Membership`.

    Attributes:
        number: a unique number, higher than that of every process that joined before.
        owner: the process, ``host:pid``.
        session: the session number of the process's handle; 0 on a store without sessions.
        data: the data that the process publishes, such as its address.
    """

    number: int
    owner: str
    session: int
    data: bytes


class Membership(Undoable):
    """A group that processes join and leave, and that every process can read and watch.

    A process that dies or closes its store leaves the group, and the processes that watch the group are woken. On a
    store that can't detect deaths (`~fscoord.Store.has_liveness`), such a process stays in the group. No process sends
    heartbeats. A ``with`` statement joins at its beginning and leaves at its end. kazoo's ``Party`` is a similar
    recipe.

    Args:
        store: the store that all processes share.
        name: the group's name in the store. Keys that begin with the name and a slash belong to the group.
        data: the data that this process publishes while it is in the group.
    """

    __reduce__ = refuse_copies

    def __init__(self, store: Store, name: Key, data: Value = b"") -> None:
        self._store = needed_store(store)
        self._name = key_bytes(name)
        self._data = value_bytes(data)
        self._joined: tuple[int, bytes] | None = None  # the pid of the process that joined, and its key
        self._members, self._changed = self._name + b"/member/", self._name + b"/changed/"
        self._changes = self._name + b"/changes"
        key_bytes(self._changed + b"%016x" % 0)  # raises an error for a name that is too long

    def __repr__(self) -> str:
        return shown(self, self._store, self._name, "joined" if self._key() else "not joined")

    @property
    def name(self) -> str:
        """The group's name in the store."""
        return key_text(self._name)

    @undone_by(lambda group, made, _: group._unjoin(made))
    def join(self, made: list[bytes], _: object) -> None:
        """Join the group.

        Raises:
            RuntimeError: this object has joined already.
        """
        self._join(made)

    def update(self, data: Value) -> None:
        """Replace the data that this process publishes, and wake the processes that watch the group.

        Raises:
            RuntimeError: this object is not in the group: the process has not joined, was evicted, or was taken for
                dead.
        """
        key = self._key()
        if key is None:
            raise RuntimeError(f"this object has not joined the group {self.name!r}; join first")
        said = value_bytes(data)
        new, refusals = self._text(said), Refusals(self._store, key)
        while True:
            known = self._store.get(key, default=None)
            if known is None:
                self._joined = None
                raise RuntimeError(
                    f"this object is no longer in the group {self.name!r}: it was evicted or taken for dead; join again"
                )
            if self._store.compare_set(key, known, new) == new:
                break
            refusals.add()
        self._data = said
        self._tell()

    @undone_by(lambda group, *_: group._leave_quietly(), FscoordError)
    def leave(self, _: list[object], __: object) -> bool:
        """Leave the group. Return False if this object was not in the group."""
        return self._leave()

    def evict(self, member: Participant) -> bool:
        """Remove `member` from the group. Return False if `member` was not in the group.

        The call does not stop the process of `member`. The next `update` of the process raises an error, or its next
        `leave` returns False. The process may join again. The caller need not be in the group.
        """
        was_there = self._store.delete_key(self._members + b"%016x" % member.number)
        if was_there:
            self._tell()
        return was_there

    def members(self) -> list[Participant]:
        """Return the participants in the order of joining. First remove participants that are known dead."""
        present = self._read()
        dead = set(self._store.dead_sessions({each.session for each in present} - {0}))
        for each in present:
            if each.session in dead and self._store.delete_key(self._members + b"%016x" % each.number):
                self._tell()
        return [each for each in present if each.session not in dead]

    @in_steps
    def observe(
        self, known: Sequence[Participant] = (), timeout: Timeout | None = None
    ) -> WaitSteps[list[Participant]]:
        """Wait until the participants or their data differ from `known`, and return the participants.

        Args:
            known: the list that this method returned last.
            timeout: how long to wait, in seconds or as a `timedelta`; None means the store's timeout.

        Raises:
            StoreTimeoutError: nothing changed within the timeout.
        """
        limit = to_seconds(self._store.timeout if timeout is None else timeout)
        awaited = Awaited(MEMBERS, self.name)
        steps = as_one_wait(awaited, lambda: str(awaited), partial(self._await_change, known, limit))
        return tracing.record_steps(begin_span("members", self._store, self._name), steps)

    def _await_change(
        self, known: Sequence[Participant], limit: float, slow_logger: SlowWaitLogger
    ) -> WaitSteps[list[Participant]]:
        end = system.time.monotonic() + limit
        while True:
            # The count is read before the participants, so a later change has a higher number.
            count = parse_count(self._changes, self._store.get(self._changes, default=b"0"))
            present = self.members()
            if present != list(known):
                return present
            left = end - system.time.monotonic()
            if left <= 0:
                raise StoreTimeoutError(
                    f"no member joined or left {self.name!r} within {limit:g} s{self._store._closer_look()}",
                    keys=[self.name],
                    waited=limit,
                )
            with suppress(StoreTimeoutError):
                others = [each.session for each in present if each.session]
                keys, longest = [self._changed + b"%d" % (count + 1)], min(LOOK_S, left)
                yield WaitRequest(KEYS, keys, longest, sessions=others, slow_logger=slow_logger)

    def watch(self, timeout: Timeout | None = math.inf) -> Generator[list[Participant], None, None]:
        """Yield the participants as soon as there are any, and again after each change.

        Args:
            timeout: how long to wait for each change, in seconds or as a `timedelta`; by default without limit. None
                means the store's timeout.

        Raises:
            StoreTimeoutError: nothing changed within the timeout.
        """
        known: list[Participant] = []
        while True:
            known = self.observe(known, timeout)
            yield known

    @undone_by(lambda group, made, _: group._unjoin(made))
    def __enter__(self: M, made: list[bytes], _: object) -> M:  # noqa: PLE0302 - they are not given
        self._join(made)
        return self

    @undone_by(lambda group, *_: group._leave_quietly(), FscoordError)
    def __exit__(self, _: list[object], __: object, *error: object) -> None:  # noqa: PYI036 - as above
        self._leave()

    def _join(self, made: list[bytes]) -> None:
        """Join the group. The new key is appended to `made` before it is written, so that `_unjoin` can delete it."""
        if self._key() is not None:
            raise RuntimeError(f"this object has already joined the group {self.name!r}")
        key = self._members + b"%016x" % add_checked(self._store, self._name + b"/joined")
        made.append(key)
        self._joined = system.os.getpid(), key
        self._store.set(key, self._text(self._data))
        self._tell()

    def _unjoin(self, made: list[bytes]) -> None:
        """Undo `_join`. This method may be called twice, and the first call may be interrupted."""
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
        """Complete an interrupted `_leave`. This method may be called twice."""
        with suppress(FscoordError):
            self._leave()

    def _key(self) -> bytes | None:
        if self._joined and self._joined[0] != system.os.getpid():
            self._joined = None  # this is a forked child, and only its parent is in the group
        return self._joined[1] if self._joined else None

    def _text(self, data: bytes) -> bytes:
        return f"{self._store.register()} {system.process_name()}\n".encode() + data

    def _tell(self) -> None:
        count = add_checked(self._store, self._changes)
        announce(self._store, self._changed, count, KEPT)

    def _read(self) -> list[Participant]:
        found = []
        for key in self._store.list_keys(self._members):
            value = self._store.get(key, default=None)
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
    """Return the number at the end of a participant's key.

    Raises:
        MalformedText: `key` does not end in a number.
    """
    digits = key[-16:]
    if not (len(digits) == 16 and set("0123456789abcdef").issuperset(digits)):
        raise MalformedText(f"{digits!r} is not a number of 16 hexadecimal digits")
    return int(digits, 16)
