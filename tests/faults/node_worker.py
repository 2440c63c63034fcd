"""A process that waits for keys in a log, on a mount that it treats as shared by hosts."""

from __future__ import annotations

import json
import os
import sys

from support.internals import mount_module as mount, node_poller, node_waiter, system, watcher

from fscoord import FileStore


def pretend(directory: str, slow: float) -> None:
    """Take `directory` for NFS, its subdirectory `node` for a file system of this node, and believe it so long."""
    here = mount.Mount("nfs4", directory, ("rw",))
    watcher.SLOW_LAST_S = slow
    node_waiter.OWN_POLL_S = 1000.0
    node_poller.FALLBACK = os.path.join(directory, "node")
    os.environ.pop("XDG_RUNTIME_DIR", None)
    local = mount.find_mount

    def find_mount(path: str) -> mount.Mount:
        return local(path) if path.startswith(node_poller.FALLBACK) else here

    from support.internals import opened

    opened.find_mount = find_mount
    system.O_DIRECT = 0  # the file system of the tests has none


def waits(directory: str, slow: float, *keys: str) -> None:
    """Wait for each of `keys`; say when the first wait is about to begin, and when each is over."""
    pretend(directory, slow)
    with FileStore(os.path.join(directory, "log"), timeout=120) as store:
        store.set("here", "1")
        print("ready", flush=True)
        for key in keys:
            store.wait([key])
            print(key, flush=True)


if __name__ == "__main__":
    waits(*json.loads(sys.argv[2]))
