"""The loggers of the package. The first use of a logger imports `logging`, to keep the import of fscoord fast.

Logging never fails an operation. If `logging` can't be imported, for example because no descriptor is left, messages
are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from fscoord._runtime.interrupts import import_uninterrupted, raise_if_foreign

if TYPE_CHECKING:
    import logging


def logger(module: str) -> logging.Logger:
    """Return the logger named `module`, which is a child of the logger ``fscoord``."""
    try:
        loaded = import_uninterrupted("logging")
    except (OSError, ImportError) as error:
        raise_if_foreign(error)
        return cast("logging.Logger", _NullLogger())
    root = loaded.getLogger("fscoord")
    if not root.handlers:
        root.addHandler(loaded.NullHandler())  # a library never prints
    return cast("logging.Logger", loaded.getLogger(module))


class _NullLogger:
    """A logger that drops every message."""

    def debug(self, *_: Any, **__: Any) -> None:
        """Drop the message."""

    info = warning = error = exception = debug
