"""The programs in examples/ do what they say."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pages
import pytest
from launch.conftest import PATIENCE_S

import fscoord
from fscoord.testing.contract.place import until

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
HOW_TO = EXAMPLES.parent / "docs" / "how-to" / "launchers.md"
ENDED = suppress(FileNotFoundError, ProcessLookupError)  # a process that ends while /proc shows it raises either
COUNTS = ["[0] 3 the", "[0] 2 cat", "[0] 1 dog", "[0] 1 saw"]


def make_texts(directory):
    (directory / "texts").mkdir()
    (directory / "texts" / "one.txt").write_text("The cat saw the dog")
    (directory / "texts" / "two.txt").write_text("the CAT")
    return directory / "texts"


def test_example_counts_words_on_two_nodes(launch, tmp_path):
    words = ("--nnodes", 2, "--nproc-per-node", 2, "--rdzv-endpoint", tmp_path / "job", EXAMPLES / "word_count.py")
    runs = [launch(*words, make_texts(tmp_path) if not n else tmp_path / "texts") for n in range(2)]
    ends = [run.end() for run in runs]
    assert [code for code, _, _ in ends] == [0, 0]
    assert sorted(out.splitlines() for _, out, _ in ends) == [[], COUNTS]


def test_example_service_is_found_by_all_ranks(launch):
    words = ("--nproc-per-node", 3, "--local-addr", "127.0.0.1", EXAMPLES / "service.py")
    code, out, _ = launch(*words).end()
    assert code == 0
    assert sorted(out.splitlines()) == ["[1] hello, rank 1", "[2] hello, rank 2"]


def test_example_of_many_nodes_meets_twice_in_one_directory(launch, tmp_path):
    """The second job finds the logs of the first."""
    for number in range(2):
        words = ("--nnodes", 3, "--nproc-per-node", 2, "--rdzv-endpoint", tmp_path / f"job{number}")
        runs = [launch(*words, "--rdzv-id", number, EXAMPLES / "many_nodes.py", tmp_path, 1) for _ in range(3)]
        ends = [run.end() for run in runs]
        assert [code for code, _, _ in ends] == [0, 0, 0], ends
        assert sorted(out for _, out, _ in ends) == ["", "", "[0] 6 ranks have finished 3 steps\n"]
    assert {path.name for path in tmp_path.glob("group-?")} == {"group-0", "group-1", "group-2"}


@pytest.fixture
def slurm(tmp_path):
    """Give the environment of a batch script, with stand-ins for programs of Slurm.

    `srun` starts two tasks, each on a node of its own as far as its environment says. `scontrol` writes its arguments
    to a file.
    """
    programs = {
        "srun": "for task in 0 1; do SLURM_PROCID=$task SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2"
        ' "$@" & tasks="$tasks $!"; done\n'
        "for task in $tasks; do wait $task || exit; done",
        "fscoord": f'exec {sys.executable} -m fscoord "$@"',
        "scontrol": f'echo "$@" >> {tmp_path}/scontrol',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FSCOORD_"))}
    return {
        **kept,
        "PATH": f"{tmp_path / 'bin'}:{kept['PATH']}",
        "PYTHONPATH": str(Path(fscoord.__file__).parent.parent),
        "TMPDIR": str(tmp_path),
        "USER": "someone",
        "SLURM_JOB_ID": "7",
    }


def test_batch_script_starts_an_agent_on_each_node(tmp_path, slurm):
    """The script is run as Slurm does: a copy of it, in a directory where nothing else is."""
    (tmp_path / "spool").mkdir()
    script = shutil.copy(EXAMPLES / "job.sbatch", tmp_path / "spool" / "slurm_script")
    environment = {
        **slurm,
        "SLURM_SUBMIT_DIR": str(EXAMPLES),
        "JOB_DIRECTORY": str(tmp_path),
        "WORKERS": "1",
        "TEXTS": str(make_texts(tmp_path)),
    }

    def batch(**variables):
        given = {**environment, **variables}
        return subprocess.run(
            ["bash", script], env=given, cwd="/", capture_output=True, text=True, timeout=200, check=False
        )

    done = batch()
    assert (done.returncode, done.stdout.splitlines()) == (0, COUNTS), done.stderr
    assert (tmp_path / "job-7.store").exists()
    done = batch(SLURM_SUBMIT_DIR="/", PROGRAM=str(EXAMPLES / "word_count.py"), SLURM_JOB_ID="8")
    assert (done.returncode, done.stdout.splitlines()) == (0, COUNTS), done.stderr
    done = batch(SLURM_SUBMIT_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (
        66,
        f"no {tmp_path}/word_count.py: call sbatch beside it, or set PROGRAM to its path\n",
    )


def test_checkpoint_of_the_how_to_is_resumed_by_the_requeued_job(tmp_path, slurm):
    """The test sends SIGUSR1 as Slurm does: to all processes that `srun` has started, when all workers run."""
    texts = [block.text for block in pages.blocks(HOW_TO)]
    (batch,) = [text for text in texts if "scontrol requeue" in text and text.startswith("#!")]
    (program,) = [text for text in texts if text.startswith("# requeued.py")]
    (tmp_path / "job.sbatch").write_text(batch.replace("/scratch/$USER", str(tmp_path)))
    (tmp_path / "requeued.py").write_text(program)
    kept = tmp_path / "checkpoints"

    def start(**variables):
        return subprocess.Popen(["bash", "job.sbatch"], env={**slurm, **variables}, cwd=tmp_path)

    with start(STEPS="1000000000") as job, killed_at_the_end(job):
        until(lambda: handlers(job.pid) == 2)
        for pid in descendants(job.pid):
            with ENDED:
                if b"srun" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGUSR1)
        assert job.wait(PATIENCE_S) == 0
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"
    (step,) = {int((kept / f"rank{rank}").read_text()) for rank in range(2)}
    assert not (kept / "done").exists()
    with start(STEPS=str(step + 3), SLURM_RESTART_COUNT="1") as job, killed_at_the_end(job):
        assert job.wait(PATIENCE_S) == 0
    assert {int((kept / f"rank{rank}").read_text()) for rank in range(2)} == {step + 3}
    assert (kept / "done").exists()
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"


@contextmanager
def killed_at_the_end(job):
    """At the end of the body, kill what the job still has running."""
    try:
        yield
    finally:
        for pid in {job.pid, *descendants(job.pid)} if job.poll() is None else ():
            with ENDED:
                os.kill(pid, signal.SIGKILL)


def handlers(pid):
    """Return how many workers below the process `pid` have a handler of SIGUSR1."""
    count = 0
    for each in descendants(pid):
        with ENDED:
            words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
            if b"requeued.py" in words[:3]:  # a worker: its launcher has more words
                (caught,) = re.findall(r"^SigCgt:\s(\w+)$", Path(f"/proc/{each}/status").read_text(), re.MULTILINE)
                count += int(caught, 16) >> (signal.SIGUSR1 - 1) & 1
    return count


def descendants(pid):
    found = [pid]
    for each in found:
        with ENDED:
            for task in list(Path(f"/proc/{each}/task").iterdir()):
                with ENDED:  # the thread
                    found += map(int, (task / "children").read_text().split())
    return set(found[1:])
