"""`TorchStore`: a store of fscoord where torch wants one of its own, through its C++ and from Python."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support.places import HANG_S, start_thread
from torch.distributed.elastic.utils import store as store_util

import fscoord
from fscoord import FileStore, HashStore, Store
from fscoord.integrations import torch as integration
from fscoord.integrations.torch import TorchStore

pytestmark = pytest.mark.torch

WORKER = Path(__file__).with_name("gloo_worker.py")
SHORT = timedelta(milliseconds=30)


@pytest.fixture(scope="session", autouse=True)
def _torch_has_opened_what_it_keeps() -> None:
    fscoord.TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False).close()


@pytest.fixture(params=["file", "hash"])
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FileStore(tmp_path / "store", timeout=HANG_S) if request.param == "file" else HashStore(timeout=HANG_S)


@pytest.fixture
def direct(inner: Store) -> Iterator[TorchStore]:
    store = TorchStore(inner)
    yield store
    store.close()


@pytest.fixture(params=["direct", "through C++"])
def store(request: pytest.FixtureRequest, direct: TorchStore) -> dist.Store:
    """The store as Python sees it, and as torch's C++ does: under its own PrefixStore."""
    return direct if request.param == "direct" else dist.PrefixStore("job", direct)


# -- the operations ----------------------------------------------------------------------------------------------------


def test_values_are_given_as_text_or_bytes_and_returned_as_bytes(store: dist.Store) -> None:
    store.set("text", "v")
    store.set("bytes", b"\0\xff")
    assert (store.get("text"), store.get("bytes")) == (b"v", b"\0\xff")
    assert store.multi_get(["bytes", "text"]) == [b"\0\xff", b"v"]


def test_add_and_compare_set_work_as_in_torch(store: dist.Store) -> None:
    assert (store.add("n", 5), store.add("n", -7), store.get("n")) == (5, -2, b"-2")
    assert store.compare_set("k", "", "1") == b"1"
    assert store.compare_set("k", "2", "3") == b"1"
    assert store.compare_set("k", "1", b"3") == b"3"
    assert store.compare_set("missing", "x", "y") == b"x"
    assert not store.check(["missing"])


def test_delete_key_returns_if_the_key_existed(store: dist.Store) -> None:
    store.set("k", "v")
    assert (store.delete_key("k"), store.delete_key("k")) == (True, False)
    assert store.num_keys() == 0


def test_append_of_a_value_equal_to_the_present_one_is_not_lost(store: dist.Store) -> None:
    for _ in range(3):
        store.append("k", "x")
    assert store.get("k") == b"xxx"


def test_multi_set_and_multi_get_take_several_values(store: dist.Store) -> None:
    assert store.has_extended_api()
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    assert store.check(["a", "b"])
    with pytest.raises(ValueError, match="1 keys but 2 values"):
        store.multi_set(["a"], ["1", "2"])


def test_methods_exist_in_both_spellings(direct: TorchStore) -> None:
    direct.set("k", "v")
    assert (direct.getNumKeys(), direct.num_keys()) == (1, 1)
    assert (direct.deleteKey("k"), direct.delete_key("k")) == (True, False)


def test_operations_that_torch_lacks_work_from_python(direct: TorchStore) -> None:
    direct.queue_push("q", "1")
    assert (direct.queue_len("q"), direct.queue_pop("q")) == (1, b"1")
    with pytest.raises(dist.QueueEmptyError):
        direct.queue_pop("q", block=False)
    direct.set("k", "v")
    assert direct.list_keys() == ["k"]
    direct.barrier("b", 1)


# -- timeouts ----------------------------------------------------------------------------------------------------------


def test_timeout_is_that_of_the_store_until_torch_sets_another(store: dist.Store, direct: TorchStore) -> None:
    assert store.timeout == timedelta(seconds=HANG_S)
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match=r"^timeout: .*did not come within"):
        store.get("never")
    assert direct.underlying_store.timeout == SHORT


def test_timeout_error_is_that_of_torch_with_ours_as_its_cause(store: dist.Store) -> None:
    with pytest.raises(dist.DistStoreError, match="never") as caught:
        store.wait(["never"], SHORT)
    assert isinstance(caught.value.__cause__, fscoord.StoreTimeoutError)


@pytest.mark.parametrize("by", ["call", "store"])
def test_timeout_of_zero_means_no_limit(store: dist.Store, inner: Store, by: str) -> None:
    if by == "store":
        store.set_timeout(timedelta(0))
    waiting = start_thread(store.wait, ["k"], *([timedelta(0)] if by == "call" else []))
    store.set("other", "1")
    assert waiting.is_alive()
    store.set("k", "v")
    waiting.join()


def test_negative_timeout_looks_once(store: dist.Store) -> None:
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], timedelta(seconds=-1))


def test_infinite_timeout_is_zero_for_torch() -> None:
    store = TorchStore(HashStore(timeout=timedelta.max))
    assert store.timeout == timedelta(0)
    store.close()


# -- errors ------------------------------------------------------------------------------------------------------------


def test_addition_to_a_value_that_is_no_integer_is_a_value_error(store: dist.Store) -> None:
    store.set("k", "abc")
    with pytest.raises(ValueError, match="not an integer"):
        store.add("k", 1)
    assert store.get("k") == b"abc"


def test_store_error_is_also_an_error_of_torch(tmp_path: Path) -> None:
    store = TorchStore(FileStore(tmp_path / "store"))
    store.underlying_store.close()
    through = dist.PrefixStore("job", store)
    with pytest.raises(dist.DistStoreError, match="is closed") as caught:
        through.set("k", "v")
    assert isinstance(caught.value.__cause__, fscoord.StoreClosedError)
    store.close()


def test_elastic_barrier_names_the_missing_ranks_on_a_file(direct: TorchStore) -> None:
    with pytest.raises(dist.DistStoreError, match=r"missing_ranks=\[host[12], host[12]\]"):
        store_util.barrier(
            direct, 3, "b", barrier_timeout=0.05, rank=0, rank_tracing_decoder=lambda rank: f"host{rank}",
            trace_timeout=0.05,
        )  # fmt: skip


# -- life --------------------------------------------------------------------------------------------------------------


def test_store_referenced_only_by_torch_stays_usable() -> None:
    prefixed = dist.PrefixStore("job", TorchStore(HashStore()))
    gc.collect()
    prefixed.set("k", "v")
    assert prefixed.get("k") == b"v"
    prefixed.underlying_store.close()


def test_closed_store_is_collected() -> None:
    store = TorchStore(HashStore())
    store.close()
    seen = weakref.ref(store)
    del store
    gc.collect()
    assert seen() is None


def test_clone_works_in_another_thread_while_the_store_waits(store: dist.Store) -> None:
    other = store.clone()
    waiting = start_thread(store.get, "k")
    other.set("k", "v")
    assert waiting.join() == b"v"
    assert other.timeout == store.timeout
    (other.underlying_store if isinstance(other, dist.PrefixStore) else other).close()


# -- process groups ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["store", "url"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_process_group_on_gloo_runs_on_a_torch_store(how: str, world_size: int, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    command = [sys.executable, "-W", "ignore", str(WORKER), how, path]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=150)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert [process.returncode for process in ranks] == [0] * world_size, "\n".join(outputs)
    assert outputs == [f"rank {rank} is done\n" for rank in range(world_size)]


# -- init_method="fscoord:///path" -------------------------------------------------------------------------------------


def test_url_gives_store_rank_and_world_size(tmp_path: Path) -> None:
    url = f"fscoord://{tmp_path}/store?rank=1&world_size=2&lock=flock"
    handler = dist.rendezvous(url, timeout=timedelta(seconds=7))
    store, rank, world_size = next(handler)
    assert (rank, world_size) == (1, 2)
    assert store.timeout == timedelta(seconds=7)
    inner = store.underlying_store
    assert isinstance(inner, FileStore)
    assert inner.path == str(tmp_path / "store")
    with pytest.raises(RuntimeError, match="one process group only"):
        next(handler)
    store.close()


@pytest.mark.parametrize("slashes", ["fscoord:", "fscoord://", "fscoord:///", "fscoord:////", "fscoord://localhost"])
@pytest.mark.parametrize("by", ["URL", "arguments", "handler"])
def test_absolute_path_has_one_slash_or_three_or_four(slashes: str, by: str, tmp_path: Path) -> None:
    """torch takes a URL apart when it is given rank and size as arguments, and may lose slashes in that."""
    url = f"{slashes}{tmp_path}/store"
    if by == "arguments":
        store, _, _ = next(dist.rendezvous(url, 0, 1))
    else:
        begin = dist.rendezvous if by == "URL" else integration.rendezvous
        store, _, _ = next(begin(f"{url}?rank=0&world_size=1"))
    assert store.underlying_store.path == str(tmp_path / "store")
    store.close()


@pytest.mark.parametrize("by", ["URL", "arguments"])
@pytest.mark.parametrize("url", ["fscoord://otherhost/path", "fscoord://otherhost:29500/path", "fscoord://tmp"])
def test_url_that_names_a_host_is_refused_and_creates_nothing(url: str, by: str) -> None:
    with pytest.raises(ValueError, match=r"names the host .* three slashes: fscoord:///path"):
        next(dist.rendezvous(url, 0, 1) if by == "arguments" else dist.rendezvous(f"{url}?rank=0&world_size=1"))
    assert not Path("/path").exists()


def test_url_host_named_like_a_directory_is_a_path_if_slashes_can_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are by Python 3.12 and older."""
    url = f"fscoord:/{tmp_path}/store?rank=0&world_size=1"
    assert url.startswith("fscoord://tmp/")
    monkeypatch.setattr("urllib.parse.urlunsplit", lambda parts: f"{parts.scheme}://{parts.path}")
    with pytest.raises(ValueError, match="names the host 'tmp'"):
        next(integration.rendezvous(url))
    monkeypatch.setattr("urllib.parse.urlunsplit", lambda parts: f"{parts.scheme}:{parts.path}")
    store, _, _ = next(integration.rendezvous(url))
    assert store.underlying_store.path == str(tmp_path / "store")
    store.close()


def test_url_options_mean_the_same_as_in_open_store(tmp_path: Path) -> None:
    url = f"fscoord://{tmp_path}/a%3F%23b+c?rank=0&world_size=1&label=x+y%20z"
    store, _, _ = next(integration.rendezvous(url))
    assert store.underlying_store.path == str(tmp_path / "a?#b+c")
    assert [member.label for member in store.underlying_store.members()] == ["x+y z"]
    store.close()


def test_host_and_port_are_those_of_a_tcp_store_and_missing_otherwise(tmp_path: Path) -> None:
    inner = fscoord.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TorchStore(inner)
    assert (store.host, store.port) == ("127.0.0.1", inner.port)
    store.close()
    store = TorchStore(FileStore(tmp_path / "store"))
    assert not hasattr(store, "port")
    with pytest.raises(AttributeError, match="has no host: only a TCPStore has a server"):
        store.host  # noqa: B018
    store.close()


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("#part?rank=0&world_size=1", "no meaning here"),
        ("?rank=0&world_size=1&lock", "has no value"),
        ("?rank=1", "world_size is missing"),
        ("?world_size=1", "rank is missing"),
        ("?rank=one&world_size=2", "rank=one is not an integer"),
        ("?rank=2&world_size=2", "rank 2 is not one of 2"),
        ("?rank=0&world_size=1&bogus=1", "unknown option 'bogus'"),
    ],
)
def test_bad_url_is_an_error_that_names_the_mistake(query: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        next(integration.rendezvous(f"fscoord://{tmp_path}/store{query}"))


# -- a second launch with the same path --------------------------------------------------------------------------------


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("PYTEST_XDIST_", "SLURM_", "FLUX_", "PALS_", "TORCHELASTIC_", "FSCOORD_")):
            monkeypatch.delenv(name)
    assert fscoord.environment.detect().run_id is None


def launch(how: str, path: Path, **environment: str) -> list[subprocess.Popen[str]]:
    """Start two ranks of one launch."""
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), how, str(path), str(rank), "2"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.mark.timeout(180)
def test_job_that_was_killed_and_restarted_meets_again_at_the_same_path(tmp_path: Path) -> None:
    """Without runs the second launch finds the addresses of the first, at which no process listens any longer."""
    job = {"SLURM_JOB_ID": "4711"}
    ranks = launch("stay", tmp_path / "store", **job)
    try:
        assert [rank.stdout.readline() for rank in ranks if rank.stdout] == ["stays\n"] * 2
        for rank in ranks:
            rank.kill()
            rank.communicate()
        again = launch("url", tmp_path / "store", **job, SLURM_RESTART_COUNT="1")
        ranks += again
        outputs = [rank.communicate(timeout=100) for rank in again]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in again] == [0, 0], outputs


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("no_launcher")
def test_launch_without_a_run_id_meets_at_the_path_of_an_ended_launch(tmp_path: Path) -> None:
    """As with torch's ``file://``, and also after a kill."""
    first = launch("stay", tmp_path / "store")
    later: list[subprocess.Popen[str]] = []
    try:
        assert [rank.stdout.readline() for rank in first if rank.stdout] == ["stays\n"] * 2
        for rank in first:
            rank.kill()
            rank.communicate()
        for _ in range(2):
            later = launch("url", tmp_path / "store")
            outputs = [rank.communicate(timeout=100) for rank in later]
            assert [rank.returncode for rank in later] == [0, 0], outputs
    finally:
        for rank in (*first, *later):
            rank.kill()
            rank.communicate()


def open_url(path: Path, rank: int, query: str = "") -> TorchStore:
    store, _, _ = next(integration.rendezvous(f"fscoord://{path}/store?rank={rank}&world_size=2{query}"))
    return store


@pytest.mark.parametrize("by", ["URL", "URL with a count", "environment"])
def test_late_rank_joins_only_its_own_launch(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_in(launch: int, rank: int) -> TorchStore:
        if by == "URL":
            return open_url(tmp_path, rank, f"&run_id=launch%20{launch}")
        if by == "URL with a count":
            return open_url(tmp_path, rank, f"&run_id=job&restart={launch}")
        monkeypatch.setenv("SLURM_JOB_ID", "4711")
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(launch))
        return open_url(tmp_path, rank)

    killed = open_in(0, 0)
    killed.set("address", "old")
    first = open_in(1, 0)
    assert not first.check(["address"])
    first.set("address", "new")
    late = open_in(1, 1)
    assert late.get("address") == b"new"
    with pytest.raises(fscoord.StaleRunError):
        open_in(0, 1)
    with pytest.raises(dist.DistStoreError) as caught:
        killed.get("address")
    assert isinstance(caught.value.__cause__, fscoord.StaleRunError)
    for store in (killed, first, late):
        store.close()


def run_elsewhere(path: Path, rank: int, query: str = "") -> subprocess.CompletedProcess[str]:
    """Open the URL in another process, which then ends."""
    code = f"from fscoord.integrations.torch import rendezvous as r; next(r('fscoord://{path}/store?rank={rank}"
    command = [sys.executable, "-W", "ignore", "-c", f"{code}&world_size=2{query}'))"]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.usefixtures("no_launcher")
def test_rank_begins_a_new_run_after_all_processes_of_a_launch_have_ended(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as before:
        before.set("written before the launch", "1")
    run_elsewhere(tmp_path, 0).check_returncode()
    run_elsewhere(tmp_path, 1).check_returncode()
    first = open_url(tmp_path, 0)
    assert not first.check(["written before the launch"])
    first.set("address", "1")
    late = open_url(tmp_path, 1)
    assert late.get("address") == b"1"
    first.close()
    late.close()


@pytest.mark.usefixtures("no_launcher")
def test_rank_that_opens_first_joins_a_store_without_an_earlier_launch(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", rank=0) as before:
        before.set("written before the launch", "1")
    store = open_url(tmp_path, 0)
    assert store.get("written before the launch") == b"1"
    store.close()


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("query", ["", "&run_id=x", "&run_id="])
def test_rank_of_a_launch_that_still_lives_is_refused_to_another_process(query: str, tmp_path: Path) -> None:
    store = open_url(tmp_path, 1, query)
    run_elsewhere(tmp_path, 0, query).check_returncode()
    again, alive = run_elsewhere(tmp_path, 0, query).stderr, run_elsewhere(tmp_path, 1, query).stderr
    me = next(member for member in store.underlying_store.members() if member.pid == os.getpid())
    assert "rank 0 is process" in again
    assert "already, which has ended" in again
    assert f"(not known to have ended: rank 1 ({me.host}:{me.pid}))" in again
    assert f"rank 1 is process {me.host}:{me.pid} already, which is alive" in alive
    assert f"rm -f {tmp_path}/store {tmp_path}/store.*" in alive
    store.close()


@pytest.mark.usefixtures("no_launcher")
def test_process_may_take_its_rank_again(tmp_path: Path) -> None:
    stores = [open_url(tmp_path, 0) for _ in range(2)]
    for store in stores:
        store.close()


def test_empty_run_id_joins_the_present_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(tmp_path / "store") as before:
        before.set("k", "v")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    store = open_url(tmp_path, 0, "&run_id=")
    assert store.get("k") == b"v"
    store.close()


def test_package_import_does_not_import_torch() -> None:
    code = "import fscoord, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
