"""An example: processes share the work of counting words. `fscoord demo` prepares the store and starts the processes.

``python -m fscoord.demo STORE DIRECTORY RANK WORLD_SIZE TIMEOUT [kill]``
"""

import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

from fscoord import BrokenBarrierError, FileStore, FscoordError, Store, StoreTimeoutError, barrier
from fscoord.recipes import Queue


def fill(store: Store, directory: str) -> list[str]:
    """Find the text files below `directory`, put their numbers into the queue, and return their relative paths."""
    paths = (Path(parent, name) for parent, _, names in os.walk(directory) for name in names)
    files = sorted(str(path.relative_to(directory)) for path in paths if _is_text(path))
    store.set("files", json.dumps(files))
    Queue(store, "work").put_all(str(number) for number in range(len(files)))
    return files


def _is_text(path: Path) -> bool:
    """Return whether `path` is a regular file that looks like text. A file that can't be read counts as text."""
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            return b"\0" not in file.read(8192)
    except OSError:
        return True  # the process that counts the words reports the error


def work(store: Store, directory: str, rank: int, world_size: int, *, kill: bool) -> None:
    """Count words as rank `rank`, until all files are counted.

    With `kill`, the last rank dies while it has a file. Then another rank counts this file.
    """
    files: list[str] = json.loads(store.get("files"))
    queue = Queue(store, "work")
    held = queue.take() if kill and rank == world_size - 1 else None
    barrier(store, world_size, "all have come", rank=rank, fail_fast=True)
    if held:
        sys.stderr.write(f"fscoord: rank {rank} has taken {files[int(held.data)]!r} and dies now\n")
        os.kill(os.getpid(), signal.SIGKILL)
    _count_files(store, queue, Path(directory), rank, files, 0)
    try:
        barrier(store, world_size, "work done", rank=rank, fail_fast=True)
    except BrokenBarrierError as error:
        sys.stderr.write(f"fscoord: rank {rank} goes on without the lost ranks: {error}\n")
        while len(store.list_keys("counts/")) < len(files):  # a file that the dead rank had taken returns to the queue
            _count_files(store, queue, Path(directory), rank, files, 0.1)
        store.set(f"goes on/{rank}", "")
        for other in range(world_size):  # a rank that leaves earlier counts as lost for those still at the barrier
            store.wait_alive([f"goes on/{other}"], [other])


def _count_files(store: Store, queue: Queue, directory: Path, rank: int, files: list[str], timeout: float) -> None:
    """Count the words of files until the queue is empty for `timeout` seconds."""
    with suppress(StoreTimeoutError):
        while True:
            with queue.take(timeout=timeout) as item:
                result: dict[str, object] = {"rank": rank, "deliveries": item.deliveries}
                try:
                    text = (directory / files[int(item.data)]).read_text(encoding="utf-8", errors="replace")
                    result["words"] = Counter(re.findall(r"[^\W\d_]+", text.lower()))
                except OSError as error:
                    result["error"] = error.strerror
                store.create(f"counts/{int(item.data)}", json.dumps(result))


if __name__ == "__main__":
    path, directory, rank, world_size, timeout, *kill = sys.argv[1:]
    # Nothing is written to standard input: the read returns when the process that started this one has ended.
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
    try:
        with FileStore(path, rank=int(rank), timeout=float(timeout)) as store:
            work(store, directory, int(rank), int(world_size), kill=bool(kill))
    except FscoordError as error:
        sys.exit(f"fscoord: rank {rank}: {error}")
