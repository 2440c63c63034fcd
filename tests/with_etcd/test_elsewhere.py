"""`EtcdStore` where the names of Linux are hidden, as they are missing on Windows and macOS."""

from __future__ import annotations

import pytest
from platforms.running import run
from support.etcd_server import Server

pytestmark = pytest.mark.etcd


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_contract_is_kept_by_etcd_store_without_names_of_linux(server: Server, platform: str) -> None:
    assert " passed in " in run(platform, "contract_etcd", FSCOORD_TEST_ETCD=server.address)
