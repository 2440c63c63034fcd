"""Where the output of workers goes: to the console, each line with its rank before it, to files, or to both."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO

from fscoord._runtime import system

__all__ = ["Console", "Streams", "parse_streams"]

STDOUT, STDERR = 1, 2
TAIL = 20
LINE_MAX = 65536


def parse_streams(text: str) -> Mapping[int | None, int]:
    """Return which streams of which local ranks are meant, in the words of torchrun.

    ``0`` is none, ``1`` standard output, ``2`` standard error, ``3`` both, for all; ``0:3,1:1`` says it for each
    local rank, and means none for others. The key None stands for all others.

    Raises:
        ValueError: `text` is something else.
    """
    streams: dict[int | None, int] = {None: 0}
    for item in text.split(","):
        rank, colon, mode = item.strip().rpartition(":")
        if mode not in {"0", "1", "2", "3"} or (colon and not rank.isascii()) or bool(colon) != rank.isdigit():
            raise ValueError(f"{text!r}: streams are 0, 1, 2 or 3 for all, or 0:3,1:1 for each local rank")
        key = int(rank) if colon else None
        if key in streams and key is not None:
            raise ValueError(f"{text!r} names the local rank {rank} twice")
        streams[key] = int(mode)
    return streams


@dataclass(frozen=True)
class Streams:
    """What becomes of the workers' streams.

    Attributes:
        redirects: which go to files only.
        tee: which go to files as well as to the console.
    """

    redirects: Mapping[int | None, int] = field(default_factory=dict)
    tee: Mapping[int | None, int] = field(default_factory=dict)

    def is_file(self, local_rank: int, stream: int) -> bool:
        """Return whether the stream, 1 or 2, of that worker goes to a file."""
        return bool((_mode(self.redirects, local_rank) | _mode(self.tee, local_rank)) & stream)

    def is_shown(self, local_rank: int, stream: int) -> bool:
        """Return whether it goes to the console."""
        return not _mode(self.redirects, local_rank) & stream or bool(_mode(self.tee, local_rank) & stream)


def _mode(streams: Mapping[int | None, int], local_rank: int) -> int:
    return streams.get(local_rank, streams.get(None, 0))


class Console:
    """This process's own output, which the lines of many workers share without breaking each other."""

    def __init__(self, out: IO[bytes] | None = None, err: IO[bytes] | None = None) -> None:
        self._sinks = {STDOUT: out or _binary(sys.stdout), STDERR: err or _binary(sys.stderr)}
        self._mutex = system.threading.Lock()

    def write(self, stream: int, line: bytes) -> None:
        """Write one whole line; an output that nobody reads any more is given up."""
        with self._mutex:
            sink = self._sinks[stream]
            if sink is None:
                return
            try:
                sink.write(line)
                sink.flush()
            except (OSError, ValueError):
                self._sinks[stream] = None

    def follow(self, pipe: IO[bytes], stream: int, prefix: bytes, path: str | None, tail: list[bytes]) -> None:
        """Copy `pipe` to its end, line by line, and to the file `path`; leave the last lines in `tail`."""
        file = None if path is None else _create(path)
        try:
            for line in iter(lambda: pipe.readline(LINE_MAX), b""):
                whole = line if line.endswith(b"\n") else line + b"\n"
                if prefix:
                    self.write(stream, prefix + whole)
                if file is not None:
                    file.write(line)
                    file.flush()
                tail.append(whole)
                del tail[:-TAIL]
        finally:
            pipe.close()
            if file is not None:
                file.close()


def _binary(text: IO[str] | None) -> IO[bytes] | None:
    return getattr(text, "buffer", None)


def _create(path: str) -> IO[bytes]:
    flags = system.os.O_WRONLY | system.os.O_CREAT | system.os.O_TRUNC | system.O_CLOEXEC
    return system.os.fdopen(system.os.open(path, flags, 0o644), "wb")
