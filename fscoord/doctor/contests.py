"""What two hands do to one file at once: write as fast as they can, answer each other, count on one store."""

from __future__ import annotations

import random
from typing import Any, Final

from fscoord._log.io import safe_files
from fscoord._runtime import system
from fscoord.doctor import lines
from fscoord.doctor.acts import Acts, Opened
from fscoord.stores.file import FileStore

__all__ = ["LINES_MAX", "Contests"]

LINES_MAX: Final = 500
SUMS_MAX: Final = 2000
TURNS: Final = 4
"""How often at least a hand must have seen that the other wrote in between: else the two were not at work at once."""
MEET_S: Final = 5.0
NAP_S: Final = 0.0005


class Contests(Acts):
    """The acts of a hand, with those that take two."""

    def race(self, name: str, kind: str, writer: str, seconds: float) -> dict[str, Any]:
        """Append lines under the lock for so many seconds, each numbered by the last one that is there.

        That is how a store appends. It begins when another writer's line is there, or after 5 s, and goes on until the
        two took turns a few times, for up to 5 s more.

        Returns:
            ``written``, how many lines; ``met``, whether there was another; ``garbled``, how many lines, looked at
            under the lock, were not sound.
        """
        file = self.file(name)
        last, garbled, written = 0, 0, 0
        others: set[str] = set()
        turns = 0
        met = system.time.monotonic() + MEET_S
        while True:
            now = system.time.monotonic()
            if others:
                met = min(met, now)
            enough = now > met + seconds or written >= LINES_MAX
            if enough and (turns >= TURNS or now > met + seconds + MEET_S):
                break
            file.await_lock(kind)
            try:
                foreign = False
                for line in _new_lines(file, kind):
                    if line is None:
                        garbled += 1
                        continue
                    last = line.number
                    others |= {line.writer} - {writer}
                    foreign = foreign or line.writer != writer
                turns += foreign
                if not written % 3:
                    system.time.sleep(2 * NAP_S)  # whoever has the lock too, or sees nothing of this, shows by it
                if not written or others or now > met:  # one line says that this hand is there
                    file.append(kind, lines.encode(last + 1, writer))
                    written += 1
            finally:
                file.lock(kind).unlock()
            system.time.sleep(random.uniform(0, 4) * NAP_S)  # let the other in
        return {"written": written, "met": bool(others), "garbled": garbled}

    def answer(self, name: str, kind: str, how: str, turn: int, rounds: int, seconds: float) -> dict[str, Any]:
        """Take turns with another hand: append a line as soon as its line is seen.

        Args:
            name: the file.
            kind: of the lock under which lines are appended.
            how: the way to look, see `Opened.read`.
            turn: 0 begins, 1 answers.
            rounds: how many lines each appends.
            seconds: after how many to give up.

        Returns:
            ``waits``, the seconds from each line of this hand to the other's answer; ``garbled``, how many looks
            showed bytes that nobody wrote; ``done``, whether all rounds came to an end; ``possible``, whether there is
            this way to look.
        """
        seen, garbled = 0, 0
        waits: list[float] = []
        start = system.time.monotonic()
        sent = 0.0
        while True:
            if seen % 2 == turn and seen < 2 * rounds:
                self.append(name, kind, seen + 1, f"turn{turn}")
                sent = system.time.monotonic()
                seen += 1
            for number in self.look(name, kind, how):
                if number < 0:
                    return {"waits": [], "garbled": 0, "done": False, "possible": False}
                garbled += number == 0
                if number > seen:
                    seen = number
                    waits += [system.time.monotonic() - sent] if sent else []
            if seen >= 2 * rounds or system.time.monotonic() - start > seconds:
                return {"waits": waits, "garbled": garbled, "done": seen >= 2 * rounds, "possible": True}
            if seen % 2 != turn:
                system.time.sleep(NAP_S)

    def scatter(self, name: str, writer: str, count: int) -> int:
        """Append lines without a lock; return how many."""
        file = self.file(name)
        for number in range(count):
            safe_files.write_all(file.writer, lines.encode(number + 1, writer))
            system.time.sleep(NAP_S)
        return count

    def scattered(self, name: str) -> int:
        """Return how many sound lines the file holds."""
        return lines.tally(self.file(name).read_all()).sound

    def count(self, name: str, options: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Add 1 to one number of a real store for so many seconds; return what it answered, and what it costs.

        Returns:
            ``sums``, every answer; ``operations``, how many adds a second; ``error``, in words, why it ended early.
        """
        sums: list[int] = []
        took = 0.0
        try:
            with FileStore(self.path(name), timeout=MEET_S + seconds, mode=self.mode, **options) as store:
                store.add("ready", 1)
                deadline = system.time.monotonic() + MEET_S
                while store.add("ready", 0) < 2 and system.time.monotonic() < deadline:
                    system.time.sleep(10 * NAP_S)
                began = system.time.monotonic()
                turns = 0
                while (took < seconds and len(sums) < SUMS_MAX) or (turns < TURNS and took < seconds + MEET_S):
                    sums.append(store.add("sum", 1))
                    turns += len(sums) > 1 and sums[-1] > sums[-2] + 1
                    if len(sums) >= SUMS_MAX:
                        system.time.sleep(NAP_S)  # let the other in
                    took = system.time.monotonic() - began
        except (OSError, RuntimeError) as error:
            return {"sums": sums, "operations": 0.0, "error": f"{type(error).__name__}: {error}"}
        return {"sums": sums, "operations": len(sums) / took, "error": ""}

    def speed(self, name: str, options: dict[str, Any], seconds: float) -> dict[str, float]:
        """Return how many seconds a set, a get and an add of a real store take, alone: the medians."""
        with FileStore(self.path(name), timeout=MEET_S + seconds, mode=self.mode, **options) as store:
            return {
                "set": _median(lambda: store.set("k", b"v" * 32), seconds / 3),
                "get": _median(lambda: store.get("k"), seconds / 3),
                "add": _median(lambda: store.add("n", 1), seconds / 3),
            }


def _new_lines(file: Opened, kind: str) -> list[lines.Line | None]:
    way = file.way(kind)
    found = more = file.read(way, kind)
    while more and None not in more:
        more = file.read(way, kind)
        found = found + more
    return found


def _median(call: Any, seconds: float) -> float:
    took: list[float] = []
    deadline = system.time.monotonic() + seconds
    while not took or (system.time.monotonic() < deadline and len(took) < LINES_MAX):
        start = system.time.perf_counter()
        call()
        took.append(system.time.perf_counter() - start)
    return sorted(took)[len(took) // 2]
