"""`wait_visible` waits until this host sees a file that another host has written.

A client of a network file system answers from its caches. On NFS these answers are old for up to a minute:

- **A name that was missing stays missing** (a negative entry of the directory cache), also for stat(2) and open(2) of
  the path. The client asks the server again if the attributes of the directory have changed, and an open(2) of the
  directory makes it read them (close-to-open consistency).
- **The size and the data** are those of the server at the latest open(2) of the file. If another descriptor of this
  host is open for writing, the client keeps the cached pages even then, and a reader gets NUL bytes. So each look opens
  the file again, and drops its cached pages (POSIX_FADV_DONTNEED).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fscoord._arguments import DEFAULT_TIMEOUT, Timeout, to_seconds
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import StoreTimeoutError

__all__ = ["wait_visible"]

FIRST_PAUSE_S: Final = 0.01
LONGEST_PAUSE_S: Final = 1.0

BLOCK: Final = 1 << 20
"""How many bytes one read(2) of the digest reads."""

_UNSEEN: Final = (system.errno.ENOENT, system.errno.ENOTDIR, system.errno.ESTALE)


def wait_visible(
    path: str | system.os.PathLike[str],
    *,
    size: int | None = None,
    sha256: str | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> None:
    """Wait until this host sees the file or directory `path`, which another host has created.

    The writer must have closed or synced the file. If another host may replace or extend a file that exists already,
    give `size` or `sha256`: otherwise the old file is a file that exists.

    Args:
        path: the path.
        size: the size of the file, in bytes, as the writer reports it; None: any size.
        sha256: the SHA-256 digest of the contents, in hexadecimal, as the writer reports it. Each look at a file of the
            right size then reads the whole file. None: any contents.
        timeout: how long to wait, in seconds or as a `timedelta`.

    Raises:
        StoreTimeoutError: the file was not visible within the timeout. The message says what this host saw.
        OSError: the file can't be read for another reason, such as a `PermissionError`; or `path` is a directory, and
            `size` or `sha256` is given.
    """
    for pause in pauses(path, size, sha256, timeout):
        system.time.sleep(pause)


def pauses(
    path: str | system.os.PathLike[str], size: int | None, sha256: str | None, timeout: Timeout
) -> Iterator[float]:
    """Look for `path` until it is visible, and yield after each look how long to sleep, in seconds."""
    name, limit, start = system.os.path.abspath(system.os.fspath(path)), to_seconds(timeout), system.time.monotonic()
    pause, looks = FIRST_PAUSE_S, 0
    while True:
        seen = _difference(name, size, sha256)
        if not seen:
            return
        looks += 1
        waited = system.time.monotonic() - start
        if waited >= limit:
            raise StoreTimeoutError(
                f"{name} is not visible on {system.hostname()} after {waited:.3g} s and {looks} looks: {seen}; check"
                " that its writer has closed it, and that both hosts mount the same directory",
                waited=waited,
            )
        yield min(pause, limit - waited)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _difference(path: str, size: int | None, sha256: str | None) -> str:
    """Return how the file `path` differs from the expected file; empty if it does not differ."""
    missing = ""
    for _ in range(2):
        try:
            return _difference_now(path, size, sha256)
        except OSError as error:
            raise_if_foreign(error)
            if error.errno not in _UNSEEN:
                raise
            missing = error.strerror or str(error)
        _refresh(system.os.path.dirname(path))
        _refresh(system.os.path.dirname(system.os.path.realpath(path)))  # of the target of a symbolic link
    return missing


def _difference_now(path: str, size: int | None, sha256: str | None) -> str:
    opened, close = system.owned_for_a_while()
    try:
        fd = _open(path, opened)
        found = system.os.fstat(fd)
        if size is None and sha256 is None:
            _drop_cached(fd)
            return ""
        if system.stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(system.errno.EISDIR, "a directory has no size and no digest to wait for", path)
        if size is not None and found.st_size != size:
            return f"the file has {found.st_size} bytes, not {size}"
        _drop_cached(fd)
        digest = None if sha256 is None else _sha256(fd)
        if sha256 is not None and digest != sha256.lower():
            return f"the file has {found.st_size} bytes with the SHA-256 digest {digest}, not {sha256}"
        return ""
    finally:
        close()


def _open(path: str, opened: system.Descriptors) -> int:
    flags = system.os.O_RDONLY | system.O_CLOEXEC | system.O_NONBLOCK | system.O_BINARY
    opened.update(map(system.os.open, (path,), (flags,)))  # in one chain of C calls: rule 1 in `interrupts`
    (fd,) = opened
    return fd


def _refresh(directory: str) -> None:
    """Make the client of the mount read the attributes of `directory` again, or of the nearest parent that it sees."""
    opened, close = system.owned_for_a_while()
    try:
        _open(directory, opened)
    except OSError as error:
        raise_if_foreign(error)
        parent = system.os.path.dirname(directory)
        if parent != directory:
            _refresh(parent)
    finally:
        close()


def _drop_cached(fd: int) -> None:
    if hasattr(system.os, "posix_fadvise"):
        system.os.posix_fadvise(fd, 0, 0, system.os.POSIX_FADV_DONTNEED)


def _sha256(fd: int) -> str:
    digest = system.import_uninterrupted("hashlib").sha256()
    while data := system.os.read(fd, BLOCK):
        digest.update(data)
    return str(digest.hexdigest())
