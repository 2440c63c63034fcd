"""`FscoordEnvironment` lets the processes of a Trainer or a Fabric find each other through a store.

The class implements ``ClusterEnvironment`` of Lightning (lightning/fabric/plugins/environments/cluster_environment.py),
and needs the extra ``fscoord[lightning]``.
"""

from __future__ import annotations

from itertools import count
from typing import Final

from fscoord import environment
from fscoord._arguments import Timeout
from fscoord._runtime import system
from fscoord.errors import needed_extra
from fscoord.rendezvous import RendezvousInfo, static_rendezvous
from fscoord.rendezvous.static import RESTART_TIMEOUT_S, session_of
from fscoord.store import Store
from fscoord.stores.url import ENVIRONMENT_VARIABLE, open_store

with needed_extra("fscoord.integrations.lightning", "lightning", "lightning"):
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.fabric.utilities.rank_zero import rank_zero_only

__all__ = ["FscoordEnvironment"]

TIMEOUT_S: Final = 300.0
"""How long to wait for the other processes, in seconds."""

_environments = count(1)


class FscoordEnvironment(ClusterEnvironment):
    """A cluster environment for ``Trainer(plugins=[...])`` and ``Fabric(plugins=[...])``.

    A launcher starts the processes, not Lightning. Rank and world size come from the environment. When Lightning asks
    for the main address, rank 0 picks a free port and publishes its address in the store, and each process waits for
    all others.

    All processes must make the same number of these objects, because each object has a rendezvous of its own. The store
    stays open as long as the object lives.

    Args:
        store_or_url: the store that the processes share, or its address; None: the address in ``FSCOORD_STORE``.
        rank: the number of this process; None: the rank in the environment, see `fscoord.environment`.
        world_size: the number of processes; None: the number in the environment.
        main_host: the name or address by which the other ranks reach rank 0; None: rank 0's host name if it can be
            resolved, or else its address on the network. Only rank 0 uses this argument.
        timeout: how long to wait for the other processes, in seconds or as a `timedelta`.
        restart_timeout: how long to wait for a launcher to restart rank 0, if rank 0 died before it published an
            address; see `fscoord.rendezvous.static_rendezvous`.

    Raises:
        ValueError: there is no store, rank or world size, or the environment contradicts itself.
    """

    def __init__(
        self,
        store_or_url: Store | str | system.os.PathLike[str] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        main_host: str | None = None,
        timeout: Timeout = TIMEOUT_S,
        restart_timeout: Timeout = RESTART_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self._rank, self._world_size = environment.rank_and_world_size(rank, world_size)
        self._store = store_or_url if isinstance(store_or_url, Store) else open_store(store_or_url)
        self._name = f"fscoord/lightning/{next(_environments)}"
        self._main_host = main_host
        self._timeout = timeout
        self._restart_timeout = restart_timeout
        self._info: RendezvousInfo | None = None
        self._place: tuple[int, int] | None = None
        rank_zero_only.rank = self._rank  # Lightning prints some messages before it asks for the rank

    @staticmethod
    def detect() -> bool:
        """Return whether the environment has a store, a rank and a world size."""
        found = environment.detect()
        has_store = bool(system.os.environ.get(ENVIRONMENT_VARIABLE))
        return has_store and found.rank is not None and found.world_size is not None

    @property
    def creates_processes_externally(self) -> bool:
        """True, because a launcher has started all processes."""
        return True

    @property
    def main_address(self) -> str:
        """The address of rank 0. The first access waits for all processes.

        Raises:
            RendezvousError: rank 0 is dead. The message names its host and process.
            StoreTimeoutError: processes are missing. The message names their ranks.
        """
        return self._meet().bootstrap_store_info.master_addr

    @property
    def main_port(self) -> int:
        """The port of rank 0; see `main_address`."""
        return self._meet().bootstrap_store_info.master_port

    def world_size(self) -> int:
        """Return the number of processes."""
        return self._world_size

    def global_rank(self) -> int:
        """Return the rank of this process."""
        return self._rank

    def local_rank(self) -> int:
        """Return the number of this process on its host, from the environment or else from the store."""
        local_rank = environment.detect().local_rank
        return self._find_place()[1] if local_rank is None else local_rank

    def node_rank(self) -> int:
        """Return the number of this process's host, from the environment or else from the store."""
        for name in ("GROUP_RANK", "SLURM_NODEID"):
            if (value := system.os.environ.get(name)) is not None:
                return int(value)
        return self._find_place()[0]

    def set_world_size(self, size: int) -> None:
        """Do nothing, because the launcher determines the world size."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because the launcher determines the rank."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the Trainer's settings against the number of processes.

        Raises:
            ValueError: the product of the settings is not the number of processes.
        """
        if num_devices * num_nodes != self._world_size:
            raise ValueError(
                f"devices={num_devices} and num_nodes={num_nodes} make {num_devices * num_nodes} processes, but the"
                f" launcher has started {self._world_size}: pass the number of processes on each host as devices, and"
                " the number of hosts as num_nodes"
            )

    def _meet(self) -> RendezvousInfo:
        if self._info is None:
            self._info = static_rendezvous(
                self._store,
                self._rank,
                self._world_size,
                self._name,
                local_addr=self._main_host,
                timeout=self._timeout,
                restart_timeout=self._restart_timeout,
            )
        return self._info

    def _find_place(self) -> tuple[int, int]:
        """Return the number of this process's host, and the number of this process on that host.

        Hosts are numbered in the order of their lowest ranks.
        """
        if self._place is None:
            store = self._meet().store
            members = {member.number: member.host for member in self._store.members()}
            hosts = [members.get(session_of(store, rank), "") for rank in range(self._world_size)]
            if "" in hosts:
                raise ValueError(
                    f"neither the environment nor {self._store!r} says which processes share a host: set LOCAL_RANK"
                    " and GROUP_RANK"
                )
            own = hosts[self._rank]
            self._place = list(dict.fromkeys(hosts)).index(own), hosts[: self._rank].count(own)
        return self._place
