"""The verdict on a soak: the journals compared with the store, its keys, its files, and the observer."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from soaking.worker import BURST, CREATED, LATCHED, LOCK, MANY, OFFICE, PARTIES, PLACES, RATE, SHARDS, SINGLE

from fscoord import FileStore
from fscoord.errors import QueueEmptyError
from fscoord.recipes import (
    Condition,
    CyclicBarrier,
    Election,
    Ephemeral,
    Event,
    Lock,
    Membership,
    Partitioner,
    PriorityQueue,
    Queue,
    RateLimiter,
    ReadWriteLock,
    Semaphore,
)

RECIPES_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "recipes.md"
OWN = r"own/\d+|trail/\d+|sum|pair/\d/[ab]|purse/[ab]|moves|scratch/\d+|long/\d"
"""The keys that the workers set without a recipe."""

FLAT_FROM_S = 600.0
GROWTH_MAX = 0.01
WATCHED_MAX = 40
"""How many processes the observer may watch at once, each by a descriptor: those that hold something, or take part."""


class Left(NamedTuple):
    """The content of the store that the last process finds when all others have ended."""

    counters: dict[str, int]
    drained: dict[str, list[str]]
    given: list[str]
    sections: dict[int, int]
    rows: dict[int, int]


# The keys


def documented(recipe: str) -> list[str]:
    """Return the keys that stay when no process uses this recipe, as its page lists them."""
    for line in RECIPES_PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and f"`{recipe}`" in cells[1]:
            return re.findall(r"`(NAME[^`]*)`", cells[2])
    raise LookupError(f"{RECIPES_PAGE} lists no keys of {recipe}")


def key_patterns(name: str, recipe: str) -> str:
    """Return a pattern of the keys that may stay of a recipe with such a name."""
    keys = (re.escape(key).replace("/N", r"/\d+").replace("NAME", name) for key in documented(recipe))
    return "|".join(f"(?:{key})" for key in keys)


def judge_keys(keys: Iterable[str], size: int) -> list[str]:
    """Return what is wrong with the keys that are left."""
    found = list(keys)
    every = [OWN, r"row/sequence/\d+|row/\d+/(?:arrivals|complete)"]
    every += [key_patterns(name, recipe) for name, recipe in [*SINGLE.items(), *MANY.items()]]
    wrong = [f"the key {key!r} is left, which no page lists" for key in found if not re.fullmatch("|".join(every), key)]
    most = {
        r"office/term/\d+": 1, r"group/changed/\d+": 128, r"shards/changed/\d+": 128, r"row/\d+/arrivals": 3,
        r"row/\d+/complete": 3, r"row/sequence/\d+": size, r"once/\d+/line": 6, r"latch/\d+/counted": 6,
        r"double/.*/enter/arrivals": 2 * size,
    }  # fmt: skip
    for pattern, limit in most.items():
        number = sum(1 for key in found if re.fullmatch(pattern, key))
        if number > limit:
            some = [key for key in found if re.fullmatch(pattern, key)][-10:]
            wrong.append(f"{number} keys like {pattern} are left, and not {limit} at most, among them {some}")
    lines = {f"{name}/line" for name in ("lock", "places", "both", "office")} - set(found)
    return wrong + [f"the key {key!r} is gone" for key in sorted(lines)]


# The journals


def judge_journals(lines: Iterable[str], left: Left) -> list[str]:
    """Return what the journals and the store disagree in."""
    wrong: list[str] = []
    begun: dict[tuple[str, ...], int] = defaultdict(int)
    acked: dict[tuple[str, ...], int] = defaultdict(int)
    amounts: Counter[str] = Counter()
    totals: Counter[int] = Counter()
    ids: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    pops: Counter[str] = Counter()
    takes: list[tuple[str, str, float]] = []
    rows: dict[str, list[tuple[float, str, str]]] = {"B": [], "A": []}
    tokens: dict[str, list[float]] = {"B": [], "A": []}
    latches: dict[str, dict[str, list[float]]] = {"B": defaultdict(list), "A": defaultdict(list)}
    for line in lines:
        mark, when, what, *words = line.split()
        if what in ("own", "trail", "section"):
            key, number = (what, words[0]), int(words[1])
            if mark == "B":
                begun[key] = max(begun[key], number)
            elif mark == "A":
                if number <= acked[key] and what != "section":
                    wrong.append(f"{what} {words[0]} is acknowledged as {number} after {acked[key]}")
                acked[key] = max(acked[key], number)
                pops[f"{what} {words[0]}"] += 1
            elif not acked[key] <= number <= begun[key]:
                wrong.append(f"{what} {words[0]} is {number}: {acked[key]} acknowledged, {begun[key]} begun")
        elif what == "add":
            amounts[mark] += int(words[0])
            if mark == "A":
                totals[int(words[1])] += 1
        elif what == "take":
            takes.append((words[0], words[1], float(words[2])))
        elif what in ("put", "done"):
            if mark == "B" and what == "put" and words[1] in ids["B", "put", words[0]]:
                wrong.append(f"the soak has a mistake: item {words[1]} of {words[0]} is begun twice")
            if mark == "A" and words[1] in ids[mark, what, words[0]]:
                wrong.append(f"item {words[1]} of {words[0]} is {what} twice")
            ids[mark, what, words[0]][words[1]] = float(when)
        elif what == "push":
            if mark == "B" and words[0] in ids[mark, what]:
                wrong.append(f"the soak has a mistake: {words[0]} is begun twice")
            ids[mark, what][words[0]] = float(when)
        elif what == "pop":
            pops[mark + what] += 1
            if mark == "A":
                if words[0] in ids[mark, what]:
                    wrong.append(f"{words[0]} is popped twice")
                ids[mark, what][words[0]] = float(when)
        elif what in ("work", "once"):
            ids[what, words[0]].setdefault(words[1], float(when))
        elif what == "latch":
            latches[mark][words[0]].append(float(when))
        elif what == "move":
            pops[mark + what] += 1
        elif what == "token":
            tokens[mark].append(float(when))
        elif what == "row":
            rows[mark].append((float(when), words[0], words[1]))
        else:
            wrong.append(f"nobody writes {line!r}")

    for key, most in begun.items():
        least = acked[key]
        value = left.sections[int(key[1])] if key[0] == "section" else left.counters.get("/".join(key), 0)
        if not least <= value <= most:
            wrong.append(f"{'/'.join(key)} is {value}: {least} acknowledged, {most} begun")
    for key, least in acked.items():
        if key not in begun:
            wrong.append(f"{'/'.join(key)}: {least} is acknowledged and was never begun")
    total = left.counters.get("sum", 0)
    if not amounts["A"] <= total <= amounts["B"]:
        wrong.append(f"the sum is {total}: {amounts['A']} acknowledged, {amounts['B']} begun")
    moves = left.counters.get("moves", 0)
    if not pops["Amove"] <= moves <= pops["Bmove"]:
        wrong.append(f"there were {moves} moves: {pops['Amove']} acknowledged, {pops['Bmove']} begun")
    first = min(tokens["B"], default=0.0)
    most = BURST + RATE * (max(tokens["A"], default=first) - first)
    if len(tokens["A"]) > most:
        wrong.append(f"{len(tokens['A'])} tokens were taken, and {most:.0f} have come at most")
    wrong += [f"{number} calls of add returned {value}" for value, number in totals.items() if number > 1]
    wrong += _judge_items(ids, takes, left)
    wrong += _judge_pops(ids, pops, left)
    wrong += _judge_meetings(ids, latches, rows, left)
    return wrong


def _judge_items(
    ids: dict[tuple[str, ...], dict[str, float]], takes: list[tuple[str, str, float]], left: Left
) -> list[str]:
    wrong = []
    for name, drained in left.drained.items():
        done = ids["A", "done", name]
        taken = {number for queue, number, _ in takes if queue == name}
        for number in ids["A", "put", name].keys() - taken - set(drained):
            wrong.append(f"item {number} of {name} was put and is lost")
        for number in (taken | set(drained)) - ids["B", "put", name].keys():
            wrong.append(f"item {number} of {name} was taken, and nobody put it")
        for number in done.keys() & set(drained):
            wrong.append(f"item {number} of {name} is done and was left in the queue")
        for queue, number, asked in takes:
            if queue == name and number in done and asked > done[number]:
                wrong.append(f"item {number} of {name} was handed out after it was done")
        for number in taken - done.keys() - set(drained) - ids["B", "done", name].keys():
            wrong.append(f"item {number} of {name} was taken, nobody was done with it, and it is lost")
    return wrong


def _judge_pops(ids: dict[tuple[str, ...], dict[str, float]], pops: Counter[str], left: Left) -> list[str]:
    popped, open_pops = ids["A", "pop"].keys(), pops["Bpop"] - pops["Apop"] - pops["Epop"]
    lost = ids["A", "push"].keys() - popped - set(left.given)
    wrong = [f"{value} was popped and is left" for value in popped & set(left.given)]
    wrong += [f"{value} was popped, and nobody pushed it" for value in popped - ids["B", "push"].keys()]
    if len(lost) > open_pops:
        wrong.append(f"{len(lost)} values that were pushed are lost, and only {open_pops} pops were never told")
    return wrong


def _judge_meetings(
    ids: dict[tuple[str, ...], dict[str, float]],
    latches: dict[str, dict[str, list[float]]],
    rows: dict[str, list[tuple[float, str, str]]],
    left: Left,
) -> list[str]:
    wrong = []
    for period, values in [(key[1], values) for key, values in ids.items() if key[0] == "once"]:
        if len(values) > 1:
            wrong.append(f"once/{period} has more than one value: {sorted(values)}")
        for value in values.keys() - ids["work", period].keys():
            wrong.append(f"once/{period} has the value {value}, which nobody worked out")
    for period, opened in latches["A"].items():
        calls = sum(1 for when in latches["B"][period] if when <= min(opened))
        if calls < LATCHED:
            wrong.append(f"latch/{period} is open after {calls} of {LATCHED} calls")
    came: dict[tuple[str, str], float] = {}
    for when, rank, number in rows["B"]:
        came[rank, number] = min(when, came.get((rank, number), when))
    for when, rank, number in rows["A"]:
        early = [other for other in left.rows if came.get((str(other), number), float("inf")) > when]
        if early:
            wrong.append(f"rank {rank} passed barrier {number} before {early}")
    passed: dict[str, int] = {}
    for _, rank, number in rows["A"]:
        passed[rank] = max(passed.get(rank, -1), int(number))
    begun: dict[str, int] = {}
    for _, rank, number in rows["B"]:
        begun[rank] = max(begun.get(rank, -1), int(number))
    for rank, reached in left.rows.items():
        if not passed.get(str(rank), -1) + 1 <= reached <= begun.get(str(rank), -1) + 1:
            wrong.append(f"rank {rank} is at barrier {reached}, and has passed {passed.get(str(rank), -1)}")
    return wrong


# The observer


def judge_observer(samples: list[dict[str, float]], seconds: float) -> tuple[list[str], list[str]]:
    """Return what is wrong with what the observer weighed, and what would be if the soak had been long enough.

    What the process has borrowed from the allocator at the moment of a sample, such as a long value, makes samples
    differ by more than is looked for; so the means of two windows are compared, each a tenth of the time that counts.
    """
    start = min(FLAT_FROM_S, seconds / 3)
    counted = [sample for sample in samples if sample["at"] >= start]
    if len(counted) < 2:
        return [], ["the observer weighed itself too seldom"]
    begin, end = window_means(counted)
    wrong = []
    if end / begin - 1 >= GROWTH_MAX:
        wrong.append(f"the observer grew by {end / begin - 1:.2%}, from {begin:.0f} to {end:.0f} KiB")
    descriptors = {sample["fds"] for sample in counted}
    if len(descriptors) > 1:
        wrong.append(f"the observer had {sorted(descriptors)} descriptors")
    watched = max(sample["watched"] for sample in counted)
    if watched > WATCHED_MAX:
        wrong.append(f"the observer watched {watched} processes at once")
    return (wrong, []) if seconds >= FLAT_FROM_S else ([], wrong)


def window_means(samples: list[dict[str, float]]) -> tuple[float, float]:
    """Return the mean size in the first tenth of the time of these samples, and in the last."""
    first, last = samples[0]["at"], samples[-1]["at"]
    width = (last - first) / 10
    begin = [sample["rss"] for sample in samples if sample["at"] <= first + width]
    end = [sample["rss"] for sample in samples if sample["at"] >= last - width]
    return sum(begin) / len(begin), sum(end) / len(end)


# The end


def settle(directory: Path, size: int, options: dict[str, Any]) -> tuple[Left, dict[str, Any], list[str]]:
    """Use every recipe once more, as its page says; return what was there, what is left, and what is wrong with it."""
    path, wrong = directory / "store" / "soak.store", []
    with FileStore(path, timeout=60, label="the last", **options) as store:
        keys = store.list_keys()
        counters = {key: int(store.get(key)) for key in keys if re.fullmatch(r"own/\d+|sum|moves", key)}
        for key in (key for key in keys if key.startswith("trail/")):
            counters[key] = int(store.get(key).split()[-1])
        rows = dict.fromkeys(range(size), 0)
        rows |= {rank: int(store.get(f"row/sequence/{rank}")) for rank in rows if store.check([f"row/sequence/{rank}"])}
        given = []
        with suppress(QueueEmptyError):
            while True:
                given.append(store.queue_pop("given", block=False).decode())
        both = ReadWriteLock(store, "both")
        for held in (Lock(store, "lock"), Semaphore(store, "places", PLACES), both.reader, both.writer):
            if not held.acquire(timeout=60):
                wrong.append(f"{held.name} is not free though all have ended: {held.holders()}")
            else:
                held.release()
        with Election(store, "office", "the last", timeout=60) as office:
            if office.leader() is None:
                wrong.append("who leads does not lead")
        drained: dict[str, list[str]] = {"jobs": [], "tasks": []}
        for queue in (Queue(store, "jobs"), PriorityQueue(store, "tasks")):
            with suppress(QueueEmptyError):
                while True:
                    with queue.take(block=False) as item:
                        drained[queue.name].append(item.data.decode())
        group = Membership(store, "group", "the last")
        with group:
            if [each.data for each in group.members()] != [b"the last"]:
                wrong.append(f"others are in the group though all have ended: {group.members()}")
        wrong += use_the_rest(store)
        store.compact()
        keys = store.list_keys()
        wrong += judge_keys(keys, size)
        members = [member for member in store.members() if member.rank is None]
        if [member.label for member in members] != ["the last"]:
            wrong.append(f"{len(members)} sessions are known though all but one have ended: {members[:5]}")
    sections = {}
    with open(directory / "sections", "rb") as file:
        for row in (LOCK, OFFICE):
            sections[row] = struct.unpack("<qq", os.pread(file.fileno(), 16, row * 16) or bytes(16))[0]
    verdict = subprocess.run(
        [sys.executable, "-m", "fscoord", "verify", "--json", str(path)],
        stdout=subprocess.PIPE,
        timeout=300,
        check=False,
    )
    report = json.loads(verdict.stdout or "{}")
    if verdict.returncode != 0 or report.get("verdict") != "sound":
        wrong.append(f"fscoord verify ended with {verdict.returncode} and says {verdict.stdout.decode()}")
    files = sorted(file.name for file in path.parent.iterdir())
    allowed = r"soak\.store(\.bell|\.alive|\.waits|\.\d+\.[0-9a-f]{12})?"
    wrong += [f"the file {name} is left" for name in files if not re.fullmatch(allowed, name)]
    if sum(re.fullmatch(r"soak\.store\.\d+\..*", name) is not None for name in files) > 1:
        wrong.append(f"the log has more than one file beside the first: {files}")
    last = max((file["generation"] for file in report.get("files", [])), default=0)
    facts = {"keys": len(keys), "files": files, "generation": last, "verify": report.get("verdict")}
    return Left(counters, drained, given, sections, rows), facts, wrong


def use_the_rest(store: FileStore) -> list[str]:
    """Use the recipes that give out nothing of which the journals tell; return what is wrong."""
    wrong = []
    flag = Event(store, "flag")
    flag.set()
    if not flag.wait(60):
        wrong.append("the event that is set is waited for")
    with Condition(store, "news") as news:
        news.notify_all()
        if news.wait(0):
            wrong.append("the condition is notified by nobody")
    circle = CyclicBarrier(store, "circle", PARTIES, timeout=60)
    circle.reset()
    with ThreadPoolExecutor(PARTIES) as threads:
        if sorted(threads.map(lambda _: circle.wait(), range(PARTIES))) != list(range(PARTIES)):
            wrong.append("a round of the cyclic barrier gives wrong numbers")
    RateLimiter(store, "bucket", RATE, burst=BURST).acquire(BURST, timeout=60)
    with Partitioner(store, "shards", SHARDS) as group:
        if sorted(group.partitions) != list(range(SHARDS)):
            wrong.append(f"others hold partitions though all have ended: {store.get('shards/shares')!r}")
    for number in range(CREATED):
        found = Ephemeral(store, f"ephemeral/{number}").get()
        if found is not None:
            wrong.append(f"ephemeral/{number} has the value {found!r} though all have ended")
    return wrong
