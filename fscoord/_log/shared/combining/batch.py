"""`Batch`: decides the records of one transaction, for the writer's own operation and for the requests that it claims.

A process claims a request only while it holds the log's lock and has read to the end. The claim ends when the lock is
released, and the lock is not released between a claim and the write. So if an author takes the lock later and finds no
record of its request, no process will append that record.

The store provides a `Draft` and a `Decider`, which interpret keys and values. This package does not interpret them.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeVar

from fscoord._log.format.record import Record, changed_keys
from fscoord._log.log import LOCK_GRACE_S, Log
from fscoord._log.shared.combining import request as requests
from fscoord._log.shared.combining.outcomes import TIMES, Watch
from fscoord._log.shared.combining.request import Answer, Author, Request, decode_request
from fscoord._log.shared.combining.station import Slot, Station
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring
from fscoord.errors import StoreUnavailableError

BATCH_MAX: Final = 1 << 18
"""The largest size of a batch in bytes. The limit is lower on a mount whose WRITE request carries fewer bytes. A batch
is never split into several WRITE requests, because a lost connection could then leave a hole between its records."""

SYNCED_MAX: Final = 32
"""The largest number of requests in a batch of a durable log. The leader syncs each record separately, and shows no
sign of life to its followers during these syncs."""

_RECORD_SIZE: Final = 64
"""The largest difference in size between the records of a request and the request itself, in bytes."""

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Draft(Protocol[T_contra]):
    """The state that a store will have after the records of the batch. A draft decides one operation after another."""

    def add(self, operation: T_contra, *, is_own: bool) -> tuple[list[tuple[int, bytes, bytes]], Any]:
        """Decide `operation`. Return (records, result): at most `TIMES` records, each as (kind, key, value).

        `is_own` is true if the calling thread is the author of the operation.
        """

    def resume(self, operation: T_contra, noted: Any) -> tuple[list[tuple[int, bytes, bytes]], Any]:
        """Return (further records, result) of `operation`, whose first record is in the log already."""


class Decider(Protocol[T]):
    """Decides, encodes and decodes the operations of a store for the combiner."""

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """The types of error that a draft raises to refuse an operation. The author's call raises them."""

    @property
    def must_write_alone(self) -> type[Exception]:
        """The type of error that `Draft.add` raises if an operation's author, and not a leader, must decide it."""

    def begin(self) -> Draft[T]:
        """Return the draft for one batch. The caller holds the log's lock and has read to the end."""

    def decode(self, data: bytes) -> T:
        """Return the operation that `Operation.encode` has encoded as `data`."""

    def note(self, operation: T, found: Any) -> Any:
        """Return the part of the store's state on which the result of `operation` depends.

        `found` is the record of `operation`. The log applies this record after the call.
        """

    def encode_result(self, result: Any) -> bytes:
        """Return `result` as bytes."""

    def decode_result(self, data: bytes) -> Any:
        """Return the result that `encode_result` has encoded as `data`."""


class Operation(Protocol):
    """A write operation."""

    def encode(self) -> bytes:
        """Return the operation as bytes."""

    @property
    def size(self) -> int:
        """The approximate size of the operation's record, in bytes."""


class Write:
    """The state of one call that writes an operation.

    Attributes:
        operation: the operation.
        time: the time of its first record (wall time in nanoseconds).
        epoch: the `system.process_epoch` of the process that began the call.
        started: when the call began (monotonic, in seconds). A call of a barrier may have waited before this write.
        limit: how long the write may take, in seconds.
        deadline: when the write times out (monotonic, in seconds); see `begin_by`.
        path: the path of the published request; empty if there is no request to withdraw.
        watch: watches for the record of the request; None if no request was published.
        is_claimed: whether a leader may have appended the record. A read under the log's lock shows if the log has it.
        result: the result; None until this process has decided the operation.
        refusal: the error with which the operation was refused, or None.
    """

    def __init__(self, operation: Any, time: int, limit: float, started: float | None = None) -> None:
        self.operation = operation
        self.time = time
        self.epoch = system.process_epoch()
        self.started = system.time.monotonic() if started is None else started
        self.limit = max(limit, LOCK_GRACE_S)
        self.deadline = self.started + self.limit
        self._has_begun = started is None
        self.path = ""
        self.watch: Watch | None = None
        self.is_claimed = False
        self.result: Any = None
        self.refusal: BaseException | None = None

    def begin_by(self, now: float) -> None:
        """Move the deadline of a write in a longer call to `limit` seconds after `now`, if that is a later time.

        Only the first call of this method has an effect. A write that is part of a longer call does not read the clock
        when it begins, because most writes end before they need a deadline.
        """
        if not self._has_begun:
            self._has_begun = True
            self.deadline = max(self.deadline, now + self.limit)

    def waited(self) -> float:
        """Return how long the call has taken, in seconds."""
        return system.time.monotonic() - self.started

    def left(self) -> float:
        """Return how long the write may still take, in seconds."""
        now = system.time.monotonic()
        self.begin_by(now)
        return max(0.0, self.deadline - now)


class Claim:
    """A request that a leader has claimed.

    Attributes:
        address: the address at which the author waits for the answer.
        answer: the answer that the leader sends if the write succeeds.
        keys: the keys that the records of the request change.
    """

    def __init__(self, request: Request) -> None:
        self.address = request.address
        self.answer = Answer(request.time, requests.UNKNOWN)
        self.keys: list[bytes] = []


class Batch:
    """Decides the records of one transaction: for the caller's own write, and for the requests that the batch claims.

    Args:
        log: the log.
        decider: decides the operations.
        write: the caller's own write.
        station: the station (the files that contain the requests), if the caller is the leader; None if the batch
            claims no requests.
        slot: the leader's slot (the sockets that it uses); None without `station`.

    Attributes:
        claims: the requests that the last attempt of the transaction has claimed.
        failed: the requests that earlier attempts have claimed. The author of each of these requests must search the
            log for the record of the request.
        keys: the keys that the records of the caller's own write change.
    """

    def __init__(
        self, log: Log, decider: Decider[Any], write: Write, station: Station | None = None, slot: Slot | None = None
    ) -> None:
        self._log = log
        self._decider = decider
        self._write = write
        self._station = station
        self._slot = slot
        self._life = int(write.started * 1e9)
        self.claims: list[Claim] = []
        self.keys: list[bytes] = []
        self.failed: list[Claim] = []

    def __len__(self) -> int:
        """Return the approximate size of the records of the caller's own write, in bytes."""
        return int(self._write.operation.size)

    def show_life(self) -> None:
        """Show the followers that this process waits for the log lock and is not stopped. Called every `LIFE_S`."""
        self._show(requests.WAITING)

    def _show(self, phase: int) -> None:
        if self._station is not None:
            self._life += 1
            with ignoring(OSError):  # followers then take this leader for stopped, and write alone
                self._station.show(phase, self._life)

    def decide(self, session: int) -> list[Record]:
        """Claim requests, and return the records to append. All are data records. `session` is the handle's session.

        The log calls this method under the log lock, directly before the write. The handle has read to the end, and the
        lock is not released before the write. If the transaction is repeated, this method is called again.
        """
        # An earlier attempt of this transaction has released the lock, and so has lost its claims. Do not decide these
        # requests again: their authors may have done so themselves.
        self.failed += self.claims
        self.claims, self.keys = [], []
        draft = self._decider.begin()
        records = self._decide_own(draft, session)
        if self._station is not None and self._slot is not None:
            self._show(requests.HOLDING)
            with ignoring(OSError):  # the files of this host must not fail the write. The claims so far are whole
                self._claim(draft, records, self._station, self._slot)
        return records

    def _decide_own(self, draft: Draft[Any], session: int) -> list[Record]:
        write = self._write
        # In a child that a signal handler has forked, the record of the parent is not that of this call.
        watch, first = (write.watch if system.process_epoch() == write.epoch else None), 0
        write.refusal = None
        try:
            if watch is not None and write.is_claimed:
                self._settle(watch)
            if watch is not None and watch.is_found:
                # A leader has appended the record, and died or failed before it sent the result.
                found, write.result = draft.resume(write.operation, watch.noted)
                first = 1
            else:
                write.is_claimed = False  # nothing was appended for the request, and never will be
                found, write.result = draft.add(write.operation, is_own=True)
        except self._decider.refusals as error:
            write.refusal = error  # raised after the write, so that it does not fail the requests of others
            return []
        self.keys += [key for each in found for key in changed_keys(*each)]
        assert len(found) + first <= TIMES, "each record needs a time of its own"
        return [(kind, key, value, session, write.time + first + n) for n, (kind, key, value) in enumerate(found)]

    def _settle(self, watch: Watch) -> None:
        log, shared = self._log, self._log.shared
        outcomes = None if shared is None else shared.outcomes
        if outcomes is not None and not outcomes.settle(watch, log.handle.header.generation):
            raise StoreUnavailableError(
                f"{log.path}: the leader of this host did not answer, and the log was compacted before the record of"
                " this operation could be found; the operation may or may not have taken effect, so read the store"
                " before you repeat it",
                path=log.path,
                maybe_applied=True,
            )

    def _claim(self, draft: Draft[Any], records: list[Record], station: Station, slot: Slot) -> None:
        shared = self._log.shared
        assert shared is not None, "writes are combined on mounts that hosts share"
        left = min(BATCH_MAX, shared.access.piece) - sum(
            len(key) + len(value) + _RECORD_SIZE for _, key, value, *_ in records
        )
        for path in station.requests():
            if len(self.claims) == SYNCED_MAX and self._log.handle.root.header.durable:
                return
            data = station.read(path)
            if data is None:
                continue
            request = decode_request(data)
            if request is not None:  # other bytes are removed, however many they are
                left -= len(data) + _RECORD_SIZE
                if left < 0:
                    return  # the next leader begins with this request
            is_wanted = request is not None and station.is_there(slot, request.address)
            # The removal claims the request. It fails if the author has withdrawn the request.
            if not station.remove(path):
                continue
            if request is not None and is_wanted:
                claim = Claim(request)
                self.claims.append(claim)
                records += self._decide_for(draft, request, claim)

    def _decide_for(self, draft: Draft[Any], request: Request, claim: Claim) -> list[Record]:
        """Decide `request`, set its answer, and return its records."""
        decider = self._decider
        claim.answer = Answer(request.time, requests.ALONE)
        if not self._may_write_for(request):
            return []
        try:
            found, result = draft.add(decider.decode(request.operation), is_own=False)
        except (decider.must_write_alone, *decider.refusals):
            return []  # the author then writes alone, and meets the same error
        claim.answer = Answer(request.time, requests.DONE, decider.encode_result(result))
        claim.keys = [key for each in found for key in changed_keys(*each)]
        session, time = request.author.session, request.time
        return [(kind, key, value, session, time + n) for n, (kind, key, value) in enumerate(found)]

    def _may_write_for(self, request: Request) -> bool:
        """Return whether the session of the request's author is registered, alive and in this run."""
        log, number = self._log, request.author.session
        session = log.table.sessions.get(number)
        if session is None or number in log.table.deaths:
            return False
        return request.author == Author(number, session.alive_id, log.follower.run)
