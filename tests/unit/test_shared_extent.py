"""The shared extent of a node: the bytes that are kept and published, and how a waiter that is rung uses them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from support.combining import HANG_S, share
from support.disks import fill
from support.internals import log_of, notifier_of, sharing_of, watcher_of
from support.places import start_thread, until

from fscoord import FileStore, SessionDeadError
from fscoord._log.format import record
from fscoord._log.format.control_records import encode_death
from fscoord._log.liveness.own_session import Liveness
from fscoord._log.replay.cursor import Cursor
from fscoord._log.shared import extent as shared_extent, network, node_waiter
from fscoord._log.shared.extent import Extent
from fscoord._log.shared.network import NetworkAccess
from fscoord._log.shared.node_poller import node_path
from fscoord._log.shared.node_waiter import NodeWaiter
from fscoord._log.wakeup import watcher
from fscoord._log.wakeup.doorbell import Doorbell, bucket

FILE = (3, 4, 0)


# The extent in a bell


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Doorbell]:
    made = Doorbell(str(tmp_path / "bell"), 0o600)
    yield made
    made.close()


def test_extent_that_goes_further_stays(bell: Doorbell) -> None:
    """A poller may publish later what a leader has read and continued."""
    shared_extent.publish(bell, Extent(FILE, 100, b"abcd"))
    for extent in (Extent(FILE, 100, b"abc"), Extent(FILE, 90, b"x" * 14)):
        shared_extent.publish(bell, extent)
        assert shared_extent.read(bell) == Extent(FILE, 100, b"abcd")
    shared_extent.publish(bell, Extent((3, 9, 0), 0, b"y"))
    assert shared_extent.read(bell) == Extent((3, 9, 0), 0, b"y")


def test_extent_that_is_torn_is_not_read(bell: Doorbell) -> None:
    """The publisher may die, or two publish at once: then the bytes of one lie among those of the other."""
    shared_extent.publish(bell, Extent(FILE, 0, b"a" * 1000))
    end = os.fstat(bell.fd).st_size
    for place in range(shared_extent.EXTENT_OFFSET, end):
        old = os.pread(bell.fd, 1, place)
        os.pwrite(bell.fd, bytes([old[0] ^ 0x55]), place)
        assert shared_extent.read(bell) is None
        os.pwrite(bell.fd, old, place)
    assert shared_extent.read(bell) == Extent(FILE, 0, b"a" * 1000)
    for size in range(shared_extent.EXTENT_OFFSET, end, 7):
        os.ftruncate(bell.fd, size)
        assert shared_extent.read(bell) is None
        os.ftruncate(bell.fd, end)
        assert shared_extent.read(bell) is None


def test_extent_of_a_bell_that_fails_is_not_read(bell: Doorbell) -> None:
    bell.close()
    assert shared_extent.read(bell) is None


def test_extent_for_which_the_disk_is_full_is_dropped(small_disk: Path) -> None:
    with closing(Doorbell(str(small_disk / "bell"), 0o600)) as full:
        fill(small_disk)
        shared_extent.publish(full, Extent(FILE, 0, b"a" * 1000))
        assert shared_extent.read(full) is None
        armed = full.arm(7)
        full.ring(7)
        assert full.is_rung(7, armed)


# What a handle on a mount that hosts share makes of it


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A log in a directory that counts as NFS. Only a ring ends the sleep of a waiter that is not the poller."""
    share(str(tmp_path), monkeypatch)
    monkeypatch.setattr(network, "PATH_CHECK_S", math.inf)
    monkeypatch.setattr(node_waiter, "OWN_POLL_S", 3.0 * HANG_S)
    for name in ("SLOW_FIRST_S", "SLOW_LAST_S"):
        monkeypatch.setattr(watcher, name, 3.0 * HANG_S)
    return str(tmp_path / "log")


def access_of(store: FileStore) -> NetworkAccess:
    access = log_of(store).access
    assert isinstance(access, NetworkAccess)
    return access


def extent_of(store: FileStore) -> Extent:
    found = access_of(store).recent
    assert found is not None
    return found


def write_from_afar(store: FileStore, key: str, value: bytes = b"v") -> None:
    """Write as another host does, without a ring and without an extent for this host."""
    log_of(store).update(record.SET, key.encode(), value, None, HANG_S)


def test_handle_does_not_keep_a_record_that_is_not_complete(path: str) -> None:
    """Its bytes may change: of an append, some pages may have reached the server and others not."""
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "1")
        other.get("k")
        tear(path, store)
        other.check(["k"])
        assert access_of(other).recent is None


def tear(path: str, store: FileStore) -> None:
    """Append to the log all of a record but its last byte."""
    data, _ = record.encode(record.SET, b"k", b"2", 1, 10, log_of(store).handle.chain)
    with open(path, "ab") as file:
        file.write(data[:-1])


def test_handle_does_not_keep_a_void_at_the_offset_of_the_torn_record(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        tear(path, store)
        kept: list[Extent | None] = []
        move = Cursor.move

        def move_and_note(cursor: Cursor, offset: int, chain: int) -> None:
            kept.append(access_of(store).recent)
            move(cursor, offset, chain)

        monkeypatch.setattr(Cursor, "move", move_and_note)
        store.set("k", "3")
        kept.append(access_of(store).recent)
        data = Path(path).read_bytes()
        assert len(kept) > 1, "a void was written"
        assert all(data[found.start : found.end] == found.data for found in kept if found is not None)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The handles, by their numbers, that have read from the server, one entry for each read."""
    made: list[int] = []
    read_on = NetworkAccess._read_on

    def count(access: NetworkAccess, *, locked: bool) -> bool:
        made.append(id(access))
        return read_on(access, locked=locked)

    monkeypatch.setattr(NetworkAccess, "_read_on", count)
    return made


def sleeps(store: FileStore) -> bool:
    watched = watcher_of(store)
    return watched is not None and bool(watched._sleeping)


@pytest.fixture
def poller(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileStore]:
    """A handle that is the poller of its node, and never polls, so that only writers ring."""
    monkeypatch.setattr(NodeWaiter, "_poll_pause", 3.0 * HANG_S)
    monkeypatch.setattr(watcher, "POLL_FIRST_S", 3.0 * HANG_S)
    with FileStore(path, timeout=HANG_S) as store, start_thread(store.get, "for the poller") as thread:
        until(lambda: sleeps(store) and election_of(store)._poller is not None)
        yield store
        with FileStore(path, timeout=HANG_S) as other:
            other.set("for the poller", "1")
        thread.join()


def election_of(store: FileStore) -> Any:
    watched = watcher_of(store)
    assert watched is not None
    return watched.election


def test_waiter_that_is_rung_reads_in_the_extent_and_not_on_the_server(
    path: str, poller: FileStore, reads: list[int]
) -> None:
    with ExitStack() as stack:
        writer = stack.enter_context(FileStore(path, timeout=HANG_S))
        writer.set("first", "1")
        stores = [stack.enter_context(FileStore(path, timeout=HANG_S)) for _ in range(5)]
        threads = []
        for store in stores:
            # One by one: of two waiters that arm a cell at once, one finds its token overwritten, and looks once more.
            threads.append(stack.enter_context(start_thread(store.get, "k")))
            until(lambda: is_armed_in(store))  # noqa: B023
        assert len(election_of(poller)._waiting) == 6
        reads.clear()
        writer.set("k", "value")
        for thread in threads:
            assert thread.join() == b"value"
        assert not {id(access_of(store)) for store in stores} & set(reads)


def is_armed_in(store: FileStore) -> bool:
    """Return whether a wait of `store` has made its last look before its sleep."""
    return any(each._wakes_at is not None for each in list(notifier_of(store)._waiters))


def test_waiter_that_does_not_find_its_key_in_the_extent_reads_on_the_server(
    path: str, poller: FileStore, reads: list[int]
) -> None:
    """No ring comes for a record of another host. So the look in the extent may not be the last one before a sleep."""
    with ExitStack() as stack:
        writer, store, afar = (stack.enter_context(FileStore(path, timeout=HANG_S)) for _ in range(3))
        with start_thread(store.get, "k") as thread:
            until(lambda: is_armed_in(store))
            twin = next(name for name in map(str, range(10**6)) if bucket(name.encode()) == bucket(b"k"))
            write_from_afar(writer, twin)  # the extent will end here
            extent = sharing_of(writer).access.recent
            write_from_afar(afar, "k")
            reads.clear()
            assert extent is not None
            bell = Doorbell(node_path(log_of(store).handle.root.key), 0o600)
            shared_extent.publish(bell, extent)
            bell.ring(bucket(b"k"))
            assert thread.join() == b"v"
            assert id(access_of(store)) in reads
            bell.close()


def test_extent_without_new_bytes_is_not_applied(path: str) -> None:
    with FileStore(path) as one, FileStore(path) as two:
        one.set("a", "1")
        two.get("a")
        end = log_of(two).handle.offset
        one.set("b", "1")
        known = extent_of(one)
        file, other_file = known.file, (*known.file[:2], known.file[2] + 1)
        data = Path(path).read_bytes()
        refused = [
            Extent(file, end - 5, data[end - 5 : end]),
            Extent(file, end - 5, data[end - 5 : end - 1]),
            Extent(file, end + 1, data[end + 1 :]),
            Extent(other_file, known.start, known.data),
        ]
        for extent in refused:
            assert not sharing_of(two).read_extent(extent)
            assert log_of(two).handle.offset == end
        assert sharing_of(two).read_extent(known)
        assert two.get("b") == b"1"
        assert log_of(two).handle.offset == len(data)


def test_extent_with_a_seal_leads_into_the_next_generation(path: str) -> None:
    with FileStore(path) as one, FileStore(path) as two:
        one.set("a", "1")
        two.get("a")
        old, file, start = Path(path), extent_of(one).file, log_of(two).handle.offset
        one.compact()
        extent = Extent(file, start, old.read_bytes()[start:])
        assert sharing_of(two).read_extent(extent)
        assert log_of(two).handle.header.generation == 1
        assert two.get("a") == b"1"


def test_handle_that_reads_of_its_own_death_in_an_extent_ends(path: str) -> None:
    with FileStore(path) as one, FileStore(path) as two:
        two.set("a", "1")
        number = log_of(two).handle.lock.session
        alive_id = log_of(two).table.sessions[number].alive_id
        one.set("b", "1")
        log_of(one).update(record.DEATH, b"", encode_death(number, alive_id), None, HANG_S)
        assert not sharing_of(two).read_extent(extent_of(one))
        with pytest.raises(SessionDeadError):
            two.get("a")


def test_handle_that_only_reads_extents_keeps_its_byte(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(path) as one, FileStore(path) as two:
        two.set("a", "1")
        one.set("b", "1")
        checks: list[float] = []
        check_byte = Liveness.check_byte
        monkeypatch.setattr(Liveness, "check_byte", lambda self, now: (checks.append(now), check_byte(self, now))[1])
        assert sharing_of(two).read_extent(extent_of(one))
        assert len(checks) == 1


def test_closed_handle_reads_no_extent(path: str) -> None:
    with FileStore(path) as one:
        two = FileStore(path)
        two.close()
        one.set("a", "1")
        assert not sharing_of(two).read_extent(extent_of(one))


def test_poller_publishes_what_it_has_read_of_another_host(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Extent] = []
    publish = shared_extent.publish
    monkeypatch.setattr(
        shared_extent, "publish", lambda bell, extent: (published.append(extent), publish(bell, extent))[1]
    )
    with ExitStack() as stack:
        afar, one, two = (stack.enter_context(FileStore(path, timeout=HANG_S)) for _ in range(3))
        threads = [stack.enter_context(start_thread(store.get, "k")) for store in (one, two)]
        until(lambda: is_armed_in(one) and is_armed_in(two) and len(election_of(one)._waiting) == 2)
        write_from_afar(afar, "k")
        for thread in threads:
            assert thread.join() == b"v"
        end = log_of(afar).handle.offset
    assert any(extent.end == end for extent in published)
