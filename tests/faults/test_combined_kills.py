"""Leaders and followers are killed and stopped: no combined write is lost, repeated, or done after a refusal."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.combining import HeldLock, Thread, combiner_of, share, station_of, until
from support.faulty import faulty_system
from support.internals import log_of
from support.plain_reader import read_newest
from support.processes import Processes

from fscoord import FileStore, FscoordError, StoreUnavailableError
from fscoord._log.shared.combining import combiner
from fscoord._log.shared.combining.batch import Batch
from fscoord.inspect import verify

SECONDS, CREW = 3, 6
KILLS_MIN, DONE_MIN = 5, 50
LIMIT_S = 60


def said(directory: Path) -> list[list[str]]:
    """Return what the workers have said, as words. The last line of a worker that was killed may be cut short."""
    return [
        line.split()
        for path in directory.glob("said-*")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def judge(directory: Path, seed: int) -> Counter[str]:
    """Compare what the workers have said with the store. Return how often each was said."""
    path = str(directory / "log")
    with FileStore(path, timeout=LIMIT_S) as store:
        store.set("last", "1")
        tags = Counter(store.get("tags").decode().split() if store.check(["tags"]) else [])
        while store.queue_len("queue"):
            tags[store.queue_pop("queue").decode()] += 1
        total = int(store.get("n"))
    words = said(directory)
    begun = {tag for word, tag, *_ in words if word == "begun"}
    outcome = {tag: (word, " ".join(rest)) for word, tag, *rest in words if word != "begun"}
    assert not [tag for tag, count in tags.items() if count > 1], f"seed {seed}: done twice"
    assert tags.keys() <= begun
    sums = []
    for tag, (word, result) in outcome.items():
        is_add = int(tag.partition(".")[2]) % 3 == 0
        if word == "done" and is_add:
            sums.append(int(result))
        elif word == "done":
            assert tag in tags, f"seed {seed}: {tag} was acknowledged, and is lost"
        elif word == "not" and not is_add:
            assert tag not in tags, f"seed {seed}: {tag} was refused, and is there: {result}"
    assert len(set(sums)) == len(sums), f"seed {seed}: two adds have one sum"
    adds = [tag for tag in begun if int(tag.partition(".")[2]) % 3 == 0]
    refused = [tag for tag in adds if outcome.get(tag, ("", ""))[0] == "not"]
    assert len(sums) <= total <= len(adds) - len(refused), f"seed {seed}"
    assert verify(path).verdict == "sound"
    return Counter(word for word, _ in outcome.values())


def test_writes_are_done_once_or_never_while_writers_are_killed_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: Callable[[int], int]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw, names = random.Random(seed), itertools.count()
    share(str(tmp_path), monkeypatch)
    (tmp_path / "node").mkdir(exist_ok=True)
    kills = stops = 0
    with Processes("combining_worker") as processes:

        def start() -> subprocess.Popen[str]:
            return processes.start_role("write", str(tmp_path), f"w{next(names)}", draw.randrange(1 << 32))

        crew = [start() for _ in range(CREW)]
        until(lambda: len(said(tmp_path)) > 10 * CREW)
        stopped: list[tuple[float, subprocess.Popen[str]]] = []
        end = time.monotonic() + scale(SECONDS)

        def is_enough() -> bool:
            return kills > KILLS_MIN and sum(word == "done" for word, *_ in said(tmp_path)) > DONE_MIN

        # On a machine with much other work, processes that are killed as soon as they have started get little done.
        while (now := time.monotonic()) < end or (not is_enough() and now < end + LIMIT_S):
            for when, process in [each for each in stopped if each[0] < now]:
                stopped.remove((when, process))
                process.send_signal(signal.SIGCONT)
            place = draw.randrange(CREW)
            if draw.random() < 0.4:
                crew[place].kill()
                stopped = [each for each in stopped if each[1] is not crew[place]]
                crew[place] = start()
                kills += 1
            else:
                crew[place].send_signal(signal.SIGSTOP)
                stopped.append((now + draw.choice([0.02, 0.7]), crew[place]))
                stops += 1
            time.sleep(draw.uniform(0.05, 0.25))
        for process in crew:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
    counts = judge(tmp_path, seed)
    print(f"{kills} kills, {stops} stops, {dict(counts)}")
    assert counts["done"] > DONE_MIN
    assert kills > KILLS_MIN


# Killed at every call


def lead_until(path: str, number: int, count: int, ready: int, go: int, compact_bytes: int | None) -> None:
    """In a child: lead a batch with the requests of `count` others, and be killed before call `number` of it."""
    left = [number]
    decide = Batch.decide

    def decide_when_all_wait(plan: Batch, session: int) -> Any:
        until(lambda: len(station_of(store).requests()) == count)
        return decide(plan, session)

    def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "listdir" and not arguments[0].endswith("/q"):
            return
        left[0] -= 1
        if left[0] == -1:
            if name == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) * 2 // 3])
            os.kill(os.getpid(), signal.SIGKILL)

    with faulty_system() as faulty:
        store = FileStore(path, timeout=LIMIT_S, compact_bytes=compact_bytes)
        store.set("registered", "1")
        Batch.decide = decide_when_all_wait  # type: ignore[method-assign]
        os.write(ready, b".")
        os.read(go, 1)
        with faulty.instead(does):
            store.add("n", 1)
        store.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("compact_bytes", "durable"), [(None, False), (1, False), (None, True)], ids=["", "compacts", "durable"]
)
def test_leader_that_is_killed_before_any_call_leaves_each_write_done_once(
    compact_bytes: int | None, durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that compacts first claims nothing before it has the lock of the new generation.

    An author that was left behind by the compaction, and was not told, may find no more than that it can't know.
    """
    share(str(tmp_path), monkeypatch)
    monkeypatch.setattr(combiner, "LOOK_S", 0.01)
    monkeypatch.setattr(combiner, "STALLED_S", LIMIT_S)  # the child may be held up, and waits for both requests
    path = str(tmp_path / "log")
    number, is_over, was_applied, doubts = 0, False, set(), 0

    def add(store: FileStore) -> list[int]:
        try:
            return [store.add("n", 1)]
        except StoreUnavailableError as error:
            assert error.maybe_applied
            assert compact_bytes
            assert "was compacted before" in str(error)
            return []

    first = FileStore(path, timeout=LIMIT_S, durable=durable)
    with first as one, FileStore(path, timeout=LIMIT_S) as two:
        for store in (one, two):
            store.set("registered", "1")
            combiner_of(store)._jitter = LIMIT_S  # likewise, when the child has the log's lock
        while not is_over:
            before = one.add("n", 0)
            heard, ready = os.pipe()
            go, begin = os.pipe()
            pid = os.fork()
            if not pid:
                try:
                    lead_until(path, number, 2, ready, go, compact_bytes)
                    os._exit(7)
                except BaseException:
                    os._exit(9)
            os.read(heard, 1)
            # The two begin once the child has the seat, or is dead. It claims nothing before both of them wait.
            state = station_of(one).seat_state()
            os.write(begin, b".")
            ended: list[int] = []

            def is_led(pid: int = pid, state: bytes = state, ended: list[int] = ended) -> bool:
                found, status = os.waitpid(pid, os.WNOHANG)
                ended += [status] * bool(found)
                return bool(ended) or station_of(one).seat_state() != state

            until(is_led)
            threads = [Thread(lambda store=store: add(store)) for store in (one, two)]
            sums = [total for thread in threads for total in thread.join()]
            doubts += 2 - len(sums)
            if not ended:
                ended.append(os.waitpid(pid, 0)[1])
            for each in (heard, ready, go, begin):
                os.close(each)
            is_over = os.waitstatus_to_exitcode(ended[0]) == 7
            assert is_over or os.waitstatus_to_exitcode(ended[0]) == -signal.SIGKILL, f"call {number}"
            after = one.add("n", 0)
            assert len(set(sums)) == len(sums), f"call {number}"
            assert max(sums, default=before) <= after <= before + 3, f"call {number}"
            assert len(sums) <= after - before, f"call {number}"
            was_applied.add(after - before)
            assert [store.get("n") for store in (one, two)] == [b"%d" % after] * 2
            assert station_of(one).requests() == [], f"call {number}"
            number += 1
    assert {2, 3} <= was_applied or durable  # there the leader's own record is complete before the others are begun
    assert was_applied == {2, 3} or compact_bytes
    assert number > 15
    assert doubts < number // 2
    written = [(writer, time) for *_, writer, time in read_newest(Path(path)).records]
    assert len(set(written)) == len(written)
    assert verify(path).verdict == "sound"


@pytest.mark.exhaustive
def test_follower_that_is_killed_before_any_call_has_written_once_or_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share(str(tmp_path), monkeypatch)
    monkeypatch.setattr(combiner, "STALLED_S", LIMIT_S)  # the child does not withdraw its request if this is held up
    path = str(tmp_path / "log")
    number, is_over, changes = 0, False, set()

    def follow(number: int) -> None:
        left = [number]

        def does(*_: Any) -> None:
            left[0] -= 1
            if left[0] == -1:
                os.kill(os.getpid(), signal.SIGKILL)

        with faulty_system() as faulty:
            store = FileStore(path, timeout=LIMIT_S)
            store.set("registered", "1")
            os.write(ready, b".")
            os.read(go, 1)
            with faulty.instead(does):
                store.add("n", 1)
            store.close()

    with FileStore(path, timeout=LIMIT_S) as leader:
        leader.add("n", 1)
        while not is_over:
            before = leader.add("n", 0)
            heard, ready = os.pipe()
            go, begin = os.pipe()
            pid = os.fork()
            if not pid:
                try:
                    follow(number)
                    os._exit(7)
                except BaseException:
                    os._exit(9)
            os.read(heard, 1)
            with HeldLock(path) as held:
                leading = Thread(lambda: leader.set("led", "1"))
                until(lambda: log_of(leader).handle.shared.leader)
                os.write(begin, b".")
                ended: list[int] = []

                def is_waiting(pid: int = pid, ended: list[int] = ended) -> bool:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    ended += [status] * bool(found)
                    return bool(ended) or bool(station_of(leader).requests())

                until(is_waiting)
                held.release()
                leading.join()
            if not ended:
                ended.append(os.waitpid(pid, 0)[1])
            for each in (heard, ready, go, begin):
                os.close(each)
            is_over = os.waitstatus_to_exitcode(ended[0]) == 7
            assert is_over or os.waitstatus_to_exitcode(ended[0]) == -signal.SIGKILL, f"call {number}"
            leader.set("swept", "1")
            assert station_of(leader).requests() == [], f"call {number}"
            changes.add(leader.add("n", 0) - before)
            number += 1
    assert changes == {0, 1}
    assert number > 3
    assert verify(path).verdict == "sound"


@pytest.mark.parametrize("phase", ["waiting", "holding"])
def test_leader_that_is_stopped_holds_nobody_up_but_by_the_lock_that_it_has(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others pass a leader that waits for the lock. They wait for a leader that has it, until their deadlines."""
    share(str(tmp_path), monkeypatch)
    monkeypatch.setattr(combiner, "STALLED_S", 0.3)
    monkeypatch.setattr(combiner, "SILENT_S", 0.3)
    path = str(tmp_path / "log")
    with FileStore(path, timeout=LIMIT_S) as store, FileStore(path, timeout=LIMIT_S) as other:
        store.set("registered", "1")
        other.set("registered", "1")
        before = station_of(store).seat_state()
        with HeldLock(path) as held:
            pid = os.fork()
            if not pid:
                try:
                    child = FileStore(path, timeout=LIMIT_S)
                    if phase == "holding":
                        Batch.decide = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]
                    child.add("n", 1)
                finally:
                    os._exit(0)
            try:
                until(lambda: station_of(store).seat_state() != before)
                if phase == "waiting":
                    os.kill(pid, signal.SIGSTOP)
                    os.waitpid(pid, os.WUNTRACED)  # otherwise the kernel may still grant it the lock
                held.release()
                if phase == "holding":
                    os.waitpid(pid, os.WUNTRACED)
                    store.set_timeout(1.0)
                    with pytest.raises(FscoordError, match="lock was not released") as caught:
                        store.add("n", 1)
                    assert not getattr(caught.value, "maybe_applied", True)
                else:
                    assert [Thread(lambda each=each: each.add("n", 1)).join() for each in (store, other)] == [1, 2]
                    assert combiner_of(store)._stalled
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        store.set_timeout(LIMIT_S)
        assert store.add("n", 1) == (1 if phase == "holding" else 3)
    assert read_newest(Path(path)).ends == "whole"
