"""`Transactions`, which reads and writes the keys of an `~fscoord.EtcdStore`; `KeyWatcher`, which waits for keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from fscoord._arguments import called, key_text, missing_error
from fscoord._runtime import system
from fscoord._waiting import timing
from fscoord._waiting.awaited import KEY, QUEUE
from fscoord._waiting.timing import Backoff, SlowWaitLogger
from fscoord.errors import (
    CompactedError,
    LimitExceededError,
    SessionDeadError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from fscoord.stores.etcd.requests import (
    CONDITIONS_MAX,
    OPERATIONS_MAX,
    KeySpace,
    Request,
    compare,
    flatten_responses,
    key_values,
    nest_operations,
    range_of,
    revision_of,
    unb64,
)

if TYPE_CHECKING:
    from fscoord.stores.etcd.client import Client

T = TypeVar("T")

Requests = Sequence[Request]

WATCH_MAX_S: Final = 10.0
"""How many seconds a watch lasts before the keys are read again.

A member that is cut off from the other members or from this host keeps the watch open, but sends nothing. The read
detects such a member.
"""

BROKEN_WATCH_PAUSE_S: Final = 0.02
"""The pause, in seconds, after a watch that has ended without an answer."""


class WatchRange(NamedTuple):
    """A range of keys to watch: `key` if `end` is None, otherwise all keys from `key` up to but not including `end`.

    If `deletions` is true, only deletions are watched, otherwise only writes.
    """

    key: bytes
    end: bytes | None = None
    deletions: bool = False

    def bound(self) -> bytes:
        """Return the first key after the range."""
        return self.key + b"\0" if self.end is None else self.end


class KeySnapshot(NamedTuple):
    """The result of a read that did not find all names, with the key ranges to watch until the missing names exist.

    Attributes:
        revision: the revision of the read.
        missing: the missing names.
        watched: for each missing name, the ranges to watch. A write in one of these ranges makes the name exist.
        also: other ranges to watch. An event in one of these ranges also ends the watch.
    """

    revision: int
    missing: Sequence[bytes]
    watched: Sequence[Sequence[WatchRange]]
    also: Sequence[WatchRange] = ()


class TxnResult(NamedTuple):
    """The outcome of a write.

    Attributes:
        is_done: whether the conditions were true. If so, the write was committed.
        answers: the answers to the operations that etcd executed. These are the operations in the argument `success` of
        `Transactions.write` if the conditions were true, and otherwise those in `failure`.
        revision: the revision of the transaction.
    """

    is_done: bool
    answers: list[dict[str, Any]]
    revision: int


class Transactions:
    """Executes the reads and writes of one handle.

    Attributes:
        session_number: the number of this handle's session, or 0 if the handle has none. `LeaseSession` sets it.
    """

    def __init__(self, client: Client, keys: KeySpace) -> None:
        self._client = client
        self._keys = keys
        self.session_number = 0

    def read(self, operations: Requests, limit: float) -> tuple[list[dict[str, Any]], int]:
        """Execute the reads `operations` at one revision. Return the answers, and the revision.

        Raises:
            StoreUnavailableError: no answer came within `limit` seconds, or etcd compacted its history during each try.
        """
        backoff = Backoff(limit)
        while True:
            answers: list[dict[str, Any]] = []
            revision = 0
            try:
                for start in range(0, max(1, len(operations)), OPERATIONS_MAX):
                    batch = operations[start : start + OPERATIONS_MAX]
                    if revision:  # a later transaction: read at the revision of the first transaction
                        batch = [{"request_range": {**each["request_range"], "revision": revision}} for each in batch]
                    reply = self._client.call("kv/txn", {"success": nest_operations(batch)}, limit)
                    revision = revision or revision_of(reply)
                    answers += flatten_responses(reply.get("responses", ()))
            except CompactedError as error:  # etcd removed the revision before the last transaction could read at it
                if backoff.pause():
                    continue
                raise StoreUnavailableError(
                    f"{self._client}: etcd compacted its history during each of {backoff.tries} reads of"
                    f" {len(operations)} keys, for {backoff.waited():.3g} s; configure etcd to compact less often"
                ) from error
            return answers, revision

    def write(self, success: Requests, limit: float, conditions: Requests = (), failure: Requests = ()) -> TxnResult:
        """Execute the operations `success` if all `conditions` are true, and otherwise the operations `failure`.

        A caller may retry a write if `is_done` is false, because then nothing was written. A caller must not retry
        after an error with ``maybe_applied``. etcd may have committed the first try, so the retry could add, append or
        pop a second time.

        If the handle has a session, the existence of its lease key is one more condition. When etcd has deleted the
        lease key, other processes may know that the session is dead. So no later write of the session may take effect.

        Raises:
            LimitExceededError: there are too many operations for one transaction.
            SessionDeadError: the lease of the session has expired.
            StoreUnavailableError: no answer came within `limit` seconds.
        """
        if len(conditions) > CONDITIONS_MAX:
            raise LimitExceededError(
                f"{self._client}: {len(conditions)} keys to compare or to add to are over the limit of"
                f" {CONDITIONS_MAX} that etcd takes in one transaction; nothing was written"
            )
        if len(success) > OPERATIONS_MAX:
            raise LimitExceededError(
                f"{self._client}: {len(success)} keys are over the limit of {OPERATIONS_MAX} that etcd writes in one"
                " transaction; nothing was written. Write them in several calls"
            )
        system.process_epoch()  # in the child of a fork by C code, this resets the parent's `session_number`
        number = self.session_number
        if number:
            life = self._keys.life(number)
            conditions = [*conditions, compare(life, "create", 0, "GREATER")]
            failure = [*failure, range_of(life, keys_only=True)]
        nested = nest_operations(success, len(conditions))
        body = {"compare": list(conditions), "success": nested, "failure": list(failure)}
        reply = self._client.call("kv/txn", body, limit, writes=True)
        answers = flatten_responses(reply.get("responses", ()))
        is_done = bool(reply.get("succeeded"))
        if number and not is_done and not key_values(answers.pop()):
            raise SessionDeadError(
                f"{self._client}: session {number} of this handle is dead, because its lease was not renewed for longer"
                " than session_ttl; nothing was written. Open the store again"
            )
        return TxnResult(is_done, answers, revision_of(reply))

    def pause_before_retry(self, backoff: Backoff, others: str, name: bytes = b"") -> None:
        """Pause before the next try of a write whose conditions were false.

        `others` describes the changes of other processes, for the message.

        Raises:
            StoreTimeoutError: the time limit of `backoff` has passed.
        """
        if not backoff.pause():
            raise StoreTimeoutError(
                f"{self._client}: other processes {others} at each of {backoff.tries} tries for"
                f" {backoff.waited():.3g} s",
                keys=[key_text(name)] if name else [],
                waited=backoff.waited(),
            )


class KeyWatcher:
    """Waits for keys on behalf of one handle. Each wait reads, and then watches from the revision after the read.

    Args:
        client: the client of the handle.
        show: a function that shows a long wait to other processes. It is called with the logger of the wait, the kind
            of the missing names, and the names.
    """

    def __init__(self, client: Client, show: Callable[[SlowWaitLogger, str, list[bytes]], object]) -> None:
        self._client = client
        self._show = show
        self._outer = system.threading.local()

    @contextmanager
    def part_of(self, slow_logger: SlowWaitLogger | None) -> Iterator[None]:
        """Context manager in which this thread's waits are shown as one wait, the wait that `slow_logger` logs."""
        self._outer.slow_logger = slow_logger
        try:
            yield
        finally:
            self._outer.slow_logger = None

    def wait(
        self,
        limit: float,
        look: Callable[[float], T | KeySnapshot],
        what: str,
        accept: Callable[[bytes], T] | None = None,
    ) -> T:
        """Call `look` at once and after each change of a missing name, until it returns a result. Return the result.

        Args:
            limit: the longest wait, in seconds.
            look: reads the names, and returns a result or a snapshot of the missing names. Its argument is its timeout,
                in seconds.
            what: the kind of the names, for messages.
            accept: makes the result from a value that a watch has reported, so that no other read is needed. Pass
                `accept` only if the wait is for the value of a single key.

        Raises:
            StoreTimeoutError: a name was still missing after `limit` seconds.
        """
        started, outer = system.time.monotonic(), getattr(self._outer, "slow_logger", None)
        slow_logger = SlowWaitLogger(__name__, started=started)
        shown = slow_logger if outer is None else outer
        left = limit
        try:
            while True:
                seen = look(left)
                if not isinstance(seen, KeySnapshot):
                    return seen
                now = system.time.monotonic()
                left = limit - (now - started)
                missing = list(seen.missing)
                if left > 0:
                    longest = self.show_if_long(shown, QUEUE if "queue" in what else KEY, missing)
                    slow_logger.warn_if_due(lambda: f"{called(what, missing)} in {self._client}")  # noqa: B023
                    missing, value = self.watch(seen, min(left, longest))
                    if value is not None and accept is not None:
                        return accept(value)
                waited = system.time.monotonic() - started
                left = max(0.0, limit - waited)
                if missing and waited >= limit:
                    raise missing_error(self._client, what, missing, waited)
        finally:
            slow_logger.end()

    def show_if_long(self, slow_logger: SlowWaitLogger, kind: str, missing: list[bytes]) -> float:
        """Show the wait of `slow_logger` if it is long. Return how long a watch lasts before the next call, in seconds.

        A wait that is not shown yet reads once more when it has become long.
        """
        now = system.time.monotonic()
        if not slow_logger.is_long(now):
            return min(WATCH_MAX_S, slow_logger.started + timing.SHOW_S - now)
        self._show(slow_logger, kind, missing)
        return WATCH_MAX_S

    def watch(self, seen: KeySnapshot, limit: float) -> tuple[list[bytes], bytes | None]:
        """Watch until all missing names of `seen` have been written, or for `limit` seconds.

        The watch starts at the revision after the read. So the watch also reports a write between the read and the
        start of the watch. If the connection is lost, no error is raised, and the caller must read again.

        Returns:
            The names that are still missing, and the last value that was written.
        """
        value = None
        ends = system.time.monotonic() + limit
        is_broken = True
        missing = dict(enumerate(seen.missing))
        ranges = [(index, each) for index, some in enumerate([*seen.watched, seen.also]) for each in some]
        request = _covering_watch([each for _, each in ranges], seen.revision + 1)
        stream = self._client.open_stream(request, limit)
        try:
            while missing and stream is not None:
                reply = stream.next(ends - system.time.monotonic())
                if reply is None or reply.get("canceled"):
                    break
                is_broken = False
                for event in reply.get("events", ()):
                    key, is_deletion = unb64(event["kv"]["key"]), event.get("type") == "DELETE"
                    for index, each in ranges:
                        if each.deletions == is_deletion and each.key <= key < each.bound():
                            if index == len(seen.missing):  # one of `also`
                                return [], None
                            missing.pop(index, None)
                            value = unb64(event["kv"].get("value"))
        finally:
            if stream is not None:
                self._client.close_stream(stream)
        if is_broken:
            system.time.sleep(max(0.0, min(BROKEN_WATCH_PAUSE_S, ends - system.time.monotonic())))
        return list(missing.values()), value


def _covering_watch(ranges: Sequence[WatchRange], revision: int) -> Request:
    """Return one watch request that covers all `ranges` and the keys between them, from `revision` on.

    One request for each range would not work: over HTTP/1 all requests except the first may be lost, because Go's
    server discards the rest of the body when the response begins (net/http, ResponseWriter.Write).
    """
    first, bound = min(each.key for each in ranges), max(each.bound() for each in ranges)
    end = None if len(ranges) == 1 and ranges[0].end is None else bound
    bounds = range_of(first, end)["request_range"]
    filters = [] if any(each.deletions for each in ranges) else ["NODELETE"]
    return {"create_request": {**bounds, "start_revision": str(revision), "filters": filters}}
