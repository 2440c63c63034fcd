"""The verb run: it turns the options into a job, runs the agent of this node, and reports how the job ended."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from fscoord import environment, rendezvous
from fscoord._runtime import system, tracing
from fscoord._runtime.escaping import closer_look
from fscoord._runtime.signals import forward_signals, parse_signals, raise_on_termination
from fscoord.cli.exit_codes import FALSE
from fscoord.cli.options import number_option, verbose
from fscoord.cli.output import counted, say, telling_if_slow
from fscoord.launch import Agent, Announcer, Console, Job, Outcome, Streams, parse_streams
from fscoord.launch.agent import file_name
from fscoord.launch.announcer import describe_failure, last_lines
from fscoord.launch.worker import STDERR, STDOUT, find_accelerators
from fscoord.rendezvous.creation import is_file_name

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class RunOptions:
    """The parsed options of the command line."""

    nnodes: tuple[int, int] | None
    nproc_per_node: int
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_id: str | None
    rdzv_conf: dict[str, str]
    local_addr: str | None
    standalone: bool
    max_restarts: int
    monitor_interval: float
    grace: float
    signals_to_handle: tuple[str, ...]
    forward_signals: tuple[str, ...]
    redirects: Mapping[int | None, int]
    tee: Mapping[int | None, int]
    local_ranks_filter: frozenset[int] | None
    duplicate_stdout_filters: list[str] | None
    duplicate_stderr_filters: list[str] | None
    virtual_local_rank: bool
    console: int | None
    role: str
    log_dir: str | None
    trace: str | None
    module: bool
    no_python: bool
    quiet: bool


def _nodes(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise click.BadParameter(f"{text!r} is neither a number of nodes nor MIN:MAX.")
    return least, most


def _parsed_by(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str], T]:
    def callback(ctx: click.Context, param: click.Parameter, text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(f"{error}.") from None

    return callback


_streams = _parsed_by(parse_streams)

NO_ID = "none"
"""The id of a job without --rdzv-id, as with torchrun."""

BACKENDS = ("c10d", "etcd", "etcd-v2", "fscoord")
"""The values of --rdzv-backend, as in torchrun. The store itself is named by --rdzv-endpoint."""

_INSTEAD = "the nodes number themselves: leave it out, and give --rdzv-endpoint a path that all nodes can reach"


@_parsed_by
def _backend(name: str) -> str:
    if name == "static":
        raise ValueError(f"there is no rendezvous 'static', because {_INSTEAD}")
    if name not in BACKENDS:
        raise ValueError(f"{name!r} is not one of {', '.join(map(repr, BACKENDS))}")
    return name


@_parsed_by
def _config(text: str) -> dict[str, str]:
    config = rendezvous.parse_rendezvous_config(text)
    rendezvous.check_options(config)
    return config


@_parsed_by
def _worker_count(text: str) -> int:
    """Return the number of workers that `text` means: a number, or one of ``auto``, ``cpu``, ``gpu`` and ``xpu``.

    As with torchrun, such a word means the number of this node's processors or accelerators.
    """
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    if text not in {"auto", "cpu", "gpu", "xpu"}:
        raise ValueError(f"{text!r} is neither a number above 0 nor auto, cpu, gpu or xpu")
    kind, count = ("cpu", 0) if text == "cpu" else find_accelerators()
    if text == "auto" and kind not in {"", "none", "cpu"}:
        return count
    if text in {"auto", "cpu"}:
        return system.usable_processors()
    if kind != {"gpu": "cuda"}.get(text, text) or count == 0:
        found = f"torch finds {count} of type {kind}" if count else "torch finds no accelerator"
        found = found if kind else "this Python has no torch that could count them"
        raise ValueError(f"{text}: {found}. Give the number of workers")
    return count


@_parsed_by
def _local_ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise ValueError(f"{text!r} is not a list of local ranks, such as 0,1")
    return frozenset(map(int, text.split(",")))


def _filters(ctx: click.Context, param: click.Parameter, text: str | None) -> list[str] | None:
    """Return the texts in `text`, which commas separate. As with torchrun, two commas are a comma in a text."""
    if text is None:
        return None
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]


REFUSED = {
    "--node-rank": _INSTEAD,
    "--master-addr": _INSTEAD,
    "--master-port": _INSTEAD,
    "--start-method": "each worker is a new process, as with torchrun --start-method spawn: leave it out",
    "--run-path": "each worker is a Python of its own: leave it out, and a program whose name ends in .py is run by"
    " Python",
    "--numa-binding": "the launcher does not know which CPUs are near a GPU: let numactl bind each worker, as in"
    """ -- sh -c 'exec numactl --cpunodebind=$NODE python train.py', with the NUMA node of the GPU $LOCAL_RANK""",
    "--logs-specs": "no class of torch writes the files: use --log-dir, --redirects, --tee and --local-ranks-filter",
    "--event-log-handler": "the launcher prints its events on standard error: use -v for more, or --trace to record",
    "--log-line-prefix-template": "each line begins with the rank in brackets: use --console RANK for the lines of one"
    " rank as they are",
    "--print-completion": "completions are for the whole command: use fscoord completion SHELL",
}
"""The options of torchrun that are refused, each with the reason and what to use instead."""


def _refuse(ctx: click.Context, param: click.Parameter, value: str | bool | None) -> None:
    if value:
        raise click.UsageError(f"there is no {param.opts[0]}, because {REFUSED[param.opts[0]]}", ctx)


def _refused_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options in `REFUSED`, which `_refuse` refuses with an explanation."""
    for name in REFUSED:
        is_flag = name == "--run-path"
        function = click.option(
            name, is_flag=is_flag, hidden=True, expose_value=False, allow_from_autoenv=False, callback=_refuse
        )(function)
    return function


def _full_name(name: str) -> str:
    """Return the full name of the option `name`, which may be abbreviated or have underscores, as with torchrun."""
    name = name.replace("_", "-")
    names = [option[2:] for parameter in run.params for option in parameter.opts if option.startswith("--" + name)]
    return names[0] if len(names) == 1 and len(name) > 1 else name


_SETTINGS = {"allow_interspersed_args": False, "token_normalize_func": _full_name, "auto_envvar_prefix": "PET"}
"""The settings of click for the verb. Options after the program belong to the program. As with torchrun, each option
has an environment variable: ``PET_NNODES`` sets ``--nnodes``."""


@click.command(context_settings=_SETTINGS)
@click.option(
    "--nnodes",
    metavar="MIN[:MAX]",
    callback=_nodes,
    help="The number of nodes. [default: those of the Slurm step, else 1]",
)
@click.option(
    "--nproc-per-node",
    metavar="N",
    callback=_worker_count,
    default="1",
    show_default=True,
    help="The number of workers on this node. cpu, gpu or xpu: one for each of them. auto: one for each accelerator, or"
    " for each CPU if there is none.",
)
@click.option(
    "--rdzv-backend",
    metavar="NAME",
    callback=_backend,
    default="c10d",
    show_default=True,
    help="c10d or fscoord: the endpoint names the store. etcd: the endpoint is the address of an etcd cluster.",
)
@click.option(
    "--rdzv-endpoint",
    metavar="PATH",
    default="",
    help="Where the nodes find each other: a path that all of them can reach, or HOST:PORT. [default: a temporary"
    " file, for one node]",
)
@click.option(
    "--rdzv-id",
    metavar="ID",
    help="The name of the job. [default: the id that Slurm or another launcher gives, else none]",
)
@click.option(
    "--rdzv-conf",
    metavar="K=V,...",
    callback=_config,
    default="",
    help="Settings of the rendezvous, such as join_timeout=60.",
)
@click.option(
    "--local-addr", metavar="ADDRESS", help="The address by which other nodes reach this node. [default: its host name]"
)
@click.option("--standalone", is_flag=True, help="Ignore --nnodes, --rdzv-endpoint and --rdzv-id: run on one node.")
@number_option("--max-restarts", metavar="N", least=0, default=0, help="The number of failures that the job survives.")
@click.option(
    "--monitor-interval",
    metavar="SECONDS",
    type=click.FloatRange(min=0.001),
    default=0.1,
    show_default=True,
    help="The time between two checks of the other nodes.",
)
@click.option(
    "--grace",
    "--shutdown-timeout",
    "grace",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    help="The time that workers have from SIGTERM to SIGKILL.",
)
@click.option(
    "--signals-to-handle",
    metavar="NAME,...",
    callback=_parsed_by(parse_signals),
    default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    show_default=True,
    help="The signals that end the workers of this node. SIGINT always does.",
)
@click.option(
    "--forward-signals",
    metavar="NAME,...",
    callback=_parsed_by(parse_signals),
    default="",
    help="The signals that this node only forwards to its workers, such as USR1,USR2. [default: none]",
)
@click.option(
    "-r",
    "--redirects",
    metavar="STREAMS",
    callback=_streams,
    default="0",
    help="The streams that go to files only. [default: none]",
)
@click.option(
    "-t",
    "--tee",
    metavar="STREAMS",
    callback=_streams,
    default="0",
    help="The streams that go to files as well. [default: none]",
)
@click.option(
    "--local-ranks-filter",
    metavar="R,...",
    callback=_local_ranks,
    default="",
    help="The local ranks that are shown. [default: all]",
)
@click.option(
    "--duplicate-stdout-filters",
    metavar="TEXT,...",
    callback=_filters,
    help="Copy the lines of --tee's standard output that contain one of these texts to a file of the whole node.",
)
@click.option(
    "--duplicate-stderr-filters",
    metavar="TEXT,...",
    callback=_filters,
    help="The same for standard error. Two commas are a comma in a text.",
)
@click.option(
    "--virtual-local-rank",
    is_flag=True,
    help="Give each worker one GPU: its LOCAL_RANK is 0, and its CUDA_VISIBLE_DEVICES names the GPU.",
)
@number_option(
    "--console",
    metavar="RANK",
    least=0,
    help="The rank whose worker writes to the console directly. Its output is not copied line by line. [default: 0, if"
    " it is the only worker]",
)
@click.option("--role", metavar="NAME", default="default", show_default=True, help="The role of this node's workers.")
@click.option(
    "--log-dir",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="The directory of the files of --redirects and --tee. [default: a temporary one]",
)
@click.option(
    "--trace",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help='The directory in which this node and its workers record a trace; see "fscoord trace".',
)
@click.option("-m", "--module", is_flag=True, help="The program is a Python module.")
@click.option("--no-python", is_flag=True, help="Execute the program by itself, even if its name ends in .py.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-q", "--quiet", is_flag=True, help="Print only why the job failed, and no other events.")
@_refused_options
@verbose
def run(program: str, arguments: tuple[str, ...], **given: Any) -> int:
    """Run a job's workers on one node or on several.

    Give this command on each node. The nodes find each other through the file that --rdzv-endpoint names; there is no
    port and no head node. PROGRAM is a Python script if its name ends in .py, a module with -m, and any executable
    otherwise. Each worker finds in its environment RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the other variables of
    torchrun, and in FSCOORD_STORE a new store that all workers share. Each line that a worker prints begins
    with the rank of the worker, unless there is only one worker.

    When a worker fails, all workers stop, and start again up to --max-restarts times. They also start again when a node
    comes or goes. STREAMS are 1 for standard output, 2 for standard error, 3 for both, or 0:3,1:1 for each local rank.
    As with torchrun, the names of options may be abbreviated, and may contain underscores. An option that is not given
    is taken from the environment: --nnodes from PET_NNODES, and so on.

    Exits with 1 if the job failed, after it has named the worker that failed first. Ctrl-C and SIGTERM stop the workers
    of this node; the other nodes go on if there are at least as many as --nnodes requires.

    \b
    Examples:
      fscoord run --nproc-per-node 4 train.py --epochs 3
      fscoord run --nnodes 2:4 --nproc-per-node 8 --rdzv-endpoint /scratch/job --rdzv-id 7 train.py
      fscoord run --nproc-per-node 2 -- sh -c 'echo worker $RANK of $WORLD_SIZE'
      fscoord run --nproc-per-node 4 --trace traces train.py      # then: fscoord trace html traces
    """
    options = RunOptions(**given)
    if options.rdzv_backend.startswith("etcd") and options.rdzv_conf.setdefault("store_type", "etcd") != "etcd":
        raise click.UsageError("--rdzv-backend etcd and a store_type in --rdzv-conf name two kinds of store: give one")
    for name in options.forward_signals:
        if name in options.signals_to_handle:
            raise click.UsageError(f"{name} is in --forward-signals and in --signals-to-handle: give it once")
    for stream in _filters_of(options):
        if not any(mode & stream for mode in options.tee.values()):
            name = {STDOUT: "--duplicate-stdout-filters", STDERR: "--duplicate-stderr-filters"}[stream]
            raise click.UsageError(f"{name} copies lines of the streams of --tee: also give --tee {stream}, or --tee 3")
    with raise_on_termination(name for name in options.signals_to_handle if name != "SIGINT"):
        outcome = _run(_command([program, *arguments], options), options)
    if not outcome.is_success:
        _show(outcome)
    return 0 if outcome.is_success else FALSE


def _filters_of(options: RunOptions) -> dict[int, list[str]]:
    filters = {STDOUT: options.duplicate_stdout_filters, STDERR: options.duplicate_stderr_filters}
    return {stream: texts for stream, texts in filters.items() if texts}


def _devices(workers: int) -> list[str]:
    """Return the GPU of each worker, for CUDA_VISIBLE_DEVICES, as torchrun --virtual-local-rank does."""
    visible = system.os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = list(map(str, range(workers))) if visible is None else [name.strip() for name in visible.split(",")]
    if len(devices) < workers:
        raise click.UsageError(
            f"--virtual-local-rank needs a GPU for each of the {workers} workers, and CUDA_VISIBLE_DEVICES={visible}"
            f" names {len(devices)}: give --nproc-per-node {len(devices)}"
        )
    return devices


def _command(words: list[str], options: RunOptions) -> list[str]:
    if options.module and options.no_python:
        raise click.UsageError("-m and --no-python exclude each other, because Python runs the module")
    if options.module:
        return [sys.executable, "-u", "-m", *words]
    if words[0].endswith(".py") and not options.no_python:
        return [sys.executable, "-u", *words]
    return words


def _run(command: list[str], options: RunOptions) -> Outcome:
    devices = _devices(options.nproc_per_node) if options.virtual_local_rank else []
    trace = system.os.path.abspath(options.trace) if options.trace else ""
    if trace:
        tracing.start(trace)
    params = _parameters(options)
    settings = rendezvous.RendezvousSettings.from_parameters(params)
    with Console() as console, redirect_stderr(console.error_text()):
        announcer = Announcer(console, quiet=options.quiet)
        with telling_if_slow(log, f"waiting for the store of the rendezvous, {params.endpoint or 'a temporary file'}"):
            backend, store = rendezvous.create_backend(params)
        log_dir = _log_dir(options.log_dir, params.run_id)
        # Without --rdzv-id two jobs on one path have the id `NO_ID` by accident, so no node joins a job that has begun.
        late_nodes = params.min_nodes if params.run_id == NO_ID else params.max_nodes
        handler = rendezvous.DynamicRendezvousHandler(
            settings, backend, store, params.local_addr, owns_store=True, late_nodes=late_nodes
        )
        is_single = params.max_nodes == options.nproc_per_node == 1
        console_rank = 0 if options.console is None and is_single else options.console
        has_files = any({**options.redirects, **options.tee}.values())
        job = Job(
            command,
            options.nproc_per_node,
            log_dir,
            options.max_restarts,
            options.monitor_interval,
            options.grace,
            Streams(
                options.redirects,
                options.tee,
                options.local_ranks_filter,
                console_rank,
                _filters_of(options),
                system.os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or Streams.prefix,
            ),
            trace,
            options.role,
            options.forward_signals,
            devices,
        )
        agent = Agent(job, handler, store, console, announcer)
        noted = {"SIGUSR1", "SIGUSR2"}.difference(options.signals_to_handle).union(options.forward_signals)
        with forward_signals(agent.pass_on, noted):
            try:
                outcome = agent.run()
                has_files |= any(failure.error_file.startswith(log_dir) for failure in outcome.failures[-1:])
                return outcome
            finally:
                handler.depart()
                if has_files:
                    announcer.say(f"the files of this node's workers are in {log_dir}")
                elif not options.log_dir:
                    system.remove_tree(log_dir)


def _parameters(options: RunOptions) -> rendezvous.RendezvousParameters:
    least, most = options.nnodes or _slurm_nodes() or (1, 1)
    endpoint, config = options.rdzv_endpoint, options.rdzv_conf
    run_id = options.rdzv_id or environment.run_text(environment.detect().run_id) or NO_ID
    if options.standalone:  # as with torchrun, the other options of the rendezvous do not count then
        endpoint, run_id, least, most = "", system.random_bytes(8).hex(), 1, 1
        config = {name: value for name, value in config.items() if name not in {"store_type", "is_host"}}
    elif not endpoint and least > 1:
        raise click.UsageError("several nodes need --rdzv-endpoint, a path that all of them can reach")
    if is_file_name(endpoint):
        config = {"store_type": "file", **config}
    return rendezvous.RendezvousParameters("c10d", endpoint, run_id, least, most, options.local_addr, **config)


def _log_dir(given: str | None, run_id: str) -> str:
    """Return a directory for this node's files. The name is unique, because nodes may share the directory `given`."""
    if not given:
        return system.make_private_directory()
    own = f"{file_name(run_id)}_{system.random_bytes(4).hex()}"
    return system.os.path.join(system.os.path.abspath(given), own)


def _slurm_nodes() -> tuple[int, int] | None:
    text = system.os.environ.get("SLURM_STEP_NUM_NODES", "")
    return (int(text), int(text)) if text.isdigit() and int(text) > 0 else None


def _show(outcome: Outcome) -> None:
    failure = outcome.failures[-1]
    times = counted(len(outcome.failures) - 1, "restart")
    say(f"the job failed after {times}, because {describe_failure(failure)}")
    for line in last_lines(failure):
        say(f"  | {line}")
    if failure.error_file:
        say(f"the traceback is in {failure.error_file} on {failure.host}")
    if outcome.kept_store:
        look = closer_look(outcome.kept_store)
        say(f"the store of round {failure.round} is kept until you remove it{look}")
