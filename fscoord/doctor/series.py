"""The probes between two hands, one after another, and what it means when one can't be finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from fscoord._runtime import system
from fscoord.doctor import locks, views
from fscoord.doctor.checks import BAD, HOSTS, INFO, UNKNOWN, Check
from fscoord.doctor.child import FailedError, LostError, StuckError
from fscoord.doctor.pair import Pair

__all__ = ["KINDS", "run"]

KINDS: Final = ("ofd", "flock", "soft")
NO_LOCKS: Final = frozenset(
    getattr(system.errno, name) for name in ("ENOLCK", "ENOSYS", "EOPNOTSUPP", "ENOTSUP", "EINVAL")
)

Probe = Callable[[], Check]


def run(pair: Pair, lock: str, options: dict[str, Any] | None, before: Callable[[str], None]) -> Iterator[Check]:
    """Try everything between the hands of `pair`, and yield what each probe found.

    Args:
        pair: the hands.
        lock: the kind of lock that the store is to have.
        options: further options for the store; None: no store would open here.
        before: called with the name of each probe before it begins.

    Raises:
        LostError: a hand is gone; what was not tried is not known.
    """
    lost = dict.fromkeys(KINDS, False)
    for name, kind, probe in _probes(pair, lock, options):
        if kind and lost[kind]:
            continue
        before(f"{name} ({kind})" if kind else name)
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
    """Each probe's name, the kind of lock without which it makes no sense, and the probe."""
    for kind in KINDS:
        yield "exclusion", kind, partial(locks.exclusion, pair, kind)
        if kind != "soft":  # its marker outlives its holder, and nobody waits for it in the kernel
            yield "handover", kind, partial(locks.handover, pair, kind)
            yield "death", kind, partial(locks.death, pair, kind)
    yield "latency", lock, partial(locks.lock_speed, pair, lock)
    yield "race", lock, partial(locks.race, pair, lock)
    yield "names", "", partial(views.claims, pair)
    for how in views.LOOKS:
        yield f"freshness-{how}", lock, partial(views.freshness, pair, lock, how)
        yield f"delay-{how}", lock, partial(views.delay, pair, lock, how)
    yield "rename", lock, partial(views.replacement, pair, lock)
    yield "events", lock, partial(views.events, pair, lock)
    if pair.between == HOSTS:
        yield "unlocked-appends", "", partial(views.scatter, pair)
    if options is None:
        return
    yield "store", lock, partial(views.store, pair, lock, options)
    if pair.between != HOSTS:
        yield "speed", lock, partial(views.speed, pair, lock, options)


def _failed(pair: Pair, name: str, kind: str, error: FailedError) -> Check:
    if kind and name == "exclusion" and error.errno in NO_LOCKS:
        return pair.check(name, BAD, f"there are no such locks here ({error})", kind, missing=True)
    outcome = INFO if name in {"latency", "rename", "events", "unlocked-appends", "speed"} else UNKNOWN
    return pair.check(name, outcome, f"could not be tried: {error}", kind)


def _start_anew(pair: Pair) -> None:
    for hand in pair:
        try:
            hand.kill()
        except (LostError, StuckError):
            pass
