"""`RendezvousHandler`: what every kind of rendezvous offers to the process that takes part."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fscoord.rendezvous.info import RendezvousInfo

__all__ = ["RendezvousHandler"]


class RendezvousHandler(ABC):
    """One node's part in a rendezvous; the methods are those of torch's class of this name."""

    @abstractmethod
    def get_backend(self) -> str:
        """Return the name of the backend."""

    @property
    def use_agent_store(self) -> bool:
        """Whether the published address is that of a TCP store which the agents keep and workers only connect to."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other nodes, and return the outcome of the next round.

        Raises:
            RendezvousClosedError: the rendezvous has been closed.
            RendezvousTimeoutError: too few nodes came.
            RendezvousConnectionError: the store failed.
            RendezvousStateError: the state is damaged.
            RendezvousGracefulExit: this node was spare, and the rendezvous closed.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether the rendezvous has been closed."""

    @abstractmethod
    def set_closed(self) -> None:
        """Close the rendezvous: no node gets a further round of it."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait that would take part if there were another round."""

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the name of the rendezvous."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Close the rendezvous and give back what this handler holds; return whether all went well."""
