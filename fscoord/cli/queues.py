"""The verbs on queues: push, pop and len for values; put-item, take-item and items for items with acknowledgement."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, Final

import click

from fscoord._arguments import key_text
from fscoord._runtime import system
from fscoord._runtime.signals import raise_on_termination
from fscoord.cli.completion import complete_name, complete_queue
from fscoord.cli.locks import states_of
from fscoord.cli.options import (
    as_json,
    content,
    limit_text,
    number_option,
    raw,
    with_existing_store,
    with_store,
    with_store_to_read,
)
from fscoord.cli.output import show, table_lines, telling_if_slow, write, write_json, write_value
from fscoord.cli.run_command import VERBATIM, Command, command_options, environment
from fscoord.errors import QueueEmptyError, StoreTimeoutError
from fscoord.launch import Ending
from fscoord.recipes import Item, PriorityQueue
from fscoord.store import Store

log = logging.getLogger(__name__)

queue_argument = click.argument("queue", type=raw, shell_complete=complete_queue)
complete_queue_of_items = complete_name("/number")
items_argument = click.argument("queue", type=raw, shell_complete=complete_queue_of_items)
stdin_option = click.option("--stdin", "by_stdin", is_flag=True, help="Pass the item to COMMAND on standard input.")


def failed_option(text: str) -> Callable[[Any], Any]:
    """Return the option --failed, which names another queue."""
    return click.option("--failed", metavar="OTHER", type=raw, shell_complete=complete_queue_of_items, help=text)


@click.command()
@queue_argument
@click.argument("value", type=raw)
@with_store
def push(store: Store, queue: bytes, value: bytes) -> None:
    """Append VALUE to QUEUE, for "fscoord pop".

    If VALUE is "-", it is read from standard input. For work that must not be lost, use "fscoord put-item", whose
    queues are separate.

    \b
    Examples:
      for shard in data/*; do fscoord push work "$shard"; done
      fscoord push blobs - < blob.bin
    """
    store.queue_push(queue, content(value))


@click.command()
@queue_argument
@click.option("-n", "--no-wait", is_flag=True, help="Do not wait: exit with 1 if the queue is empty.")
@as_json
@with_store
def pop(store: Store, queue: bytes, no_wait: bool, as_json: bool) -> None:
    """Remove the oldest value of QUEUE, and print it.

    Waits until the queue has a value. Each value is given out once. A value that this command has removed is gone from
    the queue, even if it could not be printed.

    The value is printed byte for byte. On a terminal a newline is added if the value does not end in one.

    \b
    Examples:
      while shard=$(fscoord pop --no-wait work); do ./train "$shard"; done
      fscoord pop --timeout 10 blobs > blob.bin
    """
    write(b"")  # raises an error if standard output is closed, before the value is gone
    if no_wait:
        value = store.queue_pop(queue, block=False)
    else:
        with telling_if_slow(log, f"waiting for a value in queue {key_text(queue)!r}, {limit_text(store.timeout)}"):
            value = store.queue_pop(queue)
    if as_json:
        write_json({"queue": queue, "value": value})
    else:
        write_value(value)


@click.command("len")
@queue_argument
@as_json
@with_store_to_read
def length(store: Store, queue: bytes, as_json: bool) -> None:
    """Print the number of values in QUEUE.

    A queue that does not exist has 0 values. "fscoord items" counts the items of "fscoord put-item".

    \b
    Examples:
      fscoord len work
    """
    count = store.queue_len(queue)
    show(as_json, {"queue": queue, "length": count}, [str(count)])


VARIABLE: Final = "FSCOORD_ITEM"

VARIABLE_MAX: Final = 128 * 1024 - len(VARIABLE) - 2
"""The longest value of `VARIABLE` in bytes. Linux limits name, "=", value and NUL together to 32 pages (execve(2))."""


@click.command("put-item")
@click.option(
    "--priority", metavar="NUMBER", type=int, default=0, show_default=True, help="Items with a lower number come first."
)
@items_argument
@click.argument("values", nargs=-1, required=True, type=raw, metavar="VALUE...")
@with_store
def put_item(store: Store, queue: bytes, values: tuple[bytes, ...], priority: int) -> None:
    """Put items into QUEUE, for "fscoord take-item".

    Each VALUE is one item, and all of them are put in one step. If VALUE is "-", it is read from standard input.

    An item stays in the queue until its work is done. The queues of "fscoord push" are separate: they lose a value as
    soon as it is given out.

    \b
    Examples:
      fscoord put-item shards data/*
      fscoord put-item --priority -1 mails - < urgent.eml
    """
    if values.count(b"-") > 1:
        raise click.UsageError("only one VALUE can come from standard input (-)")
    PriorityQueue(store, queue).put_all([content(value) for value in values], priority)


@click.command("take-item", context_settings=VERBATIM)
@click.option("-n", "--no-wait", is_flag=True, help="Do not wait: exit with 1 if the queue has no item.")
@click.option("--each", is_flag=True, help="Take one item after another, until none comes or COMMAND fails.")
@failed_option("Put an item whose COMMAND fails into the queue OTHER.")
@number_option("--max-deliveries", metavar="N", help="Put an item into OTHER only after it was handed out N times.")
@stdin_option
@items_argument
@command_options
@with_store
def take_item(
    store: Store,
    /,
    queue: bytes,
    no_wait: bool,
    each: bool,
    failed: bytes | None,
    max_deliveries: int | None,
    by_stdin: bool,
    command: Command,
) -> int:
    """Take an item of QUEUE, and run COMMAND for it.

    COMMAND finds the item in the environment variable FSCOORD_ITEM, or with --stdin on standard input. If COMMAND exits
    with 0, the item is done and is removed. Otherwise the item goes back to its place in the queue. It also goes back
    if this process dies, in whatever way. So the work on each item is done at least once, and by one process at a time.

    Waits for an item, up to --timeout. Exits with the exit code of COMMAND, with 1 if the queue has no item (-n), or
    with 75 if no item came in time.

    With --each this verb takes one item after another, and exits with 0 when there are no more. If COMMAND fails, the
    verb ends with the exit code of COMMAND. With --failed it goes on: it puts an item whose COMMAND fails into the
    queue OTHER, and ends with the exit code of the last COMMAND that failed.

    An item may kill each process that takes it, for example because it needs too much memory, and then comes back for
    ever. With --max-deliveries N and --failed, an item goes into the queue OTHER only after it was handed out N times.
    Before that, an item whose COMMAND fails goes back. COMMAND finds the number of deliveries in FSCOORD_DELIVERIES.

    As with "fscoord lock", this process has the item until all processes that COMMAND has started have ended. Signals
    are passed on to COMMAND. If this process is killed, all of these processes are killed.

    \b
    Examples:
      fscoord take-item --each shards -- sh -c './train "$FSCOORD_ITEM"'
      fscoord take-item --each --timeout inf --stdin mails -- sendmail -t
      fscoord take-item -n shards -c 'gzip "$FSCOORD_ITEM"' || echo "nothing to do, or failed"
    """
    if max_deliveries is not None and failed is None:
        raise click.UsageError("--max-deliveries needs --failed OTHER, the queue for items handed out that many times")
    check_failed(queue, failed)
    refuse = PriorityQueue(store, failed) if failed is not None else None
    own = environment(None)
    dead_letter = None if max_deliveries is None else failed
    source = PriorityQueue(store, queue, max_deliveries=max_deliveries, dead_letter=dead_letter)
    code = 0
    with raise_on_termination():
        while True:
            try:
                item = next_item(source, store.timeout, waits=not no_wait, is_last=not each)
            except QueueEmptyError:
                if each:
                    return code
                raise
            refused = refuse if item.deliveries >= (max_deliveries or 1) else None
            ending = work_on(item, partial(_run, item, command, own, by_stdin=by_stdin), refused)
            code = ending.code or code
            if not each or ending.interruption or (ending.code and refuse is None):
                return code


@click.command()
@items_argument
@as_json
@with_existing_store
def items(store: Store, queue: bytes, as_json: bool) -> None:
    """Count the items of QUEUE, and list those that are taken.

    Prints how many items wait and how many are taken. Then each item that is taken is a line: the state of its consumer
    (see "fscoord members"), how often the item has been handed out, and host:pid. The items of a consumer that is known
    dead count as waiting.

    \b
    Examples:
      fscoord items shards
      fscoord items --json shards | jq .waiting
    """
    source = PriorityQueue(store, queue)
    waiting, taken, state_of = len(source), source.taken(), states_of(store)
    takers = [
        {"owner": each.owner, "session": each.session, "alive": state_of(each).alive, "deliveries": each.token}
        for each in taken
    ]
    lines = [f"{waiting} waiting, {len(taken)} taken"]
    if taken:
        rows = [(state_of(each).word, str(each.token), each.owner) for each in taken]
        lines += table_lines(("STATE", "DELIVERIES", "PROCESS"), rows, ("DELIVERIES",))
    show(as_json, {"queue": queue, "waiting": waiting, "taken": takers}, lines)


def check_failed(queue: bytes, failed: bytes | None) -> None:
    """Raise `click.UsageError` if `failed`, the queue for the items whose command fails, is `queue` itself."""
    if failed == queue:
        raise click.UsageError(
            f"--failed must name another queue than {key_text(queue)!r}, which would hand the item out again at once"
        )


def next_item(source: PriorityQueue, limit: timedelta | float, *, waits: bool, is_last: bool) -> Item:
    """Take an item of `source`. If `waits` is true, wait for an item up to the timeout of `source`, which is `limit`.

    If the queue has no item, raise `QueueEmptyError`. If also `waits` and `is_last` are true, raise `StoreTimeoutError`
    instead. `is_last` means that the verb takes no further item.
    """
    if waits:
        try:
            with telling_if_slow(log, f"waiting for an item of queue {source.name!r}, {limit_text(limit)}"):
                return source.take()
        except StoreTimeoutError:
            if is_last:
                raise
    return source.take(block=False)


def work_on(
    item: Item,
    run: Callable[[], Ending],
    refuse: PriorityQueue | None,
    give_back: Callable[[Item], object] = Item.release,
) -> Ending:
    """Call `run`, which runs the command for `item`, then acknowledge the item.

    If the command failed, move the item to `refuse` instead. If `refuse` is None, pass the item to `give_back`, which
    may release it later. If the command was interrupted, release the item.
    """
    with ExitStack() as stack:
        stack.enter_context(item)
        ending = run()
        fate = "done"
        if ending.status and (refuse is None or ending.interruption):
            fate = "given back"
            (Item.release if ending.interruption else give_back)(item)
            stack.pop_all()
        elif ending.status and refuse is not None:
            fate = f"put into {refuse.name!r}"
            refuse.put(item.data)  # before it is removed here: a process that dies in between leaves it in both
        log.info("the command ended with %d: the item is %s", ending.code, fate)
    return ending


def _run(item: Item, command: Command, own: dict[str, str], *, by_stdin: bool) -> Ending:
    with ExitStack() as stack:
        file = stack.enter_context(system.unnamed_file(item.data)) if by_stdin else None
        return command.run(environment_of(item, own, by_stdin=by_stdin), item.check, stdin=file)


def environment_of(item: Item, own: dict[str, str], *, by_stdin: bool) -> dict[str, str]:
    """Return the environment of the command for `item`: the environment `own`, and the variables about the item."""
    variables = {**own, "FSCOORD_DELIVERIES": str(item.deliveries)}
    variables.pop(VARIABLE, None)  # of an outer take-item, whose command runs this one
    if not by_stdin:
        variables[VARIABLE] = _as_variable(item.data)
    return variables


def _as_variable(data: bytes) -> str:
    if len(data) > VARIABLE_MAX or b"\0" in data:
        has = "a NUL byte" if b"\0" in data else f"{len(data)} bytes"
        raise click.UsageError(
            f"the item has {has}, but {VARIABLE} can hold at most {VARIABLE_MAX} bytes, none of them NUL. The item is"
            " back in the queue; take it with --stdin"
        )
    return system.os.fsdecode(data)
