"""The verbs on keys and their values: get, set, add, cas, append, delete, wait, keys, watch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import suppress

import click

from fscoord._arguments import key_bytes, key_text, to_seconds
from fscoord._runtime import system
from fscoord._waiting.timing import Backoff
from fscoord.cli.exit_codes import FALSE
from fscoord.cli.options import as_json, content, given_timeout, raw, time_limit, with_existing_store, with_store
from fscoord.cli.output import field, flush, is_terminal, printable, show, write, write_json, write_value
from fscoord.errors import StoreTimeoutError
from fscoord.recipes import Fenced
from fscoord.store import Store, wait_for_change

__all__ = ["add", "append", "cas", "delete", "get", "keys", "set_", "wait", "watch"]

log = logging.getLogger(__name__)

key_argument = click.argument("key", type=raw)


@click.command()
@key_argument
@click.option("--fenced", is_flag=True, help="It was set with --token.")
@as_json
@with_store
def get(store: Store, key: bytes, fenced: bool, as_json: bool) -> None:
    """Print the value of KEY, waiting until somebody sets it.

    It is written byte for byte; on a terminal its last line is ended.

    \b
    Examples:
      fscoord get master_addr
      fscoord get --timeout 0 config > config.bin   # do not wait
      fscoord get --json master_addr                # {"key": "master_addr", "value": "node7"}
    """
    log.info("waiting for %r, up to %s", key, store.timeout)
    value = Fenced(store, key).get() if fenced else store.get(key)
    if as_json:
        write_json({**field("key", key), **field("value", value)})
    else:
        write_value(value)


@click.command("set")
@key_argument
@click.argument("value", type=raw)
@click.option("--token", type=click.IntRange(min=1), help="A fencing token, such as $FSCOORD_TOKEN.")
@with_store
def set_(store: Store, key: bytes, value: bytes, token: int | None) -> None:
    """Give KEY the value VALUE.

    If VALUE is "-", standard input holds the value. With a --token it is refused (exit code 69) where a newer one has
    written: so whoever has lost a lock, and does not know it, changes nothing. Print such a value by "get --fenced".

    \b
    Examples:
      fscoord set master_addr "$(hostname)"
      fscoord set config - < config.bin
      fscoord set offset -- -5                      # a value that begins with a dash
      fscoord lock state -c 'fscoord set --token "$FSCOORD_TOKEN" state "$(./step)"'
    """
    if token is None:
        store.set(key, content(value))
    else:
        Fenced(store, key).set(content(value), token)


@click.command(context_settings={"ignore_unknown_options": True})  # so that -1 is a number
@key_argument
@click.argument("amount", type=int, default=1)
@as_json
@with_store
def add(store: Store, key: bytes, amount: int, as_json: bool) -> None:
    """Add AMOUNT to the integer in KEY and print the sum.

    AMOUNT is 1 by default; a missing key counts as 0.

    \b
    Examples:
      rank=$(( $(fscoord add ranks) - 1 ))          # every caller gets a rank of its own
      fscoord add credits -5
    """
    total = store.add(key, amount)
    show(as_json, {**field("key", key), "value": total}, [str(total)])


@click.command()
@key_argument
@click.argument("expected", type=raw)
@click.argument("desired", type=raw)
@as_json
@with_store
def cas(store: Store, key: bytes, expected: bytes, desired: bytes, as_json: bool) -> int:
    """Give KEY the value DESIRED if its value is EXPECTED.

    Compare and set, in one step. An EXPECTED of "" means that KEY must not exist yet. Prints the value that KEY has
    afterwards, and exits with 0 if that is DESIRED and with 1 otherwise; so take a DESIRED that nobody else uses. One
    of the two may be "-": then standard input holds it.

    \b
    Examples:
      if fscoord cas leader "" "$(hostname):$$" > /dev/null; then echo "I lead"; fi
      fscoord cas phase train evaluate
    """
    old, new = content(expected), content(desired)
    if expected == desired or old == new:
        raise click.UsageError("EXPECTED and DESIRED are the same, so that nothing could change")
    value = store.compare_set(key, old, new)
    won = value == new
    missing = not won and value == old  # compare_set would have replaced it: it stands for "there is no such key"
    if as_json:
        write_json({**field("key", key), "won": won, **({"value": None} if missing else field("value", value))})
    elif not missing:
        write_value(value)
    return 0 if won else FALSE


@click.command()
@key_argument
@click.argument("value", type=raw)
@with_store
def append(store: Store, key: bytes, value: bytes) -> None:
    """Append VALUE to the value of KEY, in one step.

    If VALUE is "-", standard input holds it. A missing key counts as empty.

    \b
    Examples:
      fscoord append hosts "$(hostname) "
      date | fscoord append journal -
    """
    store.append(key, content(value))


@click.command()
@click.argument("names", metavar="KEY...", type=raw, nargs=-1, required=True)
@with_store
def delete(store: Store, names: tuple[bytes, ...]) -> int:
    """Remove every KEY, its value and its queue.

    Exits with 1 if one of them was not there.

    \b
    Examples:
      fscoord delete leader
      fscoord keys tmp/ | xargs -r fscoord delete
    """
    were_there = [store.delete_key(name) for name in names]
    return 0 if all(were_there) else FALSE


@click.command()
@click.argument("names", metavar="KEY...", type=raw, nargs=-1, required=True)
@with_store
def wait(store: Store, names: tuple[bytes, ...]) -> None:
    """Wait until every KEY has a value or a non-empty queue.

    If time runs out, the error names those that are missing (exit code 75).

    \b
    Examples:
      fscoord wait --timeout 60 ready/0 ready/1
      fscoord wait --timeout 0 leader 2> /dev/null && echo "there is one"
    """
    log.info("waiting for %s, up to %s", ", ".join(map(repr, names)), store.timeout)
    store.wait(names)


@click.command()
@click.argument("prefix", type=raw, default="")
@click.option("-0", "--null", is_flag=True, help="End each with a zero byte, not a newline.")
@as_json
@with_existing_store
def keys(store: Store, prefix: bytes, null: bool, as_json: bool) -> None:
    """Print the keys that begin with PREFIX, sorted.

    One stands on a line. Queues are not listed. On a terminal, what can't be printed is shown as \\x..; elsewhere
    the keys are written byte for byte.

    \b
    Examples:
      fscoord keys
      fscoord keys -0 result/ | xargs -0 -n 1 fscoord get
      fscoord keys --json                           # [{"key": "a"}, {"key": "b"}]
    """
    names = [key_bytes(name) for name in store.list_keys(prefix)]
    if as_json:
        write_json([field("key", name) for name in names])
        return
    ending = b"\0" if null else b"\n"
    for name in names:
        write((printable(name).encode() if is_terminal() else name) + ending)


SHOWN = 120
"""How many bytes of a value are shown on a line of text."""

READ_S = 5.0
"""The time limit for reading all values once."""

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
    for changes in _changes(store, prefix, is_all=is_all, interval=interval, end=end):
        for key, value in changes:
            _print_change(key, value, as_json=as_json)
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


def _changes(
    store: Store, prefix: bytes, *, is_all: bool, interval: float, end: float
) -> Iterator[list[tuple[bytes, bytes | None]]]:
    """Yield what has changed between two reads: sorted keys with their values, None for a key that was deleted."""
    heard = wait_for_change(store, None, READ_S)
    known: Values = {} if is_all else _read_all(store, prefix)
    log.info("watching the keys that begin with %r", key_text(prefix))
    while True:
        found = _read_all(store, prefix)
        changed = {key for key, value in found.items() if known.get(key) != value}
        yield [(key, found.get(key)) for key in sorted(changed | (known.keys() - found.keys()))]
        known = found
        left = end - system.time.monotonic()
        if left <= 0:
            return
        system.time.sleep(min(interval, left))
        heard = wait_for_change(store, heard, max(end - system.time.monotonic(), 0.0))


def _read_all(store: Store, prefix: bytes) -> Values:
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


def _print_change(key: bytes, value: bytes | None, *, as_json: bool) -> None:
    if as_json:
        change = {"change": "delete" if value is None else "set", **field("key", key)}
        write_json(change if value is None else {**change, **field("value", value)})
    elif value is None:
        write(f"delete {printable(key)}\n".encode())
    else:
        more = "..." if len(value) > SHOWN else ""
        write(f"set {printable(key)} {printable(value[:SHOWN])}{more}".rstrip().encode() + b"\n")
