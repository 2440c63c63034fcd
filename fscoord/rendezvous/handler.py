"""`DynamicRendezvousHandler` takes part in a rendezvous as one node, on any store."""

from __future__ import annotations

import itertools
import math
import random
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from fscoord._arguments import Timeout, key_bytes, to_seconds
from fscoord._runtime import system, tracing
from fscoord._runtime.escaping import escape_word
from fscoord._runtime.logging import logger
from fscoord._waiting.awaited import RENDEZVOUS, Awaited
from fscoord._waiting.timing import Backoff, SlowWaitLogger
from fscoord.collectives import store_timeout
from fscoord.errors import (
    FscoordError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExit,
    RendezvousTimeoutError,
    StoreTimeoutError,
)
from fscoord.rendezvous.backend import (
    POLL_INTERVAL_S,
    RendezvousBackend,
    SharedState,
    Token,
    store_errors_as_rendezvous,
)
from fscoord.rendezvous.base import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from fscoord.rendezvous.events import NodeState, construct_and_record_rdzv_event, shorten_names
from fscoord.rendezvous.keep_alive import KeepAliveThread
from fscoord.rendezvous.parameters import RendezvousSettings, RendezvousTimeout
from fscoord.rendezvous.state import Decision, Limits, Observed, State, Verdict, close, decide, evict
from fscoord.store import Store, shown
from fscoord.stores.prefix import PrefixStore

ADDRESS_POLL_S = POLL_INTERVAL_S
"""A node that waits for the address of rank 0 checks at this interval, in seconds, whether the round is broken."""

POLLS_PER_S = 8
"""The participants of a forming round, except the first, together make about this many polls per second."""

SETTLED_POLL_S = 5.0
"""The longest time, in seconds, between two polls of a participant that is not the first."""

SLOW_WRITE_S = 0.002
"""If a failed compare-and-set took at least this long, in seconds, a random pause precedes the next compare-and-set."""

SPREAD = 2.0
"""The longest random pause after a failed compare-and-set, as a multiple of the duration of the compare-and-set."""

H = TypeVar("H", bound="DynamicRendezvousHandler")

_local_ids = itertools.count()


class Progress(NamedTuple):
    """The progress of a round, as a waiting node sees it.

    Attributes:
        nodes: the number of nodes that have joined the round.
        min_nodes: the minimal number of nodes in a round.
        max_nodes: the maximal number of nodes in a round.
        waited: how long this node has waited, in seconds.
        left: the longest time that this node still waits, in seconds. If enough nodes have joined, the round completes
            after this time even if no other node joins.
        is_running: whether the present round runs without this node, so that this node waits for the next round.
    """

    nodes: int
    min_nodes: int
    max_nodes: int
    waited: float
    left: float
    is_running: bool


def short_names(nodes: Iterable[str]) -> str:
    """Return the short names of `nodes`, separated by commas; see `shorten_names`."""
    return ", ".join(map(shorten_names, nodes))


class DynamicRendezvousHandler(RendezvousHandler):
    """Takes part, as one node, in a rendezvous of ``min_nodes`` to ``max_nodes`` nodes. Nodes may come and go.

    Each call of `next_rendezvous` waits for one round. Waiting nodes sleep until the store wakes them. After the first
    call, a thread sends a keep-alive every ``keep_alive_interval``.

    The end of a ``with`` block calls `shutdown`. A forked child must create its own handler.

    Args:
        settings: the settings, which must be the same on all nodes.
        backend: the backend that keeps the state.
        store: the store that the nodes share. Each round uses keys with a prefix of its own.
        local_addr: the address by which other nodes reach this node; its host name by default.
        owns_store: whether `shutdown` closes the store.
        late_nodes: how many nodes a running job may have if new nodes join it. A new node beyond this number raises
            `~fscoord.RendezvousError`. None: the number is ``max_nodes``, and a new node beyond this number waits as a
            spare.

    Attributes:
        on_wait: a function of the progress of the round. `next_rendezvous` calls it before each wait. None: no call.
    """

    on_wait: Callable[[Progress], object] | None = None

    def __init__(
        self,
        settings: RendezvousSettings,
        backend: RendezvousBackend,
        store: Store,
        local_addr: str | None = None,
        *,
        owns_store: bool = False,
        late_nodes: int | None = None,
    ) -> None:
        self._settings = settings
        self._limits = Limits(settings.min_nodes, settings.max_nodes, late_nodes)
        self._backend = backend
        self._store = store
        self._owns_store = owns_store
        self._address = local_addr or system.hostname()
        self._local_id = next(_local_ids)
        name = f"{escape_word(self._address)}_{system.os.getpid()}_{self._local_id}_{system.random_bytes(6).hex()}"
        view = PrefixStore(f"fscoord.rendezvous.{settings.run_id}", store)
        self._shared = SharedState(backend, view)
        self._keep_alive = KeepAliveThread(self._shared, view.clone(), name, settings)
        self._node = self._keep_alive.node
        self._life: int | None = None
        self._returned: int | None = None
        self._participants: tuple[str, ...] = ()  # of the round `_returned`
        self._is_shut_down = False
        weakref.finalize(self, self._keep_alive.stop_soon)

    def __repr__(self) -> str:
        state = "shut down" if self._is_shut_down else f"round {self._returned}"
        return shown(self, self._store, key_bytes(self._settings.run_id), state)

    @classmethod
    def from_backend(
        cls: type[H],
        run_id: str,
        store: Store,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: Timeout = 5,
        keep_alive_max_attempt: int = 3,
    ) -> H:
        """Create a handler from torch's arguments, which become its `settings`: a `RendezvousSettings`."""
        settings = RendezvousSettings(
            run_id, min_nodes, max_nodes, timeout, keep_alive_interval, keep_alive_max_attempt
        )
        return cls(settings, backend, store, local_addr)

    @property
    def settings(self) -> RendezvousSettings:
        """The settings of this handler."""
        return self._settings

    @property
    def node(self) -> str:
        """The unique name of this node: its address, its pid, the number of the handler in the process, and a nonce."""
        return self._node

    @property
    def address(self) -> str:
        """The address by which other nodes reach this node."""
        return self._address

    @property
    def life(self) -> int:
        """The number of this job among the jobs with this run id, counted from 0; -1 before this node has joined."""
        return -1 if self._life is None else self._life

    @property
    def round(self) -> int:
        """The number of the round that `next_rendezvous` returned last, counted over all jobs; -1 before the first."""
        return -1 if self._returned is None else self._returned

    @property
    def participants(self) -> tuple[str, ...]:
        """The names of the nodes in the round that `next_rendezvous` returned last, in the order of their ranks."""
        return self._participants

    def get_backend(self) -> str:
        return self._backend.name

    def get_run_id(self) -> str:
        return self._settings.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self._record("comes to the rendezvous", NodeState.INIT)
        span = tracing.begin("rendezvous", self.get_run_id(), "", None, "node", self._node)
        try:
            info = self._next()
        except RendezvousGracefulExit:
            tracing.end(span, "spare")
            self._record("was spare, and leaves", NodeState.SUCCEEDED)
            raise
        except BaseException as error:
            tracing.end(span, tracing.outcome_of(error))
            if not isinstance(error, Exception):
                raise
            self._record(f"{type(error).__name__}: {error}", NodeState.FAILED)
            raise
        tracing.end(span, "passed", "round", self._returned, "node_rank", info.rank, "nodes", info.world_size)
        address = f"{info.bootstrap_store_info.master_addr}:{info.bootstrap_store_info.master_port}"
        message = f"has rank {info.rank} of {info.world_size} in round {self._returned}"
        self._record(message, NodeState.RUNNING, address, info.rank)
        return info

    def is_closed(self) -> bool:
        if self._is_shut_down:
            return True
        state, _ = self._shared.read()
        return state.closed or not self._is_mine(state)

    def set_closed(self) -> None:
        self._shared.change(lambda state: replace(state, closed=True) if self._is_mine(state) else state)

    def num_nodes_waiting(self) -> int:
        """Return how many waiting nodes would take part in another round.

        If the round of this node is over, the number is at least 1. So an agent that polls this number calls
        `next_rendezvous` again.
        """
        state, _ = self._shared.read()
        if not state.complete:
            count = len(state.participants) + len(state.waiting)
        else:
            count = min(len(state.waiting), self._limits.max_nodes - len(state.participants))
        return max(1, count) if self._returned is not None and not self._is_current(state) else count

    def is_current(self) -> bool:
        """Return whether the round that `next_rendezvous` returned last is the present round and is not broken."""
        return self._is_current(self._shared.read()[0])

    def lost_nodes(self) -> list[str]:
        """Return the participants of this node's round that have died or left since the round began."""
        present = self._shared.read()[0].present
        return [node for node in self._participants if node not in present]

    def leave(self) -> None:
        """Remove this node from the rendezvous. The other nodes continue without this node in another round."""
        self._shared.change(self._without_this)

    def depart(self) -> bool:
        """Remove this node and release the handler's resources. Unlike `shutdown`, do not close the rendezvous."""
        return self._end(self._without_this)

    def shutdown(self) -> bool:
        """Close the rendezvous, remove this node, and release the handler's resources. A second call does nothing.

        Returns:
            Whether all steps succeeded. Failures are logged.
        """
        return self._end(lambda state: close(state, self._node) if self._is_mine(state) else state)

    def _end(self, rule: Callable[[State], State]) -> bool:
        if self._is_shut_down:
            return True
        self._is_shut_down = True

        def change() -> None:
            limit = min(to_seconds(self._settings.timeout.close), to_seconds(self._store.timeout))
            with store_errors_as_rendezvous(), store_timeout(self._store, limit):
                self._shared.change(rule)

        ended = [self._try(change), self._try(self._keep_alive.stop)]
        if self._owns_store:
            ended.append(self._try(self._store.close))
        self._record("has shut down", NodeState.SUCCEEDED if all(ended) else NodeState.FAILED)
        return all(ended)

    def __enter__(self: H) -> H:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _is_mine(self, state: State) -> bool:
        return self._life in (None, state.life)

    def _is_current(self, state: State) -> bool:
        return state.complete and state.round == self._returned

    def _without_this(self, state: State) -> State:
        return evict(state, [self._node])

    def _try(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except FscoordError as error:
            logger(__name__).warning("the rendezvous %r did not end cleanly: %s", self.get_run_id(), error)
            return False
        return True

    def _next(self) -> RendezvousInfo:
        if self._is_shut_down:
            raise RendezvousClosedError(
                f"this handler of the rendezvous {self.get_run_id()!r} was shut down; create another one to take part"
                " again"
            )
        self._keep_alive.start()
        deadlines = RoundDeadlines(self._limits, self._settings.timeout)
        awaited = Awaited(RENDEZVOUS, self.get_run_id(), self._limits.min_nodes)
        slow_wait = SlowWaitLogger(__name__, lambda: self._waits_for(self._shared.read()[0]), awaited=awaited)
        self._shared.slow_logger = slow_wait
        try:
            while True:
                state = self._agree(deadlines, slow_wait)
                info = self._prepare(state, deadlines, slow_wait)
                if info is not None:
                    self._returned, self._participants = state.round, state.participants
                    return info
                if deadlines.is_over(state, self._node):
                    raise RendezvousTimeoutError(self._too_few(state))
        except (RendezvousTimeoutError, RendezvousClosedError, RendezvousGracefulExit, KeyboardInterrupt, SystemExit):
            self._try(self.leave)  # the other nodes must not wait for this one
            raise
        finally:
            self._shared.slow_logger = None
            slow_wait.end()

    def _agree(self, deadlines: RoundDeadlines, slow_wait: SlowWaitLogger) -> State:
        """Join the rendezvous, wait for a complete round with this node, and return the state of the round."""
        state, token = self._shared.read()
        writes, backoff = 0, Backoff(math.inf)
        waited_for: State | None = None
        while True:
            alive, dead = self._keep_alive.check(state)
            if self._node in state.present:
                self._life = state.life
            now = int(system.time.time())
            observed = Observed(dead, alive, self._life, self._returned, *deadlines.observe(state), now)
            decision = decide(state, self._node, self._limits, observed)
            if decision.verdict is Verdict.WAIT and self._must_know_all(decision, state, observed, waited_for):
                alive, dead = self._keep_alive.check(state, everyone=True)
                observed = replace(observed, dead=observed.dead | dead, alive=alive)
                decision = decide(state, self._node, self._limits, observed)
            # A first write is allowed even if the deadline has passed. A failed write is not repeated after it.
            if decision.verdict is Verdict.WRITE and not (writes and deadlines.is_over(state, self._node)):
                writes += 1
                began = system.time.monotonic()
                state, token, is_written = self._shared.write(decision.state, token)
                if not is_written:
                    backoff.pause()
                    state, token = self._read_apart(state, token, system.time.monotonic() - began, deadlines)
                continue
            if decision.verdict is Verdict.JOINED:
                return state
            if decision.verdict is Verdict.CLOSED:
                raise RendezvousClosedError(
                    f"the rendezvous {self.get_run_id()!r} has been closed; start a new one with this id after all its"
                    " nodes have ended, or use another id"
                )
            if decision.verdict is Verdict.REFUSED:
                raise RendezvousError(self._held(decision.state))
            if decision.verdict is Verdict.SPARE:
                raise RendezvousGracefulExit(f"the rendezvous {self.get_run_id()!r} closed without needing this node")
            if deadlines.is_over(state, self._node):
                raise RendezvousTimeoutError(self._too_few(state, backoff.tries))
            slow_wait.warn_if_due(lambda: self._waits_for(state))  # noqa: B023 - it is called at once
            if self.on_wait is not None:
                self.on_wait(deadlines.progress(state))
            self._wait(state, deadlines)
            waited_for = state
            state, token = self._shared.read()
            writes, backoff = 0, Backoff(math.inf)

    def _read_apart(
        self, state: State, token: Token | None, took: float, deadlines: RoundDeadlines
    ) -> tuple[State, Token | None]:
        """Pause for a random time after a failed compare-and-set, then read and return the state and its token.

        The compare-and-set took `took` seconds. If `took` is short, return `state` and `token` without a pause. A long
        compare-and-set shows that many nodes wait for the store's lock. If all these nodes repeated their writes at
        once, only one write would succeed.
        """
        if took < SLOW_WRITE_S:
            return state, token
        system.time.sleep(min(random.uniform(0, SPREAD * took), deadlines.left()))
        return self._shared.read()

    def _wait(self, state: State, deadlines: RoundDeadlines) -> None:
        """Wait for a change of `state` to which this node may have to react, or until the next poll.

        Each node that joins changes the state. Only the first participant reads the state after each of these changes.
        If every participant read the state, the number of requests would grow with the square of the number of nodes.
        For the same reason, the other participants poll less often in a round of many nodes.
        """
        if self._node in state.participants[1:] and not (state.complete or state.closed):
            pause = POLL_INTERVAL_S * len(state.participants) / POLLS_PER_S
            longest = min(max(POLL_INTERVAL_S, pause), SETTLED_POLL_S)
            self._shared.wait_until_settled(state, deadlines.left(longest))
        else:
            self._shared.wait(state, deadlines.left())

    def _must_know_all(self, decision: Decision, state: State, observed: Observed, waited_for: State | None) -> bool:
        """Return whether this node must probe all other nodes, because the result may change its `decision`.

        Usually the first participant completes the round. Any other node probes only if the state did not change during
        a wait. If every node probed, the number of probes would grow with the square of the number of nodes.
        """
        is_first = state.participants[:1] == (self._node,)
        return (is_first or state == waited_for) and decision != decide(
            state, self._node, self._limits, replace(observed, alive=state.present)
        )

    def _too_few(self, state: State, refused: int = 0) -> str:
        limit = to_seconds(self._settings.timeout.join)
        hint = f". The backend {self.get_backend()!r} refused the last {refused} writes of the state" if refused else ""
        return (
            f"no round of the rendezvous {self.get_run_id()!r} within {limit:g} s: {self._needs(state)}; start the"
            f" others with the same endpoint and id{hint}{self._store._closer_look()}"
        )

    def _held(self, state: State) -> str:
        path = getattr(self._store, "path", None)
        place = f" at {path}" if path else ""
        gmtime = system.time.gmtime(state.since)
        begun = f"has run since {system.time.strftime('%Y-%m-%d %H:%M:%S UTC', gmtime)}" if state.since else "begins"
        nodes = f"{len(state.present)} node" + "s" * (len(state.present) > 1)
        return (
            f"the rendezvous {self.get_run_id()!r}{place} belongs to a job that {begun} on {nodes}"
            f" ({short_names(sorted(state.present))}) and has no place for this node: wait until that job has ended, or"
            " start this node with another endpoint or id. To let nodes join a running job, start all its nodes with"
            f" the same --rdzv-id and with --nnodes MIN:MAX{self._store._closer_look()}"
        )

    def _waits_for(self, state: State) -> str:
        return f"the rendezvous {self.get_run_id()!r}: {self._needs(state)}"

    def _needs(self, state: State) -> str:
        least, most = self._limits.min_nodes, self._limits.max_nodes
        count = f"{least}" if least == most else f"{least} to {most}"
        others = sorted(state.present - {self._node})
        own = short_names([self._node])
        found = f"this one ({own}) and {short_names(others[:16])}" if others else f"only this one ({own})"
        return f"it needs {count} nodes, and has {found}"

    def _prepare(self, state: State, deadlines: RoundDeadlines, slow_wait: SlowWaitLogger) -> RendezvousInfo | None:
        """Publish or read the address of rank 0, and return the result of the round; None if the round was broken."""
        rank, first = state.participants.index(self._node), state.participants[0]
        store = PrefixStore(f"torch.rendezvous.{self.get_run_id()}.{state.round}", self._store)
        while True:
            try:
                with store_errors_as_rendezvous():
                    address = RendezvousStoreInfo.build(rank, store, self._address, timeout=ADDRESS_POLL_S)
                return RendezvousInfo(store, rank, len(state.participants), address)
            except RendezvousConnectionError as error:
                if not isinstance(error.__cause__, StoreTimeoutError):
                    raise
            now, _ = self._shared.read()
            if now.round != state.round:
                return None
            if first in now.left:
                raise RendezvousClosedError(f"the rendezvous {self.get_run_id()!r} has been closed by rank 0 ({first})")
            if deadlines.is_over(now, self._node):
                raise RendezvousTimeoutError(
                    f"rank 0 ({first}) of the rendezvous {self.get_run_id()!r} has not published its address in time;"
                    " check this node"
                )
            slow_wait.warn_if_due(lambda: f"the address of rank 0 ({first}) of rendezvous {self.get_run_id()!r}")

    def _record(self, message: str, node_state: NodeState, address: str = "", rank: int | None = None) -> None:
        name = f"{type(self).__name__}.{node_state.value.lower()}"
        text = f"the node {self._node} {message}"
        construct_and_record_rdzv_event(
            self.get_run_id(), text, node_state, name, self._address, None, address, self._local_id, rank
        )


class RoundDeadlines:
    """Tracks the deadlines of one call of `next_rendezvous` by this node's own clock."""

    def __init__(self, limits: Limits, timeout: RendezvousTimeout) -> None:
        self._limits = limits
        self._join = to_seconds(timeout.join)
        self._last_call = to_seconds(timeout.last_call)
        self._started = system.time.monotonic()
        self._deadline = self._started + self._join
        self._forming: tuple[int, float] | None = None
        self._enough: tuple[int, float] | None = None

    def observe(self, state: State) -> tuple[bool, bool]:
        """Return `Observed.is_last_call_over` and `Observed.is_reserve_over` for `state`.

        The last call is a time in which more nodes may join a round that has enough nodes. The last call begins when
        the round has ``min_nodes`` nodes. The reserve is a time in which places are kept for nodes of the previous
        round and for waiting nodes. The reserve begins with the round. Both times last `RendezvousTimeout.last_call`.
        """
        now = system.time.monotonic()
        has_enough = len(state.participants) >= self._limits.min_nodes
        self._forming = _mark(self._forming, state.round, now, not state.complete)
        self._enough = _mark(self._enough, state.round, now, not state.complete and has_enough)
        return self._is_past(self._enough, now), self._is_past(self._forming, now)

    def is_over(self, state: State, node: str) -> bool:
        """Return whether the call of `node` has timed out. A spare node never times out."""
        now = system.time.monotonic()
        if state.complete and node in state.waiting and len(state.participants) >= self._limits.max_nodes:
            self._deadline = now + self._join
        return now >= self._deadline

    def left(self, longest: float = POLL_INTERVAL_S) -> float:
        """Return how many seconds remain until the next deadline, at most `longest`."""
        now = system.time.monotonic()
        marks = [mark[1] + self._last_call for mark in (self._forming, self._enough) if mark is not None]
        ends = [end - now for end in (*marks, self._deadline) if end > now]
        return max(0.0, min([longest, *ends]))

    def progress(self, state: State) -> Progress:
        """Return the progress of the round of `state`."""
        now = system.time.monotonic()
        end = self._deadline if self._enough is None else min(self._deadline, self._enough[1] + self._last_call)
        least, most = self._limits.min_nodes, self._limits.max_nodes
        left = max(0.0, end - now)
        return Progress(len(state.participants), least, most, now - self._started, left, state.complete)

    def _is_past(self, mark: tuple[int, float] | None, now: float) -> bool:
        return mark is not None and now >= mark[1] + self._last_call


def _mark(mark: tuple[int, float] | None, number: int, now: float, holds: bool) -> tuple[int, float] | None:
    """Return the number of the round and the time at which a condition began to hold, or None if it does not hold.

    Args:
        mark: the result of the previous call for this condition.
        number: the number of the present round.
        now: the present time.
        holds: whether the condition holds now.
    """
    if not holds:
        return None
    return mark if mark is not None and mark[0] == number else (number, now)
