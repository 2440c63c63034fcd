"""`subscribe` reports the events of this process to a function of the program: waits, deaths, lost locks, rounds.

The events are made from the spans that a trace records, so a process reports its own waits and its own view of the
store. A program collects the events of all processes as it collects their logs.

- **Cost.** Without a subscription nothing is recorded. From the first subscription to its exit, a process records each
  wait, as with a trace. Operations that do not wait, such as ``set``, are never recorded.
- **Threads.** The callback runs in the thread in which the event happened, before the operation returns or raises. The
  thread holds no lock of the store. A slow callback delays the operation, and in a task of asyncio the event loop.
  Several threads may call the callback at once. A death that a compaction finds is reported in a thread of its own.
- **Errors.** An `Exception` of the callback is logged, and not raised in the program. Ctrl-C in a callback ends the
  operation.
- **Stores.** The callback may use a store. The events of its own calls are not reported.
- **Forks.** A forked child keeps the subscriptions. The waits that were open during the fork are reported in the parent
  only.

A lock reports its loss only if it was acquired after the first subscription.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fscoord._runtime import tracing
from fscoord._runtime.logging import logger
from fscoord._runtime.tracing import BEGIN, END, FACTS, HOLDS, KIND, NAME, OUTCOME, PLACE, RANK, WAITS, pattern_of

__all__ = ["HoldLost", "RoundCompleted", "SessionDied", "Subscription", "TelemetryEvent", "WaitEnded", "subscribe"]

DID_NOT_WAIT = ("empty", "not acquired")
"""The outcomes of calls that were told not to wait, such as ``acquire(blocking=False)``."""


@dataclass(frozen=True)
class WaitEnded:
    """A wait of this process has ended. A wait that is a part of another wait is not reported.

    A wait for keys is reported if it slept. All other waits are reported even if they ended at once.

    Attributes:
        kind: the kind of the wait: one of the kinds of spans of ``docs/trace.md``, such as ``barrier`` or ``lock``. The
            kind is ``wait`` or ``queue`` if the program itself waited for a key or a queue.
        name: the name of the barrier, lock, key or queue, with the prefix of a `~fscoord.PrefixStore`.
        seconds: how long the call waited.
        outcome: ``passed``, ``time-out``, ``death``, or another outcome of ``docs/trace.md``.
        rank: the rank of the caller, or None.
        store: a text that identifies the store on all hosts, or ``""``.
        ended_by: the process that ended the wait, as ``host:pid``, or ``""`` if unknown.
    """

    kind: str
    name: str
    seconds: float
    outcome: str
    rank: int | None
    store: str
    ended_by: str

    @property
    def pattern(self) -> str:
        """The name with a star for each number or long hexadecimal id: a label of metrics that has few values."""
        return pattern_of(self.name)


@dataclass(frozen=True)
class SessionDied:
    """This process has recorded the death of another session in the store. No other process reports this death.

    Attributes:
        process: the process that died, as ``host:pid``.
        session: the number of its session, which is one open handle of the store.
        rank: the rank that the session announced, or None.
    """

    process: str
    session: int
    rank: int | None


@dataclass(frozen=True)
class HoldLost:
    """This process has found out that it has lost a lock, a semaphore or an election. Each loss is reported once.

    Attributes:
        kind: ``lock`` or ``election``.
        name: the name of the lock, with the prefix of a `~fscoord.PrefixStore`.
        token: the fencing token of the lost hold.
        seconds: the time from the acquisition until the process found out.
        store: a text that identifies the store on all hosts, or ``""``.
    """

    kind: str
    name: str
    token: int
    seconds: float
    store: str


@dataclass(frozen=True)
class RoundCompleted:
    """A round of an elastic rendezvous is complete, and this node takes part in it.

    Attributes:
        run_id: the name of the rendezvous.
        round: the number of the round, from 0.
        node_rank: the rank of this node.
        nodes: the number of nodes.
    """

    run_id: str
    round: int
    node_rank: int
    nodes: int


TelemetryEvent = WaitEnded | SessionDied | HoldLost | RoundCompleted


class Subscription:
    """A subscription to the events of this process. It is also a context manager.

    Args:
        callback: called with each event.
    """

    def __init__(self, callback: Callable[[TelemetryEvent], object]) -> None:
        self._callback = callback
        tracing.subscribe(self._receive)

    def close(self) -> None:
        """End the subscription. A call of the callback that another thread has begun goes on. May be called twice."""
        tracing.subscribers.pop(self._receive, None)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, span: tracing.Span) -> None:
        for event in _events_of(span):
            try:
                self._callback(event)
            except Exception as error:  # noqa: BLE001 - of the program
                logger(__name__).exception("a subscriber raised %r; the operation goes on", error)


def subscribe(callback: Callable[[TelemetryEvent], object]) -> Subscription:
    """Call `callback` with each `TelemetryEvent` of this process from now on, until the subscription is closed.

    The documentation of this module says in which thread, and what happens after an exception or a fork.
    """
    return Subscription(callback)


def _events_of(span: tracing.Span) -> Iterator[TelemetryEvent]:
    """Yield the events that `span` shows. The span has ended, or is that of a lock that was acquired just now."""
    kind, name, place, outcome = span[KIND], span[NAME], span[PLACE], span[OUTCOME]
    facts = dict(zip(span[FACTS::2], span[FACTS + 1 :: 2], strict=False))
    seconds = (span[END] - span[BEGIN]) / 1e9
    waited = facts.get("waited_ns")
    if kind == "death":
        yield SessionDied(name, facts["session"], facts["dead_rank"])
    elif kind in HOLDS and waited is not None:
        if not outcome:
            yield WaitEnded(kind, name, waited / 1e9, "passed", span[RANK], place, "")
        elif outcome == "lost":
            yield HoldLost(kind, name, facts["token"], seconds - waited / 1e9, place)
    elif kind in WAITS and outcome not in DID_NOT_WAIT:
        yield WaitEnded(kind, name, seconds, outcome, span[RANK], place, facts.get("by", ""))
        if kind == "rendezvous" and outcome == "passed":
            yield RoundCompleted(name, facts["round"], facts["node_rank"], facts["nodes"])
