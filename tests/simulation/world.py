"""The simulated system under the whole package: each logical process has its own registries, locks and descriptors."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from portalocker import exceptions
from simulation.files import Events, Fcntl, Files, FlockLocker, Os
from simulation.scheduler import Process, Scheduler, Threading, Time, drawn
from simulation.sockets import Socket, select_of
from support.internals import (
    Waiter,
    file_events,
    hang_watchdog,
    kernel_wait,
    network,
    node_poller,
    process_mutex,
    station,
    system,
    watcher,
)

from fscoord.stores.file import lifecycle

PATH = f"{Files.DIRECTORY}/log"
HOST = "simulated"
EVICTED_S = (8, 30)
"""When the server evicts a host that has vanished, in seconds. Lustre's takes minutes, in which the others poll."""


class Own:
    """A registry of a module, of which each process has its own."""

    def __init__(self, world: World, name: str, make: Callable[[], Any]) -> None:
        self._world, self._name, self._make = world, name, make

    def _mine(self) -> Any:
        alone = self._world.scheduler.process.alone
        if self._name not in alone:
            alone[self._name] = self._make()
        return alone[self._name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mine(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._mine()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._mine()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._mine()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._mine()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mine())


class World:
    """Logical processes that share one directory.

    Args:
        seed: draws the schedule, and all else that happens.
        hosts: the names of the hosts on which they are. If there are several, the directory is that of a file server.
        kind: the file system of that server, ``"nfs4"`` or ``"lustre"``.

    Attributes:
        kills: how many processes were killed.
        wsize: the most bytes of one write to the file server.
        evicted_at: when a host that had vanished was evicted.
    """

    def __init__(self, seed: int, steps_max: int = 60_000, hosts: Sequence[str] = (HOST,), kind: str = "nfs4") -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(self.rng, steps_max)
        self.files = Files(self.scheduler, self.rng)
        self.hosts, self.kind = hosts, kind
        if kind == "lustre":
            self.files.is_lustre = True
            self.files.deadlocks = self.rng.choice([0, 0.1, 0.5])
        for host in hosts:
            self.files.add_host(host)
        self.kills = self.stops = self.fulls = 0
        self.wsize = 1 << 18
        self.evicted_at = math.inf
        self._living: dict[int, Process] = {}
        self._plan: list[tuple[int, str]] = []
        self._on_death: dict[int, Callable[[], None]] = {}
        self._tickets = self._begun = 0
        self._taken: dict[tuple[str, str], Process] = {}

    # -- processes -------------------------------------------------------------------------------------------------

    def start(
        self,
        *calls: Callable[[], object],
        name: str = "",
        then: Callable[[], None] | None = None,
        host: str = "",
    ) -> Process:
        """Start a process on `host`, by default the first, with a thread for each of `calls`.

        Should it be killed, `then` is called.
        """
        process = self.scheduler.make_process(host or self.hosts[0])
        self._living[process.number] = process
        if then is not None:
            self._on_death[process.number] = then
        for call in calls:
            self.scheduler.spawn(process, call, name)
        return process

    def lives(self, number: int) -> bool:
        return number in self._living

    def lives_here(self, number: int) -> bool:
        """Return whether the host of the process that runs has process `number`."""
        return number in self._living and self._living[number].host == self.scheduler.process.host

    def exit(self) -> None:
        """The process of the task that runs is over: it is killed no more, and the kernel closes what it had open."""
        process = self.scheduler.process
        self._living.pop(process.number, None)
        self._on_death.pop(process.number, None)
        self.files.bury(process)
        process.is_dead = True

    def plan(self, kills: int = 0, stops: int = 0, fulls: int = 0, vanishes: int = 0, *, within: int = 600) -> None:
        """Let so many things happen within so many steps from now on."""
        here = self.scheduler.steps
        for what, count in (("kill", kills), ("stop", stops), ("full", fulls), ("vanish", vanishes)):
            self._plan += [(here + at, what) for at in drawn(self.rng, count, within)]
        self._plan.sort()
        self.scheduler.meddle = self._meddle
        self._set_alarm()

    def doom(self, victim: Process, steps: int) -> None:
        """Kill `victim` when it has made so many steps from now on. Nothing else is planned."""
        left = [steps]

        def meddle() -> None:
            left[0] -= self.scheduler.process is victim
            if left[0] < 0:
                self.spare()
                self.kill(victim)

        self.scheduler.meddle, self.scheduler.meddle_at = meddle, 0

    def spare(self) -> None:
        """Take back the last `doom`."""
        self.scheduler.meddle_at = math.inf

    def _set_alarm(self) -> None:
        self.scheduler.meddle_at = self._plan[0][0] if self._plan else float("inf")

    def _meddle(self) -> None:
        while self._plan and self._plan[0][0] <= self.scheduler.steps:
            _, what = self._plan.pop(0)
            if what == "vanish":
                self.vanish(self.rng.choice(self.hosts))
            elif what == "full":
                self.fulls += 1
                self.files.full_until = self.scheduler.steps + self.rng.randrange(1, 60)
            elif self._living:
                victim = self._living[self.rng.choice(sorted(self._living))]
                if what == "kill":
                    self.kill(victim)
                else:
                    self.stops += 1
                    self.scheduler.stop(victim, self.rng.choice([0.001, 0.03, 0.2, 3.0]))
        self._set_alarm()

    def kill(self, victim: Process) -> None:
        self.kills += 1
        del self._living[victim.number]
        self.scheduler.kill(victim)
        self.files.bury(victim)
        then = self._on_death.pop(victim.number, None)
        if then is not None:
            then()

    def vanish(self, host: str) -> None:
        """Switch off `host`: its processes are gone, and what they had open stays open until the server evicts it."""
        self.files.vanished.add(host)
        for victim in [process for process in self._living.values() if process.host == host]:
            del self._living[victim.number]
            self._on_death.pop(victim.number, None)
            self.scheduler.kill(victim)
        until = self.scheduler.now + self.rng.uniform(*EVICTED_S)

        def evict() -> None:
            self.scheduler.block(lambda: False, until)
            self.evicted_at = self.scheduler.now
            self.files.evict(host)

        self.scheduler.spawn(self.scheduler.make_process("server"), evict, "evict")

    def sequel(self) -> World:
        """Return a world that begins with the files of this one, when all of its processes are gone."""
        world = World(self.rng.randrange(2**32), hosts=self.hosts, kind=self.kind)
        world.files.take_over(self.files)
        world._begun = self._begun + 1000  # its processes have numbers of this one's, and are others
        return world

    # -- the system ------------------------------------------------------------------------------------------------

    @contextmanager
    def installed(self, *, hears: bool = True) -> Iterator[World]:
        """Put the simulated system under the package; if it `hears`, there are events of files."""
        scheduler, threads = self.scheduler, Threading(self.scheduler)
        guards = Own(self, "guards", lambda: [threads.RLock()])
        own: dict[Any, dict[str, Any]] = {
            system: {
                "os": Os(self.files, self.lives_here),
                "fcntl": Fcntl(self.files),
                "threading": threads,
                "time": Time(scheduler),
                "select": select_of(self.files),
                "hostname": lambda: scheduler.process.host,
                "boot_id": lambda: scheduler.process.host.encode().rjust(16, b"!"),
                "start_time": lambda pid="self": (
                    self._begun + (scheduler.process.number if pid == "self" else int(pid))
                ),
                "namespace": lambda kind: 1,
                "is_zombie": lambda pid: False,
                "Descriptors": set,
                "close_when_collected": lambda owner, descriptors: None,  # at no time that the schedule decides
                "loose": set(),
                "opens_under_way": {},
                "random_bytes": lambda count: self.rng.randbytes(count),
                "mount_table": self._mounts,
                "nfs_recovers_lost_locks": lambda: False,
                "has_inotify": lambda: hears,
                "has_ofd_locks": lambda: True,
                "load_flock_locker": lambda: (FlockLocker(self.files), exceptions),
                "flock_holder": lambda fd: None,
                "try_thread": scheduler.start_thread,
            },
            network: {
                "acquire_host_mutex": self._take_name,
                "datagram_sockets": lambda sockets: sockets.extend([Socket(self.files), Socket(self.files)]),
            },
            station: {"SHARED_MEMORY": Files.LOCAL},
            node_poller: {"FALLBACK": Files.LOCAL},
            # It only warns, of calls that hang. It would wait for the ends of the stores of processes that were killed.
            hang_watchdog: {"_open": weakref.WeakSet()},
            hang_watchdog.HangWatchdog: {"ensure_running": lambda watchdog: None},
            file_events: {"watch_file": lambda path, mask, wake: Events(self.files, path, mask)},
            kernel_wait: {"_requests": Own(self, "requests", dict), "_guard": guards},
            process_mutex: {"_mutexes": Own(self, "mutexes", system.WeakObjects), "_guard": guards},
            watcher: {"_watchers": Own(self, "watchers", weakref.WeakValueDictionary), "_guard": guards},
            Waiter: {"__hash__": lambda waiter: self._number(waiter)},
        }
        before = {thing: {name: getattr(thing, name) for name in names} for thing, names in own.items()}
        stores, participants = set(lifecycle._open_stores), set(lifecycle._participants)
        draws, collects = random.getstate(), gc.isenabled()
        random.seed(self.rng.random())
        gc.disable()  # what is thrown away in a circle would be closed at any step
        try:
            for thing, names in own.items():
                for name, value in names.items():
                    setattr(thing, name, value)
            yield self
        finally:
            scheduler.is_over = True
            for thing, names in before.items():
                for name, value in names.items():
                    setattr(thing, name, value)
            lifecycle._participants.intersection_update(participants)
            for store in set(lifecycle._open_stores) - stores:
                del lifecycle._open_stores[store]
            random.setstate(draws)
            if collects:
                gc.enable()

    def _mounts(self) -> list[str]:
        local = "1 1 8:1 / / rw - ext4 /dev/sda1 rw"
        if len(self.hosts) == 1:
            return [local]
        server = {
            "nfs4": f"nfs4 server:/ rw,vers=4.2,wsize={self.wsize}",
            "lustre": "lustre 10.0.0.1@tcp:/fs rw,flock,checksum,lazystatfs,nolock",
        }
        return [local, f"2 1 0:50 / {Files.DIRECTORY} rw - {server[self.kind]}"]

    def _take_name(self, plain: str) -> Any:
        self.scheduler.step("take name", plain)
        process = self.scheduler.process
        name = process.host, plain
        before = self._taken.get(name)
        if before is not None and not before.is_dead:
            return None
        self._taken[name] = process
        return self._keeping(name, process)

    @contextmanager
    def _keeping(self, name: tuple[str, str], process: Process) -> Iterator[None]:
        try:
            yield
        finally:
            if self._taken.get(name) is process:
                del self._taken[name]

    def _number(self, ticket: Any) -> int:
        """Return the number by which sets of tickets have the same order in each run of a seed."""
        number = getattr(ticket, "simulated_number", 0)
        if not number:
            self._tickets += 1
            number = ticket.simulated_number = self._tickets
        return int(number)
