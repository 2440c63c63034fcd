"""The helper process of an examination: does one act after another, as it is asked to on standard input.

Whatever may hang in the kernel happens here, where it harms nobody but this process. A question is a line of JSON,
``{"n": 7, "act": "lock", "with": {...}}``, and so is its answer, ``{"n": 7, "result": ...}`` or ``{"n": 7, "error":
{...}}``: the number lets who asks again after an interruption tell the answers apart. An answer with the number 0, to
nothing, says that the process has started. When standard input ends, all files are closed and the meeting place is
left; so nothing stays behind, however the asking process ended.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from fscoord._log.io import safe_files
from fscoord.doctor.mailbox import Place
from fscoord.doctor.operations import Acts

__all__ = ["Hand", "main"]


class Hand(Acts):
    """All acts that can be asked for: those on files, those of two at once, and those at the meeting place."""

    place: Place

    def enter(self, directory: str, name: str, facts: dict[str, Any]) -> bool:
        """See `Place.enter`."""
        self.place = Place(directory, name)
        return self.place.enter(facts)

    def publish(self, name: str, message: Any) -> None:
        """See `Place.publish`."""
        self.place.publish(name, message)

    def fetch(self, name: str) -> Any:
        """See `Place.fetch`."""
        return self.place.fetch(name)

    def wait(self, prefixes: list[str], known: list[str], seconds: float, idle: bool) -> list[str]:
        """See `Place.wait`."""
        return self.place.wait(prefixes, known, seconds, idle)

    def put_aside(self) -> None:
        """See `Place.put_aside`."""
        self.place.put_aside()

    def leave(self) -> None:
        """Close all files and leave the meeting place."""
        self.close()
        if "place" in vars(self):
            self.place.leave()


def main(questions: Iterable[bytes], answers: int) -> None:
    """Do what `questions` ask for until they end; write the answers to the descriptor `answers`."""
    hand = Hand()

    def tell(answer: dict[str, Any]) -> None:
        safe_files.write_all(answers, json.dumps(answer).encode("ascii") + b"\n")

    try:
        tell({"n": 0, "result": None})
        for line in questions:
            tell(_answer(hand, json.loads(line)))
    except (BrokenPipeError, KeyboardInterrupt):  # who asked has ended
        pass
    finally:
        hand.leave()


def _answer(hand: Hand, question: dict[str, Any]) -> dict[str, Any]:
    try:
        result = getattr(hand, question["act"])(**question["with"])
    except (OSError, RuntimeError, ValueError) as error:
        number = getattr(error, "errno", None)
        words = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return {"n": question["n"], "error": {"type": type(error).__name__, "errno": number, "message": words}}
    return {"n": question["n"], "result": result}


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.fileno())
