"""`Items` reads and writes the keys of a queue. A consumer takes an item with a `Claim`, and gets an `Item`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, NoReturn

from fscoord._arguments import (
    CounterRangeError,
    MalformedText,
    NotACounterError,
    Transaction,
    Value,
    key_bytes,
    key_text,
    parse_uint63,
    refuse_copies,
    utf8,
    value_bytes,
    words_in,
)
from fscoord._runtime import system
from fscoord.errors import FscoordError, LockLostError
from fscoord.recipes._cleanup import Undoable, undone_by
from fscoord.recipes._keys import add_checked, counter_error, foreign_value_error
from fscoord.store import Choose, Store, shown


class Claim(NamedTuple):
    """The value of an item's claim key. A consumer writes a claim to take an item or to release it.

    Attributes:
        text: the value in the store: deliveries, session, owner and a random word, which makes each claim unique. The
            claim of a released item has only the deliveries. The claim of a delayed item is ``0@due``.
        deliveries: how often the item has been handed out.
        session: the session number of the consumer's handle; 0 without sessions, or if no consumer has the item.
        owner: the consumer's process, ``host:pid``; empty if no consumer has the item.
        due: when the item may be taken, in seconds since the epoch by the clock of the producer; 0 without a delay.
    """

    text: bytes
    deliveries: int
    session: int
    owner: str
    due: float = 0.0


class Content(NamedTuple):
    """What the key of an item holds. The text is the data after ``=``, and before it the other attributes.

    Attributes:
        data: the value that was put.
        expires: when the item expires, in seconds since the epoch by the clock of the producer; infinite: never.
        wants_result: whether the producer waits for the result.
    """

    data: bytes
    expires: float = math.inf
    wants_result: bool = False

    def text(self) -> bytes:
        """Return the value for the store."""
        head = b"" if self.expires == math.inf else b"%.6f" % self.expires
        return head + (b"r=" if self.wants_result else b"=") + self.data


class QueuedItem(NamedTuple):
    """An item of a queue, as `fscoord.recipes.Queue.items` lists it.

    Attributes:
        id: the item's id, which `fscoord.recipes.Queue.put` has returned.
        data: the value that was put.
        deliveries: how often the item has been handed out.
        consumer: the process that has the item, ``host:pid``; empty if the item may be taken.
    """

    id: str
    data: bytes
    deliveries: int
    consumer: str


NEVER_TAKEN = Claim(b"", 0, 0, "")
"""The claim used for an item that no consumer has taken yet."""


def new_claims(session: int, deliveries: Iterable[int]) -> list[Claim]:
    """Return claims of this process on items: one for each number of deliveries, which includes the present one.

    No other call returns a claim with the same text.
    """
    owner = system.process_name()
    end = f" {session} {owner} {system.random_bytes(8).hex()}".encode()
    return [Claim(b"%d" % number + end, number, session, owner) for number in deliveries]


def claim_until(due: float) -> bytes:
    """Return the claim of an item that may not be taken before `due`, in seconds since the epoch."""
    return b"0@%.6f" % due


_HEAD: Final = re.compile(rb"([0-9]{1,12}\.[0-9]{6})?(r?)=")
_DELAYED: Final = re.compile(rb"0@([0-9]{1,12}\.[0-9]{6})")


def parse_content(key: bytes, text: bytes) -> Content:
    """Parse `text`, the value of the item key `key`.

    Raises:
        FscoordError: `text` is not an item.
    """
    if text[:1] == b"=":
        return Content(text[1:])
    match = _HEAD.match(text)
    if match is None:
        raise foreign_value_error(key, text, "item of a queue")
    return Content(text[match.end() :], float(match[1] or math.inf), match[2] == b"r")


def parse_claim(key: bytes, text: bytes) -> Claim:
    """Parse `text`, the value of the claim key `key`.

    Raises:
        FscoordError: `text` is not a claim.
    """
    try:
        delayed = _DELAYED.fullmatch(text)
        if delayed is not None:
            return Claim(text, 0, 0, "", float(delayed[1]))
        if b" " not in text:
            return Claim(text, parse_uint63(utf8(text)), 0, "")
        deliveries, session, owner, _ = words_in(text, " ", 4)
        return Claim(text, parse_uint63(deliveries), parse_uint63(session), owner)
    except MalformedText as error:
        raise foreign_value_error(key, text, "claim on an item") from error


Taken = tuple[bytes, Claim]
"""An item's order key, and the claim on it."""


class Items:
    """The keys of the queue `name`. An item is identified by its *order key*; items are taken in sorted order.

    Attributes:
        name: the queue's name.
        numbers: the key that counts the items that were put.
        ends: the key that counts the items that were removed.
        returns: the key that counts the items that were released, and the puts with a priority.
        wakeup: the key whose appearance wakes the consumers that wait for an item.
        removed: the key whose appearance wakes the callers that wait for the removal of an item.
    """

    def __init__(self, store: Store, name: bytes) -> None:
        self._store = store
        self.name = name
        self.numbers: bytes = name + b"/number"
        self.ends: bytes = name + b"/ended"
        self.returns: bytes = name + b"/returns"
        self.wakeup: bytes = name + b"/bell"
        self.removed: bytes = name + b"/removed"

    def order_keys(self) -> tuple[set[bytes], list[bytes]]:
        """Return the order keys of all items, and the sorted order keys of all claims."""
        keys = [key_bytes(key)[len(self.name) :] for key in self._store.list_keys(self.name + b"/")]
        items = {key[len(b"/item/") :] for key in keys if key.startswith(b"/item/")}
        return items, [key[len(b"/claim/") :] for key in keys if key.startswith(b"/claim/")]

    def claims(self, order_keys: Iterable[bytes]) -> dict[bytes, Claim]:
        """Return {order key: claim} for those of the given items that have a claim."""
        start = len(self.claim_key(b""))
        texts = self._store._peek_all(list(map(self.claim_key, order_keys)))
        return {key[start:]: parse_claim(key, text) for key, text in texts.items()}

    def change(
        self,
        compare: dict[bytes, bytes],
        sets: dict[bytes, bytes],
        deletes: Sequence[bytes] = (),
        adds: dict[bytes, int] | None = None,
        wake: bytes = b"",
    ) -> bool:
        """Change several keys if each key in `compare` has the given value, where empty stands for no value, too.

        On a store without transactions, the process may die between two of the steps. `compare` must then have one key.

        Args:
            compare: {key: the value that it must have}.
            sets: {key: its new value}.
            deletes: the keys to delete.
            adds: {key: the number to add}.
            wake: the key to set last, so that those who wait for it look again.

        Returns:
            Whether the comparisons held. If not, nothing was changed.
        """
        store, adds = self._store, adds or {}
        if store._decides:

            def choose(get: Callable[[bytes], bytes | None]) -> Transaction | None:
                if any(get(key) != (value or None) for key, value in compare.items()):
                    return None
                return Transaction({}, {**sets, wake: b"1"} if wake and get(wake) is None else sets, adds, [*deletes])

            return self.transact_by(choose)
        is_one_key = len(compare) == 1 and compare.keys() == sets.keys() and not (deletes or adds or wake)
        if store.capabilities.transacts and not is_one_key:  # `compare_set` is faster for one key
            present = {**sets, wake: b"1"} if wake else sets
            expected = {key: value or None for key, value in compare.items()}
            try:
                return store.transact(compare=expected, set=present, add=adds, delete=deletes)
            except (NotACounterError, CounterRangeError) as error:
                raise counter_error(error) from error
        for key, value in compare.items():
            if key in sets:
                if store.compare_set(key, value, sets[key]) != sets[key]:
                    return False
            elif store.get(key, default=None) != value:
                return False
        for key in sets.keys() - compare.keys():
            store.set(key, sets[key])
        for key in deletes:
            store.delete_key(key)
        for key, amount in adds.items():
            add_checked(store, key, amount)
        if wake and not store.check([wake]):
            store.set(wake, b"1")
        return True

    def transact_by(self, choose: Choose) -> bool:
        """Call `Store._transact_by`, and raise the errors of a recipe for a counter with a wrong value."""
        try:
            return self._store._transact_by(choose)
        except (NotACounterError, CounterRangeError) as error:
            raise counter_error(error) from error

    def is_held(self, taken: Taken) -> bool:
        """Return whether the store still has the claim of `taken`."""
        return self._store.get(self.claim_key(taken[0]), default=None) == taken[1].text

    def remove(self, items: Sequence[Taken], results: dict[bytes, bytes]) -> bool:
        """Remove items that this process has taken, and set `results`: {order key: the text of the result}.

        Returns:
            Whether this process had all of them. If not, nothing was removed.
        """
        claims = {self.claim_key(order_key): claim.text for order_key, claim in items}
        keys = [self.item_key(order_key) for order_key, _ in items]  # first: an item without a claim is handed out
        texts = {self.result_key(order_key): text for order_key, text in results.items()}
        return self.change(claims, texts, [*keys, *claims], {self.ends: len(items)}, self.removed)

    def release(self, taken: Taken) -> bool:
        """Return a taken item to the queue. The item keeps its number of deliveries. Return whether it was taken."""
        order_key, claim = taken
        key = self.claim_key(order_key)
        return self.change({key: claim.text}, {key: b"%d" % claim.deliveries}, adds={self.returns: 1}, wake=self.wakeup)

    def put_back(self, taken: Iterable[Taken]) -> None:
        """Release the items in `taken` that this process still has. Suppress errors of the store."""
        for each in taken:
            with suppress(FscoordError):
                if self.is_held(each):
                    self.release(each)

    def item_key(self, order_key: bytes) -> bytes:
        """Return the key that holds the data of the item `order_key`."""
        return self.name + b"/item/" + order_key

    def claim_key(self, order_key: bytes) -> bytes:
        """Return the key that holds the claim on the item `order_key`."""
        return self.name + b"/claim/" + order_key

    def result_key(self, order_key: bytes) -> bytes:
        """Return the key that holds the result of the item `order_key` until a producer takes it."""
        return self.name + b"/result/" + order_key


class Item(Undoable):
    """An item that this process has taken from a queue. Call `ack` when it is processed, or `release` to return it.

    As a context manager, an item is acknowledged at the end of the ``with`` block, and released if the block raises. On
    a store with sessions, an unfinished item returns to the queue when this process dies or closes its store.

    Attributes:
        data: the value that was put.
        deliveries: how often the item has been handed out, including this time. A number above 1 means that an earlier
            consumer died or released the item.
    """

    __reduce__ = refuse_copies

    def __init__(self, items: Items, taken: Taken, content: Content) -> None:
        self.data = content.data
        self.deliveries: int = taken[1].deliveries
        self._items = items
        self._taken = taken
        self._wants_result = content.wants_result
        self._is_over = False

    def __repr__(self) -> str:
        return shown(self, self._items._store, self._items.name, "finished" if self._is_over else "taken")

    def ack(self, result: Value = b"") -> None:
        """Remove the item from the queue for good.

        Args:
            result: the value for `fscoord.recipes.Queue.result`. It is kept only if the item was put with
                ``wants_result=True``.

        Raises:
            RuntimeError: the item was acknowledged or released already.
            LockLostError: another process took this process for dead, and another consumer has taken the item.
        """
        self._end(lambda taken: self._items.remove([taken], self._results(value_bytes(result))))

    def release(self) -> None:
        """Return the item to the queue, at its old position. Raise the errors of `ack`."""
        self._end(self._items.release)

    def _results(self, value: bytes) -> dict[bytes, bytes]:
        return {self._taken[0]: b"=" + value} if self._wants_result else {}

    def check(self) -> None:
        """Raise the errors of `ack` if this process no longer has the item."""
        if self._is_over:
            self._refuse()
        if not self._items.is_held(self._taken):
            raise self._loss()

    @undone_by(lambda item, refused, _: refused or item._put_back())  # `step` may be half done
    def _end(self, refused: list[object], _: object, step: Callable[[Taken], bool]) -> None:
        if self._is_over:
            refused.append(step)
            self._refuse()
        self._is_over = True
        if not step(self._taken):
            raise self._loss()

    def _put_back(self) -> None:
        """Release the item if this process still has it. Suppress errors of the store."""
        self._is_over = True
        self._items.put_back([self._taken])

    def _refuse(self) -> NoReturn:
        name = key_text(self._items.name)
        raise RuntimeError(f"this item of the queue {name!r} was acknowledged or released already")

    def _loss(self) -> LockLostError:
        return LockLostError(
            f"an item of the queue {key_text(self._items.name)!r} is no longer held by {self._taken[1].owner}: another"
            " process took the holder for dead, and the item was handed out again"
        )

    def __enter__(self) -> Item:
        return self

    @undone_by(lambda item, *_: item._put_back(), FscoordError)
    def __exit__(self, _: object, __: object, kind: object, *error: object) -> None:
        if self._is_over:
            return
        if kind is None:
            self.ack()
        else:
            with suppress(FscoordError):  # the block's own error matters more
                self.release()
