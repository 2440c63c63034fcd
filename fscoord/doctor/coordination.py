"""`Coordinator` finds the other instances of `fscoord doctor`.

The first instance in the mailbox becomes the coordinator: it examines and makes the report. The coordinator chooses one
instance on another host as its partner. The partner's agent performs operations for the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fscoord._runtime import system
from fscoord.doctor.agents import AgentProtocol, FailedError, LocalAgent, LostError, StuckError
from fscoord.doctor.mailbox import GONE
from fscoord.errors import FscoordError

ACT_S: Final = 20.0
GRACE_S: Final = 20.0
"""How many seconds a request to another host may take in addition to the operation itself."""
STALE_S: Final = 90.0
"""A coordinator that has sent no heartbeat for this many seconds counts as dead. A coordinator sends a heartbeat every
second while it waits, and a heartbeat between two operations. No operation takes 90 s."""
SLICE_S: Final = 10.0
"""The longest wait in one request to the mailbox agent, in seconds. A hanging mailbox is noticed after such a wait."""
LATE_JOIN_S: Final = 2.0
SHUTDOWN_S: Final = 5.0
BROKEN_OFF: Final = "the examination was broken off by the instance that coordinated"
ACTS: Final = frozenset(
    "lock unlock block time_lock tally append look watch watched claim race answer count speed".split()
)
"""The operations that an instance performs for another instance."""


class BrokenOffError(LostError):
    """The mailbox was removed, or its coordinator sent no heartbeat."""


class LateError(FscoordError):
    """The other instances have begun without this instance."""


class Coordinator:
    """Lets this instance take part in an examination by several instances, which share the mailbox `directory`.

    Attributes:
        is_coordinator: whether this instance is the coordinator.
        members: the facts about each instance by its name; empty unless this instance is the coordinator.
        partner: the name of the instance on another host whose agent the coordinator uses; None if there is none.
    """

    def __init__(self, mailbox_agent: LocalAgent, directory: str, facts: dict[str, Any]) -> None:
        self.directory = directory
        self.name = f"{system.random_bytes(4).hex()}"
        self.is_coordinator = False
        self.members: dict[str, dict[str, Any]] = {}
        self.partner: str | None = None
        self._mailbox_agent = mailbox_agent
        self._facts = facts

    def gather(self, expected: int | None, seconds: float, tell: Callable[[str], None]) -> None:
        """Enter the mailbox, and wait for the other instances.

        Args:
            expected: the number of instances, or None if it is unknown.
            seconds: how long to wait for the other instances. If their number is unknown, the wait ends 2 s after the
                last instance has entered.
            tell: called with a text about the progress.

        Raises:
            LateError: the other instances have begun without this instance.
            BrokenOffError: the mailbox was removed, or its coordinator sent no heartbeat.
        """
        self.is_coordinator = self._mailbox_agent.ask(
            "enter", ACT_S, directory=self.directory, name=self.name, facts=self._facts
        )
        if self.is_coordinator:
            self._publish_members(self._await_members(expected, seconds, tell))
        else:
            tell("waiting for the instance that coordinates")
            self._await_start()

    def _await_members(self, expected: int | None, seconds: float, tell: Callable[[str], None]) -> list[str]:
        deadline = system.time.monotonic() + seconds
        there: list[str] = []
        while True:
            names = self._wait(["here."], [f"here.{name}" for name in there], deadline - system.time.monotonic())
            came = sorted(name[5:] for name in names if name.startswith("here."))
            if came != there:
                there = came
                if seconds and len(there) != expected:
                    many = "others that may come" if expected is None else f"{expected} instances"
                    tell(f"{len(there)} here, waiting for {many} (up to {seconds:g} s)")
                if expected is None and len(there) > 1:
                    deadline = min(deadline, system.time.monotonic() + LATE_JOIN_S)
            if len(there) == expected or system.time.monotonic() >= deadline:
                return there

    def _publish_members(self, names: list[str]) -> None:
        for name in names:
            try:
                self.members[name] = self._mailbox_agent.ask("fetch", ACT_S, name=f"here.{name}")
            except FailedError as error:
                if name == self.name or error.errno not in GONE:
                    raise  # otherwise the instance has left again
        elsewhere = (name for name, facts in sorted(self.members.items()) if is_elsewhere(self._facts, facts))
        self.partner = next(elsewhere, None)
        self._mailbox_agent.ask(
            "publish", ACT_S, name="roll", message={"names": list(self.members), "partner": self.partner}
        )

    def _await_start(self) -> None:
        known: list[str] = []
        while "roll" not in known:
            names = self._wait(["roll", "beat."], known, STALE_S, idle=True)
            if not set(names).difference(known):
                self._mailbox_agent.ask("put_aside", ACT_S)  # the coordinator died without leaving
                raise BrokenOffError("an instance that died has not removed the examination's directory")
            known = names
        roll = self._ask("fetch", name="roll")
        self.partner = roll["partner"]
        if self.name not in roll["names"]:
            raise LateError("an examination without this instance is under way")

    def serve(self, agent: LocalAgent) -> dict[str, Any]:
        """Perform the coordinator's requests with `agent` until the examination ends. Return the report.

        Raises:
            BrokenOffError: the mailbox was removed, or the coordinator sent no heartbeat.
        """
        known: list[str] = []
        idle = self.partner != self.name
        while True:
            names = self._wait([f"ask.{self.name}.", "over", "beat."], known, STALE_S, idle=idle)
            fresh = sorted(set(names).difference(known))
            if not fresh:
                raise BrokenOffError("the instance that coordinated sends no heartbeat any more")
            known = names
            for name in fresh:
                if name == "over":
                    return dict(self._ask("fetch", name=name))
                if name.startswith(f"ask.{self.name}."):
                    answer = _perform(agent, self._ask("fetch", name=name))
                    self._ask("publish", name=name.replace("ask.", "told."), message=answer)

    def _ask(self, act: str, **arguments: Any) -> Any:
        """Call the operation `act` of the mailbox. Raise `BrokenOffError` if the coordinator removed the mailbox."""
        try:
            return self._mailbox_agent.ask(act, ACT_S, **arguments)
        except FailedError as error:
            if error.errno in GONE:
                raise BrokenOffError(BROKEN_OFF) from None
            raise

    def end(self, report: dict[str, Any]) -> None:
        """Publish the report. Wait up to `SHUTDOWN_S` seconds until the other instances have left the mailbox."""
        self._mailbox_agent.ask("publish", ACT_S, name="over", message=report)
        others = {f"left.{name}" for name in self.members if name != self.name}
        deadline = system.time.monotonic() + SHUTDOWN_S
        names: list[str] = []
        while others.difference(names) and system.time.monotonic() < deadline:
            names = self._wait(["left."], names, deadline - system.time.monotonic())

    def beat(self) -> None:
        """Send a heartbeat to the other instances."""
        self._wait([], [], 0.0)

    def _wait(self, prefixes: list[str], known: list[str], seconds: float, *, idle: bool = False) -> list[str]:
        deadline = system.time.monotonic() + seconds
        while True:
            left = deadline - system.time.monotonic()
            slice_s = min(max(0.0, left), SLICE_S)
            question = {"prefixes": prefixes, "known": known, "seconds": slice_s, "idle": idle}
            names: list[str] = self._mailbox_agent.ask("wait", slice_s + ACT_S, **question)
            if not names:
                raise BrokenOffError(BROKEN_OFF)
            fresh = set(names).difference(known)
            if left <= SLICE_S or any(name.startswith(tuple(prefixes)) for name in fresh):
                return names

    def exchange(self, name: str, number: int, question: dict[str, Any]) -> None:
        """Send request `number` to the instance `name`."""
        self._mailbox_agent.ask("publish", ACT_S, name=f"ask.{name}.{number:06}", message=question)

    def reply(self, name: str, number: int, seconds: float) -> dict[str, Any] | None:
        """Wait for the response of the instance `name` to request `number`, and return it.

        Returns None if the instance left, or if no response came within `seconds`.
        """
        told = f"told.{name}.{number:06}"
        deadline = system.time.monotonic() + seconds
        names: list[str] = []
        while told not in names:
            left = deadline - system.time.monotonic()
            if left <= 0 or f"left.{name}" in names:
                return None
            names = self._wait([told, f"left.{name}"], [], left)
        return dict(self._mailbox_agent.ask("fetch", ACT_S, name=told))


class RemoteAgent(AgentProtocol):
    """Performs operations by the agent of the instance `name`, through the mailbox."""

    def __init__(self, coordinator: Coordinator, name: str, label: str) -> None:
        self.label = label
        self._coordinator = coordinator
        self._name = name
        self._number = 0
        self._limit = 0.0
        self._is_lost = False

    def begin(self, act: str, limit: float, **arguments: Any) -> None:
        if self._is_lost:
            raise LostError(f"{self.label} does not answer any more")
        self._number += 1
        self._limit = limit + GRACE_S
        self._coordinator.exchange(self._name, self._number, {"act": act, "with": arguments, "limit": limit})

    def finish(self) -> Any:
        answer = self._coordinator.reply(self._name, self._number, self._limit)
        if answer is None:
            self._is_lost = True
            raise LostError(f"{self.label} does not answer any more")
        if "result" in answer:
            return answer["result"]
        if "stuck" in answer:
            raise StuckError(answer["stuck"])
        if "lost" in answer:
            raise LostError(answer["lost"])
        error = answer["error"]
        raise FailedError(error["message"], errno=error["errno"], kind=error["type"])

    def kill(self) -> None:
        self.ask("kill", ACT_S)


def is_elsewhere(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the instances with the facts `one` and `other` run on different hosts.

    Containers of one host count as one host, because they share the mounts and caches of the host. But two instances on
    one host count as two hosts if they differ in network namespace and mount: tests simulate two hosts in this way.
    """
    if one["client"] is not None:
        return bool(one["client"] != other["client"])
    if one["boot_id"] != other["boot_id"]:
        return True
    return bool(one["network"] != other["network"] and one["device"] != other["device"])


def _perform(agent: LocalAgent, question: dict[str, Any]) -> dict[str, Any]:
    act = question["act"]
    if act == "kill":
        agent.kill()
        return {"result": None}
    if act not in ACTS:
        return {"error": {"type": "ValueError", "errno": None, "message": f"{act} is not one of the operations"}}
    try:
        return {"result": agent.ask(act, question["limit"], **question["with"])}
    except FailedError as error:
        return {"error": {"type": error.kind, "errno": error.errno, "message": str(error)}}
    except StuckError as error:
        return {"stuck": str(error)}
    except LostError as error:
        return {"lost": str(error)}
