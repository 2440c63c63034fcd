"""Names that are not UTF-8, of keys, locks and files: all verbs show them in one way in text and in one in JSON."""

from __future__ import annotations

import base64
import json
import os
import subprocess

import pytest
from support.internals import escaping, timing
from support.places import start_thread, until

from fscoord import FileStore, barrier
from fscoord.recipes import Lock

NAME = b"n\xff"
SHOWN = "n\\xff"
HANG_S = 60


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Give the path of a store whose name is not UTF-8, in the present directory."""
    monkeypatch.chdir(tmp_path)
    path = os.fsencode(tmp_path) + b"/s\xff"
    monkeypatch.setenv("FSCOORD_STORE", os.fsdecode(path))
    return path


def names_in(document):
    """Yield the names of all fields of `document`, and of the documents in it."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield name
            yield from names_in(value)
    elif isinstance(document, list):
        for each in document:
            yield from names_in(each)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["get", "--timeout", "0", NAME], 75),
        (["-v", "get", "--timeout", "0", NAME], 75),
        (["-vv", "get", "--timeout", "0", NAME], 75),
        (["wait", "--timeout", "0", NAME], 75),
        (["pop", "--timeout", "0", NAME], 75),
        (["watch", "--count", "1", "--timeout", "0", NAME], 75),
        (["take-item", "--timeout", "0", NAME, "true"], 75),
        (["work", "--failed", NAME, NAME, "true"], 64),
        (["leader", "--timeout", "0", NAME], 75),
        (["barrier", "-v", "-n", "2", "--timeout", "0", NAME], 75),
        (["barrier", "-n", "2", "--rank", "0", "--timeout", "0", NAME], 75),
        (["break-lock", NAME], 1),
        (["lock", "-v", NAME, "true"], 0),
        (["once", "-v", NAME, "true"], 0),
        (["join", "-v", NAME, "true"], 0),
        (["lock", "l", b"./" + NAME], 69),
        (["ps", NAME], 74),
        (["ps", "STORE", "--store", NAME], 64),
        (["verify", NAME], 74),
        (["repair", "-o", b"there-" + NAME], 64),
        (["cp", "STORE", b"there-" + NAME], 64),
        (["doctor", NAME], 74),
        (["trace", "report", NAME], 74),
        ([b"verb-" + NAME], 64),
        (["get", b"--" + NAME], 64),
        (["completion", NAME], 64),
        (["get", "--store", b"tcp://" + NAME, "k"], 64),
        (["add", "k", NAME], 64),
    ],
    ids=lambda value: b"-".join(map(os.fsencode, value)).decode("ascii", "ignore") if isinstance(value, list) else "",
)
def test_name_in_a_message_has_its_bytes_as_the_repr_of_bytes_shows_them(fscoord, place, words, code):
    FileStore(place).close()
    with open(b"there-" + NAME, "wb"):
        pass
    done = fscoord(*(place if word == "STORE" else word for word in words))
    assert done.code == code, done
    assert SHOWN in done.err
    assert "udcff" not in done.err
    assert "ufffd" not in done.err


@pytest.mark.parametrize("words", [["add", NAME], ["set", "--token", "1", NAME, "v"]], ids=lambda words: words[0])
def test_value_of_another_program_is_named_by_its_key_in_the_same_way(fscoord, place, words):
    fscoord("set", NAME, "other")
    done = fscoord(*words)
    assert done.code != 0
    assert f"key '{SHOWN}'" in done.err


def test_tables_show_a_name_as_messages_do(fscoord, place, monkeypatch):
    monkeypatch.setattr(timing, "SHOW_S", 0.02)
    with (
        FileStore(place, rank=0) as store,
        FileStore(place, rank=1) as other,
        Lock(store, NAME),
        start_thread(barrier, store, 2, b"b" + NAME, HANG_S, 0),
    ):
        until(lambda: b"barrier" in fscoord("ps").out)
        text = fscoord("ps", "--slow", "0").out.decode() + fscoord("top", "-n", "1", "--slow", "0").out.decode()
        document = json.loads(fscoord("ps", "--json", "--slow", "0").out)
        barrier(other, 2, b"b" + NAME, HANG_S, 1)
    assert f"lock '{SHOWN}'" in text
    assert f"barrier 'b{SHOWN}'" in text
    assert "udc" not in text
    assert document["store_base64"] == base64.b64encode(place).decode()
    assert document["locks"][0]["name_base64"] == base64.b64encode(NAME).decode()
    assert document["barriers"][0]["name_base64"] == base64.b64encode(b"b" + NAME).decode()
    first = document["participants"][0]
    assert first["holds"] == [f"lock '{SHOWN}'"]
    assert first["waiting"]["words"] == f"barrier 'b{SHOWN}'"
    assert first["waiting"]["name_base64"] == base64.b64encode(b"b" + NAME).decode()
    assert [base64.b64decode(key) for key in first["waiting"]["keys_base64"]] == [b"b" + NAME + b"/complete"]
    assert f"barrier 'b{SHOWN}'" in document["findings"][0]["message"]


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["verify", "--json"], {"path_base64", "file_base64"}),
        (["cp", "--json", "STORE", b"copy" + NAME], {"path_base64", "output_base64"}),
        (["repair", "--json", "-o", b"copy" + NAME], {"path_base64", "output_base64", "source_base64"}),
        (["doctor", "--json", "."], set()),
        (["doctor", "--json", b"dir" + NAME], {"path_base64"}),
        (["keys", "--json"], {"key_base64"}),
        (["watch", "--json", "--all", "--timeout", "0"], {"key_base64"}),
        (["dump", "--json"], {"key_base64"}),
        (["get", "--json", NAME], {"key_base64"}),
        (["len", "--json", NAME], {"queue_base64"}),
        (["items", "--json", NAME], {"queue_base64"}),
    ],
    ids=lambda value: b"-".join(map(os.fsencode, value)).decode("ascii", "ignore") if isinstance(value, list) else "",
)
def test_name_is_a_field_in_base64_in_every_json_document(fscoord, place, words, fields, monkeypatch):
    if words[-1] == ".":  # the examination of the other directory is a whole one
        monkeypatch.setattr("fscoord.doctor.examination.probes.run", lambda *_: iter(()))
    fscoord("set", NAME, "v")
    os.mkdir(b"dir" + NAME)
    done = fscoord(*(place if word == "STORE" else word for word in words))
    documents = [json.loads(line) for line in done.out.splitlines()]
    assert fields == {name for name in names_in(documents) if name.endswith("_base64")}
    for name in fields:
        assert name.removesuffix("_base64") not in set(names_in(documents[-1:])), done.out
    assert b"udc" not in done.out
    assert json.dumps(documents).encode("utf-8")


def test_trace_of_such_names_is_shown_exported_and_drawn(fscoord, process, place, tmp_path):
    with FileStore(place):
        child = process("lock", NAME, "true", env={"FSCOORD_STORE": os.fsdecode(place), "FSCOORD_TRACE": "traces"})
        assert child.wait(HANG_S) == 0
    text = fscoord("trace", "report", "traces").out.decode()
    assert SHOWN in text
    assert "udc" not in text
    found = json.loads(fscoord("trace", "report", "--json", "traces").out)
    assert {row.get("name_base64") for row in found["contention"]} == {base64.b64encode(NAME).decode()}
    for verb, file in (("export", "trace.json"), ("html", "report.html")):
        assert fscoord("trace", verb, "traces", "-o", file).code == 0
        written = (tmp_path / file).read_text(encoding="utf-8")
        assert "n\\\\xff" in written if verb == "export" else SHOWN in written
        assert "udc" not in written


def test_command_in_a_message_names_the_path_for_the_shell(fscoord, place):
    fscoord("set", "k", "v")
    with open(place, "r+b") as log:
        log.seek(-3, os.SEEK_END)
        log.write(b"?")
    said = fscoord("keys").err
    command = said.partition("`")[2].partition("`")[0]
    assert command.startswith("fscoord verify ")
    program = f'fscoord() {{ printf %s "$2"; }}; {command}'
    shown = subprocess.run(["bash", "-c", program], capture_output=True, check=True)
    assert shown.stdout == place


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("k\udcff", "k\\xff"),
        (repr("k\udcff"), "'k\\xff'"),
        (repr("k\\\udcff\\"), "'k\\\\\\xff\\\\'"),
        (repr("k\\udcff"), "'k\\\\udcff'"),
        ("\ud800\n\x1b", "\\ud800\\n\\x1b"),
        ("ä日", "ä日"),
    ],
    ids=ascii,
)
def test_printable_text_has_each_byte_that_is_not_utf_8_as_x_and_two_digits(text, shown):
    assert escaping.printable(text) == shown


def test_printable_bytes_are_not_taken_for_the_repr_of_a_text():
    assert escaping.printable(b"k\\udcff\xff") == "k\\udcff\\xff"


@pytest.mark.parametrize("text", ["/a/b", "/a b'c", "/a\udcff'\\ b\nc", "\u202eä", "", "-n"])
def test_word_of_the_shell_stands_for_the_text(text):
    word = escaping.shell_word(text)
    assert word.isprintable()
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert done.stdout == os.fsencode(text)
