"""`Room`: a fresh store for the workers of one round, beside the file of the rendezvous, or below its place in etcd."""

from __future__ import annotations

from typing import Any

from fscoord import _system as system
from fscoord.errors import FscoordError
from fscoord.store import Store

__all__ = ["Room"]


class Room:
    """A store that only the workers of one round use, so that nothing old is in it.

    Args:
        store: the store of the rendezvous; if it is no file, and knows no stores below it either, there is no room.
        name: what tells this round from all others in that store.
        removes: whether the end of the ``with`` removes it: for one of the nodes.

    Attributes:
        address: the address of the store, for `~fscoord.open_store`; empty if there is no room.
    """

    def __init__(self, store: Store, name: str, *, removes: bool) -> None:
        self._removes = removes
        self._below: Any = None
        path = getattr(store, "path", None)
        self._directory = f"{path}.round-{name}" if isinstance(path, str) else ""
        self.address = _url(system.os.path.abspath(system.os.path.join(self._directory, "store"))) if path else ""
        if hasattr(store, "below"):
            self._below = store.below(f"round-{name}")
            self.address = self._below.address

    def __enter__(self) -> Room:
        if self._directory:
            system.os.makedirs(self._directory, 0o700, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._directory and self._removes:
            system.remove_directory(self._directory, system.os, system.os.getpid())
        if self._below is not None:
            try:
                if self._removes:
                    self._below.erase()
            except FscoordError:  # as with a directory: what can't be removed stays
                pass
            self._below.close()


def _url(path: str) -> str:
    from urllib.parse import quote

    return "file://" + quote(path, errors="surrogateescape")
