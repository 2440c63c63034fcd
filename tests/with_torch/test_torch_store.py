"""`TorchStore`: a store of fscoord where torch wants one of its own, through its C++ and from Python."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support.places import HANG_S, start_thread
from support.torch_lacks import LACKS
from torch.distributed.elastic.utils import store as store_util

import fscoord
from fscoord import FileStore, HashStore, PrefixStore, QueueEmptyError, Store, StoreTimeoutError
from fscoord.integrations import torch as integration
from fscoord.integrations.torch import TorchStore

pytestmark = pytest.mark.torch

QUEUE_EMPTY = getattr(dist, "QueueEmptyError", dist.DistStoreError)
"""The error of torch for an empty queue. A torch without queues has no such error."""

SHORT = timedelta(milliseconds=30)


@pytest.fixture(scope="session", autouse=True)
def _torch_has_opened_what_it_keeps() -> None:
    fscoord.TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False).close()


@pytest.fixture
def fresh() -> Iterator[Callable[[], None]]:
    """Give a function after which this process counts as another one, whose predecessor has left in good order."""

    def leave() -> None:
        for participant in integration._participants.values():
            participant.store.close()
        integration._participants.clear()

    yield leave
    leave()


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
    with pytest.raises(QUEUE_EMPTY):
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


def test_store_timeout_holds_on_a_store_whose_timeout_torch_has_set(direct: TorchStore) -> None:
    direct.set_timeout(timedelta(seconds=HANG_S))  # as init_process_group does
    with fscoord.store_timeout(direct, 0.05), pytest.raises(StoreTimeoutError) as caught:
        direct.get("missing")
    assert caught.value.waited < HANG_S / 2
    assert direct.timeout == timedelta(seconds=HANG_S)
    with pytest.raises(StoreTimeoutError, match=r"timeout=0\.05") as caught:
        fscoord.barrier(direct, 2, "b", 0.05, 0, trace_timeout=0.05)
    assert caught.value.waited < HANG_S / 2
    with pytest.raises(StoreTimeoutError):
        direct.get("missing", timeout=0.05)
    assert direct.get("missing", default=None) is None
    assert direct.create("k", "v")
    assert direct.pop("k") == b"v"


def test_errors_of_a_torch_store_are_errors_of_both(direct: TorchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(dist.DistStoreError) as caught:
        direct.get("missing", timeout=0.01)
    assert isinstance(caught.value, StoreTimeoutError)
    assert caught.value.keys == ("missing",)
    with pytest.raises(QUEUE_EMPTY) as empty:
        direct.queue_pop("q", block=False)
    assert isinstance(empty.value, QueueEmptyError)
    # torch 2.6 has no error for an empty queue.
    older = types.SimpleNamespace(DistStoreError=dist.DistStoreError)
    monkeypatch.setattr(integration, "dist", older)
    with pytest.raises(dist.DistStoreError) as unnamed:
        direct.queue_pop("q", block=False)
    assert isinstance(unnamed.value, QueueEmptyError)


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
    if not hasattr(store, "clone"):
        pytest.skip(f"{LACKS}Store.clone")
    other = store.clone()
    waiting = start_thread(store.get, "k")
    other.set("k", "v")
    assert waiting.join() == b"v"
    assert other.timeout == store.timeout
    (other.underlying_store if isinstance(other, dist.PrefixStore) else other).close()


# -- init_method="fscoord:///path" -------------------------------------------------------------------------------------


def open_url(url: str) -> TorchStore:
    store, _, _ = next(integration.rendezvous(url))
    return store


def path_of(store: TorchStore) -> str:
    inner = store.underlying_store
    assert isinstance(inner, PrefixStore)
    assert isinstance(inner.underlying_store, FileStore)
    return inner.underlying_store.path


@pytest.mark.usefixtures("fresh")
def test_url_gives_store_rank_and_world_size(tmp_path: Path) -> None:
    url = f"fscoord://{tmp_path}/store?rank=0&world_size=1&lock=flock"
    handler = dist.rendezvous(url, timeout=timedelta(seconds=7))
    store, rank, world_size = next(handler)
    assert (rank, world_size) == (0, 1)
    assert store.timeout == timedelta(seconds=7)
    assert path_of(store) == str(tmp_path / "store")
    with pytest.raises(RuntimeError, match="one process group only"):
        next(handler)


@pytest.mark.usefixtures("fresh")
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
    assert path_of(store) == str(tmp_path / "store")


@pytest.mark.parametrize("by", ["URL", "arguments"])
@pytest.mark.parametrize("url", ["fscoord://otherhost/path", "fscoord://otherhost:29500/path", "fscoord://tmp"])
def test_url_that_names_a_host_is_refused_and_creates_nothing(url: str, by: str) -> None:
    with pytest.raises(ValueError, match=r"names the host .* three slashes: fscoord:///path"):
        next(dist.rendezvous(url, 0, 1) if by == "arguments" else dist.rendezvous(f"{url}?rank=0&world_size=1"))
    assert not Path("/path").exists()


@pytest.mark.usefixtures("fresh")
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
    assert path_of(store) == str(tmp_path / "store")


@pytest.mark.usefixtures("fresh")
def test_url_options_mean_the_same_as_in_open_store(tmp_path: Path) -> None:
    store = open_url(f"fscoord://{tmp_path}/a%3F%23b+c?rank=0&world_size=1&label=x+y%20z")
    assert path_of(store) == str(tmp_path / "a?#b+c")
    assert [member.label for member in store.underlying_store.members()] == ["x+y z"]


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
        ("?rank=0&world_size=1&timeout=soon", "timeout=soon is not a number"),
        ("?rank=0&world_size=1&run_id=", "run_id"),
    ],
)
def test_bad_url_is_an_error_that_names_the_mistake(query: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        next(integration.rendezvous(f"fscoord://{tmp_path}/store{query}"))


@pytest.mark.usefixtures("fresh")
def test_store_without_an_earlier_launch_is_joined(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", rank=0) as before:
        before.set("written before the launch", "1")
    store = open_url(f"fscoord://{tmp_path}/store?rank=0&world_size=1")
    assert store.underlying_store.underlying_store.get("written before the launch") == b"1"


def test_groups_of_one_process_have_keys_of_their_own(fresh: Callable[[], None], tmp_path: Path) -> None:
    url = f"fscoord://{tmp_path}/store?rank=0&world_size=1"
    for number in range(3):
        store = open_url(url)
        assert store.list_keys("address") == []
        store.set(f"address{number}", "1")
    fresh()
    assert open_url(url).list_keys("address") == []


def test_path_is_the_same_by_each_of_its_names(
    fresh: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two participants of one process would end the run of two processes when the process exits."""
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for path in (f"//{tmp_path}/store", "store", f"//{tmp_path}/link/store"):
        open_url(f"fscoord:{path}?rank=0&world_size=1")
    assert len(integration._participants) == 1
    fresh()


@pytest.mark.usefixtures("fresh")
def test_timeout_is_that_of_each_call(tmp_path: Path) -> None:
    url = f"fscoord://{tmp_path}/store?rank=0&world_size=1"
    for query, argument, limit in (("", 7, 7), ("&timeout=9", 7, 9), ("", 8, 8), ("&timeout=2.5", None, 2.5)):
        store, _, _ = next(integration.rendezvous(url + query, timeout=argument))
        assert store.timeout == timedelta(seconds=limit)


def test_package_import_does_not_import_torch() -> None:
    code = "import fscoord, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
