"""A process for test_verify: ``compacting_worker.py write [PATH, WRITER, COUNT]`` writes, and compacts as it goes."""

from __future__ import annotations

import json
import sys

from support.internals import log_of

from fscoord import FileStore

LIMIT_S = 60


def write(path: str, writer: int, count: int) -> dict[str, int]:
    """Write, so that the log is compacted every few dozen records."""
    with FileStore(path, timeout=LIMIT_S, compact_bytes=2048) as store:
        for number in range(count):
            store.set(f"{writer}", b"x" * (number % 90))
            store.add("all", 1)
        return {"generation": log_of(store).handle.header.generation}


if __name__ == "__main__":
    role, arguments = sys.argv[1:]
    print("ready", flush=True)
    print(json.dumps({"write": write}[role](*json.loads(arguments))))
