"""A server that stops answering, at each question in turn: every examination ends in time, with its report.

The file system is a model: sound, quick, and from its n-th question on silent for ever. The waits are added up instead
of waited for.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fscoord.doctor import examination, probes
from fscoord.doctor.agents import LocalAgent, MailboxAgent
from fscoord.doctor.examination import examine
from fscoord.doctor.probes import Pair
from fscoord.doctor.verdict import HOSTS, Check

IN_TIME_S = 60.0
PLACE = "/mnt"
HERE = {
    "path": PLACE,
    "kind": "nfs",
    "point": PLACE,
    "options": ["hard"],
    "is_local": False,
    "coherence": "direct",
    "reads_why": "it is current",
    "vanished_host": "its locks last for a lease",
    "objections": {"ofd": None, "flock": None, "soft": None},
    "caution": "",
    "device": 1,
    "group": None,
    "host": "here",
    "boot_id": "1",
    "network": "n1",
    "kernel": "6.1",
}
THERE = {**HERE, "host": "there", "boot_id": "2", "client": None}


class Server:
    """The model: what agents did and published, until the question with the number `silent_at` and from then on not.

    Attributes:
        asked: how many questions there were.
        waited: for how many seconds somebody waited in vain.
        messages: what is at the meeting place, by name.
    """

    def __init__(self, silent_at: int | None, *others: str, presides: bool = True) -> None:
        self.silent_at = silent_at
        self.asked = 0
        self.waited = 0.0
        self.is_coordinator = presides
        self.messages: dict[str, Any] = {f"here.{name}": THERE for name in others}
        self.others = others
        self._locks: dict[tuple[str, str], set[tuple[Any, bool]]] = {}
        self._lines: dict[str, list[int]] = {}
        self._seen: dict[tuple[Any, str], int] = {}

    def answers(self) -> bool:
        self.asked += 1
        return self.silent_at is None or self.asked < self.silent_at

    def facts(self, who: Any, path: str) -> dict[str, Any]:
        return HERE

    def enter(self, who: Any, directory: str, name: str, facts: dict[str, Any]) -> bool:
        self.publish(who, f"here.{name}", facts)
        if not self.is_coordinator:
            self.messages["roll"] = {"names": ["chief", name], "partner": name}
            question = {"act": "lock", "with": {"name": "f", "kind": "ofd"}, "limit": 15.0}
            self.messages |= {f"ask.{name}.{number:06}": question for number in range(3)}
        return self.is_coordinator

    def publish(self, who: Any, name: str, message: Any) -> None:
        self.messages[name] = message
        word, *rest = name.split(".")
        if word == "ask":  # the other host answers at once
            act = self.free if message["act"] == "kill" else getattr(self, message["act"])
            self.messages[f"told.{rest[0]}.{rest[1]}"] = {"result": act(rest[0], **message["with"])}
        if word == "over":
            self.messages |= {f"left.{other}": None for other in self.others}
        if word == "told" and rest[1] == "000002":
            self.messages["over"] = {"verdict": "safe", "checks": []}

    def fetch(self, who: Any, name: str) -> Any:
        return self.messages[name]

    def wait(self, who: Any, **_: Any) -> list[str]:
        return sorted(self.messages)

    def leave(self, who: Any) -> None:
        self.messages.clear()

    def lock(self, who: Any, name: str, kind: str, shared: bool = False) -> bool:
        holders = self._locks.setdefault((name, kind), set())
        if any(each != who and not (shared and theirs) for each, theirs in holders):
            return False
        holders.add((who, shared))
        return True

    def unlock(self, who: Any, name: str, kind: str, shared: bool = False) -> None:
        self._locks[name, kind].discard((who, shared))

    def block(self, who: Any, name: str, kind: str) -> float:
        self._locks[name, kind] = {(who, False)}  # whoever holds it is about to give it back
        return 0.001

    def free(self, who: Any) -> None:
        for holders in self._locks.values():
            holders.difference_update({(who, True), (who, False)})

    def time_lock(self, who: Any, **_: Any) -> float:
        return 0.001

    def race(self, who: Any, **_: Any) -> dict[str, Any]:
        return {"written": 5, "met": True, "garbled": 0}

    def tally(self, who: Any, **_: Any) -> dict[str, Any]:
        return {"sound": 10, "twice": 0, "garbled": 0, "turns": 5}

    def append(self, who: Any, name: str, number: int, **_: Any) -> None:
        self._lines.setdefault(name, []).append(number)

    def look(self, who: Any, name: str, **_: Any) -> list[int]:
        lines = self._lines.get(name, [])
        since, self._seen[who, name] = self._seen.get((who, name), 0), len(lines)
        return lines[since:]

    def answer(self, who: Any, **_: Any) -> dict[str, Any]:
        return {"waits": [0.002], "garbled": 0, "done": True, "possible": True}

    def claim(self, who: Any, stem: str, how: str, count: int, **_: Any) -> dict[str, Any]:
        return {"won": list(range(count)) if self.lock(who, stem, how) else [], "tried": count}

    def watch(self, who: Any, **_: Any) -> bool:
        return True

    watched = watch

    def count(self, who: Any, name: str, **_: Any) -> dict[str, Any]:
        first = self.lock(who, name, "count")
        return {"sums": [1, 3] if first else [2, 4], "operations": 100.0, "error": ""}

    def speed(self, who: Any, **_: Any) -> dict[str, float]:
        return {"set": 0.001}


class Process:
    """The process of an agent: one question silent, and nothing ends it any more."""

    stdin = stdout = stderr = None

    def __init__(self, server: Server) -> None:
        self.server = server
        self.is_stuck = False

    def kill(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        if self.is_stuck:
            self.server.waited += seconds
            raise subprocess.TimeoutExpired("agent", seconds)


class Modelled(LocalAgent):
    """The real agent, but for its process."""

    server: Server

    def _start(self) -> None:
        self._process = Process(self.server)
        self._has_started = False

    def _send(self, act: str, arguments: dict[str, Any]) -> None:
        self._number += 1
        self._act = act
        self._process.is_stuck = not self.server.answers()
        if not self._process.is_stuck:
            result = getattr(self.server, act)(self.label, **arguments)
            self._answer = json.dumps({"n": self._number, "result": result}).encode()

    def _line(self) -> bytes:
        if not self._has_started:
            return b'{"n": 0, "result": null}'
        if self._process.is_stuck:
            self.server.waited += self._limit
            raise self._late()
        return self._answer

    def kill(self) -> None:
        self.server.free(self.label)
        super().kill()


class ModelledMailboxAgent(Modelled, MailboxAgent):
    """The real scribe, but for its process."""

    def dismiss(self, seconds: float) -> bool:
        if self._process is not None and not self._process.is_stuck:
            self._process.is_stuck = not self.server.answers()
        return super().dismiss(seconds)


def between_hosts(pair: Pair, *given: Any) -> Iterator[Check]:
    return probes.run(pair, *given) if pair.between == HOSTS else iter(())


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], tuple[dict[str, Any], list[str]]]:
    """Give `examined(server)`: the report of an examination there, and what was told meanwhile."""

    def run(server: Server) -> tuple[dict[str, Any], list[str]]:
        monkeypatch.setattr(Modelled, "server", server, raising=False)
        monkeypatch.setattr(probes, "ROUNDS", 2)
        clock = SimpleNamespace(sleep=lambda _: None, monotonic=lambda: 0.0)
        monkeypatch.setattr(probes, "system", SimpleNamespace(time=clock))
        if server.others:  # what is tried between processes is tried without others too
            monkeypatch.setattr(examination, "probes", SimpleNamespace(run=between_hosts, KINDS=probes.KINDS))
        monkeypatch.setattr(examination, "LocalAgent", Modelled)
        monkeypatch.setattr(examination, "MailboxAgent", ModelledMailboxAgent)
        told: list[str] = []
        expected = sum(name.startswith("here.") for name in server.messages) + 1
        return examine(PLACE, expected=expected, effort=0.0, tell=told.append), told

    return run


def passes(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    checks = report["checks"]
    return [(each["between"], each["name"], each["lock"]) for each in checks if each["outcome"] == "ok"]


@pytest.mark.parametrize(
    ("others", "presides"),
    [((), True), (("there",), True), ((), False)],
    ids=["alone", "two hosts", "lending an agent"],
)
def test_server_that_stops_answering_at_any_question_still_yields_the_report(examined, others, presides):
    sound = Server(None, *others, presides=presides)
    whole, _ = examined(sound)
    assert {check["outcome"] for check in whole["checks"]} <= {"ok", "info"}
    assert bool(passes(whole)) == presides
    found = 0
    for silent_at in range(1, sound.asked):
        server = Server(silent_at, *others, presides=presides)
        report, told = examined(server)
        assert (report["verdict"], report["presided"]) == ("not safe", True), silent_at
        assert "did not answer" in report["reasons"][0], silent_at
        assert report["file_system"] is None if silent_at == 1 else report["file_system"]["kind"] == "nfs"
        assert report["checks"][-1]["name"] == "answer", silent_at
        passed = passes(report)
        assert passed == passes(whole)[: len(passed)], silent_at
        assert found <= len(passed), silent_at
        found = len(passed)
        assert 0 < server.waited <= IN_TIME_S, (silent_at, server.waited)
        assert "stay there until it does" in told[-1], silent_at
    at_the_end = Server(sound.asked, *others, presides=presides)
    report, told = examined(at_the_end)
    assert report["verdict"] == whole["verdict"]
    assert "stay there until it does" in told[-1]
    assert 0 < at_the_end.waited <= IN_TIME_S
