"""The file locks of `fscoord.integrations.filelock` between processes of two hosts."""

from __future__ import annotations

import pytest
from mounts.agents import LIMIT_S
from mounts.conftest import Sides

TIMES = 20
SHORT_S = 0.2


def test_file_lock_excludes_the_processes_of_both_hosts(sides: Sides) -> None:
    crew, word = sides.agents(4), "mounts.work.count_under_file_lock"
    asked = [agent.begin(word, sides.full(agent.host, "job.lock"), TIMES) for agent in crew]
    assert max(pending.result() for pending in asked) == len(crew) * TIMES


@pytest.mark.parametrize("holder", ["a", "b"])
def test_file_lock_is_free_after_its_holder_on_the_other_host_was_killed(sides: Sides, holder: str) -> None:
    one, other = (sides.a, sides.b) if holder == "a" else (sides.b, sides.a)
    killed, waiter = one.fork(), other.fork()
    killed.begin("with_worker", "mounts.work.keep_file_lock", sides.full(one, "job.lock"))
    assert killed.next_event() == 1
    words = ("mounts.work.token_of_file_lock", sides.full(other, "job.lock"))
    assert waiter.do(*words, SHORT_S) is None
    waiting = waiter.begin(*words, LIMIT_S)
    killed.kill()
    assert waiting.result() == 2
