"""`TCPStoreBarrier` and `DistBarrier`: the barriers of torch's module, under the same names."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from fscoord._arguments import DEFAULT_TIMEOUT, Key, Timeout, to_seconds
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord.barriers.base import BARRIER_REGISTRY, Barrier, register_barrier
from fscoord.barriers.store import StoreBarrier
from fscoord.collectives.arrivals import Decoder
from fscoord.errors import BarrierError, NoProcessGroupError, StoreTimeoutError, needed_extra
from fscoord.store import Store
from fscoord.stores.url import open_store

FIRST_PAUSE_S: Final = 0.00005
LONGEST_PAUSE_S: Final = 0.01
"""The pause between two checks of torch's barrier grows from `FIRST_PAUSE_S` to this time, in seconds."""


@register_barrier
class TCPStoreBarrier(StoreBarrier):
    """A `StoreBarrier` on a `~fscoord.TCPStore`. Rank 0 runs the server, so the ranks need no shared directory.

    The interface is that of torch's ``TCPStoreBarrier``, with three differences. `timeout_secs` and
    `use_checkpoint_barrier_tcpstore_libuv` have an effect. The error of a timeout names the missing ranks. Each prefix
    has a separate sequence of barriers. Rank 0 must close its barrier last, because its `close` stops the server.

    Args:
        global_rank: the caller's rank; None means the rank in the environment.
        global_world_size: the number of ranks; None means the world size in the environment.
        barrier_prefix: the name of this sequence of barriers.
        timeout_barrier_init_secs: how long to wait for the server, in seconds.
        use_checkpoint_barrier_tcpstore_libuv: whether torch's server runs with libuv.
        tcpstore_port: the server's port.
        master_address: the host of rank 0.
        timeout_secs: how long each `execute_barrier` waits, in seconds.
        barrier_prefix_list: the same as `barrier_prefix`, as a list of one prefix.
        fail_fast, rank_tracing_decoder: as for `StoreBarrier`.

    Raises:
        ImportError: torch is not installed; the message names the extra to install.
        StoreUnavailableError: no server answers at `master_address` and `tcpstore_port`.
    """

    barrier_type = "tcp_store"

    def __init__(
        self,
        global_rank: int | None = None,
        global_world_size: int | None = None,
        barrier_prefix: Key | None = None,
        timeout_barrier_init_secs: Timeout = DEFAULT_TIMEOUT,
        use_checkpoint_barrier_tcpstore_libuv: bool = True,
        tcpstore_port: int | str = 29500,
        master_address: str = "localhost",
        timeout_secs: Timeout = DEFAULT_TIMEOUT,
        *,
        barrier_prefix_list: Sequence[Key] = (),
        fail_fast: bool = False,
        rank_tracing_decoder: Decoder | None = None,
    ) -> None:
        prefixes = [*barrier_prefix_list, *([] if barrier_prefix is None else [barrier_prefix])]
        if len(prefixes) > 1:
            raise ValueError(f"a barrier has one prefix, not {len(prefixes)}; make one barrier for each prefix")
        self._libuv = bool(use_checkpoint_barrier_tcpstore_libuv)
        self._init_timeout = to_seconds(timeout_barrier_init_secs)
        self._store_timeout = to_seconds(timeout_secs)
        prefix = prefixes[0] if prefixes else "barrier"
        logger(__name__).info(  # as in torch
            f"Initializing TCPStore {master_address=!s} {tcpstore_port=!s} rank={global_rank}"
            f" world_size={global_world_size} barrier_prefix={prefix!s} {timeout_barrier_init_secs=!s}"
            f" use_checkpoint_barrier_tcpstore_libuv={self._libuv} {timeout_secs=!s}"
        )
        super().__init__(
            f"tcp://{master_address}:{int(tcpstore_port)}",
            prefix,
            rank=global_rank,
            world_size=global_world_size,
            timeout=timeout_secs,
            fail_fast=fail_fast,
            rank_tracing_decoder=rank_tracing_decoder,
        )

    def _open(self, address: str | system.os.PathLike[str], options: dict[str, object]) -> Store:
        store = open_store(
            address,
            is_master=self.rank == 0,
            world_size=self.world_size,
            timeout=self._init_timeout,
            use_libuv=self._libuv,
            **options,
        )
        store.set_timeout(self._store_timeout)
        return store


@register_barrier
class DistBarrier(Barrier):
    """A barrier that calls ``torch.distributed.barrier`` on the default process group.

    Raises:
        ImportError: torch is not installed.
        NoProcessGroupError: there is no process group. The error is also an `AssertionError`, as in torch.
    """

    barrier_type = "dist_barrier"

    def __init__(self) -> None:
        with needed_extra("DistBarrier", "torch", "torch"):
            import torch.distributed as dist
        if not dist.is_initialized():
            raise NoProcessGroupError(
                "DistBarrier needs a process group; call torch.distributed.init_process_group first"
            )
        self._dist: Any = dist

    def execute_barrier(self, timeout: Timeout | None = None) -> None:
        """Wait until every rank has called this method as many times as this rank.

        After a timeout the process group can't be used any more.

        Args:
            timeout: how long to wait, in seconds or as a `timedelta`; None means the process group's own timeout.

        Raises:
            StoreTimeoutError: a rank did not arrive.
            BarrierError: the process group failed.
        """
        started = system.time.monotonic()
        limit = None if timeout is None else to_seconds(timeout)
        try:
            self._finish(self._dist.barrier(async_op=True), None if limit == float("inf") else limit)
        except RuntimeError as error:
            raise_if_foreign(error, "torch")
            waited = system.time.monotonic() - started
            if limit is not None and waited >= limit:
                raise StoreTimeoutError(
                    f"not all ranks arrived at the process group's barrier within {waited:.3g} s: {error}",
                    waited=waited,
                ) from error
            raise BarrierError(f"the process group's barrier failed: {error}") from error

    def _finish(self, work: Any, limit: float | None) -> None:
        """Wait for `work`, for at most `limit` seconds.

        Ctrl-C does not interrupt ``work.wait``. So this method polls ``work.is_completed``. At the end it calls
        ``work.wait``, which raises the error of `work`, or the error of a time-out.
        """
        if work is None:  # this process is not a member of the group
            return
        started = system.time.monotonic()
        pause, left = FIRST_PAUSE_S, float("inf")
        while not work.is_completed():
            if limit is not None:
                left = limit - (system.time.monotonic() - started)
                if left <= 0:
                    work.wait(timedelta(milliseconds=1))
                    return
            system.time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        work.wait()


def register_in_torch() -> None:
    """Register the barriers of fscoord in torch's own ``BARRIER_REGISTRY``, except names that torch already uses.

    After this call, ``create_barrier_from_config(BarrierConfig("file_store", {...}))`` of
    ``torch.distributed.checkpoint._experimental.barriers`` makes a `FileStoreBarrier`. Such a barrier is also an
    instance of torch's ``Barrier``. A second call of `register_in_torch` does nothing.

    Raises:
        ImportError: torch is not installed, or lacks the module.
    """
    with needed_extra("fscoord.barriers.register_in_torch", "torch", "torch"):
        import torch  # noqa: F401
    from torch.distributed.checkpoint._experimental import barriers as theirs  # an older torch lacks the module

    for name, barrier_class in BARRIER_REGISTRY.items():
        if theirs.BARRIER_REGISTRY.setdefault(name, barrier_class) is barrier_class:
            theirs.Barrier.register(barrier_class)
