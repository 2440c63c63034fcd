"""The help of the command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fscoord as package
from fscoord.cli.app import cli

VERBS = sorted(cli.commands)
DOCS = Path(__file__).parent.parent.parent / "docs"


def test_verbs_are_those_of_the_design():
    assert set(VERBS) == {
        *("get", "set", "add", "cas", "append", "delete", "wait", "keys", "barrier", "push", "pop", "len", "dump"),
        *("verify", "repair", "cp", "compact", "members", "ps", "top", "demo", "doctor", "run", "trace", "completion"),
        *(
            "put",
            "take",
            "items",
            "lock",
            "rwlock",
            "sem",
            "holders",
            "break-lock",
            "elect",
            "leader",
            "once",
            "watch",
            "join",
            "group",
        ),
    }


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_all_have_help_with_examples(fscoord, verb):
    done = fscoord(verb, "--help")
    assert (done.code, done.err) == (0, "")
    text = done.out.decode()
    assert text.startswith(f"Usage: fscoord {verb} ")
    assert re.search(rf"Examples:\n(.*\n)*? +.*fscoord {verb}\b", text)
    assert fscoord(verb, "-h") == done


@pytest.mark.parametrize("verb", VERBS)
def test_verb_is_summed_up_in_one_whole_sentence(fscoord, verb):
    (line,) = re.findall(rf"^  {verb} +(.*)$", fscoord("--help").out.decode(), re.MULTILINE)
    assert line.endswith(".")
    assert not line.endswith("...")


def test_command_without_a_verb_is_a_usage_error_that_shows_the_help(fscoord):
    done = fscoord()
    assert (done.code, done.out) == (64, b"")
    assert done.err == fscoord("--help").out.decode()


def test_version_is_that_of_the_package(fscoord):
    assert fscoord("--version") == (0, f"fscoord {package.__version__}\n".encode(), "")


def test_script_and_module_are_one_command(process):
    script = Path(sys.executable).with_name("fscoord")
    out, _ = process("--version").communicate()
    if script.exists():  # not where the tests run from a checkout that is not installed
        assert subprocess.run([script, "--version"], capture_output=True, check=True).stdout == out
    assert out == f"fscoord {package.__version__}\n".encode()


@pytest.mark.parametrize("shell", ["zsh", "fish", "bash"])
def test_shells_each_get_their_completion_script(fscoord, shell):
    done = fscoord("completion", shell)
    assert done.code == 0
    assert f"_FSCOORD_COMPLETE={shell}_complete".encode() in done.out
    assert b"fscoord" in done.out


def test_completion_completes_verbs(process):
    child = process(env={"_FSCOORD_COMPLETE": "bash_complete", "COMP_WORDS": "fscoord ba", "COMP_CWORD": "1"})
    out, _ = child.communicate()
    assert (child.returncode, out) == (0, b"plain,barrier\n")


def test_verbose_option_logs_to_standard_error_before_and_behind_the_verb(fscoord):
    fscoord("set", "k", "v")
    assert fscoord("get", "k").err == ""
    assert "fscoord: waiting for b'k'" in fscoord("get", "-v", "k").err
    assert fscoord("get", "-v", "k").out == b"v"
    assert "Traceback" in fscoord("-v", "get", "-v", "--timeout", "0", "other").err


def test_documentation_shows_every_verb_and_exit_code():
    verbs = re.findall(r"^\| `([\w-]+)", (DOCS / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(VERBS) <= set(verbs)
    codes = re.findall(r"^ +(\d+)  ", cli.help, re.MULTILINE)
    assert codes == ["0", "1", "64", "65", "69", "70", "74", "75", "77", "130"]
    assert codes == re.findall(r"^\| (\d+) \|", (DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_verb_loads_nothing_that_the_demo_alone_needs():
    code = (
        "import sys; from fscoord.cli import app; print(*[name for name in ('rich', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"\n"
