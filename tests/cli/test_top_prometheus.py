"""top --prometheus: the text format, the file that a collector reads, and the port that Prometheus scrapes."""

from __future__ import annotations

import json
import os
import re
import stat
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from support.ports import held_port

from fscoord import FileStore, barrier
from fscoord.cli import prometheus
from fscoord.status import Picture, SessionStatus, ShownWait, StatusFinding
from fscoord.status.reading import Activity

LIMIT_S = 60
STRING = r'"(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"(?P<name>[a-z_]+)\{{(?P<labels>[a-z_]+={STRING}(?:,[a-z_]+={STRING})*)\}} (?P<value>[0-9.e+-]+)")


def parsed(text: str) -> dict[tuple[str, ...], float]:
    """Parse the text as strictly as Prometheus does: {(metric, label values but the store's): value}."""
    assert text.endswith("\n")
    found: dict[tuple[str, ...], float] = {}
    name = ""
    kinds = {}
    for line in text.splitlines():
        head = re.fullmatch(r"# (HELP|TYPE) (fscoord_[a-z_]+) (.+)", line)
        if head:
            name = head[2]
            if head[1] == "TYPE":
                assert name not in kinds, "the samples of a metric stand together"
                kinds[name] = head[3]
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, line
        assert sample["name"] == name
        assert (kinds[name] == "counter") == name.endswith("_total")
        labels = [json.loads(each.partition("=")[2]) for each in re.findall(rf"[a-z_]+={STRING}", sample["labels"])]
        series = (name.removeprefix("fscoord_"), *labels[1:])
        assert series not in found
        found[series] = float(sample["value"])
    return found


def session(number: int, alive: str = "yes", wait: ShownWait | None = None, *, stopped: bool = False) -> SessionStatus:
    return SessionStatus(number, number, "", "h", 1, 0.0, alive, is_stopped=stopped, waiting=wait)


def at(name: str, seconds: float) -> ShownWait:
    return ShownWait("barrier", name, (f"{name}/complete",), 1, 8, seconds, 0)


def test_metrics_have_the_participants_their_waits_the_findings_and_the_records() -> None:
    participants = (
        session(1, wait=at("epoch 7", 2.5)),
        session(2, wait=at("epoch 8", 1.5)),
        session(3, stopped=True),
        session(4, "unknown", ShownWait("key", "", ("k1", "k2"), 2, 0, 9.0, 0)),
        session(5, "no", at("epoch 7", 99.0)),
    )
    findings = [StatusFinding("barrier", "epoch 7: ...", (3,), 2.5, 2)]
    writes = {(1, "set"): 3, (2, "set"): 2_000_000, (2, "add"): 1, (1, "session"): 1}
    text = prometheus.metrics_text(Picture("/s", participants, {}), findings, Activity(writes, 4, 2, 4096))
    assert parsed(text) == {
        ("participants", "alive"): 2,
        ("participants", "stopped"): 1,
        ("participants", "unknown"): 1,
        ("waiting", "barrier", "epoch *"): 2,
        ("waiting", "key", "k*"): 1,
        ("longest_wait_seconds", "barrier", "epoch *"): 2.5,
        ("longest_wait_seconds", "key", "k*"): 9,
        ("findings", "barrier"): 1,
        ("records_total", "set"): 2_000_003,
        ("records_total", "add"): 1,
        ("barriers_total",): 4,
        ("compactions_total",): 2,
        ("log_bytes",): 4096,
    }


def test_metrics_of_a_store_that_counts_no_records_have_no_counters() -> None:
    assert parsed(prometheus.metrics_text(Picture("tcp://h", (), {}), [], None)) == {
        ("participants", "alive"): 0,
        ("participants", "stopped"): 0,
        ("participants", "unknown"): 0,
    }


def test_label_may_be_any_name() -> None:
    text = prometheus.metrics_text(Picture('a"\\\n', (session(1, wait=at('b"\\\n\udcff é', 1.0)),), {}), [], None)
    assert ("waiting", "barrier", 'b"\\\n\\udcff é') in parsed(text)
    assert r'store="a\"\\\n"' in text


def test_file_is_replaced_as_a_whole_and_may_be_read_by_a_collector(fscoord, path, tmp_path: Path) -> None:
    target = tmp_path / "job.prom"
    target.write_text("old")
    with FileStore(path, rank=0) as store, target.open() as reader:
        barrier(store, 1, "b", rank=0)
        done = fscoord("top", "--prometheus", str(target), "--count", "2", "--interval", "0.01")
        assert reader.read() == "old", "a reader of the old file is not disturbed"
    assert (done.code, done.out, done.err) == (0, b"", "")
    assert parsed(target.read_text())["barriers_total",] == 1
    assert f'store="{path}"' in target.read_text()
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o644 & ~mask
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith("job")) == ["job.prom"]


def test_file_that_cannot_be_written_is_named(fscoord, path, tmp_path: Path) -> None:
    FileStore(path).close()
    done = fscoord("top", "--prometheus", str(tmp_path / "none" / "job.prom"))
    assert done.code == 74
    assert "none/job.prom: No such file or directory" in done.err
    assert fscoord("top", "--prometheus", "").code == 64


def test_port_answers_each_scrape_with_the_newest_metrics(process, path) -> None:
    with FileStore(path, rank=0) as store:
        child = process("top", "--prometheus", "0", "--interval", "0.05")
        url = child.stderr.readline().decode().removeprefix("fscoord: ").strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
        store.set("k", "v")
        count = 0.0
        while count < 1:  # the test ends by its own limit
            with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
                assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
                count = parsed(answer.read().decode()).get(("records_total", "set"), 0.0)
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(url.replace("metrics", "else"), timeout=LIMIT_S)
        refused.value.close()
        child.send_signal(2)
        assert child.wait(LIMIT_S) == 130
        assert child.stderr.read().strip() == b""


def test_port_that_is_taken_is_named(fscoord, path) -> None:
    FileStore(path).close()
    with held_port() as port, closing(prometheus.Publisher(str(port))):
        done = fscoord("top", "--prometheus", f"127.0.0.1:{port}")
    assert done.code == 74
    assert f"127.0.0.1:{port}: Address already in use" in done.err
