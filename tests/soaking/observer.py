"""A process of the soak that lives as long as it: it looks on, and weighs itself: ``observer.py JSON``."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from soaking.weight import weighed
from soaking.worker import TIMEOUT_S

from fscoord import FileStore
from fscoord.errors import StoreTimeoutError
from fscoord.recipes import Election, Lock, Membership, Queue


def observe(given: dict[str, Any]) -> None:
    """Look on until SIGTERM, and print a line of JSON at each sample."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    rng = random.Random(given["seed"])
    seen: dict[str, int] = {}
    looks = compactions = 0
    start = due = time.monotonic()

    def risen(name: str, value: int) -> None:
        assert value >= seen.get(name, 0), f"{name} was {seen[name]} and is {value}"
        seen[name] = value

    with FileStore(
        Path(given["directory"], "store", "soak.store"), timeout=TIMEOUT_S, label="observer", **given["options"]
    ) as store:
        lock, group = Lock(store, "lock"), Membership(store, "group")
        office, jobs = Election(store, "office"), Queue(store, "jobs")
        while not ended:
            looks += 1
            chance = rng.random()
            if chance < 0.3:
                for key in [key for key in store.list_keys("own/") if rng.random() < 0.5]:
                    risen(key, int(store.get(key)))
            elif chance < 0.5:
                if store.check(["sum"]):
                    risen("sum", int(store.get("sum")))
            elif chance < 0.7:
                with suppress(StoreTimeoutError):
                    store.wait([f"scratch/{rng.randrange(20)}", f"scratch/{rng.randrange(20)}"], rng.uniform(0, 0.2))
            elif chance < 0.8:
                store.list_keys(), store.num_keys(), store.queue_len("given")
            elif chance < 0.85:
                store.members()
            elif chance < 0.9:
                with suppress(StoreTimeoutError):
                    group.observe(group.members(), timeout=0.1)
            elif chance < 0.95:
                lock.holders(), lock.waiters(), len(jobs), jobs.taken()
            elif chance < 0.99:
                with suppress(StoreTimeoutError):
                    risen("term", office.observe(timeout=0.1).term)
            elif chance < 0.992:
                store.compact()
                compactions += 1
            now = time.monotonic()
            if now >= due:
                due += given["sample_s"]
                sample = {"at": round(now - start, 1), **weighed(), "keys": store.num_keys(), "looks": looks}
                os.write(1, json.dumps({"sample": sample | {"compactions": compactions}}).encode() + b"\n")
            time.sleep(rng.uniform(0.01, 0.06))


if __name__ == "__main__":
    faulthandler.enable()
    try:
        observe(json.loads(sys.argv[1]))
    except BrokenPipeError:  # the supervisor is gone
        sys.exit(1)
    except Exception:
        os.write(1, json.dumps({"bad": f"the observer raised:\n{traceback.format_exc()}"}).encode() + b"\n")
