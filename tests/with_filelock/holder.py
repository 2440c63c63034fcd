"""A process that holds a lock of `fscoord.integrations.filelock` until it is given a line, or is killed."""

from __future__ import annotations

import sys

from fscoord.integrations.filelock import FsFileLock, FsReadWriteLock

if __name__ == "__main__":
    kind, path = sys.argv[1:]
    acquire = {
        "file": lambda: FsFileLock(path).acquire(),
        "read": lambda: FsReadWriteLock(path).acquire_read(),
        "write": lambda: FsReadWriteLock(path).acquire_write(),
    }[kind]
    held = acquire()  # filelock releases a lock whose object is dropped
    print("ready", flush=True)
    sys.stdin.readline()
    held.lock.release()
