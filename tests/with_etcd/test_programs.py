"""The command and the launcher, with a store in etcd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.etcd_server import Server
from support.ports import held_port

import fscoord

pytestmark = pytest.mark.etcd

WORKER = """
import os, fscoord
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with fscoord.open_store() as store:
    fscoord.barrier(store, size, "b", 60, rank, fail_fast=True)
    store.set(f"rank{rank}", "here")
    store.wait(["rank0", "rank1"], 60)
    print(type(store).__name__, *store.list_keys("rank"))
"""


def run(*words: str, status: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fscoord", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def test_command_verbs_work_in_etcd(server: Server) -> None:
    url = f"etcd://{server.address}/command?timeout=60"
    run("set", "k", "v", FSCOORD_STORE=url)
    assert run("--store", url, "get", "k") == "v"
    run("push", "q", "1", FSCOORD_STORE=url)
    assert run("pop", "q", FSCOORD_STORE=url) == "1"
    assert "alive" in run("members", FSCOORD_STORE=url)
    with held_port() as port:  # where nobody listens
        gone = f"127.0.0.1:{port}"
        assert gone in run("get", "k", status=74, FSCOORD_STORE=f"etcd://{gone}/command?timeout=0.5")


@pytest.mark.parametrize("by", ["address", "store_type"])
def test_launcher_meets_in_etcd_and_removes_the_store_of_its_workers(server: Server, tmp_path: Path, by: str) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    prefix = f"launch/{by}"
    if by == "address":
        where = ["--rdzv-endpoint", f"etcd://{server.address}/{prefix}"]
    else:
        where = ["--rdzv-endpoint", f"{server.address}/{prefix}", "--rdzv-conf", "store_type=etcd"]
    said = run("run", "--nnodes", "1", "--nproc-per-node", "2", *where, str(script))
    assert said.count("EtcdStore rank0 rank1") == 2
    with server.open("launch") as above:
        everything = above._client.call("kv/range", _all_below(b"launch/"), 60)
    with server.open(prefix) as store:
        mine = store._keys.values
    rooms = [key for key in _keys(everything) if b"/round-" in key]
    assert rooms == []
    assert any(key.startswith(mine) for key in _keys(everything))


def _all_below(prefix: bytes) -> dict[str, object]:
    from fscoord.stores.etcd.requests import after_prefix, range_of

    return range_of(prefix, after_prefix(prefix), keys_only=True)["request_range"]


def _keys(reply: dict[str, object]) -> list[bytes]:
    from fscoord.stores.etcd.requests import key_values, unb64

    return [unb64(each["key"]) for each in key_values(reply)]


def test_address_made_by_a_store_opens_the_same_store(server: Server) -> None:
    with (
        server.open("a b/?é=1", session_ttl=7) as store,
        fscoord.open_store(store.address) as same,
        store.below("c") as below,
        fscoord.open_store(below.address) as same_below,
    ):
        store.set("k", "v")
        below.set("k", "w")
        assert same.get("k") == b"v"
        assert same_below.get("k") == b"w"
        assert store.list_keys() == ["k"]
        below.erase()
        assert same_below.num_keys() == 0
        assert store.num_keys() == 1
        assert store.address == same.address


def test_address_holds_the_members_and_credentials() -> None:
    store = fscoord.EtcdStore("h1,h2:5", "p", user="me", password="a&b=%", cacert="/ca é", cert="/c", key="/k")
    with store, fscoord.open_store(store.address) as same:
        assert same._client.access == store._client.access
        assert same.address == store.address
        assert "a&b" not in repr(store)


def test_benchmark_of_etcd_runs(tmp_path: Path) -> None:
    """In tiny sizes; the figures mean nothing, and nothing here looks at them."""
    (tmp_path / "benchmarks").symlink_to(Path(__file__).parents[2] / "benchmarks")
    done = subprocess.run(
        [*(sys.executable, "-m", "benchmarks", "--only", "etcd", "--quick"), *("--json", "found.json")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for row in json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["results"]:
        assert len(row["values"]) == 3
        assert all(value > 0 for value in row["values"].values()), row
        assert row["missing"] == {}
