"""`FaultyFiles` and `FaultyStore` make files and stores fail on demand. `Plan` keeps the active faults."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeVar

from fscoord._arguments import Key, Timeout, key_text
from fscoord._runtime import system
from fscoord.errors import StoreTimeoutError, StoreUnavailableError
from fscoord.store import Capabilities, Store, StoreView


class Fault(NamedTuple):
    """One fault.

    Attributes:
        kind: the kind of the fault, such as ``"delay"``.
        detail: the argument of the kind, such as an error number or a number of seconds.
    """

    kind: str
    detail: Any = None


Rule = Callable[[str], "Fault | None"]
"""A function that is called with the name of an operation, and returns the fault to inject into it, or None."""

Hits = AbstractContextManager[list[str]]
"""A context manager that injects a fault. It yields the list of the calls that the fault has hit so far."""


def counted(given: Collection[str], known: Collection[str], fault: Fault, after: int, times: int | None) -> Rule:
    """Return a rule for the calls named in `given`, or for those in `known` if `given` is empty.

    The first `after` of these calls get no fault. The next `times` calls get `fault`; None means all further calls.

    Raises:
        ValueError: a call is not known, or a number is negative.
    """
    names = given or known
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"no such call: {', '.join(unknown)}; there are {', '.join(known)}")
    if after < 0 or (times is not None and times < 0):
        raise ValueError(f"after={after} and times={times}: neither can be negative")
    seen = 0

    def rule(name: str) -> Fault | None:
        nonlocal seen
        if name not in names:
            return None
        seen += 1
        return fault if seen > after and (times is None or seen <= after + times) else None

    return rule


def drawn(seed: int, rate: float, faults: Callable[[str], list[Fault]]) -> Rule:
    """Return a rule that gives a call a fault with probability `rate`, drawn from ``faults(name of the call)``.

    Raises:
        ValueError: `rate` is not between 0 and 1.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate={rate}: a probability lies between 0 and 1")
    rng = random.Random(seed)

    def rule(name: str) -> Fault | None:
        chance, choice = rng.random(), rng.random()  # always both, so that each call uses up two numbers
        possible = faults(name)
        return possible[int(choice * len(possible))] if chance < rate and possible else None

    return rule


class Plan:
    """Keeps the active rules. A plan is thread-safe. With a single thread the faults are the same in every run."""

    def __init__(self) -> None:
        self._rules: list[tuple[Rule, list[str]]] = []
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Create the mutex.

        A forked child needs a new mutex, because a thread of the parent may have held the old mutex.
        """
        self._mutex = system.mutex()

    @contextmanager
    def activate(self, rule: Rule) -> Iterator[list[str]]:
        """Activate `rule` inside the ``with``. Yield the list of the calls that the rule has hit so far."""
        hit: list[str] = []
        entry = (rule, hit)
        with self._mutex:
            self._rules.append(entry)
        try:
            yield hit
        finally:
            with self._mutex:
                self._rules.remove(entry)

    def faults(self, name: str) -> list[Fault]:
        """Return the faults for one call of `name`, in the order in which the rules were activated."""
        if not self._rules:
            return []
        system.process_epoch()  # after a fork in C it renews the mutex
        found = []
        with self._mutex:
            for rule, hit in self._rules:
                fault = rule(name)
                if fault:
                    hit.append(name)
                    found.append(fault)
        return found


_all = system.reset_in_child("faults", Plan.renew)


CALLS: Final = (
    "open", "read", "write", "pread", "pwrite", "fstat", "stat", "ftruncate", "fdatasync", "fsync", "link", "unlink",
)  # fmt: skip
LOCK: Final = "lock"


class FaultyFiles:
    """A context manager in which the files of stores fail on demand. Files that the program opens itself do not fail.

    Each of `fails`, `delays` and `tears_writes` returns a context manager, which yields the list of the calls that the
    fault has hit so far. The arguments are names of system calls, such as ``"write"`` or ``"fstat"``, and ``"lock"``
    for every attempt to lock. Without names, all calls are meant. ``after`` is the number of calls that pass first, and
    ``times`` is the number of calls that are hit after that (None: all)::

        with FaultyFiles() as files, FileStore(path) as store:
            with files.fails("write", error=errno.ENOSPC, times=1):
                work(store)

    Open the store in the body of the ``with``, because a store keeps the lock calls with which it was opened.
    ``"lock"`` hits only locks of the default kind, ``"ofd"``. The faults affect all threads of the process. The class
    can't be combined with pyfakefs.
    """

    def __init__(self) -> None:
        self._plan = Plan()
        self._real: tuple[Any, Any] | None = None

    def __enter__(self) -> FaultyFiles:
        if isinstance(system.os, _FaultyModule) or system.is_fake_fs() or system.fcntl is None:
            raise RuntimeError(
                "FaultyFiles needs the real files and locks: another FaultyFiles or pyfakefs is in force already,"
                " or this platform has no locks"
            )
        self._real = system.os, system.fcntl
        system.os = _FaultyModule(system.os, {name: self._faulty(name) for name in CALLS})
        system.fcntl = _FaultyModule(system.fcntl, {"fcntl": self._lock})
        return self

    def __exit__(self, *_: object) -> None:
        if self._real is not None:
            system.os, system.fcntl = self._real
            self._real = None

    def fails(self, *calls: str, error: int = system.errno.EIO, after: int = 0, times: int | None = None) -> Hits:
        """Make calls fail with the error number `error`, such as ``errno.ESTALE``, and without any effect."""
        return self._activate(calls, Fault("failure", error), after, times)

    def delays(self, *calls: str, seconds: float, after: int = 0, times: int | None = None) -> Hits:
        """Make calls sleep for `seconds` before they begin."""
        return self._activate(calls, Fault("delay", seconds), after, times)

    def tears_writes(
        self, keep: int, *, error: int = system.errno.ENOSPC, after: int = 0, times: int | None = None
    ) -> Hits:
        """Make a write fail with `error` after it has written `keep` bytes, or all but one byte if that is less."""
        return self._activate(("write",), Fault("torn", (keep, error)), after, times)

    def _activate(self, calls: tuple[str, ...], fault: Fault, after: int, times: int | None) -> Hits:
        return self._plan.activate(counted(calls, (*CALLS, LOCK), fault, after, times))

    def _faulty(self, name: str) -> Callable[..., Any]:
        real = getattr(system.os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            for fault in self._plan.faults(name):
                if fault.kind == "torn":
                    keep, number = fault.detail
                    data = bytes(arguments[1])
                    real(arguments[0], data[: min(keep, len(data) - 1)])
                    raise _error(number)
                _inject(fault)
            return real(*arguments, **named)

        return call

    def _lock(self, fd: int, command: int, argument: Any = 0) -> Any:
        real = (self._real or (None, system.fcntl))[1]
        if command in (getattr(real, "F_OFD_SETLK", None), getattr(real, "F_OFD_SETLKW", None)):
            kind = int.from_bytes(bytes(argument)[:2], sys.byteorder)  # struct flock begins with l_type, a short
            if kind != real.F_UNLCK:
                for fault in self._plan.faults(LOCK):
                    _inject(fault)
        return real.fcntl(fd, command, argument)


class _FaultyModule(ModuleType):
    """A module with some functions replaced."""

    def __init__(self, real: Any, instead: dict[str, Callable[..., Any]]) -> None:
        super().__init__(real.__name__)
        self._real = real
        for name, call in instead.items():
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _inject(fault: Fault) -> None:
    if fault.kind == "failure":
        raise _error(fault.detail)
    system.time.sleep(fault.detail)


def _error(number: int) -> OSError:
    return OSError(number, system.os.strerror(number))


T = TypeVar("T")

READS: Final = ("get", "check", "wait", "num_keys", "list_keys", "multi_get", "queue_len")
WRITES: Final = (
    "set",
    "add",
    "compare_set",
    "delete_key",
    "create",
    "pop",
    "append",
    "multi_set",
    "transact",
    "queue_push",
    "queue_pop",
)


class FaultyStore(StoreView):
    """A view of `store` whose operations fail on demand, to test how a program handles the errors.

    Each of `delays`, `times_out`, `fails`, `loses_answers` and `random_faults` returns a context manager, which yields
    the list of the operations that the fault has hit so far. The arguments are names of operations. Without names, all
    operations that can have the fault are meant. ``after`` is the number of operations that pass first, and ``times``
    is the number of operations that are hit after that (None: all)::

        with store.fails("set", after=2, times=1) as hit:
            work(store)
        assert hit == ["set"]

    `barrier` consists of `add`, `set` and `wait`, so it fails if one of them fails. Clones share the faults. Without a
    fault, every operation behaves as on the underlying store. `close` closes the underlying store.

    Args:
        store: the underlying store, which performs the operations.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._plan = Plan()
        self.capabilities: Capabilities = store.capabilities._replace(knows_write_outcome=False)

    def delays(self, *operations: str, seconds: float, after: int = 0, times: int | None = None) -> Hits:
        """Make operations sleep for `seconds` before they begin."""
        return self._activate(operations, Fault("delay", seconds), after, times)

    def times_out(self, *operations: str, after: int = 0, times: int | None = None) -> Hits:
        """Make operations raise `~fscoord.StoreTimeoutError` at once, without any effect."""
        return self._activate(operations, Fault("time-out"), after, times)

    def fails(
        self, *operations: str, error: BaseException | None = None, after: int = 0, times: int | None = None
    ) -> Hits:
        """Make operations raise `error`, by default a `~fscoord.StoreUnavailableError`, without any effect."""
        return self._activate(operations, Fault("failure", error), after, times)

    def loses_answers(self, *operations: str, applied: bool = True, after: int = 0, times: int | None = None) -> Hits:
        """Make writes raise `~fscoord.StoreUnavailableError` with ``maybe_applied``.

        Args:
            operations: names of operations that write; without names, all such operations.
            applied: whether the write takes effect before the error is raised.
            after: the number of operations that pass first.
            times: the number of operations that are hit after that; None: all.
        """
        return self._activate(operations, Fault("lost", applied), after, times, WRITES)

    def random_faults(self, seed: int, rate: float = 0.1, delay: float = 0.001) -> Hits:
        """Give each operation a fault with probability `rate`, drawn from the faults of all other methods.

        Args:
            seed: the seed of the draws. With the same seed, the n-th operation gets the same fault in every run.
            rate: a probability, from 0 to 1.
            delay: the length of a delay, in seconds.
        """
        any_of = [Fault("delay", delay), Fault("time-out"), Fault("failure")]
        writes = [*any_of, Fault("lost", True), Fault("lost", False)]
        return self._plan.activate(drawn(seed, rate, lambda name: writes if name in WRITES else any_of))

    def _activate(
        self,
        operations: tuple[str, ...],
        fault: Fault,
        after: int,
        times: int | None,
        known: tuple[str, ...] = READS + WRITES,
    ) -> Hits:
        return self._plan.activate(counted(operations, known, fault, after, times))

    def _do(self, operation: str, keys: list[bytes], call: Callable[[list[bytes]], T]) -> T:
        name = "wait" if operation in ("wait_alive", "wait_sessions") else operation
        where = f"{name} of {', '.join(map(repr, map(key_text, keys)))}" if keys else name
        for fault in self._plan.faults(name):
            if fault.kind == "delay":
                system.time.sleep(fault.detail)
            elif fault.kind == "time-out":
                raise StoreTimeoutError(f"{where} timed out: injected fault", keys=[key_text(key) for key in keys])
            elif fault.kind == "failure":
                raise fault.detail or StoreUnavailableError(f"{where} failed: injected fault; nothing was done")
            else:
                if fault.detail:
                    call(keys)
                raise StoreUnavailableError(f"{where} has no answer: injected fault", maybe_applied=True)
        return call(keys)

    def num_keys(self) -> int:
        return self._do("num_keys", [], lambda _: self._inner.num_keys())

    def list_keys(self, prefix: Key = "") -> list[str]:
        return self._do("list_keys", [], lambda _: self._inner.list_keys(prefix))

    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        super().barrier(key, world_size, self.timeout if timeout is None else timeout)

    def clone(self) -> FaultyStore:
        """Return another handle on the same store, with the same faults."""
        other = FaultyStore(self._inner.clone())
        other._plan = self._plan
        return other

    def close(self) -> None:
        """Close the underlying store."""
        self._inner.close()
