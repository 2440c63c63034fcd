"""What `help`, `dir` and `repr` show of the public objects in an interpreter."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.recipes import RECIPES, new

import fscoord
from fscoord import EtcdStore, FileStore, HashStore, PrefixStore, Store, TCPStore, aio, recipes
from fscoord.barriers import StoreBarrier
from fscoord.preemption import Preemption
from fscoord.rendezvous import C10dRendezvousBackend, DynamicRendezvousHandler, RendezvousSettings
from fscoord.testing import FaultyStore

STORES = [FileStore, HashStore, PrefixStore, TCPStore, EtcdStore, FaultyStore]
REFERS = re.compile(r"^(See|As) `|\b[Ss]ee `~?fscoord\.recipes")
"""How a docstring sends its reader elsewhere for what it should say."""


def members(kind: type) -> Iterator[tuple[str, str]]:
    for name, value in inspect.getmembers(kind):
        if not name.startswith("_") and (callable(value) or isinstance(value, property)):
            yield name, inspect.getdoc(value) or ""


@pytest.mark.parametrize("kind", [Store, *STORES, aio.AsyncStore], ids=lambda kind: kind.__name__)
def test_help_of_a_method_of_a_store_has_the_text_of_the_contract(kind: type) -> None:
    shown = dict(members(kind))
    assert {name for name, text in shown.items() if not text or REFERS.search(text)} == set()
    for name, contract in members(Store):
        for section in re.findall(r"^(?:Args|Raises):$", contract, re.MULTILINE):
            assert section in shown[name], f"{kind.__name__}.{name} has lost its {section}"


@pytest.mark.parametrize("kind", RECIPES)
def test_help_of_a_recipe_for_tasks_has_the_text_of_the_blocking_recipe(kind: str) -> None:
    blocking, tasks = getattr(recipes, kind), getattr(aio, kind)
    described, shown = inspect.getdoc(blocking) or "", inspect.getdoc(tasks) or ""
    assert not REFERS.search(shown)
    assert re.findall(r"^( *\w+):", described, re.MULTILINE) == re.findall(r"^( *\w+):", shown, re.MULTILINE)
    pairs = []
    theirs = dict(members(tasks))
    pairs += [(text, theirs[name]) for name, text in members(blocking)]
    for text, other in pairs:
        assert text
        assert not REFERS.search(text + other)
        assert other.endswith(text.partition("\n\n")[2])


@pytest.mark.parametrize("name", ["barrier", "get_all", "synchronize", "gather", "broadcast", "once"])
def test_help_of_a_function_for_tasks_has_the_text_of_the_blocking_function(name: str) -> None:
    blocking = inspect.getdoc(getattr(recipes if name == "once" else fscoord, name)) or ""
    assert (inspect.getdoc(getattr(aio, name)) or "").endswith(blocking.partition("\n\n")[2])
    assert "\nArgs:\n" in blocking


def test_help_of_the_package_begins_with_a_map() -> None:
    text = fscoord.__doc__ or ""
    assert len(text.splitlines()) <= 30
    named = set(re.findall(r"\w+", text))
    stores_and_recipes = {kind.__name__ for kind in STORES if kind is not FaultyStore} | {"Lock", "Queue", "Election"}
    assert stores_and_recipes | set(fscoord._MODULES) <= named
    assert all(line.isascii() and len(line) <= 120 for line in text.splitlines())


def test_modules_of_the_package_are_shown_and_imported_at_their_first_use() -> None:
    program = (
        "import sys, fscoord\n"
        "assert 'fscoord.recipes' not in sys.modules\n"
        "for name in dir(fscoord):\n"
        "    getattr(fscoord, name)\n"
        "print(fscoord.recipes.Lock.__name__, fscoord.aio.Lock.__module__, hasattr(fscoord, 'nothing'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "Lock fscoord.aio.recipes False\n"
    assert {"recipes", "aio", "FileStore", "barrier", "status", "events", "inspect"} <= set(dir(fscoord))


@pytest.mark.parametrize("kind", RECIPES)
def test_recipe_shows_its_name_and_its_store(kind: str) -> None:
    with HashStore() as store:
        assert repr(new(kind, store, "x")).startswith(f"<{kind} 'x' of HashStore()")
        assert repr(new(kind, aio.AsyncStore(store), "x", aio)).startswith(f"<aio.{kind} 'x' of HashStore()")


def test_store_shows_whether_it_is_closed(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    file, memory = FileStore(path), HashStore.named("m")
    view = PrefixStore("p", file)
    assert repr(view) == f"PrefixStore('p', FileStore({path!r}))"
    assert repr(FaultyStore(memory)) == "FaultyStore(HashStore.named('m'))"
    assert repr(memory.clone()) == "HashStore.named('m')"
    view.close()
    file.close()
    memory.close()
    assert repr(file) == f"<closed FileStore({path!r})>"
    assert repr(view) == f"<closed PrefixStore('p', <closed FileStore({path!r})>)>"
    assert repr(memory) == "<closed HashStore.named('m')>"
    etcd = EtcdStore("h1:1", "p", timeout=0)
    etcd.close()
    assert repr(etcd) == "<closed EtcdStore('etcd://h1:1', 'p/')>"


def test_barriers_and_rendezvous_show_store_name_and_state() -> None:
    with HashStore() as store:
        settings, backend = RendezvousSettings("job", 1, 1), C10dRendezvousBackend(store, "job")
        shown = {
            repr(StoreBarrier(store, barrier_prefix="b", rank=1, world_size=2)),
            repr(Preemption(store, "p", 1, 2)),
            repr(backend),
        }
        with DynamicRendezvousHandler(settings, backend, store) as handler:
            shown.add(repr(handler))
            handler.next_rendezvous()
            shown.add(repr(handler))
        shown.add(repr(handler))
    assert shown == {
        "<StoreBarrier 'b' of HashStore(), rank 1 of 2>",
        "<Preemption 'p' of HashStore(), rank 1 of 2, no stop agreed>",
        "<C10dRendezvousBackend 'torch.rendezvous.job' of HashStore()>",
        "<DynamicRendezvousHandler 'job' of HashStore(), round None>",
        "<DynamicRendezvousHandler 'job' of HashStore(), round 0>",
        "<DynamicRendezvousHandler 'job' of HashStore(), shut down>",
    }
