"""One process of the demonstration, which counts the words of text files together with the other processes.

The processes learn of each other through the store alone. One of them makes the report.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fscoord._arguments import Key, Timeout
from fscoord._runtime import system
from fscoord.collectives import barrier, gather, synchronize
from fscoord.errors import BrokenBarrierError, FscoordError, QueueEmptyError
from fscoord.store import Member, Store
from fscoord.stores.file import FileStore
from fscoord.stores.prefix import PrefixStore

__all__ = ["OWN_SOURCES", "Survivors", "Worker", "assemble", "count", "main", "text_files"]


OWN_SOURCES = system.os.path.dirname(system.os.path.dirname(system.os.path.abspath(__file__)))
"""The directory that is counted by default: this package's own sources. A zipapp or PEX has them in no directory."""
if not system.os.path.isdir(OWN_SOURCES):
    OWN_SOURCES = system.os.path.dirname(json.__file__)

_WORD = re.compile(r"[^\W\d_]+")
_PROBE = 8192
_LINE_MAX = 1024 * 1024


def text_files(directory: str) -> Iterator[str]:
    """Yield the paths, relative to `directory`, of the regular files below it that do not look like binary files."""
    for parent, _, names in system.os.walk(directory):
        for name in names:
            path = system.os.path.join(parent, name)
            if _is_text(path):
                yield system.os.path.relpath(path, directory)


def count(path: str) -> Counter[str]:
    """Return the number of occurrences of each word in the file, in lower case.

    Bytes that are not UTF-8 separate words.
    """
    words: Counter[str] = Counter()
    with system.open_regular(path) as file:
        for line in iter(lambda: file.readline(_LINE_MAX), b""):
            words.update(_WORD.findall(line.decode("utf-8", "replace").lower()))
    return words


def _is_text(path: str) -> bool:
    try:
        with system.open_regular(path) as file:
            return b"\0" not in file.read(_PROBE)
    except PermissionError:
        return True  # the process that counts it will report the error
    except OSError:
        return False  # it has just gone, or is not a regular file


class Worker:
    """One process of the demonstration. All processes run the same program.

    The process takes the next free rank and exchanges facts with the other processes (`synchronize`). Then rank 0 fills
    the queue with the numbers of the files, and every process takes files until there are none. A rank whose death a
    barrier reports is left out from then on. Files that have no result after the surviving ranks have met go back into
    the queue.

    Args:
        store: the store through which the processes meet.
        directory: the directory of the text, the same for all processes.
        world_size: how many processes there are.
        timeout: the longest wait for the other processes, in seconds.
    """

    def __init__(self, store: Store, directory: str, world_size: int, timeout: float) -> None:
        self._store = store
        self._directory = directory
        self._timeout = timeout
        self._rank = store.add("ranks", 1) - 1
        self._living = list(range(world_size))
        self._waits: dict[str, float] = {}
        everybody = synchronize(store, _packed(_facts(self._rank)), self._rank, world_size, "facts/", timeout)
        self._facts: list[dict[str, Any]] = [json.loads(facts) for facts in everybody]
        tell("met", **self._facts[self._rank])

    def work(self, *, last_holds: bool) -> None:
        """Do this process's share of the work. With `last_holds` the last rank takes a file and waits to be killed."""
        if self._rank == 0:
            self._fill_queue()
        self._meet("queue filled")
        files: list[str] = json.loads(self._store.get("files"))
        task = self._take()
        self._meet("first files taken")
        if last_holds and self._rank == len(self._facts) - 1:
            tell("holding", rank=self._rank, file=None if task is None else files[task])
            system.threading.Event().wait()
        attempt = ""
        while True:
            while task is not None:
                self._deliver(task, files[task])
                task = self._take()
            self._meet(f"work done{attempt}")
            unfinished = [number for number in range(len(files)) if not self._store.check([f"result/{number}"])]
            if not unfinished:
                break
            if self._rank == self._living[0]:
                for number in unfinished:
                    self._store.queue_push("work", str(number))
            self._meet(f"lost work queued{attempt}")
            attempt += " again"
            task = self._take()
        self._report(files)

    def _fill_queue(self) -> None:
        files = sorted(text_files(self._directory))
        self._store.set("files", _packed(files))
        for number in range(len(files)):
            self._store.queue_push("work", str(number))
        tell("filled", files=len(files))

    def _take(self) -> int | None:
        try:
            number = int(self._store.queue_pop("work", block=False))
        except QueueEmptyError:
            return None
        self._store.compare_set(f"taken/{number}", "", str(self._rank))
        return number

    def _deliver(self, number: int, file: str) -> None:
        result: dict[str, Any] = {"rank": self._rank, "words": {}, "error": None}
        try:
            result["words"] = count(system.os.path.join(self._directory, file))
        except OSError as error:
            result["error"] = error.strerror
        # Who delivers first counts: a file that is done twice is not counted twice.
        self._store.compare_set(f"result/{number}", "", _packed(result))
        tell("delivered", rank=self._rank, file=file)

    def _meet(self, name: str) -> None:
        """Pass the barrier `name` with the surviving ranks; ranks that the barrier reports dead are left out."""
        start = system.time.monotonic()
        while not self._attempt(name, start):
            pass
        self._waits[name] = system.time.monotonic() - start

    def _attempt(self, name: str, start: float) -> bool:
        living = tuple(self._living)
        names = [self._name(rank) for rank in living]
        own = living.index(self._rank)
        with Survivors(living, self._store) as store:
            try:
                barrier(store, len(living), f"barrier/{name}", self._timeout, own, names.__getitem__, fail_fast=True)
            except BrokenBarrierError as error:
                waited = system.time.monotonic() - start
                for rank in (rank for rank, named in zip(living, names, strict=True) if named in error.dead):
                    self._living.remove(rank)
                    self._store.set(f"lost/{rank}/{self._rank}", _packed({"by": self._rank, "barrier": name}))
                    tell("lost", rank=rank, by=self._rank, barrier=name, seconds=waited, error=str(error))
                if tuple(self._living) == living:  # it names none of ours: another try would end so, too
                    raise
                return False
        return True

    def _name(self, rank: int) -> str:
        return f"rank {rank}, process {self._facts[rank]['pid']} on {self._facts[rank]['host']}"

    def _report(self, files: list[str]) -> None:
        """In the first surviving rank, collect the results and send the report."""
        own = self._living.index(self._rank)
        waits = gather(self._store, _packed(self._waits), own, len(self._living), "waits/", self._timeout)
        if waits is not None:
            report = assemble(self._store, files, self._facts, self._living, [json.loads(each) for each in waits])
            tell("report", report=report)


def tell(event: str, **details: Any) -> None:
    """Report an event to the launcher, as a line of JSON on standard output."""
    line = _packed({"event": event, **details}) + b"\n"
    while line:
        line = line[system.os.write(1, line) :]


def _packed(document: Any) -> bytes:
    return json.dumps(document).encode("ascii")


def _facts(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": system.hostname(),
        "pid": system.os.getpid(),
        "start_time": system.start_time(),
        "python": sys.version.split()[0],
        "cpus": system.os.cpu_count(),
    }


def main(store: str, directory: str, world_size: str, kill: str, timeout: str) -> int:
    """Run one process of the demonstration, and return the exit code."""
    system.start_thread("fscoord-demo", _end_with_launcher)
    try:
        with FileStore(store, timeout=float(timeout)) as opened:
            Worker(opened, directory, int(world_size), float(timeout)).work(last_holds=bool(kill))
    except BrokenPipeError:
        return 1  # the launcher has gone, so no process reads the report
    except FscoordError as error:
        tell("failed", message=f"{type(error).__name__}: {error}")
        return 1
    return 0


def _end_with_launcher() -> None:
    system.os.read(0, 1)  # nothing is ever written there: this returns when the launcher has ended
    system.os._exit(1)


class Survivors(PrefixStore):
    """A view in which rank i is rank ``ranks[i]`` of `store`.

    In it the surviving ranks pass barriers without dead ranks.

    Args:
        ranks: the surviving ranks, in order. The keys depend on these ranks, so only processes that agree on them meet.
        store: the underlying store, in which the processes have their original ranks.
    """

    def __init__(self, ranks: Sequence[int], store: Store) -> None:
        super().__init__(f"survivors/{','.join(map(str, ranks))}", store)
        self._ranks = tuple(ranks)

    def announce_rank(self, rank: int) -> None:
        """Announce the rank of the underlying store that `rank` stands for in this view."""
        super().announce_rank(self._ranks[rank])

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return each of `ranks` that is known dead."""
        return self._own(super().dead_ranks(self._theirs(ranks)))

    def wait_alive(self, keys: Iterable[Key], ranks: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        """Wait for `keys`, or until some of `ranks` are known dead, and return the dead ranks."""
        return self._own(super().wait_alive(keys, self._theirs(ranks), timeout))

    def members(self, ranks: Iterable[int] | None = None) -> list[Member]:
        """Return the sessions of `ranks`, or of all survivors."""
        theirs = self._ranks if ranks is None else self._theirs(ranks)
        return [
            member if member.rank is None else member._replace(rank=self._ranks.index(member.rank))
            for member in super().members(theirs)
        ]

    def _theirs(self, ranks: Iterable[int]) -> list[int]:
        return [self._ranks[rank] for rank in ranks]

    def _own(self, ranks: Iterable[int]) -> list[int]:
        return [self._ranks.index(rank) for rank in ranks]


TOP = 10

Document = dict[str, Any]


def assemble(
    store: Store, files: list[str], everybody: list[Document], living: list[int], waits: list[dict[str, float]]
) -> Document:
    """Return the report, which ``docs/cli/demo.md`` describes.

    Args:
        store: the store through which the processes have met.
        files: the names of the files, by their number.
        everybody: the facts of all processes, by rank.
        living: the ranks that are alive at the end.
        waits: how long each of these ranks waited at each barrier, in seconds.
    """
    results = [json.loads(each) for each in store.multi_get([f"result/{number}" for number in range(len(files))])]
    takers = [int(each) for each in store.multi_get([f"taken/{number}" for number in range(len(files))])]
    work = list(zip(files, takers, results, strict=True))
    words: Counter[str] = Counter()
    for result in results:
        words.update(result["words"])
    return {
        "files": len(files),
        "words": sum(words.values()),
        "distinct_words": len(words),
        "top": words.most_common(TOP),
        "skipped": [{"file": file, "reason": result["error"]} for file, _, result in work if result["error"]],
        "reported_by": living[0],
        "processes": [_share(facts, results, living) for facts in everybody],
        "barriers": [_barrier(name, [wait[name] for wait in waits]) for name in waits[0]],
        "lost": [_loss(store, facts, work) for facts in everybody if facts["rank"] not in living],
    }


def _share(facts: Document, results: list[Document], living: list[int]) -> Document:
    mine = [result for result in results if result["rank"] == facts["rank"]]
    words = sum(sum(result["words"].values()) for result in mine)
    return {**facts, "files": len(mine), "words": words, "lost": facts["rank"] not in living}


def _barrier(name: str, waits: list[float]) -> Document:
    return {"name": name, "shortest_wait_s": min(waits), "longest_wait_s": max(waits)}


def _loss(store: Store, facts: Document, work: list[tuple[str, int, Document]]) -> Document:
    """Return which ranks reported a lost process, at which barrier, and which ranks redid its unfinished files."""
    rank = facts["rank"]
    named = [json.loads(each) for each in store.multi_get(store.list_keys(f"lost/{rank}/"))]
    return {
        "rank": rank,
        "pid": facts["pid"],
        "host": facts["host"],
        "named_by": sorted(each["by"] for each in named),
        "barrier": named[0]["barrier"],
        "redone": [
            {"file": file, "by": result["rank"]}
            for file, taker, result in work
            if taker == rank and result["rank"] != rank
        ],
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
