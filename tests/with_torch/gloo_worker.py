"""One rank of a process group on gloo, over a store of fscoord: `gloo_worker.py HOW PATH RANK WORLD_SIZE`.

HOW is `store`, `url`, or `stay`: as `url`, and at the end it says so and stays until it is killed.
"""

from __future__ import annotations

import gc
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from fscoord import FileStore
from fscoord.integrations.torch import TorchStore

LIMIT = timedelta(seconds=60)


def begin(how: str, path: str, rank: int, world_size: int) -> None:
    if how != "store":
        dist.init_process_group(
            "gloo", init_method=f"fscoord://{path}", rank=rank, world_size=world_size, timeout=LIMIT
        )
        return
    store = dist.PrefixStore("job", TorchStore(FileStore(path, timeout=60)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=LIMIT)


def work(rank: int, world_size: int) -> None:
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == world_size * (world_size + 1) / 2, total
    dist.barrier()
    gc.collect()  # nothing in Python refers to the store any more
    pair = dist.new_group([0, world_size - 1], timeout=LIMIT)
    if rank in (0, world_size - 1):
        summed = torch.tensor([1.0])
        dist.all_reduce(summed, group=pair)
        assert summed.item() == 2, summed
    facts: list[object] = [None] * world_size
    dist.all_gather_object(facts, {"rank": rank})
    assert facts == [{"rank": other} for other in range(world_size)], facts
    dist.monitored_barrier(timeout=LIMIT)


def main() -> None:
    how, path, rank, world_size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    begin(how, path, rank, world_size)
    work(rank, world_size)
    if how == "stay":
        print("stays", flush=True)
        sys.stdin.read()
    dist.destroy_process_group()
    print(f"rank {rank} is done")


if __name__ == "__main__":
    main()
