"""The verbs on queues: push, pop, len."""

from __future__ import annotations

import logging

import click

from fscoord.cli.options import as_json, content, raw, with_existing_store, with_store
from fscoord.cli.output import field, write, write_json, write_value
from fscoord.store import Store

__all__ = ["length", "pop", "push"]

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
    if as_json:
        write_json({**field("queue", queue), "length": count})
    else:
        write(b"%d\n" % count)
