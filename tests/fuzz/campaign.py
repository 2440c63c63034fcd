"""The fuzzer that learns: `python campaign.py TARGET [DIRECTORY] [-max_total_time=600 ...]`, by `tox -e fuzz`.

TARGET is `logs` (every user of a log, on logs built from the fuzzer's decisions), `bytes` (the same on raw bytes) or
`decoder`. What lies in DIRECTORY is tried first, and what leads further is kept there. A crash is written to a file;
`python campaign.py TARGET FILE` repeats it. The other words are those of libFuzzer.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent.parent))
with atheris.instrument_imports(include=["fscoord"]):
    from fuzz.exercise import exercise_log, run
    from support.internals import GenerationRef, Header, MalformedRecord, Session, record

HEADER = Header(bytes(16), 1).encode()


def fresh(use: Callable[[bytes, Path], object], data: bytes) -> None:
    directory = tempfile.mkdtemp(prefix="fscoord-fuzz-", dir="/dev/shm")
    try:
        use(data, Path(directory))
    finally:
        shutil.rmtree(directory)


def logs(data: bytes) -> None:
    fresh(run, data)


def raw(data: bytes) -> None:
    fresh(lambda found, directory: exercise_log({"log": HEADER + found}, directory), data)


def decoder(data: bytes) -> None:
    record.decode(data, 0)
    for decode in (
        lambda value: list(record.decode_pairs(value)),
        Session.decode,
        lambda value: GenerationRef.decode(record.SEAL, value),
        lambda value: GenerationRef.decode(record.FORWARD, value),
        Header.decode,
    ):
        try:
            decode(data)
        except MalformedRecord:
            continue


if __name__ == "__main__":
    target = {"logs": logs, "bytes": raw, "decoder": decoder}[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
