"""The package's loggers, made when there is something to say: `logging` takes a sixth of the time of the import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

__all__ = ["logger"]


def logger(module: str) -> logging.Logger:
    """Return the logger of `module`, a child of ``fscoord``."""
    import logging

    root = logging.getLogger("fscoord")
    if not root.handlers:
        root.addHandler(logging.NullHandler())  # a library never prints
    return logging.getLogger(module)
