"""Let the ranks of a thousand nodes meet between the steps of their work, without one log for all of them.

On each node, with the number of nodes that share a log:

    fscoord run --nnodes 1000 --nproc-per-node 8 --rdzv-endpoint /shared/job examples/many_nodes.py /shared/logs 32

or in a job of Slurm: srun python examples/many_nodes.py /shared/logs 32
"""

import sys
from pathlib import Path

from fscoord import FileStore, StoreTimeoutError
from fscoord.collectives import tree_barrier
from fscoord.environment import detect

directory, nodes = Path(sys.argv[1]), int(sys.argv[2])
found = detect()
rank, world_size, per_node = found.rank, found.world_size, found.local_world_size
if rank is None or world_size is None or per_node is None:
    sys.exit(f"the environment has no rank, world size or number of ranks on this node: {found}")
group_size = nodes * per_node

with (  # a job that is started again begins another run in the same files
    FileStore(directory / f"group-{rank // group_size}", run_id=found.run_id) as group,
    FileStore(directory / "root", run_id=found.run_id) as root,
):
    for step in range(3):
        print(f"rank {rank} does its part of step {step}", file=sys.stderr)
        try:
            tree_barrier(group, root, rank, world_size, group_size, f"step {step}", timeout=600)
        except StoreTimeoutError as error:
            sys.exit(f"rank {rank}: the ranks {', '.join(error.missing_ranks)} have not finished step {step}: {error}")
    if rank == 0:
        print(world_size, "ranks have finished 3 steps")
