"""The page without a browser: its data, its tables, its size, and that it asks for nothing from elsewhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.internals import printable
from support.traces import MS, WrittenProcess, meet, write_job

from fscoord.trace import page
from fscoord.trace.page import make_page, page_data
from fscoord.trace.reading import read


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return tmp_path / "traces"


class Tags(HTMLParser):
    """The tags of a page, and the text of its cells and of its data."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["td"]:
            self.cells[-1] += data
        if self.open[-1:] == ["script"] and self.seen[-1][1].get("id") == "data":
            self.data += data


def test_page_is_whole_and_needs_nothing_from_elsewhere(traces: Path, seed: int) -> None:
    write_job(traces, seed, ranks=4, hosts=2, barriers=3)
    text = make_page(read(traces))
    tags = Tags(text)
    assert tags.open == []
    for tag, attributes in tags.seen:
        assert tag not in {"link", "img", "iframe", "object", "embed"}
        assert not {"src", "href", "action", "srcset"} & attributes.keys()
    assert not re.search(r"https?://|//\w+\.\w|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    assert "<!--" not in text
    assert "/*data*/" not in text


def test_data_of_the_page_are_those_of_the_trace(traces: Path, seed: int) -> None:
    write_job(traces, seed, ranks=4, hosts=2, barriers=3)
    trace = read(traces)
    tags = Tags(make_page(trace))
    data = json.loads(tags.data)
    assert data == json.loads(json.dumps(page_data(trace)))
    assert [row["title"] for row in data["rows"]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    shown = [span for span in trace.spans if span.kind not in {"open", "process"}]
    assert len(data["spans"]) == len(shown)
    assert sum(span[5] for span in data["spans"]) == pytest.approx(
        sum(span.length for span in shown) / 1000, abs=len(shown)
    )


def test_barrier_has_the_row_of_the_last_to_come_and_what_each_waited(traces: Path) -> None:
    crew = [WrittenProcess("node0", 100 + rank, rank) for rank in range(3)]
    meet(crew, "b", [MS, 2 * MS, 9 * MS], [1000, 2000, 3000])
    for process in crew:
        process.write(traces)
    data = page_data(read(traces))
    ((name, last, at, certain),) = data["crossings"]
    assert (data["texts"][name], last, at, certain) == ("b", 2, 8000.0, 1)
    assert [(span[0], span[4], span[6], span[9], span[10]) for span in data["spans"]] == [
        (0, 0.0, 8001.0, 2, 0),
        (1, 1000.0, 7002.0, 2, 0),
        (2, 8000.0, 3.0, 2, 0),
    ]


def test_waits_that_are_a_part_of_a_barrier_do_not_cover_it(traces: Path) -> None:
    process = WrittenProcess("node0", 100, 0)
    process.span("barrier", "b", MS, 9 * MS, "passed", "world_size", 2, rank=0)
    process.span("wait", "b/complete", 2 * MS, 8 * MS)
    process.span("wait", "other", 10 * MS, 11 * MS)
    process.write(traces)
    data = page_data(read(traces))
    assert [data["texts"][span[3]] for span in data["spans"]] == ["b", "other"]


NASTY = "</script><script>alert(1)</script><!--\u2028&\"'\udcff"


def test_names_from_a_store_are_text_and_never_markup(traces: Path) -> None:
    process = WrittenProcess("<b>node0", 100)
    process.span("wait", NASTY, 0, 10 * MS, "passed", "key", NASTY, "by", "<i>", "by_rank", None)
    process.span("barrier", NASTY, 20 * MS, 21 * MS, "time-out", "world_size", 2, rank=0)
    process.write(traces)
    text = make_page(read(traces))
    tags = Tags(text)
    assert [tag for tag, _ in tags.seen].count("script") == 2
    assert json.loads(tags.data)["texts"].count(printable(NASTY)) == 1
    assert any("alert(1)" in cell for cell in tags.cells)
    text.encode()  # raises an error for a lone surrogate


def test_tables_show_the_report(traces: Path, seed: int) -> None:
    write_job(traces, seed, ranks=8, hosts=2, barriers=20)
    cells = Tags(make_page(read(traces))).cells
    assert cells[0] == "rank 3"
    assert {"epoch/*", "dataset", "node1:1007", "rank 1, which set 'plan'"} <= set(cells)


def test_page_of_64_ranks_and_10000_spans_is_small(traces: Path, seed: int) -> None:
    write_job(traces, seed, ranks=64, hosts=8, barriers=150)
    trace = read(traces)
    assert len(trace.spans) > 10_000
    assert len(make_page(trace).encode()) < 1_500_000


def test_page_of_a_huge_trace_keeps_the_longest_spans_and_its_limit(
    traces: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(traces, seed, ranks=8, hosts=2, barriers=20)
    whole = page_data(read(traces))
    monkeypatch.setattr(page, "SPANS_MAX", 50)
    data = page_data(read(traces))
    assert len(data["spans"]) == 50
    assert data["left_out"] == len(whole["spans"]) - 50
    assert min(span[5] for span in data["spans"]) >= sorted(span[5] for span in whole["spans"])[-51]


def test_spans_of_the_largest_page_stay_under_five_megabytes(traces: Path, seed: int) -> None:
    """By the size of one span: a page of `SPANS_MAX` spans would take the test a minute to make."""
    write_job(traces, seed, ranks=16, hosts=2, barriers=40)
    data: dict[str, Any] = page_data(read(traces))
    size = len(json.dumps(data["spans"], separators=(",", ":"))) / len(data["spans"])
    assert size * page.SPANS_MAX < 4_000_000


def test_trace_without_a_barrier_has_a_page_too(traces: Path) -> None:
    process = WrittenProcess("node0", 100)
    process.span("put", "q", 0, 1000, "done")
    process.write(traces)
    assert "No barrier" in make_page(read(traces))
