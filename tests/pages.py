"""The blocks of a page of the documentation, and a program that runs them.

- ``python pages.py PAGE`` runs all blocks in their order, in the present directory.
- ``python pages.py PAGE 2`` does so twice, in the same directory.
- ``python pages.py PAGE alone`` runs each block that can be pasted into an interpreter alone, in a fresh process and a
  new directory.

Each prints the number of the blocks that it has run. The program imports no pytest, because it starts often.
The kinds of blocks are explained in `test_docs`.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

RUN = {"python", "pycon", "console"}
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# (\S+\.py)\n")


class Block(NamedTuple):
    language: str
    line: int
    text: str

    @property
    def can_be_pasted(self) -> bool:
        """Whether a user pastes the block into an interpreter, rather than into a shell or a file."""
        return self.language == "pycon" or (self.language == "python" and not NAME.match(self.text))


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
            run_block(block, page, namespace)
    return count


def run_each_alone(page: Path) -> int:
    """Run each block that can be pasted in a process of its own; return how many there were.

    The child is forked before anything of the package is imported, so it is as good as a fresh interpreter.
    """
    to_paste = [block for block in blocks(page) if block.can_be_pasted]
    failed = []
    for block in to_paste:
        directory = Path(f"block-at-line-{block.line}")
        directory.mkdir()
        sys.stdout.flush()
        child = os.fork()
        if not child:
            os.chdir(directory)
            run_block(block, page, {"__name__": page.stem})
            sys.exit(0)  # with the handlers of `atexit`, as an interpreter that ends
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            failed.append(block.line)
    assert not failed, f"{page.name}: the blocks at these lines cannot be pasted alone: {failed}"
    return len(to_paste)


def run_block(block: Block, page: Path, namespace: dict[str, object]) -> None:
    globals()[f"run_{block.language}"](block, page, namespace)


def run_python(block: Block, page: Path, namespace: dict[str, object]) -> None:
    name = NAME.match(block.text)
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


def main(page: Path, how: str = "1") -> None:
    if how == "alone":
        print(run_each_alone(page))
    else:
        print(sum(run_page(page) for _ in range(int(how))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
