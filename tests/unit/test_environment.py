"""The variables of launchers in the environment, and which of them count."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fscoord.environment import Environment, detect, rank_and_world_size

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_SIZE": "9",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_RANK": "6",
    "PMIX_NAMESPACE": "prterun-node1-77@1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "4",
    "MV2_COMM_WORLD_SIZE": "6",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "PMI_RANK": "4",
    "PMI_SIZE": "6",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "9",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "3",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "PMIX_RANK": "9",
    "PMIX_NAMESPACE": "jsm",
    "LSB_JOBID": "777",
    "LSB_JOBINDEX": "0",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"}
PMIX = {"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-node1-77@1"}
PALS = {"PALS_RANKID": "7", "PALS_LOCAL_RANKID": "3", "PALS_LOCAL_SIZE": "4", "PALS_APID": "f3c0"}
FLUX = {"FLUX_TASK_RANK": "2", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_ID": "f2Bk7"}
JOB = {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "16", "SLURM_TASKS_PER_NODE": "8(x2)"}
BATCH = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = JOB | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
XDIST = {"PYTEST_XDIST_WORKER": "gw1", "PYTEST_XDIST_WORKER_COUNT": "3", "PYTEST_XDIST_TESTRUNUID": "cafe"}


def found(variables: dict[str, str]) -> tuple[Any, ...]:
    """All that was found but where and what was ignored."""
    return dataclasses.astuple(dataclasses.replace(detect(variables), sources={}, ignored=()))[:6]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (None, None, None, None, None, None)),
        (TORCHRUN, ("torchrun", 5, 8, 1, 4, None)),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "job7"}, ("torchrun", 5, 8, 1, 4, "job7")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 1, None, None, None)),
        (OPEN_MPI, ("Open MPI", 6, 9, 2, 3, None)),
        (HYDRA, ("PMI", 3, 5, 1, 2, None)),
        ({"PMI_RANK": "3", "PMI_SIZE": "5"}, ("PMI", 3, 5, None, None, None)),
        (PMIX, ("PMIx", 3, None, None, None, None)),
        (PALS, ("PALS", 7, None, 3, 4, "f3c0")),
        (PALS | {"PMI_RANK": "7", "PMI_SIZE": "12"}, ("PMI", 7, 12, 3, 4, "f3c0")),
        (FLUX, ("Flux", 2, 4, 0, None, "f2Bk7")),
        (FLUX | {"PMI_RANK": "2", "PMI_SIZE": "4"}, ("PMI", 2, 4, 0, None, "f2Bk7")),
        (STEP, ("Slurm", 4, 7, 0, 2, ("1234", 0))),
        (STEP | {"SLURM_RESTART_COUNT": "2"}, ("Slurm", 4, 7, 0, 2, ("1234", 2))),
        (STEP | {"SLURM_HET_JOB_ID": "1230"}, ("Slurm", 4, 7, 0, 2, ("1230", 0))),
        (STEP | {"PMI_RANK": "4", "PMI_SIZE": "7"}, ("PMI", 4, 7, 0, 2, ("1234", 0))),
        (STEP | {"PMIX_RANK": "4", "PMIX_NAMESPACE": "slurm.pmix.1234.0"}, ("Slurm", 4, 7, 0, 2, ("1234", 0))),
        (STEP | {"PMI_RANK": "4", "PMI_SIZE": "5"}, ("PMI", 4, 5, None, None, ("1234", 0))),
        (MVAPICH, ("MVAPICH", 4, 6, 0, 2, None)),
        (
            {name.replace("MV2_", "MVP_"): value for name, value in MVAPICH.items()},
            ("MVAPICH", 4, 6, 0, 2, None),
        ),
        (JSRUN, ("jsrun", 9, 12, 3, 6, "777")),
        (JSRUN | {"LSB_JOBINDEX": "5"}, ("jsrun", 9, 12, 3, 6, "777[5]")),
        (INDEXED_JOB, ("Kubernetes", 2, None, None, None, None)),
        (INDEXED_JOB | {"FSCOORD_RUN_ID": "uid"}, ("Kubernetes", 2, None, None, None, "uid")),
        (INDEXED_JOB | TORCHRUN, ("torchrun", 5, 8, 1, 4, None)),
        (HYDRA | {"JOB_ID": "42", "SGE_TASK_ID": "undefined"}, ("PMI", 3, 5, 1, 2, "42")),
        (HYDRA | {"JOB_ID": "42", "SGE_TASK_ID": "7"}, ("PMI", 3, 5, 1, 2, "42[7]")),
        (HYDRA | {"JOB_ID": "42"}, ("PMI", 3, 5, 1, 2, None)),
        (HYDRA | {"PBS_JOBID": "12[3].server"}, ("PMI", 3, 5, 1, 2, "12[3].server")),
        (STEP | {"FSCOORD_RUN_ID": "mine"}, ("Slurm", 4, 7, 0, 2, "mine")),
        (TORCHRUN | {"FSCOORD_RUN_ID": "none"}, ("torchrun", 5, 8, 1, 4, None)),
        (
            STEP | TORCHRUN | {"FSCOORD_RUN_ID": "7", "TORCHELASTIC_RUN_ID": "7"},
            ("torchrun", 5, 8, 1, 4, ("1234", 0)),
        ),
        (XDIST, ("pytest-xdist", 1, 3, 1, 3, "cafe")),
        (BATCH | XDIST, ("pytest-xdist", 1, 3, 1, 3, "cafe")),
    ],
    ids=str,
)
def test_launcher_of_each_kind_is_understood(variables: dict[str, str], expected: tuple[Any, ...]) -> None:
    assert found(variables) == expected


@pytest.mark.parametrize(
    ("nearer", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (OPEN_MPI, "Open MPI"),
        (MVAPICH, "MVAPICH"),
        (HYDRA, "PMI"),
        (PMIX, "PMIx"),
        (PALS, "PALS"),
        (FLUX, "Flux"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_process_started_inside_a_step_does_not_take_the_rank_of_the_daemon(
    nearer: dict[str, str], launcher: str
) -> None:
    within = detect(STEP | nearer)
    alone = detect(nearer)
    assert within.launcher == launcher
    for name in ("rank", "world_size", "local_rank", "local_world_size"):
        assert getattr(within, name) == getattr(alone, name)
        assert "SLURM" not in within.sources.get(name, "")


def test_torchrun_inside_any_launcher_counts() -> None:
    assert found(XDIST | STEP | FLUX | PALS | HYDRA | OPEN_MPI | TORCHRUN)[:5] == ("torchrun", 5, 8, 1, 4)


def test_torchrun_under_slurm_has_the_run_of_the_job_despite_worker_restarts() -> None:
    environment = detect(STEP | TORCHRUN | {"TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_RESTART_COUNT": "5"})
    assert environment.run_id == ("1234", 0)


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290"}], ids=str)
def test_batch_script_and_interactive_shell_have_a_run_but_no_rank(step: dict[str, str]) -> None:
    environment = detect(BATCH | step)
    assert (environment.rank, environment.world_size, environment.run_id) == (None, None, ("1234", 0))
    assert "srun" in environment.ignored[0]


@pytest.mark.parametrize("half", [{"RANK": "3"}, {"WORLD_SIZE": "3"}, {"RANK": "3", "WORLD_SIZE": ""}], ids=str)
def test_launcher_that_gives_half_of_an_answer_is_ignored_and_reported(half: dict[str, str]) -> None:
    environment = detect(half | XDIST)
    assert environment.launcher == "pytest-xdist"
    assert "RANK" in environment.ignored[0]
    assert "WORLD_SIZE" in environment.ignored[0]


def test_worker_that_replaces_a_crashed_one_has_no_rank() -> None:
    environment = detect(XDIST | {"PYTEST_XDIST_WORKER": "gw3"})
    assert environment.rank is None
    assert "crashed" in environment.ignored[0]


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "²", "WORLD_SIZE": "2"}, "RANK="),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_WORLD_SIZE"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE"),
        (STEP | {"SLURM_NODEID": "4"}, "SLURM_NODEID"),
        (STEP | {"SLURM_RESTART_COUNT": "?"}, "SLURM_RESTART_COUNT"),
    ],
    ids=str,
)
def test_variable_with_nonsense_is_refused_by_name_rather_than_passed_over(
    variables: dict[str, str], name: str
) -> None:
    with pytest.raises(ValueError, match="fix or unset") as caught:
        detect(BATCH | variables)
    assert name in str(caught.value)


@pytest.mark.parametrize(("node", "tasks"), [(0, 2), (1, 2), (2, 2), (3, 1)])
def test_tasks_of_each_node_are_read_from_the_short_form_of_slurm(node: int, tasks: int) -> None:
    assert detect(STEP | {"SLURM_NODEID": str(node)}).local_world_size == tasks


def test_environment_reports_its_values_and_their_variables() -> None:
    assert str(detect(STEP)) == (
        "Slurm: rank 4 (SLURM_PROCID), world size 7 (SLURM_STEP_NUM_TASKS), local rank 0 (SLURM_LOCALID), local world"
        " size 2 (SLURM_STEP_TASKS_PER_NODE, SLURM_NODEID), run id ('1234', 0) (SLURM_JOB_ID, SLURM_RESTART_COUNT)"
    )
    assert str(detect({})) == "nothing"
    assert str(detect({"RANK": "1"})) == "nothing; ignored: RANK is set, but no WORLD_SIZE"


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The process's own environment, without what its launcher said."""
    for name in {*TORCHRUN, *OPEN_MPI, *MVAPICH, *HYDRA, *JSRUN, *INDEXED_JOB, *PALS, *FLUX, *STEP, *XDIST}:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_environment_of_the_process_is_the_default(process: pytest.MonkeyPatch) -> None:
    assert detect() == Environment()
    for name, value in FLUX.items():
        process.setenv(name, value)
    assert detect() == detect(FLUX)


def test_argument_counts_for_more_than_the_environment(process: pytest.MonkeyPatch) -> None:
    for name, value in FLUX.items():
        process.setenv(name, value)
    assert rank_and_world_size() == (2, 4)
    assert rank_and_world_size(0) == (0, 4)
    assert rank_and_world_size(world_size=3) == (2, 3)
    process.setenv("RANK", "nonsense")
    assert rank_and_world_size(0, 1) == (0, 1)


def test_value_that_is_missing_is_an_error_that_names_those_found(process: pytest.MonkeyPatch) -> None:
    process.setenv("PMIX_RANK", "3")
    with pytest.raises(ValueError, match=r"world_size is not given.* PMIx: rank 3 \(PMIX_RANK\)"):
        rank_and_world_size()
    process.delenv("PMIX_RANK")
    with pytest.raises(ValueError, match=r"rank is not given.* nothing"):
        rank_and_world_size()
