"""`Combiner`: writes the operations of one handle, together with operations of other processes on the same host.

A writer tries to take the seat, a lock between the processes of the host. If the writer gets the seat, it leads: it
takes the log's lock, reads to the end, claims all published requests, decides its own operation and the requests, and
appends all records in one write. Otherwise it publishes a request and waits for the answer. After it has published the
request, the writer tries once more to take the seat. The leader may have left the seat before the request existed, and
then no other process would claim the request.

The cases of a request without an answer:

========================================== =========================================== ===============================
the author finds                           so the operation                            the author
========================================== =========================================== ===============================
its own unlink(2) succeeds                 was not claimed, and never will be          leads, writes alone or times out
the file is gone, its record is in the log took effect                                 returns the result
the file is gone, the handle has read a    took effect, or was not appended: the       returns the result, or decides
later snapshot instead of the records      snapshot has the last time of each session  the operation
the file is gone, the author has the log's was not appended, because a claim ends with decides the operation, under
lock, and its record is not in the log     the hold of the lock                        the same hold
the file is gone, the author does not get  may still be appended                       raises, with ``maybe_applied``
the log's lock before the deadline
========================================== =========================================== ===============================

A read of the log shows that the operation took effect. Only a read under the log's lock shows that it was not appended:
without the lock, a leader that was stopped between its claim and its write may resume.

A thread that waits for an answer holds no lock. Otherwise the threads of a process could not share a batch, and the
leader could wait for a follower. The `Station` does all I/O on files of the host. If it fails, the author takes the
log's lock itself, and its caller sees no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fscoord._log.locking.log_lock import OFD
from fscoord._log.log import BATCH, LOCK_GRACE_S, Log
from fscoord._log.recovery import CLOSED
from fscoord._log.shared.combining import request as requests
from fscoord._log.shared.combining.batch import Batch, Decider, Operation, Write
from fscoord._log.shared.combining.outcomes import Outcomes
from fscoord._log.shared.combining.request import Answer, Author, decode_request, encode_request
from fscoord._log.shared.combining.station import Slot, Station
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError, StoreError, StoreTimeoutError, StoreUnavailableError

LOOK_S = 0.05
"""How long a follower waits for an answer between two attempts to take the seat, in seconds."""

STALLED_S = 0.5
"""A leader that waits for the log's lock seems stopped after this time without a sign of life, in seconds. Each
follower then withdraws its request, and takes the log's lock itself."""

SILENT_S = 2.0
"""A leader that holds the log's lock seems stopped after this time without a sign of life, in seconds. Such a leader
may be dead: a child that has inherited the lock of the seat keeps the seat taken."""

TELL_S = 0.005
"""How long an author waits for an answer after its leader has left the seat, in seconds."""

RETRY_S = 5.0
"""The pause between two attempts to open a station (the directory of requests), and between two checks of an open
station, in seconds."""


class Combiner:
    """Writes the operations of one handle, combined with those of other writers on the host.

    Args:
        log: the log of the handle.
        decider: decides the operations.
        notify: a function that wakes the waiters for the given keys.
        outcomes: finds the records of requests.
    """

    def __init__(
        self, log: Log, decider: Decider[Any], notify: Callable[[Iterable[bytes]], None], outcomes: Outcomes
    ) -> None:
        self._log = log
        self._decider = decider
        self._notify = notify
        self._outcomes = outcomes
        self._stations: dict[str, Station] = {}  # of one station; threads that open one at once agree by `setdefault`
        self._is_closed = False
        self._check_at = 0.0
        self._stalled = b""
        self._jitter = SILENT_S * system.random_bytes(1)[0] / 512

    def write(self, operation: Operation, limit: float, started: float | None = None) -> Any:
        """Write `operation`, and return its result.

        Args:
            operation: the operation.
            limit: how long it may take, in seconds.
            started: the beginning of the caller's own call, if it has waited before (monotonic, in seconds); None: now.

        Raises:
            StoreTimeoutError: within `limit` seconds, this process did not get the log's lock, and no other process of
                the host appended the record for it. ``maybe_applied`` is true if another process may still append it.
            StoreUnavailableError, StoreGoneError, CorruptLogError: as in `Log.update`.
        """
        if not system.fork_marker[0]:
            system.recover_from_fork()
        log = self._log
        if log.handle.shared.leader == system.threading.get_ident():
            raise log.entered_twice()
        write = Write(operation, log.writer.next_time(), limit, started)
        station = self._station_for(operation, write.started)
        if station is None:
            return self._write_alone(write)
        taken: list[Slot] = []
        try:
            try:
                station.take_slot(taken)
            except OSError as error:
                raise_if_foreign(error)
                self._lose(station, error)
                return self._write_alone(write)
            return self._write_with(station, taken[0], write)
        finally:
            for slot in taken:
                station.leave_seat(slot)
                if system.process_epoch() == station.epoch:
                    station.give_back(slot)

    def close(self) -> None:
        """Close the station. A thread that waits for a leader's answer withdraws its request, and raises an error."""
        self._is_closed = True
        for station in list(self._stations.values()):
            self._drop(station)

    # -- the station -----------------------------------------------------------------------------------------------

    def _station_for(self, operation: Operation, now: float) -> Station | None:
        """Return the station; None if `operation` must be written alone. `now` is the monotonic time, in seconds."""
        handle, shared = self._log.handle, self._log.shared
        if operation.size > requests.REQUEST_MAX or handle.lock.kind != OFD:  # a long operation is its own batch
            return None
        if shared is None or shared.access.coherence != "direct" or handle.is_copy:
            return None
        station = self._stations.get("open")
        if station is not None and station.is_closed:  # after a fork
            self._drop(station)
            self._check_at, station = 0.0, None
        if now < self._check_at:
            return station
        self._check_at = now + RETRY_S
        if station is not None:
            if not station.is_lost:
                return station
            self._drop(station)
        if self._has_ended():
            return None
        try:
            station = Station(handle.root.key)
        except (OSError, FscoordError, ImportError) as error:
            raise_if_foreign(error)
            self._lose(None, error)
            return None
        first = self._stations.setdefault("open", station)
        if first is not station:
            station.close()
        if self._has_ended():  # perhaps only since the first look
            self._drop(first)
            return None
        return first

    def _has_ended(self) -> bool:
        """Return whether the handle was closed, or is being closed by another thread."""
        return self._is_closed or bool(self._log.handle.recovery & CLOSED)

    def _drop(self, station: Station) -> None:
        if self._stations.get("open") is station:
            self._stations.pop("open", None)
        station.close()

    def _lose(self, station: Station | None, error: BaseException) -> None:
        """Close `station`, because it failed with `error`. `station` is None if no station could be opened.

        `_station_for` tries to open a station again at its next check, at most `RETRY_S` seconds later.
        """
        logger(__name__).debug("%s: this process writes alone for now: %s", self._log.path, str(error))
        if station is not None:
            self._drop(station)

    # -- the author ------------------------------------------------------------------------------------------------

    def _write_alone(self, write: Write) -> Any:
        """Write the operation of `write` under the log's lock, without claiming requests."""
        batch = Batch(self._log, self._decider, write)
        try:
            if write.is_claimed:
                # Usually the log has the record, and one read is enough. Read it before the wait for the lock: if other
                # hosts compact the log twice during that wait, no file has the record any more.
                self._log.refresh(write.left())
                if self._is_complete(write):
                    return write.result
            self._log.update(BATCH, b"", batch, None, write.left())
        except (StoreError, StoreTimeoutError) as error:
            if write.is_claimed:  # no read under the lock has shown yet whether the record was appended
                # In a durable log, the error may be that the sync of this record failed.
                if not self._log.handle.root.header.durable and self._is_complete(write):
                    return write.result
                error.maybe_applied = True
            raise
        return self._finish(write, batch)

    def _finish(self, write: Write, batch: Batch) -> Any:
        """Wake the waiters for the keys of `batch`, and return the result of `write` or raise its refusal."""
        keys = batch.keys + [key for claim in batch.claims for key in claim.keys]
        if keys and self._log.handle.bell:
            self._notify(keys)
        if write.refusal is not None:
            try:
                raise write.refusal
            finally:
                write.refusal = None  # break the reference cycle of the error's traceback and this frame
        return write.result

    def _write_with(self, station: Station, slot: Slot, write: Write) -> Any:
        log = self._log
        try:
            has_seat = station.try_seat(slot)
            is_stalled = not has_seat and bool(self._stalled) and station.seat_state() == self._stalled
        except OSError as error:
            raise_if_foreign(error)
            self._lose(station, error)
            return self._write_alone(write)
        if has_seat:  # outside of the ``try``: an error of the station after the write must not repeat the write
            return self._lead(station, slot, write, write.limit)
        if is_stalled:
            return self._write_alone(write)  # the leader that was stopped has not moved since
        self._stalled = b""
        session = log.handle.lock.session
        data = self._encode(write, session, slot)
        if data is None:
            return self._write_alone(write)
        token = session, write.time
        decider, operation = self._decider, write.operation
        write.watch = self._outcomes.open(
            token, lambda found: decider.note(operation, found), log.handle.header.generation
        )
        try:
            try:
                # Before the publishing: an interruption directly after it must find the path.
                write.path = station.request_path(write.started, f"{session}.{write.time}")
                station.publish(slot, data, write.path)
            except OSError as error:
                raise_if_foreign(error)
                self._take_back(station, write)
                self._lose(station, error)
                return self._write_alone(write)
            try:
                return self._follow(station, slot, write)
            except OSError as error:
                # Of the seat: it is lost, or this is a child that a signal handler has forked.
                if isinstance(error, FscoordError):
                    raise
                raise_if_foreign(error)
                self._withdraw(station, write)
                self._lose(station, error)
                return self._write_alone(write)
        except StoreUnavailableError:
            watch = write.watch
            if not watch.is_found or watch.noted is not None or system.process_epoch() != station.epoch:
                raise
            # The operation took effect, but the log has been compacted and shows no result. A slow leader sends it.
            answer = self._receive(station, slot, write, min(SILENT_S, write.left()))
            if answer is None or answer.verdict != requests.DONE:
                raise
            return self._decider.decode_result(answer.result)
        finally:
            # After an interruption the request must not stay: it would be appended although its call has ended.
            if write.path and system.process_epoch() == station.epoch:
                self._withdraw(station, write)
            self._outcomes.close(token)

    def _encode(self, write: Write, session: int, slot: Slot) -> bytes | None:
        """Return the encoded request for `write`; None if it is too long, or this handle has no session yet."""
        log = self._log
        known = log.table.sessions.get(session)
        if known is None or log.handle.recovery & CLOSED:
            return None
        author = Author(session, known.alive_id, log.follower.run)
        data = encode_request(author, write.time, slot.name, write.operation.encode())
        return data if len(data) <= requests.REQUEST_MAX else None

    def _take_back(self, station: Station, write: Write) -> None:
        """Remove the request of `write`, if it exists, because the call that publishes it has raised an error.

        The error may come from a signal handler that ran after the request was published. If a leader has claimed the
        request meanwhile, this thread finds the record of the request when it reads the log under the log's lock.
        """
        with ignoring(OSError):  # for the same reason as the publishing
            station.remove(write.path)
        write.path = ""

    def _withdraw(self, station: Station, write: Write) -> bool:
        """Withdraw the request of `write`. Return False if a leader may have claimed it.

        Raises:
            StoreUnavailableError: the request can't be removed. A leader may claim it at any time, so the caller must
                not write alone.
        """
        path = write.path
        try:
            is_withdrawn = bool(path) and station.remove(path)
        except OSError as error:
            raise_if_foreign(error)
            write.path = ""
            raise StoreUnavailableError(
                f"{self._log.path}: the request {path} can't be withdrawn ({error}), so the operation may still take"
                " effect; make its directory writable, or remove the file",
                path=self._log.path,
                maybe_applied=True,
                errno=error.errno,
            ) from error
        write.path = ""
        if is_withdrawn:
            return True
        write.is_claimed = True
        return False

    def _follow(self, station: Station, slot: Slot, write: Write) -> Any:
        """Wait for the answer to the request of `write`, or take the seat if it is free. Return the result."""
        state, since = b"", write.started
        claimed_by: bytes | None = None  # the state of the seat once the request was gone
        now, wait_s = write.started, 0.0
        while True:
            answer = self._receive(station, slot, write, wait_s) if wait_s else None
            if system.process_epoch() != station.epoch:  # a signal handler has forked, and this is the child
                write.path = ""
                return self._write_alone(write)
            if answer is not None:
                return self._take(answer, write)
            if station.try_seat(slot):
                return self._take_over(station, slot, write)
            if wait_s:  # the first attempt comes at once, after the publishing
                now = system.time.monotonic()
                write.begin_by(now - wait_s)
                if now >= write.deadline:
                    return self._give_up(station, write)
                if self._log.handle.recovery & CLOSED:
                    self._withdraw(station, write)
                    return self._write_alone(write)  # raises
                is_gone = claimed_by is None and not station.is_pending(write.path)
                seen = station.seat_state()
                if is_gone:
                    claimed_by = seen
                elif claimed_by is not None and seen != claimed_by:
                    # The leader that has claimed the request has ended, and its answer is lost. Where many writers
                    # contend for the seat, this one might not get it in time.
                    return self._find_out(station, slot, write)
                if seen != state:
                    state, since = seen, now
                phase = requests.decode_seat(seen)[0]
                if now - since > (STALLED_S if phase == requests.WAITING else SILENT_S + self._jitter):
                    self._bypass(state, now - since)
                    self._withdraw(station, write)
                    return self._write_alone(write)
            wait_s = max(min(LOOK_S, write.deadline - now), 0.001)

    def _receive(self, station: Station, slot: Slot, write: Write, seconds: float) -> Answer | None:
        """Return the answer to `write`; None if the seat is free, or after `seconds` without an answer."""
        while True:
            data = station.receive(slot, seconds)
            if data is None:
                return None
            answer = Answer.decode(data)
            if answer is None or answer.verdict == requests.LEAD:
                return None
            # Otherwise it is a late answer to an earlier request from this address. That is rare, so the wait is
            # repeated with the full time.
            if answer.time == write.time:
                return answer

    def _take(self, answer: Answer, write: Write) -> Any:
        """Return the result in `answer`. If `answer` has no result, take the log's lock and write alone."""
        write.path = ""  # the leader has claimed it
        write.is_claimed = True
        if answer.verdict == requests.DONE:
            return self._decider.decode_result(answer.result)
        return self._write_alone(write)

    def _bypass(self, state: bytes, seconds: float) -> None:
        """Record that a leader seems stopped: the seat file has contained `state` for `seconds` seconds.

        While the seat file still contains `state`, the threads of this handle write alone.
        """
        self._stalled = state
        logger(__name__).debug(
            "%s: the process that writes for this host has shown no life for %.1f s; writing alone",
            self._log.path,
            seconds,
        )

    def _take_over(self, station: Station, slot: Slot, write: Write) -> Any:
        """Lead if no leader has claimed the request; otherwise find out whether the operation took effect.

        This thread has the seat.
        """
        is_leading = False
        try:
            is_leading = self._withdraw(station, write)
            if is_leading:
                return self._lead(station, slot, write, write.left())
        finally:
            try:
                slot.free()
            except OSError as error:  # as in `Station.leave_seat`
                raise_if_foreign(error)
            slot.may_have_seat = False
        # The previous leader may have woken another author, which found the seat taken by this thread. Wake it again.
        self._call_next(station, slot)
        return self._find_out(station, slot, write)

    def _find_out(self, station: Station, slot: Slot, write: Write) -> Any:
        """Return the result of `write`, after a leader has claimed its request and left the seat."""
        write.path = ""
        write.is_claimed = True
        answer = self._receive(station, slot, write, TELL_S)  # the leader may be about to tell the result
        return self._write_alone(write) if answer is None else self._take(answer, write)

    def _give_up(self, station: Station, write: Write) -> Any:
        """End `write` at its deadline: return its result if its record is in the log, or raise `StoreTimeoutError`."""
        log = self._log
        if self._withdraw(station, write):
            raise log.lock_timeout(write.waited())
        try:
            log.refresh(LOCK_GRACE_S)
            timeout = log.lock_timeout(write.waited())  # may read on
            if self._is_complete(write):
                return write.result
            raise timeout
        except (StoreError, StoreTimeoutError) as error:
            # Also if the log could not be read: the leader has the request, and may append its record at any time.
            error.maybe_applied = True
            raise

    def _is_complete(self, write: Write) -> bool:
        """Return whether this handle has found all records of `write` in the log. If so, set the result of `write`."""
        watch = write.watch
        if watch is None or not watch.is_found or system.process_epoch() != write.epoch:  # as in `Batch._decide_own`
            return False
        left, write.result = self._log.inspect(lambda: self._decider.begin().resume(write.operation, watch.noted))
        return not left

    # -- the leader ------------------------------------------------------------------------------------------------

    def _lead(self, station: Station, slot: Slot, write: Write, limit: float) -> Any:
        """Write `write` and all published requests under one hold of the log's lock. Return the result of `write`.

        This thread has the seat. The write may take `limit` seconds.
        """
        log = self._log
        batch = Batch(log, self._decider, write, station, slot)
        shared, is_written = log.handle.shared, False
        try:
            shared.leader = system.threading.get_ident()
            batch.show_life()
            log.update(BATCH, b"", batch, None, limit)
            is_written = True
        finally:
            # This assignment comes before the call of `free`, after which a signal handler may raise. If it were
            # skipped, the thread would count as a leader for ever. Another thread may also lead by then.
            shared.leader = 0
            try:
                # The first call is of a C function, as in `Log.update`: otherwise Ctrl-C could leave the seat taken.
                try:
                    slot.free()
                except OSError as error:  # as in `Station.leave_seat`
                    raise_if_foreign(error)
                slot.may_have_seat = False
            finally:
                self._tell(station, slot, batch, is_written=is_written)
        station.sweep_if_due(slot, write.started)
        return self._finish(write, batch)

    def _tell(self, station: Station, slot: Slot, batch: Batch, *, is_written: bool) -> None:
        """Send each author its answer, and then wake a follower to lead. If `is_written` is false, the write failed."""
        if system.process_epoch() != station.epoch:
            return  # a signal handler has forked, and this is the child: the requests are the parent's
        try:
            self._answer(station, slot, batch, is_written=is_written)
        except BaseException:  # of a signal handler. An answer that comes twice does no harm
            self._answer(station, slot, batch, is_written=is_written)
            raise
        self._call_next(station, slot)

    @staticmethod
    def _call_next(station: Station, slot: Slot) -> None:
        """Wake the author that has waited longest, because the seat is free."""
        for path in station.requests():
            data = station.read(path)
            request = None if data is None else decode_request(data)
            # Any author may take the seat. This only saves the oldest one the time until its next look.
            if request is not None and station.tell(slot, request.address, Answer(0, requests.LEAD)):
                return

    @staticmethod
    def _answer(station: Station, slot: Slot, batch: Batch, *, is_written: bool) -> None:
        for claim in batch.claims if is_written else ():
            station.tell(slot, claim.address, claim.answer)
        for claim in batch.failed if is_written else batch.failed + batch.claims:
            station.tell(slot, claim.address, Answer(claim.answer.time, requests.UNKNOWN))
