"""The verb doctor: tests a directory, shows each step, and prints the report."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any

import click

from fscoord._runtime import system
from fscoord._runtime.escaping import printable
from fscoord.cli.exit_codes import FALSE, UNAVAILABLE
from fscoord.cli.options import DirectoryPath, as_json, number_option, seconds_option, time_limit, verbose
from fscoord.cli.output import say, show, size_text, tell
from fscoord.doctor.examination import EXPECTED_WAIT_S, OPEN_WAIT_S, examine
from fscoord.doctor.prediction import LONE_ADD_REQUESTS, Job, predict, round_trip_of
from fscoord.doctor.verdict import NOT_PROVEN, NOT_SAFE, SAFE
from fscoord.environment import detect, run_text

log = logging.getLogger(__name__)

CODES = {SAFE: 0, NOT_PROVEN: FALSE, NOT_SAFE: UNAVAILABLE}
MARKS = {"ok": "ok", "bad": "BAD", "unknown": "?", "info": "-"}


@click.command()
@click.argument("path", metavar="DIR", type=DirectoryPath(file_okay=False))
@click.option(
    "--lock",
    type=click.Choice(["ofd", "flock", "soft"]),
    default="ofd",
    show_default=True,
    help="The kind of lock for which the verdict holds.",
)
@number_option(
    "-n",
    "--instances",
    help="How many instances are started at once. [default: the number in the launcher's environment]",
)
@seconds_option(
    "--wait",
    kind=time_limit,
    help=f"How long to wait for other instances. [default: {EXPECTED_WAIT_S:g} if they are expected, {OPEN_WAIT_S:g} on"
    " a mount that hosts share, else 0]",
)
@number_option("--nodes", help="How many nodes the job will have. [default: the hosts that took part]")
@number_option(
    "--ranks-per-node",
    help="How many ranks the job will have on each node. [default: the number in the launcher's environment, else 1]",
)
@click.option(
    "--anonymous",
    is_flag=True,
    help="Replace the names of users, hosts and directories in the report, so that it can be sent to others.",
)
@as_json
@verbose
def doctor(
    path: str,
    lock: str,
    instances: int | None,
    wait: float | None,
    nodes: int | None,
    ranks_per_node: int | None,
    anonymous: bool,
    as_json: bool,
) -> int:
    """Test whether a directory's file system is fit for a store.

    Tests in the directory DIR what a store needs: locks of each kind, appends, fresh reads, the death of a process that
    holds a lock, and a whole store. It first tests between two processes of this host. If you start it on two hosts at
    once, it also tests between the hosts. The instances find each other through the directory. Instances of different
    users need a common group that may write to the directory. One instance prints the report.

    It takes about five seconds on a local disk, and up to a minute on a slow mount; with instances on several hosts it
    first waits for them (--wait). On a terminal it shows each step. It leaves nothing in the directory.

    After a test between two hosts the report also says what the coordination of a job will cost there, for --nodes and
    --ranks-per-node. The numbers come from a model and the measured time of a lock. The report says how a store reads
    there, and what happens when a host vanishes. With --anonymous the report has no names of users, hosts and
    directories, so that it can be sent to others.

    \b
    Verdicts:
      exit code  verdict     it means
          0      safe        everything that a store needs was tested, and worked
          1      not proven  nothing failed, but something was not tested, such as a second host
         69      not safe    a test failed, or the directory does not answer; the report says what to do
      74 or 77   none        the directory does not exist or is full, or you may not write to it

    \b
    Examples:
      fscoord doctor /dev/shm
      srun -N2 fscoord doctor /scratch/x
      srun -N2 --ntasks-per-node=1 fscoord doctor --json /scratch/x | jq -r .verdict
      srun -N2 fscoord doctor --nodes 128 --ranks-per-node 8 /scratch/x
    """
    launched = detect()
    if instances is None and launched.launcher != "pytest-xdist":  # its workers are processes of one host
        instances = launched.world_size
    group = run_text(launched.run_id)
    report = examine(path, lock=lock, expected=instances, wait=wait, tell=partial(tell, log), group=group)
    for texts in ("reasons", "recommendations"):
        report[texts] = list(map(printable, report[texts]))
    if not report.pop("presided"):
        say(f"{report['verdict']}; another instance prints the report")
    else:
        ranks = ranks_per_node or launched.local_world_size or 1
        report["prediction"] = _prediction(report, Job(nodes or len(report["hosts"]), ranks))
        if anonymous:
            report = _without_names(report, _names_in(report))
        show(as_json, {**report, "checks": [_without_empty(check) for check in report["checks"]]}, _lines(report))
    return CODES[report["verdict"]]


def _names_in(report: dict[str, Any]) -> dict[str, str]:
    """Return the names of users, hosts, directories and addresses in `report`, each with its replacement."""
    home = system.os.path.expanduser("~")
    users = [system.os.environ.get("USER", ""), system.os.environ.get("LOGNAME", ""), system.os.path.basename(home)]
    found = {report["path"]: "DIR", home: "HOME", **dict.fromkeys(users, "USER")}
    file_system = report["file_system"]
    if file_system:
        found.setdefault(file_system["point"], "MOUNT")
        addresses = (option.partition("=")[::2] for option in file_system["options"])
        found |= {value: "ADDRESS" for name, value in addresses if name.endswith("addr")}
    for number, host in enumerate(report["hosts"], 1):
        found |= {host: f"HOST{number}", host.partition(".")[0]: f"HOST{number}"}
    return {name: replacement for name, replacement in found.items() if name.strip("/")}


def _without_names(value: Any, names: dict[str, str]) -> Any:
    """Return a copy of `value` in which each name in a text is replaced, according to `names`. Keys stay unchanged."""
    if isinstance(value, dict):
        return {key: _without_names(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_names(each, names) for each in value]
    if not isinstance(value, str):
        return value
    longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<!\w)(?:{longest_first})(?!\w)", lambda found: names[found[0]], value)


def _without_empty(check: dict[str, Any]) -> dict[str, Any]:
    printed = {**check, "says": printable(check["says"])}
    return {name: value for name, value in printed.items() if value not in ("", {})}


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [f"{report['path']}: {report['verdict'].upper()}"]
    if report["file_system"]:
        found = report["file_system"]
        options = ",".join(dict.fromkeys(found["options"]))
        lines.append(f"  {found['kind'] or 'unknown'} at {found['point']} ({options})")
        lines.append(f"  reads: {found['coherence']}: {found['reads_why']}")
        lines.append(f"  when a host vanishes: {found['vanished_host']}")
    lines += [f"  why: {reason}" for reason in report["reasons"]]
    lines += [f"  do:  {advice}" for advice in report["recommendations"]]
    for between in ("processes", "hosts"):
        checks = [check for check in report["checks"] if check["between"] == between]
        if checks:
            pair = "two processes" if between == "processes" else f"this host and {report['other_host']}"
            lines += ["", f"between {pair}", *map(_line, checks)]
    if report["prediction"] is not None:
        lines += ["", *_forecast(report["prediction"])]
        if not report["file_system"]["kind"].startswith("nfs"):
            lines.append("  the model was fitted on NFS 4.2; on another file system the requests differ")
    return lines


def _prediction(report: dict[str, Any], job: Job) -> dict[str, Any] | None:
    """Return the predicted cost of `job` on the mount of `report`; None if no round trip between hosts was measured.

    The model holds for the default kind of lock. With other kinds, writes are not combined.
    """
    if report["lock"] != "ofd":
        return None
    found = round_trip_of(report["checks"], report["lock"])
    return None if found is None else predict(job, found)


def _forecast(found: dict[str, Any]) -> list[str]:
    """Return the lines of the report that predict the cost of the job."""
    nodes, ranks = found["nodes"], found["ranks_per_node"]
    many = f"{nodes:,} nodes with {ranks:,} ranks each" if nodes > 1 else f"one node with {ranks:,} ranks"
    read = f"{size_text(found['barrier_bytes'])} read"
    trip = _duration(found["round_trip_s"])
    return [
        f"what {many} will cost, by a model (docs/how-to/many-nodes.md), at {trip} for a round trip",
        f"  a barrier            {_duration(found['barrier_s'])}, {found['barrier_requests']:,} requests, {read}",
        f"  add, all at once     {found['adds_per_s']:,.0f} a second, {found['add_requests']:.3g} requests each",
        f"  add, one rank alone  {_duration(found['lone_add_s'])}, {LONE_ADD_REQUESTS} requests",
        f"  a rendezvous         {_duration(found['rendezvous_s'])}, {found['rendezvous_requests']:,} requests",
        f"  while all wait       {found['waiting_requests_per_s']:,.0f} requests a second",
    ]


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _line(check: dict[str, Any]) -> str:
    title = f"{check['name']} ({check['lock']})" if check["lock"] else check["name"]
    return f"  {MARKS[check['outcome']]:<4} {title:<20} {check['says']}"
