"""Tests against the real torch, which is large: `tox -e torch` has it, the other environments do not."""

from importlib.util import find_spec

import pytest
from support.places import HANG_S

from fscoord.stores.tcp import connections, server

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _no_run_of_xdist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests set the variables of launchers; the run of pytest-xdist, which is nearer, would win over those."""
    monkeypatch.delenv("PYTEST_XDIST_TESTRUNUID", raising=False)


@pytest.fixture(autouse=True)
def _server_may_stop_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise `close` returns after 2 s, and on a busy machine the server may have its descriptors until later."""
    monkeypatch.setattr(server, "ANSWER_MIN_S", HANG_S)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is there may answer late, because its thread may get no turn for seconds on a busy machine."""
    monkeypatch.setattr(connections, "ANSWER_MIN_S", HANG_S)
