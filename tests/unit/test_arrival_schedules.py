"""Arrivals in slots on every schedule of a few ranks: no barrier ends early, and no rank sleeps when all have arrived.

The ranks run the code of `Arrival` itself. Each system call is a step, after which any other rank may go on, crash, or
be restarted. A hold of the log's lock has two steps, because nobody else can append between them: the read of the log,
and the append with the unlock. The bell is abstract here: a ring wakes each rank that is armed (`test_bell_schedules`).
The invariants, and a model with which this test agrees, are those of the note from which the protocol was built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from fscoord._log.format import record
from fscoord._log.log import SEVERAL
from fscoord._runtime import system
from fscoord._waiting import rounds
from fscoord._waiting.rounds import ARRIVALS, COMPLETE
from fscoord._waiting.wait import NOT_YET, ArrivalRequest
from fscoord.stores.file import arrival
from fscoord.stores.file.arrival import Arrival
from fscoord.stores.file.arrival_slots import HASH, SLOT, ArrivalSlots, Begun
from fscoord.stores.file.operations import Decisions
from fscoord.stores.file.replay import KeyValueState

pytestmark = [pytest.mark.exhaustive, pytest.mark.once]

LIMIT_S = 100.0
LATE_S = 1.0
"""A time left at which a rank arrives in the log, too."""

# The slots of the barriers a and 40 are in one row, and those of the others elsewhere.
MEET, DELETE, DELETE_BOTH = "meet", "delete", "delete both"
READY, NAPPING, ASLEEP, DEAD = "ready", "napping", "asleep", "dead"
"""The phases of an actor. NAPPING: in the one sleep of `ArrivalSlots.meet`; ASLEEP: in a sleep of an `Arrival`."""

Step = tuple[str, bytes]

LONG = [pytest.mark.long, pytest.mark.timeout(3600)]


class Progress(NamedTuple):
    """The progress of one actor: its step and what its process knows, the calls since, and their results."""

    step: int = 0
    phase: str = READY
    position: int = 0
    known: tuple[tuple[int, bytes], ...] = ()
    arrival: tuple[tuple[str, Any], ...] = ()
    results: tuple[Any, ...] = ()
    crashes: int = 0


class State(NamedTuple):
    """The state of the world.

    `pending` has the ranks whose arrivals at a barrier count, and are not used up by its end. `used` has the ranks
    whose present calls were counted by an end.
    """

    records: tuple[tuple[tuple[int, bytes, bytes], ...], ...]
    slots: tuple[tuple[int, bytes], ...]
    holder: int
    armed: frozenset[tuple[int, bytes]]
    rung: frozenset[int]
    pending: frozenset[tuple[bytes, int]]
    used: frozenset[int]
    actors: tuple[Progress, ...]


class Pause(BaseException):
    """Raised by the call before which an actor loses the processor."""


class FalseEnd(AssertionError):
    """A barrier ends without the arrival of a rank."""


class World:
    """The slots, the log, its lock and the bell, which the actors share. It takes the place of the package's `os`.

    Args:
        programs: the steps of each actor. The number of an actor is its rank.
        size: the world size: the first so many actors take part.
        crashing: the actors that may crash once at any step.
        restarts: whether such an actor begins its step again, in a new process.
        polls: whether a sleep may end without a ring.
        in_log: the actors that arrive in the log, because they poll, and so watch no bell.
        shortly: whether the others call `ArrivalSlots.meet` before they make an `Arrival`.
    """

    fd = 3
    may_hang = arms_under_lock = False

    def __init__(
        self,
        programs: list[list[Step]],
        size: int,
        *,
        crashing: Iterable[int] = (),
        restarts: bool = False,
        polls: bool = False,
        in_log: Iterable[int] = (),
        shortly: bool = True,
    ) -> None:
        self.meets_shortly = shortly
        self.programs, self.size, self.in_log = programs, size, set(in_log)
        self.crashing, self.restarts, self.polls = set(crashing), restarts, polls

    def begin(self) -> State:
        nothing: frozenset[Any] = frozenset()
        return State((), (), -1, nothing, nothing, nothing, nothing, (Progress(),) * len(self.programs))

    # -- one step ------------------------------------------------------------------------------------------------------

    def next_states(self, state: State) -> tuple[list[tuple[str, State]], bool]:
        """Return the states after each possible step, and whether one of the steps needs no crash, restart or poll."""
        found: list[tuple[str, State]] = []
        can_go_on = False
        for number, progress in enumerate(state.actors):
            if progress.phase == DEAD:
                if self.restarts:
                    found.append((f"{number} restarts", self._with(state, number, Progress(progress.step, crashes=1))))
                continue
            if progress.step == len(self.programs[number]):
                continue
            if number in self.crashing and not progress.crashes:
                dead = Progress(progress.step, DEAD, crashes=1)
                crashed = state._replace(
                    holder=-1 if state.holder == number else state.holder,
                    armed=frozenset(each for each in state.armed if each[0] != number),
                    rung=state.rung - {number},
                    used=state.used - {number},
                )
                found.append((f"{number} crashes", self._with(crashed, number, dead)))
            sleeps = progress.phase in (NAPPING, ASLEEP)
            for is_poll in (False, True) if sleeps and self.polls else (False,):
                after = self.advance(state, number, is_poll=is_poll)
                if after is not None:
                    found.append((f"{number} polls" if is_poll else f"{number}: {self._done}", after))
                    can_go_on = can_go_on or not is_poll
        return found, can_go_on

    @staticmethod
    def _with(state: State, number: int, progress: Progress) -> State:
        return state._replace(actors=(*state.actors[:number], progress, *state.actors[number + 1 :]))

    def advance(self, state: State, number: int, *, is_poll: bool) -> State | None:
        """Return the state after the next call of actor `number`, or None if the actor can't go on."""
        progress = state.actors[number]
        if progress.phase == ASLEEP and not progress.results and not is_poll and number not in state.rung:
            return None
        self._now, self._number, self._past, self._step = state, number, progress.results, progress.step
        self._position, self._new, self._has_moved, self._is_poll = 0, list[Any](), False, is_poll
        self._naps = False
        after: Progress
        try:
            after = self._run(progress)
        except Pause:
            if not self._has_moved:
                return None
            phase = READY if progress.phase == NAPPING else progress.phase
            after = progress._replace(phase=NAPPING if self._naps else phase, results=(*progress.results, *self._new))
        if after.step > progress.step:
            self._now = self._now._replace(used=self._now.used - {number})
        return self._with(self._now, number, after)

    def _run(self, progress: Progress) -> Progress:
        """Run the present step of an actor from its beginning, or from its last sleep."""
        self._state, self._seen = KeyValueState(), 0
        self._apply_to(progress.position)
        kind, name = self.programs[self._number][progress.step]
        self._bell = SimpleNamespace(fd=self.fd, has_name=lambda: True, known_slots=dict(progress.known), slot_users={})
        log: Any = SimpleNamespace(
            handle=SimpleNamespace(
                bell=1,
                header=SimpleNamespace(run=1),
                root=SimpleNamespace(header=SimpleNamespace(log_id=b"log")),
            ),
            refresh=lambda _: self._read(),
            inspect=lambda answer: answer(),
            read_locked=None,  # no value of the schedules is spilled
            path="log",
        )
        notifier: Any = SimpleNamespace(
            open_bell=lambda: self._bell,
            bell_exists=lambda: True,
            take_spare=lambda: None if self._number in self.in_log else self._waiter(name),
            add_waiter=ignore,
            discard_waiter=ignore,
            keep_spare=ignore,
        )
        slots = ArrivalSlots(log, self._state, notifier)
        if kind == DELETE_BOTH:
            self._transact(b"", None, lambda *_: self._delete_both(slots, name))
        elif kind == DELETE:
            for key in (name + ARRIVALS, name + COMPLETE):
                self._transact(key, None, lambda key, _: self._delete(slots, key))
        elif not self._meet(log, slots, name, progress):
            return Progress(
                progress.step, ASLEEP, self._seen, self._known(), tuple(self._saved), crashes=progress.crashes
            )
        return Progress(progress.step + 1, READY, self._seen, self._known(), crashes=progress.crashes)

    def _known(self) -> tuple[tuple[int, bytes], ...]:
        return tuple(sorted(self._bell.known_slots.items()))

    def _delete(self, slots: ArrivalSlots, key: bytes) -> tuple[None, int, bytes]:
        slots.clear(key)
        return None, record.DELETE if self._state.has(key) else 0, b""

    def _delete_both(self, slots: ArrivalSlots, name: bytes) -> tuple[None, int, Any]:
        keys = [name + ARRIVALS, name + COMPLETE]
        for key in keys:
            slots.clear(key)
        return None, SEVERAL, [(record.DELETE, key, b"") for key in keys if self._state.has(key)]

    def _meet(self, log: Any, slots: ArrivalSlots, name: bytes, progress: Progress) -> bool:
        """Begin or go on with a barrier. Return False if the actor sleeps there."""
        token, done, self._armed_for = b"%d/%d " % (self._number, self.size), name + COMPLETE, b""
        found: Any
        is_new = progress.phase != ASLEEP
        met = self.meets_shortly and is_new and slots.meet(name, self._number, self.size, LIMIT_S)
        if met is True:
            return True
        begun, is_full = met or (None, False)
        request = ArrivalRequest(name + ARRIVALS, token, done, self.size, LIMIT_S, begun=begun)
        decide = Decisions(self._state, lambda _: b"", "log").decide
        call = Arrival(log, self._state, request, self._write, decide, slots)
        if is_full and call.decide(LIMIT_S) is None:
            return True
        if is_new:
            found = call.arrive(lambda: self._arm(done), self._waiter(name))
        else:
            for attribute, value in progress.arrival:
                setattr(call, attribute, value)
            if call._begun is not None:
                place, content, deletes, run = call._begun  # type: ignore[misc]
                call._begun = Begun(self._bell, place, content, deletes, self._state.values, run)
            self._armed_for = b""
            is_rung = self._wake()
            found = call.look(LIMIT_S, reads=True) if is_rung else NOT_YET
            if not is_rung:
                self._arm(done)
                found = call.look(LATE_S, reads=True)
        if found is NOT_YET and self._armed_for != done:
            self._arm(done)
            found = call.look(LIMIT_S, reads=True) if not self.arms_under_lock else found
        kept: dict[str, Any] = {key: value for key, value in vars(call).items() if isinstance(value, (int, bytes))}
        if call._begun is not None:
            kept["_begun"] = (call._begun.place, call._begun.content, call._begun.deletes, call._begun.run)
        self._saved = sorted(kept.items())
        if found is NOT_YET:
            return False
        assert found is None or self._state.has(done), f"rank {self._number} is left to settle {found!r}"
        return True

    def _waiter(self, name: bytes) -> Any:
        def nap(_: float) -> bool:
            self._naps = self._position >= len(self._past)
            return self._wake()

        bell = None if self._number in self.in_log else self._bell
        return SimpleNamespace(
            watcher=SimpleNamespace(bell=bell),
            arm=lambda _: self._arm(name + COMPLETE),
            sleep_once=nap,
            close=ignore,
        )

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _call(self, call: Callable[[], Any], what: str) -> Any:
        """Return the result of `call`: that of an earlier run, or of the one call that is made now."""
        if self._position < len(self._past):
            self._position += 1
            return self._past[self._position - 1]
        if self._has_moved:
            raise Pause
        found = call()
        self._has_moved, self._done = True, what
        self._new.append(found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pread(self, _: int, size: int, offset: int) -> bytes:
        def read() -> bytes:
            slots = dict(self._now.slots)
            return b"".join([slots.get(place, bytes(SLOT)) for place in range(offset, offset + size, SLOT)])

        found: bytes = self._call(read, "reads slots")
        return found

    def pwrite(self, _: int, data: bytes, offset: int) -> None:
        def write() -> None:
            slots = {**dict(self._now.slots), offset: data}
            self._now = self._now._replace(slots=tuple(sorted(slots.items())))
            if any(data):
                self._arrive(self._number)

        self._call(write, "writes a slot")

    def _read(self) -> None:
        self._apply_to(self._call(lambda: len(self._now.records), "looks at the log"))

    def _apply_to(self, end: int) -> None:
        for records in self._now.records[self._seen : end]:
            self._state.apply([(*each, 0, 0) for each in records])
        self._seen = end

    def _arm(self, done: bytes) -> None:
        def arm() -> None:
            armed = self._now.armed | {(self._number, done)}
            self._now = self._now._replace(armed=armed, rung=self._now.rung - {self._number})

        self._armed_for = done
        self._call(arm, "arms")

    def _wake(self) -> bool:
        def wake() -> bool:
            if self._number not in self._now.rung and not self._is_poll:
                raise Pause
            is_rung = self._number in self._now.rung
            armed = frozenset(each for each in self._now.armed if each[0] != self._number)
            self._now = self._now._replace(rung=self._now.rung - {self._number}, armed=armed)
            return is_rung

        return bool(self._call(wake, "wakes"))

    def _write(self, operation: Any, *given: Any) -> Any:
        result = self._transact(operation.key, operation, given[3])
        if result.is_last:

            def ring() -> None:
                rung = frozenset(number for number, key in self._now.armed if key == operation.done)
                armed = frozenset(each for each in self._now.armed if each[0] not in rung)
                self._now = self._now._replace(armed=armed, rung=self._now.rung | rung)

            self._call(ring, "rings")
        return result

    def _transact(self, key: bytes, operation: Any, decide: Callable[[bytes, Any], tuple[Any, int, Any]]) -> Any:
        def lock() -> int:
            if self._now.holder >= 0:
                raise Pause
            self._now = self._now._replace(holder=self._number)
            return len(self._now.records)

        self._apply_to(self._call(lock, "locks"))
        result, kind, value = decide(key, operation)

        def append() -> int:
            if kind:
                records = tuple(value) if kind == SEVERAL else ((kind, key, value),)
                self._judge(records)
                self._now = self._now._replace(records=(*self._now.records, records))
            self._now = self._now._replace(holder=-1)
            return len(self._now.records)

        self._apply_to(self._call(append, "appends and unlocks" if kind else "unlocks"))
        return result

    def _arrive(self, rank: int) -> None:
        _, name = self.programs[self._number][self._step]
        if rank not in self._now.used:
            self._now = self._now._replace(pending=self._now.pending | {(name, rank)})

    def _judge(self, records: tuple[tuple[int, bytes, bytes], ...]) -> None:
        """Check the records that are appended now, and what they do to the arrivals that count."""
        for kind, key, value in records:
            pairs = dict(record.decode_pairs(value)) if kind == record.MULTI_SET else {key: value}
            name = next(iter(pairs)).rpartition(b"/")[0]
            token, text = b"%d/%d " % (self._number, self.size), pairs.get(name + ARRIVALS, b"")
            before = b"" if kind == record.APPEND else bytes(self._state.values.get(name + ARRIVALS, b""))  # type: ignore[arg-type]
            if text.count(token) > before.count(token):
                self._arrive(self._number)
            elif kind == record.DELETE:
                self._now = self._now._replace(
                    pending=frozenset(
                        each for each in self._now.pending if each[0] != name or self._is_inside(each[1], name)
                    )
                )
            if name + COMPLETE in pairs and kind != record.DELETE:
                absent = [rank for rank in range(self.size) if (name, rank) not in self._now.pending]
                if absent:
                    raise FalseEnd(f"{name!r} ends without rank {absent}")
                inside = {rank for rank in range(self.size) if rank == self._number or self._is_inside(rank, name)}
                pending = frozenset(each for each in self._now.pending if each[0] != name)
                self._now = self._now._replace(pending=pending, used=self._now.used | inside)

    def _is_inside(self, rank: int, name: bytes) -> bool:
        progress = self._now.actors[rank]
        steps = self.programs[rank]
        is_there = progress.step < len(steps) and steps[progress.step] == (MEET, name)
        return is_there and (progress.phase == ASLEEP or (progress.phase != DEAD and bool(progress.results)))


def explore(world: World, monkeypatch: pytest.MonkeyPatch) -> int:
    """Try every schedule, and return the number of states."""
    begin = world.begin()
    ways: dict[State, tuple[State, str] | None] = {begin: None}
    todo = [begin]
    with monkeypatch.context() as patch:
        patch.setattr(system, "os", world)
        while todo:
            state = todo.pop()
            try:
                found, can_go_on = world.next_states(state)
                if not can_go_on:
                    check_rest(world, state)
            except AssertionError as error:
                raise AssertionError(f"{error}, on the schedule {schedule(ways, state)}") from error
            for step, after in found:
                if after not in ways:
                    ways[after] = (state, step)
                    todo.append(after)
    return len(ways)


def schedule(ways: dict[State, tuple[State, str] | None], state: State) -> str:
    steps = []
    while (way := ways[state]) is not None:
        state, step = way
        steps.append(step)
    return "; ".join(reversed(steps))


def check_rest(world: World, state: State) -> None:
    """Fail if a rank sleeps at a barrier where all have arrived, although no actor can go on without a poll."""
    for _ in range(4 if world.polls else 0):
        for number in range(len(state.actors)):
            if state.actors[number].phase in (NAPPING, ASLEEP):
                state = run_on(world, world.advance(state, number, is_poll=True) or state)
    for number, progress in enumerate(state.actors):
        if progress.phase in (NAPPING, ASLEEP):
            _, name = world.programs[number][progress.step]
            values = KeyValueState()
            for records in state.records:
                values.apply([(*each, 0, 0) for each in records])
            assert not values.has(name + COMPLETE), f"rank {number} sleeps at {name!r}, which has ended"
            arrived = {rank for each, rank in state.pending if each == name}
            has_all = arrived == set(range(world.size))
            assert world.may_hang or not has_all, f"rank {number} sleeps at {name!r}, where all have arrived"


def run_on(world: World, state: State) -> State:
    """Let the actors go on, without crashes and polls, until none can."""
    while True:
        for number, progress in enumerate(state.actors):
            after = None
            if progress.phase != DEAD and progress.step < len(world.programs[number]):
                after = world.advance(state, number, is_poll=False)
            if after is not None:
                state = after
                break
        else:
            return state


def ignore(*_: object, **__: object) -> None:
    pass


def meets(*names: bytes) -> list[Step]:
    return [(MEET, name) for name in names]


@pytest.mark.parametrize("shortly", [True, False])
@pytest.mark.parametrize(
    ("ranks", "names"), [(2, (b"a", b"40")), (2, (b"a", b"40", b"b")), (3, (b"a",))], ids=["2x2", "2x3", "3x1"]
)
def test_barriers_need_no_poll(
    monkeypatch: pytest.MonkeyPatch, ranks: int, names: tuple[bytes, ...], shortly: bool
) -> None:
    print(explore(World([meets(*names)] * ranks, ranks, shortly=shortly), monkeypatch), "states")


@pytest.mark.parametrize(
    ("ranks", "names"), [(2, (b"a", b"b")), pytest.param(3, (b"a",), marks=LONG)], ids=["2x2", "3x1"]
)
def test_polls_change_nothing(monkeypatch: pytest.MonkeyPatch, ranks: int, names: tuple[bytes, ...]) -> None:
    print(explore(World([meets(*names)] * ranks, ranks, polls=True), monkeypatch), "states")


@pytest.mark.parametrize("restarts", [False, pytest.param(True, marks=LONG)])
def test_ranks_may_crash_at_every_call(monkeypatch: pytest.MonkeyPatch, restarts: bool) -> None:
    world = World([meets(b"a", b"b")] * 2, 2, crashing=[0, 1], restarts=restarts, polls=True)
    print(explore(world, monkeypatch), "states")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_rank_of_three_may_crash_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    print(explore(World([meets(b"a")] * 3, 3, crashing=[0], polls=True), monkeypatch), "states")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("crashing", [(), (0,)], ids=["", "crash"])
def test_keys_may_be_deleted_and_used_again(monkeypatch: pytest.MonkeyPatch, crashing: tuple[int, ...]) -> None:
    """Rank 0 deletes the keys of the barrier once it has passed, and both ranks use them again."""
    again = [*meets(b"a"), (DELETE, b"a"), *meets(b"b", b"a")]
    programs = [again, meets(b"a", b"b", b"a")]
    print(explore(World(programs, 2, crashing=crashing, restarts=True, polls=True), monkeypatch), "states")


def test_remains_of_a_dead_rank_are_deleted_before_the_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third process deletes the keys at any time, also while a rank is in its call."""
    programs = [meets(b"a"), meets(b"a"), [(DELETE_BOTH, b"a")]]
    world = World(programs, 2, crashing=[0], restarts=True, polls=True)
    world.may_hang = True  # a delete during a call takes away the arrival, as everywhere
    print(explore(world, monkeypatch), "states")


@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_that_arrives_in_the_log_meets_the_others_without_a_poll(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    print(explore(World([meets(b"a")] * ranks, ranks, in_log=[ranks - 1]), monkeypatch), "states")


def deleting() -> World:
    world = World([meets(b"a"), meets(b"a"), [(DELETE_BOTH, b"a")]], 2, crashing=[0], restarts=True, polls=True)
    world.may_hang = True
    return world


def look_at_slots_alone(self: Arrival, timeout: float, **_: object) -> Any:
    return self._look_at_slots(self._begun, timeout)


def all_arrived(_: ArrivalSlots, content: bytes) -> Iterable[int]:
    return range(int.from_bytes(content[HASH:], "little"))


def passing_twice() -> World:
    """Rank 1 passes, deletes the keys and comes again, and rank 0 has one call."""
    world = World([meets(b"a"), [*meets(b"a"), (DELETE_BOTH, b"a"), *meets(b"a")]], 2, polls=True)
    world.may_hang = True
    return world


MUTANTS: dict[str, tuple[Any, str, Any, Callable[[], World]]] = {
    "slots are not cleared": (ArrivalSlots, "clear", ignore, deleting),
    "a deleted arrival counts again": (Arrival, "_was_deleted", lambda *_: False, passing_twice),
    "the log is not read after the slot was written": (
        Arrival,
        "look",
        look_at_slots_alone,
        lambda: World([meets(b"a", b"40")] * 2, 2, shortly=False),
    ),
    "arrivals in the log do not count with those in slots": (
        arrival,
        "add_arrivals",
        lambda *given, **named: add_arrivals_alone(*given, **named),
        lambda: World([meets(b"a")] * 2, 2, in_log=[1]),
    ),
    "slots are not read after an arrival in the log": (
        World,
        "arms_under_lock",
        True,
        lambda: World([meets(b"a")] * 2, 2, in_log=[1]),
    ),
    "the slots are not read again under the lock": (
        ArrivalSlots,
        "arrived",
        all_arrived,
        lambda: World([meets(b"a")] * 2, 2, polls=True),
    ),
}


def add_arrivals_alone(text: bytes, ranks: Iterable[int], own: int | None, size: int, **given: Any) -> Any:
    """Add arrivals as `rounds.add_arrivals`, and ignore those in slots if the log has any."""
    return rounds.add_arrivals(text, [] if text else ranks, own, size, **given)


@pytest.mark.parametrize("name", MUTANTS)
def test_rules_are_all_needed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, attribute, mutant, make = MUTANTS[name]
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, mutant, raising=False)
        with pytest.raises(AssertionError, match="on the schedule"):
            explore(make(), monkeypatch)
