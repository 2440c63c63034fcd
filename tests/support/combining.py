"""A directory of this host that counts as one that hosts share, so that the writes of its processes are combined."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from support.internals import log_of

from fscoord import FileStore
from fscoord._log import mount, opened
from fscoord._log.format import record
from fscoord._log.locking.log_lock import BASE
from fscoord._log.log import BATCH
from fscoord._log.shared import node_poller
from fscoord._log.shared.combining import station as station_module
from fscoord._log.shared.combining.batch import Batch, Write
from fscoord._log.shared.combining.combiner import Combiner
from fscoord._log.shared.combining.request import WAITING, Answer, Request, decode_request
from fscoord._log.shared.combining.station import Slot, Station
from fscoord._runtime import system
from fscoord.stores.file.operations import Operation

NODE = "node"
"""The subdirectory for the files of the host."""

HANG_S = 60
"""How long anything may take; it only bounds a hang."""


def share(directory: str, monkeypatch: Any = None) -> None:
    """Let `directory` count as NFS, for this process or for one test. The files of the host lie in `NODE`."""
    node = os.path.join(directory, NODE)
    os.makedirs(node, exist_ok=True)
    put = setattr if monkeypatch is None else monkeypatch.setattr
    if monkeypatch is None:
        os.environ.pop("XDG_RUNTIME_DIR", None)
    else:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    put(station_module, "SHARED_MEMORY", node)
    put(node_poller, "FALLBACK", node)
    put(opened, "find_mount", lambda path: mount.Mount("nfs4", directory, ("rw",)))
    put(system, "O_DIRECT", 0)
    put(system, "nfs_recovers_lost_locks", lambda: False)


def combiner_of(store: FileStore) -> Combiner:
    """Return what combines the writes of `store`."""
    combiner = store._combiner
    assert combiner is not None, "the writes of this store are not combined"
    return combiner


def station_of(store: FileStore) -> Station:
    """Return the open station of `store`, which it has once it has written."""
    return combiner_of(store)._stations["open"]


def left_behind(directory: str) -> list[str]:
    """Return the directories of stations that are left: none, once every store has been closed."""
    top = os.path.join(directory, NODE)
    return [folder for folder, *_ in os.walk(top) if folder.endswith(station_module.VERSION)]


class Thread:
    """Run `call` in a thread. `join` returns its result or raises its exception."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: list[Any] = []
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result += [self._call(), None]
        except BaseException as error:
            self._result += [None, error]

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> Any:
        self._thread.join(HANG_S)
        assert not self._thread.is_alive(), "the thread hangs"
        result, error = self._result
        if error is not None:
            raise error
        return result


def until(what: Callable[[], object]) -> None:
    """Return when `what` is true."""
    end = time.monotonic() + HANG_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.0005)


class HeldLock:
    """The log's lock, held by a third party: no writer gets it until the end of the ``with``, or `release`."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR)

    def __enter__(self) -> HeldLock:
        self._do(fcntl.F_WRLCK)
        return self

    def release(self) -> None:
        self._do(fcntl.F_UNLCK)

    def _do(self, kind: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, system.FLOCK_STRUCT.pack(kind, 0, BASE, 1, 0))

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class Seat:
    """The seat, held by one that is no leader: it claims, answers and leaves when a test says so."""

    def __init__(self, store: FileStore) -> None:
        self.station = Station(log_of(store).handle.root.key)
        taken: list[Slot] = []
        self.station.take_slot(taken)
        (self.slot,) = taken
        self._number = time.monotonic_ns()  # what it shows was never shown before

    def __enter__(self) -> Seat:
        assert self.station.try_seat(self.slot)
        self.show_life()
        return self

    def show_life(self, phase: int = WAITING) -> None:
        """Write into the seat what a leader does that is not stopped."""
        self._number += 1
        self.station.show(phase, self._number)

    def requests(self, count: int) -> list[str]:
        """Return the paths of the requests, once there are `count` of them."""
        until(lambda: len(self.station.requests()) >= count)
        return self.station.requests()

    def claim(self) -> Request:
        """Claim the oldest request, as a leader does that will never append it."""
        (path, *_) = self.requests(1)
        data = self.station.read(path)
        assert data is not None
        assert self.station.remove(path)
        request = decode_request(data)
        assert request is not None
        return request

    def tell(self, request: Request, verdict: int, result: bytes = b"", time: int = 0) -> None:
        """Answer `request`. With `time` the answer is that of another request."""
        assert self.station.tell(self.slot, request.address, Answer(time or request.time, verdict, result))

    def leave(self) -> None:
        self.slot.free()

    def __exit__(self, *_: object) -> None:
        self.leave()
        self.station.give_back(self.slot)
        self.station.close()


class AlwaysLeader:
    """A thread that has the seat all the time and serves each request at once: every other writer is a follower."""

    def __init__(self, path: str) -> None:
        self._store = FileStore(path, timeout=60)
        self._store.set("the leader has registered", "1")
        self._store.delete_key("the leader has registered")
        self._is_over = False
        self.served = 0
        self._thread: Thread | None = None

    def __enter__(self) -> AlwaysLeader:
        seat = Seat(self._store)
        seat.__enter__()
        self._thread = Thread(lambda: self._serve(seat))
        return self

    def _serve(self, seat: Seat) -> None:
        combiner, log = combiner_of(self._store), log_of(self._store)
        try:
            while not self._is_over:
                seat.show_life()
                if not seat.station.requests():
                    time.sleep(0.0002)
                    continue
                write = Write(Operation(record.DELETE, b"the leader has registered"), log.writer.next_time(), 60)
                batch = Batch(log, combiner._decider, write, seat.station, seat.slot)
                log.update(BATCH, b"", batch, None, 60)  # type: ignore[arg-type]
                self.served += len(batch.claims)
                combiner._tell(seat.station, seat.slot, batch, is_written=True)
                combiner._finish(write, batch)
        finally:
            seat.__exit__()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        if self._thread is not None:
            self._thread.join()
        self._store.close()
