"""The threads that make a store's calls: none is lost, however threads come and go."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CALLS = 1500


@pytest.fixture
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_take_turns_often")
@pytest.mark.parametrize("idle_s", [0.0, 0.0001])
def test_executor_loses_no_call_that_comes_as_a_thread_is_about_to_end(
    make_executor: Callable[[float], Any], idle_s: float
) -> None:
    executor = make_executor(idle_s)

    async def main() -> None:
        for number in range(CALLS):
            assert await executor.run(lambda: number) == number  # noqa: B023

    asyncio.run(main())
