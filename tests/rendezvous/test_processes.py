"""Real processes that find each other, die, stop and come late; each of them is an `agent`."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import fscoord
from fscoord import FileStore, StoreTimeoutError
from fscoord.rendezvous import C10dRendezvousBackend
from fscoord.rendezvous.state import State

AGENT = Path(__file__).with_name("agent.py")
PATIENCE_S = 60
"""How long the agents may take to agree. It only bounds a hang."""


class Crew:
    """Agents, and what each of them told last."""

    def __init__(self, path, least, most, interval="0.25", attempts="6"):
        self.arguments = [path, str(least), str(most), interval, attempts]
        self.agents = []
        self.last = {}
        self.told = queue.SimpleQueue()

    def hire(self):
        agent = subprocess.Popen(
            [sys.executable, str(AGENT), *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(fscoord.__file__).parent.parent)},
        )
        self.agents.append(agent)
        agent.reader = threading.Thread(target=self._read, args=[agent])
        agent.reader.start()
        return agent

    def _read(self, agent):
        for line in agent.stdout:
            if line.endswith(b"\n"):
                self.told.put((agent, json.loads(line)))

    def agree(self, size, agents=None, patience=PATIENCE_S):
        """Return the number of the round when all `agents`, and no others, have reported to be in it."""
        agents = self.agents if agents is None else agents
        until = time.monotonic() + patience
        while True:
            found = [self.last.get(agent, {}) for agent in agents]
            rounds = {each.get("round") for each in found}
            ranks = sorted(each["rank"] for each in found if each.get("world") == size)
            if len(rounds) == 1 and ranks == list(range(size)):
                return rounds.pop()
            assert time.monotonic() < until, f"they never agree: {found}"
            agent, told = self.told.get(timeout=max(0.1, until - time.monotonic()))
            self.last[agent] = told

    def agree_without(self, stopped, patience):
        """As `agree`, of all that are not `stopped`. A stopped process lives. It goes on if others must wait for it.

        That is who was stopped with the log's lock, and rank 0, whose address all others wait for.
        """
        until = time.monotonic() + patience
        while True:
            living = [agent for agent in self.agents if agent not in stopped]
            try:
                return self.agree(len(living), living, patience=1)
            except (queue.Empty, AssertionError):
                assert time.monotonic() < until, f"they never agree: {[self.last.get(agent) for agent in living]}"
            for agent in self.awaited(stopped):
                os.kill(agent.pid, signal.SIGCONT)
                stopped.remove(agent)

    def awaited(self, stopped):
        """Return the `stopped` agents for which all others wait."""
        number = None
        try:
            with FileStore(self.arguments[0], timeout=1) as store:
                store.append("probe", "")
                found = C10dRendezvousBackend(store, "job").get_state()
            state = State() if found is None else State.decode(found[0])
            if state.complete:
                number = re.search(r"_([0-9]+)_[0-9]+_[0-9a-f]{12}", state.participants[0])
        except StoreTimeoutError as error:
            number = re.search(r":([0-9]+)$", error.holder or "")
        return [agent for agent in stopped if number and agent.pid == int(number[1])]

    def close(self):
        """End all processes in good order; kill those that do not end."""
        for agent in self.agents:
            if agent.poll() is None:
                os.kill(agent.pid, signal.SIGCONT)
            agent.stdin.close()
        try:
            return [agent.wait(PATIENCE_S) for agent in self.agents]
        finally:
            for agent in self.agents:
                agent.kill()
                agent.wait()
                agent.reader.join()
                agent.stdout.close()


@pytest.fixture
def crew(tmp_path):
    """Give `crew(least, most)`: agents that are hired later; all have ended at the end of the test."""
    crews = []

    def make(least, most, **settings):
        crews.append(Crew(str(tmp_path / "job"), least, most, **settings))
        return crews[-1]

    yield make
    for each in crews:
        each.close()


def test_processes_agree_each_time_though_one_is_killed_and_another_comes(crew):
    agents = crew(2, 3)
    for _ in range(3):
        agents.hire()
    first = agents.agree(3)
    agents.agents[0].kill()
    rest = agents.agents[1:]
    second = agents.agree(2, rest)
    assert second > first
    late = agents.hire()
    assert agents.agree(3, [*rest, late]) > second
    assert agents.close()[1:] == [0, 0, 0]


def test_second_launch_starts_afresh_after_the_first_was_killed(crew):
    killed = crew(2, 2)
    for _ in range(2):
        killed.hire()
    first = killed.agree(2)
    for agent in killed.agents:
        agent.kill()
    fresh = crew(2, 2)
    for _ in range(2):
        fresh.hire()
    assert fresh.agree(2) > first


@pytest.mark.long
@pytest.mark.timeout(900)
def test_sixteen_processes_killed_and_stopped_at_random_agree_in_the_end(crew, rng, scale):
    agents = crew(1, 16, interval="0.5", attempts="8")
    for _ in range(16):
        agents.hire()
    agents.agree(16, patience=300)
    for _ in range(scale(3)):
        stopped = []
        for agent in rng.sample(agents.agents, 6):
            if rng.random() < 0.5:
                agent.kill()
                agents.agents.remove(agent)
                agent.wait()
                agent.reader.join()
                agent.stdin.close()
                agent.stdout.close()
                agents.hire()
            else:
                os.kill(agent.pid, signal.SIGSTOP)
                stopped.append(agent)
        if rng.random() < 0.5:  # some are taken for dead, some are not
            agents.agree_without(stopped, patience=300)
        for agent in stopped:
            os.kill(agent.pid, signal.SIGCONT)
        agents.agree(16, patience=300)
