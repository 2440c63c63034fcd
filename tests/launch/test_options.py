"""The options of `fscoord run`: torchrun's spellings and values, and what is refused. No worker starts here."""

from __future__ import annotations

import os
import sys

import click
import pytest

from fscoord.cli import run as verb
from fscoord.cli.run import run
from fscoord.launch import Outcome
from fscoord.launch.worker import find_accelerators


@pytest.fixture
def parsed(fscoord_in_process, monkeypatch):
    """Give `parsed(*words)`: the command and the options that `fscoord run` reads; nothing is started."""
    found = {}

    def record(command, options):
        found.update(vars(options), command=command)
        return Outcome(True, [])

    monkeypatch.setattr(verb, "_run", record)

    def parse(*words):
        found.clear()
        assert fscoord_in_process("run", *map(str, words)).code == 0
        return dict(found)

    return parse


@pytest.fixture
def refused(fscoord_in_process, capsys):
    """Give `refused(*words)`: the message with which `fscoord run` refuses them."""

    def refuse(*words):
        assert fscoord_in_process("run", *map(str, words)).code == 64
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return refuse


def long_options():
    return [name for option in run.params if isinstance(option, click.Option) for name in option.opts if "--" in name]


def test_options_may_all_be_spelled_with_underscores(fscoord_in_process, capsys):
    spelled = [name for name in long_options() if "-" in name[2:]]
    assert len(spelled) > 8
    for name in spelled:  # the option is known, so it is the missing program that is refused
        assert fscoord_in_process("run", "--" + name[2:].replace("-", "_")).code == 64
        assert "No such option" not in capsys.readouterr().err


def test_option_that_is_not_given_comes_from_the_environment(parsed, refused, monkeypatch):
    """The variables that Kubeflow's training operator sets."""
    for name, value in {"NNODES": "2:4", "NPROC_PER_NODE": "3", "MAX_RESTARTS": "5", "MASTER_ADDR": "a-0"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    found = parsed("--max-restarts", 1, "train.py")
    assert (found["nnodes"], found["nproc_per_node"], found["max_restarts"]) == ((2, 4), 3, 1)
    monkeypatch.setenv("PET_MAX_RESTARTS", "many")
    assert "max-restarts" in refused("train.py")


def test_options_may_be_abbreviated_as_far_as_they_are_clear(parsed, refused):
    options = parsed(
        "--nproc", 3, "--max-r=2", "--rdzv_i", "nproc", "--log-d", "logs", "--tee", "1", "prog", "--nproc", "9"
    )
    found = options["nproc_per_node"], options["max_restarts"], options["rdzv_id"], options["log_dir"]
    assert found == (3, 2, "nproc", "logs")
    assert options["command"] == ["prog", "--nproc", "9"]
    assert "No such option" in refused("--rdzv", "x", "prog")
    assert "there is no --node-rank" in refused("--node-r", "0", "prog")
    assert "No such option" in refused("--x", "prog")


def test_option_with_underscores_has_its_value_unchanged(parsed):
    found = parsed("--nproc_per_node=3", "--rdzv_endpoint=/a_b/c_d", "--max_restarts", 2, "x_y.py", "--an_option")
    assert (found["nproc_per_node"], found["rdzv_endpoint"], found["max_restarts"]) == (3, "/a_b/c_d", 2)
    assert found["command"][1:] == ["-u", "x_y.py", "--an_option"]


@pytest.mark.parametrize("word", ["--nproc-per-nodes", "--frobnicate", "-x"])
def test_unknown_option_is_refused_and_not_run_as_the_program(refused, word):
    line = refused(word, "train.py")
    assert line.startswith("fscoord: No such option")
    assert word.partition("=")[0] in line


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--start-method=fork"], "leave it out"),
        (["--run-path"], "leave it out"),
        (["--logs_specs", "mine"], "--log-dir"),
        (["--event-log-handler=null"], "--trace"),
        (["--numa-binding", "node"], "numactl"),
    ],
)
def test_options_of_torchrun_without_a_meaning_are_refused_with_what_to_use_instead(refused, words, instead):
    line = refused(*words, "train.py")
    assert f"there is no {words[0].partition('=')[0].replace('_', '-')}" in line
    assert instead in line


def test_filters_are_separated_by_commas_and_two_commas_are_one(parsed, refused):
    found = parsed("--tee", 3, "--duplicate_stdout_filters", "a,b,,c", "--duplicate-stderr-filters", "", "x")
    assert found["duplicate_stdout_filters"] == ["a", "b,c"]
    assert found["duplicate_stderr_filters"] == [""]
    assert "--tee 2" in refused("--tee", 1, "--duplicate-stderr-filters", "a", "x")


def test_virtual_local_rank_needs_a_gpu_for_each_worker(fscoord_in_process, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert fscoord_in_process("run", "--nproc-per-node", "3", "--virtual-local-rank", "true").code == 64
    assert "give --nproc-per-node 2" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--node-rank=1", "--node_rank=1", "--master-addr=node1", "--master-port=29500"])
def test_options_of_a_static_rendezvous_are_refused_with_what_to_write_instead(refused, word):
    line = refused("--nnodes", 2, word, "train.py")
    assert word.partition("=")[0].replace("_", "-") in line
    assert "--rdzv-endpoint" in line


def test_backends_of_torchrun_are_those_of_a_rendezvous_through_a_store(parsed, refused):
    for name in ("c10d", "fscoord"):
        assert parsed("--rdzv-backend", name, "--rdzv-conf", "join_timeout=5", "x")["rdzv_conf"] == {
            "join_timeout": "5"
        }
    for name in ("etcd", "etcd-v2"):
        found = parsed("--rdzv-backend", name, "--rdzv-endpoint", "h:2379", "x")
        assert found["rdzv_conf"]["store_type"] == "etcd"
    assert "number themselves" in refused("--rdzv-backend", "static", "x")
    assert "'c10d', 'etcd', 'etcd-v2', 'fscoord'" in refused("--rdzv-backend", "zookeeper", "x")


def test_backend_etcd_contradicts_another_store_type(refused):
    assert "store_type" in refused("--rdzv-backend", "etcd", "--rdzv-conf", "store_type=file", "x")


def test_workers_may_be_one_for_each_cpu(parsed):
    count = len(os.sched_getaffinity(0))
    assert parsed("--nproc-per-node", "cpu", "x")["nproc_per_node"] == count


@pytest.mark.parametrize(
    ("word", "counted", "found"),
    [("gpu", ("cuda", 4), 4), ("auto", ("cuda", 2), 2), ("auto", ("xpu", 3), 3), ("xpu", ("xpu", 3), 3)],
)
def test_workers_may_be_one_for_each_accelerator_that_torch_finds(parsed, monkeypatch, word, counted, found):
    monkeypatch.setattr(verb, "find_accelerators", lambda: counted)
    assert parsed("--nproc-per-node", word, "x")["nproc_per_node"] == found


@pytest.mark.parametrize(
    ("word", "counted"), [("gpu", ("", 0)), ("gpu", ("cpu", 0)), ("gpu", ("xpu", 2)), ("xpu", ("cuda", 2))]
)
def test_workers_for_accelerators_that_are_not_there_are_refused(refused, monkeypatch, word, counted):
    monkeypatch.setattr(verb, "find_accelerators", lambda: counted)
    kind, count = counted
    found = f"torch finds {count} of type {kind}" if count else "torch finds no accelerator"
    found = found if kind else "this Python has no torch"
    assert f"'--nproc-per-node': {word}: {found}" in refused("--nproc-per-node", word, "x")


@pytest.mark.parametrize("counted", [("", 0), ("cpu", 0)])
def test_workers_are_one_for_each_cpu_where_there_is_no_accelerator(parsed, monkeypatch, counted):
    monkeypatch.setattr(verb, "find_accelerators", lambda: counted)
    assert parsed("--nproc-per-node", "auto", "x")["nproc_per_node"] == len(os.sched_getaffinity(0))


def test_torch_is_asked_in_a_process_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(
        "class accelerator:\n"
        "    is_available = staticmethod(lambda: True)\n"
        "    current_accelerator = staticmethod(lambda: type('device', (), {'type': 'cuda'}))\n"
        "    device_count = staticmethod(lambda: 8)\n"
        "print('noise of the import')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert find_accelerators() == ("cuda", 8)
    assert "torch" not in sys.modules
    (tmp_path / "torch.py").write_text("raise ImportError('broken')\n")
    assert find_accelerators() == ("", 0)


@pytest.mark.parametrize("word", ["0", "-1", "x", "1.5", "GPU", ""])
def test_number_of_workers_that_makes_no_sense_is_refused(refused, word):
    assert "auto, cpu, gpu or xpu" in refused(f"--nproc-per-node={word}", "x")


def test_unknown_options_of_the_rendezvous_are_refused_with_the_known_ones(refused):
    line = refused("--rdzv-conf", "join_timeout=5,lastcall_timeout=3", "x")
    assert "'lastcall_timeout'" in line
    assert "last_call_timeout" in line
    assert "'join_timeout'" not in line


def test_grace_is_torchruns_shutdown_timeout(parsed):
    assert parsed("--shutdown-timeout", 7, "x")["grace"] == 7


def test_local_ranks_filter_is_a_list_of_local_ranks(parsed, refused):
    assert parsed("--local-ranks-filter", "0,2", "x")["local_ranks_filter"] == {0, 2}
    assert parsed("x")["local_ranks_filter"] is None
    assert "local ranks" in refused("--local-ranks-filter", "0,x", "x")


def test_options_after_the_program_belong_to_the_program(parsed):
    assert parsed("x.py", "--unknown", "-m", "--nnodes", "7")["command"][2:] == [
        *("x.py", "--unknown", "-m", "--nnodes", "7")
    ]
    assert parsed("--", "-odd", "--x")["command"] == ["-odd", "--x"]


def test_program_is_run_by_python_unless_told_otherwise(parsed):
    assert parsed("x.py")["command"] == [sys.executable, "-u", "x.py"]
    assert parsed("-m", "x")["command"] == [sys.executable, "-u", "-m", "x"]
    assert parsed("--no-python", "x.py")["command"] == ["x.py"]
    assert parsed("x")["command"] == ["x"]


def test_module_contradicts_no_python(refused):
    assert "--no-python" in refused("--no-python", "-m", "x")


def test_signals_are_named_as_by_torchrun_or_as_by_a_shell(parsed, refused):
    assert parsed("x")["signals_to_handle"] == ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    assert parsed("--signals-to-handle=SIGTERM,usr1", "x")["signals_to_handle"] == ("SIGTERM", "SIGUSR1")
    assert parsed("--forward-signals", "USR1,SIGUSR2", "x")["forward_signals"] == ("SIGUSR1", "SIGUSR2")
    for word in ("SIGNONE", "KILL", "SIGSTOP", "TERM,", "12"):
        assert "is not the name of a signal that a process can handle" in refused(f"--forward-signals={word}", "x")
    line = refused("--forward-signals", "USR1,TERM", "x")
    assert "SIGTERM is in --forward-signals and in --signals-to-handle: give it once" in line
