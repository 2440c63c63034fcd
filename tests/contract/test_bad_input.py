"""Bad arguments, on every kind of store."""

from __future__ import annotations

from fscoord.testing.contract.refusals import Refusals


class TestEveryStore(Refusals):
    """The suite that users run on stores of their own, on the `place` of every kind."""
