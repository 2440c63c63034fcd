"""`TreeCall`: one call of a barrier of many nodes, whose ranks arrive in the store of their group.

The first rank of each group represents the group. This representative waits until the ranks of the group have arrived,
and meets the representatives of the other groups in a further store, the root. Then the representative releases its
group.

The groups and the root may use one store, because these keys of the barrier ``K`` are all different:

- In the store of group 3: ``K/group/3``, the prefix of a barrier with ranks that count from 0 in the group, and
  ``K/group/3/released``, for which the other ranks wait. The value of this key is `PASS`, or the reason why the barrier
  failed.
- In the root: ``K/groups``, the prefix of a barrier whose ranks are the numbers of the groups, and
  ``K/group/3/missing``. A rank of group 3 that times out sets this key, so that all groups name the missing ranks.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from fscoord._arguments import Key, Timeout, check_positive, check_rank, key_bytes, key_text, to_seconds
from fscoord._runtime import system
from fscoord._waiting.wait import KEYS, VALUES, WaitRequest, WaitSteps
from fscoord.collectives import steps
from fscoord.collectives.arrivals import MISSING_MAX, Arrivals, Attempt, describe_missing
from fscoord.errors import BarrierError, FscoordError, StoreTimeoutError, UsedBeforeError
from fscoord.store import Store, needed_store

PASS: Final = b"1"
"""The value by which a representative releases its group. Any other value is the text of an error."""


class TreeCall:
    """The call of one rank, as methods that return steps.

    A driver carries out `arrive`, then `meet` if the rank is the representative of its group, then `leave`. If one of
    these raises a `StoreTimeoutError`, the driver carries out `time_out` instead of the methods that remain.

    Attributes:
        is_representative: whether the rank represents its group.
    """

    def __init__(
        self,
        group: Store,
        root: Store,
        rank: int,
        world_size: int,
        group_size: int,
        key: Key,
        timeout: Timeout | None,
        trace_timeout: Timeout,
    ) -> None:
        self._group, self._root = needed_store(group), needed_store(root)
        self._rank, self._world_size = check_rank(rank, world_size)
        self._group_size = check_positive("group_size", group_size)
        self._number, local = divmod(self._rank, self._group_size)
        self._first = self._rank - local
        self._groups = -(-self._world_size // self._group_size)
        self._key = key_bytes(key)
        size = min(self._group_size, self._world_size - self._first)
        limit = to_seconds(group.timeout if timeout is None else timeout)
        prefix = self._prefix_of(self._number)
        self._call = Attempt(prefix, local, size, limit, system.time.monotonic(), to_seconds(trace_timeout))
        self._arrivals = Arrivals(self._group, prefix, self._call)
        self._released = prefix + b"/released"
        self._failure: BarrierError | None = None
        self.is_representative = local == 0

    def arrive(self) -> WaitSteps[None]:
        """Arrive in the store of the group. The representative waits for the other ranks of the group."""
        waits = self.is_representative
        try:
            text = yield self._arrivals.request(waits=waits, all_wait=False)
            if text is not None:
                yield from self._arrivals.settle(text, waits=waits)
        except UsedBeforeError as error:
            # All ranks of the group had arrived, but until its release they have not passed: a process was replaced.
            if self._group.check([self._released]):
                given = self._call._replace(prefix=self._key, rank=self._rank, world_size=self._world_size)
                raise given.used_before(self._group) from error
        except StoreTimeoutError:
            if self._arrivals.missing():
                raise
        except BarrierError as error:
            self._failure = self._explained(error)
            if not waits:
                raise self._failure from error

    def meet(self) -> WaitSteps[None]:
        """Meet the representatives of the other groups in the root."""
        if self._failure is not None:
            return
        call, prefix = self._call, self._key + b"/groups"
        given = (self._groups, prefix, call.left(), self._number, None, call.trace_timeout)
        try:
            yield from steps.barrier(self._root, *given, fail_fast=False)
        except UsedBeforeError:
            pass  # an earlier process with this rank passed here, and died before it released the group
        except BarrierError as error:
            self._failure = self._explained(error)

    def leave(self) -> WaitSteps[None]:
        """Release the group if the rank represents it; otherwise wait for the release. Raise if the barrier failed."""
        if self.is_representative:
            self._group.set(self._released, PASS if self._failure is None else str(self._failure))
            if self._failure is not None:
                raise self._failure
            return
        (reason,) = yield WaitRequest(VALUES, [self._released], self._call.left())
        self._end(reason)

    def time_out(self, error: StoreTimeoutError) -> WaitSteps[None]:
        """Raise a time-out error that names the missing ranks. Return if the caller's group was released meanwhile.

        The steps wait for the reports of the other groups, which are keys of the root store. The wait takes at most the
        trace timeout.
        """
        call, number, root, prefix = self._call, self._number, self._root, self._key + b"/groups"
        groups = Arrivals(root, prefix, call._replace(prefix=prefix, rank=number, world_size=self._groups))
        try:
            local = self._arrivals.record_time_out(is_over=False)
            absent = groups.missing()
        except BarrierError as problem:
            raise self._explained(problem) from problem
        if (reason := self._group.get(self._released, default=None)) is not None:
            return self._end(reason)
        if not local and (number in absent or not absent):
            local = [0]  # all ranks of the group have arrived, and its representative has not gone on
        names = [str(self._first + rank) for rank in local]
        fates = describe_missing(self._group, local, self._first)
        dead, words = list(fates.dead), fates.words
        if local or self.is_representative:  # a report of no ranks ends the wait of the other groups for a report
            key = self._prefix_of(number) + b"/missing"
            report = "|".join([";".join(names[:MISSING_MAX]), ";".join(dead), words]).encode()
            with suppress(FscoordError):  # the other ranks of the group report the same, so one write is enough
                if root.get(key, default=None) != report:
                    root._write_within(call.trace_left(), key, report, appends=False)
        keys = {each: self._prefix_of(each) + b"/missing" for each in absent[: MISSING_MAX + 1] if each != number}
        if keys:
            with suppress(StoreTimeoutError):
                yield WaitRequest(KEYS, list(keys.values()), call.trace_left())
            absent = groups.missing()
        for each in sorted(keys.keys() & absent):
            first, last = each * self._group_size, min((each + 1) * self._group_size, self._world_size) - 1
            silent = f"{first} to {last}, or some of them" if first < last else str(first)
            text = root.get(keys[each], default=silent.encode()).decode(errors="replace")
            theirs, died, description = f"{text}||".split("|", 2)
            names += filter(None, theirs.split(";"))
            dead += filter(None, died.split(";"))
            words += description.rstrip("|")
        if not names:  # all have arrived meanwhile, and the representative of this group is about to release it
            names = [str(self._first)]
        shown, more = names[:MISSING_MAX], f" and {len(names) - MISSING_MAX} more" if names[MISSING_MAX:] else ""
        raise StoreTimeoutError(
            f"Timed out waiting on tree barrier on rank {self._rank}, for key prefix: {key_text(self._key)}"
            f" (world_size={self._world_size}, group_size={self._group_size}, missing_ranks=[{', '.join(shown)}{more}],"
            f" timeout={call.timeout:g}){words}{self._group._closer_look()}",
            keys=error.keys,
            missing_ranks=shown,
            dead_ranks=dead,
            holder=error.holder,
            waited=call.waited(),
        ) from error

    def _end(self, reason: bytes) -> None:
        if reason != PASS:
            raise BarrierError(reason.decode(errors="replace"))

    def _explained(self, error: BarrierError) -> BarrierError:
        return BarrierError(
            f"tree barrier {key_text(self._key)!r} on rank {self._rank}, with world_size={self._world_size} and"
            f" group_size={self._group_size}: the ranks of a group, or the groups, disagree: {error}"
        )

    def _prefix_of(self, group: int) -> bytes:
        return self._key + b"/group/%d" % group
