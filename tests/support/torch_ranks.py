"""Processes that make process groups of torch. A test sends them one step after another."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.places import HANG_S

from fscoord import FileStore

LAUNCHERS = ("PYTEST_XDIST_", "SLURM_", "FLUX_", "PALS_", "PBS_", "TORCHELASTIC_", "FSCOORD_")
"""The beginnings of the variables that may name a job."""

# The import of torch takes seconds. The fork server makes it once for all tests of a session.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "fscoord.integrations.torch"])


_kept: list[torch.Tensor] = []
"""The tensors of collectives. torch 2.6 destroys a process group while it holds the GIL, and joins gloo's threads. Such
a thread needs the GIL if it drops the last reference to a tensor that Python had, and both would wait for ever."""


class Refused(Exception):
    """An error in the other process: the name of its class, that of its cause, and its message."""

    def __init__(self, name: str, cause: str, message: str) -> None:
        super().__init__(name, cause, message)
        self.name, self.cause, self.message = name, cause, message


class Rank:
    """A process that calls one function after another, and so makes one process group after another."""

    def __init__(self, path: str, environment: dict[str, str]) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, path, environment), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def begin(self, step: Callable[..., Any], *arguments: Any) -> Rank:
        """Let the process begin `step`, whose first argument is the path."""
        self._pipe.send((step, arguments))
        return self

    def result(self) -> Any:
        """Return the result of the step, or raise `Refused`."""
        assert self._pipe.poll(HANG_S), "the step hangs"
        is_error, value = self._pipe.recv()
        if is_error:
            raise Refused(*value)
        return value

    def call(self, step: Callable[..., Any], *arguments: Any) -> Any:
        return self.begin(step, *arguments).result()

    def end(self) -> None:
        """Let the process end in good order."""
        self._pipe.send(None)
        self._process.join(HANG_S)
        assert self._process.exitcode == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.join(HANG_S)

    def close(self) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()


@contextmanager
def ranks(path: str) -> Iterator[Callable[..., Rank]]:
    """Give `start(**environment)`, which starts a `Rank`. All are killed and reaped at the end."""
    started: list[Rank] = []

    def start(**environment: str) -> Rank:
        started.append(Rank(path, environment))
        return started[-1]

    try:
        yield start
    finally:
        for rank in started:
            rank.close()


def meet(path: str, rank: int, world_size: int, limit: float = HANG_S, query: str = "") -> int:
    """Make a process group. Return the sum of the ranks, which all ranks add up together."""
    url, wait = f"fscoord://{path}{query}", timedelta(seconds=limit)
    import fscoord.integrations.torch  # noqa: F401 - registers the scheme

    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size, timeout=wait)
    total = torch.tensor([rank])
    _kept.append(total)
    dist.all_reduce(total)
    return int(total)


def part(_: str) -> None:
    """Destroy the process group."""
    dist.destroy_process_group()


def meet_and_part(path: str, rank: int, world_size: int, limit: float = HANG_S, query: str = "") -> int:
    total = meet(path, rank, world_size, limit, query)
    dist.destroy_process_group()
    return total


def number_of_descriptors(_: str) -> int:
    return len(os.listdir("/proc/self/fd"))


def use_store(_: str) -> int:
    """Use the store of the process group, as torch does to make another group."""
    return int(dist.distributed_c10d._get_default_store().add("uses", 1))


def work(path: str, how: str, rank: int, world_size: int) -> None:
    """Make a process group on gloo, over a store of fscoord, and do with it what torch can do."""
    from fscoord.integrations.torch import TorchStore

    limit = timedelta(seconds=HANG_S)
    if how == "store":
        store = dist.PrefixStore("job", TorchStore(FileStore(path, timeout=HANG_S)))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        del store
    else:
        dist.init_process_group(
            "gloo", init_method=f"fscoord://{path}", rank=rank, world_size=world_size, timeout=limit
        )
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == world_size * (world_size + 1) / 2, total
    dist.barrier()
    gc.collect()  # nothing in Python refers to the store any more
    pair = dist.new_group([0, world_size - 1], timeout=limit)
    if rank in (0, world_size - 1):
        summed = torch.tensor([1.0])
        dist.all_reduce(summed, group=pair)
        assert summed.item() == 2, summed
    facts: list[object] = [None] * world_size
    dist.all_gather_object(facts, {"rank": rank})
    assert facts == [{"rank": other} for other in range(world_size)], facts
    dist.monitored_barrier(timeout=limit)
    dist.destroy_process_group()


def _serve(pipe: Any, path: str, environment: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]
    os.environ.update(environment, OMP_NUM_THREADS="1")
    while (task := pipe.recv()) is not None:
        step, arguments = task
        try:
            pipe.send((False, step(path, *arguments)))
        except Exception as error:  # the test judges it
            name = "DistStoreError" if isinstance(error, dist.DistStoreError) else type(error).__name__
            pipe.send((True, (name, type(error.__cause__).__name__, str(error))))
