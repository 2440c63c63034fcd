"""One process of JAX on the CPU: `jax_worker.py HOW [URL]`; its rank and world size are in the environment.

- `sum`: initialize, sum a number of each process, and print the sum.
- `fail-once`: so do all, but rank 1 fails when it is initialized, until the launcher has restarted it once.
- `detect`: as `sum`, with `jax.distributed.initialize` itself and its detection of clusters.
- `lone`: initialize, with half a second for a new rank 0.
- `open`: open the store, say so, and wait to be killed.
- `publish`: meet the others, but do not call JAX; say so, and wait to be killed.
"""

from __future__ import annotations

import os
import sys

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

import fscoord.rendezvous
from fscoord.integrations.jax import initialize


def add_up() -> None:
    mine = jnp.array([jax.process_index() + 1.0])
    total = float(multihost_utils.process_allgather(mine).sum())
    print(f"rank {jax.process_index()} of {jax.process_count()}: {total:g}", flush=True)


def hold(word: str) -> None:
    print(word, flush=True)
    sys.stdin.read()


def main() -> None:
    how, url = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if how == "open":
        with fscoord.open_store(url, rank=0):
            hold("open")
    elif how == "publish":
        with fscoord.open_store(url) as store:
            fscoord.rendezvous.static_rendezvous(store, name="fscoord/jax/1", timeout=60)
            hold("published")
    elif how == "detect":
        jax.distributed.initialize(cluster_detection_method="fscoord")
        add_up()
    else:
        initialize(url, timeout=60, restart_timeout=0.5 if how == "lone" else 30)
        if how == "fail-once" and jax.process_index() == 1 and os.environ["FSCOORD_RESTART_COUNT"] == "0":
            os._exit(3)
        add_up()


if __name__ == "__main__":
    main()
