"""`Sharing`: holds the parts that only a log on a shared mount has. `ChangedKeys`: collects the keys that changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from fscoord._log.files.opening import LogOptions
from fscoord._log.files.spill import SpilledRecord
from fscoord._log.format import record
from fscoord._log.handle import HandleState, NeedsLock
from fscoord._log.liveness.own_session import Liveness
from fscoord._log.mount import DIRECT, Mount
from fscoord._log.recovery import POSITION
from fscoord._log.replay.cursor import Cursor
from fscoord._log.replay.writer import LogWriter
from fscoord._log.session_table import SessionTable
from fscoord._log.shared.extent import Extent
from fscoord._log.shared.network import NetworkAccess, SymlinkLockAccess
from fscoord._log.state_machine import StateMachine
from fscoord._log.wakeup.doorbell import SIZE, bucket
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign
from fscoord.errors import FscoordError

if TYPE_CHECKING:
    from fscoord._log.shared.combining.outcomes import Outcomes, SharedLogWriter


class ChangedKeys:
    """A `StateMachine` that forwards every call to `state_machine`, and collects the buckets of all changed keys.

    Attributes:
        covers_all: whether `take` returns all buckets, because any key may have changed.
    """

    def __init__(self, state_machine: StateMachine) -> None:
        self._state_machine = state_machine
        self.mark_spilled, self.relocate_spilled = state_machine.mark_spilled, state_machine.relocate_spilled
        self.snapshot, self.live_size = state_machine.snapshot, state_machine.live_size
        self._buckets: set[int] = set()
        self.covers_all = False

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        self._state_machine.apply(records)
        for kind, key, value, _, _ in records:
            self._buckets.update(map(bucket, record.changed_keys(kind, key, value)))

    def reset(self) -> None:
        self._state_machine.reset()
        self.covers_all = True

    def mark_all(self) -> None:
        """Make the next `take` return all buckets. Called after a control record, which may concern every waiter."""
        self.covers_all = True

    def take(self) -> Collection[int]:
        """Return the buckets of the keys that have changed since the last call."""
        buckets: Collection[int] = range(SIZE) if self.covers_all else self._buckets
        self._buckets, self.covers_all = set(), False
        return buckets


class Sharing:
    """Creates and holds the parts of one handle that only a log on a shared mount has.

    Args:
        machine: the state machine of the log.
        options: the options of the log.
        coherence: how to read the writes of other hosts: ``"direct"`` or ``"locked"``; see `mount.COHERENCES`.
        table: the session table of the log.

    Attributes:
        machine: the state machine that the log must use. It forwards every call to the argument `machine`.
        changed_keys: collects the keys that changed. The poller rings for them, because no file event on this host
            reports the writes of other hosts.
        outcomes: finds the records that other processes on this host append for this handle; None if no other process
            appends records for this handle.
        access: reads and writes the bytes of the log. `make_parts` sets this attribute.
        writer: appends batches; None if `outcomes` is None. `make_parts` sets this attribute.
        follow: `GenerationFollower.follow`, which opens the next generation after a seal. The log sets this attribute.
    """

    access: NetworkAccess
    follow: Callable[[], object]
    _handle: HandleState
    writer: SharedLogWriter | None = None

    def __init__(self, machine: StateMachine, options: LogOptions, coherence: str, table: SessionTable) -> None:
        self._coherence = coherence
        self.changed_keys = ChangedKeys(machine)
        # Other processes of the host may append the records of this handle only where reads are direct.
        shares = coherence == DIRECT and not (options.is_soft or options.read_only)
        self.outcomes = self._new_outcomes(table) if shares else None
        table.keeps_times = self.outcomes is not None
        self.machine: StateMachine = self.outcomes or self.changed_keys

    def _new_outcomes(self, table: SessionTable) -> Outcomes | None:
        """Return the `Outcomes`; None if its module can't be imported, so that this handle can't combine writes.

        The module is imported late, because a handle that only reads does not need it.
        """
        with ignoring(OSError, ImportError):
            made: Outcomes = system.import_uninterrupted("fscoord._log.shared.combining.outcomes").Outcomes(
                self.changed_keys, table
            )
            return made
        return None

    def make_parts(self, handle: HandleState, cursor: Cursor, liveness: Liveness, mount: Mount) -> LogWriter:
        """Create the `NetworkAccess` and the `LogWriter` of `handle`. Keep the access, and return the writer."""
        is_direct = handle.options.is_soft and self._coherence == DIRECT
        kind = SymlinkLockAccess if is_direct else NetworkAccess
        self._handle = handle
        self.access = kind(handle, cursor, liveness, mount, self._coherence)
        if self.outcomes is None:
            return LogWriter(handle, cursor, self.access.write)
        writing = system.import_uninterrupted("fscoord._log.shared.combining.outcomes")
        writer: SharedLogWriter = writing.SharedLogWriter(handle, cursor, self.access.write)
        self.writer = writer
        return writer

    def read_extent(self, extent: Extent) -> bool:
        """Apply the records in `extent`, the bytes that another process on this host has read.

        Errors are ignored, because the next `refresh` raises them again.

        Returns:
            Whether any record was applied. If not, the caller must use `refresh` to look for new records.
        """
        if not system.fork_marker[0]:
            return False
        handle = self._handle
        with handle.mutex:
            if handle.shared.is_inside or handle.recovery:
                return False
            try:
                handle.shared.is_inside = True
                handle.recovery = POSITION  # as in `Log.refresh`
                is_sealed = self.access.read_extent(extent)
                if is_sealed:
                    self.follow()
                handle.recovery = 0
                return is_sealed is not None
            except (OSError, FscoordError, NeedsLock) as error:
                raise_if_foreign(error)
                return False
            finally:
                handle.shared.is_inside = False
