"""The messages and the exit codes of errors, which the tests cause in earnest where that is possible."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
import time

import click
import pytest
from support.internals import VALUE_MAX, SlowWaitLogger, logger

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
from fscoord.cli import exit_codes, options, output
from fscoord.cli.ps import since_text
from fscoord.recipes import Lock

EXAMPLES = [
    (errors.CompactedError("x"), 69),
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
    (errors.AcquireCancelledError("x"), 69),
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


def test_warning_of_the_library_is_printed_once_without_v(fscoord, monkeypatch):
    def open_and_warn(*arguments, before=options.open_store, **settings):
        logger("fscoord._log.opened").warning("the mount %r is odd", "m\udcff")
        logger("fscoord._log.opened").info("and so on")
        return before(*arguments, **settings)

    monkeypatch.setattr(options, "open_store", open_and_warn)
    for _ in range(2):
        assert fscoord("set", "k", "v") == (0, b"", "fscoord: the mount 'm\\xff' is odd\n")
    assert fscoord("-v", "set", "k", "v").err == "fscoord: the mount 'm\\xff' is odd\nfscoord: and so on\n"


def test_warning_about_a_long_wait_is_printed_only_with_v(fscoord, monkeypatch):
    def open_after_a_while(*arguments, before=options.open_store, **settings):
        SlowWaitLogger("fscoord._log", lambda: "a lock", started=time.monotonic() - 31).warn_if_due()
        return before(*arguments, **settings)

    monkeypatch.setattr(options, "open_store", open_after_a_while)
    assert fscoord("set", "k", "v") == (0, b"", "")
    assert fscoord("-v", "set", "k", "v").err == "fscoord: still waiting for a lock, after 31 s\n"


def test_rendezvous_that_can_not_be_opened_is_reported_once(fscoord, tmp_path):
    words = ["run", "--nnodes", "2", "--rdzv-endpoint", f"{tmp_path}/none/job", "true"]
    done = fscoord(*words)
    assert done.code == 69
    assert done.err.startswith("fscoord: the store of the rendezvous can't be opened: ")
    assert done.err.count("\n") == 1
    assert "RendezvousConnectionError" in fscoord("-v", *words).err


def test_internal_error_is_reported_as_a_bug(fscoord, monkeypatch):
    monkeypatch.setattr(options, "open_store", lambda *_, **__: {}["oops"])
    done = fscoord("get", "k")
    assert done.code == 70
    assert done.err == "fscoord: a bug in fscoord; please report it with the output of -vv: KeyError: 'oops'\n"


def test_store_not_given_is_a_usage_error_that_names_the_option(fscoord, monkeypatch):
    monkeypatch.delenv("FSCOORD_STORE")
    done = fscoord("get", "k")
    assert done.code == 64
    assert "--store URL or set FSCOORD_STORE" in done.err


@pytest.mark.parametrize("words", [["get", "k"], ["keys"], ["ps"], ["verify"]], ids=lambda words: words[0])
def test_empty_address_is_refused_and_not_replaced_by_the_environment(fscoord, words):
    """An unset variable of a shell must not lead a verb to another store."""
    fscoord("set", "k", "v")
    done = fscoord(*words, "--store", "")
    assert (done.code, done.out) == (64, b"")
    assert done.err.startswith("fscoord: --store is empty: name a path or an address")


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
    assert "not a number of seconds" in done.err


def test_timeout_of_inf_waits_without_limit(fscoord):
    fscoord("set", "k", "v")
    assert fscoord("get", "--timeout", "inf", "k").out == b"v"


@pytest.mark.parametrize(
    "words",
    [
        ["ps", "--slow", "-1"],
        ["ps", "--interval", "x"],
        ["top", "--interval", "nan"],
        ["lock", "--grace", "-1", "l", "true"],
        ["lock", "--ttl", "x", "l", "true"],
    ],
    ids=" ".join,
)
def test_duration_that_is_not_a_number_gets_no_advice_for_time_limits(fscoord, words):
    done = fscoord(*words)
    assert done.code == 64
    assert f"{words[2]!r} is not a number of seconds" in done.err
    assert "inf has no limit" not in done.err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["ps", "--interval", "0"], "0 would leave no pause"),
        (["top", "--interval", "0"], "0 would leave no pause"),
        (["lock", "", "true"], "the name is empty; if it is a variable of the shell, it is not set"),
        (["once", "", "true"], "the name is empty"),
        (["group", ""], "the name is empty"),
        (["leader", ""], "the name is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_value_that_is_a_mistake_is_refused_with_the_reason(fscoord, words, error):
    done = fscoord(*words)
    assert done.code == 64
    assert error in done.err


@pytest.mark.parametrize("text", ["x", "", "0x7"])
def test_number_in_an_address_that_is_none_is_called_so(fscoord, path, text):
    done = fscoord("get", "--store", f"file:{path}?world_size=y{text}", "k")
    assert done.code == 64
    assert done.err == f"fscoord: option world_size=y{text}: 'y{text}' is not an integer\n"
    assert "is not a number\n" in fscoord("get", "--store", f"file:{path}?timeout=y{text}", "k").err


@pytest.mark.parametrize("url", ["tcp://host", "nowhere:x", "file:x?colour=red", "file://host/x"])
def test_address_that_makes_no_sense_is_a_usage_error(fscoord, url):
    assert fscoord("get", "--store", url, "k").code == 64


def test_value_over_the_limit_is_a_usage_error(fscoord):
    done = fscoord("set", "k", "-", stdin=bytes(VALUE_MAX + 2))
    assert done.code == 64
    assert "limit" in done.err


def test_directory_that_is_not_there_is_an_input_error(fscoord):
    assert fscoord("get", "--store", "/nowhere/at/all", "k").code == 74


def test_directory_that_takes_no_files_is_an_input_error_with_the_next_step(fscoord):
    done = fscoord("set", "--store", "/proc/store", "k", "v")
    assert done.code == 74
    assert "/proc/store: opening the log failed: No such file or directory; no file can be created in /proc" in done.err


READERS = (
    ["keys"],
    ["members"],
    ["group", "g"],
    ["items", "q"],
    ["holders", "l"],
    ["len", "q"],
    ["dump"],
    ["verify"],
    ["ps"],
    ["compact"],
)
WRITERS = (["get", "k"], ["set", "k", "v"], ["lock", "l", "true"], ["take-item", "q", "true"])
COPIERS = (["repair", "-o", "new"], ["cp"])


def on(words, path):
    """Return the words of the verb, with `path` as its store."""
    return [*words, path, "new"] if words == ["cp"] else [words[0], "--store", path, *words[1:]]


@pytest.mark.parametrize("words", [*READERS, *WRITERS, *COPIERS], ids=lambda words: words[0])
def test_file_of_another_kind_is_called_so_by_every_verb_with_the_next_step(fscoord, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(b"somebody's text\n" * 30)
    other.chmod(0o600)
    done = fscoord(*on(words, str(other)))
    said = done.err + done.out.decode()
    assert done.code == 65
    assert said.count("not a log of fscoord: it begins with b'somebody', not with b'fscoord\\n'") == 1
    assert "check the path" in said or "repair --salvage" in said
    assert other.read_bytes() == b"somebody's text\n" * 30


@pytest.mark.parametrize("words", [*READERS, *WRITERS, *COPIERS], ids=lambda words: words[0])
def test_directory_is_called_so_by_every_verb_with_the_next_step(fscoord, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    done = fscoord(*on(words, str(tmp_path / "job")))
    assert done.code == 77
    assert (
        f"{tmp_path}/job is not a regular file, but a directory; name a file in it, such as {tmp_path}/job/store\n"
        in done.err
    )


@pytest.mark.parametrize("words", [*READERS, *WRITERS, *COPIERS], ids=lambda words: words[0])
def test_name_of_a_directory_that_is_not_there_makes_no_file(fscoord, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    done = fscoord(*on(words, "job/"))
    assert done.code == 77
    assert "job/ ends with '/', so it names a directory, which does not exist; " in done.err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("words", [*READERS, *COPIERS], ids=lambda words: words[0])
def test_store_that_is_not_there_is_called_so_once_and_not_made(fscoord, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    done = fscoord(*on(words, f"{tmp_path}/none"))
    assert done.code == 74
    says = f"no store at {tmp_path}/none; check the path (`set` creates one)"
    assert done.err == f"fscoord: {says}\n"
    assert os.listdir(tmp_path) == []


EMPTY = "no writer has opened it yet; check the path (`set` makes it a store)"
HALF = "only a part of a header, because its creator died; check the path (`set` makes it a store)"


@pytest.mark.parametrize(("data", "why"), [(b"", EMPTY), (b"fscoord\n\x03", HALF)], ids=["empty", "half a header"])
@pytest.mark.parametrize(
    "words",
    [words for words in (*READERS, *COPIERS, ["repair", "-o", "new", "--salvage"]) if words != ["verify"]],
    ids=lambda words: "-".join(words) if "--salvage" in words else words[0],
)
def test_file_without_a_header_has_one_exit_code_and_the_next_step(fscoord, tmp_path, monkeypatch, words, data, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").write_bytes(data)
    (tmp_path / "log").chmod(0o600)
    done = fscoord(*on(words, f"{tmp_path}/log"))
    assert (done.code, done.out) == (74, b"")
    assert done.err.startswith(f"fscoord: {tmp_path}/log ")
    assert done.err.endswith(f"{why}\n")
    assert done.err.count("\n") == 1
    assert os.listdir(tmp_path) == ["log"]
    assert (tmp_path / "log").read_bytes() == data
    assert fscoord("set", "--store", f"{tmp_path}/log", "k", "v").code == 0


def test_store_to_copy_that_is_not_there_is_named_and_not_the_copy(fscoord, tmp_path):
    done = fscoord("cp", f"{tmp_path}/none", f"{tmp_path}/n")
    assert done.err == f"fscoord: no store at {tmp_path}/none; check the path (`set` creates one)\n"


def test_copy_into_a_directory_that_is_not_there_names_that_directory(fscoord, tmp_path):
    fscoord("set", "k", "v")
    done = fscoord("cp", f"{tmp_path}/store", f"{tmp_path}/none/copy")
    assert done.code == 74
    assert f"{tmp_path}/none/copy: " in done.err
    assert f"its directory {tmp_path}/none does not exist: create it first" in done.err


@pytest.mark.parametrize(
    "words", [["cp", "STORE", "COPY"], ["repair", "--yes", "-o", "COPY", "STORE"]], ids=["cp", "repair"]
)
def test_copy_into_a_directory_that_refuses_it_names_the_copy_and_not_the_store(
    fscoord, as_nobody, public_dir, path, words
):
    store, copy = str(public_dir / "store"), str(public_dir / "closed" / "copy")
    with FileStore(store, mode=0o644) as handle:
        handle.set("k", "v")
    (public_dir / "closed").mkdir(mode=0o755)
    done = as_nobody(fscoord, *({"STORE": store, "COPY": copy}.get(word, word) for word in words))
    assert done.code == 77
    assert done.err.startswith(f"fscoord: {copy}: writing the copy failed: Permission denied; check the owners")


def test_tilde_in_the_address_is_the_home_directory_also_for_commands(fscoord, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for address in ("~/mine", "file:~/mine?timeout=9"):
        done = fscoord("lock", "--store", address, "l", "-c", 'test "${FSCOORD_STORE#*~}" = "$FSCOORD_STORE"')
        assert (done.code, done.err) == (0, "")
    assert (tmp_path / "mine").exists()


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
    line_with(child, "waiting for 'k'")
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


NOTE_SOON = "from fscoord.cli import main, output; output.NOTE_AFTER_S = 0.01; main()"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["get", "--timeout", "inf", "k"], "waiting for 'k', without a time limit"),
        (["wait", "k", "l"], "waiting for 'k', 'l', up to 300 s"),
        (["pop", "q"], "waiting for a value in queue 'q', up to 300 s"),
        (["take-item", "--timeout", "70", "q", "true"], "waiting for an item of queue 'q', up to 70 s"),
        (["leader", "e"], "waiting for a leader of 'e', up to 300 s"),
        (["lock", "-w", "60", "l", "true"], "waiting for the lock 'l', up to 60 s; HELD, nobody else waiting"),
        (["rwlock", "-s", "l", "true"], "waiting for the lock 'l', up to 300 s; HELD, nobody else waiting"),
        (["elect", "l", "true"], "waiting for the leadership of 'l', up to 300 s; HELD, nobody else waiting"),
        (["once", "l", "true"], "waiting for the result of 'l', up to 300 s; HELD, nobody else waiting"),
    ],
    ids=lambda value: value[0],
)
def test_wait_that_lasts_is_told_on_a_terminal(path, words, said):
    with FileStore(path) as store, Lock(store, "l"):
        (me,) = store.members()
        held = f"held by {me.host}:{me.pid} (alive, in the store since {since_text(me.since)} UTC)"
        said = said.replace("HELD", held)
        child, parent = os.openpty()
        with subprocess.Popen(
            [sys.executable, "-c", NOTE_SOON, *words],
            stderr=parent,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "FSCOORD_STORE": path},
        ) as waiting:
            os.close(parent)
            try:
                with open(child, "rb", buffering=0) as terminal:
                    assert terminal.readline().decode() == f"fscoord: {said}\r\n"
            finally:
                waiting.kill()


def test_wait_that_is_short_is_not_told(fscoord, monkeypatch):
    monkeypatch.setattr(output, "NOTE_AFTER_S", 1000.0)  # it is a short one on any machine
    fscoord("set", "k", "v")
    assert fscoord("get", "k", person=True) == (0, b"v", "")


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


@pytest.mark.parametrize(
    "words",
    [
        ["set", "k", "v"],
        ["add", "k"],
        ["push", "q", "v"],
        ["put-item", "q", "v"],
        ["lock", "l", "true"],
        ["elect", "e", "true"],
        ["once", "o", "true"],
        ["join", "g", "true"],
        ["barrier", "-n", "1", "b"],
        ["compact"],
        ["cp", "STORE", "copy"],
        ["repair", "-o", "copy", "--yes"],
    ],
    ids=lambda words: words[0],
)
def test_full_disk_has_one_exit_code_and_the_next_step(fscoord, full_disk, monkeypatch, words):
    store, copy = str(full_disk / "store"), str(full_disk / "copy")
    os.truncate(full_disk / "ballast", 32 << 10)
    with FileStore(store) as handle:
        for size in (1500, 1):
            with contextlib.suppress(StoreUnavailableError):
                for number in itertools.count():
                    handle.set(f"{number}", bytes(size))
    monkeypatch.setenv("FSCOORD_STORE", store)
    done = fscoord(*({"STORE": store, "copy": copy}.get(word, word) for word in words))
    assert done.code == 74, done
    assert "No space left on device; free some space" in done.err
    assert not os.path.exists(copy)


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


def test_value_is_not_popped_for_a_standard_output_that_is_closed(fscoord, path):
    fscoord("push", "q", "v")
    done = subprocess.run(
        ["sh", "-c", '"$0" -m fscoord pop q >&-', sys.executable],
        capture_output=True,
        env={**os.environ, "FSCOORD_STORE": path},
        check=False,
    )
    assert (done.returncode, done.stderr) == (74, b"fscoord: standard output is closed\n")
    assert fscoord("pop", "-n", "q").out == b"v"


@pytest.mark.parametrize("redirect", ["<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_command_under_a_lock_runs_with_closed_streams(path, tmp_path, redirect):
    """With two of them closed a pipe between warden and guard gets the number of a standard stream.

    The command sleeps so that a warden that takes its guard for dead has the time to kill it.
    """
    made = tmp_path / "made"
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m fscoord lock l sh -c "sleep 0.1; echo x >{made}; exit 7" {redirect}', sys.executable],
        env={**os.environ, "FSCOORD_STORE": path},
        check=False,
    )
    assert done.returncode == 7
    assert made.read_text() == "x\n"


@pytest.mark.parametrize("redirect", ["2>/dev/full", "2>&-"])
@pytest.mark.parametrize(
    ("words", "code"),
    [("get --timeout 0 k", 75), ("-vv get --timeout 0 k", 75), ("get --tiemout 0 k", 64), ("ps nowhere", 74)],
)
def test_error_that_can_not_be_written_keeps_its_exit_code(path, tmp_path, words, code, redirect):
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m fscoord {words} {redirect}', sys.executable],
        env={**os.environ, "FSCOORD_STORE": path},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == code


def test_closed_standard_input_is_a_usage_error_for_a_value_from_it(path):
    command = '"$0" -m fscoord set k - <&-'
    environment = {**os.environ, "FSCOORD_STORE": path}
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, env=environment, check=False)
    assert done.returncode == 64
    assert b"closed" in done.stderr


ON_A_TERMINAL = "from importlib import import_module; import_module('fscoord.cli.top').can_redraw = lambda: True"


@pytest.mark.parametrize(
    ("module", "first", "words"),
    [("click", "pass", ["--version"]), ("rich", ON_A_TERMINAL, ["top", "--count", "1", "store"])],
    ids=["click", "rich"],
)
def test_command_without_the_extra_reports_the_package_to_install(tmp_path, module, first, words):
    FileStore(tmp_path / "store").close()
    code = f"import sys; sys.modules[{module!r}] = None; {first}; from fscoord.cli import main; main({words!r})"
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
