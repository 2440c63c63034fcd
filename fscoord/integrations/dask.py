"""Lets the workers and clients of Dask find the scheduler through a store.

- ``dask scheduler --preload fscoord.integrations.dask --store /shared/job/store`` takes part in an election. The
  elected scheduler publishes its address. This module is the preload module, see
  https://docs.dask.org/en/stable/customize-initialization.html.
- ``dask worker fscoord:///shared/job/store`` and ``Client("fscoord:///shared/job/store")`` look up the elected
  scheduler for each connection. Dask finds `FscoordBackend` by its entry point, see
  https://distributed.dask.org/en/stable/communications.html.

This module needs the extra ``fscoord[dask]``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from fscoord import aio
from fscoord._arguments import Timeout, to_seconds
from fscoord._runtime import system
from fscoord.errors import FscoordError, StoreTimeoutError, needed_extra
from fscoord.recipes import Election
from fscoord.store import Store
from fscoord.stores.url import ENVIRONMENT_VARIABLE, open_store

with needed_extra("fscoord.integrations.dask", "distributed", "dask"):
    import click
    from distributed.comm import addressing, registry
    from distributed.scheduler import Scheduler
    from distributed.utils import get_ip

__all__ = ["FscoordBackend", "dask_setup", "dask_teardown", "scheduler_address"]

SCHEME: Final = "fscoord"
NAME: Final = "dask/scheduler"
"""The name of the election in the store."""

logger = logging.getLogger("distributed.fscoord")  # below `distributed`, whose messages Dask shows


# -- finding the scheduler ---------------------------------------------------------------------------------------------


def scheduler_address(
    store: Store | str | system.os.PathLike[str] | None = None, timeout: Timeout | None = None
) -> str:
    """Return the address of the scheduler that is published in `store`, such as ``tcp://10.0.0.1:8786``.

    If no scheduler is published, wait for one. The address of a scheduler that is known dead is not returned.

    Args:
        store: the store, or its address for `~fscoord.open_store`.
        timeout: how long to wait, in seconds or as a `timedelta`; None means the store's timeout.

    Raises:
        StoreTimeoutError: no scheduler was published within the timeout.
    """
    if not isinstance(store, Store):
        with open_store(store) as opened:
            return scheduler_address(opened, timeout)
    limit = to_seconds(store.timeout if timeout is None else timeout)
    election = Election(store, NAME)
    leader = election.leader()
    if leader is None:
        _log_wait(store, limit)
        try:
            leader = election.observe(timeout=limit)
        except StoreTimeoutError as error:
            raise _without_scheduler(store, error) from error
    return leader.data.decode()


async def _find(loc: str) -> str:
    """Return the address of the scheduler for ``fscoord://{loc}``. The asyncio version of `scheduler_address`."""
    async with aio.open_store(_store_url(loc)) as store:
        election = aio.Election(store, NAME)
        leader = await election.leader()
        if leader is None:
            _log_wait(store.store, to_seconds(store.timeout))
            try:
                leader = await election.observe()
            except StoreTimeoutError as error:
                raise _without_scheduler(store.store, error) from error
        return leader.data.decode()


def _log_wait(store: Store, limit: float) -> None:
    logger.info("Waiting for a scheduler to publish its address in %r, for up to %g s", store, limit)


def _without_scheduler(store: Store, error: StoreTimeoutError) -> StoreTimeoutError:
    """Log and return the error for a wait that ended without a scheduler.

    The error is logged because Dask replaces a `TimeoutError` of a starting worker by an error without a message.
    """
    message = (
        f"timeout: no scheduler has published its address in {store!r} within {error.waited:g} s; start one with dask"
        " scheduler --preload fscoord.integrations.dask --store PATH"
    )
    logger.error(message)
    return StoreTimeoutError(message, keys=error.keys, waited=error.waited)


def _store_url(loc: str) -> str:
    if not loc.startswith("/"):
        raise ValueError(
            f"{SCHEME}://{loc} has no absolute path: a store is a file; write three slashes, {SCHEME}:///shared/job/store"
        )
    return f"file:{loc}"


class FscoordBackend(registry.Backend):
    """Dask's communication backend for addresses of a store, such as ``fscoord:///shared/job/store?timeout=60``.

    The query takes the options of `~fscoord.open_store` for a file. ``timeout`` is how many seconds a worker waits for
    a scheduler. The connections are TCP or TLS, as in the scheduler's address.
    """

    def get_connector(self) -> Any:
        """Return this object, which connects to the scheduler."""
        return self

    async def connect(self, loc: str, deserialize: bool = True, **connection_args: Any) -> Any:
        """Connect to the scheduler that is elected now."""
        scheme, found = addressing.parse_address(await _find(loc))
        connector = registry.get_backend(scheme).get_connector()
        return await connector.connect(found, deserialize=deserialize, **connection_args)

    async def get_listener(
        self, loc: str, handle_comm: Callable[..., Awaitable[None]], deserialize: bool, **connection_args: Any
    ) -> Any:
        """Return a TCP or TLS listener for a worker or a nanny. `loc` is a host and a port.

        A worker listens by the scheme of the scheduler's address, unless ``--protocol`` names another scheme. If `loc`
        has no host, the worker is contacted by the address from which this host reaches the scheduler.
        """
        server = getattr(handle_comm, "__self__", None)
        scheduler = getattr(getattr(server, "scheduler", None), "address", "")
        if not loc.rpartition(":")[0] and scheduler.startswith(f"{SCHEME}://"):
            found = await _find(addressing.parse_address(scheduler)[1])
            connection_args.setdefault("default_host", get_ip(addressing.get_address_host(found)))
        backend = registry.get_backend("tls" if connection_args.get("ssl_context") else "tcp")
        return await backend.get_listener(loc, handle_comm, deserialize, **connection_args)

    def get_address_host(self, loc: str) -> str:
        """Wait for a scheduler as `scheduler_address` does, and return the scheduler's host."""
        host: str = addressing.get_address_host(scheduler_address(_store_url(loc)))
        return host

    def get_address_host_port(self, loc: str) -> tuple[str, int]:
        """Wait for a scheduler as `scheduler_address` does, and return the scheduler's host and port."""
        host, port = addressing.get_address_host_port(scheduler_address(_store_url(loc)))
        return host, port

    def resolve_address(self, loc: str) -> str:
        """Return `loc` unchanged, because the scheduler is looked up for each connection."""
        return loc

    def get_local_address_for(self, loc: str) -> str:
        """Return the address by which the scheduler can reach this host."""
        local = addressing.get_local_address_for(scheduler_address(_store_url(loc)))
        return str(addressing.parse_address(local)[1])


# -- publishing the scheduler ------------------------------------------------------------------------------------------


class _Candidate:
    """Runs for election on behalf of a scheduler, in a task of its event loop."""

    def __init__(self, store: aio.AsyncStore, address: str) -> None:
        self._store = store
        self._election = aio.Election(store, NAME, address, timeout=math.inf)
        self._address = address
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._lead()
        except FscoordError as error:
            logger.error("%s is no longer published in %r: %s", self._address, self._store.store, error)

    async def _lead(self) -> None:
        store = self._store.store
        leader = await self._election.leader()
        if leader is not None:
            logger.info("%s leads in %r; this scheduler takes over when it ends", leader.data.decode(), store)
        async with self._election:
            logger.info("Published %s in %r, term %d", self._address, store, self._election.term)
            async for other in self._election.watch():
                if other.term > self._election.term:
                    logger.error("%s leads in %r now, not %s", other.data.decode(), store, self._address)
                    break

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._store.close()


_candidates: WeakKeyDictionary[Any, _Candidate] = WeakKeyDictionary()


@click.command()
@click.option(
    "--store",
    envvar=ENVIRONMENT_VARIABLE,
    required=True,
    help=f"The path or the address of the store that publishes the scheduler. Default: {ENVIRONMENT_VARIABLE}.",
)
async def dask_setup(scheduler: Any, store: str) -> None:
    """Publish the scheduler's address in a store as soon as the scheduler is elected there."""
    try:
        if not isinstance(scheduler, Scheduler):
            raise TypeError(
                f"the preload module fscoord.integrations.dask is for a scheduler. Start a {type(scheduler).__name__}"
                f" without it, with the address {SCHEME}:///path"
            )
        _candidates[scheduler] = await _candidate(store, scheduler.address)
    except (FscoordError, ValueError, OSError) as error:
        # Dask only logs an exception of a preload module. The scheduler would run, and no worker would find it.
        logger.critical("The scheduler ends, because its address can't be published in %s: %s", store, error)
        scheduler.loop.add_callback(scheduler.close)
        raise


async def _candidate(url: str, address: str) -> _Candidate:
    store = await aio.open_store(url)
    if store.has_liveness:
        return _Candidate(store, address)
    await store.close()
    raise ValueError(
        f"{store.store!r} can't detect deaths, so the address of a dead scheduler would stay there: use"
        " a FileStore or an EtcdStore"
    )


async def dask_teardown(scheduler: Any) -> None:
    """Withdraw the scheduler's address, so that the next scheduler in the store is elected."""
    candidate = _candidates.pop(scheduler, None)
    if candidate is not None:
        await candidate.stop()
