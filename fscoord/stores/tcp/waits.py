"""`Waits`: waiting for keys at a server of torch's `TCPStore`; a part of `stores.tcp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from fscoord._arguments import key_names, key_text, missing_message
from fscoord._runtime import system
from fscoord.errors import StoreTimeoutError
from fscoord.stores.tcp.connections import Connections, Failure
from fscoord.stores.tcp.deadline import GRACE_S, LEAST_ANSWER_S, Deadline
from fscoord.stores.tcp.wire import Channel

__all__ = ["Waits"]

T = TypeVar("T")

AGAIN_S: Final = 0.5
"""How often a wait for a queue asks anew: for each value the server wakes one waiter, which may be interrupted then."""

RECHECK_S: Final = 0.01
"""How soon to look again, after a second look in vain, at what the server says is there: a queue, but no value."""

KEY, VALUE, ITEM = "key", "the value of key", "a value in queue"


class Waits:
    """The waits of one process at the server of `connections`.

    Each raises `StoreTimeoutError` after `limit` seconds, and `StoreUnavailableError` when the server is gone, or has
    not answered at all. One that answered when the wait began, and did not at its end, makes no difference to the
    caller: it is a time-out, but which of the keys are missing is not known.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def keys(self, names: list[bytes], limit: float) -> None:
        """Return when the server has all of `names`."""
        self._await(limit, names, KEY, lambda channel: channel.check(names) or None)

    def values(self, names: list[bytes], limit: float) -> list[bytes]:
        """Return the values of `names`."""
        return self._await(limit, names, VALUE, lambda channel: _all_values(channel, names))

    def item(self, name: bytes, limit: float) -> bytes:
        """Take the oldest value from the queue `name`."""
        return self._await(limit, [name], ITEM, lambda channel: channel.queue_pop(name))

    def _await(self, limit: float, names: list[bytes], what: str, find: Callable[[Channel], T | None]) -> T:
        """Return what `find` finds once the server has all of `names`. If it finds None, the wait goes on."""
        deadline = Deadline(
            max(limit + GRACE_S, LEAST_ANSWER_S), lambda: f"{what} {key_names(names)} in {self._connections}"
        )
        started = deadline.started
        ends = started + limit
        pause, may_retry = 0.0, True
        while True:
            until = min(ends, system.time.monotonic() + AGAIN_S) if what == ITEM else ends
            look = _Look(names, until, find)
            try:
                found = self._connections.attempt(look, deadline)
            except Failure as failure:
                if not failure.is_heard or failure.maybe_applied:
                    raise failure.public() from failure.__cause__
                if failure.errno != system.errno.ETIMEDOUT and may_retry:
                    may_retry = False  # torch's server without libuv hangs up if a key vanishes between two requests
                    continue
                if failure.errno != system.errno.ETIMEDOUT or look.is_granted:
                    raise failure.public() from failure.__cause__
                raise self._late(what, names, None, started) from None
            if found is not None:
                return found
            if system.time.monotonic() >= ends:
                raise self._late(what, names, self._missing(names, what, deadline), started)
            if look.is_granted:
                system.time.sleep(min(pause, max(0.0, ends - system.time.monotonic())))
                pause = RECHECK_S

    def _late(self, what: str, names: list[bytes], missing: list[bytes] | None, started: float) -> StoreTimeoutError:
        waited = system.time.monotonic() - started
        doubt = "; at the end its server did not answer any more" if missing is None else ""
        keys = missing or list(dict.fromkeys(names))
        return StoreTimeoutError(
            f"{self._connections}: {missing_message(what, keys, waited)}{doubt}",
            keys=[key_text(name) for name in keys],
            waited=waited,
        )

    def _missing(self, names: list[bytes], what: str, deadline: Deadline) -> list[bytes] | None:
        """Return those of `names` that are missing, or None where that can't be known."""
        names = list(dict.fromkeys(names))

        def look(channel: Channel) -> list[bytes]:
            if what == VALUE:
                return [name for name, value in zip(names, channel.value_of_each(names), strict=True) if value is None]
            return [name for name, there in zip(names, channel.check_each(names), strict=True) if not there]

        try:
            return self._connections.attempt(look, deadline)
        except Failure:
            return None


class _Look(Generic[T]):
    """Wait on a connection until the server has all of `names`, or until the moment `until`; then find something.

    Attributes:
        is_granted: whether it had them.
    """

    def __init__(self, names: list[bytes], until: float, find: Callable[[Channel], T | None]) -> None:
        self._names, self._until, self._find = names, until, find
        self.is_granted = False

    def __call__(self, channel: Channel) -> T | None:
        self.is_granted = channel.wait(self._names, self._until)
        return self._find(channel) if self.is_granted else None


def _all_values(channel: Channel, names: list[bytes]) -> list[bytes] | None:
    """Return the values of `names`, or None unless each has one.

    The server ends a wait also when there is none: for a queue, and after a `compare_set` that wrote nothing. Then it
    answers with the empty value.
    """
    found = []
    for name, read in zip(names, channel.values(names), strict=True):
        value = read or channel.value(name)
        if value is None:
            return None
        found.append(value)
    return found
