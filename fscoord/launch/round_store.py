"""`RoundStore`: a new store for the workers of one round, next to the rendezvous file or below its etcd prefix."""

from __future__ import annotations

from typing import Any

from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError
from fscoord.store import Store

__all__ = ["RoundStore"]


class RoundStore:
    """A store that only the workers of one round use, so that it is empty when they start.

    Next to a file it is a file in a directory of its own. The directory and the file have the group and the permissions
    of the rendezvous's file, so that the same users can use them.

    Args:
        store: the store of the rendezvous; unless it is a file or has stores below it, the round has no store.
        name: distinguishes this round from all others in that store.
        is_first: whether this node creates the store at the beginning of the ``with``, before the others use it, and
            removes it at the end.

    Attributes:
        address: the address of the store, for `~fscoord.open_store`; empty if the round has none.
    """

    def __init__(self, store: Store, name: str, *, is_first: bool) -> None:
        self._is_first = is_first
        self._below: Any = None
        self._directory = self.address = ""
        path = getattr(store, "path", None)
        if isinstance(path, str):
            self._directory = system.os.path.abspath(f"{path}.round-{name}")
            found = system.os.stat(path)
            self._group, self._mode = found.st_gid, system.stat.S_IMODE(found.st_mode) & 0o666
            self.address = _url(system.os.path.join(self._directory, "store"), self._mode, store)
        if hasattr(store, "below"):
            self._below = store.below(f"round-{name}")
            self.address = self._below.address

    def __enter__(self) -> RoundStore:
        if self._directory and self._is_first:
            self._make()
        return self

    def __exit__(self, *_: object) -> None:
        if self._directory and self._is_first:
            self._remove()
        if self._below is not None:
            try:
                if self._is_first:
                    self._below.erase()
            except FscoordError:  # as with a directory that can't be removed, it is left behind
                pass
            self._below.close()

    def _make(self) -> None:
        try:
            system.os.mkdir(self._directory, 0o700)
        except FileExistsError:  # a node that was killed left it
            self._remove()
            system.os.mkdir(self._directory, 0o700)
        if not self._mode & 0o077:
            return
        if system.os.stat(self._directory).st_gid != self._group:
            try:
                system.os.chown(self._directory, -1, self._group)
            except OSError as error:
                logger(__name__).warning(
                    "%s can't have the group %d of the rendezvous's file (%s): other users' workers can't enter it",
                    self._directory,
                    self._group,
                    error.strerror,
                )
        # Users who may read or write the file may enter the directory. Files in it inherit its group (the setgid bit).
        enter = (self._mode | self._mode >> 1 | self._mode >> 2) & 0o111
        system.os.chmod(self._directory, system.stat.S_ISGID | 0o700 | self._mode | enter)

    def _remove(self) -> None:
        system.remove_directory(self._directory, system.os, system.os.getpid())


def _url(path: str, mode: int, store: Store) -> str:
    from urllib.parse import quote

    options = {name: str(value) for name, value in getattr(store, "place_options", {}).items()}
    if mode & 0o077:
        options["mode"] = f"{mode:o}"
    query = "&".join(f"{name}={quote(value)}" for name, value in options.items())
    return "file://" + quote(path, errors="surrogateescape") + ("?" + query if query else "")
