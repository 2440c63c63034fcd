"""`initialize` calls ``jax.distributed.initialize`` with a coordinator's address that comes from a store.

This module needs the extra ``fscoord[jax]``. `initialize` calls only JAX's public functions.

The import of this module also adds the method ``"fscoord"`` to JAX's detection of clusters, for programs that call
``jax.distributed.initialize(cluster_detection_method="fscoord")`` themselves. The method implements
``jax._src.clusters.ClusterEnv`` (jax/_src/clusters/cluster.py). This interface is private and changes: JAX 0.10 calls
``get_coordinator_address`` with an argument that JAX 0.8 does not have. So JAX uses the method only if a program names
it. If a version of JAX lacks the interface, this module logs that, and `initialize` still works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, Final

from fscoord import environment
from fscoord._arguments import Timeout, to_seconds
from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError, RendezvousError, StoreTimeoutError, needed_extra
from fscoord.rendezvous import RendezvousInfo, static_rendezvous
from fscoord.rendezvous.static import RESTART_TIMEOUT_S, locate_rank, session_of
from fscoord.store import Store
from fscoord.stores.url import ENVIRONMENT_VARIABLE, open_store

with needed_extra("fscoord.integrations.jax", "jax", "jax"):
    import jax

__all__ = ["DETECTION_METHOD", "initialize"]

DETECTION_METHOD: Final = "fscoord"
"""The ``cluster_detection_method`` with which ``jax.distributed.initialize`` gets the coordinator from a store."""

TIMEOUT_S: Final = 300.0
"""How long to wait for the other processes, in seconds: JAX's own default."""
LONGEST_S: Final = 1e6
"""The longest timeout that is passed to JAX, in seconds. JAX takes whole numbers, so a timeout can't be infinite."""

LOOK_S: Final = 1.0
"""The time in seconds between two checks whether the thread of the call still runs. The thread records its end in the
store, but this write may fail."""

_open: list[Store] = []
"""The stores that this module has opened. Each stays open, because a rank whose session has ended counts as dead."""

_uses = count(1)  # a process may initialize again, after jax.distributed.shutdown


def initialize(
    store_or_url: Store | str | system.os.PathLike[str] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    coordinator_host: str | None = None,
    coordinator_port: int | None = None,
    timeout: Timeout = TIMEOUT_S,
    restart_timeout: Timeout = RESTART_TIMEOUT_S,
    **options: Any,
) -> None:
    """Call ``jax.distributed.initialize`` with the address of rank 0 from the store.

    All processes must call this function.

    Rank 0 picks a free port and publishes its address for this run and this restart of the workers, so that no process
    reads an older address. When all processes have arrived, each process calls JAX in a thread. If another process dies
    during the call, this function raises an error at once. JAX alone would wait until its time-out.

    If the launcher starts several processes on a host, each process uses one GPU. The number of the GPU is the local
    rank of the process, as JAX chooses it under Slurm. The option ``local_device_ids`` overrides this.

    Args:
        store_or_url: the store that the processes share, or its address; None: the address in ``FSCOORD_STORE``. A
            store that this function opens stays open until the process ends: its session shows that the process lives.
        rank: the number of this process; None: the rank in the environment, see `fscoord.environment`.
        world_size: the number of processes; None: the number in the environment.
        coordinator_host: the name or address by which the other ranks reach rank 0; None: rank 0's host name if it can
            be resolved, or else its address on the network. Only rank 0 uses this argument.
        coordinator_port: the port of rank 0; None: any free port.
        timeout: how long to wait for the other processes, in seconds or as a `timedelta`.
        restart_timeout: how long to wait for a launcher to restart rank 0, if rank 0 died before it published an
            address; see `fscoord.rendezvous.static_rendezvous`.
        options: other arguments of ``jax.distributed.initialize``, such as ``heartbeat_timeout_seconds``.

    Raises:
        RendezvousError: another process died before all were initialized. The message names its rank, host and process.
        StoreTimeoutError: processes are missing. The message names their ranks.
        ValueError: there is no store, rank or world size, or the environment contradicts itself.
    """
    limit = to_seconds(timeout)
    ends = system.time.monotonic() + limit
    with _kept_open(store_or_url) as store:
        info = static_rendezvous(
            store,
            rank,
            world_size,
            f"fscoord/jax/{next(_uses)}",
            local_addr=coordinator_host,
            server_port=coordinator_port,
            timeout=limit,
            restart_timeout=restart_timeout,
        )
        left = int(max(1, min(ends - system.time.monotonic(), LONGEST_S)))
        arguments = {"initialization_timeout": left, "local_device_ids": _local_device_ids(), **options}
        _call_beside(
            store,
            info,
            lambda: jax.distributed.initialize(_address(info), info.world_size, info.rank, **arguments),
        )


@contextmanager
def _kept_open(store_or_url: Store | str | system.os.PathLike[str] | None) -> Iterator[Store]:
    """Yield the store. If the argument is an address, open the store first.

    A store that this function opens stays open unless the ``with`` raises.
    """
    if isinstance(store_or_url, Store):
        yield store_or_url
        return
    store = open_store(store_or_url)
    try:
        _open.append(store)
        yield store
    except BaseException:
        if store in _open:
            _open.remove(store)
        store.close()
        raise


def _address(info: RendezvousInfo) -> str:
    """Return the address of rank 0 as JAX writes it. An IPv6 address is in brackets."""
    host, port = info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _call_beside(store: Store, info: RendezvousInfo, call: Callable[[], None]) -> None:
    """Run `call` in a thread, and wait for its end.

    Every process of the job calls this function. If another process dies in its call, raise `RendezvousError`.
    """
    if not store.has_liveness or info.world_size == 1:
        call()
        return
    errors: list[BaseException] = []
    own = f"returned/{info.rank}"

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            errors.append(error)
        with suppress(FscoordError):  # the caller has closed the store, or polls for the end of this thread
            info.store.set(own, b"1")

    # A daemon thread: JAX can't be interrupted, and this process must be able to end when another process has died.
    waiting = {session_of(info.store, rank): rank for rank in range(info.world_size) if rank != info.rank}
    thread = system.start_thread("fscoord-jax", run)
    while thread.is_alive():
        dead: list[int] = []
        with suppress(StoreTimeoutError):
            dead = info.store.wait_sessions([own], waiting, LOOK_S)
            if not dead:
                break
        for session in dead:
            other = waiting.pop(session)
            if not info.store.check([f"returned/{other}"]):
                raise RendezvousError(
                    f"{locate_rank(store, other, session)} died in jax.distributed.initialize, while rank {info.rank}"
                    f" of {info.world_size} waited there; the coordinator was {_address(info)}"
                )
    thread.join()
    if errors:
        raise errors[0]


def _local_device_ids() -> list[int] | None:
    """Return the number of the one GPU for this process, or None if this process is alone on its host."""
    found = environment.detect()
    return None if found.local_rank is None or (found.local_world_size or 1) == 1 else [found.local_rank]


def _add_detection() -> None:
    try:
        from jax._src.clusters import ClusterEnv

        if ClusterEnv.opt_in_only_method is not False:
            raise AttributeError("its ClusterEnv.opt_in_only_method is not False")
        registry = ClusterEnv._cluster_types
    except (ImportError, AttributeError) as error:
        text = "this JAX has no cluster_detection_method=%r (%s): call fscoord.integrations.jax.initialize"
        logger(__name__).info(text, DETECTION_METHOD, error)
        return

    class FscoordCluster(ClusterEnv):  # JAX appends every subclass to the registry
        """Gives JAX the ranks of `fscoord.environment`, and a coordinator from the store in ``FSCOORD_STORE``."""

        name = DETECTION_METHOD
        opt_in_only_method = True

        @classmethod
        def is_env_present(cls) -> bool:
            """Return whether the environment has a store, a rank and a world size."""
            found = environment.detect()
            has_store = bool(system.os.environ.get(ENVIRONMENT_VARIABLE))
            return has_store and found.rank is not None and found.world_size is not None

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: int | None = None, override_coordinator_port: str | None = None
        ) -> str:
            """Return the address of rank 0, after all processes have read the address."""
            port = None if override_coordinator_port is None else int(override_coordinator_port)
            timeout = TIMEOUT_S if timeout_secs is None else timeout_secs
            name = f"fscoord/jax/{next(_uses)}"
            with _kept_open(None) as store:
                return _address(static_rendezvous(store, name=name, server_port=port, timeout=timeout))

        @classmethod
        def get_process_count(cls) -> int:
            return environment.rank_and_world_size()[1]

        @classmethod
        def get_process_id(cls) -> int:
            return environment.rank_and_world_size()[0]

        @classmethod
        def get_local_process_id(cls) -> int | None:
            ids = _local_device_ids()
            return ids[0] if ids else None

    # JAX compares the names of the classes from the first on; in 0.9.0 and older, one of JAX's own has no name.
    registry.insert(0, registry.pop())


_add_detection()
