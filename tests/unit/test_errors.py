"""The error tree: what each is besides, and that it crosses process boundaries whole."""

from __future__ import annotations

import ast
import errno
import os
import pickle
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.internals import RefusedError, closer_look

import fscoord
from fscoord import StoreTimeoutError, errors

EXAMPLES = [
    errors.FscoordError("text"),
    errors.StoreTimeoutError("text", keys=["a"], missing_ranks=["1"], holder="host:1", waited=0.5),
    errors.StoreError("text", path="/p", maybe_applied=True),
    errors.StoreClosedError("text", path="/p"),
    errors.StoreGoneError("text", path="/p"),
    errors.SessionDeadError("text", path="/p"),
    errors.StaleRunError("text", path="/p"),
    errors.StoreUnavailableError("text", path="/p", maybe_applied=True, errno=errno.ENOSPC),
    errors.CorruptLogError("text", path="/p", offset=7, reason="why"),
    errors.CompactedError("text", path="/p", position=3),
    errors.QueueEmptyError("text", path="/p"),
    errors.LimitExceededError("text", path="/p"),
    errors.InsecurePathError("text", path="/p"),
    errors.UnsupportedFilesystemError("text", path="/p"),
    errors.BarrierError("text"),
    errors.NoProcessGroupError("text"),
    errors.UsedBeforeError("text"),
    errors.BrokenBarrierError("text", missing=["1", "2"], dead=["2"]),
    errors.LockLostError("text"),
    errors.StaleTokenError("text"),
    errors.AcquireCancelledError("text"),
    errors.WorkFailedError("text"),
    errors.RendezvousClosedError("text"),
    errors.RendezvousConnectionError("text"),
    errors.RendezvousError("text"),
    errors.RendezvousGracefulExit("text"),
    errors.RendezvousStateError("text"),
    errors.RendezvousTimeoutError("text"),
]


def test_message_about_a_path_of_any_bytes_can_be_printed(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\n\xc3\xa9"  # a byte that is not UTF-8, a line feed, an e with an accent
    with fscoord.FileStore(path) as store, pytest.raises(StoreTimeoutError) as told:
        store.get("k", timeout=0)
    text = str(told.value)
    assert "/\\xff\né" in text
    assert text.encode("utf-8").decode() == text
    assert str(pickle.loads(pickle.dumps(told.value))) == text
    assert str(errors.FscoordError("half \ud800 \udc7f")) == "half \\ud800 \\udc7f"


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_error_survives_pickling_with_all_its_contents(error: fscoord.FscoordError) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert str(error).removeprefix("timeout: ") == "text"
    assert vars(twin) == vars(error)
    assert getattr(twin, "errno", None) == getattr(error, "errno", None)


def test_examples_include_every_error_of_the_tree() -> None:
    assert {type(error) for error in EXAMPLES} == {getattr(errors, name) for name in errors.__all__}


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (errors.FscoordError, [RuntimeError]),
        (errors.StoreTimeoutError, [TimeoutError, LookupError]),
        (errors.StoreUnavailableError, [OSError]),
        (errors.LimitExceededError, [ValueError]),
        (errors.NoProcessGroupError, [AssertionError]),
        (errors.InsecurePathError, [PermissionError]),
        (errors.UnsupportedFilesystemError, [OSError]),
        (errors.BrokenBarrierError, [errors.BarrierError]),
        (errors.UsedBeforeError, [errors.BarrierError]),
        (errors.RendezvousTimeoutError, [errors.RendezvousError, TimeoutError]),
        (errors.RendezvousConnectionError, [errors.RendezvousError]),
    ],
)
def test_error_is_also_of_the_type_that_its_catcher_would_expect(
    kind: type[BaseException], others: list[type[BaseException]]
) -> None:
    for other in [*others, RuntimeError, errors.FscoordError]:
        assert issubclass(kind, other)


def test_error_number_is_where_oserror_has_it() -> None:
    try:
        raise errors.StoreUnavailableError("no space", errno=errno.ENOSPC)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        assert str(error) == "no space"


TIMEOUTS = [kind for kind in map(type, EXAMPLES) if issubclass(kind, TimeoutError)]


@pytest.mark.parametrize("kind", TIMEOUTS)
def test_message_of_a_timeout_has_the_word_that_callers_of_torch_look_for(kind: type[errors.FscoordError]) -> None:
    class Special(kind):  # type: ignore[misc, valid-type]
        """A subclass that a program defines."""

    for error in (kind("too late"), Special("too late"), kind(str(kind("too late")))):
        assert str(error) == "timeout: too late"
    assert str(kind("key 'timeouts' did not come")) == "timeout: key 'timeouts' did not come"
    torchs = "Timed out (world_size=2, timeout=5)"
    assert str(kind(torchs)) == torchs
    assert str(pickle.loads(pickle.dumps(kind("too late")))) == "timeout: too late"


def errors_made(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The name of each exception, or of the function that returns its words, and the words that are written there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name.endswith(("Error", "Failure")) and node.args:
                yield name, ast.unparse(node.args[0])


def test_error_about_a_time_that_is_over_says_timeout() -> None:
    """Over the whole package: what is said of a number of seconds that has passed is a time-out, or has the word."""
    assert issubclass(RefusedError, StoreTimeoutError)
    timeouts = {kind.__name__ for kind in [*TIMEOUTS, RefusedError]}
    package = Path(fscoord.__file__).parent
    said, found = [], set()
    for path in sorted(set(package.rglob("*.py")) - set(package.glob("doctor/*"))):  # whose errors reach no caller
        for name, words in errors_made(ast.parse(path.read_text(encoding="utf-8"))):
            found.add(name)
            if re.search(r"within \{[^}]*\} s|timed out|Timed out|in time\b", words):
                said.append(name)
                assert name in timeouts or "timeout" in words, f"{path}: {name}({words})"
    assert timeouts <= found
    assert len(said) > 10


@pytest.mark.parametrize("path", ["/shared/job.store", "", "a b", "it's", "$x;`y`", "\u00e9", '"', "\\"])
def test_command_in_a_message_is_quoted_as_the_shell_needs_it(path: str) -> None:
    assert closer_look(path) == f"; to look closer, run fscoord ps {shlex.quote(path)}"


@pytest.mark.parametrize("path", ["\u00e9\udcff1f", "a\nb", "it's \x1b\\", "\u202e"])
def test_path_that_can_not_be_printed_is_one_word_of_a_command_in_a_message(path: str) -> None:
    said = closer_look(path)
    assert said.isprintable()
    program = f'fscoord() {{ printf %s "$2"; }}; {said.removeprefix("; to look closer, run ")}'
    assert subprocess.run(["bash", "-c", program], capture_output=True, check=True).stdout == os.fsencode(path)
