"""The lines of the file that two hands write under a lock: each tells its number, its writer and whether it is whole.

The file is a small stand-in for a log: who appends must have seen the line before, so that two lines of one number are
proof that a lock was held by two, or that what was read under it was old.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Final, NamedTuple

__all__ = ["LINE_SIZE", "Line", "Tally", "decode", "encode", "tally"]

LINE_SIZE: Final = 64


class Line(NamedTuple):
    """A sound line: its `number` from 1 on, and its `writer`."""

    number: int
    writer: str


class Tally(NamedTuple):
    """What a whole file holds.

    Attributes:
        sound: how many sound lines there are.
        garbled: how many lines are not what anybody wrote.
        twice: how many numbers stand there more than once.
        turns: how often one writer's line follows another's.
        by: how many sound lines there are of each writer.
    """

    sound: int
    garbled: int
    twice: int
    turns: int
    by: dict[str, int]


def encode(number: int, writer: str) -> bytes:
    """Return the line `number` of `writer`, a word of at most 20 signs of ASCII."""
    text = f"{number:012d} {writer:<20}"
    return f"{text} {zlib.crc32(text.encode()):08x}".ljust(LINE_SIZE - 1).encode() + b"\n"


def decode(data: bytes) -> list[Line | None]:
    """Return the whole lines in `data`, None for each that is not sound; what is behind them does not count."""
    return [_decode(data[start : start + LINE_SIZE]) for start in range(0, len(data) - LINE_SIZE + 1, LINE_SIZE)]


def _decode(line: bytes) -> Line | None:
    try:
        number, writer, _ = line.decode("ascii").split()
        return Line(int(number), writer) if encode(int(number), writer) == line else None
    except ValueError:
        return None


def tally(data: bytes) -> Tally:
    """Return what the whole file `data` holds; an end that is no whole line counts as garbled."""
    lines = decode(data)
    sound = [line for line in lines if line is not None]
    writers = [line.writer for line in sound]
    turns = sum(one != other for one, other in itertools.pairwise(writers))
    return Tally(
        sound=len(sound),
        garbled=len(lines) - len(sound) + (len(data) % LINE_SIZE > 0),
        twice=len(sound) - len({line.number for line in sound}),
        turns=turns,
        by={writer: writers.count(writer) for writer in sorted(set(writers))},
    )
