"""The verbs of the command, its help, and the place where exceptions become exit codes."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Sequence
from typing import Any, Final

import click
from click.shell_completion import get_completion_class

import fscoord
from fscoord._runtime.escaping import printable
from fscoord.cli import exit_codes, output
from fscoord.cli.demo import demo
from fscoord.cli.doctor import doctor
from fscoord.cli.groups import barrier, group, join, members, once
from fscoord.cli.locks import break_lock, elect, holders, leader, lock, rate, rwlock, sem
from fscoord.cli.log_files import compact, cp, dump, repair, verify
from fscoord.cli.options import common, show_log
from fscoord.cli.ps import ps
from fscoord.cli.queues import items, length, pop, push, put_item, take_item
from fscoord.cli.run import run as launch
from fscoord.cli.top import top
from fscoord.cli.trace import trace
from fscoord.cli.values import add, append, cas, create, delete, get, keys, set_, wait, watch
from fscoord.cli.work import work

HELP_WIDTH: Final = 100


EXIT_CODES: Final = """
\b
Exit codes:
    0  done
    1  the condition is false: cas or create lost, no such key to delete, an empty queue, a lock that was not
       acquired (-n, -w) or has no holder, a lost process of the demo, a job that failed, a directory
       that the doctor could not prove safe, findings of ps, a repair without --yes; from work also 2 to 63,
       the number of failed items
   64  wrong usage or wrong values, as in sysexits.h (otherwise 2 comes only from a COMMAND that a verb runs)
   65  the log is damaged, or the file is not a log
   69  the store is gone, the file system lacks something that the store needs, a barrier is broken,
       a lock was lost, a command can't be run, or an extra is not installed
   70  a bug in fscoord
   74  input or output failed, such as a full disk, or a store that does not exist or is an empty file
   75  time ran out
   77  permission denied, or the path is a directory, a link, or a file that others can write
  130  Ctrl-C
"""

OTHER_NAMES: Final = {
    "help": "--help",
    "version": "--version",
    "ls": "keys",
    "list": "keys",
    "cat": "get KEY",
    "rm": "delete",
    "unlock": "break-lock NAME",
    "status": "ps",
    "queue": "len QUEUE' or 'fscoord items QUEUE",
    "semaphore": "sem",
    "put": "set KEY VALUE' or 'fscoord put-item QUEUE VALUE",
}
"""Maps a verb of other commands to the words to type here."""


class _Verbs(click.Group):
    """A group whose help lists the verbs by subject, before the options."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        instead = OTHER_NAMES.get(args[0])
        if instead is not None:
            if args[0] == "help" and args[1:2] and args[1] in self.commands:
                instead = f"{args[1]} --help"
            context = None if instead.endswith("--help") else ctx  # the message already says how to get help
            raise click.UsageError(f"there is no verb {args[0]!r}: type 'fscoord {instead}'", context)
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, self.commands))
        for subject, verbs in VERBS.items():
            with formatter.section(subject):
                formatter.write_dl(
                    [(f"{verb.name:<{widest}}", verb.get_short_help_str(limit=HELP_WIDTH)) for verb in verbs]
                )


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    subcommand_metavar="VERB [ARGUMENTS]...",
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH},
)
@click.version_option(fscoord.__version__, "-V", "--version", message="%(prog)s %(version)s")
@common
@click.pass_context
def cli(ctx: click.Context) -> int:
    """Coordinate processes that share a directory, without a server.

    To try it, run "fscoord demo". To test whether a directory is fit for a store, run "fscoord doctor DIR". The other
    verbs work on the store that --store or the environment variable FSCOORD_STORE names: a path, such as
    /shared/job/store, or an address, such as "file:/shared/job/store?durable=1". "fscoord VERB --help" has examples.
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
      eval "$(fscoord completion zsh)"              # in ~/.zshrc, after compinit
      fscoord completion fish > ~/.config/fish/completions/fscoord.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click completes for all three"
    script = kind(ctx.find_root().command, {}, "fscoord", "_FSCOORD_COMPLETE").source()
    output.write(script.encode())


VERBS: Final = {
    "Begin here": (demo, doctor, launch),
    "Keys and values": (get, set_, create, add, cas, append, delete, wait, keys, watch),
    "Several processes": (barrier, once, join, group),
    "Locks, rates and elections": (lock, rwlock, sem, rate, elect, leader, holders, break_lock),
    "Queues of values, each given out once": (push, pop, length),
    "Queues of items, which come back until their work is done": (put_item, take_item, work, items),
    "What processes do": (ps, top, members, trace),
    "The log of a file store": (dump, verify, repair, cp, compact),
    "The shell": (completion,),
}
"""The verbs by subject, in the order of the help."""

for verb in itertools.chain.from_iterable(VERBS.values()):
    cli.add_command(verb)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, print an error as one line on standard error, and return the exit code."""
    show_log()
    try:
        code = cli.main(arguments, prog_name="fscoord", standalone_mode=False)
        output.flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every one has its exit code
        return _fail(error)
    return code if isinstance(code, int) else 0


def _fail(error: BaseException) -> int:
    if logging.getLogger("fscoord").isEnabledFor(logging.DEBUG):
        lines = "".join(traceback.format_exception(error)).splitlines()
        output.write_error("".join(f"{printable(line)}\n" for line in lines))
    if isinstance(error, exit_codes.OutputError):
        output.detach_stdout()
    if not exit_codes.is_silent(error):
        output.say(exit_codes.message(error))
    return exit_codes.exit_code(error)
