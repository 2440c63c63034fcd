"""What a page of the documentation holds, and a program that runs its blocks: ``python pages.py PAGE``.

It imports no pytest, for it is started once for each page. The kinds of blocks are told in `test_docs`.
"""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

RUN = {"python", "pycon", "console"}
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(match[1], text.count("\n", 0, match.start(2)), match[2]) for match in FENCE.finditer(text)]


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
