"""Holds that end without a sign of life, and values that refuse the writes of a former holder."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from contract.worker import Workers, start
from support.internals import NO_LEASE, Entry, LeaseMonitor, hold_module as _hold, lease_module as _lease, line_of
from support.places import ETCD, HANG_S, Place, start_thread, until
from support.third_party import place_of

from fscoord.errors import FscoordError, LimitExceededError, LockLostError, StaleTokenError, StoreTimeoutError
from fscoord.recipes import Election, Fenced, Lock, RLock, Semaphore
from fscoord.store import Store
from fscoord.stores.prefix import PrefixStore


@pytest.fixture(params=["hash", "nested-hash", "third-party", "file-ofd", ETCD])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = place_of(request.param, str(tmp_path))
    yield place
    place.close()


class NoRenewal:
    """In the place of a thread that gives signs of life: one that is stopped."""

    def __init__(self, *_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def end(self) -> None:
        pass


# What one who waits makes of what it sees


class Clock:
    """A clock that stands still, unless it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(_lease, "system", SimpleNamespace(time=SimpleNamespace(monotonic=lambda: self.now)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def served(lease: str, token: int = 1) -> Entry:
    return Entry("a", "x", token, 0, "h:1", lease)


def looks(signs: LeaseMonitor, clock: Clock, entry: Entry, count: int, step: float) -> list[bool]:
    """Look so often, with so many seconds between two looks; return what each found."""
    found = []
    for _ in range(count):
        clock.now += step
        found.append(bool(signs.expired([entry], clock.now)))
    return found


def test_lease_without_renewal_for_its_duration_has_expired(clock: Clock) -> None:
    assert looks(LeaseMonitor(), clock, served("8.0:3"), 10, 1.0) == [False] * 8 + [True] * 2


def test_lease_that_is_renewed_begins_its_time_anew(clock: Clock) -> None:
    signs = LeaseMonitor()
    assert not any(looks(signs, clock, served("8.0:3"), 8, 1.0))
    assert looks(signs, clock, served("8.0:4"), 9, 1.0) == [False] * 8 + [True]


def test_lease_is_not_judged_over_a_time_without_looks(clock: Clock) -> None:
    signs = LeaseMonitor()
    assert looks(signs, clock, served("8.0:3"), 5, 1000.0) == [False] * 4 + [True]


def test_lease_of_a_waiter_or_none_at_all_never_expires(clock: Clock) -> None:
    assert not any(looks(LeaseMonitor(), clock, served("8.0:3", token=0), 99, 1.0))
    assert not any(looks(LeaseMonitor(), clock, served(NO_LEASE), 99, 1.0))


# Holds


HOLDS: dict[str, Callable[[Store], Any]] = {
    "Lock": lambda store: Lock(store, "l", ttl=0.2),
    "RLock": lambda store: RLock(store, "l", ttl=0.2),
    "Semaphore": lambda store: Semaphore(store, "l", 1, ttl=0.2),
    "Election": lambda store: Election(store, "l", ttl=0.2),
}


@pytest.mark.parametrize("blocking", [True, False], ids=["waiting", "trying"])
@pytest.mark.parametrize("kind", HOLDS)
def test_holder_that_does_not_renew_its_lease_loses_its_hold_and_learns_it(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch, kind: str, blocking: bool
) -> None:
    stopped, other = HOLDS[kind](store), HOLDS[kind](place.open(how="clone"))
    with monkeypatch.context() as patch:
        patch.setattr(_hold, "LeaseRenewer", NoRenewal)
        assert stopped.acquire()
    if blocking:
        assert other.acquire(timeout=HANG_S)
    else:
        until(lambda: other.acquire(blocking=False))
    assert (stopped.token, other.token) == (1, 2)
    with pytest.raises(LockLostError):
        stopped.check()
    with pytest.raises(LockLostError):
        stopped.release()
    other.check()
    other.release()


def test_hold_without_a_lease_is_not_judged_by_the_lease_of_another(place: Place, store: Store) -> None:
    with Lock(store, "l") as lock:
        assert not Lock(place.open(how="clone"), "l", ttl=0.01).acquire(timeout=0.2)
        lock.check()


def test_holder_renews_its_lease_until_it_releases(place: Place, store: Store) -> None:
    lock = Lock(store, "l", ttl=0.1)
    look = Lock(place.open(how="clone"), "l")
    with lock:
        until(lambda: int(line_of(look).entries()[0].lease.partition(":")[2]) > 2)
        lock.check()
    assert line_of(look).entries() == []


def test_waiter_renews_its_lease_from_when_it_is_served(place: Place, store: Store) -> None:
    look = Lock(place.open(how="clone"), "l")
    with Lock(store, "l"):
        waiter = start_thread(Lock(place.open(how="clone"), "l", ttl=0.1).acquire)
        until(look.waiters)
    assert waiter.join()
    until(lambda: int(line_of(look).entries()[0].lease.partition(":")[2]) > 2)


def test_hold_that_was_taken_away_is_logged(place: Place, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    lock, other = Lock(store, "l", ttl=0.1), Lock(place.open(how="clone"), "l")
    with caplog.at_level(logging.WARNING, "fscoord"):
        assert lock.acquire()
        line_of(other).leave(line_of(other).entries()[0].id)
        until(lambda: "'l' is not held any more" in caplog.text)
    with pytest.raises(LockLostError):
        lock.release()


def test_holder_that_cannot_reach_its_store_logs_it_and_tries_again(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    class Cut(PrefixStore):
        is_cut = False

        def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
            if self.is_cut:
                self.is_cut = False
                raise StoreTimeoutError("the store is away")
            return super().compare_set(key, expected, desired)

    view = Cut("x", store)
    look = Lock(PrefixStore("x", store), "l")
    with caplog.at_level(logging.WARNING, "fscoord"), Lock(view, "l", ttl=0.1) as lock:
        view.is_cut = True
        until(lambda: "could not renew the lease of 'l': timeout: the store is away" in caplog.text)
        before = line_of(look).entries()[0].lease
        until(lambda: line_of(look).entries()[0].lease != before)
        lock.check()


def test_lease_is_a_time_above_zero_and_has_an_end(store: Store) -> None:
    for ttl in (0, -1, math.inf):
        with pytest.raises(ValueError, match=r"ttl|timeout"):
            Lock(store, "l", ttl=ttl)


def test_process_that_is_stopped_loses_its_hold_and_its_writes_are_refused(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    with Workers(place.spec(), "wake_up_and_write", [["l", 0.5]]) as workers:
        start(store, 1)
        until(lambda: os.waitid(os.P_PID, workers.processes[0].pid, os.WSTOPPED | os.WNOHANG))
        with Lock(store, "l", timeout=HANG_S, ttl=HANG_S) as lock:
            Fenced(store, "value").set("new", lock.token)
            workers.processes[0].send_signal(signal.SIGCONT)
            assert workers.results() == [["LockLostError", "StaleTokenError"]]
            lock.check()
    assert Fenced(store, "value").get() == b"new"
    place.close()


def test_lease_that_the_program_renews_ends_without_its_call(place: Place, store: Store) -> None:
    lock = Lock(store, "l", ttl=0.3, auto_renew=False)
    assert lock.acquire()
    next_holder = Lock(place.open(how="clone"), "l")
    assert next_holder.acquire(timeout=HANG_S)
    for call in (lock.renew, lock.check, lock.release, lock.renew):
        with pytest.raises(LockLostError):
            call()
    next_holder.release()


def test_lease_that_the_program_renews_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hold, "LeaseRenewer", None)  # no thread is made
    hold = Semaphore(store, "l", 2, ttl=HANG_S, auto_renew=False)
    with hold, hold:
        leases = [entry.lease for entry in line_of(hold).entries()]
        hold.renew()
        renewed = [entry.lease for entry in line_of(hold).entries()]
    assert leases == [f"{HANG_S:.1f}:0"] * 2
    assert renewed == [f"{HANG_S:.1f}:1"] * 2


def test_renewal_is_refused_without_a_lease_or_a_hold(store: Store) -> None:
    with pytest.raises(ValueError, match="auto_renew=False is for a hold with a lease"):
        Lock(store, "l", auto_renew=False)
    with Lock(store, "l") as lock, pytest.raises(RuntimeError, match="has no lease to renew: give its length as ttl"):
        lock.renew()
    with pytest.raises(LockLostError, match="is not held by this object"):
        Lock(store, "l", ttl=HANG_S).renew()


# Values


def test_value_written_with_a_token_refuses_lower_tokens(place: Place, store: Store) -> None:
    value = Fenced(store, "v")
    assert value.token() == 0
    value.set("one", 3)
    value.set("two three", 3)
    assert (value.get(), value.token()) == (b"two three", 3)
    other = Fenced(place.open(how="clone"), "v")
    other.set(b"", 7)
    with pytest.raises(StaleTokenError, match=r"'.*v' was written with token 7, so token 3 is stale"):
        value.set("three", 3)
    assert (value.get(), value.token()) == (b"", 7)


def test_fenced_write_that_is_refused_is_a_lost_hold(store: Store) -> None:
    Fenced(store, "v").set("", 2)
    with pytest.raises(LockLostError):
        Fenced(store, "v").set("", 1)


def test_fenced_writes_at_once_keep_the_value_of_the_highest_token(place: Place, store: Store) -> None:
    def run(first: int) -> None:
        value = Fenced(place.open(how="clone"), "v")
        for token in range(first, 200, 4):
            try:
                value.set(f"by {token}", token)
            except StaleTokenError:
                assert value.token() > token

    for thread in [start_thread(run, first) for first in range(1, 5)]:
        thread.join()
    assert Fenced(store, "v").get() == b"by 199"


def test_fenced_write_sees_a_newer_token_that_comes_between(store: Store) -> None:
    class Slow(PrefixStore):
        def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
            Fenced(PrefixStore("x", store), "v").set("new", 9)
            return super().compare_set(key, expected, desired)

    with pytest.raises(StaleTokenError, match="token 9"):
        Fenced(Slow("x", store), "v").set("old", 8)
    assert Fenced(PrefixStore("x", store), "v").get() == b"new"


def test_fenced_value_that_is_deleted_meanwhile_begins_anew(store: Store) -> None:
    class Deleted(PrefixStore):
        def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
            self.delete_key(key)
            return super().compare_set(key, expected, desired)

    Fenced(PrefixStore("x", store), "v").set("old", 8)
    Fenced(Deleted("x", store), "v").set("new", 8)
    assert Fenced(PrefixStore("x", store), "v").get() == b"new"


def test_fenced_write_over_something_else_is_an_error_and_changes_nothing(store: Store) -> None:
    for text in (b"text", b"3", b"-3 x", b"x 3"):
        store.set("v", text)
        for call in (Fenced(store, "v").get, Fenced(store, "v").token, lambda: Fenced(store, "v").set("", 1)):
            with pytest.raises(FscoordError, match=r"v' holds .* which is not a valid value with a token"):
                call()
        assert store.get("v") == text


def test_bad_tokens_and_values_are_refused(store: Store) -> None:
    value = Fenced(store, "v")
    for bad in ("1", 1.5, None):
        with pytest.raises(TypeError, match="token must be an int"):
            value.set("", bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token must be"):
        value.set("", 0)
    with pytest.raises(LimitExceededError):
        Fenced(store, "x" * 2000)
    assert not store.check(["v"])
