"""The holds of a process on etcd when it is killed, closed or stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from support.places import HANG_S, start_thread

from fscoord.errors import FscoordError
from fscoord.recipes import Lock, Queue
from fscoord.stores.etcd import EtcdStore

pytestmark = pytest.mark.etcd

Open = Callable[..., EtcdStore]


def fork(open_store: Open, work: Callable[[EtcdStore], None]) -> int:
    """Return a child that does `work` with a store of its own, and then waits for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            while True:
                try:
                    work(open_store(session_ttl=1))
                    break
                except FscoordError:  # this process did not run for so long that its lease was over
                    continue
            signal.pause()
        finally:
            os._exit(1)
    return pid


def hold(store: EtcdStore) -> None:
    Lock(store, "l").acquire()
    store.set("has it", "1")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_lock_of_a_killed_or_stopped_process_is_free_when_its_lease_is_over(open_store: Open, how: int) -> None:
    store = open_store()
    pid = fork(open_store, hold)
    try:
        store.wait(["has it"], HANG_S)
        with start_thread(Lock(open_store(), "l").acquire) as waiter:
            os.kill(pid, how)
        assert waiter.result
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_item_of_a_killed_consumer_is_handed_out_again(open_store: Open) -> None:
    def take(store: EtcdStore) -> None:
        Queue(store, "q").take()
        store.set("has it", "1")

    store = open_store()
    Queue(store, "q").put("a")
    pid = fork(open_store, take)
    store.wait(["has it"], HANG_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert Queue(store, "q").take(timeout=HANG_S).data == b"a"


def test_lock_is_released_when_its_holder_closes_its_store(open_store: Open) -> None:
    holder = open_store(session_ttl=60)
    assert Lock(holder, "l").acquire()
    with start_thread(Lock(open_store(), "l").acquire) as waiter:
        holder.close()
    assert waiter.result
    with pytest.raises(FscoordError):
        holder.get("l/line")
