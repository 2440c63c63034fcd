"""The features of `FileStore` beyond the contract: the life of its file, its options, its handles."""

from __future__ import annotations

import gc
import math
import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from support.internals import log_of, notifier_of

from fscoord import (
    FileStore,
    InsecurePathError,
    LimitExceededError,
    PrefixStore,
    StoreClosedError,
    StoreError,
    StoreGoneError,
    StoreUnavailableError,
    UnsupportedFilesystemError,
    open_store,
)
from fscoord._runtime import system
from fscoord.stores import file
from fscoord.stores.file import lifecycle, operations

HANG_S = 120


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=HANG_S, check=False
    )


def files(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


# -- the temporary file ------------------------------------------------------------------------------------------------


def test_store_without_a_path_is_a_private_temporary_file() -> None:
    with FileStore() as store:
        directory = Path(store.path).parent
        assert directory.stat().st_mode & 0o777 == 0o700
        assert Path(store.path).stat().st_mode & 0o777 == 0o600
        assert store.add("n", 1) == 1
    assert not directory.exists()


def test_temporary_file_is_removed_when_its_handle_is_collected() -> None:
    store = FileStore()
    directory = Path(store.path).parent
    del store
    gc.collect()
    assert not directory.exists()


def test_temporary_file_is_removed_when_its_process_exits() -> None:
    result = run("import fscoord; s = fscoord.FileStore(); s.set('k', 'v'); print(s.path)")
    assert result.stderr == ""
    assert result.stdout.strip()
    assert not Path(result.stdout.strip()).parent.exists()


def test_fork_does_not_remove_the_temporary_file_of_its_parent() -> None:
    with FileStore() as store:
        pid = os.fork()
        if not pid:
            try:
                store.close()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        store.set("k", "v")
        assert Path(store.path).exists()


def test_temporary_file_is_shared_by_processes_through_its_path() -> None:
    with FileStore() as store:
        result = run("import fscoord, sys; fscoord.FileStore(sys.argv[1]).set('k', 'from a child')", store.path)
        assert result.stderr == ""
        assert store.get("k") == b"from a child"


# -- world_size --------------------------------------------------------------------------------------------------------


def test_file_is_removed_by_the_last_of_world_size_participants(tmp_path: Path) -> None:
    path = tmp_path / "store"
    one, two = FileStore(path, 2), FileStore(path, 2)
    one.set("k", "v")
    one.close()
    assert path.exists()
    assert two.get("k") == b"v"
    two.close()
    assert files(tmp_path) == set()


def test_side_cars_are_removed_with_the_log_file(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", 1)
    assert not store.check(["k"])
    until = time.monotonic() + HANG_S
    while files(tmp_path) < {"store", "store.alive", "store.bell"} and time.monotonic() < until:
        with pytest.raises(TimeoutError):
            store.wait(["k"], 0.01)
    assert files(tmp_path) == {"store", "store.alive", "store.bell"}
    store.close()
    assert files(tmp_path) == set()


def test_clone_is_not_counted_as_a_participant(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(path, 2)
    with store.clone() as twin:
        twin.set("k", "v")
    store.close()
    assert path.exists()
    with FileStore(path, 2) as last:
        assert last.get("k") == b"v"
    assert not path.exists()


def test_process_that_exits_has_left_as_a_participant(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for _ in range(2):
        result = run("import fscoord, sys; fscoord.FileStore(sys.argv[1], 2).add('n', 1)", path)
        assert result.stderr == ""
    assert not path.exists()


def test_file_stays_if_no_world_size_is_given(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for world_size in (None, -1):
        FileStore(path, world_size).close()
        assert path.exists()


def test_handle_still_open_gets_an_error_once_all_participants_have_left(tmp_path: Path) -> None:
    path = tmp_path / "store"
    late = FileStore(path, 1)
    FileStore(path, 1).close()
    with pytest.raises(StoreGoneError, match="all 1 participants have closed it"):
        late.set("k", "v")
    late.close()


@pytest.mark.parametrize("world_size", [0, -2])
def test_world_size_below_1_is_refused(tmp_path: Path, world_size: int) -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        FileStore(tmp_path / "store", world_size)
    assert files(tmp_path) == set()


# -- names and options -------------------------------------------------------------------------------------------------


def test_file_name_is_c10ds_name_for_path(tmp_path: Path) -> None:
    with FileStore(file_name=str(tmp_path / "store"), world_size=-1) as store:
        assert store.path == str(tmp_path / "store")
    with pytest.raises(TypeError, match="two names for one argument"):
        FileStore(tmp_path / "a", file_name=tmp_path / "b")


def test_relative_path_means_the_same_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FileStore("store") as store:
        store.set("k", "1")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.set("k", "2")
        with store.clone() as twin:
            assert twin.get("k") == b"2"
    assert not (tmp_path / "elsewhere" / "store").exists()


def test_missing_directory_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="does not exist: create it first"):
        FileStore(tmp_path / "missing" / "store")


def test_empty_path_is_an_error() -> None:
    with pytest.raises(ValueError, match="path of a store is empty"):
        FileStore("")


def test_address_instead_of_a_path_is_refused_and_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for address in ("file:store?durable=1", f"file://{tmp_path}/store", "tcp://host:1", "mem:"):
        with pytest.raises(ValueError, match="is an address: pass it to open_store; the file with this name is"):
            FileStore(address)
    assert os.listdir() == []
    FileStore("./file:store").close()
    assert "file:store" in os.listdir()


def test_lock_kind_other_than_that_of_the_log_is_refused_except_to_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path, lock="flock"):
        with pytest.raises(StoreError, match='pass lock="flock"'):
            FileStore(path)
        with FileStore(path, read_only=True) as reader:
            assert reader.num_keys() == 0


def test_durability_cannot_be_added_to_an_existing_log(tmp_path: Path) -> None:
    with FileStore(tmp_path / "a"), pytest.raises(StoreError, match="not made durable"):
        FileStore(tmp_path / "a", durable=True)


def test_durable_log_is_synced_by_each_of_its_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    sync = os.fdatasync
    with FileStore(tmp_path / "a", durable=True) as first, FileStore(tmp_path / "a") as second:
        monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), sync(fd)))
        second.set("k", "v")
        assert len(synced) == 2  # the introduction and the value
        assert first.get("k") == b"v"
        assert len(synced) == 3  # who sees a record may act on it


@pytest.mark.parametrize("option", [{"lock": "posix"}, {"watch": "kqueue"}])
def test_unknown_choice_is_an_error_that_names_the_known_ones(tmp_path: Path, option: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        FileStore(tmp_path / "store", **option)
    assert files(tmp_path) == set()


def test_timeout_without_limit_is_timedelta_max(tmp_path: Path) -> None:
    for limit in (math.inf, timedelta.max):
        with FileStore(tmp_path / "store", timeout=limit) as store:
            assert store.timeout == timedelta.max
            with store.clone() as twin:
                assert twin.timeout == timedelta.max


def test_file_mode_is_exact_under_every_umask(tmp_path: Path) -> None:
    for number, umask in enumerate((0o000, 0o077, 0o777)):
        old = os.umask(umask)
        try:
            with FileStore(tmp_path / str(number), mode=0o640) as store:
                store.set("k", "v")
        finally:
            os.umask(old)
        assert (tmp_path / str(number)).stat().st_mode & 0o777 == 0o640


def test_log_writable_by_others_is_refused_unless_the_mode_allows_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    FileStore(path, mode=0o660).close()
    path.chmod(0o660)
    with pytest.raises(InsecurePathError, match="others can write it") as refused:
        FileStore(path)
    FileStore(path, mode=0o660).close()
    option = re.search(r"in an address (\?mode=\d+)\)", str(refused.value))
    assert option is not None
    open_store(f"file:{path}{option[1]}").close()


# -- handles -----------------------------------------------------------------------------------------------------------


def test_read_only_handle_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("k", "v")
        before = path.read_bytes()
        with FileStore(path, read_only=True) as reader:
            assert reader.get("k") == b"v"
            for call in (lambda: reader.set("k", "2"), lambda: reader.add("n", 1), lambda: reader.delete_key("k")):
                with pytest.raises(StoreError, match="read_only=True"):
                    call()
            with pytest.raises(TimeoutError):
                reader.wait(["missing"], 0.01)
            store.set("k", "later")
            assert reader.get("k") == b"later"
        assert path.read_bytes().startswith(before)
        assert files(tmp_path) == {"store", "store.alive"}


def test_read_only_handle_creates_no_log(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match=f"no store at {tmp_path}/store; check the path"):
        FileStore(tmp_path / "store", read_only=True)
    assert files(tmp_path) == set()
    with pytest.raises(ValueError, match="needs a path"):
        FileStore(read_only=True)


def test_handle_that_is_collected_closes_its_descriptors(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    store = FileStore(tmp_path / "store")
    with pytest.raises(TimeoutError):
        store.wait(["k"], 0.01)
    del store
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def test_handle_that_is_closed_leaves_other_handles_open(tmp_path: Path) -> None:
    one, two = FileStore(tmp_path / "store"), FileStore(tmp_path / "store")
    one.close()
    one.close()
    two.set("k", "v")
    with pytest.raises(StoreClosedError):
        one.get("k")
    two.close()


def test_write_rings_the_bell_for_its_keys_once_a_bell_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[list[bytes]] = []
    with FileStore(tmp_path / "store") as store:
        monkeypatch.setattr(notifier_of(store), "notify", lambda names: rung.append(list(names)))
        writes = (
            lambda: store.set("a", "1"),
            lambda: store.compare_set("a", "1", "2"),
            lambda: store.multi_set(["a", "b"], ["1", "2"]),
            lambda: store.queue_push("q", "1"),
        )
        for write in writes:
            write()
        assert not log_of(store).handle.bell
        assert rung == []
        log_of(store).handle.bell = 1
        for write in writes:
            write()
        assert rung == [[b"a"], [b"a"], [b"a", b"b"], [b"q"]]


def test_clone_has_the_same_options_and_registers_at_its_first_write(
    tmp_path: Path,
) -> None:
    with FileStore(tmp_path / "store", rank=3, label="x", timeout=7) as store:
        twin = store.clone()
        assert [member.rank for member in store.members()] == [3]
        twin.set("k", "v")
        assert [(member.rank, member.label) for member in store.members()] == [(3, "x"), (3, "x")]
        assert twin.timeout == timedelta(seconds=7)
        twin.close()
    with pytest.raises(StoreClosedError):
        store.clone()


@pytest.mark.parametrize("option", [{"rank": 0}, {"label": "x"}, {"rank": 1, "label": "x"}])
def test_handle_with_a_rank_or_label_registers_when_it_is_opened(tmp_path: Path, option: dict[str, object]) -> None:
    path = tmp_path / "store"
    with FileStore(path, **option), FileStore(path, read_only=True) as reader:  # type: ignore[arg-type]
        assert len(reader.members()) == 1
    with pytest.raises(TypeError, match="rank"):
        FileStore(tmp_path / "other", rank="0")  # type: ignore[arg-type]
    assert files(tmp_path) == {"store", "store.alive"}


def test_append_up_to_the_value_limit_succeeds_and_beyond_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "VALUE_MAX", 10)
    with FileStore(tmp_path / "store") as store:
        store.append("k", "12345")
        store.append("k", "67890")
        with pytest.raises(LimitExceededError, match=r"'k': a value of 11 bytes would be over the limit of 10"):
            store.append("k", "x")
        store.append("k", "")
        assert store.get("k") == b"1234567890"


def test_handle_that_is_closed_closes_its_listeners_and_waiting(tmp_path: Path) -> None:
    class Listener:
        closed: list[int] = []  # noqa: RUF012  # of one test

        def close(self, session: int) -> None:
            self.closed.append(session)

    listener = Listener()
    store = FileStore(tmp_path / "store", rank=0)
    store._notifiers.add(listener)  # type: ignore[arg-type]
    waited: list[int] = []
    close = notifier_of(store).close
    notifier_of(store).close = lambda session: (waited.append(session), close(session))  # type: ignore[method-assign]
    store.close()
    assert (listener.closed, waited) == ([0], [1])


def test_close_inside_an_operation_of_the_same_thread_is_refused(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store:
        with log_of(store).handle.mutex:
            log_of(store).handle.shared.is_inside = True
            with pytest.raises(StoreError, match="signal handler or finalizer"):
                store.close()
            log_of(store).handle.shared.is_inside = False
        store.set("k", "v")


def test_repr_of_a_file_store_names_its_path(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store:
        assert repr(store) == f"FileStore({str(tmp_path / 'store')!r})"


def test_library_never_prints(tmp_path: Path) -> None:
    code = """
import fscoord, os, sys
os.symlink("/nowhere", sys.argv[1] + ".bell")
store = fscoord.FileStore(sys.argv[1])
import logging
limit = 0.01
while not logging.getLogger("fscoord").handlers:  # the warning about the bell was not logged yet
    assert limit < float(sys.argv[2])
    try:
        store.wait(["k"], limit)
    except TimeoutError:
        limit *= 2
"""
    result = run(code, tmp_path / "store", HANG_S / 4)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(("world_size", "is_one"), [(None, False), (-1, False), (1, True), (2, True)])
def test_handle_with_a_world_size_is_one_of_its_participants(
    world_size: int | None, is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    begin = lifecycle.register

    def note(store: FileStore, *, is_participant: bool) -> None:
        begun.append(is_participant)
        begin(store, is_participant=is_participant)

    monkeypatch.setattr(lifecycle, "register", note)
    FileStore(tmp_path / "store", world_size).close()
    assert begun == [is_one]


def test_platform_without_locks_is_refused_before_a_file_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "fcntl", None)
    with pytest.raises(UnsupportedFilesystemError, match="use HashStore in one process"):
        FileStore(tmp_path / "store")
    assert files(tmp_path) == set()


def test_store_closed_inside_its_own_call_stays_open(tmp_path: Path) -> None:
    """By a signal handler, or a finalizer."""
    with FileStore(tmp_path / "store", 1) as store:
        with pytest.raises(StoreError, match="signal handler or finalizer"):
            log_of(store).inspect(store.close)
        store.set("k", "v")
        assert store.get("k") == b"v"
    assert files(tmp_path) == set()


def test_call_cost_is_small_on_a_local_file_and_unknown_on_a_shared_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(tmp_path / "store") as store:
        assert store._typical_call_s == file.TYPICAL_CALL_S
    monkeypatch.setattr(system, "mount_table", lambda: [f"1 0 0:1 / {tmp_path} rw - gpfs x rw"])
    with FileStore(tmp_path / "store") as store:
        assert store._typical_call_s == math.inf


# -- what a read costs -------------------------------------------------------------------------------------------------


def test_get_reads_the_log_once_whatever_the_value_is(tmp_path: Path, reads: list[str]) -> None:
    with FileStore(tmp_path / "store", spill_bytes=1000) as store, FileStore(tmp_path / "store") as other:
        other.set("plain", "1")
        for piece in (b"a", b"b"):
            other.append("appended", piece)
        other.set("spilled", b"x" * 2000)
        for key, value in (("plain", b"1"), ("appended", b"ab"), ("spilled", b"x" * 2000)):
            reads.clear()
            assert store.get(key) == value
            assert store.get(key, default=None) == value
            assert len(reads) == 2
        reads.clear()
        assert store.get("missing", default=None) is None
        assert len(reads) == 1


def test_appended_value_is_known_without_a_read(tmp_path: Path, reads: list[str]) -> None:
    with FileStore(tmp_path / "store") as inner, FileStore(tmp_path / "store") as other:
        store = PrefixStore("p", PrefixStore("q", inner))
        other.append("q/p/k", "1")
        store.append("k", "2")
        reads.clear()
        assert store._recall(b"k") == b"12"
        other.append("q/p/k", "3")
        assert store._recall(b"k") == b"12"
        assert reads == []
        assert store.get("k") == b"123"
        assert store._recall(b"k") == b"123"
        assert store._recall(b"missing") is None
