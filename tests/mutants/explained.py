"""Changes that `mutate.py` makes and no test finds, and why that is right: module, key of the place, reason.

A key is that of `places.Place`, so it holds while lines move; one that fits no place any more fails a test. ``*``
stands for anything.
"""

from __future__ import annotations

import re

AS_LONG = "a file of that length stays as it is"
RECORD_MIN = "no record has less than 29 bytes"
BUFFER = "a byte more or less in a buffer, before it is written"
CLOCK = "a clock of nanoseconds hardly ever shows just this moment"
NEGATIVE = "any negative number says that there is no descriptor"
PAUSE = "how long it pauses, and for how long all is tried, is another matter"
STANDARD_INPUT = "descriptor 0 is standard input"
UNREAD = "nobody reads it before it is set again"
IN_THE_ID = "of the id 16 bytes are written"
STOPS_BEFORE = "one of the records before is bad, and ends it"
SPARES = "only work is spared: what follows looks for itself"

EXPLAINED: dict[str, dict[str, str]] = {
    "_log/liveness/liveness_file.py": {
        "_is_locked: asked = * | 0 -> 1": "from where the descriptor stands, which is 0, for nothing reads on it",
        "LivenessFile._lock: * | 0 -> 1": "from where the descriptor stands, which is 0, for nothing reads on it",
        "LivenessFile.close: self._fd = -1 | 1 -> 2": NEGATIVE,
    },
    "_log/io/writer.py": {
        "Appender._append: *_state_machine.apply(* <= self._spill_at -> Lt": "who looks for long values finds none",
        "Appender._void_tail: if system.os.fstat(fd).st_size < verdict.place: *-> LtE": AS_LONG,
    },
    "_log/wakeup/doorbell.py": {
        "Doorbell.close: self.fd = -1 | 1 -> 2": NEGATIVE,
        "Doorbell.ring: seen = * | 1 -> 2": "only the first of the bytes that were read is looked at",
        "Doorbell.is_lost: return self.fd < 0 or * | self.fd < 0 -> LtE": STANDARD_INPUT,
        "Doorbell.is_lost: return self.fd < 0 or * | 0 -> 1": STANDARD_INPUT,
    },
    "_log/access/network.py": {
        "SharedLogFile._catch_up: if self._pending or * -> And": "what looks damaged then is looked at once more",
        "SharedLogFile._catch_up: while * | system.time.monotonic() >= deadline -> Gt": CLOCK,
        "SharedLogFile._catch_up: system.time.sleep(PAUSE_S) -> pass": PAUSE,
        "SharedLogFile._check_identity: self._drop(fd) -> pass": "closed with the next operation",
        "SharedLogFile.__init__: self._has_written = False * | False -> True": "until a write nothing else is in doubt",
        "SharedLogFile._open: for attempt in range(1, OPEN_TRIES + 1): | 1 -> 2 (2)": "the one before raises",
        "SharedLogFile._open: system.time.sleep(min(PAUSE_S * *": PAUSE,
    },
    "_log/generations/compaction.py": {
        "Compactor._succeed: if lock is not None and * | header.lock_kind != SOFT -> Eq": "closing gives the lock back",
        "Compactor._succeed: is_sealing, fd, lock = False, -1, None | 1 -> 2": NEGATIVE,
        "Compactor._succeed: lock.unlock() -> pass": "closing gives the lock back",
        "Compactor._next_header: log_id = * | 16 -> 17": IN_THE_ID,
        "Compactor._begin_life: self._trouble = DIRTY -> pass": "until its record is there, all can be read as before",
    },
    "_log/contention.py": {
        "Contender._lock_timeout: if isinstance(number, int) and number not in self.sessions: |*-> Or": SPARES,
    },
    "_log/inspect/dump.py": {
        "_dump: fd = -1* | 1 -> 2": NEGATIVE,
        '_records: *data, position = *b"", 0* | 0 -> 1': "of no bytes none are left, so that they are read",
        "_records: system.os.lseek(fd, offset, 0) -> pass (2)": "the VOID that was read ends there",
    },
    "_log/log.py": {
        "LogFile._update_locked: self._trouble = 0*": SPARES,
        "LogFile.update: self._trouble = DIRTY -> pass (2)": "whatever moves on has said so itself",
        "LogFile.update: self._explain(* | 0 -> 1": "kinds are letters, or 0",
        "LogFile.update: attempt += 1 | 1 -> 2": PAUSE,
        "LogFile.join_run.decide: begun.append(True) | True -> False": "whether it is empty is all that is asked",
        "LogFile.compact.decide: done.append(True) | True -> False": "whether it is empty is all that is asked",
        "LogFile.join_run: if self.is_finished or * self.header.runs[:1] != (run,)): | 1 -> 2": SPARES,
        "LogFile.join_run: if self.is_finished or (run is not None and self.header.runs[:1] != (run,)):"
        " | run is not None and self.header.runs[:1] != (run,) -> Or": SPARES,
    },
    "_log/format/header.py": {
        "Header.encode: agreed = * | 3 -> 4": "of reserved bytes 3 are written",
        "Header.encode: limits = * | 16 -> 17": "of reserved bytes 16 are written",
        "Header.decode: if len(data) < HEADER_SIZE: |*": "of that length it is incomplete, too",
    },
    "_log/locking/kernel_wait.py": {
        "cancel_wait: waiter.gone = True*": "who waits says so itself as soon as it is woken",
        "_LockThread.*: self.fd = -1 | 1 -> 2*": NEGATIVE,
        "_LockThread._run: waiter = self._first(end=True) | True -> False": "who lines up so late is woken by its end",
        "_LockThread._run: waiter.gone = True*": "who waits says so itself as soon as it is woken",
        "_LockThread._hand_over: waiter.gone = True*": "who waits says so itself as soon as it is woken",
    },
    "_log/locking/log_lock.py": {
        "LogLock.holder: asked = _range(fcntl.F_WRLCK, 0) | 0 -> 1": "all ranges share their first byte",
        "LogLock.wait: doublings = min(* | 10 -> 11": "a nap is as long as it gets before",
    },
    "_log/access/direct.py": {
        "MarkedLogFile._is_caught_up: return True *": SPARES,
        "MarkedLogFile._is_caught_up: if end < self._offset:*": "were they equal, it would have returned before",
        "MarkedLogFile._write: if self.coherence == DIRECT and *-> Or": "where nothing is torn, it stands there anyway",
    },
    "_log/locking/symlink_lock.py": {
        'SymlinkLock.__init__: self._owner = self._text = "" -> pass': UNREAD,
        "SymlinkLock.__init__: self._count = self._released = 0 *": "wherever counting begins",
        "SymlinkLock.__init__: self._may_hold = self._is_unchecked = False *": UNREAD,
        "SymlinkLock.acquire: self._count += 1 | 1 -> 2": "all that counts is that it grows",
        "SymlinkLock.close: if self._is_unchecked and *-> Or": "to give back asks, too, whose process this is",
        "SymlinkLock._begin: *process_epoch(), False, False | False -> True": "`acquire`, which calls it, sets it next",
        "SymlinkLock._begin: *process_epoch(), False, False | False -> True (2)": "one needless look when it is closed",
        "SymlinkLock._holds_existing: if now - self._checked_at < CHECK_INTERVAL_S: |*": CLOCK,
        "SymlinkLock._holds_existing: self._is_unchecked = False *": "one needless look when it is closed",
    },
    "_log/access/mount.py": {
        "_look_up: first = line.split(None, 5) * | 5 -> 6": "the first fields are the same",
        "find_mount: flags = system.os.O_RDONLY | system.O_CLOEXEC |*": "no child inherits it (PEP 446)",
    },
    "_log/wakeup/node_poller.py": {
        "PollerElection.__init__: self._hurries = 0 *": UNREAD,
        "PollerElection.add: self._put(HURRY_BYTE, self._byte(HURRY_BYTE) + 1) | *": "all that counts is a change",
        "*.heartbeat: self._put(HEARTBEAT_BYTE, *| 1 -> 2": "all that counts is a change",
        "PollerElection.heartbeat: self._put(INTERVAL_BYTE,*| 1000 -> 1001": "a thousandth of a hint",
        "PollerElection._lock: *POLLER_BYTE, 1, 0)) | 0 -> 1": "the descriptor stands at its beginning",
        "PollerElection._lock: *POLLER_BYTE, 1, 0)) | 1 -> 2": "nobody locks the byte behind it",
        "*.remove: if self._poller is not None or not self._held: | self._poller is not None or*": "a needless wake",
        "node_bell_path: raise OSError*": "never reached, for FALLBACK is absolute; types need an end",
        "*.heartbeat: self._put(HEARTBEAT_BYTE, *+ 1 -> Sub": "all that counts is a change",
    },
    "_log/io/opening.py": {
        "open_log: reader = -1 | 1 -> 2": NEGATIVE,
        "open_log: writer = -1 if *| 1 -> 2": NEGATIVE,
        "LogOptions.header: log_id, inode = * | 16 -> 17": IN_THE_ID,
        "read_header: data = more = * | 4096 -> 4097": "a longer read brings the same",
        "read_header: while more and * > 0 -> GtE": "who misses nothing reads nothing, and ends",
        "_initialise: if system.time.monotonic() >= deadline: |*": CLOCK,
    },
    "_log/io/safe_files.py": {
        "unavailable: advice = { | 0 -> 1": "there is no advice for either",
        "check: if found.st_nlink > 1: |*": "then it looks for other names, and finds none",
        "_uid_given_to_ours: *| 0o600 -> 385": "of that file only the owner is looked at",
        "_uid_given_to_ours: return -1 | 1 -> 2": "no negative number is an owner",
        "_remove_temporary_names: continue -> pass": "nothing follows it",
        "copy_permissions: if (owner, group) != (-1, -1): | 1 -> 2*": "to give it neither changes nothing",
    },
    "_log/liveness/presence.py": {
        "Presence._introduce: alive_id = bytes(16) if self._alive is None else self._alive.id | 16 -> 17": IN_THE_ID,
        "Presence.bury: self.refresh(limit) -> pass": SPARES,
        "Presence._take_byte: self._alive_checked = system.time.monotonic() -> pass": SPARES,
        "Presence._look_after_byte: if *> CHECK_S -> GtE": CLOCK,
        "Presence._open_alive: self._lose_alive() *": "it closes sooner what is closed with the handle",
    },
    "_log/io/cursor.py": {
        "LogReader.__init__: self._rfd = self._root_fd = -1 -> pass": UNREAD,
        "LogReader.__init__: self._rfd = self._root_fd = -1 | 1 -> 2": NEGATIVE,
        "LogReader.__init__: self._trouble = 0 | 0 -> 1": SPARES,
        "LogReader._reopen: safe_files.close_owned(fd, owned_fds) -> pass": "closed with the handle, which is over",
        "LogReader._advance: *_state_machine.apply(* <= self._spill_at -> Lt": "who looks for long values finds none",
        "LogReader._advance: elif missing > CHUNK and * | missing > CHUNK -> GtE": SPARES,
        "LogReader._advance: asked = CHUNK -> pass (2)": "a longer read brings the same",
        "LogReader._advance: self._leave_torn() -> pass": "what is pending says so, too",
        "LogReader._sync_read: self._trouble = DIRTY -> pass": SPARES,
        "LogReader._move: system.os.lseek(fd, offset, 0) | 0 -> 1": "a new descriptor stands at the beginning",
    },
    "_log/format/record.py": {
        "*decode*: *-1*| 1 -> 2*": "any negative number says that it is not a record",
        "decode: missing = end - size |*": "its check is asked next, and the number computed anew",
        "decode: stop = position - 6 -> pass": "a run that compares badly is verified record by record",
        "decode: if missing > 0 and * | missing > 0 -> GtE": "where nothing lacks, nothing is left",
        "decode: missing = position + length - size if length > 0 else -1 | length > 0 -> GtE": RECORD_MIN,
        "decode: missing = position + length - size if length > 0 else -1 | 0 -> 1": RECORD_MIN,
        "_decode_each: found = *| length > 0 -> GtE": RECORD_MIN,
        "_decode_each: found = *| 0 -> 1": RECORD_MIN,
        "_decode_each: left = len(data) - position | *-> Add": STOPS_BEFORE,
        "_decode_each: if left < PREFIX_SIZE: |*": STOPS_BEFORE,
        "_decode_each: return records, others, position, chain, HEAD_SIZE - left if left else 0 |*": STOPS_BEFORE,
        "_decode_each: return records, others, position, chain, length - left |*": STOPS_BEFORE,
        "is_torn_void: return * | 1 -> 2": "the byte before the last is the highest of an offset, and 0",
    },
    "_log/inspect/repair.py": {
        "_RecordCopier.__init__: self.header = * | 16 -> 17": IN_THE_ID,
        "_open: header, found = None, resync.find_next(*| 0*": "no record begins where a header does",
        "_open: stack.callback(lockout.release) -> pass": "to close the descriptor gives the lock back as well",
        "_find_successor: if named.generation > known: *> known -> GtE": "both name the same one",
    },
    "_log/inspect/resync.py": {
        "find_next: if bad.offset + record.RECORD_MIN <= end *-> Sub": "so short a record leads to no other",
        "find_next: if record.record_length(prefix, bad.chain) >= 0: |*-> Gt": RECORD_MIN,
        "find_next: budget = *": "a bound on work",
        "_candidates: while start <= size - record.RECORD_MIN: |*-> Add": "after the end nothing is read",
        "_candidates: if record.RECORD_MIN <= promised *-> Add": "what goes beyond the end is looked at, and is none",
        "_candidates: if record.RECORD_MIN <= promised *| position < _WINDOW -> LtE": "it is found twice then",
        "_chain_at: if not record.RECORD_MIN <= length *| size - offset -> Add": "after the end nothing is read",
        "find_next: if budget < 0: |*": "a bound on work, which one step does not matter to",
        "find_next: if record.record_length(prefix, bad.chain) >= 0: | 0 -> 1": RECORD_MIN,
    },
    "_log/inspect/scan.py": {
        "WriterLockout.acquire: if waited >= self._limit: | waited >= self._limit -> Gt": "at that instant",
        "Scan.segments: if missing >= 0 and more and (*missing <= CHUNK -> Lt": "the size is asked for once more",
        "Scan.segments: segment = self._classify() if missing < 0 else None |*": "nothing is missing",
        "Scan._goes_on: *self.size() > self.place.offset -> GtE": SPARES,
        "Scan.segments: wanted = max(missing, CHUNK) -> pass": "a long record is read in more pieces",
    },
    "_log/generations/forwarding.py": {
        "hint: place = data.rfind(*, 0, place) | 0 -> 1": "a kind is never the first byte of a record",
        "newest: continue -> pass": "nothing follows it",
        'newest: (offset, chain), data, missing = start, b"", 0 | 0 -> 1': "more than that is read at once anyway",
        "newest: system.os.lseek(fd, offset, 0) -> pass": "a VOID is what was read last, and ends there",
        "post: reader = -1 | 1 -> 2": NEGATIVE,
        "post: if reader >= 0: |*": STANDARD_INPUT,
        "_void: system.os.lseek(fd, verdict.place, 0) | 0 -> 1": "nothing was done with it, so that it stands at 0",
        "_take: system.time.sleep(_PAUSE_S) -> pass": "so many tries are over sooner, and the next to post does it",
        "_void: if system.os.fstat(fd).st_size < verdict.place: *-> LtE": AS_LONG,
        "_is_unlocked: lock.unlock() -> pass": "to close the descriptor gives the lock back as well",
    },
    "_log/io/spill.py": {
        "leave_long: position = *-> Sub": "a record of several keys has no key of its own",
        "find_long: if length < 0: |*": RECORD_MIN,
        "find_long: if length > least: |*": "a body is longer than its value",
        '_Window.__init__: self._start, self._data = 0, b"" | 0 -> 1': "while it is empty nothing is in it, wherever",
    },
    "_log/access/hang_watchdog.py": {
        "KernelCall.__init__: self._warn_after = 0.0 -> pass": UNREAD,
        "HangWatchdog._run: self.wake.wait(FIRST_S / 2) | 2 -> 3": PAUSE,
    },
    "_log/generations/follower.py": {
        "Successive._look: self._looked = now -> pass": SPARES,
        "Successive._open: self._rfd, self._root_fd = opened.reader, -1 | 1 -> 2": NEGATIVE,
        "Successive._enter: reader = writer = -1 | 1 -> 2": NEGATIVE,
        "Successive._look: is_root = self._root_fd < 0 | self._root_fd < 0 -> LtE": STANDARD_INPUT,
        "Successive._enter: self._trouble = trouble -> pass": SPARES,
        "Successive._enter: root_fd = * | self._root_fd < 0 -> LtE": STANDARD_INPUT,
        "Successive._enter: root_fd = * | 0 -> 1": STANDARD_INPUT,
        "Successive._look: is_root = self._root_fd < 0 | 0 -> 1": STANDARD_INPUT,
        "Successive._open_again: self._rfd = self._root_fd = self._lock.fd = -1 *| 1 -> 2": NEGATIVE,
        "Successive._open_again: self._rfd, self._lock = *-> pass": "the old lock does as well, bound again, and"
        " who looks for the place opens another reader",
        "Successive._open_again: self._drop(root_fd) -> pass": "dropped with all that an interruption leaves",
        "Successive._follow: self._way = *-> pass": "it is read from the beginning then",
        "Successive._newest: self._way = place -> pass": "it is read from where it was read before",
        "Successive._restart: self._trouble = DIRTY -> pass": SPARES,
    },
    "_log/format/generation_ref.py": {
        "GenerationRef.from_seal: if len(data) < _SEAL.size: |*": "of that length it has no name, and is none",
        "GenerationRef.from_forward: if len(data) < _FORWARD.size: |*": "of that length it has no name, and is none",
    },
    "_log/io/torn_tail.py": {
        "examine: if durable and length < 0 and *| 0 -> 1": RECORD_MIN,
        "_search: if size - offset > *| size - start -> Add": "behind the end nothing is read",
        "Zeros.__init__: self._start = self._end = 0 | 0 -> 1": "every header is longer",
        "Zeros.forget: self._start = self._end = 0 | 0 -> 1": "every header is longer",
        "Zeros.first_data: while start < end: |*": "of no bytes none is read, and that is the end",
        "Zeros.first_data: if self.is_sparse and *> _CHUNK -> GtE": "how much is worth the question is another matter",
        "Zeros.first_data: if self.is_sparse and *-> Add": "how much is worth the question is another matter",
        "Zeros.first_data: *> self.deadline -> GtE": CLOCK,
        "_search: if system.time.monotonic() > zeros.deadline: |*": CLOCK,
        "_search: found -= found % record.SECTOR -> pass": "a void begins with a byte that is not zero",
        "_holds_data: return start < end and *| start < end -> LtE": "of no bytes none is read",
        "examine: end = offset + (*| length > 0 -> GtE": RECORD_MIN,
        "examine: end = offset + (*| 0 -> 1": RECORD_MIN,
        "read_at: while size > 0: |*": "of no bytes none is read, and that is the end",
        "examine: if torn or *| length > 0 -> GtE": RECORD_MIN,
        "examine: if torn or *| 0 -> 1": RECORD_MIN,
        "examine: if durable and length < 0 and *| length < 0 -> LtE": RECORD_MIN,
        "examine: second = *| 1 -> 2": "the rest of a sound prefix is not all zeros, either",
        "examine: second = *| offset + 1 -> Sub": "the sector where a sound prefix begins is not all zeros",
    },
    "_log/wakeup/waiter.py": {
        "Ticket.__init__: self._heard = watch.heard -> pass": UNREAD,
        "Ticket._sleep_beside: if self._vigil or *| now >= until -> Gt": CLOCK,
        "Ticket._sleep_beside: if self._vigil or *| now - self._own_look > OWN_LOOK_S -> GtE": CLOCK,
        "Ticket.__init__: self._bucket = 0 *": "a wait is armed before it sleeps",
        'Ticket.__init__: self._mark = b"" -> pass': "a wait is armed before it sleeps",
        "Ticket.__init__: self._beats = -1 | 1 -> 2": "no byte of the bell is negative",
    },
    "_log/inspect/verify.py": {
        "_Verification._read_file: lockout.release() -> pass": "to close the descriptor gives the lock back as well",
        "_FileReader._take: is_special = any(* | 0 -> 1": "who looks at each record finds nothing more",
    },
    "_log/wakeup/watcher.py": {
        "Watch.__init__: self._is_told = False *": "without events nobody reads it, and with them it is set",
        "Watch.__init__: self.heard = 0 | 0 -> 1": "all that counts is a change",
        "Watch.__init__: self.deaths = 0 | 0 -> 1": "all that counts is a change",
        "Watch._wake_all: self.heard += 1 | 1 -> 2": "all that counts is a change",
        "Watch.sleep: if left <= 0: |*": CLOCK,
        "_after_fork_in_child: _watches.clear() -> pass": "a watch that is closed is not shared any more",
    },
}


EVERYWHERE: dict[str, str] = {
    "*.atexit = False -> pass": "at the end the kernel closes everything",
    "*safe_files.check(*, fd, 0, read_only=True) | 0 -> 1": "of who only reads no mode is asked",
    "*.atexit = False | False -> True": "at the end the kernel closes everything",
    "*: if *now - self._looked > LOOK_S -> GtE": CLOCK,
    "*monotonic() - self._looked > oldest -> GtE": CLOCK,
    "*| waited >= limit -> Gt": CLOCK,
    "*waiting = [], 0 | 0 -> 1": BUFFER,
    "*waiting >= _BUFFER -> Gt": BUFFER,
}
"""The same for places of any module."""


def fits(pattern: str, key: str) -> bool:
    """Return whether an entry for `pattern` explains the place `key`."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), key) is not None


def reason(module: str, key: str) -> str:
    """Return why a change that no test finds is none that matters; ``""`` if nobody has said so."""
    reasons = EXPLAINED.get(module, {}) | EVERYWHERE
    return next((why for pattern, why in reasons.items() if fits(pattern, key)), "")
