"""`Keeper`: shows that this node lives, and takes the dead out of the state, from a thread of its own."""

from __future__ import annotations

from fscoord import _system as system
from fscoord._logger import logger
from fscoord.errors import RendezvousError
from fscoord.rendezvous.pulse import Pulse
from fscoord.rendezvous.settings import RendezvousSettings
from fscoord.rendezvous.shared import SharedState, connection
from fscoord.rendezvous.state import State, without
from fscoord.store import Store

__all__ = ["Keeper"]


class Keeper:
    """Counts up this node's keep-alive at every interval, and looks at those of the others.

    Args:
        shared: the state.
        store: a handle of the keeper's own, for the counters; it is closed at the end.
        node: this node.
        settings: how often, and how patient.
    """

    def __init__(self, shared: SharedState, store: Store, node: str, settings: RendezvousSettings) -> None:
        self._shared = shared
        self._store = store
        self._node = node
        self._interval = settings.keep_alive_interval.total_seconds()
        self._pulse = Pulse(self._interval, settings.keep_alive_max_attempt)
        self._mutex = system.threading.Lock()
        self._over = system.threading.Event()
        self._thread: system.threading.Thread | None = None
        store.set_timeout(settings.timeout.heartbeat)

    def start(self) -> None:
        """Show the first sign of life, and go on in a thread; again is harmless."""
        if self._thread is None and not self._over.is_set():
            self._beat()
            self._thread = system.threading.Thread(target=self._run, name="fscoord-keep-alive", daemon=True)
            self._thread.start()

    def stop_soon(self) -> None:
        """Have the thread end, without waiting for it."""
        self._over.set()

    def stop(self) -> None:
        """End the thread, remove the sign of life, and give back the store."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        try:
            with connection():
                self._store.delete_key(f"beat/{self._node}")
        finally:
            self._store.close()

    def look(self, state: State) -> frozenset[str]:
        """Take note of who is in `state`, and return who is known to live."""
        with self._mutex:
            self._pulse.meet(state.present)
            return self._pulse.alive

    def turn(self, now: float) -> None:
        """Show a sign of life, and take out of the state whoever showed none; `now` is the time, in seconds."""
        self._beat()
        state, _ = self._shared.read()
        beats = self._beats()
        with self._mutex:
            self._pulse.meet(state.present)
            dead = self._pulse.look(now, state.present - {self._node}, beats)
        if dead:
            logger(__name__).warning("dead, by their keep-alives: %s", ", ".join(sorted(dead)))
            self._shared.change(lambda found: without(found, dead & found.present))
            with connection():
                for node in dead:
                    self._store.delete_key(f"beat/{node}")

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            try:
                self.turn(system.time.monotonic())
            except RendezvousError as error:
                if not self._over.is_set():
                    logger(__name__).warning("a keep-alive of %s failed: %s", self._node, error)

    def _beat(self) -> None:
        with connection():
            self._store.add(f"beat/{self._node}", 1)

    def _beats(self) -> dict[str, int]:
        with connection():
            keys = self._store.list_keys("beat/")
            values = self._store.multi_get(keys)  # who deletes one meanwhile makes this look fail, and the next is soon
        return {key[len("beat/") :]: int(value) for key, value in zip(keys, values, strict=True)}
