"""Clocks that are shifted and skewed on purpose: what is found lies within the bound that comes with it."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import given, strategies as st
from support.traces import Clock

from fscoord.trace.clocks import DRIFT, Alignment, Passage, align

S = 1_000_000_000
MS = 1_000_000


class Job(NamedTuple):
    clocks: list[Clock]
    meetings: list[list[Passage]]
    length: int


def name(number: int) -> tuple[str, int]:
    return f"host{number}", 0


def draw_job(seed: int, drift: float = DRIFT, length: int = 0, most: int = 150) -> Job:
    """A job of some hosts, with barriers of some of them; arrivals and latencies of every size."""
    rng = random.Random(seed)
    rates = [rng.uniform(-drift / 2.2, drift / 2.2) for _ in range(rng.randint(2, 6))]
    clocks = [Clock(rng.randrange(-(10**15), 10**15), rate) for rate in rates]
    length = length or rng.choice([S, 30 * S, 400 * S, 4000 * S])
    meetings = []
    for _ in range(rng.randint(1, most)):
        true = rng.randrange(length)
        present = rng.sample(range(len(clocks)), rng.randint(2, len(clocks)))
        arrivals = {host: true + rng.randrange(10 ** rng.randint(4, 9)) for host in present}
        last = max(arrivals.values())
        meeting = []
        for host, arrived in arrivals.items():
            left = last + rng.randrange(10 ** rng.randint(3, 8))
            meeting.append(Passage(name(host), clocks[host].at(arrived), clocks[host].at(left)))
        meetings.append(meeting)
    return Job(clocks, meetings, length)


def aligned(job: Job, drift: float = DRIFT) -> Alignment:
    return align([name(host) for host in range(len(job.clocks))], job.meetings, drift)


def number(clock: tuple[str, int]) -> int:
    return int(clock[0].removeprefix("host"))


@given(st.integers(0, 2**32))
def test_times_of_all_clocks_are_found_within_their_bounds(seed: int) -> None:
    job, rng = draw_job(seed), random.Random(seed)
    alignment = aligned(job)
    for reference, *others in alignment.groups:
        for clock in others:
            for _ in range(10):
                true = rng.randrange(-S, job.length + S)
                found = alignment.to_reference(clock, job.clocks[number(clock)].at(true))
                error = abs(found.time - job.clocks[number(reference)].at(true))
                assert error <= found.bound, f"seed {seed}: {error} ns is more than {found.bound}"


@given(st.integers(0, 2**32))
def test_offsets_of_one_window_satisfy_all_its_barriers(seed: int) -> None:
    """No arrow from an arrival to a departure points backwards, because the offsets satisfy all constraints at once."""
    job = draw_job(seed, drift=0.0, length=S, most=30)
    alignment = aligned(job, drift=0.0)
    for meeting in job.meetings:
        arrivals = [alignment.to_reference(each.clock, each.arrived).time for each in meeting]
        departures = [alignment.to_reference(each.clock, each.left).time for each in meeting]
        assert max(arrivals) <= min(departures) + 200, f"seed {seed}"


@given(st.integers(0, 2**32))
def test_groups_are_the_hosts_that_chains_of_barriers_connect(seed: int) -> None:
    rng = random.Random(seed)
    hosts = rng.randint(2, 12)
    pairs = [rng.sample(range(hosts), 2) for _ in range(rng.randint(0, hosts))]
    meetings = [[Passage(name(a), 0, 10), Passage(name(b), 0, 10)] for a, b in pairs]
    sets = [{host} for host in range(hosts)]
    for a, b in pairs:
        one, other = next(each for each in sets if a in each), next(each for each in sets if b in each)
        if one is not other:
            sets.remove(other)
            one |= other
    found = align([name(host) for host in range(hosts)], meetings).groups
    assert sorted(sorted(map(number, group)) for group in found) == sorted(map(sorted, sets))


def test_reference_is_the_first_clock_of_its_group_and_exact() -> None:
    alignment = align([name(1), name(0)], [[Passage(name(0), 0, 10), Passage(name(1), 5, 15)]])
    assert alignment.groups == [[name(1), name(0)]]
    assert alignment.to_reference(name(1), 12345) == (12345, 0)
    assert alignment.widest(name(1)) == 0


def test_bound_is_as_tight_as_the_barriers() -> None:
    """Host 0 is last once, and host 1 once: each time the other one leaves 20 us later, so 20 us remain unknown."""
    offset = 77 * S
    meetings = [
        [Passage(name(0), 10 * MS, 10 * MS + 20_000), Passage(name(1), offset, offset + 10 * MS + 20_000)],
        [Passage(name(0), 20 * MS, 30 * MS + 20_000), Passage(name(1), offset + 30 * MS, offset + 30 * MS + 20_000)],
    ]
    alignment = align([name(0), name(1)], meetings)
    (fix,) = alignment.fixes(name(1))
    assert abs(fix.offset - offset) <= fix.bound
    assert 20_000 <= fix.bound <= 20_000 + DRIFT * 40 * MS + 10


def test_clocks_that_drift_more_than_allowed_are_given_shorter_windows() -> None:
    fast = Clock(5 * S, 50 * DRIFT)
    meetings = []
    for turn in range(40):
        true = turn * S
        meetings.append(
            [
                Passage(name(0), true, true + 10_000),
                Passage(name(1), fast.at(true), fast.at(true + 10_000)),
            ]
        )
    alignment = align([name(0), name(1)], meetings)
    assert len(alignment.fixes(name(1))) > 10
    assert alignment.discarded == 0
    for turn in range(40):
        found = alignment.to_reference(name(1), fast.at(turn * S))
        assert abs(found.time - turn * S) < 8 * MS


def test_barrier_that_contradicts_itself_is_discarded_and_counted() -> None:
    meetings = [[Passage(name(0), 100, 50), Passage(name(1), 0, 10)]]
    alignment = align([name(0), name(1)], meetings)
    assert alignment.discarded == 1
    assert len(alignment.groups) == 2


def test_clock_that_never_meets_the_reference_in_one_window_is_still_compared() -> None:
    """Hosts 0 and 1 meet at the beginning, hosts 1 and 2 two minutes later."""
    clocks = [Clock(0), Clock(3 * S), Clock(9 * S)]

    def met(a: int, b: int, true: int) -> list[Passage]:
        return [Passage(name(host), clocks[host].at(true), clocks[host].at(true + 1000)) for host in (a, b)]

    alignment = align(map(name, range(3)), [met(0, 1, S), met(1, 2, 120 * S)])
    assert [list(map(number, group)) for group in alignment.groups] == [[0, 1, 2]]
    found = alignment.to_reference(name(2), clocks[2].at(120 * S))
    assert abs(found.time - 120 * S) <= found.bound < 100 * MS


def test_clocks_without_barriers_are_each_alone() -> None:
    alignment = align([name(0), name(1)], [])
    assert alignment.groups == [[name(0)], [name(1)]]
    assert alignment.group(name(1)) == 1
    assert alignment.to_reference(name(1), 7) == (7, 0)


@pytest.mark.parametrize("hosts", [64])
def test_hosts_may_be_many(hosts: int) -> None:
    meetings = [[Passage(name(host), turn * S + host, turn * S + 1000) for host in range(hosts)] for turn in range(30)]
    alignment = align(map(name, range(hosts)), meetings)
    assert len(alignment.groups) == 1
