"""Births, ends and permissions of the file itself, with handles on both hosts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from mounts.agents import Agent
from mounts.conftest import Sides

from fscoord.errors import InsecurePathError, StoreError, StoreGoneError, StoreUnavailableError


def test_log_is_born_once_however_many_open_it_at_once(sides: Sides, scale: Callable[[int], int]) -> None:
    crew = sides.agents(4)
    for birth in range(scale(8)):
        path = sides.path(f"log{birth}")
        asked = [agent.begin("open", sides.full(agent.host, f"log{birth}")) for agent in crew]
        for pending in asked:
            pending.result()
        sums = [agent.begin("store:add", "n", 1) for agent in crew]
        assert sorted(pending.result() for pending in sums) == [1, 2, 3, 4], path
        for agent in crew:
            agent.do("close")


def test_empty_file_is_a_log_not_yet_born(sides: Sides) -> None:
    crew = sides.agents(4)
    crew[0].do("os.mknod", sides.full(sides.a))
    asked = [agent.begin("open", sides.full(agent.host)) for agent in crew]
    for pending in asked:
        pending.result()
    assert sorted(agent.add("n", 1) for agent in crew) == [1, 2, 3, 4]


def test_participant_that_is_last_removes_the_file_for_both_hosts(sides: Sides) -> None:
    for last in (0, 1):
        crew = [host.fork().open(sides.path(f"log{last}"), world_size=2) for host in (sides.a, sides.b)]
        crew[0].set("k", "1")
        assert crew[1].get("k") == b"1"
        crew[1 - last].do("close")
        crew[last].do("close")
        left = crew[last].do("os.listdir", sides.full(crew[last].host, ""))
        assert [name for name in left if name.startswith(f"log{last}")] == []
        fresh = [host.fork().open(sides.path(f"log{last}")) for host in (sides.a, sides.b)]
        fresh[last].set("new", "1")
        assert fresh[1 - last].list_keys() == ["new"]


def test_opener_of_a_log_that_the_other_host_has_ended_has_a_new_one(sides: Sides) -> None:
    """It may still see the old name: whatever it finds there is empty to it, and stays what the others see."""
    for round in range(4):
        one, other = (sides.a, sides.b) if round % 2 else (sides.b, sides.a)
        before = one.fork().open(sides.path("log"), world_size=1)
        assert before.list_keys() == []
        before.set(f"old {round}", "x")
        before.do("close")
        after, witness = other.fork().open(sides.path("log"), world_size=1), one.fork().open(sides.path("log"))
        after.set("new", str(round))
        assert witness.list_keys() == ["new"]
        assert witness.get("new") == str(round).encode()
        witness.do("close")
        after.do("close")


@pytest.mark.parametrize("read_only", [False, True])
def test_host_with_a_log_open_that_is_gone_opens_the_new_one_at_its_place(sides: Sides, read_only: bool) -> None:
    for round in range(4):
        one, other = (sides.a, sides.b) if round % 2 else (sides.b, sides.a)
        name = f"log{round}"
        old = other.fork().open(sides.path(name))
        old.set("old", "1")
        assert old.check(["old"])
        directory = sides.full(one, "")
        for found in one.fork().do("os.listdir", directory):
            if found.startswith(name):
                one.fork().do("os.unlink", f"{directory}/{found}")
        new = one.fork().open(sides.path(name))
        new.set("new", "1")
        late = other.fork().open(sides.path(name), read_only=read_only)
        assert late.list_keys() == ["new"]


def until_error(agent: Agent, operation: str, *given: Any) -> BaseException:
    return agent.begin("mounts.work.until_error", "@store", operation, *given).error()


@pytest.mark.parametrize("remover", ["a", "b"])
@pytest.mark.parametrize("operation", ["check", "set"])
def test_handles_on_both_hosts_notice_that_the_file_was_removed(sides: Sides, remover: str, operation: str) -> None:
    crew = sides.opened(2)
    for agent in crew:
        agent.set("k", "1")
    host = getattr(sides, remover)
    host.fork().do("os.unlink", sides.full(host))
    given: tuple[Any, ...] = (["k"],) if operation == "check" else ("k", "2")
    errors = [until_error(agent, operation, *given) for agent in crew]
    assert [type(error) for error in errors] == [StoreGoneError] * 2
    again = sides.opened(2)
    again[0].set("k", "3")
    assert [agent.get("k") for agent in again] == [b"3", b"3"]


@pytest.mark.parametrize("remover", ["a", "b"])
def test_waiter_learns_that_the_file_was_removed(sides: Sides, remover: str) -> None:
    crew = sides.opened(2)
    asked = [agent.begin("with_worker", "mounts.work.linger", "never") for agent in crew]
    for agent in crew:
        assert agent.next_event() == "waiting"
    host = getattr(sides, remover)
    host.fork().do("os.unlink", sides.full(host))
    assert [type(pending.error()) for pending in asked] == [StoreGoneError] * 2


def test_reader_sees_the_writes_of_the_other_host_and_writes_nothing(sides: Sides) -> None:
    writer = sides.a.fork().open(sides.path())
    writer.set("k", "1")
    reader = sides.b.fork().open(sides.path(), read_only=True)
    for i in range(10):
        writer.set("k", str(i))
        assert reader.get("k") == b"%d" % i
    asked = reader.begin("store:get", "later")
    writer.set("later", "1")
    assert asked.result() == b"1"
    assert isinstance(reader.begin("store:set", "k", "x").error(), StoreError)
    assert writer.get("k") == b"9"


def test_durable_log_is_shared_by_hosts(sides: Sides) -> None:
    a, b = sides.opened(2, durable=True)
    for i in range(10):
        a.set("k", str(i))
        assert b.get("k") == b"%d" % i
        assert b.add("n", 1) == 2 * i + 1
        assert a.add("n", 1) == 2 * i + 2
    reader = sides.b.fork().open(sides.path(), read_only=True)
    assert reader.get("n") == b"20"


def test_jobs_in_one_directory_do_not_meet(
    sides: Sides, together: Callable[..., list[Any]], rng: random.Random
) -> None:
    jobs = [sides.opened(4, name) for name in ("job1", "job2")]
    asked = [agent.begin("contract.worker.add", "@store", 20) for job in jobs for agent in job]
    sums = [pending.result() for pending in asked]
    for i, job in enumerate(jobs):
        assert sorted(n for given in sums[4 * i : 4 * i + 4] for n in given) == list(range(1, 81))
        assert [agent.list_keys() for agent in job] == [["n"]] * 4


def test_path_that_is_no_log_is_refused_on_both_hosts(sides: Sides) -> None:
    a, b = sides.a.fork(), sides.b.fork()
    a.do("os.symlink", "somewhere", sides.full(sides.a, "link"))
    a.do("os.mkdir", sides.full(sides.a, "folder"))
    for agent in (a, b):
        for name in ("link", "folder"):
            assert isinstance(agent.begin("open", sides.full(agent.host, name)).error(), InsecurePathError)
        missing = agent.begin("open", sides.full(agent.host, "nowhere/log")).error()
        assert isinstance(missing, StoreUnavailableError)
