"""Several threads on one store at once: whatever they do happens once, in some order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

from fscoord.store import Store
from fscoord.testing.contract.base import ContractTests
from fscoord.testing.contract.place import Place, start_thread

__all__ = ["Threads"]

THREADS = 4
TIMES = 25


def at_once(place: Place, work: Callable[[Store, int], Any]) -> list[Any]:
    """Call ``work(handle, number)`` in some threads, each with a handle of its own, and return their results."""
    threads = [start_thread(work, place.open(), number) for number in range(THREADS)]
    return [thread.join() for thread in threads]


class Threads(ContractTests):
    """Nothing is lost, and nothing happens twice."""

    def test_every_sum_is_given_to_one_thread(self, place: Place, store: Store) -> None:
        results = at_once(place, lambda handle, _: [handle.add("n", 1) for _ in range(TIMES)])
        assert sorted(chain.from_iterable(results)) == list(range(1, THREADS * TIMES + 1))
        assert store.get("n") == b"%d" % (THREADS * TIMES)

    def test_threads_on_one_handle_lose_nothing_either(self, place: Place, store: Store) -> None:
        results = at_once(place, lambda _, __: [store.add("n", 1) for _ in range(TIMES)])
        assert sorted(chain.from_iterable(results)) == list(range(1, THREADS * TIMES + 1))

    def test_of_those_who_create_a_key_one_wins_and_all_know_it(self, place: Place, store: Store) -> None:
        results = at_once(place, lambda handle, number: handle.compare_set("k", "", str(number)))
        assert set(results) == {store.get("k")}

    def test_compare_set_counts_as_well_as_add(self, place: Place, store: Store) -> None:
        store.set("n", "0")

        def count(handle: Store, number: int) -> None:
            for i in range(TIMES):
                current, mine = handle.get("n"), b" %d.%d" % (number, i)
                for _ in range(THREADS * TIMES):  # each refusal means that another thread has counted
                    current = handle.compare_set("n", current, wanted(current) + mine)
                    if current.endswith(mine):
                        break

        def wanted(current: bytes) -> bytes:
            return b"%d" % (int(current.split()[0]) + 1)

        at_once(place, count)
        assert store.get("n").split()[0] == b"%d" % (THREADS * TIMES)

    def test_appends_lose_nothing_and_keep_each_thread_in_its_order(self, place: Place, store: Store) -> None:
        def write(handle: Store, number: int) -> None:
            for i in range(TIMES):
                handle.append("text", f"{number}.{i} ")

        at_once(place, write)
        tokens = store.get("text").decode().split()
        for number in range(THREADS):
            mine = [token for token in tokens if token.startswith(f"{number}.")]
            assert mine == [f"{number}.{i}" for i in range(TIMES)]
        assert len(tokens) == THREADS * TIMES

    def test_each_item_of_a_queue_is_taken_once(self, place: Place, store: Store) -> None:
        def move(handle: Store, number: int) -> list[bytes]:
            taken = []
            for i in range(TIMES):
                handle.queue_push("q", f"{number}.{i}")
                taken.append(handle.queue_pop("q"))
            return taken

        taken = Counter(chain.from_iterable(at_once(place, move)))
        assert taken == Counter(b"%d.%d" % (number, i) for number in range(THREADS) for i in range(TIMES))
        assert store.queue_len("q") == 0

    def test_multi_set_is_seen_whole_or_not_at_all(self, place: Place) -> None:
        def pairs(handle: Store, number: int) -> list[list[bytes]]:
            seen = []
            for i in range(TIMES):
                handle.multi_set(["a", "b"], [f"{number}.{i}"] * 2)
                seen.append(handle.multi_get(["a", "b"]))
            return seen

        assert all(first == second for first, second in chain.from_iterable(at_once(place, pairs)))

    def test_threads_meet_at_barriers(self, place: Place) -> None:
        def meet(handle: Store, _: int) -> list[int]:
            here = []
            for i in range(3):
                handle.add(f"here{i}", 1)
                handle.barrier(f"barrier{i}", THREADS)
                here.append(int(handle.get(f"here{i}")))
            return here

        assert at_once(place, meet) == [[THREADS] * 3] * THREADS
