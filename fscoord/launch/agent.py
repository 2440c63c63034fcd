"""`Agent` runs one node of an elastic job: it joins each round, and starts, watches and stops the node's workers."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from fscoord import errors
from fscoord._arguments import MalformedText, parse_uint63, to_seconds
from fscoord._runtime import system, tracing
from fscoord._runtime.logging import logger
from fscoord._runtime.signals import Terminated, defer_signals
from fscoord._waiting.timing import SlowWaitLogger
from fscoord.launch.announcer import Announcer, describe_failure
from fscoord.launch.worker import Console, Failure, Streams, WorkerGroup
from fscoord.rendezvous.base import RendezvousInfo
from fscoord.rendezvous.handler import DynamicRendezvousHandler
from fscoord.store import Store
from fscoord.stores.prefix import PrefixStore
from fscoord.stores.url import file_url, with_options


class Access:
    """Creates files and directories with the group and the permissions of the rendezvous's file.

    If the store is not a file, or only the owner may use the file, the umask determines the permissions.

    Args:
        store: the store of the rendezvous.
    """

    def __init__(self, store: Store) -> None:
        path = getattr(store, "path", None)
        found = None
        if isinstance(path, str):
            with system.open_regular(path) as file:  # not a link that another user has put there since
                found = system.os.fstat(file.fileno())
        mode = 0 if found is None else system.stat.S_IMODE(found.st_mode) & 0o666
        self._group = -1 if found is None else found.st_gid
        self.file_mode = mode if mode & 0o077 else None

    def make_directory(self, path: str, mode: int = 0o777, *, is_shared: bool = True) -> int:
        """Create the directory `path`. Users who may use the rendezvous's file may enter the directory.

        Args:
            path: the path. The parent directory must exist. An empty directory at `path` is replaced.
            mode: the permissions of the directory, before the umask, if only the owner may use the rendezvous's file.
            is_shared: whether each user who may write to the rendezvous's file may also create, rename and remove files
                in the directory.

        Returns:
            A descriptor of the directory, which the caller closes.

        Raises:
            FileExistsError: `path` is a file, or a directory that is not empty.
        """
        first = mode if self.file_mode is None else 0o700
        return system.make_directory(path, first, lambda fd: self._permit(fd, path, is_shared=is_shared))

    def make_directory_in(self, parent: int, path: str) -> int:
        """Create the directory `path` in the open directory `parent`, and return a descriptor of the new directory.

        The caller ensures that no other user can rename files in `parent`. No other user can rename files in the new
        directory, either.
        """
        system.os.mkdir(path, 0o755 if self.file_mode is None else 0o700, dir_fd=parent)
        fd = system.open_file(path, _DIRECTORY, 0, system.loose, dir_fd=parent)
        self._permit(fd, path, is_shared=False)
        return fd

    def _permit(self, fd: int, path: str, *, is_shared: bool) -> None:
        if self.file_mode is None:
            return
        if system.os.fstat(fd).st_gid != self._group:
            try:
                system.os.fchown(fd, -1, self._group)
            except OSError as error:
                text = "%s can't have the group %d of the rendezvous's file (%s): other users' workers can't enter it"
                logger(__name__).warning(text, path, self._group, error.strerror)
        # Users who may read or write the file may enter the directory. Files in it inherit its group (the setgid bit).
        enter = (self.file_mode | self.file_mode >> 1 | self.file_mode >> 2) & 0o111
        mode = 0o700 | enter | self.file_mode & (0o666 if is_shared else 0o644)
        system.os.fchmod(fd, system.stat.S_ISGID | mode)

    def make_directories(self, path: str) -> None:
        """Create the directory `path` and its missing parents by `make_directory`."""
        parent = system.os.path.dirname(path)
        if parent and not system.os.path.isdir(parent):
            self.make_directories(parent)
        try:
            system.close_quietly(self.make_directory(path))
        except FileExistsError:  # created by another node, or by an earlier job
            if not system.os.path.isdir(path):
                raise

    def open_log_directory(self, path: str) -> int:
        """Return a descriptor of the directory `path`, for the files of this node. Create a missing directory.

        No other user can rename files in the directory.

        Raises:
            InsecurePathError: an existing directory belongs to another user, or other users can write to it.
        """
        try:
            fd = system.open_file(path, _DIRECTORY, 0, system.loose)
        except FileNotFoundError:
            parent = system.os.path.dirname(path)
            if not system.os.path.isdir(parent):
                self.make_directories(parent)
            return self.make_directory(path, 0o755, is_shared=False)
        found = system.os.fstat(fd)
        if found.st_uid != system.os.geteuid() or found.st_mode & 0o022:
            system.close_quietly(fd)
            raise errors.InsecurePathError(
                f"{path} belongs to another user, or others can write to it; name another directory for the log files",
                path=path,
            )
        return fd


_DIRECTORY: Final = system.os.O_RDONLY | getattr(system.os, "O_DIRECTORY", 0)


class RoundStore:
    """Creates a store for the workers of one round, and removes it at the end of the ``with``.

    If the store of the rendezvous is the file JOB, the store of the round is the file ``JOB.round-{name}/store``, with
    the same options. The directory and the file have the group and the permissions of JOB, so that the users of JOB can
    use both.

    Args:
        store: the store of the rendezvous. The round has a store only if the store of the rendezvous is a file, or can
            contain further stores.
        name: distinguishes this round from all other rounds in that store; a part of a file's name.
        is_first: whether this node creates the store at the beginning of the ``with``, before other nodes use it, and
            removes it at the end.

    Attributes:
        address: the address of the store, for `~fscoord.open_store`; empty if the round has no store.
        is_kept: whether the store is kept after the end of the ``with``, for examination.
    """

    def __init__(self, store: Store, name: str, *, is_first: bool) -> None:
        self.is_kept = False
        self._is_first = is_first
        self._access = Access(store)
        self._below: Any = None
        self._directory = self.address = ""
        path = getattr(store, "path", None)
        if isinstance(path, str):
            self._directory = system.os.path.abspath(f"{path}.round-{name}")
            options = dict(getattr(store, "shared_options", {}))
            if self._access.file_mode is not None:
                options["mode"] = self._access.file_mode
            self.address = file_url(system.os.path.join(self._directory, "store"), options)
        if hasattr(store, "below"):
            self._below = store.below(f"round-{name}")
            self.address = self._below.address

    def has_content(self) -> bool:
        """Return whether the store may have content. If the store is a file, return whether a worker has created it."""
        return self._below is not None or system.os.path.exists(system.os.path.join(self._directory, "store"))

    def __enter__(self) -> RoundStore:
        if self._directory and self._is_first:
            self._remove()  # a node that was killed may have left it
            system.close_quietly(self._access.make_directory(self._directory, 0o700))
        return self

    def __exit__(self, *_: object) -> None:
        is_over = self._is_first and not self.is_kept
        if self._directory and is_over:
            self._remove()
        if self._below is not None:
            if is_over:
                with suppress(errors.FscoordError):  # the store is left, like a directory that can't be removed
                    self._below.erase()
            self._below.close()

    def _remove(self) -> None:
        system.remove_directory(self._directory, system.os, system.os.getpid())


ROUND_CHECK_S = 1.0
"""An agent that waits for other nodes checks at this interval, in seconds, whether its round is broken."""


FILE_NAME_MAX = 100
"""A percent-encoded run id that is longer is cut to this length, and a hash is appended. Most file systems allow file
names of 255 bytes."""


@dataclass(frozen=True)
class Job:
    """The description of one node's share of a job.

    Attributes:
        command: the program and its arguments.
        workers: the number of workers on this node.
        max_restarts: the number of failed rounds that the job survives.
        monitor_interval: the time between two checks of the other nodes, in seconds.
        grace: the time from SIGTERM to SIGKILL for the workers, in seconds.
        streams: the streams of the workers that go to files, and the streams that go to the console.
        log_dir: the directory of the workers' files: ``round-{N}/{local rank}/stdout.log``, ``stderr.log`` and
            ``error.json``. The directory is for this node alone.
        trace: the directory in which the workers record their traces, or ``""`` for the setting of the environment.
        role: the role of this node's workers. ``ROLE_RANK`` and ``ROLE_WORLD_SIZE`` count the workers of one role.
        forwarded: the names of the signals that `Agent.pass_on` forwards to the workers.
        devices: for each worker, its CUDA_VISIBLE_DEVICES; the LOCAL_RANK of each worker is 0 then. If empty, the
            workers inherit CUDA_VISIBLE_DEVICES.
    """

    command: Sequence[str]
    workers: int
    log_dir: str
    max_restarts: int = 0
    monitor_interval: float = 0.1
    grace: float = 30.0
    streams: Streams = field(default_factory=Streams)
    trace: str = ""
    role: str = "default"
    forwarded: Collection[str] = ()
    devices: Sequence[str] = ()


class Outcome(NamedTuple):
    """How a job ended.

    Attributes:
        is_success: whether the job succeeded.
        failures: the first failure of each failed round. If the job failed, the last item is the failure that ended it.
        kept_store: the address of the store of the last failed round, which is kept; ``""`` if there is none.
    """

    is_success: bool
    failures: list[Failure]
    kept_store: str = ""


class Crew(NamedTuple):
    """The workers of one node in a round: their number and their role. Each node publishes its own crew."""

    workers: int
    role: str

    def encode(self) -> bytes:
        """Return the crew as text: the number, a space, and the role."""
        return f"{self.workers} {self.role}".encode("utf-8", "surrogateescape")

    @classmethod
    def parse(cls, data: bytes) -> Crew:
        """Return the crew in `data`, which `encode` has written."""
        number, _, role = data.partition(b" ")
        return cls(parse_uint63(number), role.decode("utf-8", "surrogateescape"))


class Agent:
    """Runs one node's share of a job.

    The nodes record failures in the store of the rendezvous, under one key for each round. The first failure of a round
    sets the key, and later failures are not recorded. So all nodes count the same failures, and show the same failure
    for a round.

    Args:
        job: the job.
        handler: this node's handler of the rendezvous. `run` shuts down the handler at the end of the job.
        store: the store of the rendezvous.
        console: the console to which the workers' output is copied.
        announcer: prints the events of the job; None: nothing is printed.
    """

    def __init__(
        self,
        job: Job,
        handler: DynamicRendezvousHandler,
        store: Store,
        console: Console,
        announcer: Announcer | None = None,
    ) -> None:
        self._job = job
        self._handler = handler
        self._store = store
        self._console = console
        self._announcer = announcer or Announcer(console, quiet=True)
        self._reason = ""  # of the next round, for people; "" for the first one
        self._kept_store = ""
        self._access = Access(store)
        self._log_fd = -1  # the directory of the files, which is made for the first round
        self._workers: WorkerGroup | None = None  # of the present round

    def pass_on(self, number: int) -> None:
        """Handle the signal `number`, which does not end this node.

        Print the signal. If `Job.forwarded` names the signal, forward it to the workers. For example, Slurm sends
        SIGUSR1 to all processes of a job.
        """
        is_forwarded = signal.Signals(number).name in self._job.forwarded
        if is_forwarded and self._workers is not None:
            self._workers.order(number)
        self._announcer.signal_came(number, is_forwarded, self._workers is not None)

    def run(self) -> Outcome:
        """Run until the job has ended.

        Raises:
            RendezvousError: the nodes could not agree on a round.
            OSError: a file could not be created.
        """
        self._handler.on_wait = self._announcer.waiting
        try:
            while not self._round(self._handler.next_rendezvous()):
                pass
            failures = self._failures()
            self._handler.shutdown()
        except errors.RendezvousClosedError:
            failures = self._failures()
            if len(failures) <= self._job.max_restarts:
                raise
        finally:
            system.close_quietly(self._log_fd)
        return Outcome(len(failures) <= self._job.max_restarts, failures, self._kept_store)

    def _round(self, info: RendezvousInfo) -> bool:
        """Run one round. Return whether the job has ended."""
        # The first node creates the store before it publishes its number of workers, for which all others wait.
        name = f"{file_name(self._handler.get_run_id())}-{self._handler.life}-{self._handler.round}"
        with RoundStore(self._store, name, is_first=info.rank == 0) as round_store:
            crews = self._crews(info)
            if crews is None:
                self._tell_broken()
                return False
            has_ended = self._run_workers(info, crews, round_store)
            is_lost = has_ended and len(self._failures()) > self._job.max_restarts
            round_store.is_kept = is_lost and bool(round_store.address) and round_store.has_content()
            self._kept_store = round_store.address if round_store.is_kept else ""
        return has_ended

    def _run_workers(self, info: RendezvousInfo, crews: list[Crew], round_store: RoundStore) -> bool:
        sizes = [crew.workers for crew in crews]
        if self._reason or info.world_size > 1:
            self._announcer.round_begins(self._handler.round, sizes, info.rank, self._reason)
        if self._log_fd < 0:
            self._log_fd = self._access.open_log_directory(self._job.log_dir)
        place = f"round-{self._handler.round}"
        round_fd = self._access.make_directory_in(self._log_fd, place)
        with WorkerGroup(self._job.command, self._console, self._job.streams, self._access.file_mode) as workers:
            try:
                workers.open_filtered_files(system.os.path.join(self._job.log_dir, place), round_fd)
            finally:
                system.close_quietly(round_fd)
            common = self._environment(info, sizes)
            first = sum(sizes[: info.rank])
            role_first = sum(crew.workers for crew in crews[: info.rank] if crew.role == self._job.role)
            role_size = sum(crew.workers for crew in crews if crew.role == self._job.role)
            number = int(signal.SIGTERM)
            self._workers = workers
            try:
                for local_rank in range(self._job.workers):
                    rank = first + local_rank
                    own = f"{place}/{local_rank}"
                    numbers = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
                    role = {"ROLE_RANK": str(role_first + local_rank), "ROLE_WORLD_SIZE": str(role_size)}
                    if self._job.devices:
                        numbers.update(LOCAL_RANK="0", CUDA_VISIBLE_DEVICES=self._job.devices[local_rank])
                    if round_store.address:
                        role["FSCOORD_STORE"] = with_options(round_store.address, {"rank": rank})
                    files = self._access.make_directory_in(self._log_fd, own)
                    own = system.os.path.join(self._job.log_dir, own)
                    try:
                        with defer_signals():  # a worker is started as a whole, so that its end is known
                            workers.start(rank, local_rank, {**common, **numbers, **role}, own, files)
                    finally:
                        system.close_quietly(files)
                has_ended = self._follow(workers, info)
            except (KeyboardInterrupt, Terminated) as error:
                number = error.number if isinstance(error, Terminated) else signal.SIGINT
                self._console.hurry()  # a worker that waits for the reader of its output could not clean up
                self._announcer.stopping(number, self._job.grace)
                raise
            finally:
                workers.stop(self._job.grace, number)
                self._workers = None
        return has_ended

    def _crews(self, info: RendezvousInfo) -> list[Crew] | None:
        """Return the crew (the number and the role of the workers) of each node.

        Return None if the round was broken before all nodes had published a crew.

        Raises:
            RendezvousTimeoutError: a node did not publish its crew within the store's timeout.
        """
        info.store.set(f"workers/{info.rank}", Crew(self._job.workers, self._job.role).encode())
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
                        f"{words} did not come within {limit:g} s, though these nodes have joined: check whether their"
                        " agents hang"
                    ) from error
                slow_wait.warn_if_due(lambda: words)  # noqa: B023 - it is called at once
                continue
            try:
                return [Crew.parse(value) for value in values]
            except (MalformedText, UnicodeDecodeError) as error:
                raise _foreign("numbers of workers", error) from error

    def _environment(self, info: RendezvousInfo, sizes: list[int]) -> dict[str, str]:
        restarts = str(len(self._failures()))
        values = {
            "WORLD_SIZE": str(sum(sizes)),
            "ROLE_NAME": self._job.role,
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
        if self._job.trace:
            values[tracing.ENVIRONMENT_VARIABLE] = self._job.trace
        return values

    def _follow(self, workers: WorkerGroup, info: RendezvousInfo) -> bool:
        """Watch the round until it is over. Return True if the job has ended, and False if another round follows."""
        failed = f"failed/{self._handler.round}"
        everybody = [f"done/{rank}" for rank in range(info.world_size)]
        is_done = False
        while True:
            end = workers.next_end(self._job.monitor_interval)
            if end is not None and end.status != 0:
                failure = end._replace(host=self._handler.address, round=self._handler.round)
                self._view().compare_set(failed, "", json.dumps(failure._asdict()))
            if not is_done and workers.running == 0 and not self._view().check([failed]):
                info.store.set(f"done/{info.rank}", b"1")
                is_done = True
            if self._view().check([failed]):
                return self._has_failed()
            if is_done and info.store.check(everybody):
                return True
            if not self._handler.is_current() or (not is_done and self._handler.num_nodes_waiting() > 0):
                self._tell_broken()
                return False

    def _has_failed(self) -> bool:
        """Print the failure of the round, and return whether the failure ends the job."""
        failures = self._failures()
        failure, count, limit = failures[-1], len(failures), self._job.max_restarts
        logger(__name__).info("%s", describe_failure(failure))
        self._reason = f" (restart {count} of {limit}, after the failure of rank {failure.rank})"
        if count <= limit:
            self._announcer.worker_failed(failure, count, limit)
        return count > limit

    def _tell_broken(self) -> None:
        """Print that the round is over because nodes were lost or have joined."""
        lost = self._handler.lost_nodes()
        self._reason = " without the lost nodes" if lost else " with more nodes"
        self._announcer.round_broken(self._handler.round, self._handler.node, lost)

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


def file_name(run_id: str) -> str:
    """Return a part of a file name for `run_id`, which may be any text. Different ids give different names."""
    from hashlib import sha256
    from urllib.parse import quote

    name = quote(run_id, safe="")
    return name if len(name) <= FILE_NAME_MAX else f"{name[:FILE_NAME_MAX]}-{sha256(name.encode()).hexdigest()[:16]}"


def _foreign(what: str, error: Exception) -> errors.RendezvousStateError:
    return errors.RendezvousStateError(
        f"the keys for a round's {what} hold other data ({type(error).__name__}: {error}): another program wrote"
        " it, so use another id or another store"
    )
