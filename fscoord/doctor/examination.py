"""`examine` tests a directory, from the mount's properties to the report. At the end no file remains there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fscoord._log.mount import CEPH_FUSE_KINDS
from fscoord._runtime import system
from fscoord._runtime.signals import raise_on_termination
from fscoord.doctor import probes
from fscoord.doctor.agents import FailedError, LocalAgent, LostError, MailboxAgent, SilentError
from fscoord.doctor.coordination import BrokenOffError, Coordinator, LateError, RemoteAgent
from fscoord.doctor.probes import Pair
from fscoord.doctor.verdict import BAD, HOSTS, NOT_SAFE, PROCESSES, UNKNOWN, Check, Findings, judge
from fscoord.errors import InsecurePathError, StoreUnavailableError, UnsupportedFilesystemError

FACTS_S: Final = 15.0
LEAVE_S: Final = 15.0
SILENT_S: Final = 2.0
"""How many seconds to wait for the end of the mailbox agent if the directory does not answer."""
EXPECTED_WAIT_S: Final = 60.0
"""How many seconds to wait for the other instances if their number is known."""
OPEN_WAIT_S: Final = 10.0
"""How many seconds to wait on a network mount for an unknown number of instances."""
EFFORT_S: Final = 1.0
PAIR_S: Final = 5.0
"""How many seconds the probes of one pair of agents take on a local disk. This estimate is printed."""
OTHERS_S: Final = 180.0
"""How long an instance tries to take part while other instances examine the directory, in seconds."""
AGAIN_S: Final = 0.5
FILE_SYSTEM: Final = ("kind", "point", "options", "is_local", "coherence", "reads_why", "vanished_host")
"""The facts about the file system that the report contains."""
_NEEDS_WRITES: Final = "; the doctor writes its test files there, so name a directory in which this user can write"
ADVICE: Final = {
    system.errno.ENOENT: "; check the path, or create the directory first",
    system.errno.EACCES: _NEEDS_WRITES,
    system.errno.EPERM: _NEEDS_WRITES,
    system.errno.EROFS: _NEEDS_WRITES,
    system.errno.ENOSPC: "; free some space, because the doctor writes its test files there",
    system.errno.EDQUOT: "; free some of the quota, because the doctor writes its test files there",
}
"""What to do if the directory can't be examined, by errno."""
FORCED: Final = {"fuse.glusterfs": {"coherence": "locked"}} | {
    kind: {"coherence": "direct"} for kind in CEPH_FUSE_KINDS
}
"""The options with which a `FileStore` can be opened on a mount that the store refuses by default."""


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
    """Test whether the file system of the directory `path` is fit for a store, and return the report.

    Instances that are started on several hosts at once find each other through the directory.

    Args:
        path: the directory.
        lock: the kind of lock that the store will have: ``"ofd"``, ``"flock"`` or ``"soft"``.
        expected: the number of instances; None if it is unknown.
        wait: how many seconds to wait for the other instances. None: 60 if more than one is expected; 10 if the number
            is unknown and hosts share the file system; otherwise 0.
        tell: called with texts about the progress.
        group: only instances with the same group find each other.
        client: the name of a simulated host, in tests of several hosts on one host; otherwise None.
        effort: for how many seconds each figure is measured.

    Returns:
        The report, as ``docs/cli/doctor.md`` describes it.

    Raises:
        OSError: there is no such directory, or nothing can be written there.
        UnsupportedFilesystemError: this platform has no advisory locks.
        ValueError: there is no such kind of lock.
        StoreUnavailableError: the examination could not be finished, because the coordinating instance is gone, or a
            process of the examination has ended. If the file system does not answer, no error is raised: the report
            says so.
    """
    if system.fcntl is None:
        raise UnsupportedFilesystemError(f"there are no advisory locks on {system.platform()}: use HashStore there")
    if lock not in probes.KINDS:
        raise ValueError(f"lock must be one of {', '.join(probes.KINDS)}, not {lock!r}")
    start = system.time.monotonic()
    path = system.os.path.abspath(path)  # the agents have another working directory
    instance = _Instance(path, lock, tell, effort)
    try:
        with raise_on_termination():
            try:
                report = instance.run(expected, wait, group, client)
            finally:
                instance.close()
    except FailedError as error:
        raise _as_own(error, path) from None
    except LostError as error:
        advice = "; start all instances again" if isinstance(error, BrokenOffError) else ""
        raise StoreUnavailableError(f"{path}: {error}{advice}", path=path) from None
    finally:
        instance.close()  # a signal handler's exception may have ended the first call before it did anything
    return {**report, "seconds": system.time.monotonic() - start}


class _Instance:
    """One instance of the examination, with its agents."""

    def __init__(self, path: str, lock: str, tell: Callable[[str], None], effort: float) -> None:
        self.path = path
        self.lock = lock
        self.tell = tell
        self.effort = effort
        self.checks: list[Check] = []
        self.mailbox_agent = MailboxAgent("this process")
        self.agents: list[LocalAgent] = []
        self.facts: dict[str, Any] | None = None
        self.coordinator: Coordinator | None = None
        self.other: str | None = None

    def close(self) -> None:
        """End the agents. If a call is interrupted, a further call ends the remaining agents."""
        try:
            for agent in self.agents:
                agent.kill()
        finally:
            if not self.mailbox_agent.dismiss(SILENT_S if self.mailbox_agent.is_silent else LEAVE_S):
                self.tell(f"{self.path} does not answer: the files of the examination stay there until it does")

    def run(self, expected: int | None, wait: float | None, group: str, client: str | None) -> dict[str, Any]:
        self.tell(f"examining {self.path}: about {PAIR_S:g} s for each pair of processes, and longer on a slow mount")
        try:
            self.facts = {**self._ask("facts", path=self.path), "client": client}
            return self._examine(self.facts, expected, wait, group)
        except SilentError as error:
            return self._unanswering(str(error))

    def _examine(self, facts: dict[str, Any], expected: int | None, wait: float | None, group: str) -> dict[str, Any]:
        if wait is None:
            wait = EXPECTED_WAIT_S if expected and expected > 1 else 0.0 if facts["is_local"] else OPEN_WAIT_S
        self.coordinator = coordinator = self._meet(facts, expected, wait, group)
        if not coordinator.is_coordinator:
            self.tell("working for the instance that coordinates, which prints the report")
            report = coordinator.serve(self._agent(coordinator, "this process"))
            return {**report, "presided": False}
        self._preside(coordinator, facts)
        findings = Findings(facts, self.checks, self.lock, self.other, expected, len(coordinator.members))
        report = self._report(**judge(findings))
        coordinator.end(report)
        return {**report, "presided": True}

    def _ask(self, act: str, **arguments: Any) -> Any:
        try:
            return self.mailbox_agent.ask(act, FACTS_S, **arguments)
        except FailedError as error:
            raise _as_own(error, self.path) from None

    def _agent(self, coordinator: Coordinator, label: str) -> LocalAgent:
        self.agents.append(LocalAgent(label, coordinator.directory))
        return self.agents[-1]

    def _meet(self, facts: dict[str, Any], expected: int | None, wait: float, group: str) -> Coordinator:
        shared = facts["group"]
        name = f".fscoord-doctor-{system.os.getuid() if shared is None else f'g{shared}'}"
        if group:
            name += "-" + "".join(sign if sign.isalnum() and sign.isascii() else "-" for sign in group[:100])
        directory = system.os.path.join(facts["path"], name)
        deadline = system.time.monotonic() + OTHERS_S
        while True:
            coordinator = Coordinator(self.mailbox_agent, directory, facts)
            try:
                coordinator.gather(expected, wait, self.tell)
                return coordinator
            except FailedError as error:
                raise _as_own(error, directory) from None
            except (BrokenOffError, LateError) as error:
                if system.time.monotonic() > deadline:
                    raise StoreUnavailableError(
                        f"{directory}: {error}; if no other instance runs, remove this directory", path=directory
                    ) from None
                self.tell(f"{error}; trying again")
            self.mailbox_agent.ask("leave", LEAVE_S)
            system.time.sleep(AGAIN_S)

    def _preside(self, coordinator: Coordinator, facts: dict[str, Any]) -> None:
        agents = [self._agent(coordinator, "one process"), self._agent(coordinator, "another process")]
        self._try(coordinator, facts, Pair(agents[0], agents[1], PROCESSES, self.effort))
        if coordinator.partner is not None:
            self.other = str(coordinator.members[coordinator.partner]["host"])
            remote = RemoteAgent(coordinator, coordinator.partner, f"host {self.other}")
            self._try(coordinator, facts, Pair(agents[0], remote, HOSTS, self.effort))

    def _try(self, coordinator: Coordinator, facts: dict[str, Any], pair: Pair) -> None:
        refused = facts["objections"][self.lock] is not None
        options = FORCED.get(facts["kind"], None if refused else {})

        def before(name: str) -> None:
            self.tell(f"between {pair.between}: {name}")
            coordinator.beat()

        try:
            for check in probes.run(pair, self.lock, options, before):
                self.checks.append(check)
                if check.outcome in {BAD, UNKNOWN}:
                    self.tell(f"between {pair.between}: {check.title}: {check.says}")
        except LostError as error:
            self.tell(str(error))
            self.checks.append(pair.check("presence", UNKNOWN, str(error)))

    def _unanswering(self, says: str) -> dict[str, Any]:
        """Return the report on a directory that does not answer. The verdict is "not safe", whatever worked before."""
        self.checks.append(Check("answer", PROCESSES, BAD, says))
        advice = "check whether the server of the mount runs and can be reached, with mount, ping and dmesg"
        report = self._report(verdict=NOT_SAFE, reasons=[f"{self.path}: {says}"], recommendations=[advice])
        return {**report, "presided": True}

    def _report(self, **judged: Any) -> dict[str, Any]:
        facts = self.facts
        members = {} if self.coordinator is None else self.coordinator.members
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
        return OSError(error.errno, f"{error}{ADVICE.get(error.errno, '')}", path)
    return StoreUnavailableError(f"{path}: {error}", path=path)
