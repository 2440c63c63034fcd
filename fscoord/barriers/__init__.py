"""Barriers that are made once and executed again and again, by name and from a configuration.

The shape, `Barrier`, `register_barrier`, `BarrierConfig` and `create_barrier_from_config`, is that of
``torch.distributed.checkpoint._experimental.barriers``, for code that coordinates checkpoints. What differs: rank and
world size really come from the environment when they are not given, `Barrier.execute_barrier` takes a timeout, the
error of a time-out names the missing ranks, and a rank that was restarted goes on where it was.
"""

from fscoord.barriers.base import (
    BARRIER_REGISTRY,
    Barrier,
    BarrierConfig,
    create_barrier_from_config,
    register_barrier,
)
from fscoord.barriers.store import FileStoreBarrier, StoreBarrier
from fscoord.barriers.torch import DistBarrier, TCPStoreBarrier

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
]
