"""`Store.watch` on every kind of store: each change once, in order, also after a position; and its errors."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.places import HANG_S, KINDS, TCP_KINDS, Place, start_thread, until

from fscoord import (
    Change,
    CompactedError,
    FileStore,
    FscoordError,
    HashStore,
    Position,
    Store,
    StoreClosedError,
    StoreError,
    StoreTimeoutError,
    aio,
)
from fscoord.recipes import Ephemeral
from fscoord.stores import memory
from fscoord.testing import FaultyStore

WRITES: list[tuple[Callable[[Store], object], list[tuple[str, bytes | None]]]] = [
    (lambda store: store.set("p/a", "1"), [("p/a", b"1")]),
    (lambda store: store.set("p/a", "1"), [("p/a", b"1")]),
    (lambda store: store.add("p/n", 3), [("p/n", b"3")]),
    (lambda store: store.add("p/n", -1), [("p/n", b"2")]),
    (lambda store: store.append("p/a", "2"), [("p/a", b"12")]),
    (lambda store: store.compare_set("p/a", "12", ""), [("p/a", b"")]),
    (lambda store: store.compare_set("p/a", "no", "1"), []),
    (lambda store: store.create("p/c", "1"), [("p/c", b"1")]),
    (lambda store: store.create("p/c", "2"), []),
    (lambda store: store.set("q", "not watched"), []),
    (lambda store: store.queue_push("p/a", "item"), []),
    (lambda store: store.queue_pop("p/a"), []),
    (lambda store: store.multi_set(["p/1", "o", "p/2"], ["x", "y", "z"]), [("p/1", b"x"), ("p/2", b"z")]),
    (lambda store: store.delete_key("p/none"), []),
    (lambda store: store.delete_key("p/1"), [("p/1", None)]),
    (lambda store: store.pop("p/2"), [("p/2", None)]),
    (lambda store: store.delete_key("p/c", expected="no"), []),
    (lambda store: store.delete_key("p/c", expected="1"), [("p/c", None)]),
    (
        lambda store: store.transact(compare={"p/n": "2"}, set={"p/a": "3"}, add={"p/n": 1}, delete=["p/none", "q"]),
        [("p/a", b"3"), ("p/n", b"3")],
    ),
    (lambda store: store.transact(compare={"p/n": "2"}, set={"p/a": "4"}), []),
    (lambda store: store.transact(delete=["p/a", "p/none"]), [("p/a", None)]),
]


REPORTING = [kind for kind in KINDS if getattr(kind, "values", [kind])[0] not in TCP_KINDS]


@pytest.fixture(params=REPORTING)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, str(tmp_path))
    yield place
    place.close()


@pytest.fixture
def watched(place: Place) -> Store:
    return place.open()


def told(change: Change) -> tuple[str, bytes | None]:
    assert change.kind == ("delete" if change.value is None else "set")
    return change.key, change.value


def test_watch_yields_each_change_once_and_in_order(place: Place, watched: Store) -> None:
    writer = place.open()
    writer.set("p/a", "before")
    with watched.watch("p/", timeout=HANG_S) as watch:
        positions = [watch.position]
        for write, changes in WRITES:
            write(writer)
            for change in changes:
                found = next(watch)
                assert told(found) == change
                positions.append(found.position)
        writer.set("p/last", "")
        assert told(next(watch)) == ("p/last", b""), "nothing came between"
    assert positions == sorted(set(positions))


def test_watch_begins_after_any_position(place: Place, watched: Store) -> None:
    if "short" in place.kind:
        return  # each write compacts the log
    with watched.watch("p/", timeout=HANG_S) as watch:
        start = watch.position
        for write, _ in WRITES:
            write(watched)
        changes = list(itertools.islice(watch, sum(len(changes) for _, changes in WRITES)))
    assert list(map(told, changes)) == [change for _, changes in WRITES for change in changes]
    for number, after in enumerate([start, *(change.position for change in changes)]):
        with place.open().watch("p/", after=str(after) if number % 2 else after, timeout=HANG_S) as again:
            left = changes[number:]
            assert list(itertools.islice(again, len(left))) == left
    assert Position.parse(str(start)) == start


def test_position_in_a_transaction_is_one_for_watches_of_any_prefix(place: Place, watched: Store) -> None:
    if "etcd" in place.kind or "short" in place.kind:
        return  # positions in a revision of etcd are counted among the watched keys; each write compacts the log
    watched.set("other", "")
    with watched.watch(timeout=HANG_S) as every, watched.watch("p/", timeout=HANG_S) as some:
        watched.transact(set={"p/a": "1"}, delete=["other", "p/none"])
        first = next(every)
        assert next(some) == first
    watched.set("p/b", "2")
    with watched.watch("p/", after=first.position, timeout=HANG_S) as rest:
        assert told(next(rest)) == ("p/b", b"2")


def test_watch_sleeps_until_a_change_comes(place: Place, watched: Store) -> None:
    writer = place.open()
    with watched.watch() as watch:
        for number in range(3):
            with start_thread(next, watch) as thread:
                writer.set("k", str(number))
            assert told(thread.result) == ("k", b"%d" % number)


def test_watch_that_finds_no_change_in_time_names_the_prefix(place: Place, watched: Store) -> None:
    with watched.watch("p/", timeout=0.01) as watch:
        watched.set("q", "1")
        with pytest.raises(
            StoreTimeoutError, match=f"a change of a key that begins with '{place.full('p/')}'"
        ) as error:
            next(watch)
        assert error.value.keys == (place.full("p/"),)
        watched.set("p/a", "1")
        watch._limit = HANG_S
        assert next(watch).key == "p/a"


def test_closed_watch_ends_and_closed_store_raises(place: Place, watched: Store) -> None:
    watch = watched.watch()
    watch.close()
    watch.close()
    assert list(watch) == []
    watch = watched.watch()
    thread = start_thread(next, watch)
    place.close()
    with pytest.raises(StoreClosedError):
        thread.join()


def test_watch_of_a_task_yields_the_same_changes(watched: Store) -> None:
    async def watch() -> list[Change]:
        found = []
        async with aio.AsyncStore(watched).watch("p/", timeout=HANG_S) as changes:
            for write, _ in WRITES[:5]:
                write(watched)
            async for change in changes:
                found.append(change)
                if len(found) == 5:
                    await changes.aclose()
        assert changes.position == found[-1].position
        return found

    assert list(map(told, asyncio.run(watch()))) == [change for _, changes in WRITES[:5] for change in changes]


def test_watch_of_a_task_that_has_not_begun_can_be_closed(watched: Store) -> None:
    async def body() -> None:
        store = aio.AsyncStore(watched)
        watch = store.watch()
        watched.close()
        await watch.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(watch)
        assert watch.position is None

    asyncio.run(body())


def test_cancelled_task_loses_no_change(watched: Store) -> None:
    async def watch() -> Change:
        async with aio.AsyncStore(watched).watch() as changes:
            task = asyncio.ensure_future(changes.__anext__())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            watched.set("k", "1")
            return await changes.__anext__()

    assert told(asyncio.run(watch())) == ("k", b"1")


@pytest.mark.parametrize("place", [kind for kind in KINDS if kind not in REPORTING], indirect=True)
def test_store_without_the_capability_refuses(store: Store) -> None:
    assert not store.capabilities.reports_changes
    with pytest.raises(StoreError, match="can't report changes"):
        store.watch()


def test_position_that_the_store_never_had_is_refused(watched: Store) -> None:
    with pytest.raises(StoreError, match="of another store"):
        watched.watch(after=Position(1 << 60, 0))
    for text in ("", "1", "1.x", "now"):
        with pytest.raises(ValueError, match="not a position"):
            watched.watch(after=text)


def test_view_that_injects_faults_watches_its_store() -> None:
    with FaultyStore(HashStore()) as store, store.watch(timeout=HANG_S) as watch:
        store.set("k", "1")
        assert told(next(watch)) == ("k", b"1")


# -- ephemeral keys ------------------------------------------------------------------------------------------------


def refuses_ephemeral_keys(store: Store) -> bool:
    """Return whether the store has processes, and can't detect their deaths."""
    if not store.capabilities.processes or store.has_liveness:
        return False
    with pytest.raises(StoreError, match="can't detect deaths"):
        Ephemeral(store, "e")
    return True


def test_ephemeral_key_exists_while_its_creator_has_it(store: Store) -> None:
    if refuses_ephemeral_keys(store):
        return
    key, same = Ephemeral(store, "e", "1"), Ephemeral(store, "e", "1")
    with store.watch("e", timeout=HANG_S) as watch:
        with key:
            assert same.get() == b"1"
            assert not same.create()
            assert not same.delete()
            with pytest.raises(FscoordError, match="'e' exists already, created by"):
                same.__enter__()
            assert key.get() == b"1"
        assert key.get() is None
        assert not key.delete()
        assert same.create()
        assert same.delete()
        assert [next(watch).kind for _ in range(4)] == ["set", "delete", "set", "delete"]


def test_ephemeral_key_of_a_closed_store_is_deleted_by_the_next_process_that_looks(place: Place, store: Store) -> None:
    if not store.has_liveness:
        return
    store.register()
    with store.watch("e", timeout=HANG_S) as watch:
        other = place.open()
        Ephemeral(other, "e", "1").create()
        assert next(watch).kind == "set"
        place.close_newest()
        until(lambda: Ephemeral(store, "e").get() is None)
        assert next(watch).kind == "delete"
        assert Ephemeral(store, "e", "2").create()


def test_value_of_another_program_is_no_ephemeral_key(store: Store) -> None:
    if refuses_ephemeral_keys(store):
        return
    store.set("e", "mine")
    with pytest.raises(FscoordError, match="not a valid ephemeral key"):
        Ephemeral(store, "e").get()


# -- compaction ----------------------------------------------------------------------------------------------------


def compact(store: Store) -> None:
    if isinstance(store, FileStore):
        for _ in range(3):
            store.compact()
    elif isinstance(store, HashStore):
        for number in range(memory.HISTORY + 1):
            store.set("other", str(number))
    else:
        store.set("other", "1")
        client, transactions = store._client, store._transactions  # type: ignore[attr-defined]
        revision = transactions.read([], HANG_S)[1]
        client.call("kv/compaction", {"revision": str(revision), "physical": True}, HANG_S)


@pytest.mark.parametrize("place", ["hash", "file-ofd", pytest.param("etcd", marks=pytest.mark.etcd)], indirect=True)
def test_compaction_that_removes_changes_is_an_error_with_a_position(
    place: Place, watched: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "HISTORY", 8)
    with watched.watch(timeout=HANG_S) as watch:
        watched.set("k", "1")
        first = next(watch).position
        for number in range(10):
            watched.set("k", str(number))
        compact(watched)
        with pytest.raises(CompactedError, match="removed by a compaction") as error:
            list(watch)
    for text in (first, str(first)):
        with pytest.raises(CompactedError), watched.watch(after=text, timeout=HANG_S) as late:
            next(late)
    with watched.watch(after=error.value.position, timeout=HANG_S) as again:
        watched.set("k", "2")
        assert ("k", b"2") in (told(next(again)) for _ in range(9))


def test_compaction_during_a_watch_is_followed_without_a_loss(place: Place, watched: Store) -> None:
    base = place.base
    if not isinstance(base, FileStore):
        return  # only a file store can be compacted so
    watched.set("k", "0")
    with watched.watch(timeout=HANG_S) as watch:
        for number in range(5):
            watched.append("k", str(number))
            assert told(next(watch))[1] == b"0" + b"01234"[: number + 1]
            with start_thread(next, watch) as thread:
                base.compact()
                watched.set("j", str(number))
            assert told(thread.result) == ("j", b"%d" % number)
        assert watched.watch(after=watch.position, timeout=0).position == watch.position
