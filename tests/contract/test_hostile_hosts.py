"""Hosts with names that sethostname(2) accepts and no resolver knows: such a name breaks no recipe."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.internals import escape_word, line_of, log_of, node_path, system
from support.places import ETCD, HANG_S, Place
from support.recipes import RECIPES, use

from fscoord import FileStore, aio
from fscoord.errors import WorkFailedError
from fscoord.recipes import (
    Election,
    Lock,
    Membership,
    PriorityQueue,
    Queue,
    ReadWriteLock,
    RLock,
    Semaphore,
    once,
)
from fscoord.rendezvous import RendezvousStoreInfo
from fscoord.store import Store

NAMES = {
    "space": ("my host", "my%20host"),
    "newline": ("two\nlines", "two%0Alines"),
    "no UTF-8": (os.fsdecode(b"h\xf4te \xff"), "h%F4te%20%FF"),
    "separators": ("a:b/c-d_e", "a:b/c-d_e"),
    "escape": ("%20", "%2520"),
    "control": ("\x1b[31m\u2028\u00a0", "%1B[31m%E2%80%A8%C2%A0"),
    "letters": ("büro-7.example", "büro-7.example"),
    "empty": ("", ""),
}


@pytest.fixture(params=["hash", "file-ofd", "file-soft", "nested-file", ETCD])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, str(tmp_path))
    yield place
    place.close()


@pytest.fixture(params=NAMES)
def owner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The text by which a recipe names this process, on a host of such a name."""
    name, word = NAMES[request.param]
    monkeypatch.setattr(system, "hostname", lambda: name)
    return f"{word}:{os.getpid()}"


@pytest.mark.parametrize("kind", NAMES)
def test_word_of_a_host_has_no_space_and_is_unique(kind: str) -> None:
    text, word = NAMES[kind]
    assert escape_word(text) == word
    assert len(escape_word(text).split()) == bool(text)
    assert escape_word(text).encode().decode() == word
    assert len({escape_word(other) for other, _ in NAMES.values()}) == len(NAMES)


def test_locks_take_hosts_of_any_name(owner: str, store: Store, place: Place) -> None:
    other = place.open()
    both = ReadWriteLock(store, "rw"), ReadWriteLock(other, "rw")
    for one, two in [
        (Lock(store, "l"), Lock(other, "l")),
        (RLock(store, "r"), RLock(other, "r")),
        (Lock(store, "t", ttl=HANG_S), Lock(other, "t", ttl=HANG_S)),
        (Semaphore(store, "s", 1), Semaphore(other, "s", 1)),
        (both[0].writer, both[1].writer),
        (Election(store, "e", "data"), Election(other, "e", "data")),
    ]:
        for _ in range(2):
            assert one.acquire()
            assert [each.owner for each in two.holders()] == [owner]
            assert not two.acquire(blocking=False)
            assert line_of(two).timed_out("the lock", 0).holder == owner
            one.check()
            one.release()
            assert two.acquire()
            two.release()


def test_queues_take_hosts_of_any_name(owner: str, store: Store, place: Place) -> None:
    for kind in (Queue, PriorityQueue):
        one, two = kind(store, kind.__name__), kind(place.open(), kind.__name__)
        one.put_all(["a", "b"])
        with one.take() as item:
            assert [each.owner for each in two.taken()] == [owner]
            assert item.data == b"a"
        two.take().release()
        one.take().ack()
        assert len(two) == 0


def test_groups_take_hosts_of_any_name(owner: str, store: Store, place: Place) -> None:
    with Membership(store, "g", "data"), Membership(place.open(), "g", "a b\nc") as other:
        assert [(each.owner, each.data) for each in other.members()] == [(owner, b"data"), (owner, b"a b\nc")]
        other.update("d")
        assert other.observe()[1].data == b"d"


def test_recipes_take_hosts_of_any_name(owner: str, store: Store, place: Place) -> None:
    assert once(store, "o", lambda: b"done") == b"done" == once(place.open(), "o", lambda: b"again")
    with pytest.raises(ZeroDivisionError):
        once(store, "f", lambda: b"%d" % (1 // 0))
    with pytest.raises(WorkFailedError) as caught:
        once(place.open(), "f", lambda: b"again")
    assert owner in str(caught.value)
    assert Election(store, "e", "x").campaign()
    assert Election(place.open(), "e").observe().owner == owner
    for name in RECIPES:
        use(name, store, name)
        if name != "DoubleBarrier":  # which a name can be used for once
            use(name, place.open(), name)


def test_rank_0_publishes_a_host_of_any_name(owner: str, store: Store, place: Place) -> None:
    first = RendezvousStoreInfo.build(0, store)
    assert RendezvousStoreInfo.build(1, place.open()) == first
    assert first.master_addr == system.hostname()


def test_bell_works_on_a_node_of_any_name(owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert node_path((bytes(16), 1, 2)).startswith(f"{tmp_path}/")


def test_tasks_take_hosts_of_any_name(owner: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with aio.open_store(tmp_path / "store") as store:
            async with aio.Lock(store, "l") as lock:
                assert [each.owner for each in await lock.holders()] == [owner]
            queue = aio.Queue(store, "q")
            await queue.put("a")
            async with await queue.take():
                assert [each.owner for each in await queue.taken()] == [owner]
            async with aio.Membership(store, "g") as group:
                assert [each.owner for each in await group.members()] == [owner]

    asyncio.run(work())


def test_store_names_hosts_as_they_are(owner: str, tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", lock="soft") as store, FileStore(tmp_path / "store", lock="soft") as other:
        store.set("a", "b")
        other.set("a", "c")
        assert {member.host for member in store.members()} == {system.hostname()}
        assert {f"{member}" for member in [*log_of(store).table.sessions.values()]} == {owner}
