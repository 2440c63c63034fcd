"""`python -m benchmarks.scaling RESULTS`, in the laboratory: the costs and times of many ranks on several hosts on NFS.

    tests/mounts/lab/nfslab --engine uml --cpu 1 --hosts 8 --out DIR -- python -m benchmarks.scaling /out/scaling.json

Each figure is for one number of nodes, one number of ranks per node, and one delay added to each round trip, in ms.
Where several stores are measured, they take turns.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import etcd, hosts, machine
from benchmarks.hosts import Crew
from benchmarks.stores import ETCD, OURS, TORCH_FILE, is_missing

RTTS_MS = (0, 1, 5, 25)
SHAPES = [
    *((nodes, per) for nodes, most in ((2, 16), (4, 8), (8, 8), (16, 2)) for per in (1, 2, 4, 8, 16) if per <= most),
    *((2, 32), (4, 16), (16, 4)),
]
"""Nodes, and ranks per node. The largest come last, because they take longest."""

PEER_SHAPES = ((2, 2), (2, 4), (2, 8))
"""Where torch's FileStore is measured, too: barriers of 4, 8 and 16 ranks."""
PEER_ADDS = ((2, 8), (2, 16))
ETCD_SHAPES = ((2, 1), (2, 4), (2, 8), (4, 8), (8, 8))
AGENT_SHAPES = ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1), (8, 2), (16, 1))

START_S = 0.1
"""How long before a barrier the ranks are asked for it, and how much longer for each 50 ranks, in seconds."""
WORKS = ("barrier", "tree", "add", "alone", "idle")
TREES = {4: 2, 8: 4, 16: 4}
"""The nodes of each group of a tree, by the number of all nodes."""
ROUNDS = 6
PAUSE_S = 1.1
"""The pause before each barrier, as between two steps of a training: a store checks the name of its log once in 1 s."""

ADD_S = 2.0
LONE = 30
SETTLE_S, WATCH_S = 2.5, 4.0

Figures = dict[str, Any]


def count(crew: Crew | None = None) -> Counter[str]:
    """Return the requests so far to the server of `crew`, by name, and the bytes read."""
    return hosts.requests() if crew is None or crew.kind != ETCD else etcd_requests(crew.place.partition("/")[0])


def etcd_requests(port: str) -> Counter[str]:
    """Return the counts that `hosts.requests` returns, for the etcd at `port` of this host."""
    found: Counter[str] = Counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        for line in answer.read().decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name == "etcd_network_client_grpc_sent_bytes_total":
                found["bytes"] = int(float(value))
            elif name.startswith("grpc_server_msg_received_total{"):
                method = name.partition('grpc_method="')[2].partition('"')[0]
                found[method] += int(float(value))
    return found


def cost(before: Counter[str], crew: Crew | None = None) -> tuple[int, Counter[str]]:
    """Return the bytes read since `before`, and the requests by name."""
    made = count(crew)
    made.subtract(before)
    read = made.pop("bytes")
    return read, +made


def barriers(crews: Sequence[Crew], name: str, rounds: int, tree: int = 0) -> Iterator[Figures]:
    """Measure `rounds` barriers of each crew, in turns: over a tree with groups of `tree` nodes, unless it is 0."""
    method, more = ("tree_barrier", (tree,)) if tree else ("barrier", ())
    spans: dict[str, list[float]] = {crew.kind: [] for crew in crews}
    made: dict[str, Counter[str]] = {crew.kind: Counter() for crew in crews}
    spent = dict.fromkeys(made, 0.0)
    read: Counter[str] = Counter()
    for crew in crews:
        crew.do(method, f"{name}/first", 0.0, *more)
        spent[crew.kind] -= sum(crew.do("spent"))
    for number in range(rounds):
        for crew in crews:
            time.sleep(PAUSE_S)
            before = count(crew)
            at = time.monotonic() + START_S * (1 + len(crew.pipes) / 50)
            times = crew.do(method, f"{name}/{number}", at, *more)
            bytes_read, by_name = cost(before, crew)
            made[crew.kind] += by_name
            read[crew.kind] += bytes_read
            spans[crew.kind].append(max(end for _, end in times) - min(begun for begun, _ in times))
    for crew in crews:
        spent[crew.kind] += sum(crew.do("spent"))
        yield {
            "work": "tree barrier" if tree else "barrier",
            "kind": crew.kind,
            "seconds": statistics.median(spans[crew.kind]),
            "all_seconds": [round(each, 5) for each in spans[crew.kind]],
            "processor_s": spent[crew.kind] / rounds,
            **_counted(made[crew.kind], read[crew.kind], rounds),
        }


def _counted(made: Counter[str], read: float, times: float) -> Figures:
    return {
        "requests": sum(made.values()) / times,
        "by_name": {name: round(count / times, 2) for name, count in sorted(made.items())},
        "bytes_read": read / times,
    }


def adds(crews: Sequence[Crew], name: str) -> Iterator[Figures]:
    """Measure additions to one counter by all ranks at once, of each crew in turn."""
    for crew in crews:
        before = count(crew)
        ends = crew.do("add", f"{name}/counter", ADD_S)
        read, made = cost(before, crew)
        total = sum(count for count, _ in ends)
        seconds = max(took for _, took in ends)
        yield {
            "work": "add",
            "kind": crew.kind,
            "per_s": total / seconds,
            "count": total,
            **_counted(made, read, total),
        }


def alone(crew: Crew, name: str) -> Iterator[Figures]:
    """Measure operations of one rank, while the others do nothing."""
    for work, method, given in (
        ("lone add", "add", (f"{name}/alone", 1)),
        ("lone get", "get", ("opened",)),
    ):
        before = count(crew)
        pipe = crew.pipes[0]
        pipe.send(("repeat", (method, LONE, *given)))
        took = pipe.recv()
        if isinstance(took, Exception):
            raise took
        read, made = cost(before, crew)
        yield {"work": work, "kind": crew.kind, "seconds": took / LONE, **_counted(made, read, LONE)}


def idle(crew: Crew, writer: Crew, name: str) -> Figures:
    """Count while all ranks wait for a key; then set it, and measure how soon each rank has it."""
    key = f"{name}/idle"
    crew.begin("wait", key)
    time.sleep(SETTLE_S)
    before, begun = count(crew), time.monotonic()
    time.sleep(WATCH_S)
    read, made = cost(before, crew)
    watched = time.monotonic() - begun
    (done,) = writer.do("set", key)
    late = sorted(end - done for end in crew.finish())
    wake = {"seconds": late[len(late) // 2], "worst_s": late[-1]}
    return {"work": "idle second", "kind": crew.kind, **wake, **_counted(made, read, watched)}


def rendezvous(names: Sequence[str], per_host: int, place: str) -> Iterator[Figures]:
    """Measure one rendezvous of agents, and the cost of the agents once they are idle."""
    with hosts.crew(OURS, place, names, per_host) as crew:
        before = hosts.requests()
        times = crew.do("rendezvous")
        read, made = cost(before)
        took = max(end for _, end in times) - min(begun for begun, _ in times)
        yield {"work": "rendezvous", "kind": OURS, "seconds": took, **_counted(made, read, 1)}
        time.sleep(SETTLE_S)
        before, begun = hosts.requests(), time.monotonic()
        time.sleep(2 * WATCH_S)  # as long as two rounds of keep-alives
        read, made = cost(before)
        yield {"work": "idle agents", "kind": OURS, **_counted(made, read, time.monotonic() - begun)}
        crew.do("shut_down")


def stores(options: argparse.Namespace, report: Any) -> Iterator[Figures]:
    """Yield every figure of stores."""
    for nodes, per in options.shapes or SHAPES:
        names = hosts.NAMES[:nodes]
        where = {"nodes": nodes, "ranks_per_node": per}
        kinds = [OURS, *([TORCH_FILE] if (nodes, per) in PEER_SHAPES + PEER_ADDS and not options.no_torch else [])]
        with ExitStack() as stack:
            crews = []
            for kind in kinds:
                place = f"{kind.split()[0]}-{nodes}-{per}"
                if kind == TORCH_FILE:
                    Path(f"/mnt/{names[0]}/{place}").touch()
                crews.append(stack.enter_context(hosts.crew(kind, place, names, per)))
            if (nodes, per) in options.etcd_shapes and not options.no_etcd:
                port = stack.enter_context(etcd_server())
                crews.append(stack.enter_context(hosts.crew(ETCD, f"{port}/{nodes}-{per}", names, per)))
            waiting = [crew for crew in crews if crew.kind != TORCH_FILE]
            writers = [stack.enter_context(hosts.crew(crew.kind, crew.place, names[:1], 1)) for crew in waiting]
            for crew in [*crews, *writers]:
                crew.do("open")
            for rtt in options.rtts:
                report(f"{nodes} nodes, {per} ranks per node, {rtt} ms")
                hosts.delay_replies(rtt)
                for each in works((nodes, per), crews, dict(zip(waiting, writers, strict=True)), f"rtt{rtt}", options):
                    yield {**where, "rtt_ms": rtt, **each}


def works(
    shape: tuple[int, int],
    crews: Sequence[Crew],
    writers: Mapping[Crew, Crew],
    name: str,
    options: argparse.Namespace,
) -> Iterator[Figures]:
    """Yield the figures of each kind of work. `writers` has the crew that ends the wait of another."""
    if "barrier" in options.works:
        meeting = [crew for crew in crews if crew.kind != TORCH_FILE or shape in PEER_SHAPES]
        yield from barriers(meeting, name, options.rounds)
    if "tree" in options.works and shape[0] in TREES:
        yield from barriers(
            [crew for crew in crews if crew.kind == OURS], f"{name}/tree", options.rounds, TREES[shape[0]]
        )
    if "add" in options.works:
        yield from adds([crew for crew in crews if crew.kind != TORCH_FILE or shape in PEER_ADDS], name)
    for crew in crews if "alone" in options.works else ():
        yield from alone(crew, name)
    for crew, writer in writers.items() if "idle" in options.works else ():
        yield idle(crew, writer, name)


def agents(options: argparse.Namespace, report: Any) -> Iterator[Figures]:
    """Yield every figure of a rendezvous."""
    for nodes, per in options.shapes or AGENT_SHAPES:
        for rtt in options.rtts:
            report(f"rendezvous of {nodes} x {per} agents, {rtt} ms")
            hosts.delay_replies(rtt)
            for each in rendezvous(hosts.NAMES[:nodes], per, f"rendezvous-{nodes}-{per}-{rtt}"):
                yield {"nodes": nodes, "ranks_per_node": per, "rtt_ms": rtt, **each}


@contextmanager
def etcd_server() -> Iterator[int]:
    """Run an etcd on the server, with its data on the exported disk; yield its port."""
    directory = Path(os.environ["NFS_SERVER_DIR"], f"etcd-{time.monotonic_ns()}")
    directory.mkdir()
    with etcd.server(str(directory), "0.0.0.0") as address:
        yield int(address.rpartition(":")[2])


def _shapes(text: str) -> list[tuple[int, int]]:
    return [(int(nodes), int(per)) for nodes, per in (each.split("x") for each in text.split(","))]


def main() -> None:
    """Measure, and rewrite the file after each figure, so that a run that is ended early still leaves results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("results", help="the file to write")
    parser.add_argument("--agents", action="store_true", help="measure rendezvous, and not stores")
    parser.add_argument("--shapes", type=_shapes, metavar="NODESxRANKS,...")
    parser.add_argument("--etcd-shapes", type=_shapes, default=list(ETCD_SHAPES), metavar="NODESxRANKS,...")
    parser.add_argument("--rtts", type=lambda text: [float(each) for each in text.split(",")], default=RTTS_MS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--works", nargs="+", choices=WORKS, default=WORKS, help="the kinds of work of stores to measure"
    )
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-etcd", action="store_true")
    options = parser.parse_args()
    if len(hosts.NAMES) < max(nodes for nodes, _ in options.shapes or SHAPES):
        sys.exit("this runs in the laboratory, with as many hosts: see docs/contributors/scaling.md")
    options.no_torch = options.no_torch or bool(is_missing(TORCH_FILE))
    options.no_etcd = options.no_etcd or bool(is_missing(ETCD))
    facts = machine.facts(f"/mnt/{hosts.NAMES[0]}") | {"etcd": "" if options.no_etcd else etcd.version()}
    found: dict[str, Any] = {"machine": facts, "results": []}
    begun = time.monotonic()
    preload(with_torch=not options.no_torch)
    measure = agents if options.agents else stores
    for each in measure(options, lambda text: print(f"[{time.monotonic() - begun:.0f} s] {text}", flush=True)):
        found["results"].append(each)
        found["machine"]["load_1_min_at_the_end"] = machine.load()
        Path(options.results).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def preload(*, with_torch: bool) -> None:
    """Import the modules that the ranks use, before the ranks are forked."""
    modules = ["watchdog.observers.inotify", "fscoord.rendezvous", "fscoord._log.shared.combining.combiner", "urllib3"]
    for module in [*modules, *(["torch.distributed"] if with_torch else [])]:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
