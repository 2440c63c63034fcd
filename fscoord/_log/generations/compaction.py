"""`Compactor`: continue a log in a new generation, which holds the state and not the history.

The new generation is a file of its own. It is written, synced and locked before any record names it. Then one record,
the seal, ends the old generation and names the new one. The seal is the commit: no file is renamed, and no crash leaves
anything to repair. See `Compactor._commit`, and the table in `docs/contributors/architecture/operations.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from fscoord._log.files import safe_files
from fscoord._log.files.opening import write_log
from fscoord._log.files.safe_files import copy_permissions
from fscoord._log.format import record
from fscoord._log.format.control_records import Failure, encode_death
from fscoord._log.format.generation_ref import RANDOM_BYTES, GenerationRef, generation_name
from fscoord._log.format.header import Header, LogIdentity, RunId
from fscoord._log.format.record import MalformedRecord, Record
from fscoord._log.generations import forwarding
from fscoord._log.generations.follower import GenerationFollower
from fscoord._log.handle import HandleState, open_root
from fscoord._log.liveness.own_session import Registration
from fscoord._log.locking.log_lock import SOFT, LogLock
from fscoord._log.recovery import POSITION
from fscoord._log.replay.large_values import LargeValues
from fscoord._runtime import system, tracing
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError, StoreUnavailableError

MOVED: Final[Any] = object()
"""The result of an attempt at a transaction if the log continues in another file. The transaction is then tried again.
"""


class Compactor:
    """Compacts the log for one handle. The caller of every method holds the log's lock and has read to the end."""

    def __init__(
        self, handle: HandleState, registration: Registration, large_values: LargeValues, follower: GenerationFollower
    ) -> None:
        self._handle = handle
        self._registration = registration
        self._liveness, self._writer = registration.liveness, registration.writer
        self._large_values = large_values
        self._follower = follower
        self._refused_by: int | None = None  # the error number of the last failure, which was logged

    def compact_if_due(self, more: int) -> bool:
        """Compact the log if that saves enough space. Return whether a compaction was tried.

        `more` is how many bytes the caller is about to write. A compaction that fails, for example on a full disk, is
        logged, and the write goes on. In a copy of a log, the error is raised, because the first write to the copy
        needs a new generation.
        """
        handle = self._handle
        if handle.is_copy:
            self.compact()
            return True
        least = handle.options.compact_bytes
        table = handle.table
        sessions = sum(record.RECORD_MIN + len(session.encode()) for _, session in table.remembered())
        times = record.RECORD_MIN * len(table.last_times())
        live = handle.start.offset + sessions + times + handle.machine.live_size()
        grown = handle.offset + more
        garbage = handle.offset - live
        # The next check is due after further growth, whether or not this check leads to a compaction. `compact_at` is
        # set before the attempt, so that a compaction that fails is not tried again with every write.
        handle.compact_at = max(grown + least // 4, min(grown + max(least, grown // 4), 2 * live)) + 1
        if handle.header.generation and garbage <= max(live, least // 2):
            return False  # generation 0 is never removed, so it is sealed while small, however little garbage it holds
        try:
            self.compact()
            self._refused_by = None
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            reason = getattr(error, "errno", None)
            if self._refused_by != reason or reason is None:  # once for each reason, because every retry may fail alike
                logger(__name__).warning("%s could not be compacted, and keeps growing: %s", handle.path, str(error))
            self._refused_by = reason
        return True

    def compact(self) -> None:
        """Create the next generation, and seal the generation in use. The caller then enters the next generation.

        Raises:
            OSError, FscoordError: the log still uses the old generation, unless the error has ``maybe_applied``.
        """
        handle = self._handle
        handle.recovery = POSITION
        self._writer.void_tail()
        session = handle.lock.session or self._registration.append()
        self._record_deaths(session)
        recorder = tracing.recorder
        span = None if recorder is None else recorder.begin("compaction", handle.path)
        try:
            self._commit(self._next_header(), self._snapshot(session), session)
        except BaseException as error:
            if recorder is not None and span is not None:
                recorder.end_later(span, tracing.outcome_of(error))
            raise
        if recorder is not None and span is not None:  # other processes wait for the log's lock, which this one holds
            recorder.end_later(span, "done")

    def begin_run(self, run_ids: tuple[RunId, ...], dead: int) -> None:
        """Begin the next run of the log in an empty generation, and seal the generation in use.

        If a failure ended the previous run, the new generation contains a record of the failure.

        Args:
            run_ids: the run ids for the header of the new generation.
            dead: the session number of a participant whose death is recorded before the run ends; 0: none.

        Raises:
            StoreGoneError: the log was removed.
            OSError, FscoordError: the log still uses the old generation, unless the error has ``maybe_applied``.
        """
        handle = self._handle
        handle.recovery = POSITION
        # The process that ended the log may have removed it while this handle waited for the lock. A generation that is
        # added to a removed log could never be found, so `open_root` raises if the log has lost its name.
        handle.close_fd(open_root(handle))
        self._writer.void_tail()
        header = self._next_header()._replace(run_ids=run_ids, run=(handle.header.run + 1) % (1 << 32))
        table = handle.table
        session = handle.lock.session or self._registration.append(is_guest=True)
        if dead:
            self._writer.append(record.DEATH, b"", encode_death(dead, table.sessions[dead].alive_id), session)
        entries: list[Record] = []
        if table.failure is not None:
            entries.append(_entry_of(table.failure._replace(is_previous=True), session))
        # No session continues in the new run, so the new generation says that no session has written yet.
        if table.keeps_times:
            entries.append((record.LAST_TIME, b"", b"", session, 0))
        self._commit(header, entries, session)

    def _next_header(self) -> Header:
        """Return the header of the next generation. The caller sets ``inode`` when the file exists."""
        handle = self._handle
        log_id = system.random_bytes(16)
        return handle.header._replace(
            log_id=log_id,
            lineage=log_id if handle.is_copy else handle.header.lineage,
            root_inode=handle.root.inode,
            generation=handle.header.generation + 1,
            created_ns=system.wall_time_ns(),
        )

    def _snapshot(self, session: int) -> Iterator[Record]:
        """Yield records from which a reader rebuilds the present state.

        The order is: a LEAVE record for each participant that has left, sessions and deaths from the session table,
        the failures, as many BELL records as the log has (they announce the bell file), the data, and the time of each
        session's last record. LEAVE records come first: a reader counts the death of a participant as a failure, unless
        a LEAVE record of the participant precedes the death.

        SESSION, LEAVE and LAST_TIME records have the session that they describe as their writer. All other records have
        `session` as their writer.
        """
        table = self._handle.table
        # If times are kept, each record of this session needs a time of its own; see `SessionTable.times`.
        now = self._writer.next_time() if table.keeps_times else system.wall_time_ns()
        for number in sorted(table.left):
            yield record.LEAVE, b"", b"", number, now
        for number, known in table.remembered():
            for rank, numbers in table.ranks.items():
                if number in numbers and rank != known.rank and (number not in table.deaths or number == max(numbers)):
                    yield record.SESSION, b"", known._replace(rank=rank).encode(), number, known.since_ns
            yield record.SESSION, b"", known.encode(), number, known.since_ns
            if number in table.deaths:
                yield record.DEATH, b"", encode_death(number, known.alive_id), session, table.deaths[number]
        yield from (_entry_of(failure, session) for failure in table.failures())
        for _ in range(self._handle.bell):
            yield record.BELL, b"", b"", session, now
        for kind, key, value in self._handle.machine.snapshot(self._large_values.read_locked):
            yield kind, key, value, session, now
        for number, time_ns in table.last_times():
            yield record.LAST_TIME, b"", b"", number, time_ns

    def _record_deaths(self, session: int) -> None:
        """Probe all sessions, and record the deaths that are found. The snapshot leaves dead sessions out.

        The death records are written to the old generation. A process that has only lost the lock on its liveness byte
        is still alive. Such a process finds the death record of its session in the old generation. Only liveness bytes
        are probed, not processes: a probe of a process opens descriptors, which an interruption would leak.
        """
        alive, table = self._liveness.file, self._handle.table
        deadline = system.time.monotonic() + max(self._handle.time_left, 0)
        for number, known in list(table.sessions.items()):
            if alive is None or number in table.deaths or known.alive_id != alive.id:
                continue
            if system.time.monotonic() > deadline:  # the snapshot then keeps the sessions that were not probed
                return
            if not alive.is_held(number):
                self._writer.append(record.DEATH, b"", encode_death(number, known.alive_id), session)
                if tracing.recorder is not None:
                    facts = ("session", number, "dead_rank", known.rank)
                    span = tracing.recorder.begin("death", f"{known.host}:{known.pid}", "", None, *facts)
                    tracing.recorder.end_later(span, "recorded")

    def _commit(self, header: Header, entries: Iterable[Record], session: int) -> None:
        """Write a generation with `header` and `entries`, and seal the generation in use.

        A crash at any line leaves a log that needs no repair:

        - Before the seal: the old generation is in use. No record names the new file, which is an orphan. A later
          compaction removes the orphan when its lock is free.
        - After the seal, before the forward record: every opener follows the seals to the new generation. The next
          compaction appends a forward record that names the generation that it creates.
        - After the forward record, before the removal: the superseded file stays. A later compaction removes it.
        """
        handle = self._handle
        epoch = system.process_epoch()  # a child that a signal handler forks must not remove the parent's file
        name, file = self._new_name(header.generation)
        flags = system.os.O_RDWR | system.os.O_APPEND | system.os.O_CREAT | system.os.O_EXCL
        is_sealing, fd, lock = False, -1, None
        try:
            # O_EXCL and a random name: no file of another process is ever opened here, so none is overwritten.
            try:
                fd = safe_files.open_descriptor(file, flags, owned_fds=handle.owned_fds)
            except FileExistsError as error:  # a signal handler forked above, and the child has created its file
                raise_if_foreign(error)
                name, file = self._new_name(header.generation)
                fd = safe_files.open_descriptor(file, flags, owned_fds=handle.owned_fds)
            self._copy_permissions(fd)
            lock = LogLock(file, fd, header.lock_kind, system.recursive_mutex(), set())
            if header.lock_kind != SOFT:
                # The lock is held until the forward record is written. Until then no other process can seal the new
                # generation, and `forwarding.remove_superseded` does not remove its file, because the file is locked.
                lock.bind(fd, session)
                lock.try_lock()
            place = write_log(fd, header._replace(inode=handle.options.inode(fd)), entries)
            # File and directory are synced before the seal, also in a log that is not durable: after a power failure a
            # seal that survived must not name a file that is incomplete or missing.
            system.sync_file(fd)
            safe_files.sync_directory(handle.path, handle.owned_fds)
            successor = GenerationRef(header.generation, header.log_id, place.offset, place.chain, name)
            is_sealing = True  # before the append: from here on, an exception does not prove that the seal is absent
            # The commit: before this record the old generation is in use, and after it the new one.
            self._writer.append(record.SEAL, b"", successor.seal(), session)
            self._forward(successor, session, LogIdentity(header.lineage, header.root_inode))
        except BaseException as error:
            # If the seal may have been written, the file that it names must stay: without it the log would be lost.
            if not is_sealing or (isinstance(error, StoreUnavailableError) and not error.maybe_applied):
                safe_files.unlink_quietly(file, epoch)
            raise
        finally:
            try:
                if lock is not None and header.lock_kind != SOFT:
                    lock.unlock()
            except OSError as error:  # closing the descriptor unlocks it as well
                raise_if_foreign(error)
            handle.close_fd(fd)

    def _new_name(self, generation: int) -> tuple[bytes, str]:
        base = system.os.fsencode(system.os.path.basename(self._handle.path))
        name = generation_name(base, generation, system.random_bytes(RANDOM_BYTES))
        return name, safe_files.beside(self._handle.path, name)

    def _copy_permissions(self, fd: int) -> None:
        handle = self._handle
        try:
            copy_permissions(handle.lock.fd, fd)
        except OSError as error:
            raise_if_foreign(error)
            doing = "copying the group and access control list to the next file of the log"
            raise safe_files.unavailable(error, handle.path, doing) from error

    def _forward(self, successor: GenerationRef, session: int, owner: LogIdentity) -> None:
        """Append a forward record to generation 0 after the seal, and remove superseded files.

        No reader depends on these steps, so an error is only logged. The next compaction of any process repeats them.
        """
        handle, follower = self._handle, self._follower
        before = system.os.fsencode(system.os.path.basename(handle.file)) if handle.header.generation else None
        try:
            if before is not None:
                posted = forwarding.post(handle, successor, session, self._writer.next_time(), follower.forwarded)
                if posted is None:
                    return
                follower.forwarded = posted
            # After `post`, which syncs the forward record: otherwise generation 0 could still name the file that is
            # removed here, and an opener that starts there would find none.
            forwarding.remove_superseded(handle, owner, successor, before)
        except (OSError, MalformedRecord, FscoordError) as error:
            raise_if_foreign(error)
            logger(__name__).debug("%s: after the seal of generation %d: %s", handle.path, successor.generation, error)


def _entry_of(failure: Failure, session: int) -> Record:
    return record.FAILURE, b"", failure.encode(), session, failure.time_ns
