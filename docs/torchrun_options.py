"""Write the table of torchrun's options in docs/torch.md, from torchrun's own parser and the options of `fscoord run`.

``python docs/torchrun_options.py`` needs the extras ``cli`` and ``torch``. A row of an option that the installed torch
lacks stays in the table.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
from torch.distributed.run import get_args_parser

from fscoord.cli.run import REFUSED, run

PAGE = Path(__file__).parent / "torch.md"
BEGIN, END = "<!-- torchrun's options -->\n", "<!-- end of torchrun's options -->\n"
HEAD = "| option of torchrun | `fscoord run` |\n|---|---|\n"


def their_options() -> list[str]:
    """Return the long name of each option of the installed torchrun, with dashes."""
    actions = [
        action for action in vars(get_args_parser())["_actions"] if action.dest != "help" and action.option_strings
    ]
    return [next(name for name in action.option_strings if name[:2] == "--").replace("_", "-") for action in actions]


def row(name: str) -> str:
    """Return the row of the option `name`.

    Raises:
        KeyError: `fscoord run` neither has nor refuses the option.
    """
    ours = {option for parameter in run.params if isinstance(parameter, click.Option) for option in parameter.opts}
    return f"| `{name}` | {'there' if name in ours - set(REFUSED) else 'refused: ' + REFUSED[name]} |\n"


def main() -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    names = dict.fromkeys([*their_options(), *re.findall(r"^\| `(--[a-z-]+)`", table, re.MULTILINE)])
    PAGE.write_text(f"{before}{BEGIN}{HEAD}{''.join(map(row, names))}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
