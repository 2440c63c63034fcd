"""The additions of `PrefixStore` to the contract: its keys, its timeout, and its close."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from support.internals import KEY_MAX
from support.third_party import ThirdPartyStore

from fscoord.errors import LimitExceededError, StoreClosedError, StoreTimeoutError
from fscoord.store import Store
from fscoord.stores.memory import HashStore
from fscoord.stores.prefix import PrefixStore


@pytest.fixture(params=[HashStore, ThirdPartyStore], ids=["HashStore", "third-party"])
def base(request: pytest.FixtureRequest) -> Store:
    return request.param()


def test_keys_lie_in_the_store_behind_prefix_and_slash(base: Store) -> None:
    view = PrefixStore("job", base)
    view.set("a", "1")
    view.queue_push("q", "2")
    view.multi_set([b"\xff", ""], ["3", "4"])
    assert base.list_keys() == ["job/", "job/a", "job/\udcff"]
    assert base.queue_pop("job/q") == b"2"
    base.set("job/b", "5")
    assert view.get("b") == b"5"


def test_views_nest_and_the_outermost_prefix_comes_last(base: Store) -> None:
    view = PrefixStore("c", PrefixStore("b", PrefixStore("a", base)))
    view.set("k", "1")
    assert base.list_keys() == ["a/b/c/k"]
    assert view.list_keys() == ["k"]


@pytest.mark.parametrize("prefix", ["", "/", "a/b", b"\xff", "\udcff", "я", b"a\0"])
def test_prefix_may_be_any_key(base: Store, prefix: Any) -> None:
    view = PrefixStore(prefix, base)
    base.set("outside", "0")
    for key in ["k", "", "/", b"\xff\xfe", "я"]:
        view.set(key, "1")
    assert view.num_keys() == 5
    assert view.list_keys() == ["", "/", "k", "я", "\udcff\udcfe"]
    assert view.multi_get(view.list_keys()) == [b"1"] * 5
    assert base.num_keys() == 6


def test_views_count_and_list_their_own_keys_only(base: Store) -> None:
    views = [PrefixStore(prefix, base) for prefix in ["a", "a/b", "ab", ""]]
    for view in views:
        view.set("k", "1")
    assert [view.list_keys() for view in views] == [["b/k", "k"], ["k"], ["k"], ["k"]]
    assert [view.num_keys() for view in views] == [2, 1, 1, 1]


def test_underlying_store_is_the_next_store_inwards(base: Store) -> None:
    inner = PrefixStore("a", base)
    outer = PrefixStore("b", inner)
    assert outer.underlying_store is inner
    assert inner.underlying_store is base


def test_timeout_is_that_of_the_underlying_store(base: Store) -> None:
    outer = PrefixStore("b", PrefixStore("a", base))
    outer.set_timeout(3)
    assert base.timeout == outer.timeout == timedelta(seconds=3)
    base.set_timeout(0)
    with pytest.raises(StoreTimeoutError):
        outer.get("k")


def test_errors_name_the_full_key() -> None:
    view = PrefixStore("b", PrefixStore("a", HashStore(timeout=0)))
    with pytest.raises(StoreTimeoutError, match="'a/b/k'") as caught:
        view.wait(["k"])
    assert caught.value.keys == ("a/b/k",)
    view.set("n", "no number")
    with pytest.raises(ValueError, match="'a/b/n'"):
        view.add("n", 1)


def test_prefix_and_key_together_have_the_length_of_a_key(base: Store) -> None:
    view = PrefixStore("p" * 500, base)
    with pytest.raises(LimitExceededError):
        view.set("k" * (KEY_MAX - 500), "1")
    if isinstance(base, HashStore):
        view.set("k" * (KEY_MAX - 501), "1")
    with pytest.raises(LimitExceededError):
        PrefixStore("p" * (KEY_MAX + 1), base)


def test_prefix_needs_a_store() -> None:
    with pytest.raises(ValueError, match="None"):
        PrefixStore("a", None)  # type: ignore[arg-type]
    for store in ["store", object(), {}]:
        with pytest.raises(TypeError, match="Store"):
            PrefixStore("a", store)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="key"):
        PrefixStore(None, HashStore())  # type: ignore[arg-type]


def test_view_that_is_closed_leaves_the_store_and_its_other_views_open(base: Store) -> None:
    first, second = PrefixStore("a", base), PrefixStore("a", base)
    with first:
        first.set("k", "1")
    with pytest.raises(StoreClosedError):
        first.get("k")
    assert second.get("k") == b"1"
    assert base.get("a/k") == b"1"


def test_view_that_was_cloned_closes_its_own_clone(base: Store) -> None:
    clone = PrefixStore("b", PrefixStore("a", base)).clone()
    assert isinstance(clone, PrefixStore)
    inner = clone.underlying_store
    assert isinstance(inner, PrefixStore)
    clone.set("k", "1")
    clone.close()
    for closed in (clone, inner, inner.underlying_store):
        with pytest.raises(StoreClosedError):
            closed.check(["k"])
    assert base.get("a/b/k") == b"1"


def test_barrier_of_a_view_is_the_barrier_of_the_store_under_the_full_key() -> None:
    class OneRoundTrip(ThirdPartyStore):
        def barrier(self, key: Any, world_size: int, timeout: Any = None) -> None:
            self.asked.append(f"barrier {key!r} {world_size} {timeout}")

    base = OneRoundTrip()
    PrefixStore("a", base).barrier("b", 3, 5)
    assert base.asked == ["barrier b'a/b' 3 5"]


def test_store_that_lacks_the_extended_api_lacks_it_behind_a_prefix() -> None:
    class Plain(ThirdPartyStore):
        def has_extended_api(self) -> bool:
            return False

    assert PrefixStore("a", Plain()).has_extended_api() is False
