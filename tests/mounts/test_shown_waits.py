"""A wait on one host is shown on the other one: by its slot beside the log, past both hosts' caches."""

from __future__ import annotations

import time

from mounts.agents import LIMIT_S, Agent
from mounts.conftest import Sides


def await_shown(watcher: Agent, path: str, expected: list[tuple[int, str, list[str]]]) -> None:
    """Return when exactly these waits are shown, each with the rank of its session."""
    deadline = time.monotonic() + LIMIT_S
    while (shown := watcher.do("with_worker", "mounts.work.shown_waits", path)) != expected:
        assert time.monotonic() < deadline, shown


def test_wait_of_a_second_is_shown_on_the_other_host_until_it_ends(sides: Sides) -> None:
    for waiter, watcher in (sides.opened(2), sides.opened(2)[::-1]):
        host = sides.a if watcher.host is sides.a else sides.b
        waiter.announce_rank(3)
        asked = waiter.begin("with_worker", "mounts.work.linger", "plan")
        assert waiter.next_event() == "waiting"
        await_shown(watcher, sides.full(host), [(3, "key", ["plan"])])
        watcher.set("plan", "1")
        assert asked.result() == b"1"
        await_shown(watcher, sides.full(host), [])
        assert watcher.delete_key("plan")
