"""`Publisher` shows the state of a store to Prometheus: in a file for node_exporter, or at a port of its own.

The text is that of Prometheus' text format 0.0.4. Names in which only numbers differ share a series, so that the number
of series stays small.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Final

from fscoord._runtime import system
from fscoord._runtime.tracing import pattern_of
from fscoord.cli.output import say
from fscoord.cli.trace import write_whole
from fscoord.status.findings import StatusFinding
from fscoord.status.picture import Picture
from fscoord.status.rates import CONTROL
from fscoord.status.reading import Activity

_ADDRESS: Final = re.compile(r"(?:(?P<host>[^/]*):)?(?P<port>\d{1,5})")
LOOPBACK: Final = "127.0.0.1"
POLL_S: Final = 0.1
"""How long the end of the server takes at most, in seconds."""

Samples = Mapping[tuple[tuple[str, str], ...], float]
"""Maps the labels of each series of a metric to its value."""


def metrics_text(picture: Picture, findings: Iterable[StatusFinding], activity: Activity | None) -> str:
    """Return the metrics of one look at a store. `activity` is None for a store that does not count its records."""
    living = [each for each in picture.participants if each.alive != "no"]
    states = Counter({"alive": 0, "stopped": 0, "unknown": 0})
    states.update("stopped" if each.is_stopped else {"yes": "alive"}.get(each.alive, "unknown") for each in living)
    waiting: Counter[tuple[tuple[str, str], ...]] = Counter()
    longest: dict[tuple[tuple[str, str], ...], float] = {}
    for wait in (each.waiting for each in living if each.waiting is not None):
        labels: tuple[tuple[str, str], ...] = (
            ("kind", wait.kind),
            ("name", pattern_of(wait.name or next(iter(wait.keys), ""))),
        )
        waiting[labels] += 1
        longest[labels] = max(longest.get(labels, 0.0), wait.seconds)
    metrics: list[tuple[str, str, str, Samples]] = [
        ("participants", "gauge", "Open handles of living processes, by state.", _by("state", states)),
        ("waiting", "gauge", "Participants whose longest wait lasts for a second or more, by its name.", waiting),
        ("longest_wait_seconds", "gauge", "The longest present wait, by its name.", longest),
        ("findings", "gauge", "What fscoord ps finds wrong, by kind.", _by("kind", Counter(f.kind for f in findings))),
    ]
    if activity is not None:
        records: Counter[str] = Counter()
        for (_, kind), count in activity.writes.items():
            records[kind] += 0 if kind in CONTROL else count
        metrics += [
            ("records_total", "counter", "Records in the log, by kind.", _by("kind", +records)),
            ("barriers_total", "counter", "Completed barriers.", {(): activity.barriers}),
            ("compactions_total", "counter", "Compactions of the log.", {(): activity.generation}),
            ("log_bytes", "gauge", "The size of the log's current file.", {(): activity.size}),
        ]
    lines = []
    for name, kind, text, samples in metrics:
        lines += [f"# HELP fscoord_{name} {text}", f"# TYPE fscoord_{name} {kind}"]
        for labels, value in samples.items():
            shown = ",".join(f'{label}="{_escaped(each)}"' for label, each in (("store", picture.place), *labels))
            lines.append(f"fscoord_{name}{{{shown}}} {value}")
    return "\n".join(lines) + "\n"


def _by(label: str, counts: Mapping[str, float]) -> Samples:
    return {((label, each),): count for each, count in counts.items()}


def _escaped(value: str) -> str:
    text = value.encode("utf-8", "backslashreplace").decode()  # a name that is not UTF-8 has lone surrogates
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Publisher:
    """Publishes texts at `target`: ``PORT`` or ``HOST:PORT`` for a server of its own, otherwise the path of a file.

    A file is replaced atomically. A server listens on the loopback interface unless `target` names a host.

    Raises:
        OSError: the server can't listen. The error names the address.
    """

    def __init__(self, target: str) -> None:
        self._path = target
        self._server: _Server | None = None
        self._thread: object = None
        found = _ADDRESS.fullmatch(target)
        if found is not None:
            address = found["host"] or LOOPBACK, int(found["port"])
            try:
                self._server = _Server(address, _Handler)
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise OSError(getattr(error, "errno", None) or system.errno.EINVAL, reason, target) from error

    def publish(self, text: str) -> None:
        """Replace the published text. The first call starts the server."""
        if self._server is None:
            write_whole(self._path, text)
            return
        self._server.text = text.encode()
        if self._thread is None:
            self._thread = system.start_thread("fscoord prometheus", self._server.serve_forever, POLL_S)
            if isinstance(self._thread, RuntimeError):
                raise self._thread
            host, port = self._server.server_address[:2]
            say(f"http://{host!s}:{port}/metrics")

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            if self._thread is not None and not isinstance(self._thread, RuntimeError):
                self._server.shutdown()
            self._server.server_close()


class _Server(ThreadingTCPServer):  # `HTTPServer` would look up its own name, which takes long without a name server
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    text = b""


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0  # of a client that sends nothing, in seconds
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "the metrics are at /metrics")
            return
        text = self.server.text
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is that of the base class
        """Print nothing for a request."""
