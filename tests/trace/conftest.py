"""A recorder for the test alone, and the trace that it has written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.internals import tracing

from fscoord.trace.reading import Trace, read


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.fixture
def recorder(traces: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tracing.Recorder]:
    """A recorder that this process has for the length of the test."""
    made = tracing.Recorder(str(traces))
    monkeypatch.setattr(tracing, "recorder", made)
    yield made
    made.close()


@pytest.fixture
def begins_later(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the test start the trace of this process, which ends with the test."""
    monkeypatch.setattr(tracing, "recorder", None)
    monkeypatch.setattr(tracing.atexit, "register", lambda _: None)
    yield
    if tracing.recorder is not None:
        tracing.recorder.close()


@pytest.fixture
def written(recorder: tracing.Recorder, traces: Path) -> Callable[[], Trace]:
    """Give `written()`: what this process has recorded so far, as a reader finds it."""

    def look() -> Trace:
        recorder.flush(with_open=True)
        return read(traces)

    return look
