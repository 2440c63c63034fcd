"""A plugin of pytest, with which filelock's own tests run on the locks of `fscoord.integrations.filelock`.

filelock's public names lead to these locks from then on. A test that imports a private module of filelock still finds
filelock's own class there.
"""

from __future__ import annotations

import filelock
import filelock.asyncio

from fscoord.integrations import filelock as ours

filelock.FileLock = ours.FsFileLock  # type: ignore[misc]
filelock.AsyncFileLock = ours.AsyncFsFileLock  # type: ignore[misc]
filelock.ReadWriteLock = ours.FsReadWriteLock  # type: ignore[misc]
filelock.AsyncReadWriteLock = ours.AsyncFsReadWriteLock  # type: ignore[misc]
