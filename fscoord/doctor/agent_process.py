"""The main program of an agent: a process of `fscoord doctor` that performs operations requested on standard input.

Every call that may hang in the kernel is made in an agent, so that the call blocks no other process. The caller is the
process that has started the agent. A request is a line of JSON, ``{"n": 7, "act": "lock", "with": {...}}``. The
response is a line such as ``{"n": 7, "result": ...}`` or ``{"n": 7, "error": {...}}``. The number relates a response to
its request, because an interrupted caller may send a request before it reads the last response. The first line has the
number 0 and means that the agent has started.

One agent of each caller uses the mailbox, a directory in which the callers of several hosts exchange messages (see
`fscoord.doctor.mailbox`).

When standard input ends, the agent closes all files and leaves the mailbox. So no file remains, however the caller's
process has ended. Nothing else ends the agent: it ignores Ctrl-C and the termination signals, which ``scancel`` of
Slurm sends to all processes of a job.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from fscoord._log.files import safe_files
from fscoord._log.locking.log_lock import KINDS
from fscoord._log.mount import find_mount
from fscoord._runtime import system
from fscoord._runtime.file_events import LOG_CHANGED, watch_file
from fscoord._runtime.signals import ignore_signals
from fscoord.doctor import probe_file
from fscoord.doctor.mailbox import GROUP_UMASK, OWN_MODE, Mailbox, content, file_mode, group_of, new_file
from fscoord.doctor.probe_file import ProbeFile
from fscoord.stores.file import FileStore

LINES_MAX: Final = 500
SUMS_MAX: Final = 2000
TURNS: Final = 4
"""How many times a record of the other agent must follow a record of this agent. Fewer times do not prove that both
agents wrote at the same time."""
MAILBOX_ACTS: Final = frozenset(("publish", "fetch", "wait", "put_aside"))
MEET_S: Final = 5.0
NAP_S: Final = 0.0005


class Agent:
    """Performs the operations that a caller can request, each with arguments and a result in JSON.

    The operations use files in the directory that `settle` sets, or the mailbox. The operations `MAILBOX_ACTS` are
    methods of `Mailbox`, and all others are methods of this class. The argument `name` is a file name without a
    directory. The argument `kind` is a kind of lock.
    """

    mailbox: Mailbox

    def __init__(self, pause: Callable[[float], bool | None] = system.time.sleep) -> None:
        self._pause = pause
        self.directory = ""
        self.mode = OWN_MODE
        self.files: dict[str, ProbeFile] = {}
        self._watch: Any = None

    def settle(self, directory: str) -> None:
        """Use files in `directory` from now on."""
        self.directory = directory
        self.mode = file_mode(directory)
        if self.mode != OWN_MODE:
            system.os.umask(GROUP_UMASK)

    def facts(self, path: str) -> dict[str, Any]:
        """Return the properties of the directory `path`, its mount and this host. Nothing is tested."""
        real = system.os.path.realpath(path)
        found = system.os.stat(real)
        if not system.stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(system.errno.ENOTDIR, "name the directory, not a file in it", path)
        mount = find_mount(real)
        return {
            "path": real,
            "kind": mount.kind,
            "point": mount.point,
            "options": list(mount.options),
            "is_local": mount.is_local,
            "coherence": mount.coherence,
            "reads_why": mount.reads_why,
            "vanished_host": mount.vanished_host,
            "objections": {kind: mount.objection(kind) for kind in KINDS},
            "caution": mount.caution,
            "device": found.st_dev,
            "group": group_of(found),
            "host": system.hostname(),
            "boot_id": system.boot_id().hex(),
            "network": system.namespace("net"),
            "kernel": system.os.uname().release,
        }

    def lock(self, name: str, kind: str, shared: bool = False) -> bool:
        """Try to lock the file `name`, without waiting. Return whether this agent has acquired the lock."""
        return self.file(name).take(kind, shared=shared)

    def unlock(self, name: str, kind: str, shared: bool = False) -> None:
        """Unlock the file `name`."""
        self.file(name).lock(kind, shared=shared).unlock()

    def block(self, name: str, kind: str) -> float:
        """Lock the file `name`, waiting in the kernel if `kind` allows it. Return how many seconds the wait took."""
        file = self.file(name)
        start = system.time.monotonic()
        if kind == "soft":
            file.await_lock(kind)
        else:
            file.lock(kind).block(file.writer, 0)
        return system.time.monotonic() - start

    def time_lock(self, name: str, kind: str, seconds: float) -> float:
        """Measure for `seconds`. Return the median time in seconds to acquire and release the free lock."""
        lock = self.file(name).lock(kind)

        def take_and_release() -> None:
            lock.try_lock()
            lock.unlock()

        return _median(take_and_release, seconds)

    def tally(self, name: str, kind: str) -> dict[str, Any]:
        """Read the whole file under the lock, and return its `probe_file.Summary` as a dictionary."""
        file = self.file(name)
        with file.locked(kind):
            return probe_file.summarize(content(file.path))._asdict()

    def append(self, name: str, kind: str, number: int, writer: str) -> None:
        """Append a record with `number` and `writer` under the lock."""
        file = self.file(name)
        with file.locked(kind):
            file.append(kind, probe_file.encode(number, writer))

    def look(self, name: str, kind: str, how: str) -> list[int]:
        """Return the numbers of the records since the last read, 0 for a damaged record.

        `how` is the kind of read, see `ProbeFile.read`. The result is ``[-1]`` if the mount refuses direct reads.
        """
        try:
            return [0 if line is None else line.number for line in self.file(name).read(how, kind)]
        except OSError as error:
            if how != "direct" or error.errno != system.errno.EINVAL:
                raise
            return [-1]

    def watch(self, name: str) -> bool:
        """Start to watch the file for changes. Return whether the kernel can report changes."""
        self.file(name)
        try:
            self._watch = watch_file(self.path(name), LOG_CHANGED, lambda: None)
        except (OSError, ImportError):
            return False
        return bool(self._watch.is_pollable)

    def watched(self, seconds: float) -> bool:
        """Return whether the kernel reports a change within `seconds`, and end the watch."""
        try:
            return bool(self._watch.wait(seconds))
        finally:
            self._watch.close()
            self._watch = None

    def claim(self, stem: str, how: str, count: int, seconds: float) -> dict[str, Any]:
        """Try to create the names ``STEM.0`` to ``STEM.COUNT-1``, until `seconds` are over.

        Returns:
            ``won``, the numbers of the names that this agent created; ``tried``, how many names it tried.
        """
        won: list[int] = []
        tried = 0
        deadline = system.time.monotonic() + seconds
        source = self.path(f".{stem}.{system.random_bytes(4).hex()}")
        system.close_quietly(new_file(source, self.mode))
        for number in range(count):
            path = self.path(f"{stem}.{number}")
            with suppress(FileExistsError):
                if how == "link":
                    system.os.link(source, path)
                elif how == "mkdir":
                    system.os.mkdir(path)
                else:
                    system.close_quietly(new_file(path, self.mode))
                won.append(number)
            tried = number + 1
            if system.time.monotonic() > deadline:
                break
        safe_files.unlink_quietly(source)
        return {"won": won, "tried": tried}

    def race(self, name: str, kind: str, writer: str, seconds: float) -> dict[str, Any]:
        """Append records under the lock for `seconds`, as a store does: read to the end, then append the next number.

        The period of `seconds` begins when the file has a record of another writer, but after 5 s at the latest. The
        period is extended by up to 5 s, until the two writers have alternated a few times.

        Returns:
            ``written``, the number of records that this agent appended; ``met``, whether there was another writer;
            ``garbled``, how many records were damaged when this agent read them under the lock.
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
            with file.locked(kind):
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
                    system.time.sleep(2 * NAP_S)  # time in which a second holder of the lock can do harm
                if not written or others or now > met:  # the first record announces this agent
                    file.append(kind, probe_file.encode(last + 1, writer))
                    written += 1
            system.time.sleep(random.uniform(0, 4) * NAP_S)  # so that the other agent gets the lock
        return {"written": written, "met": bool(others), "garbled": garbled}

    def answer(self, name: str, kind: str, how: str, turn: int, rounds: int, seconds: float) -> dict[str, Any]:
        """Alternate with another agent: append a record after each record of the other agent.

        Args:
            name: the file.
            kind: the kind of the lock under which records are appended.
            how: the kind of read, see `ProbeFile.read`.
            turn: 0 for the agent that appends first, 1 for the other agent.
            rounds: the number of records that each agent appends.
            seconds: the time limit in seconds.

        Returns:
            ``waits``, the seconds from each record of this agent until the other agent's next record was read;
            ``garbled``, how many damaged records were read; ``done``, whether all rounds were finished; ``possible``,
            whether the mount allows this kind of read.
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

    def count(self, name: str, options: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Open a `FileStore`, and add 1 to one of its keys again and again for `seconds`.

        Returns:
            ``sums``, the result of every add; ``operations``, the adds per second; ``error``, the text of the error
            that ended the operation early, or an empty text.
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
                        system.time.sleep(NAP_S)  # so that the other agent gets the lock
                    took = system.time.monotonic() - began
        except (OSError, RuntimeError) as error:
            return {"sums": sums, "operations": 0.0, "error": f"{type(error).__name__}: {error}"}
        return {"sums": sums, "operations": len(sums) / took, "error": ""}

    def speed(self, name: str, options: dict[str, Any], seconds: float) -> dict[str, float]:
        """Return the median times in seconds of set, get and add of a `FileStore` that no other process uses."""
        with FileStore(self.path(name), timeout=MEET_S + seconds, mode=self.mode, **options) as store:
            return {
                "set": _median(lambda: store.set("k", b"v" * 32), seconds / 3),
                "get": _median(lambda: store.get("k"), seconds / 3),
                "add": _median(lambda: store.add("n", 1), seconds / 3),
            }

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()
        self.files.clear()

    def file(self, name: str) -> ProbeFile:
        """Return the open file `name`. Open the file at its first use."""
        if name not in self.files:
            path = self.path(name)
            self.files[name] = ProbeFile(path, is_nfs=find_mount(path).is_nfs, mode=self.mode)
        return self.files[name]

    def path(self, name: str) -> str:
        """Return the path of the file `name`."""
        # Requests from other hosts arrive as files, and must not name a file outside of the mailbox directory.
        if not name or "/" in name or not self.directory:
            raise ValueError(f"{name!r} names no file of the examination")
        return system.os.path.join(self.directory, name)

    def enter(self, directory: str, name: str, facts: dict[str, Any]) -> bool:
        """Enter the mailbox `directory`, and publish `facts` there. Return whether this instance is the coordinator."""
        self.mailbox = Mailbox(directory, name, self._pause)
        return self.mailbox.enter(facts)

    def leave(self) -> None:
        """Close all files and leave the mailbox."""
        self.close()
        if "mailbox" in vars(self):
            self.mailbox.leave()


def _new_lines(file: ProbeFile, kind: str) -> list[probe_file.ProbeRecord | None]:
    way = file.way(kind)
    found = more = file.read(way, kind)
    while more and None not in more:
        more = file.read(way, kind)
        found = found + more
    return found


def _median(call: Callable[[], object], seconds: float) -> float:
    took: list[float] = []
    deadline = system.time.monotonic() + seconds
    while not took or (system.time.monotonic() < deadline and len(took) < LINES_MAX):
        start = system.time.perf_counter()
        call()
        took.append(system.time.perf_counter() - start)
    return sorted(took)[len(took) // 2]


def pause_until_end(seconds: float, fd: int = 0) -> bool:
    """Sleep for `seconds`, or until all writers of the pipe `fd` have closed it. Return whether the pipe was closed.

    A plain sleep would go on after the caller's process has ended, for example by Ctrl-C.
    """
    poll = system.select.poll()
    poll.register(fd, 0)  # the end of a pipe is reported in any case
    return bool(poll.poll(seconds * 1000))


def main(questions: Iterable[bytes], answers: int, pause: Callable[[float], bool | None] = system.time.sleep) -> None:
    """Perform each operation in `questions`, and write its response to the descriptor `answers`."""
    agent = Agent(pause)

    def tell(answer: dict[str, Any]) -> None:
        safe_files.write_all(answers, json.dumps(answer).encode("ascii") + b"\n")

    try:
        tell({"n": 0, "result": None})
        for line in questions:
            tell(_answer(agent, json.loads(line)))
    except BrokenPipeError:  # the caller's process has ended
        pass
    finally:
        agent.leave()


def _answer(agent: Agent, question: dict[str, Any]) -> dict[str, Any]:
    try:
        act = question["act"]
        result = getattr(agent.mailbox if act in MAILBOX_ACTS else agent, act)(**question["with"])
    except (OSError, RuntimeError, ValueError) as error:
        number = getattr(error, "errno", None)
        words = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return {"n": question["n"], "error": {"type": type(error).__name__, "errno": number, "message": words}}
    return {"n": question["n"], "result": result}


if __name__ == "__main__":
    ignore_signals()
    main(sys.stdin.buffer, sys.stdout.fileno(), pause_until_end)
