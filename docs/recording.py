"""Records `fscoord demo` in a terminal's picture: `python docs/recording.py FILE.svg`, with the extra `cli`.

The page docs/cli/doctor.md shows docs/pictures/demo.svg, which this program wrote. The build of the documentation runs
this program again and shows what it records then. The picture plays the lines once, at the pace at which they were
printed, with pauses of a second at most. In a program that plays no animation, or for a reader that asks for less
motion, all lines stand there at once.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COMMAND = ["fscoord", "demo", "-n", "3", "--kill"]
COLUMNS = 112
PAUSE_MAX = 1.0  # seconds
REPOSITORY = Path(__file__).parent.parent

# No font is loaded from the network; `textLength` fits the letters of any fixed font into their columns.
FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>What COMMAND prints</title>
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace;
  font-size: {char_height}px;
  line-height: {line_height}px;
}}
.{unique_id}-title {{ font: bold 18px sans-serif; }}
{styles}
@keyframes printed {{ from {{ opacity: 0; }} }}
@media (prefers-reduced-motion: no-preference) {{
TIMES
}}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
THEME = TerminalTheme(
    background=(23, 27, 34),
    foreground=(214, 220, 228),
    normal=[
        (23, 27, 34),
        (239, 107, 107),
        (126, 200, 120),
        (224, 184, 96),
        (108, 168, 240),
        (200, 140, 220),
        (94, 196, 196),
        (214, 220, 228),
    ],
)


def record() -> list[tuple[float, str]]:
    """Run the demonstration; return the lines that it prints, each with the seconds since the line before it."""
    program = Path(sys.executable).with_name(COMMAND[0])
    last = time.monotonic()
    lines = []
    with (
        subprocess.Popen(  # noqa: S603 - our own command
            [program, *COMMAND[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "FORCE_COLOR": "1"},
        ) as process
    ):
        assert process.stdout is not None
        for line in process.stdout:
            now = time.monotonic()
            lines.append((now - last, line.rstrip("\n")))
            last = now
    if process.returncode != 1:  # it is 1 if a process was lost, and one was killed on purpose
        raise SystemExit(f"{' '.join(COMMAND)} ended with {process.returncode}: {lines}")
    return lines


def draw(lines: list[tuple[float, str]]) -> str:
    """Return the picture of these lines, below the command, as SVG."""
    console = Console(record=True, width=COLUMNS, force_terminal=True, color_system="standard", file=io.StringIO())
    shown = [(0.0, Text.assemble(("$ ", "green"), (" ".join(COMMAND), "bold")))]
    # The picture is for readers elsewhere: the path of this checkout says nothing to them.
    shown += [(pause, Text.from_ansi(line.replace(str(REPOSITORY), "~/fscoord"))) for pause, line in lines]
    times: list[float] = []
    now = 0.0
    for pause, text in shown:
        now += min(pause, PAUSE_MAX)
        rows = text.wrap(console, COLUMNS)
        console.print(rows)
        times += [now] * len(rows)
    picture = console.export_svg(
        title="one process is killed while it works", theme=THEME, code_format=FORMAT, unique_id="demo"
    )
    rules = [
        f'[clip-path="url(#demo-line-{row})"] {{ animation: printed 1ms {at:.2f}s backwards; }}'
        for row, at in enumerate(times)
        if at > 0
    ]
    picture = picture.replace("TIMES", "\n".join(rules)).replace("COMMAND", " ".join(COMMAND))
    return re.sub(r"[ \t]+$", "", picture, flags=re.MULTILINE)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(record()), encoding="utf-8")
