"""Fair locks: `Lock`, `RLock`, `Semaphore` and `ReadWriteLock`. Contenders acquire in the order of their requests.

`Fenced` is a value that a former holder of a lock can't change once a later holder has written it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fscoord._arguments import (
    Key,
    MalformedText,
    Timeout,
    Value,
    check_positive,
    key_bytes,
    key_text,
    parse_uint63,
    refuse_copies,
    to_seconds,
    value_bytes,
)
from fscoord._runtime import system
from fscoord._waiting.awaited import SEMAPHORE
from fscoord._waiting.wait import VALUES, WaitRequest, WaitSteps
from fscoord.errors import FscoordError, LockLostError, StaleTokenError
from fscoord.recipes._cleanup import Undoable, in_steps, undone_by
from fscoord.recipes._entry import Entry
from fscoord.recipes._hold import Contender, Exclusive, HeldEntry, releasing
from fscoord.recipes._keys import change, foreign_value_error
from fscoord.recipes._line import caller_of, callers, readers_or_writer
from fscoord.recipes._reentrant import Reentrant
from fscoord.store import Store, needed_store, shown


class Lock(Exclusive):
    """A lock that at most one process or thread holds at a time.

    The methods are those of `threading.Lock`, so a `Lock` can replace a `threading.Lock`. A ``with`` statement waits
    for at most `timeout`. The lock is fair: contenders acquire it in the order of their requests, and a release wakes
    only the next contender, as in ZooKeeper's lock recipe.

    If the holder dies or closes its store, a `~fscoord.FileStore` on one machine frees the lock within 100 ms. Without
    a `ttl`, a stopped process keeps the lock. Without a `ttl`, a dead process also keeps the lock on a store that can't
    detect deaths (`~fscoord.Store.has_liveness`). A holder that was taken for dead by mistake may still write. Only the
    fencing `token` protects the data from these writes; see `Fenced`.

    Args:
        store: the store that all contenders share.
        name: the lock's name in the store. Keys that begin with the name and a slash belong to the lock.
        timeout: how long ``with`` waits, in seconds or as a `timedelta`; None means the store's timeout.
        ttl: the length of the lock's lease, in seconds or as a `timedelta`; None means no lease. A thread renews the
            lease while the lock is held. If `ttl` passes by a contender's clock without a renewal, the contender takes
            the lock away. So a lease ends the hold of a stopped process. A lease also ends the hold of a dead process
            on a store that can't detect deaths. Leases were invented by C. Gray and D. Cheriton (1989).
        label: a text of at most 100 characters, such as the name of the job, that `holders`, `waiters`, error messages
            and ``fscoord ps`` show beside the process.
        auto_renew: whether a thread renews the lease. If False, the program calls `renew` within each `ttl`. So the
            lease also ends the hold of a process whose other threads run, but whose work hangs.

    Raises:
        StoreTimeoutError: at the beginning of a ``with``, other processes held the lock for the whole timeout. The
            error names the holder.
        LockLostError: at the end of a ``with``, this object had already lost the lock.
        ValueError: `timeout` is negative, `ttl` is not a time above zero, `label` is too long, or `auto_renew` is False
            without a `ttl`.
    """

    _what = "the lock"

    def locked(self) -> bool:
        """Return whether any process or thread holds the lock."""
        return bool(self.holders())


class RLock(Reentrant, Lock):
    """A `Lock` that the holding thread may acquire again, like `threading.RLock`.

    The thread must release the lock as often as it has acquired it. An acquisition through another object waits, even
    in the same thread.

    A `threading.Condition` may use the lock. ``notify`` of the condition wakes only threads of this process.
    """

    # `threading.Condition` calls these three methods. Without `_is_owned` it would take a failed ``acquire(False)`` for
    # ownership.

    def _is_owned(self) -> bool:
        return self._owned_by(self._here.__dict__) is not None

    def _release_save(self) -> int:
        owned = self._owned_by(self._here.__dict__)
        if owned is None:
            raise self._not_held()
        levels = len(owned.levels)
        for _ in range(levels):
            self.release()
        return levels

    def _acquire_restore(self, levels: int) -> None:
        for _ in range(levels):
            self.acquire()


class _NotHeldError(RuntimeError, ValueError):
    """Raised by `release` if the object holds nothing.

    The error is a `ValueError`, as in `threading.BoundedSemaphore`, and a `RuntimeError`, as in the other locks.
    """


class Semaphore(Exclusive):
    """A semaphore that can be acquired at most `value` times at once, by processes or threads.

    The methods are those of `threading.BoundedSemaphore`. One thread may acquire the semaphore several times. An object
    can release only its own acquisitions, the latest first. Like `fscoord.recipes.Lock`, a semaphore is fair and has
    fencing tokens, and the death of a holder releases all its acquisitions.

    Args:
        store: the store that all contenders share.
        name: the semaphore's name in the store. Keys that begin with the name and a slash belong to the semaphore.
        value: the greatest number of acquisitions at the same time. All contenders must pass the same value.
        timeout: how long ``with`` waits, in seconds or as a `timedelta`; None means the store's timeout.
        ttl, label, auto_renew: as for `fscoord.recipes.Lock`.

    Raises:
        ValueError: `value` is below 1. `acquire` also raises a `ValueError`, if another contender has passed another
            value. The other errors are those of `fscoord.recipes.Lock`.
    """

    _what = "the semaphore"
    _kind = SEMAPHORE

    def __init__(
        self,
        store: Store,
        name: Key,
        value: int = 1,
        timeout: Timeout | None = None,
        ttl: Timeout | None = None,
        *,
        label: str = "",
        auto_renew: bool = True,
    ) -> None:
        self._value = check_positive("value", value)
        self._mode = str(self._value)
        super().__init__(store, name, timeout, ttl, label=label, auto_renew=auto_renew)

    @releasing
    def release(self, gone: list[HeldEntry | str], here: object, n: int = 1) -> None:
        """Release the latest `n` acquisitions of this object, as `threading.BoundedSemaphore.release` does.

        Raises:
            ValueError: `n` is below 1, or this object has fewer than `n` acquisitions. Nothing was released.
            LockLostError: this object had already lost an acquisition.
        """
        if n != 1:
            gone.append("")  # if a signal interrupts these checks, `_finish` must release nothing
            check_positive("n", n)
            self._current()
            if len(self._held) < n:
                raise ValueError(f"{self._what} {self.name!r} is not held {n} times by this object; none was released")
            gone.clear()
        for _ in range(n):
            self._release_one(gone, here)

    def _not_held(self) -> Exception:
        return _NotHeldError(str(super()._not_held()))

    def _policy(self, entries: list[Entry]) -> int:
        for other in [entry for entry in entries if entry.mode != self._mode]:
            if not other.mode.isdigit():
                raise ValueError(
                    f"{other.owner} uses {self.name!r} as a lock, not as a semaphore: use another name for the lock or"
                    " for the semaphore"
                )
            raise ValueError(
                f"the semaphore {self.name!r} has value={self._value} here and {other.mode} for {other.owner}: all"
                " contenders must give the same value"
            )
        return min(self._value, len(entries))


class PlainSide(Exclusive):
    """The reader side or the writer side of a `ReadWriteLock`. The methods are those of `fscoord.recipes.Lock`."""

    _policy = staticmethod(readers_or_writer)
    _of_both_sides: list[list[HeldEntry]]  # the lists of holds; a reference to the other side would be a cycle

    def __init__(self, mode: str, what: str, *arguments: Any, **options: Any) -> None:
        self._mode = mode
        self._what = what
        super().__init__(*arguments, **options)

    def _check_wait(self, entry: Entry) -> None:
        # An entry waits for every holder before it. If this thread is one of the holders, it would wait for itself: a
        # reader that wants to write, or a reader behind a writer that waits for this thread. Holds of other objects do
        # not count, because other parts of the program may release them meanwhile.
        caller = callers[entry.id]()
        held_here = {held.entry.id for holds in self._of_both_sides for held in list(holds)}
        own = [each.mode for each in self._line.entries() if each.id in held_here and caller_of(each) is caller]
        if own:
            raise self._own_hold(own[0])

    def _own_hold(self, mode: str) -> RuntimeError:
        """Return the error of an acquisition that would wait for a hold with `mode` of the same thread or task."""
        held = "reading" if mode == "r" else "writing"
        return RuntimeError(
            f"{self._what} {self.name!r} was not acquired: the same thread or task holds the lock for {held}, and"
            " would wait for itself; release that side first"
        )


class Side(Reentrant, PlainSide):
    """A side of a `ReadWriteLock`. Both sides share `_held`, because a thread has one hold of the lock."""

    def _acquire(self, got: list[str], here: object, blocking: bool, timeout: Timeout | None) -> bool | WaitSteps[bool]:
        owned = self._owned_by(here)
        if owned is not None and (owned.entry.mode, self._mode) == ("r", "w"):
            if blocking and self._limit(blocking, timeout) > 0:
                raise self._own_hold("r")
            return False
        return super()._acquire(got, here, blocking, timeout)

    def _pop_level(self, owned: HeldEntry, name: str) -> None:
        """Forget the acquisition `name`. If it was the last one for writing, the hold goes on for reading."""
        if owned.entry.mode == "w" and all(mode == "r" for level, mode in owned.levels if level != name):
            try:
                self._read_on(owned)
            except LockLostError:
                super()._pop_level(owned, name)
                raise
        super()._pop_level(owned, name)

    def _read_on(self, owned: HeldEntry) -> None:
        """Change the hold from writing to reading in one write, so that no other writer comes between.

        Raises:
            LockLostError: the hold was lost.
        """
        if not self._line.set_mode(owned.entry.id, "r"):
            raise self._lost(owned.entry)
        owned.entry = owned.entry._replace(mode="r")


class PlainReadWriteLock:
    """A read-write lock whose holds belong to the object, as those of a `Lock` do, and not to a thread or task.

    Integrations use it for interfaces in which another thread may release. The arguments are those of `ReadWriteLock`.
    """

    __reduce__ = refuse_copies
    _side: type[PlainSide] = PlainSide

    def __init__(
        self,
        store: Store,
        name: Key,
        timeout: Timeout | None = None,
        ttl: Timeout | None = None,
        *,
        label: str = "",
        auto_renew: bool = True,
    ) -> None:
        options = {"timeout": timeout, "ttl": ttl, "label": label, "auto_renew": auto_renew}
        self.reader: PlainSide = self._side("r", "the lock for reading", store, name, **options)
        self.writer: PlainSide = self._side("w", "the lock for writing", store, name, **options)
        self._share_holds()

    def _share_holds(self) -> None:
        """Give each side the lists of holds of both sides."""
        self.reader._of_both_sides = self.writer._of_both_sides = [self.reader._held, self.writer._held]

    def __repr__(self) -> str:
        modes = self._modes()
        held = [what for mode, what in (("r", "reading"), ("w", "writing")) if mode in modes]
        state = f"held for {' and '.join(held)}" if held else "not held"
        return shown(self, self.reader._store, key_bytes(self.reader.name), state)

    def _modes(self) -> set[str]:
        """Return the modes in which this process holds the lock through this object."""
        return {side._mode for side in (self.reader, self.writer) if side._current()}

    def held_side(self) -> str | None:
        """Return ``"reader"`` or ``"writer"``, the side that any process holds; None if the lock is free."""
        modes = {entry.mode for entry in self.reader._line.living() if entry.token}
        return "writer" if "w" in modes else "reader" if modes else None

    def holders(self) -> list[Contender]:
        """Return the readers that hold the lock, or the one writer, in the order of their tokens."""
        return self.reader.holders()

    def waiters(self) -> list[Contender]:
        """Return the contenders that wait for either side, in the order of their requests."""
        return self.reader.waiters()


class ReadWriteLock(PlainReadWriteLock, Undoable):
    """A lock that any number of readers or one writer can hold at a time.

    Contenders acquire in the order of their requests, so neither readers nor writers starve. Readers that wait next to
    each other acquire the lock together. The order is that of ZooKeeper's recipe for shared locks. Like
    `fscoord.recipes.Lock`, both sides have fencing tokens and the same errors, and the death of a holder releases its
    lock.

    A thread or task that holds a side may acquire the same side again, and a writer may also acquire the reader's side.
    Like an `RLock`, it must release as often as it has acquired, and no other thread or task can release for it. A
    writer that has acquired the reader's side and releases the writer's side goes on as a reader, as after `downgrade`.
    A reader can't become a writer: two readers that both try would wait for each other. So its acquisition of the
    writer's side raises `RuntimeError`, or returns False if it does not wait.

    Args:
        store: the store that all contenders share.
        name: the lock's name in the store. Keys that begin with the name and a slash belong to the lock.
        timeout: how long ``with`` waits, in seconds or as a `timedelta`; None means the store's timeout.
        ttl, label, auto_renew: as for `fscoord.recipes.Lock`.

    Attributes:
        reader: the side for reading: ``with lock.reader:``, or ``acquire`` and ``release``.
        writer: the side for writing.
    """

    _side = Side
    reader: Side
    writer: Side

    def _share_holds(self) -> None:
        reader, writer = self.reader, self.writer
        self._store, self._here = reader._store, reader._here
        writer._here, writer._held = reader._here, reader._held
        super()._share_holds()

    def _modes(self) -> set[str]:
        return {held.entry.mode for held in list(self.reader._held) if held.epoch == system.process_epoch()}

    @undone_by(lambda *_: None)
    def own_side(self, _made: list[str], here: object) -> str | None:
        """Return ``"reader"`` or ``"writer"``, the side that the calling thread or task holds; None if it holds none.

        The answer is from this process's memory. The method ``check`` of the side asks the store.
        """
        owned = self.reader._owned_by(here)
        return None if owned is None else "reader" if owned.entry.mode == "r" else "writer"

    @undone_by(lambda lock, _, here: lock._finish(here), FscoordError)
    def downgrade(self, _made: list[str], here: object) -> None:
        """Go on as a reader with the writer's side that the calling thread or task holds. No writer comes between.

        The readers that wait next in line acquire, too. Release the writer's side as without this call, for example at
        the end of the ``with``. If a signal interrupts this call, the lock is downgraded.

        Raises:
            RuntimeError: this thread or task does not hold the writer's side, or has acquired it more than once: the
                outer block would go on as if it could write. Nothing was changed.
            LockLostError: the hold was lost before.
        """
        owned = self.reader._owned_by(here)
        levels = [] if owned is None or owned.entry.mode == "r" else [mode for _, mode in owned.levels if mode == "w"]
        if len(levels) != 1:
            state = "holds it more than once: release it to one acquisition first" if levels else "does not hold it"
            raise RuntimeError(
                f"the lock for writing {self.writer.name!r} was not downgraded: the calling thread or task {state}"
            )
        self._read_on(here)

    def _read_on(self, here: object) -> None:
        owned = self.reader._owned_by(here)
        if owned is not None and owned.entry.mode == "w" and [mode for _, mode in owned.levels].count("w") == 1:
            self.reader._read_on(owned)

    def _finish(self, here: object) -> None:
        """Complete an interrupted `downgrade`. This method may be called twice."""
        with suppress(FscoordError):
            self._read_on(here)


class Fenced:
    """A value in the store that refuses writes with an old fencing token.

    A process may be stopped while it holds a lock, lose the lock, continue and write. The lock can't prevent this
    write. The target of the write can prevent it, because each hold has a higher token than all earlier holds
    (`fscoord.recipes.Lock.token`, `fscoord.recipes.Election.term`). A write is refused if its token is below the
    highest token so far. Token and value are stored under one key, as ``token value``, and change atomically on every
    store. The idea is Martin Kleppmann's, "How to do distributed locking" (2016).

    Args:
        store: the store that holds the value.
        key: the key of the value. Write nothing else under this key. If the key is deleted, the token is lost too.
    """

    def __init__(self, store: Store, key: Key) -> None:
        self._store = needed_store(store)
        self._key = key_bytes(key)

    def __repr__(self) -> str:
        return shown(self, self._store, self._key)

    def set(self, value: Value, token: int) -> None:
        """Set the value to `value`, unless an earlier write had a higher token than `token`.

        Raises:
            StaleTokenError: an earlier write had a higher token. The value is unchanged.
            StoreTimeoutError: other processes changed the value before each try, until the store's timeout was over.
            FscoordError: the key holds a value that another program wrote. The value is unchanged.
            ValueError: `token` is below 1.
        """
        token, data = check_positive("token", token), value_bytes(value)

        def written(text: bytes) -> bytes:
            seen = self._split(text)[0] if text else 0
            if seen > token:
                raise StaleTokenError(
                    f"key {key_text(self._key)!r} was written with token {seen}, so token {token} is stale: another"
                    " process has acquired the lock since; nothing was written"
                )
            return b"%d " % token + data

        change(self._store, self._key, written)

    @in_steps
    def get(self) -> WaitSteps[bytes]:
        """Return the value. If there is no value yet, wait for the first value.

        Raises:
            StoreTimeoutError: there was no value within the store's timeout.
            FscoordError: the key holds a value that another program wrote.
        """
        text = self._store.get(self._key, default=None)
        if text is None:
            (text,) = yield WaitRequest(VALUES, [self._key], to_seconds(self._store.timeout))
        return self._split(text)[1]

    def token(self) -> int:
        """Return the highest token with which the value was written; 0 before the first value.

        Raises:
            FscoordError: the key holds a value that another program wrote.
        """
        text = self._store.get(self._key, default=None)
        return 0 if text is None else self._split(text)[0]

    def _split(self, text: bytes) -> tuple[int, bytes]:
        token, space, value = text.partition(b" ")
        try:
            return parse_uint63(token if space else b""), value
        except MalformedText as error:
            raise foreign_value_error(self._key, text, "value with a token") from error
