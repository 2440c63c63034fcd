"""Changes that `mutate.py` makes and no test finds, and why that is right: module, key of the place, reason.

A key is that of `places.Place`, so it holds while lines move; one that fits no place any more fails a test. ``*`` at
the end of a key stands for anything.
"""

from __future__ import annotations

NEGATIVE = "any negative number says that there is no descriptor"
SPARES = "only work is spared: what follows looks for itself"

EXPLAINED: dict[str, dict[str, str]] = {
    "_log/coherence.py": {
        "SharedLogFile._check_identity: self._drop(fd) -> pass": "closed with the next operation",
    },
    "_log/compaction.py": {
        "Compactor._begin_life: header = self.header._replace( | 16 -> 17": "of the id 16 bytes are written",
        "Compactor._compact: header = self.header._replace( | 16 -> 17": "of the id 16 bytes are written",
        "Compactor._begin_life: self._trouble = DIRTY -> pass": "until its record is there, all can be read as before",
    },
    "_log/dump.py": {"dump_log: fd = -1 | 1 -> 2": NEGATIVE},
    "_log/file.py": {
        "LogFile._update_locked: self._trouble = 0 -> pass": SPARES,
        "LogFile.join_run: if self.is_finished or (run is not None and self.header.runs[:1] != (run,)):"
        " | run is not None and self.header.runs[:1] != (run,) -> Or": SPARES,
    },
    "_log/line.py": {
        "_Request._run: waiter.gone = True -> pass": "who waits says so itself as soon as it is woken",
        "_Request._hand_over: waiter.gone = True -> pass": "who waits says so itself as soon as it is woken",
    },
    "_log/node.py": {
        "Post.leave: if self._holder is not None or not self._held: | self._holder is not None or*": "a needless wake",
        "node_bell_path: raise OSError*": "never reached, for FALLBACK is absolute; types need an end",
        "Post.beat: self._put(BEAT, self._byte(BEAT) + 1) | self._byte(BEAT) + 1 -> Sub": "all that counts is a change",
    },
    "_log/presence.py": {
        "Presence.bury: self.refresh(limit) -> pass": SPARES,
        "Presence._open_alive: self._lose_alive() *": "it closes sooner what is closed with the handle",
    },
    "_log/reader.py": {
        "LogReader.__init__: self._finalizer.atexit = False | False -> True": "at the end the kernel closes everything",
    },
    "_log/resync.py": {
        "find_next: if budget < 0: | budget < 0 -> LtE": "a bound on work, which one step does not matter to",
        "find_next: if record.frame_length(frame, bad.chain) >= 0: | 0 -> 1": "no body has less than 15 bytes",
    },
    "_log/signpost.py": {"_is_unlocked: lock.unlock() -> pass": "to close the descriptor gives the lock back as well"},
    "_log/succession.py": {
        "Successive._open: self._rfd, self._root_fd = opened.reader, -1 | 1 -> 2": NEGATIVE,
        "Successive._enter: reader = writer = -1 | 1 -> 2": NEGATIVE,
        "Successive._look: is_root = self._root_fd < 0 | self._root_fd < 0 -> LtE": "descriptor 0 is standard input",
        "Successive._enter: self._trouble = trouble -> pass": SPARES,
    },
    "_log/tail.py": {
        "examine: second = _next_sector(offset + 1)  # of a sound frame nothing is lost in the sector where it begins"
        " | offset + 1 -> Sub": "the sector where a sound frame begins is not all zeros",
    },
    "_log/watch.py": {
        "_after_fork_in_child: _watches.clear() -> pass": "a watch that is closed is not shared any more"
    },
}


def fits(pattern: str, key: str) -> bool:
    """Return whether an entry for `pattern` explains the place `key`."""
    return key == pattern or (pattern.endswith("*") and key.startswith(pattern[:-1]))


def reason(module: str, key: str) -> str:
    """Return why a change that no test finds is none that matters; ``""`` if nobody has said so."""
    return next((why for pattern, why in EXPLAINED.get(module, {}).items() if fits(pattern, key)), "")
