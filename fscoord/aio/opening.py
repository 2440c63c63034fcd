"""`open_store` for tasks: what it returns is awaited, or entered by ``async with``."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any

from fscoord._runtime import system
from fscoord.aio._executor import CallExecutor
from fscoord.aio.store import AsyncStore
from fscoord.store import Store
from fscoord.stores.url import open_store as open_sync_store

__all__ = ["Opening", "open_store"]


class Opening(Coroutine[Any, Any, AsyncStore]):
    """The coroutine that opens a store, which is also an asynchronous context manager that closes it."""

    def __init__(self, opening: Coroutine[Any, Any, AsyncStore]) -> None:
        self._opening = opening

    def __await__(self) -> Generator[Any, Any, AsyncStore]:
        return self._opening.__await__()

    def send(self, value: Any) -> Any:
        """See `collections.abc.Coroutine`; a task calls it."""
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        """See `collections.abc.Coroutine`; a task calls it."""
        return self._opening.throw(*error)

    def close(self) -> None:
        """See `collections.abc.Coroutine`; a task calls it."""
        self._opening.close()

    async def __aenter__(self) -> AsyncStore:
        self._opened = await self._opening
        return self._opened

    async def __aexit__(self, *_: object) -> None:
        await self._opened.close()


def open_store(url: str | system.os.PathLike[str] | None = None, **options: Any) -> Opening:
    """Open the store at `url` as `fscoord.open_store` does, with the same arguments and errors.

    ``async with open_store(url) as store:`` closes it at the end; ``store = await open_store(url)`` leaves it open.
    """
    return Opening(_open(url, options))


async def _open(url: str | system.os.PathLike[str] | None, options: dict[str, Any]) -> AsyncStore:
    return AsyncStore(await CallExecutor(1, 0.0).run(partial(open_sync_store, url, **options), Store.close))
