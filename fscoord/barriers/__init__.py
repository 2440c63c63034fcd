"""Barriers that are created once and executed many times, by name and from a configuration.

`Barrier`, `register_barrier`, `BarrierConfig` and `create_barrier_from_config` have the interface of
``torch.distributed.checkpoint._experimental.barriers``, which is meant for code that coordinates checkpoints. The
main differences are: rank and world size are read from the environment when they are not given,
`Barrier.execute_barrier` takes a timeout, the error of a timeout names the missing ranks, a restarted rank continues
with the barrier that it was in, and `register_barrier` refuses a class without a name of its own.
"""

from fscoord.barriers.base import (
    BARRIER_REGISTRY,
    Barrier,
    BarrierConfig,
    create_barrier_from_config,
    register_barrier,
)
from fscoord.barriers.store import FileStoreBarrier, StoreBarrier
from fscoord.barriers.torch import DistBarrier, TCPStoreBarrier, register_in_torch

__all__ = [
    "BARRIER_REGISTRY",
    "Barrier",
    "BarrierConfig",
    "DistBarrier",
    "FileStoreBarrier",
    "StoreBarrier",
    "TCPStoreBarrier",
    "create_barrier_from_config",
    "register_barrier",
    "register_in_torch",
]
