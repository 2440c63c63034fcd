"""`Partitioner`: shares out a fixed number of partitions among the living members of a group.

The whole group is one value of the store, and every change is a compare-and-set. The value lists the members in the
order of joining, and the partitions that each member holds. A member that changes the value removes the members that
are known dead, and takes or gives up only its own partitions. So no partition ever has two holders. The *quota* of a
member is the number of partitions that it should hold; it follows from the number of members and the order of joining.
A member above its quota gives up partitions, and a member below its quota takes partitions that are free.

The value is text. The first row has the number of the change, the number of partitions, and the last fencing token.
Each further row is one `_Share`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fscoord._arguments import (
    Key,
    MalformedText,
    Timeout,
    check_positive,
    parse_uint63,
    to_seconds,
    words_in,
)
from fscoord._runtime import system, tracing
from fscoord._waiting.awaited import PARTITIONS, Awaited
from fscoord._waiting.wait import WaitSteps
from fscoord.errors import LockLostError
from fscoord.recipes._cleanup import in_steps
from fscoord.recipes._group import Group
from fscoord.recipes._keys import change, foreign_value_error
from fscoord.recipes._look import Unchanged, look_again
from fscoord.store import Store, begin_span, shown


class _Share(NamedTuple):
    """One member: its random id, its session, its process, and {partition: fencing token}."""

    id: str
    session: int
    owner: str
    held: dict[int, int]


class _Group(NamedTuple):
    """The parsed value: the number of changes, the number of partitions, the last fencing token, and the members."""

    changes: int
    partitions: int
    last: int
    shares: list[_Share]


class Partitioner(Group):
    """Shares out the partitions 0 to ``partitions - 1`` among the processes that have joined and are not known dead.

    At most one member holds a partition at a time. When a member joins, leaves or dies, the members share out anew. A
    member gives up a partition only in a call of `rebalance` or `wait_changed`. So a process calls one of these between
    two pieces of work, and works in between on what `partitions` returns. A ``with`` statement joins at its beginning
    and leaves at its end. On a store that can't detect deaths (`~fscoord.Store.has_liveness`), a dead member keeps its
    partitions. kazoo's ``SetPartitioner`` is a similar recipe.

    `join` takes as many free partitions as this member should hold, and `leave` gives up all partitions.

    Args:
        store: the store that all processes share.
        name: the group's name in the store. Keys that begin with the name and a slash belong to the group.
        partitions: how many partitions there are. All members must give the same number.

    Raises:
        ValueError: `join` was called, and the other members have given another number of partitions.
    """

    def __init__(self, store: Store, name: Key, partitions: int) -> None:
        super().__init__(store, name)
        self._count = check_positive("partitions", partitions)
        self._key = self._name + b"/shares"
        self._held: dict[int, int] = {}

    def __repr__(self) -> str:
        state = f"joined, with {len(self._held)} of {self._count} partitions" if self._own() else "not joined"
        return shown(self, self._store, self._name, state)

    @property
    def partitions(self) -> dict[int, int]:
        """The partitions that this member holds, each with its fencing token, as {partition: token}.

        The token of a partition rises with each holder. The property makes no request to the store.
        """
        return dict(self._held) if self._own() else {}

    def rebalance(self) -> bool:
        """Give up the partitions that this member should no longer hold, and take free ones. The call does not wait.

        Returns:
            Whether the partitions of this member have changed.

        Raises:
            RuntimeError: this object has not joined.
            LockLostError: this member was taken for dead, so other members may hold its partitions.
        """
        before = self.partitions
        self._share_out()
        return self._held != before

    @in_steps
    def wait_changed(self, timeout: Timeout | None = None) -> WaitSteps[dict[int, int]]:
        """Call `rebalance` until the partitions of this member have changed. Return them as `partitions` does.

        Args:
            timeout: how long to wait, in seconds or as a `timedelta`; None means the store's timeout.

        Raises:
            StoreTimeoutError: nothing changed within the timeout. This member keeps its partitions.
            RuntimeError, LockLostError: as in `rebalance`.
        """
        limit = to_seconds(self._store.timeout if timeout is None else timeout)
        before = self.partitions

        def look() -> dict[int, int] | Unchanged:
            group = self._share_out()
            if self._held != before:
                return self.partitions
            late = (
                f"timeout: the partitions of {self.name!r} that this member holds did not change within {limit:g} s"
                f" ({len(before)} of {self._count}, {len(group.shares)} members)"
            )
            return self._unchanged(group.changes, late, [each.session for each in group.shares])

        awaited = Awaited(PARTITIONS, self.name)
        steps = look_again(self._store, awaited, str(awaited), limit, look)
        return tracing.record_steps(begin_span("partitions", self._store, self._name), steps)

    def _enroll(self, made: list[bytes]) -> None:
        me = _Share(system.random_bytes(8).hex(), self._store.register(), system.process_name(), {})
        made.append(me.id.encode())

        def join(group: _Group) -> _Group:
            if group.shares and group.partitions != self._count:
                raise ValueError(
                    f"the {len(group.shares)} members of {self.name!r} share {group.partitions} partitions, not"
                    f" {self._count}; give all members the same number"
                )
            return _balanced(group._replace(partitions=self._count, shares=[*group.shares, me]), me.id)

        group = self._change(join)
        self._joined = system.process_epoch(), me.id.encode()
        self._held = dict(group.shares[-1].held)

    def _leave(self) -> bool:
        self._held = {}
        return super()._leave()

    def _remove(self, own: bytes) -> bool:
        was_there = False

        def remove(group: _Group) -> _Group:
            nonlocal was_there
            rest = [each for each in group.shares if each.id.encode() != own]
            was_there = len(rest) < len(group.shares)
            return group._replace(shares=rest)

        self._change(remove)
        return was_there

    def _share_out(self) -> _Group:
        """Give up surplus partitions, take free ones, and return the group."""
        name = self._own().decode()
        if not name:
            raise RuntimeError(f"this object has not joined the partitioner {self.name!r}; join first")

        def balance(group: _Group) -> _Group:
            found = _balanced(group, name)
            # Before the write: an interruption after the write must not leave a partition that was given up in `_held`.
            self._held = {
                number: token for number, token in self._held.items() if token in _held_by(found, name).values()
            }
            return found

        group = self._change(balance)
        self._held = dict(_held_by(group, name))
        if name not in [each.id for each in group.shares]:
            self._joined = None
            raise LockLostError(
                f"this member of the partitioner {self.name!r} was taken for dead, so other members may hold its"
                " partitions; stop the work, and join again"
            )
        return group

    def _change(self, step: Callable[[_Group], _Group]) -> _Group:
        """Remove the members that are known dead, replace the group by the result of `step`, and return that."""
        group = self._parse(b"")

        def changed(text: bytes) -> bytes | None:
            nonlocal group
            known = self._parse(text)
            dead = set(self._store.dead_sessions({each.session for each in known.shares} - {0}))
            group = step(known._replace(shares=[each for each in known.shares if each.session not in dead]))
            if group == known:
                return None
            group = group._replace(changes=known.changes + 1)
            return _format(group)

        if change(self._store, self._key, changed):
            self._announce(group.changes)
        return group

    def _parse(self, text: bytes) -> _Group:
        try:
            return _parse(text) if text else _Group(0, self._count, 0, [])
        except MalformedText as error:
            raise foreign_value_error(self._key, text, "list of partitions") from error


def _held_by(group: _Group, name: str) -> dict[int, int]:
    """Return the partitions of the member `name`; none if there is no such member."""
    return {each.id: each.held for each in group.shares}.get(name, {})


def _balanced(group: _Group, name: str) -> _Group:
    """Return `group` after the member `name` has given up its surplus partitions, or has taken free ones."""
    names = [each.id for each in group.shares]
    if name not in names:
        return group
    place, (least, more) = names.index(name), divmod(group.partitions, len(names))
    quota, last = least + (place < more), group.last
    held = dict(list(group.shares[place].held.items())[:quota])
    taken = {number for each in group.shares for number in each.held}
    for number in [number for number in range(group.partitions) if number not in taken][: quota - len(held)]:
        held[number] = last = last + 1
    shares = list(group.shares)
    shares[place] = shares[place]._replace(held=held)
    return group._replace(last=last, shares=shares)


def _parse(text: bytes) -> _Group:
    """Parse the value of a group.

    Raises:
        MalformedText: `text` is not the value of a group.
    """
    head, *rows = text.split(b"\n")
    changes, partitions, last = (parse_uint63(word) for word in words_in(head, " ", 3))
    shares, taken = [], set[int]()
    for row in rows:
        name, session, owner, held = words_in(row, " ", 4)
        pairs = [words_in(word.encode(), ":", 2) for word in held.split(",") if word]
        numbers = {parse_uint63(number): parse_uint63(token) for number, token in pairs}
        if not taken.isdisjoint(numbers) or max(numbers, default=0) >= partitions:
            raise MalformedText("two members hold a partition, or a member holds one that does not exist")
        taken.update(numbers)
        shares.append(_Share(name, parse_uint63(session), owner, numbers))
    return _Group(changes, partitions, last, shares)


def _format(group: _Group) -> bytes:
    """Return `group` as text, the inverse of `_parse`."""
    rows = [f"{group.changes} {group.partitions} {group.last}"]
    for name, session, owner, held in group.shares:
        rows.append(f"{name} {session} {owner} {','.join(f'{number}:{token}' for number, token in held.items())}")
    return "\n".join(rows).encode()
