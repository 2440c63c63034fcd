"""For tests: the contract as a suite for any store, and stores and files that fail as they are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fscoord.testing.faults import FaultyFiles, FaultyStore

if TYPE_CHECKING:
    from fscoord.testing.contract import StoreContract

__all__ = ["FaultyFiles", "FaultyStore", "StoreContract", "not_faked"]


def __getattr__(name: str) -> Any:
    if name == "StoreContract":  # it needs pytest, and the rest does not
        from fscoord.testing.contract import StoreContract

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def not_faked() -> list[str]:
    """Return what pyfakefs must leave alone, as its ``additional_skip_names``, for stores to lie on the real disk.

    What a store imports only when it needs it is imported here: inside the patcher it would get the fakes. A store with
    ``lock="soft"`` is not for this: its marker file would be a fake.
    """
    import sys
    from importlib import import_module

    for name in ("fscoord", "portalocker.portalocker", "watchdog.observers.inotify_c"):
        import_module(name)
    packages = ("fscoord", "portalocker", "watchdog")
    return [name for name in sys.modules if name.partition(".")[0] in packages]
