"""The verbs on queues: push, pop and len for values, put, take and items for items that stay until they are done."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any, Final

import click

from fscoord._runtime import system
from fscoord._runtime.signals import raise_on_termination
from fscoord.cli.locks import STATES, lives_of
from fscoord.cli.options import as_json, content, raw, with_existing_store, with_store
from fscoord.cli.output import field, show, table_lines, write_json, write_value
from fscoord.cli.run_command import VERBATIM, command_options, environment, parse_command
from fscoord.errors import QueueEmptyError, StoreTimeoutError
from fscoord.launch import Ending, run_held
from fscoord.recipes import Item, PriorityQueue
from fscoord.store import Store

__all__ = ["items", "length", "pop", "push", "put", "take"]

log = logging.getLogger(__name__)

queue_argument = click.argument("queue", type=raw)


@click.command()
@queue_argument
@click.argument("value", type=raw)
@with_store
def push(store: Store, queue: bytes, value: bytes) -> None:
    """Put VALUE at the end of QUEUE.

    If VALUE is "-", standard input holds it.

    \b
    Examples:
      for shard in data/*; do fscoord push work "$shard"; done
      fscoord push blobs - < blob.bin
    """
    store.queue_push(queue, content(value))


@click.command()
@queue_argument
@click.option("--no-wait", is_flag=True, help="Exit with 1 at once if the queue is empty.")
@as_json
@with_store
def pop(store: Store, queue: bytes, no_wait: bool, as_json: bool) -> None:
    """Take the oldest value from QUEUE and print it.

    Waits until there is one. Each value is given out exactly once: what this command has taken is gone from the
    queue, even if it can't print it. The value is written byte for byte; on a terminal its last line is ended.

    \b
    Examples:
      while shard=$(fscoord pop --no-wait work); do ./train "$shard"; done
      fscoord pop --timeout 10 blobs > blob.bin
    """
    if not no_wait:
        log.info("waiting for a value in queue %r, up to %s", queue, store.timeout)
    value = store.queue_pop(queue, block=not no_wait)
    if as_json:
        write_json({**field("queue", queue), **field("value", value)})
    else:
        write_value(value)


@click.command("len")
@queue_argument
@as_json
@with_existing_store
def length(store: Store, queue: bytes, as_json: bool) -> None:
    """Print how many values QUEUE holds.

    A queue that is not there holds 0.

    \b
    Examples:
      fscoord len work
    """
    count = store.queue_len(queue)
    show(as_json, {**field("queue", queue), "length": count}, [str(count)])


VARIABLE: Final = "FSCOORD_ITEM"

VARIABLE_MAX: Final = 128 * 1024 - len(VARIABLE) - 2
"""What fits into it, in bytes: Linux ends one variable, with its name, "=" and a NUL, at 32 pages (execve(2))."""


@click.command()
@click.option("--priority", metavar="NUMBER", type=int, default=0, show_default=True, help="Lower ones go first.")
@queue_argument
@click.argument("values", nargs=-1, required=True, type=raw, metavar="VALUE...")
@with_store
def put(store: Store, queue: bytes, values: tuple[bytes, ...], priority: int) -> None:
    """Put items into QUEUE, for "fscoord take".

    Each VALUE is one, and all are put at once. They stay in the queue until they are done, which tells them from what
    "fscoord push" puts. If VALUE is "-", standard input holds it.

    \b
    Examples:
      fscoord put shards data/*
      fscoord put --priority -1 mails - < urgent.eml
    """
    if values.count(b"-") > 1:
        raise click.UsageError("only one VALUE can come from standard input (-)")
    PriorityQueue(store, queue).put_all([content(value) for value in values], priority)


@click.command(context_settings=VERBATIM)
@click.option("-n", "--no-wait", is_flag=True, help="Do not wait for an item: exit with 1 if there is none.")
@click.option("--each", is_flag=True, help="Go on with the next item, until none comes, or COMMAND fails.")
@click.option("--failed", metavar="OTHER", type=raw, help="An item whose COMMAND fails is put into this queue.")
@click.option("--stdin", "by_stdin", is_flag=True, help="COMMAND reads the item from standard input.")
@queue_argument
@command_options
@with_store
def take(store: Store, /, queue: bytes, no_wait: bool, each: bool, failed: bytes | None, **options: Any) -> int:
    """Run COMMAND for an item of QUEUE.

    COMMAND finds the item in FSCOORD_ITEM, or with --stdin in its standard input. If it exits with 0 the item is done,
    and gone. Otherwise the item goes back to its place in the queue; also if this process dies, in whatever way. So
    each item is worked on at least once, and by one at a time.

    Waits for an item, up to --timeout. Exits as COMMAND does; with 1 if there is none (-n), with 75 if none came. With
    --each it works on one item after another, and exits with 0 when there are no more. A COMMAND that fails ends that,
    or with --failed only its item, which goes into the other queue; the exit code is that of the last one that failed.

    The rest is as with "fscoord lock": the item is this command's until everything that COMMAND has started has ended;
    signals are passed on to it; if this command is killed, so is all of that.

    \b
    Examples:
      fscoord take --each shards -- sh -c './train "$FSCOORD_ITEM"'
      fscoord take --each --timeout inf --stdin mails -- sendmail -t
      fscoord take -n shards -c 'gzip "$FSCOORD_ITEM"' || echo "nothing to do, or failed"
    """
    command = parse_command(options)
    source = PriorityQueue(store, queue)
    if failed == queue:
        raise click.UsageError("--failed is another queue: in this one the item would be taken again at once")
    refuse = PriorityQueue(store, failed) if failed is not None else None
    code = 0
    with raise_on_termination():
        while True:
            try:
                item = _next_item(source, waits=not no_wait, is_last=not each)
            except QueueEmptyError:
                if each:
                    return code
                raise
            ending = _work_on(item, command, options, refuse)
            code = ending.code or code
            if not each or ending.interruption or (ending.code and refuse is None):
                return code


@click.command()
@queue_argument
@as_json
@with_store
def items(store: Store, queue: bytes, as_json: bool) -> None:
    """Print how many items QUEUE has, and who works on one.

    That is "waits" with the number of those that nobody has taken, and a line for each that is taken: "taken", whether
    its consumer lives (yes, no, unknown), and host:pid. The items of a dead consumer count among those that wait.

    \b
    Examples:
      fscoord items shards
      fscoord items --json shards | jq .waiting
    """
    source = PriorityQueue(store, queue)
    waiting, taken, lives = len(source), source.taken(), lives_of(store)
    takers = [{"owner": each.owner, "session": each.session, "alive": lives(each)} for each in taken]
    lines = [f"{waiting} waiting, {len(taken)} taken"]
    if taken:
        lines += table_lines(("STATE", "PROCESS"), [(STATES[lives(each)], each.owner) for each in taken])
    show(as_json, {**field("queue", queue), "waiting": waiting, "taken": takers}, lines)


def _next_item(source: PriorityQueue, *, waits: bool, is_last: bool) -> Item:
    """Take an item. `QueueEmptyError` means that there are no more, a time-out that the store did not answer."""
    if waits:
        log.info("waiting for an item of queue %r", source.name)
        try:
            return source.take()
        except StoreTimeoutError:
            if is_last:
                raise
    return source.take(block=False)


def _work_on(item: Item, command: list[str], options: dict[str, Any], refuse: PriorityQueue | None) -> Ending:
    """Run the command for `item`, then acknowledge it; if the command failed, release it or move it to `refuse`."""
    by_stdin: bool = options["by_stdin"]
    with item, ExitStack() as stack:
        own = environment(None)
        own.pop(VARIABLE, None)  # of another item, within whose command this one is taken
        if not by_stdin:
            own[VARIABLE] = _as_variable(item.data)
        ending = run_held(
            command,
            own,
            item.check,
            grace=options["grace"],
            leaves_rest=options["close"],
            stdin=stack.enter_context(system.unnamed_file(item.data)) if by_stdin else None,
        )
        fate = "done"
        if ending.status and (refuse is None or ending.interruption):
            fate = "given back"
            item.release()
        elif ending.status and refuse is not None:
            fate = f"put into {refuse.name!r}"
            refuse.put(item.data)  # before it is done here: whoever dies in between leaves it in both
        log.info("the command ended with %d: the item is %s", ending.code, fate)
    return ending


def _as_variable(data: bytes) -> str:
    """Return an item in the form of an environment variable."""
    if len(data) > VARIABLE_MAX or b"\0" in data:
        raise click.UsageError(
            f"an item of {len(data)} bytes does not fit into {VARIABLE}, which holds {VARIABLE_MAX} at most and no NUL;"
            " it was given back: take it with --stdin"
        )
    return system.os.fsdecode(data)
