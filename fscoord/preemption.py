"""`Preemption`: all ranks stop at the same step after a signal of the scheduler. `requeue` asks for another start.

Each rank counts its calls of `Preemption.should_stop`. After a signal to any rank, each rank halts its count and
publishes it. All ranks stop at the call after the highest count, because no rank has made that call yet. A thread of
each rank does this: the main thread may be in a collective operation, waiting for a rank that waits for the counts.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Final, TypeVar

from fscoord._arguments import Key, Timeout, check_rank, key_bytes, key_text, to_seconds
from fscoord._runtime import system
from fscoord._runtime.signals import forward_signals, parse_signals
from fscoord.collectives.arrivals import describe_missing
from fscoord.errors import BrokenBarrierError, FscoordError, StoreTimeoutError, UsedBeforeError
from fscoord.store import Store, how_to_run_again, needed_store, shown

__all__ = ["Preemption", "requeue"]

P = TypeVar("P", bound="Preemption")

LOOK_S: Final = 1.0
"""How often each rank looks for a request, in seconds."""

END: Final = b"end"
"""The count of a rank that has left the ``with`` without a stop."""


class Preemption:
    """A context manager around the steps of a job: after a signal to any rank, all ranks stop at the same step.

    All ranks call `should_stop` equally often, for example once in each step. A call makes no request to the store. If
    a rank has left the ``with`` statement when the ranks agree, no rank stops, because the steps are at their end.

    Args:
        store: the store that all ranks share.
        name: the name in the store. Keys that begin with the name and a slash belong to it. A name can be used once.
        rank: the rank of this caller, 0 to `world_size` - 1.
        world_size: the number of ranks.
        signals: the names of the signals that request the stop. In the main thread, the ``with`` statement handles
            them. A signal that the process ignores stays ignored.
        timeout: how long the ranks wait for the counts of all ranks, in seconds or as a `timedelta`; None means the
            store's timeout.

    Raises:
        UsedBeforeError: from the ``with`` statement: this rank has used the name before.
    """

    def __init__(
        self,
        store: Store,
        name: Key,
        rank: int,
        world_size: int,
        signals: Sequence[str] = ("SIGUSR1",),
        timeout: Timeout | None = None,
    ) -> None:
        self._store = needed_store(store)
        self._rank, world_size = check_rank(rank, world_size)
        self._name = key_bytes(name)
        self._requested = self._name + b"/requested"
        self._counts = [self._name + b"/count/%d" % each for each in range(world_size)]
        self._timeout = None if timeout is None else to_seconds(timeout)
        self._signals = parse_signals(",".join(signals))
        self._mutex = system.mutex()
        self._leaving = system.AutoResetEvent()
        self._undo = ExitStack()
        self._has_request = False
        self._error: Exception | None = None
        self._calls, self._stop_at = 0, math.inf

    def __repr__(self) -> str:
        state = "no stop agreed" if self._stop_at == math.inf else f"stops at call {self._stop_at}"
        return shown(self, self._store, self._name, f"rank {self._rank} of {len(self._counts)}, {state}")

    def __enter__(self: P) -> P:
        if self._store.check([self._counts[self._rank]]):
            raise UsedBeforeError(
                f"rank {self._rank} has used {key_text(self._name)!r} before; {how_to_run_again(self._store)}"
            )
        self._store.announce_rank(self._rank)
        with ExitStack() as undo:
            undo.enter_context(forward_signals(lambda _: self.request(), self._signals))
            system.start_thread("fscoord-preemption", self._watch)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._leaving.set()
        self._undo.close()
        with suppress(*(() if error is None else (FscoordError,))):  # the exception of the body matters more
            self._store.compare_set(self._counts[self._rank], b"", END)

    def request(self) -> None:
        """Request the stop, as a signal does. The next call of `should_stop` publishes the request."""
        self._has_request = True

    def should_stop(self) -> bool:
        """Count this call, and return whether all ranks stop at it. While the ranks agree, the call waits.

        Raises:
            BrokenBarrierError: a rank died before the ranks had agreed.
            StoreTimeoutError: a rank did not publish its count within the timeout.
        """
        if self._has_request:
            self._store.set(self._requested, system.process_name())
            self._has_request = False
        with self._mutex:
            if self._error is not None:
                raise self._error
            self._calls += 1
            return self._calls >= self._stop_at

    def _watch(self) -> None:
        """Look for a request until there is one, or until this rank leaves. Runs in a thread."""
        try:
            while not self._leaving.wait(LOOK_S):
                with suppress(StoreTimeoutError):  # the next look may succeed
                    if self._store.check([self._requested]):
                        break
            else:
                return
            with self._mutex:
                self._stop_at = self._agree()
        except Exception as error:  # noqa: BLE001 - `should_stop` raises it
            self._error = error

    def _agree(self) -> float:
        """Publish the count of this rank, and return the number of the call at which all ranks stop."""
        store, missing = self._store, list(range(len(self._counts)))
        store.compare_set(self._counts[self._rank], b"", b"%d" % self._calls)
        ends = system.time.monotonic() + (to_seconds(store.timeout) if self._timeout is None else self._timeout)
        while missing:
            left = max(0.0, ends - system.time.monotonic())
            dead = store.wait_alive([self._counts[rank] for rank in missing], missing, left)
            missing = [rank for rank in missing if not store.check([self._counts[rank]])]
            lost = [str(rank) for rank in missing if rank in dead]
            if lost:
                raise BrokenBarrierError(
                    f"the ranks can't agree on a step to stop at for {key_text(self._name)!r}: ranks"
                    f" {', '.join(lost)} ended before they gave their counts{describe_missing(store, missing).words}",
                    missing=[str(rank) for rank in missing],
                    dead=lost,
                )
        counts = store.multi_get(self._counts)
        return math.inf if END in counts else max(map(int, counts)) + 1


def requeue() -> None:
    """Ask Slurm to start this job again later, by ``scontrol requeue``. Slurm then ends all processes of the job.

    Call it in one process, after all ranks have written their checkpoints. The job keeps its id, and its next start has
    a higher restart count. A store in a file distinguishes starts by both numbers, so it is empty at the next start.

    Raises:
        FscoordError: this process does not belong to a job of Slurm, or ``scontrol`` refused. The message says why.
    """
    variables = system.os.environ
    job = variables.get("SLURM_HET_JOB_ID") or variables.get("SLURM_JOB_ID")
    if not job:
        raise FscoordError(
            "SLURM_JOB_ID is not set, so this process does not belong to a job of Slurm; requeue the job by the command"
            " of its scheduler"
        )
    command = ["scontrol", "requeue", job]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603 - Slurm's
    if done.returncode:
        raise FscoordError(
            f"scontrol requeue {job} failed with exit code {done.returncode}: {done.stderr.strip()}; the job is not"
            " requeued. Submit it with --requeue, or requeue it by hand"
        )
