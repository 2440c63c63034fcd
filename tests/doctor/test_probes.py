"""Each lie of a file system is detected by the probe for it, and a sound file system passes all probes."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor import lying_agents
from support.faulty import faulty_os
from support.shared_os import shared_os

from fscoord.doctor import agent_process, probe_file, probes
from fscoord.doctor.agents import FailedError
from fscoord.doctor.probes import Pair
from fscoord.doctor.verdict import BAD, INFO, OK, PROCESSES, UNKNOWN, Check

EFFORT_S = 0.1
HANG_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's slowness is no lie of its file system: the limits only bound hangs."""
    monkeypatch.setattr(agent_process, "MEET_S", HANG_S)
    monkeypatch.setattr(probes, "RELEASE_S", HANG_S)
    monkeypatch.setattr(probes, "ACT_S", 5 * HANG_S)  # of which a fifth is the time for an answer


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    """Give `pair(kind_of_file)`: two agents in this process, on files that behave so."""
    made = []

    def make(opened: type[probe_file.ProbeFile] = probe_file.ProbeFile) -> Pair:
        made.extend([lying_agents.ThreadAgent(tmp_path, opened), lying_agents.ThreadAgent(tmp_path, opened)])
        return Pair(made[-2], made[-1], PROCESSES, EFFORT_S)

    yield make
    for agent in made:
        agent.kill()


def outcomes(pair: Any, lock: str = "ofd") -> dict[str, Check]:
    return {check.title: check for check in probes.run(pair, lock, {}, lambda _: None)}


def test_file_system_that_is_sound_passes_every_probe(pair):
    found = outcomes(pair())
    assert {check.outcome for check in found.values()} <= {OK, INFO}
    assert {check.name for check in found.values() if check.outcome == OK} >= {
        *("exclusion", "handover", "death", "race", "names", "freshness-locked", "delay-locked", "store"),
    }
    assert {title for title in found if title.startswith("exclusion")} == {
        "exclusion (ofd)",
        "exclusion (flock)",
        "exclusion (soft)",
    }


@pytest.mark.parametrize("kind", ["ofd", "flock"])
def test_locks_that_each_host_has_for_itself_are_bad(pair, kind):
    check = probes.exclusion(pair(lying_agents.OwnLocks), kind)
    assert check.outcome == BAD
    assert "both got an exclusive lock" in check.says


def test_locks_that_let_appends_overlap_are_bad(pair):
    check = probes.race(pair(lying_agents.OwnLocks), "ofd")
    assert check.outcome == BAD
    assert "repeat the number of another append" in check.says


class Steps:
    """A clock that each look at it moves on: agents do as much in its time under any load."""

    def __init__(self) -> None:
        self._steps = itertools.count()
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return next(self._steps) * EFFORT_S / 50


def test_data_that_is_old_under_the_lock_fails_the_race_and_each_look(pair, monkeypatch):
    monkeypatch.setattr(agent_process, "system", SimpleNamespace(time=Steps(), os=os))
    monkeypatch.setattr(agent_process, "MEET_S", 0.5)  # who sees old data seldom sees the other at all
    liars = pair(lying_agents.OldData)
    race = probes.race(liars, "ofd")
    assert (race.outcome, probes.exclusion(liars, "ofd").outcome) == (BAD, OK)
    assert "old data" in race.says
    looks = probes.freshness(liars, "ofd", "locked")
    assert looks.outcome == BAD
    assert looks.measured["stale"] > 0


def test_zeros_for_data_are_bad(pair):
    liars = pair(lying_agents.Zeros)
    assert probes.race(liars, "ofd").outcome == BAD
    assert "bytes that no agent wrote" in probes.race(liars, "flock").says


def test_appends_that_are_lost_are_bad(pair):
    check = probes.race(pair(lying_agents.Forgetful), "ofd")
    assert check.outcome == BAD
    assert "lost" in check.says


def test_agents_that_never_meet_prove_nothing(pair, monkeypatch):
    one, other = pair()
    monkeypatch.setattr("fscoord.doctor.agent_process.MEET_S", 0.0)
    question = {"name": "file-processes-race-ofd", "kind": "ofd", "seconds": 0.01}
    one.ask("race", 1, **question, writer="one")

    class Later:
        """The other agent, which comes when the first has gone."""

        def __getattr__(self, name: str) -> Any:
            return getattr(one, name)

        def begin(self, act: str, limit: float, **arguments: Any) -> None:
            if act != "race":
                one.begin(act, limit, **arguments)

        def finish(self) -> Any:
            return {"written": 0, "met": False, "garbled": 0}

    check = probes.race(Pair(Later(), other, PROCESSES, 0.01), "flock")
    assert (check.outcome, check.measured["turns"]) == (UNKNOWN, 0)


def test_locks_that_are_missing_are_bad_and_dependent_probes_are_skipped(pair):
    one, other = pair()
    found = outcomes(Pair(lying_agents.Refusing(one, errno.ENOLCK), other, PROCESSES, EFFORT_S))
    assert (found["exclusion (ofd)"].outcome, found["exclusion (soft)"].outcome) == (BAD, OK)
    assert "no locks of this kind" in found["exclusion (ofd)"].says
    assert not {"handover (ofd)", "death (ofd)", "race (ofd)", "store (ofd)"} & found.keys()


def test_lock_manager_that_is_silent_is_bad_and_the_examination_goes_on(pair):
    one, other = pair()
    found = outcomes(Pair(lying_agents.Silent(one, 0), other, PROCESSES, EFFORT_S))
    assert (found["exclusion (ofd)"].outcome, found["exclusion (flock)"].outcome) == (BAD, BAD)
    assert found["exclusion (ofd)"].measured["stuck"]
    assert found["names"].outcome == OK


def test_error_that_is_not_about_locks_proves_nothing(pair):
    one, other = pair()
    check = outcomes(Pair(lying_agents.Refusing(one, errno.EIO), other, PROCESSES, EFFORT_S))["exclusion (ofd)"]
    assert check.outcome == UNKNOWN
    assert "Input/output error" in check.says


def test_store_probe_is_skipped_where_a_store_would_not_open(pair):
    found = {check.name for check in probes.run(pair(), "ofd", None, lambda _: None)}
    assert not {"store", "speed"} & found
    assert "race" in found


def test_marker_files_pass_on_a_sound_file_system(pair):
    found = outcomes(pair(), "soft")
    assert found["race (soft)"].outcome == found["store (soft)"].outcome == OK
    assert {check.outcome for check in found.values()} <= {OK, INFO}


def test_marker_file_on_nfs_makes_an_agent_bypass_the_cache_as_a_store_does(tmp_path):
    with shared_os() as kernel:
        file = probe_file.ProbeFile(str(tmp_path / "f"), is_nfs=True)
        kernel.opened.clear()
        for number in (1, 2):
            file.append("soft", probe_file.encode(number, "a"))
        assert [line.number for line in file.read(file.way("soft"), "soft")] == [1, 2]
        assert [bool(flags & os.O_DIRECT) for _, flags in kernel.opened] == [True] * 3
        file.append("ofd", probe_file.encode(3, "a"))
        assert [line.number for line in file.read(file.way("ofd"), "ofd")] == [1, 2, 3]
        assert len(kernel.opened) == 3
        file.close()


def test_append_asks_for_the_size_of_the_file_before_it_as_a_store_does(tmp_path):
    """The kernel of a ceph-fuse mount appends at the size that it knows, and a lock does not renew it."""
    file = probe_file.ProbeFile(str(tmp_path / "f"))
    calls = []
    with faulty_os() as faulty, faulty.instead(lambda name, _, given: calls.append(name)):
        file.append("ofd", probe_file.encode(1, "a"))
    file.close()
    assert calls == ["fstat", "write"]


def test_name_that_both_made_is_bad(pair, monkeypatch):
    monkeypatch.setattr(agent_process.Agent, "claim", lambda *_, count, **__: {"won": [*range(count)], "tried": count})
    check = probes.claims(pair())
    assert check.outcome == BAD
    assert "made by both (link)" in check.says


def test_agent_whose_time_is_over_tries_no_further_name(tmp_path):
    agent = agent_process.Agent()
    agent.settle(str(tmp_path))
    assert agent.claim("c", "mkdir", 5, seconds=-1.0) == {"won": [0], "tried": 1}


@pytest.mark.parametrize(
    ("one", "other", "outcome"),
    [
        (([0, 2], 3), ([1, 3, 4], 5), OK),  # the first had no time for the names 3 and 4
        (([0], 3), ([1], 20), BAD),  # nobody made name 2, which both have tried
        (([0], 2), ([1], 20), UNKNOWN),
        (([0], 1), ([0], 1), BAD),
    ],
)
def test_names_are_compared_as_far_as_both_have_tried_them(one, other, outcome):
    ends = [{"won": won, "tried": tried} for won, tried in (one, other)]
    agents = [SimpleNamespace(begin=lambda *_, **__: None, finish=partial(dict, end)) for end in ends]
    assert probes.claims(probes.Pair(*agents, "hosts", 1.0)).outcome == outcome


def test_sums_that_a_store_gave_twice_are_bad(pair, monkeypatch):
    answer = {"sums": [1, 2, 4], "operations": 1.0, "error": ""}
    monkeypatch.setattr("fscoord.doctor.agent_process.Agent.count", lambda *_, **__: dict(answer))
    assert probes.store(pair(), "ofd", {}).outcome == BAD
    answer["error"] = "CorruptLogError: damaged"
    assert "damaged" in probes.store(pair(), "ofd", {}).says


@pytest.mark.parametrize(
    ("act", "kind", "arguments"),
    [
        ("append", "ofd", {"number": 1, "writer": "w"}),
        ("tally", "flock", {}),
        ("block", "soft", {}),
        ("look", "ofd", {"how": "locked"}),
        ("race", "ofd", {"writer": "w", "seconds": 0}),
    ],
    ids=["append", "tally", "block", "look", "race"],
)
def test_lock_that_stays_taken_ends_an_act_that_waits_for_it(pair, monkeypatch, act, kind, arguments):
    monkeypatch.setattr(probe_file, "TAKE_S", 0.05)
    one, other = pair()
    assert one.ask("lock", 1, name="f", kind=kind)
    with pytest.raises(FailedError, match=r"another process held its lock for 0\.05 s"):
        other.ask(act, 60, name="f", kind=kind, **arguments)
