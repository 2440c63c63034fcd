"""`instrument` reports the events of this process to OpenTelemetry: spans and a histogram of waits, and three counters.

The module calls the API of OpenTelemetry only (the extra ``fscoord[opentelemetry]``). The program chooses the SDK and
its exporters. Without an SDK the calls do nothing.
"""

from __future__ import annotations

from typing import Final

from fscoord._runtime import system
from fscoord.errors import needed_extra
from fscoord.events import HoldLost, SessionDied, Subscription, TelemetryEvent, WaitEnded, subscribe

with needed_extra("fscoord.integrations.opentelemetry", "opentelemetry", "opentelemetry"):
    from opentelemetry import metrics, trace

__all__ = ["instrument"]

NAME: Final = "fscoord"

BOUNDARIES_S: Final = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 300.0)
"""The boundaries of the histogram's buckets. The defaults of an SDK are meant for milliseconds."""


def instrument(
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    *,
    min_seconds: float = 0.0,
) -> Subscription:
    """Report the events of this process to OpenTelemetry, until the result is closed.

    Each wait is a span named ``fscoord.`` and the kind, such as ``fscoord.barrier``. It is a child of the span that is
    current in the waiting thread or task. Metrics: the histogram ``fscoord.wait.duration`` in seconds by kind, pattern
    of the name and outcome, and the counters ``fscoord.sessions.died``, ``fscoord.holds.lost`` and
    ``fscoord.rounds.completed``.

    Args:
        tracer_provider: creates the tracer; None: the global provider.
        meter_provider: creates the meter; None: the global provider.
        min_seconds: a shorter wait gets no span. The histogram counts all waits.
    """
    tracer = trace.get_tracer(NAME, tracer_provider=tracer_provider)
    meter = metrics.get_meter(NAME, meter_provider=meter_provider)
    durations = meter.create_histogram(
        "fscoord.wait.duration", "s", "How long calls waited.", explicit_bucket_boundaries_advisory=BOUNDARIES_S
    )
    deaths = meter.create_counter("fscoord.sessions.died", "{session}", "Deaths that this process recorded.")
    losses = meter.create_counter("fscoord.holds.lost", "{hold}", "Lost locks, semaphores and elections.")
    rounds = meter.create_counter("fscoord.rounds.completed", "{round}", "Rounds of a rendezvous with this node.")

    def report(event: TelemetryEvent) -> None:
        if isinstance(event, WaitEnded):
            pattern = _text(event.pattern)
            labels = {"fscoord.kind": event.kind, "fscoord.pattern": pattern, "fscoord.outcome": event.outcome}
            durations.record(event.seconds, labels)
            if event.seconds >= min_seconds:
                record_span(event, labels)
        elif isinstance(event, SessionDied):
            deaths.add(1)
        elif isinstance(event, HoldLost):
            losses.add(1, {"fscoord.kind": event.kind})
        else:
            rounds.add(1)

    def record_span(event: WaitEnded, labels: dict[str, str]) -> None:
        end = system.time.time_ns()
        more: dict[str, str | int] = {"fscoord.name": _text(event.name), "fscoord.ended_by": event.ended_by}
        if event.rank is not None:
            more["fscoord.rank"] = event.rank
        begin = end - int(event.seconds * 1e9)
        span = tracer.start_span(f"fscoord.{event.kind}", start_time=begin, attributes={**labels, **more})
        if event.outcome != "passed":
            span.set_status(trace.StatusCode.ERROR, event.outcome)
        span.end(end)

    return subscribe(report)


def _text(name: str) -> str:
    """Return `name` with escapes in place of lone surrogates, which no exporter can encode."""
    return name.encode("utf-8", "backslashreplace").decode()
