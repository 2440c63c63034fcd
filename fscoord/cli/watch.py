"""The verb watch: what changes below a prefix, as it comes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import suppress

import click

from fscoord._arguments import key_bytes, key_text, to_seconds
from fscoord._runtime import system
from fscoord._waiting.backoff import Backoff
from fscoord.cli.options import as_json, given_timeout, raw, time_limit, with_existing_store
from fscoord.cli.output import field, flush, printable, write, write_json
from fscoord.errors import StoreTimeoutError
from fscoord.store import Store

__all__ = ["watch"]

log = logging.getLogger(__name__)

SHOWN = 120
"""How much of a value stands on a line for people, in bytes."""

READ_S = 5.0
"""How long one look may take."""

Values = dict[bytes, bytes]


@click.command()
@click.argument("prefix", type=raw, default="")
@click.option("-a", "--all", "is_all", is_flag=True, help="Begin with what is there.")
@click.option("--count", type=click.IntRange(min=1), help="End after so many changes.")
@click.option(
    "--interval", metavar="SECONDS", type=time_limit, default="0.1", show_default=True, help="Rest after each look."
)
@as_json
@with_existing_store
def watch(store: Store, prefix: bytes, is_all: bool, count: int | None, interval: float, as_json: bool) -> None:
    """Print what changes below PREFIX, as it comes.

    That is, among the keys that begin with it. A change is a line: "set KEY VALUE", the value cut short if it is long,
    or "delete KEY". A file store is looked at when it has changed, any other one again and again. Of several changes of
    a key between two looks the last one counts. Queues are not shown. Each look reads all values, so this is for small
    ones.

    Ends after --timeout, if that is given, with exit code 0, or 75 if --count changes have not come by then.

    \b
    Examples:
      fscoord watch progress/
      fscoord watch --all --json result/ | jq -r .value
      fscoord watch --count 1 --timeout 60 config   # wait for the next change
    """
    limit = given_timeout(click.get_current_context())
    end = system.time.monotonic() + (math.inf if limit is None else limit)
    store.set_timeout(min(READ_S, to_seconds(store.timeout)))
    left = math.inf if count is None else count
    for changes in _looks(store, prefix, is_all=is_all, interval=interval, end=end):
        for key, value in changes:
            _tell(key, value, as_json=as_json)
            left -= 1
            if left == 0:
                return
        flush()  # before the next look, which may be the last before a Ctrl-C
    if count is not None:
        raise StoreTimeoutError(
            f"{count - left} of {count} changes below {key_text(prefix)!r} came within {limit:g} s",
            keys=[key_text(prefix)],
            waited=limit or 0.0,
        )


def _looks(
    store: Store, prefix: bytes, *, is_all: bool, interval: float, end: float
) -> Iterator[list[tuple[bytes, bytes | None]]]:
    """Yield what has changed at each look: keys, sorted, with their values, None for one that is gone."""
    heard = store._await_change(None, READ_S)
    known: Values = {} if is_all else _look(store, prefix)
    log.info("watching the keys that begin with %r", key_text(prefix))
    while True:
        found = _look(store, prefix)
        changed = {key for key, value in found.items() if known.get(key) != value}
        yield [(key, found.get(key)) for key in sorted(changed | (known.keys() - found.keys()))]
        known = found
        left = end - system.time.monotonic()
        if left <= 0:
            return
        system.time.sleep(min(interval, left))
        heard = store._await_change(heard, max(end - system.time.monotonic(), 0.0))


def _look(store: Store, prefix: bytes) -> Values:
    backoff = Backoff(to_seconds(store.timeout))
    while True:
        names = [key_bytes(name) for name in store.list_keys(prefix)]
        if store.check(names):  # else one was deleted meanwhile, and would be waited for
            with suppress(StoreTimeoutError):
                return dict(zip(names, store.multi_get(names), strict=True))
        if not backoff.pause():
            raise StoreTimeoutError(
                f"keys below {key_text(prefix)!r} were deleted during each of {backoff.tries} looks at them within"
                f" {backoff.waited():.3g} s; watch a longer prefix",
                keys=[key_text(prefix)],
                waited=backoff.waited(),
            )


def _tell(key: bytes, value: bytes | None, *, as_json: bool) -> None:
    if as_json:
        change = {"change": "delete" if value is None else "set", **field("key", key)}
        write_json(change if value is None else {**change, **field("value", value)})
    elif value is None:
        write(f"delete {printable(key)}\n".encode())
    else:
        more = "..." if len(value) > SHOWN else ""
        write(f"set {printable(key)} {printable(value[:SHOWN])}{more}".rstrip().encode() + b"\n")
