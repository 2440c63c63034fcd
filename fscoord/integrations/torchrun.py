"""Serves ``torchrun --rdzv-backend=fscoord --rdzv-endpoint=/shared/job``. torchrun finds the backend by an entry point.

The endpoint is a path or the address of a store, as for `fscoord.rendezvous.create_backend`. The rendezvous itself
listens on no port. For ``env://``, workers get the host of rank 0, and a port that was free when the nodes agreed on
the round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch.distributed.elastic import rendezvous as elastic

from fscoord import errors
from fscoord.integrations.torch import TorchStore
from fscoord.rendezvous import DynamicRendezvousHandler, RendezvousParameters, create_handler

__all__ = ["BACKEND", "TorchrunHandler", "create", "get_handler"]

BACKEND = "fscoord"

P = ParamSpec("P")
R = TypeVar("R")

_ELASTIC_ERRORS: dict[type[errors.RendezvousError], type[Exception]] = {
    errors.RendezvousClosedError: elastic.RendezvousClosedError,
    errors.RendezvousTimeoutError: elastic.RendezvousTimeoutError,
    errors.RendezvousConnectionError: elastic.RendezvousConnectionError,
    errors.RendezvousStateError: elastic.RendezvousStateError,
    errors.RendezvousGracefulExit: elastic.RendezvousGracefulExitError,
}


def _raise_elastic_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Convert the errors of a rendezvous to elastic's errors, which torchrun's agent handles."""

    @wraps(method)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return method(*arguments, **named)
        except errors.RendezvousError as error:
            raise _ELASTIC_ERRORS.get(type(error), elastic.RendezvousError)(str(error)) from error

    return call


class TorchrunHandler(elastic.RendezvousHandler):
    """Wraps `handler` with the interface that torchrun's agent calls."""

    def __init__(self, handler: DynamicRendezvousHandler) -> None:
        self._handler = handler

    def get_backend(self) -> str:
        """Return the name of the backend, as in ``--rdzv-backend``."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """False, because the worker of rank 0 creates a TCP store, and workers use no store of the agent."""
        return False

    @_raise_elastic_errors
    def next_rendezvous(self) -> elastic.RendezvousInfo:
        """Wait for the other nodes; see `fscoord.rendezvous.RendezvousHandler.next_rendezvous`."""
        info = self._handler.next_rendezvous()
        address = info.bootstrap_store_info
        bootstrap = elastic.RendezvousStoreInfo(address.master_addr, address.master_port)
        return elastic.RendezvousInfo(TorchStore(info.store), info.rank, info.world_size, bootstrap)

    @_raise_elastic_errors
    def is_closed(self) -> bool:
        """Return whether the rendezvous has been closed."""
        return self._handler.is_closed()

    @_raise_elastic_errors
    def set_closed(self) -> None:
        """Close the rendezvous."""
        self._handler.set_closed()

    @_raise_elastic_errors
    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for the next round."""
        return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Return the name of the rendezvous."""
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """Close the rendezvous and release the handler's resources; return whether all steps succeeded."""
        return self._handler.shutdown()


@_raise_elastic_errors
def create(params: Any) -> TorchrunHandler:
    """Return the handler for torch's ``RendezvousParameters``.

    Raises:
        ValueError: an option, the endpoint or the run id is invalid.
        torch.distributed.elastic.rendezvous.RendezvousConnectionError: the store can't be opened.
    """
    ours = RendezvousParameters(
        "c10d", params.endpoint, params.run_id, params.min_nodes, params.max_nodes, params.local_addr, **params.config
    )
    return TorchrunHandler(create_handler(ours))


def get_handler() -> Callable[[Any], TorchrunHandler]:
    """Return `create`. This function is the entry point ``fscoord`` of the group ``torchrun.handlers``."""
    return create
