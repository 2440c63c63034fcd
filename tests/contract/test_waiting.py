"""Waits and Ctrl-C, on every kind of store."""

from __future__ import annotations

from fscoord.testing.contract.waiting import Interrupts, Waiting


class TestEveryStore(Interrupts, Waiting):
    """The suite that users run on stores of their own, on the `place` of every kind."""
