"""Keys that stay: a user of a recipe that is killed at any operation leaves only the keys that the page names.

Here a process is killed by closing its store's handle: the others are told that its session is over, and what it would
do next it can't do.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from contract.worker import Workers, start
from support.internals import group_module, line_module
from support.places import HANG_S, Place, start_thread, until
from support.recipes import RECIPES, RESULTS, use as use_alone

from fscoord import FileStore, recipes
from fscoord.errors import AcquireCancelledError, BrokenBarrierError, FscoordError, StoreClosedError
from fscoord.recipes import (
    Condition,
    CyclicBarrier,
    Election,
    Ephemeral,
    Event,
    Lock,
    Membership,
    Partitioner,
    PriorityQueue,
    Queue,
    RateLimiter,
    ReadWriteLock,
    Semaphore,
    force_release,
    once,
)
from fscoord.store import Store
from fscoord.stores.prefix import PrefixStore


class Mortal(PrefixStore):
    """A view whose process is killed at its operation number `at`.

    Args:
        path: of the store.
        at: which operation it is killed at; 0 is none.
        moment: "before" it is done, "after" it, or "late": it is done, but ``meanwhile()`` comes before it.
        meanwhile: is called right before the process dies.
        asleep: is called when it waits, by what it waits for.
    """

    in_one_step = False

    def __init__(self, path: Path, at: int, moment: str) -> None:
        self.handle = FileStore(path, timeout=HANG_S)
        super().__init__("r", self.handle)
        self.capabilities = self.capabilities._replace(transacts=self.in_one_step)
        self.left, self._moment = at, moment
        self.meanwhile: Callable[[], object] = lambda: None
        self.asleep: Callable[[], object] = lambda: None
        self.is_dead = False

    def _step(self, name: str, *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        do = getattr(super(), name)
        if self.left != 0:
            return do(*arguments, **named)
        if self._moment == "after":
            do(*arguments, **named)
        self.meanwhile()
        if self._moment == "late":
            do(*arguments, **named)
        self.kill()
        raise StoreClosedError("killed")

    def _transact(self, *arguments: Any) -> bool:
        return self._step("_transact", *arguments)

    def kill(self) -> None:
        self.is_dead = True
        self.handle.close()

    def get(self, key: Any) -> bytes:
        return self._step("get", key)

    def set(self, key: Any, value: Any) -> None:
        self._step("set", key, value)

    def add(self, key: Any, amount: Any) -> int:
        return self._step("add", key, amount)

    def check(self, keys: Any) -> bool:
        return self._step("check", keys)

    def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
        return self._step("compare_set", key, expected, desired)

    def delete_key(self, key: Any, *, expected: Any = None) -> bool:
        return self._step("delete_key", key, expected=expected)

    def create(self, key: Any, value: Any) -> bool:
        return self._step("create", key, value)

    def multi_set(self, keys: Any, values: Any) -> None:
        self._step("multi_set", keys, values)

    def list_keys(self, prefix: Any = "") -> list[str]:
        return self._step("list_keys", prefix)

    def dead_sessions(self, numbers: Any) -> list[int]:
        return self._step("dead_sessions", list(numbers))

    def wait_sessions(self, keys: Any, numbers: Any, timeout: Any = None) -> list[int]:
        self.asleep()
        return self._step("wait_sessions", keys, numbers, timeout)


@pytest.fixture
def path(memory: Path) -> Path:
    return memory / "store"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with FileStore(path, timeout=HANG_S) as base:
        yield PrefixStore("r", base)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that should have woken a waiter is dead."""
    monkeypatch.setattr(line_module, "SLOW_LOOK_S", 0.01)


@pytest.fixture(params=["before", "after", "late"])
def moment(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def kill_at_each_operation(
    path: Path, moment: str, act: Callable[[Mortal], object], check: Callable[[], object]
) -> int:
    """Have `act` killed at its first operation, then at its second, until it has no more; return how many it had."""
    for at in range(1, 1000):
        view = Mortal(path, at, moment)
        try:
            act(view)
        except FscoordError:
            assert view.is_dead
        finally:
            is_dead = view.is_dead
            view.kill()
        check()
        if not is_dead:
            return at - 1
    raise AssertionError("it never came to an end")


# Lines


LINES: dict[str, Callable[[Store], Any]] = {
    "Lock": lambda store: Lock(store, "l"),
    "Semaphore": lambda store: Semaphore(store, "l", 1),
    "writer": lambda store: ReadWriteLock(store, "l").writer,
    "Election": lambda store: Election(store, "l", "data"),
}


ONE_BY_ONE, IN_ONE_STEP = False, True
STEPS = [
    ("Lock", ONE_BY_ONE), ("Lock", IN_ONE_STEP), ("Semaphore", ONE_BY_ONE), ("writer", IN_ONE_STEP),
    ("Election", ONE_BY_ONE), ("Election", IN_ONE_STEP),
]  # fmt: skip
"""How a process changes keys. All kinds have the code of their lines in common; an election has a key of its own."""


@pytest.fixture(params=STEPS, ids=lambda param: f"{param[0]} {'in one step' if param[1] else 'one by one'}")
def case(request: pytest.FixtureRequest) -> tuple[str, bool]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def kind(case: tuple[str, bool]) -> str:
    return case[0]


@pytest.fixture
def least(case: tuple[str, bool], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many operations of the process are tried at least. The others change keys in one step in either case."""
    monkeypatch.setattr(Mortal, "in_one_step", case[1])
    return 4 if case[1] else 6


def use(store: Store, kind: str) -> None:
    hold = LINES[kind](store)
    assert hold.acquire(timeout=HANG_S)
    hold.release()


@pytest.fixture
def check_line(store: Store, kind: str) -> Callable[[], None]:
    """The next user of the line removes the entries of the dead."""

    def check() -> None:
        use(store, kind)
        keys = [re.sub(r"term/\d+", "term/N", key) for key in store.list_keys()]
        assert keys == (["l/line", "l/term/N"] if kind == "Election" else ["l/line"])
        assert store.get("l/line").count(b" ") == 1, "no wake-up is under way"

    return check


class Another:
    """A thread with a handle of its own that waits in line, and comes and goes."""

    def __init__(self, path: Path, kind: str, look: Store) -> None:
        self._look = Lock(look, "l")
        before = len(self._look.waiters())
        self._thread = start_thread(self._run, path, kind)
        until(lambda: len(self._look.waiters()) > before or not self._thread.is_alive())

    @staticmethod
    def _run(path: Path, kind: str) -> None:
        with FileStore(path, timeout=HANG_S) as base:
            use(PrefixStore("r", base), kind)

    def pass_by(self) -> None:
        """If it has been served, wait until it has gone."""
        if not self._look.waiters():
            self._thread.join()

    def join(self) -> None:
        self._thread.join()


def test_keys_of_a_line_whose_user_is_killed_are_those_documented(
    path: Path, kind: str, moment: str, check_line: Callable[[], None], least: int
) -> None:
    assert kill_at_each_operation(path, moment, lambda view: use(view, kind), check_line) > 2


def test_keys_of_a_line_whose_holder_is_killed_serving_the_next_are_documented(
    path: Path, store: Store, kind: str, moment: str, check_line: Callable[[], None], least: int
) -> None:
    def act(view: Mortal) -> None:
        hold = LINES[kind](view)
        hold.acquire()
        others.append(Another(path, kind, store))
        view.meanwhile = others[-1].pass_by
        hold.release()

    def check() -> None:
        while others:
            others.pop().join()
        check_line()

    others: list[Another] = []
    assert kill_at_each_operation(path, moment, act, check) >= least


def test_keys_of_a_line_whose_waiter_is_killed_are_those_documented(
    path: Path, store: Store, kind: str, moment: str, check_line: Callable[[], None], least: int
) -> None:
    def act(view: Mortal) -> None:
        first = LINES[kind](store)
        assert first.acquire()

        def let_go() -> None:
            with suppress(RuntimeError):  # it was released before
                first.release()

        view.asleep = view.meanwhile = let_go
        try:
            use(view, kind)
        finally:
            let_go()

    assert kill_at_each_operation(path, moment, act, check_line) >= least


def test_keys_of_a_line_whose_cancelled_waiter_is_killed_are_documented(
    path: Path, store: Store, kind: str, moment: str, check_line: Callable[[], None], least: int
) -> None:
    def act(view: Mortal) -> None:
        first, hold = LINES[kind](store), LINES[kind](view)
        assert first.acquire()
        view.asleep = hold.cancel
        try:
            with suppress(AcquireCancelledError):
                assert not hold.acquire(timeout=HANG_S)
        finally:
            first.release()

    assert kill_at_each_operation(path, moment, act, check_line) >= least


def test_keys_of_a_line_are_documented_if_the_cleaner_of_a_dead_hold_is_killed(
    path: Path, store: Store, kind: str, moment: str, check_line: Callable[[], None], least: int
) -> None:
    def act(view: Mortal) -> None:
        with FileStore(path, timeout=HANG_S) as lost, FileStore(path, timeout=HANG_S) as away:
            holder, second = LINES[kind](PrefixStore("r", lost)), LINES[kind](PrefixStore("r", away))
            assert second.acquire()
            thread = start_thread(holder.acquire)  # so that its wake key is there
            until(second.waiters)
            second.release()
            thread.join()
            lost.close()
            use(view, kind)

    assert kill_at_each_operation(path, moment, act, check_line) >= least


def test_keys_of_a_line_whose_breaker_of_a_hold_is_killed_are_documented(
    path: Path, store: Store, kind: str, moment: str, check_line: Callable[[], None], least: int
) -> None:
    def act(view: Mortal) -> None:
        hold = LINES[kind](store)
        assert hold.acquire()
        others.append(Another(path, kind, store))
        view.meanwhile = others[-1].pass_by
        try:
            force_release(view, "l", hold.token)
        finally:
            try:
                hold.release()
            except FscoordError:
                pass

    def check() -> None:
        while others:
            others.pop().join()
        check_line()

    others: list[Another] = []
    assert kill_at_each_operation(path, moment, act, check) >= min(least, 2)


# Others


def test_keys_of_once_whose_caller_is_killed_are_those_documented(path: Path, store: Store, moment: str) -> None:
    names = iter(map(str, range(1000)))
    name = ""

    def act(view: Mortal) -> None:
        nonlocal name
        name = next(names)
        once(view, name, lambda: b"done")

    def check() -> None:
        assert once(store, name, lambda: b"done") == b"done"
        use(store, "Lock")
        assert store.list_keys(f"{name}/") == [f"{name}/line", f"{name}/result"]

    assert kill_at_each_operation(path, moment, act, check) > 5


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"Queue", "PriorityQueue", "DoubleBarrier"}))
def test_keys_of_a_recipe_whose_users_are_killed_are_those_documented(
    path: Path, store: Store, moment: str, name: str
) -> None:
    """Not of a queue, in which items stay, see below, nor of a name that can be used once."""

    def check() -> None:
        use_alone(name, store, "NAME")
        found = {re.sub(r"/(term|changed)/\d+$", r"/\1/N", key) for key in store.list_keys()}
        assert found <= keys_that_stay()[name]

    writes = 1 if name == "RankZeroFirst" else 2  # it writes the outcome only
    assert kill_at_each_operation(path, moment, lambda view: use_alone(name, view, "NAME"), check) >= writes


@pytest.mark.parametrize("kind_of_queue", [Queue, PriorityQueue])
@pytest.mark.parametrize("in_one_step", [False, True])
@pytest.mark.parametrize("way", ["ack", "release", "batch"])
def test_keys_of_a_queue_whose_users_are_killed_are_those_documented(
    path: Path,
    store: Store,
    moment: str,
    kind_of_queue: type[Queue],
    way: str,
    in_one_step: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Mortal, "in_one_step", in_one_step)

    def act(view: Mortal) -> None:
        queue = kind_of_queue(view, "q")
        if way == "batch":
            queue.put_all("abc")
            queue.ack_all(queue.take_all(3, block=False))
        else:
            queue.put("a")
            getattr(queue.take(block=False), way)()

    def check() -> None:
        queue = kind_of_queue(store, "q")
        queue.put("b")
        while len(queue) or queue.taken():
            queue.take().ack()
        assert set(store.list_keys()) <= {"q/number", "q/returns", "q/bell", "q/removed", "q/ended"}

    assert kill_at_each_operation(path, moment, act, check) > 5


def test_keys_of_a_group_whose_members_are_killed_are_those_documented(
    path: Path, store: Store, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "KEPT", 4)

    def act(view: Mortal) -> None:
        with Membership(view, "g", "data") as group:
            group.update("other")
            group.members()

    def check() -> None:
        for _ in range(4):
            with Membership(store, "g") as group:
                assert len(group.members()) == 1
        keys = [key for key in store.list_keys() if not key.startswith("g/changed/")]
        assert keys == ["g/changes", "g/joined"]
        assert len(store.list_keys("g/changed/")) <= 2 * group_module.KEPT

    assert kill_at_each_operation(path, moment, act, check) > 5


def test_keys_of_a_partitioner_whose_members_are_killed_are_those_documented(
    path: Path, store: Store, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "KEPT", 4)

    def act(view: Mortal) -> None:
        with Partitioner(view, "p", 3) as group:
            assert sorted(group.partitions) == [0, 1, 2]
            group.rebalance()

    def check() -> None:
        for _ in range(4):
            with Partitioner(store, "p", 3) as group:
                assert sorted(group.partitions) == [0, 1, 2], "the dead hold nothing"
                assert min(group.partitions.values()) > tokens[-1], "tokens rise"
                tokens.append(max(group.partitions.values()))
        assert [key for key in store.list_keys() if not key.startswith("p/changed/")] == ["p/shares"]
        assert len(store.list_keys("p/changed/")) <= 2 * group_module.KEPT

    tokens = [0]
    assert kill_at_each_operation(path, moment, act, check) > 5


# Processes that use a recipe together, of which one is killed


def beside_an_event(store: Store) -> Iterator[Event]:
    event = Event(store, "NAME")
    event.clear()
    with start_thread(event.wait, HANG_S) as waiter:
        yield event
        event.set()
    assert waiter.result is True


def beside_a_condition(store: Store) -> Iterator[Condition]:
    condition = Condition(store, "NAME")

    def wait() -> bool:
        with condition:
            return condition.wait(HANG_S)

    with start_thread(wait) as waiter:
        until(condition._line.entries)
        yield condition
        with Condition(store, "NAME") as again:
            again.notify()
    assert waiter.result is True


def beside_a_cyclic_barrier(store: Store) -> Iterator[CyclicBarrier]:
    barrier = CyclicBarrier(store, "NAME", 2, timeout=HANG_S)

    def wait() -> int | str:
        try:
            return barrier.wait()
        except BrokenBarrierError as error:
            return str(error)

    with start_thread(wait) as waiter:
        until(lambda: barrier.n_waiting() == 1)
        yield barrier
        barrier.reset()
    assert waiter.result == 0 or "is broken" in str(waiter.result)
    with start_thread(wait) as other:
        after = wait()
    assert {after, other.result} == {0, 1}, "the next round is as the first"


def beside_a_rate_limiter(store: Store) -> Iterator[RateLimiter]:
    """A killed process loses the two tokens that it takes, and not the third, and its turn."""
    for key in store.list_keys("NAME/"):
        store.delete_key(key)
    limiter = RateLimiter(store, "NAME", 1, 3600, 3)
    yield limiter
    limiter.acquire(timeout=HANG_S)


def beside_a_partitioner(store: Store) -> Iterator[Partitioner]:
    with Partitioner(store, "NAME", 3) as member:
        yield member
        member.rebalance()
        assert sorted(member.partitions) == [0, 1, 2], "the dead hold nothing"


def beside_an_ephemeral(store: Store) -> Iterator[Ephemeral]:
    key = Ephemeral(store, "NAME", "own")
    yield key
    assert key.get() is None
    assert key.create()
    assert key.get() == b"own"
    assert key.delete()


def notify(view: Store, _: object) -> None:
    with Condition(view, "NAME") as condition:
        condition.notify()


def take_two(view: Store, _: object) -> None:
    for _ in range(2):
        RateLimiter(view, "NAME", 1, 3600, 3).acquire()


def share(view: Store, survivor: Partitioner) -> None:
    with Partitioner(view, "NAME", 3) as member:
        survivor.rebalance()
        member.rebalance()
        assert member.partitions


def create(view: Store, survivor: Ephemeral) -> None:
    with Ephemeral(view, "NAME", "data"):
        assert survivor.get() == b"data"


TOGETHER: dict[str, tuple[Callable[[Store], Iterator[Any]], Callable[[Store, Any], object]]] = {
    "Event": (beside_an_event, lambda view, _: Event(view, "NAME").set()),
    "Condition": (beside_a_condition, notify),
    "CyclicBarrier": (beside_a_cyclic_barrier, lambda view, _: CyclicBarrier(view, "NAME", 2).wait(HANG_S)),
    "RateLimiter": (beside_a_rate_limiter, take_two),
    "Partitioner": (beside_a_partitioner, share),
    "Ephemeral": (beside_an_ephemeral, create),
}
"""By recipe: a process that survives, which yields its object while another process acts; and what that process does
until it is killed."""


@pytest.mark.parametrize("name", TOGETHER)
def test_survivor_of_a_process_that_is_killed_at_any_operation_goes_on(
    path: Path, store: Store, moment: str, name: str
) -> None:
    beside, act_beside = TOGETHER[name]
    survivors: list[Iterator[Any]] = []

    def act(view: Mortal) -> None:
        survivors.append(beside(store))
        act_beside(view, next(survivors[-1]))

    def check() -> None:
        assert next(survivors.pop(), None) is None
        found = {re.sub(r"/changed/\d+$", "/changed/N", key) for key in store.list_keys()}
        assert found <= keys_that_stay()[name]

    assert kill_at_each_operation(path, moment, act, check) >= 2


# The page, and processes that are killed in earnest

DOCUMENTED = Path(__file__).parent.parent.parent / "docs" / "how-to" / "recipes.md"


def keys_that_stay() -> dict[str, set[str]]:
    """The keys that stay according to the page, by recipe."""
    page = DOCUMENTED.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| .*?\|$", page.partition("## Keys")[2], re.MULTILINE)
    return {
        recipe: set(re.findall(r"`(NAME.*?)`", keys)) for names, keys in rows for recipe in re.findall(r"\w+", names)
    }


def test_keys_that_stay_are_documented_for_each_recipe() -> None:
    assert set(keys_that_stay()) == set(recipes.__all__) - RESULTS - {"force_release"}


def test_keys_after_a_history_with_kills_are_those_documented(
    tmp_path: Path, rng: random.Random, scale: Callable[[int], int]
) -> None:
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    for _ in range(scale(3)):
        store.delete_key("go")
        with Workers(place.spec(), "use_everything", [[]] * 4) as workers:
            start(store, 4)
            for process in workers.processes:
                for _ in range(rng.randint(1, 9)):
                    store.queue_pop("rounds")
                assert process.poll() is None, process.communicate()[1]
                process.kill()
    use_each_once_more(store)
    found: dict[str, set[str]] = {}
    for key in set(store.list_keys()) - {"go"}:
        recipe = key.partition("/")[0]
        found.setdefault(recipe, set()).add(re.sub(r"/(term|changed)/\d+$", r"/\1/N", key.replace(recipe, "NAME", 1)))
    documented = keys_that_stay()
    assert found == {recipe: documented[recipe] for recipe in found}
    assert len(found) == 7
    assert len(store.list_keys("Election/term/")) == 1
    assert len(store.list_keys("Membership/changed/")) <= 2 * group_module.KEPT
    place.close()


def use_each_once_more(store: Store) -> None:
    readers = ReadWriteLock(store, "ReadWriteLock")
    assert once(store, "once", lambda: b"done") == b"done"
    turn = Lock(store, "once")
    holds = (Lock(store, "Lock"), Semaphore(store, "Semaphore", 2), Election(store, "Election"), readers.writer, turn)
    for hold in holds:
        assert hold.acquire(timeout=HANG_S)
        hold.release()
    queue = Queue(store, "Queue")
    queue.put("last")
    queue.take().release()
    while len(queue) or queue.taken():
        queue.take().ack()
    queue.put("last")
    queue.take().ack()
    with Membership(store, "Membership") as group:
        assert len(group.members()) == 1
