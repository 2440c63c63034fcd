"""`LogFile`: one handle on one log: what `LogReader` follows, and records appended under the lock.

A writer holds the lock, has read to the end, and appends each record with one write(2). Nothing is ever cut or
overwritten: what a dying writer left torn is voided by the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fscoord import _system as system
from fscoord._log import path as paths, record, tail
from fscoord._log.lock import LogLock
from fscoord._log.mount import Mount, find_mount
from fscoord._log.opening import Wanted, open_log
from fscoord._log.presence import Presence
from fscoord._log.reader import APPLYING, CHUNK, DIRTY, LOOK_S, REOPEN, Consumer, Suspect
from fscoord._log.record import Session
from fscoord.errors import (
    FscoordError,
    StoreClosedError,
    StoreError,
    StoreUnavailableError,
)

__all__ = ["Decide", "LogFile"]

Decide = Callable[[bytes, bytes], tuple[Any, int, bytes]]
"""Called with the lock, up to date, with key and value; returns ``(result, kind, value)``, kind 0 to write nothing."""

LOCK_GRACE_S: Final = 0.03
"""How long the lock is waited for even by who does not want to wait: it is held for microseconds."""

_NOT_APPLIED = frozenset(getattr(system.errno, name, -1) for name in ("ENOSPC", "EDQUOT", "EROFS", "EFBIG", "EBADF"))


class LogFile(Presence):
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
        wanted: Wanted,
        introduce: Callable[[], Session],
        participants: int = 0,
        mount: Mount | None = None,
    ) -> None:
        super().__init__(path, consumer, participants, introduce)
        self.read_only = wanted.read_only
        self._wanted = wanted
        self._directory_synced = False
        self.mount: Mount = mount or find_mount(path)
        try:
            self._open()
        except FscoordError:
            raise
        except OSError as error:
            raise paths.unavailable(error, path, "opening the log") from error

    # -- opening ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        opened = open_log(self.path, self._wanted, self._read_flags, self._write_flags)
        self._adopt(opened.reader, opened.header, opened.size, opened.chain)
        self._durable = opened.header.durable
        shared = self.read_only
        fd = self._reopen(system.os.O_RDONLY, self._descriptors) if shared else self._hold(opened.writer)
        kind = opened.header.lock_kind
        self._lock = LogLock(self.path, fd, kind, self.mutex, self._descriptors, shared=shared)

    def _open_again(self) -> None:
        """In a forked child, or when the server has forgotten ours: open new descriptors on the same log."""
        self._drop(self._reopen(system.os.O_RDONLY, self._descriptors))  # a log that is gone is not to be born again
        log_id, offset, chain = self.header.log_id, self._offset, self._chain
        session = self._lock.session if not self._trouble & REOPEN else 0
        self._lock.close()
        self._trouble |= APPLYING  # should this be interrupted: the offset is to be kept
        self._open()
        if self.header.log_id != log_id:
            raise self._gone("was replaced by another log")
        self._offset, self._chain = offset, chain
        self._lock.bind(self._lock.fd, session)

    def _in_use(self) -> set[int]:
        return {self._rfd, self._lock.fd}

    def after_fork(self) -> None:
        """In a forked child: close the inherited descriptors without unlocking; the next operation opens its own."""
        self._lock.after_fork()
        super().after_fork()

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
            if shared.busy:
                raise self._entered_twice()
            try:
                shared.busy = True
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
                self._misread(error)
            finally:
                shared.busy = False
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
        attempt, started = 0, 0.0
        while True:
            if not system.own_process[0]:
                system.recover_from_fork()
            shared = self._shared
            with shared.mutex:
                if shared.busy:
                    raise self._entered_twice()
                try:
                    shared.busy = True
                    if self._trouble:
                        self._sort_out()
                    lock = self._lock
                    try:
                        grant = lock.grant
                        if grant is None:
                            lock.try_lock()
                        else:
                            lock.grant = None  # before anything that can be interrupted: ``finally`` unlocks
                            grant.release()
                        self._trouble = DIRTY
                        result = self._update_locked(kind, key, value, decide)
                        self._trouble = 0
                        return result
                    finally:
                        lock.unlock()
                except FscoordError:
                    raise
                except OSError as error:
                    self._explain(error)
                except BaseException:
                    self._lock.unlock()  # a soft lock's is Python's, which an interruption can keep from running
                    raise
                finally:
                    shared.busy = False
            if not attempt:
                started = system.time.monotonic()
            attempt += 1
            self._wait_for_lock(attempt, started, max(limit, LOCK_GRACE_S))

    def refresh_locked(self, limit: float) -> None:
        """As `refresh`, but with the lock: what it finds is final."""
        self.update(0, b"", b"", None, limit)

    def leave(self, participants: int, limit: float) -> bool:
        """Say that this participant will not come back; return whether it was the last, which removes the file."""
        self._participants = 0
        self.update(record.LEAVE, b"", b"", None, limit)
        is_last = self.left >= participants
        if is_last and paths.leads_to(self.path, self._identity):
            paths.unlink_quietly(self.path)
        return is_last

    def refuse_reentry(self) -> None:
        """Raise `StoreError` in a signal handler or finalizer that has interrupted an operation of its thread."""
        if not system.own_process[0]:
            system.recover_from_fork()
        with self.mutex:
            if self._shared.busy:
                raise self._entered_twice()

    def close(self) -> None:
        """Give the descriptors back; every later operation raises `StoreClosedError`."""
        with self.mutex:
            self.refuse_reentry()
            self._finish(StoreClosedError, "is closed; open the store again")
            self._lock.close()
            for fd in list(self._descriptors):
                self._drop(fd)
            self._lose_alive()

    def _misread(self, error: OSError) -> None:
        """Say what `error`, met while reading without the lock, means; or return if it is worth trying with it."""
        raise paths.unavailable(error, self.path, "reading the log") from error

    # -- with the lock ---------------------------------------------------------------------------------------------

    def _update_locked(self, kind: int, key: bytes, value: bytes, decide: Decide | None) -> Any:
        if self._is_shared:
            self._catch_up()
        else:
            data = system.os.read(self._rfd, CHUNK)
            if data:
                self._advance(data, locked=True)
            now = system.time.monotonic()
            if now - self._looked > LOOK_S:
                self._look(now)
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
        self._append(kind, key, value, session)
        return result

    def _catch_up(self) -> None:
        raise AssertionError("who shares the log with other hosts knows how")

    def _append(self, kind: int, key: bytes, value: bytes, session: int) -> None:
        """Write a record, sync it if the log is durable, and take it in as if it had been read."""
        time_ns = system.time.time_ns()
        data, chain = record.encode(kind, key, value, session, time_ns, self._chain)
        size = len(data)
        self._write(data)
        system.os.lseek(self._rfd, size, 1)
        self._trouble = APPLYING
        if kind in record.DATA_KINDS:
            self._consumer.apply(((kind, key, value, session, time_ns),))
        else:
            self._note(((kind, key, value, session, time_ns),))
        self._offset += size
        self._chain = chain
        self._trouble = DIRTY

    def _write(self, data: bytes) -> None:
        """Write `data` at the end of the log, and sync it if the log is durable."""
        fd = self._lock.fd
        try:
            written = system.os.write(fd, data)
            if written != len(data):
                paths.write_all(fd, data[written:])
        except OSError as error:
            applied = error.errno not in _NOT_APPLIED
            raise paths.unavailable(error, self.path, "appending to the log", maybe_applied=applied) from error
        if self._durable:
            self._sync(fd)

    def _sync(self, fd: int) -> None:
        """Make what was written survive a power loss. What the kernel failed to write it may drop: no retry."""
        try:
            system.os.fdatasync(fd)
            if not self._directory_synced:
                paths.sync_directory(self.path)
                self._directory_synced = True
        except OSError as error:
            self._finish(StoreUnavailableError, "could not be synced, so nothing is certain; open the store again")
            raise paths.unavailable(error, self.path, "syncing the log", maybe_applied=True) from error

    def _void_tail(self) -> None:
        """Void the torn record at the end of the log: its writer is gone, for we hold the lock."""
        verdict = self._examine()
        if isinstance(verdict, tail.Damage):
            raise self._corrupt(verdict)
        if isinstance(verdict, tail.Torn):
            fd = self._lock.fd
            if system.os.fstat(fd).st_size < verdict.place:
                system.os.ftruncate(fd, verdict.place)
            time_ns = system.time.time_ns()
            data, chain = record.encode_void(self._offset, self._lock.session, time_ns, self._chain)
            self._write(data)
            verdict = tail.Skip(verdict.place + len(data), chain)
        self._move(verdict.offset, verdict.chain)
