"""The tables: which rank came last, what was waited for, which lock, how late a death was known."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.traces import MS, Clock, WrittenProcess, meet, write_job

from fscoord.trace.reading import read
from fscoord.trace.report import make_report, pattern_of


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return tmp_path / "traces"


def crew_of(count: int) -> list[WrittenProcess]:
    crew = [WrittenProcess("node0", 100 + rank, rank) for rank in range(count)]
    for process in crew:
        process.span("open", "/store", 1, 2, "done", "label", "", rank=process.rank)
    return crew


def report_of(crew: list[WrittenProcess], traces: Path) -> dict:
    for process in crew:
        process.write(traces)
    return make_report(read(traces))


def test_rank_that_came_last_pays_for_the_time_of_the_others(traces: Path) -> None:
    crew = crew_of(3)
    meet(crew, "b/1", [10 * MS, 20 * MS, 50 * MS], [1000] * 3)
    meet(crew, "b/2", [100 * MS, 110 * MS, 160 * MS], [1000] * 3)
    meet(crew, "b/3", [230 * MS, 210 * MS, 220 * MS], [1000] * 3)
    first, second = report_of(crew, traces)["last_to_come"]
    assert (first["rank"], first["last"], first["barriers"], first["uncertain"]) == (2, 2, 3, 0)
    assert first["cost_rank_s"] == pytest.approx(0.040 + 0.030 + 0.060 + 0.050)
    assert first["avoidable_rank_s"] == pytest.approx(2 * 0.030 + 2 * 0.050)
    assert first["worst"] == {"name": "b/2", "cost_rank_s": pytest.approx(0.110)}
    assert (second["rank"], second["last"]) == (0, 1)


def test_last_rank_is_uncertain_if_the_clocks_do_not_tell(traces: Path) -> None:
    crew = [WrittenProcess("node0", 100, 0), WrittenProcess("node1", 101, 1, Clock(7 * 10**12))]
    meet(crew, "b/1", [10 * MS, 11 * MS], [2 * MS, 2 * MS])
    (row,) = report_of(crew, traces)["last_to_come"]
    assert row["uncertain"] == 1


def test_name_that_was_used_for_two_barriers_has_no_last_rank(traces: Path) -> None:
    crew = crew_of(2)
    meet(crew, "b", [10 * MS, 20 * MS], [1000] * 2)
    meet(crew, "b", [100 * MS, 110 * MS], [1000] * 2)
    assert report_of(crew, traces)["last_to_come"] == []


def test_waits_that_are_a_part_of_a_barrier_or_lock_count_once(traces: Path) -> None:
    (process,) = crew_of(1)
    process.span("barrier", "epoch/1", 10 * MS, 30 * MS, "passed", "world_size", 2, rank=0)
    process.span("wait", "epoch/1/complete", 11 * MS, 29 * MS)
    process.span("lock", "l", 40 * MS, 90 * MS, "released", "waited_ns", 20 * MS, "token", 2)
    process.span("wait", "l/wake/abc", 41 * MS, 59 * MS)
    process.span("wait", "l/other", 100 * MS, 101 * MS)
    waiting = {(row["kind"], row["name"]): row["total"] for row in report_of([process], traces)["waiting"]}
    assert waiting == {("barrier", "epoch/1"): 0.02, ("lock", "l"): 0.02, ("wait", "l/other"): 0.001}


def test_names_that_differ_in_numbers_are_one_row(traces: Path) -> None:
    (process,) = crew_of(1)
    for number in range(3):
        process.span("wait", f"epoch/{number}/plan", number * 10 * MS, number * 10 * MS + (number + 1) * MS)
    (row,) = report_of([process], traces)["waiting"]
    assert (row["name"], row["waits"], row["total"], row["longest"]) == ("epoch/*/plan", 3, 0.006, 0.003)
    assert pattern_of("a12b3") == "a*b*"


def test_contended_lock_names_waiters_and_holders(traces: Path) -> None:
    first, second, third = crew_of(3)
    first.span("lock", "l", 0, 30 * MS, "released", "waited_ns", 0, "token", 1)
    second.span("lock", "l", 10 * MS, 50 * MS, "released", "waited_ns", 20 * MS, "token", 2)
    third.span("lock", "l", 25 * MS, 60 * MS, "released", "waited_ns", 25 * MS, "token", 3)
    report = report_of([first, second, third], traces)
    (row,) = report["contention"]
    assert (row["acquired"], row["contended"], row["waited"], row["held"]) == (3, 2, 0.045, 0.06)
    pairs = {(pair["waiter"], pair["holder"]): pair["seconds"] for pair in row["pairs"]}
    assert pairs == {
        ("rank 1", "rank 0"): 0.02,
        ("rank 2", "rank 0"): 0.005,
        ("rank 2", "rank 1"): 0.02,
    }
    ended = {row["title"]: row["ended_by"] for row in report["longest"]}
    assert ended == {"rank 0": "free when asked for", "rank 1": "release by rank 0", "rank 2": "release by rank 1"}


def test_death_has_the_time_since_the_exit_that_the_agent_saw(traces: Path) -> None:
    agent, worker, other = WrittenProcess("node0", 50), *crew_of(2)
    agent.span("worker", "worker 0", 0, 20 * MS, "exit", "status", -9, "pid", 100, "address", "node0:100", store="")
    worker.span("put", "q", 5 * MS, 6 * MS, "done")
    other.span("death", "node0:100", 60 * MS, 61 * MS, "recorded", "session", 4, "dead_rank", 0, store="")
    (row,) = report_of([agent, worker, other], traces)["deaths"]
    assert (row["process"], row["rank"], row["session"], row["recorded_by"]) == ("node0:100", 0, 4, "rank 1")
    assert (row["since_exit"], row["since_last_sign"]) == (0.041, 0.055)


def test_longest_waits_tell_what_ended_them(traces: Path) -> None:
    first, second = crew_of(2)
    first.span("wait", "plan", 0, 90 * MS, "passed", "key", "plan", "by", "node0:101", "by_rank", 1)
    first.span("wait", "k", 100 * MS, 180 * MS, "time-out")
    first.span("wait", "s", 200 * MS, 270 * MS, "death", "dead", [4, 5])
    meet([first, second], "b", [300 * MS, 360 * MS], [1000, 1000])
    longest = report_of([first, second], traces)["longest"]
    assert [(row["name"], row["ended_by"]) for row in longest] == [
        ("plan", "rank 1, which set 'plan'"),
        ("k", "time-out"),
        ("s", "death of 4, 5"),
        ("b", "arrival of rank 1"),
        ("b", "its own arrival, which was the last"),
    ]


def test_longest_waits_are_ten(traces: Path) -> None:
    (process,) = crew_of(1)
    for number in range(30):
        process.span("wait", "k", number * 100 * MS, (number * 100 + number + 1) * MS)
    longest = report_of([process], traces)["longest"]
    assert [row["seconds"] for row in longest] == [number / 1000 for number in range(30, 20, -1)]


def test_open_waits_and_time_outs_have_tables(traces: Path) -> None:
    (process,) = crew_of(1)
    process.span("wait", "late", 0, 10 * MS, "time-out")
    process.span("wait", "never", 20 * MS, None)
    report = report_of([process], traces)
    assert [row["name"] for row in report["time_outs"]] == ["late"]
    assert [(row["name"], row["outcome"]) for row in report["open"]] == [("never", "open")]


def test_lock_that_is_held_at_the_end_is_no_wait_without_an_end(traces: Path) -> None:
    (process,) = crew_of(1)
    process.span("lock", "held", 0, None, "", "waited_ns", 5, "token", 1)
    process.span("lock", "wanted", 10 * MS, None)
    assert [row["name"] for row in report_of([process], traces)["open"]] == ["wanted"]


def test_hosts_without_a_common_barrier_are_two_groups_of_clocks(traces: Path) -> None:
    crew = [WrittenProcess(f"node{rank}", 100, rank, Clock(rank * 10**12)) for rank in range(2)]
    for process in crew:
        process.span("wait", "k", 0, MS)
    assert [group["reference"] for group in report_of(crew, traces)["clocks"]] == ["node0", "node1"]


def test_report_of_a_whole_job_finds_the_straggler_and_the_bounds(traces: Path, seed: int) -> None:
    write_job(traces, seed, ranks=16, hosts=4, barriers=30)
    report = make_report(read(traces))
    assert report["last_to_come"][0]["rank"] == 3
    assert report["last_to_come"][0]["last"] >= 20
    (group,) = report["clocks"]
    assert len(group["hosts"]) == 4
    assert all(host["bound"] < 0.05 for host in group["hosts"])
    assert [row["name"] for row in report["contention"]] == ["dataset"]
    assert [(row["rank"], row["session"]) for row in report["deaths"]] == [(15, 8)]
