"""One instance's examination of a directory, from the first look to the report; nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fscoord._runtime import system
from fscoord._runtime.signals import signals_end_it
from fscoord.doctor import probes
from fscoord.doctor.agents import ChildHand, FailedError, LostError, Scribe, SilentError
from fscoord.doctor.coordination import BrokenOffError, LateError, Meeting, RemoteHand
from fscoord.doctor.probes import Pair
from fscoord.doctor.verdict import BAD, HOSTS, NOT_SAFE, PROCESSES, UNKNOWN, Check, Findings, judge
from fscoord.errors import InsecurePathError, StoreUnavailableError, UnsupportedFilesystemError

__all__ = ["COMPANY_S", "EFFORT_S", "STRANGERS_S", "examine"]

FACTS_S: Final = 15.0
LEAVE_S: Final = 15.0
SILENT_S: Final = 2.0
"""How long to wait for an end once the directory did not answer."""
COMPANY_S: Final = 60.0
"""How long to wait for instances that a launcher said it started."""
STRANGERS_S: Final = 10.0
"""How long to wait on a network mount when nobody said how many come."""
EFFORT_S: Final = 1.0
OTHERS_S: Final = 180.0
"""How long to come again when an examination without this instance is under way."""
AGAIN_S: Final = 0.5
FILE_SYSTEM: Final = ("kind", "point", "options", "is_local", "coherence")
"""What of the facts the report tells of the file system."""
FORCED: Final = {"fuse.glusterfs": {"coherence": "locked"}}
"""What a store must be told on a mount that it refuses, so that it can be tried there."""


def examine(
    path: str,
    *,
    lock: str = "ofd",
    expected: int | None = None,
    wait: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
    group: str = "",
    client: str | None = None,
    effort: float = EFFORT_S,
) -> dict[str, Any]:
    """Try whether the file system under the directory `path` keeps what a store there promises; return the report.

    Start it on two hosts at once, and they find each other through the directory.

    Args:
        path: the directory.
        lock: the kind of lock that the store is to have: ``"ofd"``, ``"flock"`` or ``"soft"``.
        expected: how many instances there will be; None if nobody knows.
        wait: how many seconds to wait for them; None: 60 if they are expected; 10 if nobody knows and hosts share the
            file system; else not at all.
        tell: is told in words what is being done.
        group: instances of one group meet each other only.
        client: whose caches this process uses; other than None for tests only, that play several hosts on one.
        effort: for how many seconds each figure is measured.

    Returns:
        The report, as it is described in ``docs/cli.md``.

    Raises:
        OSError: there is no such directory, or nothing can be written there.
        UnsupportedFilesystemError: this platform has no advisory locks.
        ValueError: there is no such kind of lock.
        StoreUnavailableError: it could not be finished: the instance that presided went away, or a process of this
            examination ended. (A file system that does not answer is no error: the report says so.)
    """
    if system.fcntl is None:
        raise UnsupportedFilesystemError(f"there are no advisory locks on {system.platform()}: use HashStore there")
    if lock not in probes.KINDS:
        raise ValueError(f"lock is one of {', '.join(probes.KINDS)}, not {lock!r}")
    start = system.time.monotonic()
    path = system.os.path.abspath(path)  # the processes that look at it are elsewhere
    try:
        with signals_end_it(), _Instance(path, lock, tell, effort) as instance:
            report = instance.run(expected, wait, group, client)
    except (FailedError, LostError) as error:
        raise StoreUnavailableError(f"{path}: {error}", path=path) from None
    return {**report, "seconds": system.time.monotonic() - start}


class _Instance:
    """The processes of one instance, and what it does with them."""

    def __init__(self, path: str, lock: str, tell: Callable[[str], None], effort: float) -> None:
        self.path = path
        self.lock = lock
        self.tell = tell
        self.effort = effort
        self.checks: list[Check] = []
        self.scribe = Scribe("this process")
        self.hands: list[ChildHand] = []
        self.facts: dict[str, Any] | None = None
        self.meeting: Meeting | None = None
        self.other: str | None = None

    def __enter__(self) -> _Instance:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for hand in self.hands:
                hand.kill()
        finally:
            if not self.scribe.dismiss(SILENT_S if self.scribe.is_silent else LEAVE_S):
                self.tell(f"{self.path} does not answer: what the examination put there stays until it does")

    def run(self, expected: int | None, wait: float | None, group: str, client: str | None) -> dict[str, Any]:
        """See `examine`."""
        self.tell(f"looking at {self.path}")
        try:
            self.facts = {**self._ask("facts", path=self.path), "client": client}
            return self._examine(self.facts, expected, wait, group)
        except SilentError as error:
            return self._unanswering(str(error))

    def _examine(self, facts: dict[str, Any], expected: int | None, wait: float | None, group: str) -> dict[str, Any]:
        if wait is None:
            wait = COMPANY_S if expected and expected > 1 else 0.0 if facts["is_local"] else STRANGERS_S
        self.meeting = meeting = self._meet(facts, expected, wait, group)
        if not meeting.presides:
            self.tell("lending a hand to the instance that presides, which prints the report")
            report = meeting.serve(self._hand(meeting, "this process"))
            return {**report, "presided": False}
        self._preside(meeting, facts)
        findings = Findings(facts, self.checks, self.lock, self.other, expected, len(meeting.members))
        report = self._report(**judge(findings))
        meeting.end(report)
        return {**report, "presided": True}

    def _ask(self, act: str, **arguments: Any) -> Any:
        try:
            return self.scribe.ask(act, FACTS_S, **arguments)
        except FailedError as error:
            raise _as_own(error, self.path) from None

    def _hand(self, meeting: Meeting, label: str) -> ChildHand:
        self.hands.append(ChildHand(label, meeting.directory))
        return self.hands[-1]

    def _meet(self, facts: dict[str, Any], expected: int | None, wait: float, group: str) -> Meeting:
        shared = facts["group"]
        name = f".fscoord-doctor-{system.os.getuid() if shared is None else f'g{shared}'}"
        if group:
            name += "-" + "".join(sign if sign.isalnum() and sign.isascii() else "-" for sign in group[:100])
        directory = system.os.path.join(facts["path"], name)
        deadline = system.time.monotonic() + OTHERS_S
        while True:
            meeting = Meeting(self.scribe, directory, facts)
            try:
                meeting.gather(expected, wait, self.tell)
                return meeting
            except FailedError as error:
                raise _as_own(error, directory) from None
            except (BrokenOffError, LateError) as error:
                if system.time.monotonic() > deadline:
                    raise StoreUnavailableError(f"{directory}: {error}; remove it", path=directory) from None
                self.tell(f"{error}; trying again")
            self.scribe.ask("leave", LEAVE_S)
            system.time.sleep(AGAIN_S)

    def _preside(self, meeting: Meeting, facts: dict[str, Any]) -> None:
        hands = [self._hand(meeting, "one process"), self._hand(meeting, "another process")]
        self._try(meeting, facts, Pair(hands[0], hands[1], PROCESSES, self.effort))
        if meeting.partner is not None:
            self.other = str(meeting.members[meeting.partner]["host"])
            remote = RemoteHand(meeting, meeting.partner, f"host {self.other}")
            self._try(meeting, facts, Pair(hands[0], remote, HOSTS, self.effort))

    def _try(self, meeting: Meeting, facts: dict[str, Any], pair: Pair) -> None:
        refused = facts["objections"][self.lock] is not None
        options = FORCED.get(facts["kind"], None if refused else {})

        def before(name: str) -> None:
            self.tell(f"between {pair.between}: {name}")
            meeting.beat()

        try:
            for check in probes.run(pair, self.lock, options, before):
                self.checks.append(check)
                if check.outcome in {BAD, UNKNOWN}:
                    self.tell(f"between {pair.between}: {check.title}: {check.says}")
        except LostError as error:
            self.tell(str(error))
            self.checks.append(pair.check("presence", UNKNOWN, str(error)))

    def _unanswering(self, says: str) -> dict[str, Any]:
        """What was found before stands in the report; what it would have meant does not matter any more."""
        self.checks.append(Check("answer", PROCESSES, BAD, says))
        advice = "look whether the server of the mount is alive and can be reached: mount, ping, dmesg"
        report = self._report(verdict=NOT_SAFE, reasons=[f"{self.path}: {says}"], recommendations=[advice])
        return {**report, "presided": True}

    def _report(self, **judged: Any) -> dict[str, Any]:
        facts = self.facts
        members = {} if self.meeting is None else self.meeting.members
        return {
            "path": self.path if facts is None else facts["path"],
            **judged,
            "file_system": None if facts is None else {name: facts[name] for name in FILE_SYSTEM},
            "lock": self.lock,
            "hosts": sorted({str(member["host"]) for member in members.values()}),
            "other_host": self.other,
            "checks": [check._asdict() for check in self.checks],
        }


def _as_own(error: FailedError, path: str) -> Exception:
    if error.kind == InsecurePathError.__name__:
        return InsecurePathError(str(error), path=path)
    if error.errno is not None:
        return OSError(error.errno, str(error), path)
    return StoreUnavailableError(f"{path}: {error}", path=path)
