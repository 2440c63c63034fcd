"""The doctor on two hosts: the instances meet, and the verdict on these mounts agrees with the rest of the suite."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mounts.agents import Agent, Pending
from mounts.conftest import Sides

TESTABLE = {"nfs": "safe", "nfs4": "safe", "fuse.glusterfs": "not proven"}


def begin(agent: Agent, directory: str, *options: str) -> Pending:
    """Start the command on the agent's host."""
    command = [sys.executable, "-m", "fscoord", "doctor", "--json", *options, directory]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    return agent.begin("subprocess.run", command, check=False, **pipes)


@pytest.fixture(params=["ofd", "soft"])
def examined(sides: Sides, request: pytest.FixtureRequest) -> list[tuple[int, dict[str, Any] | None]]:
    """The exit code of either host's command, for a kind of lock, and the report of the one that printed it."""
    options = ("-n", "2", "--wait", "300", "--lock", request.param)
    pending = [begin(host.fork(), sides.full(host, ""), *options) for host in (sides.a, sides.b)]
    ends = [each.result() for each in pending]
    return [(end.returncode, json.loads(end.stdout) if end.stdout else None) for end in ends]


@pytest.mark.hosts
def test_doctor_finds_both_hosts_and_passes_the_mount(
    examined: list[tuple[int, dict[str, Any] | None]], sides: Sides
) -> None:
    (report,) = (report for _, report in examined if report is not None)
    bad = {
        check["name"]: check["says"]
        for check in report["checks"]
        if check["outcome"] in {"bad", "unknown"}
        and not (check["lock"] != report["lock"] and check["measured"].get("missing"))  # no symbolic links, say
    }
    assert bad == {}
    assert report["verdict"] == TESTABLE.get(report["file_system"]["kind"], "safe"), report["reasons"]
    assert {code for code, _ in examined} == {0 if report["verdict"] == "safe" else 1}
    assert report["other_host"] in {sides.a.hostname, sides.b.hostname}
    assert len(report["hosts"]) == 2
    if report["lock"] == "ofd":
        assert (report["prediction"]["nodes"], report["prediction"]["ranks_per_node"]) == (2, 1)
        assert report["prediction"]["round_trip_s"] > 0
    else:
        assert report["prediction"] is None  # only the writes of a log with the default locks are combined
    agent = sides.a.fork()
    assert agent.do("os.listdir", sides.full(sides.a, "")) == []


@pytest.mark.hosts
def test_doctor_on_one_host_alone_proves_nothing_of_a_shared_mount(sides: Sides) -> None:
    end = begin(sides.a.fork(), sides.full(sides.a, ""), "--wait", "0").result()
    report = json.loads(end.stdout)
    assert (end.returncode, report["verdict"], report["other_host"]) == (1, "not proven", None)
    assert any("one instance on each of two hosts" in reason for reason in report["reasons"])


@pytest.mark.lab
def test_doctor_reports_an_unreachable_server_in_time_and_leaves_nothing(sides: Sides) -> None:
    subprocess.run(["link_host", "a", "down"], check=True)
    try:
        end = begin(sides.a.fork(), sides.full(sides.a, "")).result()
    finally:
        subprocess.run(["link_host", "a", "up"], check=True)
    report = json.loads(end.stdout)
    assert (end.returncode, report["verdict"]) == (69, "not safe")
    assert "did not answer" in report["reasons"][0]
    while any(b"fscoord.doctor.agent_process" in arguments for arguments in command_lines()):
        time.sleep(0.1)
    assert sides.a.fork().do("os.listdir", sides.full(sides.a, "")) == []


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:  # it has just ended
            pass
