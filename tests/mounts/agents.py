"""Processes on the hosts that share a directory: one keeper a host, which forks agents that do what a test tells them.

A process start takes long in a small virtual machine and over ssh, so there is one for each host: the keeper imports
everything once and forks. Everything goes through its stdin and stdout, as frames: the agent's number and the length,
then pickled Python. Requests are small; what is large, agents make themselves.

    python agents.py        a keeper; ends, with its agents, when its stdin does
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlencode

import fscoord
from fscoord.stores.file import FileStore

HEAD = struct.Struct("<II")
KEEPER = 0
LIMIT_S = 400.0
"""How long an answer may take before a test fails: far more than it takes on the slowest machine."""


FIRST_USES = ("contract.worker", "mounts.trouble", "mounts.work", "queue", "watchdog.observers.inotify")
"""What agents import otherwise, each for itself."""


class AgentDiedError(Exception):
    """The agent ended before it answered; `status` is as in waitpid(2)."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the agent died, wait status {status}")
        self.status = status


# What an agent does


class Worker:
    """The inside of an agent: its open stores, and its way to tell the test what happens meanwhile."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.stores: dict[str, FileStore] = {}
        self.options = options

    def address(self, path: str) -> str:
        """Return the address of the store at `path`, with the options of all stores but the time limit."""
        options = {name: value for name, value in self.options.items() if name != "timeout"}
        return f"file:{quote(path)}?{urlencode(options, quote_via=quote)}"

    def report(self, event: Any) -> None:
        """Send `event` at once: it arrives even if this process is killed in the next instant."""
        send(1, 1, (None, "event", event))

    def tell(self, *words: Any) -> None:
        self.report(words)

    def serve(self) -> NoReturn:
        while True:
            _, packed = receive(0)
            serial, name, given, more = pickle.loads(packed)
            try:
                answer = (serial, "result", self.do(name, given, more))
                pickle.dumps(answer)
            except BaseException as error:
                answer = (serial, "error", portable(error))
            send(1, 1, answer)

    def do(self, name: str, given: tuple[Any, ...], more: dict[str, Any]) -> Any:
        handle, _, method = name.rpartition(":")
        if handle:
            return getattr(self.stores[handle], method)(*given, **more)
        module, _, function = name.rpartition(".")
        if not module:
            return getattr(self, function)(*given, **more)
        filled = [self.stores[word[1:]] if isinstance(word, str) and word.startswith("@") else word for word in given]
        return getattr(importlib.import_module(module), function)(*filled, **more)

    def pid(self) -> int:
        return os.getpid()

    def open(self, path: str, handle: str = "store", **options: Any) -> None:
        self.stores[handle] = FileStore(path, **(self.options | options))

    def close(self, handle: str = "store") -> None:
        self.stores.pop(handle).close()

    def with_worker(self, name: str, *given: Any) -> Any:
        """Call the function `name`, which takes this worker first."""
        module, _, function = name.rpartition(".")
        return getattr(importlib.import_module(module), function)(self, *given)


def portable(error: BaseException) -> BaseException:
    told = AssertionError("".join(traceback.format_exception(error)))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return told
    copy.__cause__ = told
    return copy


def send(fd: int, number: int, message: Any) -> None:
    write_all(fd, number, pickle.dumps(message))


def write_all(fd: int, number: int, packed: bytes) -> None:
    frame = memoryview(HEAD.pack(number, len(packed)) + packed)
    while frame:
        frame = frame[os.write(fd, frame) :]


def receive(fd: int) -> tuple[int, bytes]:
    number, size = HEAD.unpack(read_all(fd, HEAD.size))
    return number, read_all(fd, size)


def read_all(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            sys.exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# The keeper


class Keeper:
    """Forks agents and passes frames on; single-threaded, with no store open."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.agents: dict[int, tuple[int, int]] = {}  # number: pid, where it reads
        self.pipes: dict[int, tuple[int, bytearray]] = {}  # where it writes: number, what came so far
        self.poll = select.poll()
        self.poll.register(0, select.POLLIN)

    def serve(self) -> NoReturn:
        send(1, KEEPER, os.uname().nodename)
        while True:
            for fd, _ in self.poll.poll():
                if fd == 0:
                    self.obey(*receive(0))
                else:
                    self.pass_on(fd)

    def obey(self, number: int, packed: bytes) -> None:
        if number != KEEPER:
            if number in self.agents:
                try:
                    write_all(self.agents[number][1], number, packed)
                except BrokenPipeError:
                    pass  # its end is told when its pipe is read
            return
        word, number, *more = pickle.loads(packed)
        if word == "fork":
            self.fork(number)
        elif word == "signal" and number in self.agents:
            os.kill(self.agents[number][0], more[0])
        elif word == "kill" and number in self.agents:
            os.killpg(self.agents[number][0], signal.SIGKILL)

    def fork(self, number: int) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            os.dup2(theirs_in, 0)
            os.dup2(theirs_out, 1)
            os.closerange(3, 4096)
            try:
                Worker(self.options).serve()
            finally:
                os._exit(0)
        os.setpgid(pid, pid)  # what an agent forks dies with it
        os.close(theirs_in)
        os.close(theirs_out)
        self.agents[number] = (pid, ours_out)
        self.pipes[ours_in] = (number, bytearray())
        self.poll.register(ours_in, select.POLLIN)

    def pass_on(self, fd: int) -> None:
        number, so_far = self.pipes[fd]
        part = os.read(fd, 1 << 20)
        if not part:
            self.bury(fd, number)
            return
        so_far += part
        while len(so_far) >= HEAD.size:
            end = HEAD.size + HEAD.unpack_from(so_far)[1]
            if len(so_far) < end:
                return
            write_all(1, number, bytes(so_far[HEAD.size : end]))
            del so_far[:end]

    def bury(self, fd: int, number: int) -> None:
        self.poll.unregister(fd)
        os.close(fd)
        del self.pipes[fd]
        pid, requests = self.agents.pop(number)
        os.close(requests)
        send(1, number, (None, "end", os.waitpid(pid, 0)[1]))


# The test's side


class Host:
    """One host: its keeper, started by `command` (empty: here), and the shared directory as it is called there."""

    def __init__(self, name: str, command: list[str], directory: str, options: dict[str, Any]) -> None:
        self.name = name
        self.directory = directory
        roots = [Path(fscoord.__file__).parent.parent, Path(__file__).parent.parent]
        path = os.pathsep.join(map(str, roots))
        self._process = subprocess.Popen(
            [*command, "env", f"PYTHONPATH={path}", sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._numbers = itertools.count(1)
        self._buffer = bytearray()
        self.agents: dict[int, Agent] = {}
        self.hostname = ""
        send(self._in, KEEPER, options)
        until = time.monotonic() + LIMIT_S
        while not self.hostname:  # until then its process may still be that of `command`
            assert time.monotonic() < until, f"host {name}: no keeper within {LIMIT_S:g} s from {command}"
            self.look(1)

    def fork(self) -> Agent:
        """Return a new agent on this host."""
        agent = Agent(self, next(self._numbers))
        self.agents[agent.number] = agent
        send(self._in, KEEPER, ("fork", agent.number))
        return agent

    def request(self, number: int, message: Any) -> None:
        send(self._in, number, message)

    def signal(self, number: int, which: int) -> None:
        """Send a signal to an agent; a process on the agent's own host does it."""
        send(self._in, KEEPER, ("signal", number, which))

    def kill(self, number: int) -> None:
        """Kill -9 an agent, and what it has forked."""
        send(self._in, KEEPER, ("kill", number))

    def fileno(self) -> int:
        """Return what select(2) may wait at, until `look` has something to take in."""
        return self._out

    def look(self, left: float) -> None:
        """Take in what agents said, waiting up to `left` seconds for the first of it."""
        ready, _, _ = select.select([self._out], [], [], max(0.0, left))
        if not ready:
            return
        part = os.read(self._out, 1 << 20)
        assert part, f"host {self.name}: the keeper ended with {self._process.wait(LIMIT_S)}"
        self._buffer += part
        while len(self._buffer) >= HEAD.size:
            number, size = HEAD.unpack_from(self._buffer)
            if len(self._buffer) < HEAD.size + size:
                return
            message = pickle.loads(self._buffer[HEAD.size : HEAD.size + size])
            del self._buffer[: HEAD.size + size]
            if number == KEEPER:
                self.hostname = message
            else:
                self.agents[number].take(*message)

    def end_agents(self) -> None:
        """Kill every agent, and wait until each is gone."""
        for agent in self.agents.values():
            if agent.status is None:
                agent.kill()
        self.agents.clear()

    def close(self) -> None:
        self.end_agents()
        self._process.stdin.close()
        try:
            self._process.wait(LIMIT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


class Pending:
    """An answer that has been asked for."""

    def __init__(self, agent: Agent, serial: int) -> None:
        self._agent, self._serial = agent, serial

    def is_done(self) -> bool:
        """Return whether the answer, or the agent's end, is there already."""
        self._agent.host.look(0)
        return self._serial in self._agent.answers or self._agent.status is not None

    def result(self, limit: float = LIMIT_S) -> Any:
        """Wait for the answer; raise what the agent raised, or `AgentDiedError`."""
        until = time.monotonic() + limit
        while self._serial not in self._agent.answers:
            if self._agent.status is not None:
                raise AgentDiedError(self._agent.status)
            left = until - time.monotonic()
            assert left > 0, f"an agent on host {self._agent.host.name} did not answer within {limit:g} s"
            self._agent.host.look(left)
        word, value = self._agent.answers.pop(self._serial)
        if word == "error":
            raise value
        return value

    def error(self, limit: float = LIMIT_S) -> BaseException:
        """Wait for the answer, which must be an error, and return that."""
        try:
            value = self.result(limit)
        except AgentDiedError:
            raise
        except Exception as error:
            return error
        raise AssertionError(f"no error, but {value!r}")


class Agent:
    """A process on a host. Its handle "store" is the one that `store` and methods of that name use."""

    def __init__(self, host: Host, number: int) -> None:
        self.host, self.number = host, number
        self.answers: dict[int, tuple[str, Any]] = {}
        self.events: deque[Any] = deque()
        self.status: int | None = None
        self._serials = itertools.count(1)

    def take(self, serial: int | None, word: str, value: Any) -> None:
        if word == "end":
            self.status = value
        elif serial is None:
            self.events.append(value)
        else:
            self.answers[serial] = (word, value)

    def begin(self, name: str, *given: Any, **more: Any) -> Pending:
        """Start `name`: ``HANDLE:METHOD``, a function ``MODULE.NAME`` (where "@HANDLE" stands for a store), or a
        method of `Worker`.
        """
        serial = next(self._serials)
        self.host.request(self.number, (serial, name, given, more))
        return Pending(self, serial)

    def begin_and_stop(self, name: str, *given: Any) -> Pending:
        """Start `name`, which reports an event and then stops the agent (SIGSTOP); return when the agent has stopped.

        A `resume` that came earlier would have no effect.
        """
        pid = self.do("pid")
        asked = self.begin(name, *given)
        self.look_for_event()
        self.host.fork().do("mounts.work.await_stop", pid)
        return asked

    def do(self, name: str, *given: Any, **more: Any) -> Any:
        """Do `name`, as `begin` takes it, and return its result."""
        return self.begin(name, *given, **more).result()

    def open(self, path: str, handle: str = "store", **options: Any) -> Agent:
        """Open a `FileStore` at `path`, which is relative to the shared directory."""
        self.do("open", os.path.join(self.host.directory, path), handle, **options)
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *given, **more: self.do(f"store:{name}", *given, **more)

    def next_event(self, limit: float = LIMIT_S) -> Any:
        """Return the next event that the agent reports."""
        if not self.events:
            self.look_for_event(limit)
        return self.events.popleft()

    def look_for_event(self, limit: float = LIMIT_S) -> None:
        """Return when the agent has reported one more event."""
        until, count = time.monotonic() + limit, len(self.events)
        while len(self.events) == count:
            assert self.status is None, f"the agent died, wait status {self.status}"
            left = until - time.monotonic()
            assert left > 0, f"no event within {limit:g} s"
            self.host.look(left)

    def kill(self) -> None:
        """Kill the agent and its forked children with SIGKILL; return when all of them have ended."""
        self.host.kill(self.number)
        self.wait_end()

    def wait_end(self, limit: float = LIMIT_S) -> int:
        """Return its wait status, once it has ended."""
        until = time.monotonic() + limit
        while self.status is None:
            left = until - time.monotonic()
            assert left > 0, f"the agent did not end within {limit:g} s"
            self.host.look(left)
        return self.status

    def stop(self) -> None:
        self.host.signal(self.number, signal.SIGSTOP)

    def resume(self) -> None:
        self.host.signal(self.number, signal.SIGCONT)


@contextmanager
def hosts(pairs: list[tuple[str, list[str], str]], options: dict[str, Any]) -> Iterator[list[Host]]:
    """Give a `Host` for each name, command and directory; all end with the ``with``."""
    started = []
    try:
        for name, command, directory in pairs:
            started.append(Host(name, command, directory, options))
        yield started
    finally:
        for host in started:
            host.close()


def main() -> None:
    _, packed = receive(0)
    from mounts import agents  # under the name that pickled frames know it by

    for name in FIRST_USES:
        importlib.import_module(name)
    gc.freeze()  # a collection in an agent would copy every page
    agents.Keeper(pickle.loads(packed)).serve()


if __name__ == "__main__":
    main()
