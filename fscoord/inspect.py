"""Inspect the files of a `~fscoord.FileStore` without opening the store: `dump`, `verify`, `repair` and `copy`.

None of the functions changes a file that it reads. Each also works on damaged files, which no store can open.
"""

from __future__ import annotations

from fscoord._log.inspect.dump import Entry, dump
from fscoord._log.inspect.repair import Repair, Skipped, copy, repair
from fscoord._log.inspect.verify import Finding, Generation, Report, verify

__all__ = ["Entry", "Finding", "Generation", "Repair", "Report", "Skipped", "copy", "dump", "repair", "verify"]
