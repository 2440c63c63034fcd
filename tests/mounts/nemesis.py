"""Faults for agents that use one store on both hosts: SIGKILL, and SIGSTOP for a while, at any moment."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable

from mounts.agents import LIMIT_S, Agent, Host, Pending
from mounts.conftest import Sides
from mounts.trouble import HOLDING, SEALING

STOPPED_S = 0.05
"""How long one stays stopped if nobody else gets on meanwhile."""
OTHERS = 20
"""How much others may tell before one who was stopped goes on."""
HOLDER_KILLED = "kill of one that was stopped with the lock"
HOLDERS_KILLED_MAX = 2


class Nemesis:
    """Agents, begun by ``begin(host)``, and all that happens to them.

    ``begin`` waits for nothing: who has the log's lock may be stopped.

    Attributes:
        agents: all, each with the answer that it was asked for.
        killed: those who were killed; others came in their place.
        happened: how often what has happened.
    """

    def __init__(self, sides: Sides, rng: random.Random, begin: Callable[[Host], tuple[Agent, Pending]]) -> None:
        self._sides, self._rng, self._begin = sides, rng, begin
        self.agents: dict[Agent, Pending] = {}
        self.killed: set[Agent] = set()
        self._over: set[Agent] = set()
        self._stopped: dict[Agent, tuple[int, float, bool]] = {}
        self._events: Counter[str] = Counter()

    def start(self, host: Host) -> None:
        agent, pending = self._begin(host)
        self.agents[agent] = pending

    @property
    def at_work(self) -> list[Agent]:
        """Return the agents that neither ended nor were killed; raise the error of an agent that failed."""
        able = [agent for agent in self.agents if agent not in self.killed and agent not in self._over]
        for agent in able:
            if self.agents[agent].is_done():
                self.agents[agent].result()
                self._over.add(agent)
        return [agent for agent in able if agent not in self._over]

    @property
    def happened(self) -> Counter[str]:
        words = Counter(event for agent in self.agents for event in agent.events if isinstance(event, str))
        return self._events + words

    def told(self) -> int:
        return sum(len(agent.events) for agent in self.agents)

    def go_on_until(self, enough: Callable[[], bool]) -> None:
        """Let the agents work. An agent that stops itself goes on after a while, or is killed."""
        told, end = -1, 0.0
        while not enough():
            if self.told() > told:
                told, end = self.told(), time.monotonic() + LIMIT_S
            assert time.monotonic() < end, f"for {LIMIT_S:g} s nobody has got on"
            self._sides.look(STOPPED_S)
            self._wake()

    def _wake(self) -> None:
        for agent in self.at_work:
            events = agent.events
            if not events or events[-1] not in (HOLDING, SEALING):
                self._stopped.pop(agent, None)
                continue
            if agent not in self._stopped:
                is_last = self._events[HOLDER_KILLED] < HOLDERS_KILLED_MAX and self._rng.random() < 0.3
                self._stopped[agent] = self.told(), time.monotonic(), is_last
            told, since, is_last = self._stopped[agent]
            if self.told() < told + OTHERS and time.monotonic() < since + STOPPED_S:
                continue
            if is_last:
                self._events[HOLDER_KILLED] += 1
                self._kill(agent)
            else:
                agent.resume()  # and again, if it had not stopped yet

    def kill_one(self) -> None:
        """Kill one running agent, if there is one."""
        able = self.at_work
        if able:
            self._events["kill"] += 1
            self._kill(self._rng.choice(able))

    def _kill(self, victim: Agent) -> None:
        """Kill one, but not what it has forked; another one comes."""
        victim.host.signal(victim.number, signal.SIGKILL)
        self.killed.add(victim)
        self.start(victim.host)

    def stop_one(self) -> None:
        """Stop one until others have got on a little, or can't."""
        able = self.at_work
        if able:
            victim = self._rng.choice(able)
            victim.stop()
            before = self.told()
            while self.told() < before + OTHERS and self._sides.look(STOPPED_S):
                pass
            victim.resume()
            self._events["stop"] += 1
