"""Rendezvous: nodes find each other through a store, and agree which nodes take part in each round of a job.

If the ranks are known in advance, each process finds the address of rank 0 by `static_rendezvous`.

The names and their meaning follow ``torch.distributed.elastic.rendezvous``.
"""

from fscoord.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExit,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from fscoord.rendezvous.backend import C10dRendezvousBackend, RendezvousBackend, StateStore, Token
from fscoord.rendezvous.base import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from fscoord.rendezvous.creation import (
    DEFAULT_PORT,
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    check_options,
    create_backend,
    create_handler,
    get_rendezvous_handler,
    matches_machine_hostname,
    parse_rendezvous_endpoint,
    rendezvous_handler_registry,
)
from fscoord.rendezvous.events import NodeState, RdzvEvent, construct_and_record_rdzv_event
from fscoord.rendezvous.handler import DynamicRendezvousHandler, Progress
from fscoord.rendezvous.parameters import (
    RendezvousParameters,
    RendezvousSettings,
    RendezvousTimeout,
    parse_rendezvous_config,
)
from fscoord.rendezvous.static import static_rendezvous

__all__ = [
    "DEFAULT_PORT",
    "C10dRendezvousBackend",
    "DynamicRendezvousHandler",
    "NodeState",
    "Progress",
    "RdzvEvent",
    "RendezvousBackend",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExit",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousSettings",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeout",
    "RendezvousTimeoutError",
    "StateStore",
    "Token",
    "check_options",
    "construct_and_record_rdzv_event",
    "create_backend",
    "create_handler",
    "get_rendezvous_handler",
    "matches_machine_hostname",
    "parse_rendezvous_config",
    "parse_rendezvous_endpoint",
    "rendezvous_handler_registry",
    "static_rendezvous",
]

RendezvousGracefulExitError = RendezvousGracefulExit
"""torch's name for `RendezvousGracefulExit`."""

rendezvous_handler_registry.register("c10d", create_handler)
