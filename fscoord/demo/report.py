"""What the demonstration has to say at the end, from what its store holds."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from fscoord.store import Store

__all__ = ["assemble"]

TOP = 10

Document = dict[str, Any]


def assemble(
    store: Store, files: list[str], everybody: list[Document], living: list[int], waits: list[dict[str, float]]
) -> Document:
    """Return the report, as it is described in ``docs/cli.md``.

    Args:
        store: where the processes have met.
        files: the names of the files, by their number.
        everybody: the facts of all processes, by rank.
        living: the ranks that are there at the end.
        waits: how long each of them waited at each barrier, in seconds.
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
    """Return who named a lost process, where, and who did what it had taken and not delivered."""
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
