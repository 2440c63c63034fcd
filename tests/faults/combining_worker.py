"""Processes for test_combined_kills: they write to a log on what counts as a mount that hosts share."""

from __future__ import annotations

import json
import os
import random
import sys
import time

from support.combining import share
from support.internals import NetworkAccess

from fscoord import FileStore, StoreError, StoreTimeoutError

ROUND_TRIP_S = 0.001


def be_far() -> None:
    """Let reads under the lock, and writes, take as long as on a file server that is a millisecond away."""
    catch_up, write = NetworkAccess.catch_up, NetworkAccess.write

    def catch_up_late(access: NetworkAccess) -> bool:
        time.sleep(2 * ROUND_TRIP_S)
        return catch_up(access)

    def write_late(access: NetworkAccess, data: bytes) -> None:
        time.sleep(ROUND_TRIP_S)
        write(access, data)
        time.sleep(ROUND_TRIP_S)

    NetworkAccess.catch_up, NetworkAccess.write = catch_up_late, write_late  # type: ignore[method-assign]


def write(directory: str, name: str, seed: int) -> None:
    """Write until killed. Report the begin of each operation, and then its result."""
    share(directory)
    be_far()
    draw = random.Random(seed)
    said = os.open(os.path.join(directory, f"said-{name}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with FileStore(os.path.join(directory, "log"), timeout=30, compact_bytes=1 << 14) as store:
        store.set("registered", "1")
        number = 0
        while True:
            number += 1
            tag = f"{name}.{number}"
            os.write(said, f"begun {tag}\n".encode())
            store.set_timeout(draw.choice([0.005, 0.1, 30, 30]))
            result = "None"
            try:
                if number % 3 == 0:
                    result = str(store.add("n", 1))
                elif number % 3 == 1:
                    store.append("tags", f"{tag} ")
                else:
                    store.queue_push("queue", tag)
            except (StoreTimeoutError, StoreError) as error:
                os.write(said, f"{'maybe' if error.maybe_applied else 'not'} {tag} {error!r:.400}\n".encode())
            else:
                os.write(said, f"done {tag} {result}\n".encode())


if __name__ == "__main__":
    write(*json.loads(sys.argv[2]))
