"""`Room`: a fresh file store for the workers of one round, beside the file of the rendezvous."""

from __future__ import annotations

from fscoord import _system as system
from fscoord.store import Store

__all__ = ["Room"]


class Room:
    """A directory with a store that only the workers of one round use, so that nothing old is in it.

    Args:
        store: the store of the rendezvous; if it is no file, there is no room.
        name: what tells this round from all others in that store.
        removes: whether the end of the ``with`` removes it: for one of the nodes.

    Attributes:
        address: the address of the store, for `~fscoord.open_store`; empty if there is no room.
    """

    def __init__(self, store: Store, name: str, *, removes: bool) -> None:
        self._removes = removes
        path = getattr(store, "path", None)
        self._directory = f"{path}.round-{name}" if isinstance(path, str) else ""
        self.address = _url(system.os.path.abspath(system.os.path.join(self._directory, "store"))) if path else ""

    def __enter__(self) -> Room:
        if self._directory:
            system.os.makedirs(self._directory, 0o700, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._directory and self._removes:
            system.remove_directory(self._directory, system.os, system.os.getpid())


def _url(path: str) -> str:
    from urllib.parse import quote

    return "file://" + quote(path, errors="surrogateescape")
