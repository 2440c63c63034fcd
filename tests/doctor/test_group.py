"""A directory of a group: its users share one mailbox, and each can use the files of the others."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import GROUP

from fscoord import InsecurePathError
from fscoord.doctor.agent_process import Agent
from fscoord.doctor.mailbox import Mailbox, group_of

ALICE, BOB = 64001, 64002
FACTS = {"group": GROUP}
MINE = os.getegid()


def enter(directory: str, name: str, facts: dict[str, Any]) -> tuple[bool, list[str]]:
    """Do what one instance does at the place, and leave it as a SIGKILL does."""
    place = Mailbox(directory, name)
    presides = place.enter(facts)
    return presides, sorted(each for each in place.listing() if each.startswith("here."))


def work(directory: str, name: str, number: int) -> tuple[list[int], int]:
    """Do what an agent, which is another process, does with the files there."""
    agent = Agent()
    agent.settle(directory)
    agent.append("f", "ofd", number, name)
    agent.claim("c", "mkdir", 1, 60)
    agent.claim("d", "open", 1, 60)
    agent.speed("store", {}, 0.01)
    seen = agent.look("f", "ofd", "locked"), agent.tally("f", "flock")["sound"]
    agent.close()
    return seen


def put_aside(directory: str) -> None:
    place = Mailbox(directory, "bob")
    place.enter(FACTS)
    place.put_aside()


@pytest.fixture(autouse=True)
def _all_is_imported(tmp_path: Path) -> None:
    """Other users may not be able to read the package and the standard library."""
    enter(str(tmp_path / "warm"), "one", {})
    work(str(tmp_path / "warm"), "one", 1)


@pytest.fixture(params=[0o770, 0o2770, 0o777], ids=["plain", "setgid", "open to all"])
def directory(request: pytest.FixtureRequest, public_dir: Path) -> str:
    """A place in a directory of the group."""
    os.chown(public_dir, -1, GROUP)
    public_dir.chmod(request.param)
    return str(public_dir / "place")


def test_users_of_a_group_meet_and_work_on_each_others_files(as_member, directory):
    def strictly(uid: int, function: Callable[..., Any], *args: Any) -> Any:
        return as_member(uid, lambda: (os.umask(0o077), function(*args))[1])

    assert strictly(ALICE, enter, directory, "alice", FACTS) == (True, ["here.alice"])
    assert strictly(ALICE, work, directory, "alice", 1) == ([1], 1)
    assert strictly(BOB, enter, directory, "bob", FACTS) == (False, ["here.alice", "here.bob"])
    assert strictly(BOB, work, directory, "bob", 2) == ([1, 2], 2)
    assert as_member(ALICE, lambda: Mailbox(directory, "alice").fetch("here.bob")) == FACTS
    made = os.stat(directory)
    assert (stat.S_IMODE(made.st_mode), made.st_gid) == (0o2770, GROUP)
    as_member(BOB, put_aside, directory)
    assert os.listdir(os.path.dirname(directory)) == []


def test_stranger_can_not_enter_the_place_of_a_group(as_member, as_nobody, directory):
    as_member(ALICE, enter, directory, "alice", FACTS)
    with pytest.raises(PermissionError):
        as_nobody(lambda: os.listdir(directory))


@pytest.mark.parametrize(("mode", "group"), [(0o700, GROUP), (0o777, GROUP), (0o2770, GROUP + 1)])
def test_place_of_a_group_that_is_not_the_groups_alone_is_refused(as_member, directory, mode, group):
    os.mkdir(directory)
    Path(directory, "file").touch()
    os.chown(directory, ALICE, group)
    os.chmod(directory, mode)
    with pytest.raises(InsecurePathError, match="remove it"):
        as_member(BOB, enter, directory, "bob", FACTS)
    assert os.listdir(os.path.dirname(directory)) == ["place"]


def test_place_that_another_has_just_made_is_entered(as_member, directory):
    os.mkdir(directory)
    os.chown(directory, ALICE, GROUP)
    os.chmod(directory, 0o2770)
    assert as_member(BOB, lambda: Mailbox(directory, "bob").enter(FACTS))
    assert not as_member(ALICE, lambda: Mailbox(directory, "alice").enter(FACTS))


@pytest.mark.parametrize(
    ("mode", "group", "found"),
    [
        (0o40770, MINE, MINE),
        (0o42775, MINE, MINE),
        (0o40777, MINE, MINE),
        (0o40750, MINE, None),
        (0o41777, MINE, None),
        (0o43770, MINE, None),
        (0o40770, MINE + 1234, None),
    ],
    ids=lambda value: f"{value:o}" if isinstance(value, int) else "-",
)
def test_group_of_a_directory_is_found_if_this_process_is_in_it(mode: int, group: int, found: int | None) -> None:
    assert group_of(SimpleNamespace(st_mode=mode, st_gid=group)) == found
