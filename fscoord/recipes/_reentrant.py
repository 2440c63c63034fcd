"""`Reentrant`: a resource that the thread or task that holds it may acquire again."""

from __future__ import annotations

from contextlib import suppress

from fscoord._arguments import Timeout
from fscoord._runtime import system
from fscoord._waiting.wait import WaitSteps
from fscoord.errors import FscoordError
from fscoord.recipes._entry import Entry
from fscoord.recipes._hold import Exclusive, HeldEntry


class Reentrant(Exclusive):
    """A resource that the thread or task that holds it may acquire again.

    Each thread or task has at most one hold, and an id for each further acquisition. Objects that acquire the same
    resource in different modes may share `_held`.
    """

    _whose = "thread or task"

    def _owned_by(self, here: object) -> HeldEntry | None:
        """Return the hold of the thread or task `here`.

        `here` is None if the release was interrupted before its task was known. Then the only hold is returned.
        """
        epoch = system.process_epoch()
        found = [each for each in list(self._held) if each.epoch == epoch and (here is None or each.here is here)]
        return found[0] if len(found) == 1 else None

    def _acquire(self, got: list[str], here: object, blocking: bool, timeout: Timeout | None) -> bool | WaitSteps[bool]:
        owned = self._owned_by(here)
        if owned is None:
            return super()._acquire(got, here, blocking, timeout)
        name = self._line.new_id()
        got.append(name)
        owned.levels.append((name, self._mode))
        return True

    def _undo(self, got: list[str]) -> None:
        for owned in list(self._held):
            if got and got[0] != owned.entry.id and got[0] in dict(owned.levels):
                self._pop_level(owned, got[0])
                return
        super()._undo(got)

    def _release(self, gone: list[HeldEntry | str], here: object) -> bool:
        owned = self._owned_by(here)
        names = [] if owned is None else [name for name, mode in owned.levels if mode == self._mode]
        if owned is None or not names:
            return False
        if len(owned.levels) == 1:
            return super()._release(gone, here)
        gone.append(names[-1])
        self._pop_level(owned, names[-1])
        return True

    def _take(self, gone: list[HeldEntry | str], here: object) -> bool:
        owned = self._owned_by(here)
        if owned is None:
            return False
        gone.append(owned)  # before the removal: after an interruption `_finish` removes it
        self._forget(owned)
        return True

    def _finish(self, gone: list[HeldEntry | str], here: object) -> None:
        for owned in list(self._held):
            for name in [each for each in gone if isinstance(each, str) and each in dict(owned.levels)]:
                with suppress(FscoordError):
                    self._pop_level(owned, name)
        super()._finish(gone, here)

    def _pop_level(self, owned: HeldEntry, name: str) -> None:
        """Forget the acquisition `name`, which was not the only one of `owned`. This method may be called twice."""
        owned.levels = [level for level in owned.levels if level[0] != name]

    def _current(self) -> Entry | None:
        super()._current()  # a forked child forgets its parent's holds
        entries = self._entries()
        return entries[-1] if entries else None

    def _entries(self) -> list[Entry]:
        here, epoch = self._here.__dict__, system.process_epoch()
        own = [each for each in list(self._held) if each.epoch == epoch and self._mode in dict(each.levels).values()]
        return [each.entry for each in sorted(own, key=lambda each: each.here is here)]  # this thread's own is the last
