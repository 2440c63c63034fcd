"""One of two ranks that meet at a `DistBarrier`; then rank 0 waits in vain: `dist_barrier_worker.py DIR RANK END`.

END is what ends that wait: its ``timeout``, or an ``interrupt``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

from fscoord import FileStore
from fscoord._runtime.signals import resend_lost_signals
from fscoord.barriers import BarrierConfig, create_barrier_from_config
from fscoord.errors import StoreTimeoutError
from fscoord.integrations.torch import TorchStore

directory, rank, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
files = FileStore(directory + "/store", timeout=60)
limit = timedelta(seconds=60)
dist.init_process_group("gloo", store=TorchStore(files), rank=rank, world_size=2, timeout=limit)
barrier = create_barrier_from_config(BarrierConfig("dist_barrier"))
assert barrier is not None
barrier.execute_barrier()
barrier.execute_barrier(timeout=60)
print("met", flush=True)
if rank == 0:
    try:
        with resend_lost_signals():
            if end == "interrupt":  # only from here on is the interrupt caught
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            barrier.execute_barrier(timeout=0.2 if end == "timeout" else 60)
    except StoreTimeoutError:
        print("timed out", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    files.set("done", "1")
else:
    files.get("done")
