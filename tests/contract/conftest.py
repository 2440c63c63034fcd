"""The fixture `place`: a fresh store of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.places import KINDS, Place

from fscoord.store import Store


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, str(tmp_path))
    yield place
    place.close()


@pytest.fixture
def store(place: Place) -> Store:
    return place.open()
