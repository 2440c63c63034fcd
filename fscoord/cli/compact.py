"""The verb compact: let a file store's log begin anew with what it holds."""

from __future__ import annotations

import click

from fscoord.cli.options import common, file_path, store_url
from fscoord.stores.file import FileStore
from fscoord.stores.url import open_store

__all__ = ["compact"]


@click.command()
@common
@click.pass_context
def compact(ctx: click.Context) -> None:
    """Compact the log of a file store.

    What the store holds is written to a new file, in which the log goes on; whoever uses the store follows by itself.
    Stores that are written to compact their logs by themselves. This is for a log whose users have turned that off.

    \b
    Examples:
      fscoord compact --store /shared/job/store
    """
    url = store_url(ctx)
    if file_path(url) is None:
        raise click.UsageError("only the log of a file store can be compacted", ctx)
    open_store(url, read_only=True).close()  # so that a mistyped path makes no new store
    with open_store(url) as store:
        assert isinstance(store, FileStore), "file_path says so"
        store.compact()
