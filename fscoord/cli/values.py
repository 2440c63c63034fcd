"""The verbs on keys and their values: get, set, create, add, cas, append, delete, wait, keys, watch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import click

from fscoord._arguments import key_bytes, key_text, to_seconds
from fscoord._runtime import system
from fscoord._runtime.escaping import printable
from fscoord.cli.completion import complete_key, complete_key_or_queue
from fscoord.cli.exit_codes import FALSE
from fscoord.cli.options import (
    as_json,
    content,
    given_timeout,
    json_option,
    limit_text,
    number_option,
    raw,
    with_store,
    with_store_to_get,
    with_store_to_read,
    with_store_to_watch,
)
from fscoord.cli.output import counted, flush, is_terminal, show, tell, telling_if_slow, write, write_json, write_value
from fscoord.errors import StoreTimeoutError
from fscoord.recipes import Fenced
from fscoord.store import Store

log = logging.getLogger(__name__)

key_argument = click.argument("key", type=raw, shell_complete=complete_key)
keys_argument = click.argument(
    "names", metavar="KEY...", type=raw, nargs=-1, required=True, shell_complete=complete_key_or_queue
)


@click.command()
@key_argument
@click.option("--fenced", is_flag=True, help="Read a value that was written by set --token.")
@click.option("--default", metavar="VALUE", type=raw, help="Print VALUE at once, if KEY has no value.")
@as_json
@with_store_to_get
def get(store: Store, key: bytes, fenced: bool, default: bytes | None, as_json: bool) -> None:
    """Print the value of KEY. If KEY has no value, wait until another process sets one.

    The value is printed byte for byte. On a terminal a newline is added if the value does not end in one.

    \b
    Examples:
      fscoord get master_addr
      fscoord get --timeout 0 config > config.bin   # do not wait
      fscoord get --default 0 step                  # do not wait either, and succeed
      fscoord get --read-only phase                 # of a store that another user writes
      fscoord get --json master_addr                # {"key": "master_addr", "value": "node7"}
    """
    if fenced and default is not None:
        raise click.UsageError("--fenced and --default exclude each other")
    with telling_if_slow(log, f"waiting for {key_text(key)!r}, {limit_text(store.timeout)}"):
        value = Fenced(store, key).get() if fenced else store.get(key, default=... if default is None else default)
    if as_json:
        write_json({"key": key, "value": value})
    else:
        write_value(value)


@click.command("set")
@key_argument
@click.argument("value", type=raw)
@number_option("--token", help="Write under this fencing token, such as $FSCOORD_TOKEN.")
@with_store
def set_(store: Store, key: bytes, value: bytes, token: int | None) -> None:
    """Set the value of KEY to VALUE.

    If VALUE is "-", the value is read from standard input.

    With --token the write is refused (exit code 69) if the value was written with a newer token. So a process that has
    lost a lock without noticing can't overwrite the value of the next holder. "fscoord get --fenced" prints such a
    value.

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


@click.command()
@key_argument
@click.argument("value", type=raw)
@with_store
def create(store: Store, key: bytes, value: bytes) -> int:
    """Set KEY to VALUE if KEY has no value, in one step.

    If VALUE is "-", it is read from standard input.

    Exits with 0 if this call has set the value, and with 1 if KEY had one already. A TCPStore has no such operation
    (exit code 69); use cas there.

    \b
    Examples:
      fscoord create prepared yes && ./prepare      # one of all callers prepares
    """
    return 0 if store.create(key, content(value)) else FALSE


@click.command(context_settings={"ignore_unknown_options": True})  # so that -1 is a number
@key_argument
@click.argument("amount", type=int, default=1)
@as_json
@with_store
def add(store: Store, key: bytes, amount: int, as_json: bool) -> None:
    """Add AMOUNT to the integer in KEY, and print the sum.

    AMOUNT is 1 by default. A missing key counts as 0.

    \b
    Examples:
      rank=$(( $(fscoord add ranks) - 1 ))          # every caller gets a rank of its own
      fscoord add credits -5
    """
    total = store.add(key, amount)
    show(as_json, {"key": key, "value": total}, [str(total)])


@click.command()
@key_argument
@click.argument("expected", type=raw)
@click.argument("desired", type=raw)
@as_json
@with_store
def cas(store: Store, key: bytes, expected: bytes, desired: bytes, as_json: bool) -> int:
    """Set KEY to DESIRED if its value is EXPECTED (compare and set).

    The comparison and the write are one step. If EXPECTED is "", KEY must not exist. One of the two may be "-": then it
    is read from standard input.

    Prints the value that KEY has afterwards. Exits with 0 if this value is DESIRED, and with 1 otherwise. Two processes
    with the same DESIRED would both exit with 0, so give each process a DESIRED of its own.

    \b
    Examples:
      if fscoord cas leader "" "$(hostname):$$" > /dev/null; then echo "I lead"; fi
      fscoord cas phase train evaluate
    """
    old, new = content(expected), content(desired)
    if expected == desired or old == new:
        raise click.UsageError("EXPECTED and DESIRED are equal, so nothing could change")
    value = store.compare_set(key, old, new)
    won = value == new
    missing = not won and value == old  # not replaced, although equal: compare_set returns it for a missing KEY
    if as_json:
        write_json({"key": key, "won": won, "value": None if missing else value})
    elif not missing:
        write_value(value)
    return 0 if won else FALSE


@click.command()
@key_argument
@click.argument("value", type=raw)
@with_store
def append(store: Store, key: bytes, value: bytes) -> None:
    """Append VALUE to the value of KEY, in one step.

    If VALUE is "-", it is read from standard input. A missing key counts as empty.

    \b
    Examples:
      fscoord append hosts "$(hostname) "
      date | fscoord append journal -
    """
    store.append(key, content(value))


@click.command()
@keys_argument
@click.option("--expected", metavar="VALUE", type=raw, help="Remove a KEY only if this is its value.")
@click.option("--print", "prints", is_flag=True, help="Print the value that is removed. Takes a single KEY.")
@with_store
def delete(store: Store, names: tuple[bytes, ...], expected: bytes | None, prints: bool) -> int:
    """Remove each KEY with its value and its queue.

    Exits with 1 if one of the keys did not exist, or was not removed. With --expected, the comparison and the removal
    are one step. A TCPStore has neither --expected nor --print (exit code 69).

    \b
    Examples:
      fscoord delete leader
      fscoord keys tmp/ | xargs -r fscoord delete
      fscoord delete --expected "$(hostname)" leader
      address=$(fscoord delete --print address)     # one of all callers gets it
    """
    if not prints:
        were_there = [store.delete_key(name, expected=expected) for name in names]
        return 0 if all(were_there) else FALSE
    if len(names) > 1 or expected is not None:
        raise click.UsageError("--print takes one KEY and no --expected")
    value = store.pop(names[0])
    if value is None:
        return FALSE
    write_value(value)
    return 0


@click.command()
@keys_argument
@with_store_to_get
def wait(store: Store, names: tuple[bytes, ...]) -> None:
    """Wait until each KEY has a value or a queue that is not empty.

    If the time runs out (exit code 75), the error names the missing keys.

    \b
    Examples:
      fscoord wait --timeout 60 ready/0 ready/1
      fscoord wait --timeout 0 leader 2> /dev/null && echo "there is one"
    """
    wanted = ", ".join(repr(key_text(name)) for name in names)
    with telling_if_slow(log, f"waiting for {wanted}, {limit_text(store.timeout)}"):
        store.wait(names)


@click.command()
@click.argument("prefix", type=raw, default="", shell_complete=complete_key)
@click.option("-0", "--null", is_flag=True, help="End each key with a zero byte instead of a newline.")
@as_json
@with_store_to_read
def keys(store: Store, prefix: bytes, null: bool, as_json: bool) -> None:
    """Print the keys that begin with PREFIX, sorted, one on each line.

    Queues are not listed. Keys are printed byte for byte. On a terminal, a byte that can't be printed is shown as \\x..

    \b
    Examples:
      fscoord keys
      fscoord keys -0 result/ | xargs -0 -n 1 fscoord get
      fscoord keys --json                           # [{"key": "a"}, {"key": "b"}]
    """
    names = [key_bytes(name) for name in store.list_keys(prefix)]
    if as_json:
        write_json([{"key": name} for name in names])
        return
    ending = b"\0" if null else b"\n"
    for name in names:
        write((printable(name).encode() if is_terminal() else name) + ending)


SHOWN = 120
"""How many bytes of a value are shown on a line of text."""

READ_S = 5.0
"""The time limit in seconds for one read of all values."""


@click.command()
@click.argument("prefix", type=raw, default="", shell_complete=complete_key)
@click.option("-a", "--all", "is_all", is_flag=True, help="First print the present keys and values.")
@number_option("--count", help="End after this many changes. [default: no limit]")
@click.option("--after", metavar="POSITION", help="Begin after the change with this position, from --json.")
@json_option("Print each change as one line of JSON.")
@with_store_to_watch
def watch(store: Store, prefix: bytes, is_all: bool, count: int | None, after: str | None, as_json: bool) -> None:
    """Print each change of the keys that begin with PREFIX.

    Each change is printed as it happens, as a line: "set KEY VALUE", where a long value is cut short, or "delete KEY".
    Every change is printed once, in order. Queues are not shown.

    With --json each line has the position of its change. With --after the verb prints the changes after a position.
    If the store does not have them any more, because it was compacted, the verb fails with exit code 69, and the error
    names a position after which it can begin.

    A TCPStore does not report changes (exit code 74).

    With --timeout the verb ends after that time, with exit code 0, or with 75 if there were fewer changes than --count.
    On a terminal the verb first prints what it waits for.

    \b
    Examples:
      fscoord watch progress/
      fscoord watch --all --json result/ | jq -r .value
      fscoord watch --count 1 --timeout 60 config   # wait for the next change
      fscoord watch --json --after "$position"      # go on after the last change that was handled
    """
    limit = given_timeout(click.get_current_context())
    end = system.time.monotonic() + (math.inf if limit is None else limit)
    store.set_timeout(min(READ_S, to_seconds(store.timeout)))
    left = math.inf if count is None else count
    wanted = "changes" if count is None else counted(count, "change")
    words = f"watching for {wanted} of keys that begin with {key_text(prefix)!r}, {limit_text(limit)}"
    for key, value, position in _changes(store, prefix, words, after=after, is_all=is_all, end=end):
        _print_change(key, value, position, as_json=as_json)
        flush()  # before the next look, which may be the last before a Ctrl-C
        left -= 1
        if left == 0:
            return
    if count is not None:
        raise StoreTimeoutError(
            f"only {count - left} of {wanted} came within {limit:g} s, of keys that begin with {key_text(prefix)!r}",
            keys=[key_text(prefix)],
            waited=limit or 0.0,
        )


def _changes(
    store: Store, prefix: bytes, words: str, *, after: str | None, is_all: bool, end: float
) -> Iterator[tuple[bytes, bytes | None, str]]:
    """Yield each change: (key, value, position). The value is None if the key was deleted.

    Print `words` when the watch has begun.
    """
    with store.watch(prefix, after=after) as watch:
        names = [key_bytes(name) for name in store.list_keys(prefix)] if is_all else []
        present = sorted(store._peek_all(names).items())
        start = str(watch.position)
        tell(log, words)
        yield from ((key, value, start) for key, value in present)
        try:
            while True:
                watch._limit = max(end - system.time.monotonic(), 0.0)
                change = next(watch)
                yield key_bytes(change.key), change.value, str(change.position)
        except StoreTimeoutError as error:
            if not error.keys:  # the log's lock did not come
                raise


def _print_change(key: bytes, value: bytes | None, position: str, *, as_json: bool) -> None:
    if as_json:
        change = {"change": "delete" if value is None else "set", "key": key}
        change |= {} if value is None else {"value": value}
        write_json({**change, "position": position})
    elif value is None:
        write(f"delete {printable(key)}\n".encode())
    else:
        more = "..." if len(value) > SHOWN else ""
        write(f"set {printable(key)} {printable(value[:SHOWN])}{more}".rstrip().encode() + b"\n")
