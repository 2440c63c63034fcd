"""`RendezvousHandlerRegistry`: handlers by the name of their backend, those of other packages too."""

from __future__ import annotations

from collections.abc import Callable

from fscoord._runtime.logging import logger
from fscoord.rendezvous.base import RendezvousHandler
from fscoord.rendezvous.parameters import RendezvousParameters

__all__ = [
    "ENTRY_POINTS",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "get_rendezvous_handler",
    "rendezvous_handler_registry",
]

ENTRY_POINTS = "fscoord.rendezvous"
"""The group of entry points in which other packages name theirs: each is a `RendezvousHandlerCreator`."""

RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Makers of handlers by the name of their backend."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Let `create_handler` use `creator` for `backend`. The same again changes nothing.

        Raises:
            ValueError: the name is empty, or another maker has it.
        """
        if not backend:
            raise ValueError("the rendezvous backend needs a name")
        if self._creators.setdefault(backend, creator) != creator:  # each access to a method makes an object of its own
            raise ValueError(f"the rendezvous backend {backend!r} is registered already, with another maker")

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Return the handler that the maker registered for ``params.backend`` makes of `params`.

        Raises:
            ValueError: no maker has that name.
            RuntimeError: the maker made a handler of another backend.
        """
        creator = self._creators.get(params.backend)
        if creator is None:
            known = ", ".join(sorted(self._creators)) or "none"
            raise ValueError(f"unknown rendezvous backend {params.backend!r}; there are: {known}")
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"the maker of the rendezvous backend {params.backend!r} made a handler of {handler.get_backend()!r}"
            )
        return handler

    def load_entry_points(self) -> None:
        """Register what other packages name in the group ``fscoord.rendezvous``; warn of each that does not load."""
        from importlib.metadata import entry_points

        for entry in entry_points(group=ENTRY_POINTS):
            try:
                if entry.name not in self._creators:
                    self.register(entry.name, entry.load())
            except Exception as error:  # noqa: BLE001 - a broken package must not break the others
                logger(__name__).warning("the rendezvous backend %r does not load: %s", entry.name, error)


rendezvous_handler_registry = RendezvousHandlerRegistry()
"""The registry that `get_rendezvous_handler` uses."""


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return a handler for `params`, made by whoever is registered for ``params.backend``.

    Raises:
        ValueError: nobody is.
    """
    rendezvous_handler_registry.load_entry_points()
    return rendezvous_handler_registry.create_handler(params)
