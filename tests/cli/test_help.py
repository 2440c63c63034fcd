"""The help of the command."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import fscoord as package
from fscoord import FileStore, StoreTimeoutError, barrier
from fscoord.cli.app import OTHER_NAMES, VERBS as SUBJECTS, cli
from fscoord.recipes import Election, Lock, Membership, Queue, once

VERBS = sorted(cli.commands)
DOCS = Path(__file__).parent.parent.parent / "docs"


def test_verbs_are_those_of_the_design():
    assert set(VERBS) == {
        *("get", "set", "add", "cas", "append", "delete", "wait", "keys", "barrier", "push", "pop", "len", "dump"),
        "create",
        *("verify", "repair", "cp", "compact", "members", "ps", "top", "demo", "doctor", "run", "trace", "completion"),
        *(
            "put-item",
            "take-item",
            "work",
            "items",
            "lock",
            "rwlock",
            "sem",
            "rate",
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


def test_help_lists_the_verbs_by_subject_before_options_and_exit_codes(fscoord):
    text = fscoord("--help").out.decode()
    heads = [f"\n{head}:\n" for head in (*SUBJECTS, "Options", "  Exit codes")]
    places = [text.find(head) for head in heads]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["help"], "'fscoord --help'"),
        (["help", "lock"], "'fscoord lock --help'"),
        (["version"], "'fscoord --version'"),
        (["ls"], "'fscoord keys'"),
        (["list"], "'fscoord keys'"),
        (["cat", "key"], "'fscoord get KEY'"),
        (["unlock", "name"], "'fscoord break-lock NAME'"),
        (["status"], "'fscoord ps'"),
        (["rm", "key"], "'fscoord delete'"),
        (["queue", "q"], "'fscoord len QUEUE' or 'fscoord items QUEUE'"),
        (["semaphore", "-j", "2"], "'fscoord sem'"),
        (["put", "key", "value"], "'fscoord set KEY VALUE' or 'fscoord put-item QUEUE VALUE'"),
    ],
)
def test_verb_of_other_commands_is_answered_with_what_to_type(fscoord, words, instead):
    done = fscoord(*words)
    assert (done.code, done.out) == (64, b"")
    hint = "" if instead.endswith("--help'") else " ('fscoord --help' explains)"
    assert done.err == f"fscoord: there is no verb '{words[0]}': type {instead}{hint}\n"
    for verb in re.findall(r"fscoord ([\w-]+)", instead):
        assert verb in VERBS or verb.startswith("--")


def test_words_of_other_commands_stand_for_verbs_that_are_there():
    assert set(OTHER_NAMES) & set(VERBS) == set()
    assert {text.partition(" ")[0] for text in OTHER_NAMES.values()} <= {*VERBS, "--help", "--version"}


@pytest.mark.parametrize("words", [["-n", "PATH", "echo", "done"], ["PATH", "-c", "echo done"]])
def test_order_of_flock_is_answered_with_the_line_to_type(fscoord, process, tmp_path, monkeypatch, words):
    monkeypatch.delenv("FSCOORD_STORE")
    place = str(tmp_path / "my.lock")
    done = fscoord("lock", *(place if word == "PATH" else word for word in words))
    assert (done.code, done.out) == (64, b"")
    assert not Path(place).exists()
    line = re.search(r"Type: fscoord (lock --store .*?) \(", done.err)
    assert line is not None
    out, said = process(*shlex.split(line[1])).communicate()
    assert (out, said) == (b"done\n", b"")


def test_name_of_a_lock_that_is_no_path_is_not_taken_for_the_order_of_flock(fscoord, monkeypatch):
    monkeypatch.delenv("FSCOORD_STORE")
    assert "Give --store URL" in fscoord("lock", "main", "ls").err


def test_help_of_members_has_a_line_for_each_state(fscoord):
    text = fscoord("members", "--help").out.decode()
    assert re.findall(r"^ {6}(\S.*?)  +\S", text, re.MULTILINE) == ["alive", "ended", "dead, found TIME", "unknown"]


@pytest.mark.parametrize("verb", VERBS)
def test_option_that_takes_a_time_says_its_unit_and_its_default(fscoord, verb):
    text = fscoord(verb, "--help").out.decode().partition("\nOptions:\n")[2]
    options = re.split(r"^  (?=-)", text, flags=re.MULTILINE)[1:]
    timed = [option for option in options if re.match(r"(-\w, )?--(timeout|wait|grace|interval|slow|ttl)\b", option)]
    assert all("SECONDS" in option and "[default:" in " ".join(option.split()) for option in timed)


def test_command_without_a_verb_is_a_usage_error_that_shows_the_help(fscoord):
    done = fscoord()
    assert (done.code, done.out) == (64, b"")
    assert done.err == fscoord("--help").out.decode()


def test_version_is_that_of_the_package(fscoord):
    for option in ("--version", "-V"):
        assert fscoord(option) == (0, f"fscoord {package.__version__}\n".encode(), "")


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


@pytest.fixture
def completed(fscoord, monkeypatch):
    """Give `completed(*words)`: the type and text of each word that is offered for the last of `words`."""

    def call(*words, store=None):
        line = " ".join(["fscoord", *words])
        variables = {"_FSCOORD_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
        if store is not None:
            variables["FSCOORD_STORE"] = store
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            fscoord()
        assert (ended.value.code, sys.stderr.buffer.getvalue()) == (0, b"")
        return sys.stdout.buffer.getvalue().decode().split()

    return call


@pytest.fixture
def filled(path):
    """A store with keys, and with something of each recipe."""
    with FileStore(path) as store:
        store.multi_set(["phase", "progress/0", "progress/1", "bad\nname"], ["v"] * 4)
        with Lock(store, "backup"), Election(store, "front"), Membership(store, "workers"):
            pass
        Queue(store, "shards").put("x")
        for queue in ("work", "spent", "gone", "bad\nqueue"):
            store.queue_push(queue, "x")
        store.queue_pop("spent")
        store.delete_key("gone")
        once(store, "dataset", lambda: b"x")
        with pytest.raises(StoreTimeoutError):
            barrier(store, 2, "loaded", 0, rank=0)
    return path


SHARDS = ["bell", "item/80000000-0000000000000000", "number"]
"""The keys of the queue "shards" of items."""


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        (["get", "p"], ["phase", "progress/0", "progress/1"]),
        (["delete", "phase", "pro"], ["progress/0", "progress/1"]),
        (["watch", "ph"], ["phase"]),
        (["lock", "b"], ["backup"]),
        (["break-lock", "f"], ["front"]),
        (["leader", ""], ["front"]),
        (["group", ""], ["workers"]),
        (["items", ""], ["shards"]),
        (["take-item", "sh"], ["shards"]),
        (["put-item", ""], ["shards"]),
        (["work", "--failed", "x", ""], ["shards"]),
        (["take-item", "--failed", ""], ["shards"]),
        (["push", ""], ["spent", "work"]),
        (["pop", "w"], ["work"]),
        (["len", ""], ["spent", "work"]),
        (["delete", "phase", "s"], [*(f"shards/{key}" for key in SHARDS), "spent"]),
        (["wait", "sp"], ["spent"]),
        (["once", ""], ["dataset"]),
        (["barrier", "-n", "2", ""], ["loaded"]),
        (["get", "bad"], []),
    ],
    ids=lambda value: "-".join(value),
)
def test_keys_and_names_of_the_store_are_completed(completed, filled, words, offers):
    assert completed(*words) == [f"plain,{offer}" for offer in offers]


def test_queues_are_completed_after_a_compaction(completed, path):
    with FileStore(path) as store:
        for queue in ("work", "spent"):
            store.queue_push(queue, "x")
        store.queue_pop("spent")
        store.compact()
        store.queue_push("later", "x")
    assert completed("pop", "") == ["plain,later", "plain,work"]


def test_completion_reads_the_store_of_the_command_line(completed, filled, tmp_path):
    assert completed("get", "--store", filled, "ph", store=f"{tmp_path}/none") == ["plain,phase"]
    assert completed("--store", f"file:{filled}", "get", "ph", store=f"{tmp_path}/none") == ["plain,phase"]


@pytest.mark.parametrize("store", ["none", "text", "tcp://127.0.0.1:1", "nonsense:x", ""])
def test_store_that_cannot_be_read_offers_nothing_says_nothing_and_is_not_made(completed, tmp_path, store):
    (tmp_path / "text").write_text("hello")
    address = f"{tmp_path}/{store}" if store in ("none", "text") else store
    assert completed("get", "k", store=address) == []
    assert completed("pop", "k", store=address) == []
    assert [file.name for file in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(
    "words",
    [["verify", "x"], ["cp", "a", "x"], ["ps", "x"], ["top", "x"], ["get", "--store", "x"], ["repair", "-o", "x"]],
)
def test_paths_are_completed_as_files(completed, words):
    assert completed(*words) == ["file,x"]


@pytest.mark.parametrize("words", [["doctor", "x"], ["trace", "report", "x"]])
def test_directories_are_completed_as_such(completed, words):
    assert completed(*words) == ["dir,x"]


def test_subcommands_are_completed(completed):
    assert completed("trace", "re") == ["plain,report"]


def test_verbose_option_logs_to_standard_error_before_and_behind_the_verb(fscoord):
    fscoord("set", "k", "v")
    assert fscoord("get", "k").err == ""
    assert "fscoord: waiting for 'k'" in fscoord("get", "-v", "k").err
    assert fscoord("get", "-v", "k").out == b"v"
    assert "Traceback" in fscoord("-v", "get", "-v", "--timeout", "0", "other").err


def test_documentation_shows_every_verb_and_exit_code():
    verbs = re.findall(r"^\| `([\w-]+)", (DOCS / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(VERBS) <= set(verbs)
    codes = re.findall(r"^ +(\d+)  ", cli.epilog, re.MULTILINE)
    assert codes == ["0", "1", "64", "65", "69", "70", "74", "75", "77", "130"]
    assert codes == re.findall(r"^\| (\d+) \|", (DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_verb_loads_nothing_that_the_demo_alone_needs():
    code = (
        "import sys; from fscoord.cli import app; print(*[name for name in ('rich', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"\n"
