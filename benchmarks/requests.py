"""`python -m benchmarks.requests DIRECTORY`: the requests of each operation on NFS, beside torch's FileStore.

The client counts its requests itself, in /proc/self/mountstats; on NFS 3 it does not count requests of the lock
manager. Unlike times, counts carry over from one machine to another.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import crew
from benchmarks.stores import OURS, TORCH_FILE, Place, fresh, is_missing

COUNT = 200
STEADY_S, WATCH_S = 3.0, 8.0

OPERATIONS: dict[str, Callable[[Any], object]] = {
    "get, nothing new": lambda store: store.get("key"),
    "check, nothing new": lambda store: store.check(["key"]),
    "set": lambda store: store.set("key", "value"),
    "add": lambda store: store.add("counter", 1),
    "compare_set": lambda store: store.compare_set("key", "value", "value"),
}


def requests(directory: str) -> int:
    """Return how many requests this host has made to the server of `directory`, since the mount."""
    counts: dict[str, int] = {}
    point = ""
    for line in Path("/proc/self/mountstats").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if line.startswith("device "):
            point = words[4] if words[words.index("fstype") + 1].startswith("nfs") else ""
        elif point and len(words) > 8 and words[0][:-1].isupper() and words[0] != "RPC:":
            counts[point] = counts.get(point, 0) + int(words[1])
    under = [found for found in counts if Path(directory).is_relative_to(found)]
    if not under:
        raise SystemExit(f"{directory} is not on an NFS mount, and only NFS mounts count their requests")
    return counts[max(under, key=len)]


def per_operation(place: Place, directory: str) -> dict[str, float]:
    """Return the requests of each operation."""
    store = place.open()
    store.set("key", "value")
    store.add("counter", 1)
    found = {}
    for name, operation in OPERATIONS.items():
        before = requests(directory)
        for _ in range(COUNT):
            operation(store)
        found[name] = (requests(directory) - before) / COUNT
    return found


def wait_or_watch(member: crew.Member, place: Place, directory: str) -> float:
    """As rank 0, count while all others wait for a key that comes at the end; return the requests per second."""
    store = place.open()
    if member.rank:
        member.start()
        store.get("the end")
        return 0.0
    member.start()
    time.sleep(STEADY_S)
    begun, before = time.monotonic(), requests(directory)
    time.sleep(WATCH_S)
    rate = (requests(directory) - before) / (time.monotonic() - begun)
    store.set("the end", "1")
    return rate


def measure(store: str, directory: str) -> dict[str, float]:
    """Return every figure of `store`."""
    with fresh(store, directory) as place:
        found = {f"{name}, requests": cost for name, cost in per_operation(place, directory).items()}
    for waiters in (1, 8):
        with fresh(store, directory) as place:
            rates = crew.run(wait_or_watch, waiters + 1, place, directory)
            found[f"waiting, processes of the host: {waiters}, requests a second"] = rates[0]
    return found


def main(directory: str) -> None:
    """Print the table."""
    requests(directory)
    stores = [store for store in (OURS, TORCH_FILE) if not is_missing(store)]
    figures = {store: measure(store, directory) for store in stores}
    print("| work | " + " | ".join(stores) + " |\n|---|" + "---|" * len(stores))
    for work in figures[OURS]:
        print(f"| {work} | " + " | ".join(f"{figures[store][work]:.1f}" for store in stores) + " |")


if __name__ == "__main__":
    main(*sys.argv[1:])
