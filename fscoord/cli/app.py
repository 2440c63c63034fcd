"""The command itself: its verbs, its help, and the one place where exceptions become exit codes."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

import click
from click.shell_completion import get_completion_class

import fscoord
from fscoord.cli import exit_codes, output
from fscoord.cli.demo import demo
from fscoord.cli.doctor import doctor
from fscoord.cli.groups import barrier, group, join, members, once
from fscoord.cli.locks import break_lock, elect, holders, leader, lock, rwlock, sem
from fscoord.cli.log_files import compact, cp, dump, repair, verify
from fscoord.cli.options import common
from fscoord.cli.ps import ps
from fscoord.cli.queues import items, length, pop, push, put, take
from fscoord.cli.run import run as launch
from fscoord.cli.top import top
from fscoord.cli.trace import trace
from fscoord.cli.values import add, append, cas, delete, get, keys, set_, wait, watch

__all__ = ["cli", "run"]


@click.group(
    invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(fscoord.__version__, "-V", "--version", message="%(prog)s %(version)s")
@common
@click.pass_context
def cli(ctx: click.Context) -> int:
    """Processes that share nothing but a directory find each other and agree.

    Try it: "fscoord demo". "fscoord doctor DIR" tells whether a directory can carry a store. Every other verb works on
    the store that --store or FSCOORD_STORE names: a path, such as /shared/job/store, or a URL, such as
    "file:/shared/job/store?durable=1".

    \b
    Exit codes:
        0  done
        1  the condition is false: cas lost, nothing to delete, queue empty, a lock that is held (-n, -w)
           or that nobody holds, a process of the demo lost, a job that failed, a mount that the doctor could
           not prove, a repair without --yes
       64  usage: wrong arguments, wrong values, a barrier used twice
       65  the log is damaged
       69  the store is gone, the file system can't do it, a barrier is broken, a lock was lost, a command
           can't be run, or an extra is not installed
       70  a bug in fscoord
       74  input or output failed
       75  time ran out
       77  permission denied
      130  Ctrl-C
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        return exit_codes.USAGE
    return 0


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that lets SHELL complete command lines.

    SHELL is bash, zsh or fish.

    \b
    Examples:
      eval "$(fscoord completion bash)"             # in ~/.bashrc
      eval "$(fscoord completion zsh)"              # in ~/.zshrc, behind compinit
      fscoord completion fish > ~/.config/fish/completions/fscoord.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click completes for all three"
    script = kind(ctx.find_root().command, {}, "fscoord", "_FSCOORD_COMPLETE").source()
    output.write(script.encode())


VERBS = (
    *(demo, doctor, launch, get, set_, add, cas, append, delete, wait, keys, barrier, push, pop, length),
    *(put, take, items, lock, rwlock, sem, holders, break_lock, elect, leader, once, join, group, watch),
    *(members, ps, top, dump, verify, repair, cp, compact, trace, completion),
)
for verb in VERBS:
    cli.add_command(verb)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, say on standard error what went wrong, and return the exit code."""
    try:
        code = cli.main(arguments, prog_name="fscoord", standalone_mode=False)
        output.flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every one has its exit code
        return _fail(error)
    return code if isinstance(code, int) else 0


def _fail(error: BaseException) -> int:
    if logging.getLogger("fscoord").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    if isinstance(error, exit_codes.OutputError):
        output.detach_stdout()
    if not exit_codes.is_silent(error):
        # It may hold the words of other processes, such as a host's name in a log.
        click.echo(f"fscoord: {output.printable(exit_codes.message(error))}", err=True)
    return exit_codes.exit_code(error)
