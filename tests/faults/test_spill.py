"""Long values that are left in the file: forks, Ctrl-C, threads, mounts whose caches lie and whose servers forget."""

from __future__ import annotations

import errno
import math
import os
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support.internals import log_of, shared_network as network, state_of, system
from support.interrupts import At, interrupt
from support.places import start_thread
from support.shared_os import SharedOs, shared_os

from fscoord import CorruptLogError, FileStore, StoreError, StoreUnavailableError
from fscoord.stores.file.waits import read_consistent

LIMIT_S = 60
LEAST = 100
VALUE = random.Random(1).randbytes(3 * LEAST)
OTHER = random.Random(2).randbytes(2 * LEAST)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opened(path: Path) -> Callable[..., FileStore]:
    return partial(FileStore, path, timeout=LIMIT_S, spill_bytes=LEAST)


# Forks


def in_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked child; return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(LIMIT_S)
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("compactions", [0, 1, 3])
def test_forked_child_has_the_long_values_wherever_the_log_goes(
    compactions: int, opened: Callable[..., FileStore]
) -> None:
    with opened() as store:
        store.set("k", VALUE)
        store.queue_push("q", OTHER)

        def child() -> None:
            with opened() as other:
                for _ in range(compactions):
                    other.compact()
                    other.set("later", OTHER)
            assert store.get("k") == VALUE
            store.append("k", "!")
            store.compact()
            assert store.queue_pop("q") == OTHER
            assert store.get("k") == VALUE + b"!"

        assert in_child(child) == 0
        assert store.get("k") == VALUE + b"!"
        assert store.queue_len("q") == 0


# Ctrl-C


@pytest.mark.parametrize(("what", "stride"), [("get", 4), ("queue_pop", 8), ("follow", 30)])
def test_ctrl_c_at_any_point_leaves_all_long_values_readable(
    what: str, stride: int, tmp_path: Path, rng: random.Random, no_ctrl_c_is_lost: None
) -> None:
    number, reached = rng.randint(1, stride), 0
    while True:
        path = tmp_path / str(number)
        with FileStore(path, spill_bytes=LEAST) as store, FileStore(path, spill_bytes=LEAST) as other:
            store.set("k", VALUE)
            store.append("grown", OTHER)
            store.append("grown", "!")
            other.set("introduced", "1")
            for _ in range(3):
                store.queue_push("q", OTHER)
            assert other.get("k") == VALUE
            if what == "follow":
                store.compact()
            at = At(number, interrupt)
            try:
                with at:
                    other.queue_pop("q") if what == "queue_pop" else other.get("k")
            except KeyboardInterrupt:
                pass
            assert other.get("k") == VALUE, at.where
            assert other.get("grown") == OTHER + b"!", at.where
            assert store.queue_pop("q") == OTHER, at.where
            other.compact()
            assert store.get("k") == VALUE, at.where
            descriptors = log_of(store).handle.owned_fds | log_of(other).handle.owned_fds
            assert all(os.fstat(fd).st_nlink for fd in log_of(other).handle.fds_in_use()), at.where
            assert len(descriptors) <= 8, at.where
        if not at.reached:
            break
        reached += 1
        number += rng.randint(1, stride)
    assert reached > 3


# Threads


def test_threads_read_long_values_while_the_log_goes_from_file_to_file(opened: Callable[..., FileStore]) -> None:
    rounds = 40
    with opened() as store, opened() as compactor:
        store.set("k", VALUE)

        def read() -> None:
            for _ in range(rounds):
                assert store.get("k") in (VALUE, OTHER)
                assert store.multi_get(["k"])[0] in (VALUE, OTHER)

        with start_thread(read), start_thread(read):
            for number in range(rounds):
                compactor.set("k", OTHER if number % 2 else VALUE)
                compactor.compact()


# Mounts that hosts share


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedOs]:
    """A kernel under the package that takes O_DIRECT, and looks at names that are never due."""
    monkeypatch.setattr(network, "PATH_CHECK_S", math.inf)
    monkeypatch.setattr(system, "nfs_recovers_lost_locks", lambda: False)
    with shared_os() as shared:
        yield shared


@pytest.mark.parametrize("how", ["direct", "locked"])
@pytest.mark.parametrize("lock", ["ofd", "flock", "soft"])
def test_long_values_are_read_in_the_way_of_the_mount(
    lock: str, how: str, opened: Callable[..., FileStore], kernel: SharedOs
) -> None:
    opened = partial(opened, lock=lock, coherence=how)
    with opened() as store, opened() as other, opened(read_only=True) as reader:
        for _ in range(3):
            store.set("k", VALUE)
            store.append("k", OTHER)
            store.queue_push("q", OTHER)
            for handle in (store, other, reader):
                assert handle.get("k") == VALUE + OTHER
                kernel.calls.clear()
                log, state = log_of(handle), state_of(handle)
                update = partial(log.update, 0, b"", b"")
                fetched = update(
                    lambda _, __, log=log, state=state: (state.get(b"k", log.read_locked), 0, b""), LIMIT_S
                )
                assert fetched == VALUE + OTHER
                read = [fd for name, fd in kernel.calls if name == "pread"]
                assert read
                if lock == "ofd":
                    assert "open" not in {name for name, _ in kernel.calls}
                assert (how == "direct") == (set(read) <= kernel.direct)
            assert other.queue_pop("q") == OTHER
            store.compact()


@pytest.mark.parametrize("lock", ["ofd", "flock", "soft"])
@pytest.mark.parametrize("read_only", [False, True])
def test_zeros_from_a_cache_are_not_taken_for_a_long_value_nor_for_damage(
    lock: str, read_only: bool, opened: Callable[..., FileStore], kernel: SharedOs
) -> None:
    with opened(lock=lock, coherence="locked") as store:
        store.set("k", VALUE)
        with opened(lock=lock, coherence="locked", read_only=read_only) as other:
            assert other.get("k") == VALUE
            emptied: list[tuple[int, int, int]] = []
            kernel.posix_fadvise = lambda fd, *about: emptied.append(about)
            for lies in (1, 2):
                kernel.zeros = lies
                open_now = len(log_of(other).handle.owned_fds)
                inspect = log_of(other).inspect
                assert inspect(lambda: state_of(other).has(b"k"))
                value = read_consistent(log_of(other), LIMIT_S, lambda fetch: state_of(other).get(b"k", fetch))
                assert value == VALUE
                assert kernel.zeros == 0
                assert len(log_of(other).handle.owned_fds) == open_now
            assert set(emptied) == {(0, 0, os.POSIX_FADV_DONTNEED)}


def test_long_value_whose_file_name_is_missing_is_looked_for_again(
    opened: Callable[..., FileStore], kernel: SharedOs
) -> None:
    with opened(coherence="locked") as store:
        store.set("k", VALUE)
        store.compact()
        kernel.zeros = 2  # so that not even with the lock the cache is believed
        with kernel.fail(0, errno.ENOENT, names=("open",)) as failed:
            kernel.calls.clear()
            assert read_consistent(log_of(store), LIMIT_S, lambda fetch: state_of(store).get(b"k", fetch)) == VALUE
        assert failed == ["open"]
        read = [fd for name, fd in kernel.calls if name == "pread"]
        assert read[0] != read[-1], "it was looked where the log goes on"


def test_look_that_interrupts_a_look_at_long_values_is_refused(opened: Callable[..., FileStore]) -> None:
    with opened() as store, pytest.raises(StoreError, match="by a signal handler or finalizer"):
        log_of(store).inspect(lambda: log_of(store).inspect(dict))


def test_long_value_that_is_damaged_at_the_server_is_reported(
    path: Path, opened: Callable[..., FileStore], kernel: SharedOs
) -> None:
    with opened(coherence="locked") as store:
        store.set("k", VALUE)
        data = path.read_bytes()
        offset = data.index(VALUE)
        with path.open("r+b") as file:
            file.seek(offset + 7)
            file.write(bytes([data[offset + 7] ^ 4]))
        with pytest.raises(CorruptLogError, match="a long value") as raised:
            store.get("k")
        assert raised.value.offset == offset


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("how", ["direct", "locked"])
@pytest.mark.parametrize("compacted", [False, True])
def test_server_that_forgets_the_file_is_asked_again(
    compacted: bool, how: str, error: int, opened: Callable[..., FileStore], kernel: SharedOs
) -> None:
    with opened(coherence=how) as store, opened(coherence=how) as other:
        store.set("k", VALUE)
        store.queue_push("q", OTHER)
        for call, expected in ((other.get, VALUE), (other.queue_pop, OTHER)):
            assert other.get("k") == VALUE
            if compacted:
                store.compact()
            key = "k" if call == other.get else "q"
            for failures in (1, 2, 3, 3):
                left = [failures]

                def fail(name: str, *_: object, left: list[int] = left) -> None:
                    if name == "pread" and left[0]:
                        left[0] -= 1
                        raise OSError(error, os.strerror(error))

                with kernel.instead(fail):
                    assert call(key) == expected
                if key == "q":
                    store.queue_push("q", OTHER)
            assert left == [0]


def test_server_that_goes_on_forgetting_the_file_is_an_error(
    opened: Callable[..., FileStore], kernel: SharedOs
) -> None:
    with opened(coherence="direct") as store:
        store.set("k", VALUE)
        with kernel.fail(0, errno.ESTALE, names=("pread",), for_good=True), pytest.raises(StoreUnavailableError):
            store.get("k")
        assert store.get("k") == VALUE


def test_generation_removed_by_another_host_is_followed_and_not_missed(
    path: Path, opened: Callable[..., FileStore], kernel: SharedOs
) -> None:
    """The server knows the old generation no more: the read is ESTALE, and so is every attempt to open it."""
    with opened(coherence="direct") as store, opened(coherence="direct") as other:
        store.set("k", VALUE)
        store.compact()
        assert other.get("k") == VALUE
        stale = log_of(other).handle.file
        store.set("late", "1")
        store.compact()
        store.compact()
        assert not os.path.exists(stale)
        fds = {fd for fd in log_of(other).handle.owned_fds if os.readlink(f"/proc/self/fd/{fd}").startswith(stale)}

        def forget(name: str, _: object, arguments: tuple[object, ...]) -> None:
            if arguments and (arguments[0] == stale or (name in ("read", "pread", "fstat") and arguments[0] in fds)):
                fds.discard(log_of(other).handle.reader_fd if log_of(other).handle.file != stale else -1)
                if arguments[0] == stale or arguments[0] in fds:
                    raise OSError(errno.ESTALE, "stale")

        with kernel.instead(forget):
            assert other.get("k") == VALUE
            assert other.get("late") == b"1"
