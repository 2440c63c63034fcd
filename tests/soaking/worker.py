"""A process of the soak: it makes random calls on the store until it is killed: ``worker.py JSON``."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from soaking.journal import Journal, Sections
from soaking.weight import weighed
from support.internals import resend_lost_signals

from fscoord import FileStore
from fscoord.barriers import StoreBarrier
from fscoord.errors import BrokenBarrierError, CompactedError, FscoordError, QueueEmptyError, StoreTimeoutError
from fscoord.recipes import (
    Condition,
    CyclicBarrier,
    DoubleBarrier,
    Election,
    Ephemeral,
    Event,
    Item,
    Latch,
    Lock,
    Membership,
    Partitioner,
    PriorityQueue,
    Queue,
    RateLimiter,
    ReadWriteLock,
    Semaphore,
    once,
)

SINGLE = {
    "lock": "Lock", "places": "Semaphore", "both": "ReadWriteLock", "office": "Election", "jobs": "Queue",
    "tasks": "PriorityQueue", "group": "Membership", "flag": "Event", "news": "Condition", "circle": "CyclicBarrier",
    "bucket": "RateLimiter", "shards": "Partitioner",
}  # fmt: skip
"""The recipes of which there is one, by its name."""

MANY = {r"once/\d+": "once", r"latch/\d+": "Latch", r"double/\d+/\d+": "DoubleBarrier"}
"""Those of which there are more, by a pattern of their names."""

TIMEOUT_S = 60
"""How long an operation may take: far longer than anybody is stopped."""

HANG_S = 100
"""After how long a forked child that has not ended says where it is, and ends."""

PERIOD_S = 30
"""How long the names of what serves once are in use. Two periods later their keys are removed."""

PLACES, LATCHED, PARTIES, SHARDS, CREATED = 2, 20, 2, 4, 2
RATE, BURST = 100, 5
LOCK, WRITER, OFFICE, NEWS, PLACE, SHARD, EPHEMERAL, ONCE, ITEMS = 1, 2, 3, 4, 10, 20, 30, 100, 1 << 20
"""Sections; of items, `ITEMS` and the item's number."""


class Worker:
    """Who does the work, in the main thread, in two other threads, and in forked children."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.directory, self.slot, self.size = Path(given["directory"]), int(given["slot"]), int(given["size"])
        self.incarnation, self.start = int(given["incarnation"]), float(given["start"])
        self.pause, self.weighs_s = tuple(given["pause"]), float(given["weighs_s"])
        self.path, self.options = self.directory / "store" / "soak.store", given["options"]
        self.rng = random.Random(f"{given['seed']} {self.slot} {self.incarnation}")
        self.journal = Journal(self.directory / "journals" / f"worker{self.slot}")
        self.sections = Sections(self.directory / "sections")
        self.hung = open(self.directory / "hung", "a")  # noqa: SIM115 - for faulthandler, as long as this lives
        self.store = FileStore(self.path, timeout=TIMEOUT_S, label=f"worker {self.slot}", **self.options)
        self.name_things()
        self.own: int | None = None
        self.trail: int | None = None
        self.item: Item | None = None
        self.allowed = 0
        self.is_ending = self.is_due = False
        self.main = threading.current_thread()
        self.counts: Counter[str] = Counter()

    def name_things(self) -> None:
        self.lock, self.places = Lock(self.store, "lock"), Semaphore(self.store, "places", PLACES)
        self.both, self.office = ReadWriteLock(self.store, "both"), Election(self.store, "office", str(self.slot))
        self.group = Membership(self.store, "group", str(self.slot))
        self.queues = {"jobs": Queue(self.store, "jobs"), "tasks": PriorityQueue(self.store, "tasks")}
        self.flag, self.news = Event(self.store, "flag"), Condition(self.store, "news")
        self.circle = CyclicBarrier(self.store, "circle", PARTIES)
        self.bucket = RateLimiter(self.store, "bucket", RATE, burst=BURST)
        self.shards = Partitioner(self.store, "shards", SHARDS)
        self.created = Ephemeral(self.store, "ephemeral/0")

    # -- the course of it ------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Work until SIGTERM."""
        signal.signal(signal.SIGINT, self.interrupt)
        signal.signal(signal.SIGALRM, self.interrupt)
        signal.signal(signal.SIGTERM, self.end)
        self.say({"ready": self.slot})
        self.sweep()
        threads = [threading.Thread(target=self.work_beside, args=[number], daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        kinds, weights = zip(*MAIN.items(), strict=True)
        told = time.monotonic()
        weighs = told + self.weighs_s
        while not self.is_ending:
            kind = self.rng.choices(kinds, weights)[0]
            try:
                self.step(kind)
            except KeyboardInterrupt:
                self.counts["interrupted"] += 1
            if time.monotonic() > told + 1:
                told = time.monotonic()
                self.tell()
            if time.monotonic() > weighs:
                weighs += self.weighs_s
                self.say({"weighed": {"at": round(time.monotonic() - self.start, 1), **weighed()}})
            time.sleep(self.rng.uniform(*self.pause))
        for thread in threads:
            thread.join()
        self.recover()
        self.store.close()
        self.tell()

    def work_beside(self, number: int) -> None:
        rng = random.Random(f"{self.rng.random()} {number}")
        kinds, weights = zip(*BESIDE.items(), strict=True)
        while not self.is_ending:
            self.do(rng.choices(kinds, weights)[0], rng)
            time.sleep(rng.uniform(*self.pause))

    def step(self, kind: str) -> None:
        """Do one thing that SIGINT may interrupt twice, of which `KeyboardInterrupt` may come out once."""
        interrupted = True
        try:
            try:
                self.allowed = 2
                if self.is_due:
                    signal.setitimer(signal.ITIMER_REAL, self.rng.uniform(1e-5, 0.003))
                self.do(kind, self.rng)
                interrupted = False
            finally:
                self.allowed = 0
        except KeyboardInterrupt:
            self.counts["interrupted"] += 1
        finally:
            self.allowed = 0
            if interrupted:
                self.recover()

    def do(self, kind: str, rng: random.Random) -> None:
        try:
            getattr(self, kind)(rng)
        except Exception:
            self.bad(f"{kind} of worker {self.slot} raised:\n{traceback.format_exc()}")
        self.counts[kind] += 1

    def recover(self) -> None:
        """Give back what is still held: the first instruction of a release may be interrupted."""
        for held in (self.lock, self.places, self.both.reader, self.both.writer, self.office, self.news):
            with suppress(RuntimeError):  # it is not held, as it should be
                held.release()
        for end in (self.group.leave, self.shards.leave, self.created.delete):
            with suppress(FscoordError):
                end()
        item, self.item = self.item, None
        if item is not None:
            with suppress(RuntimeError):
                item.release()

    def sweep(self) -> None:
        """Remove the keys of what served once, which the one that was killed before could not remove."""
        for key in self.store.list_keys(f"double/{self.slot}/"):
            self.store.delete_key(key)

    def interrupt(self, *_: object) -> None:
        self.is_due = self.allowed <= 0  # it came between two things: the next one is to be interrupted
        if self.allowed > 0:
            self.allowed -= 1
            raise KeyboardInterrupt

    def end(self, *_: object) -> None:
        self.is_ending = True

    def tell(self) -> None:
        told, self.counts = self.counts, Counter()
        self.say({"counts": told})

    def bad(self, words: str) -> None:
        self.say({"bad": words})

    def say(self, line: dict[str, Any]) -> None:
        try:
            os.write(1, json.dumps(line).encode() + b"\n")
        except BrokenPipeError:  # the supervisor is gone
            os._exit(1)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Let nothing be interrupted within this."""
        if threading.current_thread() is not self.main:
            yield
            return
        allowed, self.allowed = self.allowed, 0
        try:
            yield
        finally:
            self.allowed = allowed

    @contextmanager
    def inside(self, section: int, *, shared: bool = False) -> Iterator[None]:
        """Be in a section."""
        with self.undisturbed():
            is_alone = self.sections.enter(section, shared=shared)
            if not is_alone:
                self.bad(f"two are in section {section}, one of them worker {self.slot}, process {os.getpid()}")
            try:
                yield
            finally:
                if is_alone:
                    self.sections.leave(section)

    def number(self) -> int:
        """Return a number that no other call gets, in no process. (The kernel gives process numbers again.)"""
        return int.from_bytes(os.urandom(7), "big")

    def period(self) -> int:
        return int((time.monotonic() - self.start) / PERIOD_S)

    # -- operations of the store -----------------------------------------------------------------------------------

    def step_own(self, rng: random.Random) -> None:
        """Advance a counter that only this worker writes."""
        del rng
        key = f"own/{self.slot}"
        if self.own is None:
            self.own = int(self.store.get(key)) if self.store.check([key]) else 0
            self.journal.write("R", "own", self.slot, self.own)
        now, self.own = self.own, None
        self.journal.write("B", "own", self.slot, now + 1)
        found = self.store.compare_set(key, str(now) if now else "", str(now + 1))
        if found != b"%d" % (now + 1):
            self.bad(f"{key} was {now}, and compare_set found {found!r}")
        self.journal.write("A", "own", self.slot, now + 1)
        self.own = now + 1

    def step_trail(self, rng: random.Random) -> None:
        """Append the next number to a value that only this worker writes; shorten it now and then."""
        del rng
        key = f"trail/{self.slot}"
        if self.trail is None:
            text = self.store.get(key) if self.store.check([key]) else b""
            steps = [int(part) for part in text.split()]
            if steps != list(range(steps[0] if steps else 0, len(steps) + (steps[0] if steps else 0))):
                self.bad(f"{key} has holes: {text!r}")
            self.trail = steps[-1] if steps else 0
            self.journal.write("R", "trail", self.slot, self.trail)
        now, self.trail = self.trail, None
        self.journal.write("B", "trail", self.slot, now + 1)
        if now % 40 == 39:
            self.store.set(key, f"{now + 1} ")
        else:
            self.store.append(key, f"{now + 1} ")
        self.journal.write("A", "trail", self.slot, now + 1)
        self.trail = now + 1 if now % 7 else None

    def step_add(self, rng: random.Random) -> None:
        amount = rng.randint(1, 9)
        self.journal.write("B", "add", amount)
        self.journal.write("A", "add", amount, self.store.add("sum", amount))

    def step_pair(self, rng: random.Random) -> None:
        """Set two keys at once, or look whether they go together."""
        name = f"pair/{rng.randrange(3)}"
        if rng.random() < 0.4 or not self.store.check([name + "/a"]):
            value = str(self.number())
            self.store.multi_set([name + "/a", name + "/b"], [value, value])
        else:
            first, second = self.store.multi_get([name + "/a", name + "/b"])
            if first != second:
                self.bad(f"half of a multi_set is seen: {first!r} and {second!r}")

    def step_scratch(self, rng: random.Random) -> None:
        """Do anything with a key of which nothing is known."""
        key = f"scratch/{rng.randrange(20)}"
        chance = rng.random()
        if chance < 0.25:
            self.store.set(key, "." * rng.randrange(200))
        elif chance < 0.4:
            self.store.delete_key(key)
        elif chance < 0.5:
            self.store.append(key, "..")
        elif chance < 0.7:
            self.store.check([key, "sum"])
        elif chance < 0.8:
            self.store.list_keys("scratch/")
        elif chance < 0.85:
            self.store.compare_set(key, "", "new")
        else:
            with suppress(StoreTimeoutError):
                self.store.wait([key, f"scratch/{rng.randrange(20)}"], rng.uniform(0, 0.05))

    def step_transact(self, rng: random.Random) -> None:
        """Move something from one key to the other, unless another process changes one of them meanwhile."""
        found = [self.store.get(key, default=None) for key in ("purse/a", "purse/b")]
        a, b = (int(text or 0) for text in found)
        moved = rng.randint(1, 9)
        self.journal.write("B", "move")
        compared = dict(zip(("purse/a", "purse/b"), found, strict=True))
        changed = {"purse/a": str(a - moved), "purse/b": str(b + moved)}
        if self.store.transact(compare=compared, set=changed, add={"moves": 1}):
            self.journal.write("A", "move")
            if a + b:
                self.bad(f"purse/a is {a} and purse/b is {b}")

    def step_watch(self, rng: random.Random) -> None:
        """Watch the counters, which only rise."""
        seen: dict[str, int] = {}
        with (
            suppress(StoreTimeoutError, CompactedError),
            self.store.watch("own/", timeout=rng.uniform(0, 0.2)) as watch,
        ):
            for change in watch:
                number = int(change.value or -1)
                if number <= seen.get(change.key, 0):
                    self.bad(f"a watch has found {change.key} as {number} after {seen.get(change.key)}")
                seen[change.key] = number
                if sum(seen.values()) % 5 == 0:
                    return

    def step_long(self, rng: random.Random) -> None:
        """Set or read a value that is not kept in memory."""
        key = f"long/{rng.randrange(2)}"
        if rng.random() < 0.3 or not self.store.check([key]):
            self.store.set(key, b"%d" % rng.randrange(10) * 140_000)
        else:
            value = self.store.get(key)
            if len(value) != 140_000 or len(set(value)) != 1:
                self.bad(f"{key} is no value that was set: {len(value)} bytes of {set(value)}")

    def step_push(self, rng: random.Random) -> None:
        del rng
        number = self.number()
        self.journal.write("B", "push", number)
        self.store.queue_push("given", str(number))
        self.journal.write("A", "push", number)

    def step_pop(self, rng: random.Random) -> None:
        del rng
        self.journal.write("B", "pop")
        try:
            value = self.store.queue_pop("given", block=False)
        except QueueEmptyError:
            self.journal.write("E", "pop")
        else:
            self.journal.write("A", "pop", value.decode())

    def step_look(self, rng: random.Random) -> None:
        chance = rng.random()
        if chance < 0.3:
            self.store.members()
        elif chance < 0.5:
            self.group.members()
        elif chance < 0.7:
            self.office.leader()
        elif chance < 0.8:
            with suppress(StoreTimeoutError):
                self.office.observe(timeout=0.1)
        elif chance < 0.9:
            len(self.queues["jobs"]), self.queues["tasks"].taken()
        else:
            self.lock.holders(), self.places.waiters(), self.both.holders(), self.store.num_keys()

    def step_compact(self, rng: random.Random) -> None:
        del rng
        self.store.compact()

    def step_visit(self, rng: random.Random) -> None:
        """Open the store once more, in another way."""
        options: dict[str, Any] = rng.choice(
            [{}, {"watch": "poll"}, {"spill_bytes": None}, {"compact_bytes": 20_000}, {"label": "a guest"}]
        )
        made: list[FileStore] = []
        try:
            made.append(FileStore(self.path, timeout=TIMEOUT_S, **self.options | options))
            if rng.random() < 0.3:
                made.append(made[0].clone())
            amount = rng.randint(1, 9)
            self.journal.write("B", "add", amount)
            self.journal.write("A", "add", amount, made[-1].add("sum", amount))
            with suppress(StoreTimeoutError):
                made[-1].wait(["nothing"], rng.uniform(0, 0.05))
        finally:
            with self.undisturbed():
                for store in made:
                    store.close()

    # -- recipes ---------------------------------------------------------------------------------------------------

    def step_lock(self, rng: random.Random) -> None:
        # What the main thread left behind when it was interrupted is released; other threads have objects of their own.
        lock = self.lock if threading.current_thread() is self.main else Lock(self.store, "lock")
        if lock.acquire(timeout=rng.choice([0, 0.1, 2])):
            try:
                self.advance(LOCK, lock.token, rng)
            finally:
                lock.release()

    def advance(self, row: int, token: int, rng: random.Random) -> None:
        """Count one more, by a read and a write with time between them."""
        with self.inside(row):
            before, last = self.sections.numbers(row)
            if token <= last:
                self.bad(f"token {token} of section {row} comes after {last}")
            self.journal.write("B", "section", row, before + 1)
            time.sleep(rng.uniform(0, 0.003))
            self.sections.set_numbers(row, before + 1, token)
            self.journal.write("A", "section", row, before + 1)

    def step_places(self, rng: random.Random) -> None:
        if self.places.acquire(timeout=rng.choice([0, 0.1, 2])):
            try:
                with self.undisturbed():
                    mine = next((PLACE + n for n in range(PLACES) if self.sections.enter(PLACE + n)), None)
                    if mine is None:
                        self.bad(f"more than {PLACES} have the semaphore")
                    time.sleep(rng.uniform(0, 0.003))
                    if mine is not None:
                        self.sections.leave(mine)
            finally:
                self.places.release()

    def step_both(self, rng: random.Random) -> None:
        """Read, or write. Two readers in one process would share a section, so the threads leave it to the main one."""
        reads = rng.random() < 0.6
        side = self.both.reader if reads else self.both.writer
        if side.acquire(timeout=rng.choice([0, 0.1, 2])):
            try:
                with self.inside(WRITER, shared=reads):
                    time.sleep(rng.uniform(0, 0.003))
            finally:
                side.release()

    def step_office(self, rng: random.Random) -> None:
        if self.office.campaign(timeout=rng.choice([0, 0.1, 2])):
            try:
                self.advance(OFFICE, self.office.term, rng)
            finally:
                self.office.resign()

    def step_group(self, rng: random.Random) -> None:
        data = str(self.number())
        group = self.group = Membership(self.store, "group", data)
        with group:
            if rng.random() < 0.3:
                with suppress(StoreTimeoutError):
                    group.observe(group.members(), timeout=0.05)
            if data.encode() not in [each.data for each in group.members()]:
                self.bad(f"worker {self.slot} is not in the group that it has joined")
        if data.encode() in [each.data for each in group.members()]:
            self.bad(f"worker {self.slot} is in the group that it has left")

    def step_flag(self, rng: random.Random) -> None:
        chance = rng.random()
        if chance < 0.3:
            self.flag.set()
        elif chance < 0.6:
            self.flag.clear()
        elif not self.flag.wait(rng.choice([0, 0.05, 1.5])):
            self.flag.is_set()

    def step_news(self, rng: random.Random) -> None:
        with self.news:
            with self.inside(NEWS):
                time.sleep(rng.uniform(0, 0.003))
            if rng.random() < 0.5:
                self.news.notify(rng.randint(1, 2))
            else:
                self.news.wait(rng.choice([0, 0.05, 1.5]))
                with self.inside(NEWS):
                    pass

    def step_circle(self, rng: random.Random) -> None:
        try:
            before = self.circle.wait(rng.choice([0, 0.1, 2]))
        except BrokenBarrierError:
            self.circle.reset()
        else:
            if before not in range(PARTIES):
                self.bad(f"{before} calls came before this one in a round of {PARTIES}")

    def step_bucket(self, rng: random.Random) -> None:
        self.journal.write("B", "token", 1)
        if rng.random() < 0.5:
            taken = self.bucket.try_acquire()
        else:
            try:
                self.bucket.acquire(timeout=rng.choice([0, 0.1, 2]))
                taken = True
            except StoreTimeoutError:
                taken = False
        if taken:
            self.journal.write("A", "token", 1)

    def step_shards(self, rng: random.Random) -> None:
        """Be a member, and work on each partition, of which a later holder has a greater token."""
        group = self.shards = Partitioner(self.store, "shards", SHARDS)
        with group:
            for _ in range(rng.randint(1, 4)):
                for number, token in group.partitions.items():
                    with self.inside(SHARD + number):
                        _, last = self.sections.numbers(SHARD + number)
                        if token < last:
                            self.bad(f"token {token} of partition {number} comes after {last}")
                        self.sections.set_numbers(SHARD + number, 0, token)
                        time.sleep(rng.uniform(0, 0.003))
                if rng.random() < 0.3:
                    with suppress(StoreTimeoutError):
                        group.wait_changed(timeout=rng.choice([0.05, 1.5]))
                group.rebalance()

    def step_created(self, rng: random.Random) -> None:
        number, data = rng.randrange(CREATED), str(self.number())
        key = self.created = Ephemeral(self.store, f"ephemeral/{number}", data)
        if not key.create():
            return
        try:
            with self.inside(EPHEMERAL + number):
                if key.get() != data.encode():
                    self.bad(f"worker {self.slot} has created ephemeral/{number}, and it is {key.get()!r}")
                time.sleep(rng.uniform(0, 0.003))
        finally:
            if not key.delete():
                self.bad(f"ephemeral/{number} of worker {self.slot} was gone before it was deleted")

    def step_put(self, rng: random.Random) -> None:
        name, number = rng.choice(["jobs", "tasks"]), self.number()
        queue = self.queues[name]
        self.journal.write("B", "put", name, number)
        if isinstance(queue, PriorityQueue):
            queue.put(str(number), priority=rng.randint(-2, 2))
        else:
            queue.put(str(number))
        self.journal.write("A", "put", name, number)

    def step_take(self, rng: random.Random) -> None:
        name = rng.choice(["jobs", "tasks"])
        queue, asked = self.queues[name], time.monotonic()
        try:
            item = queue.take(block=False) if rng.random() < 0.5 else queue.take(timeout=rng.uniform(0, 0.2))
        except (QueueEmptyError, StoreTimeoutError):
            return
        if threading.current_thread() is self.main:
            self.item = item
        number = int(item.data)
        with self.inside(ITEMS + number):
            self.journal.write("A", "take", name, number, f"{asked:.6f}")
            time.sleep(rng.uniform(0, 0.003))
        if rng.random() < 0.1:
            item.release()
        else:
            self.journal.write("B", "done", name, number)
            item.ack()
            self.journal.write("A", "done", name, number)

    def step_once(self, rng: random.Random) -> None:
        period = self.period()

        def work() -> str:
            value = str(self.number())
            self.journal.write("B", "work", period, value)
            with self.inside(ONCE + period):
                time.sleep(rng.uniform(0, 0.003))
            return value

        try:
            self.journal.write("A", "once", period, once(self.store, f"once/{period}", work, timeout=2).decode())
        except StoreTimeoutError:  # who does it is stopped
            pass
        self.forget([f"once/{period - 3}/line", f"once/{period - 3}/result"])

    def step_latch(self, rng: random.Random) -> None:
        period = self.period()
        latch = Latch(self.store, f"latch/{period}", LATCHED)
        if rng.random() < 0.5:
            self.journal.write("B", "latch", period)
            latch.count_down()
        else:
            with suppress(StoreTimeoutError):
                latch.wait(rng.uniform(0, 0.2))
                self.journal.write("A", "latch", period)
        self.forget([f"latch/{period - 3}/counted", f"latch/{period - 3}/open"])

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            if self.store.check([key]):
                self.store.delete_key(key)

    def step_row(self, rng: random.Random) -> None:
        row = StoreBarrier(self.store, "row", rank=self.slot, world_size=self.size, timeout=rng.uniform(0, 0.5))
        number = row.sequence
        self.journal.write("B", "row", self.slot, number)
        with suppress(StoreTimeoutError):
            row.execute_barrier()
            self.journal.write("A", "row", self.slot, number)

    # -- forks -----------------------------------------------------------------------------------------------------

    def step_fork(self, rng: random.Random) -> None:
        """Let a child use the store, beside whatever the other threads are doing."""
        with self.undisturbed():
            kinds = rng.choices(list(CHILD), list(CHILD.values()), k=rng.randint(1, 3))
            child = self.fork(lambda: [self.do(kind, rng) for kind in ["step_add", *kinds]])
            self.reap(child, rng)

    def step_double(self, rng: random.Random) -> None:
        """Meet a child twice."""
        with self.undisturbed():
            name = f"double/{self.slot}/{self.number()}"
            fails, parent_waits = rng.random() < 0.5, rng.uniform(0.2, 1)

            def meet(rank: int) -> None:
                with suppress(StoreTimeoutError, BrokenBarrierError):
                    both = DoubleBarrier(self.store, name, 2, rank, parent_waits, fail_fast=fails)
                    with both:
                        self.store.check(["sum"])

            child = self.fork(lambda: meet(1))
        try:
            if rng.random() < 0.9:
                meet(0)
        finally:
            with self.undisturbed():
                self.reap(child, rng)
                for key in self.store.list_keys(name + "/"):
                    self.store.delete_key(key)

    def fork(self, act: Callable[[], object]) -> int:
        pid = os.fork()
        if pid:
            self.counts["forks"] += 1
            return pid
        try:
            self.allowed, self.item = 0, None
            self.main = threading.current_thread()
            self.sections.renew()
            self.rng.seed(os.getpid())
            faulthandler.dump_traceback_later(HANG_S, exit=True, file=self.hung)
            act()
        except BaseException:
            self.bad(f"a child of worker {self.slot} raised:\n{traceback.format_exc()}")
        finally:
            os._exit(0)

    def reap(self, child: int, rng: random.Random) -> None:
        dies_at = time.monotonic() + rng.uniform(0, 0.03) if rng.random() < 0.3 else float("inf")
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > dies_at:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                self.counts["killed children"] += 1
                return
            time.sleep(0.003)


MAIN = {
    "step_own": 14, "step_trail": 8, "step_add": 8, "step_pair": 6, "step_scratch": 14, "step_long": 0.6,
    "step_push": 3, "step_pop": 4, "step_look": 5, "step_compact": 0.12, "step_visit": 1.5,
    "step_lock": 8, "step_places": 5, "step_both": 5, "step_office": 4, "step_group": 3, "step_put": 5, "step_take": 9,
    "step_once": 2, "step_latch": 2, "step_row": 6, "step_fork": 4, "step_double": 1, "step_transact": 5,
    "step_watch": 2, "step_flag": 4, "step_news": 3, "step_circle": 3, "step_bucket": 3, "step_shards": 3,
    "step_created": 3,
}  # fmt: skip
BESIDE = {
    "step_add": 20, "step_pair": 10, "step_scratch": 30, "step_push": 3, "step_pop": 4, "step_look": 3,
    "step_lock": 5, "step_put": 3, "step_take": 5, "step_fork": 2, "step_transact": 3, "step_flag": 2,
}  # fmt: skip
CHILD = {
    "step_add": 5, "step_pair": 2, "step_scratch": 5, "step_push": 2, "step_pop": 2, "step_lock": 4, "step_places": 2,
    "step_put": 2, "step_take": 3, "step_office": 2, "step_group": 2, "step_compact": 0.05, "step_visit": 0.5,
    "step_transact": 2, "step_watch": 1, "step_flag": 1, "step_news": 1, "step_circle": 1, "step_bucket": 1,
    "step_shards": 2, "step_created": 1,
}  # fmt: skip


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ warns of every fork beside threads
    faulthandler.enable()
    with resend_lost_signals():
        Worker(json.loads(sys.argv[1])).work()
