"""Linearizable on etcd, its process killed in the middle too; and nothing that was acknowledged is lost."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from linear import models, operations
from linear.checker import LINEARIZABLE, UNKNOWN, Call, check_each
from support.etcd_server import Server
from support.places import HANG_S, start_thread

from fscoord import EtcdStore
from fscoord.errors import QueueEmptyError, StoreUnavailableError

pytestmark = pytest.mark.etcd

VALUES, QUEUES = ["v1", "v2"], ["q1"]
WIDTH = 3


def model(key: str) -> tuple[Any, Any]:
    return (models.queue, ()) if key in QUEUES else (models.value, None)


class History:
    """The calls of several threads; a moment is a count of what has begun or ended."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Call]] = []
        self._moments = itertools.count(1)

    def do(self, store: EtcdStore, key: str, operation: tuple[Any, ...]) -> None:
        start = next(self._moments)
        end: float = math.inf
        result: Any = UNKNOWN
        try:
            result = operations.call(store, key, operation)
            end = next(self._moments)
        except StoreUnavailableError as error:
            if not error.maybe_applied:
                return
        except ValueError:  # it is no integer that was to be added to
            assert operation[0] == "add"
            return
        self.calls.append((key, Call(start, end, operation, result)))

    def work(self, store: EtcdStore, seed: int, count: int) -> None:
        rng = random.Random(seed)
        for number in range(count):
            key = rng.choice(VALUES + QUEUES)
            draw = operations.draw_queue if key in QUEUES else operations.draw_value
            self.do(store, key, draw(rng, number, seed))

    def judge(self) -> None:
        verdicts = check_each(self.calls, model)
        wrong = {
            key: [verdict, *sorted((call for name, call in self.calls if name == key), key=lambda call: call.start)]
            for key, verdict in verdicts.items()
            if verdict != LINEARIZABLE
        }
        assert not wrong, wrong


@pytest.fixture
def crew(server: Server) -> Iterator[Callable[[int], list[EtcdStore]]]:
    """Give `crew(turn)`: handles on one more prefix. Half of the times they are sessions."""
    opened: list[EtcdStore] = []

    def open_crew(turn: int) -> list[EtcdStore]:
        while opened:
            opened.pop().close()
        opened.extend(server.open(f"history{turn}") for _ in range(WIDTH))
        if turn % 2:
            for rank, store in enumerate(opened):
                store.announce_rank(rank)
        return opened

    yield open_crew
    while opened:
        opened.pop().close()


def test_histories_at_random_are_linearizable(
    crew: Callable[[int], list[EtcdStore]], rng: random.Random, scale: Callable[[int], int]
) -> None:
    for turn in range(scale(200)):
        history = History()
        threads = [start_thread(history.work, store, rng.randrange(2**32), 10) for store in crew(turn)]
        for thread in threads:
            thread.join()
        assert len(history.calls) > WIDTH
        history.judge()


def test_histories_are_linearizable_while_the_server_is_killed_and_restarted(
    own_server: Server, rng: random.Random, scale: Callable[[int], int]
) -> None:
    history, over = History(), threading.Event()

    def work(seed: int) -> None:
        with own_server.open("p", timeout=HANG_S) as store:
            for part in itertools.count():
                if over.is_set():
                    return
                history.work(store, seed + part, 5)

    threads = [start_thread(work, rng.randrange(2**32)) for _ in range(WIDTH)]
    try:
        for _ in range(scale(3)):
            enough = len(history.calls) + 30
            while len(history.calls) < enough:
                assert all(thread.is_alive() for thread in threads)
                over.wait(0.001)
            own_server.kill()
            own_server.start()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    history.judge()


def test_history_with_one_false_result_is_rejected(crew: Callable[[int], list[EtcdStore]]) -> None:
    history, store = History(), crew(-1)[0]
    for operation in (("set", b"1"), ("read",), ("add", 1), ("read",)):
        history.do(store, "v1", operation)
    history.judge()
    key, last = history.calls[-1]
    history.calls[-1] = (key, last._replace(result=b"1"))
    with pytest.raises(AssertionError):
        history.judge()


def test_acknowledged_writes_survive_a_kill_of_the_server_under_load(own_server: Server) -> None:
    """Each thread counts, sets and pushes, and notes what was acknowledged; what was not may have happened or not."""
    sure = [0] * WIDTH
    unsure = [0] * WIDTH
    pushed: list[list[bytes]] = [[] for _ in range(WIDTH)]
    over = threading.Event()

    def work(rank: int) -> None:
        with own_server.open("p", timeout=HANG_S) as store:
            for number in itertools.count():
                if over.is_set():
                    return
                try:
                    store.add(f"n{rank}", 1)
                    sure[rank] += 1
                except StoreUnavailableError as error:
                    unsure[rank] += error.maybe_applied
                value = b"%d.%d" % (rank, number)
                try:
                    store.queue_push("q", value)
                    pushed[rank].append(value)
                except StoreUnavailableError:
                    pass

    threads = [start_thread(work, rank) for rank in range(WIDTH)]
    try:
        for turn in range(1, 4):
            while min(sure) < 10 * turn:
                assert all(thread.is_alive() for thread in threads)
                over.wait(0.001)
            own_server.kill()
            own_server.start()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    with own_server.open("p", timeout=HANG_S) as store:
        for rank in range(WIDTH):
            assert sure[rank] <= int(store.get(f"n{rank}")) <= sure[rank] + unsure[rank]
        taken = []
        while True:
            try:
                taken.append(store.queue_pop("q", block=False))
            except QueueEmptyError:
                break
    assert len(set(taken)) == len(taken)
    for rank in range(WIDTH):
        mine = [value for value in taken if value.startswith(b"%d." % rank)]
        assert [value for value in mine if value in set(pushed[rank])] == pushed[rank]
        assert mine == sorted(mine, key=lambda value: int(value.partition(b".")[2]))
