"""Probes of what one hand sees of the other's work: appends, names, replaced files, events; and of a store itself."""

from __future__ import annotations

from typing import Any, Final

from fscoord.doctor.checks import BAD, INFO, OK, UNKNOWN, Check
from fscoord.doctor.child import FailedError
from fscoord.doctor.pair import ACT_S, Pair

__all__ = ["LOOKS", "claims", "delay", "events", "freshness", "replacement", "scatter", "speed", "store"]

LOOKS: Final = {
    "locked": "a look under the shared lock",
    "direct": "a look past the cache (O_DIRECT)",
    "plain": "a plain look",
}
ROUNDS: Final = 10
CLAIMS: Final = 20
SCATTER: Final = 100
WAYS: Final = ("link", "excl", "mkdir")


def freshness(pair: Pair, kind: str, how: str) -> Check:
    """Whether a look that begins after an append was acknowledged sees it, though one had looked just before."""
    name = pair.name("freshness", how)
    one, other = pair
    stale = 0
    for number in range(1, ROUNDS + 1):
        writer, reader = (one, other) if number % 2 else (other, one)
        seen = reader.ask("look", ACT_S, name=name, kind=kind, how=how)
        if seen == [-1]:
            return pair.check(f"freshness-{how}", INFO, f"{LOOKS[how]} is not possible here")
        writer.ask("append", ACT_S, name=name, kind=kind, number=number, writer="w")
        seen = reader.ask("look", ACT_S, name=name, kind=kind, how=how)
        stale += not seen or seen[-1] != number
    outcome = INFO if how == "plain" else BAD if stale else OK
    says = f"{stale} of {ROUNDS} looks missed what was appended before" if stale else f"{LOOKS[how]} sees every append"
    return pair.check(f"freshness-{how}", outcome, says, stale=stale)


def delay(pair: Pair, kind: str, how: str) -> Check:
    """How soon each sees what the other appends, while both look again and again, and whether they see nothing else."""
    name = pair.name("delay", how)
    for turn, hand in enumerate(pair):
        question = {"name": name, "kind": kind, "how": how, "turn": turn, "rounds": ROUNDS}
        hand.begin("answer", ACT_S + 2 * pair.effort, **question, seconds=ACT_S / 5 + 2 * pair.effort)
    ends = [hand.finish() for hand in pair]
    if not all(end["possible"] for end in ends):
        return pair.check(f"delay-{how}", INFO, f"{LOOKS[how]} is not possible here")
    garbled = sum(end["garbled"] for end in ends)
    outcome = INFO if how == "plain" else OK
    waits = sorted(wait for end in ends for wait in end["waits"])
    measured: dict[str, Any] = {"garbled": garbled}
    if waits:
        measured["seconds"] = waits[len(waits) // 2] / 2
    says = [f"an append is seen after {measured['seconds'] * 1000:.3g} ms by {LOOKS[how]}"] if waits else []
    if garbled:
        says.append(f"{garbled} looks showed bytes that nobody wrote")
        outcome = INFO if how == "plain" else BAD
    if not all(end["done"] for end in ends):
        says.append(f"{LOOKS[how]} did not show an append within seconds")
        outcome = INFO if how == "plain" else BAD
    return pair.check(f"delay-{how}", outcome, "; ".join(says), **measured)


def claims(pair: Pair) -> Check:
    """Whether of two who make a name at once exactly one is first: by link, by O_EXCL, by mkdir."""
    faults, missing = [], []
    for how in WAYS:
        try:
            for hand in pair:
                hand.begin("claim", ACT_S, stem=pair.name("claim", how), how=how, count=CLAIMS)
            won = [hand.finish() for hand in pair]
        except FailedError as error:  # an answer that nobody takes is dropped
            if how != "link":
                raise
            missing.append(f"no hard links ({error})")
            continue
        twice = set(won[0]) & set(won[1])
        if twice:
            faults.append(f"{len(twice)} of {CLAIMS} names were made by both ({how})")
        if len(set(won[0]) | set(won[1])) < CLAIMS:
            faults.append(f"some names were made by nobody ({how})")
    says = "; ".join(faults + missing) or "each name is made by one"
    return pair.check("names", BAD if faults else OK, says)


def scatter(pair: Pair) -> Check:
    """How many appends without a lock survive: on NFS an end of file is where a host believes it to be (open(2))."""
    name = pair.name("scatter")
    for hand, writer in zip(pair, ("one", "other"), strict=True):
        hand.begin("scatter", ACT_S, name=name, writer=writer, count=SCATTER)
    total = sum(hand.finish() for hand in pair)
    there = pair.one.ask("scattered", ACT_S, name=name)
    says = f"{there} of {total} appends without a lock survive"
    says += "" if there == total else " (a store never does that)"
    return pair.check("unlocked-appends", INFO, says, sound=there, written=total)


def replacement(pair: Pair, kind: str) -> Check:
    """How soon one who opens a path sees a file that was renamed over it; a store does not rely on it."""
    name = pair.name("replaced")
    pair.other.ask("append", ACT_S, name=name, kind=kind, number=1, writer="old")
    pair.other.ask("look", ACT_S, name=name, kind=kind, how="plain")
    pair.one.ask("replace", ACT_S, name=name, number=2)
    took = pair.other.ask("reopened", ACT_S, name=name, number=2, seconds=ACT_S / 3)
    if took is None:
        return pair.check("rename", INFO, "a file that was renamed over another was not seen for seconds")
    return pair.check("rename", INFO, f"a renamed file is seen within {took * 1000:.3g} ms", seconds=took)


def events(pair: Pair, kind: str) -> Check:
    """Whether the kernel tells one of the other's appends (inotify(7)); where it does not, waiters poll."""
    name = pair.name("events")
    if not pair.other.ask("watch", ACT_S, name=name):
        return pair.check("events", INFO, "there is no inotify here: waiters poll", arrive=False)
    pair.one.ask("append", ACT_S, name=name, kind=kind, number=1, writer="w")
    arrive = pair.other.ask("watched", ACT_S, seconds=2.0 if pair.between == "processes" else 0.5)
    says = "changes are told (inotify)" if arrive else "changes are not told (inotify): waiters poll"
    return pair.check("events", INFO, says, arrive=arrive)


def store(pair: Pair, kind: str, options: dict[str, Any]) -> Check:
    """Whether two who add to one number of a real store get every sum once."""
    name = pair.name("store", kind)
    for hand in pair:
        hand.begin("count", 2 * ACT_S, name=name, options={"lock": kind, **options}, seconds=pair.effort)
    ends = [hand.finish() for hand in pair]
    errors = [end["error"] for end in ends if end["error"]]
    if errors:
        return pair.check("store", BAD, f"the store fails: {errors[0]}", kind)
    sums = ends[0]["sums"] + ends[1]["sums"]
    speeds = [end["operations"] for end in ends]
    if len(set(sums)) < len(sums) or max(sums) != len(sums):
        lost = f"{len(sums)} additions of 1 made {max(sums)}, {len(sums) - len(set(sums))} sums were given twice"
        return pair.check("store", BAD, lost, kind)
    if max(ends[0]["sums"]) < min(ends[1]["sums"]) or max(ends[1]["sums"]) < min(ends[0]["sums"]):
        return pair.check("store", UNKNOWN, "the two never added at the same time", kind)
    says = f"{len(sums)} additions, each sum once; {speeds[0]:.0f} and {speeds[1]:.0f} additions/s at once"
    return pair.check("store", OK, says, kind, operations_per_s=speeds)


def speed(pair: Pair, kind: str, options: dict[str, Any]) -> Check:
    """What a store's operations cost one process alone."""
    question = {"name": pair.name("alone", kind), "options": {"lock": kind, **options}, "seconds": pair.effort / 2}
    took = pair.one.ask("speed", ACT_S, **question)
    says = ", ".join(f"{name} {1e6 * seconds:.3g} µs" for name, seconds in took.items())
    return pair.check("speed", INFO, f"alone: {says}", kind, **took)
