"""Shell completion of keys, and of the names of locks, elections, queues and groups.

Nothing here prints, creates a store or raises: a shell shows no message while it completes a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from fscoord import inspect
from fscoord._arguments import key_text
from fscoord._runtime import system
from fscoord.cli.options import store_url
from fscoord.stores.url import file_path, open_store

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

LIMIT_S: Final = 1.0
"""The time limit in seconds for an operation on the store, and for the search of a log for queues."""
SIZE_MAX: Final = 64 << 20
"""The largest log, in bytes, that is read for a completion. A user would not wait for a larger log."""
OFFERS_MAX: Final = 1000


def _keys(ctx: click.Context, prefix: str) -> list[str]:
    try:
        url = store_url(ctx)
        path = file_path(url)
        options: dict[str, Any] = {} if path is None else {"read_only": True}
        if path is not None and _is_long(path):
            return []
        with open_store(url, timeout=LIMIT_S, **options) as store:
            return [key for key in store.list_keys(prefix) if key.startswith(prefix)]
    except Exception:  # noqa: BLE001 - no store, a damaged one, one that does not answer: there is nothing to offer
        return []


def _queues(ctx: click.Context, prefix: str) -> list[str]:
    """Return the queues in the log of a file store, also empty ones. Other stores can't list their queues."""
    found: set[str] = set()
    end = system.time.monotonic() + LIMIT_S
    try:
        path = file_path(store_url(ctx))
        if path is None or _is_long(path):
            return []
        generation = 0
        for entry in inspect.dump(path):
            if entry.generation != generation:  # it begins with all values that its predecessor still had
                found, generation = set(), entry.generation
            if entry.kind == "queue_push":
                found.add(key_text(entry.key))
            elif entry.kind == "delete":
                found.discard(key_text(entry.key))
            if system.time.monotonic() > end:
                return []
    except Exception:  # noqa: BLE001 - as above
        return []
    return [name for name in found if name.startswith(prefix)]


def _is_long(path: str) -> bool:
    return system.os.path.getsize(path) > SIZE_MAX


def _completer(find: Callable[[click.Context, str], Iterable[str]]) -> Completer:
    """Return a function with which click completes a word. `find` returns the names for the context and a prefix."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer the names that begin with `incomplete`."""
        found = sorted({name for name in find(ctx, incomplete) if name.isprintable()})
        return [CompletionItem(name) for name in found[:OFFERS_MAX]]

    return complete


complete_key: Final = _completer(_keys)
complete_queue: Final = _completer(_queues)
"""Completes the names of queues made by "fscoord push"."""
complete_key_or_queue: Final = _completer(lambda ctx, begin: [*_keys(ctx, begin), *_queues(ctx, begin)])
"""Completes keys, and the names of queues made by "fscoord push"."""


def complete_name(*marks: str) -> Completer:
    """Return a function that completes the names of a recipe. A name is the part of a key before one of `marks`."""
    return _completer(
        lambda ctx, begin: [key.rpartition(mark)[0] for key in _keys(ctx, begin) for mark in marks if mark in key]
    )
