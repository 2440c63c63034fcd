"""OpenTelemetry with its SDK in memory: spans and metrics of waits; and Prometheus' own parser."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.parser import text_string_to_metric_families
from support.internals import tracing

from fscoord import FileStore, StoreTimeoutError, barrier
from fscoord.cli.prometheus import metrics_text
from fscoord.errors import LockLostError
from fscoord.integrations.opentelemetry import instrument
from fscoord.recipes import Lock, force_release
from fscoord.status import status

pytestmark = pytest.mark.packages

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "telemetry.md"
LIMIT_S = 200

Points = dict[tuple[Any, ...], Any]


@pytest.fixture(autouse=True)
def _unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "recorder", None)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracers(spans: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return provider


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def points(tracers: TracerProvider, reader: InMemoryMetricReader) -> Iterator[Callable[[], Points]]:
    """Report events to the providers of the test. Give `points()`: {(metric, sorted labels): data point}."""
    meters = MeterProvider([reader])

    def look() -> Points:
        found = reader.get_metrics_data()
        metrics = [] if found is None else found.resource_metrics[0].scope_metrics[0].metrics
        return {
            (metric.name, *(value for _, value in sorted(point.attributes.items()))): point
            for metric in metrics
            for point in metric.data.data_points
        }

    with instrument(tracers, meters):
        yield look
    meters.shutdown()


def test_wait_is_a_span_with_its_times_below_the_current_span(
    points: Callable[[], Points], store: FileStore, spans: InMemorySpanExporter, tracers: TracerProvider
) -> None:
    with tracers.get_tracer("program").start_as_current_span("step"):
        with pytest.raises(StoreTimeoutError):
            store.get("key-17\udcff", timeout=0.05)
        barrier(store, 1, "epoch-1", rank=0)
    waited, met, step = spans.get_finished_spans()
    assert (waited.name, met.name) == ("fscoord.wait", "fscoord.barrier")
    assert facts(waited) == {
        "kind": "wait", "name": "key-17\\udcff", "pattern": "key-*\\udcff", "outcome": "time-out", "ended_by": "",
    }  # fmt: skip
    assert facts(met) == {
        "kind": "barrier", "name": "epoch-1", "pattern": "epoch-*", "outcome": "passed", "ended_by": "", "rank": 0,
    }  # fmt: skip
    assert (waited.status.status_code, met.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    for span in (waited, met):
        assert span.parent is not None
        assert span.parent.span_id == step.context.span_id
        assert step.start_time <= span.start_time <= span.end_time <= step.end_time
    assert waited.end_time - waited.start_time >= 50_000_000


def facts(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("fscoord."): value for name, value in (span.attributes or {}).items()}


def test_metrics_have_a_histogram_of_waits_by_kind_and_pattern_and_counters(
    points: Callable[[], Points], store: FileStore
) -> None:
    for number in range(3):
        with pytest.raises(StoreTimeoutError):
            store.get(f"key-{number}", timeout=0.01)
    with FileStore(store.path, rank=1) as other:
        number = other.register()
    assert store.wait_sessions(["k"], [number]) == [number]
    lock = Lock(store, "l")
    lock.acquire()
    force_release(store, "l", lock.token)
    with pytest.raises(LockLostError):
        lock.release()
    found = points()
    waits = found["fscoord.wait.duration", "wait", "time-out", "key-*"]
    assert waits.count == 3
    assert waits.sum >= 0.03
    assert max(waits.explicit_bounds) == 300
    assert found["fscoord.sessions.died",].value == 1
    assert found["fscoord.holds.lost", "lock"].value == 1


def test_short_waits_get_no_span_if_the_program_says_so(
    tracers: TracerProvider, spans: InMemorySpanExporter, store: FileStore
) -> None:
    with instrument(tracers, MeterProvider(), min_seconds=3600):
        barrier(store, 1, "b", rank=0)
    assert spans.get_finished_spans() == ()


def test_prometheus_reads_the_metrics_of_top(store: FileStore) -> None:
    store.set('k "\\\n', "v")
    found = status(store)
    families = {each.name: each for each in text_string_to_metric_families(metrics_text(*found, None))}
    (alive,) = [each for each in families["fscoord_participants"].samples if each.labels["state"] == "alive"]
    assert (alive.value, alive.labels["store"]) == (1.0, store.path)


def test_program_of_the_page_prints_a_span_below_the_span_of_the_program(tmp_path: Path) -> None:
    (program,) = [block for block in pages.blocks(PAGE) if pages.NAME.match(block.text)]
    done = subprocess.run(
        [sys.executable, "-c", program.text], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    text = done.stdout.replace("}\n{", "},{")
    first, second = json.loads(f"[{text}]")
    assert (first["name"], first["parent_id"]) == ("fscoord.barrier", second["context"]["span_id"])
