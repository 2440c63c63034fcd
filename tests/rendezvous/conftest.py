"""The fixtures of the tests on every kind of store, for these tests too."""

from contract.conftest import _torch_has_opened_what_it_keeps

__all__ = ["_torch_has_opened_what_it_keeps"]
