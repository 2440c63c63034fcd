"""`Connections`: one process's connections to a server of torch's `TCPStore`, one for each call that is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar
from weakref import WeakSet

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_unless_absent
from fscoord.errors import StoreClosedError, StoreUnavailableError
from fscoord.stores.tcp.deadline import LEAST_ANSWER_S, Deadline, Unanswered
from fscoord.stores.tcp.wire import Channel, Disconnected

__all__ = ["Connections", "Failure"]

T = TypeVar("T")

FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 0.5
"""How soon, and how rarely, a server that does not listen yet is tried again."""


class Failure(Exception):
    """A call failed.

    Attributes:
        errno: the system's number for it.
        is_heard: whether the server had answered anything in this call.
        maybe_applied: whether the call began to change the store.
    """

    def __init__(self, words: str, errno: int | None, channel: Channel | None) -> None:
        super().__init__(words)
        self.errno = errno
        self.is_heard = channel is not None and channel.is_heard
        self.maybe_applied = channel is not None and channel.has_written

    def public(self) -> StoreUnavailableError:
        """Return it as callers of a store get it."""
        doubt = "; nobody knows whether this write has had its effect" if self.maybe_applied else ""
        return StoreUnavailableError(f"{self}{doubt}", maybe_applied=self.maybe_applied, errno=self.errno)


class Connections:
    """Connections to the server at `host` and `port`.

    What a call leaves when its deadline comes is closed at once. Only a thread can be left, at most one, which asks the
    resolver for `host`; it ends when that answers.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._is_closed = False
        self._network = system.import_uninterrupted("fscoord._runtime.network")
        self._begin()
        _all.add(self)

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def _begin(self) -> None:
        """Have no connections yet."""
        self._idle: list[Channel] = []
        self._busy: set[Channel] = set()
        self._endpoints: list[object] = []
        self._resolving = system.threading.Lock()

    def deadline(self, limit: float) -> Deadline:
        """Return the deadline of a call that has `limit` seconds, but `LEAST_ANSWER_S` at least."""
        return Deadline(max(limit, LEAST_ANSWER_S), lambda: f"an answer of {self}")

    def await_server(self, deadline: Deadline) -> None:
        """Return when the server answers, which may begin to listen only later.

        Raises:
            StoreUnavailableError: it has not by `deadline`.
        """
        pause = FIRST_PAUSE_S
        while True:
            try:
                return self.attempt(Channel.ping, deadline)
            except Failure as failure:
                if deadline.left() <= pause:
                    raise StoreUnavailableError(
                        f"{failure}; see that one process is the master there, and that the port is free and open",
                        errno=failure.errno,
                    ) from failure.__cause__
            deadline.remind()
            system.time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def call(self, operation: Callable[[Channel], T], deadline: Deadline) -> T:
        """Return what `operation` makes of a connection by `deadline`.

        Raises:
            StoreClosedError: the store was closed, before or meanwhile.
            StoreUnavailableError: the server is gone, or does not answer.
        """
        try:
            return self.attempt(operation, deadline)
        except Failure as failure:
            raise failure.public() from failure.__cause__

    def attempt(self, operation: Callable[[Channel], T], deadline: Deadline) -> T:
        """Do the same as `call`, but raise a `Failure` instead of a `StoreUnavailableError`."""
        self.refuse_if_closed()
        channel = None
        try:
            channel = self._take(deadline)
            channel.begin(deadline)
            self._busy.add(channel)
            self.refuse_if_closed()  # again: whoever closes it now finds this channel
            return operation(channel)
        except (Unanswered, Disconnected, OSError) as error:
            if isinstance(error, OSError) and error.errno is None:  # not the system's: a signal handler raised it
                raise
            self.refuse_if_closed()
            raise self._failure(error, channel, deadline) from error
        finally:
            if channel is not None:
                self._give_back(channel)

    def refuse_if_closed(self) -> None:
        """Raise `StoreClosedError` after `close`."""
        if self._is_closed:
            raise StoreClosedError(f"{self} is closed; open the store again")

    def close(self) -> None:
        """End the calls that are under way, and give the connections back."""
        self._is_closed = True
        system.process_epoch()
        for channel in list(self._busy):
            channel.interrupt()
        self._close_idle()

    def _take(self, deadline: Deadline) -> Channel:
        """Return a connection that no other thread uses."""
        system.process_epoch()  # after a fork in C it makes the child leave what is its parent's
        try:
            return self._idle.pop()
        except IndexError as error:
            raise_unless_absent(error)
            return deadline.run(lambda: self._connect(deadline))

    def _give_back(self, channel: Channel) -> None:
        self._busy.discard(channel)
        if channel.is_whole:
            self._idle.append(channel)
            if self._is_closed:
                self._close_idle()
        else:  # and the others are not to be trusted
            channel.abandon()
            self._close_idle()

    def _failure(self, error: Exception, channel: Channel | None, deadline: Deadline) -> Failure:
        errno = error.errno if isinstance(error, OSError) else None
        if isinstance(error, Unanswered) or errno == system.errno.ETIMEDOUT:
            what = "connection" if channel is None else "answer"
            return Failure(
                f"timeout: {self}: no {what} within {deadline.waited():.3g} s; its server is stopped or overloaded, or"
                " the network is cut",
                system.errno.ETIMEDOUT,
                channel,
            )
        words = "nobody is reached there" if channel is None else "its server is gone, or hung up"
        return Failure(f"{self}: {error}; {words}", errno, channel)

    def after_fork(self) -> None:
        """In a forked child: close the connections, where two processes would mix their answers, and begin anew."""
        for channel in [*self._idle, *self._busy]:
            channel.close()
        self._begin()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _connect(self, deadline: Deadline) -> Channel:
        """Connect, in a thread: so Ctrl-C neither waits for a resolver nor leaves a connection that nobody knows."""
        endpoints = self._endpoints
        if not endpoints:
            if not self._resolving.acquire(timeout=min(deadline.left(), system.threading.TIMEOUT_MAX)):
                raise Unanswered
            try:
                endpoints = self._endpoints or self._network.resolve(self.host, self.port)
            finally:
                self._resolving.release()
        try:
            channel = Channel(self._network.connect(endpoints, deadline.ends))
        except OSError:
            self._endpoints = []
            raise
        self._endpoints = endpoints
        return channel


_all: WeakSet[Connections] = WeakSet()


def _after_fork_in_child() -> None:
    for connections in list(_all):
        connections.after_fork()


system.after_fork_in_child("tcp connections", _after_fork_in_child)
