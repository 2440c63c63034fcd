"""`RendezvousSettings` and `RendezvousTimeout`: how many nodes, how long, how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from fscoord._arguments import Timeout, check_positive, to_seconds, to_timedelta
from fscoord.rendezvous.parameters import RendezvousParameters

__all__ = ["RendezvousSettings", "RendezvousTimeout"]


@dataclass(frozen=True)
class RendezvousTimeout:
    """How long the steps of a rendezvous may take, in seconds or as `timedelta`; kept as `timedelta`.

    Attributes:
        join: how long a node waits for a round that it takes part in (600 s); spare nodes wait without limit.
        last_call: how long a round waits for more nodes once it has enough (30 s).
        close: how long `shutdown` may take (30 s).
        heartbeat: how long one keep-alive may take (5 s).
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
                raise ValueError(f"the timeout {name} must be above zero")
            object.__setattr__(self, name, to_timedelta(limit))


@dataclass(frozen=True)
class RendezvousSettings:
    """What all nodes of a rendezvous are told alike.

    Attributes:
        run_id: names the rendezvous.
        min_nodes: how many nodes a round takes at least.
        max_nodes: how many nodes a round takes at most.
        timeout: how long the steps may take.
        keep_alive_interval: how often a node shows that it lives (5 s).
        keep_alive_max_attempt: after how many looks without a sign of life a node is dead (3).
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout = field(default_factory=RendezvousTimeout)
    keep_alive_interval: timedelta = timedelta(seconds=5)
    keep_alive_max_attempt: int = 3

    def __post_init__(self) -> None:
        if not self.run_id:
            raise ValueError("the run id is empty; give the rendezvous a name")
        if check_positive("max_nodes", self.max_nodes) < check_positive("min_nodes", self.min_nodes):
            raise ValueError(f"max_nodes must be at least min_nodes: {self.max_nodes} is less than {self.min_nodes}")
        check_positive("keep_alive_max_attempt", self.keep_alive_max_attempt)
        interval = to_seconds(self.keep_alive_interval)
        if interval == 0:
            raise ValueError("keep_alive_interval must be above zero")
        object.__setattr__(self, "keep_alive_interval", to_timedelta(interval))

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> RendezvousSettings:
        """Return the settings in `params`.

        The options are ``join_timeout``, ``last_call_timeout``, ``close_timeout``, ``heartbeat_timeout`` and
        ``keep_alive_interval``, in seconds, and ``keep_alive_max_attempt``.

        Raises:
            ValueError: one of them is no such number.
        """
        names = ("join", "last_call", "close", "heartbeat")
        given = {name: value for name in names if (value := _seconds(params, f"{name}_timeout")) is not None}
        interval = _seconds(params, "keep_alive_interval")
        return cls(
            params.run_id,
            params.min_nodes,
            params.max_nodes,
            RendezvousTimeout(**given),
            timedelta(seconds=5) if interval is None else to_timedelta(interval),
            params.get_as_int("keep_alive_max_attempt") or 3,
        )


def _seconds(params: RendezvousParameters, key: str) -> float | None:
    value = params.get(key)
    if value is None:
        return None
    try:
        return to_seconds(float(value) if isinstance(value, str) else value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the rendezvous option {key}={value!r} is no number of seconds") from error
