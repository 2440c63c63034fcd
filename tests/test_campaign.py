"""The long campaign knows of every test that has a large size. That it passes, `tox -e long` shows."""

from __future__ import annotations

import re
from pathlib import Path

from campaign import PARTS

TESTS = Path(__file__).parent
ELSEWHERE = {"mounts", "with_etcd", "with_torch"}


def test_every_test_with_a_large_size_is_a_part_of_the_campaign() -> None:
    large = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("test_*.py")
        if re.search(r"\bscale\(|mark\.long\b", path.read_text(encoding="utf-8")) and path.name != "test_campaign.py"
    }
    assert {name for name in large if name.split("/")[0] not in ELSEWHERE} == set(PARTS)
