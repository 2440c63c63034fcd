"""`Agent` by itself: its treatment of nodes that have joined and stay silent."""

from __future__ import annotations

import logging
import subprocess
from types import SimpleNamespace

import pytest
from support.places import start_thread

from fscoord import HashStore, RendezvousTimeoutError
from fscoord.launch import Agent, Console, Job, agent, worker


def crews_of(handler, store):
    info = SimpleNamespace(store=store, rank=0, world_size=3)
    return Agent(Job(["true"], 2, ""), handler, store, Console())._crews(info)


def test_node_that_joined_and_says_nothing_is_named_after_the_stores_timeout(monkeypatch):
    monkeypatch.setattr(agent, "ROUND_CHECK_S", 0.01)
    store = HashStore(timeout=0.05)
    store.set("workers/1", "4")

    def run():
        with pytest.raises(RendezvousTimeoutError, match=r"group rank 2 in round 5 did not come within 0\.05 s"):
            crews_of(SimpleNamespace(is_current=lambda: True, round=5), store)

    start_thread(run).join()


def test_wait_for_a_node_that_says_nothing_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(agent, "ROUND_CHECK_S", 0.01)
    monkeypatch.setattr("fscoord._waiting.timing.FIRST_S", 0.0)
    caplog.set_level(logging.WARNING, "fscoord")
    stands = iter([True, False])
    assert crews_of(SimpleNamespace(is_current=lambda: next(stands), round=5), HashStore()) is None
    assert "still waiting for the number of workers of group rank 1, 2 in round 5" in caplog.text


def test_node_that_says_nothing_because_the_round_is_over_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(agent, "ROUND_CHECK_S", 0.01)
    assert crews_of(SimpleNamespace(is_current=lambda: False, round=5), HashStore()) is None


def test_worker_that_the_kernel_keeps_is_left_to_it_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(worker, "KILL_S", 0.01)
    stuck = worker._Worker(3, 0, "", lambda _: None)
    stuck._process = process = subprocess.Popen(["sleep", "600"])
    stuck.close()
    process.kill()
    process.wait()
    assert (
        f"rank 3 was killed 0.01 s ago and is blocked in the kernel: inspect the children of process {process.pid}"
        in caplog.text
    )
