"""The messages and the exit codes of errors, which the tests cause in earnest where that is possible."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import click
import pytest

from fscoord import (
    BarrierError,
    BrokenBarrierError,
    CorruptLogError,
    FileStore,
    FscoordError,
    InsecurePathError,
    LimitExceededError,
    LockLostError,
    NoProcessGroupError,
    QueueEmptyError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExit,
    RendezvousStateError,
    RendezvousTimeoutError,
    SessionDeadError,
    StaleRunError,
    StoreClosedError,
    StoreError,
    StoreGoneError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnsupportedFilesystemError,
    UsedBeforeError,
    WorkFailedError,
    errors,
)
from fscoord._arguments import VALUE_MAX
from fscoord.cli import exit_codes, options

EXAMPLES = [
    (RendezvousGracefulExit("x"), 0),
    (QueueEmptyError("x"), 1),
    (click.UsageError("x"), 64),
    (LimitExceededError("x"), 64),
    (BarrierError("x"), 64),
    (UsedBeforeError("x"), 64),
    (errors.NoProcessGroupError("x"), 64),
    (ValueError("x"), 64),
    (OverflowError("x"), 64),
    (CorruptLogError("x", offset=3, reason="y"), 65),
    (RendezvousStateError("x"), 65),
    (StoreGoneError("x"), 69),
    (SessionDeadError("x"), 69),
    (StoreClosedError("x"), 69),
    (StaleRunError("x"), 69),
    (BrokenBarrierError("x"), 69),
    (NoProcessGroupError("x"), 64),
    (UnsupportedFilesystemError("x"), 69),
    (LockLostError("x"), 69),
    (errors.StaleTokenError("x"), 69),
    (WorkFailedError("x"), 69),
    (RendezvousError("x"), 69),
    (RendezvousClosedError("x"), 69),
    (RendezvousConnectionError("x"), 69),
    (FscoordError("x"), 69),
    (ModuleNotFoundError("x", name="rich.table"), 69),
    (KeyError("x"), 70),
    (ModuleNotFoundError("x", name="elsewhere"), 70),
    (StoreError("x"), 74),
    (StoreUnavailableError("x", errno=errno.ENOSPC), 74),
    (OSError(errno.EIO, "x"), 74),
    (exit_codes.OutputError("x"), 74),
    (StoreTimeoutError("x"), 75),
    (RendezvousTimeoutError("x"), 75),
    (InsecurePathError("x"), 77),
    (StoreUnavailableError("x", errno=errno.EACCES), 77),
    (PermissionError(errno.EPERM, "x"), 77),
    (KeyboardInterrupt(), 130),
    (click.Abort(), 130),
]


@pytest.mark.parametrize(("error", "code"), EXAMPLES, ids=lambda value: repr(value))
def test_errors_all_have_their_exit_codes(error, code):
    assert exit_codes.exit_code(error) == code


def test_errors_of_the_library_are_all_among_the_examples():
    kinds = {type(error) for error, _ in EXAMPLES}
    assert {getattr(errors, name) for name in errors.__all__} <= kinds


def test_error_is_one_line_on_standard_error(fscoord):
    for words in (["get", "--timeout", "0", "two\nlines"], ["nonsense"], ["get"], ["set", "k" * 2000, "v"]):
        done = fscoord(*words)
        assert done.out == b""
        assert done.err.startswith("fscoord: ")
        assert done.err.count("\n") == 1
        assert "Traceback" not in done.err


def test_traceback_comes_only_with_vv(fscoord):
    assert "Traceback" not in fscoord("get", "-v", "--timeout", "0", "k").err
    assert "Traceback" in fscoord("get", "-vv", "--timeout", "0", "k").err


def test_internal_error_is_reported_as_a_bug(fscoord, monkeypatch):
    monkeypatch.setattr(options, "open_store", lambda *_, **__: {}["oops"])
    done = fscoord("get", "k")
    assert done.code == 70
    assert done.err == "fscoord: a bug in fscoord, please report it with what -vv prints: KeyError: 'oops'\n"


def test_store_not_given_is_a_usage_error_that_names_the_option(fscoord, monkeypatch):
    monkeypatch.delenv("FSCOORD_STORE")
    done = fscoord("get", "k")
    assert done.code == 64
    assert "--store URL or set FSCOORD_STORE" in done.err


def test_store_of_the_command_line_overrides_the_environment_and_the_last_wins(fscoord, tmp_path):
    for number, words in enumerate(
        (
            ["set", "k", "0"],
            ["--store", f"{tmp_path}/1", "set", "k", "1"],
            ["set", "--store", f"{tmp_path}/2", "k", "2"],
        )
    ):
        assert fscoord(*words).code == 0, number
    assert fscoord("get", "k").out == b"0"
    assert fscoord("--store", f"{tmp_path}/1", "get", "k").out == b"1"
    assert fscoord("--store", f"{tmp_path}/1", "get", "--store", f"{tmp_path}/2", "k").out == b"2"


@pytest.mark.parametrize("timeout", ["-1", "nan", "soon", ""])
def test_timeout_that_is_not_a_number_is_refused(fscoord, timeout):
    done = fscoord("get", "--timeout", timeout, "k")
    assert done.code == 64
    assert "no number of seconds" in done.err


def test_timeout_of_inf_waits_without_limit(fscoord):
    fscoord("set", "k", "v")
    assert fscoord("get", "--timeout", "inf", "k").out == b"v"


@pytest.mark.parametrize("url", ["tcp://host", "nowhere:x", "file:x?colour=red", "file://host/x"])
def test_address_that_makes_no_sense_is_a_usage_error(fscoord, url):
    assert fscoord("get", "--store", url, "k").code == 64


def test_value_over_the_limit_is_a_usage_error(fscoord):
    done = fscoord("set", "k", "-", stdin=bytes(VALUE_MAX + 2))
    assert done.code == 64
    assert "limit" in done.err


def test_directory_that_is_not_there_is_an_input_error(fscoord):
    assert fscoord("get", "--store", "/nowhere/at/all", "k").code == 74


def test_file_that_is_no_log_is_damaged(fscoord, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"not a log at all, but long enough to be one" * 10)
    other.chmod(0o600)
    assert fscoord("get", "--store", str(other), "k").code == 65


def test_file_of_another_user_is_not_permitted(fscoord, as_nobody, public_dir):
    path = str(public_dir / "store")
    with FileStore(path):
        pass
    done = as_nobody(fscoord, "get", "--store", path, "k")
    assert done.code == 77
    assert path in done.err


def test_symbolic_link_is_not_followed(fscoord, path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    assert fscoord("get", "--store", str(tmp_path / "link"), "k").code == 77


def test_store_that_is_deleted_under_a_wait_is_gone(process, line_with, path):
    child = process("get", "-v", "k")
    line_with(child, "waiting for b'k'")
    os.unlink(path)
    _, said = child.communicate()
    assert child.returncode == 69, said


@pytest.mark.parametrize("words", [["get", "k"], ["wait", "k"], ["pop", "k"], ["barrier", "-n", "2", "k"]])
def test_ctrl_c_ends_a_wait_without_output_and_with_130(process, line_with, words):
    child = process(words[0], "-v", *words[1:])
    line_with(child, "waiting")
    child.send_signal(signal.SIGINT)
    out, said = child.communicate()
    assert (child.returncode, out, said.strip()) == (130, b"", b"")


LOSE_CTRL_C = """
import signal, sys, weakref
import fscoord.stores.file.notifier as waiting
from fscoord.cli import main

class Thing: pass

def make_watch(*arguments, before=waiting.ChangeWatcher, **options):
    thing = Thing()
    kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))  # where the next line raises, it is lost
    del thing
    return before(*arguments, **options)

waiting.ChangeWatcher = make_watch
main()
"""


def test_ctrl_c_that_python_loses_at_the_beginning_of_a_wait_still_ends_it(path):
    """The first wait imports what it needs, and each import ends with a callback in which Ctrl-C is lost."""
    done = subprocess.run(
        [sys.executable, "-c", LOSE_CTRL_C, "get", "--store", path, "k"], capture_output=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, b"", b"")


def test_ctrl_c_while_a_module_makes_a_dataclass_ends_with_130_too(path, tmp_path):
    """Python makes dataclasses by `exec` of text, and remembers of that alone how it ended."""
    program = """
from fscoord.cli import app, main
def run(_):
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        return 130
app.run = run
main()
"""
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "program"], cwd=tmp_path, capture_output=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"")


def test_ctrl_c_ends_reading_standard_input(process, line_with):
    child = process("set", "-v", "k", "-", stdin=subprocess.PIPE)
    line_with(child, "reading")
    child.send_signal(signal.SIGINT)
    assert child.wait() == 130


def test_broken_pipe_on_standard_output_is_not_reported(process, fscoord):
    fscoord("set", "k", "-", stdin=bytes(1_000_000))
    child = process("get", "k")
    child.stdout.close()
    assert (child.wait(), child.stderr.read()) == (74, b"")


def test_full_disk_under_standard_output_is_reported(process, fscoord):
    fscoord("set", "k", "v")
    with open("/dev/full", "wb") as full:
        child = process("get", "k", stdout=full)
        assert child.wait() == 74
    assert child.stderr.read() == b"fscoord: standard output: No space left on device\n"


@pytest.mark.parametrize(("redirect", "code"), [(">&-", 74), ("<&-", 0), ("2>&-", 0)])
def test_closed_streams_are_reported_or_not_needed(process, fscoord, path, redirect, code):
    fscoord("set", "k", "v")
    command = f'"$0" -m fscoord get k {redirect}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable],
        capture_output=True,
        env={**os.environ, "FSCOORD_STORE": path},
        check=False,
    )
    assert done.returncode == code
    assert b"Traceback" not in done.stderr


def test_closed_standard_input_is_a_usage_error_for_a_value_from_it(path):
    command = '"$0" -m fscoord set k - <&-'
    environment = {**os.environ, "FSCOORD_STORE": path}
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, env=environment, check=False)
    assert done.returncode == 64
    assert b"closed" in done.stderr


@pytest.mark.parametrize(("module", "words"), [("click", ["--version"]), ("rich", ["demo", "-n", "1"])])
def test_command_without_the_extra_reports_the_package_to_install(tmp_path, module, words):
    code = f"import sys; sys.modules[{module!r}] = None; from fscoord.cli import main; main({words!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path, check=False)
    assert done.returncode == 69
    assert b"pip install 'fscoord[cli]'" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("torch", ["get", "--store", "tcp://127.0.0.1:1?is_master=1", "k"], "torch"),
        ("urllib3", ["get", "--store", "etcd://127.0.0.1:1/job", "k"], "etcd"),
        ("torch", ["run", "--rdzv-endpoint", "127.0.0.1:1", "true"], "torch"),
        ("urllib3", ["run", "--rdzv-endpoint", "etcd://127.0.0.1:1/job", "true"], "etcd"),
    ],
    ids=["tcp store", "etcd store", "tcp rendezvous", "etcd rendezvous"],
)
def test_extra_that_a_store_needs_is_named_and_not_called_a_bug(fscoord, monkeypatch, module, words, extra):
    monkeypatch.setitem(sys.modules, module, None)
    done = fscoord(*words)
    assert done.code == 69
    assert done.err.endswith(f"install the extra, pip install 'fscoord[{extra}]'\n")
    assert "bug" not in done.err
