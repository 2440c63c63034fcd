"""`Check` is the result of a probe. `judge` makes a verdict of all checks: safe, not proven or not safe. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from fscoord._runtime.escaping import shell_word

OK: Final = "ok"
BAD: Final = "bad"
UNKNOWN: Final = "unknown"
INFO: Final = "info"

PROCESSES: Final = "processes"
HOSTS: Final = "hosts"


class Check(NamedTuple):
    """The result of one probe.

    Attributes:
        name: the name of the probe, one word.
        between: ``"processes"`` (of one host) or ``"hosts"``.
        outcome: ``"ok"``, ``"bad"`` (a store would break a promise), ``"unknown"`` (the probe could not be finished) or
            ``"info"`` (nothing depends on it).
        says: the result as text.
        lock: the kind of lock that was tested, or ``""``.
        measured: figures; times are in seconds.
    """

    name: str
    between: str
    outcome: str
    says: str
    lock: str = ""
    measured: dict[str, Any] = {}  # noqa: RUF012 - it is never changed

    @property
    def title(self) -> str:
        """The check's name with its kind of lock."""
        return f"{self.name} ({self.lock})" if self.lock else self.name


SAFE: Final = "safe"
NOT_PROVEN: Final = "not proven"
NOT_SAFE: Final = "not safe"

NEEDED: Final = ("exclusion", "race", "freshness-locked", "delay-locked", "names", "store")
"""The checks that must pass on every mount. For the kernel's locks, `death` must pass, too."""


class Findings(NamedTuple):
    """The input of `judge`.

    Attributes:
        facts: the properties of the mount, from `Agent.facts`.
        checks: the results of the probes.
        lock: the kind of lock that the store will use.
        other: the name of the other host, or None if nothing was tested between hosts.
        expected: how many instances were expected; None if that is unknown.
        came: how many instances took part.
    """

    facts: dict[str, Any]
    checks: Sequence[Check]
    lock: str
    other: str | None
    expected: int | None = None
    came: int = 1

    @property
    def needed(self) -> tuple[str, ...]:
        """The names of the checks that must pass for the verdict "safe"."""
        direct = ("freshness-direct", "delay-direct") if self.coherence == "direct" else ()
        return (*NEEDED, *direct, *(() if self.lock == "soft" else ("death",)))

    @property
    def coherence(self) -> str:
        """How a store reads here: by the default of the mount, or under a lock if the mount refuses direct reads."""
        refused = any(each.name == "freshness-direct" and each.outcome == INFO for each in self.checks)
        coherence: str = self.facts["coherence"]
        return "locked" if refused and coherence == "direct" else coherence

    @property
    def scopes(self) -> tuple[str, ...]:
        """The values of `Check.between` for which the checks must pass: processes, or processes and hosts."""
        return (PROCESSES,) if self.facts["is_local"] else (PROCESSES, HOSTS)

    def check(self, name: str, between: str) -> Check | None:
        """Return the check `name` for the wanted kind of lock, or None if there is no such check."""
        found = (each for each in self.checks if (each.name, each.between) == (name, between))
        return next((each for each in found if each.lock in ("", self.lock)), None)


def judge(findings: Findings) -> dict[str, Any]:
    """Return ``verdict``, ``reasons`` and ``recommendations``; the last two are lists of sentences."""
    against = _failures(findings)
    doubts = _inconclusive(findings)
    verdict = NOT_SAFE if against else NOT_PROVEN if doubts else SAFE
    return {
        "verdict": verdict,
        "reasons": against or doubts or [_summary(findings)],
        "recommendations": list(dict.fromkeys(_recommendations(findings, verdict))),
    }


def _failures(findings: Findings) -> list[str]:
    facts = findings.facts
    reasons = []
    objection = facts["objections"].get(findings.lock)
    if objection and not _is_testable(facts):
        reasons.append(f"{facts['point']}: {objection[0]}")
    for between in (PROCESSES, HOSTS):
        for name in findings.needed:
            check = findings.check(name, between)
            if check is not None and check.outcome == BAD:
                reasons.append(f"between {between}, {check.title}: {check.says}")
    if facts["is_local"] and findings.expected is not None and findings.came < findings.expected:
        reasons.append(
            f"{facts['point']} ({facts['kind']}) belongs to one host, and {findings.expected - findings.came} of"
            f" {findings.expected} instances did not appear there"
        )
    return reasons


def _is_testable(facts: dict[str, Any]) -> bool:
    """Return whether the mount table lacks the option that decides if the mount is fit. Then only a test can tell."""
    return bool(facts["kind"] == "fuse.glusterfs")


def _inconclusive(findings: Findings) -> list[str]:
    facts = findings.facts
    doubts = []
    if not facts["is_local"] and findings.other is None:
        doubts.append(
            f"{facts['kind']} is shared by hosts, and it was tested on one only; run one instance on each of two hosts"
            " at once"
        )
    doubts += [f"between {each.between}: {each.says}" for each in findings.checks if each.name == "presence"]
    for between in findings.scopes:
        if between == HOSTS and findings.other is None:
            continue
        for name in findings.needed:
            check = findings.check(name, between)
            if check is None:
                doubts.append(f"between {between}, {name} was not tested")
            elif check.outcome != OK:
                doubts.append(f"between {between}, {check.title}: {check.says}")
    if _is_testable(facts):
        doubts.append(
            "whether GlusterFS is mounted with direct-io-mode=enable can't be seen from here; without it a host may"
            " show old data"
        )
    if facts["caution"] and findings.other is None:
        doubts.append(facts["caution"])
    if not facts["kind"]:
        doubts.append("this host has no mount table, so the kind of file system is unknown")
    if findings.expected is not None and findings.came < findings.expected and not facts["is_local"]:
        doubts.append(f"{findings.expected - findings.came} of {findings.expected} instances did not come")
    return doubts


def _summary(findings: Findings) -> str:
    if findings.facts["is_local"]:
        return "everything that a store needs was tested between two processes of this host, and worked"
    return f"everything that a store needs was tested between this host and {findings.other}, and worked"


def _recommendations(findings: Findings, verdict: str) -> Iterable[str]:
    facts, lock = findings.facts, findings.lock
    objection = facts["objections"].get(lock)
    if objection:
        yield objection[1]
    yield from _about_stuck(findings)
    others = ("ofd", "flock", "soft") if _has_no_locks(findings) else ("ofd", "flock")
    sound = [kind for kind in others if _is_sound(findings, kind)]
    if lock not in sound and sound:
        yield (
            f'"{sound[0]}" locks passed the tests: pass lock="{sound[0]}" in every process, and get their verdict from'
            f" fscoord doctor --lock {sound[0]}"
        )
    if verdict == NOT_SAFE:
        yield "if none of this can be changed, choose another directory"
        return
    if not facts["is_local"]:
        if findings.other is None:
            yield f"srun -N2 fscoord doctor {shell_word(facts['path'])}, or start it in two terminals on two hosts"
        yield f'lock="{lock}" and coherence="{findings.coherence}" fit here' + (
            "" if _is_testable(facts) else " (the defaults)" if lock == "ofd" else ""
        )
    elif lock == "ofd":
        yield "the defaults fit: FileStore needs no options here"


def _has_no_locks(findings: Findings) -> bool:
    """Return whether the mount has no kernel locks of some kind. Then a soft lock can be used instead.

    A kernel lock that exists but does not exclude other processes does not count.
    """
    return any(check.measured.get("missing") and check.lock != "soft" for check in findings.checks)


def _is_sound(findings: Findings, kind: str) -> bool:
    if findings.facts["objections"].get(kind):
        return False
    needed = PROCESSES if findings.facts["is_local"] else HOSTS
    scopes = {each.between for each in findings.checks if each.lock == kind and each.name == "exclusion"}
    failed = any(each.outcome in (BAD, UNKNOWN) for each in findings.checks if each.lock == kind)
    return needed in scopes and not failed


def _about_stuck(findings: Findings) -> Iterable[str]:
    is_nfs = findings.facts["kind"] in {"nfs", "nfs4"}
    stuck = any(check.measured.get("stuck") and check.lock for check in findings.checks)
    if not stuck and not (is_nfs and _has_no_locks(findings)):  # ENOLCK on NFS: the lock manager did not answer
        return
    if is_nfs:
        yield (
            "the lock manager does not answer: on NFS 3, run rpc.statd on every host and open lockd's ports in both"
            " directions (rpcinfo -p SERVER shows them), or mount by NFS 4, which needs neither. Do not mount with"
            " nolock: its locks do not exclude other hosts"
        )
    else:
        yield "a lock call did not return: check whether the lock service of the file system runs"
