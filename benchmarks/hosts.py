"""Ranks on the client hosts of the laboratory (`tests/mounts/lab`), and the requests that they make to its file server.

All hosts of the laboratory are network and host-name namespaces of one kernel, and all their mounts are in one mount
namespace. So one process can fork ranks into each host, and count the requests of each.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fscoord
from benchmarks.stores import ETCD, OURS, TORCH_FILE
from fscoord.collectives import tree_barrier

LIMIT_S = 240.0
NAMES = os.environ.get("NFS_HOSTS", "").split()
"""The names of the hosts. The directory that they share is /mnt/NAME on each."""


def address(host: str) -> str:
    """Return the address of the server, as `host` reaches it."""
    return f"10.9.{NAMES.index(host) + 1}.1"


def delay_replies(milliseconds: float) -> None:
    """Delay each round trip between a host and the server, in place of any earlier delay."""
    for host in NAMES:
        kind = ["netem", "delay", f"{milliseconds}ms"] if milliseconds else ["noqueue"]
        subprocess.run(["tc", "qdisc", "replace", "dev", f"s{host}", "root", *kind], check=True)


def requests() -> Counter[str]:
    """Return the number of requests of all hosts since the mount, by name, and the number of ``bytes`` read."""
    found: Counter[str] = Counter()
    is_nfs = False
    for line in Path("/proc/self/mountstats").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if line.startswith("device "):
            is_nfs = words[words.index("fstype") + 1].startswith("nfs")
        elif is_nfs and words[:1] == ["bytes:"]:
            found["bytes"] += int(words[5])
        elif is_nfs and len(words) > 8 and words[0][:-1].isupper() and words[0] != "RPC:":
            found[words[0][:-1]] += int(words[1])
    return found


@dataclass
class Rank:
    """One process: its host, its store, and the calls that it makes on request."""

    number: int
    size: int
    host: str
    hosts: Sequence[str]
    kind: str
    place: str
    store: Any = None
    more: dict[str, Any] = field(default_factory=dict)

    def open(self) -> None:
        """Open the store, and write to it, so that no host can serve reads from its cache."""
        if self.kind == OURS:
            self.store = fscoord.FileStore(f"/mnt/{self.host}/{self.place}", timeout=LIMIT_S)
        elif self.kind == ETCD:
            port, _, prefix = self.place.partition("/")
            self.store = fscoord.EtcdStore(f"{address(self.host)}:{port}", prefix, timeout=LIMIT_S)
        else:
            from torch.distributed import FileStore

            self.store = FileStore(f"/mnt/{self.host}/{self.place}", -1)
            self.store.set_timeout(timedelta(seconds=LIMIT_S))
        self.store.add("opened", 1)

    def barrier(self, key: str, at: float) -> tuple[float, float]:
        """Pass a barrier with all ranks at the monotonic time `at`; return when the call began and ended.

        The messages that ask the ranks for a call go out one after the other, which would be part of the time.
        """
        time.sleep(max(0.0, at - time.monotonic()))
        begun = time.monotonic()
        if self.kind == TORCH_FILE:  # as in torch/distributed/elastic/utils/store.py
            if self.store.add(f"{key}/n", 1) == self.size:
                self.store.set(f"{key}/last", "1")
            self.store.wait([f"{key}/last"])
        else:
            fscoord.barrier(self.store, self.size, key, LIMIT_S, rank=self.number)
        return begun, time.monotonic()

    def tree_barrier(self, key: str, at: float, nodes: int) -> tuple[float, float]:
        """Pass a tree barrier of groups of `nodes` nodes at the monotonic time `at`, as `barrier` does."""
        per_host = self.size // len(self.hosts)
        rank = self.hosts.index(self.host) * per_host + self.number // len(self.hosts)  # those of a node in a row
        group_size = nodes * per_host
        if "tree" not in self.more:
            names = f"{self.place}-group-{rank // group_size}", f"{self.place}-root"
            self.more["tree"] = [fscoord.FileStore(f"/mnt/{self.host}/{name}", timeout=LIMIT_S) for name in names]
        time.sleep(max(0.0, at - time.monotonic()))
        begun = time.monotonic()
        tree_barrier(*self.more["tree"], rank, self.size, group_size, key, LIMIT_S)
        return begun, time.monotonic()

    def add(self, key: str, seconds: float) -> tuple[int, float]:
        """Add to a counter, again and again; return the number of additions, and the time that they took."""
        begun, count = time.monotonic(), 0
        while time.monotonic() < begun + seconds:
            self.store.add(key, 1)
            count += 1
        return count, time.monotonic() - begun

    def repeat(self, method: str, count: int, *given: Any) -> float:
        """Call a method `count` times; return how long the calls took."""
        begun = time.monotonic()
        for _ in range(count):
            getattr(self.store, method)(*given)
        return time.monotonic() - begun

    def wait(self, key: str) -> float:
        """Wait for a key; return when it was there."""
        self.store.wait([key])
        return time.monotonic()

    def set(self, key: str) -> float:
        """Set a key; return when the call ended."""
        self.store.set(key, "1")
        return time.monotonic()

    def rendezvous(self) -> tuple[float, float]:
        """Join a rendezvous with the other agents; return when the call began and ended. The agent keeps running."""
        from fscoord.rendezvous import RendezvousParameters, create_handler

        path = f"/mnt/{self.host}/{self.place}"
        address = f"{self.host}{self.number}"
        given = RendezvousParameters("c10d", path, "job", self.size, self.size, local_addr=address)
        self.more["agent"] = agent = create_handler(given)
        begun = time.monotonic()
        agent.next_rendezvous()
        return begun, time.monotonic()

    def shut_down(self) -> None:
        """End the agent."""
        self.more.pop("agent").shutdown()

    def spent(self) -> float:
        """Return the processor time of this process, in seconds."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


class Crew:
    """Ranks of one store on `hosts`, `per_host` on each, in processes that the present process has forked."""

    def __init__(self, kind: str, place: str, hosts: Sequence[str], per_host: int) -> None:
        context = multiprocessing.get_context("fork")
        self.kind = kind
        self.place = place
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        size = len(hosts) * per_host
        for number in range(size):
            here, there = context.Pipe()
            rank = Rank(number, size, hosts[number % len(hosts)], hosts, kind, place)
            process = context.Process(target=_serve, args=(rank, there, list(self.pipes)), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def begin(self, method: str, *given: Any) -> None:
        """Ask all ranks to call a method."""
        for pipe in self.pipes:
            pipe.send((method, given))

    def finish(self) -> list[Any]:
        """Return the results, by rank."""
        ends = time.monotonic() + LIMIT_S
        results = []
        for number, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, ends - time.monotonic())):
                raise RuntimeError(f"{self.kind}: rank {number} has not answered within {LIMIT_S:g} s")
            results.append(pipe.recv())
        failed = [result for result in results if isinstance(result, Exception)]
        if failed:
            raise failed[0]
        return results

    def do(self, method: str, *given: Any) -> list[Any]:
        """Make all ranks call a method; return the results, by rank."""
        self.begin(method, *given)
        return self.finish()

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


@contextmanager
def crew(kind: str, place: str, hosts: Sequence[str], per_host: int) -> Iterator[Crew]:
    """Yield a crew; end it afterwards."""
    made = Crew(kind, place, hosts, per_host)
    try:
        yield made
    finally:
        made.end()


def _serve(rank: Rank, pipe: Connection, others: list[Connection]) -> None:
    for other in others:
        other.close()
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts"):
        with Path(f"/run/ns/{rank.host}.{kind}").open("rb") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"host {rank.host} can't be entered")
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            call: Callable[..., Any] = getattr(rank, method)
            pipe.send(call(*given))
        except Exception as error:  # noqa: BLE001 - the process that measures raises it
            pipe.send(RuntimeError(f"rank {rank.number} on host {rank.host}, {method}: {error!r}"))
