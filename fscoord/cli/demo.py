"""The verb demo: it starts the processes of the example `fscoord.demo`, and reports their work."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from fscoord import demo as example
from fscoord._runtime import system, tracing
from fscoord._runtime.signals import defer_signals, raise_on_termination
from fscoord.cli.exit_codes import FALSE
from fscoord.cli.options import as_json, seconds_option, time_limit, verbose
from fscoord.cli.output import counted, show, table_lines
from fscoord.cli.trace import write_page
from fscoord.errors import FscoordError
from fscoord.store import Store
from fscoord.stores.file import FileStore

log = logging.getLogger(__name__)

PROCESSES_MAX = 256
TOP = 10
POLL_S = 0.05

OWN_SOURCES = system.os.path.dirname(system.os.path.abspath(example.__file__))
"""The default directory of text: this package's sources or, in a zipapp or PEX, the sources of the module `json`."""
if not system.os.path.isdir(OWN_SOURCES):
    OWN_SOURCES = system.os.path.dirname(json.__file__)


@click.command()
@click.option(
    "-n",
    "--processes",
    metavar="NUMBER",
    type=click.IntRange(1, PROCESSES_MAX),
    default=4,
    show_default=True,
    help="How many processes to start.",
)
@click.option(
    "--input",
    "directory",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    default=OWN_SOURCES,
    help="The directory with the text. [default: the sources of fscoord itself]",
)
@click.option("--kill", is_flag=True, help="Kill one process during its work. The others report it and do its work.")
@seconds_option("--timeout", kind=time_limit, default=60, help="How long the processes wait for each other.")
@click.option(
    "--trace",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Record a trace in DIR, and write the page DIR/report.html. The page also shows earlier runs that DIR has.",
)
@as_json
@verbose
def demo(processes: int, directory: str, kill: bool, timeout: float, trace: str | None, as_json: bool) -> int:
    """Start some processes that share work through one store.

    They count the words in a directory of text files. They find each other through the store, which is a temporary file
    in $TMPDIR, take the files from a queue, and meet at barriers. The report has the work of each process. Exits with 1
    if a process was lost, by --kill or in another way.

    \b
    Examples:
      fscoord demo
      fscoord demo -n 8 --input /usr/share/doc
      fscoord demo --kill
      fscoord demo -n 8 --trace traces              # then open traces/report.html in a browser
      TMPDIR=/shared/tmp fscoord demo               # try the file system that your job will use
    """
    directory = system.os.path.abspath(directory)
    if kill and processes < 2:
        raise click.UsageError("--kill needs at least 2 processes, so that one can report the death of the other")
    start = system.time.monotonic()
    with raise_on_termination(), FileStore() as store:
        files = example.fill(store, directory)
        if not files:
            raise click.UsageError(f"{directory} holds no text file")
        words = [str(processes), str(timeout), *(["kill"] if kill else [])]
        with _started(str(store.path), directory, words, processes, trace) as members:
            lost = _losses(store, members)
        counts = [json.loads(store.get(f"counts/{number}", default="null")) for number in range(len(files))]
    if None in counts:
        cause = f"process {lost[0]['pid']} ended with {lost[0]['cause']}" if lost else "no process reported an error"
        raise FscoordError(f"the processes could not finish: {cause}")
    seconds = system.time.monotonic() - start
    report = {"input": directory, "seconds": seconds, **_report(files, counts, members), "lost": lost}
    if trace is not None:
        write_page(trace, system.os.path.join(trace, "report.html"))
    show(as_json, report, _lines(report))
    return FALSE if lost else 0


@contextmanager
def _started(
    store: str, directory: str, words: list[str], processes: int, trace: str | None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes, and kill them at the end of the ``with``.

    A process also ends when its standard input ends, so no process runs on if this process is killed.
    """
    environment = {**system.os.environ, "PYTHONPATH": system.import_path()}
    if trace is not None:
        environment[tracing.ENVIRONMENT_VARIABLE] = system.os.path.abspath(trace)
    members: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(processes):
            # Python imports from the working directory, so this is one without modules, that of the store. Ctrl-C does
            # not reach a session of its own. A signal during the start must not hide the process from `finally`.
            with defer_signals():
                member = subprocess.Popen(  # noqa: S603 - our own module and our own arguments
                    [sys.executable, "-m", example.__name__, store, directory, str(rank), *words],
                    stdin=subprocess.PIPE,
                    cwd=system.os.path.dirname(store),
                    env=environment,
                    start_new_session=True,
                )
                members.append(member)
            log.info("started process %d", member.pid)
        yield members
    finally:
        with defer_signals():
            for member in members:
                member.kill()  # does nothing to one that has been waited for
        for member in members:
            with member:
                pass


def _losses(store: Store, members: list[subprocess.Popen[bytes]]) -> list[dict[str, Any]]:
    """Wait until the processes have ended. Return the failed processes, in the order in which they ended.

    If a process fails before it has opened the store, return at once. The other processes can't detect the death of
    such a process, and would wait for it.
    """
    lost: list[dict[str, Any]] = []
    running = dict(enumerate(members))
    while running:
        system.time.sleep(POLL_S)
        for rank, member in [each for each in running.items() if each[1].poll() is not None]:
            code = running.pop(rank).returncode
            if code:
                cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                lost.append({"rank": rank, "pid": member.pid, "cause": cause})
                if not store.members([rank]):
                    return lost
    return lost


def _report(files: list[str], counts: list[dict[str, Any]], members: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Return the report, in the form described in ``docs/cli/doctor.md``."""
    words: Counter[str] = Counter()
    by_rank: list[list[int]] = [[] for _ in members]
    for found in counts:
        words.update(found.get("words", {}))
        by_rank[found["rank"]].append(sum(found.get("words", {}).values()))
    work = list(zip(files, counts, strict=True))
    return {
        "files": len(files),
        "words": sum(words.values()),
        "distinct_words": len(words),
        "top": words.most_common(TOP),
        "skipped": [{"file": file, "reason": found["error"]} for file, found in work if "error" in found],
        "redone": [{"file": file, "by": found["rank"]} for file, found in work if found["deliveries"] > 1],
        "processes": [
            {"rank": rank, "pid": member.pid, "files": len(own), "words": sum(own), "lost": member.returncode != 0}
            for rank, (member, own) in enumerate(zip(members, by_rank, strict=True))
        ],
    }


def _lines(report: dict[str, Any]) -> list[str]:
    most = ", ".join(f"{word} {count}" for word, count in report["top"])
    rows = [
        (*(str(each[name]) for name in ("rank", "pid", "files", "words")), "LOST" if each["lost"] else "")
        for each in report["processes"]
    ]
    counts = f"{counted(report['words'], 'word')} ({counted(report['distinct_words'], 'different one')})"
    files = f"{counted(report['files'], 'file')} below {report['input']}"
    lines = [
        f"{counts} in {files}, in {report['seconds']:.2f} s",
        f"most frequent: {most}",
        "",
        *table_lines(("RANK", "PROCESS", "FILES", "WORDS", ""), rows, ("RANK", "FILES", "WORDS")),
        "",
    ]
    lines += [f"skipped {skipped['file']}: {skipped['reason']}" for skipped in report["skipped"]]
    lines += [f"rank {loss['rank']}, process {loss['pid']}, was lost to {loss['cause']}" for loss in report["lost"]]
    lines += [f"{redone['file']} was taken again, by rank {redone['by']}" for redone in report["redone"]]
    return lines
