"""The verb barrier."""

from __future__ import annotations

import logging

import click

from fscoord import collectives
from fscoord.cli.options import raw, with_store
from fscoord.store import Store

__all__ = ["barrier"]

log = logging.getLogger(__name__)


@click.command()
@click.argument("key", type=raw)
@click.option("-n", "--world-size", type=click.IntRange(min=1), required=True, help="How many must come.")
@click.option("--rank", type=click.IntRange(min=0), help="Which of them this is, counted from 0.")
@click.option("--fail-fast", is_flag=True, help="With --rank, end as soon as a rank that is missing is known dead.")
@with_store
def barrier(store: Store, key: bytes, world_size: int, rank: int | None, fail_fast: bool) -> None:
    """Wait until all processes have come to the barrier KEY.

    They are as many as --world-size says. A key serves once. Who gives a --rank can come again after a time-out
    and counts once; and when time runs out (exit code 75), the error names the ranks that are missing, if all give
    theirs.

    --fail-fast is for ranks that keep the store open from the start: a rank whose last process has ended, that of an
    earlier command, too, counts as dead.

    \b
    Examples:
      fscoord barrier -n 4 epoch-1
      srun sh -c 'fscoord barrier -n "$SLURM_NTASKS" --rank "$SLURM_PROCID" --timeout 60 loaded'
    """
    log.info("waiting at barrier %r, up to %s", key, store.timeout)
    collectives.barrier(store, world_size, key, store.timeout, rank, fail_fast=fail_fast)
