"""`KeepAliveThread` sends the keep-alives of this node, and evicts dead nodes from the state of the rendezvous.

If the store detects dead sessions (`~fscoord.Store.has_liveness`), each node has a session in the store, and writes no
keep-alives. The name of the node ends in the number of its session. On any other store, a keep-alive increments a key
of the node, and a `FailureDetector` watches the keys of the other nodes.

**The ring.** With sessions, a node does not probe all other nodes, because the number of probes would grow with the
square of the number of nodes. The sorted names of the nodes form a ring, and each node watches its next `NEIGHBOURS`
living successors, as in the failure detectors of Chord and of systems derived from SWIM. At each tick (once in each
keep-alive interval) a node probes its successors in order. The tick ends when the node has found `NEIGHBOURS` living
successors, or has probed all other nodes. So
the nearest living predecessor of a dead node finds the death within one keep-alive interval, even if many nodes die at
once. A stopped node (SIGSTOP) counts as living, but does not tick. Each node has several watchers, so that one stopped
watcher does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord.errors import RendezvousError
from fscoord.rendezvous.backend import POLL_INTERVAL_S, SharedState, latest_change, store_errors_as_rendezvous
from fscoord.rendezvous.parameters import RendezvousSettings
from fscoord.rendezvous.state import State, evict
from fscoord.store import Store

NEIGHBOURS = 3
"""How many living successors a node watches, in the ring of the sorted names of the nodes."""

TICKS_PER_READ = 6
"""The state is read at least once in this many ticks (keep-alive intervals), because a node that changed the state may
have died before it set the ``changed`` key."""

_SESSION = re.compile(r"_s([0-9]{1,19})$")


class KeepAliveThread:
    """Sends the keep-alives of one node, and evicts dead nodes, in a thread.

    Args:
        shared: the state of the rendezvous.
        store: a handle that only this object uses. `stop` closes it.
        name: the name of the node. If the store has sessions, the number of the node's session is appended.
        settings: the settings of the rendezvous, with the interval and the time limits of keep-alives.

    Attributes:
        node: the name of the node.
    """

    def __init__(self, shared: SharedState, store: Store, name: str, settings: RendezvousSettings) -> None:
        self._shared = shared
        self._store = store
        self._limit = settings.timeout.heartbeat.total_seconds()
        self._interval = settings.keep_alive_interval.total_seconds()
        self._detector = FailureDetector(self._interval, settings.keep_alive_max_attempt)
        self._renew()
        self._is_inherited = False
        self._asked: dict[str, float] = {}  # when each node that is not known alive was last probed
        self._probed: set[str] = set()  # the nodes that the last call of `_probe_ring` probed
        self._state: State | None = None  # the latest state that this node has read
        self._ticks_since_read = 0
        _all.add(self)
        with store_errors_as_rendezvous():
            self._has_sessions = store.has_liveness
            # Unlike a keep-alive, this call has the timeout of the store. A late keep-alive is sent again, but a node
            # that is not registered takes part in no round. If many nodes open a log at once, each waits for its turn.
            self.node = f"{name}_s{store.register()}" if self._has_sessions else name
        store.set_timeout(settings.timeout.heartbeat)

    def _renew(self) -> None:
        self._mutex = system.mutex()
        self._over = system.threading.Event()
        self._thread: system.threading.Thread | None = None

    def after_fork(self) -> None:
        """Reset the object in a forked child. The node belongs to the parent, and the child has no thread."""
        self._renew()
        self._over.set()
        self._is_inherited = True

    def start(self) -> None:
        """Send the first keep-alive, and start the thread that sends later keep-alives. A second call does nothing."""
        if self._thread is None and not self._over.is_set():
            self._beat()
            with store_errors_as_rendezvous():
                self._thread = system.start_thread("fscoord-keep-alive", self._run)

    def stop_soon(self) -> None:
        """Tell the thread to end, and do not wait for its end."""
        system.process_epoch()  # after a fork in C, this call runs `after_fork` in the child
        self._over.set()

    def stop(self) -> None:
        """End the thread, delete the keep-alive key of this node, and close the store. A forked child keeps the key."""
        self.stop_soon()
        if self._thread is not None:
            self._thread.join()
        try:
            if not (self._has_sessions or self._is_inherited):
                with store_errors_as_rendezvous():
                    self._store.delete_key(f"beat/{self.node}")
        finally:
            self._store.close()

    def check(self, state: State, *, everyone: bool = False) -> tuple[frozenset[str], frozenset[str]]:
        """Record the nodes in `state`, and probe some nodes. Return the nodes known alive and the nodes known dead.

        A node that is known alive is not probed. Without `everyone`, the probes end when the next `NEIGHBOURS` living
        successors in the ring of sorted names are known. Each node is probed at most once in `POLL_INTERVAL_S`.
        """
        system.process_epoch()
        with self._mutex:
            self._observe_members(state)
            now = system.time.monotonic()
            unknown = state.present - self._detector.alive - {self.node}
            self._asked = {node: at for node, at in self._asked.items() if node in unknown}
            if not self._has_sessions or not unknown:
                return self._detector.alive, frozenset()
            due = {node for node in unknown if now >= self._asked.get(node, -POLL_INTERVAL_S) + POLL_INTERVAL_S}
            successors = self._successors(state.present)
            dead = self._probe_ring(successors, due, len(successors) if everyone else NEIGHBOURS)
            self._asked.update(dict.fromkeys(due & self._probed, now))
            return self._detector.alive, dead

    def tick(self, now: float) -> None:
        """Send one keep-alive, and evict dead nodes. `now` is the time of the monotonic clock, in seconds."""
        self._beat()
        state = self._latest_state()
        beats = {} if self._has_sessions else self._beats()
        with self._mutex:
            self._observe_members(state)
            if self._has_sessions:
                successors = self._successors(state.present)
                dead = self._probe_ring(successors, set(successors), NEIGHBOURS)
            else:
                dead = self._detector.check(now, state.present - {self.node}, beats)
        if dead and self._has_sessions:  # another node may have evicted them since
            state, _ = self._shared.read()
            dead &= state.present
        if dead:
            names = ", ".join(sorted(dead))  # other programs may have written names that can't be encoded
            logger(__name__).warning("nodes found dead: %s", names.encode("utf-8", "backslashreplace").decode())
            self._shared.change(lambda found: evict(found, dead & found.present), self._limit)
            if not self._has_sessions:
                with store_errors_as_rendezvous():
                    for node in dead:
                        self._store.delete_key(f"beat/{node}")

    def _latest_state(self) -> State:
        """Return the latest state. If the ``changed`` keys show no later state, return the state that was read last.

        On a network mount, the check of the keys costs one request, and a read of the state costs two.
        """
        known = self._state
        self._ticks_since_read += 1
        if known is not None and self._has_sessions and self._ticks_since_read < TICKS_PER_READ:
            with store_errors_as_rendezvous():
                if latest_change(self._store) == known.sequence:
                    return known
        self._ticks_since_read = 0
        return self._shared.read()[0]

    def _observe_members(self, state: State) -> None:
        """Record the nodes in `state`, unless another thread has already recorded a later state."""
        if self._state is None or state.sequence >= self._state.sequence:
            self._state = state
            self._detector.observe_members(state.present)

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            try:
                self.tick(system.time.monotonic())
            except RendezvousError as error:
                if not self._over.is_set():
                    logger(__name__).warning("a keep-alive of %s failed: %s", self.node, error)

    def _successors(self, present: frozenset[str]) -> list[str]:
        """Return the other nodes, sorted by name in a ring that begins after this node."""
        ring = sorted(present | {self.node})
        place = ring.index(self.node)
        return ring[place + 1 :] + ring[:place]

    def _probe_ring(self, successors: list[str], due: set[str], wanted: int) -> frozenset[str]:
        """Probe `successors` in order until `wanted` living nodes are found. Return the dead nodes.

        A node that is not in `due` is not probed, and counts as living. A node whose state is unknown counts as neither
        living nor dead.
        """
        dead: set[str] = set()
        self._probed = set[str]()
        living, size, rest = 0, wanted, list(successors)
        while rest and living < wanted:
            batch, rest = rest[:size], rest[size:]
            asked = [node for node in batch if node in due]
            self._probed.update(asked)
            with store_errors_as_rendezvous():
                states = self._store._session_states(map(_session, asked)) if asked else {}
            found = {node: states.get(_session(node), "unknown") for node in asked}
            self._detector.mark_alive(node for node, verdict in found.items() if verdict == "yes")
            dead.update(node for node, verdict in found.items() if verdict == "no")
            living += sum(found.get(node, "yes") == "yes" for node in batch)
            size = 2 * size if living == 0 else wanted - living  # doubling needs few calls if a whole host has died
        return frozenset(dead)

    def _beat(self) -> None:
        if not self._has_sessions:
            with store_errors_as_rendezvous():
                self._store.add(f"beat/{self.node}", 1)

    def _beats(self) -> dict[str, bytes]:
        with store_errors_as_rendezvous():
            keys = self._store.list_keys("beat/")
            values = self._store.multi_get(keys)  # fails if a key has been deleted meanwhile; the next tick is soon
        return {key[len("beat/") :]: value for key, value in zip(keys, values, strict=True)}


_all = system.reset_in_child("keepers", KeepAliveThread.after_fork)


def _session(node: str) -> int:
    """Return the session number at the end of the name `node`; 0 if the name has none. No session has the number 0."""
    match = _SESSION.search(node)
    return int(match[1]) if match else 0


class _Peer:
    def __init__(self, now: float, beat: object) -> None:
        self.beat = beat
        self.since = now
        self.misses = 0


class FailureDetector:
    """Finds living and dead nodes by whether their keep-alive counters change. Does no I/O.

    Clocks of other hosts are not used. A node is alive if its counter was seen to change. A node is dead if `attempts`
    checks, at least `interval` seconds apart, found its counter unchanged. A long time without checks does not make a
    node dead. Otherwise a process that continues after a long stop would take every other node for dead.

    Args:
        interval: the least time between two checks that count, in seconds.
        attempts: a node is dead after this number of checks without a change.
    """

    def __init__(self, interval: float, attempts: int) -> None:
        self._interval = interval
        self._attempts = attempts
        self._known: frozenset[str] | None = None
        self._peers: dict[str, _Peer] = {}
        self._alive: set[str] = set()

    @property
    def alive(self) -> frozenset[str]:
        """The nodes that were seen to join, or whose counter was seen to change, except nodes that died later."""
        return frozenset(self._alive)

    def observe_members(self, present: frozenset[str]) -> None:
        """Record which nodes are `present`. A node that was not present in the previous call has just joined."""
        if self._known is not None:
            self._alive |= present - self._known
            self._alive &= present
        self._known = present

    def mark_alive(self, nodes: Iterable[str]) -> None:
        """Record that `nodes` are alive, because the caller has other evidence."""
        self._alive.update(nodes)

    def check(self, now: float, nodes: Iterable[str], beats: Mapping[str, object]) -> frozenset[str]:
        """Return the dead nodes among `nodes`.

        Args:
            now: the time of a monotonic clock, in seconds.
            nodes: the nodes to check.
            beats: maps nodes to their keep-alive counters. The values are only tested for equality.
        """
        wanted = frozenset(nodes)
        dead = set()
        for node in wanted:
            peer = self._peers.setdefault(node, _Peer(now, beats.get(node)))
            if beats.get(node) != peer.beat:
                self._peers[node] = _Peer(now, beats.get(node))
                self._alive.add(node)
            elif now - peer.since >= self._interval:
                peer.since = now
                peer.misses += 1
            if self._peers[node].misses >= self._attempts:
                dead.add(node)
        self._alive -= dead
        self._peers = {node: peer for node, peer in self._peers.items() if node in wanted}
        return frozenset(dead)
