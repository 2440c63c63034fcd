"""A worker under torchrun: meets the others on gloo, and writes what it saw: `torchrun_worker.py DIR [fail-once]`.

With `fail-once` rank 0 fails in its first life. With `until-two` it works on until there are two workers.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

directory = Path(sys.argv[1])
mode = sys.argv[2] if len(sys.argv) > 2 else ""

failed_before = (directory / "failed").exists()
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.tensor([1.0])
dist.all_reduce(total)
assert total.item() == size
(directory / f"rank{rank}-of-{size}{'-again' * failed_before}").touch()
if mode == "fail-once" and not failed_before:
    dist.barrier()
    if rank == 0:
        (directory / "failed").touch()
        sys.exit(3)
    dist.barrier()  # which fails, with rank 0
until = time.monotonic() + 100
while mode == "until-two" and size < 2:
    assert time.monotonic() < until, "nobody joined"
    time.sleep(0.02)  # the agent ends this process when another node has come
dist.barrier()
dist.destroy_process_group()
