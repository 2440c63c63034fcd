"""For tests: the contract as a suite for any store, and stores and files that fail as they are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fscoord.testing.contract import StoreContract

__all__ = ["StoreContract"]


def __getattr__(name: str) -> Any:
    if name == "StoreContract":  # it needs pytest, and the rest does not
        from fscoord.testing.contract import StoreContract

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
