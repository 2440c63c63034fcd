"""Reusable barriers: classes that are registered by name, created from a configuration, and executed many times.

`Barrier`, `register_barrier`, `BarrierConfig` and `create_barrier_from_config` have the interface of
``torch.distributed.checkpoint._experimental.barriers``. There are these differences. If rank and world size are not
given, their values come from the environment. `Barrier.execute_barrier` takes a timeout, and its error names the
missing ranks. A restarted rank continues with the first barrier that this rank has not passed. `register_barrier`
refuses a class without a unique name.
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
