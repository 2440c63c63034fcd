"""`open_store` of `fscoord.aio`: for ``async with``, for ``await`` and as a task."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fscoord import FileStore, StoreClosedError, StoreTimeoutError, StoreUnavailableError
from fscoord.aio import AsyncStore, open_store


def test_store_is_closed_at_the_end_of_the_with(tmp_path: Path) -> None:
    async def run() -> None:
        async with open_store(tmp_path / "log", timeout=5) as store:
            await store.set("k", "v")
            assert store.timeout.total_seconds() == 5
        with pytest.raises(StoreClosedError):
            await store.get("k")

    asyncio.run(run())


def test_store_is_closed_when_the_body_raises(tmp_path: Path) -> None:
    opened: list[AsyncStore] = []

    async def run() -> None:
        async with open_store(tmp_path / "log") as store:
            opened.append(store)
            raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        asyncio.run(run())
    with pytest.raises(StoreClosedError):
        opened[0].store.check(["k"])


def test_participant_whose_body_raises_has_failed(tmp_path: Path) -> None:
    """The store is closed in another thread, which does not handle the exception by itself."""

    async def run() -> None:
        async with open_store(tmp_path / "log", world_size=2, rank=0) as store:
            await store.set("k", "v")
            raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        asyncio.run(run())
    with FileStore(tmp_path / "log", 2, rank=1, timeout=0) as late:
        assert late.list_keys() == []
        with pytest.raises(
            StoreTimeoutError, match=r"the start before this one ended because rank 0 .* left by KeyError"
        ):
            late.wait(["k"], 0.01)


def test_store_that_is_awaited_stays_open(tmp_path: Path) -> None:
    async def run() -> None:
        store = await open_store(tmp_path / "log")
        await store.set("k", "v")
        async with store:
            assert await store.get("k") == b"v"
        async with await open_store(tmp_path / "log") as again:
            assert await again.get("k") == b"v"

    asyncio.run(run())


def test_store_is_opened_by_a_task(tmp_path: Path) -> None:
    async def run() -> None:
        one = asyncio.create_task(open_store(tmp_path / "log"))
        stores = [await one, *await asyncio.gather(open_store(tmp_path / "log"), open_store("mem:"))]
        for store in stores:
            await store.close()

    asyncio.run(run())
    asyncio.run(asyncio.run(open_store("mem:")).close())


def test_task_that_is_cancelled_opens_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        task = asyncio.create_task(open_store(tmp_path / "log"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert not (tmp_path / "log").exists()


def test_store_that_cannot_be_opened_raises_where_it_is_awaited(tmp_path: Path) -> None:
    async def run() -> None:
        opening = open_store(tmp_path / "missing" / "log")
        with pytest.raises(StoreUnavailableError):
            async with opening:
                pass
        with pytest.raises(ValueError, match="unknown option"):
            await open_store("mem:", lable="typo")
        open_store("mem:").close()  # never awaited, and no warning

    asyncio.run(run())
