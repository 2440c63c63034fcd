"""The job scripts of the page on launchers, run with stand-ins for the programs of the launchers.

A stand-in starts the ranks here, each with the variables that the launcher's manual names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pages
import pytest

import fscoord

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "launchers.md"
BLOCKS = [block.text for block in pages.blocks(PAGE)]
SCRIPTS = {text.splitlines()[1].removeprefix("# "): text for text in BLOCKS if text.startswith("#!/bin/bash\n# ")}

RANKS = 'for r in 0 1 2 3; do {variables} "$@" & ranks="$ranks $!"; done; for r in $ranks; do wait $r || exit; done'
OPEN_MPI = RANKS.format(variables="OMPI_COMM_WORLD_RANK=$r OMPI_COMM_WORLD_SIZE=4")
CASES = {
    "job.pbs": ({"PBS_JOBID": "7.server", "PBS_O_WORKDIR": "."}, {"mpiexec": OPEN_MPI}),
    "agents.pbs": (
        {"PBS_JOBID": "7.server", "PBS_O_WORKDIR": "."},
        {"pbsdsh": 'shift; for n in 0 1; do "$@" & nodes="$nodes $!"; done; for n in $nodes; do wait $n || exit; done'},
    ),
    "job.lsf": (
        {"LSB_JOBID": "7", "LSB_JOBINDEX": "0"},
        {"jsrun": "shift 4; " + RANKS.format(variables="JSM_NAMESPACE_RANK=$r JSM_NAMESPACE_SIZE=4")},
    ),
    "job.flux": (
        {"FLUX_JOB_ID": "f7"},
        {"flux": "shift 3; " + RANKS.format(variables="FLUX_TASK_RANK=$r FLUX_JOB_SIZE=4")},
    ),
    "job.sge": (
        {"JOB_ID": "7", "SGE_TASK_ID": "undefined", "NSLOTS": "4"},
        {"mpirun": "shift 2; " + RANKS.format(variables="PMI_RANK=$r PMI_SIZE=4")},
    ),
}


def test_page_has_a_case_for_each_script() -> None:
    assert set(SCRIPTS) == {*CASES, "agent.sh", "job.sbatch"}  # test_examples runs the last one


@pytest.mark.parametrize("name", CASES)
def test_script_starts_the_ranks_of_one_job(name: str, tmp_path: Path) -> None:
    variables, programs = CASES[name]
    (tmp_path / "bin").mkdir()
    programs = {
        **programs,
        "python": f'exec {sys.executable} "$@"',
        "fscoord": f'exec {sys.executable} -m fscoord "$@"',
    }
    for program, text in programs.items():
        (tmp_path / "bin" / program).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / program).chmod(0o755)
    for script, text in SCRIPTS.items():
        (tmp_path / script).write_text(text.replace("/scratch/$USER", str(tmp_path)))
        (tmp_path / script).chmod(0o755)
    (program,) = [text for text in BLOCKS if text.startswith("# train.py")]
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "nodes").write_text("one\ntwo\none\n")
    done = subprocess.run(
        ["bash", name],
        env={
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(fscoord.__file__).parent.parent),
            "TMPDIR": str(tmp_path),
            "PBS_NODEFILE": str(tmp_path / "nodes"),
            **variables,
        },
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.removeprefix("[0] ") for line in done.stdout.splitlines()] == ["4 processes, hosts: 1"]


def test_pod_of_an_indexed_job_finds_its_rank() -> None:
    (manifest,) = [text for text in BLOCKS if "completionMode: Indexed" in text]
    assert 'command: ["sh", "-c", "RANK=$JOB_COMPLETION_INDEX exec python train.py"]' in manifest
    show = "from fscoord.environment import detect as d; print(d().rank, d().world_size, d().run_id)"
    said = subprocess.run(
        ["sh", "-c", f"RANK=$JOB_COMPLETION_INDEX exec {sys.executable} -c '{show}'"],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(fscoord.__file__).parent.parent),
            "JOB_COMPLETION_INDEX": "2",
            "WORLD_SIZE": "4",
            "FSCOORD_RUN_ID": "0f-1e",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout == "2 4 0f-1e\n"
