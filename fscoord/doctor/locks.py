"""Probes of one kind of lock between two hands: whom it keeps out, who gets it next, what death and haste do to it."""

from __future__ import annotations

from typing import Any, Final

from fscoord._runtime import system
from fscoord.doctor.checks import BAD, INFO, OK, UNKNOWN, Check
from fscoord.doctor.child import HandLike
from fscoord.doctor.pair import ACT_S, Pair

__all__ = ["death", "exclusion", "handover", "lock_speed", "race"]

RELEASE_S: Final = 5.0
"""How long a lock that was given back may stay taken for others: a client of NFS 4.0 asks again only now and then."""
TURNS_MIN: Final = 3


def exclusion(pair: Pair, kind: str) -> Check:
    """Whether an exclusive lock keeps the other out, shared ones don't, and a lock that is given back is free."""
    name = pair.name("exclusion", kind)
    one, other = pair
    faults = []
    if not one.ask("lock", ACT_S, name=name, kind=kind):
        return pair.check("exclusion", UNKNOWN, "a fresh file was locked already", kind)
    if other.ask("lock", ACT_S, name=name, kind=kind):
        faults.append("both got an exclusive lock at once")
        other.ask("unlock", ACT_S, name=name, kind=kind)
    if kind != "soft" and other.ask("lock", ACT_S, name=name, kind=kind, shared=True):
        faults.append("a shared lock was given beside an exclusive one")
        other.ask("unlock", ACT_S, name=name, kind=kind, shared=True)
    one.ask("unlock", ACT_S, name=name, kind=kind)
    if not _free(other, name, kind):
        faults.append("a lock that was given back stayed taken")
    else:
        if one.ask("lock", ACT_S, name=name, kind=kind):
            faults.append("both got an exclusive lock at once, the other way round")
            one.ask("unlock", ACT_S, name=name, kind=kind)
        other.ask("unlock", ACT_S, name=name, kind=kind)
    if kind != "soft" and not faults:
        faults += _sharing(one, other, name, kind)
    return pair.check("exclusion", BAD if faults else OK, "; ".join(faults) or "each keeps the other out", kind)


def _free(hand: HandLike, name: str, kind: str, *, shared: bool = False) -> bool:
    deadline = system.time.monotonic() + RELEASE_S
    while not hand.ask("lock", ACT_S, name=name, kind=kind, shared=shared):
        if system.time.monotonic() > deadline:
            return False
        system.time.sleep(0.01)
    return True


def _sharing(one: HandLike, other: HandLike, name: str, kind: str) -> list[str]:
    both = [_free(hand, name, kind, shared=True) for hand in (one, other)]
    for hand in (one, other):
        hand.ask("unlock", ACT_S, name=name, kind=kind, shared=True)
    return [] if all(both) else ["two shared locks exclude each other"]


def handover(pair: Pair, kind: str) -> Check:
    """How soon one who waits in the kernel gets a lock that is given back."""
    name = pair.name("handover", kind)
    one, other = pair
    one.ask("lock", ACT_S, name=name, kind=kind)
    other.begin("block", ACT_S, name=name, kind=kind)
    system.time.sleep(pair.pause)  # so that it waits already; if it does not, the figure is only better
    freed = system.time.monotonic()
    one.ask("unlock", ACT_S, name=name, kind=kind)
    other.finish()
    took = system.time.monotonic() - freed
    other.ask("unlock", ACT_S, name=name, kind=kind)
    return pair.check("handover", OK, f"within {_ms(took)}", kind, seconds=took)


def death(pair: Pair, kind: str) -> Check:
    """Whether a lock whose holder is killed comes to one who waits for it, and how soon."""
    name = pair.name("death", kind)
    one, other = pair
    if not other.ask("lock", ACT_S, name=name, kind=kind):
        return pair.check("death", UNKNOWN, "a fresh file was locked already", kind)
    one.begin("block", ACT_S, name=name, kind=kind)
    system.time.sleep(pair.pause)
    killed = system.time.monotonic()
    other.kill()
    one.finish()
    took = system.time.monotonic() - killed
    one.ask("unlock", ACT_S, name=name, kind=kind)
    says = f"the lock of a process that was killed was free within {_ms(took)}"
    return pair.check("death", OK, says, kind, seconds=took)


def race(pair: Pair, kind: str) -> Check:
    """Whether two who append as fast as they can under the lock lose or repeat anything."""
    name = pair.name("race", kind)
    for hand, writer in zip(pair, ("one", "other"), strict=True):
        hand.begin("race", ACT_S + pair.effort, name=name, kind=kind, writer=writer, seconds=pair.effort)
    ends = {writer: hand.finish() for hand, writer in zip(pair, ("one", "other"), strict=True)}
    tallies = [hand.ask("tally", ACT_S, name=name, kind=kind) for hand in pair]
    faults = _faults(ends, tallies)
    measured = {"written": {writer: end["written"] for writer, end in ends.items()}, "turns": tallies[0]["turns"]}
    if faults:
        return pair.check("race", BAD, "; ".join(faults), kind, **measured)
    total = sum(measured["written"].values())
    if tallies[0]["turns"] < TURNS_MIN:
        return pair.check("race", UNKNOWN, "the two never wrote at the same time", kind, **measured)
    says = f"{total} appends, {measured['turns']} times in turn, all there and in order"
    return pair.check("race", OK, says, kind, **measured)


def _faults(ends: dict[str, Any], tallies: list[dict[str, Any]]) -> list[str]:
    written = {writer: end["written"] for writer, end in ends.items()}
    faults = []
    worst = max(tallies, key=lambda each: int(each["twice"]))
    if worst["twice"]:
        faults.append(
            f"{worst['twice']} of {worst['sound']} appends did not know of the one before: who held the lock saw old"
            " data, or was not alone"
        )
    for each in tallies:
        lost = sum(written.values()) - each["sound"]
        if lost > 0 and not any("lost" in fault for fault in faults):
            faults.append(f"{lost} of {sum(written.values())} appends under the lock are lost, or not seen")
        if each["garbled"] and not any("bytes" in fault for fault in faults):
            faults.append(f"{each['garbled']} lines hold bytes that nobody wrote")
    garbled = sum(end["garbled"] for end in ends.values())
    if garbled:
        faults.append(f"{garbled} times who held the lock saw bytes that nobody wrote")
    return faults


def lock_speed(pair: Pair, kind: str) -> Check:
    """How long it takes to take a free lock and give it back."""
    name = pair.name("speed", kind)
    one, other = pair
    other.ask("lock", ACT_S, name=name, kind=kind)  # NFS 4 may leave a file that one host alone has open to that host
    other.ask("unlock", ACT_S, name=name, kind=kind)
    took = one.ask("time_lock", ACT_S, name=name, kind=kind, seconds=pair.effort / 5)
    return pair.check("latency", INFO, f"{_ms(took)} to take a free lock and give it back", kind, seconds=took)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
