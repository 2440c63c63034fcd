"""Start a service on the first worker and use it from all other workers, as with Dask, Ray or jax.distributed.

    fscoord run --nproc-per-node 3 examples/service.py

`MASTER_ADDR` is the first node, and `MASTER_PORT` was free there when the round began. The service sets a key when it
listens. A worker that only waited for the port might connect to another program there.
"""

import os
from multiprocessing.connection import Client, Listener

from fscoord import open_store

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
store = open_store()

if rank == 0:
    key = os.urandom(16)
    with Listener(address, backlog=world_size, authkey=key) as service:
        store.set("the service listens", key)
        for _ in range(world_size - 1):
            with service.accept() as connection:
                connection.send(f"hello, rank {connection.recv()}")
else:
    with Client(address, authkey=store.get("the service listens")) as connection:
        connection.send(rank)
        print(connection.recv())
