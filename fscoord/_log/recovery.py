"""Flags for the invariants of a handle that an interrupted operation may have broken: `POSITION` and others.

A signal handler may raise between any two instructions, a process may fork in the middle of an operation, and a file
server may forget a file. So an operation sets a flag in `HandleState.recovery` *before* it breaks an invariant, and
clears the flag when the invariant holds again. The next operation on the handle recovers before it does anything else
(`fscoord._log.log.Log._recover`).

The invariant: the position of the read descriptor is ``offset + len(pending)``, and the state machine has applied
exactly the records before ``offset``.
"""

from __future__ import annotations

from typing import Final

# The flags are ints, because an operation on an IntFlag takes a microsecond, and one on an int a hundredth of that. At
# most one of POSITION and APPLYING is set, because each is assigned in place of the other. The other flags are set in
# any combination. `docs/contributors/architecture/recovery.md` has the table.

POSITION: Final = 1
"""The position of the read descriptor is unknown. An operation sets the flag before every read and append, and clears
the flag at the end of the operation. Recovery: a new descriptor at ``offset``."""

APPLYING: Final = 2
"""It is unknown which records the state machine has applied. This flag replaces `POSITION` before records are applied.
`POSITION` replaces it again when ``offset`` and ``chain`` are updated. In a durable log the records are synced first.
Recovery: the state machine is reset, and the generation is read again from its first record."""

DESCRIPTORS: Final = 4
"""The descriptors may be closed, for example in a forked child. Recovery: the same generation is opened again."""

CLOSED: Final = 8
"""The handle has ended, and every operation raises `HandleState.final_error`. The flag is never cleared."""

SERVER_STATE: Final = 16
"""The file server may have forgotten the descriptors, or their locks (ESTALE, EIO). Recovery: as `DESCRIPTORS`."""

GENERATION: Final = 32
"""The generation of the handle is unknown. The flag is set while the handle enters another generation, or opens its own
generation again. Recovery: the handle begins at the newest generation that generation 0 names."""
