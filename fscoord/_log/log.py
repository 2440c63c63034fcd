"""`LogFile`: one handle on one log: what `LogReader` follows, and records appended under the lock.

A writer holds the lock, has read to the end, and appends each record with one write(2). Nothing is ever cut or
overwritten: what a dying writer left torn is voided by the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from fscoord._log.access.mount import Mount, find_mount
from fscoord._log.consumer import Consumer
from fscoord._log.contention import said_first
from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.format.header import LogIdentity
from fscoord._log.format.runs import classify_run
from fscoord._log.generations import forwarding
from fscoord._log.generations.compaction import MOVED, NEVER, Compactor
from fscoord._log.io import safe_files, spill, torn_tail
from fscoord._log.io.cursor import CHUNK, DIRTY, LOOK_S, REOPEN, Suspect, Vanished
from fscoord._log.io.opening import LogOptions
from fscoord._runtime import system
from fscoord._runtime.foreign import raise_if_foreign
from fscoord.errors import FscoordError, StoreClosedError, StoreError, StoreUnavailableError

__all__ = ["Decide", "LogFile"]

Decide = Callable[[bytes, bytes], tuple[Any, int, bytes]]
"""Called with the lock, up to date, with key and value; returns ``(result, kind, value)``, kind 0 to write nothing."""

LOCK_GRACE_S: Final = 0.03
"""How long the lock is waited for even by who does not want to wait: it is held for microseconds."""


class LogFile(Compactor):
    """One handle on the log at `path`, which appears, with its header, if it is not there.

    Args:
        path: an absolute path, as `path.resolve` returns it.
        consumer: is given every data record once, in order.
        wanted: what the log must be like.
        introduce: returns who this handle is, when it first writes.
        participants: the handle is over when so many have left; 0 for never.
        mount: what `path` is on, if that is known.
    """

    def __init__(
        self,
        path: str,
        consumer: Consumer,
        wanted: LogOptions,
        introduce: Callable[[], Session],
        participants: int = 0,
        mount: Mount | None = None,
    ) -> None:
        super().__init__(path, consumer, participants, introduce)
        self.read_only = wanted.read_only
        self._directory_synced = False
        self.mount: Mount = mount or find_mount(path)
        self._wanted = wanted = wanted._replace(inodes_last=wanted.inodes_last and self.mount.inodes_last)
        self._zeros = torn_tail.Zeros(is_sparse=self.mount.reports_holes and not system.is_faked())
        self._compact_at = wanted.compact_bytes or NEVER
        self._spill_at = wanted.spill_bytes or spill.NEVER
        try:
            self._open()
        except (FscoordError, OSError) as error:
            raise_if_foreign(error)
            self._drop_all()  # whoever keeps the error keeps what is half open
            if isinstance(error, FscoordError):
                raise
            raise safe_files.unavailable(error, path, "opening the log") from error

    def after_fork(self) -> None:
        """In a forked child: the descriptors are closed, and nothing is unlocked; the next operation opens its own."""
        self._lock.after_fork(self._shared.mutex)
        super().after_fork()

    def be_closed_by_fork(self) -> None:
        """In a forked child, after `after_fork`: a thread of the parent was closing this handle, and is not here."""
        self._finish(StoreClosedError, "was being closed by another thread when this process was forked; open it again")

    # -- the two things that one does with a log -------------------------------------------------------------------

    def refresh(self, limit: float) -> None:
        """Give the consumer every record that is complete by now.

        Raises:
            StoreGoneError: the file was deleted, replaced or truncated.
            CorruptLogError: the log is damaged.
            StoreTimeoutError: the lock was needed (to be sure of damage, or on a shared file system) and did not come.
        """
        if not system.own_process[0]:
            system.recover_from_fork()
        shared = self._shared
        with shared.mutex:
            if shared.is_inside:
                raise self._entered_twice()
            try:
                shared.is_inside = True
                self._limit = limit
                if self._trouble:
                    self._sort_out()
                self._trouble = DIRTY
                self._read()
                self._trouble = 0
                return
            except Suspect:
                pass
            except FscoordError:
                raise
            except OSError as error:
                raise_if_foreign(error)
                self._misread(error)
            finally:
                shared.is_inside = False
        self.refresh_locked(limit)

    def update(self, kind: int, key: bytes, value: bytes, decide: Decide | None, limit: float) -> Any:
        """With the lock, and up to date, append the record ``(kind, key, value)`` or what `decide` makes of it.

        Raises:
            StoreTimeoutError: the lock did not come within `limit` seconds; its ``holder`` names who has it.
            StoreUnavailableError: the file system refused; ``maybe_applied`` says whether the record may be there.
            StoreGoneError, CorruptLogError: as in `refresh`.
        """
        if self.read_only and kind:
            raise StoreError(f"{self.path} was opened with read_only=True; nothing was written", path=self.path)
        attempt, started, left, result = 0, 0.0, limit, MOVED
        while True:
            if not system.own_process[0]:
                system.recover_from_fork()
            shared = self._shared
            with shared.mutex:
                if shared.is_inside:
                    raise self._entered_twice()
                try:
                    shared.is_inside = True
                    self._limit = left
                    if self._trouble:
                        self._sort_out()
                    lock = self._lock
                    try:
                        handover = lock.handover
                        if handover is None:
                            lock.try_lock()
                        else:
                            lock.handover = None  # before anything that can be interrupted: ``finally`` unlocks
                            handover.release()
                        self._trouble = DIRTY
                        result = self._update_locked(kind, key, value, decide)
                        if result is MOVED:
                            self._trouble = DIRTY
                            continue
                        self._trouble = 0
                        return result
                    finally:
                        lock.unlock()
                except FscoordError:
                    raise
                except OSError as error:
                    if error.errno is None:  # a signal handler's
                        self._lock.unlock()
                        raise
                    first = said_first(error)
                    if first is not None and not self._is_cut_by_fork():
                        self._explain(first, maybe_applied=result is not MOVED and kind > 0)
                except Vanished:  # the next attempt mends it
                    pass
                except BaseException:
                    self._lock.unlock()  # a soft lock's is Python's, which an interruption can keep from running
                    raise
                finally:
                    shared.is_inside = False
            if not attempt:
                started = system.time.monotonic()
            attempt += 1
            self._wait_for_lock(attempt, started, max(limit, LOCK_GRACE_S))
            left = limit - (system.time.monotonic() - started)

    def refresh_locked(self, limit: float) -> None:
        """As `refresh`, but with the lock: what it finds is final."""
        self.update(0, b"", b"", None, limit)

    def leave(self, participants: int, limit: float, clear: Callable[[str], object]) -> None:
        """Say that this participant will not come back. If it is the last of `participants`, that ends the log.

        The record of its end is its removal. Its names go as well if they can, after ``clear(path)`` has removed what
        stands beside it. Errors as in `update`.
        """
        self._participants = 0

        def decide(_: bytes, __: bytes) -> tuple[None, int, bytes]:
            if self.left + 1 < participants:
                return None, record.LEAVE, b""
            self._trouble = DIRTY
            if self._pending or self._torn:
                self._void_tail()
            session = self._lock.session or self._introduce()
            self._is_settled = False
            self._append(record.FINISHED, b"", b"", session)
            owner = LogIdentity(self.header.lineage, self.root.inode)
            flags = forwarding.Flags(self._read_flags, self._write_flags)
            forwarding.remove_log(self.path, self.root, owner, clear, flags, self._descriptors)
            return None, 0, b""

        self.update(record.LEAVE, b"", b"", decide, limit)

    def join_run(self, limit: float, *, shows: bool = False) -> None:
        """Belong to the run that was asked for, which begins if it is a new one; without one, to that which there is.

        A finished log begins a new life. If it `shows`, the handle introduces itself at once.

        Raises:
            StaleRunError: the run is over.
            StoreError: it has not begun, and this handle only reads.
            StoreUnavailableError: the log is finished, and this handle only reads.
            StoreUnavailableError, StoreTimeoutError, StoreGoneError, CorruptLogError: as in `update`.
        """
        run, begun = self._wanted.run, list[bool]()

        def decide(_: bytes, __: bytes) -> tuple[Any, int, bytes]:
            verdict = "join" if run is None else classify_run(self.header.runs, run)
            if verdict == "stale":
                raise self._superseded(self.header.runs[0])
            if verdict == "join" and not self.is_finished:
                return None, 0, b""
            if self.read_only and verdict == "join":
                message = f"{self.path} is finished, and no writer has opened it since"
                raise StoreUnavailableError(message, path=self.path, errno=system.errno.ENOENT)
            if self.read_only:
                raise StoreError(f"{self.path}: the run that was asked for has not begun; try again", path=self.path)
            self._begin_life(run)
            begun.append(True)
            return MOVED, 0, b""

        if self.is_finished or (run is not None and self.header.runs[:1] != (run,)):
            self._change_generation(decide, begun, limit)
        self.settle()
        if shows and not self.read_only:
            self.introduce(limit)

    def compact(self, limit: float) -> None:
        """Go on in a new generation that holds nothing but what the log amounts to.

        Raises:
            StoreUnavailableError: the file system refused, and all is as it was.
            StoreTimeoutError, StoreGoneError, CorruptLogError: as in `update`.
        """
        if self.read_only:
            raise StoreError(f"{self.path} was opened with read_only=True; it can't be compacted", path=self.path)
        done: list[bool] = []

        def decide(_: bytes, __: bytes) -> tuple[Any, int, bytes]:
            if done:
                return None, 0, b""
            self._compact()
            done.append(True)
            return MOVED, 0, b""

        self._change_generation(decide, done, limit)

    def _change_generation(self, decide: Decide, done: list[bool], limit: float) -> None:
        """As `update`; `decide` fills `done` when there is a new generation, which then must still be entered."""
        try:
            self.update(0, b"", b"", decide, limit)
        except StoreError as error:
            error.maybe_applied = error.maybe_applied or bool(done)
            raise

    def refuse_reentry(self) -> None:
        """Raise `StoreError` in a signal handler or finalizer that has interrupted an operation of its thread."""
        if not system.own_process[0]:
            system.recover_from_fork()
        with self.mutex:
            if self._shared.is_inside:
                raise self._entered_twice()

    def close(self) -> None:
        """Give the descriptors back; every later operation raises `StoreClosedError`."""
        with self.mutex:
            self.refuse_reentry()
            self._finish(StoreClosedError, "is closed; open the store again")
            self._lock.close()
            if self._alive is not None:
                self._alive.release()
            self._drop_all()
            self._lose_alive()

    def _drop_all(self) -> None:
        for fd in list(self._descriptors):
            self._drop(fd)

    def _misread(self, error: OSError) -> None:
        """Say what `error`, met while reading without the lock, means; or return if it is worth trying with it."""
        if self._is_cut_by_fork():
            return
        raise safe_files.unavailable(error, self.path, "reading the log") from error

    def _is_cut_by_fork(self) -> bool:
        """Return whether a signal handler has forked in the middle of an operation, which goes on in the child.

        Its descriptors are closed there. So the child's next attempt opens its own.
        """
        is_cut = self._rfd < 0 or self._lock.fd < 0
        if is_cut:
            self._trouble |= REOPEN
        return is_cut

    # -- with the lock ---------------------------------------------------------------------------------------------

    def _update_locked(self, kind: int, key: bytes, value: bytes, decide: Decide | None) -> Any:
        lock = self._lock
        if self._is_shared:
            self._catch_up()
        else:
            data = system.os.read(self._rfd, CHUNK)
            if data:
                self._advance(data, locked=True)
                if lock is not self._lock:  # of what follows not all may have been read
                    return MOVED
            now = system.time.monotonic()
            if now - self._looked > LOOK_S:
                self._look(now)
        if lock is not self._lock:
            return MOVED
        self._trouble = 0
        result = None
        if decide is not None:
            result, kind, value = decide(key, value)
        if not kind:
            return result
        self._trouble = DIRTY
        if self._pending or self._torn:
            self._void_tail()
        session = self._lock.session
        if not session:
            session = self._introduce()
            if kind == record.SESSION:
                return result
        if self._offset + len(value) >= self._compact_at and self._tries_to_compact(len(value)):
            return MOVED
        self._append(kind, key, value, session)
        return result

    if TYPE_CHECKING:

        def _catch_up(self) -> None: ...  # of `coherence`, for logs that hosts share
