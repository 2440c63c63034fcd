"""`Items` reads and writes the keys of a queue. A consumer takes an item with a `Claim`, and gets an `Item`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple, NoReturn

from fscoord._arguments import MalformedText, key_bytes, key_text, parse_uint63, refuse_copies, utf8, words_in
from fscoord._runtime import system
from fscoord.errors import FscoordError, LockLostError
from fscoord.recipes._cleanup import Undoable, undone_by
from fscoord.recipes._keys import add_checked, foreign_value_error
from fscoord.store import Store, shown


class Claim(NamedTuple):
    """The value of an item's claim key. A consumer writes a claim to take an item or to release it.

    Attributes:
        text: the value in the store: deliveries, session, owner and a random word, which makes each claim unique. The
            claim of a released item has only the deliveries.
        deliveries: how often the item has been handed out.
        session: the session number of the consumer's handle; 0 without sessions, or if the item was released.
        owner: the consumer's process, ``host:pid``; empty if the item was released.
    """

    text: bytes
    deliveries: int
    session: int
    owner: str


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


def new_claim(session: int, deliveries: int) -> Claim:
    """Return a unique claim of this process. `deliveries` is the number of deliveries, including the present one."""
    owner = system.process_name()
    text = f"{deliveries} {session} {owner} {system.random_bytes(8).hex()}"
    return Claim(text.encode(), deliveries, session, owner)


def parse_claim(key: bytes, text: bytes) -> Claim:
    """Parse `text`, the value of the claim key `key`.

    Raises:
        FscoordError: `text` is not a claim.
    """
    try:
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
        returns: the key that counts the items that were released.
        wakeup: the key whose appearance wakes the consumers that wait for an item.
        removed: the key whose appearance wakes the callers that wait for the removal of an item.
    """

    def __init__(self, store: Store, name: bytes) -> None:
        self._store = store
        self.name = name
        self.numbers: bytes = name + b"/number"
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
        claims = {}
        for order_key in order_keys:
            text = self._store.get(self.claim_key(order_key), default=None)
            if text is not None:
                claims[order_key] = parse_claim(self.claim_key(order_key), text)
        return claims

    def is_held(self, taken: Taken) -> bool:
        """Return whether the store still has the claim of `taken`."""
        return self._store.get(self.claim_key(taken[0]), default=None) == taken[1].text

    def remove(self, taken: Taken) -> None:
        """Remove an item that this process has taken."""
        order_key = taken[0]
        self._store.delete_key(self.item_key(order_key))  # first: an item without a claim would be handed out
        self._store.delete_key(self.claim_key(order_key))
        if not self._store.check([self.removed]):
            self._store.set(self.removed, b"1")

    def release(self, taken: Taken) -> None:
        """Return a taken item to the queue. The item keeps its number of deliveries."""
        order_key, claim = taken
        self._store.compare_set(self.claim_key(order_key), claim.text, str(claim.deliveries))
        add_checked(self._store, self.returns)
        self._store.set(self.wakeup, b"1")

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

    def __init__(self, items: Items, taken: Taken, data: bytes) -> None:
        self.data = data
        self.deliveries: int = taken[1].deliveries
        self._items = items
        self._taken = taken
        self._is_over = False

    def __repr__(self) -> str:
        return shown(self, self._items._store, self._items.name, "finished" if self._is_over else "taken")

    def ack(self) -> None:
        """Remove the item from the queue for good.

        Raises:
            RuntimeError: the item was acknowledged or released already.
            LockLostError: another process took this process for dead, and another consumer has taken the item.
        """
        self._end(self._items.remove)

    def release(self) -> None:
        """Return the item to the queue, at its old position. Raise the errors of `ack`."""
        self._end(self._items.release)

    def check(self) -> None:
        """Raise the errors of `ack` if this process no longer has the item."""
        if self._is_over:
            self._refuse()
        if not self._items.is_held(self._taken):
            raise self._loss()

    @undone_by(lambda item, refused, _: refused or item._put_back())  # `step` may be half done
    def _end(self, refused: list[object], _: object, step: Callable[[Taken], None]) -> None:
        if self._is_over:
            refused.append(step)
            self._refuse()
        self._is_over = True
        if not self._items.is_held(self._taken):
            raise self._loss()
        step(self._taken)

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
