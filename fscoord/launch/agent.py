"""`Agent`: one node of an elastic job. It takes part in rounds, runs its workers in each, and ends with the job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fscoord import errors
from fscoord._arguments import MalformedText, parse_uint63, to_seconds
from fscoord._runtime import system, tracing
from fscoord._runtime.logging import logger
from fscoord._waiting.timing import SlowWaitLogger
from fscoord.launch.worker import Console, Streams, WorkerGroup
from fscoord.rendezvous.base import RendezvousInfo
from fscoord.rendezvous.handler import DynamicRendezvousHandler
from fscoord.store import Store
from fscoord.stores.prefix import PrefixStore

__all__ = ["Agent", "Failure", "Job", "Outcome", "RoundStore"]


class RoundStore:
    """A store that only the workers of one round use, so that it is empty when they start.

    If the store of the rendezvous is a file, this one is a file in a new directory next to it. The directory and the
    file have the group and the permissions of the rendezvous's file, so that the same users can use them.

    Args:
        store: the store of the rendezvous. If it is not a file and can't have stores below it, the round has no store.
        name: distinguishes this round from all others in that store.
        is_first: whether this node creates the store at the beginning of the ``with``, before the others use it, and
            removes it at the end.

    Attributes:
        address: the address of the store, for `~fscoord.open_store`; empty if the round has none.
    """

    def __init__(self, store: Store, name: str, *, is_first: bool) -> None:
        self._is_first = is_first
        self._below: Any = None
        self._directory = self.address = ""
        path = getattr(store, "path", None)
        if isinstance(path, str):
            self._directory = system.os.path.abspath(f"{path}.round-{name}")
            found = system.os.stat(path)
            self._group, self._mode = found.st_gid, system.stat.S_IMODE(found.st_mode) & 0o666
            self.address = _url(system.os.path.join(self._directory, "store"), self._mode, store)
        if hasattr(store, "below"):
            self._below = store.below(f"round-{name}")
            self.address = self._below.address

    def __enter__(self) -> RoundStore:
        if self._directory and self._is_first:
            self._make()
        return self

    def __exit__(self, *_: object) -> None:
        if self._directory and self._is_first:
            self._remove()
        if self._below is not None:
            if self._is_first:
                with suppress(errors.FscoordError):  # the store is left, like a directory that can't be removed
                    self._below.erase()
            self._below.close()

    def _make(self) -> None:
        try:
            system.os.mkdir(self._directory, 0o700)
        except FileExistsError:  # it was left by a node that was killed
            self._remove()
            system.os.mkdir(self._directory, 0o700)
        if not self._mode & 0o077:
            return
        if system.os.stat(self._directory).st_gid != self._group:
            try:
                system.os.chown(self._directory, -1, self._group)
            except OSError as error:
                text = "%s can't have the group %d of the rendezvous's file (%s): other users' workers can't enter it"
                logger(__name__).warning(text, self._directory, self._group, error.strerror)
        # Users who may read or write the file may enter the directory. Files in it inherit its group (the setgid bit).
        enter = (self._mode | self._mode >> 1 | self._mode >> 2) & 0o111
        system.os.chmod(self._directory, system.stat.S_ISGID | 0o700 | self._mode | enter)

    def _remove(self) -> None:
        system.remove_directory(self._directory, system.os, system.os.getpid())


def _url(path: str, mode: int, store: Store) -> str:
    from urllib.parse import quote

    options = {name: str(value) for name, value in getattr(store, "place_options", {}).items()}
    if mode & 0o077:
        options["mode"] = f"{mode:o}"
    query = "&".join(f"{name}={quote(value)}" for name, value in options.items())
    return "file://" + quote(path, errors="surrogateescape") + ("?" + query if query else "")


ROUND_CHECK_S = 1.0
"""The seconds between two checks, by an agent that waits for other nodes, that its round is not broken."""


@dataclass(frozen=True)
class Job:
    """The description of a job. It is the same on every node, except for `workers`.

    Attributes:
        command: the program and its arguments.
        workers: the number of workers on this node.
        max_restarts: the number of failed rounds after which the job still goes on.
        monitor_interval: the time between two checks of the other nodes, in seconds.
        grace: the time from SIGTERM to SIGKILL for the workers, in seconds.
        streams: the streams of the workers that go to files, and those that go to the console.
        log_dir: the directory of the workers' files. Each round has a directory in it.
        trace: the directory in which the workers record their traces, or ``""`` for what the environment says.
    """

    command: Sequence[str]
    workers: int
    log_dir: str
    max_restarts: int = 0
    monitor_interval: float = 0.1
    grace: float = 30.0
    streams: Streams = field(default_factory=Streams)
    trace: str = ""


class Failure(NamedTuple):
    """The first worker that failed in a round.

    Attributes:
        rank: the worker's rank.
        local_rank: the worker's rank on its node.
        host: the address of the node.
        pid: the worker's process id.
        status: the exit code, or the negative number of the signal that killed the worker.
        message: the last lines of the worker's standard error.
        error_file: the path of the worker's traceback on its host, or ``""``.
        round: the number of the round.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    status: int
    message: str
    error_file: str
    round: int


class Outcome(NamedTuple):
    """How a job ended: whether it succeeded, and the failures of its rounds. If it failed, the last one ended it."""

    is_success: bool
    failures: list[Failure]


class Agent:
    """Runs one node's share of a job.

    The nodes record failures in the store of the rendezvous, one key for each round. Only the first report of a round
    is written to its key. So all nodes count the same failures, and show the same first failure of a round.

    Args:
        job: the job.
        handler: this node's part in the rendezvous. It is shut down when the job has ended.
        store: the store of the rendezvous.
        console: the console to which the workers' output is copied.
    """

    def __init__(self, job: Job, handler: DynamicRendezvousHandler, store: Store, console: Console) -> None:
        self._job = job
        self._handler = handler
        self._store = store
        self._console = console

    def run(self) -> Outcome:
        """Run until the job has ended.

        Raises:
            RendezvousError: the nodes could not agree on a round.
            OSError: a file could not be created.
        """
        while True:
            try:
                info = self._handler.next_rendezvous()
            except errors.RendezvousClosedError:
                failures = self._failures()
                if len(failures) > self._job.max_restarts:
                    return Outcome(False, failures)
                raise
            if self._round(info):
                failures = self._failures()
                self._handler.shutdown()
                return Outcome(len(failures) <= self._job.max_restarts, failures)

    def _round(self, info: RendezvousInfo) -> bool:
        """Run the workers once; return whether the job has ended."""
        # The first node creates the store before it publishes its number of workers, for which all others wait.
        name = f"{self._handler.life}-{self._handler.round}"
        with RoundStore(self._store, name, is_first=info.rank == 0) as round_store:
            sizes = self._sizes(info)
            return False if sizes is None else self._run_workers(info, sizes, round_store)

    def _run_workers(self, info: RendezvousInfo, sizes: list[int], round_store: RoundStore) -> bool:
        directory = system.os.path.join(self._job.log_dir, f"round-{self._handler.round}")
        with WorkerGroup(self._job.command, self._console, self._job.streams) as workers:
            common = self._environment(info, sizes, round_store.address)
            first = sum(sizes[: info.rank])
            for local_rank in range(self._job.workers):
                rank = first + local_rank
                own = system.os.path.join(directory, str(local_rank))
                system.os.makedirs(own, exist_ok=True)
                numbers = {"RANK": str(rank), "ROLE_RANK": str(rank), "LOCAL_RANK": str(local_rank)}
                workers.start(rank, local_rank, {**common, **numbers}, own)
            has_ended = self._follow(workers, info)
            workers.stop(self._job.grace)
        return has_ended

    def _sizes(self, info: RendezvousInfo) -> list[int] | None:
        """Return how many workers each node runs, or None if the round was broken before all nodes published that.

        Raises:
            RendezvousTimeoutError: a node did not publish its number within the store's timeout, in an unbroken round.
        """
        info.store.set(f"workers/{info.rank}", str(self._job.workers))
        keys = [f"workers/{rank}" for rank in range(info.world_size)]
        limit = to_seconds(info.store.timeout)
        end = system.time.monotonic() + limit
        slow_wait = SlowWaitLogger(__name__)
        while True:
            try:
                info.store.wait(keys, ROUND_CHECK_S)
                values = info.store.multi_get(keys)
            except errors.StoreTimeoutError as error:
                if not self._handler.is_current():
                    return None
                missing = ", ".join(key.rpartition("/")[2] for key in error.keys)
                words = f"the number of workers of group rank {missing} in round {self._handler.round}"
                if system.time.monotonic() >= end:
                    raise errors.RendezvousTimeoutError(
                        f"{words} did not come within {limit:g} s, though these nodes have joined: look whether their"
                        " agents hang"
                    ) from error
                slow_wait.warn_if_due(lambda: words)  # noqa: B023 - it is called at once
                continue
            try:
                return [parse_uint63(value) for value in values]
            except MalformedText as error:
                raise _foreign("numbers of workers", error) from error

    def _environment(self, info: RendezvousInfo, sizes: list[int], address: str) -> dict[str, str]:
        world, restarts = str(sum(sizes)), str(len(self._failures()))
        values = {
            "WORLD_SIZE": world,
            "ROLE_WORLD_SIZE": world,
            "ROLE_NAME": "default",
            "LOCAL_WORLD_SIZE": str(self._job.workers),
            "GROUP_RANK": str(info.rank),
            "GROUP_WORLD_SIZE": str(info.world_size),
            "MASTER_ADDR": info.bootstrap_store_info.master_addr,
            "MASTER_PORT": str(info.bootstrap_store_info.master_port),
            "TORCHELASTIC_RESTART_COUNT": restarts,
            "TORCHELASTIC_MAX_RESTARTS": str(self._job.max_restarts),
            "TORCHELASTIC_RUN_ID": self._handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "FSCOORD_RESTART_COUNT": restarts,
            "FSCOORD_RUN_ID": self._handler.get_run_id(),
        }
        if address:
            values["FSCOORD_STORE"] = address
        if self._job.trace:
            values[tracing.ENVIRONMENT_VARIABLE] = self._job.trace
        return values

    def _follow(self, workers: WorkerGroup, info: RendezvousInfo) -> bool:
        """Follow the round until it is over. Return whether the job has ended; if not, there is another round."""
        failed = f"failed/{self._handler.round}"
        everybody = [f"done/{rank}" for rank in range(info.world_size)]
        is_done = False
        while True:
            end = workers.next_end(self._job.monitor_interval)
            if end is not None and end.status != 0:
                failure = {**end._asdict(), "host": self._handler.address, "round": self._handler.round}
                self._view().compare_set(failed, "", json.dumps(failure))
            if not is_done and workers.running == 0 and not self._view().check([failed]):
                info.store.set(f"done/{info.rank}", b"1")
                is_done = True
            if self._view().check([failed]):
                failures = self._failures()
                logger(__name__).info("round %s failed: %s", self._handler.round, failures[-1])
                return len(failures) > self._job.max_restarts
            if is_done and info.store.check(everybody):
                return True
            if not self._handler.is_current() or (not is_done and self._handler.num_nodes_waiting() > 0):
                logger(__name__).info("round %s is over: nodes have come or gone", self._handler.round)
                return False

    def _failures(self) -> list[Failure]:
        view = self._view()
        keys = view.list_keys("failed/")
        try:
            failures = [Failure(**json.loads(value)) for value in view.multi_get(keys)]
            return sorted(failures, key=lambda failure: failure.round)
        except (ValueError, TypeError, RecursionError) as error:
            raise _foreign("failures", error) from error

    def _view(self) -> Store:
        return PrefixStore(f"fscoord.run.{self._handler.get_run_id()}.{self._handler.life}", self._store)


def _foreign(what: str, error: Exception) -> errors.RendezvousStateError:
    return errors.RendezvousStateError(
        f"the store holds something else in the place of a round's {what} ({type(error).__name__}: {error}): use"
        " another id, or another store"
    )
