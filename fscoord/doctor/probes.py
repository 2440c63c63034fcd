"""The probes of an examination. Each tests one property between two agents, and returns a `Check`.

The agents are two processes of this host, or one process here and one on another host. The first probes test a lock:
exclusion, handover, the death of the holder, races. The next probes test how soon one agent reads the appends of the
other. The last probes test a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

from fscoord._runtime import system
from fscoord.doctor.agents import AgentProtocol, FailedError, LostError, StuckError
from fscoord.doctor.verdict import BAD, HOSTS, INFO, OK, UNKNOWN, Check

ACT_S: Final = 15.0
"""The time limit in seconds of an operation that usually takes milliseconds. A longer call counts as stuck."""


class Pair:
    """The two agents of a probe, `one` and `other`. `between` is ``"processes"`` or ``"hosts"``.

    `effort` is how many seconds each measurement takes. `pause` is how many seconds a waiter has to begin its wait.
    """

    def __init__(self, one: AgentProtocol, other: AgentProtocol, between: str, effort: float) -> None:
        self.one = one
        self.other = other
        self.between = between
        self.effort = effort
        self.pause = min(0.2, effort)

    def __iter__(self) -> Iterator[AgentProtocol]:
        return iter((self.one, self.other))

    def name(self, what: str, how: str = "") -> str:
        """Return the name of the file for the probe `what`. Each probe has files of its own."""
        return f"file-{self.between}-{what}-{how}"

    def check(self, name: str, outcome: str, says: str, lock: str = "", **measured: Any) -> Check:
        """Return the result of the probe `name` between these agents."""
        return Check(name, self.between, outcome, says, lock, measured)


KINDS: Final = ("ofd", "flock", "soft")
NO_LOCKS: Final = frozenset(
    getattr(system.errno, name) for name in ("ENOLCK", "ENOSYS", "EOPNOTSUPP", "ENOTSUP", "EINVAL")
)

Probe = Callable[[], Check]


def run(pair: Pair, lock: str, options: dict[str, Any] | None, before: Callable[[str], None]) -> Iterator[Check]:
    """Run every probe between the agents of `pair`, and yield the results.

    Args:
        pair: the agents.
        lock: the kind of lock that the store is to have.
        options: further options for the store. None means that a store refuses this mount: then no store is tested.
        before: called with the name and number of each probe before it begins.

    Raises:
        LostError: an agent is gone; the remaining probes were not run.
    """
    lost = dict.fromkeys(KINDS, False)
    steps = list(_probes(pair, lock, options))
    for number, (name, kind, probe) in enumerate(steps, 1):
        if kind and lost[kind]:
            continue
        before(f"{f'{name} ({kind})' if kind else name}, step {number} of {len(steps)}")
        try:
            check = probe()
        except StuckError as error:
            check = pair.check(name, BAD if kind else UNKNOWN, f"no answer: {error}", kind, stuck=True)
            _start_anew(pair)
        except FailedError as error:
            check = _failed(pair, name, kind, error)
        if kind and name == "exclusion":
            lost[kind] = check.outcome == BAD and (
                kind != lock or "missing" in check.measured or "stuck" in check.measured
            )
        yield check


def _probes(pair: Pair, lock: str, options: dict[str, Any] | None) -> Iterator[tuple[str, str, Probe]]:
    """Yield the name of each probe, the kind of lock that it needs (or ``""``), and the probe."""
    for kind in KINDS:
        yield "exclusion", kind, partial(exclusion, pair, kind)
        if kind != "soft":  # a soft lock outlives its holder, and has no waiters in the kernel
            yield "handover", kind, partial(handover, pair, kind)
            yield "death", kind, partial(death, pair, kind)
    yield "latency", lock, partial(lock_speed, pair, lock)
    yield "race", lock, partial(race, pair, lock)
    yield "names", "", partial(claims, pair)
    for how in LOOKS:
        yield f"freshness-{how}", lock, partial(freshness, pair, lock, how)
        yield f"delay-{how}", lock, partial(delay, pair, lock, how)
    yield "events", lock, partial(events, pair, lock)
    if options is None:
        return
    yield "store", lock, partial(store, pair, lock, options)
    if pair.between != HOSTS:
        yield "speed", lock, partial(speed, pair, lock, options)


def _failed(pair: Pair, name: str, kind: str, error: FailedError) -> Check:
    if kind and name == "exclusion" and error.errno in NO_LOCKS | ({system.errno.EPERM} if kind == "soft" else set()):
        return pair.check(name, BAD, f"the mount has no locks of this kind ({error})", kind, missing=True)
    outcome = INFO if name in {"latency", "events", "speed"} else UNKNOWN
    return pair.check(name, outcome, f"could not be tested: {error}", kind)


def _start_anew(pair: Pair) -> None:
    for agent in pair:
        with suppress(LostError, StuckError):
            agent.kill()


RELEASE_S: Final = 5.0
"""How many seconds a lock may be refused after its release. An NFS 4.0 client polls for a lock at long intervals."""
TURNS_MIN: Final = 3


def exclusion(pair: Pair, kind: str) -> Check:
    """Test that an exclusive lock excludes the other agent, that shared locks coexist, and that a release works."""
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
        faults.append("a released lock stayed held")
    else:
        if one.ask("lock", ACT_S, name=name, kind=kind):
            faults.append("both got an exclusive lock at once, also in the reverse order")
            one.ask("unlock", ACT_S, name=name, kind=kind)
        other.ask("unlock", ACT_S, name=name, kind=kind)
    if kind != "soft" and not faults:
        faults += _sharing(one, other, name, kind)
    return pair.check("exclusion", BAD if faults else OK, "; ".join(faults) or "each keeps the other out", kind)


def _free(agent: AgentProtocol, name: str, kind: str, *, shared: bool = False) -> bool:
    deadline = system.time.monotonic() + RELEASE_S
    while not agent.ask("lock", ACT_S, name=name, kind=kind, shared=shared):
        if system.time.monotonic() > deadline:
            return False
        system.time.sleep(0.01)
    return True


def _sharing(one: AgentProtocol, other: AgentProtocol, name: str, kind: str) -> list[str]:
    both = [_free(agent, name, kind, shared=True) for agent in (one, other)]
    for agent in (one, other):
        agent.ask("unlock", ACT_S, name=name, kind=kind, shared=True)
    return [] if all(both) else ["two shared locks exclude each other"]


def handover(pair: Pair, kind: str) -> Check:
    """Measure how soon a waiter in the kernel gets a lock after its release."""
    name = pair.name("handover", kind)
    one, other = pair
    one.ask("lock", ACT_S, name=name, kind=kind)
    other.begin("block", ACT_S, name=name, kind=kind)
    system.time.sleep(pair.pause)  # so that `other` waits already; if it does not, the figure is only smaller
    freed = system.time.monotonic()
    one.ask("unlock", ACT_S, name=name, kind=kind)
    other.finish()
    took = system.time.monotonic() - freed
    other.ask("unlock", ACT_S, name=name, kind=kind)
    return pair.check("handover", OK, f"within {_ms(took)}", kind, seconds=took)


def death(pair: Pair, kind: str) -> Check:
    """Test whether a waiter gets the lock after its holder was killed, and how soon."""
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
    """Test that no record is lost or repeated if two agents append under the lock as fast as they can."""
    name = pair.name("race", kind)
    for agent, writer in zip(pair, ("one", "other"), strict=True):
        agent.begin("race", ACT_S + pair.effort, name=name, kind=kind, writer=writer, seconds=pair.effort)
    ends = {writer: agent.finish() for agent, writer in zip(pair, ("one", "other"), strict=True)}
    tallies = [agent.ask("tally", ACT_S, name=name, kind=kind) for agent in pair]
    faults = _faults(ends, tallies)
    measured = {"written": {writer: end["written"] for writer, end in ends.items()}, "turns": tallies[0]["turns"]}
    if faults:
        return pair.check("race", BAD, "; ".join(faults), kind, **measured)
    total = sum(measured["written"].values())
    if tallies[0]["turns"] < TURNS_MIN:
        return pair.check("race", UNKNOWN, "the two processes never wrote at the same time", kind, **measured)
    says = f"{total} appends, {measured['turns']} times in turn, all there and in order"
    return pair.check("race", OK, says, kind, **measured)


def _faults(ends: dict[str, Any], tallies: list[dict[str, Any]]) -> list[str]:
    written = {writer: end["written"] for writer, end in ends.items()}
    faults = []
    worst = max(tallies, key=lambda each: int(each["twice"]))
    if worst["twice"]:
        faults.append(
            f"{worst['twice']} of {worst['sound']} appends repeat the number of another append: two processes held the"
            " lock at once, or its holder read old data"
        )
    for each in tallies:
        lost = sum(written.values()) - each["sound"]
        if lost > 0 and not any("lost" in fault for fault in faults):
            faults.append(f"{lost} of {sum(written.values())} appends under the lock are lost, or not seen")
        if each["garbled"] and not any("bytes" in fault for fault in faults):
            faults.append(f"{each['garbled']} records contain bytes that no agent wrote")
    garbled = sum(end["garbled"] for end in ends.values())
    if garbled:
        faults.append(f"{garbled} times the holder of the lock read bytes that no agent wrote")
    return faults


def lock_speed(pair: Pair, kind: str) -> Check:
    """Measure the time to acquire and release a free lock."""
    name = pair.name("speed", kind)
    one, other = pair
    # If one host alone has a file open, an NFS 4 server may delegate the file to it: then no lock reaches the server.
    other.ask("lock", ACT_S, name=name, kind=kind)
    other.ask("unlock", ACT_S, name=name, kind=kind)
    took = one.ask("time_lock", ACT_S, name=name, kind=kind, seconds=pair.effort / 5)
    return pair.check("latency", INFO, f"{_ms(took)} to acquire and release a free lock", kind, seconds=took)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


LOOKS: Final = {
    "locked": "a read under the shared lock",
    "direct": "a read past the cache (O_DIRECT)",
    "plain": "a plain read",
}
ROUNDS: Final = 10
CLAIMS: Final = 20
WAYS: Final = ("link", "excl", "mkdir")


def freshness(pair: Pair, kind: str, how: str) -> Check:
    """Test whether a read finds an append that returned before, although an older read has filled the cache."""
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
    says = f"{stale} of {ROUNDS} reads missed an earlier append" if stale else f"{LOOKS[how]} sees every append"
    return pair.check(f"freshness-{how}", outcome, says, stale=stale)


def delay(pair: Pair, kind: str, how: str) -> Check:
    """Measure how soon each agent reads the appends of the other while both poll. Test that no read is damaged."""
    name = pair.name("delay", how)
    for turn, agent in enumerate(pair):
        question = {"name": name, "kind": kind, "how": how, "turn": turn, "rounds": ROUNDS}
        agent.begin("answer", ACT_S + 2 * pair.effort, **question, seconds=ACT_S / 5 + 2 * pair.effort)
    ends = [agent.finish() for agent in pair]
    if not all(end["possible"] for end in ends):
        return pair.check(f"delay-{how}", INFO, f"{LOOKS[how]} is not possible here")
    garbled = sum(end["garbled"] for end in ends)
    are_done = all(end["done"] for end in ends)
    outcome = INFO if how == "plain" else BAD if garbled or not are_done else OK
    waits = sorted(wait for end in ends for wait in end["waits"])
    measured: dict[str, Any] = {"garbled": garbled}
    if waits:
        measured["seconds"] = waits[len(waits) // 2] / 2
    says = [f"an append is seen after {measured['seconds'] * 1000:.3g} ms by {LOOKS[how]}"] if waits else []
    if garbled:
        says.append(f"{garbled} reads returned bytes that no agent wrote")
    if not are_done:
        says.append(f"{LOOKS[how]} did not show an append in time")
    return pair.check(f"delay-{how}", outcome, "; ".join(says), **measured)


def claims(pair: Pair) -> Check:
    """Test that exactly one agent succeeds if both create the same name at once: by link, by O_EXCL, by mkdir."""
    faults, missing = [], []
    fewest = CLAIMS
    for how in WAYS:
        try:
            for agent in pair:
                question = {"stem": pair.name("claim", how), "how": how, "count": CLAIMS, "seconds": ACT_S}
                agent.begin("claim", 2 * ACT_S, **question)
            ends = [agent.finish() for agent in pair]
        except FailedError as error:  # the other agent's next request drops its unread response
            if how != "link":
                raise
            missing.append(f"no hard links ({error})")
            continue
        won = [set(end["won"]) for end in ends]
        both = min(end["tried"] for end in ends)  # on a slow mount an agent has no time for all names
        fewest = min(fewest, both)
        twice = won[0] & won[1]
        if twice:
            faults.append(f"{len(twice)} of {both} names were made by both ({how})")
        if not (won[0] | won[1]).issuperset(range(both)):
            faults.append(f"some names were made by neither ({how})")
    if fewest < TURNS_MIN and not faults:
        return pair.check("names", UNKNOWN, f"the two processes tried only {fewest} names in time")
    says = "; ".join(faults + missing) or "each name is made by one"
    return pair.check("names", BAD if faults else OK, says)


def events(pair: Pair, kind: str) -> Check:
    """Test whether the kernel reports the appends of the other agent (inotify(7)). If it does not, waiters poll."""
    name = pair.name("events")
    if not pair.other.ask("watch", ACT_S, name=name):
        return pair.check("events", INFO, "there is no inotify here: waiters poll", arrive=False)
    pair.one.ask("append", ACT_S, name=name, kind=kind, number=1, writer="w")
    arrive = pair.other.ask("watched", ACT_S, seconds=2.0 if pair.between == "processes" else 0.5)
    says = "changes are reported (inotify)" if arrive else "changes are not reported (inotify): waiters poll"
    return pair.check("events", INFO, says, arrive=arrive)


def store(pair: Pair, kind: str, options: dict[str, Any]) -> Check:
    """Let two agents add 1 to one key of a `FileStore`, and test that no sum is returned twice."""
    name = pair.name("store", kind)
    for agent in pair:
        agent.begin("count", 2 * ACT_S, name=name, options={"lock": kind, **options}, seconds=pair.effort)
    ends = [agent.finish() for agent in pair]
    errors = [end["error"] for end in ends if end["error"]]
    if errors:
        return pair.check("store", BAD, f"the store fails: {errors[0]}", kind)
    sums = ends[0]["sums"] + ends[1]["sums"]
    speeds = [end["operations"] for end in ends]
    if len(set(sums)) < len(sums) or max(sums) != len(sums):
        lost = f"{len(sums)} additions of 1 gave {max(sums)}; {len(sums) - len(set(sums))} sums were returned twice"
        return pair.check("store", BAD, lost, kind)
    if max(ends[0]["sums"]) < min(ends[1]["sums"]) or max(ends[1]["sums"]) < min(ends[0]["sums"]):
        return pair.check("store", UNKNOWN, "the two processes never added at the same time", kind)
    says = f"{len(sums)} additions, each sum once; {speeds[0]:.0f} and {speeds[1]:.0f} additions/s at once"
    return pair.check("store", OK, says, kind, operations_per_s=speeds)


def speed(pair: Pair, kind: str, options: dict[str, Any]) -> Check:
    """Measure the times of a store's operations if only one process uses it."""
    question = {"name": pair.name("alone", kind), "options": {"lock": kind, **options}, "seconds": pair.effort / 2}
    took = pair.one.ask("speed", ACT_S, **question)
    says = ", ".join(f"{name} {1e6 * seconds:.3g} µs" for name, seconds in took.items())
    return pair.check("speed", INFO, f"alone: {says}", kind, **took)
