"""The memory and descriptors of a process."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any


def weighed() -> dict[str, Any]:
    """Return what this process takes: KiB in memory, threads, descriptors, of which kinds, and those of processes."""
    sizes = {"Rss": 0, "Anonymous": 0}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name = line.partition(":")[0]
        if name in sizes:
            sizes[name] = int(line.split()[1])
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            kinds[re.sub("[0-9a-f]*[0-9][0-9a-f]*", "N", Path(os.readlink(f"/proc/self/fd/{name}")).name)] += 1
    watched = kinds.pop("anon_inode:[pidfd]", 0)  # of processes that come and go
    return {
        "rss": sizes["Rss"], "own": sizes["Anonymous"], "threads": threading.active_count(),
        "fds": sum(kinds.values()), "watched": watched, "kinds": dict(kinds),
    }  # fmt: skip
