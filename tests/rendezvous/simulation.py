"""Nodes that follow the rules of a rendezvous, one step at a time, on a register with compare-and-set.

A step of a node is a look at the register, or a write of what it decided at its last look, which is lost if somebody
else has written since. Between steps anything may happen: nodes come, die, stop for a while and are taken for dead,
come again, leave; time-outs pass; the answer to a write is lost, so that the node looks again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from fscoord.rendezvous.state import Decision, Limits, Observed, State, Verdict, close, decide, evict


@dataclass
class Node:
    name: str
    seen: Observed = field(default_factory=Observed)
    known: frozenset[str] | None = None
    read: State | None = None
    decision: Decision | None = None
    outcome: tuple[int, int, int] | None = None
    """Round, rank and world size, while the node works; None while it looks for the others."""
    is_over: bool = False


class World:
    """The register, the nodes, and what every outcome so far said."""

    def __init__(self, rng: random.Random, limits: Limits) -> None:
        self.rng = rng
        self.limits = limits
        self.state = State()
        self.nodes: dict[str, Node] = {}
        self.dead: set[str] = set()
        self.outcomes: dict[int, dict[int, str]] = {}
        self.sizes: dict[int, int] = {}
        self.story: list[str] = []
        self.is_settling = False

    def tell(self, text: str) -> None:
        self.story.append(text)

    def come(self) -> None:
        name = f"n{len(self.nodes) + len(self.dead):02}"
        self.nodes[name] = Node(name)
        self.tell(f"{name} comes")

    def die(self, node: Node) -> None:
        del self.nodes[node.name]
        self.dead.add(node.name)
        self.tell(f"{node.name} dies")

    def bury(self) -> bool:
        """One node detects the dead nodes, and removes them."""
        new = evict(self.state, self.dead & self.state.present)
        return self._put(new, f"the dead are taken out: {sorted(self.dead & self.state.present)}")

    def mistake_for_dead(self, node: Node) -> None:
        self._put(evict(self.state, {node.name}), f"{node.name} is taken for dead")

    def leave(self, node: Node) -> None:
        self._put(evict(self.state, {node.name}), f"{node.name} leaves")
        del self.nodes[node.name]
        self.dead.add(node.name)

    def close(self, node: Node) -> None:
        self._put(close(self.state, node.name), f"{node.name} closes and leaves")
        del self.nodes[node.name]
        self.dead.add(node.name)

    def _put(self, new: State, text: str) -> bool:
        if new == self.state:
            return False
        self.tell(text)
        self.state = replace(new, sequence=self.state.sequence + 1)
        return True

    def again(self, node: Node) -> None:
        """The node's work ended, and it looks for the others again."""
        self.tell(f"{node.name} comes again")
        node.outcome = None

    def step(self, node: Node) -> bool:
        """Let the node look, decide or write; return whether anything changed."""
        if node.outcome or node.is_over:
            return False
        if node.decision is not None and node.decision.verdict is Verdict.WRITE:
            return self._write(node)
        return self._look(node)

    def _look(self, node: Node) -> bool:
        state = self.state
        if node.known is not None:
            alive = (node.seen.alive | (state.present - node.known)) & state.present
            node.seen = replace(node.seen, alive=alive)
        node.known = state.present
        if self.is_settling:  # in the end everybody knows the truth, and all time has passed
            living = frozenset(self.nodes)
            known = state.present & living
            node.seen = replace(node.seen, alive=known, is_last_call_over=True, is_reserve_over=True)
        else:
            over = {name: self.rng.random() < 0.2 for name in ("is_last_call_over", "is_reserve_over")}
            dead = frozenset(self.dead) if self.rng.random() < 0.2 else frozenset()
            node.seen = replace(node.seen, dead=dead, **over)
        if node.name in state.present:
            node.seen = replace(node.seen, life=state.life)
        decision = decide(state, node.name, self.limits, replace(node.seen, now=1))
        node.read, node.decision = state, decision
        if decision.verdict is Verdict.JOINED:
            self._joined(node, state)
            return True
        if decision.verdict in (Verdict.CLOSED, Verdict.SPARE, Verdict.REFUSED):
            self.tell(f"{node.name} is told: {decision.verdict.value}")
            node.is_over = True
            self._put(evict(self.state, {node.name}), f"{node.name} goes")
            return True
        return decision.verdict is Verdict.WRITE

    def _write(self, node: Node) -> bool:
        wanted, node.decision = node.decision.state, None
        if self.state != node.read:
            self.tell(f"{node.name} is too late")
            return True
        self.tell(f"{node.name} writes {wanted}")
        assert wanted.sequence == self.state.sequence + 1
        assert State.decode(wanted.encode()) == wanted
        self.check_state(wanted)
        self.state = wanted
        return True

    def check_state(self, state: State) -> None:
        """The conditions that hold in every state."""
        assert len(set(state.participants)) == len(state.participants) <= self.limits.max_nodes
        assert not set(state.participants) & set(state.waiting + state.former)
        assert len(set(state.waiting)) == len(state.waiting)
        assert not set(state.waiting) & set(state.former)
        assert set(state.left) <= set(state.participants)
        if state.complete:
            assert self.limits.min_nodes <= len(state.participants)
            assert list(state.participants) == sorted(state.participants)
            assert not state.former
        assert (state.life, state.round) >= (self.state.life, self.state.round)

    def _joined(self, node: Node, state: State) -> None:
        rank, size = state.participants.index(node.name), len(state.participants)
        node.outcome = (state.round, rank, size)
        node.seen = replace(node.seen, returned=state.round, life=state.life)
        self.tell(f"{node.name} has rank {rank} of {size} in round {state.round}")
        assert self.outcomes.setdefault(state.round, {}).setdefault(rank, node.name) == node.name
        assert self.sizes.setdefault(state.round, size) == size
        assert rank < size

    def settle(self) -> None:
        """Let all nodes look and act until nothing changes."""
        self.is_settling = True
        for _ in range(40 * (len(self.nodes) + 2)):
            changed = self.bury()
            nodes = list(self.nodes.values())
            self.rng.shuffle(nodes)
            for node in nodes:
                if node.outcome and (not self.state.complete or node.outcome[0] != self.state.round):
                    self.again(node)
                    changed = True
                changed |= self.step(node)
            if not changed:
                return
        raise AssertionError("it never comes to rest")

    def check_agreement(self) -> None:
        """The conditions that hold when all nodes rest."""
        living = [node for node in self.nodes.values() if not node.is_over]
        if self.state.closed:
            assert all(node.outcome for node in living)
            return
        working = [node for node in living if node.outcome]
        if len(living) < self.limits.min_nodes:
            assert not working
            return
        size = min(len(living), self.limits.max_nodes)
        if working:  # a round stands, and who came late waits: all take part that were there, at least the least
            size = len(self.state.participants)
        assert {node.outcome[0] for node in working} == {self.state.round}
        assert {node.outcome[2] for node in working} == {size}
        assert sorted(node.outcome[1] for node in working) == list(range(size))
        waiting = {node.name for node in living} - {node.name for node in working}
        assert waiting == set(self.state.waiting)
        assert len(working) == size
        assert self.limits.min_nodes <= size <= self.limits.max_nodes
