"""`RendezvousParameters` has the arguments of a rendezvous as given. `RendezvousSettings` has the checked values."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from fscoord._arguments import Timeout, check_positive, to_seconds, to_timedelta

_LIMITS = ("join", "last_call", "close", "heartbeat")
SETTINGS = (*(f"{name}_timeout" for name in _LIMITS), "keep_alive_interval", "keep_alive_max_attempt")
"""The options of `RendezvousSettings.from_parameters`."""

_TRUE = {"1", "true", "t", "yes", "y", "on"}
_FALSE = {"0", "false", "f", "no", "n", "off"}


class RendezvousParameters:
    """The parameters of a rendezvous, as in torch's ``RendezvousParameters``.

    Args:
        backend: the name of the backend, such as ``c10d``.
        endpoint: the address of the store: a path, a URL, or ``host[:port]``.
        run_id: the name of the rendezvous. It distinguishes the rendezvous from other rendezvous in the same store.
        min_nodes: the minimal number of nodes in a round, at least 1.
        max_nodes: the maximal number of nodes in a round.
        local_addr: the address by which other nodes reach this node; its host name by default.
        config: options of the backend, as text or as values of their types.

    Raises:
        ValueError: `backend` is empty, or the numbers of nodes are invalid.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **config: Any,
    ) -> None:
        if not backend:
            raise ValueError("the rendezvous backend needs a name, such as 'c10d'")
        if min_nodes < 1:
            raise ValueError(f"min_nodes must be at least 1, not {min_nodes}")
        if max_nodes < min_nodes:
            raise ValueError(f"max_nodes must be at least min_nodes: {max_nodes} is less than {min_nodes}")
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config = config

    def get(self, key: str, default: Any = None) -> Any:
        """Return the option `key`, or `default` if the option was not given."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return the option `key` as a bool, or `default` if the option was not given.

        ``1 true t yes y on`` mean True, and ``0 false f no n off`` mean False, in upper or lower case.

        Raises:
            ValueError: the option has another value.
        """
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        text = str(value).strip().lower() if isinstance(value, (int, str)) else ""
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise ValueError(f"the rendezvous option {key}={value!r} is neither yes nor no; write 1 or 0")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return the option `key` as an integer, or `default` if the option was not given.

        Unlike in torch, a float with a fraction is an error.

        Raises:
            ValueError: the option is not an integer.
        """
        value = self.get(key, default)
        if value is None:
            return None
        try:
            if isinstance(value, float) and not value.is_integer():
                raise ValueError("the number has a fraction")
            return int(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"the rendezvous option {key}={value!r} is not an integer") from error

    def __repr__(self) -> str:
        return f"RendezvousParameters({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def parse_rendezvous_config(text: str) -> dict[str, str]:
    """Parse `text` of the form ``key=value,key=value``. Blanks around keys and values are ignored.

    Raises:
        ValueError: a key or a value is missing, or a key occurs twice.
    """
    config: dict[str, str] = {}
    for item in text.split(",") if text.strip() else []:
        key, _, value = (part.strip() for part in item.partition("="))
        if not key:
            raise ValueError(f"rendezvous options have the form key=value,key=value; {item!r} has no key")
        if not value:
            raise ValueError(f"the rendezvous option {key!r} has no value; write {key}=...")
        if key in config:
            raise ValueError(f"the rendezvous option {key!r} is given twice")
        config[key] = value
    return config


@dataclass(frozen=True)
class RendezvousTimeout:
    """How long the steps of a rendezvous may take. Arguments are seconds or a `timedelta`; attributes are `timedelta`.

    Attributes:
        join: how long a node waits for a round in which it takes part (default 600 s). Spare nodes wait without limit.
        last_call: how long a round with enough nodes waits for more nodes (default 30 s).
        close: how long `shutdown` may take (default 30 s).
        heartbeat: how long one keep-alive may take (default 5 s).

    Raises:
        ValueError: a time is negative, or a time other than `last_call` is 0.
        TypeError: a time is neither a number nor a `timedelta`.
    """

    join: timedelta = timedelta(seconds=600)
    last_call: timedelta = timedelta(seconds=30)
    close: timedelta = timedelta(seconds=30)
    heartbeat: timedelta = timedelta(seconds=5)

    def __init__(
        self, join: Timeout = 600, last_call: Timeout = 30, close: Timeout = 30, heartbeat: Timeout = 5
    ) -> None:
        given = {"join": join, "last_call": last_call, "close": close, "heartbeat": heartbeat}
        for name, value in given.items():
            limit = to_seconds(value)
            if limit == 0 and name != "last_call":
                raise ValueError(f"the rendezvous timeout {name} is 0; it must be above zero")
            object.__setattr__(self, name, to_timedelta(limit))


@dataclass(frozen=True)
class RendezvousSettings:
    """The settings of a rendezvous. All nodes of the rendezvous must have the same settings.

    Attributes:
        run_id: the name of the rendezvous.
        min_nodes: the minimal number of nodes in a round.
        max_nodes: the maximal number of nodes in a round.
        timeout: how long the steps may take; None means the defaults.
        keep_alive_interval: the time between two keep-alives of a node (default 5 s). The argument is in seconds or a
            `timedelta`, the attribute a `timedelta`.
        keep_alive_max_attempt: a node is dead after this number of checks without a new keep-alive (default 3).

    Raises:
        ValueError: `run_id` is empty, a number is below 1, `max_nodes` is below `min_nodes`, or the interval is 0 or
            negative.
        TypeError: a number is not an integer, or the interval is neither a number nor a `timedelta`.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout = field(default_factory=RendezvousTimeout)
    keep_alive_interval: timedelta = timedelta(seconds=5)
    keep_alive_max_attempt: int = 3

    def __init__(
        self,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: Timeout = 5,
        keep_alive_max_attempt: int = 3,
    ) -> None:
        if not run_id:
            raise ValueError("the run id is empty; give the rendezvous a name")
        if check_positive("max_nodes", max_nodes) < check_positive("min_nodes", min_nodes):
            raise ValueError(f"max_nodes must be at least min_nodes: {max_nodes} is less than {min_nodes}")
        check_positive("keep_alive_max_attempt", keep_alive_max_attempt)
        interval = to_seconds(keep_alive_interval)
        if interval == 0:
            raise ValueError("the rendezvous option keep_alive_interval is 0; it must be above zero")
        vars(self).update(  # as `object.__setattr__` would, because the class is frozen
            run_id=run_id,
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            timeout=timeout or RendezvousTimeout(),
            keep_alive_interval=to_timedelta(interval),
            keep_alive_max_attempt=keep_alive_max_attempt,
        )

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> RendezvousSettings:
        """Check `params` and return the settings.

        The options are ``join_timeout``, ``last_call_timeout``, ``close_timeout``, ``heartbeat_timeout`` and
        ``keep_alive_interval``, in seconds, and ``keep_alive_max_attempt``.

        Raises:
            ValueError: an option is not a valid number.
        """
        given = {name: value for name in _LIMITS if (value := _seconds(params, f"{name}_timeout")) is not None}
        interval = _seconds(params, "keep_alive_interval")
        return cls(
            params.run_id,
            params.min_nodes,
            params.max_nodes,
            RendezvousTimeout(**given),
            5 if interval is None else interval,
            params.get_as_int("keep_alive_max_attempt") or 3,
        )


def _seconds(params: RendezvousParameters, key: str) -> float | None:
    value = params.get(key)
    if value is None:
        return None
    try:
        return to_seconds(float(value) if isinstance(value, str) else value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the rendezvous option {key}={value!r} is not a number of seconds") from error
