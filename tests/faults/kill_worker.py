"""A process for test_kill: it writes to a store, and prints each write that the store has acknowledged."""

from __future__ import annotations

import json
import os
import sys

from fscoord import FileStore

SIZES = (0, 10, 600, 10, 40_000, 0, 10, 5000)


def content(victim: int, number: int) -> bytes:
    """What `victim` writes as its operation `number`."""
    size = SIZES[(number * 3 + victim) % len(SIZES)]
    return b"%d.%d." % (victim, number) + bytes(size // 2) + b"x" * (size - size // 2)


def write(path: str, lock: str, victim: int) -> None:
    """Write until killed."""
    store = FileStore(path, lock=lock, timeout=60, compact_bytes=None)  # the test reads the log from its beginning
    print("ready", flush=True)
    sys.stdin.readline()
    number = 0
    while True:
        data = content(victim, number)
        if number % 3 == 0:
            store.set(f"value of {victim}", data)
        elif number % 3 == 1:
            store.queue_push("queue", data)
        else:
            store.append(f"list of {victim}", data)
        number += 1
        os.write(1, b"%d\n" % number)


if __name__ == "__main__":
    write(*json.loads(sys.argv[1]))
