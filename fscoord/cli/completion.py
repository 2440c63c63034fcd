"""The verb completion: what a shell needs to complete our command lines."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from fscoord.cli.output import write

__all__ = ["completion"]


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
    write(script.encode())
