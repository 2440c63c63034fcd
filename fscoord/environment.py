"""Finds the rank, world size, local rank, local world size and run of this process in environment variables.

`detect` returns the values, and the names of the variables from which they come. Only the nearest launcher counts. For
example, a rank that torchrun or mpirun starts inside a Slurm step inherits the variables of the step, but these
describe the agent or daemon that started the rank. So the order is torchrun, Open MPI, MVAPICH, PMI (MPICH, Intel MPI),
jsrun (LSF), PMIx, PALS (HPE Cray), Flux, Slurm, Kubernetes (an Indexed Job) and pytest-xdist.

The variables are in the launchers' manuals: torchrun's *Environment Variables*; mpirun(1) of Open MPI; Hydra's
``PMI_*`` and ``MPI_LOCAL*``; the PMIx standard's ``PMIX_RANK`` and ``PMIX_NAMESPACE``; flux-environment(7); srun(1) and
sbatch(1), *OUTPUT ENVIRONMENT VARIABLES*; qsub(1B) of OpenPBS; pytest-xdist's *How-tos*; the user guides of MVAPICH 2
and 4; jsrun(1) and *Environment variables set for job execution* of LSF; submit(1) of Grid Engine; *Jobs*, *Completion
mode* of Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fscoord._runtime import system

__all__ = ["Environment", "RunId", "detect", "rank_and_world_size"]

RunId = tuple[str, int] | str
"""The id of a run: a job id and a restart count, or a text. The restart count shows which of two runs of one job is
later. Two texts do not show which run is later."""

SLURM_STEP_MAX = 0xFFFFFFF0
"""The largest id of a step that srun starts (slurm.h). Larger ids are those of batch scripts and interactive shells."""

_TASKS_PER_NODE = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Environment:
    """The result of `detect`. An attribute is None if the environment has no variable for it.

    Attributes:
        launcher: the launcher of this process: ``"torchrun"``, ``"Open MPI"``, ``"MVAPICH"``, ``"PMI"``, ``"jsrun"``,
            ``"PMIx"``, ``"PALS"``, ``"Flux"``, ``"Slurm"``, ``"Kubernetes"`` or ``"pytest-xdist"``. Any launcher that
            sets ``RANK`` and ``WORLD_SIZE`` counts as torchrun.
        rank: the number of this process, from 0.
        world_size: the number of processes.
        local_rank: the number of this process among the processes on its host, from 0.
        local_world_size: the number of processes on this host.
        run_id: the run of the job. A restart of the job changes the run. A restart of a worker does not change the run.
        sources: maps the name of each attribute to the names of the variables that gave its value.
        ignored: one sentence for each variable that was set but does not count.
    """

    launcher: str | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    run_id: RunId | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the attributes and their variables, as text for people."""
        found = [
            f"{name.replace('_', ' ')} {getattr(self, name)} ({source})" for name, source in self.sources.items()
        ] or ["nothing"]
        by = f"{self.launcher}: " if self.launcher else ""
        ignored = f"; ignored: {'; '.join(self.ignored)}" if self.ignored else ""
        return f"{by}{', '.join(found)}{ignored}"


def detect(variables: Mapping[str, str] | None = None) -> Environment:
    """Return the rank, world size and run of this process from the nearest launcher's environment variables.

    ``SLURM_PROCID`` counts only inside a step, because in a batch script it is 0 for all processes of the script.

    Args:
        variables: the environment variables; None: the variables of this process.

    Raises:
        ValueError: the nearest launcher's variables contradict each other or can't be parsed. The variables of another
            launcher are not used instead.
    """
    values = {name: value for name, value in (system.os.environ if variables is None else variables).items() if value}
    ignored: list[str] = []
    launcher, answers = _nearest(values, ignored)
    if launcher == "PMI" and "local_rank" not in answers:
        answers |= _local_answers(values, answers)
    _refuse_impossible(answers)
    numbers: dict[str, Any] = {name: answer.value for name, answer in answers.items()}
    sources = {name: answer.source for name, answer in answers.items()}
    found = Environment(launcher, sources=sources, ignored=tuple(ignored), **numbers)
    for run_id, source in _runs(values, launcher):
        return replace(found, run_id=run_id, sources={**sources, "run_id": source})
    return found


def find_job() -> RunId | None:
    """Return the run of the job from the environment variables; None if no variable has one.

    The function takes the run from the same variables as `detect`, and reads no ranks. The function ignores the run id
    of pytest-xdist, because the tests of one run of pytest-xdist start many jobs.

    Raises:
        ValueError: the restart count of the job is not a number.
    """
    values = {name: value for name, value in system.os.environ.items() if value}
    return next((run_id for run_id, _ in _runs(values, None)), None)


def run_text(run: RunId | None) -> str:
    """Return the id of a run as one word: the job, and its restart count if it has one; ``""`` if `run` is None."""
    return "-".join(map(str, run)) if isinstance(run, tuple) else run or ""


def rank_and_world_size(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return `rank` and `world_size`. If an argument is None, take the value from the environment.

    Raises:
        ValueError: an argument is None and the environment has no value for it. The message lists the values that the
            environment has.
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    found = detect()
    known = {"rank": found.rank if rank is None else rank}
    known["world_size"] = found.world_size if world_size is None else world_size
    for name, value in known.items():
        if value is None:
            raise ValueError(
                f"{name} is not given and not in the environment, which has {found}; pass {name}, or start this process"
                " by a launcher that sets it"
            )
    return known["rank"], known["world_size"]  # type: ignore[return-value]


class _Answer(NamedTuple):
    value: int
    source: str


_Answers = dict[str, _Answer]


class _Launcher(NamedTuple):
    """The variables of a launcher. If a value has several variables, the first variable that is set counts."""

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()


_TORCHRUN = _Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_OPEN_MPI = _Launcher(
    "Open MPI",
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
_PMI = _Launcher(
    "PMI", ("PMI_RANK",), ("PMI_SIZE",), ("PMI_LOCAL_RANK", "MPI_LOCALRANKID"), ("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS")
)
_MVAPICH = _Launcher(
    "MVAPICH",
    ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
)
_JSRUN = _Launcher(
    "jsrun",
    ("JSM_NAMESPACE_RANK",),
    ("JSM_NAMESPACE_SIZE",),
    ("JSM_NAMESPACE_LOCAL_RANK",),
    ("JSM_NAMESPACE_LOCAL_SIZE",),
)
_PMIX = _Launcher("PMIx", ("PMIX_RANK",))  # PMIx has no variable for the world size
_PALS = _Launcher("PALS", ("PALS_RANKID",), ("PMI_SIZE",), ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",))
_FLUX = _Launcher("Flux", ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",))
_SLURM = _Launcher(
    "Slurm", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",)
)
_KUBERNETES = _Launcher("Kubernetes", ("JOB_COMPLETION_INDEX",))  # the number of completions is not in the environment
_SIZE_MAY_BE_MISSING = {"PMIx", "PALS", "Kubernetes"}


def _nearest(values: Mapping[str, str], ignored: list[str]) -> tuple[str | None, _Answers]:
    """Return the nearest launcher, and the values of its variables."""
    for launcher in (_TORCHRUN, _OPEN_MPI, _MVAPICH, _PMI, _JSRUN, _PMIX, _PALS, _FLUX):
        answers = _ask(launcher, values, ignored)
        if launcher is _PMIX and answers and _is_slurms_own_pmix(values):
            continue  # the variables of the Slurm step have the same values, and also the world size
        if answers:
            return launcher.name, answers
    answers = _ask_slurm(values, ignored)
    if answers:
        return _SLURM.name, answers
    answers = _ask(_KUBERNETES, values, ignored)
    if answers:
        return _KUBERNETES.name, answers
    answers = _ask_xdist(values, ignored)
    return ("pytest-xdist", answers) if answers else (None, {})


def _ask(launcher: _Launcher, values: Mapping[str, str], ignored: list[str]) -> _Answers:
    answers: _Answers = {}
    for what, names in zip(launcher._fields[1:], launcher[1:], strict=True):
        source = next((name for name in names if name in values), None)
        if source:
            answers[what] = _Answer(_number(source, values[source]), source)
    if "rank" not in answers or ("world_size" not in answers and launcher.name not in _SIZE_MAY_BE_MISSING):
        if "rank" in answers:
            ignored.append(f"{launcher.rank[0]} is set, but no {' or '.join(launcher.world_size)}")
        elif launcher is _TORCHRUN and "world_size" in answers:
            ignored.append("WORLD_SIZE is set, but no RANK")
        return {}
    return answers


def _ask_slurm(values: Mapping[str, str], ignored: list[str]) -> _Answers:
    if "SLURM_PROCID" not in values:
        return {}
    step = values.get("SLURM_STEP_ID") or values.get("SLURM_STEPID", "")
    if not step.isdecimal() or int(step) > SLURM_STEP_MAX:
        ignored.append("SLURM_PROCID is of a batch script or a shell, not of a step: start the ranks with srun")
        return {}
    answers = _ask(_SLURM, values, ignored)
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if answers and name in values and "SLURM_NODEID" in values:
            tasks = _tasks_on_node(name, values[name], _number("SLURM_NODEID", values["SLURM_NODEID"]))
            answers["local_world_size"] = _Answer(tasks, f"{name}, SLURM_NODEID")
            break
    return answers


def _tasks_on_node(name: str, text: str, node: int) -> int:
    """Return the number of tasks on node number `node`. `text` is the value of the variable `name`, in Slurm's form.

    For example, ``2(x3),1`` means three nodes with two tasks each, and one node with one task.
    """
    counts: list[tuple[int, int]] = []
    for part in text.split(","):
        match = _TASKS_PER_NODE.fullmatch(part)
        if match is None:
            raise ValueError(f"environment variable {name}={text!r} is not of the form 2(x3),1; fix or unset it")
        counts.append((int(match[1]), int(match[2] or 1)))
    for tasks, nodes in counts:
        if node < nodes:
            return tasks
        node -= nodes
    raise ValueError(f"environment variable {name}={text!r} has fewer nodes than SLURM_NODEID needs; fix or unset both")


def _ask_xdist(values: Mapping[str, str], ignored: list[str]) -> _Answers:
    worker, count = values.get("PYTEST_XDIST_WORKER", ""), values.get("PYTEST_XDIST_WORKER_COUNT")
    if not re.fullmatch(r"gw\d+", worker) or count is None:
        return {}
    rank = _Answer(int(worker[2:]), "PYTEST_XDIST_WORKER")
    size = _Answer(_number("PYTEST_XDIST_WORKER_COUNT", count), "PYTEST_XDIST_WORKER_COUNT")
    if rank.value >= size.value:
        ignored.append(f"{worker} of {size.value} workers replaces one that crashed, and has no rank")
        return {}
    return {"rank": rank, "world_size": size, "local_rank": rank, "local_world_size": size}


def _is_slurms_own_pmix(values: Mapping[str, str]) -> bool:
    """Return whether the PMIx server is Slurm's. The namespaces of Slurm's server are named slurm.pmix.JOB.STEP."""
    return values.get("PMIX_NAMESPACE", "").startswith("slurm.pmix.") and bool(_ask_slurm(values, []))


def _local_answers(values: Mapping[str, str], answers: _Answers) -> _Answers:
    """Return the local rank and local world size from a launcher that provides PMI.

    A launcher provides PMI if its own variables have the same rank and world size as `answers`, which come from PMI's
    variables.
    """
    world = [answers["rank"].value, answers["world_size"].value]
    for other in (_ask(_PALS, values, []), _ask(_FLUX, values, []), _ask_slurm(values, [])):
        if [other[name].value for name in ("rank", "world_size") if name in other] == world:
            return {name: answer for name, answer in other.items() if name.startswith("local_")}
    return {}


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise ValueError(f"environment variable {name}={text!r} is not a non-negative integer; fix or unset it")
    return int(text)


def _refuse_impossible(answers: _Answers) -> None:
    for which, of in (("rank", "world_size"), ("local_rank", "local_world_size")):
        if which in answers and of in answers and answers[which].value >= answers[of].value:
            rank, size = answers[which], answers[of]
            raise ValueError(
                f"environment variable {rank.source}={rank.value} is not below the {of.replace('_', ' ')} {size.value}"
                f" ({size.source}); fix or unset them"
            )


def _runs(values: Mapping[str, str], launcher: str | None) -> Iterator[tuple[RunId, str]]:
    """Yield each run to which this process belongs, and the names of the run's variables. The nearest run comes first.

    A launcher may also count how often it restarted the *workers*. A run id does not contain this count, because the
    run continues.
    """
    if launcher == "pytest-xdist" and "PYTEST_XDIST_TESTRUNUID" in values:
        yield values["PYTEST_XDIST_TESTRUNUID"], "PYTEST_XDIST_TESTRUNUID"
    # `fscoord run` sets both names in its workers: then the id counts as that of torchrun, after those of schedulers.
    if values.get("FSCOORD_RUN_ID", "none") not in ("none", values.get("TORCHELASTIC_RUN_ID")):
        yield values["FSCOORD_RUN_ID"], "FSCOORD_RUN_ID"
    if "FLUX_JOB_ID" in values:
        yield values["FLUX_JOB_ID"], "FLUX_JOB_ID"
    for name in ("SLURM_HET_JOB_ID", "SLURM_JOB_ID", "SLURM_JOBID"):
        if name in values:
            count = _number("SLURM_RESTART_COUNT", values.get("SLURM_RESTART_COUNT", "0"))
            yield (values[name], count), f"{name}, SLURM_RESTART_COUNT"
    for name in ("PALS_APID", "PBS_JOBID"):
        if name in values:
            yield values[name], name
    if "LSB_JOBID" in values:
        yield _array_job(values["LSB_JOBID"], values.get("LSB_JOBINDEX")), "LSB_JOBID, LSB_JOBINDEX"
    if "JOB_ID" in values and "SGE_TASK_ID" in values:  # the first name alone may be another program's
        yield _array_job(values["JOB_ID"], values["SGE_TASK_ID"]), "JOB_ID, SGE_TASK_ID"
    if values.get("TORCHELASTIC_RUN_ID", "none") != "none":  # torchrun's name of a run without --rdzv-id
        yield values["TORCHELASTIC_RUN_ID"], "TORCHELASTIC_RUN_ID"


def _array_job(job: str, index: str | None) -> str:
    """Return the id of a job. For a job of a job array, the id is ``job[index]``.

    For any other job, the scheduler does not set `index`, or sets it to ``0`` or ``undefined``.
    """
    return job if index in (None, "0", "undefined") else f"{job}[{index}]"
