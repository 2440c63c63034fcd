"""``torchrun --rdzv-backend=fscoord --rdzv-endpoint=/shared/job``: fscoord's rendezvous, found by its entry point.

The endpoint is whatever `fscoord.rendezvous.create_backend` takes: a path, or the address of a store. Nothing listens
on a port for the rendezvous; the address that workers get for ``env://`` is that of rank 0's host, with a port that was
free when the round was agreed.
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

_THEIRS: dict[type[errors.RendezvousError], type[Exception]] = {
    errors.RendezvousClosedError: elastic.RendezvousClosedError,
    errors.RendezvousTimeoutError: elastic.RendezvousTimeoutError,
    errors.RendezvousConnectionError: elastic.RendezvousConnectionError,
    errors.RendezvousStateError: elastic.RendezvousStateError,
    errors.RendezvousGracefulExit: elastic.RendezvousGracefulExitError,
}


def _in_elastics_words(method: Callable[P, R]) -> Callable[P, R]:
    """Raise the errors of a rendezvous as elastic's, which torchrun's agent knows."""

    @wraps(method)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return method(*arguments, **named)
        except errors.RendezvousError as error:
            raise _THEIRS.get(type(error), elastic.RendezvousError)(str(error)) from error

    return call


class TorchrunHandler(elastic.RendezvousHandler):
    """`handler` as torchrun's agent wants it."""

    def __init__(self, handler: DynamicRendezvousHandler) -> None:
        self._handler = handler

    def get_backend(self) -> str:
        """Return the name of the backend, as it stands in ``--rdzv-backend``."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether workers connect to a TCP store of the agent: there is none; the worker of rank 0 makes theirs."""
        return False

    @_in_elastics_words
    def next_rendezvous(self) -> elastic.RendezvousInfo:
        """Wait for the other nodes; see `fscoord.rendezvous.RendezvousHandler.next_rendezvous`."""
        info = self._handler.next_rendezvous()
        address = info.bootstrap_store_info
        bootstrap = elastic.RendezvousStoreInfo(address.master_addr, address.master_port)
        return elastic.RendezvousInfo(TorchStore(info.store), info.rank, info.world_size, bootstrap)

    @_in_elastics_words
    def is_closed(self) -> bool:
        """Return whether the rendezvous has been closed."""
        return self._handler.is_closed()

    @_in_elastics_words
    def set_closed(self) -> None:
        """Close the rendezvous."""
        self._handler.set_closed()

    @_in_elastics_words
    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for another round."""
        return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Return the name of the rendezvous."""
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """Close the rendezvous and give back what the handler holds."""
        return self._handler.shutdown()


@_in_elastics_words
def create(params: Any) -> TorchrunHandler:
    """Return the handler for torch's ``RendezvousParameters``.

    Raises:
        ValueError: an option, the endpoint or the run id makes no sense.
        torch.distributed.elastic.rendezvous.RendezvousConnectionError: the store can't be opened.
    """
    ours = RendezvousParameters(
        "c10d", params.endpoint, params.run_id, params.min_nodes, params.max_nodes, params.local_addr, **params.config
    )
    return TorchrunHandler(create_handler(ours))


def get_handler() -> Callable[[Any], TorchrunHandler]:
    """Return what makes handlers: the entry point ``fscoord`` of the group ``torchrun.handlers``."""
    return create
