"""Every code block of the README and of docs/ does what the page says.

A page's blocks run in their order, in one directory of the page's own:

- ``python`` whose first line is ``# name.py`` is saved under that name, for the blocks that follow;
- other ``python`` blocks are executed, and ``pycon`` sessions are compared, in one namespace for the page;
- of ``console`` blocks each line behind ``$ `` runs in bash, and what it prints is compared with the lines under it;
- in what is compared ``...`` stands for any text, and blanks at the end of lines do not count;
- ``sh``, ``text``, ``ini`` and the like are shown, not run (but those of the README: a test below says why).
"""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parent.parent
NAMES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES = [*(REPOSITORY / name for name in NAMES), *sorted((REPOSITORY / "docs").glob("*.md"))]
RUN = {"python", "pycon", "console"}
SHOWN = {"", "bash", "ini", "json", "sh", "text", "toml", "{eval-rst}", "{include}", "{toctree}"}
SET_BY_OTHERS = ("FSCOORD_", "COLUMNS", "RANK", "WORLD_SIZE", "OMPI_", "PMI", "PALS_", "FLUX_", "SLURM_", "PYTEST_")
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(match[1], text.count("\n", 0, match.start(2)), match[2]) for match in FENCE.finditer(text)]


RUNNABLE = [page for page in PAGES if any(block.language in RUN for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_of_a_kind_that_is_run_or_shown(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^\s*```", text, re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page)), "a fence is indented or not closed"
    assert {block.language for block in blocks(page)} <= RUN | SHOWN


def test_the_readme_has_two_commands_for_a_stranger_and_the_continuous_check_runs_them() -> None:
    """`.ci/run` takes every line of a `sh` block of the README for one; what is only shown there is `bash`."""
    commands = [
        line for block in blocks(REPOSITORY / "README.md") if block.language == "sh" for line in block.text.splitlines()
    ]
    assert [command.rpartition("/bin/")[2] for command in commands] == ["fscoord demo", "tox run -e py"]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_the_code_of_a_page_does_what_the_page_says(page: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "tmp").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SET_BY_OTHERS)}
    environment["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), environment["PATH"]])
    environment["TMPDIR"] = str(tmp_path / "tmp")
    done = subprocess.run(
        [sys.executable, __file__, str(page)],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, f"{page.name}:\n{done.stdout}"
    assert json.loads(done.stdout.splitlines()[-1]) == sum(block.language in RUN for block in blocks(page))
    assert list((tmp_path / "tmp").iterdir()) == [], "the page leaves temporary files behind"


# What runs in the child


def run_page(page: Path) -> int:
    """Run every block of the page; return how many there were."""
    namespace: dict[str, object] = {"__name__": page.stem}
    count = 0
    for block in blocks(page):
        if block.language in RUN:
            count += 1
            globals()[f"run_{block.language}"](block, page, namespace)
    return count


def run_python(block: Block, page: Path, namespace: dict[str, object]) -> None:
    name = re.match(r"# (\S+\.py)\n", block.text)
    if name:
        Path(name[1]).write_text(block.text, encoding="utf-8")
    else:  # padded, so that a traceback tells the line of the page
        exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)


def run_pycon(block: Block, page: Path, namespace: dict[str, object]) -> None:
    session = doctest.DocTestParser().get_doctest(block.text, namespace, page.name, str(page), block.line)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    runner.run(session, clear_globs=False)
    namespace.update(session.globs)
    assert runner.summarize().failed == 0


def run_console(block: Block, page: Path, namespace: dict[str, object]) -> None:
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        done = subprocess.run(
            ["bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        same = doctest.OutputChecker().check_output(trimmed(expected), trimmed(done.stdout), doctest.ELLIPSIS)
        assert same, f"{page.name}:{block.line}: $ {command}\nexpected:\n{expected}\ngot:\n{done.stdout}"


def trimmed(text: str) -> str:
    """The text without what the eye does not see: blanks at the end of lines, and the last newline."""
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


if __name__ == "__main__":
    print(run_page(Path(sys.argv[1])))
