"""The inside of the package for tests outside `unit` and `faults`, which import no private module.

Only this module names the private attributes of a `FileStore`.
"""

from __future__ import annotations

from typing import Any

from fscoord import FileStore
from fscoord._arguments import (
    INT64_MAX,
    INT64_MIN,
    KEY_MAX,
    VALUE_MAX,
    Key,
    MalformedText,
    Timeout,
    check_int64,
    key_bytes,
    keys_bytes,
    missing_message,
)
from fscoord._log import log as log_module, mount as mount_module, opened
from fscoord._log.files import safe_files, spill as spill_module, torn_tail
from fscoord._log.files.opening import COMPACT_BYTES, SPILL_BYTES, LogOptions
from fscoord._log.files.safe_files import copy_permissions
from fscoord._log.format import record
from fscoord._log.format.control_records import Session, decode_death, encode_death
from fscoord._log.format.generation_ref import GenerationRef, generation_name, parse_generation_name
from fscoord._log.format.header import MAGIC, Header, LogIdentity, classify_run, parse_run_id, supersede
from fscoord._log.format.record import LogPosition, MalformedRecord, Record, chain_at_end, decode_changes
from fscoord._log.generations import follower, forwarding
from fscoord._log.handle import open_root
from fscoord._log.inspect import scan
from fscoord._log.inspect.repair import write_copy
from fscoord._log.inspect.verify import Generation, Report
from fscoord._log.liveness import liveness_file, own_session
from fscoord._log.liveness.liveness_file import LivenessFile, ProcessIdentity
from fscoord._log.liveness.own_session import Liveness
from fscoord._log.locking import kernel_wait, process_mutex
from fscoord._log.locking.log_lock import FLOCK, OFD, _nothing as unlock_of_a_closed_lock, _range as lock_range
from fscoord._log.locking.process_mutex import process_mutex_for
from fscoord._log.log import Log
from fscoord._log.mount import COHERENCES, Mount, find_mount
from fscoord._log.recovery import DESCRIPTORS, GENERATION
from fscoord._log.replay.cursor import CHUNK
from fscoord._log.shared import hang_watchdog, network as shared_network, node_poller, node_waiter, symlink_lock
from fscoord._log.shared.combining import combiner, station
from fscoord._log.shared.combining.batch import Batch
from fscoord._log.shared.combining.outcomes import SharedLogWriter
from fscoord._log.shared.combining.station import Station
from fscoord._log.shared.network import NetworkAccess
from fscoord._log.shared.node_poller import node_path
from fscoord._log.shared.sharing import Sharing
from fscoord._log.wakeup import watcher
from fscoord._log.wakeup.doorbell import bucket
from fscoord._log.wakeup.watcher import ChangeWatcher, Waiter
from fscoord._runtime import escaping, file_events, network, system, tracing
from fscoord._runtime.escaping import closer_look, escape_word, printable
from fscoord._runtime.logging import logger
from fscoord._runtime.signals import Terminated, resend_lost_signals
from fscoord._waiting import timing
from fscoord._waiting.rounds import ARRIVALS, RoundState
from fscoord._waiting.timing import SHOW_S, SlowWaitLogger
from fscoord.recipes import (
    _group as group_module,
    _hold as hold_module,
    _lease as lease_module,
    _line as line_module,
    _look as look_module,
)
from fscoord.recipes._entry import NO_LEASE, Entry, parse_line
from fscoord.recipes._hold import Exclusive
from fscoord.recipes._keys import RefusedError
from fscoord.recipes._lease import LeaseMonitor, check_interval
from fscoord.recipes._line import Line
from fscoord.stores.file.notifier import ChangeNotifier
from fscoord.stores.file.replay import KeyValueState


def log_of(store: FileStore) -> Log:
    """Return the handle of `store` on its log."""
    return store._log


def sharing_of(store: FileStore) -> Sharing:
    """Return what the log of `store`, on a mount that hosts share, has because of these hosts."""
    sharing = log_of(store).shared
    assert sharing is not None
    return sharing


def state_of(store: FileStore) -> KeyValueState:
    """Return the values and queues that `store` has replayed so far."""
    return store._state


def notifier_of(store: FileStore) -> ChangeNotifier:
    """Return what wakes the waiting threads of `store`."""
    return store._notifier


def watcher_of(store: FileStore) -> ChangeWatcher | None:
    """Return the watcher of the waiting threads of `store`; None while no thread has waited."""
    return notifier_of(store)._watcher


def ranks_in_slots(store: FileStore, name: str, world_size: int) -> list[int]:
    """Return the ranks that have arrived at the barrier `name` in slots that count. There are none without a bell."""
    slots = store._slots
    return [] if slots is None else slots.arrived(slots.content(name.encode() + ARRIVALS, world_size))


def line_of(recipe: Any) -> Line:
    """Return the line of a lock, a semaphore, or a part of a read-write lock."""
    return recipe._line


def streams_of(store: Any) -> Any:
    """Return the open streams of watches of an `EtcdStore`."""
    return store._client._streams


def process_of(agent: Any) -> Any:
    """Return the process of an agent of the doctor."""
    return agent._process
