"""Write the golden logs: `python tests/data/make_logs.py DIRECTORY`.

They were made once, and are never made anew: whatever they hold must stay readable. A test runs this again, elsewhere,
to see that the same operations still give the same bytes.

Their headers name no inode numbers, as on a file system where these do not last: a checkout gives the files others.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fscoord import FileStore, StoreTimeoutError
from fscoord.stores.file.lifecycle import session_record

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.internals import LogOptions, Session, log_of, parse_generation_name, system

START_NS = 1_767_225_600_000_000_000  # the first second of 2026


class World:
    """The clock and the random numbers, the same wherever this runs. The clock stands still unless it is told to go on:
    then each record of a session is a nanosecond later than the one before.
    """

    monotonic, sleep = staticmethod(time.monotonic), staticmethod(time.sleep)
    now = START_NS
    random = b""

    def time_ns(self) -> int:
        return self.now

    def random_bytes(self, count: int) -> bytes:
        return (self.random * count)[:count]


@contextmanager
def same_everywhere() -> Iterator[World]:
    world, encode = World(), Session.encode

    def encode_another(session: Session) -> bytes:
        known = session._replace(host="node1", pid=4242, start_time=123456, pid_space=4026531836, time_space=4026531834)
        return encode(known._replace(boot_id=bytes(range(16)), alive_id=bytes(16)))

    with (
        patch.object(system, "time", world),
        patch.object(system, "random_bytes", world.random_bytes),
        patch.object(Session, "encode", encode_another),
        patch.object(LogOptions, "inode", lambda wanted, fd: 0),
    ):
        yield world


def make_logs(directory: Path) -> None:
    """Write every golden log into `directory`."""
    with same_everywhere() as world:
        for number, (name, make) in enumerate(LOGS.items(), start=1):
            world.random = bytes([number])
            make(directory / f"{name}.log", world)
    for side_car in [*directory.glob("*.bell"), *directory.glob("*.alive"), *directory.glob("*.waits")]:
        side_car.unlink()


def make_every_kind(path: Path, world: World) -> None:
    """Every kind of record that this version writes but the void."""
    store = FileStore(path, 3, timeout=0.01, rank=0, label="first")
    other = FileStore(path, 3, timeout=0.01, rank=1)
    try:
        store.get("never")
    except StoreTimeoutError:
        world.now += 10**9
    for operation in (
        lambda: store.set("text", "h\u00e9llo"),
        lambda: store.set(b"\xff\0\n", bytes(range(256))),
        lambda: store.set("", ""),
        lambda: other.add("counter", 41),
        lambda: store.add("counter", -42),
        lambda: store.compare_set("lock", "", "mine"),
        lambda: other.compare_set("lock", "mine", "yours"),
        lambda: store.append("list", "one "),
        lambda: other.append("list", "two "),
        lambda: store.multi_set(["a", "b", "text"], [b"", b"\0" * 7, "bye"]),
        lambda: store.set("gone", "soon"),
        lambda: store.queue_push("gone", "too"),
        lambda: other.delete_key("gone"),
        lambda: store.queue_push("queue", "first"),
        lambda: store.queue_push("queue", "second"),
        lambda: store.queue_push("queue", b"\0"),
        lambda: other.queue_pop("queue"),
        lambda: store.queue_push("emptied", "x"),
        lambda: store.queue_pop("emptied"),
    ):
        operation()
        world.now += 1_000_000_001
    other.close()
    try:
        raise KeyError
    except KeyError:
        store.close()


def write(path: Path, key: str, value: str | bytes, torn: int = 0, durable: bool = False) -> int:
    """Write a value; with `torn`, as a process that dies after so many bytes of the record. Return where it begins."""
    with FileStore(path, durable=durable) as store:
        store.add("writers", 1)
        start = path.stat().st_size
        store.set(key, value)
    if torn:
        os.truncate(path, start + torn)
    return start


def make_torn(path: Path, world: World) -> None:
    """A writer has died in the middle of a record, and no process has written since."""
    write(path, "kept", "value")
    write(path, "lost", "x" * 100, torn=77)


def make_voided(path: Path, world: World) -> None:
    """Torn and voided: in the prefix, further on, and twice at one place, so that the first void is torn itself."""
    write(path, "one", "1")
    write(path, "lost", "x", torn=5)
    write(path, "two", "2")
    write(path, "lost", "x" * 700, torn=300)
    torn = path.stat().st_size
    write(path, "lost", "too")
    os.truncate(path, path.read_bytes().index(b"\x25\0\0\0", torn) + 20)
    write(path, "three", "3")


def make_durable(path: Path, world: World) -> None:
    """A durable log whose power failed twice: a record has lost a sector of its value, another that of its prefix."""
    write(path, "one", "1", durable=True)
    for key, lost in (("two", 1), ("three", 0)):
        start = write(path, "lost", b"x" * 2000)
        sector = (start // 512 + lost) * 512
        with path.open("r+b") as file:
            file.seek(max(start, sector))
            file.write(bytes(sector + 512 - max(start, sector)))
        write(path, key, key)


LOGS = {"every-kind": make_every_kind, "torn": make_torn, "voided": make_voided, "durable": make_durable}


def make_generations(directory: Path) -> None:
    """A log that was compacted, after which another run began: generation 0, the newest, and none between."""
    path = directory / "generations.log"
    with same_everywhere() as world:

        @contextmanager
        def opened(number: int, **arguments: Any) -> Iterator[FileStore]:
            world.random = bytes([number])
            with FileStore(path, **arguments) as store:
                log_of(store).registration._introduce = partial(session_record, {"rank": number, "label": "run"})
                world.random = bytes([number + 16])  # of the generation that it makes
                yield store
            world.now += 10**9

        with opened(1, run_id=("job", 3)) as store:
            store.set("old", "1")
            store.compact()
            store.set("old", "2")
        with opened(2, run_id=("job", 4)) as store:
            world.random = bytes([33])
            store.multi_set(["a", "b"], ["1", "2"])
            store.queue_push("queue", "first")
            store.delete_key("b")
            store.compact()
            store.set("behind", "the snapshot")
    for file in sorted(directory.iterdir()):
        if parse_generation_name(os.fsencode(file.name)) in (
            1,
            2,
        ):  # without inode numbers the log does not remove them
            file.unlink()
    for side_car in [*directory.glob("*.bell"), *directory.glob("*.alive")]:
        side_car.unlink()


if __name__ == "__main__":
    make_logs(Path(sys.argv[1]))
    (Path(sys.argv[1]) / "generations").mkdir()
    make_generations(Path(sys.argv[1]) / "generations")
