"""`Membership`: a group of processes, in which each member publishes data and every process can watch the changes."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import NamedTuple

from fscoord._arguments import (
    Key,
    MalformedText,
    Timeout,
    Value,
    key_bytes,
    parse_uint63,
    to_seconds,
    value_bytes,
    words_in,
)
from fscoord._runtime import system, tracing
from fscoord._waiting.awaited import MEMBERS, Awaited
from fscoord._waiting.wait import WaitSteps
from fscoord.recipes._cleanup import in_steps
from fscoord.recipes._group import Group
from fscoord.recipes._keys import add_checked, change, foreign_value_error, parse_count
from fscoord.recipes._look import Unchanged, look_again
from fscoord.store import Store, begin_span, shown


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


class Membership(Group):
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

    def __init__(self, store: Store, name: Key, data: Value = b"") -> None:
        super().__init__(store, name)
        self._data = value_bytes(data)
        self._members, self._changes = self._name + b"/member/", self._name + b"/changes"

    def __repr__(self) -> str:
        return shown(self, self._store, self._name, "joined" if self._own() else "not joined")

    def update(self, data: Value) -> None:
        """Replace the data that this process publishes, and wake the processes that watch the group.

        Raises:
            RuntimeError: this object is not in the group: the process has not joined, was evicted, or was taken for
                dead.
        """
        own = self._own()
        if not own:
            raise RuntimeError(f"this object has not joined the group {self.name!r}; join first")
        said = value_bytes(data)
        new = self._text(said)

        def updated(text: bytes) -> bytes:
            if not text:
                self._joined = None
                raise RuntimeError(
                    f"this object is no longer in the group {self.name!r}: it was evicted or taken for dead; join again"
                )
            return new

        change(self._store, self._members + own, updated)
        self._data = said
        self._tell()

    def evict(self, member: Participant) -> bool:
        """Remove `member` from the group. Return False if `member` was not in the group.

        The call does not stop the process of `member`. The next `update` of the process raises an error, or its next
        `leave` returns False. The process may join again. The caller need not be in the group.
        """
        return self._remove(b"%016x" % member.number)

    def members(self) -> list[Participant]:
        """Return the participants in the order of joining. First remove participants that are known dead."""
        present = self._read()
        dead = set(self._store.dead_sessions({each.session for each in present} - {0}))
        for each in present:
            if each.session in dead:
                self._remove(b"%016x" % each.number)
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

        def look() -> list[Participant] | Unchanged:
            count = parse_count(self._changes, self._store.get(self._changes, default=b"0"))
            present = self.members()
            if present != list(known):
                return present
            late = f"no member joined or left {self.name!r} within {limit:g} s"
            return self._unchanged(count, late, [each.session for each in present])

        awaited = Awaited(MEMBERS, self.name)
        steps = look_again(self._store, awaited, str(awaited), limit, look)
        return tracing.record_steps(begin_span("members", self._store, self._name), steps)

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

    def _enroll(self, made: list[bytes]) -> None:
        own = b"%016x" % add_checked(self._store, self._name + b"/joined")
        made.append(own)
        self._joined = system.process_epoch(), own
        self._store.set(self._members + own, self._text(self._data))
        self._tell()

    def _remove(self, own: bytes) -> bool:
        was_there = self._store.delete_key(self._members + own)
        if was_there:
            self._tell()
        return was_there

    def _text(self, data: bytes) -> bytes:
        return f"{self._store.register()} {system.process_name()}\n".encode() + data

    def _tell(self) -> None:
        self._announce(add_checked(self._store, self._changes))

    def _read(self) -> list[Participant]:
        keys = [key_bytes(key) for key in self._store.list_keys(self._members)]
        return [self._participant(key, value) for key, value in self._store._peek_all(keys).items()]

    def _participant(self, key: bytes, value: bytes) -> Participant:
        head, _, data = value.partition(b"\n")
        try:
            session, owner = words_in(head, " ", 2)
            return Participant(_number(key), owner, parse_uint63(session), data)
        except MalformedText as error:
            raise foreign_value_error(key, value, "participant") from error


def _number(key: bytes) -> int:
    """Return the number at the end of a participant's key.

    Raises:
        MalformedText: `key` does not end in a number.
    """
    digits = key[-16:]
    if not (len(digits) == 16 and set(b"0123456789abcdef").issuperset(digits)):
        raise MalformedText(f"{digits!r} is not a number of 16 hexadecimal digits")
    return int(digits, 16)
