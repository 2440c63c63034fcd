"""Tools for tests: a test suite for any store, and stores and files that fail on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fscoord.testing.faults import FaultyFiles, FaultyStore

if TYPE_CHECKING:
    from fscoord.testing.contract import StoreContract
else:

    def __getattr__(name: str) -> Any:
        if name == "StoreContract":  # it needs pytest, and the rest does not
            from fscoord.testing.contract import StoreContract

            return StoreContract
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["FaultyFiles", "FaultyStore", "StoreContract", "not_faked"]


def not_faked() -> list[str]:
    """Return the ``additional_skip_names`` with which pyfakefs leaves stores on the real disk.

    The function first imports the modules that a store would import later, because modules that are imported inside the
    patcher get the fakes. The result does not work for a store with ``lock="soft"``, whose lock would be a fake link.
    """
    import sys
    from importlib import import_module

    for name in ("fscoord", "portalocker.portalocker", "watchdog.observers.inotify_c"):
        import_module(name)
    packages = ("fscoord", "portalocker", "watchdog")
    return [name for name in sys.modules if name.partition(".")[0] in packages]
