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
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

RUN = {"python", "pycon", "console"}
FENCE = re.compile(r"^(?:<!-- test: ([a-z ]+) -->\n)?```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOOK = r"\b\d+\.\d+s( \(\d+:\d\d:\d\d\))?"
"""How long a run of pytest took: it adds hours and minutes from a minute on."""
VARYING = re.compile(rf"\b[0-9a-f]{{12}}\b|{TOOK}|(?<!exit code )(?<![\d.])\d+(\.\d+)?(, \d+)*")
"""What differs from run to run in the output of a marked block: numbers, lists of numbers, and drawn parts of names."""
NAME = re.compile(r"# (\S+\.py)\n")


AWAITED_S = 100.0
"""How long the output of a command may take to become what the page shows, after the mark ``until alike``."""

background: list[subprocess.Popen[bytes]] = []
"""Shells whose commands go on while the page continues. The end of the page ends them, or a ``kill %1``."""


class Block(NamedTuple):
    language: str
    line: int
    text: str
    mark: str = ""

    @property
    def can_be_pasted(self) -> bool:
        """Whether a user pastes the block into an interpreter, rather than into a shell or a file."""
        return self.language == "pycon" or (self.language == "python" and not NAME.match(self.text))


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[2], text.count("\n", 0, match.start(3)), match[3], match[1] or "") for match in FENCE.finditer(text)
    ]


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
    deadline = time.monotonic() + (AWAITED_S if block.mark == "until alike" else 0.0)
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        if command.endswith(("&", "& done")):
            with Path("background-output").open("ab") as file:
                shell = ["bash", "-c", command]
                background.append(subprocess.Popen(shell, stdout=file, stderr=file, start_new_session=True))
            continue
        if command.startswith("kill %"):
            end_background()
            continue
        while not is_same(block, expected, got := output_of(command)):
            left = deadline - time.monotonic()
            assert left > 0, f"{page.name}:{block.line}: $ {command}\nexpected:\n{expected}\ngot:\n{got}"
            time.sleep(min(left, 0.1))


def output_of(command: str) -> str:
    return subprocess.run(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    ).stdout


def is_same(block: Block, expected: str, got: str) -> bool:
    flags = doctest.ELLIPSIS
    if block.mark.endswith("alike"):
        flags |= doctest.NORMALIZE_WHITESPACE
        got = got.replace(str(Path.cwd()), "/shared").replace(f"{socket.gethostname()}:", "node1:")
        got = got.replace(f"on {socket.gethostname()}", "on node1")
        expected, got = (VARYING.sub("0", text) for text in (expected, got))
    return doctest.OutputChecker().check_output(trimmed(expected), trimmed(got), flags)


def end_background() -> None:
    """Kill the background commands, also those that are stopped. Their shells are reaped last, so no id is reused."""
    while background:
        shell = background.pop()
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def trimmed(text: str) -> str:
    """The text without what the eye does not see: blanks at the end of lines, and the last newline."""
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def main(page: Path, how: str = "1") -> None:
    if how == "alone":
        print(run_each_alone(page))
        return
    try:
        print(sum(run_page(page) for _ in range(int(how))))
    finally:
        end_background()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
