"""Write the manual pages and the completions of shells that the wheel installs, from the command itself.

``python packaging/manual.py`` writes them to ``packaging/share``, and needs the extra ``cli``. ``--check`` writes
nothing, names each file that is not as it would be written, and ends with 1 if there is one.

click-man is not used: it fills the examples and tables of a help text into paragraphs, and its pages have the control
characters by which click keeps them apart.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

import fscoord
from fscoord.cli.app import VERBS, cli

SHARE = Path(__file__).parent / "share"
COMPLETIONS = {
    "bash": "bash-completion/completions/fscoord",
    "zsh": "zsh/site-functions/_fscoord",
    "fish": "fish/vendor_completions.d/fscoord.fish",
}
VERBATIM = "\b\n"
"""The mark before a paragraph whose lines click leaves alone."""


def escaped(text: str) -> str:
    """Return `text` as man(7) shows it: dashes that can be pasted, and no line that is taken for a macro."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


def paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\n+", inspect.cleandoc(text)):
        if paragraph.startswith(VERBATIM):
            yield f".PP\n.nf\n{escaped(paragraph.removeprefix(VERBATIM))}\n.fi"
        else:
            yield f".PP\n{escaped(' '.join(paragraph.split()))}"


def options(command: click.Command, ctx: click.Context) -> Iterator[str]:
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None and record[0].startswith("-"):
            yield f".TP\n\\fB{escaped(record[0])}\\fR\n{escaped(' '.join(record[1].split()))}"


def verbs(command: click.Group) -> Iterator[str]:
    subjects = VERBS if command is cli else {"Commands": tuple(command.commands.values())}
    for subject, members in subjects.items():
        yield f".SS {escaped(subject)}"
        for member in members:
            yield f".TP\n\\fB{escaped(member.name or '')}\\fR\n{escaped(short_help(member))}"


def short_help(command: click.Command) -> str:
    return command.get_short_help_str(limit=200).rstrip(".")


def page(command: click.Command, ctx: click.Context) -> str:
    """Return the manual page of `command` as text for man(7)."""
    name = ctx.command_path.replace(" ", "-")
    usage = " ".join(command.collect_usage_pieces(ctx))
    parts = [
        '.\\" Written by packaging/manual.py from the command itself.',
        f'.TH "{escaped(name.upper())}" 1 "" "fscoord {fscoord.__version__}" "fscoord"',
        f".SH NAME\n{escaped(name)} \\- {escaped(short_help(command))}",
        f".SH SYNOPSIS\n\\fB{escaped(ctx.command_path)}\\fR {escaped(usage)}",
        ".SH DESCRIPTION",
        *paragraphs(command.help or ""),
    ]
    if isinstance(command, click.Group):
        parts += [".SH COMMANDS", *verbs(command)]
    parts += [".SH OPTIONS", *options(command, ctx)]
    if command.epilog:
        heading, _, text = inspect.cleandoc(command.epilog).removeprefix(VERBATIM).partition("\n")
        parts += [f".SH {escaped(heading.rstrip(':').upper())}", *paragraphs(VERBATIM + text)]
    if ctx.parent is not None:
        parts.append(f".SH SEE ALSO\n.BR {escaped(ctx.parent.command_path.replace(' ', '-'))} (1)")
    return "\n".join(parts) + "\n"


def pages(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of the page of `command`, and of each of its verbs."""
    yield f"man/man1/{ctx.command_path.replace(' ', '-')}.1", page(command, ctx)
    if isinstance(command, click.Group):
        for name, verb in sorted(command.commands.items()):
            if not verb.hidden:
                yield from pages(verb, type(ctx)(verb, info_name=name, parent=ctx))


def files() -> dict[str, str]:
    """Return the text of each file below ``share``, by its path."""
    made = dict(pages(cli, click.Context(cli, info_name="fscoord", **cli.context_settings)))
    for shell, path in COMPLETIONS.items():
        kind = get_completion_class(shell)
        assert kind is not None, "click completes for all three"
        made[path] = kind(cli, {}, "fscoord", "_FSCOORD_COMPLETE").source().strip() + "\n"
    return made


def main(*words: str) -> int:
    wanted = files()
    there = {path.relative_to(SHARE).as_posix(): path for path in SHARE.rglob("*") if path.is_file()}
    if words == ("--check",):
        wrong = [name for name, text in wanted.items() if name not in there or there[name].read_text("utf-8") != text]
        wrong += sorted(there.keys() - wanted.keys())
        print(*(f"{name} is not up to date: run packaging/manual.py" for name in wrong), sep="\n", end="")
        return 1 if wrong else 0
    for name in there.keys() - wanted.keys():
        there[name].unlink()
    for name, text in wanted.items():
        (SHARE / name).parent.mkdir(parents=True, exist_ok=True)
        (SHARE / name).write_text(text, encoding="utf-8")
    print(f"{len(wanted)} files in {SHARE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
