"""`python -m benchmarks.leading RESULTS`: the cost to a leader of writing for another rank of its node.

The cost is processor time of the leader. The directory is local, and the store treats it as a directory that hosts
share. Each hold of the log's lock is 5 ms longer than necessary, so that the other ranks have published requests before
the next hold.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fscoord
from benchmarks import crew, machine
from benchmarks.stores import OURS
from fscoord._log import mount, opened
from fscoord._log.shared import node_poller
from fscoord._log.shared.combining import station
from fscoord._log.shared.combining.combiner import Combiner
from fscoord._log.shared.network import NetworkAccess
from fscoord._runtime import system

RANKS = (1, 2, 4, 8, 16, 32)
HOLD_S, MEASURED_S, ROUNDS = 0.005, 2.0, 3


class Led:
    """The processor time of the holds of this process, and the number of requests that they have claimed."""

    def __init__(self) -> None:
        self.holds, self.claims, self.seconds = 0, 0, 0.0

    def watch(self, directory: str) -> None:
        """Treat `directory` as shared by hosts, and record the holds of this process as a leader from now on."""
        os.environ.pop("XDG_RUNTIME_DIR", None)
        changes: list[tuple[Any, str, Any]] = [
            (station, "SHARED_MEMORY", directory),
            (node_poller, "FALLBACK", directory),
            (opened, "find_mount", lambda _: mount.Mount("nfs4", directory, ("rw",))),
            (system, "O_DIRECT", 0),
            (system, "nfs_recovers_lost_locks", lambda: False),
        ]
        for module, name, value in changes:
            setattr(module, name, value)
        lead, tell, catch_up = Combiner._lead, Combiner._tell, NetworkAccess.catch_up

        def watched(combiner: Any, *given: Any) -> Any:
            begun = time.thread_time()
            result = lead(combiner, *given)
            self.seconds += time.thread_time() - begun
            self.holds += 1
            return result

        def counted(combiner: Any, place: Any, slot: Any, batch: Any, *, is_written: bool) -> None:
            self.claims += len(batch.claims)
            tell(combiner, place, slot, batch, is_written=is_written)

        def slow(access: Any) -> bool:
            time.sleep(HOLD_S)
            return catch_up(access)

        Combiner._lead, Combiner._tell = watched, counted  # type: ignore[method-assign]
        NetworkAccess.catch_up = slow  # type: ignore[method-assign]


def add(member: crew.Member, directory: str) -> tuple[int, int, float]:
    """Add to one counter for a while; return the holds of this process as a leader."""
    led = Led()
    led.watch(directory)
    store = fscoord.FileStore(Path(directory, "log"))
    store.add("counter", 1)
    member.start()
    led.holds, led.claims, led.seconds = 0, 0, 0.0
    begun = time.monotonic()
    while time.monotonic() < begun + MEASURED_S:
        store.add("counter", 1)
    return led.holds, led.claims, led.seconds


def main(results: str) -> None:
    """Write the results: for each number of ranks the claims and the processor time of a hold, for each round."""
    found: dict[str, Any] = {"machine": machine.facts("/dev/shm"), "results": []}
    for _ in range(ROUNDS):
        for ranks in RANKS:
            with tempfile.TemporaryDirectory(prefix="benchmark-", dir="/dev/shm") as directory:
                ends = crew.run(add, ranks, directory)
            holds, claims, seconds = (sum(part) for part in zip(*ends, strict=True))
            row = {"work": "leading", "kind": OURS, "nodes": 1, "ranks_per_node": ranks, "rtt_ms": 0}
            found["results"].append(row | {"claims": claims / holds, "seconds": seconds / holds})
    found["machine"]["load_1_min_at_the_end"] = machine.load()
    Path(results).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
