"""`open_store`: the meaning of addresses, and the errors of invalid ones."""

from __future__ import annotations

import gc
import inspect
import math
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fscoord.errors import StoreTimeoutError
from fscoord.store import Store
from fscoord.stores import url
from fscoord.stores.file import FileStore
from fscoord.stores.memory import HashStore
from fscoord.stores.url import ENVIRONMENT_VARIABLE, open_store, parse_url, register_scheme


@pytest.fixture(autouse=True)
def _no_address_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


calls: list[tuple[str, str, dict[str, Any]]] = []


def note(host: str, path: str, **options: Any) -> Store:
    calls.append((host, path, options))
    return HashStore()


register_scheme("seen", note, {"number": int, "text": str})


@pytest.fixture
def opened() -> list[tuple[str, str, dict[str, Any]]]:
    """What the scheme `seen:` is called with."""
    calls.clear()
    return calls


def refused(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        open_store(*arguments, **options)
    return str(caught.value)


# Files


@pytest.mark.parametrize("form", ["file://{}", "file:{}", "file://localhost{}", "FILE://{}", "{}"])
def test_forms_of_one_path_open_one_store(tmp_path: Path, form: str) -> None:
    path = tmp_path / "store"
    with open_store(form.format(path)) as first, open_store(path) as second:
        assert isinstance(first, FileStore)
        first.set("k", "1")
        assert second.get("k") == b"1"
    assert path.is_file()


@pytest.mark.parametrize("form", ["file:store", "store", "./store", "file:./store"])
def test_relative_path_counts_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(form).close()
    assert (tmp_path / "store").is_file()


@pytest.mark.parametrize(
    ("encoded", "name"),
    [("a%20b", "a b"), ("a%3Fb%23c%25", "a?b#c%"), ("%D1%8F", "я"), ("%ff", os.fsdecode(b"\xff")), ("a+b", "a+b")],
)
def test_url_path_is_percent_decoded(tmp_path: Path, encoded: str, name: str) -> None:
    open_store(f"file://{tmp_path}/{encoded}").close()
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["a%20b", "a#b", "a b", "a%zz"])
def test_bare_path_is_not_decoded(tmp_path: Path, name: str) -> None:
    open_store(f"{tmp_path}/{name}").close()
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["a?timeout=1", "a%3F", "mem:x", "tcp:x"])
def test_path_object_is_not_parsed_as_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(Path(name)).close()
    assert os.listdir(tmp_path) == [name]


def test_options_in_the_query_reach_the_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_store(f"file://{path}?timeout=2.5&world_size=1&rank=0&lock=flock&watch=poll&durable=1&mode=640") as store:
        assert store.timeout == timedelta(seconds=2.5)
        assert path.stat().st_mode & 0o777 == 0o640
    assert not path.exists(), "world_size=1 was not heard"


def test_file_url_options_are_those_of_the_constructor() -> None:
    parameters = inspect.signature(FileStore).parameters.keys() - {"path", "file_name"}
    known = refused("file:x?nothing=1").partition("known are ")[2].split(", ")
    assert set(known) == parameters | {"restart"}


def test_arguments_override_the_query(tmp_path: Path) -> None:
    with open_store(f"file:{tmp_path}/store?timeout=1", timeout=timedelta(seconds=2)) as store:
        assert store.timeout == timedelta(seconds=2)


def test_host_in_a_file_url_is_an_error_that_shows_the_three_slashes() -> None:
    assert "file:///" in refused("file://shared/store")


@pytest.mark.parametrize("address", ["file:", "file://", "file://localhost"])
def test_file_url_needs_a_path(address: str) -> None:
    assert "path" in refused(address)


def test_bare_path_with_a_query_is_an_error_that_shows_the_right_url() -> None:
    message = refused("/shared/store?timeout=1")
    assert "file:/shared/store?timeout=1" in message
    assert "%3F" in message


# Memory


def test_memory_name_opens_one_shared_store() -> None:
    with open_store("mem:test-a") as first, open_store("mem:test-a") as second, open_store("mem:test-b") as other:
        first.set("k", "1")
        assert second.get("k") == b"1"
        assert not other.check(["k"])


def test_memory_handles_have_their_own_timeouts() -> None:
    with open_store("mem:test-a?timeout=1") as first, open_store("mem:test-a", timeout=2) as second:
        assert (first.timeout, second.timeout) == (timedelta(seconds=1), timedelta(seconds=2))


def test_memory_store_without_a_name_is_private() -> None:
    with open_store("mem:") as first, open_store("mem:") as second:
        first.set("k", "1")
        assert not second.check(["k"])


def test_memory_name_is_forgotten_with_its_last_open_handle() -> None:
    first = open_store("mem:test-a")
    clone = first.clone()
    first.set("k", "1")
    first.close()
    with open_store("mem:test-a") as second:
        assert second.get("k") == b"1"
    clone.close()
    gc.collect()
    with open_store("mem:test-a") as third:
        assert third.num_keys() == 0


# The environment


def test_url_is_taken_from_the_environment_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "mem:test-env?timeout=3")
    with open_store() as store, open_store("mem:test-env") as other, open_store(timeout=4) as third:
        other.set("k", "1")
        assert store.get("k") == b"1"
        assert store.timeout == timedelta(seconds=3)
        assert third.timeout == timedelta(seconds=4)


@pytest.mark.parametrize("value", [None, ""])
def test_missing_url_is_an_error_that_names_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is not None:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, value)
    assert ENVIRONMENT_VARIABLE in refused()
    assert ENVIRONMENT_VARIABLE in refused("")


# Options and their errors


def test_unknown_option_is_an_error_that_lists_the_known_ones() -> None:
    message = refused("mem:?timout=1")
    assert "'timout'" in message
    assert "timeout" in message.partition("known are")[2]
    assert "world_size" in refused("file:x?nonsense=1")
    assert "'nonsense'" in refused("mem:", nonsense=1)


@pytest.mark.parametrize(
    "query",
    [
        "timeout=abc", "timeout=", "timeout=-1", "timeout=nan", "world_size=1.5", "rank=x", "durable=2",
        "read_only=maybe", "mode=999", "mode=rw", "mode=0b11", "lock=lockf", "watch=never", "timeout",
        "timeout=1&timeout=2",
    ],
)  # fmt: skip
def test_invalid_option_is_an_error_and_opens_nothing(tmp_path: Path, query: str) -> None:
    message = refused(f"file:{tmp_path}/store?{query}")
    assert query.partition("=")[0] in message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("text", "value"), [("inf", timedelta.max), ("1e3", timedelta(seconds=1000))])
def test_timeout_in_a_url_is_any_number(text: str, value: timedelta) -> None:
    with open_store(f"mem:?timeout={text}") as store:
        assert store.timeout == value
    with open_store("mem:", timeout=math.inf) as store:
        assert store.timeout == timedelta.max


@pytest.mark.parametrize("text", ["1", "true", "Yes", "on", "0", "FALSE", "no", "off"])
def test_boolean_option_has_several_spellings(text: str) -> None:
    assert url.convert({"durable": text}, "file")["durable"] is (text.lower() in ("1", "true", "yes", "on"))


@pytest.mark.parametrize("text", ["600", "0600", "0o600"])
def test_mode_option_is_octal(text: str) -> None:
    assert url.convert({"mode": text}, "file") == {"mode": 0o600}


@pytest.mark.parametrize("text", ["999", "rw"])
def test_mode_that_is_not_octal_is_refused_with_an_example(text: str) -> None:
    assert refused(f"file:store?mode={text}").endswith(f"mode={text}: '{text}' is not a mode in octal, such as 0660")


def test_timeout_of_zero_looks_once() -> None:
    with open_store("mem:?timeout=0") as store, pytest.raises(StoreTimeoutError):
        store.get("k")


# Schemes


def test_unknown_scheme_is_an_error_that_lists_the_known_ones() -> None:
    message = refused("redis://host/0")
    assert "redis:" in message
    assert "file:, mem:" in message
    assert "./a:b" in message


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package, `acme`, with two entry points: one that works and one that does not."""
    (tmp_path / "acme_stores.py").write_text(
        "from fscoord import HashStore\n"
        "from fscoord.stores.url import register_scheme\n\n"
        "def register():\n"
        "    register_scheme('acme', lambda host, path, **options: HashStore(**options), {'timeout': float})\n"
    )
    info = tmp_path / "acme_stores-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-stores\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fscoord.stores]\nacme = acme_stores:register\nbroken = acme_stores:nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("acme_stores", None)


@pytest.mark.usefixtures("installed")
def test_scheme_of_another_package_is_loaded_from_its_entry_point_on_demand() -> None:
    open_store("mem:").close()
    assert "acme_stores" not in sys.modules
    for _ in range(2):
        with open_store("acme://host/path?timeout=3") as store:
            assert store.timeout.total_seconds() == 3
    assert "the entry point acme_stores:nothing of the scheme 'broken' failed" in refused("broken:x")


def test_tilde_at_the_beginning_of_a_path_is_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for directory in (home, here, here / "~"):
        directory.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    for number, address in enumerate(("~/0", "file:~/1", "file:~/2?timeout=3", "file://localhost/~/3")):
        assert parse_url(address)[2] == (f"/~/{number}" if "localhost" in address else f"{home}/{number}")
    open_store("~/store").close()
    for exact in ("./~/exact", Path("~/exact of a path")):
        open_store(exact).close()
    assert sorted(os.listdir(home)) == ["store"]
    assert sorted(os.listdir(here / "~")) == ["exact", "exact of a path"]


def test_single_letter_and_a_colon_are_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_store("C:store").close()
    open_store("./mem:x").close()
    assert sorted(os.listdir(tmp_path)) == ["C:store", "mem:x"]


@pytest.mark.parametrize(
    ("address", "call"),
    [
        ("seen:", ("", "", {})),
        ("seen:a/b", ("", "a/b", {})),
        ("seen://host", ("host", "", {})),
        ("seen://host:12/a%20b?number=3&text=%26x=y", ("host:12", "/a b", {"number": 3, "text": "&x=y"})),
        ("seen:///a", ("", "/a", {})),
        ("SEEN:?", ("", "", {})),
        ("seen:?&number=1&", ("", "", {"number": 1})),
        ("seen:?text=", ("", "", {"text": ""})),
    ],
)
def test_registered_scheme_gets_host_path_and_options_decoded(
    opened: list[tuple[str, str, dict[str, Any]]], address: str, call: tuple[str, str, dict[str, Any]]
) -> None:
    open_store(address).close()
    assert opened == [call]


def test_option_given_as_an_argument_is_passed_unchanged(opened: list[tuple[str, str, dict[str, Any]]]) -> None:
    marker = object()
    open_store("seen:x?number=1", number=marker, text=None).close()
    assert opened == [("", "x", {"number": marker, "text": None})]


@pytest.mark.parametrize("address", ["seen:a#b", "seen:%zz", "seen:%", "seen:?text=%2", "seen:?number"])
def test_malformed_url_is_an_error_and_opens_nothing(
    opened: list[tuple[str, str, dict[str, Any]]], address: str
) -> None:
    refused(address)
    assert opened == []


@pytest.mark.parametrize("scheme", ["seen", "SEEN", "file", "mem"])
@pytest.mark.usefixtures("opened")
def test_scheme_already_registered_is_refused(scheme: str) -> None:
    with pytest.raises(ValueError, match="registered"):
        register_scheme(scheme, lambda _host, _path: HashStore(), {})


@pytest.mark.parametrize("scheme", ["", "x", "1x", "a_b", "a:", "a b", "ünder"])
def test_invalid_scheme_name_is_refused(scheme: str) -> None:
    with pytest.raises(ValueError, match="scheme"):
        register_scheme(scheme, lambda _host, _path: HashStore(), {})


@pytest.mark.parametrize("address", [1, 1.5, ["mem:"], b"mem:x", object()])
def test_argument_that_is_no_url_or_path_is_a_type_error(address: Any) -> None:
    with pytest.raises(TypeError):
        open_store(address)


@pytest.mark.parametrize("sign", [chr(code) for code in range(1, 256) if chr(code) not in "#%&/?"])
def test_address_keeps_every_character_that_has_no_meaning_in_it(sign: str) -> None:
    found = url.parse_url(f"file:///a{sign}b?label=a{sign}b")
    assert found == ("file", "", f"/a{sign}b", {"label": f"a{sign}b"})


def test_etcd_store_announces_the_rank_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def __init__(self, host: str, prefix: str, **options: Any) -> None:
            self.seen: list[Any] = [host, prefix, options]

        def announce_rank(self, rank: int) -> None:
            self.seen.append(rank)

    monkeypatch.setattr("fscoord.stores.etcd.EtcdStore", Store)
    opened: Any = open_store("etcd://h:2379/p?rank=3&session_ttl=9")
    assert opened.seen == ["h:2379", "p", {"session_ttl": 9}, 3]
