"""`FscoordDriver` is a driver of OpenStack's coordination library tooz, for ``fscoord:///path``, a store in a file.

The module implements the interface of ``tooz.coordination.CoordinationDriver`` and ``tooz.locking.Lock``, as
https://docs.openstack.org/tooz/latest/ documents them. tooz finds the driver by its entry point. The module needs the
extra ``fscoord[tooz]``.

A group consists of a key, which shows that the group exists, and a `~fscoord.recipes.Membership`. A process that
creates, joins or deletes a group holds a lock of the group while it reads the state of the group and then writes. The
write is one atomic operation. So the group stays intact if the process dies, and the death releases the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import quote_from_bytes, unquote_to_bytes

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import FscoordError, LockLostError, StoreError, StoreTimeoutError, needed_extra
from fscoord.recipes import Election, Lock, Membership, Participant, force_release
from fscoord.recipes.lock import PlainReadWriteLock
from fscoord.store import Store
from fscoord.stores.url import open_store, with_options

with needed_extra("fscoord.integrations.tooz", "tooz", "tooz"):
    import tooz
    from tooz import coordination, locking, utils

__all__ = ["FscoordDriver", "FscoordLock"]

P = ParamSpec("P")
R = TypeVar("R")

GROUPS: Final = "tooz/groups/"
"""The prefix of the keys of existing groups."""
MEMBERS: Final = "tooz/members/"
LEADERS: Final = "tooz/leaders/"
LOCKS: Final = "tooz/locks/"
CHANGES: Final = "tooz/changes/"
"""The prefix of the locks that a process holds while it creates, joins or deletes a group."""

HEARTBEAT_S: Final = 10.0
"""How many seconds `FscoordDriver.heartbeat` asks the caller to wait. The driver needs no heartbeats."""


class FscoordLock(locking.Lock):
    """A lock of tooz, exclusive or shared, made like a `~fscoord.recipes.ReadWriteLock`.

    Contenders acquire the lock in the order of their requests, across processes and hosts. The lock is released when
    its holder dies, and when the coordinator that made the holder's object stops. An object that holds the lock shared
    may acquire it shared again. Several threads may use one object. As in tooz's drivers, a thread may release a lock
    that another thread has acquired.

    Args:
        store: the store of the coordinator.
        name: the lock's name.
    """

    def __init__(self, store: Store, name: bytes) -> None:
        super().__init__(name)
        self._store = store
        self._key = LOCKS + _quoted(name)
        self._lock = PlainReadWriteLock(store, self._key)
        self._state_lock = system.mutex()
        self._again = 0  # how often this object acquired the lock shared while it already held it shared

    def acquire(self, blocking: bool | float = True, shared: bool = False, timeout: float | None = None) -> bool:
        """Acquire the lock. Return whether this object has acquired it.

        Args:
            blocking: whether to wait. A number is a timeout in seconds.
            shared: whether to hold the lock together with other holders that hold it shared.
            timeout: the longest wait, in seconds; None means no limit. A call that does not block ignores this
                argument.
        """
        waits, limit = utils.convert_blocking(blocking, timeout)
        with _tooz_errors(f"the lock {self._key!r}"):
            if shared and self._acquire_again():
                return True
            side = self._lock.reader if shared else self._lock.writer
            if not waits:
                return side.acquire(blocking=False)
            return side.acquire(timeout=-1 if limit is None else limit)

    def _acquire_again(self) -> bool:
        """If this object holds the lock shared, count one more acquisition, and return True.

        A new request could deadlock: the request would wait for a waiting writer, and the writer waits for this object.
        """
        with self._state_lock:
            is_held = _is_valid(self._lock.reader.check)
            if is_held:
                self._again += 1
            return is_held

    def release(self) -> bool:
        """Release the lock, and return whether this object held the lock until now."""
        with _tooz_errors(f"the lock {self._key!r}"), self._state_lock:
            if self._again and _is_valid(self._lock.reader.check):
                self._again -= 1
                return True
            self._again = 0
            return _release(self._lock.writer.release) or _release(self._lock.reader.release)

    def is_still_owner(self) -> bool:
        """Return whether this object holds the lock, according to the store."""
        with _tooz_errors(f"the lock {self._key!r}"):
            return _is_valid(self._lock.writer.check) or _is_valid(self._lock.reader.check)

    @property
    def acquired(self) -> bool:
        """Whether this object holds the lock, according to the store."""
        return self.is_still_owner()

    def break_(self) -> bool:
        """Take the lock away from all holders, and return whether the lock had a holder.

        The holders are not notified. ``release`` and ``is_still_owner`` of a former holder return False.
        """
        with _tooz_errors(f"the lock {self._key!r}"):
            broken = [force_release(self._store, self._key, holder.token) for holder in self._lock.holders()]
        return any(broken)


def _is_valid(check: Callable[[], None]) -> bool:
    try:
        check()
        return True
    except LockLostError:
        return False


def _release(release: Callable[[], None]) -> bool:
    """Call `release`, and return whether the hold was valid until then."""
    try:
        release()
        return True
    except LockLostError:
        return False
    except FscoordError:
        raise
    except RuntimeError as error:  # nothing was held
        raise_if_foreign(error)
        return False


@contextmanager
def _tooz_errors(what: str) -> Iterator[None]:
    """Convert fscoord's errors to tooz's, for callers that catch ``ToozError``. The message begins with `what`."""
    try:
        yield
    except StoreTimeoutError as error:
        raise coordination.OperationTimedOut(f"{what}: {error}", cause=error) from error
    except StoreError as error:
        raise coordination.ToozConnectionError(f"{what}: {error}", cause=error) from error
    except FscoordError as error:
        raise tooz.ToozError(f"{what}: {error}", cause=error) from error


def _of_group(
    method: Callable[Concatenate[FscoordDriver, bytes, P], R],
) -> Callable[Concatenate[FscoordDriver, bytes, P], coordination.CoordinatorResult[R]]:
    """Return a method that calls `method` in the executor, with the group's id as bytes, and returns tooz's future."""

    def submit(
        self: FscoordDriver, group_id: bytes, /, *arguments: P.args, **named: P.kwargs
    ) -> coordination.CoordinatorResult[R]:
        def call() -> R:
            with _tooz_errors(f"the group {_text(group_id)!r}"):
                return method(self, _id(group_id), *arguments, **named)

        return coordination.CoordinatorResult(self._executor.submit(call))

    return wraps(method)(submit)


class FscoordDriver(coordination.CoordinationDriverCachedRunWatchers, coordination.CoordinationDriverWithExecutor):
    """The coordinator for ``fscoord:///shared/job/store``: groups, watchers, elections and locks in a store.

    Apart from its scheme, the URL is that of `~fscoord.open_store` for a file, with the same options in its query. The
    keyword arguments of ``tooz.coordination.get_coordinator`` are options, too. tooz's own option ``executor`` is
    ``sync`` by default: a method returns when its work is done. With ``executor=thread`` a method returns at once, and
    ``get()`` of the future waits for the end of the work. The executor ``thread`` is slower, because the work takes
    less time than its transfer to the thread, and because tooz's thread delays ``stop`` by a second.

    As soon as the death of a member is detected, the member leaves its groups, loses its locks and stops leading. No
    process sends heartbeats, and no timeout has to pass. So ``requires_beating`` is False.

    Args:
        member_id: the id of this member.
        parsed_url: the URL, in its parts.
        options: the options of the query and of the call, each with a list of values.
    """

    CHARACTERISTICS = (
        coordination.Characteristics.NON_TIMEOUT_BASED,
        coordination.Characteristics.DISTRIBUTED_ACROSS_THREADS,
        coordination.Characteristics.DISTRIBUTED_ACROSS_PROCESSES,
        coordination.Characteristics.DISTRIBUTED_ACROSS_HOSTS,
        coordination.Characteristics.LINEARIZABLE,
        coordination.Characteristics.SERIALIZABLE,
    )

    def __init__(self, member_id: bytes, parsed_url: Any, options: dict[str, Any]) -> None:
        super().__init__(_id(member_id), parsed_url, {"executor": ["sync"], **options})
        self.requires_beating = False
        self._host, self._path = parsed_url.netloc, parsed_url.path
        self._opened: Store | None = None
        self._own: dict[bytes, Membership] = {}
        self._elections: dict[bytes, Election] = {}

    @property
    def _url(self) -> str:
        return f"fscoord://{self._host}{self._path}"

    @property
    def _store(self) -> Store:
        if self._opened is None:
            raise tooz.ToozError(f"{self._url}: the coordinator is not started; call start() first")
        return self._opened

    def _start(self) -> None:
        """Open the store, and register this member's session.

        Raises:
            ToozConnectionError: the address names a host or no path, an option is unknown or invalid, the store can't
                be opened or written, or it can't detect deaths.
        """
        try:
            self._opened = self._open()
        except (FscoordError, ValueError, OSError) as error:
            raise coordination.ToozConnectionError(f"{self._url}: {error}", cause=error) from error

    def _open(self) -> Store:
        if self._host not in ("", "localhost"):
            raise ValueError(
                f"the address names the host {self._host!r}, but a store is a file: write its absolute path with three"
                " slashes, fscoord:///shared/job/store"
            )
        if not self._path.strip("/"):
            raise ValueError("the address has no path: write fscoord:///shared/job/store")
        options = {name: value for name, value in self._options.items() if name != "executor"}
        texts = {name: value for name, value in options.items() if isinstance(value, str)}
        path = f"/{self._path.lstrip('/')}" if self._path.startswith("/") else self._path
        others = {name: value for name, value in options.items() if name not in texts}
        store = open_store(with_options(f"file:{path}", texts), **others)
        try:
            store.register()
            if not store.has_liveness:
                raise ValueError(
                    "the store can't detect deaths with these options, so a member that dies would stay in its groups"
                )
        except BaseException:
            store.close()
            raise
        return store

    def _stop(self) -> None:
        """Stop leading, and close the store, which releases the locks of this coordinator."""
        for group_id in list(self._elections):
            with suppress(tooz.ToozError):
                self.stand_down_group_leader(group_id)
        self._elections.clear()
        self._own.clear()
        store, self._opened = self._opened, None
        if store is not None:
            store.close()

    def heartbeat(self) -> float:
        """Check that the store can be reached and that this member still counts as alive.

        Nothing depends on the call: a member lives as long as its process, whether it calls this method or not.

        Returns:
            The number of seconds after which to call this method again.

        Raises:
            ToozConnectionError: the store can't be reached, or it has recorded this member as dead. A member that is
                recorded as dead must call ``stop`` and ``start``, and join again.
        """
        with _tooz_errors(self._url):
            self._store.check([GROUPS])  # reads what others wrote, and so a record of this session's death
        return HEARTBEAT_S

    # -- groups --------------------------------------------------------------------------------------------------------

    def _changing(self, group_id: bytes) -> Lock:
        return Lock(self._store, CHANGES + _quoted(group_id))

    def _exists(self, group_id: bytes) -> bool:
        return self._store.check([GROUPS + _quoted(group_id)])

    def _membership(self, group_id: bytes, data: bytes = b"") -> Membership:
        return Membership(self._store, MEMBERS + _quoted(group_id), data)

    def _participants(self, group_id: bytes) -> dict[bytes, Participant]:
        """Return {member id: participant} of a group. Raise ``GroupNotCreated`` if there is no such group."""
        if not self._exists(group_id):
            raise coordination.GroupNotCreated(group_id)
        return {_member(each)["member_id"]: each for each in self._membership(group_id).members()}

    def _participant(self, group_id: bytes, member_id: bytes) -> dict[str, Any]:
        found = self._participants(group_id).get(_id(member_id))
        if found is None:
            raise coordination.MemberNotJoined(group_id, _id(member_id))
        return _member(found)

    @_of_group
    def create_group(self, group_id: bytes) -> None:
        """Create a group. ``get()`` of the future raises ``GroupAlreadyExist``."""
        with self._changing(group_id):
            if self._exists(group_id):
                raise coordination.GroupAlreadyExist(group_id)
            self._store.set(GROUPS + _quoted(group_id), b"1")

    @_of_group
    def delete_group(self, group_id: bytes) -> None:
        """Delete a group. ``get()`` of the future raises ``GroupNotCreated`` or ``GroupNotEmpty``."""
        with self._changing(group_id):
            if self._participants(group_id):
                raise coordination.GroupNotEmpty(group_id)
            self._store.delete_key(GROUPS + _quoted(group_id))

    def get_groups(self) -> coordination.CoordinatorResult[list[bytes]]:
        """Return a future of the ids of all groups."""

        def call() -> list[bytes]:
            with _tooz_errors(self._url):
                return [unquote_to_bytes(key[len(GROUPS) :]) for key in self._store.list_keys(GROUPS)]

        return coordination.CoordinatorResult(self._executor.submit(call))

    @_of_group
    def join_group(self, group_id: bytes, capabilities: coordination.Capabilities | None = None) -> None:
        """Join a group. ``get()`` of the future raises ``GroupNotCreated`` or ``MemberAlreadyExist``."""
        member = self._membership(group_id, self._data(capabilities))
        with self._changing(group_id):
            if self._member_id in self._participants(group_id):
                raise coordination.MemberAlreadyExist(group_id, self._member_id)
            member.join()
        self._own[group_id] = member
        self._joined_groups.add(group_id)

    def join_group_create(self, group_id: bytes, capabilities: coordination.Capabilities | None = None) -> None:
        """Join a group, and create a missing group first. Unlike tooz's own method, this method does not sleep."""
        while True:
            with suppress(coordination.GroupNotCreated):
                self.join_group(group_id, capabilities).get()
                return
            with suppress(coordination.GroupAlreadyExist):
                self.create_group(group_id).get()

    @_of_group
    def leave_group(self, group_id: bytes) -> None:
        """Leave a group. ``get()`` of the future raises ``GroupNotCreated`` or ``MemberNotJoined``.

        If another coordinator with the same member id has joined the group, that coordinator is removed.
        """
        own = self._own.pop(group_id, None)
        self._joined_groups.discard(group_id)
        if own is not None and own.leave():
            return
        with self._changing(group_id):  # without the lock, another member could get the participant's number meanwhile
            found = self._participants(group_id).get(self._member_id)
            if found is None or not self._membership(group_id).evict(found):
                raise coordination.MemberNotJoined(group_id, self._member_id)

    @_of_group
    def update_capabilities(self, group_id: bytes, capabilities: coordination.Capabilities) -> None:
        """Replace this member's capabilities. ``get()`` raises ``GroupNotCreated`` or ``MemberNotJoined``."""
        joined = self._participant(group_id, self._member_id)["created_at"]
        own = self._own.get(group_id)
        if own is None:  # another coordinator with this member's id has joined
            raise coordination.MemberNotJoined(group_id, self._member_id)
        try:
            own.update(self._data(capabilities, joined))
        except FscoordError:
            raise
        except RuntimeError as error:  # this member was removed from the group, or taken for dead
            raise_if_foreign(error)
            raise coordination.MemberNotJoined(group_id, self._member_id) from error

    def _data(self, capabilities: coordination.Capabilities | None, joined: float | None = None) -> bytes:
        """Return this member's data. `joined` is the time of its join, in seconds since the epoch; None: now."""
        now = system.time.time()
        data: bytes = utils.dumps(
            {
                "member_id": self._member_id,
                "capabilities": capabilities,
                "created_at": now if joined is None else joined,
                "updated_at": now,
            }
        )
        return data

    @_of_group
    def get_members(self, group_id: bytes) -> set[bytes]:
        """Return a future of the ids of a group's members. ``get()`` of the future raises ``GroupNotCreated``."""
        return set(self._participants(group_id))

    @_of_group
    def get_member_capabilities(self, group_id: bytes, member_id: bytes) -> coordination.Capabilities | None:
        """Return a future of a member's capabilities. ``get()`` raises ``GroupNotCreated`` or ``MemberNotJoined``."""
        capabilities: coordination.Capabilities | None = self._participant(group_id, member_id)["capabilities"]
        return capabilities

    @_of_group
    def get_members_with_capabilities(self, group_id: bytes) -> dict[bytes, coordination.Capabilities | None]:
        """Return a future of {member id: capabilities}. ``get()`` of the future raises ``GroupNotCreated``."""
        members = map(_member, self._participants(group_id).values())
        return {member["member_id"]: member["capabilities"] for member in members}

    @_of_group
    def get_member_info(self, group_id: bytes, member_id: bytes) -> dict[str, Any]:
        """Return a future of a member's capabilities, and of the times when it joined and was last updated.

        The times are those of the clock of the member's host.

        ``get()`` of the future raises ``GroupNotCreated`` or ``MemberNotJoined``.
        """
        member = self._participant(group_id, member_id)
        times = {name: utils.millis_to_datetime(1000 * member[name]) for name in ("created_at", "updated_at")}
        return {"capabilities": member["capabilities"], **times}

    # -- elections -----------------------------------------------------------------------------------------------------

    def _election(self, group_id: bytes) -> Election:
        if group_id not in self._elections:
            self._elections[group_id] = Election(self._store, LEADERS + _quoted(group_id), self._member_id)
        return self._elections[group_id]

    def run_watchers(self, timeout: float | None = None) -> list[Any]:
        """Call the callbacks for changes in the watched groups since the last call, and take part in elections.

        Args:
            timeout: how many seconds to wait for the store at most.

        Returns:
            The results of the callbacks for members that joined or left.
        """
        results: list[Any] = super().run_watchers(timeout)
        self.run_elect_coordinator()
        return results

    def run_elect_coordinator(self) -> None:
        """Become the leader of each watched group that has no leader, and call the callbacks of these groups."""
        for group_id in list(self._hooks_elected_leader):
            with _tooz_errors(f"the election of the group {_text(group_id)!r}"):
                election = self._election(_id(group_id))
                if _is_valid(election.check):
                    continue
                _release(election.resign)  # a term that ended because this member was taken for dead
                is_elected = election.acquire(blocking=False)
            if is_elected:
                event = coordination.LeaderElected(group_id, self._member_id)
                self._hooks_elected_leader[group_id].run(event)

    def stand_down_group_leader(self, group_id: bytes) -> bool:
        """Stop leading a group, and return whether this member led the group."""
        with _tooz_errors(f"the election of the group {_text(group_id)!r}"):
            return _release(self._election(_id(group_id)).resign)

    @_of_group
    def get_leader(self, group_id: bytes) -> Any:  # tooz declares bytes, and its own drivers return None as well
        """Return a future of the id of the member that leads the group; the id is None if the group has no leader."""
        leader = self._election(group_id).leader()
        return None if leader is None else leader.data

    # -- locks ---------------------------------------------------------------------------------------------------------

    def get_lock(self, name: bytes) -> FscoordLock:
        """Return the lock `name`. ``stop`` of this coordinator releases the lock."""
        return FscoordLock(self._store, name)


def _id(text: bytes | str) -> bytes:
    """Return an id as bytes, which tooz uses. Callers may pass a ``str``."""
    return text.encode() if isinstance(text, str) else text


def _text(name: bytes | str) -> str:
    return _id(name).decode(errors="backslashreplace")


def _quoted(name: bytes | str) -> str:
    """Return `name` with its slashes quoted, so that no key of one group or lock is below a key of another."""
    return quote_from_bytes(_id(name), safe="")


def _member(participant: Participant) -> dict[str, Any]:
    member: dict[str, Any] = utils.loads(participant.data)
    return member
