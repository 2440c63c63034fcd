"""Functions on the files of a `~fscoord.FileStore` that is not opened: `dump`, `verify`, `repair` and `copy`.

No function changes a file that it reads. All functions also work on damaged files, which a store can't open.
"""

from __future__ import annotations

from fscoord._log.inspect.dump import Entry, dump
from fscoord._log.inspect.repair import Repair, Skipped, copy, repair
from fscoord._log.inspect.verify import Finding, Generation, Report, verify

__all__ = ["Entry", "Finding", "Generation", "Repair", "Report", "Skipped", "copy", "dump", "repair", "verify"]
