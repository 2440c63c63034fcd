"""Count the words in a directory of text, on any number of nodes and workers.

On each node:

    fscoord run --nnodes 2 --nproc-per-node 4 --rdzv-endpoint /shared/job examples/word_count.py /shared/texts
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

from fscoord import QueueEmptyError, barrier, open_store, synchronize

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = open_store()  # the store in FSCOORD_STORE, which the workers of this round share
if rank == 0:
    for path in sorted(Path(sys.argv[1]).rglob("*.txt")):
        store.queue_push("files", str(path))
barrier(store, world_size, "the queue is full", rank=rank)

words: Counter[str] = Counter()
while True:
    try:
        path = store.queue_pop("files", block=False).decode()
    except QueueEmptyError:
        break
    words.update(Path(path).read_text(encoding="utf-8", errors="replace").lower().split())

counts = synchronize(store, json.dumps(words), rank, world_size, "counts/")
if rank == 0:
    total = sum((Counter(json.loads(count)) for count in counts), Counter())
    for word, count in sorted(total.items(), key=lambda item: (-item[1], item[0]))[:10]:
        print(count, word)
