"""Two processes of macOS on one `FileStore`: ``file_store.py PATH WATCH RANK``, with flock and without inotify."""

from __future__ import annotations

import sys

from support.internals import watcher_of

from fscoord import FileStore, barrier, inspect, recipes

path, watch, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
with FileStore(path, lock="flock", watch=watch, durable=True, timeout=60, rank=rank) as store:
    barrier(store, 2, "begin", rank=rank)
    for _ in range(20):
        store.add("count", 1)
    store.set(f"from {rank}", b"value" * 100_000)
    assert store.get(f"from {1 - rank}") == b"value" * 100_000
    store.wait(["from 0", "from 1"])
    with recipes.Lock(store, "lock"):
        store.set("held", str(rank))
        assert store.get("held") == str(rank).encode()
    store.compact()
    barrier(store, 2, "end", rank=rank)
    assert store.get("count") == b"40"
    assert not store.has_liveness
    assert inspect.verify(path).verdict in ("sound", "torn")
    watcher = watcher_of(store)
    print(type(watcher._events).__name__ if watcher is not None else None)
