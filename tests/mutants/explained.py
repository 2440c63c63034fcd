"""Changes that `mutate.py` makes and no test finds, and why that is right: module, key of the place, reason.

A key is that of `places.Place`, so it holds while lines move; one that fits no place any more fails a test. ``*`` at
the end of a key stands for anything.
"""

from __future__ import annotations

EXPLAINED: dict[str, dict[str, str]] = {}


def fits(pattern: str, key: str) -> bool:
    return key == pattern or (pattern.endswith("*") and key.startswith(pattern[:-1]))


def reason(module: str, key: str) -> str:
    """Return why a change that no test finds is none that matters; ``""`` if nobody has said so."""
    return next((why for pattern, why in EXPLAINED.get(module, {}).items() if fits(pattern, key)), "")
