"""The program of an agent process of an examination: performs the operations that arrive on standard input.

Every call that may hang in the kernel is made here, so that it blocks this process alone. A question is a line of JSON,
``{"n": 7, "act": "lock", "with": {...}}``, and so is its answer, ``{"n": 7, "result": ...}`` or ``{"n": 7, "error":
{...}}``. The number relates an answer to its question, since a caller that was interrupted may have asked another one.
The first line has the number 0 and means that the process has started. When standard input ends, the agent closes all
files and leaves the mailbox. So no file remains, however the asking process ended.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from fscoord._log.io import safe_files
from fscoord.doctor.mailbox import Mailbox
from fscoord.doctor.operations import ProbeOperations

__all__ = ["Agent", "main"]


class Agent(ProbeOperations):
    """All operations that a question can name: those on files and those on the mailbox."""

    mailbox: Mailbox

    def enter(self, directory: str, name: str, facts: dict[str, Any]) -> bool:
        """See `Mailbox.enter`."""
        self.mailbox = Mailbox(directory, name)
        return self.mailbox.enter(facts)

    def publish(self, name: str, message: Any) -> None:
        """See `Mailbox.publish`."""
        self.mailbox.publish(name, message)

    def fetch(self, name: str) -> Any:
        """See `Mailbox.fetch`."""
        return self.mailbox.fetch(name)

    def wait(self, prefixes: list[str], known: list[str], seconds: float, idle: bool) -> list[str]:
        """See `Mailbox.wait`."""
        return self.mailbox.wait(prefixes, known, seconds, idle)

    def put_aside(self) -> None:
        """See `Mailbox.put_aside`."""
        self.mailbox.put_aside()

    def leave(self) -> None:
        """Close all files and leave the mailbox."""
        self.close()
        if "mailbox" in vars(self):
            self.mailbox.leave()


def main(questions: Iterable[bytes], answers: int) -> None:
    """Perform the operations in `questions` until they end; write the answers to the descriptor `answers`."""
    agent = Agent()

    def tell(answer: dict[str, Any]) -> None:
        safe_files.write_all(answers, json.dumps(answer).encode("ascii") + b"\n")

    try:
        tell({"n": 0, "result": None})
        for line in questions:
            tell(_answer(agent, json.loads(line)))
    except (BrokenPipeError, KeyboardInterrupt):  # the asking process has ended
        pass
    finally:
        agent.leave()


def _answer(agent: Agent, question: dict[str, Any]) -> dict[str, Any]:
    try:
        result = getattr(agent, question["act"])(**question["with"])
    except (OSError, RuntimeError, ValueError) as error:
        number = getattr(error, "errno", None)
        words = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return {"n": question["n"], "error": {"type": type(error).__name__, "errno": number, "message": words}}
    return {"n": question["n"], "result": result}


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.fileno())
