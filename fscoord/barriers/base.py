"""`Barrier`, the registry of its subclasses, and the configuration from which a barrier is created."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from fscoord._arguments import Timeout
from fscoord.environment import detect

B = TypeVar("B", bound="Barrier")
C = TypeVar("C", bound="type[Barrier]")


class Barrier(ABC):
    """A barrier that all ranks execute any number of times. As a context manager, it calls `close` at the end.

    Attributes:
        barrier_type: the name under which `register_barrier` registers the class.
    """

    barrier_type: ClassVar[str]

    @abstractmethod
    def execute_barrier(self, timeout: Timeout | None = None) -> None:
        """Wait until every rank has called this method as many times as this rank.

        Args:
            timeout: how long to wait, in seconds or as a `timedelta`; None means the barrier's own timeout.
        """

    def close(self) -> None:  # noqa: B027 - most barriers hold nothing
        """Release the resources of the barrier. A second call does nothing."""

    def __enter__(self: B) -> B:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


BARRIER_REGISTRY: dict[str, type[Barrier]] = {}
"""Maps each registered `Barrier.barrier_type` to its class."""


def register_barrier(barrier_class: C) -> C:
    """Register `barrier_class` under its ``barrier_type``, and return the class. Use it as a decorator.

    Raises:
        TypeError: the class is not a subclass of `Barrier`.
        ValueError: the class has no ``barrier_type``, or has the ``barrier_type`` of another registered class.
    """
    given: object = barrier_class
    if not (isinstance(given, type) and issubclass(given, Barrier)):
        raise TypeError(f"{barrier_class!r} is not a subclass of fscoord.barriers.Barrier")
    name = getattr(barrier_class, "barrier_type", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{barrier_class.__name__} has no barrier_type: set it to a unique name, a str")
    if BARRIER_REGISTRY.setdefault(name, barrier_class) is not barrier_class:
        raise ValueError(
            f"{barrier_class.__name__}: the barrier_type {name!r} is already used by"
            f" {BARRIER_REGISTRY[name].__name__}; set it to a unique name"
        )
    return barrier_class


@dataclass
class BarrierConfig:
    """The type of a barrier and the arguments of its constructor.

    Attributes:
        barrier_type: a registered name, or None for no barrier.
        barrier_args: the constructor's keyword arguments. Rank and world size may be omitted; see
            `create_barrier_from_config`.
    """

    barrier_type: str | None = None
    barrier_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name: object = self.barrier_type
        args: object = self.barrier_args
        if not (name is None or isinstance(name, str)):
            raise TypeError(f"barrier_type must be a str or None, not {type(name).__name__}")
        if not (isinstance(args, dict) and all(isinstance(key, str) for key in args)):
            raise TypeError("barrier_args must be a dict from the names of arguments, each a str, to their values")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BarrierConfig:
        """Make a configuration from a mapping: ``{"barrier_type": ..., "barrier_args": {...}}``.

        Raises:
            ValueError: a key is neither ``barrier_type`` nor ``barrier_args``.
            TypeError: a value has the wrong type.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"a BarrierConfig is loaded from a mapping, not from {type(values).__name__}")
        unknown = sorted(str(name) for name in values.keys() - {"barrier_type", "barrier_args"})
        if unknown:
            raise ValueError(
                f"a BarrierConfig has the keys barrier_type and barrier_args only, not {', '.join(unknown)}"
            )
        args = values.get("barrier_args")
        return cls(
            values.get("barrier_type"), dict(args) if isinstance(args, Mapping) else {} if args is None else args
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> BarrierConfig:
        """Make a configuration from JSON: an object with the keys of `from_dict`.

        Raises:
            ValueError: the text is not JSON, or a key is neither ``barrier_type`` nor ``barrier_args``.
            TypeError: the JSON is not an object, or a value has the wrong type.
        """
        import json

        try:
            values = json.loads(text)
        except RecursionError:
            raise ValueError("the JSON text of the BarrierConfig is nested too deeply") from None
        return cls.from_dict(values)


def create_barrier_from_config(barrier_config: BarrierConfig) -> Barrier | None:
    """Create the barrier that `barrier_config` describes. Return None if ``barrier_config.barrier_type`` is None.

    The constructor may have a parameter ``rank``, ``world_size``, ``global_rank`` or ``global_world_size``. If the
    configuration omits the parameter, `fscoord.environment.detect` supplies the value.

    Raises:
        ValueError: the type is not registered, or a needed rank or size is neither in the configuration nor in the
            environment.
        TypeError: the constructor does not take these arguments.
    """
    name = barrier_config.barrier_type
    if name is None:
        return None
    if name not in BARRIER_REGISTRY:
        raise ValueError(f"unknown barrier_type {name!r}; registered are {', '.join(sorted(BARRIER_REGISTRY))}")
    barrier_class = BARRIER_REGISTRY[name]
    return barrier_class(**_from_environment(barrier_class, barrier_config.barrier_args), **barrier_config.barrier_args)


def _from_environment(barrier_class: type[Barrier], given: dict[str, Any]) -> dict[str, int]:
    """Return each rank and world size that is a parameter of the class and not in `given`, from the environment."""
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
            raise ValueError(f"{name} is not given: add {name} to barrier_args. The environment has: {environment}")
    return found
