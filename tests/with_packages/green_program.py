"""A program of green threads: ``python green_program.py gevent|eventlet first|last PATH|mem`` prints what each saw.

"first" patches the standard library before the import of fscoord, "last" after it. While a green thread waits, another
must run: each wait here ends only by the deed of another.
"""

from __future__ import annotations

import sys
from typing import Any

LIBRARY, ORDER, PATH = sys.argv[1:4]


def patch() -> Any:
    if LIBRARY == "gevent":
        import gevent.monkey

        gevent.monkey.patch_all()
        import gevent

        return gevent.spawn, gevent.sleep, gevent.Greenlet.get
    import eventlet

    eventlet.monkey_patch()
    return eventlet.spawn, eventlet.sleep, lambda thread: thread.wait()


if ORDER == "first":
    spawn, sleep, result_of = patch()

from fscoord import FileStore, HashStore, Store, StoreTimeoutError  # noqa: E402
from fscoord.recipes import Lock, RLock  # noqa: E402

if ORDER == "last":
    spawn, sleep, result_of = patch()

store: Store = HashStore(timeout=20) if PATH == "mem" else FileStore(PATH, timeout=20)


def all_of(*calls: Any) -> None:
    for thread in [spawn(call) for call in calls]:
        print(result_of(thread))


def take(kind: type[Lock], name: str) -> str:
    with kind(store, name):
        sleep(0)
    return "taken"


shared = RLock(store, "shared")


def reenter() -> str:
    with shared, shared:
        store.set("reentered", "")
        store.get("refused")
    return "left"


def intrude() -> str:
    store.get("reentered")
    assert not shared.acquire(timeout=0.1), "two green threads hold one RLock"
    store.set("refused", "")
    return "refused"


def time_out() -> str:
    try:
        store.wait(["never"], 0.2)
    except StoreTimeoutError as error:
        return f"timeout {error.waited < 10}"
    return "no timeout"


def set_later() -> str:
    sleep(0)
    store.set("k", "v")
    return "set"


all_of(lambda: store.get("k"), set_later, time_out)
all_of(lambda: take(Lock, "l"), lambda: take(Lock, "l"), lambda: take(RLock, "r"))
all_of(reenter, intrude)
with Lock(store, "leased", ttl=20):
    pass
