"""The verbs of `fscoord trace`, and the demonstration with a trace."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.traces import write_job


@pytest.fixture
def traces(tmp_path: Path, seed: int) -> str:
    write_job(tmp_path / "traces", seed, ranks=4, hosts=2, barriers=6)
    return str(tmp_path / "traces")


def test_report_prints_the_tables(fscoord, traces):
    done = fscoord("trace", "report", traces)
    assert (done.code, done.err) == (0, "")
    text = done.out.decode()
    assert text.startswith(f"{text.split()[0]} spans of 4 processes on 2 hosts, in {traces}\n")
    for title in (
        "came last to barriers",
        "Waiting time by name",
        "Locks and elections",
        "Deaths",
        "longest",
        "Clocks",
    ):
        assert title in text
    assert "rank 3 " in text
    assert "rank 1, which set 'plan'" in text


def test_directory_without_a_verb_is_answered_with_what_to_type(fscoord, traces):
    done = fscoord("trace", traces)
    assert (done.code, done.out) == (64, b"")
    command = f"fscoord trace report {traces}"
    assert done.err == f"fscoord: a verb is missing: type '{command}' ('fscoord trace --help' explains)\n"
    assert fscoord(*command.split()[1:]).code == 0


def test_report_as_json_is_one_line(fscoord, traces):
    done = fscoord("trace", "report", "--json", traces)
    assert done.out.count(b"\n") == 1
    report = json.loads(done.out)
    assert report["last_to_come"][0]["rank"] == 3
    assert set(report) == {
        *("directory", "processes", "clocks", "last_to_come", "waiting", "contention", "deaths", "longest", "open"),
        "time_outs",
    }


def test_table_that_is_long_names_the_number_of_further_rows(fscoord, tmp_path, seed):
    write_job(tmp_path / "traces", seed, ranks=40, hosts=2, barriers=200)
    done = fscoord("trace", "report", str(tmp_path / "traces"))
    assert "more, which --json shows" in done.out.decode()


def test_export_writes_chrome_trace_events(fscoord, traces, tmp_path):
    output = tmp_path / "trace.json"
    done = fscoord("trace", "export", traces, "--output", str(output))
    assert (done.code, done.out) == (0, b"")
    events = json.loads(output.read_text())["traceEvents"]
    assert done.err == f"fscoord: {output} has {len(events)} events\n"


def test_html_writes_a_page(fscoord, traces, tmp_path):
    output = tmp_path / "report.html"
    done = fscoord("trace", "html", traces, "-o", str(output))
    assert (done.code, done.out) == (0, b"")
    assert done.err == f"fscoord: {output} shows the trace in {traces}\n"
    assert "rank 3" in output.read_text()


def test_directory_without_a_trace_is_an_error(fscoord, tmp_path):
    done = fscoord("trace", "report", str(tmp_path))
    assert (done.code, done.out) == (69, b"")
    assert "holds no trace" in done.err
    assert "FSCOORD_TRACE" in done.err


def test_name_that_can_not_be_read_is_reported_beside_the_report(fscoord, traces):
    os.mkfifo(os.path.join(traces, "x.trace"))
    done = fscoord("trace", "report", traces)
    assert done.code == 0
    assert done.err == f"fscoord: {traces}/x.trace is left out of the trace: it is not a regular file\n"


@pytest.mark.parametrize("verb", ["report", "export", "html"])
def test_directory_that_is_missing_or_a_file_is_an_error_of_input(fscoord, tmp_path, verb):
    (tmp_path / "file").touch()
    for name, why in (("nothing", "No such file or directory"), ("file", "Not a directory")):
        done = fscoord("trace", verb, str(tmp_path / name))
        advice = "name the directory that FSCOORD_TRACE had"
        assert (done.code, done.err) == (74, f"fscoord: {tmp_path}/{name}: {why}; {advice}\n")
        assert fscoord("doctor", str(tmp_path / name)).code == 74


@pytest.mark.parametrize("verb", ["export", "html"])
def test_error_of_a_full_device_names_it(fscoord, traces, verb):
    done = fscoord("trace", verb, traces, "-o", "/dev/full")
    assert (done.code, done.err) == (74, "fscoord: /dev/full: No space left on device\n")


def test_output_that_can_not_be_written_is_an_error_of_input_and_output(fscoord, traces, tmp_path):
    done = fscoord("trace", "export", traces, "-o", str(tmp_path / "no" / "such" / "directory"))
    assert done.code == 74


@pytest.mark.parametrize("verb", ["export", "html"])
def test_full_disk_is_an_error_that_names_the_file_and_leaves_the_last_one(fscoord, traces, full_disk, verb):
    (full_disk / "ballast").write_bytes(bytes(60 << 10))
    output = full_disk / "output"
    output.write_text("the last report")
    done = fscoord("trace", verb, traces, "-o", str(output))
    assert (done.code, done.err) == (74, f"fscoord: {output}: No space left on device\n")
    assert output.read_text() == "the last report"
    assert sorted(file.name for file in full_disk.iterdir()) == ["ballast", "output"]


def test_output_may_be_a_device_or_a_link(fscoord, traces, tmp_path):
    assert fscoord("trace", "export", traces, "-o", "/dev/null").code == 0
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real").write_text("before")
    assert fscoord("trace", "export", traces, "-o", str(tmp_path / "link")).code == 0
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "real").read_text())["traceEvents"]


def test_trace_without_a_verb_is_a_usage_error_that_shows_the_help(fscoord):
    assert fscoord("trace") == (64, b"", fscoord("trace", "--help").out.decode())


@pytest.mark.parametrize("verb", ["report", "export", "html"])
def test_verbs_below_trace_have_help_with_examples(fscoord, verb):
    text = fscoord("trace", verb, "--help").out.decode()
    assert f"fscoord trace {verb} traces" in text


def test_demo_makes_a_report_of_its_trace(process, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one two two")
    child = process("demo", "-n", "2", "--input", str(tmp_path / "texts"), "--trace", str(tmp_path / "traces"))
    _, err = child.communicate()
    assert child.returncode == 0, err
    page = (tmp_path / "traces" / "report.html").read_text()
    assert "rank 1" in page
    assert "all have come" in page
