"""`KeepAliveThread`: sends this node's keep-alives, and evicts dead nodes from the state, from a thread of its own.

Where the store detects dead sessions (`~fscoord.Store.has_liveness`), a node is a session of the store, and its name
ends in the session's number. Nothing has to be written then. Elsewhere each node increments a key, and a
`FailureDetector` watches the keys of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from weakref import WeakSet

from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord.errors import RendezvousError
from fscoord.rendezvous.backend import POLL_INTERVAL_S, SharedState, store_errors_as_rendezvous
from fscoord.rendezvous.parameters import RendezvousSettings
from fscoord.rendezvous.state import State, evict
from fscoord.store import Store

__all__ = ["FailureDetector", "KeepAliveThread"]

_SESSION = re.compile(r"_s([0-9]{1,19})$")


class KeepAliveThread:
    """The thread that sends the keep-alives of one node, and evicts dead nodes.

    Args:
        shared: the state.
        store: a handle for this object alone, which `stop` closes.
        name: the node's name; where the store has sessions, the number of the node's session is appended.
        settings: the interval of keep-alives, and how many a node may miss.

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
        self._asked: frozenset[str] = frozenset()
        self._asked_at = 0.0
        self._observed_sequence = 0
        store.set_timeout(settings.timeout.heartbeat)
        _all.add(self)
        with store_errors_as_rendezvous():
            self._has_sessions = store.has_liveness
            self.node = f"{name}_s{store.register()}" if self._has_sessions else name

    def _renew(self) -> None:
        self._mutex = system.threading.Lock()
        self._over = system.threading.Event()
        self._thread: system.threading.Thread | None = None

    def after_fork(self) -> None:
        """Reset the object in a forked child: the node belongs to the parent, and the thread did not survive fork."""
        self._renew()
        self._over.set()
        self._is_inherited = True

    def start(self) -> None:
        """Send the first keep-alive, and start the thread that sends the others. A second call does nothing."""
        if self._thread is None and not self._over.is_set():
            self._beat()
            with store_errors_as_rendezvous():
                self._thread = system.start_thread("fscoord-keep-alive", self._run)

    def stop_soon(self) -> None:
        """Request the end of the thread, and do not wait for it."""
        system.process_epoch()  # after a fork in C, this call runs `after_fork` in the child
        self._over.set()

    def stop(self) -> None:
        """End the thread, delete this node's keep-alive key, and close the store. A forked child only closes it."""
        self.stop_soon()
        if self._thread is not None:
            self._thread.join()
        try:
            if not (self._has_sessions or self._is_inherited):
                with store_errors_as_rendezvous():
                    self._store.delete_key(f"beat/{self.node}")
        finally:
            self._store.close()

    def check(self, state: State) -> tuple[frozenset[str], frozenset[str]]:
        """Record the nodes in `state`; return those known alive and those known dead."""
        system.process_epoch()
        with self._mutex:
            self._observe_members(state)
            unknown = state.present - self._detector.alive - {self.node}
            now = system.time.monotonic()
            was_asked = unknown <= self._asked and now < self._asked_at + POLL_INTERVAL_S
            if not self._has_sessions or not unknown or was_asked:
                return self._detector.alive, frozenset()
            self._asked, self._asked_at = unknown, now
            dead = self._ask(state.present)
            return self._detector.alive, dead

    def tick(self, now: float) -> None:
        """Send one keep-alive and evict the nodes that sent none; `now` is the time in seconds, monotonic."""
        self._beat()
        state, _ = self._shared.read()
        beats = {} if self._has_sessions else self._beats()
        with self._mutex:
            self._observe_members(state)
            if self._has_sessions:
                dead = self._ask(state.present)
            else:
                dead = self._detector.check(now, state.present - {self.node}, beats)
        if dead:
            names = ", ".join(sorted(dead))  # other programs may have written names that can't be encoded
            logger(__name__).warning("dead: %s", names.encode("utf-8", "backslashreplace").decode())
            self._shared.change(lambda found: evict(found, dead & found.present), self._limit)
            self._forget(dead)

    def _observe_members(self, state: State) -> None:
        """Record the nodes in `state`, unless a later state was recorded: two threads read, and one may be late."""
        if state.sequence >= self._observed_sequence:
            self._observed_sequence = state.sequence
            self._detector.observe_members(state.present)

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            try:
                self.tick(system.time.monotonic())
            except RendezvousError as error:
                if not self._over.is_set():
                    logger(__name__).warning("a keep-alive of %s failed: %s", self.node, error)

    def _ask(self, present: frozenset[str]) -> frozenset[str]:
        """Return the nodes in `present` whose sessions are dead according to the store."""
        with store_errors_as_rendezvous():
            alive = {member.number: member.alive for member in self._store.members()}
        found = {node: alive.get(_session(node), "unknown") for node in present - {self.node}}
        self._detector.mark_alive(node for node, verdict in found.items() if verdict == "yes")
        return frozenset(node for node, verdict in found.items() if verdict == "no")

    def _beat(self) -> None:
        if not self._has_sessions:
            with store_errors_as_rendezvous():
                self._store.add(f"beat/{self.node}", 1)

    def _beats(self) -> dict[str, bytes]:
        with store_errors_as_rendezvous():
            keys = self._store.list_keys("beat/")
            values = self._store.multi_get(keys)  # fails if a key has been deleted meanwhile; the next tick is soon
        return {key[len("beat/") :]: value for key, value in zip(keys, values, strict=True)}

    def _forget(self, dead: frozenset[str]) -> None:
        if not self._has_sessions:
            with store_errors_as_rendezvous():
                for node in dead:
                    self._store.delete_key(f"beat/{node}")


_all: WeakSet[KeepAliveThread] = WeakSet()


def _after_fork_in_child() -> None:
    for thread in list(_all):
        thread.after_fork()


system.after_fork_in_child("keepers", _after_fork_in_child)


def _session(node: str) -> int:
    """Return the session number at the end of a node's name; 0, which no session has, if there is none."""
    match = _SESSION.search(node)
    return int(match[1]) if match else 0


class _Peer:
    def __init__(self, now: float, beat: object) -> None:
        self.beat = beat
        self.since = now
        self.misses = 0


class FailureDetector:
    """Decides which nodes are alive by whether their keep-alive counters change. It does no I/O.

    Clocks of other hosts are not used. A node is alive because its counter was seen to change. It is dead when a number
    of checks, an interval apart, found the counter unchanged. Checks are counted rather than time alone: a process that
    was stopped and continues later would otherwise take every other node for dead.

    Args:
        interval: the time between checks that count, in seconds.
        attempts: after how many checks without a change a node is dead.
    """

    def __init__(self, interval: float, attempts: int) -> None:
        self._interval = interval
        self._attempts = attempts
        self._known: frozenset[str] | None = None
        self._peers: dict[str, _Peer] = {}
        self._alive: set[str] = set()

    @property
    def alive(self) -> frozenset[str]:
        """The nodes that were seen to join, or whose counter was seen to change, and that have not died since."""
        return frozenset(self._alive)

    def observe_members(self, present: frozenset[str]) -> None:
        """Record the nodes that are present. A node that was absent the last time has just joined, so it is alive."""
        if self._known is not None:
            self._alive |= present - self._known
            self._alive &= present
        self._known = present

    def mark_alive(self, nodes: Iterable[str]) -> None:
        """Record that `nodes` are alive according to another source of information."""
        self._alive.update(nodes)

    def check(self, now: float, nodes: Iterable[str], beats: Mapping[str, object]) -> frozenset[str]:
        """Return those of `nodes` that are dead.

        Args:
            now: the time in seconds, of a monotonic clock.
            nodes: the nodes to check.
            beats: the nodes' counters, where they have one; only changes of the values count.
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
