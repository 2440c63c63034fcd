"""`RendezvousHandler` is the interface of all rendezvous. `RendezvousInfo` is the result of a round for one node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from fscoord._arguments import Timeout
from fscoord._runtime import network, system
from fscoord.errors import RendezvousStateError
from fscoord.store import Store


class RendezvousHandler(ABC):
    """Takes part in a rendezvous as one node. The methods are those of torch's ``RendezvousHandler``.

    `is_closed`, `set_closed` and `num_nodes_waiting` may raise `~fscoord.RendezvousConnectionError` if the store fails,
    and `~fscoord.RendezvousStateError` if the state is damaged. `set_closed` may also raise
    `~fscoord.RendezvousTimeoutError` if other nodes kept changing the state.
    """

    @abstractmethod
    def get_backend(self) -> str:
        """Return the name of the backend."""

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers connect to a TCP store that an agent hosts, at the address that rank 0 published."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the next round has enough nodes, and return the rank of this node and the store of the round.

        Raises:
            RendezvousClosedError: the rendezvous has been closed.
            RendezvousTimeoutError: too few nodes joined within the join timeout.
            RendezvousConnectionError: the store failed.
            RendezvousStateError: the state of the rendezvous is damaged.
            RendezvousGracefulExit: this node was a spare (a waiting node in excess of ``max_nodes``), and the
                rendezvous has been closed.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether the rendezvous has been closed."""

    @abstractmethod
    def set_closed(self) -> None:
        """Close the rendezvous, so that no further round begins."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return the number of waiting nodes that would take part in the next round."""

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the name of the rendezvous."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Close the rendezvous and release the handler's resources. Return whether all steps succeeded."""


_ADDRESS, _PORT = "MASTER_ADDR", "MASTER_PORT"


@dataclass(frozen=True)
class RendezvousStoreInfo:
    """The address at which rank 0 can offer a service to the other nodes. This class does not start a service.

    By default, the port is one that was free when the address was published.

    Attributes:
        master_addr: a host name or an address.
        master_port: a TCP port.
    """

    master_addr: str
    master_port: int

    @classmethod
    def build(
        cls,
        rank: int,
        store: Store,
        local_addr: str | None = None,
        server_port: int | None = None,
        timeout: Timeout | None = None,
    ) -> RendezvousStoreInfo:
        """On rank 0, publish the address of rank 0. On any other rank, wait for this address. Return the address.

        Args:
            rank: this node's rank.
            store: the store of the round. The keys are ``MASTER_ADDR`` and ``MASTER_PORT``.
            local_addr: the address of rank 0; its host name by default.
            server_port: the port; by default a port that is free now.
            timeout: how long other ranks wait, in seconds or as a `timedelta`; None means the store's timeout.

        Raises:
            StoreTimeoutError: rank 0 published no address within the timeout.
            RendezvousStateError: another program has written these keys.
        """
        if rank == 0:
            address = local_addr or system.hostname()
            port = network.free_port() if server_port is None else server_port
            store.multi_set([_ADDRESS, _PORT], [address, str(port)])
            return cls(address, port)
        store.wait([_ADDRESS, _PORT], timeout)
        found, port_text = store.multi_get([_ADDRESS, _PORT])
        try:
            return cls(found.decode("utf-8", "surrogateescape"), int(port_text))
        except ValueError as error:
            raise RendezvousStateError(
                f"the keys {_ADDRESS} and {_PORT} hold {found[:40]!r} and {port_text[:40]!r}, which is not an address:"
                " another program wrote them, so use another store"
            ) from error


@dataclass(frozen=True)
class RendezvousInfo:
    """The result of a round of a rendezvous for one node.

    Attributes:
        store: a store that only the nodes of this round use.
        rank: this node's rank, 0 to `world_size` - 1.
        world_size: how many nodes take part.
        bootstrap_store_info: the address of rank 0.
    """

    store: Store
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo
