"""The package's loggers, made when there is something to say: `logging` takes a sixth of the time of the import.

What is said is never worth an error: if `logging` can't be imported, for want of a descriptor say, it is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from fscoord._runtime.interrupts import import_uninterrupted, raise_if_foreign

if TYPE_CHECKING:
    import logging

__all__ = ["logger"]


def logger(module: str) -> logging.Logger:
    """Return the logger of `module`, a child of ``fscoord``."""
    try:
        loaded = import_uninterrupted("logging")
    except (OSError, ImportError) as error:
        raise_if_foreign(error)
        return cast("logging.Logger", _Silence())
    root = loaded.getLogger("fscoord")
    if not root.handlers:
        root.addHandler(loaded.NullHandler())  # a library never prints
    return cast("logging.Logger", loaded.getLogger(module))


class _Silence:
    """A logger that says nothing."""

    def debug(self, *_: Any, **__: Any) -> None:
        """Say nothing."""

    info = warning = error = exception = debug
