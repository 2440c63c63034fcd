"""`Capabilities`: in what the stores differ, although all of them keep the one contract."""

from __future__ import annotations

from typing import NamedTuple

from fscoord.arguments import VALUE_MAX

__all__ = ["Capabilities"]


class Capabilities(NamedTuple):
    """What a kind of store can do beside the contract, and the few things in which it falls short of it.

    As it stands here: what the contract alone says. The suite in ``fscoord.testing`` reads these flags and tests each
    store by what it claims; the table in the documentation, "Stores compared", is made of them.

    Attributes:
        processes: several processes can share one store.
        hosts: so can several hosts.
        durable: it can be told to keep what is acknowledged through a power failure.
        survives_handles: what it holds is still there when the last handle has been closed and another is opened.
        survives_first_handle: no handle's end takes the store with it, not even that of the first one.
        sessions: it knows who has it open, and, where `Store.has_liveness` is true, who of them is dead.
        certain: whether a failed write has taken effect is always known; otherwise its error may say ``maybe_applied``.
        lists_any_key: keys that are no UTF-8 can be listed, too; otherwise `Store.list_keys` raises when there are any.
        deletes_at_once: a key's value and its queue vanish in one step.
        value_max: the longest value, in bytes. It may also bound what one `Store.multi_set` carries.
    """

    processes: bool = False
    hosts: bool = False
    durable: bool = False
    survives_handles: bool = False
    survives_first_handle: bool = True
    sessions: bool = False
    certain: bool = False
    lists_any_key: bool = True
    deletes_at_once: bool = True
    value_max: int = VALUE_MAX
