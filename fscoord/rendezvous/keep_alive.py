"""`Keeper`: shows that this node lives, and takes the dead out of the state, from a thread of its own.

Where the store can tell the living from the dead (`~fscoord.Store.has_liveness`), a node is a session of the store,
whose number stands in its name, and nothing has to be written. Elsewhere each node counts up a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from weakref import WeakSet

from fscoord._runtime import system
from fscoord._runtime.logger import logger
from fscoord.errors import RendezvousError
from fscoord.rendezvous.parameters import RendezvousSettings
from fscoord.rendezvous.shared import POLL_INTERVAL_S, SharedState, connection
from fscoord.rendezvous.state import State, without
from fscoord.store import Store

__all__ = ["Keeper", "Pulse"]

_SESSION = re.compile(r"_s([0-9]{1,19})$")


class Keeper:
    """Keeps one node among the living.

    Args:
        shared: the state.
        store: a handle of the keeper's own, which it closes at the end.
        name: what the node is to be called; where there are sessions, the number of its own is added.
        settings: how often, and how patient.

    Attributes:
        node: the name of the node.
    """

    def __init__(self, shared: SharedState, store: Store, name: str, settings: RendezvousSettings) -> None:
        self._shared = shared
        self._store = store
        self._limit = settings.timeout.heartbeat.total_seconds()
        self._interval = settings.keep_alive_interval.total_seconds()
        self._pulse = Pulse(self._interval, settings.keep_alive_max_attempt)
        self._renew()
        self._is_inherited = False
        self._asked: frozenset[str] = frozenset()
        self._asked_at = 0.0
        self._met = 0
        store.set_timeout(settings.timeout.heartbeat)
        _all.add(self)
        with connection():
            self._has_sessions = store.has_liveness
            self.node = f"{name}_s{store.session}" if self._has_sessions else name

    def _renew(self) -> None:
        self._mutex = system.threading.Lock()
        self._over = system.threading.Event()
        self._thread: system.threading.Thread | None = None

    def after_fork(self) -> None:
        """In a forked child: the node is the parent's, whose thread is not here; there is nothing to keep."""
        self._renew()
        self._over.set()
        self._is_inherited = True

    def start(self) -> None:
        """Show the first sign of life, and go on in a thread; again is harmless."""
        if self._thread is None and not self._over.is_set():
            self._beat()
            with connection():
                self._thread = system.start_thread("fscoord-keep-alive", self._run)

    def stop_soon(self) -> None:
        """Have the thread end, without waiting for it."""
        system.life()  # after a fork in C it makes the child forget the thread
        self._over.set()

    def stop(self) -> None:
        """End the thread, remove the sign of life, and give back the store; in a forked child do only the latter."""
        self.stop_soon()
        if self._thread is not None:
            self._thread.join()
        try:
            if not (self._has_sessions or self._is_inherited):
                with connection():
                    self._store.delete_key(f"beat/{self.node}")
        finally:
            self._store.close()

    def look(self, state: State) -> tuple[frozenset[str], frozenset[str]]:
        """Take note of who is in `state`; return who is known to live, and who is known dead."""
        system.life()
        with self._mutex:
            self._meet(state)
            unknown = state.present - self._pulse.alive - {self.node}
            if not self._has_sessions or not unknown:
                return self._pulse.alive, frozenset()
            now = system.time.monotonic()
            if unknown <= self._asked and now < self._asked_at + POLL_INTERVAL_S:
                return self._pulse.alive, frozenset()
            self._asked, self._asked_at = unknown, now
            dead = self._ask(state.present)
            return self._pulse.alive, dead

    def turn(self, now: float) -> None:
        """Show a sign of life, and take out of the state whoever showed none; `now` is the time, in seconds."""
        self._beat()
        state, _ = self._shared.read()
        beats = {} if self._has_sessions else self._beats()
        with self._mutex:
            self._meet(state)
            if self._has_sessions:
                dead = self._ask(state.present)
            else:
                dead = self._pulse.look(now, state.present - {self.node}, beats)
        if dead:
            names = ", ".join(sorted(dead))  # of which others may have made anything; a log is made of characters
            logger(__name__).warning("dead: %s", names.encode("utf-8", "backslashreplace").decode())
            self._shared.change(lambda found: without(found, dead & found.present), self._limit)
            self._forget(dead)

    def _meet(self, state: State) -> None:
        """Take note of who is in `state`, unless a later one was seen: two threads read, and one may be late."""
        if state.sequence >= self._met:
            self._met = state.sequence
            self._pulse.meet(state.present)

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            try:
                self.turn(system.time.monotonic())
            except RendezvousError as error:
                if not self._over.is_set():
                    logger(__name__).warning("a keep-alive of %s failed: %s", self.node, error)

    def _ask(self, present: frozenset[str]) -> frozenset[str]:
        """Return who of those present is dead, by what the store knows of their sessions."""
        with connection():
            alive = {member.number: member.alive for member in self._store.members()}
        found = {node: alive.get(_session(node), "unknown") for node in present - {self.node}}
        self._pulse.know(node for node, verdict in found.items() if verdict == "yes")
        return frozenset(node for node, verdict in found.items() if verdict == "no")

    def _beat(self) -> None:
        if not self._has_sessions:
            with connection():
                self._store.add(f"beat/{self.node}", 1)

    def _beats(self) -> dict[str, bytes]:
        with connection():
            keys = self._store.list_keys("beat/")
            values = self._store.multi_get(keys)  # who deletes one meanwhile makes this look fail, and the next is soon
        return {key[len("beat/") :]: value for key, value in zip(keys, values, strict=True)}

    def _forget(self, dead: frozenset[str]) -> None:
        if not self._has_sessions:
            with connection():
                for node in dead:
                    self._store.delete_key(f"beat/{node}")


_all: WeakSet[Keeper] = WeakSet()


def _after_fork_in_child() -> None:
    for keeper in list(_all):
        keeper.after_fork()


system.after_fork_in_child("keepers", _after_fork_in_child)


def _session(node: str) -> int:
    """Return the number of the session in the name of a node; 0, which no session has, if there is none."""
    match = _SESSION.search(node)
    return int(match[1]) if match else 0


class _Patient:
    def __init__(self, now: float, beat: object) -> None:
        self.beat = beat
        self.since = now
        self.misses = 0


class Pulse:
    """What one node knows of the lives of others.

    Args:
        interval: how far looks that count are apart, in seconds.
        attempts: how many of them without a change mean death.
    """

    def __init__(self, interval: float, attempts: int) -> None:
        self._interval = interval
        self._attempts = attempts
        self._known: frozenset[str] | None = None
        self._patients: dict[str, _Patient] = {}
        self._alive: set[str] = set()

    @property
    def alive(self) -> frozenset[str]:
        """The nodes that were seen coming, or whose counter was seen to change, and that did not die since."""
        return frozenset(self._alive)

    def meet(self, present: frozenset[str]) -> None:
        """Take note of who is there: who was not there at the look before has just come, so it lives."""
        if self._known is not None:
            self._alive |= present - self._known
            self._alive &= present
        self._known = present

    def know(self, nodes: Iterable[str]) -> None:
        """Take note that `nodes` live: somebody who knows has said so."""
        self._alive.update(nodes)

    def look(self, now: float, nodes: Iterable[str], beats: Mapping[str, object]) -> frozenset[str]:
        """Return those of `nodes` that are dead.

        Args:
            now: the time, in seconds, on a clock that never goes back.
            nodes: who is to live.
            beats: their counters, as far as they have one; all that counts is whether they change.
        """
        wanted = frozenset(nodes)
        dead = set()
        for node in wanted:
            patient = self._patients.setdefault(node, _Patient(now, beats.get(node)))
            if beats.get(node) != patient.beat:
                self._patients[node] = _Patient(now, beats.get(node))
                self._alive.add(node)
            elif now - patient.since >= self._interval:
                patient.since = now
                patient.misses += 1
            if self._patients[node].misses >= self._attempts:
                dead.add(node)
        self._alive -= dead
        self._patients = {node: patient for node, patient in self._patients.items() if node in wanted}
        return frozenset(dead)
