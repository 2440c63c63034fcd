"""A process for test_fork_locks: it makes every kind of object, one thread takes all their locks, and it forks.

It is one of its own so that the locks that modules make when they are imported are counted, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any

taken: list[Any] = []
"""Every lock that the package made so far, or a weak reference to what holds one."""


def watch_locks() -> None:
    """Have every lock noted that a module of the package makes."""
    for name in ("Lock", "RLock", "Event"):
        setattr(threading, name, noting(getattr(threading, name)))


def noting(make: Any) -> Any:
    def call(*arguments: Any) -> Any:
        lock = make(*arguments)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("fscoord"):
            taken.append(lock._cond if hasattr(lock, "_cond") else lock)  # an event's lock is its condition's
        return lock

    return call


watch_locks()

from faults.forking import BYSTANDERS, HANG_S, Gate, fork_in_c  # noqa: E402 - the locks come first

from fscoord import EtcdStore, FileStore, HashStore, PrefixStore, StoreError, StoreTimeoutError, store_timeout  # noqa: E402
from fscoord.aio import AsyncStore  # noqa: E402
from fscoord.rendezvous import RendezvousParameters, get_rendezvous_handler  # noqa: E402
from fscoord.stores.tcp.connections import Connections  # noqa: E402
from fscoord.stores.tcp.wire import Channel  # noqa: E402
from fscoord.testing import FaultyStore  # noqa: E402


class Things:
    """Everything that a process may have when it forks."""

    def __init__(self, path: str) -> None:
        self.stores = [
            FileStore(path, timeout=HANG_S),
            FileStore(path, timeout=HANG_S, coherence="locked"),
            HashStore(timeout=HANG_S),
            HashStore.named("name", timeout=HANG_S),
            FaultyStore(HashStore(timeout=HANG_S)),
        ]
        self.stores.append(PrefixStore("prefix", self.stores[0]))
        self.plan = self.stores[4].delays("set", seconds=0.0)
        self.plan.__enter__()
        self.handler = get_rendezvous_handler(
            RendezvousParameters("c10d", "", "job", 1, 1, store_type="file", path=path + ".rendezvous")
        )
        self.handler.next_rendezvous()
        self.etcd = EtcdStore("http://127.0.0.1:1", "prefix", timeout=0.1)
        self.server = socket.create_server(("127.0.0.1", 0))  # the kernel accepts for it, and nobody answers
        self.connections = Connections(*self.server.getsockname())
        self.owners: dict[Channel, int] = {}
        self.tasks = [AsyncStore(store) for store in self.stores]
        self.use()

    def use(self) -> None:
        """Use all of it."""
        for number, store in enumerate(self.stores):
            store.set(f"k{number}", "v")
            assert store.get(f"k{number}") == b"v"
            store.queue_push("q", "1")
            assert store.queue_pop("q") == b"1"
            with store_timeout(store, 0.01):
                try:
                    store.get("never")
                except StoreTimeoutError:
                    pass
            store.list_keys()
            store.dead_sessions([])
            clone = store.clone()
            clone.check(["k"])
            clone.close()
        asyncio.run(self.use_tasks())
        assert self.handler.num_nodes_waiting() >= 0
        owner = self.connections.call(
            lambda channel: self.owners.setdefault(channel, os.getpid()), self.connections.deadline(HANG_S)
        )
        assert owner == os.getpid(), "two processes would mix their answers"
        try:
            self.etcd.set("k", "v")
        except StoreError:
            pass

    async def use_tasks(self) -> None:
        for number, store in enumerate(self.tasks):
            await store.set("task", "v")
            assert await store.get("task") == b"v"
            try:
                await store.wait(["never"], 0.01)
            except StoreTimeoutError:
                pass
            assert await store.check([f"k{number}"])

    def close(self) -> None:
        """Close all of it."""
        for store in self.tasks:
            asyncio.run(store.close())
        for store in self.stores:
            store.close()
        self.handler.shutdown()
        self.etcd.close()
        self.connections.close()


def take_all(gate: Gate, counts: list[int]) -> None:
    """Take every lock there is that can be had, as a thread that is in the middle of something has it."""
    mine = []
    for lock in taken:
        if lock.acquire(blocking=False):
            mine.append(lock)
    for pool in things.etcd._client._pools:  # the locks of urllib3's queues
        pool.pool.mutex.acquire()
        mine.append(pool.pool.mutex)
    counts.append(len(mine))
    gate.wait()
    for lock in mine:
        try:
            lock.release()
        except RuntimeError:  # one that wakes a thread was released meanwhile
            pass


def in_child(how: str) -> None:
    """Use, or close, what was inherited; an end by the interpreter's own way is a part of it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(HANG_S // 2)
    try:
        things.use() if how == "use" else things.close()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if sys.argv[2] == "C":  # Python does not know that its other threads are gone, and would wait for them
        os._exit(0)
    sys.exit(0)


things = Things(sys.argv[1])


def main() -> None:
    fork = fork_in_c if sys.argv[2] == "C" else os.fork
    ends, counts, bystanders = list[int](), list[int](), Gate()
    for _ in range(BYSTANDERS):
        threading.Thread(target=bystanders.wait, daemon=True).start()
    bystanders.await_all(BYSTANDERS)
    for how in ("use", "close"):
        gate = Gate()
        thread = threading.Thread(target=take_all, args=(gate, counts), daemon=True)
        thread.start()
        gate.await_all(1)
        pid = fork()
        if not pid:
            in_child(how)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        gate.open()
        thread.join(HANG_S)
    things.use()  # the parent's are what they were
    things.close()
    print(json.dumps([ends, counts]))


main()
