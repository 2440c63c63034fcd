"""The capabilities of the stores, and the documentation's table, which is made from them."""

from __future__ import annotations

import inspect
from pathlib import Path

from support.places import Place

from fscoord import Capabilities, EtcdStore, FileStore, HashStore, PrefixStore, Store, TCPStore

PAGE = Path(__file__).parents[2] / "docs" / "promises.md"
STORES: list[type[Store]] = [FileStore, HashStore, TCPStore, EtcdStore]
WORDS = {
    "processes": "several processes can share the store",
    "hosts": "several hosts can share the store",
    "durable": "can survive a power failure",
    "survives_handles": "outlives its last handle",
    "survives_first_handle": "outlives its first handle",
    "sessions": "has sessions and detects deaths",
    "knows_write_outcome": "always reports whether a failed write has taken effect",
    "lists_any_key": "lists keys that are not UTF-8",
    "deletes_at_once": "a key's value and queue vanish in one step",
    "changes_conditionally": "changes a key on a condition: `create`, `pop`, `delete_key(expected=)`",
    "transacts": "changes several keys on conditions, in one step: `transact`",
    "reports_changes": "reports changes: `watch`",
    "value_max": "the longest value",
}


def table() -> str:
    """Return the table that belongs into the page."""
    rows = [["", *(f"`{store.__name__}`" for store in STORES)], ["---"] * (len(STORES) + 1)]
    rows += [[WORDS[flag], *(shown(getattr(store.capabilities, flag)) for store in STORES)] for flag in WORDS]
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)


def shown(flag: bool | int) -> str:
    if isinstance(flag, bool):
        return "yes" if flag else "no"
    return f"{flag / (1 << 20):.3g} MiB"


def test_table_in_the_documentation_agrees_with_the_flags() -> None:
    """When this fails, put `table()` into the page."""
    assert table() in PAGE.read_text(encoding="utf-8"), f"\n{table()}"


def test_table_has_every_flag_and_every_flag_is_explained() -> None:
    assert list(WORDS) == list(Capabilities._fields)
    for flag in WORDS:
        assert f"    {flag}: " in (inspect.getdoc(Capabilities) or "").replace("\n", "\n    ")


def test_view_has_the_flags_of_the_store_behind_it() -> None:
    for kind in (FileStore, HashStore):
        with kind() as store:
            assert PrefixStore("b", PrefixStore("a", store)).capabilities is kind.capabilities


def test_data_that_outlives_its_last_handle_is_found_by_the_next(place: Place) -> None:
    store = place.open()
    store.set("k", "v")
    place.close()
    if store.capabilities.survives_handles:
        assert place.open().get("k") == b"v"
