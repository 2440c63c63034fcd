"""The contract on an `EtcdStore`, for an interpreter from which `elsewhere` has hidden names.

The address of the server is in ``FSCOORD_TEST_ETCD``.
"""

from __future__ import annotations

import os
from pathlib import Path

from fscoord import EtcdStore, Store
from fscoord.testing import StoreContract


class TestEtcdStore(StoreContract):
    def make_store(self, tmp_path: Path) -> Store:
        return EtcdStore(os.environ["FSCOORD_TEST_ETCD"], f"elsewhere{tmp_path}")
