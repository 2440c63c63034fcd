"""The programs in examples/ do what they say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fscoord

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
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


def test_batch_script_starts_an_agent_on_each_node(tmp_path):
    """`srun` stands here for one that starts two tasks, each on a node of its own as far as its environment says.

    The script is run as Slurm does: a copy of it, in a directory where nothing else is.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "spool").mkdir()
    script = shutil.copy(EXAMPLES / "job.sbatch", tmp_path / "spool" / "slurm_script")
    srun = tmp_path / "bin" / "srun"
    srun.write_text(
        "#!/bin/bash\n"
        "for task in 0 1; do SLURM_PROCID=$task SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2"
        ' "$@" & tasks="$tasks $!"; done\n'
        "for task in $tasks; do wait $task || exit; done\n"
    )
    fscoord_command = tmp_path / "bin" / "fscoord"
    fscoord_command.write_text(f'#!/bin/bash\nexec {sys.executable} -m fscoord "$@"\n')
    for path in (srun, fscoord_command):
        path.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FSCOORD_"))}
    environment = {
        **kept,
        "PATH": f"{tmp_path / 'bin'}:{kept['PATH']}",
        "PYTHONPATH": str(Path(fscoord.__file__).parent.parent),
        "TMPDIR": str(tmp_path),
        "USER": "someone",
        "SLURM_JOB_ID": "7",
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
