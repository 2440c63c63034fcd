"""One convention for time: None is the store's timeout, ``math.inf`` no limit, 0 looks once; seconds or `timedelta`."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from fscoord import FileStore
from fscoord.arguments import Timeout
from fscoord.inspect import copy, repair, verify


@pytest.fixture
def log(tmp_path: Path) -> str:
    with FileStore(tmp_path / "log") as store:
        store.set("k", "v")
    return str(tmp_path / "log")


READERS: list[Callable[[str, Timeout], object]] = [
    lambda log, timeout: verify(log, timeout=timeout).verdict == "sound",
    lambda log, timeout: repair(log, f"{log}.repaired", timeout=timeout).kept == 2,
    lambda log, timeout: copy(log, f"{log}.copy-{timeout}", timeout=timeout).kept == 2,
]


@pytest.mark.parametrize("timeout", [0, 0.5, math.inf, timedelta(seconds=1), timedelta.max])
@pytest.mark.parametrize("read", READERS, ids=["verify", "repair", "copy"])
def test_what_reads_a_log_takes_seconds_a_timedelta_or_no_limit(
    read: Callable[[str, Timeout], object], log: str, timeout: Timeout
) -> None:
    assert read(log, timeout)


@pytest.mark.parametrize("read", READERS, ids=["verify", "repair", "copy"])
def test_what_reads_a_log_refuses_a_timeout_below_zero(read: Callable[[str, Timeout], object], log: str) -> None:
    with pytest.raises(ValueError, match="a timeout can't be -1"):
        read(log, -1)
