"""Barriers that are made once and executed again and again, by name and from a configuration.

The shape, `Barrier`, `register_barrier`, `BarrierConfig` and `create_barrier_from_config`, is that of
``torch.distributed.checkpoint._experimental.barriers``, for code that coordinates checkpoints. What differs: rank and
world size really come from the environment when they are not given, `Barrier.execute_barrier` takes a timeout, the
error of a time-out names the missing ranks, and a rank that was restarted goes on where it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from fscoord import _system as system
from fscoord._roll import Decoder, UsedBeforeError, check_rank
from fscoord._sequence import Sequence
from fscoord.arguments import DEFAULT_TIMEOUT, Key, Timeout, key_bytes, positive, seconds
from fscoord.collectives import barrier
from fscoord.environment import detect, rank_and_world_size
from fscoord.errors import BrokenBarrierError, FscoordError, StoreTimeoutError
from fscoord.store import Store
from fscoord.stores.url import open_store

__all__ = [
    "BARRIER_REGISTRY",
    "Barrier",
    "BarrierConfig",
    "FileStoreBarrier",
    "StoreBarrier",
    "create_barrier_from_config",
    "register_barrier",
]

B = TypeVar("B", bound="Barrier")
C = TypeVar("C", bound="type[Barrier]")


class Barrier(ABC):
    """A place where all ranks wait for each other, as often as they come there; also a context manager.

    Attributes:
        barrier_type: the name under which `register_barrier` finds the class.
    """

    barrier_type: ClassVar[str]

    @abstractmethod
    def execute_barrier(self, timeout: Timeout | None = None) -> None:
        """Wait until all ranks have called this as often as this one has.

        Args:
            timeout: seconds or a `timedelta`; None means the barrier's own.
        """

    def close(self) -> None:  # noqa: B027 - most barriers hold nothing
        """Give back what the barrier holds. Closing twice is harmless."""

    def __enter__(self: B) -> B:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


BARRIER_REGISTRY: dict[str, type[Barrier]] = {}
"""The registered classes by their `Barrier.barrier_type`."""


def register_barrier(barrier_class: C) -> C:
    """Register a class under its ``barrier_type``, and return it: a decorator.

    Raises:
        TypeError: it is no subclass of `Barrier`.
        ValueError: it has no ``barrier_type``, or another class has the same.
    """
    given: object = barrier_class
    if not (isinstance(given, type) and issubclass(given, Barrier)):
        raise TypeError(f"{barrier_class!r} is no subclass of fscoord.barriers.Barrier")
    name = getattr(barrier_class, "barrier_type", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{barrier_class.__name__} has no barrier_type: give it a name, as text, of its own")
    if BARRIER_REGISTRY.setdefault(name, barrier_class) is not barrier_class:
        raise ValueError(
            f"{barrier_class.__name__}: the barrier_type {name!r} is that of {BARRIER_REGISTRY[name].__name__};"
            " give it a name of its own"
        )
    return barrier_class


@dataclass
class BarrierConfig:
    """Which barrier to make, and how.

    Attributes:
        barrier_type: a registered name, or None for no barrier at all.
        barrier_args: what its constructor is called with. Rank and world size may be left out.
    """

    barrier_type: str | None = None
    barrier_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name: object = self.barrier_type
        args: object = self.barrier_args
        if not (name is None or isinstance(name, str)):
            raise TypeError(f"barrier_type is str or None, not {type(name).__name__}")
        if not (isinstance(args, dict) and all(isinstance(key, str) for key in args)):
            raise TypeError("barrier_args is a dict with the names of arguments for keys")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BarrierConfig:
        """Return the configuration with these values: ``{"barrier_type": ..., "barrier_args": {...}}``.

        Raises:
            ValueError: there is a value of another name.
            TypeError: a value has the wrong type.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"a BarrierConfig is loaded from a mapping, not from {type(values).__name__}")
        unknown = sorted(str(name) for name in values.keys() - {"barrier_type", "barrier_args"})
        if unknown:
            raise ValueError(f"a BarrierConfig has barrier_type and barrier_args, not {', '.join(unknown)}")
        args = values.get("barrier_args")
        return cls(
            values.get("barrier_type"), dict(args) if isinstance(args, Mapping) else {} if args is None else args
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> BarrierConfig:
        """Return the configuration in a JSON object, as `from_dict` does.

        Raises:
            ValueError: it is no JSON, or there is a value of another name.
            TypeError: it is no object, or a value has the wrong type.
        """
        import json

        return cls.from_dict(json.loads(text))


def create_barrier_from_config(barrier_config: BarrierConfig) -> Barrier | None:
    """Return the barrier that `barrier_config` describes, or None if it describes none.

    A constructor that takes ``rank``, ``world_size``, ``global_rank`` or ``global_world_size`` and is not given it gets
    what `fscoord.environment.detect` finds.

    Raises:
        ValueError: the type is not registered, or a rank or size is needed and nobody says it.
        TypeError: the constructor does not take these arguments.
    """
    name = barrier_config.barrier_type
    if name is None:
        return None
    if name not in BARRIER_REGISTRY:
        raise ValueError(f"unknown barrier_type {name!r}; there are {', '.join(sorted(BARRIER_REGISTRY))}")
    barrier_class = BARRIER_REGISTRY[name]
    return barrier_class(**_from_environment(barrier_class, barrier_config.barrier_args), **barrier_config.barrier_args)


def _from_environment(barrier_class: type[Barrier], given: dict[str, Any]) -> dict[str, int]:
    """Return the ranks and sizes that the constructor takes, is not given, and the environment says."""
    from inspect import Parameter, signature

    accepted = signature(barrier_class).parameters
    wanted = [name for name in accepted if name not in given and name.removeprefix("global_") in {"rank", "world_size"}]
    if not wanted:
        return {}
    environment, found = detect(), {}
    for name in wanted:
        value = getattr(environment, name.removeprefix("global_"))
        if value is not None:
            found[name] = value
        elif accepted[name].default is Parameter.empty:
            raise ValueError(f"{name} is not given, and the environment does not say it: it says {environment}")
    return found


@register_barrier
class StoreBarrier(Barrier):
    """A barrier on any store.

    How far each rank is, is kept in the store: another object, or the process that takes a dead one's place, goes on
    with the barrier that its rank was in, and passes at once if the others have gone on. Two barriers at most leave
    keys behind, however many are executed. One rank has one caller at a time, and a prefix belongs to one world: one of
    another size, and a job that begins from the start on an old store, take another prefix (or the store another run).

    Args:
        store: an open store, which stays open, or an address for `~fscoord.open_store`.
        barrier_prefix: names this row of barriers; others on the same store have other names.
        rank: which caller this is; None means what the environment says.
        world_size: how many there are, the same for all; None means what the environment says.
        timeout: how long each `execute_barrier` waits, in seconds or as a `timedelta`; a store that is opened here has
            it too.
        fail_fast: whether to raise `~fscoord.BrokenBarrierError` as soon as a rank that is needed is known dead.
        rank_tracing_decoder: turns a missing rank into what the error says of it, such as its host.
        options: what else `~fscoord.open_store` takes for that address.

    Raises:
        TypeError: there are options, and the store is open already.
        ValueError: rank or world size is not given and the environment does not say it.
        BarrierError: `rank` is not below `world_size`.
    """

    barrier_type = "store"

    def __init__(
        self,
        store: Store | str | system.os.PathLike[str],
        barrier_prefix: Key = "barrier",
        *,
        rank: int | None = None,
        world_size: int | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        fail_fast: bool = False,
        rank_tracing_decoder: Decoder | None = None,
        **options: Any,
    ) -> None:
        self._rank, self._world_size = rank_and_world_size(rank, world_size)
        check_rank(self._rank, positive("world_size", self._world_size))
        prefix = key_bytes(barrier_prefix)
        self._timeout = seconds(timeout)
        self._fail_fast = fail_fast
        self._decoder = rank_tracing_decoder
        self._owns_store = not isinstance(store, Store)
        if isinstance(store, Store) and options:
            raise TypeError(f"an open store takes no options; these are for an address: {', '.join(options)}")
        self._store = store if isinstance(store, Store) else self._open(store, options)
        self._sequence = Sequence(self._store, prefix, self._rank)

    def _open(self, address: str | system.os.PathLike[str], options: dict[str, Any]) -> Store:
        return open_store(address, timeout=self._timeout, **options)

    @property
    def rank(self) -> int:
        """Which caller this is."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many callers there are."""
        return self._world_size

    @property
    def sequence(self) -> int:
        """The number of the barrier that this rank joins next, as it stands in the store."""
        return self._sequence.next_of(self._rank)

    def execute_barrier(self, timeout: Timeout | None = None) -> None:
        """Wait until all ranks have called this as often as this one has. After a time-out a rank may try again.

        Args:
            timeout: seconds or a `timedelta`; None means the barrier's own.

        Raises:
            StoreTimeoutError: not all came. It names the missing ranks, and says how far each of them is.
            BrokenBarrierError: with `fail_fast`, a rank that is needed is dead.
            BarrierError: the callers disagree about the world's size, or two of them have one rank.
        """
        limit = self._timeout if timeout is None else seconds(timeout)
        number = self._sequence.next_of(self._rank)
        missing: list[int] = []

        def named(rank: int) -> str:
            missing.append(rank)
            return self._decoder(rank) if self._decoder else str(rank)

        # fail_fast asks the store who is alive, so it is not asked for on stores that can't tell.
        wishes: dict[str, Any] = {"fail_fast": True} if self._fail_fast else {}
        try:
            barrier(self._store, self._world_size, self._sequence.barrier(number), limit, self._rank, named, **wishes)
        except UsedBeforeError:
            pass  # all came, this rank too: whoever was it then never told its caller
        except (StoreTimeoutError, BrokenBarrierError) as error:
            error.args = (f"{error}{self._positions(number, missing)}",)
            raise
        self._sequence.advance(number)

    def close(self) -> None:
        """Close the store, if it was opened here."""
        if self._owns_store:
            self._store.close()

    def _positions(self, number: int, ranks: list[int]) -> str:
        """Return the words that say how far this rank and the missing are; none if the store does not tell."""
        try:
            others = [f"rank {rank} is at sequence {self._sequence.next_of(rank)}" for rank in ranks]
        except FscoordError:
            return ""
        return f"; this is sequence {number}, {', '.join(others)}" if others else ""


@register_barrier
class FileStoreBarrier(StoreBarrier):
    """A `StoreBarrier` on a `~fscoord.FileStore` of its own.

    Args:
        path: the store's path, taken as it stands.
        barrier_prefix, rank, world_size, timeout, fail_fast, rank_tracing_decoder: as for `StoreBarrier`.
        options: whatever else `~fscoord.FileStore` takes, such as ``lock``, ``durable`` or ``label``.
    """

    barrier_type = "file_store"

    def __init__(
        self,
        path: str | system.os.PathLike[str],
        barrier_prefix: Key = "barrier",
        *,
        rank: int | None = None,
        world_size: int | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        fail_fast: bool = False,
        rank_tracing_decoder: Decoder | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            path,
            barrier_prefix,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            fail_fast=fail_fast,
            rank_tracing_decoder=rank_tracing_decoder,
            **options,
        )

    def _open(self, address: str | system.os.PathLike[str], options: dict[str, Any]) -> Store:
        from urllib.parse import quote

        # An address in which nothing has a meaning: a path may hold colons and question marks.
        url = "file:" + quote(system.os.fspath(address), safe="", errors="surrogateescape")
        return open_store(url, rank=self._rank, timeout=self._timeout, **options)
