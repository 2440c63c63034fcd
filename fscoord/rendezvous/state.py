"""The rules of a rendezvous: its state, and what a node does next. This module does no I/O and reads no clock.

A *life* is one job, from its first node to its last. A *round* is one start of the workers on the nodes that take part.
A round is first *forming*, then *complete*. When one of its participants dies, leaves or joins again, the round is
*broken*, and the next round forms:

- Nodes join a forming round while it has free places. The places are reserved, for the length of a last call, first
  for the participants of the broken round (*former*), then for waiting nodes in their order. Other nodes get the rest.
- A round is complete when it has `Limits.max_nodes` participants. If it has at least `Limits.min_nodes`, it is complete
  at the end of the *last call*, a time in which more nodes may join. Only a node that knows that all participants are
  alive completes the round. So no round is completed with the dead participants that an earlier job has left in the
  state. The first participant has seen the other participants join, so it knows at once that they are alive.
- A node that comes to a complete round waits. A waiting node beyond `Limits.max_nodes` is a *spare*.
- No node joins a closed rendezvous. When all nodes of a closed rendezvous are dead, the next node begins another life.
- With `Limits.late_nodes` there are no spare nodes: a new node that finds no place is *refused*, because it may belong
  to another job with the same run id. When all nodes of a job are dead, the next node begins another life.

Every node changes the state by compare-and-set. If a compare-and-set fails, the node decides again on the new state.
So any node can make a change. A node that does not learn whether its own write succeeded reads the state, and decides
again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from fscoord.errors import RendezvousStateError

FORMAT = 2
"""The version of the state's format. A reader refuses other versions."""

Node = str


@dataclass(frozen=True)
class State:
    """The state that all nodes share.

    Attributes:
        sequence: the number of changes so far.
        life: the number of the job, counted from 0.
        round: the number of the round, counted from 0 over all lives.
        complete: whether `participants` are final.
        closed: whether no node may join any more.
        participants: the nodes of the round. In a complete round, the nodes are in the order of their ranks.
        former: participants of the previous, broken round that have not joined again.
        waiting: nodes that wait for a place, in the order in which they came.
        left: participants of a complete round that left after the rendezvous was closed.
        since: when the first round of the life was complete, in seconds since the epoch; 0 before.
    """

    sequence: int = 0
    life: int = 0
    round: int = 0
    complete: bool = False
    closed: bool = False
    participants: tuple[Node, ...] = ()
    former: tuple[Node, ...] = ()
    waiting: tuple[Node, ...] = ()
    left: tuple[Node, ...] = ()
    since: int = 0

    @property
    def present(self) -> frozenset[Node]:
        """The nodes of this state that have not left."""
        return frozenset(self.participants + self.former + self.waiting) - frozenset(self.left)

    def encode(self) -> bytes:
        """Return the state as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> State:
        """Parse `data`, the result of `encode`.

        Raises:
            RendezvousStateError: `data` is not a state, or has another version.
        """
        try:
            found = json.loads(data)
            version = _checked(found.pop("format"), FORMAT)
            names = fields(cls) if version == FORMAT else ()
            values: dict[str, Any] = {each.name: _checked(found.pop(each.name), each.default) for each in names}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RendezvousStateError(
                f"the state of the rendezvous can't be read ({type(error).__name__}: {error});"
                " another program wrote it, so use another id or another store"
            ) from error
        if version != FORMAT or found:
            raise RendezvousStateError(
                f"the state of the rendezvous has format {version!r}, and this version of fscoord reads {FORMAT};"
                " run one version on all nodes"
            )
        return cls(**values)


def _checked(value: object, example: object) -> object:
    """Return `value`, which was read from JSON. Raise an error unless `value` has the type of `example`."""
    if isinstance(example, tuple):
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise TypeError(f"a field has the value {value!r}, which is not a list of nodes")
        return tuple(value)
    if type(value) is not type(example):
        raise TypeError(f"a field has the value {value!r}, which is not of type {type(example).__name__}")
    if isinstance(value, int) and not 0 <= value < 1 << 63:
        raise ValueError(f"a field has the value {value}, which is below 0 or has more than 63 bits")
    return value


@dataclass(frozen=True)
class Limits:
    """Limits for the number of nodes.

    Attributes:
        min_nodes: the minimal number of nodes in a round.
        max_nodes: the maximal number of nodes in a round.
        late_nodes: how many nodes a running job may have if new nodes join it. A new node beyond this number is
            refused. None: the number is `max_nodes`, and a new node beyond this number waits as a spare.
    """

    min_nodes: int
    max_nodes: int
    late_nodes: int | None = None


@dataclass(frozen=True)
class Observed:
    """The facts that one node knows in addition to the state.

    Attributes:
        dead: nodes that are known dead.
        alive: nodes that are known alive, for example because this node has seen them join.
        life: the number of the job (`State.life`) that this node has joined; None if it has joined no job.
        returned: the number of the last round that `next_rendezvous` returned on this node; None before the first.
        is_last_call_over: whether the last call is over: the time in which more nodes may join a round that has
            `Limits.min_nodes` nodes.
        is_reserve_over: whether the places are no longer reserved for former and waiting nodes.
        now: the time, in seconds since the epoch.
    """

    dead: frozenset[Node] = frozenset()
    alive: frozenset[Node] = frozenset()
    life: int | None = None
    returned: int | None = None
    is_last_call_over: bool = False
    is_reserve_over: bool = False
    now: int = 0


class Verdict(Enum):
    """What a node does next."""

    WRITE = "write the new state, and decide again"
    WAIT = "wait for a change"
    JOINED = "go to work"
    CLOSED = "leave: the rendezvous is closed"
    REFUSED = "leave: another job has the rendezvous"
    SPARE = "leave: the rendezvous is closed, and this node was never needed"


@dataclass(frozen=True)
class Decision:
    """What a node does next. With `Verdict.WRITE`, the node writes `state`. Any other verdict was made on `state`."""

    verdict: Verdict
    state: State = field(default_factory=State)


def evict(state: State, gone: Iterable[Node]) -> State:
    """Return `state` without the nodes `gone`, which died or left.

    If one of these nodes takes part in a complete round, the round is broken. But in a closed rendezvous a complete
    round keeps its participants, and `State.left` gets the nodes that are gone.
    """
    lost = frozenset(gone)
    state = replace(state, former=_minus(state.former, lost), waiting=_minus(state.waiting, lost))
    if not state.complete:
        return replace(state, participants=_minus(state.participants, lost))
    if state.closed:  # keep `participants`, because a slow node still has to find its rank there
        leaving = (node for node in state.participants if node in lost and node not in state.left)
        return replace(state, left=(*state.left, *leaving))
    return _broken(state, lost) if lost.intersection(state.participants) else state


def close(state: State, node: Node) -> State:
    """Return `state` as closed and without `node`."""
    return evict(replace(state, closed=True), [node])


def decide(state: State, me: Node, limits: Limits, observed: Observed) -> Decision:
    """Return what the node `me` does next to join a round after `observed.returned`."""
    now = evict(state, observed.dead & (state.present - {me}))
    life = now.life if me in now.participants or me in now.present else observed.life
    if now.complete and me in now.participants and me not in now.left and now.round != observed.returned:
        return _write_or(Verdict.JOINED, state, now)
    if life not in (None, now.life):
        return Decision(Verdict.CLOSED, now)  # the job that this node belongs to is over
    if now.closed:
        others = now.present - {me}
        if life is not None or others & observed.alive:
            is_spare = now.complete and len(now.participants) >= limits.max_nodes and me in now.waiting
            return Decision(Verdict.SPARE if is_spare else Verdict.CLOSED, now)
        if others:
            return _write_or(Verdict.WAIT, state, now)  # until it is known whether the others are alive
        now = State(life=now.life + 1, round=now.round + 1)
    elif life is None and limits.late_nodes is not None:
        if now.since and not now.present:  # the job is dead: begin a new life, which does not inherit its failures
            now = State(life=now.life + 1, round=state.round + 1)
        elif len(now.present) >= (limits.late_nodes if now.since else limits.max_nodes):
            # A node that is not known alive may be dead, and so leave a free place.
            is_full = now.present <= observed.alive
            return Decision(Verdict.REFUSED, now) if is_full else _write_or(Verdict.WAIT, state, now)
    if now.complete and me in now.participants:
        now = _broken(now, frozenset())
    now = _join(now, me, limits, observed)
    now = _complete(now, me, limits, observed)
    return _write_or(Verdict.WAIT, state, now)


def _write_or(verdict: Verdict, old: State, new: State) -> Decision:
    if new == old:
        return Decision(verdict, old)
    return Decision(Verdict.WRITE, replace(new, sequence=old.sequence + 1))


def _join(state: State, me: Node, limits: Limits, observed: Observed) -> State:
    if me in state.participants:
        return state
    former = _minus(state.former, {me})
    if not state.complete and _has_place(state, me, limits, observed):
        participants = (*state.participants, me)
        return replace(state, participants=participants, former=former, waiting=_minus(state.waiting, {me}))
    if me in state.waiting:
        return state
    return replace(state, former=former, waiting=(*state.waiting, me))


def _has_place(state: State, me: Node, limits: Limits, observed: Observed) -> bool:
    taken = len(state.participants)
    if me not in state.former and not observed.is_reserve_over:
        ahead = state.waiting.index(me) if me in state.waiting else len(state.waiting)
        taken += len(state.former) + ahead
    return taken < limits.max_nodes


def _complete(state: State, me: Node, limits: Limits, observed: Observed) -> State:
    count = len(state.participants)
    if state.complete or me not in state.participants or count < limits.min_nodes:
        return state
    if count < limits.max_nodes and not observed.is_last_call_over:
        return state
    if not observed.alive.issuperset(_minus(state.participants, {me})):
        return state
    participants, since = tuple(sorted(state.participants)), state.since or observed.now
    return replace(state, complete=True, participants=participants, former=(), since=since)


def _broken(state: State, lost: frozenset[Node]) -> State:
    former = _minus(state.participants, lost)
    return replace(state, round=state.round + 1, complete=False, participants=(), former=former, left=())


def _minus(nodes: tuple[Node, ...], lost: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(node for node in nodes if node not in lost)
