"""Load the modules that a crew uses. The server process that forks the crew imports this module.

The objects of torch and fscoord are then kept out of garbage collections. Otherwise the first full collection of each
process would copy all of their pages, which takes up to 0.6 s, in the middle of the measurement (see `gc.freeze`).
"""

from __future__ import annotations

import gc
from contextlib import suppress

with suppress(ImportError):
    import torch.distributed  # noqa: F401 - without torch only fscoord is measured

import fscoord  # noqa: F401 - loaded for the processes that are forked

gc.collect()
gc.freeze()
