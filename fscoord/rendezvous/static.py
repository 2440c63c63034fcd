"""`static_rendezvous`: processes that know their ranks find the address of rank 0, or learn that rank 0 is dead.

torch calls this kind of rendezvous static. `fscoord.rendezvous.DynamicRendezvousHandler` is for nodes that have no
ranks yet.

**Keys.** All keys begin with ``{name}/{run}/{restart}/``. ``{run}`` is the run id from `fscoord.environment.detect`.
``{restart}`` is how often a launcher has restarted the workers. So no rank reads the address of an earlier run. When
nodes come or go, a launcher starts the workers again without counting a restart. So each new rank 0 begins an *attempt*
with the next free number, and no rank accepts an attempt whose rank 0 is dead. The keys of an attempt are:

- ``{attempt}/address``: the session of rank 0, its port and its address;
- ``{attempt}/rank/{rank}``: the session of a rank that has read the address;
- ``{attempt}/complete``: set when all ranks have read the address.
"""

from __future__ import annotations

from itertools import count
from typing import Final, NamedTuple

from fscoord import environment
from fscoord._arguments import MalformedText, Timeout, check_rank, key_bytes, key_text, parse_uint63, to_seconds
from fscoord._runtime import network, system
from fscoord._runtime.logging import logger
from fscoord._waiting.awaited import RENDEZVOUS, Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest
from fscoord.collectives.arrivals import Attempt, location_of
from fscoord.errors import RendezvousError, RendezvousStateError, StoreTimeoutError
from fscoord.rendezvous.base import RendezvousInfo, RendezvousStoreInfo
from fscoord.store import Store, wait_on
from fscoord.stores.prefix import PrefixStore

RESTART_TIMEOUT_S: Final = 30.0
"""How many seconds the other ranks wait for a new rank 0 after all sessions of rank 0 have ended."""


def static_rendezvous(
    store: Store,
    rank: int | None = None,
    world_size: int | None = None,
    name: str = "static_rendezvous",
    *,
    local_addr: str | None = None,
    server_port: int | None = None,
    timeout: Timeout | None = None,
    restart_timeout: Timeout = RESTART_TIMEOUT_S,
) -> RendezvousInfo:
    """Publish the address of rank 0 to all ranks, and wait until all ranks have read it.

    The caller provides the service that listens at this address. Each process announces its rank to the store. Keep
    the store open for as long as the other ranks are needed. A process can use each name once.

    Args:
        store: the store that the ranks share.
        rank: the rank of this process; None: the rank in the environment.
        world_size: the number of ranks; None: the number in the environment.
        name: the name of the rendezvous. All its keys begin with this name.
        local_addr: the address of rank 0; None: its host name if it can be resolved, or else its network address.
        server_port: the port of rank 0; None: a port that is free now.
        timeout: how long to wait, in seconds or as a `timedelta`; None means the store's timeout.
        restart_timeout: how long to wait for a new rank 0 after all sessions of rank 0 have ended without an address,
            in seconds or as a `timedelta`. A launcher may be starting a new rank 0, or rank 0 may be opening another
            handle.

    Returns:
        The address of rank 0, the rank, the world size, and a store that only the ranks of this attempt use.

    Raises:
        RendezvousError: rank 0 is dead. The message names its host and process.
        StoreTimeoutError: rank 0 published no address, or other ranks are missing. The message names the missing ranks.
        UsedBeforeError: this name was used before in this run, on a store that can't detect dead sessions.
        RendezvousStateError: another program has written these keys.
        ValueError: the environment has no rank or world size, or the rank is not below the world size.
    """
    rank, world_size = environment.rank_and_world_size(rank, world_size)
    rank, world_size = check_rank(rank, world_size)
    limit = to_seconds(store.timeout if timeout is None else timeout)
    name = f"{name}/{_this_run()}"
    call = _Call(store, Attempt(key_bytes(name), rank, world_size, limit, system.time.monotonic()))
    store.announce_rank(rank)
    session = store.register()
    if rank == 0:
        port = network.free_port() if server_port is None else server_port
        common, address = call.publish(name, _Address(session, local_addr or network.own_name(), port))
    else:
        common, address = call.find(name, to_seconds(restart_timeout))
    call.meet(common, address, session)
    return RendezvousInfo(common, rank, world_size, RendezvousStoreInfo(address.host, address.port))


def session_of(store: Store, rank: int) -> int:
    """Return the session of `rank`. `store` is the ``store`` of the `RendezvousInfo` from `static_rendezvous`."""
    key = f"rank/{rank}"
    value = store.get(key)
    try:
        return parse_uint63(value)
    except MalformedText as error:
        raise _foreign(key, value) from error


def locate_rank(store: Store, rank: int, session: int | None = None) -> str:
    """Return `rank`, its host, its process and its state as text.

    If `session` is not None, describe only the handle with this session, and not other handles with the same rank.
    """
    members = [member for member in store.members([rank]) if session in (None, member.number)]
    return f"rank {rank} ({location_of(members)})"


def _this_run() -> str:
    """Return the part of the keys that identifies this run and this restart of its workers."""
    run = environment.detect().run_id
    job = "/".join(map(str, run)) if isinstance(run, tuple) else run or "-"
    restarts = [system.os.environ.get(name) for name in ("FSCOORD_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
    return f"{job}/{next(filter(None, restarts), '0')}"


def _foreign(key: str, value: bytes) -> RendezvousStateError:
    return RendezvousStateError(
        f"the key {key!r} holds {value[:40]!r}, which is not a record of a rendezvous: another program wrote it, so"
        " give the rendezvous another name"
    )


class _Address(NamedTuple):
    """The value of an attempt's key ``address``, which rank 0 writes."""

    session: int
    host: str
    port: int

    def encode(self) -> bytes:
        return f"{self.session} {self.port} {self.host}".encode("utf-8", "surrogateescape")


class _Call:
    """Carries out one rank's call of `static_rendezvous`."""

    def __init__(self, store: Store, attempt: Attempt) -> None:
        self._store = store
        self._attempt = attempt

    def publish(self, name: str, address: _Address) -> tuple[Store, _Address]:
        """As rank 0, publish `address` in a new attempt. Return the store of the attempt, and `address`."""
        for number in count(1):
            store = PrefixStore(f"{name}/{number}", self._store)
            # If an address was already there, this same handle may have written it in an earlier call.
            if not store.check(["address"]) and store.compare_set("address", "", address.encode()) == address.encode():
                return store, address
            if not self._store.has_liveness or _read(store).session == address.session:
                raise self._attempt.used_before(self._store)  # other ranks can't see that the earlier address is old
        raise AssertionError  # the loop has no end

    def find(self, name: str, restart_timeout: float) -> tuple[Store, _Address]:
        """Wait for the address of an attempt whose rank 0 is not dead. Return the attempt's store and the address."""
        for number in count(1):
            store = PrefixStore(f"{name}/{number}", self._store)
            try:
                self._wait_for_address(store, restart_timeout)
            except StoreTimeoutError as error:
                raise self._attempt.time_out("waiting for the address of rank 0", [0], error, self._store) from error
            address = _read(store)
            if self._store._session_states([address.session]).get(address.session) != "no":
                return store, address
        raise AssertionError  # the loop has no end

    def meet(self, store: Store, address: _Address, session: int) -> None:
        """Record that this rank has read `address`, and wait for all ranks. Raise `RendezvousError` if rank 0 dies."""
        rank, world_size = self._attempt.rank, self._attempt.world_size
        own, record = f"rank/{rank}", str(session)
        if store.check([own]) or store.compare_set(own, "", record) != record.encode():
            raise self._attempt.used_before(self._store)
        keys = [f"rank/{each}" for each in range(world_size)]
        if store.check(keys):
            store.set("complete", b"1")
            return
        needed = None if rank == 0 else [address.session]
        try:
            dead = self._wait(store, "complete", self._attempt.left(), sessions=needed)
        except StoreTimeoutError as error:
            missing = [each for each, key in enumerate(keys) if not store.check([key])]
            raise self._attempt.time_out("in the rendezvous", missing, error, self._store) from error
        if dead:
            who = locate_rank(self._store, 0, address.session)
            raise RendezvousError(f"{who} died after it had published its address {address.host}; {self._for()}")

    def _wait_for_address(self, store: Store, restart_timeout: float) -> None:
        """Wait until the attempt of `store` has an address.

        Raise an error if rank 0 is dead and no new rank 0 publishes an address within `restart_timeout` seconds.
        """
        while True:
            if not self._store.dead_ranks([0]) and not self._wait(store, "address", self._attempt.left(), ranks=[0]):
                return
            place = locate_rank(self._store, 0)
            logger(__name__).warning("%s has ended: waiting %g s for a new rank 0", place, restart_timeout)
            limit = min(restart_timeout, self._attempt.left())
            try:
                self._wait(store, "address", limit)
                return
            except StoreTimeoutError as error:
                if limit < restart_timeout:
                    raise
                if self._store.dead_ranks([0]):
                    raise RendezvousError(
                        f"{locate_rank(self._store, 0)} is dead and published no address; timeout: no new rank 0 came"
                        f" within {limit:g} s; {self._for()}"
                    ) from error

    def _wait(
        self, store: Store, key: str, timeout: float, ranks: list[int] | None = None, sessions: list[int] | None = None
    ) -> list[int]:
        """Wait until `key` of `store` is set, or one of `ranks` or `sessions` is dead.

        Return the dead ranks or sessions.
        """
        awaited = Awaited(RENDEZVOUS, key_text(self._attempt.prefix), self._attempt.world_size)
        slow_logger = SlowWaitLogger(__name__, lambda: f"{awaited} on rank {self._attempt.rank}", awaited=awaited)
        try:
            request = WaitRequest(KEYS, [key_bytes(key)], timeout, ranks, sessions, slow_logger)
            dead: list[int] = wait_on(store, request)
            return dead
        finally:
            slow_logger.end()

    def _for(self) -> str:
        return f"rank {self._attempt.rank} of {self._attempt.world_size} gives up; start all ranks again"


def _read(store: Store) -> _Address:
    value = store.get("address")
    session, _, rest = value.partition(b" ")
    port, _, host = rest.partition(b" ")
    try:
        return _Address(parse_uint63(session), host.decode("utf-8", "surrogateescape"), parse_uint63(port))
    except MalformedText as error:
        raise _foreign("address", value) from error
