"""Train a small model with DDP, on hosts that have a directory in common and no port open for a rendezvous.

On each of two hosts (or twice on one):

    torchrun --nnodes 2 --nproc-per-node 2 --max-restarts 3 \
        --rdzv-backend fscoord --rdzv-endpoint /shared/job --rdzv-id spirals torch_train.py /shared/training

The workers learn which of two spirals a point lies on. The points are drawn by `two_spirals` from the seed, so that
nothing is downloaded.

A checkpoint has a part of every worker: the first worker writes model and optimizer, and each worker its own random
state. After their parts all workers pass a barrier of fscoord, and only then the first worker names the checkpoint in
the file ``latest``, and removes the directory ``epoch-N`` of the checkpoint before the last one. So the checkpoint in
``latest`` is complete, whichever worker is killed, at any moment. After a death torchrun starts all workers again, and
they go on from that checkpoint. To see this, let a worker kill itself in its first life: with ``--kill 3:2`` worker 3
does so after it has written its part of the checkpoint of epoch 2.

To see for which worker the others wait, record a trace and make a page of it, for any browser:

    torchrun --nproc-per-node 4 ... torch_train.py /shared/training --trace /shared/traces
    fscoord trace html /shared/traces --output report.html
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fscoord import FileStore
from fscoord.barriers import StoreBarrier

POINTS = 4096
BATCH = 64


def two_spirals(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of the plane and on which spiral, 0 or 1, each lies.

    A point of spiral 0 is at angle t and radius t / 3 pi, t from 0.5 to 3 pi, drawn so that the points lie evenly along
    the spiral; those of spiral 1 are turned by half a circle. Each coordinate has Gaussian noise of 0.02.
    """
    generator = torch.Generator().manual_seed(seed)
    end = 3 * math.pi
    angle = torch.sqrt(0.25 + torch.rand(POINTS, generator=generator) * (end**2 - 0.25))
    which = torch.randint(2, (POINTS,), generator=generator)
    turned = angle + which * math.pi
    points = torch.stack([turned.cos(), turned.sin()], dim=1) * (angle / end)[:, None]
    return points + 0.02 * torch.randn(POINTS, 2, generator=generator), which


def make_model() -> nn.Module:
    """Return an untrained model."""
    return nn.Sequential(
        *(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.05), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    )


class Checkpoints:
    """The checkpoints of one life of the workers, in `directory`.

    Args:
        directory: the directory of the checkpoints; the same for all workers.
        barrier: the barrier of all workers of this life.
    """

    def __init__(self, directory: Path, barrier: StoreBarrier) -> None:
        self._directory = directory
        self._barrier = barrier

    def save(self, epoch: int, parts: dict[str, Any], kill: bool) -> None:
        """Write the parts of this worker; after all workers have written, name the checkpoint in ``latest``."""
        place = self._directory / f"epoch-{epoch}"
        place.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            write(place / name, part)
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        self._barrier.execute_barrier()
        if self._barrier.rank == 0:
            write(self._directory / "latest", epoch)
            shutil.rmtree(self._directory / f"epoch-{epoch - 2}", ignore_errors=True)


def write(path: Path, content: Any) -> None:
    """Write `content`, so that a reader of `path` finds the whole content, or else the old one."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with unfinished.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def read(path: Path) -> Any:
    """Return the content that `write` wrote to `path`, or None if there is no such file."""
    try:
        return torch.load(path, weights_only=True)
    except FileNotFoundError:
        return None


def begin(directory: Path) -> tuple[str, int]:
    """Return a name for this life of the workers, and the last epoch with a checkpoint, or -1.

    The first worker reads ``latest`` and sends the result to the others, because all must begin at the same epoch. A
    barrier of an earlier life may have some arrivals already, so each life has barriers of its own.
    """
    facts: list[Any] = [None, None]
    if dist.get_rank() == 0:
        latest = read(directory / "latest")
        facts = [uuid.uuid4().hex, -1 if latest is None else latest]
    dist.broadcast_object_list(facts)
    return facts[0], facts[1]


def train(options: argparse.Namespace) -> None:
    """Train until the last epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    life, done = begin(options.directory)
    print(f"worker {rank} of {world_size} goes on after epoch {done}", flush=True)
    torch.manual_seed(options.seed)  # all begin with the same model; then each has its own random state
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    torch.manual_seed(options.seed + 1 + rank)
    if done >= 0:
        place = options.directory / f"epoch-{done}"
        common, own = read(place / "common.pt"), read(place / f"worker-{rank}.pt")
        model.load_state_dict(common["model"])
        optimizer.load_state_dict(common["optimizer"])
        if own is not None:  # there may have been fewer workers
            torch.set_rng_state(own["random"])
    parallel = DistributedDataParallel(model)
    points, which = two_spirals(options.seed)
    with (
        FileStore(options.directory / "barriers", rank=rank, trace=options.trace) as store,
        StoreBarrier(store, life, rank=rank, world_size=world_size, fail_fast=True) as barrier,
    ):
        checkpoints = Checkpoints(options.directory, barrier)
        for epoch in range(done + 1, options.epochs):
            order = torch.randperm(POINTS, generator=torch.Generator().manual_seed(epoch))
            for batch in order[: POINTS - POINTS % (BATCH * world_size)][rank::world_size].split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(parallel(points[batch]), which[batch]).backward()
                optimizer.step()
            parts: dict[str, Any] = {f"worker-{rank}.pt": {"random": torch.get_rng_state()}}
            if rank == 0:
                parts["common.pt"] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoints.save(epoch, parts, kill=done < 0 and options.kill == (rank, epoch))
    if rank == 0:
        model.eval()
        print(f"{accuracy(model, options.seed + 1):.3f} of other points are right", flush=True)


def accuracy(model: nn.Module, seed: int) -> float:
    """Return the part of the points drawn from `seed` that `model` puts on the right spiral."""
    points, which = two_spirals(seed)
    with torch.no_grad():
        return float((model(points).argmax(dim=1) == which).float().mean())


def worker_and_epoch(text: str) -> tuple[int, int]:
    """Return the two numbers of ``3:2``."""
    worker, epoch = text.split(":")
    return int(worker), int(epoch)


def main() -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description="Train a small model; to be started by torchrun.")
    parser.add_argument("directory", type=Path, help="where checkpoints go; all hosts must see it")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, metavar="DIR", help="record a trace there, for `fscoord trace`")
    parser.add_argument("--kill", type=worker_and_epoch, metavar="WORKER:EPOCH", help="kill that worker there, once")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
