"""`Log`: one handle on one log. Each operation is a transaction or a read, from lock to unlock.

This module imports the parts of the log. Of these parts, only `opened` and `shared.combining` import this module. A
writer holds the log's lock, has read to the end, and appends each record with one write(2).

The methods carry out one sequence (recover, lock, catch up, decide, append, unlock), and handle a step that fails.

The process mutex (`HandleState.mutex`) guards every attribute of the handle. The log lock guards the end of the file. A
thread takes the mutex, and then tries the log lock without blocking. A thread never blocks for the log lock while it
holds the mutex, because the thread that hands a lock over (`locking.kernel_wait`) takes the two locks in the opposite
order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from fscoord._log.access import PATH_CHECK_S, Access, LocalAccess
from fscoord._log.files import safe_files, torn_tail
from fscoord._log.files.opening import LogOptions
from fscoord._log.format import record
from fscoord._log.format.control_records import Failure, Session, encode_death
from fscoord._log.format.header import LogIdentity, classify_run, supersede
from fscoord._log.generations import forwarding
from fscoord._log.generations.compaction import MOVED, Compactor
from fscoord._log.generations.follower import GenerationFollower
from fscoord._log.handle import GenerationUnlinked, HandleState, NeedsLock
from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._log.liveness.own_session import Liveness, Registration
from fscoord._log.locking.log_lock import SOFT
from fscoord._log.mount import LOCAL, Mount, find_mount
from fscoord._log.recovery import APPLYING, CLOSED, DESCRIPTORS, GENERATION, POSITION, SERVER_STATE
from fscoord._log.replay.cursor import Cursor
from fscoord._log.replay.large_values import LargeValues
from fscoord._log.replay.writer import LogWriter, append_each
from fscoord._log.session_table import SessionTable
from fscoord._log.shared.sharing import Sharing
from fscoord._log.state_machine import StateMachine
from fscoord._runtime import system, tracing
from fscoord._runtime.escaping import closer_look
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord.errors import (
    FscoordError,
    StoreClosedError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    UsedBeforeError,
)

T = TypeVar("T")

SEVERAL: Final = -1
"""The kind that a `Decide` function returns to append several records, with a list of (kind, key, value) as the value.
"""

BATCH: Final = -2
"""The kind of a transaction that appends a batch. The value is a `~fscoord._log.shared.combining.batch.Batch`."""

Decide = Callable[[bytes, Any], tuple[Any, int, Any]]
"""A function that decides one transaction. The log calls it with a key and a value, under the log lock, after it has
applied all records. The function returns ``(result, kind, value)``: the result of the transaction, and the kind and
value of the record to append. Kind 0 appends nothing."""


IN_A_ROW_NS: Final = 50_000
"""The longest time between two records of a handle that writes without a pause, in nanoseconds."""

LOCK_GRACE_S: Final = 0.03
"""The shortest wait for the lock in seconds, even with a timeout of 0: the lock is usually held for microseconds."""

SHARED_CHECK_S: Final = 1.0
"""How often a thread that waits for the lock of a shared log checks the log's path, in seconds. Each check is a request
to the file server."""

STALE_PAUSE_S: Final = 0.01
STALE_PAUSE_MAX_S: Final = 0.1
"""The first and the longest pause, in seconds, between attempts to reopen a file that the server has forgotten. The
first attempt is made at once."""


class Log:
    """One handle on the log at `path`. A missing log is created, unless the options are read-only.

    Args:
        path: an absolute path, as `safe_files.resolve` returns it.
        machine: the state machine that applies every data record once, in order.
        options: the options to open the log with. A ``coherence`` of None means ``"local"`` here.
        introduce: a function that returns the content of the handle's session record. It is called before the first
            write.
        mount: the mount of `path`. None: the handle finds it.

    Attributes:
        handle: the state that the parts of the handle share. The process mutex of the log guards it.
        table: the sessions that the log has recorded.
        shared: the parts for a mount that several hosts share; None on any other mount.
        read_locked, read_unlocked: return the bytes of a long value; see `LargeValues`.
    """

    def __init__(
        self,
        path: str,
        machine: StateMachine,
        options: LogOptions,
        introduce: Callable[[], Session],
        mount: Mount | None = None,
    ) -> None:
        self.path = path
        coherence = options.coherence or LOCAL
        self.mount: Mount = mount or find_mount(path)
        options = options._replace(inodes_last=options.inodes_last and self.mount.inodes_last)
        self.read_only = options.read_only
        self.table = SessionTable()
        self.shared = shared = None if coherence == LOCAL else Sharing(machine, options, coherence, self.table)
        self.machine = machine if shared is None else shared.machine
        self.handle = handle = HandleState(path, options, self.machine, self.table)
        handle.zeros = torn_tail.Zeros(is_sparse=self.mount.reports_holes and not system.is_fake_fs())
        system.close_when_collected(self, handle.owned_fds)
        # The parts refer to `handle` and to parts made before them, never to this object. So there is no reference
        # cycle: a handle that is dropped is freed at once, and its finalizer closes the descriptors.
        self.cursor = Cursor(handle, None if shared is None else shared.changed_keys.mark_all)
        self.liveness = Liveness(handle)
        self.access: Access
        if shared is None:
            self.access = LocalAccess(handle, self.cursor, self.liveness, self.mount)
            self.writer = LogWriter(handle, self.cursor, self.access.write)
        else:
            self.writer = shared.make_parts(handle, self.cursor, self.liveness, self.mount)
            self.access = shared.access
        self.large_values = LargeValues(handle, self.cursor)
        self.registration = Registration(handle, self.liveness, self.writer, introduce)
        self.follower = GenerationFollower(handle, self.cursor, self.large_values)
        if shared is not None:
            shared.follow = self.follower.follow
        self.compactor = Compactor(handle, self.registration, self.large_values, self.follower)
        self._writes_in_a_row = False  # only a hint, so no lock guards it
        # The methods that vary by mount are bound once, because every operation calls them.
        self._read, self._append = self.access.read, self.writer.append
        self._before_lock = self.access.before_lock
        self.read_locked, self.read_unlocked = self.large_values.read_locked, self.large_values.read_unlocked
        try:
            self.access.open(self._open)
        except (FscoordError, OSError) as error:
            raise_if_foreign(error)
            system.close_all(
                system.os.close, handle.owned_fds
            )  # a caller that keeps the error also keeps this object, and its descriptors
            if isinstance(error, FscoordError):
                raise
            raise safe_files.unavailable(error, path, "opening the log") from error

    def _open(self) -> None:
        self.machine.reset()  # an earlier attempt may have applied records of a log that was removed meanwhile
        self.follower.open(lambda: _handles.add(self))

    # -- forks -----------------------------------------------------------------------------------------------------

    def after_fork(self) -> None:
        """Drop the parent's descriptors, lock and session in a forked child. The next operation opens new descriptors.

        Nothing is unlocked, because an unlock in the child would also release the parent's lock. The parent keeps the
        liveness byte, so the child registers as another session before its first write. By ``forks.ORDER``, the shared
        mutex is renewed before this method is called.
        """
        handle = self.handle
        handle.lock.after_fork(handle.shared.mutex)
        self.liveness.lose()
        handle.lock.session = 0
        handle.mutex = handle.shared.mutex
        handle.reader_fd = handle.root_fd = -1
        handle.options = handle.options._replace(world_size=0)  # the participant is the parent
        handle.recovery |= DESCRIPTORS

    def be_closed_by_fork(self) -> None:
        """Close the handle in a forked child, after `after_fork`, if a thread of the parent was closing it.

        The thread does not exist in the child, so it can't finish the close there.
        """
        self.handle.finish(
            StoreClosedError, "was being closed by another thread when this process was forked; open it again"
        )

    # -- a read, and a transaction ---------------------------------------------------------------------------------

    def refresh(self, limit: float, answer: Callable[[], Any] | None = None) -> Any:
        """Apply every record that is complete by now, without the log's lock if the mount allows that.

        The records are read under the lock if the bytes look damaged, or if no other read on this mount is coherent.

        Args:
            limit: how long to wait for the log's lock if it is needed, in seconds.
            answer: a function that is called after the read, before the mutex is released. The function makes no system
                call.

        Returns:
            The result of `answer`; None without `answer`.

        Raises:
            StoreGoneError: the file was deleted, replaced or truncated.
            CorruptLogError: the log is damaged.
            StoreTimeoutError: the lock was needed, and was not free within `limit` seconds.
        """
        if not system.fork_marker[0]:
            system.recover_from_fork()
        handle, read = self.handle, self._read
        shared = handle.shared
        mutex = shared.mutex
        with mutex:
            if shared.is_inside:
                raise self.entered_twice()
            try:
                shared.is_inside = True
                handle.time_left = limit
                if handle.recovery:
                    self._recover()
                # The flag is set before the read. If an exception arrives between read(2) and the new offset, the flag
                # stays set, and the next operation seeks again. Without the flag it would skip the bytes that were
                # read.
                handle.recovery = POSITION
                while read():
                    self.follower.follow()
                handle.recovery = 0
                return None if answer is None else answer()
            except NeedsLock:
                pass
            except FscoordError:
                if not system.is_ended_by_exit():
                    raise
            except OSError as error:
                raise_if_foreign(error)
                if not self.access.retries_read(error) and not self._is_cut_by_fork(error, mutex):
                    raise safe_files.unavailable(error, self.path, "reading the log") from error
            finally:
                shared.is_inside = False
        self.update(0, b"", b"", None, limit)  # under the lock a verdict of damage is final
        return None if answer is None else self.inspect(answer)

    def update(
        self,
        kind: int,
        key: bytes,
        value: Any,
        decide: Decide | None,
        limit: float,
        appended: Callable[[], None] | None = None,
    ) -> Any:
        """Run one transaction: lock, read to the end, decide, append what was decided, unlock.

        Args:
            kind: the kind of the record; 0 appends nothing.
            key: the key of the record.
            value: the value of the record, or the second argument of `decide`.
            decide: a function that is called after the handle has read to the end. It returns the record to append in
                place of the given record. None: the given record is appended.
            limit: how long to wait for the lock, in seconds.
            appended: a function that is called after a single record was appended, before the lock is released. It is
                not called for `SEVERAL` and `BATCH`.

        Returns:
            The result of `decide`; None without `decide`.

        Raises:
            StoreTimeoutError: the lock was not free within `limit` seconds; ``holder`` names the session that holds it.
            StoreUnavailableError: a system call failed; ``maybe_applied`` is true if the record may have been written.
            StoreGoneError, CorruptLogError: as in `refresh`.
        """
        if self.read_only and kind:
            raise StoreError(f"{self.path} was opened with read_only=True; nothing was written", path=self.path)
        attempt = 0
        left = limit
        result = MOVED
        handle = self.handle
        # Each pass is one attempt. It ends with a return, an error, or the release of both locks. If the lock is held
        # or the file is gone, the next attempt begins after a wait. If the log continues in another file (MOVED), the
        # next attempt begins at once.
        while True:
            if not system.fork_marker[0]:
                system.recover_from_fork()
            shared = handle.shared
            mutex = shared.mutex
            # The exception of the transaction, in case the unlock fails too.
            first: BaseException | None = None
            with mutex:
                if shared.is_inside:
                    raise self.entered_twice()
                try:
                    shared.is_inside = True
                    handle.time_left = left
                    if handle.recovery:
                        self._recover()
                    lock = handle.lock
                    try:
                        handover = lock.handover
                        if handover is None:
                            if self._before_lock is not None:
                                self._before_lock()
                            lock.try_lock()
                        else:
                            # The kernel has already granted the lock. After this assignment `_LockThread._hand_over`
                            # does not release it any more, so the ``finally`` below must.
                            lock.handover = None
                            handover.release()
                        # Set before the first read of this pass, as in `refresh`.
                        handle.recovery = POSITION
                        result = self._update_locked(kind, key, value, decide, appended)
                        if result is MOVED:
                            handle.recovery = POSITION
                            continue
                        handle.recovery = 0
                        return result
                    except BlockingIOError as error:
                        first = error
                        # Without a flag, the error is that of `try_lock`, because another handle holds the lock.
                        # It gets a handler of its own, because a contended writer meets it with most attempts.
                        if handle.recovery or error.errno is None or handle.shared.mutex is not mutex:
                            raise
                    except BaseException as error:
                        first = error
                        raise
                    finally:
                        # This must stay the first statement of the ``finally``, and a C function for the kernel's kinds
                        # of lock. Python handles signals between statements and when it enters a Python function, so no
                        # KeyboardInterrupt can come before the unlock. Otherwise Ctrl-C could leave the log locked
                        # until the process ends.
                        lock.unlock()
                except FscoordError:
                    if not system.is_ended_by_exit():  # otherwise `_wait_for_lock` sleeps, without the mutex
                        raise
                except OSError as error:
                    if error.errno is None:  # a signal handler raised it, not a system call
                        handle.lock.unlock()
                        raise
                    applied = result is not MOVED and kind != 0
                    self._raise_unless_retried(_cause_of(first, error), mutex, maybe_applied=applied)
                except GenerationUnlinked:  # the next attempt recovers
                    pass
                except BaseException:
                    handle.lock.unlock()  # a soft lock's unlock is a Python function, which may have been interrupted
                    raise
                finally:
                    shared.is_inside = False
                    first = None  # break the reference cycle of the error's traceback and this frame
            if not attempt:
                started = system.time.monotonic()
            attempt += 1
            show_life = value.show_life if kind == BATCH else None
            self._wait_for_lock(attempt, started, max(limit, LOCK_GRACE_S), show_life)
            left = limit - (system.time.monotonic() - started)

    def _update_locked(
        self, kind: int, key: bytes, value: Any, decide: Decide | None, appended: Callable[[], None] | None
    ) -> Any:
        """Catch up, decide and append, under the lock. Return `MOVED` if the log continues in another file."""
        if self._read(True):
            self.follower.follow()
            return MOVED  # the lock that is held is that of the sealed generation: nothing may be appended under it
        handle = self.handle
        # An exception of `decide` leaves every invariant intact. A `decide` that appends sets a flag itself.
        handle.recovery = 0
        if decide is None:
            result = None
        else:
            result, kind, value = decide(key, value)
        if not kind:
            return result
        handle.recovery = POSITION
        # The void must come first. Readers skip a torn tail only if a void follows it, so a record that is appended
        # directly after the tail would be lost. The session record comes next, because every other record names its
        # session.
        if handle.pending or handle.is_torn:
            self.writer.void_tail()
        session = handle.lock.session
        if not session:
            session = self.registration.append()
            if kind == record.SESSION:
                return result
        if handle.offset + len(value) >= handle.compact_at and self.compactor.compact_if_due(len(value)):
            return MOVED
        if kind < 0:
            self._append_several(kind, value, session)
            return result
        self._append(kind, key, value, session)
        if appended is not None:
            appended()
        return result

    def _append_several(self, kind: int, value: Any, session: int) -> None:
        """Append the records of the list `value` (`SEVERAL`), or the records of the batch `value` (`BATCH`)."""
        if kind == SEVERAL:
            append_each(self._append, [(*each, session) for each in value])
            return
        # Nothing may come between this line and the write. A request is claimed only until the lock is released.
        records = value.decide(session)
        if records:
            writer = None if self.shared is None else self.shared.writer
            assert writer is not None, "only a log whose writes are combined has batches"
            writer.append_batch(records)

    def inspect(self, answer: Callable[[], T]) -> T:
        """Return the result of `answer`. It runs under the mutex: no thread or signal handler can change the state."""
        if not system.fork_marker[0]:
            system.recover_from_fork()
        shared = self.handle.shared
        with shared.mutex:
            if shared.is_inside:
                raise self.entered_twice()
            try:
                shared.is_inside = True
                return answer()
            finally:
                shared.is_inside = False

    def position(self) -> tuple[int, int]:
        """Return (generation, offset): the generation that is being read, and the offset up to which it was read."""
        return self.inspect(lambda: (self.handle.header.generation, self.handle.offset))

    def refuse_reentry(self) -> None:
        """Raise `StoreError` if the caller is a signal handler or finalizer that interrupted an operation."""
        self.inspect(lambda: None)

    def entered_twice(self) -> StoreError:
        """Return the error for a signal handler or finalizer that begins an operation inside another operation."""
        return StoreError(
            f"{self.path}: the store was called by a signal handler or finalizer that interrupted a call of the"
            " same thread; hand the work to another thread",
            path=self.path,
        )

    # -- recovery --------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Restore, at the start of an operation, the invariants that an interruption or a fork may have broken.

        The caller holds the process mutex, and has not taken the log lock yet. The flags are cleared only at the end,
        so the next operation repeats a recovery that was interrupted.

        Raises:
            OSError: the file server has forgotten a file. The caller must begin the transaction again.
        """
        handle = self.handle
        if handle.recovery & CLOSED:
            kind, message = handle.final_error
            raise kind(f"{self.path} {message}", path=self.path)
        try:
            try:
                self._recover_parts()
            except OSError as error:
                if isinstance(error, FscoordError):
                    raise
                raise_if_foreign(error)
                raise safe_files.unavailable(error, self.path, "opening the log again") from error
        except StoreUnavailableError as error:
            if not self.access.retries_recovery(error):
                raise
            raise error.__cause__ or error from None
        handle.recovery = 0

    def _recover_parts(self) -> None:
        """Restore the invariant of each flag that is set.

        The order is: descriptors, generation, applied records, position. Each step relies on the steps before it. For
        example, a seek is useful only on a descriptor of the right file.
        """
        handle = self.handle
        try:
            if handle.recovery & (DESCRIPTORS | SERVER_STATE):
                self.follower.open_again()
                self.access.reopened()
            if handle.recovery & GENERATION:
                self.follower.restart()
            elif handle.recovery & APPLYING:
                # The state machine can't undo records, and it is unknown which it has applied. So read all of them
                # again.
                self.cursor.reset()
            try:
                # Done for every flag: a new descriptor at `offset` does not depend on the position of the old
                # descriptor. If a seal was read and not followed yet, the offset is after the seal, and a read from
                # there would miss the seal.
                if handle.seal is None:
                    self.cursor.move(handle.offset, handle.chain)
                else:
                    self.follower.follow()
            except GenerationUnlinked:
                self.follower.restart()
        finally:
            # An interruption between open(2) and the assignment, or before close(2), leaves a descriptor that only
            # `owned_fds` names. So does an attempt that fails here.
            for fd in handle.owned_fds - handle.fds_in_use():
                handle.close_fd(fd)

    def _is_cut_by_fork(self, error: OSError, mutex: Any) -> bool:
        """Return whether `error` comes from a fork in a signal handler that interrupted an operation of this handle.

        The interrupted operation continues in the child. There `after_fork` has closed the descriptors, has replaced
        `mutex`, and has set `DESCRIPTORS`; the operation may have cleared that flag. This method sets it again, so that
        the next attempt opens new descriptors.
        """
        handle = self.handle
        is_cut = handle.shared.mutex is not mutex
        if error.errno == system.errno.EBADF:
            is_cut = is_cut or handle.reader_fd < 0 or handle.lock.fd < 0
        if is_cut:
            handle.recovery |= DESCRIPTORS
        return is_cut

    # -- the wait for the lock -------------------------------------------------------------------------------------

    def _raise_unless_retried(self, error: OSError | None, mutex: Any, *, maybe_applied: bool) -> None:
        """Return if the caller must repeat the transaction that failed with `error`. Otherwise raise a `StoreError`.

        `error` comes from `_cause_of`, and `mutex` is for `_is_cut_by_fork`. `maybe_applied` is true if `error` comes
        from the unlock, so that the record may have been written.
        """
        handle = self.handle
        if error is None or self._is_cut_by_fork(error, mutex):
            return
        if self.access.retries_transaction(error, maybe_applied=maybe_applied):
            return
        if handle.recovery or maybe_applied:
            applied = maybe_applied or bool(handle.recovery & APPLYING)
            raise safe_files.unavailable(error, self.path, "using the log", maybe_applied=applied) from error
        if not handle.lock.is_taken(error):
            raise handle.lock.refuse(error) or safe_files.unavailable(error, self.path, "locking the log") from error

    def _wait_for_lock(
        self, attempt: int, started: float, limit: float, show_life: Callable[[], None] | None = None
    ) -> None:
        """Wait until the lock may be free. The caller holds neither the mutex nor the log lock.

        Args:
            attempt: the number of attempts so far.
            started: when the transaction began (monotonic, in seconds).
            limit: how long the transaction may take, in seconds.
            show_life: see `Batch.show_life`.

        Raises:
            StoreTimeoutError: `limit` seconds have passed since `started`.
            StoreClosedError: the process is exiting, and this thread still runs after `EXIT_MAX_S` seconds.
        """
        handle = self.handle
        if system.is_ended_by_exit():
            system.time.sleep(system.EXIT_MAX_S)
            raise StoreClosedError(
                f"{self.path} is closed, because the process is exiting; join this thread before the program ends",
                path=self.path,
            )
        waited = system.time.monotonic() - started
        if waited >= limit:
            raise self.lock_timeout(waited)
        if handle.recovery & SERVER_STATE:  # no process holds the lock of a file that the server has forgotten
            system.time.sleep(min(STALE_PAUSE_S * (attempt - 1), STALE_PAUSE_MAX_S))
            return
        oldest = SHARED_CHECK_S if handle.is_shared else PATH_CHECK_S
        if not handle.lock.can_block and system.time.monotonic() - handle.path_checked_at > oldest:
            self.read_ahead()  # so that the next attempt raises if the log was removed meanwhile
        if attempt == 1:
            self._writes_in_a_row = system.time.time_ns() - self.writer.last_time < IN_A_ROW_NS
        options: dict[str, Any] = {"patient": not handle.is_shared, "in_a_row": self._writes_in_a_row}
        options["flags"] = handle.write_flags
        if show_life is not None:
            options["show_life"] = show_life
            show_life()
        if handle.lock.wait(attempt, waited, limit - waited, self._reopen_for_lock, **options):
            # All other writers wait while the holder of the lock reads what they have written. So read most of it now.
            self.read_ahead()

    def _reopen_for_lock(self) -> int:
        """Return another descriptor of the file in use, for the thread that waits for the file's lock in the kernel.

        The thread calls this method without the mutex, so this method changes nothing in the handle. Before the
        file is open, another thread of the process may let the handle enter another generation. So `_LockThread` checks
        that its waiters still need the lock of the file that was opened.
        """
        return safe_files.open_descriptor(self.handle.file, self.handle.write_flags)

    def lock_timeout(self, waited: float) -> StoreTimeoutError:
        """Return the error of an operation that has waited `waited` seconds for the log lock. It names the holder."""
        lock, sessions = self.handle.lock, self.table.sessions
        number = lock.holder()
        if isinstance(number, int) and number not in sessions:
            self.read_ahead()
        holder = str(sessions.get(number, f"session {number}")) if isinstance(number, int) else number
        if number == 0:
            holder = "a process that has not written yet"
        remedy = ""
        if lock.kind == SOFT:
            remedy = f"; {lock.foreign_holder()}once that process has ended: rm {lock.marker}"
        return StoreTimeoutError(
            f"{self.path}: the log's lock was not released within {waited:.3g} s: {holder or 'an unknown process'}"
            f" holds it (is it stopped, or blocked in the kernel?){remedy or closer_look(self.path)}",
            holder=holder,
            waited=waited,
        )

    def closer_look(self) -> str:
        """Return the last part of a time-out's message: why the previous start ended, and a command to run."""
        before = self.table.previous
        return ("" if before is None else f"; the start before this one ended because {before}") + closer_look(
            self.path
        )

    def read_ahead(self) -> None:
        """Apply new records without taking the lock. Errors are ignored: the next operation raises them again.

        The records name the process that holds the lock. The read also detects that the log is gone.
        """
        handle = self.handle
        with handle.mutex:
            if handle.shared.is_inside:
                return
            try:
                handle.shared.is_inside = True
                if handle.recovery:
                    self._recover()
                handle.recovery = POSITION
                while self._read():
                    self.follower.follow()
                handle.recovery = 0
            except (OSError, FscoordError, NeedsLock) as error:
                raise_if_foreign(error)
            finally:
                handle.shared.is_inside = False

    # -- runs and generations --------------------------------------------------------------------------------------

    def join_run(self, limit: float, *, shows: bool = False) -> None:
        """Join the present run of the log, or begin the next one. A participant registers in the same transaction.

        The next run begins if the present run is finished, or if ``options.run_id`` is new. It also begins if this
        handle is a participant without a run_id, and another participant of the present run has failed. So a handle
        never reads the data of an earlier, failed start of its job.

        Args:
            limit: how long to wait for the lock, in seconds.
            shows: whether the handle registers now even if it is not a participant.

        Raises:
            StaleRunError: a later run has superseded the run ``options.run_id``.
            UsedBeforeError: another live participant has the rank of this handle.
            ValueError: the other participants have another world size.
            StoreError: the run has not begun, and this handle is read-only.
            StoreUnavailableError: the log is finished, and this handle is read-only.
            StoreUnavailableError, StoreTimeoutError, StoreGoneError, CorruptLogError: as in `update`.
        """
        handle, table = self.handle, self.table
        wanted, begun = handle.options.run_id, list[bool]()
        registers = not self.read_only and (shows or handle.options.world_size > 0)

        def decide(_: bytes, __: bytes) -> tuple[Any, int, bytes]:
            run_ids, dead = handle.header.run_ids, 0
            verdict = "join" if wanted is None else classify_run(run_ids, wanted)
            if verdict == "stale":
                raise self.follower.superseded(handle.header)
            if self.read_only and (verdict == "new" or table.is_ended):
                raise self._not_begun(is_new=verdict == "new")
            if wanted is None and registers and handle.options.world_size and not table.is_ended:
                dead = 0 if table.failure is not None else self._dead_participant()
                verdict = "new" if dead or table.failure is not None else verdict
            if verdict == "new" or table.is_ended:
                self.compactor.begin_run(supersede(run_ids, wanted) if verdict == "new" else run_ids, dead)
                begun.append(True)
                return MOVED, 0, b""
            if not registers:
                return None, 0, b""
            if handle.options.world_size:
                self._check_world_size(handle.options.world_size)
                self._check_rank(self.registration.describe().rank)
            return None, record.SESSION, b""

        if registers or table.is_ended or (wanted is not None and handle.header.run_ids[:1] != (wanted,)):
            self._change_generation(decide, begun, limit)
        self.follower.settle()
        if begun and table.previous is not None:
            logger(__name__).warning(
                "%s: the start before this one ended because %s. Its data are discarded",
                self.path,
                table.previous,
            )

    def _not_begun(self, *, is_new: bool) -> StoreError:
        if is_new:
            return StoreError(f"{self.path}: the requested run has not begun; try again", path=self.path)
        what = "is finished, and no writer has opened it since; start the job again, or check the path"
        return StoreUnavailableError(f"{self.path} {what}", path=self.path, errno=system.errno.ENOENT)

    def _dead_participant(self) -> int:
        """Return a participant of the present run that has died without leaving; 0 if no such participant is known."""
        home = ProcessIdentity.find()
        for number in self.table.participants():
            alive = self.liveness.is_alive(number, home)
            if alive is False or (alive is None and home.is_provably_dead(self.table.sessions[number])):
                return number
        return 0

    def _check_world_size(self, world_size: int) -> None:
        theirs = self.table.world_size
        if theirs not in (0, world_size):
            names = [session.name for session in self.table.sessions.values() if session.world_size == theirs]
            raise ValueError(
                f"{self.path}: world_size is {world_size} here, and {names[0] if names else 'another participant'} has"
                f" opened it with world_size={theirs}; pass the same number in all processes, or give this start"
                " a path or run_id of its own"
            )

    def _check_rank(self, rank: int | None) -> None:
        """Raise `UsedBeforeError` if a live participant in another process has `rank`. The caller holds the log lock.

        If that process is stopped, or if it is unknown whether it is alive, log a warning instead.
        """
        table, home = self.table, ProcessIdentity.find()
        for number in sorted(set(() if rank is None else table.ranks.get(rank, ())).intersection(table.participants())):
            session, alive = table.sessions[number], self.liveness.is_alive(number, home)
            if alive is False or (session.pid == system.os.getpid() and home.is_same_process(session)):
                continue
            if alive and not home.is_stopped(session):
                raise UsedBeforeError(
                    f"{self.path}: rank {rank} is already taken by {session}, which is alive. Give each process a rank"
                    " of its own. If the job was started twice, end one of the two, or give each a path or run_id of"
                    " its own"
                )
            state = "is stopped" if alive else "may be alive"
            message = "%s: rank %d is already taken by %s, which %s. This process takes the same rank"
            logger(__name__).warning(message, self.path, rank, session, state)

    def leave(self, reason: str, limit: float, clear: Callable[[str], object]) -> None:
        """Record that this participant has left for good. The last participant to leave in good order ends the run.

        The last participant appends a FINISHED record, and removes the files of the log as far as possible. The errors
        are those of `update`.

        Args:
            reason: the name of the exception by which the participant leaves; empty if it leaves in good order.
            limit: how long to wait for the lock, in seconds.
            clear: a function that removes the files beside the log. It is called with the log's path at the end of the
                run.
        """
        handle, table = self.handle, self.table
        self.inspect(self.cursor.check_descriptors)

        def decide(_: bytes, __: bytes) -> tuple[None, int, bytes]:
            handle.recovery = POSITION
            self.writer.void_tail()
            session = handle.lock.session or self.registration.append()
            if reason:
                self._append(record.FAILURE, b"", Failure(table.sessions[session], reason).encode(), session)
            elif len(table.left) + 1 < handle.options.world_size:
                self._append(record.LEAVE, b"", b"", session)
            else:
                handle.is_settled = False
                self._append(record.FINISHED, b"", b"", session)
                forwarding.remove_log(handle, LogIdentity(handle.header.lineage, handle.root.inode), clear)
            return None, 0, b""

        self.update(record.LEAVE, b"", b"", decide, limit)

    def compact(self, limit: float) -> None:
        """Continue the log in a new generation that holds the state and not its history.

        Raises:
            StoreUnavailableError: a system call failed. The log is unchanged, unless ``maybe_applied`` is true.
            StoreTimeoutError, StoreGoneError, CorruptLogError: as in `update`.
        """
        if self.read_only:
            raise StoreError(f"{self.path} was opened with read_only=True; it can't be compacted", path=self.path)
        done: list[bool] = []

        def decide(_: bytes, __: bytes) -> tuple[Any, int, bytes]:
            if done:
                return None, 0, b""
            self.compactor.compact()
            done.append(True)
            return MOVED, 0, b""

        self._change_generation(decide, done, limit)

    def _change_generation(self, decide: Decide, done: list[bool], limit: float) -> None:
        """Run a transaction in which `decide` begins a new generation, and enter that generation.

        `decide` appends to `done` after it has sealed the old generation. A `StoreError` that is raised later has a
        true ``maybe_applied``, because the seal stays in the log.
        """
        try:
            self.update(0, b"", b"", decide, limit)
        except StoreError as error:
            error.maybe_applied = error.maybe_applied or bool(done)
            raise

    # -- sessions --------------------------------------------------------------------------------------------------

    @property
    def session_if_ready(self) -> int:
        """The number of this handle's session, read without the mutex; 0 if the handle has not registered.

        The number is also 0 before a recovery, after `close`, and after a fork.
        """
        return 0 if self.handle.recovery or not system.fork_marker[0] else self.handle.lock.session

    def has_announced(self, rank: int) -> bool:
        """Return whether this handle has registered `rank`. If so, its next session is registered with `rank`, too.

        The present session may have a death record that was not read yet. The next write reads it.
        """
        number = self.handle.lock.session
        if number in self.table.ranks.get(rank, ()) and system.fork_marker[0] and not self.handle.recovery:
            self.registration.rank = rank
            return True
        return False

    def register(self, limit: float, rank: int | None = None) -> int:
        """Register this handle as a session, with `rank` if given. Return the session's number.

        The errors are those of `update`.
        """
        table = self.table
        if rank is not None:
            self.registration.rank = rank
        number = self.handle.lock.session
        if number and (rank is None or number in table.ranks.get(rank, ())):
            return number

        def decide(_: bytes, __: bytes) -> tuple[None, int, bytes]:
            if rank is not None and self.handle.options.world_size:
                self._check_rank(rank)
            known = table.sessions.get(self.handle.lock.session)
            return None, record.SESSION, b"" if known is None else known._replace(rank=rank).encode()

        self.update(record.SESSION, b"", b"", decide, limit)
        return self.handle.lock.session

    def is_alive(self, number: int, home: ProcessIdentity | None) -> bool | None:
        """Probe session `number`, as `Liveness.is_alive` does, under the process mutex."""
        return self.inspect(lambda: self.liveness.is_alive(number, home))

    def record_death(self, number: int, limit: float, is_needed: Callable[[], bool] | None = None) -> bool:
        """Record that session `number` is dead. Return whether its death is recorded.

        The session is probed again under the log lock. If it may be alive, nothing is recorded. For all processes the
        session is dead from its death record on, not from the probe. A process that resumes later finds the death
        record of its own session. The errors are those of `update`.

        Args:
            number: the number of the session.
            limit: how long to wait for the lock, in seconds.
            is_needed: a function that is called under the lock, before the probe. If it returns False, nothing is
                recorded.
        """
        table = self.table
        self.refresh(limit)
        if number in table.deaths:  # all its watchers notice the death at the same moment, and one record is enough
            return True

        started = 0 if tracing.recorder is None else system.time.monotonic_ns()
        verdicts: list[Session] = []

        def decide(_: bytes, __: bytes) -> tuple[bool, int, bytes]:
            if number in table.deaths:
                return True, 0, b""
            if is_needed is not None and not is_needed():
                return False, 0, b""
            if self.liveness.is_alive(number, ProcessIdentity.find()) is not False:
                return False, 0, b""
            verdicts[:] = [table.sessions[number]]
            return True, record.DEATH, encode_death(number, verdicts[0].alive_id)

        is_recorded = bool(self.update(record.DEATH, b"", b"", decide, limit))
        if tracing.recorder is not None and verdicts:
            dead = verdicts[0]
            facts = ("session", number, "dead_rank", dead.rank)
            span = tracing.recorder.begin("death", f"{dead.host}:{dead.pid}", "", None, *facts)
            span[tracing.BEGIN] = started
            tracing.end(span, "recorded")
        return is_recorded

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all descriptors. Every later operation raises `StoreClosedError`."""
        handle = self.handle
        with handle.mutex:
            self.refuse_reentry()
            if not handle.recovery & CLOSED:
                with suppress(StoreError):
                    self.cursor.check_descriptors()
            handle.finish(StoreClosedError, "is closed; open the store again")
            handle.lock.close()
            self.liveness.unlock()
            system.close_all(system.os.close, handle.owned_fds)
            self.liveness.lose()


_handles = system.reset_in_child("handles", Log.after_fork)


def _cause_of(first: BaseException | None, error: OSError) -> OSError | None:
    """Return the error to report for a transaction that has ended with `error`, perhaps raised by the unlock.

    `first` is the exception that the transaction raised before the unlock, or None. Return `first` if there is one,
    otherwise `error`. If `first` is a `GenerationUnlinked`, return None: the log continues in another file, and on
    NFS 3 the unlock fails because another host has removed the old file.

    Raises:
        BaseException: `first`, if it is an `FscoordError` or an interruption.
    """
    if first is None or first is error:
        return error
    if isinstance(first, GenerationUnlinked):
        return None
    if isinstance(first, OSError) and not isinstance(first, FscoordError) and first.errno is not None:
        return first
    raise first from first.__cause__
