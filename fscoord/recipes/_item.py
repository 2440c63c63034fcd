"""`Items`: what a queue has in the store, under which keys; and `Item`, one of them that this process has taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from fscoord.arguments import key_bytes, key_text
from fscoord.errors import FscoordError, LockLostError
from fscoord.recipes._claim import Claim, read_claim
from fscoord.recipes._cleanup import await_end, go_on_in_thread
from fscoord.recipes._keys import counted, read_now
from fscoord.store import Store

__all__ = ["Item", "Items", "Taken"]

Taken = tuple[bytes, Claim]
"""An item's place in the order, and the claim on it."""


class Items:
    """The items of the queue `name`, by their places in its order.

    Attributes:
        name: the queue's name.
        numbers: the key that counts what was put.
        returns: the key that counts what was released.
        bell: the key whose appearance wakes those who wait.
    """

    def __init__(self, store: Store, name: bytes) -> None:
        self._store = store
        self.name = name
        self.numbers, self.returns, self.bell = (name + end for end in (b"/number", b"/returns", b"/bell"))

    def places(self) -> tuple[set[bytes], list[bytes]]:
        """Return the places of all items, and the places of those that somebody has, in their order."""
        keys = [key_bytes(key)[len(self.name) :] for key in self._store.list_keys(self.name + b"/")]
        items = {key[len(b"/item/") :] for key in keys if key.startswith(b"/item/")}
        return items, [key[len(b"/claim/") :] for key in keys if key.startswith(b"/claim/")]

    def claims(self, places: Iterable[bytes]) -> dict[bytes, Claim]:
        """Return the claims that stand at `places`."""
        claims = {}
        for place in places:
            text = read_now(self._store, self.claim_key(place))
            if text is not None:
                claims[place] = read_claim(self.claim_key(place), text)
        return claims

    def is_held(self, taken: Taken) -> bool:
        """Return whether this claim is the one that counts."""
        return read_now(self._store, self.claim_key(taken[0])) == taken[1].text

    def remove(self, place: bytes) -> None:
        """Remove an item that this process has."""
        self._store.delete_key(self.item_key(place))  # in this order: an item without a claim is handed out
        self._store.delete_key(self.claim_key(place))

    def release(self, place: bytes) -> None:
        """Let somebody else take an item that this process has."""
        self._store.delete_key(self.claim_key(place))
        counted(self._store, self.returns)
        self._store.set(self.bell, b"1")

    def put_back(self, taken: Iterable[Taken]) -> None:
        """Give back what of `taken` this process has, on the way out with another error."""
        for each in taken:
            with suppress(FscoordError):
                if self.is_held(each):
                    self.release(each[0])

    def item_key(self, place: bytes) -> bytes:
        """Return the key under which the item stands."""
        return self.name + b"/item/" + place

    def claim_key(self, place: bytes) -> bytes:
        """Return the key under which the claim on it stands."""
        return self.name + b"/claim/" + place


class Item:
    """What was taken from a queue, until it is acknowledged or released.

    As a context manager it is acknowledged at the end of the ``with``, and released if that raises. If neither happens
    it comes back to the queue when this process dies, or its store is closed, where the store can tell.

    Attributes:
        data: what was put.
    """

    def __init__(self, items: Items, taken: Taken, data: bytes) -> None:
        self.data = data
        self._items = items
        self._taken = taken
        self._is_over = False

    def ack(self) -> None:
        """Remove it for good.

        Raises:
            RuntimeError: it was acknowledged or released already.
            LockLostError: this process was taken for dead, and another one has it, or has done it.
        """
        self._end(self._items.remove)

    def release(self) -> None:
        """Let somebody else take it, at the place in the order that it had; see `ack` for errors."""
        self._end(self._items.release)

    def check(self) -> None:
        """Raise an error if this process has it no longer; see `ack`."""
        if self._is_over:
            self._refuse()
        if not self._items.is_held(self._taken):
            raise self._loss()

    def _end(self, step: Callable[[bytes], None]) -> None:
        if self._is_over:
            self._refuse()
        over: list[object] = []
        try:
            self._is_over = True
            if self._items.is_held(self._taken):
                return step(self._taken[0])
        except BaseException:  # nobody knows how far that came; each line of this is explained in `_cleanup`
            try:
                self._put_back()
            except BaseException:
                go_on_in_thread((over, self._put_back))
                await_end(over)
                raise
            raise
        raise self._loss()

    def _put_back(self) -> None:
        """Give it back, if it is held still, on the way out with another error."""
        self._is_over = True
        self._items.put_back([self._taken])

    def _refuse(self) -> NoReturn:
        name = key_text(self._items.name)
        raise RuntimeError(f"this item of the queue {name!r} was acknowledged or released already")

    def _loss(self) -> LockLostError:
        return LockLostError(
            f"an item of the queue {key_text(self._items.name)!r} is no longer held by {self._taken[1].owner}: it was"
            " taken for dead, and its item handed out again"
        )

    def __enter__(self) -> Item:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        over: list[object] = []
        try:
            if self._is_over:
                return
            if kind is None:
                self.ack()
            else:
                with suppress(FscoordError):  # what was raised matters more
                    self.release()
        except FscoordError:
            raise
        except BaseException:
            try:
                self._put_back()
            except BaseException:
                go_on_in_thread((over, self._put_back))
                await_end(over)
                raise
            raise
