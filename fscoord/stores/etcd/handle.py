"""`EtcdHandle`: the part of an `~fscoord.EtcdStore` that makes transactions, and waits for what others write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from fscoord._runtime import system
from fscoord._waiting.backoff import Backoff
from fscoord._waiting.slow_wait import Patience
from fscoord.arguments import key_names, key_text, missing_message
from fscoord.errors import LimitExceededError, SessionDeadError, StoreTimeoutError, StoreUnavailableError
from fscoord.store import Store
from fscoord.stores.etcd.requests import (
    OPERATIONS_MAX,
    Names,
    Request,
    compare,
    decoded,
    found,
    grouped,
    range_of,
    revision_of,
    ungrouped,
    watch,
)

if TYPE_CHECKING:
    from fscoord.stores.etcd.client import Cluster

__all__ = ["Done", "EtcdHandle", "Look", "Watched"]

T = TypeVar("T")

SLICE_S: Final = 10.0
"""How long a watch goes on before the keys are read again: so a member that lost the others, or its network, without a
word is found out."""

BROKEN_PAUSE_S: Final = 0.02
"""How long to do nothing after a watch that ended at once."""


class Watched(NamedTuple):
    """Keys to be told of: `key`, or all from there to before `end`; when they are written, or when they are deleted."""

    key: bytes
    end: bytes | None = None
    deletions: bool = False

    def bound(self) -> bytes:
        """Return the first key behind these."""
        return self.key + b"\0" if self.end is None else self.end


class Look(NamedTuple):
    """What a wait has seen at `revision`: names that are `missing`, and for each what is to be watched."""

    revision: int
    missing: Sequence[bytes]
    watched: Sequence[Sequence[Watched]]
    also: Sequence[Watched] = ()
    """What ends the sleep whatever is missing."""


class Done(NamedTuple):
    """What became of a write: whether its conditions held, the answers to what was done then, and the revision."""

    is_done: bool
    answers: list[dict[str, Any]]
    revision: int


class EtcdHandle(Store):
    """A handle on the keys below one prefix of an etcd cluster."""

    _cluster: Cluster
    _names: Names
    _session_number = 0
    """The session that this handle writes in, 0 for none yet."""

    def _read(self, operations: Sequence[Request], limit: float | None = None) -> tuple[list[dict[str, Any]], int]:
        """Return the answer to each of the range `operations`, all at one revision, and that revision."""
        from fscoord.stores.etcd.client import CompactedError

        allowed = self._timeout if limit is None else limit
        backoff = Backoff(allowed)
        while True:
            answers: list[dict[str, Any]] = []
            revision = 0
            try:
                for start in range(0, max(1, len(operations)), OPERATIONS_MAX):
                    batch = operations[start : start + OPERATIONS_MAX]
                    if revision:
                        batch = [{"request_range": {**each["request_range"], "revision": revision}} for each in batch]
                    reply = self._cluster.call("kv/txn", {"success": grouped(batch)}, allowed)
                    revision = revision or revision_of(reply)
                    answers += ungrouped(reply.get("responses", ()))
            except CompactedError as error:  # between two batches
                if backoff.pause():
                    continue
                raise StoreUnavailableError(
                    f"{self._cluster}: etcd compacted its history during each of {backoff.tries} reads of"
                    f" {len(operations)} keys, for {backoff.waited():.3g} s; let it compact less often"
                ) from error
            return answers, revision

    def _pause(self, backoff: Backoff, others: str, name: bytes = b"") -> None:
        """Pause before the next try of a write that failed because of what `others` did.

        Raises:
            StoreTimeoutError: the time for it is up.
        """
        if not backoff.pause():
            raise StoreTimeoutError(
                f"{self._cluster}: others {others} at each of our {backoff.tries} tries for {backoff.waited():.3g} s",
                keys=[key_text(name)] if name else [],
                waited=backoff.waited(),
            )

    def _write(
        self,
        success: Sequence[Request],
        conditions: Sequence[Request] = (),
        failure: Sequence[Request] = (),
    ) -> Done:
        """Do `success` if all `conditions` hold, or else `failure`.

        A handle that has a session writes only as long as the session lives: others may have been told that it is dead.
        """
        if len(success) > OPERATIONS_MAX:
            raise LimitExceededError(
                f"{self._cluster}: {len(success)} keys are over the {OPERATIONS_MAX} that etcd writes at once; nothing"
                " was written"
            )
        number = self._own_session()
        if number:
            life = self._names.life(number)
            conditions = [*conditions, compare(life, "create", 0, "GREATER")]
            failure = [*failure, range_of(life, keys_only=True)]
        body = {"compare": list(conditions), "success": grouped(success), "failure": list(failure)}
        reply = self._cluster.call("kv/txn", body, self._timeout, writes=True)
        answers = ungrouped(reply.get("responses", ()))
        is_done = bool(reply.get("succeeded"))
        if number and not is_done and not found(answers.pop()):
            raise SessionDeadError(
                f"{self._cluster}: session {number} of this handle was taken for dead, because etcd heard nothing of it"
                " for longer than session_ttl; nothing was written. Open the store again"
            )
        return Done(is_done, answers, revision_of(reply))

    def _own_session(self) -> int:
        """Return the number of the session that this handle writes in, 0 for none."""
        return self._session_number

    def _await(
        self, limit: float, look: Callable[[float], T | Look], what: str, accept: Callable[[bytes], T] | None = None
    ) -> T:
        """Return what `look` finds, looking again whenever it may have changed, until `limit` seconds are over.

        With `accept`, the value that the first news bring is good enough, and what it makes of that is returned: right
        where one key's value is all that was missing, for it was written since the look.
        """
        patience = Patience()
        left = limit
        while True:
            seen = look(left)
            if not isinstance(seen, Look):
                return seen
            left = limit - (system.time.monotonic() - patience.started)
            missing = list(seen.missing)
            if left > 0:
                patience.speak(__name__, lambda: f"{what} {key_names(missing)} in {self._cluster}")  # noqa: B023
                missing, value = self._sleep(seen, min(left, SLICE_S))
                if value is not None and accept is not None:
                    return accept(value)
            waited = system.time.monotonic() - patience.started
            left = max(0.0, limit - waited)
            if missing and waited >= limit:
                raise StoreTimeoutError(
                    f"{self._cluster}: {missing_message(what, missing, waited)}",
                    keys=[key_text(name) for name in missing],
                    waited=waited,
                )

    def _sleep(self, seen: Look, limit: float) -> tuple[list[bytes], bytes | None]:
        """Wait until all that `seen` lacked has been written, or `limit` seconds; return what has not come, and the
        value that came last.
        """
        value = None
        ends = system.time.monotonic() + limit
        is_broken = True
        coming = dict(enumerate(seen.missing))
        ranges = [(index, each) for index, some in enumerate([*seen.watched, seen.also]) for each in some]
        request = _covering([each for _, each in ranges], seen.revision + 1)
        stream = self._cluster.open_stream("watch", [request], limit)
        try:
            while coming and stream is not None:
                news = stream.next(ends - system.time.monotonic())
                if news is None or news.get("canceled"):
                    break
                is_broken = False
                for event in news.get("events", ()):
                    key, is_deletion = decoded(event["kv"]["key"]), event.get("type") == "DELETE"
                    for index, each in ranges:
                        if each.deletions == is_deletion and each.key <= key < each.bound():
                            if index == len(seen.missing):
                                return [], None
                            coming.pop(index, None)
                            value = decoded(event["kv"].get("value"))
        finally:
            if stream is not None:
                self._cluster.close_stream(stream)
        if is_broken:
            system.time.sleep(max(0.0, min(BROKEN_PAUSE_S, ends - system.time.monotonic())))
        return list(coming.values()), value


def _covering(ranges: Sequence[Watched], revision: int) -> Request:
    """Return the one request for a watch that covers all `ranges`, and what lies between them.

    A stream takes several requests, but over HTTP/1 all but the first may be lost: Go's server throws away what it has
    not read of a body when the answer begins (net/http, ResponseWriter.Write).
    """
    first, bound = min(each.key for each in ranges), max(each.bound() for each in ranges)
    end = None if len(ranges) == 1 and ranges[0].end is None else bound
    return watch(first, end, revision, "" if any(each.deletions for each in ranges) else "NODELETE")
