"""`force_release`: release a lock, or another hold, that another process has."""

from __future__ import annotations

from itertools import takewhile

from fscoord._arguments import Key, check_positive
from fscoord.recipes._entry import Entry
from fscoord.recipes._line import Line
from fscoord.store import Store

__all__ = ["force_release"]


def force_release(store: Store, name: Key, token: int) -> bool:
    """Release the hold with the fencing token `token`, whichever process has it; the next in line gets it.

    This is for a holder that hangs, or that can't be told dead. It is not asked, and finds out only at its next
    ``check`` or ``release``, which raises `~fscoord.LockLostError`. Until then it may write at the same time as the
    next holder. Only a resource that refuses its token, such as `Fenced`, is safe from it. ``holders`` of any recipe
    returns the tokens of a name.

    Args:
        store: where the hold is.
        name: the name of a `Lock`, `RLock`, `ReadWriteLock`, `Semaphore` or `Election`, or of work under `once`.
        token: which of its holds: so it can't be another one's, who came meanwhile.

    Returns:
        Whether there was such a hold.
    """
    check_positive("token", token)
    line = Line(store, name, _admitted)
    held = [entry for entry in line.entries() if entry.token == token]
    entry = held[0] if held else None
    return entry is not None and line.leave(entry.id)


def _admitted(entries: list[Entry]) -> int:
    """Return how many of these are served: what the recipe would say that their modes are of."""
    mode = entries[0].mode if entries else ""
    if mode.isdigit():  # a semaphore's value
        return min(int(mode), len(entries))
    readers = sum(1 for _ in takewhile(lambda entry: entry.mode == "r", entries))
    return readers or min(1, len(entries))
